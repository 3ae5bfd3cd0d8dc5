"""Ageing: whoever waits counts with a higher priority by and by, so that no stream of higher ones starves it.

So many points for each hour since a job was accepted, in ledger time and in integers, up to a priority that age alone
lifts nobody over. At that bound arrival decides: before a job that has got there stand only those that came earlier and
those that were given more. Age decides who goes first, gets hosts reserved, and what a preemptor has to exceed; a right
to end others comes from a job's own priority alone.
"""

from __future__ import annotations

from typing import Final, NamedTuple

_HOUR_MS: Final = 3_600_000


class Ageing(NamedTuple):
    """`rate_milli` are thousandths of a point an hour; `most` is the priority up to which age lifts."""

    rate_milli: int
    most: int

    def of(self, priority: int, waited_ms: int) -> int:
        """What a priority counts after so long a wait, in whole points."""
        if priority >= self.most or waited_ms <= 0:
            return priority
        return min(self.most, priority + waited_ms * self.rate_milli // (1000 * _HOUR_MS))
