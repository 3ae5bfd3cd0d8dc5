"""Counts the GPUs of a tenant of which nothing says when they come free: those of services, say.

A job that needs more than its tenant's limit leaves it holds up the tenant's later jobs, or they would take the GPUs
that come free one by one. But it must not wait, with all others behind it, for what may never end. That is the rule for
hosts too: a reservation counts only on ends that are known. What an attempt has in quarantine, or a job that is kept
through a partition, may never come free either.
"""

from __future__ import annotations

import math
from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.ledger.state import AT_EXITED, LEAVING, LOST_KEPT, Attempt, State
from moorage.scheduler.core.schedule.runtime import Estimates

#: ledger ms between two counts: one for each worker, since a count reads all attempts, and at most so many
COUNT_MS: Final = 1_000


class Endless:
    """The counts of all tenants with a limit, at most a second old."""

    def __init__(self, state: State, estimates: Estimates) -> None:
        self._state = state
        self._estimates = estimates
        self._gpus: dict[str, int] = {}
        self._at: tuple[int, int] | None = None  # the state's digest, and the ledger ms, of the last count

    def of(self, draft: Draft, tenant: str) -> int:
        """Return how many GPUs of a tenant with a limit have no known end."""
        at, digest, now_ms = self._at, draft.digest, draft.time_ms
        if at is None or (at[0] != digest and now_ms >= at[1] + _pause_ms(draft.state)):
            self._at = digest, now_ms
            self._gpus = self._count(draft.state, now_ms)
        return self._gpus.get(tenant, 0)

    def next_ms(self) -> float:
        """Return from which ledger ms on a count may have another result though nothing happens; infinity for never."""
        at = self._at
        return math.inf if at is None or at[0] == self._state.digest else at[1] + _pause_ms(self._state)

    def _count(self, state: State, now_ms: int) -> dict[str, int]:
        limited = {tenant.name for tenant in state.tenants.values() if tenant.gpus_max}
        found = dict.fromkeys(limited, 0)
        for attempt in state.attempts():
            tenant = attempt.replica.job.tenant
            if tenant in limited and attempt.mask and not self._ends(attempt, now_ms):
                found[tenant] += attempt.mask.bit_count()
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
