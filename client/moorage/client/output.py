"""A job's output: read page by page from the worker that keeps it, joined to new output without gaps, and collected."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from moorage.client.errors import ClientError, NoOutput, NotFound, Overloaded, Unreachable, read_answer
from moorage.client.follow.job_history import Reads, Result, decided
from moorage.client.kept_output import attempts_to_read, newest_attempts
from moorage.schemas.frames import LOG_OFFSET_MAX, LOG_PAGE_BYTES_MAX, LogPage, LogStream, ResultLine, StreamName
from moorage.schemas.ranges import Ranges, numbers_in

if TYPE_CHECKING:
    from moorage.client.answers import JobInfo
    from moorage.client.follow.follower import Budget

OVERLOADED_TRIES_MAX: Final = 50
#: wait between two of these tries, if the worker sends no other
OVERLOADED_WAIT_S: Final = 0.2
STREAMS: Final[tuple[StreamName, ...]] = ("out", "err")
#: replicas whose stored output is asked for at once, a question for each stream; a leader relays 16 of one tenant
REPLICAS_AHEAD: Final = 4
#: bytes of an average line, to guess where a tail begins; if the lines are longer, earlier pages are read as well
TAIL_LINE_BYTES: Final = 1024

#: most bytes that `run` keeps of each stream of each replica; if there are more, the first ones are dropped
STREAM_BYTES_MAX: Final = 16 * 1024 * 1024
#: what the output that `run` collects leaves free of the client's budget, for whatever waits for a reader
SPARE_BYTES: Final = 64 * 1024 * 1024
#: bounds of the last lines of output that `JobFailed` has
TAIL_LINES: Final = 20
TAIL_CHARS_MAX: Final = 16 * 1024

#: bytes of each number of the stream `order`; see `LogsAsked`
ORDER_NUMBER_BYTES: Final = 4

#: replica, attempt (None: the newest, where no number is known), stream
_Key = tuple[int, int | None, StreamName]


class Piece(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="log"):
    """A piece of output: the bytes from `offset` up to `next` of one stream of a replica's attempt.

    `text` is the decoded output; bytes that are not UTF-8 are replaced in it, and `data` then has the raw bytes. `end`
    marks the last piece of a stream. `dropped` bytes of the stream right before this piece were not kept by the worker,
    because the stream is longer than `output_cap_bytes`. A piece with `note` or `ports` is not output: `note` says what
    the worker does before the start, `ports` has the addresses of a container's ports.
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
    dropped: int = 0

    @property
    def is_output(self) -> bool:
        """Whether the job wrote this piece, as opposed to a note of the worker."""
        return not self.note and not self.ports

    @property
    def behind(self) -> int:
        """The offset of the byte after this piece. It is computed if the worker does not send `next`."""
        return self.next or self.offset + len(self.text.encode())


async def read_page(
    read: Reads,
    job: str,
    replica: int,
    attempt: int | None,
    stream: LogStream,
    offset: int,
    limit: int = LOG_PAGE_BYTES_MAX,
) -> LogPage:
    """Return one page of stored output. Tries at most OVERLOADED_TRIES_MAX times while the worker is overloaded.

    `attempt` None means the newest one. A negative `offset` counts from the end of the stream. Raises `NoOutput`,
    `NotFound`, `Overloaded`, and what `show` raises.
    """
    arguments: dict[str, Any] = {"job": job, "replica": replica, "stream": stream, "offset": offset, "limit": limit}
    if attempt is not None:
        arguments["attempt"] = attempt
    tries = 0
    while True:
        try:
            return read_answer(await read("logs", arguments), LogPage)
        except Overloaded as busy:
            tries += 1
            if tries == OVERLOADED_TRIES_MAX:
                raise
            await asyncio.sleep(busy.problem.retry_after_s or OVERLOADED_WAIT_S)


