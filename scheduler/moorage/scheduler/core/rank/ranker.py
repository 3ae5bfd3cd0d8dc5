"""Rankers: each chooses a host and slots for a request among the hosts that fit now.

To add a ranking, write one class with `choose` and name it in `rankers.py`. Ties are broken by a stable order (buckets
by insertion, classes by joining), so the same input gives the same placement.
"""

from __future__ import annotations

import functools
from typing import ClassVar, Final

from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import EXCLUSIVE, NO_GPU, Fit, Host, HostClass
from moorage.scheduler.core.fleet.shape import Shape

#: cached choices among linked slots: a few kinds of hosts, in as many states
SLOTS_KNOWN: Final = 65_536

#: sets of slots linked by NVLink, and by NUMA node (`host.HostClass.islands`)
Islands = tuple[tuple[int, ...], ...]


class Choice:
    """Where one replica goes: the host, the slot mask, and how many free devices remain there."""

    __slots__ = ("host", "left", "mask")

    def __init__(self, host: Host, mask: int, left: int) -> None:
        self.host = host
        self.mask = mask
        self.left = left


class Ranker:
    """Chooses among the hosts that fit now. Must not change the fleet."""

    name: ClassVar[str] = ""
    #: hosts scored since the pass began, or other work of equal cost; a pass ends when it is large. It must depend only
    #: on the calls made, so that a recording replays alike
    work = 0

    def __init_subclass__(cls) -> None:
        """Let a subclass with its own `choose` be called for each replica, unless it also has its own `again`."""
        if "choose" in vars(cls) and "again" not in vars(cls):
            cls.again = Ranker.again  # type: ignore[method-assign]

    def choose(self, fleet: Fleet, shape: Shape, avoid: dict[int, int], excluded: frozenset[int]) -> Choice | None:
        """Return a choice, or None if nothing fits.

        `avoid` counts this job's replicas by worker (for spread). `excluded` are hosts that the job may not use, such
        as those reserved for another job.
        """
        raise NotImplementedError

    def prepare(self, fleet: Fleet) -> bool:
        """Prepare for the choices of a record. Return False if more time is needed: then nothing is placed in it.

        It is called again soon. So slow work is done in parts, between which the scheduler answers requests. The result
        must depend only on the calls made.
        """
        return True

    def arrived(self, shape: Shape, replicas: int) -> None:
        """Note a job's arrival: `replicas` replicas of this shape. Called once a term for each job, in ledger order."""

    def again(self, choice: Choice, shape: Shape, most: int) -> list[int]:
        """Return slot masks for at most `most` more replicas of this shape that `choose` would put on the same host.

        `choice` is already taken from the fleet. The result must equal repeated calls of `choose`; when in doubt,
        return none.
        """
        return []


def lowest_slots(mask: int, count: int) -> int:
    """Return the lowest `count` set bits of a mask that has at least this many."""
    taken = 0
    for _ in range(count):
        low = mask & -mask
        taken |= low
        mask ^= low
    return taken


def best_slots(mask: int, fit: Fit, count: int) -> int:
    """Return `count` slots of a mask: best matches first (A10 before A100 for `A10`), then least memory, then lowest.

    `mask` must have at least `count` slots that match.
    """
    return _first_of(mask, fit.tiers, count)


def _first_of(mask: int, tiers: tuple[int, ...], count: int) -> int:
    taken = 0
    for tier in tiers:
        part, missing = mask & tier, count - taken.bit_count()
        if part.bit_count() >= missing:
            return taken | lowest_slots(part, missing)
        taken |= part
    return taken


def whole_slots(host: Host, mask: int, fit: Fit, count: int) -> int:
    """Return the mask of `count` slots of a host, out of `mask`; linked devices where there are islands.

    `mask` must have at least `count` slots that match. An island is a set of devices linked by NVLink, or else on one
    NUMA node. The request gets the island with the least memory, and of those the fewest free devices, that suffice, so
    that large ones stay whole; if none suffices, it spans as few islands as possible.
    """
    islands = host.cls.islands
    if not islands:
        return best_slots(mask, fit, count)
    return _linked_slots(islands, mask, mask & fit.best_mask, fit.tiers, count)


