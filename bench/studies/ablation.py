"""`python -m bench.studies.ablation`: what each part of ranking and of reservations brings, by runs without it.

    python -m bench.studies.ablation ranking [--seeds 4] [--made] [--gone step …] [--without prices …]
    python -m bench.studies.ablation queueing [--copies 2] [--clusters 2869ce …] [--gone moves …] [--without order …]

A part is switched off by a patch of the code. `--gone` names parts that are off in every run, also in the one that
the others are compared with: so the cheapest part is taken out, and what is left is measured again. Ranking is judged
by allocation under saturation (`bench/studies/placement/openb.py`, the mix learned), queueing by the waits of the Philly jobs
(`bench/queueing.py`). With `--keep FOLDER` outcomes are kept there, by the code that they come from, and not measured
again.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import multiprocessing
import pickle
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np

from bench import queueing
from bench.studies.placement import relatives
from bench.studies.placement.openb import CLASSES, Outcome
from bench.studies.placement.page import AT, FIRST_SEED, OURS, lost_percent, mean_and_error
from bench.studies.placement.run import TRACES, digest_of
from bench.studies.placement.run import one as saturated
from moorage.ranking import fragments, prices
from moorage.ranking.mix import Mix
from moorage.ranking.prices import Prices
from moorage.ranking.table import HostTable, Ints
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.schedule import plan, runtime
from moorage.testing.simulate.openb import pod_lists
from moorage.testing.simulate.philly import CLUSTERS

#: switches a part off until the stack is left
Off = Callable[[ExitStack], object]


def _off(owner: object, name: str, value: Any) -> Off:
    return lambda stack: stack.enter_context(patch.object(owner, name, value))


def _all_alike(self: Prices, table: HostTable, shape: Shape) -> Ints:
    """`Prices.charges` where all is worth the same."""
    return np.zeros(len(table.types), np.int64)


#: the parts of ranking, and how each is switched off
RANKING: Final[dict[str, Off]] = {
    "prices": _off(Prices, "charges", _all_alike),
    "what-is-left": _off(prices, "WANTED_MAX", 0),
    "look-ahead": _off(fragments, "AHEAD", 0),
    "step": _off(fragments, "STEP_MILLI", 1),
    "mix-classes": _off(Mix, "_class_changed", lambda self: False),
}
#: and those of reservations
QUEUEING: Final[dict[str, Off]] = {
    "siblings": _off(runtime, "SIBLINGS_MS", -1),
    "whole-hosts-first": _off(plan, "fills_hosts", lambda fleet, shape: True),
    "many-hosts-later": _off(plan, "_due_ms", lambda known, draft, claim: draft.time_ms),
}

Job = tuple[str, int, tuple[str, ...]]


def allocated(job: Job) -> Outcome:
    """Return the outcome of a list and seed without some parts."""
    name, seed, without = job
    with ExitStack() as stack:
        for part in without:
            RANKING[part](stack)
        return saturated((str(TRACES), name, OURS, seed, False, AT))


def waited(job: Job) -> queueing.Rows:
    """Return the waits of a cluster's trace or copy without some parts."""
    name, copy, without = job
    jobs = queueing.jobs_of(name, copy)
    rows = queueing.baselines(name, jobs, (queueing.FIFO, queueing.EASY))
    with ExitStack() as stack:
        for part in without:
            QUEUEING[part](stack)
        rows[queueing.OURS] = queueing.ours(name, jobs, Config())
    return rows


def run_all(jobs: list[Job], one: Callable[[Job], Any], code: str, keep: Path | None, processes: int) -> dict[Job, Any]:
    """Return what each job came to; what was kept is not run again."""
    found: dict[Job, Any] = {}
    paths: dict[Job, Path] = {}
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        names = {job: hashlib.sha256(f"{code} {one.__name__} {job}".encode()).hexdigest()[:24] for job in jobs}
        paths = {job: keep / name for job, name in names.items()}
        found = {job: pickle.loads(path.read_bytes()) for job, path in paths.items() if path.exists()}
    todo = [job for job in jobs if job not in found]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for job, outcome in zip(todo, pool.imap(one, todo), strict=True):
            found[job] = outcome
            if job in paths:
                paths[job].write_bytes(pickle.dumps(outcome))
    return found


