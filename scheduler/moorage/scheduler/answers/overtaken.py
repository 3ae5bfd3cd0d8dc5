"""Who passed a job that waits for GPUs: jobs accepted after it that run where it would have had room without them."""

from __future__ import annotations

from collections.abc import Iterable

from moorage.scheduler.answers.explain import ATTEMPTS_LOOKED_MAX
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.fleet.host import Host
from moorage.scheduler.core.ledger.state import Attempt, Job
from moorage.schemas.units import many


def overtaken(engine: Engine, job: Job, hosts: Iterable[Host]) -> str:
    """Return by what right jobs that came after this one hold the GPUs that it needs; "" if the fleet was full.

    The jobs on these hosts are taken away, the newest first, until the job has room. If the one that makes room came
    after it, it was passed; if not, nobody who came later could have been in its way. At most `ATTEMPTS_LOOKED_MAX`
    attempts are read.
    """
    shape = engine.reader.shape_of(job)
    left: dict[int, list[Attempt]] = {}
    at: dict[int, Host] = {}
    looked = 0
    for host in hosts:
        attempts = list(host.worker.attempts.values())
        looked += len(attempts)
        if looked > ATTEMPTS_LOOKED_MAX:
            return ""
        at[host.worker.num], left[host.worker.num] = host, attempts
    newest = sorted(
        (attempt for each in left.values() for attempt in each if _job(attempt).accepted_ms > job.accepted_ms),
        key=lambda attempt: (-_job(attempt).accepted_ms, -_job(attempt).num),
    )
    passed = 0
    for attempt in newest:
        host = at[attempt.worker.num]
        left[attempt.worker.num].remove(attempt)
        passed += (attempt.mask & host.cls.fit(shape).mask).bit_count()
        leased = 0
        for other in left[attempt.worker.num]:
            leased |= other.mask
        out = leased | host.busy | host.sick | host.worker.quarantined | host.worker.unwell_mask
        slots = host.lent & ~out & host.cls.fit(shape).mask
        if host.cls.rooms(slots, shape):
            return _right(engine, job, _job(attempt), passed)
    return ""


def _right(engine: Engine, job: Job, other: Job, gpus: int) -> str:
    """Return in words by what right the other one was before a job, and how many GPUs went to such."""
    own, its = engine.reader.priority_of(job), engine.reader.priority_of(other)
    tenant = engine.state.tenants[other.tenant]
    named = other.name if other.tenant == job.tenant else "a job of another tenant"
    held = f"{many(gpus, 'GPU')} went to jobs that came later"
    if its > own:
        return f"{held}: {named} has priority {its}, and it has {own}"
    if other.tenant == job.tenant:
        return f"{held}: {named} is of the same tenant, and fitted sooner"
    if tenant.guaranteed and tenant.gpus <= tenant.guaranteed:
        return f"{held}: {named} is within its tenant's guarantee"
    return f"{held}: {named} is of a tenant that was owed more, or fitted sooner"


def _job(attempt: Attempt) -> Job:
    return attempt.replica.job
