"""Make the list of laboratory notes from the files themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

NOTES: Final = Path(__file__).resolve().parents[1] / "bench" / "notes"

_ABOUT_NOTES: Final = """# Laboratory notes

What was measured, tried and tuned, on the day named, on the machine of that day. The text of a note is not changed
later: newer notes and [the decisions](../../docs/decisions/index.md) say what holds now, and
[RESULTS.md](../RESULTS.md) has the figures that hold now. A number is that of the decision that a note was until
2026-11-23, or to which it belongs. A new note is named after its date and its title, begins as these do, and needs no
number.

| date | number | note | what was found |
| --- | --- | --- | --- |
"""


class Note(NamedTuple):
    """One laboratory note; `number` is that of the decision that it was, or that it measures, or empty."""

    path: Path
    number: str
    title: str
    found: str


def notes() -> Iterator[Note]:
    """Yield each laboratory note, by date. Raise ValueError if a note does not begin with its title and finding."""
    for path in sorted(NOTES.glob("[0-9]*.md")):
        begins = re.match(r"# ([^\n]+)\n\nFound: ([^\n]+)\n(?:\n.*\bdecision (\d{4})\b)?", path.read_text())
        if begins is None or not re.match(r"\d{4}-\d\d-\d\d-", path.name):
            raise ValueError(f"{path.name}: name it DATE-title.md and begin with '# title', then 'Found: ...'")
        yield Note(path, begins[3] or "", begins[1], begins[2])


def listed() -> str:
    """Return the page that lists the laboratory notes."""
    return _ABOUT_NOTES + "".join(
        f"| {note.path.name[:10]} | {note.number} | [{note.title}]({note.path.name}) | {note.found} |\n"
        for note in notes()
    )
