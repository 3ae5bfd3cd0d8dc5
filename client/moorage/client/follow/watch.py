"""Follow the events and the output of one job. `events`, `logs`, `result` and `run` are built on `Watch`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Literal

import msgspec

from moorage.bus.transport import Delivery, Subscribed
from moorage.client.errors import JobFailed
from moorage.client.follow.captured import Captured, Tail
from moorage.client.follow.follower import Following, Stories
from moorage.client.follow.output import STREAMS, Joiner, Piece, newest_attempts
from moorage.client.follow.story import Result
from moorage.schemas.capabilities import driver_of
from moorage.schemas.codec import Decoder
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Event, Output, StreamName
from moorage.schemas.job import RUNNING, SUCCEEDED, Request

#: how long to wait for the end of the output after the job's last event
OUTPUT_GRACE_S: Final = 1.0
#: the same, if missing output can be read from the worker
KEPT_GRACE_S: Final = 0.2

_decode_output: Final[Decoder[Output]] = Decoder(Output, from_leader=True)


class Watch:
    """An async context manager and iterator over a job's events (`Event`) and output (`Piece`). It ends with the job.

    Made by `AsyncClient.watch`. With `output` it yields new output. With `past` it first yields the output that the
    workers keep, from the beginning or only the last `tail` lines of each stream; new output joins it without gaps or
    duplicates. `replica` selects one replica. With `notes` a `Piece` may also be a note of a worker. `lost` counts
    pieces of output that this client dropped.
    """

    def __init__(
        self,
        following: Following,
        *,
        output: bool = False,
        past: bool = False,
        tail: int | None = None,
        replica: int | None = None,
        notes: bool = False,
    ) -> None:
        if tail is not None and not past:
            raise TypeError("tail is about stored output: it needs past=True")
        self.lost = 0
        self.joiner = Joiner(following, following.story.job, tail) if past else None
        self._following = following
        self._output = output or past
        self._replica = replica
        self._notes = notes
        self._logs: Subscribed | None = None
        self._open_streams: set[tuple[int, int, StreamName]] = set()
        self._ended_streams: set[tuple[int, int, StreamName]] = set()

    async def __aenter__(self) -> Watch:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def job(self) -> str:
        """The id of the job."""
        return self._following.story.job

    @property
    def state(self) -> str:
        """The last state that was received; "" before the first."""
        return self._following.story.state

    @property
    def driver(self) -> str:
        """The driver that runs the job; "" if it is not known yet, or if the job's request is no longer kept."""
        return self._following.driver or driver_of(self._following.shown)

    def result(self) -> Result:
        """Return how the job ended. Call it only once the job has ended."""
        return self._following.story.result(self._following.shown)

    async def open(self) -> None:
        """Subscribe to the job's events and, if asked for, to its output. Raises `NotPermitted`."""
        await self._following.open()
        if not self._output:
            return
        try:
            asks = self._following.asks
            subject = asks.subjects.log(asks.tenant, self.job, self._heard_replica)
            self._logs = await self._following.subscribe(subject, self._on_output)
        except BaseException:  # if it is cancelled here, `__aexit__` is never called
            await self.close()
            raise

    @property
    def _heard_replica(self) -> int | Literal["*"]:
        """The replica to subscribe to. A wildcard costs the server more, so the only replica of a job is named."""
        request = self._following.to_submit
        if self._replica is None and request is not None and request.replicas == 1:
            return 0
        return "*" if self._replica is None else self._replica

    async def close(self) -> None:
        """Stop listening; the job goes on."""
        logs, self._logs = self._logs, None
        try:
            if logs is not None:
                await logs.unsubscribe()
        finally:
            await self._following.close()

    def _on_output(self, delivery: Delivery) -> None:
        try:
            said = _decode_output(delivery.data)
            replica = int(delivery.subject.rpartition(".")[2])
        except (Refused, ValueError):
            self.lost += 1
            return
        if said.end:
            self._open_streams.discard((replica, said.attempt, said.stream))
            self._ended_streams.add((replica, said.attempt, said.stream))
        piece = Piece(
            replica, said.attempt, said.stream, said.offset, said.text, said.end, said.next, said.data,
            said.note, said.ports,
        )  # fmt: skip
        if (piece.is_output or self._notes) and not self._following.put(piece):
            self.lost += 1

    def __aiter__(self) -> AsyncIterator[Event | Piece]:
        return self.follow()

    async def follow(self, timeout_s: float | None = None) -> AsyncIterator[Event | Piece]:
        """Yield events and, if asked for, output until the job ends, for at most `timeout_s` seconds.

        None means no time limit. Raises `TimedOut`, `NotFound`, `NoScheduler`, `NotPermitted`, and RuntimeError if
        another task iterates over this watch at the same time: each item would go to only one of them.
        """
        following = self._following
        for event in await following.begin(timeout_s):
            await self._note_streams(event)
            yield event
        if self.joiner is not None and following.to_submit is None:
            async for piece in self._past(self.joiner):
                yield piece
        async for item in following.items():
            if isinstance(item, Event):
                await self._note_streams(item)
                yield item
                continue
            async for piece in self._joined(item):
                yield piece
        if self._output:
            async for piece in self._rest():
                yield piece

    async def _note_streams(self, event: Event) -> None:
        """Note which streams have begun and will send an end."""
        begun = [change for change in event.changes if change.state == RUNNING] if self._output else []
        if begun:
            await self._following.learn_driver(self.driver)
        if begun and self._following.drivers.can(self.driver).ends_streams:
            both = {(change.replica, change.attempt, name) for change in begun for name in STREAMS}
            self._open_streams |= both - self._ended_streams

    async def _past(self, joiner: Joiner) -> AsyncIterator[Piece]:
        """Yield the stored output of each replica's newest attempt."""
        newest = newest_attempts(self._following.shown)
        async for piece in joiner.kept_of(newest, self._replica):
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
        grace_s = OUTPUT_GRACE_S if self.joiner is None else KEPT_GRACE_S
        ends_s = asyncio.get_running_loop().time() + grace_s
        while True:
            for item in self._following.taken():
                if isinstance(item, Piece):
                    async for piece in self._joined(item):
                        yield piece
            if not self._open_streams:
                return
            if not await self._following.more(ends_s):
                break
        if self.joiner is not None:
            for replica, attempt in sorted({key[:2] for key in self._open_streams}):
                if self._replica in (None, replica):
                    async for piece in self.joiner.kept(replica, attempt):
                        yield piece


async def run(
    stories: Stories, job: str, asked: Request, submit: Callable[[], Awaitable[None]], timeout_s: float
) -> Result:
    """Submit a job, and return its result with its output. The watch opens first, so that no output is missed.

    Raises as `AsyncClient.run`.
    """
    captured, tail = Captured(stories.budget), Tail()
    watch = Watch(Following(stories, job, to_submit=asked, ahead=True, at_end=True), past=True)
    await watch.open()
    try:
        await submit()
        if asked.events == "tenant" and stories.feed.is_refused:  # a watch that asks first turns on the job's subject
            await watch.close()
            watch = Watch(Following(stories, job, ahead=True), past=True)
            await watch.open()
        async for item in watch.follow(timeout_s):
            if isinstance(item, Piece):
                captured.take(item)
                tail.take(item)
    finally:
        captured.close()
        await watch.close()
    result = msgspec.structs.replace(
        watch.result(),
        stdout=captured.text("out"),
        stderr=captured.text("err"),
        lost_bytes=captured.lost_bytes,
    )
    if result.state != SUCCEEDED:
        raise JobFailed(result, await tail.or_kept(stories.asks, result), asked)
    return result
