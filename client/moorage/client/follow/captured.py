"""Collect the output of one job from the pieces of its streams."""

from __future__ import annotations

from collections import deque
from typing import Final

from moorage.client.follow.budget import SPARE_BYTES, Budget
from moorage.client.follow.output import Piece, Reads, tail_of
from moorage.client.follow.story import Result, decided
from moorage.schemas.frames import ResultLine, StreamName

#: most bytes kept of each stream of each replica; if there are more, the first ones are dropped
STREAM_BYTES_MAX: Final = 16 * 1024 * 1024


class _Stream:
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


#: bounds of the last lines of output that `JobFailed` has
TAIL_LINES: Final = 20
TAIL_CHARS_MAX: Final = 16 * 1024


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

    async def or_kept(self, reads: Reads, result: Result) -> str:
        """Return the last lines, at most TAIL_LINES. If no piece arrived, read those of the attempt that decided the
        end from its worker, unless that attempt has no exit code.
        """
        text = "".join(self._texts)[-TAIL_CHARS_MAX:]
        last = decided(result.changes, result.state)
        if not self._texts and last is not None and last.code is not None:
            text = await tail_of(reads, result.job, last.replica, last.attempt, TAIL_CHARS_MAX)
        return "\n".join(text.splitlines()[-TAIL_LINES:])


class Captured:
    """Collects pieces as they arrive. If a replica was tried again, only its newest attempt is kept.

    At most STREAM_BYTES_MAX of each stream are kept, and of all streams what the client's budget has room for: then the
    beginning of the longest stream is dropped.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._streams: dict[tuple[int, StreamName], _Stream] = {}

    def take(self, piece: Piece) -> None:
        key = (piece.replica, piece.stream)
        stream = self._streams.get(key)
        if stream is None or piece.attempt > stream.attempt:
            self._budget.give(0 if stream is None else stream.bytes)
            stream = self._streams[key] = _Stream(piece.attempt)
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
