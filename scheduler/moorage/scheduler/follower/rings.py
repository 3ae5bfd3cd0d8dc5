"""Rings of numbers over time: a day and a month at fixed steps, or a whole life at steps that grow. Pure."""

from __future__ import annotations

import math
from array import array
from typing import Final, NamedTuple

DAY_MS: Final = 86_400_000
KEPT_MS: Final = 31 * DAY_MS
UNKNOWN: Final = math.nan
#: numbers of a life, and the ms of its first step: the step doubles whenever there would be more
LIFE_POINTS: Final = 240
LIFE_STEP_MS: Final = 10_000


class Steps(NamedTuple):
    """ms of a step: of the last day, and of the days before."""

    fine_ms: int
    coarse_ms: int

    @property
    def bytes(self) -> int:
        """Return what one series of such steps takes in memory."""
        return 4 * (DAY_MS // self.fine_ms + KEPT_MS // self.coarse_ms)


#: what is counted for the whole fleet, and what there is one of for each host, service or further tenant
CLOSE: Final = Steps(10_000, 300_000)
WIDE: Final = Steps(60_000, 3_600_000)


class Ring:
    """Numbers at fixed steps of ledger time; those older than its span are gone."""

    __slots__ = ("last", "step_ms", "values")

    def __init__(self, step_ms: int, span_ms: int) -> None:
        self.step_ms = step_ms
        self.values: array[float] = array("f", (UNKNOWN,)) * (span_ms // step_ms)
        self.last = -1  # the step of the newest number; negative: none

    def put(self, step: int, value: float) -> None:
        size = len(self.values)
        for gone in range(max(self.last + 1, step - size + 1), step):
            self.values[gone % size] = UNKNOWN
        self.values[step % size] = value
        self.last = step

    def between(self, first: int, end: int) -> array[float]:
        """Return the numbers of the steps from `first` on, up to `end`; what is not kept is unknown."""
        size = len(self.values)
        kept = range(max(first, self.last - size + 1), min(end, self.last + 1))
        if not kept:
            return array("f", (UNKNOWN,)) * (end - first)
        begin, stop = kept[0] % size, kept[-1] % size + 1
        found = self.values[begin:stop] if begin < stop else self.values[begin:] + self.values[:stop]
        before, behind = (array("f", (UNKNOWN,)) * count for count in (kept[0] - first, end - kept[-1] - 1))
        return before + found + behind


class Series:
    """A number over time: fine for a day, its means for a month."""

    __slots__ = ("coarse", "count", "fine", "sum")

    def __init__(self, steps: Steps) -> None:
        self.fine, self.coarse = Ring(steps.fine_ms, DAY_MS), Ring(steps.coarse_ms, KEPT_MS)
        self.sum, self.count = 0.0, 0

    @classmethod
    def of_zeros(cls, steps: Steps, beside: Series, at_ms: int) -> Series:
        """Return a series that is zero wherever `beside`, whose steps are no longer, has a number up to `at_ms`."""
        made = cls(steps)
        for ring, other in ((made.fine, beside.fine), (made.coarse, beside.coarse)):
            ring.last, times = at_ms // ring.step_ms, ring.step_ms // other.step_ms
            first = ring.last - len(ring.values) + 1
            numbers = other.between(first * times, (ring.last + 1) * times)
            for at in range(len(ring.values)):
                if any(value == value for value in numbers[at * times : (at + 1) * times]):
                    ring.values[(first + at) % len(ring.values)] = 0.0
        begin_ms = at_ms // steps.coarse_ms * steps.coarse_ms
        before = beside.fine.between(begin_ms // beside.fine.step_ms, at_ms // beside.fine.step_ms)
        made.count = sum(value == value for value in before)
        return made

    def copy(self, steps: Steps) -> Series:
        """Return a series of its own with the same numbers and `steps`."""
        made = Series(steps)
        for ring, own in ((made.fine, self.fine), (made.coarse, self.coarse)):
            ring.values, ring.last = own.values[:], own.last
        made.sum, made.count = self.sum, self.count
        return made

    def put(self, at_ms: int, value: float) -> None:
        step, wide = at_ms // self.fine.step_ms, at_ms // self.coarse.step_ms
        if self.fine.last >= 0 and self.fine.last * self.fine.step_ms // self.coarse.step_ms != wide:
            self.sum, self.count = 0.0, 0
        self.fine.put(step, value)
        if not math.isnan(value):
            self.sum, self.count = self.sum + value, self.count + 1
            self.coarse.put(wide, self.sum / self.count)

    def step_ms(self, span_ms: int) -> int:
        """Return the ms of a step in which so long a time is kept."""
        return (self.fine if span_ms <= DAY_MS else self.coarse).step_ms

    def over(self, from_ms: int, until_ms: int, each_ms: int) -> list[float | None]:
        """Return the means of steps of `each_ms`, from the one in which `from_ms` lies on; None for an unknown one.

        Where what is kept is coarser, its number stands in each of the steps that it spans.
        """
        ring = self.fine if until_ms - from_ms <= DAY_MS else self.coarse
        found: list[float | None] = []
        first = from_ms // each_ms * each_ms // ring.step_ms
        values = ring.between(first, until_ms // ring.step_ms + 1)
        for at_ms in range(from_ms // each_ms * each_ms, until_ms // each_ms * each_ms, each_ms):
            begin = at_ms // ring.step_ms - first
            step = values[begin : max(begin + 1, (at_ms + each_ms) // ring.step_ms - first)]
            known = [value for value in step if value == value]  # unknown is NaN, which equals nothing
            found.append(round(sum(known) / len(known), 3) if known else None)
        return found


class Life:
    """A number over a life of any length: `LIFE_POINTS` means at most, whose step doubles as the life goes on."""

    __slots__ = ("begin_ms", "count", "last_ms", "step_ms", "values")

    def __init__(self, begin_ms: int) -> None:
        self.begin_ms = begin_ms // LIFE_STEP_MS * LIFE_STEP_MS
        self.step_ms = LIFE_STEP_MS
        self.values: array[float] = array("f")
        self.count = 0  # numbers in the mean of the last step
        self.last_ms = begin_ms

    def put(self, at_ms: int, value: float) -> None:
        while (at := (at_ms - self.begin_ms) // self.step_ms) >= LIFE_POINTS:
            self._double()
        self.last_ms = at_ms
        if at == len(self.values) - 1:
            mean = self.values[at]
            self.values[at] = value if math.isnan(mean) else mean + (value - mean) / (self.count + 1)
            self.count += 1
        elif at >= len(self.values):
            self.values.extend([UNKNOWN] * (at - len(self.values)))
            self.values.append(value)
            self.count = 1

    def _double(self) -> None:
        values = self.values
        pairs = [(values[at], values[at + 1] if at + 1 < len(values) else UNKNOWN) for at in range(0, len(values), 2)]
        if len(values) % 2 == 0:
            self.count *= 2
        self.values = array("f", (_mean(pair) for pair in pairs))
        self.step_ms *= 2

    def over(self, begin_ms: int, step_ms: int, count: int) -> list[float | None]:
        """Return `count` numbers at a step that is this one's or longer; None for an unknown one."""
        found: list[float | None] = []
        for at in range(count):
            first = (begin_ms + at * step_ms - self.begin_ms) // self.step_ms
            own = range(max(0, first), min(len(self.values), first + max(1, step_ms // self.step_ms)))
            known = [self.values[step] for step in own if not math.isnan(self.values[step])]
            found.append(sum(known) / len(known) if known else None)
        return found


def _mean(pair: tuple[float, float]) -> float:
    known = [value for value in pair if not math.isnan(value)]
    return sum(known) / len(known) if known else UNKNOWN
