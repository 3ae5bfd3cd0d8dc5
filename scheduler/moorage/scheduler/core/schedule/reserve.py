"""The reservation: hosts kept free for one job that has waited too long, and which jobs may use them meanwhile.

A stream of small jobs must not starve a big one. Among the jobs that have waited longer than `reserve_after`, the first
in order gets the reservation: the hosts on which it will fit soonest are excluded for all other jobs until it starts.
Only a job that surely ends before that start may be placed there (backfill; Lifka, "The ANL/IBM SP Scheduling System",
1995), judged by its time limit or by earlier runs. There is one reservation at a time. An overdue job of higher
priority takes it over: otherwise one of low priority would keep idle hosts from it for hours.

Requests that need whole hosts get room only through a reservation; for smaller requests, room appears by itself. So
whole-host requests go first. But the first in order of the overdue jobs with smaller requests is passed only until as
many hosts were reserved before it as the fleet has. Then it goes first.

Hosts reserved for a gang stand idle until the last of them is free. So a gang that needs n of H hosts, and became the
first candidate a time t after `reserve_after`, lets other jobs continue to use the hosts for another 3/2 t (n - 1) / H.
A gang that is first at once, or needs one host, waits no longer; a gang that needs half of the fleet waits less than
three quarters of t longer; and often enough hosts become free meanwhile. If a job of its priority and shape had a
reservation since, t counts from then: otherwise each of many gangs that came together would wait longer than the one
before it by a factor. It is the slack that Talby and Feitelson give to all jobs ("Supporting Priorities and Improving
Utilization of the IBM SP Scheduler Using Slack-Based Backfilling", 1999), in proportion to what a reservation costs.

All of this is soft state. A new leader does not know since when a job is first, so it adds no slack for jobs accepted
before its term.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from heapq import nsmallest
from itertools import islice
from typing import Final, NamedTuple

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.state import QUEUED, Job
from moorage.scheduler.core.queue.order import QueueOrder
from moorage.scheduler.core.queue.queue import REPLICA_BITS, VOID, Group, Key, Queue, Verdict, Waits
from moorage.scheduler.core.schedule.placing import Placing
from moorage.scheduler.core.schedule.preempt import Preempting
from moorage.scheduler.core.schedule.runtime import DEPTH_MAX, Estimates
from moorage.scheduler.core.schedule.soonest import expected, soonest
from moorage.schemas.job import Request

#: how often the reservation looks for hosts that become free sooner: at most every this many ms for each host of the
#: fleet, since that walks the fleet: each second up to 333 hosts, every 30 s with 10,000
MOVE_MS_A_HOST: Final = 3
#: how often one reservation moves to hosts that are free sooner
MOVES_MAX: Final = 16
#: backfill is tried again once the expected start has moved later by this many ms and by this part of the remaining
#: time
LATER_MS: Final = 5_000
LATER_PART: Final = 8
#: a reservation whose hosts could not hold the job even if emptied is given up after this many ms
SHORT_MS: Final = 60_000


class Reservation:
    """Hosts kept free for one queue entry, and for entries of its priority and shape, of which the first goes first.

    `start_ms` is the ledger ms at which the hosts are expected to be free; None if unknown. `since_ms` is when the
    reservation was made.
    """

    __slots__ = (
        "hosts", "item", "looked_start_ms", "moves", "priority", "shape", "short_ms", "since_ms", "start_ms",
        "tenant",
    )  # fmt: skip

    def __init__(
        self,
        item: int,
        group: Group,
        hosts: frozenset[int],
        start_ms: int,
        since_ms: int,
    ) -> None:
        self.item = item
        self.tenant = group.tenant
        self.priority = group.priority
        self.shape = group.shape
        self.hosts = hosts
        self.start_ms: int | None = start_ms
        self.moves = 0  # how often it has moved
        self.since_ms = since_ms
        #: `start_ms` when the excluded groups were last opened again because it had changed
        self.looked_start_ms: int | None = start_ms
        self.short_ms = -1  # ledger ms since when its hosts could not hold it; -1 if they could at the last check

    def is_short_for(self, now_ms: int) -> int:
        """Note that the hosts cannot hold the entry's job now, and return for how many ms that has been so."""
        if self.short_ms < 0:
            self.short_ms = now_ms
        return now_ms - self.short_ms

    @property
    def num(self) -> int:
        """The number of the job that it is for."""
        return self.item >> REPLICA_BITS


