"""Write down what was measured: into the book of its command, and the page of all books.

A command that measures some of its chapters again replaces those alone, and every command writes bench/RESULTS.md anew
from all books: the bounds with what came (`bounds`), then every figure of `make bench`. So the page never mixes rounds
of two runs in one row, and each row tells its run.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.bounds import BOUNDS
from bench.kept import ROOT, Book, Chapter, read, spread, write

PAGE: Final = ROOT / "bench" / "RESULTS.md"


def keep(
    name: str,
    command: str,
    chapters: Mapping[str, Mapping[str, Sequence[float]]],
    busy_percent: float,
    page: str = "",
) -> None:
    """Put chapters into a book in place of what it held of them, and write the page anew."""
    book = read(name) or Book(command, page, {})
    book.command, book.page = command, page
    for title, figures in chapters.items():
        rounds = max((len(values) for values in figures.values()), default=0)
        book.chapters[title] = Chapter(
            at=time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
            rounds=rounds,
            busy_percent=round(busy_percent, 1),
            machine=machine(),
            versions=versions(),
            figures={
                figure: [float(f"{value:.5g}") for value in values] for figure, values in figures.items() if values
            },
        )
    write(name, book)
    PAGE.write_text(render())


def busy_percent() -> float:
    """How busy the machine is before anything is measured."""

    def sample() -> tuple[int, int]:
        values = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        return sum(values), values[3] + values[4]

    before = sample()
    time.sleep(1)
    after = sample()
    return 100 * (1 - (after[1] - before[1]) / (after[0] - before[0]))


def machine() -> str:
    """Cores, processor, kernel and Python."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())
    return f"{os.cpu_count()} cores of {model}, Linux {platform.release()}, Python {platform.python_version()}"


def versions() -> str:
    """The server's, and those of the packages that figures hang on."""
    server = subprocess.run([Path(sys.executable).parent / "nats-server", "--version"], capture_output=True, text=True)
    packages = ("nats-py", "msgspec", "uvloop", "numpy")
    return ", ".join([server.stdout.strip(), *(f"{name} {importlib.metadata.version(name)}" for name in packages)])


#: books of which the page has the figures without a bound, too
WHOLE: Final = ("bench", "services", "tls", "worker-files")

HEAD: Final = """# Results

Written by the commands that it names. Every process (server, scheduler, fleet, callers) shares the cores named here;
JetStream fsyncs every append (`sync_interval: always`); GPUs are **simulated**, and noop members start no process.
Compare ratios of one run; absolute numbers are this machine's. The numbers of every round stand in `bench/figures`.
"""


def render() -> str:
    """RESULTS.md from all books."""
    lines = [HEAD, "## What was aimed at, and what came", ""]
    verdicts = [bound.verdict() for bound in BOUNDS]
    met, goals, missed = (sum(v in of for v in verdicts) for of in (("must", "goal"), ("goal",), ("missed",)))
    lowered = [bound for bound in BOUNDS if bound.first is not None]
    kept = f"{met} of {len(BOUNDS)} bounds are kept, {goals} of them at their goal; {missed} missed."
    easier = f"{len(lowered)} were [lowered](#bounds-that-were-lowered), each with its reason."
    lines += [f"{kept} The column in the middle decides. {easier}"]
    for name in dict.fromkeys(bound.book for bound in BOUNDS):
        book = read(name)
        if book is None:
            lines += ["", f"### {name}", "", "Never run here."]
            continue
        linked = f", with all there is to it in [{book.page}]({book.page})" if book.page else ""
        lines += ["", f"### `{book.command}`{linked}", ""]
        middle = {"placement": "mean", "queueing": "geometric mean"}.get(name, "median")
        lines += [f"| figure | must | goal | min | {middle} | max | kept |", "| --- |" + " ---: |" * 5 + " --- |"]
        for bound in BOUNDS:
            if bound.book == name:
                lines.append(bound.row())
        lines += ["", *_runs(book)]
    lines += ["", "## Bounds that were lowered", "", "The trials behind the reasons stand in [TRIED.md](TRIED.md)."]
    for why in dict.fromkeys(bound.why for bound in lowered):
        lines += ["", why, "", "| figure | first | now |", "| --- | ---: | ---: |"]
        lines += [bound.change() for bound in lowered if bound.why == why]
    for name in WHOLE:
        if (book := read(name)) is not None:
            lines += ["", f"## Every figure of `{book.command}`", ""]
            lines += ["| figure | min | median | max |", "| --- | ---: | ---: | ---: |"]
            for figure, values in book.figures.items():
                lines.append(f"| {figure} | {spread(values)} |")
    return "\n".join(lines) + "\n"


def _runs(book: Book) -> list[str]:
    """When the chapters of a book were measured, and on what; those alike in one line."""
    alike: dict[tuple[str, str], dict[str, list[str]]] = {}
    for title, chapter in book.chapters.items():
        when = f"{chapter.at} UTC, {chapter.rounds} rounds, machine {chapter.busy_percent:.0f} % busy before"
        if chapter.rounds == 1:
            when = f"{chapter.at} UTC, machine {chapter.busy_percent:.0f} % busy before"
        alike.setdefault((chapter.machine, chapter.versions), {}).setdefault(when, []).append(title)
    return [
        f"- {on}; {with_}. " + "; ".join(f"{', '.join(titles)}: {when}" for when, titles in each.items())
        for (on, with_), each in alike.items()
    ]
