"""Rankers: each chooses a host and slots for a request among the hosts that fit now.

To add a ranking, write one class with `choose` and name it in `rankers.py`. Ties are broken by a stable order (buckets
by insertion, classes by joining), so the same input gives the same placement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import EXCLUSIVE, NO_GPU, Fit, Host, HostClass
from moorage.scheduler.core.fleet.shape import Shape


class Choice:
    """Where one replica goes: the host, the slot mask, and how many free devices remain there."""

    __slots__ = ("host", "left", "mask")

    def __init__(self, host: Host, mask: int) -> None:
        self.host = host
        self.mask = mask
        self.left = (host.open & ~mask).bit_count()


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

    def least(
        self,
        fleet: Fleet,
        shape: Shape,
        excluded: frozenset[int],
        key: Callable[[Host, Fit, int], tuple[int, ...]],
    ) -> Choice | None:
        """Return the choice with the least `key(host, how it fits, slots)` of all hosts with room; None without one."""
        best: tuple[tuple[int, ...], Host, int] | None = None
        for host, fit in fleet.usable(shape, excluded):
            if host.fits_host(shape) and (slots := self._slots_for(host, shape)) is not None:
                found = key(host, fit, slots)
                if best is None or found < best[0]:
                    best = found, host, slots
        return None if best is None else Choice(best[1], best[2])

    def _slots_for(self, host: Host, shape: Shape) -> int | None:
        return host.pick(shape)


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
        if shape.spread or shape.mode != EXCLUSIVE or not shape.is_whole or shape.is_gang:
            return []
        return choice.host.pick_more(shape, most)

    def _best_fit(self, fleet: Fleet, shape: Shape, excluded: frozenset[int]) -> Choice | None:
        best: Choice | None = None
        best_key = (0, 0, 0)
        count = shape.count
        for cls, fit in fleet.capable(shape):
            for free in range(count, len(cls.buckets)):
                if best is not None and (-fit.rank, free - count, fit.least_mib * count) >= best_key:
                    break
                bucket = cls.buckets[free]
                choice = self._first_in(bucket, shape, fit, excluded) if bucket else None
                if choice is not None:
                    key = (-fit.rank, choice.left, cls.memory_of(choice.mask))
                    if best is None or key < best_key:
                        best, best_key = choice, key
                    break
        return best

    def _first_in(self, bucket: dict[int, Host], shape: Shape, fit: Fit, excluded: frozenset[int]) -> Choice | None:
        best: Choice | None = None
        least = 0
        for host in bucket.values():
            if not host.fits_host(shape) or host.worker.num in excluded:
                continue
            slots = host.cls.pick(host.open & fit.mask, shape)
            if slots is None:
                continue
            if len(fit.tiers) == 1:
                return Choice(host, slots)
            memory = host.cls.memory_of(slots)
            if best is None or memory < least:
                best, least = Choice(host, slots), memory
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
                        best, best_users, least = Choice(host, 1 << slot), users, memory
        return best

    def _share_many(self, fleet: Fleet, shape: Shape, excluded: frozenset[int]) -> Choice | None:
        """Return a choice of several devices of one host, some of them shared already; None if no host has enough."""
        for host, _ in fleet.usable(shape, excluded):
            if host.fits_host(shape) and (slots := host.pick_beside(shape)) is not None:
                return Choice(host, slots)
        return None

    def _without_gpu(self, fleet: Fleet, shape: Shape, excluded: frozenset[int]) -> Choice | None:
        for cls, _ in sorted(fleet.capable(shape), key=_device_count):
            for bucket in cls.buckets:
                for host in bucket.values():
                    if host.worker.num not in excluded and host.fits_host(shape):
                        return Choice(host, 0)
        return None

    def _spread(self, fleet: Fleet, shape: Shape, avoid: dict[int, int], excluded: frozenset[int]) -> Choice | None:
        """Return a choice on the host with the fewest of this job's replicas; among equals, the best fit."""
        return self.least(
            fleet,
            shape,
            excluded,
            lambda host, fit, slots: (
                avoid.get(host.worker.num, 0),
                -fit.rank,
                (host.open & ~slots).bit_count(),
                host.cls.memory_of(slots),
                host.worker.num,
            ),
        )


def _device_count(pair: tuple[HostClass, Fit]) -> int:
    return len(pair[0].devices)
