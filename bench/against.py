"""Today's tree beside another commit: the figures of `bench.hot_paths` of both, in alternating order, and their ratios.

    python -m bench.against main              # a branch, a tag or a hash: three rounds, some 25 minutes
    python -m bench.against main --quick      # a look
    python -m bench.against main --only endpoint one --rounds 5

The other commit gets a clone and an environment of its own under `.cache/against`, made once. This tree's measurements
run on both; where they need what the other commit lacks, it is measured by its own. Run it before a change of a hot
path lands, on a machine that does nothing else. The last line is for the commit's message.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.book import busy_percent
from bench.hot_paths import QUESTIONS
from bench.kept import number
from moorage.schemas.units import many

ROOT: Final = Path(__file__).resolve().parents[1]
CACHE: Final = ROOT / ".cache" / "against"
#: how long pip may install a commit; how long one question may take, and to end what it started once interrupted
INSTALL_S_MAX: Final = 900
ANSWER_S_MAX: Final = 600
END_S_MAX: Final = 30
THEN, TODAY = "then", "today"
#: by tree: each figure's value in every round; None where it could not be measured
Measured = dict[str, dict[str, list[float | None]]]


class CannotCompare(Exception):
    """The other commit is unknown, or cannot be made ready: why."""


class Tree(NamedTuple):
    """A commit that can be measured: where the bench that fits it stands, and the Python that has its moorage."""

    bench: Path
    python: Path


class Ratio(NamedTuple):
    """Today's figure over that of the other commit, round by round."""

    low: float
    median: float
    high: float


# ------------------------------------------------------------------------------------------------ pure


def orders(rounds: int) -> list[tuple[str, str]]:
    """Return who is measured first and second in each round: A B, B A, A B, …"""
    return [(TODAY, THEN) if number % 2 == 0 else (THEN, TODAY) for number in range(rounds)]


def ratios(today: Sequence[float | None], then: Sequence[float | None]) -> Ratio | None:
    """Return the ratios of the rounds in which both were measured; None if there is no such round."""
    found = [ours / theirs for ours, theirs in zip(today, then, strict=True) if ours is not None and theirs]
    return Ratio(min(found), statistics.median(found), max(found)) if found else None


