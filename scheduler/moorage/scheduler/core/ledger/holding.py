"""What a tenant holds beside GPUs, and what it has spent of its budget: counted as its attempts come and go.

Only of a tenant with a limit beside that of GPUs: others cost nothing. What an attempt holds follows from its request,
which never changes, and the spent GPU time from the number of GPUs that the tenant leases. A budget begins anew with
each day, week (on Monday) or month in UTC.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Final

from moorage.scheduler.core.ledger.limits import NOTHING_HELD, PERIODS, Held, Needs, Spent, Used
from moorage.scheduler.core.ledger.state import Attempt, Job, State, Tenant, Worker
from moorage.schemas.codec import decode_accepted
from moorage.schemas.gpu import model_matches

#: stands in the body of each request that uses a counter
_USES: Final = b"uses"


def uses_any(job: Job) -> bool:
    """Return whether a job may use counters: if not, it does not."""
    return job.body.find(_USES) >= 0


def needs_of(job: Job, rank: int = 0) -> Needs:
    """Return what one replica of a job holds beside GPUs; of a gang with groups, what this rank does."""
    if job.needs is None:
        request = decode_accepted(job.body)
        groups = request.groups
        host = groups[request.group_of(rank)[0]].resources if groups else request.resources
        cores, memory = (0, 0) if host is None else (host.cpu_milli, host.memory_mib)
        needs = Needs(cores, memory, request.is_gang, request.fleet_uses)
        if groups:
            return needs
        job.needs = needs
    return job.needs


def held_by(attempts: Iterable[Attempt]) -> Held:
    """Return what attempts hold."""
    found = NOTHING_HELD
    for attempt in attempts:
        found = _sum(found, _of(attempt), 1)
    return found


def take(state: State, tenant: Tenant, attempt: Attempt, sign: int) -> None:
    """Count an attempt of a tenant that came (1), or is gone (-1)."""
    if tenant.limits is not None:
        tenant.held = _sum(tenant.held, _of(attempt), sign)
        tenant.devices = _with_devices(tenant.devices, attempt, attempt.mask, sign)
    if uses_any(attempt.replica.job):
        for name, count in needs_of(attempt.replica.job).uses:
            state.used = _counted(state.used, name, sign * count)
            tenant.used = _counted(tenant.used, name, sign * count)


def move(tenant: Tenant, attempt: Attempt, mask: int) -> None:
    """Count these slots in place of those that an attempt holds, as one that is frozen or resumed."""
    if tenant.limits is not None:
        devices = _with_devices(tenant.devices, attempt, attempt.mask, -1)
        tenant.devices = _with_devices(devices, attempt, mask, 1)


def recount(state: State, worker: Worker) -> None:
    """Count the devices of tenants anew, as some that their attempts hold on a worker are forgotten."""
    for name in {attempt.replica.job.tenant for attempt in worker.attempts.values()}:
        tenant = state.tenants[name]
        if tenant.limits is not None:
            tenant.devices = devices_of(attempt for job in tenant.jobs.values() for attempt in job.attempts)


def devices_of(attempts: Iterable[Attempt]) -> Used:
    """Return how many devices of each name attempts hold."""
    found: Used = {}
    for attempt in attempts:
        found = _with_devices(found, attempt, attempt.mask, 1)
    return found


def _with_devices(devices: Used, attempt: Attempt, mask: int, sign: int) -> Used:
    for name in names_of(attempt, mask):
        devices = _counted(devices, name, sign)
    return devices


def names_of(attempt: Attempt, mask: int) -> list[str]:
    """Return the names of the devices in these slots of an attempt's worker; "" for a forgotten one."""
    devices = attempt.worker.pool_at(attempt.fence).devices if mask else ()
    return [devices[slot].name if slot < len(devices) else "" for slot in range(mask.bit_length()) if mask >> slot & 1]


def used_by(attempts: Iterable[Attempt]) -> Used:
    """Return how many of each counter attempts use."""
    found: Used = {}
    for attempt in attempts:
        for name, count in needs_of(attempt.replica.job).uses if uses_any(attempt.replica.job) else ():
            found = _counted(found, name, count)
    return found


def _counted(used: Used, name: str, more: int) -> Used:
    """Return what is in use with so many more of a counter; the table itself stays, as a record may be taken back."""
    count = used.get(name, 0) + more
    return {**used, name: count} if count else {each: n for each, n in used.items() if each != name}


def _of(attempt: Attempt) -> Held:
    job = attempt.replica.job
    needs = needs_of(job, attempt.replica.index)
    counts = not needs.is_gang or attempt.replica.index == job.numbers[0][0]
    return needs.cores_milli, needs.memory_mib, int(counts)


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
    return Spent(spent.from_ms, spent.gpu_ms + _rate_milli(tenant) * max(0, time_ms - spent.at_ms) // 1000, time_ms)


def _rate_milli(tenant: Tenant) -> int:
    """Return what the devices that a tenant holds count in its budget, in thousandths of a GPU."""
    weights = () if tenant.limits is None else tenant.limits.weights
    if not weights:
        return 1000 * tenant.gpus
    longest = sorted(weights, key=lambda row: -len(row[0]))
    return sum(
        count * next((milli for pattern, milli in longest if model_matches(pattern, name)), 1000)
        for name, count in tenant.devices.items()
    )


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
