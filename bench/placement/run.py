"""`make bench-placement`: allocation under saturation, ours against FGD and the classics, into RESULTS-placement.md.

    python -m bench.placement.run [--traces FOLDER] [--seeds 10] [--lists default …] [--made] [--policies …] [--dry]

Another folder of the same format may be given; where it holds `published_*.csv`, its figures stand beside ours. With
`--made`, lists made from those of the folder (`relatives.py`) are run as well: ours and FGD. Tasks come in the order of
the published run of that seed, so that each run of a classic policy has its published figure.

The whole takes a core some 15 minutes. With `--keep FOLDER` each outcome is kept there under a digest of the code, the
traces and the run, and the same command goes on where it was cut off, until the page is written.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.metadata
import math
import multiprocessing
import os
import pickle
import platform
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from bench import book
from bench.placement import relatives
from bench.placement.openb import CLASSES, Outcome, run
from moorage.scheduler.simulate.openb import node_list, pod_lists, read_hosts

ROOT: Final = Path(__file__).resolve().parents[2]
TRACES: Final = ROOT / "bench/traces/openb"
RESULTS: Final = ROOT / "bench/RESULTS-placement.md"
FIRST_SEED: Final = 42
OURS: Final = "fragments"
CLASSIC: Final = ("fgd", "best-fit", "gpu-packing", "gpu-clustering", "dot-product", "random")
#: policy here -> its name in the published results
PUBLISHED: Final = {
    "random": "Random",
    "dot-product": "DotProd",
    "gpu-clustering": "GpuClustering",
    "gpu-packing": "GpuPacking",
    "best-fit": "BestFit",
    "fgd": "FGD",
}
#: what the placement of this list must allocate, and should, in percent at 100 % asked for
WANTED: Final = {
    "default": (95.5, 95.8),
    "gpuspec33": (93.5, 94.5),
    "cpu050": (95.5, 95.8),
    "gpushare100": (86.7, 87.0),
    "multigpu50": (97.0, 97.3),
}
#: a class may lose so many more of its requests, in points, than under FGD
CLASS_POINTS_MAX: Final = 2.0
#: a run is the published one where it allocates the same to a hundredth of a point, to which theirs are rounded twice
SAME_POINTS: Final = 0.01
AT: Final = 100
#: what an outcome depends on besides its job and the traces
CODE: Final = (
    "scheduler/moorage/scheduler/core/rank",
    "scheduler/moorage/scheduler/core/fleet.py",
    "scheduler/moorage/scheduler/core/shape.py",
    "scheduler/moorage/scheduler/simulate/openb.py",
    "bench/placement/draws.py",
    "bench/placement/openb.py",
    "bench/placement/relatives.py",
)

Job = tuple[str, str, str, int, bool, int]
Found = dict[tuple[str, str, bool], list[Outcome]]


def one(job: Job) -> Outcome:
    """A run in a process of its own: folder, list, policy, seed, told, percent at which it ends."""
    folder, name, policy, seed, told, until = job
    path = Path(folder)
    return run(
        read_hosts(node_list(path)),
        relatives.tasks_of(path, name),
        policy,
        name,
        seed,
        told=told,
        until_percent=until,
    )


def digest_of(folder: Path) -> bytes:
    """Of the code that outcomes come from, and the traces."""
    found = hashlib.sha256(platform.python_version().encode())
    for root in (*(ROOT / name for name in CODE), folder):
        for path in sorted(root.glob("**/*") if root.is_dir() else [root]):
            if path.suffix in (".py", ".csv"):
                found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.digest()


def paths_of(jobs: list[Job], options: argparse.Namespace) -> dict[Job, Path]:
    """Where the outcome of each job is kept."""
    code = digest_of(options.traces)
    return {job: options.keep / hashlib.sha256(code + repr(job[1:]).encode()).hexdigest()[:32] for job in jobs}


def run_all(jobs: list[Job], options: argparse.Namespace, found: Found) -> int:
    """Run what is not kept yet, into `found`; how many outcomes were kept."""
    paths: dict[Job, Path] = {}
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        paths = paths_of(jobs, options)
    kept = [job for job in jobs if job in paths and paths[job].exists()]
    outcomes: list[Outcome] = [pickle.loads(paths[job].read_bytes()) for job in kept]
    todo = [job for job in jobs if job not in set(kept)]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for job, outcome in zip(todo, pool.imap(one, todo), strict=True):
            outcomes.append(outcome)
            if job in paths:
                part = paths[job].with_suffix(".part")
                part.write_bytes(pickle.dumps(outcome))
                part.replace(paths[job])
    for outcome in outcomes:
        found.setdefault((outcome.policy, outcome.trace, outcome.told), []).append(outcome)
    for each in found.values():
        each.sort(key=lambda outcome: outcome.seed)
    return len(kept)


def jobs_of(options: argparse.Namespace, names: list[str]) -> list[Job]:
    """Ours with the mix learned, and told; the others told, as published; on lists made here ours learned, and FGD."""
    variants = [(policy, True) for policy in options.policies] + [(OURS, False)]
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    return [
        (str(options.traces), name, policy, seed, told, options.until)
        for policy, told in variants
        for name in names
        for seed in seeds
        if not name.startswith(relatives.PREFIX) or (policy, told) in ((OURS, False), ("fgd", True))
    ]


def published(folder: Path) -> dict[tuple[str, str], dict[int, float]]:
    """Allocation at 100 % by list and policy, then by seed, as published; empty where the folder has none."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for path in sorted(folder.glob("published_*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                name = row["workload"].removeprefix("openb_pod_list_")
                by_seed = found.setdefault((name, row["policy"].partition("-")[2]), {})
                by_seed[int(row["seed"])] = float(row["alloc_pct_at_100"])
    return found


