"""The workers' own records of a fault run: what their journals, their supervisors and the jobs themselves wrote.

Nothing here is the scheduler's word. A journal is followed while it grows, as agents and supervisors replace theirs by
a shorter one; a record that stands in both the old file and the new one says the same twice.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from moorage.system.framing import HEADER_BYTES, body_at
from moorage.worker.agent import journal as agent_journal
from moorage.worker.supervisor import journal as supervisor_journal
from moorage.worker.supervisor.journal import Over, Record, Starting

#: tenant, job, replica, attempt, fence
AttemptKey = tuple[str, str, int, int, int]

_LAST: Final = frozenset({"freed", "withdrawn", "refused", "not-held"})
_LINE: Final = re.compile(
    r"(?P<word>start|beat|end) (?P<tenant>\S+) (?P<job>\S+) (?P<replica>\d+) (?P<attempt>\d+) (?P<fence>\d+)"
    r" (?P<uuids>\S+) (?P<up>[\d.]+)"
)


class Hold(NamedTuple):
    """An entry of a worker's journal: an attempt took these slots, or is done with them."""

    worker: str
    attempt: AttemptKey
    word: str  # placed, claimed, or the report that ends it
    slots: tuple[int, ...] = ()


class Line(NamedTuple):
    """What a job wrote, in the order in which it happened (one O_APPEND write each); `up_s` is CLOCK_BOOTTIME."""

    word: str
    attempt: AttemptKey
    uuids: tuple[str, ...]
    up_s: float


class Life(NamedTuple):
    """An attempt by its supervisor's journal, in seconds of CLOCK_BOOTTIME.

    `ended_s` is None while no end stands there, and where it died with its supervisor: its tree was gone before the
    next one, which wrote that, was there to see it.
    """

    attempt: AttemptKey
    worker: str
    began_s: float
    ended_s: float | None


class Followed:
    """A file that grows by whole records and is now and then replaced; `read` gives what is new."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1
        self._inode = 0
        self._rest = b""

    def read(self) -> Iterator[bytes]:
        """New bytes, a chunk for each file that there was; `rest` gives back what was no whole record."""
        with contextlib.suppress(FileNotFoundError):
            while True:
                if self._file >= 0:
                    yield self._more()
                found = os.stat(self.path)
                if found.st_ino == self._inode:
                    return
                if self._file >= 0:
                    yield self._more()  # what came between the look and now
                    os.close(self._file)
                self._file, self._rest = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC), b""
                self._inode = os.fstat(self._file).st_ino

    def keep(self, rest: bytes) -> None:
        """Bytes that are not yet a whole record: they come again with the next chunk."""
        self._rest = rest

    def _more(self) -> bytes:
        size = os.fstat(self._file).st_size
        if size < os.lseek(self._file, 0, os.SEEK_CUR):  # its next owner cut a torn record off
            os.lseek(self._file, size, os.SEEK_SET)
            self._rest = b""
        parts = [self._rest]
        while part := os.read(self._file, 1 << 20):
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class AgentJournal:
    """An agent's journal: which attempts took which slots, and when they were done, in order."""

    def __init__(self, worker: str, path: Path) -> None:
        self._worker = worker
        self._followed = Followed(path)

    def read(self) -> Iterator[Hold]:
        for chunk in self._followed.read():
            form = agent_journal.FORM
            at = len(form.magic) if chunk.startswith(form.magic) else 0
            while (body := body_at(chunk, at, form.record_bytes_max)) is not None:
                yield from self._holds(msgspec.msgpack.decode(body))
                at += HEADER_BYTES + len(body)
            self._followed.keep(chunk[at:])

    def _holds(self, record: list[Any]) -> Iterator[Hold]:
        kind, *rest = record
        if kind == "placed":
            for place in rest[0]:
                tenant, job, replica, attempt, fence, slots = place[:6]
                yield Hold(self._worker, (tenant, job, replica, attempt, fence), "placed", tuple(slots))
        elif kind in ("facts", "join"):
            for word, tenant, job, replica, attempt, fence, *_ in rest[1]:
                if word == "claimed" or word in _LAST:
                    yield Hold(self._worker, (tenant, job, replica, attempt, fence), word)

    def close(self) -> None:
        self._followed.close()


class SupervisorJournal:
    """A supervisor's journal and those of its successors on the same folder."""

    def __init__(self, worker: str, path: Path) -> None:
        self._worker = worker
        self._followed = Followed(path)
        self.lives: dict[AttemptKey, Life] = {}
        self._decode = msgspec.msgpack.Decoder(Record).decode

    def read(self) -> None:
        for chunk in self._followed.read():
            at, form = 0, supervisor_journal.FORM
            while (mark := chunk.find(form.mark, at)) >= 0:
                body = body_at(chunk, mark + len(form.mark), form.record_bytes_max)
                if body is None:
                    break
                self._take(self._decode(body))
                at = mark + len(form.mark) + HEADER_BYTES + len(body)
            self._followed.keep(chunk[at:])

    def _take(self, record: Record) -> None:
        if isinstance(record, Starting):
            attempt = _attempt_of(record.key)
            self.lives.setdefault(attempt, Life(attempt, self._worker, record.boottime_s, None))
        elif isinstance(record, Over):
            attempt = _attempt_of(record.ended.key)
            life = self.lives.get(attempt)
            if life is not None and life.ended_s is None and record.ended.reason != "supervisor-died":
                self.lives[attempt] = life._replace(ended_s=record.ended.ended_boottime_s)

    def close(self) -> None:
        self._followed.close()


def lines_in(file: Path) -> list[Line]:
    """What the jobs wrote. A line that is none of theirs raises ValueError."""
    found = []
    for text in file.read_text().splitlines() if file.exists() else []:
        match = _LINE.fullmatch(text)
        if match is None:
            raise ValueError(f"no line of a job: {text!r}")
        attempt = (match["tenant"], match["job"], int(match["replica"]), int(match["attempt"]), int(match["fence"]))
        uuids = () if match["uuids"] == "-" else tuple(match["uuids"].split(","))
        found.append(Line(match["word"], attempt, uuids, float(match["up"])))
    return found


def _attempt_of(key: str) -> AttemptKey:
    tenant, job, replica, attempt, fence = key.partition("|")[2].split("/")
    return tenant, job, int(replica), int(attempt), int(fence)
