"""Hosts that are held back in a pass: reserved for whoever is out of patience, or taken back by preemption.

One reservation at a time, and whose it is, is `Claims`; which hosts, `reserve`. Soft: a new leader looks anew.
"""

from __future__ import annotations

from heapq import nsmallest
from typing import Final

from moorage.scheduler.core.decide.lines import Lines
from moorage.scheduler.core.decide.preempting import Preempting
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet import Fleet
from moorage.scheduler.core.queueing.backfill import Estimates
from moorage.scheduler.core.queueing.claims import Claim, Claims, fills_hosts
from moorage.scheduler.core.queueing.queue import REPLICA_BITS, Line
from moorage.scheduler.core.queueing.reserve import (
    LATER_MS,
    LATER_PART,
    MOVE_MS_A_HOST,
    SHORT_MS,
    Reservation,
    expected,
    soonest,
    still_holds,
)
from moorage.scheduler.core.shape import Shape
from moorage.scheduler.core.state import QUEUED, Job

#: ledger ms between two looks for somebody out of patience
LOOK_MS: Final = 1000
#: lines of the queue that are looked at for whoever is out of patience, and as many of those that need whole hosts
LINES_MAX: Final = 512
NOBODY: Final[frozenset[int]] = frozenset()


class Holding:
    """Over one engine's fleet and queue. Hosts are named by their workers' numbers."""

    def __init__(
        self, fleet: Fleet, lines: Lines, estimates: Estimates, preempting: Preempting, patience_ms: int
    ) -> None:
        self.reservation: Reservation | None = None
        self._fleet = fleet
        self._lines = lines
        self._estimates = estimates
        self._preempting = preempting
        self._patience_ms = patience_ms
        self._claims = Claims(fleet, patience_ms)
        self._draft: Draft | None = None  # the last pass's
        self._looked_ms = -patience_ms
        self._moved_ms = 0  # ledger ms at which the reservation's hosts were last chosen
        self._preemptors = NOBODY  # the jobs for which others ended at the last pass, by number

    # ------------------------------------------------------------------------------------- whose they are

    def barred(self, priority: int, shape: Shape, tenant: str) -> frozenset[int]:
        """The hosts that are held back for somebody else than the lines of this priority and shape.

        Under fair share a tenant passes to which more is owed than to the one they are held for; and what others ended
        for is theirs for whom they did, whoever has waited longer.
        """
        taken = self.taken_back(priority, shape, tenant)
        held, turns, draft = self.reservation, self._lines.turns, self._draft
        if held is None or self.passes(priority, shape, held):
            return taken
        if turns is not None and turns.is_owed(tenant, held.tenant):
            return taken
        if draft is None or not draft.state.preempting:
            return held.hosts
        return (held.hosts - self._preempting.own(draft, shape, priority, tenant)) | taken

    def passes(self, priority: int, shape: Shape, held: Reservation) -> bool:
        """Whether a line of this priority and shape passes a reservation: its own, or of somebody whom it would end."""
        if held.priority == priority and held.shape is shape:
            return True
        return self._preempting.priority <= priority > self._lines.standing_of(held.priority, held.item)

    def taken_back(self, priority: int, shape: Shape, tenant: str) -> frozenset[int]:
        """The hosts on which others end for somebody else."""
        draft = self._draft
        if draft is None or not draft.state.preempting:
            return NOBODY
        return self._preempting.held(draft, shape, priority, tenant)

    # ----------------------------------------------------------------------------------------- a pass begins

    def begin(self, draft: Draft) -> None:
        """A pass begins; the order of `Lines` stands already."""
        self._draft = draft
        if self._lines.order != "fifo":
            self._reserve(draft)
        if self._preemptors or draft.state.preempting:
            self._settle(draft)

    def _settle(self, draft: Draft) -> None:
        """Give up preemptions that are void; what was held for whoever needs it no more is open again."""
        preempting = draft.state.preempting
        if not self._preemptors <= preempting.keys():
            self._fleet.opens()
        self._preemptors = frozenset(preempting)
        self._preempting.settle(draft, lambda job: self._still_waits(draft, job))

    def _still_waits(self, draft: Draft, job: Job) -> bool:
        """Whether whoever others end for could still start."""
        waiting = any(draft.replica(replica).state == QUEUED for replica in job.replicas)
        return waiting and draft.job(job).hold is None and draft.tenant(job.tenant).hold is None

    def _reserve(self, draft: Draft) -> None:
        """Give up a reservation that is used or void; look once a second for somebody out of patience."""
        self._claims.begin(draft.time_ms)
        held, lines = self.reservation, self._lines
        if held is not None and not self._may_start(draft, held):
            self.give_up()
            held = None
        if draft.time_ms - self._looked_ms < LOOK_MS:
            return
        self._looked_ms = draft.time_ms
        if held is not None:
            barred = lines.left_too_soon(draft, held.item) | held.shape.refusing
            with self._fleet.avoiding(held.shape.avoid):
                if self._keep(held, barred, draft.time_ms):
                    self._reopen(held, draft.time_ms)
                    return
            self.give_up()
        likely = self._likely_lines()
        for line in likely:
            lines.prune(draft, line)
        claims = self._claims_of(draft, likely, NOBODY)
        self.reservation = self._grant(draft, claims)
        if self.reservation is not None:
            self._moved_ms = draft.time_ms
            self._claims.granted(self.reservation, claims)

    def _may_start(self, draft: Draft, held: Reservation) -> bool:
        """Whether the job of a reservation still waits, and its tenant may start it."""
        return self._lines.waits(draft, held.item) and held.shape.gpus <= self._lines.room_of(draft, held.tenant)

    def next_reservation(self, draft: Draft, without: frozenset[int]) -> Reservation | None:
        """Who would get hosts reserved, with these jobs (their numbers) gone, now or before long; changes nothing."""
        return self._grant(draft, self._claims_of(draft, self._likely_lines(), without), early=True)

    def _likely_lines(self) -> list[Line]:
        """The lines whose first one may have the first claim.

        All of them; of more than `LINES_MAX` those that come first, and those that come first for whole hosts: where as
        many shapes wait as jobs, a look at all of them once a second would hold up the leader.
        """
        queue, head_of = self._lines.queue, self._lines.head_of()
        if len(queue.lines) <= LINES_MAX:
            return list(queue.lines.values())
        rows = [
            (key[0] if head_of is None else head_of(line), line.entries[0], line)
            for key, line in queue.lines.items()
            if line.entries
        ]
        least = min((len(cls.devices) for cls in self._fleet.classes.values() if cls.devices), default=0)
        whole = [row for row in rows if row[2].shape.gpus >= least]
        likely = nsmallest(LINES_MAX, rows) + nsmallest(LINES_MAX, whole)
        return list({line: None for _, _, line in likely})

    def _claims_of(self, draft: Draft, lines: list[Line], without: frozenset[int]) -> list[Claim]:
        """Who is out of patience, the first of each line, in order; with these jobs (their numbers) gone."""
        head_of = self._lines.head_of()
        impatient: list[Claim] = []
        for line in lines:
            item = next((item for item in line.entries if item >> REPLICA_BITS not in without), None)
            job = draft.state.jobs.get(item >> REPLICA_BITS) if item is not None else None
            if item is None or job is None or draft.time_ms - job.accepted_ms <= self._patience_ms:
                continue
            if self._lines.may(draft, line):
                head = head_of(line) if head_of is not None else -line.priority
                impatient.append(Claim(head, not fills_hosts(self._fleet, line.shape), item, line, job.accepted_ms))
        return self._claims.in_order(impatient)

    def _grant(self, draft: Draft, claims: list[Claim], *, early: bool = False) -> Reservation | None:
        """Hosts for the first of these claims that some could hold, if it is due or `early`."""
        for claim in claims:  # what no host could hold must not hide who could be helped
            if not early and not self._comes_due(draft, claim):
                return None
            line = claim.line
            barred = self._lines.left_too_soon(draft, claim.item) | line.shape.refusing
            with self._fleet.avoiding(line.shape.avoid):  # and not where it would not be put
                hosts, start_ms = soonest(self._fleet, line.shape, barred, self._estimates, draft.time_ms)
            if hosts:
                tenant = draft.state.jobs[claim.item >> REPLICA_BITS].tenant
                return Reservation(claim.item, line, tenant, hosts, start_ms, draft.time_ms)
        return None

    def _comes_due(self, draft: Draft, claim: Claim) -> bool:
        """Whether hosts are closed for it by now; at once under fair share: who is let on has had more already."""
        waits = self._lines.waits
        return self._lines.turns is not None or self._claims.comes_due(
            claim, draft.time_ms, lambda item: waits(draft, item)
        )

    # --------------------------------------------------------------------------------- while one stands

    def _keep(self, held: Reservation, barred: frozenset[int], now_ms: int) -> bool:
        """Look after a reservation: on its own hosts, else on others; where there are none it is kept for a while.

        A worker that is started anew, or cordoned for a moment, must not undo what was emptied.
        """
        if still_holds(self._fleet, held, barred):
            held.short_ms = -1
            self._move(held, barred, now_ms)
            return True
        hosts, start_ms = soonest(self._fleet, held.shape, barred, self._estimates, now_ms)
        if not hosts:
            return held.is_short_for(now_ms) < SHORT_MS
        self._take_hosts(held, hosts, start_ms, now_ms)
        return True

    def _move(self, held: Reservation, barred: frozenset[int], now_ms: int) -> None:
        """See again when a reservation's hosts will hold it, and now and then whether others would sooner."""
        fleet, estimates = self._fleet, self._estimates
        held.start_ms = expected(fleet, held, barred, estimates, now_ms)
        if now_ms - self._moved_ms < MOVE_MS_A_HOST * len(fleet.hosts):
            return
        self._moved_ms = now_ms
        hosts, start_ms = soonest(fleet, held.shape, barred, estimates, now_ms)
        if start_ms is None or hosts == held.hosts or (held.start_ms is not None and held.start_ms <= start_ms):
            return
        self._take_hosts(held, hosts, start_ms, now_ms)

    def _take_hosts(self, held: Reservation, hosts: frozenset[int], start_ms: int | None, now_ms: int) -> None:
        """Others than it had."""
        held.hosts, held.start_ms, held.short_ms = hosts, start_ms, -1
        self._moved_ms = now_ms
        self._fleet.opens()  # the hosts it leaves

    def _reopen(self, held: Reservation, now_ms: int) -> None:
        """Open the queue groups again that time alone lets pass a reservation, though nothing changes in the fleet.

        More is owed to a tenant by and by; and where the hosts are free later than was expected, jobs may end before.
        """
        start_ms, looked_ms, later = held.start_ms, held.looked_start_ms, False
        if start_ms is not None:
            least_ms = max(LATER_MS, (start_ms - now_ms) // LATER_PART)
            later = looked_ms is None or start_ms - looked_ms > least_ms
            if looked_ms is None or later or start_ms < looked_ms:
                held.looked_start_ms = start_ms
        for line in self._lines.queue.lines.values():
            if line.barred and (later or not held.hosts & self.barred(line.priority, line.shape, line.tenant)):
                line.barred, line.blocked_at = False, -1

    def forget(self, num: int) -> None:
        """A job is held, moved, or asks differently now: nothing is held back for it as it stood."""
        if self.reservation is not None and self.reservation.item >> REPLICA_BITS == num:
            self.give_up()

    def give_up(self) -> None:
        """Open the hosts of the reservation, if there is one, to all jobs."""
        if self.reservation is None:
            return
        self.reservation = None
        self._fleet.opens()  # its hosts