def mean_and_error(values: Iterable[float]) -> tuple[float, float]:
    """Mean, and standard error of the mean; 0 for one value."""
    each = list(values)
    error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else 0.0
    return statistics.fmean(each), error


def lost_percent(outcomes: list[Outcome], kind: str) -> float:
    asked = sum(outcome.asked[kind] for outcome in outcomes)
    return 100 * sum(outcome.lost[kind] for outcome in outcomes) / asked if asked else math.nan


def against_fgd(found: Found, names: list[str]) -> list[str]:
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
        must, goal = WANTED.get(name, (math.nan, math.nan))
        verdict = "" if math.isnan(must) else "goal" if mean >= goal else "must" if mean >= must else "**below**"
        row: list[float | str] = [
            mean,
            said,
            base,
            f"{gain:+.2f} ({error:.2f})",
            statistics.fmean(found_published.get((name, "FGD"), {0: math.nan}).values()),
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


def reproduced(found: Found, names: list[str], policies: list[str]) -> list[str]:
    """Every classic policy: mean here / published, and how many runs are the published ones."""
    shown = [policy for policy in policies if policy in PUBLISHED]
    lines = ["| list | " + " | ".join(shown) + " |", "| --- |" + " ---: |" * len(shown)]
    for name in names:
        cells = []
        for policy in shown:
            pairs = beside(found[policy, name, True], found_published.get((name, PUBLISHED[policy]), {}))
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


def figures_of(found: Found, names: list[str]) -> dict[str, list[float]]:
    """For the book: percent allocated by seed, and the worst of what must stay near FGD and near what was published."""
    figures = {f"{name}, allocated %": [o.allocated[AT] for o in found[OURS, name, False]] for name in names}
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
        pairs = beside(outcomes, found_published.get((name, PUBLISHED.get(policy, "")), {})) if told else []
        if pairs:
            who = "FGD" if policy == "fgd" else "another classic policy"
            mean = abs(statistics.fmean(ours - theirs for ours, theirs in pairs))
            off.setdefault(f"{who} off the published, points, at most", []).append(mean)
    figures |= {figure: [max(each)] for figure, each in off.items()}
    return {name: values for name, values in figures.items() if values}


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else "–" if math.isnan(value) else f"{value:.2f}"


found_published: dict[tuple[str, str], dict[int, float]] = {}


def report(found: Found, names: list[str], options: argparse.Namespace, took: str) -> str:
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
            "Written by `make bench-placement`. Allocated GPUs in percent once 100 % of them were asked for; the",
            "experiment is described in `bench/placement/openb.py`, the policies in `docs/explanation/ranking.md`;",
            "lists whose names begin with `made-` are made from the others (`bench/placement/relatives.py`).",
            "",
            f"- trace {shown}, seeds {seeds}, runs paired by seed; s.e. is the standard error of the paired difference",
            f"- {os.cpu_count()} cores of {model}, Python {platform.python_version()}, "
            f"numpy {importlib.metadata.version('numpy')}, {time.strftime('%Y-%m-%d', time.gmtime())}, {took}",
            f"- `python -m bench.placement.run {' '.join(sys.argv[1:])}`".replace(str(options.traces), str(shown)),
            f"- a decision of ours cost {statistics.median(costs):.0f} µs of processor time on average, filling up and"
            " learning included",
            "",
            "## Ours against FGD",
            "",
            *against_fgd(found, names),
            "",
            "## Requests lost by class, percent: ours / FGD",
            "",
            *by_class(found, names),
            "",
            "## The classic policies: here / published",
            "",
            "In brackets: how many runs allocate what the published run of that seed did, to a hundredth of a point.",
            "",
            *reproduced(found, listed, options.policies),
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=TRACES, help="a folder of openb CSV files")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--lists", nargs="*", help="some pod lists alone")
    parser.add_argument("--made", action="store_true", help="lists made from those of the folder, too")
    parser.add_argument("--policies", nargs="*", default=[OURS, *CLASSIC], help="told policies to run beside ours")
    parser.add_argument("--until", type=int, default=AT, help="percent asked for at which a run ends")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", type=Path, help="a folder for outcomes, to go on from after a cut")
    parser.add_argument("--dry", action="store_true", help="write no file")
    options = parser.parse_args()
    known = pod_lists(options.traces)
    names = options.lists or sorted(known, key=lambda name: (name not in WANTED, name))
    if options.made:
        names += [name for name in relatives.names() if name not in names]
    unknown = [name for name in names if name not in known and name not in relatives.names()]
    if unknown:
        there = ", ".join([*known, *relatives.names()])
        parser.error(f"no list {unknown[0]!r} in {options.traces}, and none is made; there are {there}")
    lacking = [name for name in relatives.NEEDED if name not in known]
    if lacking and any(name.startswith(relatives.PREFIX) for name in names):
        parser.error(f"{options.traces} lacks the list {lacking[0]!r}, which others are made from; leave --made out")
    found_published.update(published(options.traces))
    busy, began = book.busy_percent(), time.monotonic()
    found: Found = {}
    jobs = jobs_of(options, names)
    kept = run_all(jobs, options, found)
    runs = sum(len(outcomes) for outcomes in found.values())
    took = f"{runs} runs in {time.monotonic() - began:.0f} s"
    if kept:
        took += f", {kept} of them kept from the same command before it was cut off"
    text = report(found, names, options, took)
    print(text)
    if not options.dry:
        RESULTS.write_text(text)
        if options.keep:  # it is told: the same command measures anew
            for path in paths_of(jobs, options).values():
                path.unlink()
        seeds = f"seeds {FIRST_SEED}..{FIRST_SEED + options.seeds - 1}"
        book.keep("placement", "make bench-placement", {seeds: figures_of(found, names)}, busy, RESULTS.name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
