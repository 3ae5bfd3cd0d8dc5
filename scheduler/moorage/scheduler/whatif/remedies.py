"""Finds changes other than of the request that may start a waiting job at once: operators' acts, or cancels.

These are candidates: each is tried before it is suggested (see `fixes`). Only the tenant's own jobs are named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from moorage.scheduler.answers.view import View
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import Cancel, Order
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger import fairkeys
from moorage.scheduler.core.ledger.holding import spent_at
from moorage.scheduler.core.ledger.limits import PERIODS
from moorage.scheduler.core.ledger.state import Job, Tenant
from moorage.scheduler.core.operate.changing import is_own
from moorage.scheduler.core.queue import limits, models
from moorage.schemas.answers.jobs import Fix
from moorage.schemas.names import word_of
from moorage.schemas.operate import act_of
from moorage.schemas.reasons import Cure, Reason

#: the most own jobs whose cancel is tried for one answer
JOBS_TRIED_MAX: Final = 2
_BY: Final = "explain"


class Remedy(NamedTuple):
    """An act in words and as a command, the role that may give the command, and the engine's event for it."""

    say: str
    command: str
    who: str
    event: Order | Cancel

    def as_fix(self) -> Fix:
        """Return the remedy in the form of `explain`."""
        return Fix(say=self.say, command=self.command, who=self.who)


def remedies(engine: Engine, job: Job, reason: Reason) -> list[Iterator[Remedy]]:
    """Return an iterator for each kind of remedy against a reason, the best kind first; one of each is suggested."""
    return [remedy(engine, job) for cure in reason.cures for remedy in _OF.get(cure, ())]


def _order(say: str, command: str, verb: str, **arguments: Any) -> Remedy:
    return Remedy(say, command, "operator", Order(verb, act_of(verb, {**arguments, "by": _BY}), "", True))


def _cancel(job: Job, say: str) -> Remedy:
    command = f"moorage cancel {word_of(job.name)} --tenant {job.tenant}"
    return Remedy(say, command, "tenant", Cancel(job.tenant, job.name, _BY))


def _raise_limit(engine: Engine, job: Job) -> Iterator[Remedy]:
    tenant, shape = engine.state.tenants[job.tenant], engine.reader.shape_of(job)
    named = [*_raised(engine, tenant, shape), *_raised_models(engine, job, tenant, shape)]
    if fairkeys.is_full(tenant, job.fair, shape.ranks):
        used = tenant.keys.get(job.fair) if tenant.keys else None
        most = (0 if used is None else used.running) + shape.ranks
        named.append(({"running_per_key": most}, f"--running-per-key {most}"))
    if named:
        command = f"moorage admin limit --tenant {job.tenant} {' '.join(option for _, option in named)}"
        arguments = {name: value for each, _ in named for name, value in each.items()}
        yield _order("ask your operator for a higher limit", command, "limit", tenant=job.tenant, **arguments)
        return
    before = View(engine).gpus_before(job)
    gpus_max = engine.state.tenants[job.tenant].gpus + before + engine.reader.shape_of(job).gpus
    queued = f", {before} of them for your jobs before it" if before else ""
    command = f"moorage admin limit --tenant {job.tenant} --gpus {gpus_max}"
    yield _order(f"ask your operator for {gpus_max} GPUs{queued}", command, "limit", tenant=job.tenant, gpus=gpus_max)


def _raised(engine: Engine, tenant: Tenant, shape: Shape) -> list[tuple[dict[str, Any], str]]:
    """Return which limits beside GPUs would have to be what, so that a job of a shape may start: fields, and option."""
    found: list[tuple[dict[str, Any], str]] = []
    needs, has = limits.needs(shape), limits.has(tenant)
    for part in limits.short(engine.state, tenant, shape):
        if part == limits.BUDGET and tenant.limits is not None:
            hours = math.ceil(spent_at(tenant, engine.state.time_ms).gpu_ms / 3_600_000) + shape.gpus
            period = PERIODS[tenant.limits.period]
            found.append(({"gpu_hours": hours, "period": period}, f"--gpu-hours {hours}/{period}"))
            continue
        value = has[part] + needs[part] if part != limits.BUDGET else 0
        if part == limits.CORES:
            found.append(({"cores": value / 1000}, f"--cores {value / 1000:g}"))
        elif part == limits.MEMORY:
            found.append(({"memory_mib": value}, f"--memory {value}Mi"))
        elif part == limits.RUNNING:
            found.append(({"running": value}, f"--running {value}"))
    return found


