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

#: hosts that are expected to be free some time and compared for one reservation, and so many times what it needs where
#: that is more; of so many hosts, as it takes a look at all that runs there
LOOKED_MAX: Final = 64
LOOKED_TIMES: Final = 4
READ_MAX: Final = 512
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


#: replicas of a shape that fit now, that would on the host emptied, the host's number, the host
_Row = tuple[int, int, int, Host]
#: ledger ms, a host's number, how many replicas fit there from then on
_Room = tuple[int, int, int]


def _capable(fleet: Fleet, shape: Shape, excluded: frozenset[int]) -> list[_Row]:
    """The hosts that could run some of it, the likely ones first; none of `excluded`."""
    capable = [
        (host.replicas_of(shape, "now"), host.replicas_of(shape, "emptied"), host.worker.num, host)
        for cls, _ in fleet.capable(shape)
        for host in cls.hosts.values()
        if host.usable and host.worker.num not in excluded
    ]
    # most of what it needs is free first; of hosts alike the one with the least in the way
    capable.sort(key=lambda row: (-min(row[0], shape.together), row[1] - row[0], row[2]))
    return capable


def soonest(
    fleet: Fleet, shape: Shape, excluded: frozenset[int], estimates: Estimates, now_ms: int
) -> tuple[frozenset[int], int] | None:
    """Return the hosts on which all of it is expected to fit soonest, and the ledger ms; None where nothing tells.

    None of `excluded`, on which it may not start. It walks the fleet: at most once a second, and only while a job is
    overdue.
    """
    capable = _capable(fleet, shape, excluded)
    most = max((row[1] for row in capable), default=0)
    wanted = max(LOOKED_MAX, LOOKED_TIMES * -(-shape.together // most)) if most else 0
    rooms: list[_Room] = []
    for row in capable[: max(READ_MAX, wanted)]:
        found = list(_rooms(row, shape, estimates, now_ms))
        rooms += found
        wanted -= bool(found)
        if wanted <= 0:
            break
    return _fits(rooms, shape)


def expected(
    fleet: Fleet, shape: Shape, hosts: frozenset[int], excluded: frozenset[int], estimates: Estimates, now_ms: int
) -> int | None:
    """Return when these hosts are expected to hold all of it; None where nothing tells. Those `excluded` never do."""
    found = [fleet.hosts[num] for num in hosts - excluded if num in fleet.hosts]
    rows = [
        (host.replicas_of(shape, "now"), host.replicas_of(shape, "emptied"), host.worker.num, host)
        for host in found
        if host.usable
    ]
    fits = _fits([room for row in rows for room in _rooms(row, shape, estimates, now_ms)], shape)
    return fits[1] if fits is not None else None


def _fits(rooms: list[_Room], shape: Shape) -> tuple[frozenset[int], int] | None:
    """Return the hosts of these that hold all of it first, and from when on; None where they never do."""
    has: dict[int, int] = {}
    left = shape.together
    for at, num, room in sorted(rooms):
        left -= max(0, room - has.get(num, 0))
        has[num] = max(room, has.get(num, 0))
        if left <= 0:
            return frozenset(has), at
    return None


def _rooms(row: _Row, shape: Shape, estimates: Estimates, now_ms: int) -> Iterator[_Room]:
    """How many fit when, as the members leave one after the other that are known to."""
    now, emptied, num, host = row
    if now:
        yield now_ms, num, now
    if emptied <= now:
        return
    members = host.worker.members.values()
    ends = sorted(estimates.ends_of(members, now_ms))
    if shape.mode != EXCLUSIVE or not shape.count:
        if ends and len(ends) == len(members):  # sharers and processors: when all have left
            yield ends[-1][0], num, emptied
        return
    mask, open_, last = host.cls.fit(shape).mask, host.open, now
    opens, count = mask & host.lent & ~(host.shut | host.twice), shape.count
    for at, freed in ends:
        open_ |= freed & opens
        room = min((open_ & mask).bit_count() // count, emptied)
        if room > last:
            last = room
            yield at, num, room
