"""Turns reports, cancels, lost workers and deadlines into steps of replicas: the policy of transitions.

Every function here reads the state, which has this record's steps so far, writes further steps to the draft, and
updates the fleet's view. Races are decided by the order in the ledger (ledger-rules H44).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from msgspec.structs import astuple

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.acts import LastReported, Peaked, Preempt, Used
from moorage.scheduler.core.ledger.records import (
    COUNT_BITS,
    KIND,
    NOTICE_S_MAX,
    RAN_MS_MAX,
    WITH_SUPERVISOR,
    Count,
    GangPhase,
    Mode,
    Op,
)
from moorage.scheduler.core.ledger.state import (
    AT_EXITED,
    AT_PLACED,
    AT_RUNNING,
    CANCELLED,
    CANCELLING,
    CLAIMED,
    ENDING,
    EXITED,
    EXPIRED,
    FAILED,
    FROZEN,
    LEAVING,
    LOST_KEPT,
    MAY_END,
    PLACED,
    QUEUED,
    REJECTED,
    RUNNING,
    STARTING,
    SUCCEEDED,
    TIMED_OUT,
    Attempt,
    Job,
    Replica,
    Worker,
)
from moorage.scheduler.core.lifecycle.checkpoints import note_checkpoint, note_running, note_unread
from moorage.scheduler.core.lifecycle.freezing import FREEZING, on_freezing
from moorage.scheduler.core.lifecycle.group_addresses import with_address
from moorage.scheduler.core.lifecycle.lacking import Lacking
from moorage.scheduler.core.lifecycle.readiness import READINESS, is_address, on_readiness
from moorage.scheduler.core.lifecycle.refusals import every_slot
from moorage.scheduler.core.lifecycle.retrying import row_in, with_row
from moorage.scheduler.core.lifecycle.starts import Starts
from moorage.scheduler.core.lifecycle.suspects import charged, lost_with_supervisor
from moorage.schemas.attempt import AttemptName
from moorage.schemas.codec import encode
from moorage.schemas.errors import (
    CHECKPOINT_NOT_STORED,
    CHECKPOINT_REFUSED,
    ENDED_AS_ASKED,
    ENDED_FROZEN,
    NEIGHBOUR_OVER,
    UPGRADED,
    is_as_asked,
    reason_of,
)
from moorage.schemas.frames import (
    ABOUT_THE_JOB,
    CANNOT_RUN,
    NOT_HERE,
    SETUP_FAILED,
    START_FAILED,
    Report,
    result_of,
    used_of,
)
from moorage.schemas.frames.reported import fits
from moorage.schemas.job import Request
from moorage.schemas.ranges import Ranges, is_in
from moorage.schemas.staying import PORTS_MAX
from moorage.schemas.units import many

RETRY_BACKOFF_MS: Final = 1_000
RETRY_BACKOFF_MS_MAX: Final = 60_000
RESTART_BACKOFF_MS: Final = 1_000
RESTART_BACKOFF_MS_MAX: Final = 300_000
#: an attempt that ran for so long was no failed start: the back-off before the next one begins anew
RESTART_RESET_MS: Final = 600_000
REFUSAL_BACKOFF_MS: Final = 250
REFUSAL_BACKOFF_MS_MAX: Final = 30_000
#: the exit code of a job whose request its driver refuses as wrong; a shell uses it for what it cannot execute
CODE_CANNOT_RUN: Final = 126
#: larger exit codes are cut to this, since the ledger stores whatever number a worker sends
EXIT_CODE_MAX: Final = 2**31 - 1

_LOST_REASONS: Final = frozenset({"lost", "fence"})
_AS_ASKED: Final = frozenset({ENDED_AS_ASKED, ENDED_FROZEN})
#: what a report of an end has as its reason if it adds nothing to the exit code
_WELL: Final = frozenset({"", "exit"})
#: what is told behind such a reason too
_TOLD_BEHIND: Final = (CHECKPOINT_NOT_STORED, NEIGHBOUR_OVER)


def backoff_ms(base: int, used: int, at_most: int) -> int:
    """Return base, 2·base, 4·base, … by the number of tries already used, up to a bound."""
    return min(base << min(used, 16), at_most)


def rows_of(job: Job, only: Ranges | None) -> list[Replica]:
    """Return the rows of a job's replicas, or of those `only`."""
    return [replica for replica in job.rows.values() if only is None or is_in(only, replica.index)]


def _first(job: Job) -> Replica:
    """Return the rank of a gang whose retries and losses are those of the gang."""
    return next(iter(job.rows.values()))


