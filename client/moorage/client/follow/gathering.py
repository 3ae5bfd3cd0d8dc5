"""What is made of the news of many jobs: `Gathering` yields each as it ends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Final

from moorage.client.errors import TimedOut, read_answer, timed_out, word_to_explain
from moorage.client.follow.follower import CROWD, Follower, Histories
from moorage.client.follow.job_history import JobHistory, Shown, decided, result_of, shown_event
from moorage.schemas.frames import Change, Event
from moorage.schemas.job import REJECTED, TERMINAL

if TYPE_CHECKING:
    from moorage.client.job import AsyncJob
    from moorage.schemas.answers.jobs import JobRow

#: a crowd is asked for after its first silence of QUIET_S, in which most jobs may end; after FIRST_ASK_S at the latest
QUIET_S: Final = 0.05
FIRST_ASK_S: Final = 1.0
#: most names in one `ls`: its cost for the leader is small
LISTED_MAX: Final = 250


class Gathering(Follower):
    """Waits for many jobs of one tenant: an async context manager. `over` yields the jobs in the order in which they
    end. Only the end of a job matters here: an earlier gap is not repaired."""

    def __init__(self, histories: Histories, jobs: Iterable[AsyncJob]) -> None:
        self._jobs = {job.job: job for job in jobs}
        self._ended = deque(job for job in self._jobs.values() if job.known_result is not None)
        waited = (JobHistory(name) for name, job in self._jobs.items() if job.known_result is None)
        super().__init__(histories, waited, asks_first=True)

    async def over(self, timeout_s: float) -> AsyncIterator[AsyncJob]:
        """Yield each job as it ends. Raises `TimedOut` (jobs go on), `NotFound`, `NoScheduler`, `NotPermitted`."""
        self._ends_after(timeout_s)
        self._refresh()
        if len(self.left) >= CROWD:
            self._ask_at_s, self._silence_s = asyncio.get_running_loop().time() + FIRST_ASK_S, QUIET_S
        while True:
            while self._ended:
                yield self._ended.popleft()
            if not self.left:
                return
            await self._step()

    def _take_event(self, event: Event) -> None:
        history = self.left.get(event.job)
        if history is None:
            return
        was_refused = (
            event.state == REJECTED and event.rev == history.last_rev == 0
        )  # by the durable queue: it is no job
        if event.rev <= history.last_rev and not was_refused:
            return
        self._received += 1
        history.take(event)
        self._jobs[event.job]._saw(event)
        if event.state in TERMINAL:
            if history.has_gap and decided(history.all_changes(), event.state) is None:
                self._due[event.job] = None  # the transition that decided the job's end was missed
            else:
                self._end(history, event.state, event.why, None)
            self._wake()

    def _take_answer(self, history: JobHistory, shown: Shown, rev: int, changes: list[Change]) -> None:
        self._jobs[history.job]._learn(shown.info)
        history.accept(shown_event(self._client.tenant, history.job, shown, rev, changes))
        if history.is_over:
            self._end(history, history.state, "", shown.info)

    def _end(self, history: JobHistory, state: str, why: str, shown: JobRow | None) -> None:
        job = self._jobs[history.job]
        del self.left[history.job]
        job._has_ended(result_of(job.job, state, history.all_changes(), why or history.why, shown))
        self._ended.append(job)

    async def _not_listed(self, names: list[str]) -> list[str]:
        from moorage.schemas.answers.jobs import JobsAnswer

        listed: set[str] = set()
        for at in range(0, len(names), LISTED_MAX):
            part = [name for name in names[at : at + LISTED_MAX] if name in self.left]
            for row in read_answer(await self._read("ls", {"jobs": part}), JobsAnswer).jobs:
                listed.add(row.job)
                if (history := self.left.get(row.job)) is not None:
                    self._jobs[history.job]._learn(row)
                    if row.state in TERMINAL:
                        self._end(history, row.state, "", row)
        return [name for name in names if name not in listed]

    def _too_late(self) -> TimedOut:
        name = next(iter(self.left), "")
        return timed_out(
            f"{len(self.left)} of {len(self._jobs)} jobs have not ended after {self._timeout_s:g} s; they go on",
            job=name,
            next_step=f"moorage explain {word_to_explain(name)} says why the first of them has not ended",
        )
