"""Tells since when a member runs. Time in which it was frozen counts, as it does for its limits."""

from __future__ import annotations

from moorage.scheduler.core.state import AT_MS, FENCE, PLACED, REPLICA, RUNNING, STATE, Member


def began_ms(member: Member, unknown: int) -> int:
    """Return the ledger ms of a member's first start, or else of its placement; `unknown` if its story has neither."""
    began = unknown
    for row in reversed(member.replica.job.story):
        if row[REPLICA] == member.replica.index and row[FENCE] == member.fence:
            if row[STATE] == RUNNING:
                began = row[AT_MS]
            elif row[STATE] == PLACED:
                return row[AT_MS] if began == unknown else began
    return began
