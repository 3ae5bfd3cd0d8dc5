"""Returns since when an attempt runs. Time in which it was frozen counts, as it does for its limits."""

from __future__ import annotations

from moorage.scheduler.core.ledger.state import AT_MS, FENCE, PLACED, REPLICA, RUNNING, STATE, Attempt, Job


def began_ms(attempt: Attempt, unknown: int) -> int:
    """Return the ledger ms of an attempt's first start, or else of its placement; `unknown` if the history has
    neither."""
    began: int | None = None
    for row in reversed(attempt.replica.job.history):
        if row[REPLICA] == attempt.replica.index and row[FENCE] == attempt.fence:
            if row[STATE] == RUNNING:
                began = row[AT_MS]
            elif row[STATE] == PLACED:
                return row[AT_MS] if began is None else began
    return unknown if began is None else began


def begins_of(job: Job) -> dict[tuple[int, int], int]:
    """Return the same for all attempts in a job's history, by (replica, fence), in one pass."""
    begins: dict[tuple[int, int], int] = {}
    runs: set[tuple[int, int]] = set()
    for row in job.history:
        key = row[REPLICA], row[FENCE]
        if row[STATE] == PLACED or (row[STATE] == RUNNING and key not in runs):
            begins[key] = row[AT_MS]
            if row[STATE] == RUNNING:
                runs.add(key)
    return begins
