"""Estimates how long jobs run, learned from earlier runs of the same tenant and workload in the ledger.

This is soft state without inputs of its own. It follows from the state at the first record of the term and the records
folded since, so a replay of the term learns the same. A new leader starts with the last runs of the jobs that are in
memory (`Job.ran`). All values are integers, in ledger ms.

An estimate is a quantile (nearest rank) of the last `SAMPLES_MAX` runs of the narrowest group with enough runs. The
groups are: *siblings*, which have the same tenant, workload and shape and were accepted within `SIBLINGS_MS`; the same
tenant, workload and shape; the same tenant and workload; the same tenant and number of GPUs. Siblings mostly belong to
one sweep, or one series of attempts, and run alike: in the clusters of the Philly trace, the logarithms of the
durations of jobs accepted within minutes correlate by 0.5 to 0.9. (So do Zilber, Amit and Talby, "What is Worth
Learning from Parallel Workloads?", 2005, who let a user's session end after 20 minutes, and Tsafrir, Etsion and
Feitelson, "Backfilling Using System-Generated Predictions", 2007, who predict from the last two jobs alone.) A run
longer than all seen before is assumed to follow a Pareto law of index 1: after a time t, the median remaining time is t
(Harchol-Balter and Downey, "Exploiting Process Lifetime Distributions", 1997).

Of what stays (`STAYS`) nothing is learned, and only a time limit says when it ends.

Backfill errs on the safe side twice: a job that would pass a reservation is taken at its longest likely time, the jobs
that the reservation waits for at their median. The longest likely time is what nine of ten such runs take. A generous
time limit does not make it longer: it would keep out jobs that get in without one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Final

from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.state import Attempt, Job
from moorage.scheduler.core.request_reader import STAYS, workload_of
from moorage.schemas.job import Request

#: runs remembered for each group; older runs are dropped
SAMPLES_MAX: Final = 64
#: a group with fewer runs is used only if no wider group has this many
SAMPLES_SURE: Final = 3
#: jobs are siblings if accepted within this many ms of each other
SIBLINGS_MS: Final = 20 * 60_000
#: groups remembered, each with at most twice `SAMPLES_MAX` integers; the least recently used are dropped
GROUPS_MAX: Final = 16_384
#: the most jobs of one record to learn from
LEARNED_MAX: Final = 32
#: the most ended jobs that a new leader learns from, newest first; besides, it learns from all that have not ended
LEARNED_AT_START_MAX: Final = 2_000
#: later than any ledger ms
FOREVER_MS: Final = 1 << 62
#: a run that outlived all others is expected, in nine of ten cases, to last at most this many times longer
OUTLIVED_P90: Final = 9

#: runs of one job that one record teaches: it may run for long, and what starts beside it is planned by how long its
#: replicas take
LEARNED_A_RECORD: Final = 2

_Group = tuple[str, str, int]
#: from narrow to wide, see `groups_of`
Groups = tuple[_Group, ...]


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


class Durations:
    """Remembers run times by group. Bounded: the least recently used groups are dropped."""

    def __init__(self) -> None:
        self.learned = 0  # runs so far: no estimate changes without one
        self._runs: OrderedDict[_Group, _Runs] = OrderedDict()

    def __len__(self) -> int:
        return len(self._runs)

    def observe(self, tenant: str, workload: str, shape: Shape, ms: int, accepted_ms: int = 0) -> None:
        """Record that an attempt ran for `ms` milliseconds, from its start to the end of its process tree.

        `accepted_ms` is the ledger ms at which its job was accepted.
        """
        if workload == STAYS:
            return
        runs = self._runs
        self.learned += 1
        for group in groups_of(tenant, workload, shape):
            known = runs.get(group)
            if known is None:
                if len(runs) >= GROUPS_MAX:
                    runs.popitem(last=False)
                known = runs[group] = _Runs()
            else:
                runs.move_to_end(group)
            known.add(max(0, ms), accepted_ms)

    def left_ms(
        self,
        groups: Groups,
        elapsed_ms: int = 0,
        limit_ms: int | None = None,
        accepted_ms: int | None = None,
        percent: int = 50,
    ) -> tuple[int, int] | None:
        """Return (ms in which `percent` of the attempts that have run for `elapsed_ms` end, number of runs known).

        `limit_ms` is the request's time limit: no estimate exceeds it, and with nothing learned it is the estimate (an
        upper bound, as in EASY backfill). With `accepted_ms`, the time at which the job was accepted, runs of siblings
        take precedence. None if nothing is known and there is no limit.
        """
        known = self._known(groups, accepted_ms)
        ms = None if known is None else _left_ms(known, elapsed_ms, percent)
        if limit_ms is not None:
            within_ms = max(0, limit_ms - elapsed_ms)
            ms = within_ms if ms is None else min(ms, within_ms)
        return None if ms is None else (ms, 0 if known is None else len(known))

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

    def learn(self, job: Job, shape: Shape, workload: str, runs: Iterable[int]) -> None:
        """Learn from runs of a job, in ms, each from its start to its end."""
        for run_ms in runs:
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
    if workload == STAYS:  # neither its own runs nor those of others tell its end
        return (tenant, STAYS, -1), (tenant, STAYS, -1), (tenant, STAYS, -1)
    return (tenant, workload, shape.index), (tenant, workload, -1), (tenant, "", shape.gpus)


#: how many entries of one queue group are tried for backfill behind an excluded first entry
DEPTH_MAX: Final = 64
#: assumed time from the end of a process until its memory is free
FREED_MS: Final = 2_000


class Estimates:
    """Estimates the ends of one state's jobs."""

    def __init__(
        self,
        request_of: Callable[[Job], Request],
        shape_of: Callable[[Job], Shape],
        limit_ms_of: Callable[[Job, int], int | None],
        durations: Durations,
    ) -> None:
        self.request_of = request_of
        self.shape_of = shape_of
        self.limit_ms_of = limit_ms_of
        self.durations = durations

    def most_ms(self, tenant: str, request: Request, shape: Shape, accepted_ms: int) -> int | None:
        """Return how long an attempt holds its devices at most, including grace and freeing of memory; None if unknown.

        As nine of ten such runs, but no longer than its time limit; with a limit only if `SAMPLES_SURE` runs are known.
        `accepted_ms` is when its job was accepted.
        """
        limit_ms, groups = _limit_ms(request), groups_of(tenant, workload_of(request), shape)
        found = self.durations.left_ms(groups, accepted_ms=accepted_ms, percent=90)
        most_ms = None if found is None else found[0]
        if limit_ms is not None:
            is_sure = found is not None and found[1] >= SAMPLES_SURE
            most_ms = min(limit_ms, most_ms) if most_ms is not None and is_sure else limit_ms
        return None if most_ms is None else most_ms + after_ms(request)

    def end_ms(self, attempt: Attempt, now_ms: int) -> int | None:
        """Return the ledger ms at which an attempt is expected to end; None if unknown."""
        return self._end_ms(attempt, self.runs_as(attempt), now_ms)

    def _end_ms(self, attempt: Attempt, runs_as: RunsAs, now_ms: int) -> int | None:
        elapsed = max(0, now_ms - attempt.began_ms)
        accepted_ms = attempt.replica.job.accepted_ms
        found = self.durations.left_ms(runs_as.groups, elapsed, runs_as.limit_ms, accepted_ms)
        return None if found is None else now_ms + found[0]

    def ends_of(self, attempts: Iterable[Attempt], now_ms: int) -> list[tuple[int, int, int, int]]:
        """Return (`end_ms`, device mask, CPU milli, memory in MiB) of each attempt; `FOREVER_MS` for an unknown end."""
        found: list[tuple[int, int, int, int]] = []
        for attempt in attempts:
            runs_as = self.runs_as(attempt)
            end_ms, asked = self._end_ms(attempt, runs_as, now_ms), runs_as.shape
            asked = asked.of_rank(attempt.replica.index) if asked.parts else asked
            found.append((FOREVER_MS if end_ms is None else end_ms, attempt.mask, asked.cpu_milli, asked.memory_mib))
        return found

    def runs_as(self, attempt: Attempt) -> RunsAs:
        """Return the data that an attempt's estimate needs; computed once per attempt and shape."""
        job = attempt.replica.job
        found: RunsAs | None = attempt.runs_as
        if found is None or found.shape is not job.shape:
            found = attempt.runs_as = self._read(job, attempt.fence)
        return found

    def _read(self, job: Job, fence: int) -> RunsAs:
        request, shape = self.request_of(job), self.shape_of(job)
        groups = groups_of(job.tenant, workload_of(request), shape)
        return RunsAs(shape, groups, self.limit_ms_of(job, fence))


def _limit_ms(request: Request) -> int | None:
    """Return the time limit of a request in ms; None without one."""
    limit_s = request.workload.timeout_s
    return None if limit_s is None else int(limit_s * 1000)


def after_ms(request: Request) -> int:
    """Return for how many ms an attempt may hold its devices after its time limit."""
    return int(request.workload.grace_s * 1000) + FREED_MS


class RunsAs:
    """What the estimate of an attempt's end needs, cached because one scan reads thousands of attempts."""

    __slots__ = ("groups", "limit_ms", "shape")

    def __init__(self, shape: Shape, groups: Groups, limit_ms: int | None) -> None:
        self.shape = shape
        self.groups = groups
        self.limit_ms = limit_ms
