"""`python -m bench.forecasts`: of the Philly jobs that wait, how many start within the interval that they were told.

Each virtual cluster is played by the production core. When one of the chosen jobs comes and has to wait, its start is
forecast, as `explain` does, and compared with its start in the replay. Virtual cluster and number of GPUs stand for the
command, since the trace has none. Counted are the jobs that wait longer than a minute; told is one with an interval,
from 10 to 90 percent. Takes some minutes a cluster, and prints a table.
"""

from __future__ import annotations

import argparse
from typing import Final, NamedTuple

import msgspec

from bench.queueing import gpus_of, jobs_of
from moorage.scheduler.core.config import Config
from moorage.scheduler.whatif.forecast import decode_forecast, forecast
from moorage.testing.simulate.philly import CLUSTERS, hosts_of
from moorage.testing.simulate.trace import TraceJob
from moorage.testing.simulate.world import World

#: a job that waits less is not counted
WAITED_MS: Final = 60_000
#: so many jobs of a cluster are chosen, evenly
CHOSEN: Final = 100
#: of each look by the clock, which says little on a busy machine: a look is bounded by its moments
LIMIT_S: Final = 60.0
#: what is asked: of those told, the least and the most that are inside; of those that wait, the least that are told
INSIDE: Final = (0.75, 0.92)
TOLD: Final = 0.60


class Count(NamedTuple):
    """How many jobs waited, were told an interval, and started within it, before it and behind it."""

    waited: int = 0
    told: int = 0
    inside: int = 0
    before: int = 0
    behind: int = 0

    def plus(self, other: Count) -> Count:
        return Count(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def told(world: World, job: tuple[str, str]) -> tuple[int, int] | None:
    """Return the interval that a job is told now, in ms from now; None if it is told none."""
    found = decode_forecast(forecast(world.engine, world.time_ms, [job], LIMIT_S))
    start = found.starts.get(job[0], {}).get(job[1])
    return None if start is None or start.p10_ms < 0 or start.p90_ms < 0 else (start.p10_ms, start.p90_ms)


def with_command(job: TraceJob) -> TraceJob:
    labels = {"workload": f"{gpus_of(job.request)} GPUs"}
    return msgspec.structs.replace(job, request=msgspec.structs.replace(job.request, labels=labels))


def measure(cluster: str, chosen: int) -> Count:
    """Return the count of one virtual cluster."""
    jobs = [with_command(job) for job in jobs_of(cluster, 0)]
    names = {job.request.job for job in jobs[:: max(1, len(jobs) // chosen)]}
    world, seen = World(hosts_of(CLUSTERS[cluster]), jobs, Config()), 0
    intervals: dict[tuple[str, str], tuple[int, tuple[int, int] | None]] = {}  # by job: when it was told, and what
    while world.step() and (seen < len(jobs) or any(world.runs[job].started_ms < 0 for job in intervals)):
        come = [(job.tenant, job.request.job or "") for job in jobs[seen:] if job.at_ms <= world.now_ms]
        seen += len(come)
        for job in come:
            if job[1] in names and world.runs[job].started_ms < 0:
                intervals[job] = world.now_ms, told(world, job)
    count = Count()
    for job, (at_ms, interval) in intervals.items():
        waited_ms = world.runs[job].started_ms - at_ms
        if waited_ms <= WAITED_MS:
            continue
        if interval is None:
            count = count.plus(Count(waited=1))
            continue
        first_ms, last_ms = interval
        is_before, is_behind = waited_ms < first_ms, waited_ms > last_ms
        count = count.plus(Count(1, 1, not is_before and not is_behind, is_before, is_behind))
    return count


def row_of(name: str, count: Count) -> str:
    inside = f"{count.inside / count.told:.0%}" if count.told else "-"
    told_of = f"{count.told / count.waited:.0%}" if count.waited else "-"
    return f"| {name} | {count.waited} | {told_of} | {inside} | {count.before} | {count.behind} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", nargs="*", choices=list(CLUSTERS), default=list(CLUSTERS))
    parser.add_argument("--chosen", type=int, default=CHOSEN, help="jobs of each cluster")
    options = parser.parse_args()
    every = Count()
    print("| virtual cluster | waited > 1 min | told | of those inside | before | behind |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for cluster in options.clusters:
        count = measure(cluster, options.chosen)
        every = every.plus(count)
        print(row_of(cluster, count), flush=True)
    print(row_of("all", every))
    is_kept = bool(every.told) and INSIDE[0] <= every.inside / every.told <= INSIDE[1]
    return 0 if is_kept and every.told >= TOLD * every.waited else 1


if __name__ == "__main__":
    raise SystemExit(main())
