"""The trend of a noisy figure: Theil and Sen's slope of the medians of blocks, and how sure it is.

Resident memory moves in steps and back: least squares over some samples follows a single step. The median of the slopes
between all pairs of blocks does not (Sen 1968); its error is the interval of Kendall's statistic. Medians of blocks,
since samples that stand close together say the same thing twice.
"""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Final, NamedTuple

#: of a run, at most so many blocks, and at least so many for a verdict
BLOCKS_MAX: Final = 40
BLOCKS_MIN: Final = 8
#: of the two-sided interval: 95 of 100
Z: Final = 1.96


class Trend(NamedTuple):
    """Change of the value an hour: the slope, and between what it lies for 95 of 100."""

    an_hour: float
    low: float
    high: float

    def verdict(self, bound: float) -> str:
        """`kept` below the bound, `broken` above it, `unclear` where the interval holds it: then run longer."""
        if self.high < bound:
            return "kept"
        return "broken" if self.low >= bound else "unclear"


def trend(samples: list[tuple[float, float]]) -> Trend:
    """Of (seconds, value) in order of time. Raises ValueError for fewer than `BLOCKS_MIN` samples."""
    if len(samples) < BLOCKS_MIN:
        raise ValueError(f"a trend needs {BLOCKS_MIN} samples after the warm-up, found {len(samples)}: run longer")
    blocks = list(_blocks(samples))
    slopes = sorted(
        (later[1] - earlier[1]) / (later[0] - earlier[0]) * 3600 for earlier, later in itertools.combinations(blocks, 2)
    )
    count = len(blocks)
    apart = Z * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(0, math.floor((len(slopes) - apart) / 2) - 1)
    high = min(len(slopes) - 1, math.ceil((len(slopes) + apart) / 2))
    return Trend(statistics.median(slopes), slopes[low], slopes[high])


def _blocks(samples: list[tuple[float, float]]) -> list[tuple[float, float]]:
    count = min(BLOCKS_MAX, len(samples))
    edges = [round(number * len(samples) / count) for number in range(count + 1)]
    parts = [samples[first:end] for first, end in itertools.pairwise(edges)]
    return [(statistics.median([t for t, _ in part]), statistics.median([v for _, v in part])) for part in parts]
