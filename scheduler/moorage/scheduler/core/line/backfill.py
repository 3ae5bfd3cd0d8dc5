"""How long what runs goes on, and how long what waits would run: from time limits, else from what was learned.

Backfill is on the safe side both ways: whoever would pass a reservation counts with the most that it may take, what
the reservation waits for with what it takes as a rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from moorage.scheduler.core.line.durations import Durations, Groups, groups_of, workload_of
from moorage.scheduler.core.shape import Shape
from moorage.scheduler.core.state import AT_RUNNING, PLACED, RUNNING, Job, Member
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
        after = _after_ms(request)
        if run.timeout_s is not None:
            return int(run.timeout_s * 1000) + after
        found = self.durations.estimate(tenant, workload_of(request), shape, None, accepted_ms)
        return found.p90_ms + after if found is not None else None

    def even_ms(self, tenant: str, request: Request, shape: Shape, accepted_ms: int) -> int | None:
        """How long a member holds its devices at even odds, as `most_ms`; None where a sibling's run tells more."""
        workload = workload_of(request)
        if self.durations.knows_siblings(tenant, workload, shape, accepted_ms):
            return None
        limit_s = request.workload.timeout_s
        limit_ms = None if limit_s is None else int(limit_s * 1000)
        found = self.durations.estimate(tenant, workload, shape, limit_ms)
        return found.p50_ms + _after_ms(request) if found is not None else None

    def end_ms(self, member: Member, now_ms: int) -> tuple[int, bool]:
        """(the ledger ms at which a member is expected to end, whether anything tells)."""
        runs_as = self.runs_as(member)
        since_ms = runs_as.since_ms
        if since_ms < 0:
            found = _since(member)
            since_ms = now_ms if found is None else found
        elapsed = now_ms - since_ms if now_ms > since_ms else 0
        accepted_ms = member.replica.job.accepted_ms
        left_ms = self.durations.half_left_ms(runs_as.groups, elapsed, runs_as.limit_ms, accepted_ms)
        if left_ms is not None:
            return now_ms + left_ms, True
        return now_ms + max(elapsed, UNKNOWN_MS), False

    def runs_as(self, member: Member) -> RunsAs:
        """What tells the end of a member, looked up once for all that stays as it is."""
        job = member.replica.job
        found: RunsAs | None = member.runs_as
        if found is None or found.shape is not job.shape:
            found = member.runs_as = self._read(job)
        if found.since_ms < 0 and member.phase >= AT_RUNNING and (since_ms := _since(member)) is not None:
            found.since_ms = since_ms
        return found

    def _read(self, job: Job) -> RunsAs:
        request, shape = self.request_of(job), self.shape_of(job)
        limit_s = request.workload.timeout_s
        limit_ms = None if limit_s is None else int(limit_s * 1000)
        return RunsAs(shape, groups_of(job.tenant, workload_of(request), shape), limit_ms, request.priority)


def _after_ms(request: Request) -> int:
    """For how long it may still hold its devices once its time is over."""
    return int(request.workload.grace_s * 1000) + FREED_MS


class RunsAs:
    """How a member runs, as far as that tells its end: thousands are asked for at one look.

    `since_ms` is the ledger ms since which it runs; -1 before it does, and where its story does not tell.
    """

    __slots__ = ("groups", "limit_ms", "priority", "shape", "since_ms")

    def __init__(self, shape: Shape, groups: Groups, limit_ms: int | None, priority: int) -> None:
        self.shape = shape
        self.groups = groups
        self.limit_ms = limit_ms
        self.priority = priority  # that it was asked for with
        self.since_ms = -1


def began_ms(member: Member, now_ms: int) -> int:
    """Since which ledger ms a member runs, else since when it is placed; now where its story tells neither."""
    since_ms = _since(member)
    return now_ms if since_ms is None else since_ms


def _since(member: Member) -> int | None:
    """As `began_ms`; None where its story tells neither."""
    for row in reversed(member.replica.job.story):
        if row[2] == member.replica.index and row[9] == member.fence and row[4] in (RUNNING, PLACED):
            since_ms: int = row[1]
            return since_ms
    return None
