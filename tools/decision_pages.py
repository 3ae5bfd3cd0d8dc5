"""Make the list of decisions and the list of laboratory notes from the files themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

DECISIONS: Final = Path(__file__).resolve().parents[1] / "docs" / "decisions"
NOTES: Final = DECISIONS.parents[1] / "bench" / "notes"

_ABOUT_DECISIONS: Final = """# Decisions

One page for each decision that shaped moorage: its status, its context, what was decided, and what follows from it.
A number is used once. Numbers that are missing here belong to laboratory notes: what was measured, tried and tuned is
written down in `bench/notes`, and `bench/notes/README.md` lists it by date.

| number | decision | status |
| --- | --- | --- |
"""
_ABOUT_NOTES: Final = """# Laboratory notes

What was measured, tried and tuned, on the day named, on the machine of that day. The text of a note is not changed
later: newer notes and [the decisions](../../docs/decisions/index.md) say what holds now, and
[RESULTS.md](../RESULTS.md) has the figures that hold now. A number is that of the decision that a note was until
2026-11-23, or to which it belongs. A new note is named after its date and its title, begins as these do, and needs no
number.

| date | number | note | what was found |
| --- | --- | --- | --- |
"""


class Record(NamedTuple):
    """One decision."""

    path: Path
    number: str
    title: str
    status: str


class Note(NamedTuple):
    """One laboratory note; `number` is that of the decision that it was, or that it measures, or empty."""

    path: Path
    number: str
    title: str
    found: str


def records() -> Iterator[Record]:
    """Yield each decision, by number. Raise ValueError if a page does not begin with its number, title and status."""
    for path in sorted(DECISIONS.glob("[0-9]*.md")):
        begins = re.match(r"# (\d{4}): ([^\n]+)\n\nStatus: (.+?)\n\n", path.read_text(), re.DOTALL)
        if begins is None or begins[1] != path.name[:4]:
            raise ValueError(f"{path.name}: begin with '# NNNN: title', an empty line and 'Status: ...'")
        yield Record(path, begins[1], begins[2], " ".join(begins[3].split()).rstrip("."))


def lab_notes() -> Iterator[Note]:
    """Yield each laboratory note, by date. Raise ValueError if a note does not begin with its title and finding."""
    for path in sorted(NOTES.glob("[0-9]*.md")):
        begins = re.match(r"# ([^\n]+)\n\nFound: ([^\n]+)\n(?:\n.*\bdecision (\d{4})\b)?", path.read_text())
        if begins is None or not re.match(r"\d{4}-\d\d-\d\d-", path.name):
            raise ValueError(f"{path.name}: name it DATE-title.md and begin with '# title', then 'Found: ...'")
        yield Note(path, begins[3] or "", begins[1], begins[2])


def decisions() -> str:
    """Return the page that lists the decisions."""
    listed = list(records())
    links = {record.number: f"[{record.number}]({record.path.name})" for record in listed}
    page = _ABOUT_DECISIONS
    for record in listed:
        status = re.sub(r"\[?\b(\d{4})\b\]?(?:\([^)]*\))?", lambda at: links.get(at[1], at[0]), record.status)
        page += f"| {record.number} | [{record.title}]({record.path.name}) | {status} |\n"
    return page


def notes() -> str:
    """Return the page that lists the laboratory notes."""
    return _ABOUT_NOTES + "".join(
        f"| {note.path.name[:10]} | {note.number} | [{note.title}]({note.path.name}) | {note.found} |\n"
        for note in lab_notes()
    )
