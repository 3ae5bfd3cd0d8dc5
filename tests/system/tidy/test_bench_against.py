"""`python -m bench.against`: what it makes of two trees' figures, and that nothing it starts outlives it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from bench import against
from bench.against import THEN, TODAY, Measured, Ratio, Tree
from tests.waiting import until

HERE = Tree(against.ROOT, Path(sys.executable))


def test_a_ratio_is_of_two_figures_of_one_round() -> None:
    assert against.ratios([110.0, 90.0, 330.0], [100.0, 100.0, 300.0]) == Ratio(0.9, 1.1, 1.1)
    assert against.ratios([None, 2.0], [4.0, 4.0]) == Ratio(0.5, 0.5, 0.5)
    assert against.ratios([1.0, 1.0], [None, 0.0]) is None
    assert against.ratios([], []) is None


def measured() -> Measured:
    found: Measured = {TODAY: {}, THEN: {}}
    against.add(found, {TODAY: {"jobs/s": 120.0, "p50 ms": 2.0}, THEN: {"jobs/s": 100.0}}, 0)
    against.add(found, {THEN: {"jobs/s": 100.0}, TODAY: {"jobs/s": 110.0, "new": 1.0}}, 1)
    return found


def test_the_table_and_the_line_tell_lowest_median_and_highest() -> None:
    assert against.table(measured(), "abcdef01") == [
        "| figure | abcdef01 | today | today / abcdef01: min | median | max |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| jobs/s | 100 | 115 | 1.10 | 1.15 | 1.20 |",
        "| p50 ms | – | 2 | – | – | – |",
        "| new | – | 1 | – | – | – |",
    ]
    last = against.line(measured(), "abcdef01", "2 rounds, 4 cores")
    assert last == "Today / abcdef01 (2 rounds, 4 cores): jobs/s 1.15 (1.10–1.20)"
    assert against.line({TODAY: {}, THEN: {}}, "abcdef01", "1 round").endswith("(1 round): nothing was measured")


def test_each_round_asks_both_trees_each_question(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, str]] = []

    def measure(tree: Tree, question: str, *, quick: bool) -> dict[str, float]:
        assert quick
        asked.append((tree.bench, question))
        return {question: float(len(asked))}

    monkeypatch.setattr(against, "measure", measure)
    ours, theirs = Tree(Path("ours"), Path("python")), Tree(Path("theirs"), Path("python"))
    found = against.compared({TODAY: ours, THEN: theirs}, ["one", "fold"], 2, quick=True)
    names = [(str(bench), question) for bench, question in asked]
    assert names == [
        ("ours", "one"), ("theirs", "one"), ("ours", "fold"), ("theirs", "fold"),
        ("theirs", "one"), ("ours", "one"), ("theirs", "fold"), ("ours", "fold"),
    ]  # fmt: skip
    assert found == {TODAY: {"one": [1, 6], "fold": [3, 8]}, THEN: {"one": [2, 5], "fold": [4, 7]}}


STARTS_ANOTHER: Final = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""


def _is_gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


async def test_an_interrupt_ends_a_measurement_and_what_it_started() -> None:
    words = [sys.executable, "-c", STARTS_ANOTHER]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:  # noqa: ASYNC220
        assert process.stdout is not None
        started = int(process.stdout.readline())
        with pytest.raises(KeyboardInterrupt), against._ended(process):
            raise KeyboardInterrupt
    assert process.returncode is not None
    await until(lambda: _is_gone(started), 60, "the end of what it started")


@pytest.mark.slow
def test_a_tree_beside_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(against, "other", lambda ref: (ref * 5, HERE))
    assert against.main(["f77363cc", "--only", "fold", "--quick", "--rounds", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    [(figure, row)] = told["figures"].items()
    assert figure == "fold of a million, s"
    assert row["ratio"]["median"] == row[TODAY][0] / row[THEN][0] > 0
    assert told["line"].startswith("Today / f77363cc (1 round, quick, ")