def piece_of(page: LogPage) -> Piece:
    """Return a page of `out` or `err` as a piece. Its `end` is false if the stored output was cut off there."""
    text = page.text if page.data is None else page.data.decode(errors="replace")
    end = page.over and (not page.truncated or page.cut_to > 0)
    stream: StreamName = "err" if page.stream == "err" else "out"
    return Piece(page.replica, page.attempt, stream, page.offset, text, end, page.next, page.data)


async def tail_of(read: Reads, job: str, replica: int, attempt: int | None, chars_max: int) -> str:
    """Return the end of an attempt's output, at most `chars_max` bytes of each stream; "" if a stream is not available.

    Stdout comes before stderr. It raises no `ClientError`: the caller reports how the job ended, with or without its
    output.
    """

    async def text_of(stream: StreamName) -> str:
        try:
            return piece_of(await read_page(read, job, replica, attempt, stream, -chars_max, chars_max)).text
        except ClientError:
            return ""

    return "".join(await asyncio.gather(*map(text_of, STREAMS)))


class _Stream:
    """How far one stream was yielded: up to the offset `at`, None if nothing was read yet. `cut_at` is the offset where
    the stored output was cut off. `over` says that the whole stream was yielded."""

    __slots__ = ("at", "cut_at", "over")

    def __init__(self) -> None:
        self.at: int | None = None
        self.cut_at = LOG_OFFSET_MAX
        self.over = False

    def wanted(self, until: int | None, tail: int | None) -> tuple[int, int]:
        """Return offset and length of the next page up to `until` (None: to the end); length 0 if there is none.

        If only a tail is wanted and nothing was read yet, the offset is negative and counts from the end.
        """
        if self.at is None and tail is not None:
            length = min(max(tail, 1) * TAIL_LINE_BYTES, LOG_PAGE_BYTES_MAX)
            return -length, length
        offset = self.at or 0
        length = LOG_PAGE_BYTES_MAX if until is None else min(until - offset, LOG_PAGE_BYTES_MAX)
        return offset, 0 if offset >= self.cut_at else length

    def take(self, page: LogPage, begin: int) -> Piece:
        """Note that a page was read, and return the part of it from the offset `begin` on, to be yielded."""
        if page.truncated and not page.cut_to:
            self.cut_at = page.size
        piece = piece_of(page)
        self.at = max(self.at or 0, page.next)
        self.over = self.over or piece.end
        return _from(piece, begin) if begin > page.offset else piece


class _Source:
    """The pieces of one stream, of which a part may be taken."""

    def __init__(self, pieces: AsyncIterator[Piece]) -> None:
        self.piece: Piece | None = None
        self._pieces = pieces

    async def fill(self) -> None:
        if self.piece is None:
            self.piece = await anext(self._pieces, None)

    async def up_to(self, offset: int | None) -> AsyncIterator[Piece]:
        """Yield the pieces up to an offset of the stream; None: all of them."""
        while True:
            await self.fill()
            piece = self.piece
            if piece is None or (offset is not None and piece.offset >= offset):
                return
            if offset is None or piece.behind <= offset:
                self.piece = None
                yield piece
            else:
                first, self.piece = _split(piece, offset)
                yield first


_Sources: TypeAlias = dict[StreamName, _Source]


