"""Mixes the output of several replicas into one stream of whole lines. Each begins with the number of its replica: `[3]
loss 0.7`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

#: a line longer than this is written in parts
LINE_BYTES_MAX: Final = 64 * 1024

#: replica, attempt and stream ("out" or "err")
Source = tuple[int, int, str]


class Labelled:
    """Keeps the unfinished line of each source, at most `LINE_BYTES_MAX` bytes of it."""

    def __init__(self) -> None:
        self._begun: dict[Source, bytes] = {}

    def lines(self, source: Source, data: bytes, *, end: bool) -> bytes:
        """Return the lines that are complete now, labelled. With `end`, the unfinished rest follows as a line."""
        *whole, rest = (self._begun.pop(source, b"") + data).split(b"\n")
        while len(rest) > LINE_BYTES_MAX:
            whole.append(rest[:LINE_BYTES_MAX])
            rest = rest[LINE_BYTES_MAX:]
        if rest and end:
            whole.append(rest)
        elif rest:
            self._begun[source] = rest
        label = b"[%d] " % source[0]
        return b"".join(label + line + b"\n" for line in whole)

    def rest(self) -> Iterator[tuple[str, bytes]]:
        """Yield the name of each stream that has an unfinished line, and the line; then forget these lines."""
        for source in list(self._begun):
            yield source[2], self.lines(source, b"", end=True)
