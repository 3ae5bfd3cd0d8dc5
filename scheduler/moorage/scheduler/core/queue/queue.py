"""The queue: groups of jobs of one priority, shape and tenant, by arrival. Each group is tried only once a pass.

A group that found no room is skipped until something changes that may help it. It holds numbers of jobs, each of which
may place something now; a hundred thousand of them cost the garbage collector nothing. Limits, holds and shares are a
tenant's, so they are checked once for each group.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final, NamedTuple

from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.fairkeys import parts_of
from moorage.scheduler.core.ledger.state import QUEUED, Attempt, Job
from moorage.schemas.ranges import NOTHING, Ranges, count_of, is_in

#: how many replicas a job may place that has no bound of its own
UNBOUNDED: Final = 1 << 30
#: with so many replicas of a job that came back at once, no new one is placed until some of them have been
BACK_MAX: Final = 1_000
#: each time that so many jobs of a group have ended, some while queued, a part of the group is cleared of such jobs
SPARE: Final = 1_000
PART: Final = 8_192

_NOWHERE: Final[frozenset[int]] = frozenset()

#: the sort key of queue groups, see `order`: smaller goes first
Key = tuple[int, ...]
#: what a group is known by: the priority, the shape, the owner: a tenant, or one of its fair keys
Kind = tuple[int, Shape, str]
_Name = tuple[int, int, str]  # (minus the priority, the shape's index, the owner)


class Verdict(NamedTuple):
    """That the first job of a queue group found no room; `schedule.verdicts` gives it, and says when it is void."""

    change: int  # the change number of the fleet at which it found none; -1: void
    plan: int = -1  # the number of the plans that keep it from reserved hosts with room; -1: none does
    turn: int = -1  # the plan at which some of its jobs had their turn at backfill; -1: all were tried


VOID: Final = Verdict(-1)


class Group:
    """The waiting jobs of one priority, shape and owner, by arrival."""

    __slots__ = (
        "cleared", "fair", "gone", "has_more", "jobs", "owner", "priority", "resumes", "shape", "tenant", "verdict",
    )  # fmt: skip

    def __init__(self, priority: int, shape: Shape, owner: str, jobs: Iterable[int] = ()) -> None:
        self.priority = priority
        self.shape = shape
        self.owner = owner
        self.tenant, self.fair = parts_of(owner)
        self.jobs = deque(jobs)  # numbers, ascending; nearly all jobs arrive in order and leave from the front
        self.gone = 0  # an upper bound of how many of them have ended since a part was cleared
        self.cleared = 0  # where the next part begins
        self.verdict = VOID
        self.has_more = False  # jobs were added since the verdict
        self.resumes: Attempt | None = None  # a frozen attempt that is to be resumed: its job is the only one

    def __lt__(self, other: Group) -> bool:
        """Return whether this group comes before another with an equal key: a fixed order.

        With ageing, a job that was moved stands in two groups with equal keys for a while.
        """
        return (self.priority, self.shape.index) > (other.priority, other.shape.index)


class Waiting:
    """What a job of several replicas may place: those that were never placed, and those of `back`.

    All but `back` is read from the job's row, so it follows each step of a record at once.
    """

    __slots__ = ("back", "is_full", "job", "most")

    pins = False  # each replica runs on one worker alone

    def __init__(self, job: Job, back: Iterable[int] = (), most: int | None = None) -> None:
        self.job = job
        self.back = list(back)  # numbers of the replicas that came back, and whose pause is over; ascending
        self.most = most  # how many may be on workers at once; None for all
        self.is_full = self.room <= 0  # when `opens` was asked last

    @property
    def fresh(self) -> Ranges:
        """The replicas that were never placed, and may be."""
        return NOTHING if self.job.back >= BACK_MAX else self.job.fresh

    @property
    def room(self) -> int:
        """How many more replicas may be on workers."""
        return UNBOUNDED if self.most is None else self.most - self.job.on_workers

    @property
    def count(self) -> int:
        """How many replicas wait for a host, now or once the job may place them."""
        return len(self.back) + count_of(self.fresh)

    @property
    def may(self) -> int:
        """How many replicas the job may place now."""
        return max(0, min(self.count, self.room))

    @property
    def may_any(self) -> bool:
        """Whether the job may place a replica now."""
        return self.room > 0 and bool(self.back or self.fresh)

    @property
    def first(self) -> int:
        """The number of the replica that is placed next."""
        back, fresh = self.back, self.fresh
        return back[0] if back and (not fresh or back[0] < fresh[0][0]) else fresh[0][0]

    @property
    def rests(self) -> bool:
        """Whether what is left waits for workers that are not here."""
        return False

    @property
    def others(self) -> frozenset[int]:
        """The workers on which the job is not to run, by number."""
        return _NOWHERE

    def opens(self) -> bool:
        """Return whether the job may place replicas, and could place none when this was asked last."""
        was_full, self.is_full = self.is_full, self.room <= 0
        return was_full and not self.is_full

    def prune(self, time_ms: int) -> None:
        """Let the first of those that came back be one that still waits: others were placed, or have ended."""
        back, rows = self.back, self.job.rows
        while back and ((row := rows.get(back[0])) is None or row.state != QUEUED or row.not_before > time_ms):
            del back[0]

    def come_back(self, number: int) -> None:
        """Put in a replica that came back, once its pause is over."""
        at = bisect_left(self.back, number)
        if at == len(self.back) or self.back[at] != number:
            self.back.insert(at, number)

    def has(self, number: int) -> bool:
        """Return whether this replica waits."""
        at = bisect_left(self.back, number)
        return self.back[at : at + 1] == [number] or is_in(self.fresh, number)


class Queue:
    """All queue groups. A job leaves its group at once with the last replica that it may place, or when it is held.

    One that ended while queued stays until a pass meets it, or its part of the group is cleared. So a caller that takes
    the first job of a group must check that it still waits.
    """

    def __init__(self, new_shape: Callable[[Shape], None] | None = None) -> None:
        #: called with the shape of each new group, before it is asked where that fits
        self._new_shape = new_shape
        self.groups: dict[_Name, Group] = {}
        #: by number, of each live job that may place several replicas, or another than number 0; any other job in a
        #: group places one, or the whole gang
        self.waiting: dict[int, Waiting] = {}

    def __len__(self) -> int:
        """Return the number of replicas and gangs that wait. It reads all jobs: for questions."""
        return sum(self.size(group) for group in self.groups.values())

    @property
    def jobs(self) -> int:
        """The number of jobs. It reads all queue groups."""
        return sum(len(group.jobs) for group in self.groups.values())

    @property
    def is_empty(self) -> bool:
        """Whether no job is queued; stops at the first group that has one."""
        return not any(group.jobs for group in self.groups.values())

    def may(self, num: int) -> int:
        """Return how many replicas, or gangs, a job in a group may place now."""
        waiting = self.waiting.get(num)
        return 1 if waiting is None else waiting.may

    def size(self, group: Group) -> int:
        """Return the number of replicas and gangs of a group that wait. It reads all its jobs."""
        several = self.waiting
        if not several:
            return len(group.jobs)
        return sum(several[num].count if num in several else 1 for num in group.jobs)

    def enter(self, num: int, kind: Kind) -> None:
        """Put a job into its queue group, at its place in the order of arrival, unless it is there."""
        priority, shape, owner = kind
        name = (-priority, shape.index, owner)
        group = self.groups.get(name)
        if shape.each_worker and group is not None:
            group.verdict = VOID  # that others found no room says nothing of other workers
        if group is None:
            group = self.groups[name] = Group(priority, shape, owner)
            if self._new_shape is not None:
                self._new_shape(shape)
        jobs = group.jobs
        if not jobs or num > jobs[-1]:
            jobs.append(num)
        elif num < jobs[0]:
            jobs.appendleft(num)
        elif jobs[at := bisect_left(jobs, num)] != num:  # back from a pause, among jobs that came meanwhile
            jobs.insert(at, num)
        else:
            return
        group.has_more = True

    def leave(self, num: int, kind: Kind) -> None:
        """Take a job out of its queue group, if it is there."""
        priority, shape, owner = kind
        group = self.groups.get((-priority, shape.index, owner))
        if group is None:
            return
        at = bisect_left(group.jobs, num)
        if at < len(group.jobs) and group.jobs[at] == num:
            del group.jobs[at]

    def drop(self, num: int) -> None:
        """Take a job out of the group that it is in, whichever that is."""
        for group in self.groups.values():
            self.leave(num, (group.priority, group.shape, group.owner))

    def first(self, num: int) -> int:
        """Return the number of the replica that a job in a group places next; 0 for a gang."""
        waiting = self.waiting.get(num)
        return 0 if waiting is None else waiting.first

    def placed(self, group: Group, num: int, time_ms: int) -> bool:
        """Take out the replica of a job that was placed just now; return whether the job stays in its group."""
        waiting, jobs = self.waiting.get(num), group.jobs
        if waiting is not None:
            if waiting.back:
                waiting.prune(time_ms)
            if waiting.may_any:
                return True
        if jobs[0] == num:
            jobs.popleft()
        else:
            del jobs[bisect_left(jobs, num)]
        return False

    def ended(self, kind: Kind, is_live: Callable[[int], bool]) -> None:
        """Note that a job of a group has ended, maybe while queued; now and then clear a part of the group."""
        group = self.group_of(*kind)
        if group is None or len(group.jobs) <= SPARE:
            return  # a pass takes out so few
        group.gone += 1
        if group.gone > SPARE:
            jobs, at = group.jobs, group.cleared if group.cleared < len(group.jobs) else 0
            live = list(filter(is_live, islice(jobs, at, at + PART)))
            group.jobs = deque([*islice(jobs, at), *live, *islice(jobs, at + PART, None)])
            group.gone, group.cleared = 0, at + len(live)

    def with_jobs(self) -> list[Group]:
        """Return the queue groups that have jobs; empty groups are removed."""
        found = [group for group in self.groups.values() if group.jobs]
        if len(found) < len(self.groups):
            self.groups = {name: group for name, group in self.groups.items() if group.jobs}
        return found

    def group_of(self, priority: int, shape: Shape, owner: str) -> Group | None:
        """Return the queue group that a job of this priority, shape and owner would join; None if there is none."""
        return self.groups.get((-priority, shape.index, owner))

    def before(self, priority: int, num: int, standing: Callable[[int, int], int]) -> int:
        """Return how many jobs come before this one.

        `standing` returns the effective priority of a job from its own priority and its number; within a group it never
        rises with later arrival.
        """
        mine, found = (-standing(priority, num), num), 0
        for group in self.groups.values():
            found += bisect_left(group.jobs, mine, key=_head_by(standing, group.priority))
        return found


def _head_by(standing: Callable[[int, int], int], priority: int) -> Callable[[int], tuple[int, int]]:
    return lambda num: (-standing(priority, num), num)
