"""Join the files of `changes/`: `python -m tools.changelog` prints what the next release says of them.

`python -m tools.changelog 0.3.0 2026-12-01` puts it into CHANGELOG.md, under that release and date, and removes the
files. `changes/README.md` has the form of a file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
#: below it is what breaks existing use, in a file as in the changelog
MUST: Final = "What you must change"
#: heading of all other lines in the changelog
MORE: Final = "Changes"
CHARS_MAX: Final = 160
_LINE: Final = re.compile(r"- [^:]{1,60}: \S.*")
_UNRELEASED: Final = re.compile(r"^## (?P<release>\S+), unreleased\n", re.MULTILINE)


class BadChange(ValueError):
    """A line of a file has another form; the message names file and line."""


class Changes(NamedTuple):
    must: list[str]
    more: list[str]


def files(root: Path = ROOT) -> list[Path]:
    return sorted(file for file in (root / "changes").glob("*.md") if file.name != "README.md")


def read(file: Path) -> Changes:
    """Return the lines of a file. Raises `BadChange`."""
    found = Changes([], [])
    into = found.more
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if line == f"## {MUST}":
            into = found.must
        elif _LINE.fullmatch(line) and len(line) <= CHARS_MAX:
            into.append(line)
        elif line.strip():
            form = f"`- area: sentence.` of at most {CHARS_MAX} characters, or `## {MUST}`"
            raise BadChange(f"changes/{file.name}:{number}: a line is {form}: {line!r} has {len(line)}")
    return found


def joined(root: Path = ROOT) -> Changes:
    """Return the lines of all files, those of one area side by side. Raises `BadChange`."""
    every = [read(file) for file in files(root)]
    return Changes(
        sorted((line for each in every for line in each.must), key=_area),
        sorted((line for each in every for line in each.more), key=_area),
    )


def _area(line: str) -> str:
    return line.partition(":")[0].casefold()


def released(changelog: str, found: Changes, release: str, day: date) -> str:
    """Return the changelog in which a release has a date and these changes.

    Its section may be there already, unreleased, and keeps what it has. Raises ValueError if another one is unreleased.
    """
    head, *sections = re.split(r"^(?=## )", changelog, flags=re.MULTILINE)
    section = ""
    if sections and (there := _UNRELEASED.match(sections[0])):
        if there["release"] != release:
            raise ValueError(f"CHANGELOG.md has {there['release']} as the next release, not {release}")
        section = sections.pop(0)[there.end() :]
    told = "\n\n".join([f"## {release}, {day.isoformat()}", *_parts(section, found)])
    return "\n\n".join(part.strip() for part in (head, told, *sections)) + "\n"


def _parts(section: str, found: Changes) -> Iterator[str]:
    """Yield the parts of a release's section with these changes: its lead, what must be changed, all others."""
    lead, *parts = (part.strip() for part in re.split(r"^(?=### )", section, flags=re.MULTILINE))
    if lead:
        yield lead
    must = next((part for part in parts if part.startswith(f"### {MUST}\n")), f"### {MUST}\n")
    if must in parts or found.must:
        yield "\n".join([must, *found.must])
    yield from (part for part in parts if part != must)
    if found.more:
        yield "\n".join([f"### {MORE}\n", *found.more])


def main(words: list[str]) -> int:
    try:
        found = joined()
        if not words:
            print("\n\n".join(_parts("", found)))
            return 0
        release, day = words
        file = ROOT / "CHANGELOG.md"
        file.write_text(released(file.read_text(), found, release, date.fromisoformat(day)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for each in files():
        each.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
