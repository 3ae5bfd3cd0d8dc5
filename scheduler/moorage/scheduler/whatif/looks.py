"""Several looks ahead in place of one, and what they tell together: a median, and what nine of ten stay within.

With the median for every run a look is wrong where many runs follow each other: the sum of medians is no median of
the sum, and of runs that are mostly short and sometimes long it is far too early. So each look draws how long each job
runs. The draws are a Latin hypercube (McKay, Beckman and Conover, 1979): the quantiles are cut in as many equal parts
as there are looks, and over all looks a job is drawn once from each part. For what waits for one end alone, the looks
are then exactly the quantiles of that one; for what waits for many, they differ as sums of such runs do.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final, NamedTuple

#: a prime, so that every step below it goes through all parts; of five parts the middles are 10, 30, 50, 70 and 90 %
LOOKS: Final = 5
#: in the order of the looks' outcomes: the middle one, and the one that nine of ten stay within
_MEDIAN: Final = LOOKS // 2
_LAST: Final = LOOKS - 1


class Outcome(NamedTuple):
    """When something happens by one look: in so many ms; `detail` is what goes with it."""

    in_ms: int
    detail: tuple[str, int] = ("", 0)


class Band(NamedTuple):
    """With even odds within `p50_ms`, nine times in ten within `p90_ms`; -1 where too few looks came so far."""

    p50_ms: int
    p90_ms: int
    detail: tuple[str, int]


def part_of(look: int, tenant: str, job: str) -> int:
    """From which part of the quantiles a look draws for a job, 0 the shortest runs; the same for all its replicas."""
    drawn = zlib.crc32(f"{tenant} {job}".encode())
    step, first = 1 + drawn % (LOOKS - 1), drawn // (LOOKS - 1)
    return (step * look + first) % LOOKS


def middle(part: int) -> int:
    """Return the middle of a part, in percent."""
    return 50 * (2 * part + 1) // LOOKS


def somewhere_in(part: int, look: int, tenant: str, job: str) -> int:
    """Any percent within a part: of many jobs the longest runs are drawn, too, that no middle is."""
    return (100 * part + zlib.crc32(f"{look} {tenant} {job}".encode()) % 100) // LOOKS


def band(outcomes: Sequence[Outcome]) -> Band | None:
    """Return what looks tell together, of which some may not have come so far; None where fewer than half have."""
    if len(outcomes) <= _MEDIAN:
        return None
    ordered = sorted(outcomes)
    p90_ms = ordered[_LAST].in_ms if len(ordered) > _LAST else -1
    return Band(ordered[_MEDIAN].in_ms, p90_ms, ordered[_MEDIAN].detail)
