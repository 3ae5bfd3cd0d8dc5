"""Lists of the same family as the published ones, made from those in the folder.

The published lists are the default one with the part of a class changed, or with models named by some of its tasks
(Weng et al., USENIX ATC 2023, figures 11 to 14). These are made the same way from `default`, and from `gpuspec33` for
which models are named, with a source of chance that depends on the list's name alone. They are not the published lists
of like names, so they have names of their own:

    made-cpu200        20.0 % of the tasks ask for no GPU (cpu050 is 5.0 %, the default list 13.3 %)
    made-gpushare40    40 % of the GPUs are asked for by tasks that share; as many tasks with GPUs as before
    made-multigpu30    30 % of the GPUs are asked for by tasks with several; as many other tasks as before
    made-gpuspec20     20 % of the tasks with GPUs name models: what tasks of the same shape name in gpuspec33
    made-multigpu30-gpuspec20    both
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from moorage.testing.simulate.openb import TraceTask, pod_lists, read_tasks

PREFIX: Final = "made-"
#: lists of a folder that the others are made from
NEEDED: Final = ("default", "gpuspec33")
#: percent of the tasks with GPUs that name models in gpuspec33, which the others are scaled from
NAMED_THERE: Final = 33.8
MADE: Final = (
    "gpuspec05",
    "gpuspec15",
    "gpuspec20",
    "gpuspec25",
    "multigpu20-gpuspec10",
    "multigpu30-gpuspec20",
    "cpu100",
    "cpu200",
    "cpu300",
    "gpushare20",
    "gpushare40",
    "gpushare60",
    "gpushare80",
    "multigpu20",
    "multigpu30",
    "multigpu40",
)


def names() -> list[str]:
    """The lists that can be made."""
    return [PREFIX + name for name in MADE]


def tasks_of(folder: Path, name: str) -> list[TraceTask]:
    """A list of the folder, or one of `names()`. Raises KeyError for any other, and TraceError as reading does."""
    known = pod_lists(folder)
    if not name.startswith(PREFIX):
        return read_tasks(known[name])
    tasks = read_tasks(known["default"])
    for part in name.removeprefix(PREFIX).split("-"):
        kind, number = part.rstrip("0123456789"), int(part.lstrip("abcdefghijklmnopqrstuvwxyz"))
        chance = random.Random(f"{name} {part}")
        if kind == "gpuspec":
            tasks = _named(tasks, read_tasks(known["gpuspec33"]), number, chance)
        else:
            tasks = _RECIPES[kind](tasks, number, chance)
    return tasks


def _cpu(tasks: list[TraceTask], per_mille: int, chance: random.Random) -> list[TraceTask]:
    without, others = _split(tasks, lambda task: not task.gpus)
    count = round(len(others) * per_mille / (1000 - per_mille))
    return others + chance.choices(without, k=count)


def _gpushare(tasks: list[TraceTask], percent: int, chance: random.Random) -> list[TraceTask]:
    """Both classes drawn anew, as many in all, shares so often that their part of the GPUs is right."""
    without, with_gpu = _split(tasks, lambda task: not task.gpus)
    shares, others = _split(with_gpu, lambda task: task.is_share)
    each, other = _mean_milli(shares), _mean_milli(others)
    part = percent * other / (percent * other + (100 - percent) * each)
    count = round(len(with_gpu) * part)
    return without + chance.choices(shares, k=count) + chance.choices(others, k=len(with_gpu) - count)


def _multigpu(tasks: list[TraceTask], percent: int, chance: random.Random) -> list[TraceTask]:
    several, others = _split(tasks, lambda task: task.gpus > 1)
    rest = sum(task.gpu_demand_milli for task in others)
    wanted, asked = rest * percent / (100 - percent), 0
    added: list[TraceTask] = []
    while asked < wanted:
        added.append(chance.choice(several))
        asked += added[-1].gpu_demand_milli
    return others + added


def _named(tasks: list[TraceTask], like: list[TraceTask], percent: int, chance: random.Random) -> list[TraceTask]:
    """Each task names what a task of its shape, drawn at random, names there; and that as often as asked for."""
    found: dict[tuple[int, int, int], list[tuple[str, ...]]] = defaultdict(list)
    for task in like:
        found[task.cpu_milli, task.gpus, task.gpu_milli].append(task.models)
    keep = percent / NAMED_THERE
    return [
        replace(task, models=chance.choice(found[task.cpu_milli, task.gpus, task.gpu_milli]))
        if task.gpus and chance.random() < keep
        else task
        for task in tasks
    ]


def _split(tasks: list[TraceTask], which: Callable[[TraceTask], bool]) -> tuple[list[TraceTask], list[TraceTask]]:
    return [task for task in tasks if which(task)], [task for task in tasks if not which(task)]


def _mean_milli(tasks: list[TraceTask]) -> float:
    return sum(task.gpu_demand_milli for task in tasks) / len(tasks)


_RECIPES: Final[dict[str, Callable[[list[TraceTask], int, random.Random], list[TraceTask]]]] = {
    "cpu": _cpu,
    "gpushare": _gpushare,
    "multigpu": _multigpu,
}
