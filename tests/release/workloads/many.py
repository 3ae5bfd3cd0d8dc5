"""Many cases, on every core: `python -m tests.release.workloads.many --cases 10000`.

What has passed is remembered by the tree's content, so a run that was stopped goes on where it was; `--anew` forgets
that. Each failing case is told as it fails, with the command that shows it, and all of them once more at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.ceilings import SMALL, worlds_with
from tests.release.workloads.__main__ import failure, made, same_hashes, world_of

ROOT: Final = Path(__file__).resolve().parents[3]
KEPT: Final = ROOT / ".cache" / "workloads"
#: what a case depends on
SOURCES: Final = ("schemas", "scheduler", "tests/release/workloads", "tests/unit/scheduler")
PROGRESS_S: Final = 10.0
BY_NAME: Final = "python -m tests.release.workloads --seed"


class Came(NamedTuple):
    """What a case came to: `wrong` is empty where every promise held; `found` counts what was confirmed, by reason."""

    seed: int
    theme: str
    wrong: str
    cpu_s: float
    records: int
    found: Counter[str]


def run(seed: int) -> Came:
    began = time.process_time()
    plan = made(seed)
    world = world_of(plan)
    wrong = failure(plan, world=world)
    if not wrong:
        with worlds_with(SMALL):
            wrong = failure(plan)
        wrong = wrong and f"{wrong} --small"
    return Came(seed, plan.theme, wrong, time.process_time() - began, world.records, world.found)


def tree() -> str:
    """A name of what is tested: of all sources that a case depends on, as they are on disk."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{file.relative_to(ROOT)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str:
    """The commit, with a + where the work tree differs; empty outside of git."""
    asked = ["git", "describe", "--always", "--dirty=+", "--abbrev=8"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


class Passed:
    """The seeds that have passed on this tree: a file to which each is added as it passes, one a line.

    A dot ends each: of a number that a kill has cut nobody can tell what it was.
    """

    def __init__(self, path: Path, *, anew: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if anew:
            path.unlink(missing_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.seeds = {int(line[:-1]) for line in lines if line.endswith(".")}
        self._file = path.open("a")
        self._file.write("\n")  # behind a number that was cut

    def add(self, seed: int) -> None:
        self.seeds.add(seed)
        self._file.write(f"{seed}.\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release.workloads.many", description=__doc__)
    parser.add_argument("--cases", type=int, default=300, help="how many")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    parser.add_argument("--anew", action="store_true", help="also what has passed on this very tree")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args(arguments)
    if arguments is None:
        same_hashes("tests.release.workloads.many")
    name = tree()
    passed = Passed(KEPT / name, anew=asked.anew)
    every = range(asked.first, asked.first + asked.cases)
    todo = [seed for seed in every if seed not in passed.seeds]
    print(f"commit {commit()}, tree {name}: {len(every) - len(todo)} of {len(every)} cases have passed before")
    came: list[Came] = []
    began = told = time.monotonic()
    pool = multiprocessing.get_context("fork").Pool(asked.processes, maxtasksperchild=200)
    try:
        for one in pool.imap_unordered(run, todo, chunksize=4):
            came.append(one)
            if one.wrong:
                print(f"FAILED  {BY_NAME} {one.seed}  # {one.theme}: {one.wrong[:300]}", flush=True)
            else:
                passed.add(one.seed)
            if time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                left_s = (told - began) / len(came) * (len(todo) - len(came))
                failed = sum(bool(each.wrong) for each in came)
                done = len(every) - len(todo) + len(came)
                print(f"{done} of {len(every)} cases, {failed} failed, {left_s:.0f} s left", flush=True)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here")
    finally:
        pool.terminate()
        pool.join()
        passed.close()
    _summary(came, time.monotonic() - began)
    return 1 if any(one.wrong for one in came) or len(came) < len(todo) else 0


def _summary(came: list[Came], wall_s: float) -> None:
    if not came:
        return
    failed = sorted(one for one in came if one.wrong)
    found = sum((one.found for one in came), Counter[str]())
    print(f"{len(came)} cases, {len(failed)} failed, {sum(one.records for one in came)} ledger records, {wall_s:.0f} s")
    cpu_s = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"processor time of a case: median {statistics.median(one.cpu_s for one in came):.3f} s,"
        f" longest {max(one.cpu_s for one in came):.2f} s, {cpu_s.ru_utime + cpu_s.ru_stime:.0f} s in all"
    )
    print("confirmed: " + ", ".join(f"{reason} {count}" for reason, count in found.most_common()))
    for one in failed:
        print(f"FAILED  {BY_NAME} {one.seed}  # {one.theme}: {one.wrong[:300]}")


if __name__ == "__main__":
    sys.exit(main())
