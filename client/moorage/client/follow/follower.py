"""Follow jobs: hear their events, and ask the leader for what was missed.

A job's own subject costs the leader and the server a message for every change, and this process a subscription and a
request for earlier events. The leader sends each tick's events to the tenant's subject in any case. A client therefore
subscribes to that subject, once for all of its followers,

- while it follows many jobs or waits for them, and
- while it lingers: for LINGER_S after it began to run a job, or to await the result of one that it submitted. It then
  receives all events of the jobs that it submits next, and needs no request for their results. It does not linger if
  nearly all events are of other clients' jobs.

The leader is asked by `show`, by `ls` for a crowd, and by `history` for transitions that are too old for `show`: at the
beginning, after a gap, a reconnection, an overflow or an unreadable frame, and after a long silence, because the last
event may have been lost.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, Self, TypeVar

from moorage.bus.errors import ConnectionClosed, RequestTimeout
from moorage.bus.inbox import CLOCK_S, Answers
from moorage.bus.transport import Delivery, Handler, Subscribed
from moorage.client.errors import NotPermitted, TimedOut, Unreachable
from moorage.client.follow.job_history import JobHistory, Shown
from moorage.client.known_drivers import KnownDrivers
from moorage.schemas.codec import Decoder
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Answer, Change, Event, Events, ResultLine, Results
from moorage.schemas.subjects import Subjects

if TYPE_CHECKING:
    from moorage.client.answers import JobInfo

#: if a client has this many followers, further ones share the subscription to the tenant's frames. The states of this
#: many jobs or more are read by `ls`
CROWD: Final = 16
#: most `show` at once: their cost for the leader is small
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
#: how long a client stays subscribed after it awaited a result
LINGER_S: Final = 5.0
#: a client stops lingering after OTHERS_FREE events of other clients' jobs, and OTHERS_PER_OWN more for each of its own
OTHERS_PER_OWN: Final = 32
OTHERS_FREE: Final = 5_000
#: after that it does not linger for this long
CROWDED_OUT_S: Final = 60.0
#: most received results that wait for their readers; the oldest are dropped first, and can be read from the bucket
RESULTS_MAX: Final = 4096
#: most transitions that are kept of a submitted job that is not followed yet
HELD_MAX: Final = 64
#: bytes of events and output that one client holds until its readers take them. Events beyond it are asked for later;
#: output beyond it is lost (and counted)
BYTES_MAX: Final = 256 * 1024 * 1024
#: argument of `show` for a follower of the tenant's frames: it does not turn on the job's own subject
BY_FRAMES: Final = {"events": "tenant"}

T = TypeVar("T")


class Wire(Protocol):
    """The connection of a client, as following needs it: `client.connected.Connected`."""

    tenant: str
    subjects: Subjects

    async def answer(self, verb: str, arguments: Mapping[str, Any]) -> Answer: ...

    async def read(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]: ...

    async def subscribe(self, subject: str, handler: Handler) -> Subscribed: ...

    async def subscribe_ahead(self, subject: str, handler: Handler) -> Subscribed: ...


_decode_results: Final[Decoder[Results]] = Decoder(Results, from_leader=True)
decode_events: Final[Decoder[Events]] = Decoder(Events, from_leader=True)


class Budget:
    """The bytes that a client may still hold."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self.left = bytes_max

    def take(self, size: int, spare: int = 0) -> bool:
        """Reserve `size` bytes; return False, and reserve none, if fewer than `spare` bytes would be left."""
        if self.left - size < spare:
            return False
        self.left -= size
        return True

    def give(self, size: int) -> None:
        """Return bytes that were reserved."""
        self.left += size


