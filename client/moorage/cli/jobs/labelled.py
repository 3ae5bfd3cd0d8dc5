"""Mixes the output of several replicas into one stream of whole lines. Each begins with the number of its replica: `[3]
loss 0.7`. An update of a progress bar, which ends with a carriage return, counts as a line."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

#: a line longer than this is written in parts
LINE_BYTES_MAX: Final = 64 * 1024
#: an unfinished line is written after this time, such as a prompt
UNFINISHED_S_MAX: Final = 1.0
_ENDS: Final = re.compile(rb"(\r?\n|\r)")
#: a character has at most four bytes in UTF-8
_CHAR_BYTES_MAX: Final = 4

#: replica, attempt and stream ("out" or "err")
Source = tuple[int, int, str]


class _Begun(NamedTuple):
    """An unfinished line, and when it began."""

    line: bytes
    since_s: float


class Labelled:
    """Keeps the unfinished line of each source, at most `LINE_BYTES_MAX` bytes of it."""

    def __init__(
        self, now_s: Callable[[], float] = time.monotonic, *, job: str = "", has_replicas: bool = True
    ) -> None:
        """With `job`, lines begin with that, too: `[train-42/3]`, or `[train-42]` if it has one replica."""
        self._head = f"{job}/" if job and has_replicas else job
        self._numbered = has_replicas or not job
        self._now_s = now_s
        self._begun: dict[Source, _Begun] = {}
        self._returned: set[Source] = set()  # whose last update has ended with a carriage return

    def lines(self, source: Source, data: bytes, *, end: bool) -> bytes:
        """Return the lines that are complete now, labelled. With `end`, the unfinished rest follows as a line."""
        begun = self._begun.pop(source, None) or _Begun(b"", self._now_s())
        *parts, rest = _ENDS.split(begun.line + data)
        label = f"[{self._head}{source[0] if self._numbered else ''}] ".encode()
        whole: list[bytes] = []
        for line, ends in zip(parts[::2], parts[1::2], strict=True):
            if line or ends != b"\r":  # many bars begin an update with a carriage return, and so end the one before
                is_same_end = not line and source in self._returned and ends == b"\n"  # CR LF that came in two pieces
                whole.append(ends if is_same_end else label + line + ends)
            self._returned.discard(source)
        if parts and parts[-1] == b"\r" and not rest:
            self._returned.add(source)
        elif rest:
            self._returned.discard(source)
        while len(rest) > LINE_BYTES_MAX:
            length = _whole_chars(rest, LINE_BYTES_MAX)
            whole.append(label + rest[:length] + b"\n")
            rest = rest[length:]
        if rest and end:
            whole.append(label + rest + b"\n")
        elif rest:
            self._begun[source] = _Begun(rest, self._now_s() if parts else begun.since_s)
        return b"".join(whole)

    def rest(self) -> Iterator[tuple[str, bytes]]:
        """Yield the name of each stream that has an unfinished line, and the line; then forget these lines."""
        for source in list(self._begun):
            yield source[2], self.lines(source, b"", end=True)

    def overdue(self) -> Iterator[tuple[str, bytes]]:
        """Yield the unfinished lines that began UNFINISHED_S_MAX ago, as `rest` does. Half a character still waits."""
        now_s = self._now_s()
        for source, begun in list(self._begun.items()):
            length = _whole_chars(begun.line, len(begun.line))
            if now_s - begun.since_s >= UNFINISHED_S_MAX and length:
                del self._begun[source]
                yield source[2], self.lines(source, begun.line[:length], end=True)
                if half := begun.line[length:]:
                    self._begun[source] = _Begun(half, now_s)


def _whole_chars(data: bytes, length: int) -> int:
    """Return `length`, or up to three bytes less, so that a character of UTF-8 is not cut there."""
    for back in range(1, min(_CHAR_BYTES_MAX, length) + 1):
        byte = data[length - back]
        if byte < 0x80:  # ASCII: what follows is no UTF-8
            return length
        if byte >= 0xC0:  # the first byte of a character of 2, 3 or 4 bytes
            size = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return length if back >= size else length - back
    return length
