"""`python -m bench.queueing`: waits on the Philly jobs, four virtual clusters: ours beside FIFO, EASY, greedy and SJF.

The baselines are small simulations of their own: hosts of 8 GPUs, a gang of 8 or more takes whole free hosts, a smaller
request the host with the least room that suffices, nothing is preempted. EASY and SJF are told the true durations, and
EASY counts GPUs, not hosts. Ours is the production core (`moorage simulate`), told no duration.

One trace says little: a job that comes a minute later may save or cost a day. So each cluster is run on its trace and
on copies of it, in which arrivals are shifted and durations changed a little at random, and its figure is the geometric
mean. `python -m bench.tenants` plays traces of several tenants. Takes an hour or more; prints a table, and with `--out`
writes it. With `--keep FOLDER` what each run came to is kept there, and the same command goes on where it was cut off,
as long as the code is the same.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import statistics
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

import msgspec

import moorage.scheduler
from bench import book
from moorage.scheduler.core.config import Config
from moorage.schemas.job import Request
from moorage.testing.simulate.philly import CLUSTERS, HOST_GPUS, hosts_of, read_philly
from moorage.testing.simulate.run import simulate
from moorage.testing.simulate.trace import TraceJob

TRACE: Final = Path(__file__).parent / "traces" / "philly" / "philly_gavel_seed0.csv"
HOUR_MS: Final = 3_600_000
#: copies of each cluster's trace, beside the trace itself, which is number 0; a copy's number is its seed
COPIES: Final = 5
#: in a copy a job comes so much earlier or later at most, and runs so many parts of its duration more or less at most
SHIFT_MS: Final = 12 * 60_000
STRETCH: Final = 0.03


class Task(NamedTuple):
    """A job of the trace; times in ms."""

    at_ms: int
    runs_ms: int
    gpus: int


class Waits(NamedTuple):
    """Hours."""

    mean: float
    gangs: float
    longest: float


def waits_of(pairs: list[tuple[int, int]]) -> Waits:
    """From (GPUs, wait in ms) of every job."""
    hours = [wait / HOUR_MS for _, wait in pairs]
    gangs = [wait / HOUR_MS for gpus, wait in pairs if gpus >= HOST_GPUS]
    return Waits(fmean(hours), fmean(gangs), max(hours))


class Cluster:
    """Hosts and what runs on them."""

    def __init__(self, gpus: int) -> None:
        self.free = [HOST_GPUS] * (gpus // HOST_GPUS)
        self.ends: list[tuple[int, int, tuple[int, ...], int]] = []  # ms, order, hosts, GPUs on each
        self._order = 0

    def place(self, task: Task, now_ms: int) -> bool:
        if task.gpus >= HOST_GPUS:
            whole = [host for host, free in enumerate(self.free) if free == HOST_GPUS]
            count, each = -(-task.gpus // HOST_GPUS), HOST_GPUS
            if len(whole) < count:
                return False
            hosts = tuple(whole[:count])
        else:
            fits = [(free, host) for host, free in enumerate(self.free) if free >= task.gpus]
            if not fits:
                return False
            hosts, each = (min(fits)[1],), task.gpus
        for host in hosts:
            self.free[host] -= each
        self._order += 1
        heappush(self.ends, (now_ms + task.runs_ms, self._order, hosts, each))
        return True

    def end_until(self, now_ms: int) -> None:
        while self.ends and self.ends[0][0] <= now_ms:
            _, _, hosts, each = heappop(self.ends)
            for host in hosts:
                self.free[host] += each

    def shadow(self, gpus: int) -> tuple[float, int]:
        """When so many GPUs will be free, and how many more are then; counted in GPUs, not in hosts."""
        free = sum(self.free)
        for at_ms, _, hosts, each in sorted(self.ends):
            if free >= gpus:
                break
            free += len(hosts) * each
            last = at_ms
            if free >= gpus:
                return last, free - gpus
        return 0, free - gpus


Start = Callable[[list[Task], Cluster, int], Iterator[Task]]


def fifo(queue: list[Task], cluster: Cluster, now_ms: int) -> Iterator[Task]:
    for task in queue:
        if not cluster.place(task, now_ms):
            return
        yield task


def greedy(queue: list[Task], cluster: Cluster, now_ms: int) -> Iterator[Task]:
    yield from (task for task in queue if cluster.place(task, now_ms))


def sjf(queue: list[Task], cluster: Cluster, now_ms: int) -> Iterator[Task]:
    yield from greedy(sorted(queue, key=lambda task: task.runs_ms), cluster, now_ms)


def easy(queue: list[Task], cluster: Cluster, now_ms: int) -> Iterator[Task]:
    first = 0
    for task in queue:
        if not cluster.place(task, now_ms):
            break
        first += 1
        yield task
    if first == len(queue):
        return
    start_ms, spare = cluster.shadow(queue[first].gpus)
    for task in queue[first + 1 :]:
        in_time = now_ms + task.runs_ms <= start_ms
        if (in_time or task.gpus <= spare) and cluster.place(task, now_ms):
            spare -= 0 if in_time else task.gpus
            yield task


def run(tasks: list[Task], gpus: int, start: Start) -> Waits:
    """Every job through one policy, which is asked whenever somebody comes or goes."""
    cluster, queue, waited = Cluster(gpus), list[Task](), list[tuple[int, int]]()
    coming = sorted(tasks, reverse=True)
    while coming or queue:
        now_ms = min(([coming[-1].at_ms] if coming else []) + ([cluster.ends[0][0]] if cluster.ends else []))
        cluster.end_until(now_ms)
        while coming and coming[-1].at_ms <= now_ms:
            queue.append(coming.pop())
        started = list(start(queue, cluster, now_ms))
        for task in started:
            queue.remove(task)
            waited.append((task.gpus, now_ms - task.at_ms))
    return waits_of(waited)


def jobs_of(cluster: str, copy: int) -> list[TraceJob]:
    """Return the jobs of a virtual cluster, as traced (0) or in a copy."""
    return shifted(list(read_philly(TRACE, cluster)), copy)


def shifted(jobs: list[TraceJob], copy: int) -> list[TraceJob]:
    """Return the jobs as they are (0), or a copy of this number."""
    if not copy:
        return jobs
    chance = random.Random(copy)
    moved = [
        msgspec.structs.replace(
            job,
            at_ms=max(0, job.at_ms + round(chance.uniform(-SHIFT_MS, SHIFT_MS))),
            runs_ms=max(1, round(job.runs_ms * chance.uniform(1 - STRETCH, 1 + STRETCH))),
        )
        for job in jobs
    ]
    return sorted(moved, key=lambda job: job.at_ms)


def ours(cluster: str, jobs: list[TraceJob], config: Config) -> Waits:
    """Return the waits of these jobs under the production core."""
    done = simulate(cluster, hosts_of(CLUSTERS[cluster]), jobs, config, {})
    return waits_of([(gpus_of(each.job.request), each.started_ms - each.job.at_ms) for each in done.runs])


def gpus_of(request: Request) -> int:
    gpu = request.effective_gpu
    return gpu.count * request.copies if gpu is not None else 0


OURS: Final = "ours"
FIFO: Final = "FIFO"
EASY: Final = "EASY, told"
BASELINES: Final[dict[str, Start]] = {FIFO: fifo, EASY: easy, "greedy": greedy, "SJF, told": sjf}
Rows = dict[str, Waits]


def baselines(cluster: str, jobs: list[TraceJob], policies: tuple[str, ...]) -> Rows:
    """Return the waits of these jobs under some of the baselines."""
    tasks = [Task(job.at_ms, job.runs_ms, gpus_of(job.request)) for job in jobs]
    return {name: run(tasks, CLUSTERS[cluster], BASELINES[name]) for name in policies}


def one(of: tuple[str, int]) -> Rows:
    """Return the waits under each policy, for a cluster's trace or copy; for a copy those that ratios are made of."""
    cluster, copy = of
    jobs = jobs_of(cluster, copy)
    rows = baselines(cluster, jobs, (FIFO, EASY) if copy else tuple(BASELINES))
    rows[OURS] = ours(cluster, jobs, Config())
    return rows


