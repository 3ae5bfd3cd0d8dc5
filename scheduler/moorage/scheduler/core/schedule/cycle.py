"""One scheduling cycle (a pass): serve the queue groups in order; each is placed, or gets a verdict and waits.

`order` says which group is next. `verdicts` says who may use which host, and which groups can be skipped because
nothing changed for them: read that first. `placing` says where a job goes, `backfill` places jobs on reserved hosts,
and `preempt` chooses which jobs to end for groups without room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from enum import Enum, auto
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from typing import Final, NamedTuple

from moorage.scheduler.core.containment import PLACING, PREEMPTING, RESERVING
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.fairkeys import owner_of
from moorage.scheduler.core.ledger.records import BORROWED, GUARANTEED, RIGHT_LEVEL
from moorage.scheduler.core.ledger.state import Attempt
from moorage.scheduler.core.lifecycle.frozen import Frozen
from moorage.scheduler.core.queue import limits, models
from moorage.scheduler.core.queue.limits import is_limited
from moorage.scheduler.core.queue.order import QueueOrder
from moorage.scheduler.core.queue.queue import UNBOUNDED, Group, Key, Queue
from moorage.scheduler.core.rank.ranker import Choice, Ranker
from moorage.scheduler.core.schedule.backfill import Backfilling
from moorage.scheduler.core.schedule.endless import Endless
from moorage.scheduler.core.schedule.placing import Placing
from moorage.scheduler.core.schedule.plan import Known
from moorage.scheduler.core.schedule.preempt import CANDIDATES_MAX, REPLICAS_MAX, Candidate, Preempting
from moorage.scheduler.core.schedule.runtime import Estimates
from moorage.scheduler.core.schedule.verdicts import Verdicts

#: failed searches in one pass, beyond which it goes on in the next record. A group counts `A_LOOK` if the ranker
#: searched, else one. It matters where many groups each ask for something different
IN_VAIN_MAX: Final = 1_024
#: jobs of a group that one pass skips because a drain would end them too soon
ASIDE_MAX: Final = 64
#: more than any ledger sequence: what waits for devices again comes before all entries of the queue, by this
LEDGER_END: Final = 1 << 62
#: once more than one in this many of the remaining groups was skipped one by one, all groups like them are removed at
#: once
SWEEP_PART: Final = 16


class End(Enum):
    """Why a pass leaves a group."""

    ALL_SERVED = auto()
    OTHERS_FIRST = auto()  # the first job of another group comes before the current first job of this one
    HAD_TURNS = auto()  # it took turns with groups like it; the heap of groups is as it is to be
    OVER_LIMIT = auto()  # the tenant's limit is reached
    NO_ROOM = auto()


class Served(NamedTuple):
    """The result of serving one queue group: how many replicas were placed or backfilled, and the group's key now."""

    placed: int
    end: End
    key: Key


#: a queue group that may find room, in a heap: its key, its first job, itself
Ready = tuple[Key, int, Group]


