"""Break each promise on purpose and see its test fail: `make mutants`, or some of them with `make mutants ONLY=H12`.

The mutants stand in `tests/release/mutants/`, a file for each promise (`tests/release/mutants/files.py` says how). A
mutant that is not caught, or whose code is no longer found, is a failure of this program. One with `seeds` must break a
promise in the simulation of whole clusters, too, by that many seeds; the first that shows it is told.

A test that fails anyway would catch everything: so all tests that are named run once on the tree as it is, and must
pass. The mutants then run side by side, each of `--jobs` in a copy of the tree of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.release.mutants.files import ROOT, Mutant, file_of, mutated, read_mutants
from tests.turns import ALL

RULES: Final = ROOT / "docs" / "reliability-rules.md"
ROOMS: Final = ("schemas", "system", "bus", "scheduler", "ranking", "worker", "client", "testing")
COPIED: Final = (*ROOMS, "tests", "docs", "bench", "tools", "deploy", "pyproject.toml", "README.md")
TIMEOUT_S: Final = 300
SEEDS_TIMEOUT_S: Final = 900


def copy_tree(target: Path) -> None:
    """With what is compiled already: a copy keeps the times of the files, by which Python knows that it fits."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name)
        elif source.exists():
            shutil.copy2(source, target / name)


def environment_of(tree: Path) -> dict[str, str]:
    """The tree's own sources, also in the processes that its tests start; nothing compiled is left behind."""
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        ALL: "1",
        "PYTHONPATH": os.pathsep.join(str(tree / room) for room in ROOMS),
    }
    environment.pop("CI", None)  # there a skip is a failure, and would be taken for a catch
    return environment


@contextmanager
def broken(tree: Path, mutant: Mutant) -> Iterator[None]:
    """The tree with a mutant in it, and afterwards as it was."""
    file = tree / file_of(mutant)
    source, times = file.read_text(), file.stat()
    changed = mutated(source, mutant)
    compiled = Path(importlib.util.cache_from_source(str(file)))
    kept = compiled.read_bytes() if compiled.exists() else None
    compiled.unlink(missing_ok=True)  # it is told apart by second and size: a mutant may have both
    file.write_text(changed)
    try:
        yield
    finally:
        file.write_text(source)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        if kept is not None:
            compiled.write_bytes(kept)


