"""Reads stored output page by page from the worker that keeps it, and joins new output to it without gaps."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import msgspec

from moorage.client.errors import ClientError, NoOutput, NotFound, Overloaded, Unreachable
from moorage.client.follow.ports import Reads
from moorage.schemas.frames import LOG_OFFSET_MAX, LOG_PAGE_BYTES_MAX, LogPage, StreamName

OVERLOADED_TRIES_MAX: Final = 50
#: between two of these tries, where the worker does not say how long
OVERLOADED_WAIT_S: Final = 0.2
STREAMS: Final[tuple[StreamName, ...]] = ("out", "err")
#: bytes of an average line, to guess where a tail begins; if its lines are longer, earlier pages are read as well
TAIL_LINE_BYTES: Final = 1024

#: replica, attempt (None: the newest, where no number is known), stream
_Key = tuple[int, int | None, StreamName]


class Piece(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="log"):
    """A piece of output: the bytes from `offset` up to `next` of one stream of a replica's attempt.

    `text` is decoded with replacement; if the bytes are not UTF-8, `data` has them as they are. `end` marks the last
    piece of a stream. A piece with `note` or `ports` is no output: what the worker does before the start, or where the
    ports of a container are reached.
    """

    replica: int
    attempt: int
    stream: StreamName
    offset: int
    text: str
    end: bool = False
    next: int = 0
    data: bytes | None = None
    note: str = ""
    ports: dict[str, str] = {}

    @property
    def is_output(self) -> bool:
        """Whether the job wrote it."""
        return not self.note and not self.ports

    @property
    def behind(self) -> int:
        """The offset after it, also for a worker that does not send `next`."""
        return self.next or self.offset + len(self.text.encode())


async def read_page(
    client: Reads,
    job: str,
    replica: int,
    attempt: int | None,
    stream: StreamName,
    offset: int,
    limit: int = LOG_PAGE_BYTES_MAX,
) -> LogPage:
    """Read one page; waits while the workers are asked too much. Raises `NoOutput`, `NotFound`, and as `show`."""
    arguments: dict[str, Any] = {"job": job, "replica": replica, "stream": stream, "offset": offset, "limit": limit}
    if attempt is not None:
        arguments["attempt"] = attempt
    tries = 0
    while True:
        try:
            return msgspec.convert(await client.read("logs", arguments), LogPage)
        except Overloaded as busy:
            tries += 1
            if tries == OVERLOADED_TRIES_MAX:
                raise
            await asyncio.sleep(busy.problem.retry_after_s or OVERLOADED_WAIT_S)


def piece_of(page: LogPage) -> Piece:
    """Return a page as a piece. Where what is kept was cut off, the stream goes on behind it: that is no end."""
    text = page.text if page.data is None else page.data.decode(errors="replace")
    end = page.over and not page.truncated
    return Piece(page.replica, page.attempt, page.stream, page.offset, text, end, page.next, page.data)


async def tail_of(client: Reads, job: str, replica: int, attempt: int | None, chars_max: int) -> str:
    """Return the end of a member's output, stdout before stderr; "" of a stream that is not kept or not available.

    How the job ended is known by then, and is to be told in any case.
    """

    async def text_of(stream: StreamName) -> str:
        try:
            return piece_of(await read_page(client, job, replica, attempt, stream, -chars_max, chars_max)).text
        except ClientError:
            return ""

    return "".join(await asyncio.gather(*map(text_of, STREAMS)))


class _Stream:
    """How far one stream was yielded: up to `at`, None before anything was read. `cut_at` is where what is kept of it
    was cut off, `over` says that all of it was yielded."""

    __slots__ = ("at", "cut_at", "over")

    def __init__(self) -> None:
        self.at: int | None = None
        self.cut_at = LOG_OFFSET_MAX
        self.over = False

    def wanted(self, until: int | None, tail: int | None) -> tuple[int, int]:
        """Offset and length of the next page up to `until` (None: to the end), 0 for none. Of a stream of which nothing
        was read and only a tail is wanted, the offset counts from its end."""
        if self.at is None and tail is not None:
            length = min(max(tail, 1) * TAIL_LINE_BYTES, LOG_PAGE_BYTES_MAX)
            return -length, length
        offset = self.at or 0
        length = LOG_PAGE_BYTES_MAX if until is None else min(until - offset, LOG_PAGE_BYTES_MAX)
        return offset, 0 if offset >= self.cut_at else length

    def take(self, page: LogPage, begin: int) -> Piece:
        """What of a page is to be yielded, from the offset `begin` on."""
        if page.truncated:
            self.cut_at = page.size
        piece = piece_of(page)
        self.at = max(self.at or 0, page.next)
        self.over = self.over or piece.end
        return _from(piece, begin) if begin > page.offset else piece


class Joiner:
    """Joins stored and new output: knows how far each stream was yielded, and reads what is missing in between.

    If `tail` is not None, only so many lines of the stored output are yielded. `lost` counts bytes that are not kept,
    `trouble` is the first reason. Trouble with an attempt no longer matters once a later attempt of the same replica
    has output: perhaps it never ran, as its worker died.
    """

    def __init__(self, client: Reads, job: str, tail: int | None = None) -> None:
        self.lost = 0
        self.truncated: set[_Key] = set()
        self._client = client
        self._job = job
        self._tail = tail
        self._streams: defaultdict[_Key, _Stream] = defaultdict(_Stream)
        self._troubles: dict[tuple[int, int | None], ClientError] = {}  # by replica and attempt
        self._newest: dict[int, int] = {}  # each replica's newest attempt that had output

    @property
    def trouble(self) -> ClientError | None:
        """The first reason why output of a replica's newest attempt is missing."""
        for (replica, attempt), error in self._troubles.items():
            if attempt is None or attempt >= self._newest.get(replica, 0):
                return error
        return None

    async def kept_of(
        self, newest: Mapping[int, int | None], replica: int | None, attempt: int | None = None
    ) -> AsyncIterator[Piece]:
        """The stored output of each replica's `newest` attempt, or of one `replica` or `attempt` where that is given.

        Raises what the leader says of a replica that the job does not have.
        """
        if replica is not None and replica not in newest:
            await read_page(self._client, self._job, replica, attempt, "out", 0, 1)
        for each, last in newest.items():
            wanted = attempt or last
            if wanted != 0 and replica in (None, each):
                async for piece in self.kept(each, wanted):
                    yield piece

    async def kept(self, replica: int, attempt: int | None) -> AsyncIterator[Piece]:
        """The stored output of an attempt that was not yielded yet, stdout before stderr."""
        for stream in STREAMS:
            async for piece in self._up_to((replica, attempt, stream), None):
                yield piece

    def is_over(self, replica: int, attempt: int, stream: StreamName) -> bool:
        """Return whether all of a stream was yielded."""
        return self._streams[replica, attempt, stream].over

    async def joined(self, piece: Piece) -> AsyncIterator[Piece]:
        """A new piece, after the output that is missing before it; nothing if it was yielded already."""
        key = (piece.replica, piece.attempt, piece.stream)
        stream = self._streams[key]
        self._heard(piece.replica, piece.attempt)
        if stream.over:
            return
        if piece.offset > (stream.at or 0):
            async for before in self._up_to(key, piece.offset):
                yield before
            missing = piece.offset - (stream.at or 0)
            if missing > 0:
                self.lost += missing
                stream.at = piece.offset
        at, behind = stream.at or 0, piece.behind
        if piece.offset < at < behind:
            if len(_bytes_of(piece)) == behind - piece.offset:
                piece = _from(piece, at)
            else:  # its text was decoded with replacements: read the bytes from the worker
                async for before in self._up_to(key, behind):
                    yield before
                at = stream.at or 0
        if behind > at or (piece.end and behind == at):
            stream.at = behind
            if behind == at:
                piece = msgspec.structs.replace(piece, offset=at, text="", data=None)
            yield piece
        stream.over = stream.over or piece.end

    async def _up_to(self, key: _Key, until: int | None) -> AsyncIterator[Piece]:
        """The stored pages up to an offset, or to the end of what is stored now."""
        replica, attempt, name = key
        stream = self._streams[key]
        while not stream.over:
            offset, length = stream.wanted(until, self._tail)
            if length <= 0:
                return
            try:
                page = await read_page(self._client, self._job, replica, attempt, name, offset, length)
                begin = await self._tail_begins(page) if offset < 0 else page.offset
            except (NoOutput, NotFound, Overloaded, Unreachable) as gone:
                self._troubles.setdefault((replica, attempt), gone)
                return
            self._heard(replica, page.attempt)
            if begin < page.offset:  # its lines are longer than guessed: read on from where the tail begins
                stream.at = begin
                continue
            if page.truncated:
                self.truncated.add(key)
            piece = stream.take(page, begin)
            if piece.text or piece.end:
                yield piece
            if page.next == page.offset or page.next >= page.size or page.over:
                return

    async def _tail_begins(self, page: LogPage) -> int:
        """Return the offset of the tail's first line; `page` is the last page of the stream."""
        left = self._tail or 0
        if not left:
            return page.next
        text = _bytes_of(piece_of(page))
        end = len(text) - text.endswith(b"\n")  # the newline at the very end begins no further line
        while True:
            while left and (end := text.rfind(b"\n", 0, end)) >= 0:
                left -= 1
            if not left or page.offset == 0:
                return page.offset + end + 1
            before = max(page.offset - LOG_PAGE_BYTES_MAX, 0)
            page = await read_page(
                self._client, self._job, page.replica, page.attempt, page.stream, before, page.offset - before
            )
            text = _bytes_of(piece_of(page))
            end = len(text)

    def _heard(self, replica: int, attempt: int) -> None:
        self._newest[replica] = max(attempt, self._newest.get(replica, 0))


def newest_attempts(shown: dict[str, Any]) -> dict[int, int | None]:
    """Each replica's newest attempt by the answer of `show`; None if that is no longer known."""
    if "replica_states" in shown:
        return {row["replica"]: row["attempt"] for row in shown["replica_states"]}
    newest: dict[int, int | None] = {}
    for change in shown.get("changes", ()):  # of a job that left the scheduler's memory
        if change["replica"] >= 0:
            newest[change["replica"]] = max(newest.get(change["replica"]) or 0, change["attempt"])
    return newest or {0: None}


def _bytes_of(piece: Piece) -> bytes:
    return piece.text.encode() if piece.data is None else piece.data


def _from(piece: Piece, offset: int) -> Piece:
    """Return the part of a piece from this offset of the stream on."""
    rest = _bytes_of(piece)[offset - piece.offset :]
    data = rest if piece.data is not None else None
    return msgspec.structs.replace(piece, offset=offset, text=rest.decode(errors="replace"), data=data)
