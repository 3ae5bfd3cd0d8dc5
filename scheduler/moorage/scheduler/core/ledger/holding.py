"""What a tenant holds beside GPUs, and what it has spent of its budget: counted as its attempts come and go.

Only of a tenant with a limit beside that of GPUs: others cost nothing. What an attempt holds follows from its request,
which never changes, and the spent GPU time from the number of GPUs that the tenant leases. A budget begins anew with
each day, week (on Monday) or month in UTC.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from moorage.schemas.codec import decode_accepted

if TYPE_CHECKING:
    from moorage.scheduler.core.ledger.state import Attempt, Job, State, Tenant

#: cores in thousandths, memory in MiB, and replicas on workers, of which a gang counts as one
Held = tuple[int, int, int]
NOTHING_HELD: Final[Held] = (0, 0, 0)
PERIODS: Final = ("day", "week", "month")


class Limits(NamedTuple):
    """A tenant's limits beside those of GPUs and jobs; 0 for none."""

    cores_milli: int = 0
    memory_mib: int = 0
    running: int = 0
    job_gpus: int = 0  # of one job at once
    time_limit_ms: int = 0  # the longest of a job, which has to name one
    budget_ms: int = 0  # milliseconds of a leased GPU in a period
    period: int = 0  # in `PERIODS`
    refuses: int = 0  # 1: once the budget is spent, jobs with GPUs are refused; else they wait


class Spent(NamedTuple):
    """What a tenant has spent of its budget up to a ledger ms, since the beginning of a period."""

    from_ms: int
    gpu_ms: int
    at_ms: int


def needs_of(job: Job) -> tuple[int, int, bool]:
    """Return cores and memory of one replica of a job, and whether it is a gang."""
    if job.needs is None:
        request = decode_accepted(job.body)
        host, gpu = request.resources, request.gpu
        cores, memory = (0, 0) if host is None else (host.cpu_milli, host.memory_mib)
        job.needs = cores, memory, gpu is not None and gpu.effective_scheduling == "gang"
    return job.needs


def held_by(attempts: Iterable[Attempt]) -> Held:
    """Return what attempts hold."""
    found = NOTHING_HELD
    for attempt in attempts:
        found = _sum(found, _of(attempt), 1)
    return found


def take(tenant: Tenant, attempt: Attempt, sign: int) -> None:
    """Count an attempt of a tenant that came (1), or is gone (-1)."""
    if tenant.limits is not None:
        tenant.held = _sum(tenant.held, _of(attempt), sign)


def _of(attempt: Attempt) -> Held:
    job = attempt.replica.job
    cores, memory, is_gang = needs_of(job)
    return cores, memory, int(not is_gang or attempt.replica.index == job.numbers[0][0])


def _sum(held: Held, more: Held, sign: int) -> Held:
    return held[0] + sign * more[0], held[1] + sign * more[1], held[2] + sign * more[2]


# ------------------------------------------------------------------------------------------------------------ budgets


def begins_ms(time_ms: int, period: int) -> int:
    """Return when the period of a ledger ms has begun."""
    now = datetime.fromtimestamp(time_ms / 1000, UTC)
    day = now.replace(hour=0, minute=0, second=0, microsecond=0)
    if PERIODS[period] == "week":
        day -= timedelta(days=day.weekday())
    elif PERIODS[period] == "month":
        day = day.replace(day=1)
    return max(0, round(day.timestamp() * 1000))


def ends_ms(time_ms: int, period: int) -> int:
    """Return when the next period begins."""
    days = {"day": 1, "week": 7, "month": 31}[PERIODS[period]]
    return begins_ms(begins_ms(time_ms, period) + days * 86_400_000, period)


def spent_at(tenant: Tenant, time_ms: int) -> Spent:
    """Return what a tenant with a budget has spent in the period of a ledger ms."""
    assert tenant.limits is not None
    spent, begun_ms = tenant.spent or Spent(time_ms, 0, time_ms), begins_ms(time_ms, tenant.limits.period)
    if spent.from_ms < begun_ms:
        spent = Spent(begun_ms, 0, max(begun_ms, spent.at_ms) if spent.at_ms > begun_ms else begun_ms)
    return Spent(spent.from_ms, spent.gpu_ms + tenant.gpus * max(0, time_ms - spent.at_ms), time_ms)


def spend(state: State, tenant: Tenant) -> bool:
    """Count what a tenant has spent until now, before it leases another number of GPUs; return whether it has a
    budget."""
    if tenant.limits is None or not tenant.limits.budget_ms:
        return False
    tenant.spent = spent_at(tenant, state.time_ms)
    return True


def is_spent(state: State, tenant: Tenant) -> bool:
    """Return whether a tenant has a budget, of which nothing is left now."""
    limits = tenant.limits
    return limits is not None and bool(limits.budget_ms) and left_ms(state, tenant) <= 0


def left_ms(state: State, tenant: Tenant) -> int:
    """Return how many milliseconds of a GPU are left of a tenant's budget."""
    assert tenant.limits is not None
    return tenant.limits.budget_ms - spent_at(tenant, state.time_ms).gpu_ms
