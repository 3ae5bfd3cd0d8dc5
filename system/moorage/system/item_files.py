"""Read a file of items: where each item begins, and what it says.

A client reads the whole file before it submits a job, and a worker the item of one replica, by an index of where each
begins. Blank lines are no items. Errors are ValueErrors that begin with the line at fault.
"""

from __future__ import annotations

import csv
import io
import sys
from array import array
from collections.abc import Iterator
from typing import IO, Final, NamedTuple

import msgspec

from moorage.schemas.items import ITEM_BYTES_MAX, Format, Item, check_columns, checked, item_of
from moorage.schemas.ranges import NUMBERS_MAX

_BOM: Final = b"\xef\xbb\xbf"  # Windows writes a byte order mark
#: bytes of an item with its line end and a byte order mark, and one more
_PIECE_BYTES: Final = ITEM_BYTES_MAX + len(_BOM) + 3


class _Record(NamedTuple):
    """A line that is not blank, or a row of CSV of several: where it begins in bytes, its first line, its content."""

    at: int
    line: int
    content: bytes


def _records(source: IO[bytes], format: Format, bytes_max: int = sys.maxsize) -> Iterator[_Record]:
    """Yield the records from where `source` stands, of at most `bytes_max` bytes, and as many as a job has items.

    Raises ValueError.
    """
    at, line, left = 0, 0, NUMBERS_MAX + (format == "csv")  # the header, too
    while piece := source.readline(min(_PIECE_BYTES, bytes_max - at)):
        first = line = line + 1
        begin, size = at, len(piece)
        if not at and piece.startswith(_BOM):
            piece, begin = piece[len(_BOM) :], len(_BOM)
        while format == "csv" and piece.count(b'"') % 2 and len(piece) < _PIECE_BYTES:  # a value of several lines
            more = source.readline(min(_PIECE_BYTES, bytes_max - at - size))
            if not more:
                raise ValueError(f"line {first} has a quote that is not closed")
            piece, size, line = piece + more, size + len(more), line + 1
        at += size
        content = piece.removesuffix(b"\n").removesuffix(b"\r")
        if len(content) > ITEM_BYTES_MAX:
            raise ValueError(f"line {first} must have at most {ITEM_BYTES_MAX} bytes, and has more")
        if content.strip():
            if not left:
                raise ValueError(f"line {first}: a job has at most {NUMBERS_MAX} items")
            left -= 1
            yield _Record(begin, first, content)


def _item(content: bytes, format: Format, columns: list[str]) -> Item:
    """Return the item of a record. Raises ValueError, as `must be ..., found ...`."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"must be UTF-8, found the byte {content[error.start]:#x}") from None
    if format == "lines":
        return checked(Item(text, {}, text))
    if format == "csv":
        cells = _cells(text)
        if len(cells) != len(columns):
            raise ValueError(f"must have {len(columns)} values, one for each column, found {len(cells)}")
        return item_of(dict(zip(columns, cells, strict=True)))
    try:
        value = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"must be a JSON value, found {str(error).partition(' - at ')[0]}") from None
    return item_of(value)


def _cells(text: str) -> list[str]:
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True))
    except csv.Error as error:
        raise ValueError(f"must be a row of CSV: {error}") from None
    if len(rows) != 1:
        raise ValueError(f"must be one row of CSV, with a quote in a value written twice, found {len(rows)} rows")
    return rows[0]


def _columns(header: _Record) -> list[str]:
    try:
        columns = [cell.strip() for cell in _cells(header.content.decode())]
        check_columns(columns)
    except UnicodeDecodeError:
        raise ValueError(f"line {header.line} must be UTF-8") from None
    except ValueError as error:
        raise ValueError(f"line {header.line} {error}") from None
    return columns


def _divided(source: IO[bytes], format: Format, bytes_max: int = sys.maxsize) -> tuple[list[str], Iterator[_Record]]:
    """Return the columns of a file, none unless it is CSV, and the records of its items. Raises ValueError."""
    records = _records(source, format, bytes_max)
    header = next(records, None) if format == "csv" else None
    return [] if header is None else _columns(header), records


def items_in(source: IO[bytes], format: Format) -> Iterator[tuple[int, Item]]:
    """Yield each item of a file, with the line that it begins in. Raises ValueError for the first that is wrong."""
    columns, records = _divided(source, format)
    for record in records:
        try:
            yield record.line, _item(record.content, format, columns)
        except ValueError as error:
            raise ValueError(f"line {record.line} {error}") from None


class ItemIndex:
    """Where each item of a file begins; 8 bytes an item.

    The file stands in `source` from `begin` on and has `size` bytes. Raises ValueError if it cannot be divided.
    """

    def __init__(self, source: IO[bytes], format: Format, begin: int = 0, size: int = sys.maxsize) -> None:
        self._format: Format = format
        source.seek(begin)
        self._columns, records = _divided(source, format, size)
        self._begins = array("Q", (begin + record.at for record in records))
        self._end = begin + size

    def __len__(self) -> int:
        return len(self._begins)

    def item(self, source: IO[bytes], number: int) -> Item:
        """Return an item of the file, from the `source` of which the index was made. Raises ValueError, OSError."""
        if number >= len(self):
            raise ValueError(f"has {len(self)} items, and none for replica {number}")
        source.seek(self._begins[number])
        # a line that is too long, or a quote that is not closed, was refused as the index was made
        record = next(_records(source, self._format, self._end - self._begins[number]))
        try:
            return _item(record.content, self._format, self._columns)
        except ValueError as error:
            raise ValueError(f"item {number} {error}") from None
