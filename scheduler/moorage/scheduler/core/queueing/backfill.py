"""How long what runs goes on, and how long what waits would run: from time limits, else from what was learned.

Backfill is on the safe side both ways: whoever would pass a reservation counts with the most that it may take, what
the reservation waits for with what it takes as a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from moorage.scheduler.core.queueing.durations import Durations, Groups, groups_of, workload_of
from moorage.scheduler.core.shape import Shape
from moorage.scheduler.core.shared_values import SharedCount
from moorage.scheduler.core.state import AT_MS, AT_RUNNING, FENCE, PLACED, REPLICA, RUNNING, STATE, Job, Member
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
        after, limit_ms = after_ms(request), _limit_ms(request)
        if limit_ms is not None:
            return limit_ms + after
        found = self.durations.estimate(tenant, workload_of(request), shape, None, accepted_ms)
        return found.p90_ms + after if found is not None else None

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

    def ends_of(self, members: Iterable[Member], now_ms: int) -> list[tuple[int, bool, int]]:
        """(`end_ms`, whether anything tells, devices) of what runs, but for what its worker no longer shows."""
        found: list[tuple[int, bool, int]] = []
        for member in members:
            if member.missed:
                continue
            known: RunsAs | None = member.runs_as
            if (
                known is None
                or known.until_ms < now_ms
                or known.told is None
                or known.told.count != known.told_at
                or known.shape is not member.replica.job.shape
            ):
                found.append((*self.end_ms(member, now_ms), member.mask))
                self._note(member, now_ms)
            elif known.end_ms < 0:
                found.append((2 * now_ms - known.since_ms, True, member.mask))
            else:
                found.append((known.end_ms, True, member.mask))
        return found

    def _note(self, member: Member, now_ms: int) -> None:
        """Until when what was found of a member's end holds: at most looks nothing new is known of it."""
        runs_as = self.runs_as(member)
        if runs_as.since_ms < 0:
            return
        if runs_as.told is None:
            runs_as.told = self.durations.told(*runs_as.groups[0][:2])
        elif runs_as.until_ms < 0 and runs_as.told.count == runs_as.told_at:
            return  # nothing did, and nothing new is known
        job = member.replica.job
        steady = self.durations.steady_end_ms(
            runs_as.groups, runs_as.since_ms, now_ms, runs_as.limit_ms, job.accepted_ms
        )
        runs_as.end_ms, runs_as.until_ms = steady or (-1, -1)
        runs_as.told_at = runs_as.told.count

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
        groups = groups_of(job.tenant, workload_of(request), shape)
        return RunsAs(shape, groups, _limit_ms(request), request.priority)


def _limit_ms(request: Request) -> int | None:
    """How long it may run by its own time limit; None without one."""
    limit_s = request.workload.timeout_s
    return None if limit_s is None else int(limit_s * 1000)


def after_ms(request: Request) -> int:
    """For how long it may still hold its devices once its time is over."""
    return int(request.workload.grace_s * 1000) + FREED_MS


class RunsAs:
    """How a member runs, as far as that tells its end: thousands are asked for at one look.

    `since_ms` is the ledger ms since which it runs; -1 before it does, and where its story does not tell. `end_ms` and
    `until_ms` are those of `Durations.steady_end_ms`, as of `told_at`.
    """

    __slots__ = ("end_ms", "groups", "limit_ms", "priority", "shape", "since_ms", "told", "told_at", "until_ms")

    def __init__(self, shape: Shape, groups: Groups, limit_ms: int | None, priority: int) -> None:
        self.shape = shape
        self.groups = groups
        self.limit_ms = limit_ms
        self.priority = priority  # that it was asked for with
        self.since_ms = self.end_ms = self.until_ms = self.told_at = -1
        self.told: SharedCount | None = None


def began_ms(member: Member, now_ms: int) -> int:
    """Since which ledger ms a member runs, else since when it is placed; now where its story tells neither."""
    since_ms = _since(member)
    return now_ms if since_ms is None else since_ms


def _since(member: Member) -> int | None:
    """As `began_ms`; None where its story tells neither."""
    for row in reversed(member.replica.job.story):
        if row[REPLICA] == member.replica.index and row[FENCE] == member.fence and row[STATE] in (RUNNING, PLACED):
            since_ms: int = row[AT_MS]
            return since_ms
    return None