def ranking(options: argparse.Namespace, variants: list[tuple[str, ...]]) -> list[str]:
    """Return the table: allocation, and what the classes of requests lose, against the run without `--gone` alone."""
    names = options.lists or [*pod_lists(TRACES), *(relatives.names() if options.made else ())]
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    jobs = [(name, seed, parts) for parts in variants for seed in seeds for name in names]
    found = run_all(jobs, allocated, digest_of(TRACES).hex(), options.keep, options.processes)
    lines = [
        "| without | mean % (s.e. of the difference) | most that a class loses, points | " + " | ".join(names) + " |",
        "| --- | ---: | --- |" + " ---: |" * len(names),
    ]
    base = variants[0]
    for parts in variants:
        by_list = {name: [found[name, seed, parts] for seed in seeds] for name in names}
        gains = [
            statistics.fmean(
                found[name, seed, parts].allocated[AT] - found[name, seed, base].allocated[AT] for name in names
            )
            for seed in seeds
        ]
        mean = statistics.fmean(each.allocated[AT] for outcomes in by_list.values() for each in outcomes)
        gain, error = mean_and_error(gains)
        worst, kind, name = max(
            (
                lost_percent(by_list[name], kind) - lost_percent([found[name, seed, base] for seed in seeds], kind),
                kind,
                name,
            )
            for name in names
            for kind in CLASSES
            if not math.isnan(lost_percent(by_list[name], kind))
        )
        cells = [f"{statistics.fmean(each.allocated[AT] for each in by_list[name]):.2f}" for name in names]
        head = f"| {_called(parts, base)} | {mean:.2f} {gain:+.3f} ({error:.3f}) |"
        lines.append(f"{head} {worst:+.2f} {kind} of {name} | {' | '.join(cells)} |")
    return lines


def waits(options: argparse.Namespace, variants: list[tuple[str, ...]]) -> list[str]:
    """Return the table: each cluster's ratios, geometric means over its trace and copies, and its mean wait against
    the run without `--gone` alone."""
    copies = range(options.copies + 1)
    jobs = [(name, copy, parts) for parts in variants for copy in copies for name in options.clusters]
    found = run_all(jobs, waited, queueing.digest(), options.keep, options.processes)
    lines = [
        "| without | " + " | ".join(f"{name}: mean, gangs, longest; mean wait" for name in options.clusters) + " |",
        "| --- |" + " --- |" * len(options.clusters),
    ]
    base = variants[0]
    for parts in variants:
        cells = []
        for name in options.clusters:
            rows = [found[name, copy, parts] for copy in copies]
            ratios = zip(*map(queueing.ratios_of, rows), strict=True)
            ours = queueing.OURS
            change = statistics.geometric_mean(
                row[ours].mean / found[name, copy, base][ours].mean for copy, row in zip(copies, rows, strict=True)
            )
            cells.append(
                ", ".join(f"{statistics.geometric_mean(each):.3f}" for each in ratios) + f"; {change - 1:+.1%}"
            )
        lines.append(f"| {_called(parts, base)} | {' | '.join(cells)} |")
    return lines


def _called(parts: tuple[str, ...], base: tuple[str, ...]) -> str:
    return ", ".join(part for part in parts if part not in base) or f"nothing more than {', '.join(base) or 'nothing'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ranking", "queueing"))
    parser.add_argument("--gone", nargs="*", default=[], help="parts that are off in every run")
    parser.add_argument("--without", nargs="*", help="parts to take out, one at a time; else each that is left")
    parser.add_argument("--seeds", type=int, default=4, help="of each list of ranking")
    parser.add_argument("--lists", nargs="*", help="some lists alone, of ranking")
    parser.add_argument("--made", action="store_true", help="lists made from those of the folder, too")
    parser.add_argument("--clusters", nargs="*", choices=list(CLUSTERS), default=list(CLUSTERS))
    parser.add_argument("--copies", type=int, default=2, help="of each cluster's trace, beside that")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder for outcomes")
    options = parser.parse_args()
    known = RANKING if options.what == "ranking" else QUEUEING
    unknown = [part for part in (*options.gone, *(options.without or ())) if part not in known]
    if unknown:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(known)}")
    gone = tuple(options.gone)
    without = options.without if options.without is not None else [part for part in known if part not in gone]
    variants = [gone, *((*gone, part) for part in without)]
    print("\n".join((ranking if options.what == "ranking" else waits)(options, variants)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
