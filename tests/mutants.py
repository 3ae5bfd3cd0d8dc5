"""Break each promise on purpose and see its test fail: `make mutants`.

`docs/promises.toml` lists the promises, their tests, and the mutants: a file, a text that stands in it exactly once,
what takes its place, and the tests that must then fail. Every mutant runs in a copy of the tree; a mutant that is not
caught, or whose text is no longer found, is a failure of this program.
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


def copy_tree(target: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, target / name)


def run_tests(tree: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """The tests on the tree's own sources, in the processes that they start too."""
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(str(tree / room) for room in ROOMS),
    }
    environment.pop("CI", None)  # there a skip is a failure, and would be taken for a catch
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not docker", "-p", "no:cacheprovider", *tests],
        cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip


def try_mutant(mutant: dict[str, Any]) -> str:
    """Empty when the mutant was caught, else what went wrong."""
    source = (ROOT / mutant["file"]).read_text()
    if source.count(mutant["old"]) != 1:
        return f"its text stands {source.count(mutant['old'])} times in {mutant['file']}, not once"
    with tempfile.TemporaryDirectory(prefix="moorage-mutant-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        (tree / mutant["file"]).write_text(source.replace(mutant["old"], mutant["new"]))
        try:
            done = run_tests(tree, mutant["tests"])
        except subprocess.TimeoutExpired:
            return ""  # a hang is caught too: the suite has a time limit for each test
    if done.returncode == 1:
        return ""
    return "not caught" if done.returncode == 0 else f"pytest ended with {done.returncode}: {done.stdout[-800:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="these mutants alone")
    names = parser.parse_args().names
    table = tomllib.loads((ROOT / "docs" / "promises.toml").read_text())
    failed = 0
    mutants = [mutant for mutant in table["mutant"] if not names or mutant["name"] in names]
    for mutant in mutants:
        trouble = try_mutant(mutant)
        print(f"{'caught' if not trouble else 'MISSED'}  {mutant['name']}  {trouble}".rstrip(), flush=True)
        failed += bool(trouble)
    print(f"{len(mutants) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
