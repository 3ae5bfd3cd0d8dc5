"""Combines several simulated futures (looks) into one forecast: a median, and the interval for eight of ten cases.

One look with the median of every run is wrong where many runs follow each other: the sum of medians is not the median
of the sum, and far too early for runs that are mostly short and sometimes long. So each look draws each job's run time.
The draws are a Latin hypercube (McKay, Beckman and Conover, 1979): quantiles are cut into as many equal parts as there
are looks, and over all looks a job's replica is drawn once from each part. If a job waits for a single end, the looks
are exactly the quantiles of that end; if it waits for many, they differ as sums of such runs do.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final, NamedTuple

#: a prime, so that every step below it visits all parts; the middles of five parts are 10, 30, 50, 70 and 90 %
LOOKS: Final = 5
#: indexes into the sorted outcomes: the median, and the bound for nine of ten
_MEDIAN: Final = LOOKS // 2
_LAST: Final = LOOKS - 1


class Outcome(NamedTuple):
    """When something happens in one look, in ms from now; `detail` goes with it.

    `limited` says that it waits for an end of which only a time limit is known, so it may happen earlier.
    """

    in_ms: int
    detail: tuple[str, int] = ("", 0)
    limited: bool = False


class Band(NamedTuple):
    """Median `p50_ms`, and in eight of ten cases from `p10_ms` to `p90_ms`; `detail` is that of the median look.

    `p90_ms` is -1 if not every look has an outcome; then, and if a look is `limited`, `p10_ms` is -1, too.
    """

    p10_ms: int
    p50_ms: int
    p90_ms: int
    detail: tuple[str, int]


def part_of(look: int, tenant: str, job: str, replica: int = 0) -> int:
    """Return the part of the quantiles that a look draws from for a job's replica, 0 for the shortest runs.

    Replicas differ as jobs do: else all of a sweep would be short in one look, and all long in the next one.
    """
    drawn = zlib.crc32(f"{tenant} {job}{f' {replica}' if replica else ''}".encode())
    step, first = 1 + drawn % (LOOKS - 1), drawn // (LOOKS - 1)
    return (step * look + first) % LOOKS


def middle(part: int) -> int:
    """Return the middle of a part, in percent."""
    return 50 * (2 * part + 1) // LOOKS


def somewhere_in(part: int, look: int, tenant: str, job: str, replica: int = 0) -> int:
    """Return a percent within a part that looks random, but is always the same for these arguments.

    So the longest of many runs are drawn too.
    """
    drawn = zlib.crc32(f"{look} {tenant} {job}{f' {replica}' if replica else ''}".encode())
    return (100 * part + drawn % 100) // LOOKS


def band(outcomes: Sequence[Outcome]) -> Band | None:
    """Return the band of all looks, some of which may be missing; None if fewer than half have an outcome."""
    if len(outcomes) <= _MEDIAN:
        return None
    ordered = sorted(outcomes)
    p50_ms, detail = ordered[_MEDIAN].in_ms, ordered[_MEDIAN].detail
    if len(ordered) <= _LAST:
        return Band(-1, p50_ms, -1, detail)
    first_ms, last_ms = ordered[0].in_ms, ordered[_LAST].in_ms
    return Band(-1 if any(each.limited for each in ordered) else first_ms, p50_ms, last_ms, detail)
