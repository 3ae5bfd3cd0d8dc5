"""Waits for many jobs of one tenant at once, over one subscription.

It subscribes to the tenant's event frames, then asks for the state of each job, and from then on takes their ends from
the frames. Frames may be lost, so after a reconnection, an overflow or a long silence it asks again, for some at a
time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from moorage.bus.transport import Delivery, Subscribed
from moorage.client.errors import TimedOut, Unreachable, rejected, timed_out
from moorage.client.feed import decode_events
from moorage.client.job import Job, Result, decided, result_of
from moorage.client.watch import REPAIR_S, REPAIR_S_FIRST, RETRY_S
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Change, Event
from moorage.schemas.job import TERMINAL

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient

#: frames that may wait here; beyond it the jobs are asked for instead
FRAMES_MAX: Final = 10_000
SHOWS_AT_ONCE: Final = 64
#: so many jobs or more are asked for with `ls`, and only after a moment in which most may end by themselves
CROWD: Final = 16
#: names in one `ls`: some 2 ms of the leader's time
LISTED_MAX: Final = 250
#: a crowd is asked for after its first silence of QUIET_S, after FIRST_ASK_S at the latest
QUIET_S: Final = 0.05
FIRST_ASK_S: Final = 1.0
#: after a later silence only so many are asked for: all jobs of a large crowd get their turn
REPAIR_JOBS_MAX: Final = 250

H = TypeVar("H")


def handles(jobs: Iterable[H], kind: type[H]) -> Iterator[H]:
    """These handles, as they come. Raises TypeError for what is none of this kind of client."""
    if isinstance(jobs, kind):
        raise TypeError(f"several jobs are waited for here: a list of them; {jobs!r} by itself: job.result()")
    for job in jobs:
        if isinstance(job, kind):
            yield job
        elif isinstance(job, list | tuple):
            raise TypeError(
                f"a {type(job).__name__} is no {kind.__name__}: gather takes them one by one, gather(*jobs)"
            )
        else:
            made = f"job({job!r})" if isinstance(job, str) else "job(id)"
            raise TypeError(
                f"{job!r} is no {kind.__name__}: name jobs by their handles, as submit or {made} makes them"
            )


class _Seen:
    """What the frames have said of a job that is not over."""

    __slots__ = ("changes", "rev", "why")

    def __init__(self) -> None:
        self.rev = 0
        self.why = ""
        self.changes: list[Change] = []


class Gathering:
    """An async context manager; `over` yields each job once it is over, in the order in which they end."""

    def __init__(self, client: AsyncClient, jobs: Iterable[Job]) -> None:
        self._client = client
        self._jobs = list({job.id: job for job in handles(jobs, Job)}.values())
        for job in self._jobs:
            if job.tenant != client.tenant:  # under this tenant the same id would be another job
                raise rejected(
                    "invalid-argument",
                    f"job {job.id} is of tenant {job.tenant}, and this client of tenant {client.tenant}",
                    found=job.tenant,
                    allowed=client.tenant,
                    next="wait for the jobs of each tenant with a client of that tenant",
                )
        self._waiting: dict[str, Job] = {}
        self._seen: dict[str, _Seen] = {}
        self._over: deque[Job] = deque()
        self._frames: deque[bytes] = deque()
        self._unclear: set[str] = set()
        self._some = asyncio.Event()
        self._stale = False
        self._ask_by_s = inf
        self._subscription: Subscribed | None = None

    async def __aenter__(self) -> Gathering:
        events = self._client.subjects.events(self._client.tenant)
        self._subscription = await self._client.subscribe(events, self._on_events)
        self._client.watches.add(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.watches.discard(self)
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    def refresh(self) -> None:
        """Ask for all jobs again, as something may have been missed."""
        self._stale = True
        self._some.set()

    def _on_events(self, delivery: Delivery) -> None:
        if len(self._frames) >= FRAMES_MAX:
            self._stale = True
        else:
            self._frames.append(delivery.data)
        self._some.set()

    async def over(self, timeout_s: float) -> AsyncIterator[Job]:
        """Raises `TimedOut` (the jobs go on), `NotFound`, `NoScheduler`, `NotPermitted`."""
        began_s = asyncio.get_running_loop().time()
        ends_s = began_s + timeout_s
        for job in self._jobs:
            if job.known_result is not None:
                self._over.append(job)
            else:
                self._waiting[job.id] = job
        crowd = len(self._waiting) >= CROWD
        self._ask_by_s = began_s + (FIRST_ASK_S if crowd else 0.0)
        silence_s = QUIET_S if crowd else REPAIR_S_FIRST
        while True:
            while self._over:
                yield self._over.popleft()
            if not self._waiting:
                return
            try:
                async with asyncio.timeout_at(ends_s):
                    silence_s = await self._step(silence_s)
            except TimeoutError:
                raise self._too_late(timeout_s) from None

    async def _step(self, silence_s: float) -> float:
        """Handle what has arrived, or wait for it; returns how long the next silence may be.

        Raises `Unreachable` only until the jobs were asked for once.
        """
        loop = asyncio.get_running_loop()
        first = self._ask_by_s < inf
        try:
            if loop.time() >= self._ask_by_s:
                await self._ask(len(self._waiting))
                self._ask_by_s = inf
                return REPAIR_S_FIRST
            if self._frames:
                self._take_frames()
                await self._show(list(self._unclear))
            elif self._stale:
                self._stale = False
                await self._ask(len(self._waiting))
            else:
                self._some.clear()
                try:
                    async with asyncio.timeout(silence_s):
                        await self._some.wait()
                except TimeoutError:
                    if first:
                        self._ask_by_s = loop.time()
                        return silence_s
                    await self._ask(REPAIR_JOBS_MAX)
                    return REPAIR_S
        except Unreachable:  # a takeover, or a server that restarts: the jobs go on meanwhile
            if first:
                raise
            self._stale = True
            await asyncio.sleep(RETRY_S)
        return silence_s

    # -- what is said

    def _take_frames(self) -> None:
        while self._frames:
            try:
                events = decode_events(self._frames.popleft()).jobs
            except Refused:
                self._stale = True
                continue
            for event in events:
                if event.job in self._waiting:
                    self._take(event)

    def _take(self, event: Event) -> None:
        name, rev = event.job, event.rev
        seen = self._seen.get(name)
        if seen is None:
            seen = self._seen[name] = _Seen()
        if rev <= seen.rev:
            return
        changes = event.changes
        if changes and changes[0].rev <= seen.rev:
            changes = [change for change in changes if change.rev > seen.rev]
        whole = len(changes) == rev - seen.rev
        seen.rev, seen.why = rev, event.why or seen.why
        seen.changes += changes
        job = self._waiting[name]
        job.saw(event)
        if event.state not in TERMINAL:
            return
        if not whole and decided(seen.changes, event.state) is None:
            self._unclear.add(name)  # the frame with the end of the replica that decided it was missed: ask
        else:
            self._end(job, result_of(name, event.state, seen.changes, seen.why, {}))

    def _end(self, job: Job, result: Result) -> None:
        del self._waiting[job.id]
        self._seen.pop(job.id, None)
        self._unclear.discard(job.id)
        job.ended(result)
        self._over.append(job)

    # -- what is asked

    async def _ask(self, jobs_max: int) -> None:
        """Ask for the state of up to `jobs_max` jobs: many with `ls`, and one by one those that it does not list."""
        rest = list(self._waiting)[:jobs_max]
        if len(rest) >= CROWD:
            listed: set[str] = set()
            for at in range(0, len(rest), LISTED_MAX):
                self._take_frames()
                part = [name for name in rest[at : at + LISTED_MAX] if name in self._waiting]
                for row in (await self._client.read("ls", {"jobs": part}))["jobs"]:
                    listed.add(row["job"])
                    if row["job"] in self._waiting:
                        self._take_row(row)
            await self._show([name for name in rest if name not in listed])
        else:
            await self._show(rest)
        for name in rest:  # to the end of the queue: next time the others come first
            if (job := self._waiting.pop(name, None)) is not None:
                self._waiting[name] = job

    async def _show(self, names: list[str]) -> None:
        for at in range(0, len(names), SHOWS_AT_ONCE):
            self._take_frames()
            part = [name for name in names[at : at + SHOWS_AT_ONCE] if name in self._waiting]
            answers = await asyncio.gather(*(self._client.answer("show", {"job": name}) for name in part))
            for name, answer in zip(part, answers, strict=True):
                if name in self._waiting:
                    self._take_shown(answer.data)

    def _take_row(self, row: dict[str, Any]) -> None:
        job = self._waiting[row["job"]]
        job.learn(row)
        if row["state"] in TERMINAL:
            seen = self._seen.get(job.id) or _Seen()
            self._end(job, result_of(job.id, row["state"], seen.changes, "", row))

    def _take_shown(self, data: dict[str, Any]) -> None:
        job = self._waiting[data["job"]]
        job.learn(data)
        seen = self._seen[job.id] = _Seen()
        seen.rev, seen.changes = data.get("rev", 0), msgspec.convert(data.get("changes", []), list[Change])
        if data["state"] in TERMINAL:
            self._end(job, result_of(job.id, data["state"], seen.changes, "", data))

    def _too_late(self, timeout_s: float) -> TimedOut:
        left = len(self._waiting)
        name = next(iter(self._waiting))
        return timed_out(
            f"{left} of {len(self._jobs)} jobs are not over after {timeout_s:g} s; they go on",
            job=name,
            next_step=f"moorage explain {name} says why the first of them is where it is",
        )
