"""When running jobs leave room for a shape: the hosts and the time that a reservation is made for.

Only what is known to end counts: by a time limit, or by earlier runs. What any other job holds is free at no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from operator import or_
from typing import Final

from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import EXCLUSIVE, Host
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.schedule.runtime import FOREVER_MS, Estimates

#: for one reservation, compare at most this many hosts that will be free, or the second number times the hosts it needs
#: if that is more; read at most `READ_MAX` hosts, since each read examines all that runs there
LOOKED_MAX: Final = 64
LOOKED_TIMES: Final = 4
READ_MAX: Final = 512

#: (replicas that fit now, replicas that fit if it were emptied, host number, host)
_Row = tuple[int, int, int, Host]
#: (ledger ms, host number, replicas that fit from then on)
_Room = tuple[int, int, int]


def _capable(fleet: Fleet, shape: Shape, excluded: frozenset[int], num: int) -> list[_Row]:
    """Return rows of the hosts outside `excluded` that could run some of a job, the most promising first."""
    usable = fleet.usable(shape, excluded)
    hosts = [(host, fleet.closed_turns(host, num) if host.turns else 0) for host, _ in usable]
    capable = [
        (host.replicas_of(shape, "now", closed), host.replicas_of(shape, "emptied", closed), host.worker.num, host)
        for host, closed in hosts
    ]
    # first those with most of the needed room free; of equal ones, those with the least running in the way
    capable.sort(key=lambda row: (-min(row[0], shape.together), row[1] - row[0], row[2]))
    return capable


def soonest(
    fleet: Fleet, shape: Shape, excluded: frozenset[int], estimates: Estimates, now_ms: int, num: int
) -> tuple[frozenset[int], int] | None:
    """Return the hosts on which all of this job's shape is expected to fit soonest, and the ledger ms; None if unknown.

    Hosts in `excluded` are not used. This walks the fleet: at most once a second, and only while a job is overdue.
    """
    if shape.parts:
        return _all_groups(fleet, shape, excluded, estimates, now_ms, num)
    capable = _capable(fleet, shape, excluded, num)
    most = max((row[1] for row in capable), default=0)
    wanted = max(LOOKED_MAX, LOOKED_TIMES * -(-shape.together // most)) if most else 0
    rooms: list[_Room] = []
    for row in capable[: max(READ_MAX, wanted)]:
        found = list(_rooms(row, shape, estimates, now_ms))
        rooms += found
        wanted -= bool(found)
        if wanted <= 0:
            break
    return _fits(rooms, shape, fleet, now_ms)


def _all_groups(
    fleet: Fleet, shape: Shape, excluded: frozenset[int], estimates: Estimates, now_ms: int, num: int
) -> tuple[frozenset[int], int] | None:
    """Return the hosts of all groups of a gang, and from when on: each group has hosts of its own, if there are any."""
    hosts, start_ms = frozenset[int](), now_ms
    for part in sorted(shape.parts, key=lambda part: -part.shape.count):
        found = soonest(fleet, part.shape, excluded | hosts, estimates, now_ms, num)
        found = found or soonest(fleet, part.shape, excluded, estimates, now_ms, num)
        if found is None:
            return None
        hosts, start_ms = hosts | found[0], max(start_ms, found[1])
    return hosts, start_ms


def _fits(rooms: list[_Room], shape: Shape, fleet: Fleet, now_ms: int) -> tuple[frozenset[int], int] | None:
    """Return the hosts that together hold the whole shape first, and from when on; None if they never do.

    The remaining time of a host counts for less the more of it is idle: one that was emptied in part for a reservation
    is not left for one that looks free a little sooner. Jobs that outlive their estimates would send a reservation to
    and fro for ever.
    """
    has: dict[int, int] = {}
    left, start_ms = shape.together, now_ms
    busy = {num: _busy(fleet.hosts[num]) for _, num, _ in rooms}
    rows = [(now_ms + (at - now_ms) * busy[num][0] // busy[num][1], at, num, room) for at, num, room in rooms]
    for _, at, num, room in sorted(rows):
        left -= max(0, room - has.get(num, 0))
        has[num], start_ms = max(room, has.get(num, 0)), max(start_ms, at)
        if left <= 0:
            return frozenset(has), start_ms
    return None


def _busy(host: Host) -> tuple[int, int]:
    """Return which part of a host is in use, as (part, whole); by processors where it has no devices."""
    if host.cls.devices:
        return len(host.cls.devices) - host.open.bit_count(), len(host.cls.devices)
    return (host.cpu_milli - max(0, host.cpu_free), host.cpu_milli) if host.cpu_milli else (1, 1)


def _rooms(row: _Row, shape: Shape, estimates: Estimates, now_ms: int) -> Iterator[_Room]:
    """Yield how many replicas fit from when on, as the attempts whose end is known leave one after the other."""
    now, emptied, num, host = row
    if now:
        yield now_ms, num, now
    if emptied <= now:
        return
    attempts = host.worker.attempts.values()
    ends = sorted(estimates.ends_of(attempts, now_ms))
    if shape.mode > EXCLUSIVE:
        if ends and ends[-1][0] < FOREVER_MS:  # shared devices: only once all have left
            yield ends[-1][0], num, emptied
        return
    mask, last = host.cls.fit(shape).mask, now
    opens, ended = mask & host.lent & ~(host.shut | host.awaited), 0
    # by attempt the slots that later ends leave: a device with several sharers is free once the last of them has left
    later = list(accumulate((row[1] for row in reversed(ends)), or_, initial=0))[-2::-1]
    cpu = rest = memory = 0
    of_host = bool(shape.cpu_milli or shape.memory_mib)
    if of_host:  # not what the host has free: that counts an attempt that leaves in this record, as its end here does
        cpu = host.cpu_milli - sum([row[2] for row in ends])
        rest = host.cpu_of(shape) - sum([row[2] for row in ends if not row[1]])
        memory = host.memory_mib - sum([row[3] for row in ends])
    for (at, slots, cpu_milli, memory_mib), held in zip(ends, later, strict=True):
        if at >= FOREVER_MS:
            return
        ended |= slots
        cpu, memory = cpu + cpu_milli, memory + memory_mib
        rest += 0 if slots else cpu_milli
        open_ = (host.open | ended & opens & ~held) & mask
        room = min(host.cls.rooms(open_, shape), emptied)
        if of_host:
            room = host.within(shape, room, cpu if shape.count else min(cpu, rest), memory)
        if room > last:
            last = room
            yield at, num, room
