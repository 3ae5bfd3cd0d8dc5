"""Tells since when a member runs. Time in which it was frozen counts, as it does for its limits."""

from __future__ import annotations

from moorage.scheduler.core.ledger.state import AT_MS, FENCE, PLACED, REPLICA, RUNNING, STATE, Job, Member


def began_ms(member: Member, unknown: int) -> int:
    """Return the ledger ms of a member's first start, or else of its placement; `unknown` if its story has neither."""
    began: int | None = None
    for row in reversed(member.replica.job.story):
        if row[REPLICA] == member.replica.index and row[FENCE] == member.fence:
            if row[STATE] == RUNNING:
                began = row[AT_MS]
            elif row[STATE] == PLACED:
                return row[AT_MS] if began is None else began
    return unknown if began is None else began


def begins_of(job: Job) -> dict[tuple[int, int], int]:
    """Return the same for all attempts in a job's story, by (replica, fence), in one pass."""
    begins: dict[tuple[int, int], int] = {}
    runs: set[tuple[int, int]] = set()
    for row in job.story:
        key = row[REPLICA], row[FENCE]
        if row[STATE] == PLACED or (row[STATE] == RUNNING and key not in runs):
            begins[key] = row[AT_MS]
            if row[STATE] == RUNNING:
                runs.add(key)
    return begins
