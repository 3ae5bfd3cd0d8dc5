"""When what runs leaves room for a shape: when it will as a rule, for reservations, and the soonest that it could.

The soonest is a lower bound, for refusing what cannot start in time. It is optimistic in every doubt: the queue ahead,
limits and shares count as nothing, jobs of a lower priority as gone, and each member as over after the shortest run
that was ever seen of its kind (and lasted as long as it has). Only where enough such runs were seen does a bound stand;
a worker that could run it and is closed may open at any moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from moorage.scheduler.core.fleet import Fleet
from moorage.scheduler.core.host import EXCLUSIVE, Host
from moorage.scheduler.core.schedule.runtime import Estimates
from moorage.scheduler.core.shape import Shape
from moorage.scheduler.core.state import AT_EXITED, AT_RUNNING, Member, State, started_ms

#: hosts whose members' ends are looked at for one reservation, and so many times what it needs where that is more
LOOKED_MAX: Final = 64
LOOKED_TIMES: Final = 4
#: runs that must have been seen before the shortest of them bounds anything
SAMPLES_SURE: Final = 8
#: members that are looked at; with more of them no bound is found
MEMBERS_MAX: Final = 4_096
#: hosts and members that are looked at in one second of the ledger, for whatever is asked: more would hold up the
#: leader. Behind that no bound is found, and no job is refused
LOOKED_A_SECOND_MAX: Final = 2 * MEMBERS_MAX

#: how long a member lasts at least from now, in ms; 0 where nothing is sure
Least = Callable[[Member], int]


def soonest_ms(fleet: Fleet, shape: Shape, least: Least) -> tuple[int, int]:
    """In how many ms the fleet could hold it, all of it for a gang; 0 for now, and where no bound stands.

    And how many hosts and members were looked at for that.
    """
    missing, members, hosts = shape.together, 0, 0
    frees: list[tuple[int, int]] = []  # after how many ms, and how many replicas more
    for cls, _ in fleet.capable(shape):
        for host in cls.hosts.values():
            hosts += 1
            members += len(host.worker.members)
            if not host.usable or host.waiting or members > MEMBERS_MAX:
                return 0, hosts + members
            missing -= host.replicas_of(shape, "now")
            frees += _frees(host, shape, least)
    if missing <= 0:
        return 0, hosts + members
    frees.sort()
    for after_ms, more in frees:
        missing -= more
        if missing <= 0:
            return after_ms, hosts + members
    return 0, hosts + members  # it is not what runs that it waits for


def _frees(host: Host, shape: Shape, least: Least) -> list[tuple[int, int]]:
    """When this host holds how many more, as its members end one after the other."""
    ends = sorted(
        ((least(member), member.fence, member) for member in host.worker.members.values()), key=lambda e: e[:2]
    )
    rooms, open_ = host.replicas_of(shape, "now"), host.open
    cpu, memory = host.cpu_free, host.memory_free
    fit = host.cls.fit(shape).mask
    found: list[tuple[int, int]] = []
    for after_ms, _, member in ends:
        open_ |= member.mask & host.lent & ~host.shut
        asked = member.replica.job.shape
        assert isinstance(asked, Shape)
        cpu, memory = cpu + asked.cpu_milli, memory + asked.memory_mib
        most = host.replicas_of(shape, "ever")
        if shape.count:
            places = host.cls.places(open_ & fit, shape)
            shared = len(host.shared) * host.cls.sharers(shape.mode) if shape.mode > EXCLUSIVE else 0
            most = min(most, (places + shared) // shape.count)
        if shape.cpu_milli and host.cpu_milli:
            most = min(most, cpu // shape.cpu_milli)
        if shape.memory_mib and host.memory_mib:
            most = min(most, memory // shape.memory_mib)
        if most > rooms:
            found.append((after_ms, most - rooms))
            rooms = most
    return found


class Soonest:
    """How soon something could start at the earliest, whoever waits before it."""

    def __init__(self, state: State, fleet: Fleet, estimates: Estimates) -> None:
        self._state = state
        self._fleet = fleet
        self._estimates = estimates
        self._second = -1  # of the ledger, and how many hosts and members may still be looked at in it
        self._left = 0

    def of(self, shape: Shape, priority: int) -> int:
        """In how many ms, where every worker was heard in this reign; 0 for now, and where no bound stands."""
        second = self._state.time_ms // 1000
        if second != self._second:
            self._second, self._left = second, LOOKED_A_SECOND_MAX
        if self._left <= 0:
            return 0
        after_ms, looked = soonest_ms(self._fleet, shape, lambda member: self._least_ms(member, priority))
        self._left -= looked
        return after_ms

    def _least_ms(self, member: Member, priority: int) -> int:
        """How long a member lasts at least, by what was seen; 0 where nothing is sure, or where it may be preempted."""
        job, runs_as = member.replica.job, self._estimates.runs_as(member)
        given = job.priority if job.priority >= 0 else runs_as.priority
        if member.phase == AT_EXITED or given < priority:
            return 0
        elapsed_ms = 0
        if member.phase == AT_RUNNING:
            since_ms = runs_as.since_ms if runs_as.since_ms >= 0 else started_ms(job, member)
            elapsed_ms = max(0, self._state.time_ms - since_ms)
        return self._estimates.durations.least_left_ms(runs_as.groups, elapsed_ms, SAMPLES_SURE)


def still_holds(fleet: Fleet, shape: Shape, hosts: frozenset[int], barred: frozenset[int]) -> bool:
    """Whether these hosts could hold all of it, once our jobs have left them; none of `barred`."""
    found = [fleet.hosts[num] for num in hosts - barred if num in fleet.hosts]
    room = sum(host.replicas_of(shape, "emptied") for host in found if host.usable)
    return room >= shape.together


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
    """Return the hosts on which all of it would fit soonest, and when; no hosts where none could hold it.

    None of `barred`, on which it may not start. It walks the fleet: at most once a second, and only while a job is
    overdue.
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


def expected(
    fleet: Fleet, shape: Shape, hosts: frozenset[int], barred: frozenset[int], estimates: Estimates, now_ms: int
) -> int | None:
    """Return when these hosts will hold all of it, as far as anything tells; those of `barred` never do."""
    rooms = sorted(
        (at, not sure, num, room)
        for num in hosts - barred
        if (host := fleet.hosts.get(num)) is not None and host.usable
        for at, sure, room in _rooms(
            host, shape, host.replicas_of(shape, "now"), host.replicas_of(shape, "emptied"), estimates, now_ms
        )
    )
    has: dict[int, int] = {}
    unsure: dict[int, bool] = {}
    left = shape.together
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
