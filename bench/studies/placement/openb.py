"""The saturation experiment of Weng et al. (USENIX ATC 2023) through the production fleet, shapes and rankers.

An empty cluster; the trace in random order, then tasks drawn from it with replacement until the GPU requests add up to
130 % of capacity; nothing departs, each task is tried once. The figure is the part of all GPUs that is allocated, in
percent, averaged over the arrivals at which the part asked for so far rounds to 100 % (95, 110, 120).

What the trace calls a share of a GPU is a request in mode `mps` with a compute share, rounded up to whole percent; a
model is a pattern for whole words. Devices take as many sharers as anywhere (8). Only the order of hosts and of tasks
depends on the seed; every policy sees the same, and the published runs of that seed saw it too (`draws.py`).
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from bench.studies.placement.classic import CLASSIC, Random
from bench.studies.placement.draws import drawn
from moorage.ranking.mix import UNIT
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shape, Shapes
from moorage.scheduler.core.ledger.inventory import Inventory
from moorage.scheduler.core.ledger.state import Worker
from moorage.scheduler.core.rank.ranker import Ranker
from moorage.scheduler.core.rank.rankers import ranker_class
from moorage.schemas.frames import Device
from moorage.schemas.gpu import GpuSpec, Share
from moorage.schemas.job import Request, Resources, Run
from moorage.testing.simulate.openb import TraceHost, TraceTask

NO_PEERS: Final[dict[int, int]] = {}
NOBODY: Final[frozenset[int]] = frozenset()
#: percent of capacity asked for at which the figures are taken, and up to which classes of requests are counted
POINTS: Final = (95, 100, 110, 120)
COUNTED_AT: Final = 100
CLASSES: Final = ("multi-gpu", "model-bound", "one-gpu", "share", "cpu-only")
#: nominal memory of the published models is masked or irrelevant here: no task of the trace asks for device memory
DEVICE_MIB: Final = 16_384


@dataclass
class Outcome:
    """One run. `allocated` is percent of all GPUs by point; asked and lost are requests by class up to 100 %."""

    policy: str
    trace: str
    seed: int
    told: bool
    allocated: dict[int, float] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    decision_us: float = 0.0


def request_of(task: TraceTask) -> Request:
    """The request that a service would make for a task of the trace."""
    gpu: GpuSpec | None = None
    models = [f"={model}" for model in task.models]
    if task.is_share:
        gpu = GpuSpec(model=models or None, sharing="mps", share=Share(0, -(-task.gpu_milli // 10)))
    elif task.gpus:
        gpu = GpuSpec(count=task.gpus, model=models or None)
    return Request(gpu=gpu, resources=Resources(task.cpu_milli, task.memory_mib), run=Run(argv=["true"]))


def worker_of(num: int, host: TraceHost) -> Worker:
    """A worker as the ledger knows it once such a host has joined."""
    worker = Worker(num, host.name, host.name)
    worker.session = "bench"
    worker.inventory = Inventory(
        gpu_pool=[
            Device(index, "nvidia", host.model, f"GPU-{host.name}-{index}", DEVICE_MIB) for index in range(host.gpus)
        ],
        drivers=["process"],
        modes=["exclusive", "mps"],
        cpu_milli=host.cpu_milli,
        memory_mib=host.memory_mib,
    )
    return worker


def fleet_of(hosts: list[TraceHost]) -> Fleet:
    """All hosts, empty and heard; ties fall in this order."""
    fleet = Fleet()
    for num, host in enumerate(hosts):
        made = fleet.join(worker_of(num, host), [])
        made.heard = True
        fleet.refresh(made)
    return fleet


def classes_of(task: TraceTask) -> list[str]:
    """The classes of requests that a task counts in."""
    if not task.gpus:
        return ["cpu-only"]
    kind = "multi-gpu" if task.gpus > 1 else "share" if task.is_share else "one-gpu"
    return [kind, "model-bound"] if task.models else [kind]


class Told:
    """Shapes of a list's tasks, interned once; `tell` gives a ranker the whole mix before the first arrival."""

    def __init__(self, tasks: list[TraceTask]) -> None:
        shapes = Shapes()
        self.shape_of: dict[tuple[object, ...], Shape] = {}
        self._tasks = tasks
        for task in tasks:
            key = _key(task)
            if key not in self.shape_of:
                self.shape_of[key] = shapes.of(request_of(task))

    def of(self, task: TraceTask) -> Shape:
        return self.shape_of[_key(task)]

    def tell(self, ranker: Ranker) -> None:
        mix = getattr(ranker, "mix", None)
        if mix is not None:
            # at once: one by one, in the order of the list, the mix would see it change and count the first ones less
            mix.counts = {shape: UNIT * count for shape, count in Counter(map(self.of, self._tasks)).items()}
            mix.total = UNIT * len(self._tasks)
            mix.use()


def _key(task: TraceTask) -> tuple[object, ...]:
    return (task.cpu_milli, task.memory_mib, task.gpus, task.gpu_milli, task.models)


def ranker_of(policy: str, seed: int) -> Ranker:
    """Return a ranker by its name in `CLASSIC` or in the settings; the random one gets the run's seed."""
    if policy == Random.name:
        return Random(seed)
    return (CLASSIC[policy] if policy in CLASSIC else ranker_class(policy))()


def run(
    hosts: list[TraceHost],
    tasks: list[TraceTask],
    policy: str,
    trace: str,
    seed: int,
    *,
    told: bool,
    until_percent: int = 130,
) -> Outcome:
    """One run of one policy; with `told` the mix is known from the start and not learned."""
    ordered, arriving = drawn(hosts, tasks, seed)
    fleet, ranker, shapes = fleet_of(ordered), ranker_of(policy, seed), Told(tasks)
    capacity = 1000 * sum(host.gpus for host in hosts)
    if told:
        shapes.tell(ranker)
    order = [(task, shapes.of(task)) for task in arriving]
    out = Outcome(policy, trace, seed, told)
    sums: dict[int, list[int]] = {point: [0, 0] for point in POINTS}
    asked = used = decisions = 0
    gc.collect()
    gc.freeze()
    began = time.process_time()
    for task, shape in order:
        if not told:
            ranker.arrived(shape, 1)
        asked += task.gpu_demand_milli
        ranker.prepare(fleet)
        choice = ranker.choose(fleet, shape, NO_PEERS, NOBODY)
        decisions += 1
        if choice is not None:
            fleet.take(choice.host, shape, choice.mask)
            used += task.gpu_demand_milli
        percent = (200 * asked + capacity) // (2 * capacity)  # rounded
        if percent <= COUNTED_AT:
            for kind in classes_of(task):
                out.asked[kind] += 1
                out.lost[kind] += choice is None
        if percent in sums:
            sums[percent][0] += used
            sums[percent][1] += 1
        elif percent > until_percent:
            break
    out.decision_us = (time.process_time() - began) / decisions * 1e6
    out.allocated = {point: 100 * total / (count * capacity) for point, (total, count) in sums.items() if count}
    return out
