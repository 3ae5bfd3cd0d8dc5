"""`python -m bench.tenants`: waits on two traces of several tenants: ours beside FIFO, EASY and EASY by fair share.

The traces are two clusters of Microsoft's ITP (`bench/traces/itp`). The baselines are small simulations of their own:
hosts of 8 GPUs, a gang takes whole free hosts, a smaller request the host with the least room that suffices. EASY knows
what users know, the time limits: a job without one may run for ever. It reserves hosts, not GPUs. The order of the last
baseline is that of our tenants' usage, with a half-life of an hour. Ours is the production core (`moorage simulate`).

Each trace is played as three copies, in which arrivals are shifted and durations changed a little at random, and the
figure is their mean. Takes a quarter of an hour or more; prints a table, and returns 1 if a bound is not kept.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Mapping
from heapq import heappop, heappush
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from bench.queueing import HOUR_MS, gpus_of, shifted
from moorage.scheduler.core.config import Config
from moorage.testing.simulate.run import simulate
from moorage.testing.simulate.trace import TraceJob, in_order, read_csv, uniform_host

TRACES: Final = Path(__file__).parent / "traces" / "itp"
#: hosts by trace
HOSTS: Final = {"itp03": 20, "itp06": 12}
EACH: Final = 8
COPIES: Final = (1, 2, 3)
#: GPUs of a gang that has columns of its own
LARGE: Final = 32
HALF_LIFE_MS: Final = HOUR_MS
#: what usage counts against what is used at the moment, as in the core
USAGE_WEIGHT: Final = 128


class Task(NamedTuple):
    """A job; times in ms. Without a time limit `limit_ms` is infinite."""

    at_ms: int
    num: int
    runs_ms: int
    gpus: int
    tenant: str
    limit_ms: float


class Ended(NamedTuple):
    """A job that started: its GPUs, wait and run time in ms, and when it started."""

    gpus: int
    waited_ms: int
    runs_ms: int
    started_ms: int


class Waits(NamedTuple):
    """Hours; `use` is the part of the fleet, in percent, that is in use until the last arrival."""

    mean: float
    whole: float
    large: float
    longest: float
    use: float


def waits_of(ended: list[Ended], last_ms: int, hosts: int) -> Waits:
    def mean_of(least: int) -> float:
        return fmean(each.waited_ms / HOUR_MS for each in ended if each.gpus >= least)

    used = sum(each.gpus * max(0, min(last_ms, each.started_ms + each.runs_ms) - each.started_ms) for each in ended)
    longest = max(each.waited_ms for each in ended) / HOUR_MS
    return Waits(mean_of(0), mean_of(EACH), mean_of(LARGE), longest, 100 * used / (last_ms * hosts * EACH))


_Place = list[tuple[int, int]]  # (host, GPUs)


def fit(free: list[int], gpus: int, spare: Mapping[int, int] = {}) -> _Place | None:
    """Return where a request fits, whole hosts or the fullest one that suffices; None if nowhere.

    Of a host in `spare` no more may be taken than that.
    """
    rooms = [(room, host) for host, room in enumerate(free) if spare.get(host, EACH) >= min(gpus, EACH)]
    if gpus < EACH:
        fits = [(room, host) for room, host in rooms if room >= gpus]
        return [(min(fits)[1], gpus)] if fits else None
    whole = [(host, EACH) for room, host in rooms if room == EACH]
    needed = -(-gpus // EACH)
    return whole[:needed] if len(whole) >= needed else None


class Cluster:
    """Hosts, what runs on them, and what tenants have used."""

    def __init__(self, hosts: int) -> None:
        self.free = [EACH] * hosts
        self.ends: list[tuple[int, int, Task, _Place, float]] = []  # ms, task number, task, where, ms known
        self.now_ms = 0
        self._used: dict[str, float] = defaultdict(float)
        self._uses: dict[str, int] = defaultdict(int)

    def start(self, task: Task, place: _Place) -> None:
        for host, gpus in place:
            self.free[host] -= gpus
        self._uses[task.tenant] += task.gpus
        heappush(self.ends, (self.now_ms + task.runs_ms, task.num, task, place, self.now_ms + task.limit_ms))

    def go_to(self, now_ms: int) -> None:
        """Let time pass to the next moment, with the ends until then."""
        decay = 0.5 ** ((now_ms - self.now_ms) / HALF_LIFE_MS)
        for tenant, uses in self._uses.items():
            self._used[tenant] = self._used[tenant] * decay + uses * (1 - decay)
        self.now_ms = now_ms
        while self.ends and self.ends[0][0] <= now_ms:
            _, _, task, place, _ = heappop(self.ends)
            self._uses[task.tenant] -= task.gpus
            for host, gpus in place:
                self.free[host] += gpus

    def owed(self, task: Task) -> tuple[float, int]:
        return (USAGE_WEIGHT * self._used[task.tenant] + self._uses[task.tenant], task.num)

    def reserve(self, gpus: int) -> tuple[float, dict[int, int]]:
        """Return when a request fits by the limits of what runs, and what is left of its hosts then; never: -inf."""
        free = list(self.free)
        for _, _, _, place, known_ms in sorted(self.ends, key=lambda row: row[4]):
            if known_ms == math.inf:
                break
            for host, count in place:
                free[host] += count
            if (found := fit(free, gpus)) is not None:
                return known_ms, {host: free[host] - count for host, count in found}
        return -math.inf, {}


class Policy(NamedTuple):
    """Whether later jobs may pass the first that finds no room, and whether the order is that of shares."""

    backfills: bool
    by_share: bool


def one_pass(queue: list[Task], cluster: Cluster, policy: Policy) -> Task | None:
    """Start the first job in order that may start now; None if there is none."""
    start_ms, spare = math.inf, dict[int, int]()
    full = set[tuple[int, bool]]()  # requests without room: GPUs, and whether they end in time
    is_first = True
    for task in sorted(queue, key=cluster.owed) if policy.by_share else queue:
        in_time = is_first or cluster.now_ms + task.limit_ms <= start_ms
        if (task.gpus, in_time) in full:
            continue
        place = fit(cluster.free, task.gpus, {} if in_time else spare)
        if place is not None:
            cluster.start(task, place)
            return task
        full.add((task.gpus, in_time))
        if is_first:
            if not policy.backfills:
                return None
            start_ms, spare = cluster.reserve(task.gpus)
            is_first = False
    return None


def run(tasks: list[Task], hosts: int, policy: Policy) -> Waits:
    """Play every job through one policy, which is asked whenever somebody comes or goes."""
    cluster, queue, ended, coming = Cluster(hosts), list[Task](), list[Ended](), sorted(tasks, reverse=True)
    while coming or queue:
        cluster.go_to(min([row[0] for row in cluster.ends[:1]] + [task.at_ms for task in coming[-1:]]))
        while coming and coming[-1].at_ms <= cluster.now_ms:
            queue.append(coming.pop())
        while (task := one_pass(queue, cluster, policy)) is not None:
            queue.remove(task)
            ended.append(Ended(task.gpus, cluster.now_ms - task.at_ms, task.runs_ms, cluster.now_ms))
    return waits_of(ended, max(task.at_ms for task in tasks), hosts)


BASELINES: Final = {"FIFO": Policy(False, False), "EASY": Policy(True, False), "EASY by share": Policy(True, True)}
OURS: Final = "ours"


def jobs_of(trace: str, copy: int) -> list[TraceJob]:
    path = TRACES / f"{trace}.csv"
    return shifted(in_order(path, read_csv(path)), copy)


def tasks_of(jobs: list[TraceJob]) -> list[Task]:
    limits = [job.request.workload.timeout_s for job in jobs]
    known = [math.inf if limit is None else 1000 * limit for limit in limits]
    return [
        Task(job.at_ms, num, job.runs_ms, gpus_of(job.request), job.tenant, known[num]) for num, job in enumerate(jobs)
    ]


def ours(trace: str, jobs: list[TraceJob]) -> Waits:
    """Return the waits under the production core."""
    hosts = [uniform_host(f"h{number}", EACH, "A100") for number in range(HOSTS[trace])]
    runs = simulate(trace, hosts, jobs, Config(), {}).runs
    ended = [
        Ended(gpus_of(each.job.request), each.started_ms - each.job.at_ms, each.job.runs_ms, each.started_ms)
        for each in runs
    ]
    return waits_of(ended, jobs[-1].at_ms, HOSTS[trace])


def means(trace: str, only: str = "") -> dict[str, Waits]:
    """Return the mean over the copies under each policy."""
    found = defaultdict[str, list[Waits]](list)
    for copy in COPIES:
        jobs = jobs_of(trace, copy)
        for name, policy in BASELINES.items():
            if only in ("", name):
                found[name].append(run(tasks_of(jobs), HOSTS[trace], policy))
        if only in ("", OURS):
            found[OURS].append(ours(trace, jobs))
    return {name: Waits(*map(fmean, zip(*rows, strict=True))) for name, rows in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="*", choices=list(HOSTS), default=list(HOSTS))
    parser.add_argument("--only", choices=[*BASELINES, OURS], default="", help="one policy")
    options = parser.parse_args()
    print("| trace, hosts | policy | mean wait h | 8 GPUs and more | 32 and more | longest | in use % |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |", flush=True)
    is_kept = True
    for trace in options.traces:
        rows = means(trace, options.only)
        for name, waits in rows.items():
            figures = " | ".join(f"{value:.1f}" for value in waits)
            print(f"| {trace}, {HOSTS[trace]}x{EACH} | {name} | {figures} |", flush=True)
        if not options.only:
            is_kept &= rows[OURS].large <= 1.4 * rows["EASY"].large
            is_kept &= rows[OURS].longest <= 1.6 * rows["FIFO"].longest
    return 0 if is_kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