def _streak(draft: Draft, replica: Replica) -> int:
    """Return how many restarts of a replica have followed one another before the one that its attempt's end leads to.

    An attempt that ran for long ends such a row.
    """
    attempt, ran_ms = replica.attempt, -1 if replica.ended is None else replica.ended.ran_ms
    if attempt is not None:
        ran_ms = draft.time_ms - attempt.began_ms if attempt.phase == AT_RUNNING else -1
    return 0 if ran_ms >= RESTART_RESET_MS else replica.streak


def _note_used(draft: Draft, attempt: Attempt, report: Report) -> None:
    """Record what an attempt used, as measured by its worker; do nothing if the report does not say."""
    used, peaks, job = used_of(report.detail), report.peaks, attempt.replica.job
    if used is not None:
        draft.add(Used(job.num, *used))
    if peaks is not None and peaks.is_known and peaks.fits:
        draft.tell(Peaked(job.num, *astuple(peaks)))
    if report.reported and fits(report.reported):
        draft.tell(LastReported(job.num, attempt.replica.index, encode(report.reported).decode()))


def _code(report: Report) -> int:
    return min(max(report.code, -EXIT_CODE_MAX), EXIT_CODE_MAX)


class Lifecycle:
    """Writes the steps of replicas into drafts.

    `requeue(replica, not_before)` puts a replica back into the queue at that ledger time.
    """

    def __init__(
        self,
        fleet: Fleet,
        request_of: Callable[[Job], Request],
        shape_of: Callable[[Job], Shape],
        requeue: Callable[[Replica, int], None],
        lacking: Lacking,
        starts: Starts,
    ) -> None:
        self.fleet = fleet
        self.lacking = lacking
        self.starts = starts
        self.request_of = request_of
        self.shape_of = shape_of
        self.requeue = requeue
        self.failing: dict[Job, None] = {}  # jobs of which replicas have failed, to be looked at by `give_up`
        self._with_supervisor: frozenset[Attempt] = frozenset()  # by the reports that are taken now
        self._charged: frozenset[Attempt] = frozenset()

    # ------------------------------------------------------------------------------------------- reports

    def on_reports(self, draft: Draft, worker: Worker, reports: list[Report]) -> None:
        """Take a report frame of a worker's current session. Those about unknown attempts change nothing."""
        attempts = worker.attempts
        if self.starts.watches:
            self.starts.on_reports(draft, worker, reports)
        freed: list[Attempt] = []
        for report in reports:
            attempt = attempts.get((report.tenant, report.job, report.replica, report.attempt, report.fence))
            if attempt is None:
                continue
            if report.kind == "freed" and (report.detail or report.peaks is not None or report.reported):
                _note_used(draft, attempt, report)
            if report.kind == "freed":
                if attempt.phase == AT_EXITED:
                    draft.free(attempt)
                    freed.append(attempt)
            else:
                self._on_report(draft, attempt, report)
        if freed:
            host = self.fleet.hosts.get(worker.num)
            if host is not None:
                self.fleet.give_all(host, [(self._asked_by(attempt), attempt.mask) for attempt in freed])

    def on_reports_of_dead_supervisor(self, draft: Draft, worker: Worker, reports: list[Report]) -> None:
        """Take the reports of a session that ended because the supervisor died, while the machine went on."""
        self._with_supervisor = lost_with_supervisor(worker.attempts, reports)
        self._charged = charged(draft, self._with_supervisor)
        try:
            self.on_reports(draft, worker, reports)
        finally:
            self._with_supervisor = self._charged = frozenset()

    def _on_report(self, draft: Draft, attempt: Attempt, report: Report) -> None:
        kind, replica = report.kind, attempt.replica
        phase = attempt.phase
        if phase == AT_EXITED:
            if kind == "quarantined":
                self._quarantined(draft, attempt, report.detail)
            return
        state = replica.state
        if kind == "claimed":
            if state == PLACED:
                self._claimed(draft, replica, report.detail)
        elif kind == "started":
            address, _, told = report.detail.partition("; ")
            self._started(draft, replica, state, address=address, told=told)
            if report.checkpoint is not None:
                note_running(draft, attempt, report)
        elif kind == "ran":
            if report.checkpoint is not None or report.detail not in _WELL:
                note_checkpoint(draft, attempt, report)
            self._ran(draft, replica, attempt, state, report)
        elif kind == "idle":
            if state == RUNNING:
                draft.idle.append((attempt, report))
        elif kind in READINESS:
            on_readiness(draft, attempt, report)
        elif kind in FREEZING:
            on_freezing(draft, self.fleet, attempt, self.shape_of(attempt.replica.job), report)
        elif kind == "exited":
            note_checkpoint(draft, attempt, report)
            self._exited(draft, replica, attempt, state, _code(report), report.detail)
        elif kind == "refused":
            self._refused(draft, attempt, state, report)
        elif kind == "withdrawn":
            count = self._withdrawn(replica, report)
            self._never_ran(draft, Op.WITHDRAW, replica, attempt, state, report.detail or "withdrawn", count)
        elif kind == "not-held":
            self._never_ran(draft, Op.LOSE, replica, attempt, state, "not held by its worker", Count.LOSS)

    @staticmethod
    def _withdrawn(replica: Replica, report: Report) -> Count:
        """Return what a withdrawal counts as: a loss only if the work had begun, of a gang by any of its ranks."""
        state = replica.state
        if state in LEAVING:
            return Count.NONE
        begun = state not in STARTING or replica.job.gang == GangPhase.STARTED
        return Count.LOSS if begun and report.detail != "supervisor-died" else Count.REFUSAL

    def _refused(self, draft: Draft, attempt: Attempt, state: int, report: Report) -> None:
        """Take a refusal: its reason says whether the request, this worker, its rules or the moment are at fault."""
        replica, why = attempt.replica, report.detail or "refused"
        if replica.job.gang and why.startswith(f"{NOT_HERE}{CHECKPOINT_REFUSED}"):  # no host is at fault
            note_unread(draft, attempt)
            self._never_ran(draft, Op.REFUSE, replica, attempt, state, why.removeprefix(NOT_HERE), Count.REFUSAL)
            return
        said = report.code if 0 < report.code < 256 else CODE_CANNOT_RUN
        code = said if why.startswith((CANNOT_RUN, SETUP_FAILED)) else 0
        if report.code or why.startswith(START_FAILED):
            self.starts.failed(draft, attempt, why)
        count = self._count_of_setup(attempt, said, why)
        if count != Count.REFUSAL:
            self._never_ran(draft, Op.REFUSE, replica, attempt, state, why, count)
            return
        if not why.startswith(ABOUT_THE_JOB):
            self._mark_busy(attempt)
        elif not code:
            draft.avoid(replica.job, attempt.worker, every_slot(attempt.worker))
            # without a code no start was tried: a worker with that handler may still be to come
            if why.startswith(NOT_HERE) and said == report.code:
                draft.lacks(replica.job, attempt.worker)
                over = None if state in LEAVING else self.lacking.why_over(draft, attempt, why)
                if over is not None:
                    why, code = over, said
        self._never_ran(draft, Op.REFUSE, replica, attempt, state, why, Count.REFUSAL, code)
        if code and why.startswith((NOT_HERE, SETUP_FAILED)):
            self._end_waiting(draft, replica.job, FAILED, why, code)

    def _count_of_setup(self, attempt: Attempt, code: int, why: str) -> int:
        """Return what a refusal counts as: a failure if its setup failed, and `retry` allows another attempt for it."""
        job = attempt.replica.job
        if not why.startswith(SETUP_FAILED) or not self.request_of(job).retry:
            return Count.REFUSAL
        count = with_row(self.request_of(job), Count.RETRY, code, why)
        replica = _first(job) if job.gang else attempt.replica
        return count if self._next_after(replica, count) == QUEUED else Count.REFUSAL

    def _claimed(self, draft: Draft, replica: Replica, detail: str, ran_ms: int = 0) -> None:
        job = replica.job
        gang = bool(job.gang) and job.gang == GangPhase.HOLDING
        address = detail if gang and is_address(detail) else ""
        if address and (parts := self.shape_of(job).parts):
            address = with_address(job.master, parts, replica.index, address)
        elif replica.index != 0:
            address = ""
        draft.claim(replica, address, ran_ms)
        if gang and all(peer.state == CLAIMED for peer in job.rows.values()):
            draft.gang(job, GangPhase.STARTED)  # one record moves all of them

    def _started(
        self, draft: Draft, replica: Replica, state: int, ran_ms: int = 0, address: str = "", told: str = ""
    ) -> None:
        if state == PLACED:
            self._claimed(draft, replica, "", ran_ms)
            state = replica.state
        if state == CLAIMED and not (replica.job.gang and replica.job.gang == GangPhase.HOLDING):
            draft.start(replica, ran_ms, address if address and is_address(address, PORTS_MAX) else "", told)

    def _ran(self, draft: Draft, replica: Replica, attempt: Attempt, state: int, report: Report) -> None:
        job, ran_ms = replica.job, min(max(report.ran_ms, 0), RAN_MS_MAX)
        result = None if report.detail in _WELL else result_of(report.detail)
        well = report.code == 0 and (report.detail in _WELL or result is not None)
        if well and state == PLACED and not job.gang and not self._always(job):
            draft.ran(replica, ran_ms, result)
            self.starts.quick.ended(draft, attempt)
            return
        self._started(draft, replica, state, ran_ms)
        self._exited(draft, replica, attempt, replica.state, _code(report), report.detail)

    def _exited(self, draft: Draft, replica: Replica, attempt: Attempt, state: int, code: int, detail: str) -> None:
        job, result, told = replica.job, None, detail
        # not in `reason_of`, by which ledgers are folded
        detail = reason_of(detail).partition(f"; {NEIGHBOUR_OVER}: ")[0]
        if code == 0 and result_of(detail) is not None:
            detail, result = "exit", result_of(detail)
        well = code == 0 and detail in _WELL
        why = "" if detail in _WELL and not any(word in told for word in _TOLD_BEHIND) else told
        cause = self._cause(detail)
        if detail.startswith(START_FAILED):
            self.starts.failed(draft, attempt, detail)
        if attempt in self._with_supervisor:
            why = WITH_SUPERVISOR
            cause = Count.LOSS if attempt in self._charged else Count.NONE
        cause = with_row(self.request_of(job), cause, code, detail) if not well else cause
        if state == PLACED:
            self._claimed(draft, replica, "")
            state = CLAIMED
        if state == CANCELLING:
            draft.exit(replica, SUCCEEDED if well else CANCELLED, code, why, result)
        elif job.gang and job.gang != GangPhase.NONE:
            if state == ENDING or (well and job.gang == GangPhase.STARTED):
                draft.exit(replica, EXITED, code, why, result)
                self._settle_gang(draft, job)
            else:
                self._fail_gang(draft, replica, Op.EXIT, code, why or f"exit code {code}", cause)
        elif state == ENDING or (state == LOST_KEPT and detail in _AS_ASKED):  # asked before its worker was lost
            to = SUCCEEDED if well and not self._always(job) else self._after_ending(draft, replica)
            draft.exit(replica, to, code, why, result)
            self._back_to_queue(draft, replica, to, Count.NONE)
        else:
            to = SUCCEEDED if well else TIMED_OUT if detail == "timeout" else FAILED
            if to == FAILED:
                to = self._next_after(replica, cause)
            elif self._always(job) or (not well and self.request_of(job).workload.stays):
                cause = Count.RESTART
                to = self._next_after(replica, cause, to)
            draft.exit(replica, to, code, why, result)
            self._back_to_queue(draft, replica, to, cause)
        self.starts.quick.ended(draft, attempt)

    @staticmethod
    def _cause(detail: str) -> int:
        if detail == UPGRADED:
            return Count.NONE
        return Count.LOSS if detail in _LOST_REASONS else Count.RETRY

    def _never_ran(
        self, draft: Draft, op: int, replica: Replica, attempt: Attempt, state: int, why: str, count: int, code: int = 0
    ) -> None:
        """Write REFUSE, WITHDRAW or LOSE: the attempt is over and holds nothing any more. A `code` fails the replica.

        Without a code it gets a new attempt if the request allows one. An attempt that was asked to end ends as it was
        asked. A gang ends as a whole.
        """
        if state == CANCELLING:
            draft.over(op, replica, CANCELLED, why)
        elif replica.job.gang != GangPhase.NONE:
            if state == ENDING:
                draft.over(op, replica, EXITED, why)
                self._settle_gang(draft, replica.job)
            else:
                self._fail_gang(draft, replica, op, code, why, count)
        elif state == ENDING:
            to = self._after_ending(draft, replica)
            draft.over(op, replica, to, why)
            self._back_to_queue(draft, replica, to, Count.NONE)
        else:
            if state == PLACED and count == Count.LOSS:
                count = Count.REFUSAL  # it had not begun, so no work was lost
            to = FAILED if code else self._next_after(replica, count)
            draft.over(op, replica, to, why, code)
            self._back_to_queue(draft, replica, to, count)
        self._give(attempt)

    def _always(self, job: Job) -> bool:
        """Return whether another attempt follows even one that ended well."""
        if job.always is None:
            job.always = self.request_of(job).workload.restart == "always"
        return job.always

    def _counted(self, replica: Replica, count: int) -> int:
        """Return what an end counts as: the failures and losses of a job that stays are restarts.

        An attempt counts once. One that was asked to leave has counted then, even if it went on because its worker did
        not hear of it.
        """
        if replica.not_before:
            return Count.NONE
        if count not in (Count.RETRY, Count.LOSS):
            return count
        request = self.request_of(replica.job)
        return Count.RESTART if request.workload.stays else with_row(request, count)

    def _next_after(self, replica: Replica, count: int, else_to: int = FAILED) -> int:
        """Return QUEUED while the request allows another try of this kind, else the state `else_to`.

        Only RETRY, LOSS and RESTART are limited: a refusal is never fatal.
        """
        request, count = self.request_of(replica.job), self._counted(replica, count)
        row = row_in(request, count)
        if row is not None:
            return QUEUED if replica.tries_of(count >> COUNT_BITS) < row.times else else_to
        count &= KIND
        if count == Count.RETRY:
            return QUEUED if replica.retries < request.retries else else_to
        if count == Count.LOSS:
            return QUEUED if replica.losses < request.retries_on_lost else else_to
        most = request.workload.max_restarts if count == Count.RESTART else None
        return QUEUED if most is None or replica.restarts < most else else_to

    def _after_ending(self, draft: Draft, replica: Replica) -> int:
        """Return the state after a replica has ended as asked; no new attempt if the deadline has passed meanwhile."""
        deadline_ms = replica.job.deadline_ms
        late = deadline_ms is not None and draft.time_ms >= deadline_ms
        return TIMED_OUT if late and replica.after == QUEUED else replica.after

    def _back_to_queue(self, draft: Draft, replica: Replica, to: int, count: int) -> None:
        if to != QUEUED:
            return
        count = self._counted(replica, count)
        streak = _streak(draft, replica) if count == Count.RESTART else 0
        wait_ms = max(self._wait_ms(replica, count, streak), replica.not_before)  # the latter by `leave`
        not_before = draft.time_ms + wait_ms
        draft.backoff(replica, not_before, count, streak + 1 if count == Count.RESTART else 0)
        self.requeue(replica, not_before)

    def _wait_ms(self, replica: Replica, count: int, streak: int = 0) -> int:
        if count >> COUNT_BITS:
            row = row_in(self.request_of(replica.job), count)
            if row is not None and row.pause_s is not None:
                return round(row.pause_s * 1000)
            count &= KIND
        if count == Count.RESTART:
            return backoff_ms(RESTART_BACKOFF_MS, streak, RESTART_BACKOFF_MS_MAX)
        if count == Count.RETRY:
            return backoff_ms(RETRY_BACKOFF_MS, replica.retries, RETRY_BACKOFF_MS_MAX)
        if count == Count.REFUSAL:
            return backoff_ms(REFUSAL_BACKOFF_MS, replica.refusals, REFUSAL_BACKOFF_MS_MAX)
        return 0

    def _quarantined(self, draft: Draft, attempt: Attempt, detail: str) -> None:
        named = {part.strip() for part in detail.split(",")}
        mask = sum(1 << slot for slot in range(64) if str(slot) in named) & attempt.home
        host = self.fleet.hosts.get(attempt.worker.num)
        if not attempt.mask and host is not None:  # its worker had resumed it, so that it could end
            shape = self.shape_of(attempt.replica.job)
            if attempt.home & ~host.free if shape.mode <= Mode.EXCLUSIVE else not host.has_room(shape, attempt.home):
                return
            self.fleet.resume(host, attempt, shape)
        before = attempt.worker.out
        draft.quarantine(attempt, mask or attempt.home)
        self.fleet.out_changed(attempt.worker, before)

    # ------------------------------------------------------------------------------------------- gangs

    def _fail_gang(self, draft: Draft, replica: Replica, op: int, code: int, why: str, count: int) -> None:
        """End a whole gang: the first attempt that fails, is refused or lost moves all to ENDING in one record."""
        job, first = replica.job, _first(replica.job)
        if count & KIND == Count.LOSS and job.gang == GangPhase.HOLDING:
            count = Count.REFUSAL  # no rank was started yet, so no work was lost
        count = with_row(self.request_of(job), count)
        after = TIMED_OUT if why == "timeout" else self._next_after(first, count)
        if op == Op.REFUSE and code:
            after = FAILED
        draft.gang(job, GangPhase.ENDING, after, count)
        if after == QUEUED and count & KIND == Count.LOSS:
            self._keep_hosts(draft, replica)
        if op == Op.EXIT:
            draft.exit(replica, EXITED, code, why)
        else:
            draft.over(op, replica, EXITED, why, code)
        for peer in job.rows.values():
            if peer.state in MAY_END:
                draft.end(peer, ENDING, EXITED, f"gang: replica {replica.index}: {why}")
        self._settle_gang(draft, job)

    def _keep_hosts(self, draft: Draft, lost: Replica) -> None:
        """Reserve the hosts of a gang's other ranks for it, if its request asks for that: it starts again there."""
        job = lost.job
        if not self.request_of(job).repair_s:
            return
        attempts = [row.attempt for row in job.rows.values() if row.state in MAY_END and row.attempt is not None]
        gone = -1 if lost.attempt is None else lost.attempt.worker.num
        if hosts := {attempt.worker.num for attempt in attempts} - {gone}:
            draft.add(Preempt(job.num, sorted(hosts), []))

    @staticmethod
    def _ended_with(job: Job) -> tuple[dict[int, int], str]:
        """Return the exit codes of a gang's ended ranks by index, and the reason of the first failure ("" if none).

        A rank that was asked to end is no failure.
        """
        ends = sorted((ended.rev, index, ended) for index, row in job.rows.items() if (ended := row.ended) is not None)
        why = ""
        for _, index, ended in ends:
            code, detail = ended.code, ended.why
            if not why and (code or detail) and not is_as_asked(detail):  # why it was asked stands in its ENDING
                why = f"gang: replica {index}: {detail or f'exit code {code}'}"
        return {index: ended.code for _, index, ended in ends}, why

    def _settle_gang(self, draft: Draft, job: Job) -> None:
        """Once the attempts of all ranks are over, move all of them on: success, a new attempt, or the end.

        Until then, do nothing.
        """
        if len(job.rows) < job.size or any(peer.state != EXITED for peer in job.rows.values()):
            return
        phase, after, count = job.gang, job.after, job.count
        if phase == GangPhase.STARTED:
            after = SUCCEEDED
        codes, why = self._ended_with(job) if after in (FAILED, TIMED_OUT) else ({}, "")
        for peer in list(job.rows.values()):
            draft.move(peer, after, why, codes.get(peer.index, 0))
        draft.gang(job, GangPhase.OVER)
        if after == QUEUED:
            first = _first(job)
            not_before = draft.time_ms + self._wait_ms(first, count)
            for peer in job.rows.values():
                draft.backoff(peer, not_before, count if peer is first else Count.NONE)
            self.requeue(first, not_before)

    # ------------------------------------------------------------------------- cancels, deadlines, losses

    @staticmethod
    def _end_waiting(draft: Draft, job: Job, to: int, why: str, code: int = 0) -> None:
        """End all QUEUED replicas: those that came back, and those that were never placed."""
        for replica in list(job.rows.values()):
            if replica.state == QUEUED:
                draft.move(replica, to, why, code)
        draft.move_fresh(job, to, why, code)

    def reject(self, draft: Draft, job: Job, why: str) -> None:
        """End all QUEUED replicas of a job that no worker could ever run."""
        self._end_waiting(draft, job, REJECTED, why)

    def cancel(self, draft: Draft, job: Job, why: str, only: Ranges | None = None) -> bool:
        """Cancel all replicas that have not ended, or those `only`; return False if there are none left to cancel.

        Of a job with many on workers, some may be left for the next record, see `is_left`.
        """
        did = draft.move_fresh(job, CANCELLED, why, only=only)
        if job.gang in (GangPhase.HOLDING, GangPhase.STARTED):
            draft.gang(job, GangPhase.ENDING, CANCELLED)
        for replica in rows_of(job, only):
            state = replica.state
            if draft.full and not job.gang:
                break
            if state in (QUEUED, EXITED):
                draft.move(replica, CANCELLED, why)
            elif state in MAY_END or state == ENDING:
                draft.end(replica, CANCELLING, CANCELLED, why)
            elif state == LOST_KEPT:
                self._lost(draft, replica, CANCELLED, why)
            else:
                continue
            did = True
        return did

    @staticmethod
    def is_left(draft: Draft, job: Job, only: Ranges | None = None) -> bool:
        """Return whether a full record has left some of these replicas as they are, which are to end."""
        goes_on = (*MAY_END, QUEUED, LOST_KEPT)
        return draft.full and not job.gang and any(row.state in goes_on for row in rows_of(job, only))

    def give_up(self, draft: Draft) -> None:
        """Cancel what is left of jobs in `failing` of which so many replicas failed that the others would fail, too.

        To be called once a record, behind all that may end a replica. A job for which the record has no room is given
        up in a later one.
        """
        for job in list(self.failing):
            if draft.bulk_full:
                return
            del self.failing[job]
            if job.size == 1 or job.over:
                continue
            request = self.request_of(job)
            if request.is_gang:
                continue
            failed, most = job.failed, request.failed_max
            if most is not None and failed >= most:
                self.cancel(draft, job, f"{many(failed, 'replica')} failed, and max_failed is {most}")
                if self.is_left(draft, job):
                    self.failing[job] = None
                    return

    def start_over(self, draft: Draft, job: Job, why: str, only: Ranges | None = None) -> int:
        """End a job's placed and running replicas, or those `only`, and queue them again. Return their number.

        This counts no retry.

        Replicas that are ending already are left alone. A replica kept through a partition is queued at once: with this
        order the operator declares it over.
        """
        gang = job.gang in (GangPhase.HOLDING, GangPhase.STARTED)
        if gang:
            draft.gang(job, GangPhase.ENDING, QUEUED)
        did = 0
        for replica in rows_of(job, only):
            state = replica.state
            if state in MAY_END:
                draft.end(replica, ENDING, EXITED if gang else QUEUED, why)
            elif state == LOST_KEPT:
                self._lost(draft, replica, QUEUED, why)
                self._back_to_queue(draft, replica, QUEUED, Count.NONE)
            else:
                continue
            did += 1
        return did

    @staticmethod
    def is_on_worker(attempt: Attempt) -> bool:
        """Return whether an attempt is placed, claimed, running or frozen, and was not asked to end yet."""
        return attempt.replica.attempt is attempt and attempt.replica.state in MAY_END

    @staticmethod
    def lingers(attempt: Attempt) -> bool:
        """Return whether an attempt has ended, and keeps devices in quarantine, perhaps until an operator's word."""
        return attempt.phase == AT_EXITED and bool(attempt.worker.quarantined & attempt.home)

    def notice_s(self, job: Job) -> int:
        """Return how many seconds before its end a job wants its checkpoint signal; 0 without such a signal."""
        run = self.request_of(job).workload
        return math.ceil(run.checkpoint_before_s) if run.checkpoint_signal is not None else 0

    def leave(self, draft: Draft, attempt: Attempt, why: str, count: int, notice_s: int | None = None) -> None:
        """Evict an attempt from its worker (a gang with all its ranks), to be queued for a new attempt.

        It gets its checkpoint signal `notice_s` before it is asked to end; None stands for the request's own
        `checkpoint_before_s`. With `count` LOSS the eviction counts against the request's `retries_on_lost`, and if
        these are used up the replica fails; with NONE, for reasons that are not the job's, it counts against nothing,
        and neither does a gang of which no rank was started. With RETRY it counts as a failure.
        """
        replica, job = attempt.replica, attempt.replica.job
        if job.gang == GangPhase.HOLDING:
            count = Count.NONE
        count = with_row(self.request_of(job), count)
        notice_s = min(self.notice_s(job) if notice_s is None else notice_s, NOTICE_S_MAX)
        after = self._next_after(_first(job) if job.gang else replica, count)
        if job.gang in (GangPhase.HOLDING, GangPhase.STARTED):
            draft.gang(job, GangPhase.ENDING, after, count)
            for peer in job.rows.values():
                if peer.state in MAY_END:
                    draft.end(peer, ENDING, EXITED, why, notice_s)
            return
        count = self._counted(replica, count)
        if count != Count.NONE and after == QUEUED:  # an end that no other attempt follows counts for nothing
            streak = _streak(draft, replica)
            # it waits for so long from its end on, which may be much later: `_back_to_queue` adds the time of its end.
            # At least 1 ms, by which it is known that this attempt has counted
            draft.backoff(replica, max(self._wait_ms(replica, count, streak), 1), count, streak + 1)
        draft.end(replica, ENDING, after, why, notice_s)

    def deadline(self, draft: Draft, job: Job) -> None:
        """Apply a passed deadline: waiting replicas become EXPIRED, the others are ended and become TIMED_OUT.

        Replicas that are ending already go on, but get no new attempt. Of a job with many on workers, some may be left
        for the next record, see `is_left`.
        """
        phase, after = job.gang, job.after
        gang = phase in (GangPhase.HOLDING, GangPhase.STARTED, GangPhase.ENDING)
        if gang and (phase != GangPhase.ENDING or after == QUEUED):  # a gang that is ending must not be queued again
            draft.gang(job, GangPhase.ENDING, TIMED_OUT)
        draft.move_fresh(job, EXPIRED, "deadline_s passed")
        for replica in list(job.rows.values()):
            state = replica.state
            if draft.full and not job.gang:
                break
            if state == QUEUED:
                draft.move(replica, EXPIRED, "deadline_s passed")
            elif state in MAY_END:
                draft.end(replica, ENDING, EXITED if gang else TIMED_OUT, "deadline_s passed")
            elif state == LOST_KEPT:
                self._lost(draft, replica, TIMED_OUT, "deadline_s passed")
        if gang:
            self._settle_gang(draft, job)

    def expire(self, draft: Draft, job: Job) -> None:
        """Apply a passed `start_within_s`: waiting replicas expire, unless one replica, a gang or a job that stays has
        run."""
        if job.started and (job.size == 1 or job.gang or self.request_of(job).workload.stays):
            return
        self._end_waiting(draft, job, EXPIRED, "start_within_s passed")

    def lose_worker(self, draft: Draft, worker: Worker, why: str, listed: frozenset[AttemptName]) -> None:
        """End a worker's session: attempts that no new session adopts are over (ledger-rules H8, H20).

        `listed` are those that the new session adopts; none when the worker is lost or says goodbye. If `why` is
        `lost`, attempts that may live on there are kept, not over. A worker counts as lost only after lease + grace +
        margin, when nothing else of the old session can run any more: so a new attempt never overlaps with the old one.
        """
        draft.end_session(worker, why)
        self.starts.left(worker)
        for name, attempt in list(worker.attempts.items()):
            replica = attempt.replica
            state = replica.state
            if name in listed:
                if state == LOST_KEPT and replica.attempt is attempt:  # the worker of a kept job is back
                    if attempt.mask == attempt.home:
                        draft.start(replica, address=attempt.address)
                    else:
                        draft.freeze(replica, FROZEN)
                continue
            if attempt.phase == AT_EXITED:
                draft.free(attempt)
                continue
            if state == LOST_KEPT:
                if why != "lost":
                    to = self._next_after(replica, Count.LOSS)
                    self._lost(draft, replica, to, why)
                    self._back_to_queue(draft, replica, to, Count.LOSS)
            elif why == "lost" and (kept := self._may_live_on(draft, replica, state, worker)):
                draft.keep_lost(replica, f"worker lost, {kept}: waits for the worker or an operator")
            else:
                self._never_ran(draft, Op.LOSE, replica, attempt, state, f"worker {worker.id}: {why}", Count.LOSS)

    def _may_live_on(self, draft: Draft, replica: Replica, state: int, worker: Worker) -> str:
        """Return why a replica of a lost worker may live on there, so that it must not be placed again; else "".

        Its request says so (`on_partition`), or nothing ends the processes of its driver (`fence`). A gang is never
        kept. A PLACED replica may be running too: perhaps only its reports did not get through. An ENDING one may not
        have received the order to end; it is kept only if it is to get a new attempt.
        """
        request = self.request_of(replica.job)
        driver = request.workload.driver
        why = "on_partition keep" if request.on_partition == "keep" else ""
        if worker.can(driver).fence == "none":
            why = f"nothing ends what its driver {driver} runs"
        if not why or replica.job.gang != GangPhase.NONE:
            return ""
        if state == ENDING:
            return why if self._after_ending(draft, replica) == QUEUED else ""
        return why if state in MAY_END else ""

    def _lost(self, draft: Draft, replica: Replica, to: int, why: str) -> None:
        attempt = replica.attempt
        if attempt is not None:
            draft.over(Op.LOSE, replica, to, why)

    # ------------------------------------------------------------------------------------ the soft view

    def _asked_by(self, attempt: Attempt) -> Shape:
        """Return what an attempt asks of its host."""
        job = attempt.replica.job
        shape = job.shape or self.shape_of(job)
        return shape.of_rank(attempt.replica.index) if job.gang else shape

    def _give(self, attempt: Attempt) -> None:
        host = self.fleet.hosts.get(attempt.worker.num)
        if host is not None:
            self.fleet.give(host, self._asked_by(attempt), attempt.mask)

    def release(self, draft: Draft, worker: Worker, mask: int) -> int:
        """Free the attempts whose quarantined devices an operator has declared healthy (`mask`). Return how many.

        Attempts with another device that stays in quarantine are not freed.
        """
        lingering = [
            attempt
            for attempt in worker.attempts.values()
            if attempt.phase == AT_EXITED and (kept := attempt.mask & worker.quarantined) and not kept & ~mask
        ]
        for attempt in lingering:
            draft.free(attempt)
            self._give(attempt)
        return len(lingering)

    def _mark_busy(self, attempt: Attempt) -> None:
        """Count the slots of a refused attempt as busy, until a renewal reports which ones are (H41)."""
        host = self.fleet.hosts.get(attempt.worker.num)
        if host is not None and attempt.phase == AT_PLACED:
            host.keep(attempt.mask)
            self.fleet.refresh(host)
