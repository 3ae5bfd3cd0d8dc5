"""The results of a simulation: allocation over time, waits and completion times, by class of request and tenant.

Times are in hours in reports and in seconds in files. Means of allocation are weighted by time. *Slowdown* is (wait +
run) / run with runs below a minute counted as one (bounded slowdown, Feitelson 1998). *Fairness* is Jain's index over
the tenants' mean slowdowns: 1 if all are equal, 1/n if one tenant gets everything.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.scheduler.core.schedule.runtime import rank
from moorage.testing.simulate.world import Moment, Run

HOUR_MS: Final = 3_600_000
#: points of the timeline; beyond it every second one is dropped, and the rest stand for longer
POINTS_MAX: Final = 20_000
SLOWDOWN_RUN_MS_MIN: Final = 60_000
#: tenants in a report, those with the most GPU hours
TENANTS_MAX: Final = 100

#: the classes of requests: name, and the most GPUs at once (in thousandths) of the class
CLASSES: Final = (("no GPU", 0), ("share", 999), ("1 GPU", 1000), ("2-7 GPUs", 7999), ("8+ GPUs", 1 << 62))


class Waits(msgspec.Struct, frozen=True):
    """The waits of one group of jobs in hours, over the jobs that started; 0 if none did.

    `jct_mean_h`, `slowdown_mean` and `gpu_hours` are over the jobs that started and ended.
    """

    jobs: int
    started: int
    wait_mean_h: float = 0.0
    wait_p50_h: float = 0.0
    wait_p90_h: float = 0.0
    wait_max_h: float = 0.0
    jct_mean_h: float = 0.0
    slowdown_mean: float = 0.0
    gpu_hours: float = 0.0


class Report(msgspec.Struct, frozen=True, tag_field="kind", tag="simulation"):
    """The results of one run of a trace.

    `allocated_percent` is the mean part of the GPUs that was leased until the last arrival, `whole_percent` until the
    clock stopped.
    """

    trace: str
    settings: dict[str, Any]
    hosts: int
    gpus: int
    jobs: int
    ended: int
    never_started: int
    makespan_h: float
    allocated_percent: float
    whole_percent: float
    fairness: float
    decisions: int
    records: int
    #: where the clock stopped before the last end, by `--until` or Ctrl-C
    cut_at_h: float | None
    all: Waits
    classes: dict[str, Waits]
    tenants: dict[str, Waits]
    #: a few jobs that never started although the clock was not stopped, as tenant/job, with the reason at the end
    never: dict[str, str] = {}


class Timeline:
    """The moments in order: `points` are thinned to at most `POINTS_MAX`, means are over all moments."""

    def __init__(self) -> None:
        self.points: list[Moment] = []
        self._stride = 1
        self._skipped = 0
        self._last: Moment | None = None
        self._area = 0  # thousandths of a GPU times ms
        self._area_at: list[tuple[int, int]] = []

    def add(self, moment: Moment) -> None:
        last = self._last
        if last is not None:
            self._area += last.leased_milli * (moment.at_ms - last.at_ms)
        self._last = moment
        self._skipped += 1
        if self._skipped < self._stride:
            return
        self._skipped = 0
        self.points.append(moment)
        self._area_at.append((moment.at_ms, self._area))
        if len(self.points) > POINTS_MAX:
            del self.points[1::2], self._area_at[1::2]
            self._stride *= 2

    def mean_milli(self, until_ms: int | None = None) -> float:
        """Return the mean of GPUs leased, in thousandths, from the first moment to the last; 0 without two moments.

        With `until_ms`, to the first point kept at or after it.
        """
        if self._last is None:
            return 0.0
        start = self._area_at[0][0]
        at, area = self._last.at_ms, self._area
        if until_ms is not None:
            at, area = next(((ms, sum_) for ms, sum_ in self._area_at if ms >= until_ms), (at, area))
        return area / (at - start) if at > start else 0.0


def gpus_milli(run: Run) -> int:
    """Return the GPUs that a job asks for at once, in thousandths; a share counts as its part."""
    request = run.job.request
    spec = request.effective_gpu
    if spec is None:
        return 0
    share = spec.share.compute_percent * 10 if spec.share is not None else 1000
    return spec.count * share * min(request.copies, request.max_running or request.copies)


def class_of(run: Run) -> str:
    """Return the class in `CLASSES` of a job."""
    milli = gpus_milli(run)
    return next(name for name, most in CLASSES if milli <= most)


def wait_ms(run: Run) -> int:
    return run.started_ms - run.job.at_ms


def _slowdown(run: Run) -> float:
    ran = max(SLOWDOWN_RUN_MS_MIN, run.ended_ms - run.started_ms)
    return max(1.0, (run.ended_ms - run.job.at_ms) / ran)


def waits_of(runs: Iterable[Run]) -> Waits:
    """Return the waits, completion times and GPU hours of one group of jobs."""
    listed = list(runs)
    waits = sorted(wait_ms(run) for run in listed if run.started_ms >= 0)
    over = [run for run in listed if run.started_ms >= 0 and run.ended_ms >= 0]
    if not waits:
        return Waits(len(listed), 0)
    return Waits(
        len(listed),
        len(waits),
        _hours(sum(waits) / len(waits)),
        _hours(rank(waits, 50)),
        _hours(rank(waits, 90)),
        _hours(waits[-1]),
        _hours(_mean(run.ended_ms - run.job.at_ms for run in over)),
        round(_mean(map(_slowdown, over)), 3),
        round(sum(run.leased for run in over) / 1000 / HOUR_MS, 1),
    )


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def _hours(ms: float) -> float:
    return round(ms / HOUR_MS, 4)


def fairness_of(groups: Iterable[Waits]) -> float:
    """Return Jain's index over the mean slowdowns of the groups with ended jobs; 1 for one such group, or none."""
    values = [group.slowdown_mean for group in groups if group.slowdown_mean]
    squares = sum(value * value for value in values)
    return round(sum(values) ** 2 / (len(values) * squares), 4) if squares else 1.0


