"""The request mix: which shapes arrive how often, learned from arrivals, old ones fading.

Arrivals are counted in whole numbers and all counts are halved every `HALF_LIFE` arrivals, so the mix depends on the
order of arrivals alone: no clock, no float. What rankers use is a snapshot of it, which changes seldom: when the mix
has drifted, which is looked at often while little was seen, or when a class of requests comes clearly more often than
it says. All that is counted by then is halved: what comes next tells more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from moorage.scheduler.core.shape import GpuKind, Shape

#: arrivals after which everything counted so far counts half
HALF_LIFE: Final = 16_384
#: what one arrival adds: so that a shape seen once survives a few halvings
UNIT: Final = 16
#: shapes that are counted; beyond it the rarest half is forgotten. As many classes are counted since the mix in use was
#: taken; beyond it all of those are forgotten, so that a class which comes more often is noticed later
COUNTED_MAX: Final = 8_192
#: arrivals before the mix is looked at for the first time; then at least so many, and as this part of what was seen has
#: come beside it; from `DRIFT_EVERY` on every so many for a class that came, and for a drift. A new mix means that
#: every host is scored anew for every shape
LOOK_FIRST: Final = 32
LOOK_LEAST: Final = 64
LOOK_PART: Final = 4
LOOK_EVERY: Final = 1_024
DRIFT_EVERY: Final = 4_096
#: a mix that moved by less than so many hundredths of all arrivals is left in use
DRIFT_PERCENT: Final = 4
#: a class comes more often than the mix in use says when by so many standard deviations, squared: 17 single arrivals
#: of a class unheard of do, one job of any number of replicas does not
CHANGE_SQUARED: Final = 16
#: what is judged by is the most frequent shapes that cover so many percent of the arrivals
TOP_PERCENT: Final = 95


#: what requests of one class have in common: mode, devices, vendor, models, memory of a device
_Class = tuple[int, int, GpuKind]


class Mix:
    """Counts arrivals. `version` grows when what `counts` says should be used anew.

    `counted_max` bounds the shapes, and the classes, that are counted.
    """

    __slots__ = (
        "_counted_max",
        "_drift_at",
        "_look_at",
        "_said",
        "_seen",
        "_since",
        "_squares",
        "_used",
        "_used_total",
        "counts",
        "total",
        "version",
    )

    def __init__(self, counted_max: int = COUNTED_MAX) -> None:
        self._counted_max = counted_max
        self.counts: dict[Shape, int] = {}
        self.total = 0
        self.version = 0
        self._seen = 0
        self._look_at = self._drift_at = LOOK_FIRST
        #: arrivals since the mix in use was taken, and the sum of squares of each job's: their variance, if by chance
        self._since: dict[_Class, int] = {}
        self._squares: dict[_Class, int] = {}
        self._said: dict[_Class, int] = {}  # `_used` by class
        self._used: dict[Shape, int] = {}
        self._used_total = 0

    def add(self, shape: Shape, replicas: int = 1) -> None:
        """So many requests of this shape arrived."""
        self.counts[shape] = self.counts.get(shape, 0) + UNIT * replicas
        self.total += UNIT * replicas
        key = _class_of(shape)
        self._since[key] = self._since.get(key, 0) + replicas
        self._squares[key] = self._squares.get(key, 0) + replicas * replicas
        self._seen += replicas
        if self._seen >= self._look_at:
            self._look()

    def _look(self) -> None:
        self._look_at = self._next(LOOK_EVERY)
        changed = self._class_changed()
        if changed or self.total >= 2 * UNIT * HALF_LIFE:
            self.counts = {shape: count // 2 for shape, count in self.counts.items() if count > 1}
        if len(self.counts) > self._counted_max:
            kept = sorted(self.counts.items(), key=lambda pair: -pair[1])[: self._counted_max // 2]
            self.counts = dict(kept)
        if len(self._since) > self._counted_max:
            self._forget_since()
        self.total = sum(self.counts.values())
        if changed or (self._seen >= self._drift_at and self._has_drifted()):
            self.use()

    def _next(self, every: int) -> int:
        """Return the arrival at which to look again, where that is done `every` so many in the long run."""
        return self._seen + (every if self._seen >= DRIFT_EVERY else max(LOOK_LEAST, self._seen // LOOK_PART))

    def _class_changed(self) -> bool:
        """Return whether some class came clearly more often since the mix in use was taken than that says."""
        used, total = self._used_total, sum(self._since.values())
        if not used:
            return False
        for key, came in self._since.items():
            expected = self._said.get(key, 0) * total // used
            gap, variance = came - expected, self._squares[key] + expected * UNIT * total // used
            if gap > 0 and gap * gap > CHANGE_SQUARED * variance:
                return True
        return False

    def _has_drifted(self) -> bool:
        self._drift_at = self._next(DRIFT_EVERY)
        return self._drift() * 100 >= DRIFT_PERCENT * self.total * max(1, self._used_total)

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
        self._said = _by_class(self._used)
        self._forget_since()
        self.version += 1

    def _forget_since(self) -> None:
        self._since.clear()
        self._squares.clear()

    def top(self) -> list[tuple[Shape, int]]:
        """Return the most frequent shapes in use that cover `TOP_PERCENT` of the arrivals, the most frequent first."""
        return most_frequent(self._used.items())

    def all(self) -> list[tuple[Shape, int]]:
        """Return every shape in use with its count."""
        return list(self._used.items())


def _class_of(shape: Shape) -> _Class:
    return (shape.mode, shape.count, shape.gpu_kind)


def _by_class(counted: dict[Shape, int]) -> dict[_Class, int]:
    """Summed up over the shapes of each class."""
    found: dict[_Class, int] = {}
    for shape, count in counted.items():
        key = _class_of(shape)
        found[key] = found.get(key, 0) + count
    return found


def most_frequent(counted: Iterable[tuple[Shape, int]], percent: int = TOP_PERCENT) -> list[tuple[Shape, int]]:
    """Return those that cover so many percent of all, the most frequent first; of those alike the first."""
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
