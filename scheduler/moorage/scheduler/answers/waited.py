"""Counts how long jobs waited from acceptance to first start, for monitors: by tenant, and by GPUs asked for.

Soft state: the counts begin at zero in each term, like counters in Prometheus. Bounded by tenants, classes and buckets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from moorage.scheduler.core.fleet.host import EXCLUSIVE
from moorage.scheduler.core.fleet.shape import Shape

#: upper bounds of the buckets in ledger ms; longer waits are in one more bucket
BUCKETS_MS: Final = (100, 1_000, 10_000, 60_000, 600_000, 3_600_000, 21_600_000, 86_400_000)
#: the first tenants of the term are counted separately, up to this many; all others together, under a name that no
#: tenant has
TENANTS_MAX: Final = 200
OTHERS: Final = "(others)"


class Waited:
    """The waits of a term. For each tenant and class, one list: jobs by bucket, then the sum of their waits in ms."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._tenants: set[str] = set()

    def add(self, started: Iterable[tuple[str, Shape, int]]) -> None:
        """Count first starts, given as (tenant, shape, ms since acceptance)."""
        for (tenant, shape, ms), jobs in Counter(started).items():  # jobs of one record are mostly alike
            counts = self._row(tenant, shape)
            counts[bisect_left(BUCKETS_MS, ms)] += jobs
            counts[-1] += ms * jobs

    def _row(self, tenant: str, shape: Shape) -> list[int]:
        counts = self._counts.get((tenant, class_of(shape)))
        if counts is not None:
            return counts
        if len(self._tenants) < TENANTS_MAX:
            self._tenants.add(tenant)
        key = (tenant if tenant in self._tenants else OTHERS, class_of(shape))
        return self._counts.setdefault(key, [0] * (len(BUCKETS_MS) + 2))

    def as_data(self) -> dict[str, Any]:
        """Return the bucket bounds, and by tenant and class the jobs in each bucket and the sum of waits, in seconds.

        One more bucket has the jobs that waited longer than the last bound.
        """
        rows = [
            {"tenant": tenant, "gpus": gpus, "jobs": counts[:-1], "sum_s": counts[-1] / 1000}
            for (tenant, gpus), counts in sorted(self._counts.items())
        ]
        return {"buckets_s": [ms / 1000 for ms in BUCKETS_MS], "rows": rows}


def class_of(shape: Shape) -> str:
    """Return the class of a shape, as in `moorage simulate`: by the GPUs that it needs at once, or that it shares."""
    gpus = shape.gpus
    if gpus == 1:
        return "1" if shape.mode <= EXCLUSIVE else "share"
    if not gpus:
        return "none"
    if shape.mode > EXCLUSIVE:
        return "share"
    return "2-7" if gpus < 8 else "8+"
