"""The output of one job, put together from the pieces of its streams."""

from __future__ import annotations

from collections import deque
from typing import Final

from moorage.client.stored_output import Piece
from moorage.schemas.frames import StreamName

#: characters kept of each stream of each replica; of more, the beginning is let go
STREAM_CHARS_MAX: Final = 16 * 1024 * 1024


class _Stream:
    """One stream of one replica in its newest attempt."""

    __slots__ = ("attempt", "chars", "expected", "lost", "sizes", "texts")

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.texts: deque[str] = deque()
        self.sizes: deque[int] = deque()  # of each in bytes, as they were written
        self.chars = 0
        self.expected = 0
        self.lost = 0

    def add(self, piece: Piece) -> None:
        self.lost += max(piece.offset - self.expected, 0)
        self.expected = max(self.expected, piece.behind)
        self.texts.append(piece.text)
        self.sizes.append(piece.behind - piece.offset)
        self.chars += len(piece.text)
        while self.chars > STREAM_CHARS_MAX and len(self.texts) > 1:
            gone = self.texts.popleft()
            self.chars -= len(gone)
            self.lost += self.sizes.popleft()


class Captured:
    """Takes pieces as they come. Of a replica that was tried again only the newest attempt is kept."""

    def __init__(self) -> None:
        self._streams: dict[tuple[int, StreamName], _Stream] = {}

    def take(self, piece: Piece) -> None:
        key = (piece.replica, piece.stream)
        stream = self._streams.get(key)
        if stream is None or piece.attempt > stream.attempt:
            stream = self._streams[key] = _Stream(piece.attempt)
        if piece.attempt == stream.attempt:
            stream.add(piece)

    def text(self, name: StreamName) -> str:
        """Everything heard of the stream `out` or `err`, replica by replica."""
        return "".join("".join(self._streams[key].texts) for key in sorted(self._streams) if key[1] == name)

    @property
    def lost_bytes(self) -> int:
        """Bytes known to be missing: gaps between the pieces, and what was over the bound."""
        return sum(stream.lost for stream in self._streams.values())