class Ratios(NamedTuple):
    """Ours over EASY's mean wait, FIFO's wait of gangs, and FIFO's longest wait."""

    mean: float
    gangs: float
    longest: float


def ratios_of(rows: Rows) -> Ratios:
    mine, strict = rows[OURS], rows[FIFO]
    return Ratios(mine.mean / rows[EASY].mean, mine.gangs / strict.gangs, mine.longest / strict.longest)


#: what a ratio of `Ratios` is called in the book
CALLED: Final = ("mean wait / EASY's", "gangs' wait / FIFO's", "longest wait / FIFO's")
ALL_CLUSTERS: Final = "all clusters"


def figures_of(found: dict[tuple[str, int], Rows]) -> dict[str, list[float]]:
    """Return each cluster's ratios, the trace's first and then each copy's; of all clusters the geometric mean."""
    ratios = {of: ratios_of(rows) for of, rows in found.items()}
    clusters, copies = (list(dict.fromkeys(each)) for each in zip(*ratios, strict=True))
    figures = {
        f"{cluster}, {what}": [ratios[cluster, copy][at] for copy in copies]
        for cluster in clusters
        for at, what in enumerate(CALLED)
    }
    every = [statistics.geometric_mean(ratios[cluster, copy].mean for cluster in clusters) for copy in copies]
    return figures | {f"{ALL_CLUSTERS}, {CALLED[0]}": every}


