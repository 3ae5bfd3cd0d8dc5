"""Write the figures of the README: medians of `make bench`, and when they were measured."""

from __future__ import annotations

import re
import statistics
from typing import Final

from bench.kept import ROOT, read

README: Final = ROOT / "README.md"
#: a row of the README's table: the figure of `make bench` that it rounds, and its unit
FIGURES: Final = {
    "submit → start, one in flight": ("one in flight, submit→start p50 ms", "ms"),
    "submit → start at 200 jobs/s, p99": ("200 jobs/s, submit→start p99 ms", "ms"),
    "submit → terminal, 1,000 callers, 2,048 slots": ("endpoint, 1,000 callers, 2,048 slots, jobs/s", "jobs/s"),
    "the same through the durable queue": ("durable queue, 1,000 in flight, jobs/s", "jobs/s"),
    "real processes, each with session, cgroup, death signal and output files": ("real processes, jobs/s", "jobs/s"),
    "scheduler's memory with 100,000 jobs queued": ("scheduler RSS MiB, 100,000 queued", "MiB"),
}
TABLE: Final = re.compile(r"^measured [^\n|]*\n\n\| \| median \|\n\| --- \| ---: \|\n(?:\|[^\n]*\n)+", re.MULTILINE)


def readme() -> str:
    """Return the README with the medians that bench/figures/bench.json has now."""
    text, found = TABLE.subn(_table(), README.read_text())
    assert found == 1, "the README has one table of figures, behind a line that begins with `measured`"
    return text


def _table() -> str:
    book = read("bench")
    assert book is not None, "make bench writes the figures"
    mine = [each for each in book.chapters.values() if each.figures.keys() & {name for name, _ in FIGURES.values()}]
    days = sorted({each.at[:10] for each in mine})
    when = f"measured on {days[0]}" if len(days) == 1 else f"measured from {days[0]} to {days[-1]}"
    rows = [f"| {row} | {_rounded(book.figures[name])} {unit} |" for row, (name, unit) in FIGURES.items()]
    return "\n".join([f"{when}:", "", "| | median |", "| --- | ---: |", *rows, ""])


def _rounded(values: list[float]) -> str:
    """The median to three digits."""
    return f"{float(f'{statistics.median(values):.3g}'):,.10g}"
