"""How long what runs goes on, and how long what waits would run: from time limits, else from what was learned.

Backfill is on the safe side both ways: whoever would pass a reservation counts with the most that it may take, what
the reservation waits for with what it takes as a rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from moorage.scheduler.core.line.durations import Durations, workload_of
from moorage.scheduler.core.shape import Shape
from moorage.scheduler.core.state import PLACED, RUNNING, Job, Member
from moorage.schemas.job import Request

#: entries of one line that are looked at behind a first one that a reservation bars
DEPTH_MAX: Final = 64
#: what nothing is known of is taken to go on as long as it has, and at least so long
UNKNOWN_MS: Final = 60_000
#: the end of a process, and its memory seen free
FREED_MS: Final = 2_000


class Estimates:
    """Over one state's jobs, with what was learned of how long work runs."""

    def __init__(
        self, request_of: Callable[[Job], Request], shape_of: Callable[[Job], Shape], durations: Durations
    ) -> None:
        self.request_of = request_of
        self.shape_of = shape_of
        self.durations = durations

    def most_ms(self, tenant: str, request: Request, shape: Shape, accepted_ms: int) -> int | None:
        """How long a member holds its devices at most, its grace and the freeing of memory too; None: no bound.

        By its time limit, else nine of ten such runs; `accepted_ms` is when its job was accepted.
        """
        run = request.workload
        after = int(run.grace_s * 1000) + FREED_MS
        if run.timeout_s is not None:
            return int(run.timeout_s * 1000) + after
        found = self.durations.estimate(tenant, workload_of(request), shape, None, accepted_ms)
        return found.p90_ms + after if found is not None else None

    def end_ms(self, member: Member, now_ms: int) -> tuple[int, bool]:
        """(the ledger ms at which a member is expected to end, whether anything tells)."""
        job = member.replica.job
        request = self.request_of(job)
        run = request.workload
        began = began_ms(member, now_ms)
        elapsed = max(0, now_ms - began)
        limit = int(run.timeout_s * 1000) if run.timeout_s is not None else None
        found = self.durations.remaining(
            job.tenant, workload_of(request), self.shape_of(job), elapsed, limit, job.accepted_ms
        )
        if found is not None:
            return now_ms + found.p50_ms, True
        return now_ms + max(elapsed, UNKNOWN_MS), False


def began_ms(member: Member, now_ms: int) -> int:
    """Since which ledger ms a member runs, else since when it is placed; now where its story tells neither."""
    placed = now_ms
    for row in reversed(member.replica.job.story):
        if row[2] == member.replica.index and row[9] == member.fence:
            if row[4] == RUNNING:
                return row[1]
            if row[4] == PLACED:
                placed = row[1]
                break
    return placed
