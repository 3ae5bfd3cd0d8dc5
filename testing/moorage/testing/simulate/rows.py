"""Reads CSV for all trace readers: rows by column, and errors that name file, line, column and what was found.

A byte order mark and empty lines are skipped. These are refused with line and column: a name twice in the first line,
more cells than names, unclosed quotes, and bytes that are not UTF-8 in a cell that is read.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final, TextIO

from moorage.schemas.errors import Refused, refuse

#: bytes of a JSON line, or characters of a CSV line
LINE_MAX: Final = 64 * 1024
DURATION_MS_MAX: Final = 10 * 366 * 86_400_000
#: the most digits of a number
_DIGITS_MAX: Final = 20
_FLAGS: Final = {"": False, "0": False, "false": False, "1": True, "true": True}
_FOUND_CHARS_MAX: Final = 60


def trouble(path: Path, line: int, why: str, **fields: Any) -> Refused:
    """Return the error for a trace: what is wrong, and where."""
    at = f"{path.name} line {line}: " if line else f"{path.name}: "
    return refuse("invalid-argument", at + why, **{"next": "moorage simulate --help shows the formats", **fields})


def too_long(path: Path, line: int, unit: str) -> Refused:
    """Return the error for a line longer than the bound."""
    return trouble(
        path,
        line,
        "the line is too long",
        found=f"more than {LINE_MAX} {unit}",
        allowed=f"at most {LINE_MAX}",
        next="is a quote or the end of a line missing there?",
    )


class Row:
    """One row; its getters raise Refused with what is needed to fix it. A missing cell counts as empty."""

    __slots__ = ("_cells", "line", "path")

    def __init__(self, path: Path, line: int, cells: dict[str, str]) -> None:
        self.path = path
        self.line = line
        self._cells = cells

    def raw(self, column: str) -> str:
        value = self._cells.get(column, "").strip()
        if not value.isascii() and value != _printable(value):
            found = value.encode("utf-8", "surrogateescape")[:_FOUND_CHARS_MAX]
            raise self.trouble(
                f"{column} is {found!r}, which is not UTF-8",
                found=repr(found),
                allowed="UTF-8",
                next="save the file as UTF-8",
            )
        return value

    def text(self, column: str, empty: bool = False) -> str:
        value = self.raw(column)
        if not value and not empty:
            raise self.wrong(column, "a word")
        return value

    def whole(self, column: str, least: int = 0, most: int = 1 << 40, *, empty: int | None = None) -> int:
        """Return a whole number; `empty` is the value of an empty cell, which is refused without it."""
        value = self.raw(column)
        if not value and empty is not None:
            return empty
        is_number = value.isascii() and value.isdigit() and len(value) <= _DIGITS_MAX
        if not is_number or not least <= int(value) <= most:
            raise self.wrong(column, f"a whole number {least}..{most}")
        return int(value)

    def seconds(self, column: str, most: float = 1e12) -> float | None:
        """Return the seconds in a column, 0 to `most`; None if the column is missing or empty."""
        value = self.raw(column)
        if not value:
            return None
        try:
            found = float(value)
        except ValueError:
            found = -1.0
        if not 0 <= found <= most:
            raise self.wrong(column, f"seconds, 0..{most:.0f}")
        return found

    def ms(self, column: str) -> int:
        """Return the seconds in a column as ms; the column must not be empty."""
        seconds = self.seconds(column, DURATION_MS_MAX / 1000)
        if seconds is None:
            raise self.wrong(column, f"seconds, 0..{DURATION_MS_MAX // 1000}")
        return round(seconds * 1000)

    def flag(self, column: str) -> bool:
        """Return a boolean: 1 or true, 0 or false; empty is false."""
        found = _FLAGS.get(self.raw(column).lower())
        if found is None:
            raise self.wrong(column, "0, 1, true or false")
        return found

    def wrong(self, column: str, allowed: str) -> Refused:
        value = self.raw(column)
        return self.trouble(
            f"{column} is {value[:_FOUND_CHARS_MAX]!r}, allowed: {allowed}", found=value, allowed=allowed
        )

    def trouble(self, why: str, **fields: Any) -> Refused:
        return trouble(self.path, self.line, why, **fields)


def read_rows(path: Path, needed: tuple[str, ...], known: Collection[str] | None = None) -> Iterator[Row]:
    """Yield the rows below the first line, which names the columns.

    It must name all of `needed`, and none but `known` if that is given. Raises Refused. Cells that no getter reads are
    not checked.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            cells_of_lines = _cells(path, file)
            line, names = next(cells_of_lines, (1, []))
            names = [_printable(name).strip() for name in names]
            _check_names(path, line, names, needed, known)
            for line, cells in cells_of_lines:
                if len(cells) > len(names):
                    surplus = _printable(cells[len(names)])[:_FOUND_CHARS_MAX]
                    raise trouble(
                        path,
                        line,
                        f"cell {len(names) + 1} is {surplus!r}, in no column: the first line names {len(names)}",
                        found=f"{len(cells)} cells",
                        allowed=f"at most {len(names)} cells",
                        next="take it out, or quote the cell before it that holds a comma",
                    )
                yield Row(path, line, dict(zip(names, cells, strict=False)))
    except OSError as error:
        raise trouble(path, 0, f"cannot be read: {error.strerror}", next="name a file that you may read") from None


def _cells(path: Path, file: TextIO) -> Iterator[tuple[int, list[str]]]:
    """Yield the line on which each row begins, and its cells; empty rows are left out."""
    reader = csv.reader(_lines(path, file), strict=True)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise trouble(
                path,
                line,
                f"not CSV: {error}",
                allowed="cells split by commas, quotes closed",
                next="look for an unclosed quote",
            ) from None
        if len(cells) > 1 or (cells and cells[0].strip()):
            yield line, cells


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    number = 0
    while line := file.readline(LINE_MAX + 1):
        number += 1
        if len(line) > LINE_MAX:
            raise too_long(path, number, "characters")
        yield line


def _check_names(
    path: Path, line: int, names: list[str], needed: tuple[str, ...], known: Collection[str] | None
) -> None:
    found = ", ".join(names) or "an empty file"
    for at, name in enumerate(names):
        if (first := names.index(name)) < at:
            raise trouble(
                path,
                line,
                f"column {at + 1} has the name {name[:_FOUND_CHARS_MAX]!r}, which column {first + 1} has already",
                found=found,
                allowed="each name once",
                next="remove one of them, or rename it",
            )
        if known is not None and name not in known:
            raise trouble(
                path,
                line,
                f"column {at + 1}, {name[:_FOUND_CHARS_MAX]!r}, is not a column of a trace",
                found=found,
                allowed=", ".join(known),
            )
    if missing := [name for name in needed if name not in names]:
        raise trouble(
            path,
            line,
            f"the first line must name {', '.join(needed)}; it lacks {missing[0]}",
            found=found,
            allowed=", ".join(known or needed),
        )


def _printable(text: str) -> str:
    """Return the text with a mark where bytes were no UTF-8: nothing can print these."""
    return text if text.isascii() else text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
