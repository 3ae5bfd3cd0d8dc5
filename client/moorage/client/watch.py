"""Follows one job until it is over: its events without gaps or duplicates, and on request its output.

It subscribes first, then asks `show` for what happened before (and `history` if that does not reach back far enough),
and merges both by the job's revision numbers. Events may be lost, so it asks again after a gap, a reconnection, an
overflow or a long silence.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from moorage.bus.transport import Delivery, Subscribed
from moorage.client.beginning import Beginning
from moorage.client.errors import NotFound, Rejected, TimedOut, Unreachable, timed_out
from moorage.client.feed import Feed, check_permitted
from moorage.client.stored_output import STREAMS, Joiner, Piece, newest_attempts
from moorage.client.waiting import Waiting
from moorage.schemas.capabilities import Capabilities, driver_of
from moorage.schemas.codec import Decoder
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Change, Event, Output, StreamName
from moorage.schemas.job import RUNNING, TERMINAL
from moorage.schemas.names import SIMULATED_UUID

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.schemas.job import Request

#: items that wait to be taken; beyond it events are dropped and asked for later, and output is lost (and counted)
PENDING_MAX: Final = 10_000
#: who needs nothing before the job is over is woken once so many items wait
TOGETHER_MAX: Final = 64
#: after a silence of this length the job is asked for, as the last event may have been lost
REPAIR_S: Final = 10.0
#: the first time sooner, since most jobs that are watched to their end end soon
REPAIR_S_FIRST: Final = 2.0
RETRY_S: Final = 0.5
#: how long to wait for the end of the output after the job's last event
OUTPUT_GRACE_S: Final = 1.0
#: the same if missing output can be asked for
KEPT_GRACE_S: Final = 0.2
#: argument of `show` for a watch that listens to the tenant's frames: it does not turn on the job's own subject
BY_FRAMES: Final = {"events": "tenant"}

_decode_event: Final[Decoder[Event]] = Decoder(Event, from_leader=True)
_decode_output: Final[Decoder[Output]] = Decoder(Output, from_leader=True)


class Watch:
    """An async context manager and iterator over `Event` and `Piece`; ends by itself once the job is over.

    With `output` it yields output from now on. With `past` this is joined to what the workers keep, without gaps or
    duplicates: everything from the beginning, or the last `tail` lines of each stream of that; `replica` chooses one
    replica. `state` is the last state seen; `lost` counts pieces of output that were dropped here. `request` is what
    will be submitted once this is open: its history is then heard from the beginning, nothing needs to be asked, and
    its `events` say on which subject. Without it, the job's own subject is heard, or, if `CROWD` others are open on
    this client, the tenant's frames, once for all of them. `beginning` is what these have said of it so far: where it
    is whole, they are listened to on, and nothing needs to be asked either. `driver` is the job's where it is known.
    `ahead` is for who asks or submits next on this client: it then waits for no round trip of its own. `at_end` is for
    who needs nothing before the job is over: what comes may be yielded together then. `began_s` is when the wait began,
    by the loop's clock, for who has waited already.
    """

    def __init__(
        self,
        client: AsyncClient,
        job: str,
        *,
        output: bool = False,
        past: bool = False,
        tail: int | None = None,
        replica: int | None = None,
        request: Request | None = None,
        beginning: Beginning | None = None,
        driver: str = "",
        ahead: bool = False,
        at_end: bool = False,
        began_s: float | None = None,
    ) -> None:
        if tail is not None and not past:
            raise TypeError("tail is of the output that is kept: it goes with past=True")
        self.job = job
        self.state = ""
        self.rev = 0
        self._ledger = 0  # the record of what was told last
        self.lost = 0
        self.shown: dict[str, Any] = {}
        self._client = client
        self._request = request
        self._ahead = ahead
        self._beginning = beginning if beginning is not None and beginning.is_whole else None
        self._driver = driver if request is None else request.workload.driver
        self._output = output or past
        self._replica = replica
        self.joiner = Joiner(client, job, tail) if past else None
        self._pending: deque[Event | Piece] = deque()
        self._at_end = at_end
        self._began_s = began_s
        self._waiting = Waiting()
        self._stale = False
        self._open_streams: set[tuple[int, int, StreamName]] = set()
        self._ended_streams: set[tuple[int, int, StreamName]] = set()
        self._subscriptions: list[Subscribed] = []
        self._feed: Feed | None = None  # if it listens to the tenant's frames

    async def __aenter__(self) -> Watch:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Subscribe. Raises `NotPermitted`, or `follow` does where this is `ahead` of what is asked next."""
        client, subjects = self._client, self._client.subjects
        if self._beginning is not None and client.feed.is_refused:
            self._beginning = None
        together = client.crowded if self._request is None else self._request.events == "tenant"
        if together and client.feed.is_refused:  # its own subject may be heard, once it was asked for
            together = False
        subscribe = client.subscribe_ahead if self._ahead else client.subscribe
        client.watches.add(self)
        try:
            if self._beginning is not None:
                self._beginning.tell(self._hear)
            if together or self._beginning is not None:
                await self._hear_tenant()
            else:
                subject = subjects.event(client.tenant, self.job)
                self._subscriptions.append(await subscribe(subject, self._on_event))
            if self._output:
                subject = subjects.log(client.tenant, self.job, self._heard_replica)
                self._subscriptions.append(await subscribe(subject, self._on_output))
        except BaseException:  # if it is cancelled here, `__aexit__` is never called
            await self.close()
            raise

    @property
    def _heard_replica(self) -> int | Literal["*"]:
        """A wildcard costs the server a look at all subjects that it keeps in mind, so the only one is named."""
        if self._replica is None and self._request is not None and self._request.replicas == 1:
            return 0
        return "*" if self._replica is None else self._replica

    async def close(self) -> None:
        """Stop listening; the job goes on."""
        self._client.watches.discard(self)
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._subscriptions.clear()
        feed, self._feed = self._feed, None
        if feed is not None:
            await feed.leave(self.job, self._hear, self.refresh)

    def refresh(self) -> None:
        """Ask for the job again, as something may have been missed."""
        self._stale = True
        self._waiting.wake()

    @property
    def driver(self) -> str:
        """The driver that runs the job; "" before `show` was asked, and if its request is no longer known."""
        return self._driver or driver_of(self.shown)

    @property
    def can(self) -> Capabilities:
        """What this driver can do, as far as it is known."""
        return self._client.drivers.can(self.driver)

    # -- what comes in: only enqueued

    def _on_event(self, delivery: Delivery) -> None:
        try:
            self._hear(_decode_event(delivery.data))
        except Refused:
            self.refresh()

    def _hear(self, event: Event) -> None:
        if len(self._pending) >= PENDING_MAX:
            self._stale = True
        else:
            self._pending.append(event)
            if self._at_end and event.state not in TERMINAL and len(self._pending) < TOGETHER_MAX:
                return
        self._waiting.wake()

    def _on_output(self, delivery: Delivery) -> None:
        try:
            output = _decode_output(delivery.data)
            replica = int(delivery.subject.rpartition(".")[2])
        except (Refused, ValueError):
            self.lost += 1
            return
        if output.end:
            stream = (replica, output.attempt, output.stream)
            self._open_streams.discard(stream)
            self._ended_streams.add(stream)
        if len(self._pending) >= PENDING_MAX:
            self.lost += 1
        else:
            piece = Piece(
                replica,
                output.attempt,
                output.stream,
                output.offset,
                output.text,
                output.end,
                output.next,
                output.data,
            )
            self._pending.append(piece)
            if self._at_end and self.state not in TERMINAL and len(self._pending) < TOGETHER_MAX:
                return
        self._waiting.wake()

    # -- what goes out

    def __aiter__(self) -> AsyncIterator[Event | Piece]:
        return self.follow()

    async def follow(self, timeout_s: float | None = None) -> AsyncIterator[Event | Piece]:
        """Iterate for at most `timeout_s` seconds in all. Raises `TimedOut`, `NotFound`, `NoScheduler`."""
        loop = asyncio.get_running_loop()
        began_s = loop.time() if self._began_s is None else self._began_s
        ends_s = None if timeout_s is None else began_s + timeout_s
        repair_s = REPAIR_S if self._stale else REPAIR_S_FIRST
        grace_s = OUTPUT_GRACE_S
        is_new = self._request is not None or self._beginning is not None
        shown = [] if is_new else await self._show(first=True)
        self._check_permitted()
        for event in shown:
            yield event
            if self.state in TERMINAL and event.changes:  # the end of its output may be under way still
                grace_s -= max(time.time() - event.changes[-1].time_ms / 1000, 0)
        async for piece in self._past():
            yield piece
        while True:
            while self._pending:
                item = self._pending.popleft()
                if isinstance(item, Piece):
                    async for piece in self._joined(item):
                        yield piece
                    continue
                for news in await self._merge(item):
                    yield news
            if self.state in TERMINAL:
                break
            if self._stale:
                for news in await self._show():
                    yield news
                continue
            if not await self._wait(repair_s, ends_s) and not self._pending:
                if ends_s is not None and loop.time() >= ends_s:
                    raise too_late(self.job, self.state, timeout_s or 0.0)
                self._stale = True
                repair_s = REPAIR_S
        async for piece in self._rest(grace_s):
            yield piece

    def _check_permitted(self) -> None:
        """Subscriptions are made ahead of the first question: once it is answered, what they came to is known."""
        if self._feed is not None:
            self._feed.check_permitted()
        for subscription in self._subscriptions:
            check_permitted(subscription)

    async def _past(self) -> AsyncIterator[Piece]:
        """The stored output of each replica's newest attempt; nothing if the job is yet to be submitted."""
        if self.joiner is None or self._request is not None:
            return
        newest = newest_attempts(self.shown)
        async for piece in self.joiner.kept_of(newest, self._replica):
            yield piece
        self._open_streams = {
            key for key in self._open_streams if key[1] >= (newest.get(key[0]) or 0) and not self.joiner.is_over(*key)
        }

    async def _joined(self, piece: Piece) -> AsyncIterator[Piece]:
        if self.joiner is None:
            yield piece
            return
        async for each in self.joiner.joined(piece):
            yield each

    async def _rest(self, grace_s: float) -> AsyncIterator[Piece]:
        """The output that arrives after the job's last event; what does not arrive is asked for, if it is kept."""
        if not self._output:
            return
        if self.joiner is not None:
            grace_s = min(grace_s, KEPT_GRACE_S)
        ends_s = asyncio.get_running_loop().time() + grace_s
        while True:
            while self._pending:
                item = self._pending.popleft()
                if isinstance(item, Piece):
                    async for piece in self._joined(item):
                        yield piece
            if not self._open_streams:
                return
            if not await self._wait(OUTPUT_GRACE_S, ends_s):
                break
        if self.joiner is not None:
            for replica, attempt in sorted({key[:2] for key in self._open_streams}):
                if self._replica in (None, replica):
                    async for piece in self.joiner.kept(replica, attempt):
                        yield piece

    async def _wait(self, at_most_s: float, ends_s: float | None) -> bool:
        """Wait until something arrives; False if nothing did."""
        if ends_s is not None:
            at_most_s = min(at_most_s, ends_s - asyncio.get_running_loop().time())
        return await self._waiting.wait(self._client.waits, max(at_most_s, 0.0))

    async def _merge(self, event: Event) -> list[Event]:
        """What is new in an event; after a gap what `show` says instead."""
        if event.rev == self.rev and event.waiting is not None:
            return [event]  # no transition; only the reason why it waits has changed
        if event.rev <= self.rev:
            return []
        fresh = behind(self.rev, event.changes)
        if len(fresh) != event.rev - self.rev or self._needs_to_learn(fresh):
            return await self._show()
        return [self._take(msgspec.structs.replace(event, changes=fresh))]

    def _needs_to_learn(self, changes: list[Change]) -> bool:
        """Return whether a job of an unknown driver has begun to run: `show` reports what the driver can do."""
        known = not self._output or not self.driver or self.driver in self._client.drivers
        return not known and any(change.state == RUNNING for change in changes)

    async def _show(self, *, first: bool = False) -> list[Event]:
        """Ask for the job. Only the first time does a missing scheduler raise; later it is waited for."""
        self._stale = False
        try:
            answer = await self._client.answer("show", {"job": self.job, **({} if self._feed is None else BY_FRAMES)})
        except Unreachable:
            if first:
                raise
            self._stale = True
            await asyncio.sleep(RETRY_S)
            return []
        if answer.data.get("rev", self.rev) < self.rev and answer.ledger < self._ledger:
            # of a leader that does not know yet that another one leads; of a restored ledger, records are above all
            self._stale = True
            await asyncio.sleep(RETRY_S)
            return []
        data = self.shown = answer.data
        self._client.drivers.learn(data)
        told = data.get("own_subject", False) or data.get("request", {}).get("events") != "tenant"
        if not told and self._feed is None:
            # a scheduler of an older release sends its events in the tenant's frames only: listen there, and ask again
            self._stale = True
            await self._hear_tenant()
        changes = behind(self.rev, msgspec.convert(data.get("changes", []), list[Change]))
        rev = data.get("rev", self.rev)
        if len(changes) != rev - self.rev or "rev" not in data:
            try:
                changes, rev = await self._history(changes, rev)
            except Unreachable:
                self._stale = True
                await asyncio.sleep(RETRY_S)
                return []
        if rev <= self.rev and data["state"] == self.state:
            return []
        simulated = any(gpu.startswith(SIMULATED_UUID) for change in changes for gpu in change.gpus)
        event = Event(
            self._client.tenant, self.job, rev, data["state"], answer.ledger, changes, data.get("why", ""), simulated
        )
        return [self._take(event)]

    async def _hear_tenant(self) -> None:
        feed = self._client.feed
        await feed.join(self.job, self._hear, self.refresh)
        self._feed = feed

    async def _history(self, changes: list[Change], rev: int) -> tuple[list[Change], int]:
        """The transitions after the last one seen, from the history, and from `changes` what is not in there."""
        found = {change.rev: change for change in changes}
        after, more = self.rev, True
        while more:
            try:
                page = await self._client.read("history", {"job": self.job, "after_rev": after})
            except (Rejected, NotFound):  # expired, or a scheduler without history: `show` has all there is
                break
            told = behind(after, msgspec.convert(page["changes"], list[Change]))
            found |= {change.rev: change for change in told}
            rev, more = max(rev, page["rev"]), page["more"] and bool(told)
            after = told[-1].rev if told else after
        return [found[each] for each in sorted(found) if each <= rev], rev

    def _take(self, event: Event) -> Event:
        self.rev, self.state, self._ledger = event.rev, event.state, event.ledger
        if self._output and self.can.ends_streams:
            for change in event.changes:
                if change.state == RUNNING:
                    both = {(change.replica, change.attempt, name) for name in STREAMS}
                    self._open_streams |= both - self._ended_streams
        return event


def too_late(job: str, state: str, timeout_s: float) -> TimedOut:
    return timed_out(
        f"job {job} is {state or 'not heard of'} after {timeout_s:g} s; it goes on",
        job=job,
        next_step=f"moorage explain {job}",
    )


def behind(rev: int, changes: list[Change]) -> list[Change]:
    """Those that come after that revision."""
    return [change for change in changes if change.rev > rev]
