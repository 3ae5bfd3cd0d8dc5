"""Ageing: the effective priority of a waiting job rises with time, so that higher priorities cannot starve it.

It rises by some points for each hour since the job was accepted, in ledger time and integers, up to a maximum. Age
lifts a job only to priorities that waiting jobs actually have: within one priority, fair share and arrival decide as
without ageing. Once a job has reached a priority, the only jobs before it are those of a higher priority, and those of
that priority that came earlier or whose tenant is owed more.

Age decides which jobs go first and which get a reservation. A job started because of its age is not ended by the jobs
that it passed. The right to end other jobs comes only from a job's own priority.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from typing import Final, NamedTuple

_HOUR_MS: Final = 3_600_000


class Ageing(NamedTuple):
    """`rate_milli` is thousandths of a point for each hour; `most` is the priority up to which age lifts."""

    rate_milli: int
    most: int

    def of(self, priority: int, waited_ms: int) -> int:
        """Return the effective priority after this wait, in whole points."""
        if priority >= self.most or waited_ms <= 0:
            return priority
        return min(self.most, priority + waited_ms * self.rate_milli // (1000 * _HOUR_MS))

    def standing(self, classes: Sequence[int], priority: int, waited_ms: int) -> int:
        """Return the highest of the priorities `classes` (ascending) that is reached with age, at least `priority`."""
        if priority >= self.most or waited_ms <= 0:
            return priority
        more = waited_ms * self.rate_milli // (1000 * _HOUR_MS)
        if not more:
            return priority
        found = bisect(classes, min(self.most, priority + more))
        return max(priority, classes[found - 1]) if found else priority

    def rises_ms(self, classes: Sequence[int], priority: int, waited_ms: int) -> float:
        """Return after what wait `standing` is the next higher one; infinity if it never is."""
        found = bisect(classes, self.standing(classes, priority, waited_ms))
        if not self.rate_milli or found == len(classes) or classes[found] > self.most:
            return math.inf
        return -(-(classes[found] - priority) * 1000 * _HOUR_MS // self.rate_milli)
