"""When running jobs leave room for a shape: the expected time, for reservations, and a lower bound, for admission.

The lower bound serves to refuse jobs that cannot start in time, so it is optimistic wherever something is unknown. It
ignores the queue, limits and shares, counts jobs of lower priority and jobs that are asked to end as gone, and assumes
that each member ends after the shortest run ever seen of its kind (among runs that lasted as long as it already has),
or at its time limit or deadline. A bound is given only if enough such runs were seen. If a closed worker could run the
shape there is none, since it may open at any moment; nor if a device could that is in other use or not well, or that a
guest may get beside a frozen job; nor if guaranteed GPUs can be taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from operator import or_
from typing import Final

from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import EXCLUSIVE, Host
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.began import began_ms
from moorage.scheduler.core.ledger.state import AT_EXITED, AT_RUNNING, CANCELLING, ENDING, Member, State
from moorage.scheduler.core.schedule.runtime import FOREVER_MS, Estimates
from moorage.schemas.capabilities import takes_guests

#: for one reservation, compare at most this many hosts that will be free, or the second number times the hosts it needs
#: if that is more; read at most `READ_MAX` hosts, since each read examines all that runs there
LOOKED_MAX: Final = 64
LOOKED_TIMES: Final = 4
READ_MAX: Final = 512
#: how many runs must have been seen before the shortest of them counts as a bound
SAMPLES_SURE: Final = 8
#: with more members to examine than this, no bound is given
MEMBERS_MAX: Final = 4_096
#: hosts and members examined within one second of the ledger; beyond it no bound is given and no job is refused, so
#: that admission does not hold up the leader
LOOKED_A_SECOND_MAX: Final = 2 * MEMBERS_MAX

#: the shortest time that a member still runs, in ms; 0 if unknown
Least = Callable[[Member], int]


def soonest_ms(fleet: Fleet, shape: Shape, least: Least) -> tuple[int, int]:
    """Return in how many ms the fleet could hold the shape (a gang whole), and how many hosts and members were read.

    The time is 0 for now, and where no bound can be given.
    """
    missing, members, hosts = shape.together, 0, 0
    frees: list[tuple[int, int]] = []  # (after how many ms, how many more replicas fit)
    for cls, _ in fleet.capable(shape):
        for host in cls.hosts.values():
            hosts += 1
            members += len(host.worker.members)
            if not host.usable or host.waiting or members > MEMBERS_MAX or _may_open(host, shape):
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
    return 0, hosts + members  # it waits for something other than running jobs


def _may_open(host: Host, shape: Shape) -> bool:
    """Return whether a device for the shape may become free at any moment, though no job ends."""
    fit = host.cls.fit(shape).mask & host.lent
    lends = shape.guest and takes_guests(host.worker.hello, shape.driver)
    return bool(fit if lends else fit & host.shut)


def _frees(host: Host, shape: Shape, least: Least) -> list[tuple[int, int]]:
    """Return (after how many ms, how many more replicas) for this host as its members end one after the other."""
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
        most = host.within(shape, most, cpu, memory)
        if most > rooms:
            found.append((after_ms, most - rooms))
            rooms = most
    return found


class Soonest:
    """Gives a lower bound of the time until a shape could start, ignoring the queue before it."""

    def __init__(self, state: State, fleet: Fleet, estimates: Estimates, *, reclaims: bool) -> None:
        self._reclaims = reclaims
        self._state = state
        self._fleet = fleet
        self._estimates = estimates
        self._second = -1  # the ledger second, and how many hosts and members may still be examined in it
        self._left = 0

    def of(self, shape: Shape, priority: int) -> int:
        """Return the bound in ms; 0 for now or no bound. Valid only once every worker was heard from in this term."""
        second = self._state.time_ms // 1000
        if second != self._second:
            self._second, self._left = second, LOOKED_A_SECOND_MAX
        if self._left <= 0 or self._reclaims:
            return 0
        after_ms, looked = soonest_ms(self._fleet, shape, lambda member: self._least_ms(member, priority))
        self._left -= looked
        return after_ms

    def _least_ms(self, member: Member, priority: int) -> int:
        """Return how long a member runs at least from now, in ms; 0 if unknown, or if it ends or may be preempted.

        A member of lower priority counts as preempted, whatever the settings.
        """
        job, runs_as = member.replica.job, self._estimates.runs_as(member)
        given = job.priority if job.priority >= 0 else runs_as.priority
        if member.phase == AT_EXITED or member.replica.state in (ENDING, CANCELLING) or given < priority:
            return 0
        elapsed_ms = 0
        if member.phase == AT_RUNNING:
            since_ms = runs_as.since_ms if runs_as.since_ms >= 0 else began_ms(member, job.accepted_ms)
            elapsed_ms = max(0, self._state.time_ms - since_ms)
        least_ms = self._estimates.durations.least_left_ms(runs_as.groups, elapsed_ms, SAMPLES_SURE)
        if runs_as.limit_ms is not None:
            least_ms = min(least_ms, max(0, runs_as.limit_ms - elapsed_ms))
        if job.deadline_ms is not None:
            least_ms = min(least_ms, max(0, job.deadline_ms - self._state.time_ms))
        return least_ms


#: (replicas that fit now, replicas that fit if it were emptied, host number, host)
_Row = tuple[int, int, int, Host]
#: (ledger ms, host number, replicas that fit from then on)
_Room = tuple[int, int, int]


def _capable(fleet: Fleet, shape: Shape, excluded: frozenset[int]) -> list[_Row]:
    """Return rows of the hosts outside `excluded` that could run some of the shape, the most promising first."""
    capable = [
        (host.replicas_of(shape, "now"), host.replicas_of(shape, "emptied"), host.worker.num, host)
        for host, _ in fleet.usable(shape, excluded)
    ]
    # first those with most of the needed room free; of equal ones, those with the least running in the way
    capable.sort(key=lambda row: (-min(row[0], shape.together), row[1] - row[0], row[2]))
    return capable


def soonest(
    fleet: Fleet, shape: Shape, excluded: frozenset[int], estimates: Estimates, now_ms: int
) -> tuple[frozenset[int], int] | None:
    """Return the hosts on which all of the shape is expected to fit soonest, and the ledger ms; None if unknown.

    Hosts in `excluded` are not used. This walks the fleet: at most once a second, and only while a job is overdue.
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
    """Return the ledger ms from which these hosts, less `excluded`, are expected to hold the whole shape.

    None if unknown.
    """
    found = [fleet.hosts[num] for num in hosts - excluded if num in fleet.hosts]
    rows = [
        (host.replicas_of(shape, "now"), host.replicas_of(shape, "emptied"), host.worker.num, host)
        for host in found
        if host.usable
    ]
    fits = _fits([room for row in rows for room in _rooms(row, shape, estimates, now_ms)], shape)
    return fits[1] if fits is not None else None