class Joiner:
    """Joins stored and new output: it tracks how far each stream was yielded, and reads what is missing in between.

    If `tail` is not None, only the last `tail` lines of the stored output are yielded. `lost` counts the missing bytes
    that no worker keeps. `truncated` has the streams of which the worker did not keep all, each with the number of
    bytes that are missing in the middle; 0 if all after some byte are missing. `trouble` is the first error. An error
    with an attempt no longer counts once a later attempt of the same replica has output: perhaps the first one never
    ran, because its worker died.
    """

    def __init__(self, read: Reads, job: str, tail: int | None = None) -> None:
        self.lost = 0
        self.left_out = 0  # replicas of a job of very many that have ended and whose stored output is not given
        self.truncated: dict[_Key, int] = {}
        #: called with the first error for which output is missing, when it is met
        self.on_trouble: Callable[[ClientError], None] | None = None
        self._read = read
        self._job = job
        self._tail = tail
        self._streams: defaultdict[_Key, _Stream] = defaultdict(_Stream)
        self._troubles: dict[tuple[int, int | None], ClientError] = {}  # by replica and attempt
        self._newest: dict[int, int] = {}  # each replica's newest attempt that had output

    @property
    def trouble(self) -> ClientError | None:
        """The first error for which output of a replica's newest attempt is missing; None if there is none."""
        for (replica, attempt), error in self._troubles.items():
            if attempt is None or attempt >= self._newest.get(replica, 0):
                return error
        return None

    async def newest(self, shown: JobInfo, only: Ranges | None) -> dict[int, int | None]:
        """Return the attempts for `kept_of`, from an answer of `show`. Where nobody named replicas (`only`), of a job
        of very many only some: see `kept_output`; `left_out` then counts the others."""
        if only is not None:
            return newest_attempts(shown)
        newest, self.left_out = await attempts_to_read(self._read, shown)
        return newest

    async def kept_of(
        self, newest: Mapping[int, int | None], only: Ranges | None, attempt: int | None = None
    ) -> AsyncIterator[Piece]:
        """Yield the stored output of each replica's `newest` attempt, or of the replicas `only`, or of an `attempt`.

        The first pages of the next `REPLICAS_AHEAD` are read meanwhile. Raises the leader's error for a replica that
        the job does not have.
        """
        numbers = iter(newest if only is None else numbers_in(only))
        begun: deque[tuple[int, int | None, asyncio.Task[_Sources]]] = deque()
        try:
            while True:
                while len(begun) < REPLICAS_AHEAD and (each := next(numbers, None)) is not None:
                    wanted = attempt or newest.get(each)
                    if wanted != 0:
                        beginning = self._begin(each, wanted, is_known=each in newest)
                        begun.append((each, wanted, asyncio.create_task(beginning)))
                if not begun:
                    return
                replica, wanted, task = begun[0]
                async for piece in self._in_order(replica, wanted, await task):
                    yield piece
                begun.popleft()
        finally:
            for *_, task in begun:
                task.cancel()
            await asyncio.gather(*(task for *_, task in begun), return_exceptions=True)

    async def kept(self, replica: int, attempt: int | None) -> AsyncIterator[Piece]:
        """Yield the stored output of an attempt that was not yielded yet, both streams in the order in which it arrived
        at the worker. What is not known of that order comes at the end, stdout first. Errors go to `trouble`."""
        async for piece in self._in_order(replica, attempt, await self._begin(replica, attempt)):
            yield piece

    async def _begin(self, replica: int, attempt: int | None, *, is_known: bool = True) -> _Sources:
        """Read the first page of both streams of an attempt. Raises the leader's error where it is not known whether
        the job has such a replica, and it has none."""
        if not is_known:
            await read_page(self._read, self._job, replica, attempt, "out", 0, 1)
        sources = {name: _Source(self._up_to((replica, attempt, name), None)) for name in STREAMS}
        await asyncio.gather(*(source.fill() for source in sources.values()))
        return sources

    async def _in_order(self, replica: int, attempt: int | None, sources: _Sources) -> AsyncIterator[Piece]:
        if all(source.piece is not None for source in sources.values()):
            ends = dict.fromkeys(STREAMS, 0)
            async for name, size in self._runs(replica, attempt):
                ends[name] += size
                async for piece in sources[name].up_to(ends[name]):
                    yield piece
        for source in sources.values():
            async for piece in source.up_to(None):
                yield piece

    async def _runs(self, replica: int, attempt: int | None) -> AsyncIterator[tuple[StreamName, int]]:
        """Yield of which stream how many bytes arrived one after the other, as far as the worker has recorded it."""
        offset, count, rest = 0, 0, b""
        while True:
            try:
                page = await read_page(self._read, self._job, replica, attempt, "order", offset)
            except ClientError:  # its driver keeps no record of the order
                return
            rest += page.text.encode() if page.data is None else page.data
            whole = len(rest) // ORDER_NUMBER_BYTES * ORDER_NUMBER_BYTES
            for at in range(0, whole, ORDER_NUMBER_BYTES):
                yield STREAMS[count % len(STREAMS)], int.from_bytes(rest[at : at + ORDER_NUMBER_BYTES], "little")
                count += 1
            rest = rest[whole:]
            if page.next <= offset or page.next >= page.size:
                return
            offset = page.next

    def is_over(self, replica: int, attempt: int, stream: StreamName) -> bool:
        """Return whether the whole stream was yielded."""
        return self._streams[replica, attempt, stream].over

    async def joined(self, piece: Piece) -> AsyncIterator[Piece]:
        """Yield the output that is missing before a new piece, and then the piece, unless it was yielded already."""
        key = (piece.replica, piece.attempt, piece.stream)
        stream = self._streams[key]
        self._note_attempt(piece.replica, piece.attempt)
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
        """Yield the stored pages up to an offset, or to the present end of the stored output."""
        replica, attempt, name = key
        stream = self._streams[key]
        while not stream.over:
            offset, length = stream.wanted(until, self._tail)
            if length <= 0:
                return
            try:
                page = await read_page(self._read, self._job, replica, attempt, name, offset, length)
                begin = await self._tail_begins(page) if offset < 0 else page.offset
            except (NoOutput, NotFound, Overloaded, Unreachable) as gone:
                if not self._troubles and self.on_trouble is not None:
                    self.on_trouble(gone)
                self._troubles.setdefault((replica, attempt), gone)
                return
            self._note_attempt(replica, page.attempt)
            if begin < page.offset:  # its lines are longer than guessed: read on from where the tail begins
                stream.at = begin
                continue
            if page.truncated:
                self.truncated[key] = page.cut_to - page.cut_from
            dropped = page.offset - offset if 0 <= offset < page.offset else 0
            if until is not None and page.offset >= until:  # all before the new piece is gone: the caller counts it
                return
            self.lost += dropped
            piece = msgspec.structs.replace(stream.take(page, begin), dropped=dropped)
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
            behind = page.offset
            page = await read_page(
                self._read, self._job, page.replica, page.attempt, page.stream, before, behind - before
            )
            if page.offset > before:  # what is before was not kept
                return min(page.offset, behind)
            text = _bytes_of(piece_of(page))
            end = len(text)

    def _note_attempt(self, replica: int, attempt: int) -> None:
        self._newest[replica] = max(attempt, self._newest.get(replica, 0))


