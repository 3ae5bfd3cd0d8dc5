"""What one decision of the ranker costs, in µs of processor time, on fleets in steady use.

Run by `python -m bench.studies.placement.decisions`.

    python -m bench.studies.placement.decisions [--decisions 4000] [--only 1213 10000 tenants] [--ranker fragments]

Each fleet is filled to 90 %, or until it takes hardly more, then lives on: as many members end as start, at random.
A decision is what the planner asks for (`prepare` and `choose`); taking and giving are told apart. `tenants` is the
1,213 hosts with 1,000 shapes, each tenant with CPU and memory of its own. What it takes to ask the clock (a call of the
kernel, 1 to 3 µs) is measured before and taken off. The memory is what the ranker's tables, scores and mix hold after.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy

from bench import book
from bench.bounds import bound_of
from bench.studies.placement.openb import NO_PEERS, NOBODY, fleet_of, ranker_of, request_of
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import Host
from moorage.scheduler.core.fleet.shape import Shape, Shapes
from moorage.scheduler.core.rank.ranker import Choice, Ranker
from moorage.testing.simulate.openb import TraceHost, TraceTask, node_list, pod_lists, read_hosts, read_tasks

TRACES: Final = Path(__file__).resolve().parents[2] / "traces/openb"
PAGE: Final = Path(__file__).resolve().parents[2] / "DECISIONS.md"
FULL_PERCENT: Final = 90
#: gangs that are taken and given back at the end, and replicas of each
GANGS: Final = 50
GANG: Final = 64
#: arrivals between two looks at whether a fleet still fills
LOOK_EVERY: Final = 2_000
SEED: Final = 42


@dataclass
class Cost:
    """µs of processor time, and MiB that the ranker holds."""

    choose: list[float]
    take: list[float]
    give: list[float]
    memory_mib: float
    full_percent: float
    failed: int
    gang: list[float] = field(default_factory=list)  # taking one replica of a gang, the mean of each gang


def openb_hosts() -> list[TraceHost]:
    return read_hosts(node_list(TRACES))


def big_hosts() -> list[TraceHost]:
    """10,000 hosts of 8 GPUs, of four models with processors as such hosts have them."""
    kinds = (("G2", 96_000, 393_216), ("G3", 128_000, 786_432), ("V100M32", 96_000, 786_432), ("T4", 104_000, 524_288))
    return [TraceHost(f"h{n}", cpu, memory, 8, model) for n in range(10_000) for model, cpu, memory in [kinds[n % 4]]]


def tenant_tasks(tasks: list[TraceTask]) -> list[TraceTask]:
    """1,000 shapes: the trace's tasks as so many tenants ask, each with some processors and memory of its own."""
    chance = random.Random(SEED)
    source = [task for task in tasks if task.gpus or chance.random() < 0.5]
    made = []
    for number in range(1000):
        task = chance.choice(source)
        cpu = task.cpu_milli + 10 * (number % 100)
        made.append(TraceTask(f"t{number}", cpu, task.memory_mib + 16 * (number // 100), task.gpus, task.gpu_milli))
    return made


def clock_us() -> float:
    """What two looks at the clock are apart, µs: the median of many."""
    clock = time.process_time_ns
    return statistics.median(-(clock() - clock()) for _ in range(2001)) / 1000


def measure(hosts: list[TraceHost], tasks: list[TraceTask], name: str, decisions: int) -> Cost:
    """Fill the fleet, let it live until all is warm, then measure."""
    shapes = Shapes()
    kinds = [(shapes.of(request_of(task)), task.gpu_demand_milli) for task in tasks]
    ranker = ranker_of(name, SEED)
    chance = random.Random(SEED)
    ordered = list(hosts)
    random.Random(SEED).shuffle(ordered)
    fleet = fleet_of(ordered)
    capacity = 1000 * sum(host.gpus for host in hosts)
    members: list[tuple[Host, Shape, int, int]] = []
    used, before_used = 0, -1
    full = FULL_PERCENT * capacity // 100
    while used < full:
        for _ in range(LOOK_EVERY):
            if used < full:
                used += _arrive(fleet, ranker, members, *chance.choice(kinds))
        if (used - before_used) * 1000 < capacity:
            full = used  # processors or memory are what is used up: it takes hardly anything more
        before_used = used
    gc.collect()
    gc.freeze()
    cost = Cost([], [], [], 0.0, 0.0, 0)
    clock, off = time.process_time_ns, clock_us()
    for number in range(2 * decisions):  # the first half warms up
        shape, milli = chance.choice(kinds)
        ranker.arrived(shape, 1)
        while used >= full:
            index = chance.randrange(len(members))
            members[index], members[-1] = members[-1], members[index]
            host, ended, mask, share = members.pop()
            began = clock()
            fleet.give(host, ended, mask)
            cost.give.append((clock() - began) / 1000)
            used -= share
        began = clock()
        ranker.prepare(fleet)
        choice = ranker.choose(fleet, shape, NO_PEERS, NOBODY)
        chosen = clock()
        if choice is None:
            cost.failed += number >= decisions
        else:
            fleet.take(choice.host, shape, choice.mask)
            cost.take.append((clock() - chosen) / 1000)
            members.append((choice.host, shape, choice.mask, milli))
            used += milli
        if number >= decisions:
            cost.choose.append((chosen - began) / 1000)
    cost.choose, cost.take, cost.give = (
        [max(0.0, us - off) for us in each] for each in (cost.choose, cost.take, cost.give)
    )
    cost.full_percent = 100 * used / capacity
    cost.memory_mib = held_mib(ranker)
    cost.gang = _gangs(fleet, ranker, shapes.of(request_of(TraceTask("gang", 1000, 1024, 1, 1000))))
    return cost


def _gangs(fleet: Fleet, ranker: Ranker, shape: Shape) -> list[float]:
    """µs that taking the devices of one replica takes, the mean of each gang; only whole gangs count."""
    clock, off = time.process_time_ns, clock_us()
    means: list[float] = []
    for _ in range(GANGS):
        taken: list[Choice] = []
        spent = 0
        while len(taken) < GANG and (choice := ranker.choose(fleet, shape, NO_PEERS, NOBODY)) is not None:
            began = clock()
            fleet.take(choice.host, shape, choice.mask)
            spent += clock() - began
            taken.append(choice)
        for choice in taken:
            fleet.give(choice.host, shape, choice.mask)
        if len(taken) == GANG:
            means.append(max(0.0, spent / 1000 / GANG - off))
    return means


def _arrive(fleet: Fleet, ranker: Ranker, members: list[tuple[Host, Shape, int, int]], shape: Shape, milli: int) -> int:
    ranker.arrived(shape, 1)
    ranker.prepare(fleet)
    choice = ranker.choose(fleet, shape, NO_PEERS, NOBODY)
    if choice is None:
        return 0
    fleet.take(choice.host, shape, choice.mask)
    members.append((choice.host, shape, choice.mask, milli))
    return milli


def held_mib(ranker: Ranker) -> float:
    """What the arrays and tables of a ranker take; hosts, classes and shapes are the fleet's and not counted."""
    held = getattr(ranker, "held_bytes", None)
    return held() / (1 << 20) if held is not None else 0.0


def fleets() -> dict[str, Callable[[], tuple[list[TraceHost], list[TraceTask]]]]:
    def tasks() -> list[TraceTask]:
        return read_tasks(pod_lists(TRACES)["default"])

    return {
        "1213": lambda: (openb_hosts(), tasks()),
        "10000": lambda: (big_hosts(), tasks()),
        "tenants": lambda: (openb_hosts(), tenant_tasks(tasks())),
    }


HEAD: Final = """# What a decision costs

Written by `python -m bench.studies.placement.decisions`, which describes the fleets, in µs of processor time.
Must and goal are mean / p99; `gang` is what taking the devices of one replica of a gang of 64 takes, `MiB` what the
ranker holds.

"""
COLUMNS: Final = """| fleet | full % | mean µs | p50 | p99 | must | goal | take | give | gang | no room % | MiB |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""


def row(name: str, cost: Cost) -> str:
    ranks = sorted(cost.choose)
    p50, p99 = ranks[len(ranks) // 2], ranks[len(ranks) * 99 // 100]
    bounds = [bound_of("decisions", f"{name}, {what}, µs") for what in ("mean", "p99")]
    must = " / ".join(f"{bound.must:g}" for bound in bounds if bound is not None)
    goal = " / ".join(f"{bound.goal:g}" for bound in bounds if bound is not None and bound.goal is not None)
    return (
        f"| {name} | {cost.full_percent:.1f} | {statistics.fmean(ranks):.1f} | {p50:.1f} | {p99:.1f} | "
        f"{must} | {goal} | {statistics.fmean(cost.take):.1f} | "
        f"{statistics.fmean(cost.give):.1f} | {statistics.fmean(cost.gang or [0]):.1f} | "
        f"{100 * cost.failed / len(ranks):.1f} | {cost.memory_mib:.1f} |"
    )


def figures_of(name: str, cost: Cost) -> dict[str, list[float]]:
    """For the book; µs, but for the memory."""
    ranks = sorted(cost.choose)
    return {
        f"{name}, mean, µs": [statistics.fmean(ranks)],
        f"{name}, p99, µs": [ranks[len(ranks) * 99 // 100]],
        f"{name}, commit, µs": [statistics.fmean(cost.take)],
        f"{name}, release, µs": [statistics.fmean(cost.give)],
        f"{name}, a gang's replica, µs": cost.gang,
        f"{name}, the ranker's MiB": [cost.memory_mib],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=4000, help="measured; as many before to warm up")
    parser.add_argument("--only", nargs="*", choices=list(fleets()), help="some fleets alone; writes no page")
    parser.add_argument("--ranker", default="fragments", help="also a classic policy, or module:Class")
    options = parser.parse_args()
    busy = book.busy_percent()
    print(COLUMNS, flush=True)
    rows, chapters = [], {}
    for name, make in fleets().items():
        if not options.only or name in options.only:
            cost = measure(*make(), options.ranker, options.decisions)
            rows.append(row(name, cost))
            chapters[name] = figures_of(name, cost)
            print(rows[-1], flush=True)
    if not options.only and options.ranker == "fragments":
        machine = f"{os.cpu_count()} cores, Python {platform.python_version()}, numpy {numpy.__version__}"
        on = f"- {machine}, {time.strftime('%Y-%m-%d', time.gmtime())}, machine {busy:.0f} % busy before"
        PAGE.write_text("\n".join((HEAD + on, "", COLUMNS, *rows, "")))
        book.keep("decisions", "python -m bench.studies.placement.decisions", chapters, busy, PAGE.name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
