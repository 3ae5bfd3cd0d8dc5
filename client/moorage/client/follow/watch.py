"""What is made of the news of one job: `Watch` yields its events and its output."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from moorage.bus.transport import Delivery, Subscribed
from moorage.client.durations import Duration, seconds
from moorage.client.errors import (
    JobFailed,
    NotFound,
    Rejected,
    TimedOut,
    Unreachable,
    timed_out,
    word_to_explain,
)
from moorage.client.follow.follower import BY_FRAMES, CROWD, Follower, Held, Histories, check_permitted
from moorage.client.follow.job_history import (
    JobHistory,
    Result,
    Shown,
    behind,
    replicas_in,
    shown_event,
)
from moorage.client.output import STREAMS, Captured, Joiner, Piece, Tail
from moorage.client.replicas import Which, replicas_of
from moorage.client.transitions import history_after
from moorage.schemas.codec import Decoder
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Change, Event, Output, StreamName
from moorage.schemas.job import RUNNING, SUCCEEDED, Request
from moorage.schemas.ranges import NOTHING, count_of, is_in

if TYPE_CHECKING:
    from moorage.client.answers import JobInfo

#: how long to wait for the end of the output after the job's last event
OUTPUT_GRACE_S: Final = 1.0
#: the same, if missing output can be read from the worker
KEPT_GRACE_S: Final = 0.2
#: bytes that an item takes here beside its text, and bytes of one transition
ITEM_BYTES: Final = 512
CHANGE_BYTES: Final = 512
#: a reader that only needs the job's end is woken early if this many items wait
TOGETHER_MAX: Final = 64

_decode_event: Final[Decoder[Event]] = Decoder(Event, from_leader=True)
_decode_output: Final[Decoder[Output]] = Decoder(Output, from_leader=True)


class AsyncWatch(Follower):
    """An async context manager and iterator over a job's events (`Event`) and output (`Piece`). It ends with the job.

    Made by `AsyncClient.watch`. With `output` it yields new output. With `past` it first yields the output that the
    workers keep, from the beginning or only the last `tail` lines of each stream; new output joins it without gaps or
    duplicates. `replica` selects one replica, or several as in `0-9,205`. With `notes` a `Piece` may also be a note of
    a worker. `lost` counts pieces of output that this client dropped.
    """

    # `heard` is the history of a job that the client submitted while it lingered: it has all events so far, so the
    # leader need not be asked. `to_submit` is a request that will be submitted once this is open: then the leader need
    # not be asked either, and the request's `events` choose the subject. `driver` is the job's driver, if it is known.
    # With `ahead`, opening takes no round trip, and `follow` instead of `open` raises `NotPermitted`; the caller sends
    # a request next. `at_end` is for readers that only need the end of the job: they are woken less often. `saw` is
    # called with each new event.
    def __init__(
        self,
        histories: Histories,
        job: str,
        *,
        output: bool = False,
        past: bool = False,
        tail: int | None = None,
        replica: Which = None,
        notes: bool = False,
        heard: JobHistory | None = None,
        to_submit: Request | None = None,
        driver: str = "",
        ahead: bool = False,
        at_end: bool = False,
        saw: Callable[[Event], None] | None = None,
    ) -> None:
        if tail is not None and not past:
            raise TypeError("tail is about stored output: it needs past=True")
        self._is_heard = heard is not None and not heard.is_stale and not histories.is_refused
        self._history = heard if heard is not None and self._is_heard else JobHistory(job)
        super().__init__(histories, [self._history], asks_first=not self._is_heard and to_submit is None)
        self.lost = 0
        self.joiner = Joiner(self._read, job, tail) if past else None
        self._output = output or past
        self._only = replicas_of(replica)
        self._notes = notes
        self._to_submit = to_submit
        self._driver = driver if to_submit is None else to_submit.workload.driver
        self._subscribe = self._client.subscribe_ahead if ahead else self._client.subscribe
        self._at_end = at_end
        self._saw = saw
        self.info: JobInfo | None = None  # the last answer of `show`
        self._pending: Held[Event | Piece] = Held(histories.budget)
        self._logs: Subscribed | None = None
        self._open_streams: set[tuple[int, int, StreamName]] = set()
        self._ended_streams: set[tuple[int, int, StreamName]] = set()

    @property
    def job(self) -> str:
        """The id of the job."""
        return self._history.job

    @property
    def state(self) -> str:
        """The last state that was received; "" before the first."""
        return self._history.state

    @property
    def driver(self) -> str:
        """The driver that runs the job; "" if it is not known yet, or if the job's request is no longer kept."""
        return self._driver or ("" if self.info is None else self.info.driver)

    def result(self) -> Result:
        """Return how the job ended. Call it only once the job has ended."""
        return self._history.result(self.info)

    async def open(self) -> None:
        """Subscribe to the job's events and, if asked for, to its output. Raises `NotPermitted`."""
        await super().open()

    async def _listen(self) -> None:
        histories, client, request = self._histories, self._client, self._to_submit
        together = len(histories.followers) > CROWD if request is None else request.events == "tenant"
        if self._is_heard:
            histories.is_followed(self._history)
        if self._is_heard or (together and not histories.is_refused):
            await super()._listen()
        else:
            self._own = await self._subscribe(client.subjects.event(client.tenant, self.job), self._on_event)
        if self._output:
            # a wildcard costs the server more, so the only replica of a job is named; a service gets further ones
            numbers = NOTHING if request is None or request.service is not None else request.numbers
            only = self._only or numbers
            replica: int | Literal["*"] = only[0][0] if count_of(only) == 1 else "*"
            self._logs = await self._subscribe(client.subjects.log(client.tenant, self.job, replica), self._on_output)

    async def close(self) -> None:
        """Stop listening; the job goes on."""
        self._pending.take_all()
        logs, self._logs = self._logs, None
        try:
            if logs is not None:
                await logs.unsubscribe()
        finally:
            await super().close()

    # -- received items: they are merged and enqueued while the connection reads

    def _on_event(self, delivery: Delivery) -> None:
        try:
            self._take_event(_decode_event(delivery.data))
        except Refused:
            self._refresh()

    def _take_event(self, event: Event) -> None:
        history = self._history
        self._received += 1
        if self._histories.budget.left < _size_of(event):
            history.is_stale = True
        elif (news := history.take(event)) is not None:
            self._enqueue(news)
            self._wake_reader()
            return
        if history.has_gap:
            self._refresh()

    def _take_answer(self, history: JobHistory, shown: Shown, rev: int, changes: list[Change]) -> None:
        for news in history.accept(shown_event(self._client.tenant, history.job, shown, rev, changes)):
            self._enqueue(news)

    def _enqueue(self, news: Event) -> None:
        if self._saw is not None:
            self._saw(news)
        self._pending.put(news, _size_of(news), always=True)  # the history has it already, so it is not asked for again

    def _on_output(self, delivery: Delivery) -> None:
        try:
            said = _decode_output(delivery.data)
            replica = int(delivery.subject.rpartition(".")[2])
        except (Refused, ValueError):
            self.lost += 1
            return
        if self._only is not None and not is_in(self._only, replica):
            return
        if said.end:
            self._open_streams.discard((replica, said.attempt, said.stream))
            self._ended_streams.add((replica, said.attempt, said.stream))
        piece = Piece(
            replica, said.attempt, said.stream, said.offset, said.text, said.end, said.next, said.data,
            said.note, said.ports,
        )  # fmt: skip
        if piece.is_output or self._notes:
            if self._pending.put(piece, _size_of(piece)):
                self._wake_reader()
            else:
                self.lost += 1

    def _wake_reader(self) -> None:
        if not self._at_end or self._is_over or len(self._pending) >= TOGETHER_MAX:
            self._wake()

    # -- what the reader takes

    def __aiter__(self) -> AsyncIterator[Event | Piece]:
        return self.follow()

    async def follow(self, timeout_s: Duration | None = None) -> AsyncIterator[Event | Piece]:
        """Yield events and, if asked for, output until the job ends, for at most `timeout_s`: seconds, or "10m".

        None means no time limit. Raises `Rejected` for what is no duration, `TimedOut`, `NotFound`, `NoScheduler`,
        `NotPermitted`, and RuntimeError if another task iterates over this watch at the same time: each item would go
        to only one of them.
        """
        await self._begin(None if timeout_s is None else seconds(timeout_s))
        if self._to_submit is None:  # all events so far, then the stored output, then what was heard of it meanwhile
            for event in self._take_events():
                await self._note_streams(event)
                yield event
            async for piece in self._past():
                yield piece
        while True:
            while self._pending:
                item = self._pending.take()
                if isinstance(item, Event):
                    await self._note_streams(item)
                    yield item
                else:
                    async for piece in self._joined(item):
                        yield piece
            if self._is_over:
                break
            await self._step()
        async for piece in self._rest():
            yield piece

    async def _until_over(self, timeout_s: float) -> None:
        """Wait until the job ends, for at most `timeout_s` seconds, and drop all items. Raises as `follow`."""
        await self._begin(timeout_s)
        while not self._is_over:
            self._pending.take_all()
            await self._step()

    async def _begin(self, timeout_s: float | None) -> None:
        """Make sure that all events of the job so far are here. It is followed for at most `timeout_s` from now on."""
        if timeout_s is not None:
            self._ends_after(timeout_s)
        if self._is_heard:
            self._take_events()
            if self._history.rev:
                self._enqueue(self._history.so_far(self._client.tenant))
        elif self._to_submit is None:
            self._asks_first = True
            self._refresh()
            await self._ask()
        # an answer has arrived since the subscription, so the server has accepted or refused that by now
        check_permitted(self._own)
        if self._by_frames:
            self._histories.check_permitted()

    def _take_events(self) -> list[Event]:
        """Return the waiting events; output stays in the queue."""
        items = self._pending.take_all()
        for item in items:
            if isinstance(item, Piece):
                self._pending.put(item, _size_of(item), always=True)
        return [item for item in items if isinstance(item, Event)]

    async def _note_streams(self, event: Event) -> None:
        """Note which streams have begun and will send an end."""
        begun = [change for change in event.changes if change.state == RUNNING] if self._output else []
        drivers = self._histories.drivers
        if begun and self.driver and self.driver not in drivers:
            with contextlib.suppress(NotFound, Rejected, Unreachable):  # `show` of a running job tells what it can do
                from moorage.client.answers import JobInfo
                from moorage.client.reading import as_struct

                drivers.learn(as_struct(JobInfo, await self._read("show", {"job": self.job, **BY_FRAMES})))
        if begun and drivers.can(self.driver).ends_streams:
            of = [change for change in begun if self._only is None or is_in(self._only, change.replica)]
            both = {(change.replica, change.attempt, name) for change in of for name in STREAMS}
            self._open_streams |= both - self._ended_streams

    async def _past(self) -> AsyncIterator[Piece]:
        """Yield the stored output of each replica's newest attempt."""
        joiner = self.joiner
        if joiner is None:
            return
        assert self.info is not None  # stored output is never asked for of a job that was only heard
        newest = await joiner.newest(self.info, self._only)
        async for piece in joiner.kept_of(newest, self._only):
            yield piece
        self._open_streams = {
            key for key in self._open_streams if key[1] >= (newest.get(key[0]) or 0) and not joiner.is_over(*key)
        }

    async def _joined(self, piece: Piece) -> AsyncIterator[Piece]:
        if self.joiner is None or not piece.is_output:
            yield piece
            return
        async for each in self.joiner.joined(piece):
            yield each

    async def _rest(self) -> AsyncIterator[Piece]:
        """Yield output that arrives after the job's last event. With `past`, missing output is read from the worker."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + (OUTPUT_GRACE_S if self.joiner is None else KEPT_GRACE_S)
        while True:
            for item in self._pending.take_all():
                if isinstance(item, Piece):
                    async for piece in self._joined(item):
                        yield piece
            if not self._open_streams:
                return
            if not self._pending and not await self._wait(self._histories.waits, max(ends_s - loop.time(), 0.0)):
                break
        if self.joiner is not None:
            for replica, attempt in sorted({key[:2] for key in self._open_streams}):
                async for piece in self.joiner.kept(replica, attempt):
                    yield piece

    # -- requests to the leader

    @property
    def _is_over(self) -> bool:
        return self._history.is_over

    async def _shown(self, history: JobHistory) -> Shown:
        shown = await super()._shown(history)
        self.info = shown.info  # kept even if it is older than the history: it has the replicas' attempts
        self._histories.drivers.learn(shown.info)
        return shown

    async def _missing(self, info: JobInfo) -> tuple[int, list[Change]]:
        """Return the revision of an answer of `show`, and the transitions up to it that the history lacks.

        Transitions that are not in the answer are read from the history, as far as it is kept. Raises `Unreachable`.
        """
        known = self._history.rev
        changes, rev = behind(known, info.changes), info.rev or known
        if (len(changes) == rev - known and info.rev) or replicas_in(info) is not None:
            return rev, changes
        newest, found = await history_after(self._read, self.job, known)
        # transitions between the two answers arrive as events: `show` does not have the state after them
        rev, by_rev = info.rev or newest, {change.rev: change for change in [*changes, *found]}
        return rev, [by_rev[each] for each in sorted(by_rev) if each <= rev]

    def _too_late(self) -> TimedOut:
        return timed_out(
            f"job {self.job} is {self.state or 'in an unknown state'} after {self._timeout_s:g} s; it goes on",
            job=self.job,
            next_step=f"moorage explain {word_to_explain(self.job)}",
        )


async def run(
    histories: Histories, job: str, asked: Request, submit: Callable[[], Awaitable[None]], timeout_s: float
) -> Result:
    """Submit a job, and return its result with its output. The watch opens first, so that no output is missed.

    Raises as `AsyncClient.run`.
    """
    captured, tail = Captured(histories.budget), Tail()
    watch = AsyncWatch(histories, job, to_submit=asked, ahead=True, at_end=True, past=True)
    await watch.open()
    try:
        await submit()
        if asked.events == "tenant" and histories.is_refused:  # a watch that asks first turns on the job's subject
            await watch.close()
            watch = AsyncWatch(histories, job, ahead=True, past=True)
            await watch.open()
        async for item in watch.follow(timeout_s):
            if isinstance(item, Piece):
                captured.take(item)
                tail.take(item)
    finally:
        captured.close()
        await watch.close()
    result = msgspec.structs.replace(
        watch.result(), stdout=captured.text("out"), stderr=captured.text("err"), lost_bytes=captured.lost_bytes
    )
    if result.state != SUCCEEDED:
        raise JobFailed(result, await tail.or_kept(histories.client.read, result), asked)
    return result


def _size_of(item: Event | Piece) -> int:
    """Return about how many bytes an item takes."""
    if isinstance(item, Event):
        return ITEM_BYTES + CHANGE_BYTES * len(item.changes) + sum(len(change.gpus) for change in item.changes) * 64
    return ITEM_BYTES + len(item.text) + len(item.data or b"")
