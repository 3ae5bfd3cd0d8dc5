"""One pass: queue → rank → place, over consistent state; a gang whole or not at all.

Whoever waits too long gets hosts reserved, see `reserve`; who surely ends before they are free is filled in there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from itertools import islice
from typing import Final

from moorage.scheduler.core.ageing import Ageing, within
from moorage.scheduler.core.decide.preempting import Preempting
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fairshare import Rates
from moorage.scheduler.core.fleet import Fleet
from moorage.scheduler.core.host import EXCLUSIVE
from moorage.scheduler.core.line.backfill import DEPTH_MAX, Estimates
from moorage.scheduler.core.line.claims import Claim, Claims, fills_hosts
from moorage.scheduler.core.line.queue import REPLICA_BITS, Head, Line, Queue
from moorage.scheduler.core.line.reserve import (
    LATER_MS,
    LATER_PART,
    MOVE_MS_A_HOST,
    PATIENCE_MS,
    Reservation,
    another,
    expected,
    soonest,
    still_holds,
)
from moorage.scheduler.core.line.turns import Turns
from moorage.scheduler.core.rank.ranker import Choice, Ranker
from moorage.scheduler.core.records import GangPhase
from moorage.scheduler.core.shape import Shape
from moorage.scheduler.core.state import QUEUED, Job
from moorage.schemas.job import Request

#: choices that one pass makes, some 50 µs each where requests differ: then the record goes, and the next one goes on
CHOICES_MAX: Final = 192
#: entries of a line that are passed over in a pass as they could not end before a drain
ASIDE_MAX: Final = 64
_REPLICA_MASK: Final = (1 << REPLICA_BITS) - 1
_NO_PEERS: Final[dict[int, int]] = {}
_NOBODY: Final[frozenset[int]] = frozenset()
_NEVER: Final = -2  # no change number: a line that found no room is looked at, too


class Planner:
    """Places what fits now, in order of priority, of fair share where shares are set, and of arrival.

    `order` is that of `Config`; `could_ever` says whether the fleet could hold a shape if it were empty.
    """

    def __init__(
        self,
        fleet: Fleet,
        queue: Queue,
        ranker: Ranker,
        estimates: Estimates,
        preempting: Preempting,
        order: str = "fair",
        could_ever: Callable[[Shape], bool] = lambda shape: True,
        ageing: Ageing | None = None,
        patience_ms: int = PATIENCE_MS,
    ) -> None:
        self.fleet = fleet
        self.queue = queue
        self.ranker = ranker
        self.estimates = estimates
        self.preempting = preempting
        self.order = order
        self.could_ever = could_ever
        self.ageing = ageing
        self.patience_ms = patience_ms
        self.rates = Rates(fleet)
        self.reservation: Reservation | None = None
        self.fresh: dict[int, tuple[str, Request]] = {}  # while hosts are reserved: jobs that this record accepts
        self._looked_ms = -patience_ms
        self._claims = Claims(fleet, patience_ms)
        self._moved_ms = 0  # ledger ms at which the reservation's hosts were last chosen
        self._preemptors = _NOBODY  # the jobs for which others ended at the last pass, by number
        self._spread: dict[int, dict[int, int]] = {}  # this pass: job number -> its replicas by worker
        #: workers on which a job (by its number, at ledger ms) must not be placed, as they are to be left too soon
        self.barred_by_limits: Callable[[int, int], frozenset[int]] = lambda num, now_ms: _NOBODY
        self._classes: list[int] = []  # this pass: the priorities of those who wait, where jobs age
        self._full: set[str] = set()  # this pass: tenants of which somebody waits for the tenant's limit
        self._no_room: set[tuple[int, frozenset[int]]] = set()  # this pass: shapes, and the hosts barred to them
        self._turns: Turns | None = None  # this pass: the order under fair share
        self._draft: Draft | None = None  # the last pass's
        self._choices = 0  # this pass: hosts that were found

    def is_done(self, draft: Draft) -> bool:
        """Whether nothing more may be placed in this record; who still waits is looked at in the next."""
        return self._choices > CHOICES_MAX or draft.full

    def plan(self, draft: Draft) -> int:
        """Write placements into the draft; returns how many replicas were placed."""
        self._choices = 0
        if not self.queue.size:
            return 0
        self._begin(draft)
        if self._preemptors or draft.state.preempting:
            self._settle(draft)
        fleet, queue, placed_all, turns = self.fleet, self.queue, 0, self._turns
        strict, head_of, aged = self.order == "fifo", self._head_of(), self.ageing is not None
        ready = queue.ready(_NEVER if strict else fleet.changes, head_of)
        while ready and not self.is_done(draft):
            head, _, line = ready[0]
            if head_of is not None and (now := head_of(line)) != head:
                heapreplace(ready, (now, line.entries[0], line))
                continue
            waits = strict and line.blocked_at == fleet.changes and self._may(draft, line)
            if waits and (not self._prune(draft, line) or line.entries[0] != ready[0][1]):
                heappop(ready)  # whoever stood there first has gone, and stops nobody
                if line.entries:
                    if line.barred:  # by a time limit of its own
                        line.barred, line.blocked_at = False, -1
                    heappush(ready, (head_of(line) if head_of is not None else head, line.entries[0], line))
                continue
            placed, filled, first, over = 0, 0, 0, False
            last: Choice | None = None
            aside: list[int] = []
            need, room = line.shape.gpus, self._room(draft, line)
            others = min(ready[1:3])[:2] if len(ready) > 1 else None  # the heap's root aside, its least
            while line.entries and not waits and not self.is_done(draft):
                item = line.entries[0]
                if queue.is_taken(line, item) or not self.waits(draft, item):
                    queue.pop(line)
                    continue
                if aged and head_of is not None:
                    head = head_of(line)  # who comes later has waited less
                if others is not None and not aside and (head, item) > others:
                    break
                if need > room:
                    over = True
                    break
                choice = self._place(draft, line, item)
                if choice is None and not strict and len(aside) < ASIDE_MAX and self._waits_out_a_drain(draft, item):
                    aside.append(queue.pop(line))
                    continue
                if choice is None:
                    line.blocked_at = fleet.changes
                    line.barred = line.barred or (strict and self._waits_out_a_drain(draft, item))
                    waits = True
                    filled += self._fill_in(draft, line, room)
                    break
                queue.pop(line)
                last, first = choice, first or item >> REPLICA_BITS
                placed += line.shape.together
                room -= need
                most = len(line.entries) if room == math.inf or not need else int(room // need)
                if turns is not None:
                    self._count(draft, line, line.shape.together)
                    head, most = turns.head(line), min(most, turns.most(line, others))
                if line.entries and room >= need and most > 0:
                    more, last = self._place_more(draft, line, choice, most, head, others, head_of if aged else None)
                    placed += more
                    room -= more * need
                    if turns is not None:
                        self._count(draft, line, more)
                        head = turns.head(line)
            if aside:
                queue.put_back(line, aside)
                filled += 0 if waits else self._fill_in(draft, line, room)
            if last is not None:
                # flat, four a decision: first job, how many were placed, hosts known, free devices left on the last
                draft.evidence += (first, placed, len(fleet.hosts), last.left)
                placed_all += placed
                if line.tenant and turns is None:
                    draft.gpus[line.tenant] = draft.gpus.get(line.tenant, 0) + line.shape.count * placed
            placed_all += filled
            if waits and strict and self.could_ever(line.shape):
                break  # nobody passes whoever is first
            if over:
                self._over_limit(draft, line)
                heappop(ready)
            elif line.entries and not aside and not waits:
                heapreplace(ready, (head, line.entries[0], line))
            else:
                heappop(ready)
        if self.preempting.allowed and not draft.full:
            self.preempting.seek(draft, self._eligible(draft), self._held_for_others)
        return placed_all

    def _eligible(self, draft: Draft) -> list[tuple[Head, int, Line]]:
        """The lines that found no room and whose first might have a right to it."""
        changes, head_of = self.fleet.changes, self._head_of()
        return [
            (head_of(line) if head_of is not None else -line.priority, line.entries[0], line)
            for line in self.queue.lines.values()
            if line.blocked_at == changes and self._prune(draft, line) and self._may(draft, line)
        ]

    def _held_for_others(self, line: Line) -> frozenset[int]:
        return self.barred(line.priority, line.shape, line.tenant)

    def _settle(self, draft: Draft) -> None:
        """Give up preemptions that are void; what was held for whoever needs it no more is open again."""
        preempting = draft.state.preempting
        if not self._preemptors <= preempting.keys():
            self.fleet.changes += 1
        self._preemptors = frozenset(preempting)
        self.preempting.settle(draft, lambda job: self._still_waits(draft, job))

    def _still_waits(self, draft: Draft, job: Job) -> bool:
        """Whether whoever others end for could still start."""
        waiting = any(draft.state_of(replica) == QUEUED for replica in job.replicas)
        return waiting and not draft.is_held(job) and not draft.is_tenant_held(job.tenant)

    def _begin(self, draft: Draft) -> None:
        self._draft = draft
        standing = None
        if self.ageing is not None:
            standing = self.standing
            self._classes = sorted({line.priority for line in self.queue.lines.values() if line.entries})
        self._turns = Turns(draft, self.rates, standing) if self.is_fair(draft) else None
        if self.order != "fifo":
            self._reserve(draft)
        self._spread.clear()
        self._full.clear()
        self._no_room.clear()

    def is_fair(self, draft: Draft) -> bool:
        """Whether tenants have turns: an operator has set somebody's share, and the order is not another."""
        return self.order == "fair" and draft.state.half_life_ms > 0 and self.queue.by_tenant

    def _head_of(self) -> Callable[[Line], Head] | None:
        """What comes before arrival in the order of lines, where that is not their priority alone."""
        if self._turns is not None:
            return self._turns.head
        return (lambda line: -self.standing(line)) if self.ageing is not None else None

    def standing(self, line: Line) -> int:
        """What the first of a line counts as: its priority, and its age where jobs age."""
        return self.standing_of(line.priority, line.entries[0]) if line.entries else line.priority

    def standing_of(self, priority: int, item: int) -> int:
        """The same of one entry of the queue."""
        return priority if self.ageing is None else within(self._classes, priority, self.aged_of(priority, item))

    def aged_of(self, priority: int, item: int) -> int:
        """What an entry's priority has come to, whether there is such a class or not."""
        if self.ageing is None or self._draft is None:
            return priority
        job = self._draft.state.jobs.get(item >> REPLICA_BITS)
        return priority if job is None else self.ageing.of(priority, self._draft.time_ms - job.accepted_ms)

    def _count(self, draft: Draft, line: Line, replicas: int) -> None:
        """What was placed counts at once in whose turn it is."""
        assert self._turns is not None
        self._turns.took(line, replicas)
        draft.gpus[line.tenant] = draft.gpus.get(line.tenant, 0) + line.shape.count * replicas

    def _room(self, draft: Draft, line: Line) -> float:
        """How many GPUs the line's tenant may still lease; below 0 where nothing of it may be placed at all."""
        if not line.tenant:
            return math.inf
        if draft.is_tenant_held(line.tenant):
            return -1
        gpus_max, _ = draft.limits_of(line.tenant)
        if not gpus_max:
            return math.inf
        return 0 if line.tenant in self._full else max(0, gpus_max - draft.leased_by(line.tenant))

    def _over_limit(self, draft: Draft, line: Line) -> None:
        """What comes later of this tenant waits behind it, else small jobs would starve a big one under the limit."""
        if line.shape.gpus <= draft.limits_of(line.tenant)[0]:
            self._full.add(line.tenant)

    def waits(self, draft: Draft, item: int) -> bool:
        """Whether this entry still waits (removal from the queue is lazy)."""
        num = item >> REPLICA_BITS
        if num >= draft.state.next_num:
            return True  # accepted in this very record
        job = draft.state.jobs.get(num)
        if job is None:
            return False
        replica = job.replicas[item & _REPLICA_MASK]
        return draft.state_of(replica) == QUEUED and replica.not_before <= draft.time_ms

    def _prune(self, draft: Draft, line: Line) -> bool:
        """Take whoever waits no more from a line's front; whether anybody is left."""
        entries, queue = line.entries, self.queue
        while entries and (queue.is_taken(line, entries[0]) or not self.waits(draft, entries[0])):
            queue.pop(line)
        return bool(entries)

    def _waits_out_a_drain(self, draft: Draft, item: int) -> bool:
        """Whether its own time limit keeps it from a worker: who stands behind it may have another."""
        return bool(draft.state.windows and self.barred_by_limits(item >> REPLICA_BITS, draft.time_ms))

    def _place(self, draft: Draft, line: Line, item: int) -> Choice | None:
        return self._choose(draft, line.shape, item, self.barred(line.priority, line.shape, line.tenant))

    def _choose(self, draft: Draft, shape: Shape, item: int, barred: frozenset[int]) -> Choice | None:
        if draft.state.windows:
            barred |= self.barred_by_limits(item >> REPLICA_BITS, draft.time_ms)
        if (shape.index, barred) in self._no_room:
            return None
        if not shape.avoid:
            return self._look(draft, shape, item, barred)
        with self.fleet.avoiding(shape.avoid):
            return self._look(draft, shape, item, barred)

    def _look(self, draft: Draft, shape: Shape, item: int, barred: frozenset[int]) -> Choice | None:
        if shape.together > 1:
            choice = self._place_gang(draft, shape, item >> REPLICA_BITS, barred)
        else:
            choice = self._place_one(draft, shape, item, barred)
        if choice is None:
            self._no_room.add((shape.index, barred))
        else:
            self._choices += shape.together
        return choice

    def _place_one(self, draft: Draft, shape: Shape, item: int, barred: frozenset[int]) -> Choice | None:
        num = item >> REPLICA_BITS
        avoid = self._peers(draft, num) if shape.spread else _NO_PEERS
        choice = self.ranker.choose(self.fleet, shape, avoid, barred)
        if choice is not None:
            self.fleet.take(choice.host, shape, choice.mask)
            if shape.spread:
                avoid[choice.host.worker.num] = avoid.get(choice.host.worker.num, 0) + 1
            draft.placed(num, item & _REPLICA_MASK, choice.host.worker.num, choice.mask, self._mode(shape))
        return choice

    def _place_more(
        self,
        draft: Draft,
        line: Line,
        choice: Choice,
        most: int,
        head: Head,
        others: tuple[Head, int] | None,
        aged: Callable[[Line], Head] | None,
    ) -> tuple[int, Choice]:
        """At most so many who wait behind in line and would be put on the very same host, without asking for each.

        Returns how many, and the last choice: what one by one would have come to. With `aged`, each of the line has a
        head of its own.
        """
        shape, entries, host = line.shape, line.entries, choice.host
        taken, mode = 0, self._mode(shape)
        if shape.avoid or host.worker.window is not None:
            return 0, choice  # others that ask alike may have other time limits; on these devices it may not be
        masks = self.ranker.again(choice, shape, min(most, len(entries)))
        self._choices += bool(masks)
        for mask in masks:
            while entries and (self.queue.is_taken(line, entries[0]) or not self.waits(draft, entries[0])):
                self.queue.pop(line)
            if not entries or draft.full:
                break
            if aged is not None:
                head = aged(line)
            if others is not None and (head, entries[0]) > others:
                break
            item = self.queue.pop(line)
            draft.placed(item >> REPLICA_BITS, item & _REPLICA_MASK, host.worker.num, mask, mode)
            taken += 1
        if taken:
            self.fleet.take_all(host, shape, masks[:taken])
            choice = Choice(host, masks[taken - 1], host.open.bit_count())
        return taken, choice

    def _place_gang(self, draft: Draft, shape: Shape, num: int, barred: frozenset[int]) -> Choice | None:
        fleet = self.fleet
        if not self._may_fit(shape):
            return None
        taken: list[Choice] = []
        for _ in range(shape.together):
            choice = self.ranker.choose(fleet, shape, _NO_PEERS, barred)
            if choice is None:
                before = fleet.changes
                for done in taken:  # of its own alone (fact 30)
                    fleet.give(done.host, shape, done.mask)
                fleet.changes = before  # nothing changed: whoever was blocked still is
                return None
            fleet.take(choice.host, shape, choice.mask)
            taken.append(choice)
        for index, choice in enumerate(taken):
            draft.placed(num, index, choice.host.worker.num, choice.mask, self._mode(shape))
        draft.step_gang(num, GangPhase.HOLDING)
        return taken[-1]

    def _may_fit(self, shape: Shape) -> bool:
        """A bound from the buckets alone, so that a gang that cannot fit costs no walk for every rank."""
        if shape.mode != EXCLUSIVE:
            return True
        room = sum(
            free // shape.count * len(bucket)
            for cls, _ in self.fleet.capable(shape)
            for free, bucket in enumerate(cls.buckets)
        )
        return room >= shape.together

    def _mode(self, shape: Shape) -> int:
        return self._turns.mode(shape) if self._turns is not None else shape.mode

    def _peers(self, draft: Draft, num: int) -> dict[int, int]:
        """How many replicas of this job each worker has, those placed in this pass too."""
        used = self._spread.get(num)
        if used is None:
            used = self._spread[num] = {}
            job = draft.state.jobs.get(num)
            for replica in job.replicas if job is not None else ():
                member = draft.held_by(replica)
                if member is not None:
                    used[member.worker.num] = used.get(member.worker.num, 0) + 1
        return used

    # ------------------------------------------------------------------------------------- reservation

    def barred(self, priority: int, shape: Shape, tenant: str) -> frozenset[int]:
        """The hosts that are held back for somebody else than the lines of this priority and shape.

        Under fair share a tenant passes to which more is owed than to the one they are held for.
        """
        taken = self._taken_back(priority, shape, tenant)
        held, turns = self.reservation, self._turns
        if held is None or self.passes(priority, shape, held):
            return taken
        if turns is not None and turns.is_owed(tenant, held.line.tenant):
            return taken
        return held.hosts | taken if taken else held.hosts

    def passes(self, priority: int, shape: Shape, held: Reservation) -> bool:
        """Whether a line of this priority and shape passes a reservation: its own, or of somebody whom it would end."""
        if held.priority == priority and held.shape is shape:
            return True
        return self.preempting.priority <= priority > self.standing_of(held.priority, held.item)

    def _taken_back(self, priority: int, shape: Shape, tenant: str) -> frozenset[int]:
        """The hosts on which others end for somebody else."""
        draft = self._draft
        if draft is None or not draft.state.preempting:
            return _NOBODY
        return self.preempting.held(draft, shape, priority, tenant)

    def _reserve(self, draft: Draft) -> None:
        """Give up a reservation that is used or void; look once a second for somebody out of patience."""
        self._claims.begin(draft.time_ms)
        held = self.reservation
        if held is not None and not (self.waits(draft, held.item) and self._may(draft, held.line)):
            self._give_up()
        if draft.time_ms - self._looked_ms < 1000:
            return
        self._looked_ms = draft.time_ms
        held = self.reservation
        if held is not None:
            with self.fleet.avoiding(held.shape.avoid):
                if still_holds(self.fleet, held):
                    self._move(held, draft.time_ms)
                    self._reopen(held, draft.time_ms)
                    return
            self._give_up()
        for line in self.queue.lines.values():
            self._prune(draft, line)
        claims = self._claims_of(draft, _NOBODY)
        self.reservation = self._grant(draft, claims)
        if self.reservation is not None:
            self._moved_ms = draft.time_ms
            self._claims.granted(self.reservation, claims)

    def _claims_of(self, draft: Draft, without: frozenset[int]) -> list[Claim]:
        """Who is out of patience, the first of each line, in order; with these jobs (their numbers) gone."""
        head_of = self._head_of()
        impatient: list[Claim] = []
        for line in self.queue.lines.values():
            item = next((item for item in line.entries if item >> REPLICA_BITS not in without), None)
            job = draft.state.jobs.get(item >> REPLICA_BITS) if item is not None else None
            if item is None or job is None or draft.time_ms - job.accepted_ms <= self.patience_ms:
                continue
            if self._may(draft, line):
                head = head_of(line) if head_of is not None else -line.priority
                impatient.append(Claim(head, not fills_hosts(self.fleet, line.shape), item, line, job.accepted_ms))
        return self._claims.in_order(impatient)

    def next_reservation(self, draft: Draft, without: frozenset[int]) -> Reservation | None:
        """Who would get hosts reserved, with these jobs (their numbers) gone, now or before long; changes nothing."""
        return self._grant(draft, self._claims_of(draft, without), early=True)

    def _grant(self, draft: Draft, claims: list[Claim], *, early: bool = False) -> Reservation | None:
        """Hosts for the first of these claims that some could hold, if it is due or `early`."""
        for claim in claims:  # what no host could hold must not hide who could be helped
            if not early and not self._claims.comes_due(claim, draft.time_ms, lambda item: self.waits(draft, item)):
                return None
            line = claim.line
            with self.fleet.avoiding(line.shape.avoid):  # and not where it would not be put
                hosts, start_ms = soonest(self.fleet, line.shape, self.estimates, draft.time_ms)
            if hosts:
                return Reservation(claim.item, line, hosts, start_ms, draft.time_ms)
        return None

    def _move(self, held: Reservation, now_ms: int) -> None:
        """See again when a reservation's hosts will hold it, and now and then whether others would sooner.

        One that is late closes one host more.
        """
        if now_ms >= held.late_ms:
            held.one_more(another(self.fleet, held, self.estimates, now_ms), now_ms)
        held.start_ms = expected(self.fleet, held, self.estimates, now_ms)
        if now_ms - self._moved_ms < MOVE_MS_A_HOST * len(self.fleet.hosts):
            return
        self._moved_ms = now_ms
        hosts, start_ms = soonest(self.fleet, held.shape, self.estimates, now_ms, held.more)
        if start_ms is None or hosts == held.hosts or (held.start_ms is not None and held.start_ms <= start_ms):
            return
        held.hosts, held.start_ms = hosts, start_ms
        self.fleet.changes += 1  # the hosts it leaves are open again

    def _reopen(self, held: Reservation, now_ms: int) -> None:
        """Time alone may let somebody pass a reservation, though nothing changes in the fleet: look at those again.

        To a tenant more is owed by and by, and hosts are free later than they were expected to be.
        """
        start_ms, looked_ms, later = held.start_ms, held.looked_start_ms, False
        if start_ms is not None:
            least_ms = max(LATER_MS, (start_ms - now_ms) // LATER_PART)
            later = looked_ms is None or start_ms - looked_ms > least_ms
            if looked_ms is None or later or start_ms < looked_ms:
                held.looked_start_ms = start_ms
        for line in self.queue.lines.values():
            if line.barred and (later or not held.hosts & self.barred(line.priority, line.shape, line.tenant)):
                line.barred, line.blocked_at = False, -1

    def _fill_in(self, draft: Draft, line: Line, room: float) -> int:
        """`_backfill`, counted; nobody is told of in the evidence but who came by the order."""
        if self.reservation is None:
            return 0
        count = self._backfill(draft, line, self.barred(line.priority, line.shape, line.tenant), room)
        if count and self._turns is not None:
            self._count(draft, line, count)
        elif count and line.tenant:
            draft.gpus[line.tenant] = draft.gpus.get(line.tenant, 0) + line.shape.count * count
        return count

    def _backfill(self, draft: Draft, line: Line, barred: frozenset[int], room: float) -> int:
        """Place who waits in a line that a reservation bars, and surely ends before that could start. How many."""
        held, shape = self.reservation, line.shape
        if not barred or held is None:
            return 0
        line.barred = True  # whoever joins it may be short enough
        if held.start_ms is None:
            return 0
        taken = self._taken_back(line.priority, shape, line.tenant)
        placed, need, jobs = 0, shape.gpus, draft.state.jobs
        for item in list(islice(line.entries, DEPTH_MAX)):
            if need > room or draft.full:
                break
            job = jobs.get(item >> REPLICA_BITS)
            if self.queue.is_taken(line, item) or not self.waits(draft, item):
                continue
            if job is not None:
                asked: tuple[str, Request] | None = (job.tenant, self.estimates.request_of(job))
            else:
                asked = self.fresh.get(item >> REPLICA_BITS)
            came_ms = job.accepted_ms if job is not None else draft.time_ms
            most_ms = self.estimates.most_ms(*asked, shape, came_ms) if asked is not None else None
            if most_ms is None or draft.time_ms + most_ms > held.start_ms:
                continue
            if self._choose(draft, shape, item, taken) is None:
                break
            self.queue.take_out(line.priority, shape, item, line.tenant)
            placed += shape.together
            room -= need
        return placed

    def _may(self, draft: Draft, line: Line) -> bool:
        """Whether its tenant may start it: hosts are held back for nobody who may not."""
        return line.shape.gpus <= self._room(draft, line)

    def waits_for_limit(self, tenant: str) -> bool:
        """Whether somebody of this tenant found no room under its limit in the last pass."""
        return tenant in self._full

    def forget(self, num: int) -> None:
        """A job is held, moved, or asks differently now: nothing is held back for it as it stood."""
        if self.reservation is not None and self.reservation.item >> REPLICA_BITS == num:
            self._give_up()

    def _give_up(self) -> None:
        self.reservation = None
        self.fleet.changes += 1  # its hosts are open again

    def sweep(self, draft: Draft) -> None:
        """Take out of the queue what no longer waits: cancels would else fill a line whose head is blocked."""
        self.queue.sweep(lambda item: self.waits(draft, item))