def _bytes_of(piece: Piece) -> bytes:
    return piece.text.encode() if piece.data is None else piece.data


def _split(piece: Piece, offset: int) -> tuple[Piece, Piece]:
    """Return the parts of a piece before and from an offset of the stream, which is inside it."""
    data = _bytes_of(piece)
    at = offset - piece.offset
    return (
        _with(msgspec.structs.replace(piece, end=False, next=offset), data[:at]),
        _with(msgspec.structs.replace(piece, offset=offset, next=piece.behind, dropped=0), data[at:]),
    )


def _with(piece: Piece, data: bytes) -> Piece:
    text = data.decode(errors="replace")
    return msgspec.structs.replace(piece, text=text, data=data if text.encode() != data else None)


def _from(piece: Piece, offset: int) -> Piece:
    """Return the part of a piece from this offset of the stream on."""
    return _with(msgspec.structs.replace(piece, offset=offset), _bytes_of(piece)[offset - piece.offset :])


class _Kept:
    """One stream of one replica in its newest attempt."""

    __slots__ = ("attempt", "bytes", "expected", "lost", "sizes", "texts")

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.texts: deque[str] = deque()
        self.sizes: deque[int] = deque()  # the size of each text in bytes, as the job wrote it
        self.bytes = 0
        self.expected = 0
        self.lost = 0

    def add(self, piece: Piece) -> None:
        self.lost += max(piece.offset - self.expected, 0)
        self.expected = max(self.expected, piece.behind)
        self.texts.append(piece.text)
        self.sizes.append(piece.behind - piece.offset)
        self.bytes += self.sizes[-1]

    def drop(self) -> int:
        """Drop the oldest text, and return its size in bytes."""
        self.texts.popleft()
        size = self.sizes.popleft()
        self.bytes -= size
        self.lost += size
        return size


