"""Counts how jobs ended, for monitors: by tenant and final state.

Soft state: the counts begin at zero in each term, like counters in Prometheus. Bounded by tenants and states.
"""

from __future__ import annotations

from collections.abc import Iterable

from moorage.scheduler.core.ledger.state import Job
from moorage.scheduler.core.queue.waited import OTHERS, TENANTS_MAX


class Outcomes:
    """How many jobs of a term ended in which state, by tenant; the first tenants of the term by name."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}

    def add(self, ended: Iterable[Job]) -> None:
        """Count jobs that have just ended."""
        for job in ended:
            name = job.tenant if job.tenant in self._counts or len(self._counts) < TENANTS_MAX else OTHERS
            row = self._counts.setdefault(name, {})
            row[job.state] = row.get(job.state, 0) + 1

    def as_data(self) -> dict[str, dict[str, int]]:
        """Return the counts by tenant and state."""
        return {tenant: dict(row) for tenant, row in sorted(self._counts.items())}
