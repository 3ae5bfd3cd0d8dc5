"""Many jobs of one tenant waited for at once, over one subscription.

Subscribe to the tenant's frames first, then ask where the jobs stand, then take their ends from the frames. What is
said may be lost, so a reconnection, an overflow or a long silence asks again, some of them at a time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from moorage.bus.transport import Delivery, Subscribed
from moorage.client.errors import TimedOut, Unreachable, client_problem
from moorage.client.job import Job, Outcome, Result
from moorage.client.watch import REPAIR_S, REPAIR_S_FIRST, RETRY_S
from moorage.schemas.codec import Decoder
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Change, Event, Events
from moorage.schemas.job import TERMINAL

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient

#: frames that wait to be looked at; beyond it the jobs are asked for
FRAMES_MAX: Final = 10_000
SHOWS_AT_ONCE: Final = 64
#: jobs asked for one by one after a silence: each of a large crowd has its turn
REPAIR_JOBS_MAX: Final = 256
#: from so many on, one `ls` is asked before the jobs are asked for one by one
LS_FROM_JOBS: Final = 16
LS_MAX: Final = 1000

_decode_events: Final[Decoder[Events]] = Decoder(Events)


class Gathering:
    """An async context manager; `over` yields each job once when it is over, in the order of their ends."""

    def __init__(self, client: AsyncClient, jobs: Iterable[Job]) -> None:
        self._client = client
        self._jobs = list({job.id: job for job in jobs}.values())
        self._waiting: dict[str, Job] = {}
        self._seen: dict[str, Outcome] = {}
        self._revs: dict[str, int] = {}
        self._over: deque[Job] = deque()
        self._frames: deque[bytes] = deque()
        self._unclear: set[str] = set()
        self._some = asyncio.Event()
        self._stale = False
        self._subscription: Subscribed | None = None

    async def __aenter__(self) -> Gathering:
        self._client.watches.add(self)
        events = self._client.subjects.events(self._client.tenant)
        self._subscription = await self._client.subscribe(events, self._on_events)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.watches.discard(self)
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    def refresh(self) -> None:
        """Ask for all of them again: something may have been missed."""
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
        ends_s = asyncio.get_running_loop().time() + timeout_s
        for job in self._jobs:
            if job.known_result is not None:
                self._over.append(job)
            else:
                self._waiting[job.id] = job
        try:
            async with asyncio.timeout_at(ends_s):
                await self._ask(len(self._waiting))
        except TimeoutError:
            raise self._too_late(timeout_s) from None
        silence_s = REPAIR_S_FIRST
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
        """Take what came, or wait for it; returns how long the next silence may be."""
        try:
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
                    await self._ask(REPAIR_JOBS_MAX)
                    return REPAIR_S
        except Unreachable:  # a takeover, or a server that comes back: the jobs go on meanwhile
            self._stale = True
            await asyncio.sleep(RETRY_S)
        return silence_s

    # -- what is said

    def _take_frames(self) -> None:
        while self._frames:
            try:
                events = _decode_events(self._frames.popleft()).jobs
            except Refused:
                self._stale = True
                continue
            for event in events:
                if event.job in self._waiting:
                    self._take(event)

    def _take(self, event: Event) -> None:
        rev = self._revs.get(event.job, 0)
        if event.rev <= rev:
            return
        fresh = [change for change in event.changes if change.rev > rev]
        self._revs[event.job] = event.rev
        outcome = self._seen.get(event.job)
        if outcome is None:
            outcome = self._seen[event.job] = Outcome(event.job)
        outcome.take(msgspec.structs.replace(event, changes=fresh))
        job = self._waiting[event.job]
        job.saw(event)
        if event.state not in TERMINAL:
            return
        if outcome.decided is None and len(fresh) != event.rev - rev:
            self._unclear.add(event.job)  # the replica that decided it ended in a frame that was not heard
        else:
            self._end(job, outcome.result())

    def _end(self, job: Job, result: Result) -> None:
        del self._waiting[job.id]
        self._seen.pop(job.id, None)
        self._revs.pop(job.id, None)
        self._unclear.discard(job.id)
        job.ended(result)
        self._over.append(job)

    # -- what is asked

    async def _ask(self, jobs_max: int) -> None:
        """Where the jobs stand, `jobs_max` of those that one `ls` does not hold."""
        rest = list(self._waiting)
        if len(rest) >= LS_FROM_JOBS:
            listed = {row["job"]: row for row in (await self._client.ls(limit=LS_MAX))["jobs"]}
            for name in rest:
                if name in listed and name in self._waiting:
                    self._take_row(listed[name])
            rest = [name for name in rest if name not in listed]
        rest = rest[:jobs_max]
        await self._show(rest)
        for name in rest:  # to the end of the line: the others come first next time
            if (job := self._waiting.pop(name, None)) is not None:
                self._waiting[name] = job

    async def _show(self, names: list[str]) -> None:
        for at in range(0, len(names), SHOWS_AT_ONCE):
            self._take_frames()
            part = [name for name in names[at : at + SHOWS_AT_ONCE] if name in self._waiting]
            answers = await asyncio.gather(*(self._client.answer("show", {"job": name}) for name in part))
            for name, answer in zip(part, answers, strict=True):
                if name in self._waiting:
                    self._take_shown(answer.ledger, answer.data)

    def _take_row(self, row: dict[str, Any]) -> None:
        job = self._waiting[row["job"]]
        job.learn(row)
        if row["state"] in TERMINAL:
            seen = self._seen.get(job.id)
            changes = seen.result().changes if seen is not None else []
            self._end(job, Result(job.id, row["state"], row["code"], row["why"], changes))

    def _take_shown(self, ledger: int, data: dict[str, Any]) -> None:
        job = self._waiting[data["job"]]
        job.learn(data)
        outcome = self._seen[job.id] = Outcome(job.id)
        changes = msgspec.convert(data.get("changes", []), list[Change])
        self._revs[job.id] = data.get("rev", 0)
        event = Event(data["tenant"], job.id, data.get("rev", 0), data["state"], ledger, changes, data.get("why", ""))
        outcome.take(event)
        if data["state"] in TERMINAL:
            self._end(job, outcome.result(data))

    def _too_late(self, timeout_s: float) -> TimedOut:
        left = len(self._waiting)
        name = next(iter(self._waiting))
        return TimedOut(
            client_problem(
                "timed-out",
                f"{left} of {len(self._jobs)} jobs are not over after {timeout_s:g} s; they go on",
                job=name,
                next_step=f"moorage explain {name} says why the first of them is where it is",
            )
        )
