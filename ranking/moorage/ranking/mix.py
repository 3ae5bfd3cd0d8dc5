"""The request mix: how often each shape arrives, learned from arrivals; old arrivals fade.

Counts are integers, and all are halved every `HALF_LIFE` arrivals, so the mix depends only on the order of arrivals: no
clock, no float. Rankers use a snapshot of it, which changes rarely: when the mix has drifted (checked more often in the
beginning), or when a class of requests arrives clearly more often than the snapshot predicts. In that second case all
counts are halved, so that newer arrivals weigh more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from moorage.scheduler.core.fleet.shape import GpuKind, Shape

#: after this many arrivals, everything counted before counts half
HALF_LIFE: Final = 16_384
#: what one arrival adds, so that a shape seen once survives some halvings
UNIT: Final = 16
#: the most shapes counted; beyond it the rarest half is dropped. Also the most classes counted since the snapshot;
#: beyond it all are dropped, so a class that becomes more frequent is noticed later
COUNTED_MAX: Final = 8_192
#: arrivals before the first check; then a check each time this part more has arrived, at least `LOOK_LEAST`; from
#: `DRIFT_EVERY` arrivals on, every `LOOK_EVERY` for classes and every `DRIFT_EVERY` for drift. A new snapshot means
#: that every host is scored again for every shape
LOOK_FIRST: Final = 32
LOOK_LEAST: Final = 64
LOOK_PART: Final = 4
LOOK_EVERY: Final = 1_024
DRIFT_EVERY: Final = 4_096
#: a drift of less than this many percent of all arrivals keeps the snapshot
DRIFT_PERCENT: Final = 4
#: a class has become more frequent beyond this many standard deviations, squared: 17 single arrivals of an unknown
#: class suffice, one job of any number of replicas does not
CHANGE_SQUARED: Final = 16
#: only the most frequent shapes that cover this many percent of arrivals are used
TOP_PERCENT: Final = 95


#: what requests of one class have in common: mode, devices, and `gpu_kind`
_Class = tuple[int, int, GpuKind]


class Mix:
    """Counts arrivals. `version` grows when a new snapshot is taken.

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
        #: arrivals since the snapshot, and the sum of squares over jobs: their variance if arrivals are random
        self._since: dict[_Class, int] = {}
        self._squares: dict[_Class, int] = {}
        self._said: dict[_Class, int] = {}  # the snapshot by class
        self._used: dict[Shape, int] = {}
        self._used_total = 0

    def add(self, shape: Shape, replicas: int = 1) -> None:
        """Count the arrival of a job with `replicas` replicas of this shape."""
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
        """Return the arrival count at which to check again; `every` is the interval in the long run."""
        return self._seen + (every if self._seen >= DRIFT_EVERY else max(LOOK_LEAST, self._seen // LOOK_PART))

    def _class_changed(self) -> bool:
        """Return whether some class arrived clearly more often since the snapshot than the snapshot predicts."""
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
        """Return half the sum of differences between the current mix and the snapshot, times both totals.

        Without a snapshot, return the current total.
        """
        now, used = self.total, self._used_total
        if not used:
            return now
        both = self.counts.keys() | self._used.keys()
        return sum(abs(self.counts.get(s, 0) * used - self._used.get(s, 0) * now) for s in both) // 2

    def use(self) -> None:
        """Take a snapshot of the current counts, which `top` and `all` return from now on, and raise `version`."""
        self._used, self._used_total = dict(self.counts), self.total
        self._said = _by_class(self._used)
        self._forget_since()
        self.version += 1

    def _forget_since(self) -> None:
        self._since.clear()
        self._squares.clear()

    def top(self) -> list[tuple[Shape, int]]:
        """Return the most frequent shapes of the snapshot that cover `TOP_PERCENT` of arrivals, most frequent first."""
        return most_frequent(self._used.items())

    def all(self) -> list[tuple[Shape, int]]:
        """Return every shape of the snapshot with its count."""
        return list(self._used.items())


def _class_of(shape: Shape) -> _Class:
    return (shape.mode, shape.count, shape.gpu_kind)


def _by_class(counted: dict[Shape, int]) -> dict[_Class, int]:
    """Return the sums over the shapes of each class."""
    found: dict[_Class, int] = {}
    for shape, count in counted.items():
        key = _class_of(shape)
        found[key] = found.get(key, 0) + count
    return found


def most_frequent(counted: Iterable[tuple[Shape, int]], percent: int = TOP_PERCENT) -> list[tuple[Shape, int]]:
    """Return the items that cover `percent` percent of all, most frequent first; equal counts keep their order."""
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
