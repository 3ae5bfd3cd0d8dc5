"""Break each promise on purpose and see its test fail: `make mutants`.

`docs/promises.toml` lists the promises, their tests, and the mutants: a file, a text that stands in it exactly once,
what takes its place, and the tests that must then fail. Every mutant runs in a copy of the tree; a mutant that is not
caught, or whose text is no longer found, is a failure of this program. One with `seeds` must break a promise in the
simulation of whole clusters, too, by that many seeds; the first that shows it is told.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("schemas", "bus", "scheduler", "worker", "client")
COPIED = (*ROOMS, "tests", "docs", "bench", "pyproject.toml", "README.md")
TIMEOUT_S = 300
SEEDS_TIMEOUT_S = 900


def copy_tree(target: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, target / name)


def environment_of(tree: Path) -> dict[str, str]:
    """The tree's own sources, also in the processes that its tests start."""
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(str(tree / room) for room in ROOMS),
    }
    environment.pop("CI", None)  # there a skip is a failure, and would be taken for a catch
    return environment


def run_tests(tree: Path, tests: list[str]) -> str:
    """Empty when one of them failed, else what went wrong."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not docker", "-p", "no:cacheprovider", *tests],
            cwd=tree, env=environment_of(tree), capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return ""  # a hang is caught too: the suite has a time limit for each test
    if done.returncode == 1:
        return ""
    return "not caught" if done.returncode == 0 else f"pytest ended with {done.returncode}: {done.stdout[-800:]}"


def run_seeds(tree: Path, seeds: int) -> tuple[str, str]:
    """What went wrong, empty when a seed broke a promise, and which seed it was."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.sim.many", "--stop", "--seeds", str(seeds)],
            cwd=tree, env=environment_of(tree), capture_output=True, text=True, timeout=SEEDS_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"the simulation did not end within {SEEDS_TIMEOUT_S} s", ""
    failing = next((line for line in done.stdout.splitlines() if line.startswith("FAILED")), "")
    if done.returncode == 1 and failing:
        return "", failing.removeprefix("FAILED").strip()
    told = done.stderr[-800:] if done.returncode else ""
    return f"not caught by {seeds} seeds {told}".rstrip(), ""


def try_mutant(mutant: dict[str, Any]) -> tuple[str, str]:
    """What went wrong, empty when the mutant was caught, and by which seed where it names any."""
    source = (ROOT / mutant["file"]).read_text()
    if source.count(mutant["old"]) != 1:
        return f"its text stands {source.count(mutant['old'])} times in {mutant['file']}, not once", ""
    with tempfile.TemporaryDirectory(prefix="moorage-mutant-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        (tree / mutant["file"]).write_text(source.replace(mutant["old"], mutant["new"]))
        trouble = run_tests(tree, mutant["tests"]) if mutant["tests"] else ""
        return run_seeds(tree, mutant["seeds"]) if not trouble and mutant.get("seeds") else (trouble, "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="these mutants alone")
    names = parser.parse_args().names
    table = tomllib.loads((ROOT / "docs" / "promises.toml").read_text())
    failed = 0
    mutants = [mutant for mutant in table["mutant"] if not names or mutant["name"] in names]
    for mutant in mutants:
        trouble, seed = try_mutant(mutant)
        print(f"{'MISSED' if trouble else 'caught'}  {mutant['name']}  {trouble or seed}".rstrip(), flush=True)
        failed += bool(trouble)
    print(f"{len(mutants) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
