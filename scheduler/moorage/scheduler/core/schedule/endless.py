"""Counts what a tenant has of which nothing says when it comes free: the GPUs, cores and memory of services, say.

A job that needs more than its tenant's limit leaves it holds up the tenant's later jobs, or they would take the GPUs
that come free one by one. But it must not wait, with all others behind it, for what may never end. That is the rule for
hosts too: a reservation counts only on ends that are known. What an attempt has in quarantine, or a job that is kept
through a partition, may never come free either.
"""

from __future__ import annotations

import math
from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.ledger.holding import devices_of, needs_of
from moorage.scheduler.core.ledger.limits import Used
from moorage.scheduler.core.ledger.state import AT_EXITED, LEAVING, LOST_KEPT, Attempt, State
from moorage.scheduler.core.queue.limits import is_limited
from moorage.scheduler.core.queue.models import is_limited as is_by_model
from moorage.scheduler.core.schedule.runtime import Estimates

#: ledger ms between two counts: one for each worker, since a count reads all attempts, and at most so many
COUNT_MS: Final = 1_000


class Endless:
    """The counts of all tenants with a limit, at most a second old."""

    def __init__(self, state: State, estimates: Estimates) -> None:
        self._state = state
        self._estimates = estimates
        self._has: dict[str, tuple[int, ...]] = {}
        self._devices: dict[str, Used] = {}
        self._at: tuple[int, int] | None = None  # the state's digest, and the ledger ms, of the last count

    def of(self, draft: Draft, tenant: str) -> tuple[int, ...]:
        """Return how many GPUs, cores in thousandths and MiB of a tenant with a limit have no known end."""
        at, digest, now_ms = self._at, draft.digest, draft.time_ms
        if at is None or (at[0] != digest and now_ms >= at[1] + _pause_ms(draft.state)):
            self._at = digest, now_ms
            self._has = self._count(draft.state, now_ms)
        return self._has.get(tenant, (0, 0, 0))

    def devices(self, draft: Draft, tenant: str) -> Used:
        """Return how many devices of each name a tenant with limits beside GPUs has of which no end is known."""
        self.of(draft, tenant)
        return self._devices.get(tenant, {})

    def next_ms(self) -> float:
        """Return from which ledger ms on a count may have another result though nothing happens; infinity for never."""
        at = self._at
        return math.inf if at is None or at[0] == self._state.digest else at[1] + _pause_ms(self._state)

    def _count(self, state: State, now_ms: int) -> dict[str, tuple[int, ...]]:
        limited = {tenant.name: tenant for tenant in state.tenants.values() if is_limited(tenant)}
        found: dict[str, tuple[int, ...]] = dict.fromkeys(limited, (0, 0, 0))
        by_model: dict[str, list[Attempt]] = {name: [] for name, tenant in limited.items() if is_by_model(tenant)}
        for attempt in state.attempts():
            tenant = attempt.replica.job.tenant
            has_any = tenant in limited and (attempt.mask or limited[tenant].limits is not None)
            if has_any and not self._ends(attempt, now_ms):
                gpus, cores, memory = found[tenant]
                beside = (
                    (0, 0, False)
                    if limited[tenant].limits is None
                    else needs_of(attempt.replica.job, attempt.replica.index)
                )
                found[tenant] = gpus + attempt.mask.bit_count(), cores + beside[0], memory + beside[1]
                if tenant in by_model:
                    by_model[tenant].append(attempt)
        self._devices = {tenant: devices_of(attempts) for tenant, attempts in by_model.items()}
        return found

    def _ends(self, attempt: Attempt, now_ms: int) -> bool:
        if attempt.phase == AT_EXITED:
            return not attempt.worker.quarantined & attempt.home  # else it keeps all it has until an operator's word
        if attempt.replica.state == LOST_KEPT:
            return False  # its worker may never come back
        if attempt.replica.state in LEAVING:
            return True
        return self._estimates.end_ms(attempt, now_ms) is not None


def _pause_ms(state: State) -> int:
    return min(COUNT_MS, len(state.worker_by_num))
