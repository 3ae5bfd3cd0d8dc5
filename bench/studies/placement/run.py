"""Allocation under saturation, ours against FGD and the classics: `python -m bench.studies.placement.run`.

    python -m bench.studies.placement.run [--traces FOLDER] [--seeds 10] [--lists default …] [--made] [--policies …] [--dry]

Another folder of the same format may be given; where it holds `published_*.csv`, its figures stand beside ours. With
`--made`, lists made from those of the folder (`relatives.py`) are run as well: ours and FGD. Tasks come in the order of
the published run of that seed, so that each run of a classic policy has its published figure.

The whole takes a core some 15 minutes. With `--keep FOLDER` each outcome is kept there under a digest of the code, the
traces and the run, and the same command goes on where it was cut off, until the page is written.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import pickle
import platform
import time
from pathlib import Path
from typing import Final

from bench import book
from bench.studies.placement import relatives
from bench.studies.placement.classic import CLASSIC
from bench.studies.placement.openb import Outcome, run
from bench.studies.placement.page import (
    AT,
    FIRST_SEED,
    OURS,
    ROOT,
    Found,
    allocation_bound,
    figures_of,
    read_published,
    report,
)
from moorage.testing.simulate.openb import node_list, pod_lists, read_hosts

TRACES: Final = ROOT / "bench/traces/openb"
RESULTS: Final = ROOT / "bench/RESULTS-placement.md"
#: in the order of the page, the best first
POLICIES: Final = tuple(reversed(CLASSIC))
#: what an outcome depends on besides its job and the traces
CODE: Final = (
    "ranking/moorage/ranking",
    "scheduler/moorage/scheduler/core/rank",
    "scheduler/moorage/scheduler/core/fleet/fleet.py",
    "scheduler/moorage/scheduler/core/fleet/shape.py",
    "testing/moorage/testing/simulate/openb.py",
    "bench/studies/placement/classic.py",
    "bench/studies/placement/draws.py",
    "bench/studies/placement/openb.py",
    "bench/studies/placement/relatives.py",
)

Job = tuple[str, str, str, int, bool, int]


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=TRACES, help="a folder of openb CSV files")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--lists", nargs="*", help="some pod lists alone")
    parser.add_argument("--made", action="store_true", help="lists made from those of the folder, too")
    parser.add_argument("--policies", nargs="*", default=[OURS, *POLICIES], help="told policies to run beside ours")
    parser.add_argument("--until", type=int, default=AT, help="percent asked for at which a run ends")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", type=Path, help="a folder for outcomes, to go on from after a cut")
    parser.add_argument("--dry", action="store_true", help="write no file")
    options = parser.parse_args()
    known = pod_lists(options.traces)
    names = options.lists or sorted(known, key=lambda name: (allocation_bound(name) is None, name))
    if options.made:
        names += [name for name in relatives.names() if name not in names]
    unknown = [name for name in names if name not in known and name not in relatives.names()]
    if unknown:
        there = ", ".join([*known, *relatives.names()])
        parser.error(f"no list {unknown[0]!r} in {options.traces}, and none is made; there are {there}")
    lacking = [name for name in relatives.NEEDED if name not in known]
    if lacking and any(name.startswith(relatives.PREFIX) for name in names):
        parser.error(f"{options.traces} lacks the list {lacking[0]!r}, which others are made from; leave --made out")
    published = read_published(options.traces)
    busy, began = book.busy_percent(), time.monotonic()
    found: Found = {}
    jobs = jobs_of(options, names)
    kept = run_all(jobs, options, found)
    runs = sum(len(outcomes) for outcomes in found.values())
    took = f"{runs} runs in {time.monotonic() - began:.0f} s"
    if kept:
        took += f", {kept} of them kept from the same command before it was cut off"
    text = report(found, published, names, options, took)
    print(text)
    if not options.dry:
        RESULTS.write_text(text)
        if options.keep:  # it is told: the same command measures anew
            for path in paths_of(jobs, options).values():
                path.unlink()
        seeds = f"seeds {FIRST_SEED}..{FIRST_SEED + options.seeds - 1}"
        book.keep(
            "placement",
            "python -m bench.studies.placement.run",
            {seeds: figures_of(found, published, names)},
            busy,
            RESULTS.name,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