def page_of(found: dict[tuple[str, int], Rows]) -> str:
    """Return the table of waits on the traces, then that of the ratios."""
    lines = [
        "Waits on the traces, in hours; `ours` is the production core, told no duration.",
        "",
        "| virtual cluster, GPUs | policy | mean wait h | gangs of 8 and more | longest |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for (name, copy), rows in found.items():
        for policy, waits in rows.items() if not copy else ():
            head = f"| {name}, {CLUSTERS[name]} | {policy} |"
            lines.append(f"{head} {waits.mean:.1f} | {waits.gangs:.1f} | {waits.longest:.0f} |")
    figures = figures_of(found)
    copies = sorted({copy for _, copy in found})
    lines += [
        "",
        f"Ours over the baselines, on the trace and on copies of it (arrivals shifted by up to {SHIFT_MS // 60_000}"
        f" minutes, durations by up to {STRETCH:.0%}).",
        "",
        "| figure | geometric mean | " + " | ".join(f"copy {copy}" if copy else "trace" for copy in copies) + " |",
        "| --- | ---: |" + " ---: |" * len(copies),
    ]
    for name, values in figures.items():
        cells = " | ".join(f"{value:.2f}" for value in values)
        lines.append(f"| {name} | {statistics.geometric_mean(values):.3f} | {cells} |")
    return "\n".join(lines)


def digest() -> str:
    """Return a digest of the code that a run's outcome comes from."""
    found = hashlib.sha256(Path(__file__).read_bytes() + TRACE.read_bytes())
    scheduler = Path(moorage.scheduler.__path__[0])
    for path in sorted(
        (*scheduler.glob("core/**/*.py"), *scheduler.glob("simulate/*.py"), *scheduler.glob("whatif/*.py"))
    ):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def run_all(todo: list[tuple[str, int]], keep: Path | None, processes: int) -> dict[tuple[str, int], Rows]:
    """Return what each run came to, in the order asked for; what was kept is not run again."""
    paths = {of: keep / f"{digest()}-{of[0]}-{of[1]}.json" for of in todo} if keep is not None else {}
    found: dict[tuple[str, int], Rows] = {
        of: msgspec.json.decode(path.read_bytes(), type=Rows) for of, path in paths.items() if path.exists()
    }
    left = [of for of in todo if of not in found]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for of, rows in zip(left, pool.imap(one, left), strict=True):
            found[of] = rows
            print(f"{of[0]}, {of[1]}: " + ", ".join(f"{ratio:.3f}" for ratio in ratios_of(rows)), flush=True)
            if of in paths:
                paths[of].parent.mkdir(parents=True, exist_ok=True)
                paths[of].write_bytes(msgspec.json.encode(rows))
    return {of: found[of] for of in todo}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the table there")
    parser.add_argument("--clusters", nargs="*", choices=list(CLUSTERS), default=list(CLUSTERS))
    parser.add_argument("--copies", type=int, default=COPIES)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", type=Path, help="a folder for outcomes, to go on from after a cut")
    options = parser.parse_args()
    busy = book.busy_percent()
    todo = [(cluster, copy) for copy in range(options.copies + 1) for cluster in options.clusters]
    found = run_all(todo, options.keep, options.processes)
    text = page_of(found)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
        figures = figures_of(found)
        book.keep("queueing", "python -m bench.queueing", {"four virtual clusters": figures}, busy, options.out.name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