#: the most entries whose time of becoming first is remembered
FIRST_MAX: Final = 1_024
#: the slack of a gang: its wait, times the idle share of the fleet, times 3/2
LETS_ON: Final = (3, 2)


class Claim(NamedTuple):
    """A reservation candidate: the first entry of a group with an overdue job. The smallest candidate goes first."""

    key: Key
    later: bool  # needs no whole hosts, so room for it appears by itself
    item: int
    group: Group
    accepted_ms: int


class Claims:
    """Orders the reservation candidates, and says when the first of them is due. All times are in ledger ms."""

    __slots__ = ("_began_ms", "_fleet", "_granted", "_passed", "_passed_hosts", "_patience_ms", "_since")

    def __init__(self, fleet: Fleet, patience_ms: int) -> None:
        self._fleet = fleet
        self._patience_ms = patience_ms
        self._began_ms = -1  # time of this leader's first pass
        self._since: dict[int, int] = {}  # entry -> since when it is the first candidate
        #: (priority, index of the shape) -> time of the last reservation for such a job; the oldest are dropped
        self._granted: dict[tuple[int, int], int] = {}
        self._passed = -1  # the entry that has waited longest among those that need no whole host
        self._passed_hosts = 0  # hosts reserved for later jobs while it waited

    def in_order(self, claims: list[Claim]) -> list[Claim]:
        """Return the candidates in order. `later` says of each whether it needs no whole hosts."""
        others = [claim for claim in claims if claim.later]
        if others and min(others).item == self._passed and self._passed_hosts >= len(self._fleet.hosts):
            claims = [claim._replace(later=False) for claim in claims]
        return sorted(claims)

    def begin(self, now_ms: int) -> None:
        """Note the start of a pass: slack is counted only for jobs accepted after this leader's first pass."""
        if self._began_ms < 0:
            self._began_ms = now_ms

    def due_ms(self, claim: Claim, now_ms: int, waits: Callable[[int], bool]) -> int:
        """Return from when on hosts may be reserved for the first candidate, and remember since when it is the first.

        `waits` says whether an entry still waits. Called only within a pass, so that a replay of the term remembers the
        same.
        """
        needed, of = hosts_needed(self._fleet, claim.group.shape)
        if not 1 < needed <= of:
            return now_ms
        since = self._since.get(claim.item)
        if since is None:
            since = now_ms if claim.accepted_ms >= self._began_ms else claim.accepted_ms + self._patience_ms
            if len(self._since) >= FIRST_MAX:
                self._since = {item: at for item, at in self._since.items() if waits(item)}
            if len(self._since) >= FIRST_MAX:
                return now_ms
            self._since[claim.item] = since
        waited_from = max(claim.accepted_ms + self._patience_ms, self._granted.get(_alike(claim.group), 0))
        waited, (times, by) = max(0, since - waited_from), LETS_ON
        return since - (-waited * (needed - 1) * times // (of * by))

    def granted(self, held: Reservation, claims: list[Claim]) -> None:
        """Note that a reservation was made for one of these candidates."""
        others = [claim for claim in claims if claim.later]
        mine = next(claim for claim in claims if claim.item == held.item)
        self._granted.pop(_alike(mine.group), None)
        self._granted[_alike(mine.group)] = held.since_ms
        if len(self._granted) > FIRST_MAX:
            del self._granted[next(iter(self._granted))]
        if not others or mine.later:
            return
        first = min(others)
        if (first.key, first.item) < (mine.key, mine.item):
            if first.item != self._passed:
                self._passed, self._passed_hosts = first.item, 0
            self._passed_hosts += len(held.hosts)


def _alike(group: Group) -> tuple[int, int]:
    return (group.priority, group.shape.index)


def _sizes(fleet: Fleet, shape: Shape) -> Iterator[tuple[int, int]]:
    """Yield (GPUs of a host, number of hosts) for each class that could run the shape."""
    for cls, _ in fleet.capable(shape):
        yield len(cls.devices), len(cls.hosts)


def fills_hosts(fleet: Fleet, shape: Shape) -> bool:
    """Return whether the shape asks for as many GPUs at once as the largest host that could run it has, or more."""
    most = max((gpus for gpus, _ in _sizes(fleet, shape)), default=0)
    return 0 < most <= shape.gpus


def hosts_needed(fleet: Fleet, shape: Shape) -> tuple[int, int]:
    """Return how many empty hosts the shape needs at least, and how many hosts could run it; zeros if none could."""
    each = max((gpus // shape.count if shape.count else shape.together for gpus, _ in _sizes(fleet, shape)), default=0)
    return (-(-shape.together // each) if each else 0), sum(hosts for _, hosts in _sizes(fleet, shape))


#: ledger ms between two scans for overdue jobs, or of the reservation's hosts
LOOK_MS: Final = 1000
#: the reservation is checked against fair share each time usage has decayed by one such part of its half-life
OWED_PART: Final = 512
#: the most queue groups that are scanned for overdue jobs, and again for those that need whole hosts
GROUPS_MAX: Final = 512
#: the most kinds of overdue jobs whose hosts are searched in one scan, since each search walks the fleet
WALKS_MAX: Final = 8
NO_HOSTS: Final[frozenset[int]] = frozenset()


#: jobs with the same search: their shape, and the hosts that drains exclude for them
_Sought = tuple[int, frozenset[int]]


class InVain(NamedTuple):
    """A failed search for hosts; its result holds until the fleet changes."""

    change: int
    at_ms: int


class Reserving:
    """Makes, checks and gives up the reservation of one engine. Hosts are named by their workers' numbers."""

    def __init__(
        self,
        fleet: Fleet,
        order: QueueOrder,
        estimates: Estimates,
        preempting: Preempting,
        patience_ms: int,
        could_ever: Callable[[Shape], bool],
    ) -> None:
        self._could_ever = could_ever
        self.reservation: Reservation | None = None
        self.is_waited_for = False  # whether a queue group waited for the reserved hosts at the last scan, or since
        self._fleet = fleet
        self._order = order
        self._estimates = estimates
        self._preempting = preempting
        self._patience_ms = patience_ms
        self._claims = Claims(fleet, patience_ms)
        self._draft: Draft | None = None  # the draft of the last pass
        self._looked_ms = -patience_ms
        self._seen: tuple[int, int, int] | None = None  # the `_view` of the last scan
        #: when the next job that might get a reservation becomes overdue, or is due for one
        self._next_claim_ms = math.inf
        self._moved_ms = 0  # ledger ms at which the reservation's hosts were last chosen
        self._in_vain: dict[_Sought, InVain] = {}  # failed searches for candidates of the last scan
        self.learned: set[str] = set()  # tenants of which runs were learned since the last scan
        self._preemptors = NO_HOSTS  # numbers of the jobs for which other jobs were being ended at the last pass

    # ----------------------------------------------------------------------- which hosts are excluded for a group

    def excluded(self, priority: int, shape: Shape, tenant: str) -> frozenset[int]:
        """Return the hosts that are excluded for jobs of this priority, shape and tenant.

        Under fair share, a tenant that is owed more passes the reservation. Hosts that were freed by ending jobs belong
        to the job for which those ended, even if another job has waited longer.
        """
        taken = self.taken_back(priority, shape, tenant)
        held, turns, draft = self.reservation, self._order.turns, self._draft
        if held is None or self.passes(priority, shape, held):
            return taken
        if turns is not None and turns.is_owed(tenant, held.tenant):
            return taken
        if draft is None or not draft.state.preempting:
            return held.hosts
        return (held.hosts - self._preempting.own(draft, shape, priority, tenant)) | taken

    def passes(self, priority: int, shape: Shape, held: Reservation) -> bool:
        """Return whether jobs of this priority and shape may use the reserved hosts.

        They may if the reserved job has the same priority and shape, or if they may preempt it.
        """
        if held.priority == priority and held.shape is shape:
            return True
        return self._preempting.priority <= priority > self._order.standing_of(held.priority, held.item)

    def taken_back(self, priority: int, shape: Shape, tenant: str) -> frozenset[int]:
        """Return the hosts on which jobs are being ended for a job not of this priority, shape and tenant."""
        draft = self._draft
        if draft is None or not draft.state.preempting:
            return NO_HOSTS
        return self._preempting.held(draft, shape, priority, tenant)

    # ----------------------------------------------------------------------------------------- a pass begins

    def begin(self, draft: Draft) -> None:
        """Begin a pass; `QueueOrder` has begun before."""
        self._draft = draft
        self._reserve(draft)
        if self._preemptors or draft.state.preempting:
            self._settle(draft)

    def _settle(self, draft: Draft) -> None:
        """Give up preemptions for jobs that no longer wait; their reserved hosts open again."""
        preempting = draft.state.preempting
        if not self._preemptors <= preempting.keys():
            self._fleet.opens()
        self._preemptors = frozenset(preempting)
        self._preempting.settle(draft, lambda job: self._still_waits(draft, job))

    def _still_waits(self, draft: Draft, job: Job) -> bool:
        """Return whether a job for which others are being ended could still start."""
        waiting = any(draft.replica(replica).state == QUEUED for replica in job.replicas)
        return waiting and draft.job(job).hold is None and draft.tenant(job.tenant).hold is None

    def _reserve(self, draft: Draft) -> None:
        """Give up a used or void reservation; scan on a change or at a computed time, at most once a second."""
        self._claims.begin(draft.time_ms)
        held = self.reservation
        if held is not None and not self._may_start(draft, held):
            self.give_up()
            held = None
        if draft.time_ms - self._looked_ms < LOOK_MS or not (self._has_changed(draft) or self._is_time(draft)):
            return
        self._looked_ms = draft.time_ms
        self._scan(draft, held)
        self.learned.clear()
        # else the scan saw changes that are not in the state yet
        self._seen = self._view(draft) if draft.empty else None

    def _scan(self, draft: Draft, held: Reservation | None) -> None:
        """Update the current reservation; if there is none, reserve hosts for the first overdue job.

        An overdue job of higher priority takes a reservation over.
        """
        order = self._order
        if held is not None:
            excluded = order.kept_from(draft, held.item) | held.shape.refusing
            before = held.hosts
            with self._fleet.avoiding(held.shape.avoid):
                stands = self._keep(held, excluded, draft.time_ms)
            if stands:
                if held.hosts != before:
                    self._fleet.opens()  # hosts that it left open only now: `avoiding` would have undone that
                self._reserve_for_first(draft, self._above(held))
                if self.reservation is held:
                    self._reopen(held, draft.time_ms)
                return
            self.give_up()
        self._reserve_for_first(draft, list(order.queue.groups.values()))

    def _above(self, held: Reservation) -> list[Group]:
        """Return the queue groups of higher priority, and of no lesser claim, than the job of a reservation."""
        order = self._order
        own = order.queue.group_of(held.priority, held.shape, held.tenant)
        if own is None:
            return []
        guaranteed, priority, _ = order.key(own)
        # most groups are of no higher priority, which without ageing needs no key: there may be thousands
        higher = [
            group
            for group in order.queue.groups.values()
            if group.entries and (order.ageing is not None or group.priority > held.priority)
        ]
        return [group for group in higher if (key := order.key(group))[1] < priority and key[0] <= guaranteed]

    def _reserve_for_first(self, draft: Draft, groups: list[Group]) -> None:
        """Reserve hosts for the first overdue job of these groups, in place of any reservation, if some can hold it."""
        order = self._order
        self._next_claim_ms = math.inf
        likely = self._likely(groups)
        for group in likely:
            if (
                order.prune(draft, group)
                and (job := draft.state.jobs.get(group.entries[0] >> REPLICA_BITS)) is not None
            ):
                overdue_ms = job.accepted_ms + self._patience_ms + 1
                if overdue_ms > draft.time_ms:
                    self._next_claim_ms = min(self._next_claim_ms, overdue_ms)
        claims = self._claims_of(draft, likely)
        found = self._grant(draft, claims)
        if found is not None:
            self.give_up()
            self.reservation = found
            self._moved_ms = draft.time_ms
            self._claims.granted(found, claims)

    def _may_start(self, draft: Draft, held: Reservation) -> bool:
        """Return whether the job of a reservation still waits, and its tenant may start it."""
        group = self._order.queue.group_of(held.priority, held.shape, held.tenant)
        return group is not None and self._order.waits(draft, held.item) and self._order.may(draft, group)

    def _likely(self, groups: list[Group]) -> list[Group]:
        """Return those of some queue groups whose first job may be the first reservation candidate.

        All of them; if there are more than `GROUPS_MAX`, the first ones in order, plus the first ones that need whole
        hosts. With as many shapes as jobs, a scan of all groups each second would hold up the leader.
        """
        if len(groups) <= GROUPS_MAX:
            return groups
        rows = [(self._order.key(group), group.entries[0], group) for group in groups if group.entries]
        least = min((len(cls.devices) for cls in self._fleet.classes.values() if cls.devices), default=0)
        whole = [row for row in rows if row[2].shape.gpus >= least]
        likely = nsmallest(GROUPS_MAX, rows) + nsmallest(GROUPS_MAX, whole)
        return list({group: None for _, _, group in likely})

    def _claims_of(self, draft: Draft, groups: list[Group]) -> list[Claim]:
        """Return the overdue first jobs of these groups as reservation candidates, in order."""
        impatient: list[Claim] = []
        for group in groups:
            item = group.entries[0] if group.entries else None
            job = draft.state.jobs.get(item >> REPLICA_BITS) if item is not None else None
            if item is None or job is None or draft.time_ms - job.accepted_ms <= self._patience_ms:
                continue
            if self._order.may(draft, group):
                impatient.append(
                    Claim(
                        self._order.key(group), not fills_hosts(self._fleet, group.shape), item, group, job.accepted_ms
                    )
                )
        return self._claims.in_order(impatient)

    def _grant(self, draft: Draft, claims: list[Claim]) -> Reservation | None:
        """Reserve hosts for the first candidate that some hosts could hold, if it is due; else return None.

        A candidate that no hosts could hold must neither hide nor delay a later one. A failed search stands until the
        fleet changes; if more than `WALKS_MAX` kinds must be searched, the kinds searched longest ago have their turn.
        """
        now_ms, change = draft.time_ms, self._fleet.changes
        kinds: dict[_Sought, Claim] = {}
        for claim in claims:
            if self._could_ever(claim.group.shape):
                kinds.setdefault((claim.group.shape.index, self._order.kept_from(draft, claim.item)), claim)
        vain = self._in_vain = {kind: found for kind, found in self._in_vain.items() if kind in kinds}
        turn = [kind for kind in kinds if kind not in vain or vain[kind].change != change]
        if len(turn) > WALKS_MAX:
            self._next_claim_ms = now_ms + LOOK_MS
            longest_ago = set(nsmallest(WALKS_MAX, turn, key=lambda kind: vain[kind].at_ms if kind in vain else 0))
            turn = [kind for kind in turn if kind in longest_ago]
        for kind in turn:
            claim, leaving = kinds[kind], kind[1]
            shape = claim.group.shape
            with self._fleet.avoiding(shape.avoid):  # and not on devices that the job avoids
                found = soonest(self._fleet, shape, leaving | shape.refusing, self._estimates, now_ms)
            if found is None:
                vain[kind] = InVain(change, now_ms)
                continue
            if (due_ms := self._due_ms(draft, claim)) > now_ms:
                self._next_claim_ms = min(self._next_claim_ms, due_ms)
                return None
            return Reservation(claim.item, claim.group, *found, now_ms)
        return None

    def _due_ms(self, draft: Draft, claim: Claim) -> int:
        """Return from when on hosts may be reserved for a candidate. Under fair share that is at once.

        Under fair share the tenants that went before it have had more than their share already.
        """
        if self._order.turns is not None:
            return draft.time_ms
        waits = self._order.waits
        return self._claims.due_ms(claim, draft.time_ms, lambda item: waits(draft, item))

    # ------------------------------------------------------------------------------- when it is scanned again

    def _view(self, draft: Draft) -> tuple[int, int, int]:
        """Return a value that differs whenever a scan may have another result for a reason other than time."""
        return (draft.state.digest, self._fleet.version, self._fleet.changes)

    def _has_changed(self, draft: Draft) -> bool:
        return self._seen is None or not draft.empty or self._view(draft) != self._seen

    def _is_time(self, draft: Draft) -> bool:
        return draft.time_ms >= self._moment_ms(draft)

    def _moment_ms(self, draft: Draft) -> float:
        """Return the ledger ms from which on a scan may have another result though nothing has changed.

        Time alone opens reserved hosts to groups that wait for them: when the expected start moves later, or more is
        owed to a tenant. If no group waits for them, the reservation only has to be given up in time, or taken over.
        """
        held, looked_ms = self.reservation, self._looked_ms
        if draft.state.windows:
            return looked_ms + LOOK_MS
        if held is None:
            return self._next_claim_ms
        if self._order.ageing is not None:
            return looked_ms + LOOK_MS  # age may lift another job above its own
        moments = [self._next_claim_ms]
        if held.short_ms >= 0:
            moments.append(held.short_ms + SHORT_MS)
        if self.is_waited_for:
            if held.start_ms is not None:
                moments.append(looked_ms + max(LATER_MS, (held.start_ms - looked_ms) // LATER_PART))
            if self._order.turns is not None:
                moments.append(looked_ms + max(LOOK_MS, draft.state.half_life_ms // OWED_PART))
        return min(moments)

    def next_ms(self, draft: Draft) -> float:
        """Return the ledger ms of the next scan if nothing more happens; infinity for none."""
        return self._looked_ms + LOOK_MS if self._has_changed(draft) else self._moment_ms(draft)

    # --------------------------------------------------------------------------------- while one stands

    def _keep(self, held: Reservation, excluded: frozenset[int], now_ms: int) -> bool:
        """Update a reservation's start, moving it to hosts that are free sooner; return whether it stands.

        While its start is known it moves at most `MOVES_MAX` times: each move leaves hosts that were emptied in part,
        and jobs that outlive their estimates would send it to and fro for ever. Once its start is unknown it may move
        again. If no other hosts are found then, it is kept for a while: a worker that restarts, or is cordoned for a
        moment, must not undo what was emptied either.
        """
        fleet, estimates = self._fleet, self._estimates
        held.start_ms = expected(fleet, held.shape, held.hosts, excluded, estimates, now_ms)
        if held.start_ms is not None:
            held.short_ms = -1
            if now_ms - self._moved_ms < MOVE_MS_A_HOST * len(fleet.hosts) or held.moves >= MOVES_MAX:
                return True
        self._moved_ms = now_ms
        found = soonest(fleet, held.shape, excluded, estimates, now_ms)
        if found is None:
            return held.start_ms is not None or held.is_short_for(now_ms) < SHORT_MS
        if held.start_ms is None or found[1] < held.start_ms:
            held.hosts, held.start_ms = found
            held.short_ms = -1
            held.moves += 1
        return True

    def _reopen(self, held: Reservation, now_ms: int) -> None:
        """Reopen the queue groups that may now pass the reservation although no host has opened.

        Over time more is owed to a tenant; if the hosts become free later than expected, more jobs end before that; and
        runs of a tenant's jobs that have ended say how long its others take.
        """
        start_ms, looked_ms, later = held.start_ms, held.looked_start_ms, False
        if start_ms is not None:
            least_ms = max(LATER_MS, (start_ms - now_ms) // LATER_PART)
            later = looked_ms is None or start_ms - looked_ms > least_ms
            if looked_ms is None or later or start_ms < looked_ms:
                held.looked_start_ms = start_ms
        self.is_waited_for = False
        for group in self._order.queue.groups.values():
            if group.verdict.waits is Waits.RESERVED:
                is_learned = group.tenant in self.learned
                if later or is_learned or not held.hosts & self.excluded(group.priority, group.shape, group.tenant):
                    group.verdict = VOID
                else:
                    self.is_waited_for = True

    def forget(self, num: int) -> None:
        """Give up the reservation if it is for this job, which was held, or whose priority or shape has changed."""
        if self.reservation is not None and self.reservation.item >> REPLICA_BITS == num:
            self.give_up()

    def give_up(self) -> None:
        """Give up the reservation, if there is one: its hosts are open to all jobs again."""
        if self.reservation is None:
            return
        self.reservation = None
        self._fleet.opens()  # the hosts of the reservation


class Backfilling:
    """Places jobs on reserved hosts if they end before the job of the reservation is expected to start."""

    def __init__(
        self, queue: Queue, order: QueueOrder, reserving: Reserving, placing: Placing, estimates: Estimates
    ) -> None:
        self.fresh: dict[int, tuple[str, Request]] = {}  # jobs accepted in this record, by number
        self._queue = queue
        self._order = order
        self._reserving = reserving
        self._placing = placing
        self._estimates = estimates

    def backfill(self, draft: Draft, group: Group, room: float) -> int:
        """Place jobs of a group that end before the reservation starts. Return the number of replicas.

        0 if no hosts are excluded for the group; else it gets the verdict that it waits for reserved hosts, and its
        first `DEPTH_MAX` entries are tried. `room` is how many GPUs the group's tenant may still lease. The record's
        evidence covers only jobs placed in order.
        """
        held, shape = self._reserving.reservation, group.shape
        if held is None or not self._reserving.excluded(group.priority, shape, group.tenant):
            return 0
        group.verdict = Verdict(Waits.RESERVED, group.verdict.change)
        self._reserving.is_waited_for = True
        if held.start_ms is None:
            return 0
        taken = self._reserving.taken_back(group.priority, shape, group.tenant)
        placed, need = 0, shape.gpus
        for item in list(islice(group.entries, DEPTH_MAX)):
            if need > room or draft.full:
                break
            if not self._surely_ends(draft, shape, item, held.start_ms - draft.time_ms):
                continue
            if self._placing.place(draft, shape, item, taken) is None:
                if self._order.kept_from(draft, item):
                    continue  # a drain excludes hosts for this job; the next one may have another time limit
                break
            self._queue.take(group, [item])
            placed += shape.together
            room -= need
        if placed:
            self._order.count(draft, group, placed)
        return placed

    def _surely_ends(self, draft: Draft, shape: Shape, item: int, within_ms: int) -> bool:
        """Return whether an entry still waits and surely ends within `within_ms` ms.

        That is judged by its time limit, else by how long nine of ten such runs took.
        """
        if not self._order.waits(draft, item):
            return False
        num = item >> REPLICA_BITS
        job = draft.state.jobs.get(num)
        if job is not None:
            most_ms = self._estimates.most_ms(job.tenant, self._estimates.request_of(job), shape, job.accepted_ms)
        elif num in self.fresh:
            most_ms = self._estimates.most_ms(*self.fresh[num], shape, draft.time_ms)
        else:
            return False
        return most_ms is not None and most_ms <= within_ms
