"""Try the mutants that a library makes of the scheduler's core: `python -m tests.release.mutants.library [FILE…]`.

The mutants of `tests/release/mutants/*.toml` break promises, and all of them must be caught. cosmic-ray makes the
others: it changes each operator, number, comparison and branch of a file, one at a time, and runs the tests of the
file's folder. Some of its mutants change nothing that a test could see. So the count is for a person to read: the
survivors are printed, and only a run that could not be made is a failure.

It runs in a copy of the tree. Without FILE it takes all files of `core/`, for `--minutes` each: 5 minutes are a night.
It needs the dependency group `mutants`, which `make release-check` installs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.release.mutants.__main__ import copy_tree, environment_of
from tests.release.mutants.files import ROOT

CORE: Final = Path("scheduler/moorage/scheduler/core")
TESTS: Final = Path("tests/unit/scheduler")
TEST_S_MAX: Final = 120.0
CONFIG: Final = """\
[cosmic-ray]
module-path = "{file}"
timeout = {timeout_s}
excluded-modules = []
test-command = "{command}"
[cosmic-ray.distributor]
name = "local"
[cosmic-ray.filters.operators-filter]
exclude-operators = [{left_out}]
"""
#: changes that no test can see: `is` for another comparison, and the `|` of annotations, which nothing evaluates
LEFT_OUT: Final = ("core/ReplaceComparisonOperator_.*_Is(Not)?", "core/ReplaceBinaryOperator_BitOr_.*")


def core_files() -> list[Path]:
    """Return the files of the core, relative to the root."""
    return sorted(file.relative_to(ROOT) for file in (ROOT / CORE).rglob("*.py") if file.name != "__init__.py")


def named_tests(file: Path) -> list[Path]:
    """Return the tests that run for a file of the core, relative to the root: its own first, then their folder.

    The folder is the one that mirrors the file's, else that of all tests of the scheduler.
    """
    mirrored = TESTS / file.relative_to(CORE).parts[0]
    folder = mirrored if (ROOT / mirrored).is_dir() else TESTS
    own = folder / f"test_{file.stem}.py"
    return [own, folder] if (ROOT / own).exists() else [folder]


def config(file: Path) -> str:
    """Return what cosmic-ray is told of a file: one mutant at a time, and the tests that run for it."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    words += [str(path) for path in named_tests(file)]
    left_out = ", ".join(f'"{name}"' for name in LEFT_OUT)
    return CONFIG.format(file=file, timeout_s=TEST_S_MAX, command=shlex.join(words), left_out=left_out)


def try_file(tree: Path, file: Path, seconds: float) -> bool:
    """Print how many mutants of a file were made, tried and caught, and the survivors; False if none could be tried.

    Stops after this many seconds; the rest of the mutants is then counted as not tried.
    """
    settings, session = tree / "cosmic-ray.toml", tree / "cosmic-ray.sqlite"
    settings.write_text(config(file))
    session.unlink(missing_ok=True)

    def call(*words: str, limit_s: float | None = None) -> str:
        command = [str(Path(sys.executable).with_name(words[0])), *words[1:]]
        with subprocess.Popen(
            command, cwd=tree, env=environment_of(tree), stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            try:
                said, _ = process.communicate(timeout=limit_s)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)  # the tests that it runs, too
                raise
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, said)
        return said

    before, began = (tree / file).read_text(), time.monotonic()
    call("cosmic-ray", "init", settings.name, session.name)
    call("cr-filter-operators", session.name, settings.name)
    call("cosmic-ray", "baseline", settings.name)  # the tests pass without a mutant, or this raises
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            call("cosmic-ray", "exec", settings.name, session.name, limit_s=seconds)
    finally:
        (tree / file).write_text(before)
    made, caught, survived = counts(session)
    took_s = time.monotonic() - began
    print(f"{file}: {made} mutants, {caught + survived} tried, {caught} caught, {survived} survived ({took_s:.0f} s)")
    print(call("cr-report", "--show-diff", "--surviving-only", session.name), flush=True)
    return caught + survived > 0


def counts(session: Path) -> tuple[int, int, int]:
    """Return the number of a session's mutants, less those that a filter left out, and of those caught and survived."""
    with contextlib.closing(sqlite3.connect(session)) as base:
        (made,) = base.execute("SELECT COUNT(*) FROM work_items").fetchone()
        rows = base.execute("SELECT worker_outcome, test_outcome, COUNT(*) FROM work_results GROUP BY 1, 2").fetchall()
    left_out = sum(number for worker, _, number in rows if worker == "SKIPPED")
    survived = sum(number for _, test, number in rows if test == "SURVIVED")
    return made - left_out, sum(number for *_, number in rows) - left_out - survived, survived


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release.mutants.library", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="these files of core/ alone")
    parser.add_argument("--minutes", type=float, default=5.0, help="for each file at most (5)")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moorage-mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        could = [try_file(tree, file, asked.minutes * 60) for file in asked.files or core_files()]
    return 0 if all(could) else 1


if __name__ == "__main__":
    sys.exit(main())
