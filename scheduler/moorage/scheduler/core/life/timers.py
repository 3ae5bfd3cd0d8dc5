"""Times that jobs wait for or must keep, in ledger time: the end of a pause, a deadline, the latest start."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.life.lifecycle import Lifecycle
from moorage.scheduler.core.line.queue import REPLICA_BITS, entry
from moorage.scheduler.core.state import Job, Replica, State
from moorage.schemas.job import Request

#: timers of jobs that are over before they are cleared out
TIMERS_SPARE: Final = 10_000
#: that are looked at in one record
DUE_MAX: Final = 8_192
_DEADLINE, _START_WITHIN, BACKOFF = range(3)

#: puts an entry back in line: the job, its request, the priority that an operator gave it (below 0 for none), the entry
Enqueue = Callable[[Job, Request, int, int], None]


class Timers:
    """`rows` is a heap of (ledger ms, kind, job number or queue entry).

    `overdue` are the jobs whose time passed and for whose end no record had room yet: what waits of them starts no
    more.
    """

    def __init__(self, state: State, request_of: Callable[[Job], Request]) -> None:
        self.rows: list[tuple[int, int, int]] = []
        self.overdue: dict[int, int] = {}  # by number: for how many reasons
        self._late: deque[tuple[int, int, int, bool]] = deque()  # and whether it is a reason
        self._state = state
        self._request_of = request_of

    @property
    def next_ms(self) -> float:
        """Ledger time of the next one; infinity when there is none."""
        if self._late:
            return self._late[0][0]
        return self.rows[0][0] if self.rows else math.inf

    def arm(self, job: Job, request: Request) -> None:
        if request.deadline_s is not None:
            job.deadline_ms = job.accepted_ms + int(request.deadline_s * 1000)
            heappush(self.rows, (job.deadline_ms, _DEADLINE, job.num))
        if request.start_within_s is not None:
            heappush(self.rows, (job.accepted_ms + int(request.start_within_s * 1000), _START_WITHIN, job.num))

    def requeue(self, replica: Replica, not_before: int) -> None:
        """Put a replica in line again at a ledger time."""
        heappush(self.rows, (not_before, BACKOFF, entry(replica.job.num, replica.index)))

    def due(self, draft: Draft, lifecycle: Lifecycle, enqueue: Enqueue) -> None:
        """What a record of this ledger time must not leave for a later one: pauses that end, deadlines, late starts.

        Where many jobs end at once, this record ends some, and the next ones go on; pauses wait for none of them.
        """
        timers, state = self.rows, self._state
        for _ in range(DUE_MAX):
            if not timers or timers[0][0] > draft.time_ms or draft.full:
                break
            due_ms, kind, what = heappop(timers)
            if kind == BACKOFF:
                job = state.jobs.get(what >> REPLICA_BITS)
                if job is not None and not job.over:
                    request = self._request_of(job)
                    late_ms = math.inf if request.start_within_s is None else int(request.start_within_s * 1000)
                    if draft.time_ms - job.accepted_ms >= late_ms:
                        lifecycle.expire(draft, job)  # placed when its time passed, and refused since
                    if not draft.is_held(job):
                        enqueue(job, request, draft.priority_of(job), what)
                continue
            job = state.jobs.get(what)
            if job is not None and not job.over:
                # one of which something is placed may have started by its turn: then it goes on
                ends = kind == _DEADLINE or not (job.held or job.started)
                self._late.append((due_ms, kind, what, ends))
                if ends:
                    self.overdue[what] = self.overdue.get(what, 0) + 1
        while self._late and not draft.bulk_full:
            _, kind, what, ends = self._late.popleft()
            if ends:
                self.overdue[what] -= 1
                if not self.overdue[what]:
                    del self.overdue[what]
            job = state.jobs.get(what)
            if job is None or job.over:
                continue
            if kind == _DEADLINE:
                lifecycle.deadline(draft, job)
            else:
                lifecycle.expire(draft, job)

    def behind(self, draft: Draft) -> bool:
        """Whether more is due than `due` looked at: pauses may be among it, and who is overdue is not all known."""
        return bool(self.rows) and self.rows[0][0] <= draft.time_ms

    def clear_out(self) -> None:
        """Jobs end long before their deadlines: what can mean nothing any more goes, once there is much of it."""
        if len(self.rows) > 2 * self._state.live + TIMERS_SPARE:
            self.rows = [timer for timer in self.rows if self._is_live(timer)]
            heapify(self.rows)

    def _is_live(self, timer: tuple[int, int, int]) -> bool:
        job = self._state.jobs.get(timer[2] >> REPLICA_BITS if timer[1] == BACKOFF else timer[2])
        return job is not None and not job.over
