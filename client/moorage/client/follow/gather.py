"""Wait for many jobs of one tenant at once, by the events in the tenant's frames.

It subscribes first, then asks for the state of each job. Frames may be lost, so after a reconnection or a long silence
it asks again, for some jobs at a time. Only the end of a job matters here: an earlier gap is not repaired.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from math import inf
from typing import Any, Final, Generic, TypeVar

from moorage.client.errors import TimedOut, Unreachable, timed_out
from moorage.client.follow.result import decided, result_of
from moorage.client.follow.seen import Seen
from moorage.client.follow.stories import REPAIR_S, REPAIR_S_FIRST, RETRY_S, Stories
from moorage.client.follow.story import Story, changes_of, shown_event
from moorage.client.follow.waiting import Waiting
from moorage.schemas.frames import Answer, Event
from moorage.schemas.job import TERMINAL

SHOWS_AT_ONCE: Final = 64
#: the states of this many jobs or more (a crowd) are read by `ls`, after a delay in which most jobs may end
CROWD: Final = 16
#: most names in one `ls`: its cost for the leader is small
LISTED_MAX: Final = 250
#: a crowd is asked for after its first silence of QUIET_S, after FIRST_ASK_S at the latest
QUIET_S: Final = 0.05
FIRST_ASK_S: Final = 1.0
#: after a later silence this many jobs are asked for; after the next silence, the next ones
REPAIR_JOBS_MAX: Final = 250

H = TypeVar("H")
J = TypeVar("J", bound=Seen)


def handles(jobs: Iterable[H], kind: type[H]) -> Iterator[H]:
    """Yield these handles. Raises TypeError for anything but a handle of this kind of client."""
    if isinstance(jobs, kind):
        raise TypeError(f"give a list of jobs; to wait for {jobs!r} alone, use job.result()")
    for job in jobs:
        if isinstance(job, kind):
            yield job
        elif isinstance(job, list | tuple):
            raise TypeError(
                f"a {type(job).__name__} is no {kind.__name__}: gather takes jobs as arguments, gather(*jobs)"
            )
        else:
            made = f"job({job!r})" if isinstance(job, str) else "job(id)"
            raise TypeError(f"{job!r} is no {kind.__name__}: give handles of jobs, as submit or {made} returns them")


class Gathering(Generic[J]):
    """An async context manager for the wait; `over` yields the jobs in the order in which they end."""

    def __init__(self, stories: Stories, jobs: Iterable[J]) -> None:
        every = {job.id: job for job in jobs}
        self._count = len(every)
        self._over = deque(job for job in every.values() if job.known_result is not None)
        self._left = {name: job for name, job in every.items() if job.known_result is None}
        self._names = tuple(self._left)
        self._asks = stories.asks
        self._registry = stories
        self._stories: dict[str, Story] = {}
        self._unclear: set[str] = set()
        self._waiting = Waiting(stories.waits, stories.silences)
        self._received = 0
        self._is_stale = False
        self._ask_by_s = inf

    async def __aenter__(self) -> Gathering[J]:
        self._registry.followers.add(self)
        try:
            await self._registry.feed.join(self._names, self)
        except BaseException:
            self._registry.followers.discard(self)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._registry.followers.discard(self)
        await self._registry.feed.leave(self._names, self)

    def refresh(self) -> None:
        """Have the waiting task ask for all jobs again, as something may have been missed."""
        self._is_stale = True
        self._waiting.wake()

    def hear(self, event: Event) -> None:
        """Merge an event, in the read path. A job that has ended leaves the wait."""
        job = self._left.get(event.job)
        if job is None:
            return
        story = self._story(event.job)
        if event.rev <= story.last_rev:
            return
        self._received += 1
        story.take(event)
        job._saw(event)
        if event.state in TERMINAL:
            if story.has_gap and decided(story.all_changes(), event.state) is None:
                self._unclear.add(event.job)  # the transition that decided the job's end was missed: ask for it
            else:
                self._end(job, event.state, event.why, {})
            self._waiting.wake()

    async def over(self, timeout_s: float) -> AsyncIterator[J]:
        """Yield each job as it ends. Raises `TimedOut` (jobs go on), `NotFound`, `NoScheduler`, `NotPermitted`."""
        began_s = asyncio.get_running_loop().time()
        ends_s = began_s + timeout_s
        crowd = len(self._left) >= CROWD
        self._ask_by_s = began_s + (FIRST_ASK_S if crowd else 0.0)
        silence_s = QUIET_S if crowd else REPAIR_S_FIRST
        while True:
            while self._over:
                yield self._over.popleft()
            if not self._left:
                return
            try:
                async with asyncio.timeout_at(ends_s):
                    silence_s = await self._step(silence_s)
            except TimeoutError:
                raise self._too_late(timeout_s) from None

    async def _step(self, silence_s: float) -> float:
        """Wait for an event, or ask for what is missing. Return how long the next silence may last.

        Raises `Unreachable` only until a first request for the jobs was answered.
        """
        loop = asyncio.get_running_loop()
        first = self._ask_by_s < inf
        try:
            self._registry.feed.check_permitted()
            if loop.time() >= self._ask_by_s:
                await self._ask(len(self._left))
                self._ask_by_s = inf
                return REPAIR_S_FIRST
            if self._unclear:
                unclear, self._unclear = list(self._unclear), set()
                await self._show(unclear)
                if not self._left.keys().isdisjoint(unclear):  # the answer came from a replaced leader
                    self._is_stale = True
                    await asyncio.sleep(RETRY_S)
            elif self._is_stale:
                self._is_stale = False
                await self._ask(len(self._left))
            else:
                received = self._received
                wait = self._waiting.wait if first else self._waiting.wait_in_silence
                if not await wait(silence_s) and received == self._received:
                    if first:
                        self._ask_by_s = loop.time()
                        return silence_s
                    await self._ask(REPAIR_JOBS_MAX)
                    return REPAIR_S
        except Unreachable:  # a takeover, or the server restarts: the jobs go on meanwhile
            if first:
                raise
            self._is_stale = True
            await asyncio.sleep(RETRY_S)
        return silence_s

    # -- what is known

    def _story(self, name: str) -> Story:
        story = self._stories.get(name)
        if story is None:
            story = self._stories[name] = Story(name)
        return story

    def _end(self, job: J, state: str, why: str, shown: dict[str, Any]) -> None:
        story = self._story(job.id)
        del self._left[job.id], self._stories[job.id]
        self._unclear.discard(job.id)
        job._ended(result_of(job.id, state, story.all_changes(), why or story.why, shown))
        self._over.append(job)

    # -- what is asked

    async def _ask(self, jobs_max: int) -> None:
        """Ask for the state of up to `jobs_max` jobs: a crowd by `ls`, and jobs that it does not list one by one."""
        rest = list(self._left)[:jobs_max]
        if len(rest) >= CROWD:
            listed: set[str] = set()
            for at in range(0, len(rest), LISTED_MAX):
                part = [name for name in rest[at : at + LISTED_MAX] if name in self._left]
                for row in (await self._asks.read("ls", {"jobs": part}))["jobs"]:
                    listed.add(row["job"])
                    if (job := self._left.get(row["job"])) is not None:
                        job._learn(row)
                        if row["state"] in TERMINAL:
                            self._end(job, row["state"], "", row)
            await self._show([name for name in rest if name not in listed])
        else:
            await self._show(rest)
        for name in rest:  # move these to the end: the next time, the other jobs are asked for first
            if (one := self._left.pop(name, None)) is not None:
                self._left[name] = one

    async def _show(self, names: list[str]) -> None:
        for at in range(0, len(names), SHOWS_AT_ONCE):
            part = [name for name in names[at : at + SHOWS_AT_ONCE] if name in self._left]
            answers = await asyncio.gather(*(self._asks.answer("show", {"job": name}) for name in part))
            for name, answer in zip(part, answers, strict=True):
                if (job := self._left.get(name)) is not None:
                    self._take_shown(job, answer)

    def _take_shown(self, job: J, answer: Answer) -> None:
        """Merge an answer of `show`, unless it is older than the events that were received."""
        story = self._story(job.id)
        if story.knows_more_than(answer):
            return
        job._learn(answer.data)
        story.accept(shown_event(self._asks.tenant, job.id, answer, answer.data.get("rev", 0), changes_of(answer.data)))
        if story.is_over:
            self._end(job, story.state, "", answer.data)

    def _too_late(self, timeout_s: float) -> TimedOut:
        left = len(self._left)
        name = next(iter(self._left))
        return timed_out(
            f"{left} of {self._count} jobs have not ended after {timeout_s:g} s; they go on",
            job=name,
            next_step=f"moorage explain {name} says why the first of them has not ended",
        )