def pytest(tree: Path, tests: list[str], *more: str, timeout_s: float | None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not docker", "-p", "no:cacheprovider", *more, *tests]
    return subprocess.run(
        command, cwd=tree, env=environment_of(tree), capture_output=True, text=True, timeout=timeout_s
    )


def run_tests(tree: Path, tests: list[str]) -> str:
    """Empty when one of them failed, else what went wrong."""
    try:
        done = pytest(tree, tests, "-x", timeout_s=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return ""  # a hang is caught too: the suite has a time limit for each test
    if done.returncode == 1:
        return ""
    return "not caught" if done.returncode == 0 else f"pytest ended with {done.returncode}: {done.stdout[-800:]}"


def run_seeds(tree: Path, seeds: int) -> tuple[str, str]:
    """What went wrong, empty when a seed broke a promise, and which seed it was."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.release.sim.many", "--stop", "--seeds", str(seeds), "--processes", "1"],
            cwd=tree, env=environment_of(tree), capture_output=True, text=True, timeout=SEEDS_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"the simulation did not end within {SEEDS_TIMEOUT_S} s", ""
    failing = next((line for line in done.stdout.splitlines() if line.startswith("FAILED")), "")
    if done.returncode == 1 and failing:
        return "", failing.removeprefix("FAILED").strip()
    told = done.stderr[-800:] if done.returncode else ""
    return f"not caught by {seeds} seeds {told}".rstrip(), ""


def try_mutant(tree: Path, mutant: Mutant) -> tuple[str, str]:
    """What went wrong, empty when the mutant was caught, and by which seed where it names any."""
    try:
        with broken(tree, mutant):
            trouble = run_tests(tree, mutant["tests"]) if mutant["tests"] else ""
            return run_seeds(tree, mutant["seeds"]) if not trouble and mutant.get("seeds") else (trouble, "")
    except ValueError as error:
        return str(error), ""


def of_rule(rule: str) -> frozenset[str]:
    """The mutants that docs/reliability-rules.md names for a rule, by its number."""
    _, _, behind = RULES.read_text().partition(f"\n## {rule}\n")
    return frozenset(behind.partition("\n## ")[0].split("*")[1::2])


def words_of(mutant: Mutant) -> str:
    """Return the texts in which `--only` looks for a word, a line each."""
    return "\n".join((mutant["name"], mutant["promise"], file_of(mutant)))


def chosen(mutants: list[Mutant], only: list[str]) -> list[Mutant]:
    """Return those of a rule or of a promise, by its id, or else those with a word in their name, promise or file.

    Raises SystemExit for a word that finds none.
    """
    if not only:
        return mutants
    names: set[str] = set()
    for word in only:
        ruled = of_rule(word)
        found = {each["name"] for each in mutants if each["name"] in ruled or each["promise"] == word}
        found = found or {each["name"] for each in mutants if word in words_of(each)}
        if not found:
            raise SystemExit(f"no mutant has {word!r} in its rule, name, promise or file (tests/release/mutants/)")
        names |= found
    return [mutant for mutant in mutants if mutant["name"] in names]


def passing(tree: Path, mutants: list[Mutant], jobs: int) -> bool:
    """Whether what is to catch them passes without them; what it said where it does not."""
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant["tests"]))
    if not tests:
        return True
    began = time.monotonic()
    done = pytest(tree, tests, "-n", str(jobs), "--dist", "loadscope", timeout_s=None)
    print(f"without mutants: {done.stdout.strip().splitlines()[-1]} ({time.monotonic() - began:.0f} s)", flush=True)
    if done.returncode:
        print(done.stdout[-4000:])
    return done.returncode == 0


def try_all(mutants: list[Mutant], trees: list[Path]) -> list[str]:
    """The names of those that were missed. Each runs in whichever tree is idle."""
    idle: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for tree in trees:
        idle.put(tree)
    stop = threading.Event()

    def one(mutant: Mutant) -> tuple[str, str, float]:
        tree, began = idle.get(), time.monotonic()
        try:
            return (*(("", "") if stop.is_set() else try_mutant(tree, mutant)), time.monotonic() - began)
        finally:
            idle.put(tree)

    missed: list[str] = []
    with ThreadPoolExecutor(len(trees)) as pool:
        tried = {pool.submit(one, mutant): mutant["name"] for mutant in mutants}
        try:
            for done, attempt in enumerate(as_completed(tried), 1):
                trouble, seed, took_s = attempt.result()
                verdict = "MISSED" if trouble else "caught"
                told = f"{verdict}  {done}/{len(mutants)}  {took_s:.0f} s  {tried[attempt]}  {trouble or seed}"
                print(told.rstrip(), flush=True)
                if trouble:
                    missed.append(tried[attempt])
        finally:
            stop.set()  # Ctrl-C: what has not begun does not
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="these mutants alone")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="a rule (H12), a promise, or part of a name or a file"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants side by side")
    asked = parser.parse_args()
    mutants = chosen([m for m in read_mutants() if not asked.names or m["name"] in asked.names], asked.only)
    mutants.sort(key=lambda mutant: -mutant.get("seeds", 0))  # the long ones first, so that none is left at the end
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="moorage-mutants-") as folder:
        trees = [Path(folder, str(number)) for number in range(max(1, min(asked.jobs, len(mutants))))]
        for tree in trees:
            copy_tree(tree)
        if not passing(trees[0], mutants, len(trees)):
            print("a test that fails without a mutant catches none: mend it first")
            return 1
        missed = try_all(mutants, trees)
    print(f"{len(mutants) - len(missed)} passed, {len(missed)} failed, {time.monotonic() - began:.0f} s")
    for name in missed:
        print(f"MISSED  {name}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
