"""The slowest calls of one member in the last hour, in memory: for who asks which they were."""

from __future__ import annotations

import heapq
from itertools import count
from typing import Final

from moorage.schemas.service import SlowCall

#: calls that are kept, and for how long
SLOWEST_MAX: Final = 100
KEPT_MS: Final = 3_600_000
#: what is older is looked for this often, so that it keeps out no call of now
LOOK_MS: Final = 60_000


class Slowest:
    """Calls by how long they waited and ran together. Times are milliseconds since 1970."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, int, SlowCall]] = []  # a heap, the fastest first
        self._number = count()
        self._looked_ms = 0

    def is_one(self, took_ms: int, now_ms: int) -> bool:
        """Return whether a call that took so long, and ends now, is one of them."""
        if now_ms - self._looked_ms >= LOOK_MS:
            self._looked_ms = now_ms
            self._calls = [each for each in self._calls if now_ms - each[2].at_ms < KEPT_MS]
            heapq.heapify(self._calls)
        return len(self._calls) < SLOWEST_MAX or took_ms > self._calls[0][0]

    def add(self, call: SlowCall) -> None:
        """Keep a call that `is_one`."""
        row = (call.waited_ms + call.ran_ms, next(self._number), call)
        if len(self._calls) < SLOWEST_MAX:
            heapq.heappush(self._calls, row)
        else:
            heapq.heapreplace(self._calls, row)

    def told(self, now_ms: int) -> list[SlowCall]:
        """Return them, the slowest first."""
        current = [each for each in self._calls if now_ms - each[2].at_ms < KEPT_MS]
        return [call for _, _, call in sorted(current, key=lambda each: (-each[0], each[1]))]
