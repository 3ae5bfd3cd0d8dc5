"""Hosts held back, so that a stream of small jobs cannot starve a big one, and what may still use them.

Whoever is first (see `claims`) and has waited beyond the setting `reserve_after` gets a reservation: the hosts on which
it would fit soonest are closed to everybody else until it starts. Behind its back goes only who surely ends before it
could start (backfill; Lifka, "The ANL/IBM SP Scheduling System", 1995).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from moorage.scheduler.core.fleet import Fleet
from moorage.scheduler.core.host import EXCLUSIVE, Host
from moorage.scheduler.core.queueing.queue import REPLICA_BITS, Line
from moorage.scheduler.core.shape import Shape

if TYPE_CHECKING:
    from moorage.scheduler.core.queueing.backfill import Estimates

#: the setting's default
PATIENCE_MS: Final = 30_000
#: a reservation's hosts are chosen anew where others will be free sooner, so many ms apart for each host of the fleet,
#: since it is a walk over it: up to 333 hosts at every look, once a second, 10,000 hosts every 30 s
MOVE_MS_A_HOST: Final = 3
#: jobs that may be backfilled are looked for again once the start is expected so much later, and by this part of what
#: is left
LATER_MS: Final = 5_000
LATER_PART: Final = 8
#: hosts whose members' ends are looked at for one reservation, and so many times what it needs where that is more
LOOKED_MAX: Final = 64
LOOKED_TIMES: Final = 4
#: a reservation whose hosts could not hold it any more, though emptied, is given up after so many ms
SHORT_MS: Final = 60_000


class Reservation:
    """Hosts held back for one entry of the queue, and for those of its priority and shape: the first goes first.

    `tenant` is that of the entry's job. The queue group in which the entry stands is not remembered, since an
    operator's act on the tenant moves it to another.

    `start_ms` is the ledger ms at which its hosts are expected to be free; None where nothing tells. It stands since
    `since_ms`.
    """

    __slots__ = (
        "hosts", "item", "looked_start_ms", "priority", "shape", "short_ms", "since_ms", "start_ms", "tenant",
    )  # fmt: skip

    def __init__(
        self,
        item: int,
        line: Line,
        tenant: str,
        hosts: frozenset[int],
        start_ms: int | None = None,
        since_ms: int = 0,
    ) -> None:
        self.item = item
        self.tenant = tenant
        self.priority = line.priority
        self.shape = line.shape
        self.hosts = hosts
        self.start_ms = start_ms
        self.since_ms = since_ms
        self.looked_start_ms = start_ms  # as it was when the groups that it bars were last opened again because of it
        self.short_ms = -1  # since when its hosts could not hold it; -1: they could at the last look

    def is_short_for(self, now_ms: int) -> int:
        """Its hosts could not hold it at this look; for how many ms that is so."""
        if self.short_ms < 0:
            self.short_ms = now_ms
        return now_ms - self.short_ms

    @property
    def num(self) -> int:
        """The job that it is for."""
        return self.item >> REPLICA_BITS


def still_holds(fleet: Fleet, held: Reservation, barred: frozenset[int]) -> bool:
    """Whether the hosts held back could still hold it, once ours have left them; none of `barred`."""
    hosts = [fleet.hosts[num] for num in held.hosts - barred if num in fleet.hosts]
    room = sum(host.replicas_of(held.shape, "emptied") for host in hosts if host.usable)
    return room >= held.shape.together


#: replicas of a shape that fit now, that would on the host emptied, the host's number, the host
_Row = tuple[int, int, int, Host]


def _capable(fleet: Fleet, shape: Shape, barred: frozenset[int]) -> list[_Row]:
    """The hosts that could run some of it, the likely ones first; none of `barred`."""
    capable = [
        (host.replicas_of(shape, "now"), host.replicas_of(shape, "emptied"), host.worker.num, host)
        for cls, _ in fleet.capable(shape)
        for host in cls.hosts.values()
        if host.usable and host.worker.num not in barred
    ]
    # most of what it needs is free first; of hosts alike the one with the least in the way
    capable.sort(key=lambda row: (-min(row[0], shape.together), row[1] - row[0], row[2]))
    return capable


def _in_time(capable: list[_Row], shape: Shape, estimates: Estimates, now_ms: int) -> list[tuple[int, bool, int, int]]:
    """(ledger ms, whether nothing tells, host, replicas) of the likely hosts, the soonest first."""
    most = max((row[1] for row in capable), default=0)
    looked = capable[: max(LOOKED_MAX, LOOKED_TIMES * -(-shape.together // most))] if most else []
    return sorted(
        (at, not sure, row[2], room)
        for row in looked
        if row[1]
        for at, sure, room in _rooms(row[3], shape, row[0], row[1], estimates, now_ms)
    )


def soonest(
    fleet: Fleet, shape: Shape, barred: frozenset[int], estimates: Estimates, now_ms: int
) -> tuple[frozenset[int], int | None]:
    """The hosts on which the whole gang would fit soonest, and when; no hosts where none could hold it.

    None of `barred`, on which it may not start. It walks the fleet, at most once a second and only while a job is out
    of patience.
    """
    capable = _capable(fleet, shape, barred)
    chosen: dict[int, tuple[int, bool]] = {}  # host -> replicas, and whether nothing tells when
    left = shape.together
    for at, unsure, num, room in _in_time(capable, shape, estimates, now_ms):
        before = chosen.get(num, (0, False))[0]
        if room <= before:
            continue
        chosen[num] = (room, unsure)
        left -= room - before
        if left <= 0:
            return frozenset(chosen), at if not any(unknown for _, unknown in chosen.values()) else None
    every: list[int] = []
    left = shape.together
    for _, room, num, _ in capable:  # more hosts than were looked at
        if room > 0:
            every.append(num)
            left -= room
        if left <= 0:
            return frozenset(every), None
    return frozenset(), None


def expected(fleet: Fleet, held: Reservation, barred: frozenset[int], estimates: Estimates, now_ms: int) -> int | None:
    """When the hosts that are held back will hold it, as far as anything tells; those of `barred` never do."""
    rooms = sorted(
        (at, not sure, num, room)
        for num in held.hosts - barred
        if (host := fleet.hosts.get(num)) is not None and host.usable
        for at, sure, room in _rooms(
            host, held.shape, host.replicas_of(held.shape, "now"), host.replicas_of(held.shape, "emptied"), estimates,
            now_ms,
        )
    )  # fmt: skip
    has: dict[int, int] = {}
    unsure: dict[int, bool] = {}
    left = held.shape.together
    for at, unknown, num, room in rooms:
        left -= max(0, room - has.get(num, 0))
        has[num] = max(room, has.get(num, 0))
        unsure[num] = unsure.get(num, False) or unknown
        if left <= 0:
            return None if any(unsure.values()) else at
    return None


def _rooms(
    host: Host, shape: Shape, now: int, emptied: int, estimates: Estimates, now_ms: int
) -> Iterator[tuple[int, bool, int]]:
    """(ledger ms, whether something tells, replicas): how many fit when, as the members leave one after the other."""
    if now:
        yield now_ms, True, now
    if emptied <= now:
        return
    ends = sorted(estimates.ends_of(host.worker.members.values(), now_ms))
    if shape.mode != EXCLUSIVE or not shape.count:
        if ends:  # sharers and processors: when all have left
            yield ends[-1][0], all(sure for _, sure, _ in ends), emptied
        return
    mask, open_, last, known = host.cls.fit(shape).mask, host.open, now, True
    opens, count = mask & host.lent & ~host.shut, shape.count
    for at, sure, freed in ends:
        open_ |= freed & opens
        known = known and sure
        room = min((open_ & mask).bit_count() // count, emptied)
        if room > last:
            last = room
            yield at, known, room