class Tail:
    """Keeps the end of a job's output: the pieces in the order in which they arrive."""

    def __init__(self) -> None:
        self._texts: deque[str] = deque()
        self._chars = 0

    def take(self, piece: Piece) -> None:
        self._texts.append(piece.text)
        self._chars += len(piece.text)
        while self._chars > TAIL_CHARS_MAX and len(self._texts) > 1:
            self._chars -= len(self._texts.popleft())

    def take_of(self, results: dict[str, ResultLine], result: Result) -> None:
        """Add the last lines that were sent with the result of a handler: of the attempt that decided the job's end."""
        last = decided(result.changes, result.state)
        line = None if last is None else results.pop(f"{result.job}.{last.replica}.{last.fence}", None)
        if line is not None:
            self._texts.append(line.tail)

    async def or_kept(self, read: Reads, result: Result) -> str:
        """Return the last lines, at most TAIL_LINES. If no piece arrived, read those of the attempt that decided the
        end from its worker, unless that attempt has no exit code.
        """
        text = "".join(self._texts)[-TAIL_CHARS_MAX:]
        last = decided(result.changes, result.state)
        if not self._texts and last is not None and last.code is not None:
            text = await tail_of(read, result.job, last.replica, last.attempt, TAIL_CHARS_MAX)
        return "\n".join(text.splitlines()[-TAIL_LINES:])


class Captured:
    """Collects pieces as they arrive. If a replica was tried again, only its newest attempt is kept.

    At most STREAM_BYTES_MAX of each stream are kept, and of all streams what the client's budget has room for: then the
    beginning of the longest stream is dropped.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._streams: dict[tuple[int, StreamName], _Kept] = {}

    def take(self, piece: Piece) -> None:
        key = (piece.replica, piece.stream)
        stream = self._streams.get(key)
        if stream is None or piece.attempt > stream.attempt:
            self._budget.give(0 if stream is None else stream.bytes)
            stream = self._streams[key] = _Kept(piece.attempt)
        if piece.attempt != stream.attempt:
            return
        size = piece.behind - piece.offset
        while not self._budget.take(size, SPARE_BYTES):
            longest = max(self._streams.values(), key=lambda each: each.bytes)
            if not longest.bytes:  # others hold all of it
                stream.lost += max(piece.behind - stream.expected, 0)
                stream.expected = max(stream.expected, piece.behind)
                return
            self._budget.give(longest.drop())
        stream.add(piece)
        while stream.bytes > STREAM_BYTES_MAX and len(stream.texts) > 1:
            self._budget.give(stream.drop())

    def close(self) -> None:
        """Return what this holds to the client's budget. The texts stay, for the result."""
        self._budget.give(sum(stream.bytes for stream in self._streams.values()))

    def text(self, name: StreamName) -> str:
        """Return what was received of the stream `out` or `err`, replica by replica."""
        return "".join("".join(self._streams[key].texts) for key in sorted(self._streams) if key[1] == name)

    @property
    def lost_bytes(self) -> int:
        """Bytes known to be missing: gaps between the pieces, and what exceeded the bound."""
        return sum(stream.lost for stream in self._streams.values())
