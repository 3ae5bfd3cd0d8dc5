"""Judges reservations by the ledger alone: nothing here is the scheduler's rule.

A reservation tells hosts and a start. Until then another job may run there only if it ends before: by its time limit
and its grace. A job without such a limit, or one with a longer limit whose earlier runs were shorter, may outlive the
start; how many do is counted. Jobs that come before the reserved one in the queue, or are its equals, are left out and
counted by why. It judges fleets of one tenant, where no share decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from moorage.scheduler.core.ledger.acts import AnyAct, Reserves
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.record import Record, decode_record
from moorage.scheduler.core.ledger.records import STEP_WIDTH, Op
from moorage.scheduler.core.ledger.state import State
from moorage.schemas.codec import decode_request
from moorage.schemas.job import Request

#: a job with a time limit may be let in by an estimate only if so many runs of its tenant were as short
KNOWN: Final = 3


class ReservationsJudge:
    """Fold each record with `record`; `let_in` counts the jobs placed on hosts that were reserved for others."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.let_in = Counter[str]()
        self.reserved: Reserves | None = None
        self._pending: dict[tuple[int, int, int], int] = {}  # job, replica, fence -> the start that was told
        self._began = dict[tuple[int, int], int]()  # by job and replica, when its last attempt was placed
        self._ran = list[int]()  # how long runs took, in ms from the placement

    def record(self, payload: bytes) -> None:
        """Raises AssertionError for a job that was let in against the start that the ledger told."""
        record = decode_record(payload)
        fold(self.state, record, self.state.seq + 1)
        for what in _in_order(record):
            if isinstance(what, Reserves):
                self.reserved = what if what.workers else None
            elif isinstance(what, tuple):
                self._placed(*what)
        for op, num, index, *_ in _steps(record):
            if op == Op.PLACE:
                self._began[num, index] = self.state.time_ms
            elif op in (Op.EXIT, Op.RAN):
                self._ran.append(self.state.time_ms - self._began[num, index])
        self._follow()

    def _placed(self, num: int, index: int, worker: int) -> None:
        held, job = self.reserved, self.state.jobs[num]
        if held is None or worker not in held.workers or num == held.job:
            return
        waiting = self.state.jobs.get(held.job)
        if waiting is None or not waiting.first_waiting:
            return  # it has started, in this record or before
        mine, theirs = decode_request(job.body), decode_request(waiting.body)
        if why := _why_before(mine, theirs):
            self.let_in[why] += 1
            return
        limit_s = mine.workload.timeout_s
        ends_ms = None if limit_s is None else self.state.time_ms + int(1000 * (limit_s + mine.workload.grace_s))
        if ends_ms is not None and ends_ms <= held.start_ms:
            self.let_in["in time"] += 1
            return
        within_ms = held.start_ms - self.state.time_ms
        is_known = sum(ran_ms <= within_ms for ran_ms in self._ran) >= (1 if limit_s is None else KNOWN)
        assert is_known, f"{job.name} ends by {ends_ms}, {waiting.name} was to start at {held.start_ms}"
        attempt = job.rows[index].attempt
        if attempt is not None:
            self.let_in["estimated"] += 1
            self._pending[num, index, attempt.fence] = held.start_ms

    def _follow(self) -> None:
        """Note which of the estimated ones have ended, and outlived the start."""
        for (num, index, fence), start_ms in list(self._pending.items()):
            job = self.state.jobs.get(num)
            row = None if job is None else job.rows.get(index)
            if row is None or row.attempt is None or row.attempt.fence != fence:
                self.let_in["overrun"] += self.state.time_ms > start_ms
                del self._pending[num, index, fence]


def _steps(record: Record) -> list[list[int]]:
    return [record.steps[at : at + STEP_WIDTH] for at in range(0, len(record.steps), STEP_WIDTH)]


def _in_order(record: Record) -> Iterator[AnyAct | tuple[int, int, int]]:
    """Yield the acts of a record, and its placements as (job, replica, worker), in the order of the fold."""
    steps, acts = _steps(record), iter(record.acts)
    for _ in range(len(record.acts) - sum(step[0] == Op.ACT for step in steps)):
        yield next(acts)
    for op, num, index, worker, *_ in steps:
        if op == Op.ACT:
            yield next(acts)
        elif op == Op.PLACE:
            yield num, index, worker


def _why_before(mine: Request, theirs: Request) -> str:
    """Return why a job comes before another one, or is its equal; "" if neither."""
    if mine.priority > theirs.priority:
        return "of higher priority"
    is_equal = (mine.gpu, mine.resources, mine.requires) == (theirs.gpu, theirs.resources, theirs.requires)
    return "its equal" if is_equal and mine.priority == theirs.priority else ""
