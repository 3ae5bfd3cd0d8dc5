"""Answers that come in parts as their functions make them: the numbers of these, and whether anybody listens.

A caller that was killed says nothing, and an endless function would keep its place for ever. So a part asks the server
from time to time, by a reply subject, on which the server says that it found no subscriber.
"""

from __future__ import annotations

from typing import Final

#: a part of a stream asks this often
LISTENS_S: Final = 2.0


class Streams:
    """The streams of a member with this inbox, each by the number of its call. `asked` is where the server answers."""

    def __init__(self, inbox: str) -> None:
        self.asked = f"{inbox}.part.*"
        self._ask = f"{inbox}.part."
        self._parts: dict[int, tuple[int, float]] = {}  # of each: how many there were, and when one asked last

    def next(self, number: int, now_s: float, *, may_ask: bool) -> tuple[int, str]:
        """A call has one more part. Return its number from 1, and its reply subject; "" where it asks nothing."""
        before, asked_s = self._parts.get(number, (0, now_s))
        asks = may_ask and now_s - asked_s >= LISTENS_S
        self._parts[number] = before + 1, now_s if asks else asked_s
        return before + 1, f"{self._ask}{number}" if asks else ""

    def over(self, number: int) -> int:
        """A call has ended; return how many parts it had."""
        return self._parts.pop(number, (0, 0.0))[0]
