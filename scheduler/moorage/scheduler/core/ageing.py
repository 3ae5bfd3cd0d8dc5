"""Ageing: whoever waits counts with a higher priority by and by, so that no stream of higher ones starves it.

So many points for each hour since a job was accepted, in ledger time and in integers, up to a priority that age alone
lifts nobody over. Age lifts a job into the classes that are there: within a class it tells nobody apart, so that fair
share and arrival decide there as they did. Once it has come up to a class, only those of it stand before a job that
came earlier, or to whose tenant more is owed.

Age decides who goes first and who gets hosts reserved, and what is started by it is not ended by what it passed. A
right to end others comes from a job's own priority alone.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from typing import Final, NamedTuple

_HOUR_MS: Final = 3_600_000


class Ageing(NamedTuple):
    """`rate_milli` are thousandths of a point an hour; `most` is the priority up to which age lifts."""

    rate_milli: int
    most: int

    def of(self, priority: int, waited_ms: int) -> int:
        """Return what a priority comes to after so long a wait, in whole points."""
        if priority >= self.most or waited_ms <= 0:
            return priority
        return min(self.most, priority + waited_ms * self.rate_milli // (1000 * _HOUR_MS))

    def standing(self, classes: Sequence[int], priority: int, waited_ms: int) -> int:
        """The highest of these classes, in rising order, that a priority has come up to; its own where none is."""
        if priority >= self.most or waited_ms <= 0:
            return priority
        more = waited_ms * self.rate_milli // (1000 * _HOUR_MS)
        if not more:
            return priority
        found = bisect(classes, min(self.most, priority + more))
        return max(priority, classes[found - 1]) if found else priority
