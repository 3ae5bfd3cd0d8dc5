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


@pytest.mark.parametrize(
    ("values", "verdict"),
    [([0.5, 0.6, 9.0], "goal"), ([0.7], "must"), ([1.0], "must"), ([1.1, 1.2, 0.1], "missed"), ([], "not measured")],
)
def test_the_median_decides(values: list[float], verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "BOOKS", tmp_path / "figures")
    monkeypatch.setattr(book, "PAGE", tmp_path / "RESULTS.md")
    book.keep("bench", "make bench", {"latency": {"p50": values}}, 0.0)
    assert Bound("bench", "p50", 1.0, 0.6, at_most=True).verdict() == verdict
