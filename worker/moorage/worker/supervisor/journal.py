"""Keep a file of the members that a supervisor started and of their ends, for the next supervisor.

A member's start is written before any process of it exists. Nothing is synced to the disk: the file has to outlive the
supervisor, not the machine, because a reboot ends every member anyway.

The file is `MAGIC` and then the records: `MARK` and a frame (`system.framing`) of msgpack each. What is damaged, its
length too, is left out up to the next mark that a whole record follows.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from moorage.schemas.unreadable import UNREADABLE
from moorage.system.framing import HEADER_BYTES, FrameRefused, body_at, framed
from moorage.worker.supervisor.protocol import Ended

COMPACT_BYTES: Final = 4 * 1024 * 1024
MAGIC: Final = b"moorage-supervisor-journal-2\n"
MARK: Final = b"\xc1rec"
"""Begins a record; 0xc1 is no byte of msgpack's own."""
#: no record is longer
RECORD_BYTES_MAX: Final = (1 << 32) - 1


class Starting(msgspec.Struct, frozen=True, kw_only=True, tag="s"):
    """Written before the member's first process. `cgroup` is the path of its cgroup, empty without one.

    `container` is the id of the member's container; empty for a process.
    """

    key: str
    boot_id: str
    boottime_s: float
    cgroup: str
    marks: tuple[bytes, ...]
    container: str = ""


class Running(msgspec.Struct, frozen=True, kw_only=True, tag="p"):
    """The main process has this pid, which is also its session id."""

    key: str
    pid: int


class Over(msgspec.Struct, frozen=True, kw_only=True, tag="e"):
    ended: Ended


class Forgotten(msgspec.Struct, frozen=True, kw_only=True, tag="f"):
    keys: tuple[str, ...]


Record: TypeAlias = Starting | Running | Over | Forgotten

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Record).decode


class Left(msgspec.Struct):
    """What the journal knows of one member that is not forgotten."""

    starting: Starting | None = None
    pid: int | None = None
    ended: Ended | None = None


def read_journal(path: Path) -> dict[str, Left]:
    """Return the members in the file, in order of their start; damaged records and a torn last one are left out.

    Empty without a file. Raises `OSError`.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    left: dict[str, Left] = {}
    for body in _bodies(data):
        try:
            record = _decode(body)
        except UNREADABLE:
            continue  # of a newer supervisor
        match record:
            case Starting():
                left[record.key] = Left(starting=record)
            case Running():
                left.setdefault(record.key, Left()).pid = record.pid
            case Over():
                left.setdefault(record.ended.key, Left()).ended = record.ended
            case Forgotten():
                for key in record.keys:
                    left.pop(key, None)
    return left


def _bodies(data: bytes) -> Iterator[bytes]:
    at = data.find(MARK)
    while at >= 0:
        try:
            body = body_at(data, at + len(MARK), RECORD_BYTES_MAX)
        except FrameRefused:
            body = None
        if body is not None:
            yield body
        at = data.find(MARK, at + 1 if body is None else at + len(MARK) + HEADER_BYTES + len(body))


class Journal:
    """The file, open for appending. Its methods raise `OSError`."""

    __slots__ = ("_compact_bytes", "_descriptor", "_path", "bytes_written")

    def __init__(self, path: Path, records: Iterable[Record]) -> None:
        """Replace the file by these records, atomically."""
        self._path = path
        self._descriptor = -1
        self.bytes_written = 0
        self._compact_bytes = COMPACT_BYTES
        self.compact(records)

    def append(self, records: Iterable[Record]) -> None:
        """Add the records; if that fails, none of them is in the file."""
        data = _framed(records)
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError:
            # cut off what was written before the disk was full, so that later records stay readable
            os.ftruncate(self._descriptor, self.bytes_written)
            raise
        self.bytes_written += len(data)

    def compact(self, records: Iterable[Record]) -> None:
        """Replace the file by these records, atomically."""
        fresh = self._path.with_name(self._path.name + ".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(fresh, flags, 0o600)
        try:
            data = MAGIC + _framed(records)
            with open(descriptor, "wb", closefd=False) as file:
                file.write(data)
            os.rename(fresh, self._path)
        except OSError:
            os.close(descriptor)
            raise
        self.close()
        self._descriptor = descriptor
        self.bytes_written = len(data)
        self._compact_bytes = max(COMPACT_BYTES, 2 * len(data))

    @property
    def wants_compaction(self) -> bool:
        return self.bytes_written > self._compact_bytes

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _framed(records: Iterable[Record]) -> bytes:
    pieces: list[bytes] = []
    for record in records:
        body = _encode(record)
        pieces += (MARK, framed(body, RECORD_BYTES_MAX))
    return b"".join(pieces)


def records_of(left: dict[str, Left]) -> list[Record]:
    """Return the fewest records that describe the same members; a member without start and end has none."""
    records: list[Record] = []
    for key, entry in left.items():
        if entry.ended is not None:
            records.append(Over(ended=entry.ended))
            continue
        if entry.starting is not None:
            records.append(entry.starting)
        if entry.pid is not None:  # also without a readable start: the next supervisor must know of the member
            records.append(Running(key=key, pid=entry.pid))
    return records
