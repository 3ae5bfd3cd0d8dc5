"""Receive the events of the jobs that a client follows, and ask the leader for missed ones.

The events of a job are on its own subject and in the tenant's frames; many followers share one subscription to the
frames (`feed`). The leader is asked by `show`, and by `history` for transitions that are too old for `show`. It is
asked at the beginning, after a gap, a reconnection, an overflow or an unreadable frame, and after a long silence,
because the last event may have been lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Callable, Mapping
from math import inf
from typing import Any, Final, Protocol

from moorage.bus.errors import ConnectionClosed
from moorage.bus.inbox import CLOCK_S, Answers
from moorage.bus.transport import Delivery, Handler, Subscribed
from moorage.client.errors import NotFound, Rejected, TimedOut, Unreachable, timed_out
from moorage.client.follow.budget import Budget, Held
from moorage.client.follow.feed import Feed, check_permitted
from moorage.client.follow.output import Piece
from moorage.client.follow.ports import Asks
from moorage.client.follow.story import Story, behind, changes_of, shown_event
from moorage.client.follow.waiting import Waiting
from moorage.client.known_drivers import KnownDrivers
from moorage.schemas.codec import Decoder
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Answer, Change, Event
from moorage.schemas.job import Request

#: if a client has this many followers, further ones share the subscription to the tenant's frames
CROWD: Final = 16
#: bytes that an item takes here beside its text, and bytes of one transition. Events beyond the client's budget are
#: asked for later; output beyond it is lost (and counted)
ITEM_BYTES: Final = 512
CHANGE_BYTES: Final = 512
#: a reader that only needs the job's end is woken early if this many items wait
TOGETHER_MAX: Final = 64
#: after a silence of this length the leader is asked for the job, as the last event may have been lost
REPAIR_S: Final = 10.0
#: the first such silence is shorter, because most jobs that are followed to their end finish soon
REPAIR_S_FIRST: Final = 2.0
RETRY_S: Final = 0.5
#: the first answer may take this long even if the timeout is shorter: `timeout=0` tests whether a job has ended
FIRST_ANSWER_S: Final = 1.0
#: argument of `show` for a follower of the tenant's frames: it does not turn on the job's own subject
BY_FRAMES: Final = {"events": "tenant"}

_decode_event: Final[Decoder[Event]] = Decoder(Event, from_leader=True)


class Refreshed(Protocol):
    def refresh(self) -> None:
        """Note that events may have been missed."""


class Stories:
    """The followers of jobs on one open client. `upkeep` is the context of the timers that end silences."""

    def __init__(self, asks: Asks, upkeep: contextvars.Context | None = None) -> None:
        self.asks = asks
        self.feed = Feed(asks)
        self.drivers = KnownDrivers()
        self.budget = Budget()
        self.waits = Answers("")  # waits for events use the class for answers: one timer serves all of them
        self.silences = Answers("", context=upkeep)
        self.followers: set[Refreshed] = set()
        self.endless: set[asyncio.Event] = set()  # waits without a timeout: these events are set at the close
        self._is_closed = False

    def check_open(self) -> None:
        """Raise RuntimeError if the client was closed: no event would ever arrive."""
        if self._is_closed:
            raise RuntimeError("the client was closed while this listened")

    @property
    def is_crowded(self) -> bool:
        """Whether the client has CROWD or more followers, so that the next one should use the tenant's frames."""
        return len(self.followers) >= CROWD

    def refresh(self) -> None:
        """Have all followers ask the leader again: the connection was lost and is back."""
        self.feed.refresh()
        for follower in self.followers:
            follower.refresh()

    def close(self) -> None:
        """End all waits, because the client is closed."""
        self._is_closed = True
        self.feed.close()
        for follower in self.followers:
            follower.refresh()
        for closed in self.endless:
            closed.set()
        self.waits.fail_all(ConnectionClosed)
        self.silences.fail_all(ConnectionClosed)


