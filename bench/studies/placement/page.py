"""The page of the placement benchmark: ours against FGD and the published runs; and the book's figures."""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from bench.bounds import Bound, bound_of
from bench.studies.placement import relatives
from bench.studies.placement.openb import CLASSES, Outcome

ROOT: Final = Path(__file__).resolve().parents[3]
FIRST_SEED: Final = 42
OURS: Final = "fragments"
#: policy here -> its name in the published results
PUBLISHED: Final = {
    "random": "Random",
    "dot-product": "DotProd",
    "gpu-clustering": "GpuClustering",
    "gpu-packing": "GpuPacking",
    "best-fit": "BestFit",
    "fgd": "FGD",
}
#: a class may lose so many more of its requests, in points, than under FGD
CLASS_POINTS_MAX: Final = 2.0
#: a run is the published one where it allocates the same to a hundredth of a point, to which theirs are rounded twice
SAME_POINTS: Final = 0.01
AT: Final = 100

#: outcomes by policy, list, and whether the mix was told
Found = dict[tuple[str, str, bool], list[Outcome]]
#: percent allocated as published, by list and policy, then by seed
Published = dict[tuple[str, str], dict[int, float]]


def read_published(folder: Path) -> Published:
    """Allocation at 100 % by list and policy, then by seed, as published; empty where the folder has none."""
    found: Published = {}
    for path in sorted(folder.glob("published_*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                name = row["workload"].removeprefix("openb_pod_list_")
                by_seed = found.setdefault((name, row["policy"].partition("-")[2]), {})
                by_seed[int(row["seed"])] = float(row["alloc_pct_at_100"])
    return found


def allocation_bound(name: str) -> Bound | None:
    """What the placement of a list must allocate, where that was set."""
    return bound_of("placement", f"{name}, allocated %")


def mean_and_error(values: Iterable[float]) -> tuple[float, float]:
    """Mean, and standard error of the mean; 0 for one value."""
    each = list(values)
    error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else 0.0
    return statistics.fmean(each), error


def lost_percent(outcomes: list[Outcome], kind: str) -> float:
    asked = sum(outcome.asked[kind] for outcome in outcomes)
    return 100 * sum(outcome.lost[kind] for outcome in outcomes) / asked if asked else math.nan


def against_fgd(found: Found, published: Published, names: list[str]) -> list[str]:
    """Ours and FGD of the same seeds, what is wanted, and whether the gain counts (above two standard errors)."""
    lines = [
        "| list | ours, mix learned | mix told | FGD | gain (s.e.) | published FGD | must | goal | |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for name in names:
        ours, told, fgd = (found.get(key, []) for key in ((OURS, name, False), (OURS, name, True), ("fgd", name, True)))
        mean, _ = mean_and_error(o.allocated[AT] for o in ours)
        said = mean_and_error(o.allocated[AT] for o in told)[0] if told else math.nan
        base = mean_and_error(o.allocated[AT] for o in fgd)[0] if fgd else math.nan
        gain, error = (
            mean_and_error(a.allocated[AT] - b.allocated[AT] for a, b in zip(ours, fgd, strict=True))
            if fgd
            else (math.nan, 0.0)
        )
        bound = allocation_bound(name)
        must = bound.must if bound is not None else math.nan
        goal = bound.goal if bound is not None and bound.goal is not None else math.nan
        verdict = "" if math.isnan(must) else "goal" if mean >= goal else "must" if mean >= must else "**below**"
        row: list[float | str] = [
            mean,
            said,
            base,
            f"{gain:+.2f} ({error:.2f})",
            statistics.fmean(published.get((name, "FGD"), {0: math.nan}).values()),
            must,
            goal,
        ]
        lines.append(f"| {name} | {' | '.join(map(_cell, row))} | {verdict} |")
    return lines


def by_class(found: Found, names: list[str]) -> list[str]:
    """Requests lost up to 100 %, in percent of their class: ours / FGD."""
    lines = ["| list | " + " | ".join(CLASSES) + " |", "| --- |" + " ---: |" * len(CLASSES)]
    for name in names:
        ours, fgd = found[OURS, name, False], found.get(("fgd", name, True), [])
        cells = []
        for kind in CLASSES:
            mine, theirs = lost_percent(ours, kind), lost_percent(fgd, kind)
            mark = " **over**" if mine > theirs + CLASS_POINTS_MAX else ""
            cells.append("–" if math.isnan(mine) else f"{mine:.1f} / {theirs:.1f}{mark}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def reproduced(found: Found, published: Published, names: list[str], policies: list[str]) -> list[str]:
    """Every classic policy: mean here / published, and how many runs are the published ones."""
    shown = [policy for policy in policies if policy in PUBLISHED]
    lines = ["| list | " + " | ".join(shown) + " |", "| --- |" + " ---: |" * len(shown)]
    for name in names:
        cells = []
        for policy in shown:
            pairs = beside(found[policy, name, True], published.get((name, PUBLISHED[policy]), {}))
            same = sum(abs(ours - theirs) < SAME_POINTS for ours, theirs in pairs)
            said = statistics.fmean(theirs for _, theirs in pairs) if pairs else math.nan
            cells.append(f"{_mean(found[policy, name, True]):.2f} / {_cell(said)} ({same})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def beside(outcomes: list[Outcome], by_seed: dict[int, float]) -> list[tuple[float, float]]:
    """Allocation here and as published, of each run that was published."""
    return [(one.allocated[AT], by_seed[one.seed]) for one in outcomes if one.seed in by_seed]


def _mean(outcomes: list[Outcome]) -> float:
    return mean_and_error(outcome.allocated[AT] for outcome in outcomes)[0]


def figures_of(found: Found, published: Published, names: list[str]) -> dict[str, list[float]]:
    """For the book: percent allocated by seed, and the worst of what must stay near FGD and near what was published."""
    figures = {f"{name}, allocated %": [o.allocated[AT] for o in found[OURS, name, False]] for name in names}
    under = [
        _mean(found["fgd", name, True]) - _mean(found[OURS, name, False])
        for name in names
        if ("fgd", name, True) in found
    ]
    figures["most that a list stays under FGD, points"] = [max(under)] if under else []
    for which, made in (("lists of the folder", False), ("made lists", True)):
        worse = [
            lost_percent(found[OURS, name, False], kind) - lost_percent(found["fgd", name, True], kind)
            for name in names
            for kind in CLASSES
            if name.startswith(relatives.PREFIX) == made and ("fgd", name, True) in found
        ]
        figures[f"most that a class loses over FGD, points, {which}"] = [max(p for p in worse if not math.isnan(p))]
    off: dict[str, list[float]] = {}
    for (policy, name, told), outcomes in found.items():
        pairs = beside(outcomes, published.get((name, PUBLISHED.get(policy, "")), {})) if told else []
        if pairs:
            who = "FGD" if policy == "fgd" else "another classic policy"
            mean = abs(statistics.fmean(ours - theirs for ours, theirs in pairs))
            off.setdefault(f"{who} off the published, points, at most", []).append(mean)
    figures |= {figure: [max(each)] for figure, each in off.items()}
    return {name: values for name, values in figures.items() if values}


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else "–" if math.isnan(value) else f"{value:.2f}"


def report(found: Found, published: Published, names: list[str], options: argparse.Namespace, took: str) -> str:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    costs = sorted(o.decision_us for key, outcomes in found.items() if key[0] == OURS for o in outcomes)
    seeds = f"{FIRST_SEED}..{FIRST_SEED + options.seeds - 1}"
    folder = options.traces.resolve()
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder.name
    listed = [name for name in names if not name.startswith(relatives.PREFIX)]
    return "\n".join(
        [
            "# Results: placement",
            "",
            "Written by `python -m bench.studies.placement.run`. The tables have allocated GPUs in percent once 100 % were",
            "asked for. `bench/studies/placement/openb.py` describes the experiment, `docs/explanation/ranking.md` the",
            "policies. Lists whose names begin with `made-` are made from the others",
            "(`bench/studies/placement/relatives.py`).",
            "",
            f"- trace {shown}, seeds {seeds}, runs paired by seed; s.e. is the standard error of the paired difference",
            f"- {os.cpu_count()} cores of {model}, Python {platform.python_version()}, "
            f"numpy {importlib.metadata.version('numpy')}, {time.strftime('%Y-%m-%d', time.gmtime())}, {took}",
            f"- `python -m bench.studies.placement.run {' '.join(sys.argv[1:])}`".replace(str(options.traces), str(shown)),
            f"- a decision of ours cost {statistics.median(costs):.0f} µs of processor time on average, filling up and"
            " learning included",
            "",
            "## Ours against FGD",
            "",
            *against_fgd(found, published, names),
            "",
            "## Requests lost by class, percent: ours / FGD",
            "",
            *by_class(found, names),
            "",
            "## The classic policies: here / published",
            "",
            "In brackets: how many runs allocate what the published run of that seed did, to a hundredth of a point.",
            "",
            *reproduced(found, published, listed, options.policies),
            "",
        ]
    )
