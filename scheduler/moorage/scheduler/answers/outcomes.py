"""Counts how jobs ended, for monitors and screens: by tenant and final state, and which failed lately.

Soft state: the counts begin at zero in each term, like counters in Prometheus. Bounded by tenants, states and jobs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from moorage.scheduler.answers.waited import OTHERS, TENANTS_MAX
from moorage.scheduler.core.ledger.state import Job
from moorage.schemas.frames import FailedLately
from moorage.schemas.job import EXPIRED, FAILED, TIMED_OUT

#: final states of jobs that did not do their work, though nobody ended them
FAILURES: Final = frozenset((FAILED, TIMED_OUT, EXPIRED))
#: how long a failure is one of the last, and how many are kept
LATELY_MS: Final = 3_600_000
KEPT_MAX: Final = 5_000


class Outcomes:
    """How many jobs of a term ended in which state, by tenant; the first tenants of the term by name."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}
        self._failed: deque[tuple[int, str, str, str]] = deque(maxlen=KEPT_MAX)  # when, tenant, job, state

    def add(self, ended: Iterable[Job], time_ms: int) -> None:
        """Count jobs that have just ended, at this time of the ledger."""
        for job in ended:
            name = job.tenant if job.tenant in self._counts or len(self._counts) < TENANTS_MAX else OTHERS
            row = self._counts.setdefault(name, {})
            row[job.state] = row.get(job.state, 0) + 1
            if job.state in FAILURES:
                self._failed.append((time_ms, job.tenant, job.name, job.state))

    def as_data(self) -> dict[str, dict[str, int]]:
        """Return the counts by tenant and state."""
        return {tenant: dict(row) for tenant, row in sorted(self._counts.items())}

    def failed_lately(self, time_ms: int) -> list[FailedLately]:
        """Return the tenants whose jobs failed within the last hour, the one with the last failure first."""
        while self._failed and time_ms - self._failed[0][0] > LATELY_MS:
            self._failed.popleft()
        jobs: dict[str, int] = {}
        last: dict[str, tuple[int, str, str]] = {}
        for at_ms, tenant, job, state in reversed(self._failed):
            jobs[tenant] = jobs.get(tenant, 0) + 1
            last.setdefault(tenant, (at_ms, job, state))
        return [
            FailedLately(tenant, jobs[tenant], job, state, time_ms - at_ms)
            for tenant, (at_ms, job, state) in last.items()
        ]