def table(measured: Measured, ref: str) -> list[str]:
    """Return the lines of a table: medians of both, and the ratios."""
    lines = [
        f"| figure | {ref} | today | today / {ref}: min | median | max |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for figure, today in measured[TODAY].items():
        then = measured[THEN][figure]
        found = ratios(today, then)
        told = [f"{each:.2f}" for each in found] if found is not None else ["–"] * 3
        lines.append(f"| {figure} | {_median(then)} | {_median(today)} | {' | '.join(told)} |")
    return lines


def line(measured: Measured, ref: str, how: str) -> str:
    """Return one line for a commit's message: of each figure the median of the ratios, with the lowest and highest."""
    told = []
    for figure, today in measured[TODAY].items():
        found = ratios(today, measured[THEN][figure])
        if found is not None:
            told.append(f"{figure} {found.median:.2f} ({found.low:.2f}–{found.high:.2f})")
    return f"Today / {ref} ({how}): {'; '.join(told) or 'nothing was measured'}"


def add(measured: Measured, found: dict[str, dict[str, float]], round_: int) -> None:
    """Add what one round found, by tree; a figure that one of the trees lacks gets None there."""
    for figure in dict.fromkeys(name for figures in found.values() for name in figures):
        for tree in (TODAY, THEN):
            values = measured[tree].setdefault(figure, [])
            values += [None] * (round_ - len(values))
            values.append(found.get(tree, {}).get(figure))


def _median(values: Sequence[float | None]) -> str:
    found = [value for value in values if value is not None]
    return number(statistics.median(found)) if found else "–"


# ------------------------------------------------------------------------------------------------ the other commit


def other(ref: str) -> tuple[str, Tree]:
    """Return a commit's hash, and its tree ready to be measured. Raises `CannotCompare`."""
    commit = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    if not commit:
        raise CannotCompare(f"{ref} is no commit of this repository; git log shows those there are")
    home = CACHE / commit
    files, python = home / "tree", home / "venv" / "bin" / "python"
    if not (home / "installed").exists():
        _install(commit, home, files, python)
    if _hot_paths(ROOT, python, "--fits").returncode == 0:
        return commit, Tree(ROOT, python)
    _say(f"{commit[:8]} lacks what today's bench needs: it is measured by its own")
    return commit, Tree(files, python)


def _install(commit: str, home: Path, files: Path, python: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)  # what was left when it was interrupted
    home.mkdir(parents=True)
    _say(f"{commit[:8]}: a clone and an environment of its own in {home.relative_to(ROOT)}, once")
    _run(["git", "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(files)])
    _run(["git", "-C", str(files), "checkout", "--quiet", "--detach", commit])
    venv.create(home / "venv", with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    bounds = ["-c", "constraints.txt"] if (files / "constraints.txt").exists() else []
    # with all that `make` gives today's tree: nats-py imports aiohttp where it finds it, which takes memory
    _run([*pip, *bounds, "-e", ".[test]"], cwd=files)
    (home / "installed").touch()


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    return done.stdout.strip()


def _run(command: list[str], cwd: Path | None = None) -> None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=INSTALL_S_MAX)
    except subprocess.TimeoutExpired:
        raise CannotCompare(f"`{' '.join(command)}` took over {INSTALL_S_MAX} s; try it by hand") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise CannotCompare(f"`{' '.join(command)}` failed: {why}")


# ------------------------------------------------------------------------------------------------ measuring


def measure(tree: Tree, question: str, *, quick: bool) -> dict[str, float]:
    """Return what a tree answers to a question, by figure; {} if it cannot."""
    done = _hot_paths(*tree, question, *(["--quick"] if quick else []))
    if done.returncode == 0:
        answer: dict[str, float] = json.loads(done.stdout)
        return answer
    why = (done.stderr.strip().splitlines() or ["no word"])[-1]
    _say(f"{question} is not measured: {why}")
    return {}


def _hot_paths(bench: Path, python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run this tree's `hot_paths.py` with a Python, over a bench; what it starts ends with it, however it ends."""
    environment = {**os.environ, "PYTHONPATH": str(bench)}
    with tempfile.TemporaryDirectory(prefix="moorage-against-") as folder:
        started = subprocess.Popen(
            [str(python), str(ROOT / "bench" / "hot_paths.py"), *words], cwd=folder, env=environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        with started as process, _ended(process):
            try:
                out, said = process.communicate(timeout=ANSWER_S_MAX)
            except subprocess.TimeoutExpired:
                return subprocess.CompletedProcess(words, 1, "", f"no answer within {ANSWER_S_MAX} s")
            return subprocess.CompletedProcess(words, process.returncode, out, said)


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """End a measurement however the block is left: it first ends what it has started, then its session is killed."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S_MAX)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def compared(trees: dict[str, Tree], questions: Sequence[str], rounds: int, *, quick: bool) -> Measured:
    """Measure both trees, one right behind the other in each question of each round."""
    measured: Measured = {TODAY: {}, THEN: {}}
    for round_, order in enumerate(orders(rounds)):
        for question in questions:
            found = {}
            for name in order:
                _say(f"round {round_ + 1} of {rounds}: {question}, {name}")
                found[name] = measure(trees[name], question, quick=quick)
            add(measured, found, round_)
    return measured


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.against", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref", help="the other commit: a hash, a branch or a tag")
    parser.add_argument("--only", choices=QUESTIONS, nargs="+", metavar="NAME", help=f"of {', '.join(QUESTIONS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="measure less: for a look, not for a decision")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    asked = parser.parse_args(words)
    if asked.rounds < 1:
        parser.error(f"--rounds must be at least 1, found {asked.rounds}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    try:
        commit, tree = other(asked.ref)
        trees = {TODAY: Tree(ROOT, Path(sys.executable)), THEN: tree}
        _say(f"the machine is {busy_percent():.0f} % busy before it begins")
        measured = compared(trees, asked.only or list(QUESTIONS), asked.rounds, quick=asked.quick)
    except CannotCompare as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        _say("interrupted: what was started has ended")
        return 130
    ref, cores = commit[:8], len(os.sched_getaffinity(0))
    how = f"{many(asked.rounds, 'round')}{', quick' * asked.quick}, {many(cores, 'core')}"
    last = line(measured, ref, how)
    if asked.json:
        print(json.dumps(_document(commit, measured, last)))
    else:
        print("\n".join([*table(measured, ref), "", last]))
    return 0 if any(ratios(values, measured[THEN][name]) for name, values in measured[TODAY].items()) else 1


def _document(commit: str, measured: Measured, last: str) -> dict[str, Any]:
    figures = {}
    for figure, today in measured[TODAY].items():
        found = ratios(today, measured[THEN][figure])
        figures[figure] = {
            TODAY: today, THEN: measured[THEN][figure], "ratio": None if found is None else found._asdict()
        }  # fmt: skip
    return {"commit": commit, "figures": figures, "line": last}


if __name__ == "__main__":
    sys.exit(main())
