"""What a tenant's limits of GPUs by model leave: for how many placements of a shape, and on which hosts for none.

A request may allow several models, and which one it gets is known as it is placed. So such a limit closes the hosts
with that model to what needs more GPUs than it leaves, and a job waits for it where no other host could hold it. A gang
counts as if all of it came on that model; a host with several models is closed by any of them that the request allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import Fit, HostClass
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.holding import names_of
from moorage.scheduler.core.ledger.state import Attempt, Tenant
from moorage.schemas.gpu import model_matches

_NONE: frozenset[int] = frozenset()


def is_limited(tenant: Tenant) -> bool:
    """Return whether a tenant has a limit of GPUs of a model."""
    return tenant.limits is not None and bool(tenant.limits.gpus_of)


def count(devices: Mapping[str, int], pattern: str) -> int:
    """Return how many of these devices are of a model."""
    return sum(number for name, number in devices.items() if model_matches(pattern, name))


def left(tenant: Tenant) -> dict[str, int]:
    """Return how many GPUs of each model with a limit a tenant may lease now; below 0 if it has more."""
    limits = tenant.limits.gpus_of if tenant.limits is not None else ()
    return {pattern: most - count(tenant.devices, pattern) for pattern, most in limits}


def room(fleet: Fleet, tenant: Tenant, shape: Shape) -> float:
    """Return how many placements of a shape the limits allow, at least: 0 only if they allow none; infinity without."""
    if not is_limited(tenant) or not shape.gpus:
        return math.inf
    lefts = left(tenant)
    needs = _needs(fleet, shape, lefts)
    full = [pattern for pattern, need in needs.items() if need > lefts[pattern]]
    if full and any(_must(fleet, part, full) for part in _parts(shape)):
        return 0
    return min((lefts[pattern] // need for pattern, need in needs.items() if pattern not in full), default=math.inf)


def closed(fleet: Fleet, tenant: Tenant, shape: Shape) -> frozenset[int]:
    """Return the hosts on which the limits leave too few GPUs for a placement of a shape."""
    if not is_limited(tenant) or not shape.gpus:
        return _NONE
    lefts = left(tenant)
    full = [pattern for pattern, need in _needs(fleet, shape, lefts).items() if need > lefts[pattern]]
    if not full:
        return _NONE
    classes = (row for part in _parts(shape) for row in fleet.capable(part))
    return frozenset(num for cls, fit in classes if _takes(cls, fit, full) for num in cls.hosts)


def most_ranks(fleet: Fleet, tenant: Tenant, shape: Shape) -> float:
    """Return how many ranks the limits allow a gang that takes as many as have room, wherever it may come."""
    lefts = left(tenant) if shape.count else {}
    open_ = (lefts[pattern] // shape.count for pattern in _needs(fleet, shape, lefts))
    return min((ranks for ranks in open_ if ranks >= shape.together), default=math.inf)


def short(fleet: Fleet, tenant: Tenant, shape: Shape, lefts: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return of which models the limits leave too few for a placement of a shape, with how many it may need; or
    `lefts` does."""
    lefts = left(tenant) if lefts is None else lefts
    needs = _needs(fleet, shape, lefts) if lefts and shape.gpus else {}
    return {pattern: need for pattern, need in needs.items() if need > lefts[pattern]}


def must_take(fleet: Fleet, shape: Shape, patterns: Iterable[str]) -> bool:
    """Return whether some of a shape can come only on one of these models."""
    return any(part.gpus and _must(fleet, part, [*patterns]) for part in _parts(shape))


def has_room_for(tenant: Tenant, attempt: Attempt, given: Mapping[str, int]) -> bool:
    """Return whether a frozen attempt may have its devices again, if its tenant gives up these ones for it."""
    names = names_of(attempt, attempt.home)
    return all(
        free + count(given, pattern) >= sum(model_matches(pattern, name) > 0 for name in names)
        for pattern, free in left(tenant).items()
    )


def _parts(shape: Shape) -> list[Shape]:
    return [part.shape for part in shape.parts] or [shape]


def _needs(fleet: Fleet, shape: Shape, patterns: Mapping[str, int]) -> dict[str, int]:
    """Return how many GPUs of each model a placement of a shape needs if all comes on it that may."""
    found: dict[str, int] = {}
    for part in _parts(shape):
        for pattern in patterns:
            if part.gpus and any(_takes(cls, fit, [pattern]) for cls, fit in fleet.capable(part)):
                found[pattern] = found.get(pattern, 0) + part.gpus
    return found


def _must(fleet: Fleet, shape: Shape, patterns: list[str]) -> bool:
    rows = list(fleet.capable(shape)) if shape.gpus else []
    return bool(rows) and all(_takes(cls, fit, patterns) for cls, fit in rows)


def _takes(cls: HostClass, fit: Fit, patterns: list[str]) -> bool:
    """Return whether a shape may get a device of one of these models on hosts of a class that it fits."""
    return any(model_matches(pattern, name) for pattern in patterns for name in _names(cls, fit))


def _names(cls: HostClass, fit: Fit) -> Iterator[str]:
    return iter({device[2] for slot, device in enumerate(cls.devices) if fit.mask >> slot & 1})
