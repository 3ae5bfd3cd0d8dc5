"""Keep a file of the attempts that a supervisor started and of their ends, for the next supervisor.

It is about processes alone: what an attempt is, its request and its devices, is in the agent's journal of placements.

An attempt's start is written before any process of it exists. Nothing is synced to the disk: the file has to outlive
the supervisor, not the machine, because a reboot ends every attempt anyway.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from moorage.schemas.unreadable import UNREADABLE
from moorage.system.record_file import Form, RecordFile, read_records
from moorage.worker.supervisor.protocol import Ended

FORM: Final = Form(
    magic=b"moorage-supervisor-journal-2\n",
    mark=b"\xc1rec",  # 0xc1 is no byte of msgpack's own
    record_bytes_max=(1 << 32) - 1,
    bytes_max=4 * 1024 * 1024,
)


class Starting(msgspec.Struct, frozen=True, kw_only=True, tag="s"):
    """Written before the attempt's first process. `cgroup` is the path of its cgroup, empty without one.

    `container` is the id of the attempt's container; empty for a process.
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
    """What the journal knows of one attempt that is not forgotten."""

    starting: Starting | None = None
    pid: int | None = None
    ended: Ended | None = None


def read_journal(path: Path) -> dict[str, Left]:
    """Return the attempts in the file, in order of their start; damaged records and a torn last one are left out.

    Empty without a file. Raises `OSError`, `NotThisForm`.
    """
    left: dict[str, Left] = {}
    for body in read_records(path, FORM).bodies:
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


def open_journal(path: Path, records: Iterable[Record]) -> RecordFile:
    """Replace the file by these records and open it. Raises `OSError`."""
    return RecordFile(path, FORM, encoded(records))


def encoded(records: Iterable[Record]) -> Iterator[bytes]:
    """Return the records as a journal's file takes them."""
    return map(_encode, records)


def records_of(left: dict[str, Left]) -> list[Record]:
    """Return the fewest records that describe the same attempts; an attempt without start and end has none."""
    records: list[Record] = []
    for key, entry in left.items():
        if entry.ended is not None:
            records.append(Over(ended=entry.ended))
            continue
        if entry.starting is not None:
            records.append(entry.starting)
        if entry.pid is not None:  # also without a readable start: the next supervisor must know of the attempt
            records.append(Running(key=key, pid=entry.pid))
    return records
