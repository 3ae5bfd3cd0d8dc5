"""Figures that were measured, as they are kept: bench/figures/<book>.json, one book for each command.

A book holds chapters, each with what it was measured with.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

ROOT: Final = Path(__file__).resolve().parents[1]
BOOKS: Final = ROOT / "bench" / "figures"


class Chapter(msgspec.Struct):
    """Figures of one run: of each its value in every round, in the unit that its name tells."""

    at: str  # UTC
    rounds: int
    busy_percent: float  # the machine, before the first round
    machine: str
    versions: str
    figures: dict[str, list[float]]


class Book(msgspec.Struct):
    """All that a command measures, by chapter."""

    command: str
    page: str  # beside RESULTS.md, with what else there is to say; empty where this is all
    chapters: dict[str, Chapter]

    @property
    def figures(self) -> dict[str, list[float]]:
        return {name: values for chapter in self.chapters.values() for name, values in chapter.figures.items()}


def read(name: str) -> Book | None:
    """A book by its name; None where its command never ran."""
    path = BOOKS / f"{name}.json"
    return msgspec.json.decode(path.read_bytes(), type=Book) if path.exists() else None


def write(name: str, book: Book) -> None:
    BOOKS.mkdir(exist_ok=True)
    encoded = msgspec.json.format(msgspec.json.encode(book), indent=1)
    (BOOKS / f"{name}.json").write_bytes(encoded + b"\n")


def spread(values: Sequence[float]) -> str:
    """min | median | max."""
    return " | ".join(number(value) for value in (min(values), statistics.median(values), max(values)))


def number(value: float) -> str:
    """As a table shows it: whole from a hundred on, four digits that count from ten on, else three."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}" if abs(value) >= 10 else f"{value:.3g}"