def grouped(runs: Iterable[Run], by: Callable[[Run], str]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(by(run), []).append(run)
    return groups


def report_of(
    trace: str,
    settings: dict[str, Any],
    hosts: int,
    gpus: int,
    runs: list[Run],
    timeline: Timeline,
    *,
    decisions: int,
    records: int,
    cut_at_ms: int | None,
    never: dict[str, str],
) -> Report:
    """Return the report of a whole run. `runs` are in order of arrival; there must be one."""
    classes = grouped(runs, class_of)
    tenants = {name: waits_of(group) for name, group in grouped(runs, lambda run: run.job.tenant).items()}
    most = sorted(tenants.items(), key=lambda row: (-row[1].gpu_hours, row[0]))[:TENANTS_MAX]
    capacity = gpus * 10  # thousandths of a GPU to percent
    last_ms = max((run.ended_ms for run in runs), default=0)
    return Report(
        trace=trace,
        settings=settings,
        hosts=hosts,
        gpus=gpus,
        jobs=len(runs),
        ended=sum(run.ended_ms >= 0 for run in runs),
        never_started=sum(run.started_ms < 0 for run in runs),
        makespan_h=_hours(max(0, last_ms - runs[0].job.at_ms)),
        allocated_percent=round(timeline.mean_milli(runs[-1].job.at_ms) / capacity, 2) if capacity else 0.0,
        whole_percent=round(timeline.mean_milli() / capacity, 2) if capacity else 0.0,
        fairness=fairness_of(tenants.values()),
        decisions=decisions,
        records=records,
        cut_at_h=None if cut_at_ms is None else _hours(cut_at_ms),
        all=waits_of(runs),
        classes={name: waits_of(classes[name]) for name, _ in CLASSES if name in classes},
        tenants=dict(most),
        never=never,
    )


def write_jobs(path: Path, runs: Iterable[Run]) -> None:
    """Write a CSV with a line for each job; times in seconds from the trace's beginning, empty if it did not happen."""
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(("tenant", "job", "class", "gpus", "at_s", "started_s", "ended_s", "wait_s", "state", "attempts"))
        for run in runs:
            started = run.started_ms / 1000 if run.started_ms >= 0 else ""
            ended = run.ended_ms / 1000 if run.ended_ms >= 0 else ""
            waited = wait_ms(run) / 1000 if run.started_ms >= 0 else ""
            job = run.job
            row = (job.tenant, job.request.job, class_of(run), gpus_milli(run) / 1000, job.at_ms / 1000)
            out.writerow((*row, started, ended, waited, run.state, run.attempts))


def write_timeline(path: Path, points: Iterable[Moment]) -> None:
    """Write a CSV with a line for each moment: seconds, GPUs leased, waiting jobs."""
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(("at_s", "gpus_leased", "jobs_waiting"))
        for point in points:
            out.writerow((point.at_ms / 1000, point.leased_milli / 1000, point.waiting))
