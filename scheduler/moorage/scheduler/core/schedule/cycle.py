"""One scheduling cycle (a pass): each queue group in its order is placed, or waits with a verdict.

`order` says which group is next, `verdicts` which need not be served as nothing has changed for them, `reserve` which
hosts are closed to it, `placing` where it goes; what found no room then may end other jobs (`preempt`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum, auto
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, NamedTuple

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet import Fleet
from moorage.scheduler.core.queue.order import QueueOrder
from moorage.scheduler.core.queue.queue import REPLICA_BITS, VOID, Group, Key, Queue, Waits
from moorage.scheduler.core.rank.ranker import Choice, Ranker
from moorage.scheduler.core.schedule.placing import Placing
from moorage.scheduler.core.schedule.preempt import Preempting
from moorage.scheduler.core.schedule.reserve import Backfilling, Reserving
from moorage.scheduler.core.schedule.runtime import Estimates
from moorage.scheduler.core.schedule.verdicts import Verdicts
from moorage.scheduler.core.shape import Shape

#: choices that one pass makes, as they hold up the leader: then the record goes, and the next one goes on
CHOICES_MAX: Final = 192
#: groups that find no room, each of which counts `A_LOOK` times where the ranker had to look: many groups that all ask
#: for something else are looked at over several records
IN_VAIN_MAX: Final = 1_024
#: entries of a group that are passed over in a pass as they could not end before a drain
ASIDE_MAX: Final = 64
#: of the groups that a pass has still to look at, the part that is passed over one by one before all such go at once
SWEEP_PART: Final = 16
#: entries of the queue that one record looks at for jobs that wait no longer
SWEPT_MAX: Final = 8_192
_NONE: Final = -2  # no change of the fleet: in strict order the group that comes first is served whatever its verdict


class End(Enum):
    """Why a pass leaves a group."""

    ALL_SERVED = auto()
    OTHERS_FIRST = auto()  # another group's first job comes before the one that is first here now
    OVER_LIMIT = auto()  # the tenant's
    NO_ROOM = auto()


class Served(NamedTuple):
    """What a pass did for one queue group: replicas placed, in their turn or backfilled, and its key now."""

    placed: int
    end: End
    key: Key


class Planner:
    """Places what fits now, in order of priority, of fair share where shares are set, and of arrival.

    `could_ever` says whether the fleet could hold a shape if it were empty.
    """

    def __init__(
        self,
        fleet: Fleet,
        queue: Queue,
        ranker: Ranker,
        estimates: Estimates,
        preempting: Preempting,
        order: QueueOrder,
        could_ever: Callable[[Shape], bool],
        patience_ms: int,
    ) -> None:
        self.fleet = fleet
        self.queue = queue
        self.estimates = estimates
        self.preempting = preempting
        self.could_ever = could_ever
        self.order = order
        self.reserving = Reserving(fleet, self.order, estimates, preempting, patience_ms, could_ever)
        self.placing = Placing(fleet, self.order, ranker)
        self.backfilling = Backfilling(queue, self.order, self.reserving, self.placing, estimates)
        self.verdicts = Verdicts(fleet, self.order, self.reserving)
        self._unprepared = False  # the ranker is not ready to choose
        self.serving: Group | None = None  # the group that a pass is at, for when it fails
        self._in_vain_max = IN_VAIN_MAX
        self._waiting = 0  # groups that the last pass had to look at

    def is_done(self, draft: Draft) -> bool:
        """Whether nothing more may be placed in this record; groups that were not served are served in the next."""
        placing = self.placing
        if self._unprepared:
            return True
        return placing.spent > CHOICES_MAX or placing.in_vain > self._in_vain_max or draft.full

    def plan(self, draft: Draft) -> int:
        """Run one scheduling cycle: write placements into the draft. Return how many replicas were placed."""
        cut = self.placing.in_vain > self._in_vain_max
        if not self._begin(draft):
            return 0
        order, verdicts, placed, passed = self.order, self.verdicts, 0, 0
        strict = order.is_strict
        if strict:
            ready = self.queue.ready(order.key, _NONE, lambda group: False)
        else:
            ready = self.queue.ready(order.key, self.fleet.changes, lambda group: verdicts.holds(draft, group))
        self._bound(cut, len(ready))
        while ready and not self.is_done(draft):
            key, first, group = ready[0]
            self.serving = group
            if verdicts.is_like_full(draft, group):
                heappop(ready)
                passed += order.room(draft, group) == math.inf
                if passed * SWEEP_PART >= len(ready):
                    ready, passed = self._without_full(draft, ready), 0
                continue
            if (now := order.key(group)) != key:
                heapreplace(ready, (now, group.entries[0], group))
                continue
            if strict and verdicts.is_new(group) and order.may(draft, group):
                if not order.prune(draft, group) or group.entries[0] != first:
                    self._serve_the_next(ready, group)  # the job that found no room has left, and stops no other job
                    continue
                served = Served(0, End.NO_ROOM, key)
            else:
                others = min(ready[1:3])[:2] if len(ready) > 1 else None  # the heap's root aside, its least
                kind = verdicts.kind_of(group)
                served = self._serve(draft, group, others)
                if served.end is End.NO_ROOM and not strict:
                    verdicts.no_room_for(draft, kind, group)
            placed += served.placed
            if strict and served.end is End.NO_ROOM and self.could_ever(group.shape):
                placed += self._place_freed(draft)
                break  # in strict order no job passes the first one, but on hosts that were freed for it
            if served.end is End.OTHERS_FIRST:
                heapreplace(ready, (served.key, group.entries[0], group))
            else:
                heappop(ready)
            if served.end is End.OVER_LIMIT and self.could_ever(group.shape):
                order.over_limit(draft, group)
        self.serving = None
        if self.preempting.allowed and not draft.full:
            self.preempting.seek(draft, lambda: self._eligible(draft), lambda group: self._closed_to(draft, group))
        return placed

    def next_ms(self, draft: Draft) -> float:
        """Return from which ledger ms on a pass may come to another result though nothing happens; infinity for never.

        Where running jobs may be ended for others, or jobs age, that may be at any time.
        """
        if self.queue.is_empty:
            return math.inf
        if self.preempting.allowed or draft.state.preempting or self.order.ageing is not None:
            return draft.time_ms
        return self.reserving.next_ms(draft)

    def _begin(self, draft: Draft) -> bool:
        """Begin a pass. Return False where there is nothing to place, or the ranker is not ready to choose."""
        self.placing.begin()
        self.serving, self._unprepared = None, False
        if self.queue.is_empty:
            self.queue.groups.clear()
            self.reserving.give_up()
            return False
        self.order.begin(draft)
        self.reserving.begin(draft)  # by the limits that jobs waited for in the last pass
        self.order.forget_limits()
        self._unprepared = not self.placing.ranker.prepare(self.fleet)
        self.verdicts.begin()
        return not self._unprepared

    def _serve_the_next(self, ready: list[tuple[Key, int, Group]], group: Group) -> None:
        """In strict order: the next job of a group has its turn, which is later; the verdict was of the one before it.

        Unless that one found no room at all: then the next one of the same shape does not find any.
        """
        heappop(ready)
        if group.entries:
            if group.verdict.waits is not Waits.NO_ROOM:
                group.verdict = VOID
            heappush(ready, (self.order.key(group), group.entries[0], group))

    def _bound(self, cut: bool, waiting: int) -> None:
        """How often this pass may look in vain, of so many groups, after one that did so as often as it might.

        A group that found no room is not served again, so each pass comes further. Where it does not, as the whole
        fleet has changed meanwhile, it may look twice as often: each group is served some time.
        """
        further = not cut or waiting < self._waiting
        self._in_vain_max = max(IN_VAIN_MAX, self._in_vain_max // 2) if further else 2 * self._in_vain_max
        self._waiting = waiting

    def _without_full(self, draft: Draft, ready: list[tuple[Key, int, Group]]) -> list[tuple[Key, int, Group]]:
        """Return the groups that are still to be served; one over its tenant's limit is left out at its turn."""
        room, is_like_full = self.order.room, self.verdicts.is_like_full
        left = [row for row in ready if room(draft, row[2]) != math.inf or not is_like_full(draft, row[2])]
        heapify(left)
        return left

    def _serve(self, draft: Draft, group: Group, others: tuple[Key, int] | None) -> Served:
        """Place from the front of one queue group until the first job of another one, `others`, comes before it."""
        order, queue, placing = self.order, self.queue, self.placing
        placed, filled, first, end = 0, 0, 0, End.ALL_SERVED
        last: Choice | None = None
        aside: list[int] = []
        need, room, key = group.shape.gpus, order.room(draft, group), order.key(group)
        while order.prune(draft, group) and not self.is_done(draft):
            item, key = group.entries[0], order.key(group)
            if others is not None and not aside and (key, item) > others:
                end = End.OTHERS_FIRST
                break
            if need > room:
                end = End.OVER_LIMIT
                break
            choice = self._place_first(draft, group)
            if choice is None:
                if self._stands_aside(draft, group, aside):
                    continue
                filled, end = self.backfilling.backfill(draft, group, room), End.NO_ROOM
                break
            last, first = choice, first or item >> REPLICA_BITS
            placed += group.shape.together
            room -= need
            order.count(draft, group, group.shape.together)
            most = len(group.entries) if room == math.inf or not need else int(room // need)
            most = min(most, order.most(group, others))
            if group.entries and room >= need and most > 0:
                more, last = placing.place_more(draft, group, choice, most, others)
                placed += more
                room -= more * need
                order.count(draft, group, more)
        if last is not None:
            # flat, four a decision: first job, how many were placed, hosts known, free devices left on the last
            draft.evidence += (first, placed, len(self.fleet.hosts), last.left)
        if aside:
            queue.put_back(group, aside)
            filled += 0 if end is End.NO_ROOM else self.backfilling.backfill(draft, group, room)
        return Served(placed + filled, end, key)

    def _place_first(self, draft: Draft, group: Group) -> Choice | None:
        """Place the first job of a queue group; None where it finds no room, and stays."""
        if not self.order.is_strict and self.verdicts.finds_none(draft, group):
            self.placing.in_vain += 1
            return None
        excluded = self.reserving.excluded(group.priority, group.shape, group.tenant)
        choice = self.placing.place(draft, group.shape, group.entries[0], excluded)
        if choice is not None:
            self.queue.pop(group)
        return choice

    def _place_freed(self, draft: Draft) -> int:
        """Place the jobs that others have ended for, on the hosts that were freed for them. Return how many replicas.

        In strict order, where another job comes first: often the one that ended, which waits again in its old place.
        """
        placed, hosts = 0, self.fleet.hosts
        for job in draft.state.preempting.values():
            shape, priority = self.preempting.policy.shape_of(job), self.preempting.policy.priority_of(job)
            group = self.queue.group_of(priority, shape, job.tenant)
            if self.is_done(draft) or group is None or not self.order.prune(draft, group):
                continue
            if not self.order.may(draft, group):
                continue
            own = self.preempting.own(draft, shape, priority, job.tenant) & hosts.keys()
            if sum(hosts[num].replicas_of(shape, "now") for num in own) < shape.together:
                continue
            closed = self.reserving.excluded(priority, shape, job.tenant) | (hosts.keys() - own)
            if self.placing.place(draft, shape, group.entries[0], closed) is not None:
                self.queue.pop(group)
                self.order.count(draft, group, shape.together)
                placed += shape.together
        return placed

    def _stands_aside(self, draft: Draft, group: Group, aside: list[int]) -> bool:
        """Whether the first job of a group, which finds no room, lets others of it go first; it is among `aside` then.

        So where a drain keeps it from hosts, as it could not end before: a job behind it may have another time limit.
        Else the group has its verdict.
        """
        strict, limited = self.order.is_strict, bool(self.order.kept_from(draft, group.entries[0]))
        if limited and not strict and len(aside) < ASIDE_MAX:
            aside.append(self.queue.pop(group))
            return True
        self.verdicts.give(group, Waits.LEAVING if strict and limited else Waits.NO_ROOM)
        return False

    # ---------------------------------------------------------------------------------------- preemption

    def _eligible(self, draft: Draft) -> list[tuple[Key, int, Group]]:
        """Return the groups that found no room, or whose first waits out a drain, if their tenants may start them."""
        order = self.order
        return [
            (order.key(group), group.entries[0], group)
            for group in self.queue.groups.values()
            if order.prune(draft, group)
            and (self.verdicts.is_new(group) or order.kept_from(draft, group.entries[0]))
            and order.may(draft, group)
        ]

    def _closed_to(self, draft: Draft, group: Group) -> frozenset[int]:
        """Return the hosts on which the first job of a group may not start, also if all jobs leave them."""
        return self.reserving.excluded(group.priority, group.shape, group.tenant) | self.order.kept_from(
            draft, group.entries[0]
        )

    def sweep(self, draft: Draft) -> bool:
        """Take out of the queue what no longer waits: cancels would else fill a group whose head is blocked.

        Some thousands of entries a record; whether all were looked at.
        """
        jobs, fresh = draft.state.jobs, draft.state.next_num

        def is_over(num: int) -> bool:
            job = jobs.get(num)
            return job.over if job is not None else num < fresh

        return self.queue.sweep(is_over, lambda item: self.order.waits(draft, item), SWEPT_MAX)