class Held(Generic[T]):
    """Items that wait for their reader, each with its size in bytes."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._items: deque[tuple[T, int]] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T, size: int, *, always: bool = False) -> bool:
        """Add an item; return False if the client holds too much, unless it is added `always`."""
        if always:
            self._budget.give(-size)
        elif not self._budget.take(size):
            return False
        self._items.append((item, size))
        return True

    def take(self) -> T:
        """Remove and return the oldest item."""
        item, size = self._items.popleft()
        self._budget.give(size)
        return item

    def take_all(self) -> list[T]:
        """Remove and return all items."""
        return [self.take() for _ in range(len(self._items))]


def check_permitted(subscription: Subscribed | None) -> None:
    """Raise `NotPermitted` if the server has refused this subscription, as far as that is known by now."""
    if subscription is not None and subscription.refused is not None:
        raise NotPermitted(subscription.refused.problem)


class Histories:
    """What the followers of one open client share: its subscription to the tenant's frames, and its budget.

    `upkeep` is the context of the timers that end silences. Not thread-safe.
    """

    def __init__(self, client: Wire, upkeep: contextvars.Context | None = None) -> None:
        self.client = client
        self.drivers = KnownDrivers()
        self.budget = Budget()
        self.waits = Answers("")  # waits for events use the class for answers: one timer serves all of them
        self.silences = Answers("", context=upkeep)
        self.followers: set[Follower] = set()
        self.endless: set[asyncio.Event] = set()  # waits without a timeout: these events are set at the close
        #: by name: small results of jobs that are followed here, from the subject for all results of the tenant
        self.results: dict[str, ResultLine] = {}
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._listeners: dict[str, list[Follower]] = {}
        self._expected: weakref.WeakValueDictionary[str, JobHistory] = weakref.WeakValueDictionary()
        self._subscription: Subscribed | None = None
        self._results: Subscribed | None = None
        self._changing = asyncio.Lock()  # one task subscribes or unsubscribes at a time
        self._lingers_until_s = 0.0
        self._lingers_not_until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._own = self._others = 0  # events since the client began to linger

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
        self._doubt_expected()
        for follower in self.followers:
            follower._refresh()

    def close(self) -> None:
        """End all waits, because the client is closed, and its subscriptions with it."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.refresh()
        for closed in self.endless:
            closed.set()
        self.waits.fail_all(ConnectionClosed)
        self.silences.fail_all(ConnectionClosed)

    async def frames(self, subject: str, decode: Callable[[bytes], T], most: int | None) -> AsyncGenerator[T, None]:
        """Yield the frames on a subject, without end. The newest frames wait for the reader, at most `most` of them,
        and as many as the budget has room for; invalid frames are skipped."""
        waiting: Held[bytes] = Held(self.budget)
        some = asyncio.Event()

        def on_frame(delivery: Delivery) -> None:
            while (len(waiting) == most or not waiting.put(delivery.data, len(delivery.data))) and waiting:
                waiting.take()
            some.set()

        subscription = await self.client.subscribe(subject, on_frame)
        self.endless.add(some)
        try:
            self.check_open()  # the client may have been closed meanwhile
            while True:
                while waiting:
                    try:
                        frame = decode(waiting.take())
                    except Refused:
                        continue
                    yield frame
                some.clear()
                await some.wait()
                self.check_open()
        finally:
            self.endless.discard(some)
            waiting.take_all()
            await subscription.unsubscribe()

    # -- the tenant's frames

    async def join(self, jobs: Iterable[str], follower: Follower) -> None:
        """Have `follower` hear each event of these jobs from now on.

        Raises `NotPermitted`. If the client lingers, `check_permitted` raises it instead, once a request was answered.
        """
        names = list(jobs)
        for job in names:
            self._listeners.setdefault(job, []).append(follower)
        if self._subscription is not None:
            return
        try:
            async with self._changing:
                if self._subscription is None:
                    subject = self.client.subjects.events(self.client.tenant)
                    self._subscription = await self.client.subscribe(subject, self._on_frame)
        except BaseException:
            self._remove(names, follower)
            raise

    async def leave(self, jobs: Iterable[str], follower: Follower) -> None:
        """Undo `join` with the same arguments. Without listeners the subscription ends, unless the client lingers."""
        self._remove(jobs, follower)
        if not self._listeners and not self._lingers_until_s:
            await self._end()

    def _remove(self, jobs: Iterable[str], follower: Follower) -> None:
        for job in jobs:
            of_job = self._listeners[job]
            of_job.remove(follower)
            if not of_job:
                del self._listeners[job]

    @property
    def is_refused(self) -> bool:
        """Whether the server refused the subscription, as far as that is known."""
        return self._subscription is not None and self._subscription.refused is not None

    def check_permitted(self) -> None:
        """Raise `NotPermitted` if the server has refused the subscription, as far as that is known."""
        check_permitted(self._subscription)

    def _on_frame(self, delivery: Delivery) -> None:
        listeners, expected = self._listeners, self._expected
        try:
            events = decode_events(delivery.data).jobs
        except Refused:
            self._doubt_expected()
            for follower in {follower for of_job in listeners.values() for follower in of_job}:
                follower._refresh()
            return
        own = 0
        for event in events:
            name = event.job
            following, history = listeners.get(name), expected.get(name)
            if following is not None:
                for follower in following:
                    follower._take_event(event)
            if history is not None:  # even if the job is followed: its result is taken from this history
                if len(history.changes) < HELD_MAX:
                    history.take(event)
                else:
                    history.is_stale = True
            own += following is not None or history is not None
        self._own += own
        self._others += len(events) - own
        if self._timer is not None and self._others > OTHERS_FREE + OTHERS_PER_OWN * self._own:
            self._timer.cancel()
            self._lingers_until_s, self._lingers_not_until_s = 0.0, self._loop.time() + CROWDED_OUT_S
            self._end_lingering()

    # -- lingering

    @property
    def lingers(self) -> bool:
        """Whether the client receives all events of jobs that it submits now."""
        return bool(self._lingers_until_s) and self._subscription is not None and not self.is_refused

    @property
    def has_results(self) -> bool:
        """Whether the client receives small results of jobs that it submits now."""
        return self.lingers and self._results is not None and self._results.refused is None

    async def linger(self, *, results: bool = False) -> None:
        """Stay subscribed for the next LINGER_S; with `results`, also to the results of handlers.

        Does nothing for CROWDED_OUT_S if the server refused the subscription, or if too many events were of other
        clients' jobs. The server subscribes the client before it handles what the client sends next.
        """
        now_s = self._loop.time()
        if self.is_refused:
            self._lingers_not_until_s = now_s + CROWDED_OUT_S
        if now_s < self._lingers_not_until_s:
            return
        self._lingers_until_s = now_s + LINGER_S
        if self._timer is None:
            self._own = self._others = 0
            self._timer = self._loop.call_at(self._lingers_until_s, self._end_lingering)
        client = self.client
        if self._subscription is None or (results and self._results is None):
            async with self._changing:
                if self._subscription is None:
                    subject = client.subjects.events(client.tenant)
                    self._subscription = await client.subscribe_ahead(subject, self._on_frame)
                if results and self._results is None:
                    subject = client.subjects.results(client.tenant)
                    self._results = await client.subscribe_ahead(subject, self._on_results)

    def expect(self, job: str) -> JobHistory | None:
        """Return the history of a job that is submitted next. Events are merged into it while the caller references it.

        None if the client does not linger.
        """
        if not self.lingers:
            return None
        if (before := self._expected.get(job)) is not None:  # submitted twice: events go to the new history from now on
            before.is_stale = True
        history = self._expected[job] = JobHistory(job)
        return history

    def is_followed(self, history: JobHistory) -> None:
        """Stop merging events into this history: a follower does it from now on."""
        if self._expected.get(history.job) is history:
            del self._expected[history.job]

    def _doubt_expected(self) -> None:
        """Note that events of the jobs that are not followed yet may have been missed."""
        for history in self._expected.values():
            history.is_stale = True

    def _end_lingering(self) -> None:
        """Stop lingering, unless `linger` was called meanwhile. Unsubscribe if there are no listeners."""
        self._timer = None
        if self._loop.time() < self._lingers_until_s:
            self._timer = self._loop.call_at(self._lingers_until_s, self._end_lingering)
            return
        self._lingers_until_s = 0.0
        self._doubt_expected()
        self._expected.clear()
        if not self._listeners or self._results is not None:
            self._ending = self._loop.create_task(self._end())

    async def _end(self) -> None:
        async with self._changing:
            subscription, results = self._subscription, self._results
            if results is not None and not self._lingers_until_s:
                self._results = None
                self.results.clear()
                await results.unsubscribe()
            if subscription is not None and not self._listeners and not self._lingers_until_s:
                self._subscription = None
                await subscription.unsubscribe()

    def _on_results(self, delivery: Delivery) -> None:
        try:
            lines = _decode_results(delivery.data).results
        except Refused:
            return  # the results can be read from the bucket
        for line in lines:
            job = line.result.partition(".")[0]
            if job in self._listeners or job in self._expected:
                self.results[line.result] = line
            else:
                self._others += 1
        while len(self.results) > RESULTS_MAX:
            del self.results[next(iter(self.results))]