class Following:
    """Follows one job until it ends. `Watch` opens and closes it.

    `heard` is the story of a job that the client submitted while it lingered: it has all events so far, so the leader
    need not be asked. `to_submit` is a request that will be submitted once this is open: then the leader need not be
    asked either, and the request's `events` choose the subject. Without either the leader is asked first. `driver` is
    the job's driver, if it is known. With `ahead`, opening takes no round trip; the caller sends a request next.
    `at_end` is for readers that only need the end of the job: they are woken less often. `saw` is called with each new
    event.
    """

    def __init__(
        self,
        stories: Stories,
        job: str,
        *,
        heard: Story | None = None,
        to_submit: Request | None = None,
        driver: str = "",
        ahead: bool = False,
        at_end: bool = False,
        saw: Callable[[Event], None] | None = None,
    ) -> None:
        usable = heard is not None and not heard.is_stale and not stories.feed.is_refused
        self.story = heard if heard is not None and usable else Story(job)
        self.to_submit = to_submit
        self.driver = driver if to_submit is None else to_submit.workload.driver
        self.asks = stories.asks
        self.drivers = stories.drivers
        self.shown: dict[str, Any] = {}
        self._stories = stories
        self._is_heard = usable
        self._ahead = ahead
        self._at_end = at_end
        self._saw = saw
        self._pending: Held[Event | Piece] = Held(stories.budget)
        self._received = 0
        self._waiting = Waiting(stories.waits, stories.silences)
        self._silence_s = REPAIR_S_FIRST
        self._timeout_s = self._ends_s = inf
        self._end_timer: asyncio.TimerHandle | None = None
        self._own: Subscribed | None = None
        self._by_frames = False

    async def open(self) -> None:
        """Subscribe to the job's events. Raises `NotPermitted`; with `ahead`, `begin` raises it instead."""
        stories = self._stories
        together = stories.is_crowded if self.to_submit is None else self.to_submit.events == "tenant"
        stories.followers.add(self)
        try:
            if self._is_heard:
                stories.feed.is_followed(self.story)
            if self._is_heard or (together and not stories.feed.is_refused):
                await self._listen_to_frames()
            else:
                asks = self.asks
                self._own = await self.subscribe(asks.subjects.event(asks.tenant, self.story.job), self._on_event)
        except BaseException:  # if it is cancelled here, `__aexit__` is never called
            await self.close()
            raise

    async def subscribe(self, subject: str, handler: Handler) -> Subscribed:
        """Subscribe to a subject; with `ahead`, without a round trip."""
        return await (self.asks.subscribe_ahead if self._ahead else self.asks.subscribe)(subject, handler)

    async def close(self) -> None:
        """Stop listening; the job goes on."""
        self._stories.followers.discard(self)
        self._pending.take_all()
        if self._end_timer is not None:
            self._end_timer.cancel()
        own, self._own = self._own, None
        try:
            if own is not None:
                await own.unsubscribe()
        finally:
            if self._by_frames:
                self._by_frames = False
                await self._stories.feed.leave((self.story.job,), self)

    async def _listen_to_frames(self) -> None:
        await self._stories.feed.join((self.story.job,), self)
        self._by_frames = True

    # -- received items: they are merged and enqueued

    def _on_event(self, delivery: Delivery) -> None:
        try:
            self.hear(_decode_event(delivery.data))
        except Refused:
            self.refresh()

    def hear(self, event: Event) -> None:
        """Merge an event, in the read path, and enqueue it."""
        story = self.story
        self._received += 1
        if self._stories.budget.left < _size_of(event):
            story.is_stale = True
        elif (news := story.take(event)) is not None:
            self._tell([news])
            self._pending.put_always(news, _size_of(news))  # the story has it already, so it is not asked for again
            self._wake()
            return
        if story.has_gap:
            self._waiting.wake()

    def put(self, item: Event | Piece) -> bool:
        """Enqueue an item; return False if this client holds too much that waits for readers."""
        if not self._pending.put(item, _size_of(item)):
            return False
        self._wake()
        return True

    def _wake(self) -> None:
        if not self._at_end or self.story.is_over or len(self._pending) >= TOGETHER_MAX:
            self._waiting.wake()

    def refresh(self) -> None:
        """Have the reader ask for the job again, as events may have been missed."""
        self.story.is_stale = True
        self._waiting.wake()

    # -- what the reader takes

    async def begin(self, timeout_s: float | None = None) -> list[Event]:
        """Return the events of the job so far. From now on it is followed for at most `timeout_s`; None: no limit.

        Raises `NotFound`, `NoScheduler`, `NotPermitted`, `TimedOut`.
        """
        if timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._timeout_s, self._ends_s = timeout_s, loop.time() + timeout_s
            self._end_timer = loop.call_at(self._ends_s, self._waiting.wake)
        news: list[Event] = []
        if self._is_heard:
            self._take_events()
            if self.story.rev:
                news = self._tell([self.story.so_far(self.asks.tenant)])
        elif self.to_submit is None:
            asked = await self._repair(first=True)
            news = self._take_events() + asked
        # an answer has arrived since the subscription, so the server has accepted or refused that by now
        if self._own is not None:
            check_permitted(self._own)
        if self._by_frames:
            self._stories.feed.check_permitted()
        return news

    def _take_events(self) -> list[Event]:
        """Return the waiting events; output stays in the queue."""
        items = self._pending.take_all()
        for item in items:
            if not isinstance(item, Event):
                self._pending.put_always(item, _size_of(item))
        return [item for item in items if isinstance(item, Event)]

    def _tell(self, news: list[Event]) -> list[Event]:
        if self._saw is not None:
            for event in news:
                self._saw(event)
        return news

    async def items(self) -> AsyncIterator[Event | Piece]:
        """Yield events and output in order until the job ends. Raises `TimedOut`."""
        while True:
            while self._pending:
                yield self._pending.take()
            if self.story.is_over:
                return
            await self._step()

    async def over(self) -> None:
        """Wait until the job ends, and drop all items. Raises `TimedOut`."""
        while not self.story.is_over:
            self._pending.take_all()
            await self._step()

    def taken(self) -> list[Event | Piece]:
        """Remove and return the waiting items."""
        return self._pending.take_all()

    async def more(self, ends_s: float) -> bool:
        """Wait for an item until `ends_s` of the loop's clock, and return whether one arrived."""
        left_s = ends_s - asyncio.get_running_loop().time()
        return bool(self._pending) or await self._waiting.wait(max(left_s, 0.0))

    async def _step(self) -> None:
        """Wait for an item, or ask the leader for what is missing. Raises `TimedOut`."""
        story = self.story
        if self._left_s() <= CLOCK_S:
            raise too_late(story.job, story.state, self._timeout_s)
        if story.has_gap:
            for event in await self._repair():
                self._pending.put_always(event, _size_of(event))
            return
        received = self._received
        woken = await self._waiting.wait_in_silence(self._silence_s)
        if not woken and received == self._received:
            story.is_stale, self._silence_s = True, REPAIR_S

    def _left_s(self) -> float:
        return self._ends_s - asyncio.get_running_loop().time()

    # -- requests to the leader

    async def answer(self, verb: str, arguments: Mapping[str, Any], at_least_s: float = 0.0) -> Answer:
        """Send a request for as long as the job is followed, and no longer than the client's timeout.

        Requests for the output of a job that has ended have the client's timeout only. Raises `TimedOut`.
        """
        left_s = None if self.story.is_over or self._ends_s == inf else max(self._left_s(), at_least_s)
        try:
            async with asyncio.timeout(left_s) as bound:
                return await self.asks.answer(verb, arguments)
        except TimeoutError:
            if not bound.expired():
                raise
            raise too_late(self.story.job, self.story.state, self._timeout_s) from None

    async def read(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request as `answer` does, and return only the `data` of the answer frame."""
        data: dict[str, Any] = (await self.answer(verb, arguments)).data
        return data

    async def _repair(self, *, first: bool = False) -> list[Event]:
        """Ask the leader for the job, and return the new events. Only a `first` request raises `Unreachable`.

        Events are merged while this waits, so the answer may be older than the story.
        """
        story = self.story
        story.is_stale, rev = False, story.rev
        try:
            arguments = {"job": story.job, **(BY_FRAMES if self._by_frames else {})}
            answer = await self.answer("show", arguments, FIRST_ANSWER_S if first else 0.0)
        except Unreachable:
            if first:
                raise
            return await self._later()
        data = self.shown = answer.data  # kept even if it is older than the story: it has the replicas' attempts
        if story.knows_more_than(answer):
            return [] if story.rev > rev else await self._later()
        self.drivers.learn(data)
        has_own_subject = data.get("own_subject", False) or data.get("request", {}).get("events") != "tenant"
        if not has_own_subject and not self._by_frames:
            # a scheduler of an older release sends the events in the tenant's frames only: subscribe to them, ask again
            story.is_stale = True
            await self._listen_to_frames()
        try:
            rev, changes = await self._missing(answer)
        except Unreachable:
            return await self._later()
        if story.knows_more_than(answer):
            return []
        return self._tell(story.accept(shown_event(self.asks.tenant, story.job, answer, rev, changes)))

    async def learn_driver(self, driver: str) -> None:
        """Ask for a driver's capabilities if they are not known: `show` of a running job reports them."""
        if driver and driver not in self.drivers:
            with contextlib.suppress(NotFound, Rejected, Unreachable):
                self.drivers.learn(await self.read("show", {"job": self.story.job, **BY_FRAMES}))

    async def _later(self) -> list[Event]:
        self.story.is_stale = True
        await asyncio.sleep(min(RETRY_S, max(self._left_s(), 0.0)))
        return []

    async def _missing(self, answer: Answer) -> tuple[int, list[Change]]:
        """Return the revision of an answer of `show`, and the transitions up to it that the story lacks.

        Transitions that are not in the answer are read from the history, as far as it is kept. Raises `Unreachable`.
        """
        data, known = answer.data, self.story.rev
        changes, rev = behind(known, changes_of(data)), data.get("rev", known)
        if len(changes) == rev - known and "rev" in data:
            return rev, changes
        found = {change.rev: change for change in changes}
        after, more = known, True
        while more:
            try:
                page = await self.read("history", {"job": self.story.job, "after_rev": after})
            except (Rejected, NotFound):  # expired, or a scheduler without history: there are no more transitions
                break
            told = behind(after, changes_of(page))
            found |= {change.rev: change for change in told}
            # transitions between the two answers arrive as events: `show` does not have the state after them
            rev, more = data.get("rev", max(rev, page["rev"])), page["more"] and bool(told)
            after = told[-1].rev if told else after
        return rev, [found[each] for each in sorted(found) if each <= rev]


def _size_of(item: Event | Piece) -> int:
    """Return about how many bytes an item takes."""
    if isinstance(item, Event):
        return ITEM_BYTES + CHANGE_BYTES * len(item.changes) + sum(len(change.gpus) for change in item.changes) * 64
    return ITEM_BYTES + len(item.text) + len(item.data or b"")


def too_late(job: str, state: str, timeout_s: float) -> TimedOut:
    """Return the error for a wait of `timeout_s` that is over, while the job goes on.

    `state` is the last state of the job that is known; "" if none is.
    """
    return timed_out(
        f"job {job} is {state or 'in an unknown state'} after {timeout_s:g} s; it goes on",
        job=job,
        next_step=f"moorage explain {job}",
    )