class Planner:
    """Places the jobs that fit now, ordered by priority, fair share and arrival.

    `could_ever` says whether the fleet could hold a shape if it were empty. `patience_ms` is the wait after which hosts
    may be reserved for a job. `begins` says whether to run a part of the pass now, or to leave it out.
    """

    def __init__(
        self,
        fleet: Fleet,
        queue: Queue,
        ranker: Ranker,
        estimates: Estimates,
        preempting: Preempting,
        order: QueueOrder,
        frozen: Frozen,
        could_ever: Callable[[Shape], bool],
        patience_ms: int,
        begins: Callable[[str, Draft], bool],
    ) -> None:
        self._begins = begins
        self.fleet = fleet
        self.queue = queue
        self.estimates = estimates
        self.preempting = preempting
        self.could_ever = could_ever
        self.order = order
        self.frozen = frozen
        known = Known(fleet, order, estimates, could_ever, preempting.policy.priority_of, patience_ms)
        self.verdicts = Verdicts(known, preempting)
        self.placing = Placing(fleet, self.order, ranker)
        self.backfilling = Backfilling(self.order, self.verdicts, self.placing, estimates)
        self._endless = Endless(order.state, estimates)
        self._unprepared = False  # the ranker is not ready to choose
        self.serving: Group | None = None  # the group being served, for containment when a pass fails
        self._in_vain_max = IN_VAIN_MAX
        #: in this pass, by worker number: the slots for which frozen attempts wait that are to be resumed first
        self._claimed: dict[int, int] = {}
        self._waiting = 0  # groups that the last pass had to serve
        self._knows_limits = False  # which jobs wait for the limits of their tenants, as of the last pass

    def is_done(self, draft: Draft) -> bool:
        """Return whether nothing more may be placed in this record; the remaining groups are served in the next one."""
        placing = self.placing
        if self._unprepared:
            return True
        return placing.spent > draft.state.ceilings.choices or placing.in_vain > self._in_vain_max or draft.full

    def plan(self, draft: Draft) -> int:
        """Run one cycle: write placements and preemptions into the draft. Return how many replicas were placed."""
        cut = self.placing.in_vain > self._in_vain_max
        if not self._begin(draft):
            return 0
        placed = self._serve_groups(draft, cut=cut)
        self.serving = None
        if self.preempting.allowed() and not draft.full and self._begins(PREEMPTING, draft):
            self.preempting.seek(draft, self._eligible, self._closed_to)
        return placed

    def _serve_groups(self, draft: Draft, *, cut: bool) -> int:
        """Place jobs of the groups that may find room, in order. Return how many replicas were placed."""
        order, verdicts, placed, passed = self.order, self.verdicts, 0, 0
        ready = verdicts.ready(order.key)
        self._bound(cut, len(ready))
        if self.fleet.with_frozen:
            self._add_frozen(ready)
        while ready and not self.is_done(draft):
            key, _, group = ready[0]
            self.serving = group
            if group.resumes is not None:
                heappop(ready)
                self._resume(draft, group, group.resumes)
                continue
            if verdicts.is_like_full(group):
                heappop(ready)
                passed += order.room(group) == math.inf
                if passed * SWEEP_PART >= len(ready):
                    ready, passed = self._without_full(ready), 0
                continue
            if (now := order.key(group)) != key:
                heapreplace(ready, (now, group.jobs[0], group))
                continue
            kind = verdicts.kind_of(group)
            served = self._serve(draft, group, ready)
            if served.end is End.NO_ROOM:
                verdicts.no_room_for(kind, group)
            placed += served.placed
            if served.end is End.OTHERS_FIRST:
                heapreplace(ready, (served.key, group.jobs[0], group))
            elif served.end is not End.HAD_TURNS:
                heappop(ready)
            if served.end is End.OVER_LIMIT and self._holds_up(draft, group):
                order.over_limit(group)
        return placed

    def next_ms(self) -> float:
        """Return from which ledger ms on a pass may have another result although nothing happens; infinity for never.

        A plan, a count of what never ends, a search for victims, or the age of a waiting job may differ then.
        """
        if self.queue.is_empty:
            return math.inf
        parts = self.verdicts, self._endless, self.preempting, self.order, self.order.data
        return min(part.next_ms() for part in parts)

    def moment_ms(self) -> float:
        """Return the ledger ms after the last record at which a pass is to plan by time alone; infinity for none.

        One that has passed without a plan does not come again: reserving may be left out after a failure.
        """
        moments = () if self.queue.is_empty else (self.verdicts.moment_ms(), self.order.data.next_ms())
        return min((at_ms for at_ms in moments if at_ms > self.order.state.time_ms), default=math.inf)

    def _add_frozen(self, ready: list[Ready]) -> None:
        """Add the frozen attempts that are to be resumed to a heap of groups: each before others of its priority.

        Among these, the one that has been without its devices for longest goes first: they may take turns on them. So
        members of services that sleep have one key on each host, the first of theirs: neither priority nor share lets
        one that has just had its turn come before one that waits.
        """
        policy = self.preempting.policy
        self._claimed.clear()
        groups = list[tuple[Key, Group, Attempt]]()
        firsts: dict[int, Key] = {}
        for attempt in self.frozen.waiting():
            job = attempt.replica.job
            if job.hold is None:
                group = Group(policy.priority_of(job), policy.shape_of(job), owner_of(job), [job.num])
                group.resumes = attempt
                key, host = self.order.key(group), attempt.worker.num
                groups.append((key, group, attempt))
                if group.shape.sleeps:
                    firsts[host] = min(key, firsts.get(host, key))
        for key, group, attempt in groups:
            first = firsts[attempt.worker.num] if group.shape.sleeps else key
            heappush(ready, (first, max(attempt.fence, attempt.leased) - LEDGER_END, group))

    def _resume(self, draft: Draft, group: Group, attempt: Attempt) -> None:
        """Resume a frozen attempt if its devices are free, and its tenant may have them now.

        What it waits for is not given to a later one in parts: attempts that need fewer devices would starve it. But it
        is if no turn gives the attempt all of it: some is in other use or unwell, or has an attempt that stays awake.
        """
        host, refused = attempt.worker.num, self.frozen.refused
        refused.discard(attempt.name)
        may_lease = self.order.may_lease(group.tenant, group.shape.gpus, attempt)
        if may_lease and self.order.goes_first(group):
            claimed = self._claimed.get(host, 0)
            closed = self.fleet.hosts[host].shut | self.fleet.stuck.get(host, 0)
            if (attempt.home & claimed or not self.frozen.resume(draft, attempt)) and not attempt.home & closed:
                self._claimed[host] = claimed | attempt.home
            return
        if may_lease:
            refused.add(attempt.name)
        if self._holds_up(draft, group):
            self.order.over_limit(group)

    def _begin(self, draft: Draft) -> bool:
        """Begin a pass. Return False if there is nothing to place, or the ranker is not ready to choose."""
        self.placing.begin()
        self.serving, self._unprepared = None, False
        if self.queue.is_empty:
            self.queue.groups.clear()
            self.verdicts.give_up(draft)
            if not self.fleet.with_frozen:
                return False
        self.order.data.begin(draft.time_ms)
        self.order.begin()
        if not self._knows_limits:
            self._knows_limits = True
            self._learn_limits(draft)
        if self._begins(RESERVING, draft):
            self.verdicts.reserve(draft)  # needs the limits that jobs waited for in the last pass
        self._begins(PLACING, draft)
        self.verdicts.begin(draft)
        self.order.forget_limits()
        self._unprepared = not self.placing.prepare()
        return not self._unprepared

    def _learn_limits(self, draft: Draft) -> None:
        """Find the jobs that wait for their tenants' limits, as the last pass of the leader before did.

        Else hosts would be reserved for one behind them, and smaller jobs be let on those that were reserved.
        """
        order, tenants = self.order, self.order.state.tenants
        groups = list[Group]()
        for group in self.queue.with_jobs():
            self.serving = group
            if is_limited(tenants[group.tenant]) and order.prune(group):
                groups.append(group)
        for group in sorted(groups, key=lambda each: (order.key(each), each.jobs[0])):
            self.serving = group
            if not order.may(group) and self._holds_up(draft, group):
                order.over_limit(group)
        self.serving = None

    def _holds_up(self, draft: Draft, group: Group) -> bool:
        """Return whether a job at its tenant's limit holds up the tenant's later jobs.

        Not if the fleet could never run it, or if it waits for GPUs of which nothing says when they come free.
        """
        if not self.could_ever(group.shape):
            return False
        most, needs = limits.most(self.order.state.read_tenant(group.tenant)), limits.needs(group.shape)
        parts = limits.HOLDING_UP if group.resumes is None else frozenset((limits.GPUS,))
        short = parts.intersection(self.order.short_of(group.tenant, group.shape))
        if not short and group.resumes is None:
            return self._holds_up_model(draft, group)
        if not short:
            return False
        endless = self._endless.of(draft, group.tenant)
        return all(needs[part] <= most[part] - endless[part] for part in short)

    def _holds_up_model(self, draft: Draft, group: Group) -> bool:
        """Return the same of a job that waits for GPUs of a model."""
        short = self.order.short_of_models(group.tenant, group.shape)
        bounds = self.order.state.read_tenant(group.tenant).limits
        if not short or bounds is None:
            return False
        endless = self._endless.devices(draft, group.tenant)
        most = dict(bounds.gpus_of)
        return all(need <= most[model] - models.count(endless, model) for model, need in short.items())

    def _bound(self, cut: bool, waiting: int) -> None:
        """Set how many failed searches this pass may make; `cut` says whether the last pass reached its limit.

        A group that found no room is normally not served again, so each pass gets further. If a pass did not, because
        the fleet has changed meanwhile, the limit doubles, so that each group is served eventually.
        """
        further = not cut or waiting < self._waiting
        self._in_vain_max = max(IN_VAIN_MAX, self._in_vain_max // 2) if further else 2 * self._in_vain_max
        self._waiting = waiting

    def _without_full(self, ready: list[Ready]) -> list[Ready]:
        """Return the heap of groups still to be served, without those like a group that found no room in this pass.

        A group of a tenant with a limit stays, since serving it records which jobs wait for the limit.
        """
        room, is_like_full = self.order.room, self.verdicts.is_like_full
        left = [
            row for row in ready if row[2].resumes is not None or room(row[2]) != math.inf or not is_like_full(row[2])
        ]
        heapify(left)
        return left

    def _serve(self, draft: Draft, group: Group, ready: list[Ready]) -> Served:
        """Place jobs from the front of the group at the root of a heap until the first job of another comes first.

        Groups that want the same, of several tenants, take turns job by job. They then do so on one host, until it is
        full: that comes to what a choice for each job would come to.
        """
        order, placing = self.order, self.placing
        after = min(ready[1:3]) if len(ready) > 1 else None  # the smallest in the heap after its root
        others = None if after is None else after[:2]
        placed, filled, first, right, end = 0, 0, 0, 0, End.ALL_SERVED
        last: Choice | None = None
        aside = list[int]()
        room, key = order.room(group), ready[0][0]
        while order.prune(group) and not self.is_done(draft):
            num, key = group.jobs[0], order.key(group)
            if others is not None and not aside and (key, num) > others:
                end = End.OTHERS_FIRST
                break
            if room < 1:
                end = End.OVER_LIMIT
                break
            choice = self._place_first(draft, group)
            if choice is None:
                if self._set_aside(draft, group, aside):
                    continue
                end = End.NO_ROOM
                if self.verdicts.give(group):
                    filled = self.backfilling.backfill(draft, group, room)
                if filled:
                    self.verdicts.goes_on(group)
                break
            last, first, right = choice, first or num, right or (BORROWED if key[0] else GUARANTEED)
            placed += group.shape.together
            room -= 1
            order.turns.count(group)
            if order.is_by_model(group.tenant):
                room = order.room(group)  # what was placed may have come under a limit, or not
                continue
            if after is not None and not aside and self._are_alike(draft, group, after[2]):
                more, last = placing.place_more(draft, choice, group.shape, UNBOUNDED, self._in_turns(draft, ready))
                placed += more
                if ready and ready[0][2].resumes is None and not order.prune(ready[0][2]):
                    heappop(ready)
                end = End.HAD_TURNS
                break
            held = self.verdicts.reservation
            if held is not None and choice.host.worker.num in held.hosts:
                continue  # its tenant may use a reserved host while it is owed more, which each placement changes
            most = order.turns.most(group, others)
            if room != math.inf:
                most = min(most, int(room))
            if not order.queue.waiting:
                most = min(most, len(group.jobs))  # else a job of several may place many
            if group.jobs and room >= 1 and most > 0:
                more, last = placing.place_more(draft, choice, group.shape, most, self._in_a_row(group, others))
                placed += more
                room -= more
                order.turns.count(group)
        if last is not None:
            # flat, four numbers a decision: first job, replicas placed, known hosts, free devices on the last host
            right = right if draft.state.level >= RIGHT_LEVEL else 0
            draft.evidence += (first, placed | right, len(self.fleet.hosts), last.left)
        if aside:
            group.jobs.extendleft(reversed(aside))
            filled += 0 if end is End.NO_ROOM else self.backfilling.backfill(draft, group, room)
        return Served(placed + filled, end, key)

    def _are_alike(self, draft: Draft, group: Group, other: Group) -> bool:
        """Return whether what has room for a group has it for another one, on the same hosts."""
        if other.resumes is not None or other.shape.sleeps or self.verdicts.reservation or draft.preempting:
            return False
        if self.order.is_by_model(other.tenant):
            return False
        return self.verdicts.kind_of(other) == self.verdicts.kind_of(group)

    def _in_a_row(self, group: Group, others: tuple[Key, int] | None) -> Iterator[Group]:
        """Yield a group while its first job still comes before `others`, another group."""
        order = self.order
        while order.prune(group) and (others is None or (order.key(group), group.jobs[0]) <= others):
            yield group

    def _in_turns(self, draft: Draft, ready: list[Ready]) -> Iterator[Group]:
        """Yield the group whose first job is placed next, while those at the root of the heap are alike."""
        order, first = self.order, ready[0][2]
        rooms = {first: order.room(first)}
        while ready:
            group = ready[0][2]
            if group not in rooms:
                if not self._are_alike(draft, first, group):
                    return
                rooms[group] = order.room(group)
            if rooms[group] < 1:
                return
            if not order.prune(group):
                heappop(ready)
                continue
            now = order.key(group), group.jobs[0]
            if len(ready) > 1 and now > min(ready[1:3])[:2]:
                heapreplace(ready, (*now, group))
                continue
            self.serving = group
            rooms[group] -= 1
            order.turns.count(group)
            yield group

    def _place_first(self, draft: Draft, group: Group) -> Choice | None:
        """Place the first job of a queue group. Return None if it found no room; then it stays in the group."""
        if self.verdicts.finds_none(group):
            self.placing.in_vain += 1
            return None
        excluded = self.verdicts.excluded(group.priority, group.shape, group.owner)
        choice = self.placing.place(draft, group.shape, group.jobs[0], excluded)
        if choice is not None:
            self.queue.placed(group, group.jobs[0], draft.time_ms)
        return choice

    def _set_aside(self, draft: Draft, group: Group, aside: list[int]) -> bool:
        """Return whether the first job of a group, which found no room, is set aside for those behind it.

        Only if hosts are excluded for it alone: a job behind it may have a shorter time limit, or take turns where it
        takes none. Otherwise the group gets its verdict. One of which all jobs stand aside gets none, as a job that
        arrives may start where these may not.
        """
        if len(aside) < ASIDE_MAX and self.order.kept_from(draft, group.jobs[0], group.shape):
            aside.append(group.jobs.popleft())
            return True
        return False

    # ---------------------------------------------------------------------------------------- preemption

    def _eligible(self, draft: Draft) -> Iterator[Candidate]:
        """Yield the first jobs of the groups without room, or whose first job a drain keeps from hosts.

        As many of a group as its tenant may start.
        """
        order = self.order
        for group in self.queue.groups.values():
            if group.shape.parts or not order.prune(group):
                continue  # no job ends for a gang of several groups: whether all find room then is not searched
            if not self.verdicts.is_new(group) and not order.kept_from(draft, group.jobs[0], group.shape):
                continue
            key, room = order.key(group), order.room(group)
            for num in islice(group.jobs, CANDIDATES_MAX):
                if not order.waits(num) or order.data.waiting(num):
                    continue
                if room < 1:
                    break
                wanted = order.to_place(num, REPLICAS_MAX)
                wanted = wanted if room == math.inf else min(wanted, int(room))
                room -= wanted
                yield Candidate(key, num, group, wanted)

    def _closed_to(self, draft: Draft, group: Group) -> frozenset[int]:
        """Return the hosts on which the first job of a group may not start even if they become empty."""
        return self.verdicts.excluded(group.priority, group.shape, group.owner) | self.order.barred_from(
            draft, group.jobs[0], group.shape
        )
