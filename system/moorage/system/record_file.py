"""Keep records in a file that grows by whole records, until it is replaced by one with fewer of them.

The file is `Form.magic` and then the records, each `Form.mark` and a frame (`framing`). A process that dies may leave a
torn record at the end, and a full disk a piece of one: `read_records` leaves out what is not whole.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from moorage.system.framing import HEADER_BYTES, FrameRefused, body_at, framed

_READ_BYTES: Final = 1024 * 1024


class NotThisForm(Exception):
    """The file begins otherwise: another program, or another release, wrote it."""


class Form(NamedTuple):
    """What files of one kind have in common.

    With a `mark` a damaged record hides only itself, since reading goes on at the next mark. Without one, reading ends
    at the first damage: so it must be where records hold bytes of a stranger, who could write a mark into them.
    """

    magic: bytes
    mark: bytes
    #: no record's body is longer
    record_bytes_max: int
    #: a file is replaced beyond this size, or beyond twice what it had when it was last replaced, if that is more
    bytes_max: int


class Records(NamedTuple):
    """The bodies of the whole records in a file, in order, and how many bytes of it are no record."""

    bodies: list[bytes]
    torn_bytes: int


def read_records(path: Path, form: Form) -> Records:
    """Return what is in a file; nothing if there is none. Raises OSError, NotThisForm."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Records([], 0)
    if not _has_form(data, form):
        return Records([], len(data))
    bodies = list(_bodies_in(data, form))
    beside_bytes = len(form.mark) + HEADER_BYTES
    whole_bytes = len(form.magic) + sum(beside_bytes + len(body) for body in bodies)
    return Records(bodies, len(data) - whole_bytes)


def check_form(path: Path, form: Form) -> None:
    """Raise NotThisForm if a file is there that begins otherwise. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        _has_form(file.read(len(form.magic)), form)


def _has_form(data: bytes, form: Form) -> bool:
    """Return whether a file with these bytes has records: with a torn beginning it has none. Raises NotThisForm."""
    if data.startswith(form.magic):
        return True
    if not form.magic.startswith(data):
        raise NotThisForm
    return False


def _bodies_in(data: bytes, form: Form) -> Iterator[bytes]:
    mark, at = form.mark, data.find(form.mark, len(form.magic))
    while at >= 0:
        try:
            body = body_at(data, at + len(mark), form.record_bytes_max)
        except FrameRefused:
            body = None
        if body is not None:
            yield body
        elif not mark:
            return
        at = data.find(mark, at + 1 if body is None else at + len(mark) + HEADER_BYTES + len(body))


class RecordFile:
    """A file of records, open for appending. Its methods raise OSError."""

    __slots__ = ("_bytes_max", "_descriptor", "_form", "_is_synced", "_path", "bytes_written")

    def __init__(self, path: Path, form: Form, bodies: Iterable[bytes], *, synced: bool = False) -> None:
        """Replace the file by these records. If `synced`, a replaced file is on the disk before it is in place."""
        self._path = path
        self._form = form
        self._is_synced = synced
        self._descriptor = -1
        self.bytes_written = 0
        self.replace(bodies)

    def append(self, bodies: Iterable[bytes]) -> None:
        """Add records; if that fails, none of them is in the file."""
        data = self._framed(bodies)
        try:
            _write_all(self._descriptor, data)
        except OSError:
            # cut off what was written before the disk was full, so that later records stay readable
            os.ftruncate(self._descriptor, self.bytes_written)
            raise
        self.bytes_written += len(data)

    def replace(self, bodies: Iterable[bytes]) -> None:
        """Replace the file by these records: readers see the old file or the new one."""
        fresh = self._path.with_name(self._path.name + ".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(fresh, flags, 0o600)
        try:
            data = self._form.magic + self._framed(bodies)
            _write_all(descriptor, data)
            if self._is_synced:  # else the rename may reach the disk before the bytes (rename(2), delayed allocation)
                os.fsync(descriptor)
            os.rename(fresh, self._path)
        except BaseException:
            os.close(descriptor)
            raise
        self.close()
        self._descriptor = descriptor
        self.bytes_written = len(data)
        self._bytes_max = max(self._form.bytes_max, 2 * len(data))

    @property
    def is_large(self) -> bool:
        """Whether it is time to replace it."""
        return self.bytes_written > self._bytes_max

    def is_in_place(self) -> bool:
        """Return whether a file of this name is this one: a folder may be removed or replaced under its owner."""
        try:
            there = os.stat(self._path)
        except OSError:
            return False
        ours = os.fstat(self._descriptor)
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def sync(self) -> None:
        """Return once all records are on the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _framed(self, bodies: Iterable[bytes]) -> bytes:
        mark, most_bytes = self._form.mark, self._form.record_bytes_max
        return b"".join([piece for body in bodies for piece in (mark, framed(body, most_bytes))])


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