@functools.lru_cache(SLOTS_KNOWN)
def _linked_slots(islands: Islands, mask: int, best: int, tiers: tuple[int, ...], count: int) -> int:
    within = best if best.bit_count() >= count else mask
    found = _smallest(within, islands[0], tiers, count) or _smallest(within, islands[1], tiers, count)
    if found:
        return found
    taken = 0
    for island in sorted(islands[0], key=lambda island: -(within & island).bit_count()):
        part = within & island
        missing = count - taken.bit_count()
        taken |= part if part.bit_count() <= missing else _first_of(part, tiers, missing)
        if taken.bit_count() == count:
            return taken
    return _first_of(mask, tiers, count)


def _smallest(mask: int, islands: tuple[int, ...], tiers: tuple[int, ...], count: int) -> int:
    """Return `count` slots of a mask within one island: with the least memory, of the fewest devices that are enough.

    0 if no island has enough.
    """
    last_first = tiers[::-1]
    best, best_key = 0, ([0], 0)
    for island in islands:
        part = mask & island
        if part.bit_count() < count:
            continue
        taken = _first_of(part, tiers, count)
        key = [(taken & tier).bit_count() for tier in last_first], part.bit_count()
        if not best or key < best_key:
            best, best_key = taken, key
    return best


class Pack(Ranker):
    """Best fit: the host with the fewest free devices that still suffice; sharers join the fullest device.

    A model name matched as a whole word goes before one matched inside a word. Of hosts that are equal so far, the
    devices with the least memory are taken, so that the others are left to requests that need them. CPU-only jobs go to
    the hosts with the fewest devices, so that they do not use up the CPU beside GPUs.
    """

    name: ClassVar[str] = "pack"

    def choose(self, fleet: Fleet, shape: Shape, avoid: dict[int, int], excluded: frozenset[int]) -> Choice | None:
        if shape.spread:
            return self._spread(fleet, shape, avoid, excluded)
        if shape.mode == NO_GPU:
            return self._without_gpu(fleet, shape, excluded)
        if shape.mode > EXCLUSIVE:
            choice = self._join_sharers(fleet, shape, excluded)
            if choice is not None:
                return choice
        return self._best_fit(fleet, shape, excluded)

    def again(self, choice: Choice, shape: Shape, most: int) -> list[int]:
        # after a placement the host has still fewer free devices than any other that suffices: it remains the best fit
        if shape.spread or shape.mode != EXCLUSIVE or shape.together > 1:
            return []
        host, count = choice.host, shape.count
        fit = host.cls.fit(shape)
        free = host.open & fit.mask
        masks: list[int] = []
        for _ in range(min(most, free.bit_count() // count, host.rooms_beside(shape))):
            mask = whole_slots(host, free, fit, count)
            free ^= mask
            masks.append(mask)
        return masks

    def _best_fit(self, fleet: Fleet, shape: Shape, excluded: frozenset[int]) -> Choice | None:
        best: Choice | None = None
        best_key = (0, 0, 0)
        count = shape.count
        for cls, fit in fleet.capable(shape):
            whole = fit.mask == (1 << len(cls.devices)) - 1
            for free in range(count, len(cls.buckets)):
                if best is not None and (-fit.rank, free - count, fit.least_mib * count) >= best_key:
                    break
                choice = self._first_in(cls.buckets[free], shape, fit, whole, excluded)
                if choice is not None:
                    key = (-fit.rank, choice.left, cls.memory_of(choice.mask))
                    if best is None or key < best_key:
                        best, best_key = choice, key
                    break
        return best

    def _first_in(
        self, bucket: dict[int, Host], shape: Shape, fit: Fit, whole: bool, excluded: frozenset[int]
    ) -> Choice | None:
        count, alike = shape.count, len(fit.tiers) == 1
        best: Choice | None = None
        least = 0
        for host in bucket.values():
            mask = host.open if whole else host.open & fit.mask
            if (whole or mask.bit_count() >= count) and host.fits_host(shape):
                if excluded and host.worker.num in excluded:
                    continue
                choice = Choice(host, whole_slots(host, mask, fit, count), host.open.bit_count() - count)
                if alike:
                    return choice
                memory = host.cls.memory_of(choice.mask)
                if best is None or memory < least:
                    best, least = choice, memory
        return best

    def _join_sharers(self, fleet: Fleet, shape: Shape, excluded: frozenset[int]) -> Choice | None:
        if shape.count > 1:
            return self._share_many(fleet, shape, excluded)
        best: Choice | None = None
        best_users, least = -1, 0
        for cls, fit in fleet.capable(shape):
            for (num, slot), device in cls.shared_open[shape.mode].items():
                users, memory = device.users, cls.devices[slot][3]
                if users < best_users or (users == best_users and memory >= least):
                    continue
                if fit.mask >> slot & 1 and num not in excluded:
                    host = cls.hosts[num]
                    if host.room_beside(slot, device, shape) and host.fits_host(shape):
                        best, best_users, least = Choice(host, 1 << slot, host.open.bit_count()), users, memory
        return best

    def _share_many(self, fleet: Fleet, shape: Shape, excluded: frozenset[int]) -> Choice | None:
        """Return a choice of several devices of one host, some of them shared already: those first, then free ones.

        None if no host with such a shared device has enough. A gang's replicas take the devices with the most room. In
        any other order, the last of them may find room on too few devices, where all of them would have fitted; see
        `Host.replicas_of`.
        """
        for cls, fit in fleet.capable(shape):
            for num, host in cls.hosts.items():
                if host.bucket < 0 or num in excluded or not host.fits_host(shape):
                    continue
                joined, free = host.rooms_on_shared(shape), host.open & fit.mask
                if not joined or len(joined) + free.bit_count() < shape.count:
                    continue
                rooms = joined | host.rooms_on_empty(free, shape)
                slots = sorted(rooms, key=rooms.__getitem__, reverse=True) if shape.together > 1 else list(rooms)
                mask = sum(1 << slot for slot in slots[: shape.count])
                return Choice(host, mask, (free & ~mask).bit_count())
        return None

    def _without_gpu(self, fleet: Fleet, shape: Shape, excluded: frozenset[int]) -> Choice | None:
        for cls, _ in sorted(fleet.capable(shape), key=_device_count):
            for bucket in cls.buckets:
                for host in bucket.values():
                    if host.worker.num not in excluded and host.fits_host(shape):
                        return Choice(host, 0, host.bucket)
        return None

    def _spread(self, fleet: Fleet, shape: Shape, avoid: dict[int, int], excluded: frozenset[int]) -> Choice | None:
        """Return a choice on the host with the fewest of this job's replicas; among equals, the best fit."""
        best: Choice | None = None
        best_key: tuple[int, int, int, int, int] | None = None
        for cls, fit in fleet.capable(shape):
            for num, host in cls.hosts.items():
                if host.bucket < 0 or num in excluded or not host.fits_host(shape):
                    continue
                mask = self._slots_for(host, shape, fit)
                if mask is None:
                    continue
                left = host.open.bit_count() - shape.count
                key = (avoid.get(num, 0), -fit.rank, left, cls.memory_of(mask), num)
                if best_key is None or key < best_key:
                    best, best_key = Choice(host, mask, left), key
        return best

    def _slots_for(self, host: Host, shape: Shape, fit: Fit) -> int | None:
        if shape.mode == NO_GPU:
            return 0
        mask = host.open & fit.mask
        if shape.mode > EXCLUSIVE:
            mask |= sum(1 << slot for slot in host.rooms_on_shared(shape))
        return whole_slots(host, mask, fit, shape.count) if mask.bit_count() >= shape.count else None


def _device_count(pair: tuple[HostClass, Fit]) -> int:
    return len(pair[0].devices)