class Follower:
    """Follows jobs until they end, and asks the leader for what was missed: the only loop that does.

    What is made of the news is up to the views: `Watch` yields all of one job, `Gathering` the ends of many. `left` has
    the histories that are followed on. `_due` are the jobs that the leader is asked for next, from `_ask_at_s` on.
    """

    def __init__(self, histories: Histories, jobs: Iterable[JobHistory], *, asks_first: bool) -> None:
        self.left = {history.job: history for history in jobs}
        self._names = tuple(self.left)
        self._histories = histories
        self._client = histories.client
        self._due: dict[str, None] = {}
        self._asks_first = asks_first  # and no answer has come yet
        self._ask_at_s = 0.0
        self._silence_s = REPAIR_S_FIRST
        self._received = 0
        self._awaited: asyncio.Future[list[Delivery]] | None = None
        self._timeout_s = self._ends_s = math.inf
        self._end_timer: asyncio.TimerHandle | None = None
        self._own: Subscribed | None = None  # to the job's own subject
        self._by_frames = False

    # -- what a view does with what is heard. The first two are called while the connection reads

    def _take_event(self, event: Event) -> None:
        raise NotImplementedError

    def _take_answer(self, history: JobHistory, shown: Shown, rev: int, changes: list[Change]) -> None:
        """Merge an answer of `show`: a job's state, and its transitions up to revision `rev`."""
        raise NotImplementedError

    async def _listen(self) -> None:
        """Subscribe to the events of the jobs."""
        await self._histories.join(self._names, self)
        self._by_frames = True

    @property
    def _is_over(self) -> bool:
        """Whether all of the jobs have ended."""
        return not self.left

    def _too_late(self) -> TimedOut:
        """Return the error for a wait that is over, while the jobs go on."""
        raise NotImplementedError

    async def _not_listed(self, names: list[str]) -> list[str]:
        """Ask for a crowd by `ls`, and return the jobs that it does not list."""
        return names

    async def _missing(self, info: JobInfo) -> tuple[int, list[Change]]:
        """Return the revision of an answer of `show`, and the transitions up to it that are known."""
        return info.rev, info.changes

    # -- opening and closing

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Subscribe to the jobs' events. Raises `NotPermitted`."""
        self._histories.followers.add(self)
        try:
            await self._listen()
        except BaseException:  # if it is cancelled here, `__aexit__` is never called
            await self.close()
            raise

    async def close(self) -> None:
        """Stop listening; the jobs go on."""
        self._histories.followers.discard(self)
        if self._end_timer is not None:
            self._end_timer.cancel()
        own, self._own = self._own, None
        try:
            if own is not None:
                await own.unsubscribe()
        finally:
            if self._by_frames:
                self._by_frames = False
                await self._histories.leave(self._names, self)

    # -- waiting

    def _ends_after(self, timeout_s: float) -> None:
        """From now on, follow for at most `timeout_s`."""
        loop = asyncio.get_running_loop()
        self._timeout_s, self._ends_s = timeout_s, loop.time() + timeout_s
        self._end_timer = loop.call_at(self._ends_s, self._wake)

    def _refresh(self) -> None:
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

    async def _step(self) -> None:
        """Wait for an event, or ask the leader for the jobs that are due.

        Raises `TimedOut`; `NotPermitted` and `Unreachable` until a first request was answered.
        """
        now_s = asyncio.get_running_loop().time()
        if self._ends_s - now_s <= CLOCK_S:
            raise self._too_late()
        if self._by_frames:
            self._histories.check_permitted()
        if self._due and now_s >= self._ask_at_s:
            await self._ask()
            return
        received = self._received
        # a simulation may lengthen the wait for a silence while no event can have been lost
        waits = self._histories.waits if self._due else self._histories.silences
        if await self._wait(waits, self._silence_s) or received != self._received:
            return
        if self._due:  # of a crowd that is not asked for yet, no job ends at present
            self._ask_at_s = 0.0
        else:
            self._silence_s = REPAIR_S
            self._due = dict.fromkeys(islice(self.left, REPAIR_JOBS_MAX))

    # -- requests to the leader

    async def _answer(self, verb: str, arguments: Mapping[str, Any]) -> Answer:
        """Send a request for as long as the jobs are followed, and no longer than the client's timeout.

        Requests after the last job has ended have the client's timeout only. Raises `TimedOut`.
        """
        left_s = None
        if self._ends_s != math.inf and not self._is_over:
            left_s = max(self._ends_s - asyncio.get_running_loop().time(), FIRST_ANSWER_S if self._asks_first else 0.0)
        try:
            async with asyncio.timeout(left_s) as bound:
                answer = await self._client.answer(verb, arguments)
        except TimeoutError:
            if not bound.expired():
                raise
            raise self._too_late() from None
        self._asks_first = False
        return answer

    async def _read(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request as `_answer` does, and return only the `data` of the answer frame."""
        data: dict[str, Any] = (await self._answer(verb, arguments)).data
        return data

    async def _ask(self) -> None:
        """Ask for the jobs that are due. Only a first request raises `Unreachable`, and none once all have ended.

        Events are merged while this waits, so an answer may be older than what is known of the job.
        """
        first, due = self._asks_first, [name for name in self._due if name in self.left]
        self._due = {}
        for name in due:  # at the end: after the next silence, the other jobs are asked for first
            self.left[name] = history = self.left.pop(name)
            history.is_stale = False
        try:
            rest = due if len(due) < CROWD else await self._not_listed(due)
            for at in range(0, len(rest), SHOWS_AT_ONCE):
                await self._show([self.left[name] for name in rest[at : at + SHOWS_AT_ONCE] if name in self.left])
        except Unreachable:  # a takeover, or the server restarts: the jobs go on meanwhile
            if self._asks_first and not self._is_over:
                raise
            self._due |= dict.fromkeys(due)
        except TimedOut:
            if not self._is_over:  # else all have ended while this waited
                raise
        if first:
            self._ask_at_s, self._silence_s = 0.0, REPAIR_S_FIRST
        if not self._due.keys().isdisjoint(due):
            left_s = self._ends_s - asyncio.get_running_loop().time()
            await asyncio.sleep(min(RETRY_S, max(left_s, 0.0)))

    async def _show(self, histories: list[JobHistory]) -> None:
        revs = [history.rev for history in histories]
        for history, rev, shown in zip(
            histories, revs, await asyncio.gather(*map(self._shown, histories)), strict=True
        ):
            if history.job not in self.left:
                continue
            if not history.knows_more_than(shown):
                told = await self._missing(shown.info)
                if not history.knows_more_than(shown):
                    self._take_answer(history, shown, *told)
            elif history.rev == rev:  # it came from a replaced leader
                history.is_stale = True
            if history.has_gap and history.job in self.left:
                self._due[history.job] = None

    async def _shown(self, history: JobHistory) -> Shown:
        from moorage.client.answers import JobInfo  # slow to import, and most jobs end without a question
        from moorage.client.reading import as_struct

        answer = await self._answer("show", {"job": history.job, **(BY_FRAMES if self._by_frames else {})})
        return Shown(as_struct(JobInfo, answer.data), answer.ledger)
