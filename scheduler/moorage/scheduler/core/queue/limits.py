"""What the limits of a tenant leave for jobs of a shape: GPUs, cores, memory, replicas at once, and its budget.

All are asked at one place, so that a limit that is added holds wherever something is placed. Room is counted in
placements: replicas of the shape, or whole gangs.
"""

from __future__ import annotations

import math
from typing import Final

from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger import fairkeys
from moorage.scheduler.core.ledger.holding import ends_ms, is_spent
from moorage.scheduler.core.ledger.limits import AS_PREEMPTIBLE
from moorage.scheduler.core.ledger.records import Mode
from moorage.scheduler.core.ledger.state import State, Tenant

#: what limits are of: the parts of the vectors here
NAMES: Final = ("GPUs", "cores", "MiB of memory", "replicas at once")
GPUS, CORES, MEMORY, RUNNING = range(len(NAMES))
#: stand for the budget, and for GPUs of a model, where a part is named
BUDGET: Final = len(NAMES)
MODELS: Final = BUDGET + 1
#: parts of which a job that needs more than is left holds up its tenant's later ones: small ones would starve it
HOLDING_UP: Final = frozenset((GPUS, CORES, MEMORY))
Parts = tuple[int, int, int, int]


def needs(shape: Shape) -> Parts:
    """Return what one placement of a shape needs."""
    if shape.parts:
        found = [needs(part.shape) for part in shape.parts]
        return shape.gpus, sum(each[CORES] for each in found), sum(each[MEMORY] for each in found), 1
    return shape.gpus, shape.cpu_milli * shape.together, shape.memory_mib * shape.together, 1


def has(tenant: Tenant) -> Parts:
    """Return what a tenant has now."""
    return (tenant.gpus, *tenant.held)


def most(tenant: Tenant) -> Parts:
    """Return the limits of a tenant; 0 for none."""
    limits = tenant.limits
    return (tenant.gpus_max, *limits[:3]) if limits is not None else (tenant.gpus_max, 0, 0, 0)


def is_limited(tenant: Tenant) -> bool:
    """Return whether a tenant has any limit of what it may have at once, or a budget."""
    return bool(tenant.gpus_max) or tenant.limits is not None


def room(state: State, tenant: Tenant, shape: Shape) -> float:
    """Return how many more placements of a shape a tenant's limits allow now; infinity without a limit of it."""
    if tenant.limits is None:
        if not tenant.gpus_max and not shape.uses:
            return math.inf
        gpus = shape.gpus
        found = max(0, tenant.gpus_max - tenant.gpus) // gpus if tenant.gpus_max and gpus else math.inf
        return min(found, _counted(state, tenant, shape)) if shape.uses else found
    if shape.gpus and is_spent(state, tenant) and not goes_on(tenant, shape):
        return 0
    found = _counted(state, tenant, shape)
    for bound, held, need in zip(most(tenant), has(tenant), needs(shape), strict=True):
        if bound and need:
            found = min(found, max(0, bound - held) // need)
    return found


def goes_on(tenant: Tenant, shape: Shape) -> bool:
    """Return whether jobs of a shape start as preemptible ones once their tenant's budget is spent.

    As such a request may ask for it: a gang, and what shares a GPU, cannot be preemptible.
    """
    is_set = tenant.limits is not None and tenant.limits.refuses == AS_PREEMPTIBLE
    return is_set and not shape.is_gang and shape.mode <= Mode.EXCLUSIVE


def is_beyond(state: State, tenant: str, shape: Shape) -> bool:
    """Return whether what a tenant starts of a shape is preemptible, as its budget is spent."""
    if tenant not in state.budgeted or not shape.gpus:
        return False
    row = state.read_tenant(tenant)
    return goes_on(row, shape) and is_spent(state, row)


def _counted(state: State, tenant: Tenant, shape: Shape) -> float:
    """Return how many more placements of a shape the counters that it uses allow; a counter that is not there, none."""
    found = math.inf
    for name, each in shape.uses:
        counter = state.counters.get(name)
        if counter is None:
            return 0
        used = (tenant if counter.of_tenant else state).used.get(name, 0)
        found = min(found, max(0, counter.most - used) // (each * shape.ranks))
    return found


def most_ranks(state: State, tenant: Tenant, shape: Shape, key: str) -> int:
    """Return how many ranks a gang that takes as many as have room may have now; at least its fewest, as `room` says
    whether these may start."""
    found, each, bounds = shape.most, (shape.count, shape.cpu_milli, shape.memory_mib), tenant.limits
    for bound, held, need in zip(most(tenant), has(tenant), each, strict=False):
        if bound and need:
            found = min(found, (bound - held) // need)
    for name, need in shape.uses:
        if (counter := state.counters.get(name)) is not None:
            used = (tenant if counter.of_tenant else state).used.get(name, 0)
            found = min(found, (counter.most - used) // need)
    if bounds is not None and bounds.job_gpus and shape.count:
        found = min(found, bounds.job_gpus // shape.count)
    if bounds is not None and bounds.running_key:
        found = min(found, fairkeys.room(tenant, key, 1))
    return max(found, shape.together)


def taken(state: State, tenant: Tenant, shape: Shape) -> list[str]:
    """Return the names of the counters of which too few are left for a placement of a shape."""
    found = []
    for name, each in shape.uses:
        counter = state.counters.get(name)
        used = 0 if counter is None else (tenant if counter.of_tenant else state).used.get(name, 0)
        if counter is None or used + each * shape.ranks > counter.most:
            found.append(name)
    return found


def short(state: State, tenant: Tenant, shape: Shape) -> list[int]:
    """Return of which parts a tenant's limits leave too little for a placement of a shape now, `BUDGET` among them."""
    rows = enumerate(zip(most(tenant), has(tenant), needs(shape), strict=True))
    found = [part for part, (bound, held, need) in rows if bound and need > bound - held]
    return [*found, BUDGET] if shape.gpus and is_spent(state, tenant) and not goes_on(tenant, shape) else found


def anew_ms(state: State) -> float:
    """Return the ledger ms at which the first spent budget begins anew for a tenant of which jobs wait; infinity for
    none."""
    found = math.inf
    for name in state.budgeted:
        tenant = state.read_tenant(name)
        if tenant.limits is not None and tenant.waits and is_spent(state, tenant):
            found = min(found, ends_ms(state.time_ms, tenant.limits.period))
    return found


def words(part: int, amount: int) -> str:
    """Return an amount of a part, as 1.5 cores."""
    number = f"{amount / 1000:g}" if part == CORES else f"{amount:,}"
    return f"{number} {NAMES[part]}"