def _fits(rooms: list[_Room], shape: Shape) -> tuple[frozenset[int], int] | None:
    """Return the hosts that together hold the whole shape first, and from when on; None if they never do."""
    has: dict[int, int] = {}
    left = shape.together
    for at, num, room in sorted(rooms):
        left -= max(0, room - has.get(num, 0))
        has[num] = max(room, has.get(num, 0))
        if left <= 0:
            return frozenset(has), at
    return None


def _rooms(row: _Row, shape: Shape, estimates: Estimates, now_ms: int) -> Iterator[_Room]:
    """Yield how many replicas fit from when on, as the members whose end is known leave one after the other."""
    now, emptied, num, host = row
    if now:
        yield now_ms, num, now
    if emptied <= now:
        return
    members = host.worker.members.values()
    ends = sorted(estimates.ends_of(members, now_ms))
    if shape.mode > EXCLUSIVE:
        if ends and ends[-1][0] < FOREVER_MS:  # shared devices: only once all have left
            yield ends[-1][0], num, emptied
        return
    mask, last = host.cls.fit(shape).mask, now
    opens, ended = mask & host.lent & ~(host.shut | host.twice), 0
    # by member the slots that later ends leave: a device with several sharers is free once the last of them has left
    later = list(accumulate((row[1] for row in reversed(ends)), or_, initial=0))[-2::-1]
    # not what the host has free: that counts a member that leaves in this record, which is among the ends, too
    cpu = host.cpu_milli - sum(row[2] for row in ends)
    memory = host.memory_mib - sum(row[3] for row in ends)
    for (at, slots, cpu_milli, memory_mib), held in zip(ends, later, strict=True):
        if at >= FOREVER_MS:
            return
        ended |= slots
        cpu, memory = cpu + cpu_milli, memory + memory_mib
        open_ = (host.open | ended & opens & ~held) & mask
        room = host.within(shape, min(host.cls.rooms(open_, shape), emptied), cpu, memory)
        if room > last:
            last = room
            yield at, num, room
