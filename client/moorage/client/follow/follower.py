"""Follow jobs: merge what is heard of them, and ask the leader for what was missed.

The events of a job are on its own subject and in the tenant's frames; many followers share one subscription to the
frames (`feed`). The leader is asked by `show`, by `ls` for a crowd, and by `history` for transitions that are too old
for `show`. It is asked at the beginning, after a gap, a reconnection, an overflow or an unreadable frame, and after a
long silence, because the last event may have been lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from itertools import islice
from math import inf
from typing import Any, Final, Generic, TypeVar

from moorage.bus.errors import ConnectionClosed, RequestTimeout
from moorage.bus.inbox import CLOCK_S, Answers
from moorage.bus.transport import Delivery, Handler, Subscribed
from moorage.client.errors import NotFound, Rejected, TimedOut, Unreachable, timed_out
from moorage.client.follow.budget import Budget, Held
from moorage.client.follow.feed import Asks, Feed, check_permitted
from moorage.client.follow.output import Piece
from moorage.client.follow.story import Seen, Story, behind, changes_of, decided, result_of, shown_event
from moorage.client.known_drivers import KnownDrivers
from moorage.schemas.codec import Decoder
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Answer, Change, Event
from moorage.schemas.job import TERMINAL, Request

#: if a client has this many followers, further ones share the subscription to the tenant's frames. The states of this
#: many jobs or more are read by `ls`, after a delay in which most jobs may end
CROWD: Final = 16
#: a crowd is asked for after its first silence of QUIET_S, after FIRST_ASK_S at the latest
QUIET_S: Final = 0.05
FIRST_ASK_S: Final = 1.0
#: most names in one `ls`, and most `show` at once: their cost for the leader is small
LISTED_MAX: Final = 250
SHOWS_AT_ONCE: Final = 64
#: after a silence of this length the leader is asked, as the last event may have been lost
REPAIR_S: Final = 10.0
#: the first such silence is shorter, because most jobs that are followed to their end finish soon
REPAIR_S_FIRST: Final = 2.0
#: after a silence this many jobs are asked for; after the next silence, the next ones
REPAIR_JOBS_MAX: Final = 250
RETRY_S: Final = 0.5
#: the first answer may take this long even if the timeout is shorter: `timeout=0` tests whether a job has ended
FIRST_ANSWER_S: Final = 1.0
#: bytes that an item takes here beside its text, and bytes of one transition. Events beyond the client's budget are
#: asked for later; output beyond it is lost (and counted)
ITEM_BYTES: Final = 512
CHANGE_BYTES: Final = 512
#: a reader that only needs the job's end is woken early if this many items wait
TOGETHER_MAX: Final = 64
#: argument of `show` for a follower of the tenant's frames: it does not turn on the job's own subject
BY_FRAMES: Final = {"events": "tenant"}

H = TypeVar("H")
J = TypeVar("J", bound=Seen)

_decode_event: Final[Decoder[Event]] = Decoder(Event, from_leader=True)


class Stories:
    """The followers of jobs on one open client. `upkeep` is the context of the timers that end silences."""

    def __init__(self, asks: Asks, upkeep: contextvars.Context | None = None) -> None:
        self.asks = asks
        self.feed = Feed(asks)
        self.drivers = KnownDrivers()
        self.budget = Budget()
        self.waits = Answers("")  # waits for events use the class for answers: one timer serves all of them
        self.silences = Answers("", context=upkeep)
        self.followers: set[Follower] = set()
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


class Follower:
    """Follows jobs until they end. `Following` follows one with all of its transitions, `Gathering` many to their ends.

    `left` has the jobs that are followed on. `_due` are those that the leader is asked for next, from `_ask_at_s` on.
    Not thread-safe.
    """

    def __init__(self, stories: Stories, jobs: Iterable[Story], *, asks_first: bool) -> None:
        self.asks = stories.asks
        self.left = {story.job: story for story in jobs}
        self._names = tuple(self.left)
        self._stories = stories
        self._due: dict[str, None] = {}
        self._asks_first = asks_first  # and no answer has come yet
        self._ask_at_s = 0.0
        self._silence_s = REPAIR_S_FIRST
        self._received = 0
        self._awaited: asyncio.Future[list[Delivery]] | None = None
        self._timeout_s = self._ends_s = inf
        self._end_timer: asyncio.TimerHandle | None = None
        self._own: Subscribed | None = None
        self._by_frames = False

    # -- what a kind of follower does with what is heard. The first three are called in the read path

    def hear(self, event: Event) -> None:
        """Merge an event."""
        raise NotImplementedError

    async def _listen(self) -> None:
        """Subscribe to the events of the jobs."""
        await self._listen_to_frames()

    def _take_answer(self, story: Story, answer: Answer, rev: int, changes: list[Change]) -> None:
        """Merge an answer of `show`: a job's state, and its transitions up to revision `rev`."""
        raise NotImplementedError

    @property
    def _is_over(self) -> bool:
        """Whether all of the jobs have ended."""
        return not self.left

    def _too_late(self) -> TimedOut:
        """Return the error for a wait that is over, while the jobs go on."""
        raise NotImplementedError

    # -- opening and closing

    async def open(self) -> None:
        """Subscribe to the jobs' events. Raises `NotPermitted`."""
        self._stories.followers.add(self)
        try:
            await self._listen()
        except BaseException:  # if it is cancelled here, `__aexit__` is never called
            await self.close()
            raise

    async def close(self) -> None:
        """Stop listening; the jobs go on."""
        self._stories.followers.discard(self)
        if self._end_timer is not None:
            self._end_timer.cancel()
        own, self._own = self._own, None
        try:
            if own is not None:
                await own.unsubscribe()
        finally:
            if self._by_frames:
                self._by_frames = False
                await self._stories.feed.leave(self._names, self)

    async def _listen_to_frames(self) -> None:
        await self._stories.feed.join(self._names, self)
        self._by_frames = True

    # -- waiting

    def ends_after(self, timeout_s: float) -> None:
        """From now on, follow for at most `timeout_s`."""
        loop = asyncio.get_running_loop()
        self._timeout_s, self._ends_s = timeout_s, loop.time() + timeout_s
        self._end_timer = loop.call_at(self._ends_s, self._wake)

    def refresh(self) -> None:
        """Have the reader ask for the jobs again, as events may have been missed."""
        self._due = dict.fromkeys(self.left)
        self._wake()

    def _wake(self) -> None:
        """End the present wait, if there is one. First change the state that the waiting task checks."""
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result([])

    async def _wait(self, waits: Answers, at_most_s: float) -> bool:
        """Wait for `_wake`, and return whether it came in time. Raises `ConnectionClosed` once the client is closed."""
        if self._awaited is not None:
            raise RuntimeError(
                "another task reads this watch already, and each item goes to one task: open two watches"
            )
        token, self._awaited = waits.open("", at_most_s)
        try:
            await self._awaited
        except RequestTimeout:
            return False
        finally:
            waits.abandon(token)
            self._awaited = None
        return True

    def _left_s(self) -> float:
        return self._ends_s - asyncio.get_running_loop().time()

    async def step(self) -> None:
        """Wait for an event, or ask the leader for the jobs that are due.

        Raises `TimedOut`; `NotPermitted` and `Unreachable` until a first request was answered.
        """
        now_s = asyncio.get_running_loop().time()
        if self._ends_s - now_s <= CLOCK_S:
            raise self._too_late()
        if self._by_frames:
            self._stories.feed.check_permitted()
        if self._due and now_s >= self._ask_at_s:
            await self._ask()
            return
        received = self._received
        # a simulation may lengthen the wait for a silence while no event can have been lost
        waits = self._stories.waits if self._due else self._stories.silences
        if await self._wait(waits, self._silence_s) or received != self._received:
            return
        if self._due:  # of a crowd that is not asked for yet, no job ends at present
            self._ask_at_s = 0.0
        else:
            self._silence_s = REPAIR_S
            self._due = dict.fromkeys(islice(self.left, REPAIR_JOBS_MAX))

    # -- requests to the leader

    async def answer(self, verb: str, arguments: Mapping[str, Any]) -> Answer:
        """Send a request for as long as the jobs are followed, and no longer than the client's timeout.

        Requests after the last job has ended have the client's timeout only. Raises `TimedOut`.
        """
        left_s = None
        if not self._is_over and self._ends_s != inf:
            left_s = max(self._left_s(), FIRST_ANSWER_S if self._asks_first else 0.0)
        try:
            async with asyncio.timeout(left_s) as bound:
                answer = await self.asks.answer(verb, arguments)
        except TimeoutError:
            if not bound.expired():
                raise
            raise self._too_late() from None
        self._asks_first = False
        return answer

    async def read(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request as `answer` does, and return only the `data` of the answer frame."""
        data: dict[str, Any] = (await self.answer(verb, arguments)).data
        return data

    async def _ask(self) -> None:
        """Ask for the jobs that are due. Only a first request raises `Unreachable`.

        Events are merged while this waits, so an answer may be older than what is known of the job.
        """
        first, due = self._asks_first, [name for name in self._due if name in self.left]
        self._due = {}
        for name in due:  # at the end: after the next silence, the other jobs are asked for first
            self.left[name] = story = self.left.pop(name)
            story.is_stale = False
        try:
            rest = due if len(due) < CROWD else await self._not_listed(due)
            for at in range(0, len(rest), SHOWS_AT_ONCE):
                await self._show([self.left[name] for name in rest[at : at + SHOWS_AT_ONCE] if name in self.left])
        except Unreachable:  # a takeover, or the server restarts: the jobs go on meanwhile
            if self._asks_first:
                raise
            self._due |= dict.fromkeys(due)
        if first:
            self._ask_at_s, self._silence_s = 0.0, REPAIR_S_FIRST
        if not self._due.keys().isdisjoint(due):
            await asyncio.sleep(min(RETRY_S, max(self._left_s(), 0.0)))

    async def _not_listed(self, names: list[str]) -> list[str]:
        """Ask for a crowd by `ls`, and return the jobs that it does not list."""
        return names

    async def _show(self, stories: list[Story]) -> None:
        revs = [story.rev for story in stories]
        for story, rev, answer in zip(stories, revs, await asyncio.gather(*map(self._shown, stories)), strict=True):
            if story.job not in self.left:
                continue
            if not story.knows_more_than(answer):
                told = await self._missing(answer)
                if not story.knows_more_than(answer):
                    self._take_answer(story, answer, *told)
            elif story.rev == rev:  # it came from a replaced leader
                story.is_stale = True
            if story.has_gap and story.job in self.left:
                self._due[story.job] = None

    async def _shown(self, story: Story) -> Answer:
        return await self.answer("show", {"job": story.job, **(BY_FRAMES if self._by_frames else {})})

    async def _missing(self, answer: Answer) -> tuple[int, list[Change]]:
        """Return the revision of an answer of `show`, and the transitions up to it that are known."""
        return answer.data.get("rev", 0), changes_of(answer.data)


class Following(Follower):
    """Follows one job with all of its transitions. `Watch` opens and closes it.

    `heard` is the story of a job that the client submitted while it lingered: it has all events so far, so the leader
    need not be asked. `to_submit` is a request that will be submitted once this is open: then the leader need not be
    asked either, and the request's `events` choose the subject. Without either the leader is asked first. `driver` is
    the job's driver, if it is known. With `ahead`, opening takes no round trip, and `begin` instead of `open` raises
    `NotPermitted`; the caller sends a request next. `at_end` is for readers that only need the end of the job: they are
    woken less often. `saw` is called with each new event.
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
        super().__init__(stories, [self.story], asks_first=not usable and to_submit is None)
        self.to_submit = to_submit
        self.driver = driver if to_submit is None else to_submit.workload.driver
        self.drivers = stories.drivers
        self.shown: dict[str, Any] = {}
        self._is_heard = usable
        self._ahead = ahead
        self._at_end = at_end
        self._saw = saw
        self._pending: Held[Event | Piece] = Held(stories.budget)

    @property
    def _is_over(self) -> bool:
        return self.story.is_over

    async def _listen(self) -> None:
        feed, asks = self._stories.feed, self.asks
        together = len(self._stories.followers) > CROWD if self.to_submit is None else self.to_submit.events == "tenant"
        if self._is_heard:
            feed.is_followed(self.story)
        if self._is_heard or (together and not feed.is_refused):
            await self._listen_to_frames()
        else:
            self._own = await self.subscribe(asks.subjects.event(asks.tenant, self.story.job), self._on_event)

    async def subscribe(self, subject: str, handler: Handler) -> Subscribed:
        """Subscribe to a subject; with `ahead`, without a round trip."""
        return await (self.asks.subscribe_ahead if self._ahead else self.asks.subscribe)(subject, handler)

    async def close(self) -> None:
        """Stop listening; the job goes on."""
        self._pending.take_all()
        await super().close()

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
            self._enqueue(news)
            self._wake_reader()
            return
        if story.has_gap:
            self.refresh()

    def _take_answer(self, story: Story, answer: Answer, rev: int, changes: list[Change]) -> None:
        for news in story.accept(shown_event(self.asks.tenant, story.job, answer, rev, changes)):
            self._enqueue(news)

    def _enqueue(self, news: Event) -> None:
        if self._saw is not None:
            self._saw(news)
        self._pending.put_always(news, _size_of(news))  # the story has it already, so it is not asked for again

    def put(self, item: Piece) -> bool:
        """Enqueue a piece of output; return False if this client holds too much that waits for readers."""
        if not self._pending.put(item, _size_of(item)):
            return False
        self._wake_reader()
        return True

    def _wake_reader(self) -> None:
        if not self._at_end or self.story.is_over or len(self._pending) >= TOGETHER_MAX:
            self._wake()

    # -- what the reader takes

    async def begin(self, timeout_s: float | None = None) -> list[Event]:
        """Return the events of the job so far. From now on it is followed for at most `timeout_s`; None: no limit.

        Raises `NotFound`, `NoScheduler`, `NotPermitted`, `TimedOut`.
        """
        if timeout_s is not None:
            self.ends_after(timeout_s)
        if self._is_heard:
            self._take_events()
            if self.story.rev:
                self._enqueue(self.story.so_far(self.asks.tenant))
        elif self.to_submit is None:
            self._asks_first = True
            self.refresh()
            await self._ask()
        # an answer has arrived since the subscription, so the server has accepted or refused that by now
        if self._own is not None:
            check_permitted(self._own)
        if self._by_frames:
            self._stories.feed.check_permitted()
        return self._take_events() if self.to_submit is None else []

    def _take_events(self) -> list[Event]:
        """Return the waiting events; output stays in the queue."""
        items = self._pending.take_all()
        for item in items:
            if not isinstance(item, Event):
                self._pending.put_always(item, _size_of(item))
        return [item for item in items if isinstance(item, Event)]

    async def items(self) -> AsyncIterator[Event | Piece]:
        """Yield events and output in order until the job ends. Raises `TimedOut`."""
        while True:
            while self._pending:
                yield self._pending.take()
            if self.story.is_over:
                return
            await self.step()

    async def over(self) -> None:
        """Wait until the job ends, and drop all items. Raises `TimedOut`."""
        while not self.story.is_over:
            self._pending.take_all()
            await self.step()

    def taken(self) -> list[Event | Piece]:
        """Remove and return the waiting items."""
        return self._pending.take_all()

    async def more(self, ends_s: float) -> bool:
        """Wait for an item until `ends_s` of the loop's clock, and return whether one arrived."""
        left_s = ends_s - asyncio.get_running_loop().time()
        return bool(self._pending) or await self._wait(self._stories.waits, max(left_s, 0.0))

    # -- requests to the leader

    async def _shown(self, story: Story) -> Answer:
        answer = await super()._shown(story)
        self.shown = answer.data  # kept even if it is older than the story: it has the replicas' attempts
        self.drivers.learn(self.shown)
        return answer

    async def learn_driver(self, driver: str) -> None:
        """Ask for a driver's capabilities if they are not known: `show` of a running job reports them."""
        if driver and driver not in self.drivers:
            with contextlib.suppress(NotFound, Rejected, Unreachable):
                self.drivers.learn(await self.read("show", {"job": self.story.job, **BY_FRAMES}))

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

    def _too_late(self) -> TimedOut:
        job, state = self.story.job, self.story.state
        return timed_out(
            f"job {job} is {state or 'in an unknown state'} after {self._timeout_s:g} s; it goes on",
            job=job,
            next_step=f"moorage explain {job}",
        )


class Gathering(Follower, Generic[J]):
    """Waits for many jobs of one tenant: an async context manager. `over` yields the jobs in the order in which they
    end. Only the end of a job matters here: an earlier gap is not repaired."""

    def __init__(self, stories: Stories, jobs: Iterable[J]) -> None:
        every = {job.id: job for job in jobs}
        self._jobs = every
        self._over = deque(job for job in every.values() if job.known_result is not None)
        waited = (Story(name) for name, job in every.items() if job.known_result is None)
        super().__init__(stories, waited, asks_first=True)

    async def __aenter__(self) -> Gathering[J]:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def hear(self, event: Event) -> None:
        """Merge an event, in the read path. A job that has ended leaves the wait."""
        story = self.left.get(event.job)
        if story is None or event.rev <= story.last_rev:
            return
        self._received += 1
        story.take(event)
        self._jobs[event.job]._saw(event)
        if event.state in TERMINAL:
            if story.has_gap and decided(story.all_changes(), event.state) is None:
                self._due[event.job] = None  # the transition that decided the job's end was missed
            else:
                self._end(story, event.state, event.why, {})
            self._wake()

    async def over(self, timeout_s: float) -> AsyncIterator[J]:
        """Yield each job as it ends. Raises `TimedOut` (jobs go on), `NotFound`, `NoScheduler`, `NotPermitted`."""
        self.ends_after(timeout_s)
        self.refresh()
        if len(self.left) >= CROWD:
            self._ask_at_s, self._silence_s = asyncio.get_running_loop().time() + FIRST_ASK_S, QUIET_S
        while True:
            while self._over:
                yield self._over.popleft()
            if not self.left:
                return
            await self.step()

    def _end(self, story: Story, state: str, why: str, shown: Mapping[str, Any]) -> None:
        job = self._jobs[story.job]
        del self.left[story.job]
        job._ended(result_of(job.id, state, story.all_changes(), why or story.why, shown))
        self._over.append(job)

    async def _not_listed(self, names: list[str]) -> list[str]:
        listed: set[str] = set()
        for at in range(0, len(names), LISTED_MAX):
            part = [name for name in names[at : at + LISTED_MAX] if name in self.left]
            for row in (await self.read("ls", {"jobs": part}))["jobs"]:
                listed.add(row["job"])
                if (story := self.left.get(row["job"])) is not None:
                    self._jobs[story.job]._learn(row)
                    if row["state"] in TERMINAL:
                        self._end(story, row["state"], "", row)
        return [name for name in names if name not in listed]

    def _take_answer(self, story: Story, answer: Answer, rev: int, changes: list[Change]) -> None:
        self._jobs[story.job]._learn(answer.data)
        story.accept(shown_event(self.asks.tenant, story.job, answer, rev, changes))
        if story.is_over:
            self._end(story, story.state, "", answer.data)

    def _too_late(self) -> TimedOut:
        name = next(iter(self.left))
        return timed_out(
            f"{len(self.left)} of {len(self._jobs)} jobs have not ended after {self._timeout_s:g} s; they go on",
            job=name,
            next_step=f"moorage explain {name} says why the first of them has not ended",
        )


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


def _size_of(item: Event | Piece) -> int:
    """Return about how many bytes an item takes."""
    if isinstance(item, Event):
        return ITEM_BYTES + CHANGE_BYTES * len(item.changes) + sum(len(change.gpus) for change in item.changes) * 64
    return ITEM_BYTES + len(item.text) + len(item.data or b"")
