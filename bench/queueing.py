"""`make bench-queueing`: waits on the Philly jobs, four virtual clusters: ours beside FIFO, EASY, greedy and SJF.

The baselines are small simulations of their own: hosts of 8 GPUs, a gang of 8 or more takes whole free hosts, a smaller
request the host with the least room that suffices, nothing is preempted. EASY and SJF are told the true durations, and
EASY counts GPUs, not hosts. Ours is the production core (`moorage simulate`), told no duration; under `fifo` too, to
show how far the two simulations are apart. Hours; prints a table, and with `--out` writes it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from bench import book
from moorage.scheduler.core.config import Config
from moorage.scheduler.simulate.philly import CLUSTERS, HOST_GPUS, hosts_of, read_philly
from moorage.scheduler.simulate.run import simulate
from moorage.schemas.job import Request

TRACE: Final = Path(__file__).parent / "traces" / "philly" / "philly_gavel_seed0.csv"
HOUR_MS: Final = 3_600_000


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


def ours(cluster: str, config: Config) -> Waits:
    """The production core on the same jobs."""
    done = simulate(cluster, hosts_of(CLUSTERS[cluster]), list(read_philly(TRACE, cluster)), config, {})
    return waits_of([(gpus_of(each.job.request), each.started_ms - each.job.at_ms) for each in done.runs])


def tasks_of(cluster: str) -> list[Task]:
    return [Task(job.at_ms, job.runs_ms, gpus_of(job.request)) for job in read_philly(TRACE, cluster)]


def gpus_of(request: Request) -> int:
    gpu = request.effective_gpu
    return gpu.count * request.replicas if gpu is not None else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="also write the table there")
    out = parser.parse_args().out
    busy = book.busy_percent()
    policies: dict[str, Start] = {"FIFO": fifo, "EASY, told": easy, "greedy": greedy, "SJF, told": sjf}
    lines = [
        "| virtual cluster, GPUs | policy | mean wait h | gangs of 8 and more | longest |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    figures: dict[str, list[float]] = {}
    for name, gpus in CLUSTERS.items():
        tasks = tasks_of(name)
        rows = {policy: run(tasks, gpus, start) for policy, start in policies.items()}
        rows["ours, fifo"] = ours(name, Config(order="fifo"))
        rows["ours"] = ours(name, Config())
        for policy, waits in rows.items():
            lines.append(f"| {name}, {gpus} | {policy} | {waits.mean:.1f} | {waits.gangs:.1f} | {waits.longest:.0f} |")
        mine, told, strict = rows["ours"], rows["EASY, told"], rows["FIFO"]
        figures[f"{name}, mean wait / EASY's"] = [mine.mean / told.mean]
        figures[f"{name}, gangs' wait / FIFO's"] = [mine.gangs / strict.gangs]
        figures[f"{name}, longest wait / FIFO's"] = [mine.longest / strict.longest]
        holds = mine.mean <= told.mean, mine.longest <= 1.2 * strict.longest, mine.gangs <= strict.gangs
        said = ("mean <= EASY", "longest <= 1.2 FIFO", "gangs <= FIFO")
        verdict = ", ".join(f"{what}: {'yes' if true else 'no'}" for what, true in zip(said, holds, strict=True))
        lines.append(f"| {name}, {gpus} | {verdict} | | | |")
    text = "\n".join(lines)
    print(text)
    if out is not None:
        out.write_text(text + "\n")
        book.keep("queueing", "make bench-queueing", {"four virtual clusters": figures}, busy, out.name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
