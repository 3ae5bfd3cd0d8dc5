"""The timers of jobs, in ledger time: the end of a backoff, a deadline, the latest start, the earliest one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from moorage.scheduler.core.containment import Containment
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.ledger.state import QUEUED, TIME, Job, Replica, State
from moorage.scheduler.core.lifecycle.max_running import most_of
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.scheduler.core.request_reader import RequestReader
from moorage.schemas.job import Request

#: the timers of ended jobs are removed once there are more timers than this, and twice as many as after the last time
TIMERS_SPARE: Final = 10_000
#: the most timers that one record handles
DUE_MAX: Final = 8_192
_DEADLINE, _START_WITHIN, BACKOFF, _NOT_BEFORE = range(4)

REPLICA_BITS: Final = 20  # 1,000,000 replicas a job

#: lets a replica wait in the queue again, given by its job and its number
ComeBack = Callable[[Job, int], None]


def of_replica(num: int, number: int) -> int:
    """Return what a timer of one replica of a job is known by."""
    return num << REPLICA_BITS | number


class _Passed(NamedTuple):
    """A job's timer that has passed, to be handled in this record or a later one."""

    due_ms: int
    kind: int
    num: int
    ends: bool  # whether it surely ends the job's waiting replicas


class Timers:
    """The timers that are set: `rows` is a heap of (ledger ms, kind, number of the job or `of_replica`).

    Those that `containment` sets aside are skipped for as long.

    `overdue` are jobs whose time has passed while no record had room to end them: they may not start any more.
    """

    def __init__(self, state: State, requests: RequestReader, containment: Containment) -> None:
        self.rows: list[tuple[int, int, int]] = []
        self.overdue: dict[int, int] = {}  # job number -> how many of `_passed` end it
        self.at: tuple[int, int] | None = None  # kind and job number or `of_replica` of the timer being handled
        self._starting: set[int] = set()  # numbers of jobs with a timer of their latest start
        self._containment = containment
        self._passed: deque[_Passed] = deque()
        self._clear_at = TIMERS_SPARE  # how many timers there must be before `clear_out` walks them
        self._state = state
        self._requests = requests

    @property
    def next_ms(self) -> float:
        """The ledger time of the next timer; infinity for none."""
        if self._passed:
            return self._passed[0].due_ms
        return self.rows[0][0] if self.rows else math.inf

    def arm(self, job: Job, request: Request) -> None:
        if request.deadline_s is not None:
            job.deadline_ms = job.accepted_ms + int(request.deadline_s * 1000)
            self._push(job.deadline_ms, _DEADLINE, job.num)
        if not job.awaits:
            self.arm_start(job, request, job.may_start_ms)
        for num, at_ms in job.awaits:
            if num == TIME:
                self._push(at_ms, _NOT_BEFORE, job.num)

    def arm_start(self, job: Job, request: Request, from_ms: int) -> None:
        """Set the timer of the latest start of a job that may start from this ledger ms on, unless it has one."""
        if request.start_within_s is not None and job.num not in self._starting:
            self._starting.add(job.num)
            self._push(from_ms + int(request.start_within_s * 1000), _START_WITHIN, job.num)

    def requeue(self, replica: Replica, not_before: int) -> None:
        """Set a timer that puts a replica back into the queue at a ledger time."""
        self._push(not_before, BACKOFF, of_replica(replica.job.num, replica.index))

    def forget(self, num: int) -> None:
        """Drop all timers of a job that have not passed. It walks all that are set."""
        self.rows = [timer for timer in self.rows if _job_of(timer) != num]
        heapify(self.rows)
        self._starting.discard(num)

    def _push(self, due_ms: int, kind: int, what: int) -> None:
        if self._containment.until:
            due_ms = max(due_ms, self._containment.until.get(("timer", kind, what), 0))
        heappush(self.rows, (due_ms, kind, what))

    def due(self, draft: Draft, lifecycle: Lifecycle, come_back: ComeBack, time_came: Callable[[int], None]) -> None:
        """Handle the timers that have passed by the draft's time: a replica whose pause is over comes back, and
        `time_came` is called with the number of a job that may start from now on.

        If many jobs end at once, this record ends some of them, and later records the rest. Ended backoffs are handled
        before them.
        """
        self.at = None
        self._pop_due(draft, come_back, time_came)
        while self._passed and not draft.bulk_full:
            _, kind, num, ends = self._passed.popleft()
            self.at = kind, num
            if ends:
                self.overdue[num] -= 1
                if not self.overdue[num]:
                    del self.overdue[num]
            job = self._state.jobs.get(num)
            if job is None or job.over:
                self._starting.discard(num)
            elif kind == _DEADLINE:
                lifecycle.deadline(draft, job)
                if lifecycle.is_left(draft, job):
                    self._passed.appendleft(_Passed(0, kind, num, False))
            elif (start_ms := self._start_ms(job)) > draft.time_ms:
                self._push(start_ms, _START_WITHIN, num)  # others of its replicas were placed since, or came back
            else:
                self._starting.discard(num)
                lifecycle.expire(draft, job)

    def _pop_due(self, draft: Draft, come_back: ComeBack, time_came: Callable[[int], None]) -> None:
        timers, state = self.rows, self._state
        for _ in range(DUE_MAX):
            if not timers or timers[0][0] > draft.time_ms or draft.full:
                break
            due_ms, kind, what = heappop(timers)
            self.at = kind, what
            if kind == BACKOFF:
                self._end_backoff(come_back, what)
                continue
            if kind == _NOT_BEFORE:
                time_came(what)
                continue
            job = state.jobs.get(what)
            if job is None or job.over:
                self._starting.discard(what)
            else:
                # a job with a placed replica may have started when it is handled, and then goes on; of several replicas
                # that have begun, some may come back until then, and their time counts anew
                ends = kind == _DEADLINE or not (job.held or job.started or self._start_ms(job) > draft.time_ms)
                self._passed.append(_Passed(due_ms, kind, what, ends))
                if ends:
                    self.overdue[what] = self.overdue.get(what, 0) + 1

    def _end_backoff(self, come_back: ComeBack, what: int) -> None:
        job, number = self._state.jobs.get(what >> REPLICA_BITS), what & (1 << REPLICA_BITS) - 1
        row = job.rows.get(number) if job is not None else None
        if job is None or row is None or row.state != QUEUED:
            return  # it has ended in its pause
        request = self._requests.request_of(job)
        self.arm_start(job, request, job.waits_from_ms)  # its timer may have passed while nothing of it waited
        come_back(job, number)

    def _start_ms(self, job: Job) -> int:
        """Return the ledger ms until which the next replica of a job of several has to be placed; 0 for any other job.

        The time counts anew from each placement, and from when a replica came back and its backoff ended. A job with as
        many running as it may have waits for nothing.
        """
        request = self._requests.request_of(job)
        if job.size == 1 or job.gang or request.start_within_s is None:
            return 0
        most = most_of(job, request)
        if most is not None and job.on_workers >= most:
            from_ms = self._state.time_ms
        else:
            waiting = [row for row in job.rows.values() if row.state == QUEUED]
            from_ms = max([job.waits_from_ms, *(row.not_before for row in waiting)])
        return from_ms + int(request.start_within_s * 1000)

    def more_are_due(self) -> bool:
        """Return whether passed timers remain that `due` did not reach; they may be backoffs or overdue jobs."""
        return bool(self.rows) and self.rows[0][0] <= self._state.time_ms

    def clear_out(self) -> None:
        """Drop the timers of ended jobs once there are many, since most jobs end long before their deadlines.

        All timers are walked only when twice as many are set as were left by the last walk.
        """
        self._clear_at = max(TIMERS_SPARE, min(self._clear_at, 2 * len(self.rows)))
        if len(self.rows) > self._clear_at:
            self.rows = [timer for timer in self.rows if self._is_live(timer)]
            heapify(self.rows)
            self._starting = {num for num in self._starting if self._is_live((0, _START_WITHIN, num))}
            self._clear_at = 2 * len(self.rows)

    def _is_live(self, timer: tuple[int, int, int]) -> bool:
        job = self._state.jobs.get(_job_of(timer))
        return job is not None and not job.over


def _job_of(timer: tuple[int, int, int]) -> int:
    """Return the number of a timer's job."""
    _, kind, what = timer
    return what >> REPLICA_BITS if kind == BACKOFF else what
