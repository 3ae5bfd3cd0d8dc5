"""Estimates how long jobs run, learned from earlier runs of the same tenant and workload in the ledger.

This is soft state without inputs of its own. It follows from the state at the first record of the term and the records
folded since, so a replay of the term learns the same. A new leader starts with the ended jobs that are still in memory
(`Config.ended_max`). All values are integers, in ledger ms.

An estimate is a quantile (nearest rank) of the last `SAMPLES_MAX` runs of the narrowest group with enough runs. The
groups are: *siblings*, which have the same tenant, workload and shape and were accepted within `SIBLINGS_MS`; the same
tenant, workload and shape; the same tenant and workload; the same tenant and number of GPUs. Siblings mostly belong to
one sweep, or one series of attempts, and run alike: in the clusters of the Philly trace, the logarithms of the
durations of jobs accepted within minutes correlate by 0.5 to 0.9. (So do Zilber, Amit and Talby, "What is Worth
Learning from Parallel Workloads?", 2005, who let a user's session end after 20 minutes, and Tsafrir, Etsion and
Feitelson, "Backfilling Using System-Generated Predictions", 2007, who predict from the last two jobs alone.) A run
longer than all seen before is assumed to follow a Pareto law of index 1: after a time t, the median remaining time is t
(Harchol-Balter and Downey, "Exploiting Process Lifetime Distributions", 1997).

Backfill errs on the safe side twice: a job that would pass a reservation is taken at its longest likely time, the jobs
that the reservation waits for at their median.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.began import began_ms
from moorage.scheduler.core.ledger.state import (
    AT_MS,
    AT_RUNNING,
    ATTEMPT,
    EXITED,
    FAILED,
    FROZEN,
    REPLICA,
    RUNNING,
    STATE,
    SUCCEEDED,
    TIMED_OUT,
    WORKER,
    Job,
    Member,
)
from moorage.scheduler.core.request_reader import workload_of
from moorage.schemas.job import Request

#: runs remembered for each group; older runs are dropped
SAMPLES_MAX: Final = 64
#: a group with fewer runs is used only if no wider group has this many
SAMPLES_SURE: Final = 3
#: jobs are siblings if accepted within this many ms of each other
SIBLINGS_MS: Final = 20 * 60_000
#: groups remembered, each with at most twice `SAMPLES_MAX` integers; the least recently used are dropped
GROUPS_MAX: Final = 16_384
#: the most ended jobs of one record to learn from
LEARNED_MAX: Final = 32
#: the most ended jobs that a new leader learns from, newest first
LEARNED_AT_START_MAX: Final = 2_000
#: the most transitions of one ended job that are read, from its end
ROWS_MAX: Final = 16
#: later than any ledger ms
FOREVER_MS: Final = 1 << 62
#: a run that outlived all others is expected, in nine of ten cases, to last at most this many times longer
OUTLIVED_P90: Final = 9

#: ends that show how long the work takes; an end on request does not
_RAN: Final = frozenset({SUCCEEDED, FAILED, TIMED_OUT, EXITED})

_Group = tuple[str, str, int]
#: from narrow to wide, see `groups_of`
Groups = tuple[_Group, _Group, _Group]


class Estimate(NamedTuple):
    """Half of such runs take at most `p50_ms`, nine of ten at most `p90_ms`.

    `samples` is the number of runs behind it; 0 if only the request's time limit is known.
    """

    p50_ms: int
    p90_ms: int
    samples: int


class _Runs:
    """The last runs of one group in ms, and when their jobs were accepted; sorted when first needed."""

    __slots__ = ("_accepted", "_at", "_near", "_sorted", "ring")

    def __init__(self) -> None:
        self.ring: deque[int] = deque(maxlen=SAMPLES_MAX)
        self._accepted: deque[int] = deque(maxlen=SAMPLES_MAX)
        self._sorted: list[int] = []
        self._at: list[tuple[int, int]] = []  # (accepted ms, run ms), sorted
        # for a slice (first, end) of `_at`: its runs, sorted. Windows have a fixed width, so there are at most two
        # slices for each run, and no bound is needed
        self._near: dict[tuple[int, int], list[int]] = {}

    def add(self, ms: int, accepted_ms: int) -> None:
        self.ring.append(ms)
        self._accepted.append(accepted_ms)
        if self._sorted:
            self._sorted = []
        if self._at:
            self._at, self._near = [], {}

    @property
    def sorted(self) -> list[int]:
        if not self._sorted:
            self._sorted = sorted(self.ring)
        return self._sorted

    def siblings(self, accepted_ms: int) -> list[int]:
        """Return the runs of jobs accepted at about that time, ascending; the caller must not change the list."""
        at = self._at
        if not at:
            at = self._at = sorted(zip(self._accepted, self.ring, strict=True))
        window = bisect_left(at, (accepted_ms - SIBLINGS_MS,)), bisect_left(at, (accepted_ms + SIBLINGS_MS + 1,))
        near = self._near.get(window)
        if near is None:
            near = self._near[window] = sorted(ms for _, ms in at[slice(*window)])
        return near


class SharedCount:
    """A counter shared by several holders; unlike an int, it can be a value of a `WeakValueDictionary`."""

    __slots__ = ("__weakref__", "count")

    def __init__(self) -> None:
        self.count = 0


class Durations:
    """Remembers run times by group. Bounded: the least recently used groups are dropped."""

    def __init__(self) -> None:
        self.learned = 0  # runs so far: no estimate changes without one
        self._runs: OrderedDict[_Group, _Runs] = OrderedDict()
        self._told: WeakValueDictionary[tuple[str, str], SharedCount] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._runs)

    def observe(self, tenant: str, workload: str, shape: Shape, ms: int, accepted_ms: int = 0) -> None:
        """Record that a member ran for `ms` milliseconds, from its start to the end of its process tree.

        `accepted_ms` is the ledger ms at which its job was accepted.
        """
        runs = self._runs
        self.learned += 1
        self._tell(tenant, workload)
        for group in groups_of(tenant, workload, shape):
            known = runs.get(group)
            if known is None:
                if len(runs) >= GROUPS_MAX:
                    forgotten, _ = runs.popitem(last=False)
                    self._tell(*forgotten[:2])
                known = runs[group] = _Runs()
            else:
                runs.move_to_end(group)
            known.add(max(0, ms), accepted_ms)

    def told(self, tenant: str, workload: str) -> SharedCount:
        """Return a counter that grows when runs of this tenant's workload are learned or forgotten.

        Estimates that come from the tenant's other workloads may change without it.
        """
        return self._told.setdefault((tenant, workload), SharedCount())

    def _tell(self, tenant: str, workload: str) -> None:
        told = self._told.get((tenant, workload))
        if told is not None:
            told.count += 1

    def estimate(
        self,
        tenant: str,
        workload: str,
        shape: Shape,
        limit_ms: int | None = None,
        accepted_ms: int | None = None,
    ) -> Estimate | None:
        """Return an estimate of a whole run; None if nothing is known and there is no time limit.

        `limit_ms` is the request's time limit. No estimate exceeds it; with nothing learned it is both p50 and p90 (an
        upper bound, as in EASY backfill).
        """
        return self.remaining(tenant, workload, shape, 0, limit_ms, accepted_ms)

    def remaining(
        self,
        tenant: str,
        workload: str,
        shape: Shape,
        elapsed_ms: int,
        limit_ms: int | None = None,
        accepted_ms: int | None = None,
    ) -> Estimate | None:
        """Return an estimate of the remaining time of a member that has run for `elapsed_ms`; None as `estimate`.

        With `accepted_ms`, the time at which its job was accepted, runs of siblings take precedence.
        """
        left = None if limit_ms is None else max(0, limit_ms - elapsed_ms)
        known = self._known(groups_of(tenant, workload, shape), accepted_ms)
        if known is None:
            return None if left is None else Estimate(left, left, 0)
        p50, p90 = (_left_ms(known, elapsed_ms, percent) for percent in (50, 90))
        if left is not None:
            p50, p90 = min(p50, left), min(p90, left)
        return Estimate(p50, p90, len(known))

    def left_ms(
        self, tenant: str, workload: str, shape: Shape, elapsed_ms: int, limit_ms: int | None, percent: int
    ) -> tuple[int, int] | None:
        """Return (ms in which `percent` of such members end, number of runs known); as `remaining`."""
        left = None if limit_ms is None else max(0, limit_ms - elapsed_ms)
        known = self._known(groups_of(tenant, workload, shape), None)
        if known is None:
            return None if left is None else (left, 0)
        ms = _left_ms(known, elapsed_ms, percent)
        return (ms if left is None else min(ms, left)), len(known)

    def half_left_ms(self, groups: Groups, elapsed_ms: int, limit_ms: int | None, accepted_ms: int) -> int | None:
        """Return only the `p50_ms` of `remaining`, for questions about thousands of members."""
        known = self._known(groups, accepted_ms)
        left_ms = None if known is None else _left_ms(known, elapsed_ms, 50)
        if limit_ms is None:
            return left_ms
        within_ms = max(0, limit_ms - elapsed_ms)
        return within_ms if left_ms is None else min(left_ms, within_ms)

    def steady_end_ms(
        self, groups: Groups, since_ms: int, now_ms: int, limit_ms: int | None, accepted_ms: int
    ) -> tuple[int, int] | None:
        """Return (end by `half_left_ms`, ledger ms until which that stays the same) for work running since `since_ms`.

        It holds as long as the counter of `told` does not change. An end of -1 means: as far ahead as the work has
        lasted already. None if the next estimate may differ.
        """
        known, elapsed_ms = self._of_workload(groups, accepted_ms), now_ms - since_ms
        if known is None or elapsed_ms < 0:
            return None
        first = 0 if not elapsed_ms else bisect_right(known, elapsed_ms)
        if first == len(known):
            return None if limit_ms is not None else (-1, FOREVER_MS)
        end_ms, until_ms = since_ms + rank(known, 50, first), since_ms + known[first] - 1
        if limit_ms is not None:
            if now_ms > since_ms + limit_ms:
                return None
            end_ms, until_ms = min(end_ms, since_ms + limit_ms), min(until_ms, since_ms + limit_ms)
        return end_ms, until_ms

    def _of_workload(self, groups: Groups, accepted_ms: int) -> list[int] | None:
        """Return what `_known` returns if that comes from enough runs of this very workload; else None."""
        own = self._runs.get(groups[0])
        if own is not None and (near := own.siblings(accepted_ms)):
            return near
        for group in groups[:2]:
            known = self._runs.get(group)
            if known is not None and len(known.ring) >= SAMPLES_SURE:
                return known.sorted
        return None

    def _known(self, groups: Groups, accepted_ms: int | None) -> list[int] | None:
        """Return the sorted runs of the narrowest group with enough runs, else of the narrowest with any; or None.

        With `accepted_ms` a single sibling is enough: longer runs then count as outliving all. With None there are no
        siblings.
        """
        own = self._runs.get(groups[0]) if accepted_ms is not None else None
        if own is not None and accepted_ms is not None and (near := own.siblings(accepted_ms)):
            return near
        some: list[int] | None = None
        for group in groups:
            known = self._runs.get(group)
            if known is None:
                continue
            self._runs.move_to_end(group)
            if len(known.ring) >= SAMPLES_SURE:
                return known.sorted
            some = some or known.sorted
        return some

    def learn(self, job: Job, shape: Shape, workload: str) -> None:
        """Learn from the runs in the last transitions of an ended job.

        A run that was ever frozen is left out.
        """
        ends: dict[tuple[int, int], int] = {}
        ran: dict[tuple[int, int], int] = {}
        for row in job.story[: -ROWS_MAX - 1 : -1]:
            key, state = (row[REPLICA], row[ATTEMPT]), row[STATE]
            if state in _RAN and row[WORKER] >= 0:
                ends[key] = row[AT_MS]
            elif state == FROZEN:
                ends.pop(key, None)
                ran.pop(key, None)
            elif state == RUNNING and key in ends:
                ran[key] = ends[key] - row[AT_MS]
        for run_ms in ran.values():
            self.observe(job.tenant, workload, shape, run_ms, job.accepted_ms)


def rank(ordered: list[int], percent: int, first: int = 0) -> int:
    """Return the nearest-rank quantile of sorted values from the place `first` on; `percent` 0 is the smallest."""
    return ordered[first + max(0, -(-percent * (len(ordered) - first) // 100) - 1)]


def _left_ms(known: list[int], elapsed_ms: int, percent: int) -> int:
    """Return the time in which `percent` of the runs that lasted `elapsed_ms` have ended, in ms from now."""
    first = bisect_right(known, elapsed_ms) if elapsed_ms else 0
    if first < len(known):
        return rank(known, percent, first) - elapsed_ms
    # Pareto law: the median is as long again, nine of ten end within `OUTLIVED_P90` times
    return elapsed_ms * percent // (100 - percent)


def groups_of(tenant: str, workload: str, shape: Shape) -> Groups:
    """Return the groups of such a run, narrowest first. `workload` is never empty: it is at least the driver."""
    return (tenant, workload, shape.index), (tenant, workload, -1), (tenant, "", shape.gpus)


#: how many entries of one queue group are tried for backfill behind an excluded first entry
DEPTH_MAX: Final = 64
#: assumed time from the end of a process until its memory is free
FREED_MS: Final = 2_000


class Estimates:
    """Estimates the ends of one state's jobs."""

    def __init__(
        self, request_of: Callable[[Job], Request], shape_of: Callable[[Job], Shape], durations: Durations
    ) -> None:
        self.request_of = request_of
        self.shape_of = shape_of
        self.durations = durations

    def most_ms(self, tenant: str, request: Request, shape: Shape, accepted_ms: int) -> int | None:
        """Return how long a member holds its devices at most, including grace and freeing of memory; None if unknown.

        By its time limit, else as nine of ten such runs; `accepted_ms` is when its job was accepted.
        """
        after, limit_ms = after_ms(request), _limit_ms(request)
        if limit_ms is not None:
            return limit_ms + after
        found = self.durations.estimate(tenant, workload_of(request), shape, None, accepted_ms)
        return found.p90_ms + after if found is not None else None

    def end_ms(self, member: Member, now_ms: int) -> int | None:
        """Return the ledger ms at which a member is expected to end; None if unknown."""
        runs_as = self.runs_as(member)
        began = runs_as.since_ms if runs_as.since_ms >= 0 else began_ms(member, now_ms)
        elapsed = now_ms - began if now_ms > began else 0
        accepted_ms = member.replica.job.accepted_ms
        left_ms = self.durations.half_left_ms(runs_as.groups, elapsed, runs_as.limit_ms, accepted_ms)
        return None if left_ms is None else now_ms + left_ms

    def ends_of(self, members: Iterable[Member], now_ms: int) -> list[tuple[int, int, int, int]]:
        """Return (`end_ms`, device mask, CPU milli, memory in MiB) of each member; `FOREVER_MS` for an unknown end."""
        found: list[tuple[int, int, int, int]] = []
        for member in members:
            known: RunsAs | None = member.runs_as
            if (
                known is None
                or known.until_ms < now_ms
                or known.told is None
                or known.told.count != known.told_at
                or known.shape is not member.replica.job.shape
            ):
                end_ms = self.end_ms(member, now_ms)
                self._note(member, now_ms)
                known = self.runs_as(member)
            else:
                end_ms = known.end_ms if known.end_ms >= 0 else 2 * now_ms - known.since_ms
            asked = known.shape
            found.append((FOREVER_MS if end_ms is None else end_ms, member.mask, asked.cpu_milli, asked.memory_mib))
        return found

    def _note(self, member: Member, now_ms: int) -> None:
        """Cache a member's estimated end, and until when that holds; most scans then need no new estimate."""
        runs_as = self.runs_as(member)
        if runs_as.since_ms < 0:
            return
        if runs_as.told is None:
            runs_as.told = self.durations.told(*runs_as.groups[0][:2])
        elif runs_as.until_ms < 0 and runs_as.told.count == runs_as.told_at:
            return  # there was no stable answer, and nothing was learned since
        job = member.replica.job
        steady = self.durations.steady_end_ms(
            runs_as.groups, runs_as.since_ms, now_ms, runs_as.limit_ms, job.accepted_ms
        )
        runs_as.end_ms, runs_as.until_ms = steady or (-1, -1)
        runs_as.told_at = runs_as.told.count

    def runs_as(self, member: Member) -> RunsAs:
        """Return the data that a member's estimate needs; computed once per member and shape."""
        job = member.replica.job
        found: RunsAs | None = member.runs_as
        if found is None or found.shape is not job.shape:
            found = member.runs_as = self._read(job)
        if found.since_ms < 0 and member.phase >= AT_RUNNING:
            found.since_ms = began_ms(member, -1)
        return found

    def _read(self, job: Job) -> RunsAs:
        request, shape = self.request_of(job), self.shape_of(job)
        groups = groups_of(job.tenant, workload_of(request), shape)
        return RunsAs(shape, groups, _limit_ms(request))


def _limit_ms(request: Request) -> int | None:
    """Return the time limit of a request in ms; None without one."""
    limit_s = request.workload.timeout_s
    return None if limit_s is None else int(limit_s * 1000)


def after_ms(request: Request) -> int:
    """Return for how many ms an attempt may hold its devices after its time limit."""
    return int(request.workload.grace_s * 1000) + FREED_MS


class RunsAs:
    """What the estimate of a member's end needs, cached because one scan reads thousands of members.

    `since_ms` is the ledger ms since which it runs; -1 if it does not run yet, or its story does not say. `end_ms` and
    `until_ms` are from `Durations.steady_end_ms`, when the counter `told` was `told_at`; -1 if there was no answer.
    """

    __slots__ = ("end_ms", "groups", "limit_ms", "shape", "since_ms", "told", "told_at", "until_ms")

    def __init__(self, shape: Shape, groups: Groups, limit_ms: int | None) -> None:
        self.shape = shape
        self.groups = groups
        self.limit_ms = limit_ms
        self.since_ms = self.end_ms = self.until_ms = self.told_at = -1
        self.told: SharedCount | None = None
