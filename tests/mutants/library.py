"""Try the mutants that a library makes of the scheduler's core: `python -m tests.mutants.library [FILE…]`.

The mutants of `tests/mutants/*.toml` break promises, and all of them must be caught. cosmic-ray makes the others: it
changes each operator, number, comparison and branch of a file, one at a time, and runs the tests of the file's folder.
Some of its mutants change nothing that a test could see. So the count is for a person to read: the survivors are
printed, and only a run that could not be made is a failure.

It runs in a copy of the tree. Without FILE it takes all of `core/`, which takes a night; `--minutes` stops it earlier.
It needs `pip install -e '.[mutants]'`.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.mutants.__main__ import copy_tree, environment_of
from tests.mutants.files import ROOT

CORE: Final = Path("scheduler/moorage/scheduler/core")
TESTS: Final = Path("tests/scheduler")
TEST_S_MAX: Final = 120.0
CONFIG: Final = """\
[cosmic-ray]
module-path = "{file}"
timeout = {timeout_s}
excluded-modules = []
test-command = "{command}"
[cosmic-ray.distributor]
name = "local"
"""


def core_files() -> list[Path]:
    """Return the files of the core, relative to the root."""
    return sorted(file.relative_to(ROOT) for file in (ROOT / CORE).rglob("*.py") if file.name != "__init__.py")


def tests_of(file: Path) -> Path:
    """Return the folder of the tests of a file of the core, relative to the root: the mirrored one, else all."""
    mirrored = TESTS / file.relative_to(CORE).parts[0]
    return mirrored if (ROOT / mirrored).is_dir() else TESTS


def config(file: Path) -> str:
    """Return what cosmic-ray is told of a file: one mutant at a time, and the tests that run for it."""
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        str(tests_of(file)),
    ]
    return CONFIG.format(file=file, timeout_s=TEST_S_MAX, command=shlex.join(words))


def try_file(tree: Path, file: Path, seconds: float) -> bool:
    """Print how many mutants of a file were made, tried and caught, and the survivors; False if none could be tried.

    Stops after this many seconds; the rest of the mutants is then counted as not tried.
    """
    settings, session = tree / "cosmic-ray.toml", tree / "cosmic-ray.sqlite"
    settings.write_text(config(file))
    session.unlink(missing_ok=True)

    def call(*words: str, limit_s: float | None = None) -> str:
        return subprocess.run(
            [Path(sys.executable).with_name(words[0]), *words[1:]],
            cwd=tree, env=environment_of(tree), check=True, capture_output=True, text=True, timeout=limit_s,
        ).stdout  # fmt: skip

    before, began = (tree / file).read_text(), time.monotonic()
    call("cosmic-ray", "init", settings.name, session.name)
    call("cosmic-ray", "baseline", settings.name)  # the tests pass without a mutant, or this raises
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            call("cosmic-ray", "exec", settings.name, session.name, limit_s=seconds)
    finally:
        (tree / file).write_text(before)
    report = call("cr-report", "--show-diff", "--surviving-only", session.name)
    made, tried, survived = (count(report, name) for name in ("total jobs", "complete", "surviving mutants"))
    print(f"{file}: {made} mutants, {tried} tried, {tried - survived} caught, {survived} survived", end=" ")
    print(f"({time.monotonic() - began:.0f} s, {tests_of(file)})\n{report}", flush=True)
    return tried > 0


def count(report: str, name: str) -> int:
    """Return a number of cosmic-ray's report, such as `surviving mutants: 3 (12.5%)`. Raises ValueError without it."""
    found = re.search(rf"^{name}: (\d+)", report, re.MULTILINE)
    if found is None:
        raise ValueError(f"the report of cosmic-ray has no line {name!r}: {report[-400:]}")
    return int(found[1])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.library", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="these files of core/ alone")
    parser.add_argument("--minutes", type=float, default=600.0, help="for each file at most")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moorage-mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        could = [try_file(tree, file, asked.minutes * 60) for file in asked.files or core_files()]
    return 0 if all(could) else 1


if __name__ == "__main__":
    sys.exit(main())