def _raised_models(engine: Engine, job: Job, tenant: Tenant, shape: Shape) -> Iterator[tuple[dict[str, Any], str]]:
    short = models.short(engine.fleet, tenant, shape) if models.is_limited(tenant) else {}
    most = {model: models.count(tenant.devices, model) + need for model, need in short.items()}
    for before, count in View(engine).shapes_before(job) if most else ():
        for model in most:
            most[model] += before.gpus * count * models.must_take(engine.fleet, before, [model])
    if most:
        yield {"gpus_of": most}, f"--gpus-of {','.join(f'{model}={n}' for model, n in sorted(most.items()))}"


def _more_of_counter(engine: Engine, job: Job) -> Iterator[Remedy]:
    state, tenant, shape = engine.state, engine.state.tenants[job.tenant], engine.reader.shape_of(job)
    for name in limits.taken(state, tenant, shape)[:1]:
        counter, needs = state.counters.get(name), dict(shape.uses)[name] * shape.ranks
        of_tenant = counter is not None and bool(counter.of_tenant)
        most = (tenant if of_tenant else state).used.get(name, 0) + needs
        command = f"moorage admin counter {name} {most}" + " --per-tenant" * of_tenant
        say = f"ask your operator for {most} of {name}"
        yield _order(say, command, "counter", name=name, most=most, per="tenant" if of_tenant else "fleet")


def _cancel_for_limit(engine: Engine, job: Job) -> Iterator[Remedy]:
    """Yield cancels of the tenant's smallest jobs that free enough of its limit; of equal ones the youngest first."""
    tenant, rows = engine.state.tenants[job.tenant], list[tuple[int, int, Job]]()
    over = tenant.gpus + View(engine).gpus_before(job) + engine.reader.shape_of(job).gpus - tenant.gpus_max
    for other in tenant.jobs.values():
        attempts = [replica.attempt for replica in other.rows.values() if replica.attempt is not None]
        gpus = sum(attempt.mask.bit_count() for attempt in attempts)
        if other is not job and gpus >= max(1, over):
            rows.append((gpus, -max(attempt.fence for attempt in attempts), other))
    for gpus, _, other in sorted(rows, key=lambda row: row[:2])[:JOBS_TRIED_MAX]:
        yield _cancel(other, f"cancel {other.name}, which has {gpus} GPU{'s' * (gpus > 1)} of your limit")


def _cancel_first(engine: Engine, job: Job) -> Iterator[Remedy]:
    """Yield the cancel of the tenant's own job that waits for the limit before this one."""
    first = View(engine).first_for_limit(job.tenant)
    if first is not None and first is not job and not any(replica.attempt for replica in first.rows.values()):
        yield _cancel(first, f"cancel {first.name}, which waits for your limit before it")


def _release(engine: Engine, job: Job) -> Iterator[Remedy]:
    if job.hold is not None and engine.state.tenants[job.tenant].hold is None:
        if is_own(job.hold):
            event = Order("release", act_of("release", {"tenant": job.tenant, "job": job.name, "by": _BY}), "", True)
            command = f"moorage change {word_of(job.name)} --release --tenant {job.tenant}"
            yield Remedy("release it", command, "tenant", event)
            return
        command = f"moorage admin release {word_of(job.name)} --tenant {job.tenant}"
        yield _order("ask your operator to let it go on", command, "release", tenant=job.tenant, job=job.name)


_OF: Final[dict[Cure, tuple[Callable[[Engine, Job], Iterator[Remedy]], ...]]] = {
    Cure.LIMIT: (_raise_limit, _cancel_first, _cancel_for_limit),
    Cure.COUNTER: (_more_of_counter,),
    Cure.RELEASE: (_release,),
}
