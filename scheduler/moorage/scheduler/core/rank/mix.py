"""The request mix: which shapes arrive how often, learned from arrivals, old ones fading.

Arrivals are counted in whole numbers and all counts are halved every `HALF_LIFE` arrivals, so the mix depends on the
order of arrivals alone: no clock, no float. What rankers use is a `Snapshot` of it, which changes seldom: first at
each doubling of what was seen, later whenever the mix has drifted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from moorage.scheduler.core.shape import Shape

#: arrivals after which everything counted so far counts half
HALF_LIFE: Final = 16_384
#: what one arrival adds: so that a shape seen once survives a few halvings
UNIT: Final = 16
#: shapes that are counted; beyond it the rarest half is forgotten
COUNTED_MAX: Final = 8_192
#: arrivals before the mix is looked at for the first time, and then at each doubling up to `LOOK_EVERY`
LOOK_FIRST: Final = 32
LOOK_EVERY: Final = 4_096
#: a mix that moved by less than so many hundredths of all arrivals is left in use
DRIFT_PERCENT: Final = 4
#: what is judged by is the most frequent shapes that cover so many percent of the arrivals
TOP_PERCENT: Final = 95


class Mix:
    """Counts arrivals. `version` grows when what `counts` says should be used anew."""

    __slots__ = ("_look_at", "_seen", "_used", "_used_total", "counts", "total", "version")

    def __init__(self) -> None:
        self.counts: dict[Shape, int] = {}
        self.total = 0
        self.version = 0
        self._seen = 0
        self._look_at = LOOK_FIRST
        self._used: dict[Shape, int] = {}
        self._used_total = 0

    def add(self, shape: Shape, replicas: int = 1) -> None:
        """So many requests of this shape arrived."""
        self.counts[shape] = self.counts.get(shape, 0) + UNIT * replicas
        self.total += UNIT * replicas
        self._seen += replicas
        if self._seen >= self._look_at:
            self._look()

    def _look(self) -> None:
        self._look_at = self._seen + min(self._seen, LOOK_EVERY)
        if self.total >= 2 * UNIT * HALF_LIFE:
            self.counts = {shape: count // 2 for shape, count in self.counts.items() if count > 1}
        if len(self.counts) > COUNTED_MAX:
            kept = sorted(self.counts.items(), key=lambda pair: -pair[1])[: COUNTED_MAX // 2]
            self.counts = dict(kept)
        self.total = sum(self.counts.values())
        if self._drift() * 100 >= DRIFT_PERCENT * self.total * max(1, self._used_total):
            self.use()

    def _drift(self) -> int:
        """Half the sum of differences between the mix now and the one in use, times both totals."""
        now, used = self.total, self._used_total
        if not used:
            return now
        both = self.counts.keys() | self._used.keys()
        return sum(abs(self.counts.get(s, 0) * used - self._used.get(s, 0) * now) for s in both) // 2

    def use(self) -> None:
        """Take what is counted now into use."""
        self._used, self._used_total = dict(self.counts), self.total
        self.version += 1

    def top(self, percent: int = TOP_PERCENT) -> list[tuple[Shape, int]]:
        """The most frequent shapes in use that cover so many percent of the arrivals, the most frequent first."""
        return most_frequent(self._used.items(), percent)

    def all(self) -> list[tuple[Shape, int]]:
        """Every shape in use with its count."""
        return list(self._used.items())


def most_frequent(counted: Iterable[tuple[Shape, int]], percent: int = TOP_PERCENT) -> list[tuple[Shape, int]]:
    """Those that cover so many percent of all, the most frequent first; of those alike the first."""
    ranked = sorted(counted, key=lambda pair: -pair[1])
    total = sum(count for _, count in ranked)
    chosen: list[tuple[Shape, int]] = []
    covered = 0
    for shape, count in ranked:
        if covered * 100 >= percent * total:
            break
        chosen.append((shape, count))
        covered += count
    return chosen
