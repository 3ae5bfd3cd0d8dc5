"""Who may use which host now, and which queue groups a pass may skip: the theory of the pass.

Rule 1: everything that says who may use which host now is here. The last answer of `plan` is all that is remembered
between two passes, and a group's verdict is written and judged here alone.

*What keeps a job from a host with room for it* is one of four things, and nothing else does:

- The host is reserved for another job (`plan`). The reserved job's equals (same priority and shape) pass it, as do jobs
  that may preempt it, and under fair share tenants that are owed more, but not if it is a gang over several hosts. Who
  would borrow GPUs passes no job within its tenant's guarantee. Any job passes it that surely ends before the reserved
  job is expected to start (`backfill`).
- Jobs were ended there for another job (`preempt`): until that starts, the host is its own.
- The host is drained before the job surely ends, the job avoids it, waits for one with its data
  (`QueueOrder.kept_from`), or it refused jobs of its shape (`Shape.refusing`). That is the job's own matter: those
  behind it in its group are tried.
- Its tenant's limit, or a hold (`QueueOrder.may`). That is the tenant's matter: its groups are served, and wait.

What counts as room is the host's matter: `Host.open_to` leaves out devices in other use, unwell, or awaited by a frozen
job.

*When the plan is made again*: at most once a second (with more than a thousand hosts: once in as many ms), and at once
if room has come free on reserved hosts, or one of them has closed: the plan before would let the wrong job in. A
reservation whose job has started or ended is dropped in the next pass, whatever the time. If its hosts still have room,
or its job waits but may not start any more, the next plan is made at once. A plan less than a second before time alone
may give another one waits until then: else that one came up to a second late. Hosts that a plan leaves are opened, one
by one.

*A verdict* says that the first job of a group found no room: at which change of the fleet, and, where reserved hosts
had room for it, under which plan. It holds

- until a host opens that may have room for it (`Fleet.opened_since`): a job's end changes one host, so that one alone
  is looked at for each shape that waits, not the whole fleet;
- and, of a group kept from reserved hosts with room, until more may pass than before: then backfill is tried again, and
  nothing else. That is when a plan has other hosts or a later start, when a run was learned or a tenant has come to be
  owed more since the last plan, when the group gets a job; and at each plan, if only some of its jobs had their turn.

So no job waits for longer than a second beside a host that it may use, and a pass costs nothing for those for which
nothing has changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heapify
from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.host import EXCLUSIVE, Host
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.acts import Reserves
from moorage.scheduler.core.ledger.fairkeys import owner_of, parts_of
from moorage.scheduler.core.ledger.records import GangPhase
from moorage.scheduler.core.ledger.state import QUEUED, Job
from moorage.scheduler.core.queue.queue import VOID, Group, Key, Verdict
from moorage.scheduler.core.schedule.plan import NOTHING, Known, Reservation, needs_whole_hosts, plan
from moorage.scheduler.core.schedule.preempt import Preempting
from moorage.scheduler.core.schedule.runtime import DEPTH_MAX

#: (change of the fleet at the verdict, priority, shape): groups of one kind all find room, or none does
_Kind = tuple[int, int, int]
_NO_HOSTS: Final[frozenset[int]] = frozenset()
#: the ledger tells a start anew once it has moved by more than so many ms
TOLD_MS: Final = 60_000


class Verdicts:
    """The verdicts on one engine's queue groups, and the reservation. Hosts are named by their workers' numbers.

    All other memory here belongs to a single pass.
    """

    def __init__(self, known: Known, preempting: Preempting) -> None:
        self.reservation: Reservation | None = None  # of the last plan, while its job may start
        self._answer = NOTHING  # the last plan
        self._usable = 0  # how many of the reserved hosts were usable at the last plan
        self._changes = 0  # the change of the fleet up to which openings were looked at
        self._number = 0  # of the last plan from which on more may pass than before; the first is 1
        self._turn = 0  # how many plans were made
        self._learned = 0  # runs learned before the last plan
        self._let_by_share = frozenset[tuple[str, bool]]()  # see `_owed_or_equal`, as of the last plan
        #: of tenants with guaranteed GPUs, as of the last plan
        self._rights: tuple[tuple[str, int, int], ...] = ()
        self._planned_ms = -math.inf  # when it was made
        self._until_ms = math.inf  # when time alone may give another one
        self._awaits_moment = False  # whether a plan that is due waits for that moment, which is near
        self._seen: tuple[int, int, int] | None = (
            None  # the `_view` of the last plan; None if that was not of the state
        )
        self._known = known
        self._fleet = known.fleet
        self._order = known.order
        self._state = known.order.state
        self._preempting = preempting
        self._preemptors = _NO_HOSTS  # numbers of the jobs for which other jobs were being ended at the last pass
        self._draft: Draft | None = None  # the draft of the last pass
        self._last = VOID  # the last verdict that was given
        self._opened: dict[int, list[Host] | None] = {}  # hosts that opened since a change; None for all
        #: for a change and a shape: whether none of the hosts opened since can have room
        self._closed: dict[tuple[int, int], bool] = {}
        self._full: set[_Kind] = set()  # kinds without room in this pass although no host was excluded

    # ------------------------------------------------------------------------------------- a pass begins

    def reserve(self, draft: Draft) -> None:
        """Drop a reservation that no longer stands, and plan anew if it is time; `QueueOrder` has begun the pass."""
        if (held := self.reservation) is not None and not self.still_waits():
            if self._waits(held) or self._have_room(held.hosts):
                self._planned_ms = -math.inf
            self._become(None)
        step_ms = self._known.step_ms
        is_due = draft.time_ms - self._planned_ms >= step_ms and not self._is_settled(draft)
        self._awaits_moment = is_due and self._planned_ms > -math.inf and 0 < self._until_ms - draft.time_ms < step_ms
        if self._has_changed() or (is_due and not self._awaits_moment):
            self._awaits_moment = False
            before = self.reservation if self._turn else self._told(draft)
            answer = self._answer = plan(self._known, draft, before, self._answer.had)
            self._turn += 1
            self._number += self._lets_more_pass(answer.reservation)
            self._planned_ms, self._until_ms = draft.time_ms, answer.until_ms
            self._become(answer.reservation)
            self._usable = self._count_usable()
            # else the plan saw changes that are in no digest yet
            self._seen = self._view() if draft.empty else None
        self.tell(draft, TOLD_MS)

    def _told(self, draft: Draft) -> Reservation | None:
        """Return the reservation of the leader before, if the ledger tells it and its job still waits."""
        if draft.state.reserved is None:
            return None
        num, workers, start_ms = draft.state.reserved
        job, hosts = draft.state.jobs.get(num), frozenset(workers)
        if job is None or not self._order.waits(num) or not hosts <= self._fleet.hosts.keys():
            return None
        shape, priority = self._known.estimates.shape_of(job), self._known.priority_of(job)
        first = self._order.queue.first(num)
        return Reservation(num, first, job.tenant, priority, shape, hosts, start_ms, owner=owner_of(job))

    def tell(self, draft: Draft, late_ms: int = 0) -> None:
        """Write the reservation into the record if the ledger tells another, or a start that is off by `late_ms`."""
        held, told = self.reservation, draft.state.reserved
        if (held is None and told is None) or not draft.may(Reserves):
            return
        if held is None:
            if told is not None:
                draft.add(Reserves(told[0], [], 0))
            return
        workers = sorted(held.hosts)
        if told is None or told[:2] != (held.num, tuple(workers)) or abs(held.start_ms - told[2]) > late_ms:
            draft.add(Reserves(held.num, workers, held.start_ms))

    def _has_changed(self) -> bool:
        """Return whether room came free on reserved hosts since the last plan or the last look, or one has closed.

        While a job has its minute and no hosts, that is so with any host.
        """
        before, self._changes = self._changes, self._fleet.changes
        held, is_held_up = self.reservation, self._answer.is_held_up
        if held is None and not is_held_up:
            return False
        if self._fleet.has_opened(before, None if held is None else held.hosts):
            return True
        return self._count_usable() < self._usable

    def _count_usable(self) -> int:
        """Return how many of the reserved hosts are usable."""
        hosts = self._fleet.hosts
        nums = () if self.reservation is None else self.reservation.hosts
        return len([num for num in nums if num in hosts and hosts[num].bucket >= 0])

    def _have_room(self, nums: frozenset[int]) -> bool:
        """Return whether any of these hosts may have room for some job."""
        hosts = [self._fleet.hosts[num] for num in nums if num in self._fleet.hosts]
        return any(host.usable and (host.open or host.shared or not host.cls.devices) for host in hosts)

    def begin(self, draft: Draft) -> None:
        """Begin a pass; what is to be reserved was planned before."""
        self._draft = draft
        if self._preemptors or draft.preempting:
            self._settle(draft)
        self._opened.clear()
        self._closed.clear()
        self._full.clear()

    def next_ms(self) -> float:
        """Return the ledger ms of the next plan if nothing more happens; infinity for none."""
        is_for_time = self._awaits_moment or self._view() == self._seen
        return self._until_ms if is_for_time else self._planned_ms + self._known.step_ms

    def moment_ms(self) -> float:
        """Return the ledger ms at which time alone may give another plan, and one may be made; infinity for never."""
        return max(self._until_ms, self._planned_ms + self._known.step_ms)

    def give_up(self, draft: Draft) -> None:
        """Open the reserved hosts to all jobs."""
        self._become(None)
        self.tell(draft, TOLD_MS)

    def still_waits(self) -> bool:
        """Return whether the job of the reservation still waits, as what it was, and its tenant may start it."""
        held, order = self.reservation, self._order
        group = None if held is None else order.queue.group_of(held.priority, held.shape, held.owner)
        if held is None or group is None or not self._waits(held) or not order.may(group):
            return False
        return held.num in group.jobs

    def _waits(self, held: Reservation) -> bool:
        """Return whether the replica with the reservation still waits; another of its job may be the next by now."""
        waiting = self._order.queue.waiting.get(held.num)
        return self._order.waits(held.num) and (waiting is None or waiting.has(held.replica))

    def _view(self) -> tuple[int, int, int]:
        """Return a value that differs whenever a plan may differ for a reason other than time."""
        return (self._state.digest, self._fleet.version, self._fleet.changes)

    def _is_settled(self, draft: Draft) -> bool:
        """Return whether a plan would come to no reservation again. One that stands is made again each time."""
        if self.reservation is not None or not draft.empty or draft.time_ms >= self._until_ms:
            return False
        return self._view() == self._seen

    def _lets_more_pass(self, new: Reservation | None) -> bool:
        """Return whether the next reservation may let jobs pass that the last one, as it was last planned, kept out.

        With an unchanged start the time until then only becomes shorter, so what was too long for it stays so.
        """
        old, learned, let_in, rights = self.reservation, self._learned, self._let_by_share, self._rights
        self._learned, self._let_by_share = self._known.estimates.durations.learned, self._owed_or_equal(new)
        self._rights = self._guaranteed()
        if old is None or new is None or self._state.windows:
            return True
        if self._learned != learned or not self._let_by_share <= let_in or self._rights != rights:
            return True
        is_same = new[:6] == old[:6]
        return not is_same or new.start_ms > old.start_ms

    def _guaranteed(self) -> tuple[tuple[str, int, int], ...]:
        """Return the tenants with guaranteed GPUs, with these and how many they lease."""
        tenants = self._state.tenants.values()
        return tuple((each.name, each.guaranteed, each.gpus) for each in tenants if each.guaranteed)

    def _owed_or_equal(self, held: Reservation | None) -> frozenset[tuple[str, bool]]:
        """Return the waiting tenants that are owed more than that of the reserved job, and those whose equals are next.

        The second value tells the two apart.
        """
        if held is None:
            return frozenset()
        turns, groups = self._order.turns, self._order.queue.with_jobs()
        equals = (each for each in groups if each.shape is held.shape and each.priority == held.priority)
        owed = {(tenant, True) for tenant in {each.tenant for each in groups} if turns.is_owed(tenant, held.tenant)}
        return frozenset(owed | {(each.tenant, False) for each in equals if self._is_next(each.tenant, held)})

    def _become(self, new: Reservation | None) -> None:
        """Replace the reservation; hosts that were kept from somebody who may use them now are noted as opened."""
        old, self.reservation = self.reservation, new
        if old is None:
            return
        is_alike = new is not None and (new.priority, new.shape) == (old.priority, old.shape)
        for num in sorted(old.hosts - new.hosts if new is not None and is_alike else old.hosts):
            self._fleet.opens(num)

    def _settle(self, draft: Draft) -> None:
        """Give up preemptions for jobs that no longer wait; the hosts freed for them open to all jobs."""
        preempting = draft.state.preempting
        if not self._preemptors <= preempting.keys():
            self._fleet.opens()
        self._preemptors = frozenset(preempting)
        self._preempting.settle(draft, lambda job: self._still_waits(job))

    def _still_waits(self, job: Job) -> bool:
        """Return whether a job for which others are being ended could still start."""
        waiting = job.fresh or any(row.state == QUEUED for row in job.rows.values())
        waiting = waiting or (job.gang == GangPhase.ENDING and job.after == QUEUED)  # it has lost a rank
        return bool(waiting) and job.hold is None and self._state.read_tenant(job.tenant).hold is None

    # ----------------------------------------------------------------------- which hosts are excluded for a group

    def excluded(self, priority: int, shape: Shape, owner: str) -> frozenset[int]:
        """Return the hosts that are excluded for jobs of this priority, shape and owner.

        Hosts that were freed by ending jobs belong to the job for which those ended, even if another job has waited
        longer.
        """
        held, draft = self.reservation, self._draft
        tenant = parts_of(owner)[0]
        if held is None and (draft is None or not draft.preempting):
            return self._order.closed_by_limits(tenant, shape)
        taken = self.taken_back(priority, shape, tenant)
        if held is None or self._passes(priority, shape, owner, held):
            return taken
        if draft is None or not draft.preempting:
            return held.hosts | taken
        return (held.hosts - self._preempting.own(draft, shape, priority, tenant)) | taken

    def taken_back(self, priority: int, shape: Shape, tenant: str) -> frozenset[int]:
        """Return the hosts on which jobs are being ended for a job not of this priority, shape and tenant, and those
        that its tenant's limits of models close."""
        draft, closed = self._draft, self._order.closed_by_limits(tenant, shape)
        if draft is None or not draft.preempting:
            return closed
        return self._preempting.held(draft, shape, priority, tenant) | closed

    def _passes(self, priority: int, shape: Shape, owner: str, held: Reservation) -> bool:
        """Return whether jobs of this priority, shape and owner may use the reserved hosts.

        They may if they may end the reserved job as soon as it runs. Else who stays within the tenant's guarantee goes
        before who would borrow. Of equal ones they may if the priority and shape are the same and they come next, or if
        their tenant is owed more and their priority is not lower: higher, if it is for a gang over several hosts.
        """
        if held.shape.preemptible and not shape.preemptible and shape.mode <= EXCLUSIVE:
            return True  # for a sharer no job ends
        turns, preempting, tenant = self._order.turns, self._preempting, parts_of(owner)[0]
        borrows, held_borrows = turns.borrows(tenant, shape), turns.borrows(held.tenant, held.shape)
        if preempting.priority <= priority > self._order.standing_of(held.priority, held.num):
            return borrows <= held_borrows or not preempting.reclaim  # else it takes no tenant below its guarantee
        if borrows > held_borrows:
            return False
        if borrows < held_borrows and shape.gpus:
            return True  # a guarantee is of GPUs: it lets no job pass that asks for none
        if held.priority == priority and held.shape is shape:
            return self._is_next(owner, held)
        if held.is_wide and priority == held.priority:
            return False
        return priority >= held.priority and turns.is_owed(tenant, held.tenant)  # as in the queue's order

    def _is_next(self, owner: str, held: Reservation) -> bool:
        """Return whether the first job of an owner, of the reserved job's priority and shape, may use its hosts.

        It is that job, or comes before the next that claims hosts; a gang over several hosts goes before its equals.
        """
        order, then = self._order, self._answer.then
        group = order.queue.group_of(held.priority, held.shape, owner)
        first = group.jobs[0] if group is not None and group.jobs else None
        if first == held.num:
            return True
        if held.is_wide and self._waits(held):
            return False
        if then is None or group is None or first is None:
            return then is None
        return (order.key(group), not needs_whole_hosts(self._fleet, held.shape), first) < then[:3]

    def _let_in(self, group: Group) -> list[Host]:
        """Return the reserved hosts that a queue group may use all the same."""
        held, hosts = self.reservation, self._fleet.hosts
        if held is None:
            return []
        let = held.hosts - self.excluded(group.priority, group.shape, group.owner)
        return [hosts[num] for num in sorted(let) if num in hosts]

    def _keeps_out(self, group: Group) -> bool:
        """Return whether a queue group is kept from reserved hosts that have room for it now."""
        held, hosts, shape = self.reservation, self._fleet.hosts, group.shape
        if held is None:
            return False
        kept = [hosts[num] for num in held.hosts & self.excluded(group.priority, shape, group.owner) if num in hosts]
        return any(host.may_have_room(shape) and host.replicas_of(shape, "now") for host in kept)

    # ------------------------------------------------------------------------------------------- verdicts

    def give(self, group: Group) -> bool:
        """Record that the first job of a queue group found no room just now; return whether it may be backfilled."""
        is_kept = self._keeps_out(group)
        in_part = is_kept and len(group.jobs) > DEPTH_MAX
        self._write(group, self._number if is_kept else -1, self._turn if in_part else -1)
        return is_kept

    def goes_on(self, group: Group) -> None:
        """Let the next pass backfill more jobs of a group, since this one found some."""
        self._write(group, 0)

    def _write(self, group: Group, number: int, turn: int = -1) -> None:
        last, new = self._last, Verdict(self._fleet.changes, number, turn)
        if last != new:
            last = self._last = new  # shared, because thousands of groups may get the same verdict
        group.verdict, group.has_more = last, False

    def is_new(self, group: Group) -> bool:
        """Return whether the fleet is unchanged since a queue group got its verdict."""
        return group.verdict.change == self._fleet.changes

    def ready(self, key: Callable[[Group], Key]) -> list[tuple[Key, int, Group]]:
        """Return the queue groups that may find room, as a heap of (key, first job, group)."""
        change, number, turn = self._fleet.changes, self._number, self._turn
        found: list[tuple[Key, int, Group]] = []
        for group in self._order.queue.with_jobs():
            at, planned, tried = group.verdict
            if at == change and (planned == -1 or (planned == number and tried in (-1, turn) and not group.has_more)):
                continue
            if at < 0 or not self.holds(group):
                found.append((key(group), group.jobs[0], group))
        heapify(found)
        return found

    def holds(self, group: Group) -> bool:
        """Return whether a queue group's verdict still holds at the start of a pass; if so, renew it.

        It is asked only if the fleet or the plan has changed since the verdict. The answer is the same for all groups
        of a shape that found no room at the same change. There may be as many shapes as groups, so the hosts opened
        since are checked only by an upper bound, and exactly once the group is served (`finds_none`). A group of a
        tenant with a limit is always served, as serving it records which jobs wait for the limit.
        """
        at, planned, tried = group.verdict
        if planned >= 0:
            is_over = planned != self._number or tried not in (-1, self._turn) or group.has_more
            if is_over or self._let_in(group):
                return False
        key = (at, group.shape.index)
        closed = self._closed.get(key)
        if closed is None:
            hosts = self._hosts_opened(group)
            closed = hosts is not None and not any(host.may_have_room(group.shape) for host in hosts)
            self._closed[key] = closed
        if not closed or self._order.room(group) != math.inf:
            return False
        self._write(group, planned, tried)
        return True

    def finds_none(self, group: Group) -> bool:
        """Return whether a group without room finds none on the hosts opened since its verdict; scans those hosts.

        False if any host may have opened for it. Reserved hosts that it is let in to now count as opened.
        """
        hosts = self._hosts_opened(group)
        if hosts is None:
            return False
        if group.verdict.plan >= 0:
            hosts = hosts + self._let_in(group)
        return not any(host.may_have_room(group.shape) and host.replicas_of(group.shape, "now") for host in hosts)

    def _hosts_opened(self, group: Group) -> list[Host] | None:
        """Return the hosts that opened since a queue group found no room; None if any host may have.

        With planned drains, excluded hosts differ from job to job, and with limits of models from one placement to the
        next: None is returned.
        """
        at = group.verdict.change
        if at < 0 or self._state.windows or group.shape.parts or self._order.is_by_model(group.tenant):
            return None
        if at not in self._opened:
            self._opened[at] = self._fleet.opened_since(at)
        return self._opened[at]

    # ------------------------------------------------------------------------------------ alike in one pass

    @staticmethod
    def kind_of(group: Group) -> _Kind:
        """Return the kind of a queue group; groups of one kind find room, or none, alike if no host is excluded."""
        return (group.verdict.change, group.priority, group.shape.index)

    def no_room_for(self, kind: _Kind, group: Group) -> None:
        """Note for this pass that groups of this kind find no room, because this group found none.

        Does nothing if hosts are excluded for this group: another one may find room on them.
        """
        if group.shape.data or group.shape.each_worker:  # of the latter, jobs wait for workers of their own
            return
        if not self._state.windows and not self.excluded(group.priority, group.shape, group.owner):
            self._full.add(kind)

    def is_like_full(self, group: Group) -> bool:
        """Return whether a group of the same kind found no room in this pass; then this group gets that verdict.

        Thousands of tenants may wait for one kind of GPU while one tenant takes each GPU that becomes free.
        """
        if self.kind_of(group) not in self._full or not self._order.may(group):
            return False
        self._write(group, -1)
        return True
