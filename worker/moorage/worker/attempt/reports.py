"""What attempts report of themselves while they run: lines of JSON behind one another in a file of their folder.

Only what is new is read, and of much that is new only its end, so a job that writes without pause costs itself alone.
The file counts as any other of its folder.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames.reported import (
    LINE_BYTES_MAX,
    REPORTED_NAMES_MAX,
    ROWS_MAX,
    TAIL_BYTES,
    VALUES_BYTES_MAX,
    Reported,
    Values,
    fits,
    row_of,
)
from moorage.schemas.handler import REPORT_FILE
from moorage.schemas.printable import shortened

#: bytes of one attempt that are read in one look
LOOK_BYTES: Final = 16 * 1024
#: bytes of what one renewal tells; the attempts take turns
TOLD_BYTES_MAX: Final = 16 * 1024
_REFUSED_CHARS_MAX: Final = 200


class Reporting:
    """What one attempt has reported so far."""

    def __init__(self) -> None:
        self.values: Values = {}
        self.refused = ""
        self._at = 0

    def look(self, folder: str) -> bool:
        """Take what is new in an attempt's folder; return whether there was something."""
        lines, behind = _read(folder, self._at, LOOK_BYTES)
        is_new, self._at = behind != self._at, behind
        for line in lines:
            self.take(line)
        return is_new

    def take(self, line: bytes) -> None:
        """Take a line, or note why it is refused."""
        try:
            row = row_of(line)
            values = {**self.values, **row}
            if len(values) > REPORTED_NAMES_MAX:
                new = next(name for name in row if name not in self.values)
                raise ValueError(f"{new} would be one name more than {REPORTED_NAMES_MAX}")
            if not fits(values):
                raise ValueError(f"the newest values would take more than {VALUES_BYTES_MAX} bytes")
        except ValueError as error:
            shown = shortened(line[:60].decode(errors="replace"), 40)
            self.refused = shortened(f"{error}: {shown}", _REFUSED_CHARS_MAX)
        else:
            self.values = values


class Reports:
    """What the running attempts of one worker have reported, for its renewals."""

    def __init__(self) -> None:
        self._of: dict[AttemptName, Reporting] = {}
        self._direct: frozenset[AttemptName] = frozenset()

    def look(self, folders: Mapping[AttemptName, str]) -> None:
        """Take what is new in the folders of these attempts; forget the others that have one."""
        for name in self._of.keys() - folders.keys() - self._direct:
            self._of.pop(name, None)
        for name, folder in folders.items():
            reporting = self._of.get(name) or Reporting()
            if reporting.look(folder):
                self._of[name] = reporting

    def told(self, direct: Mapping[AttemptName, Reporting]) -> list[Reported]:
        """Return what the next renewal tells: all, or those that follow the last ones of the renewal before. `direct`
        are those of running attempts that have no folder."""
        for name in self._direct - direct.keys():
            self._of.pop(name, None)
        self._direct = frozenset(direct)
        for name, reporting in direct.items():
            self._of.setdefault(name, reporting)
        found, size = list[Reported](), 0
        for name, reporting in list(self._of.items()):
            each = Reported(*name, reporting.values, reporting.refused)
            size += len(msgspec.msgpack.encode(each))
            if size > TOLD_BYTES_MAX:
                break
            found.append(each)
            with contextlib.suppress(KeyError):  # a look in another thread may have forgotten it
                self._of[name] = self._of.pop(name)  # to the end of the row
        return found


def last_of(folder: str) -> Reporting:
    """Return what an attempt that has ended reported last."""
    reporting = Reporting()
    for line in _lines(folder):
        reporting.take(line)
    return reporting


def rows_in(folder: str) -> list[Values]:
    """Return the last rows that an attempt has reported, without those that are refused."""
    return list(_rows(_lines(folder)))[-ROWS_MAX:]


def has_reported(folder: str) -> bool:
    """Return whether there is something in an attempt's file of reports."""
    try:
        about = os.stat(f"{folder}/{REPORT_FILE}", follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(about.st_mode) and about.st_size > 0


def _rows(lines: Iterable[bytes]) -> Iterable[Values]:
    for line in lines:
        with contextlib.suppress(ValueError):
            yield row_of(line)


def _lines(folder: str) -> list[bytes]:
    """Return the last lines, also one without an end: nothing more will come behind it."""
    lines, _ = _read(folder, 0, TAIL_BYTES, to_end=True)
    return lines


def _read(folder: str, at: int, most: int, *, to_end: bool = False) -> tuple[list[bytes], int]:
    """Return the whole lines from this offset on, and the offset behind them.

    Of more than `most` bytes only the end is read. With `to_end`, what is behind the last line's end is a line, too.
    """
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(f"{folder}/{REPORT_FILE}", flags)
    except OSError:
        return [], at
    try:
        about = os.fstat(descriptor)
        size = about.st_size if stat.S_ISREG(about.st_mode) else 0
        at = at if at <= size else 0  # it was written anew
        begin = max(at, size - most)
        data = os.pread(descriptor, size - begin, begin)
    except OSError:
        return [], at
    finally:
        os.close(descriptor)
    end = len(data) if to_end else data.rfind(b"\n") + 1
    end = len(data) if len(data) - end > LINE_BYTES_MAX else end  # a line that is too long, whatever follows
    first = data.find(b"\n") + 1 if begin > at else 0  # that line began before
    return [line for line in data[first:end].splitlines() if line.strip()], begin + end
