"""bench/RESULTS.md is what the books of the measurements come to, and every bound has been measured."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from bench import book, kept
from bench.bounds import BOUNDS, Bound

BOOKS: Final = sorted({bound.book for bound in BOUNDS})


def test_the_page_is_what_the_books_come_to() -> None:
    assert book.PAGE.read_text() == book.render()


@pytest.mark.parametrize("name", BOOKS)
def test_every_bound_has_been_measured(name: str) -> None:
    known = kept.read(name)
    assert known is not None
    assert [bound.figure for bound in BOUNDS if bound.book == name and bound.figure not in known.figures] == []


def test_some_chapters_again_replace_those_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "BOOKS", tmp_path / "figures")
    monkeypatch.setattr(book, "PAGE", tmp_path / "RESULTS.md")
    book.keep("fairness", "make it", {"one": {"weights 3:1, off by %": [6.0, 1.0, 2.0]}, "two": {"b": [4.0]}}, 1.0)
    book.keep("fairness", "make it", {"two": {"b": [5.0]}}, 1.0)
    known = kept.read("fairness")
    assert known is not None
    assert known.figures == {"weights 3:1, off by %": [6.0, 1.0, 2.0], "b": [5.0]}
    assert "| weights 3:1, off by % | ≤ 5 |  | 1 | 2 | 6 | must |" in (tmp_path / "RESULTS.md").read_text()


@pytest.mark.parametrize(
    ("values", "verdict"),
    [([0.5, 0.6, 9.0], "goal"), ([0.7], "must"), ([1.0], "must"), ([1.1, 1.2, 0.1], "missed"), ([], "not measured")],
)
def test_the_median_decides(values: list[float], verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "BOOKS", tmp_path / "figures")
    monkeypatch.setattr(book, "PAGE", tmp_path / "RESULTS.md")
    book.keep("bench", "make bench", {"latency": {"p50": values}}, 0.0)
    assert Bound("bench", "p50", 1.0, 0.6, at_most=True).verdict() == verdict


def test_what_is_missed_by_little_does_not_read_as_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "BOOKS", tmp_path / "figures")
    monkeypatch.setattr(book, "PAGE", tmp_path / "RESULTS.md")
    book.keep("bench", "make bench", {"latency": {"p50": [1.0041]}}, 0.0)
    row = Bound("bench", "p50", 1.0, None, at_most=True).row()
    assert row == "| p50 | ≤ 1 |  | 1 | 1.0041 | 1 | **missed** |"
