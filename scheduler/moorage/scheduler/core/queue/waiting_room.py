"""The waiting room: jobs that wait for something else than a host, the end of other jobs or a time.

They are in no queue group, so none has a reservation, a place in an order, or an age. The state says what each waits
for (`Job.awaits`); the tables here are made from it, at a takeover as after each record. Once all of it has come true,
the record that says so (`Met`) puts the job into the queue. Once some of it never can, the record ends the job, and
that end is written in turn for those that wait for it. A record has so many of the jobs behind an end as it has room
for; until all were written, the job that has ended stays in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.ledger.acts import Met
from moorage.scheduler.core.ledger.records import Ends
from moorage.scheduler.core.ledger.state import CANCELLED, SUCCEEDED, TIME, Job, State
from moorage.schemas.job import STATE_NUMBER, STATES

#: the most jobs for which one record has ends
TOLD_MAX: Final = 512


def counts(which: int, state: int) -> bool:
    """Return whether a final state is the end that a job waits for; see `records.Ends`."""
    return which == Ends.ANY or (state == SUCCEEDED) == (which == Ends.SUCCEEDED)


class _End(NamedTuple):
    num: int
    state: int
    behind: deque[int]  # the jobs that wait for it and were not written, by arrival


class WaitingRoom:
    """`cancel(draft, job, why)` ends a job."""

    def __init__(self, state: State, cancel: Callable[[Draft, Job, str], bool]) -> None:
        self._state = state
        self._cancel = cancel
        self.jobs: dict[int, int] = {}  # by number: the jobs here, with their numbers of replicas
        self._behind: dict[int, dict[int, None]] = {}  # by number of a live job: those here that wait for its end
        self._ends: deque[_End] = deque()
        self.telling: dict[int, _End] = {}  # by number: the jobs of `_ends`
        self._due: deque[int] = deque()  # jobs whose time has come, and that were not written

    @property
    def is_due(self) -> bool:
        """Whether some job has ended, or a time has come, and not all that wait for it know."""
        return bool(self._ends or self._due)

    def add(self, job: Job) -> None:
        """Take in a live job that waits for something, as the state has it."""
        self.jobs[job.num] = job.size
        for num, _ in job.awaits:
            if num == TIME:
                continue
            other = self._state.jobs[num]
            if other.live:
                self._behind.setdefault(num, {})[job.num] = None
            else:
                self._ended(num, STATE_NUMBER[other.state]).behind.append(job.num)

    def on_end(self, job: Job) -> None:
        """Note that a job has ended: it is written for those that wait for it. To be called for each, in any order."""
        if job.num in self.jobs:
            self._leave(job)
        if job.num in self._behind:
            self._ended(job.num, STATE_NUMBER[job.state])

    def write_due(self, draft: Draft, enter: Callable[[Job], None]) -> None:
        """Write what follows from ends and times, for as many of the jobs that wait as the record has room for.

        `enter(job)` puts a job into the queue that waits for nothing more.
        """
        room = self._write_times(draft, TOLD_MAX, enter)
        while self._ends and room > 0 and not draft.bulk_full:
            end = self._ends[0]
            name, met = self._state.jobs[end.num].name, list[int]()
            while end.behind and room > 0 and not draft.bulk_full:
                num = end.behind.popleft()
                room -= 1
                job = self._state.jobs.get(num)
                if job is None or num not in self.jobs or not job.fresh:
                    continue  # it has ended by itself, perhaps with this record
                if counts(dict(job.awaits)[end.num], end.state):
                    met.append(num)
                else:
                    self._cancel(draft, job, f"after {name}: {STATES[end.state]}")
                    self._leave(job)
                    if num in self._behind:
                        self._ended(num, CANCELLED)
            self._write_end(draft, end.num, met, enter)
            if not end.behind:
                self._ends.popleft()
                del self.telling[end.num]

    def time_came(self, num: int) -> None:
        """Note that the time has come for which a job waited: that is written with this record or a later one."""
        self._due.append(num)

    def _write_times(self, draft: Draft, room: int, enter: Callable[[Job], None]) -> int:
        """Write that the time of jobs has come, for at most so many; return how many more may be written."""
        met = list[int]()
        while self._due and room > 0 and not draft.bulk_full:
            num = self._due.popleft()
            room -= 1
            job = self._state.jobs.get(num)
            if job is None or num not in self.jobs or not job.fresh:
                continue  # it has ended by itself, perhaps with this record
            if TIME in dict(job.awaits):
                met.append(num)
        self._write_end(draft, TIME, met, enter)
        return room

    def _write_end(self, draft: Draft, ended: int, waiting: list[int], enter: Callable[[Job], None]) -> None:
        if waiting:
            draft.add(Met(ended, waiting))
        for job in [self._state.jobs[num] for num in waiting]:
            if not job.awaits:
                self._leave(job)
                enter(job)

    def _ended(self, num: int, state: int) -> _End:
        end = self.telling.get(num)
        if end is None:
            end = self.telling[num] = _End(num, state, deque(self._behind.pop(num, ())))
            self._ends.append(end)
        return end

    def _leave(self, job: Job) -> None:
        del self.jobs[job.num]
        for num, _ in job.awaits:
            behind = self._behind.get(num)
            if behind is not None:
                behind.pop(job.num, None)
                if not behind:
                    del self._behind[num]
