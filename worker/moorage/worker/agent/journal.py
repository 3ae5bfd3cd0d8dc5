"""Record what an agent must not forget when it dies: its join number, reports not yet answered, and its placements.

It is the one journal of placements: the supervisor's has the processes, under names that mean nothing to it.

It is one file of records (`system.record_file`). The same function folds them into a small state when they are written
and when they are read, and the file is replaced by that state at a start and once it has grown. A record is a msgpack
array that starts with the record's kind. A torn end after a crash is left out; `torn_bytes` is its size.

On a full disk it is written with the room of a reserve (`state_disk`). Without that it stays behind: its state is in
memory alone, nothing of it may be sent or started, and the file is replaced by it once there is room.

Only joins and replaced files are fsynced. The page cache outlives a killed agent, and after a crash of the machine the
boot id is new, so no earlier attempt is taken over. Only the join number must keep growing in that case, too.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from moorage.schemas.attempt import AttemptName, name_in
from moorage.schemas.errors import MoorageError, problem
from moorage.schemas.frames import Place, Report, ReportFrame
from moorage.schemas.unreadable import UNREADABLE
from moorage.system.disk_room import NO_ROOM
from moorage.system.proctree import boottime_s
from moorage.system.record_file import Form, NotThisForm, RecordFile, read_records

T = TypeVar("T")
JOURNAL_NAME: Final = "agent.journal"
#: without marks: a placement has the bytes of a tenant's request
FORM: Final = Form(
    magic=b"moorage-agent-journal-1\n", mark=b"", record_bytes_max=4 * 1024 * 1024, bytes_max=8 * 1024 * 1024
)
#: `is_in_use` has the lock only for a moment, so an agent that finds it locked tries again
LOCK_TRIES_MAX: Final = 100
LOCK_RETRY_S: Final = 0.001

#: a journal that is behind tries so often to be written
TRY_AGAIN_S: Final = 1.0
#: reports after which the journal needs no placement of an attempt any more
_LAST_REPORTS: Final = frozenset({"freed", "withdrawn", "refused", "not-held"})
#: reports after which nothing of an attempt runs, though its devices may not be free yet
_END_REPORTS: Final = frozenset({"exited", "ran"})
#: most names in `JournalState.released`; the oldest go first
RELEASED_MAX: Final = 1000


class JournalInUse(MoorageError):
    """Another agent uses this state folder."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            problem(
                "failed-precondition",
                f"another agent uses the journal {path}",
                found=str(path),
                next="stop it, or give this worker a state folder of its own",
            )
        )


class JournalUnwritable(MoorageError):
    """The disk refuses writes, and not for want of room: an agent without a journal must not go on."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(
            problem(
                "failed-precondition",
                f"the journal {path} cannot be written: {error.strerror or error}",
                found=str(path),
                next="mend the disk and start the agent again: running jobs go on until its lease is over",
            )
        )


class JournalUnreadable(MoorageError):
    """The file is not a journal, or a newer release wrote it."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            problem(
                "failed-precondition",
                f"{path} is not a journal that this release can read",
                found=str(path),
                next="use the release that wrote it, or move the file away once no job of it runs here",
            )
        )


def is_in_use(path: Path) -> bool:
    """Return whether an agent, this one included, has the journal at this path open; False if that cannot be seen."""
    try:
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: a starting agent can tell it from an agent's lock
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _lock_alone(lock: int) -> bool:
    """Lock an agent's lock file; return False if another agent has it (`is_in_use` has it only for a moment)."""
    for _ in range(LOCK_TRIES_MAX):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(lock, fcntl.LOCK_UN)
        time.sleep(LOCK_RETRY_S)
    return False


class _Join(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    n: int
    reports: list[Report]
    devices: list[str] = []
    left: list[str] = []
    released: list[AttemptName] = []  # of a replaced file; last, so that an earlier release reads past it


class _Live(msgspec.Struct, frozen=True, array_like=True, tag="live"):
    ledger: str


class _Reports(msgspec.Struct, frozen=True, array_like=True, tag="facts"):
    no: int
    reports: list[Report]


class _Answered(msgspec.Struct, frozen=True, array_like=True, tag="answered"):
    no: int


class _Quarantined(msgspec.Struct, frozen=True, array_like=True, tag="quarantined"):
    name: AttemptName


class _Placed(msgspec.Struct, frozen=True, array_like=True, tag="placed"):
    places: list[Place]
    ended: Report | None = None  # of a replaced file's single place; last, so that an earlier release reads past it


class Kept(msgspec.Struct, frozen=True, array_like=True, tag="kept"):
    """What else a placed attempt has: its ports, and whether it was ready once."""

    name: AttemptName
    ports: list[int]
    was_ready: bool


_Record = _Join | _Live | _Reports | _Answered | _Placed | _Quarantined | Kept
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Record).decode


class JournalState:
    """The state after all records so far."""

    __slots__ = (
        "devices",
        "ended",
        "frames",
        "join_n",
        "join_reports",
        "kept",
        "ledger",
        "left",
        "places",
        "quarantined",
        "released",
    )

    def __init__(self) -> None:
        self.join_n = 0
        self.ledger = ""
        self.join_reports: list[Report] = []
        self.frames: dict[int, list[Report]] = {}
        self.places: dict[AttemptName, Place] = {}
        self.kept: dict[AttemptName, Kept] = {}
        self.quarantined: set[AttemptName] = set()  # those of the places that have only slots in quarantine left
        self.ended: dict[AttemptName, Report] = {}  # how those of the places ended whose devices are not free yet
        #: those of the quarantined ones that are freed since. If a driver lists one as stuck, an operator released it,
        #: and the driver was not asked to forget it: that follows only once the leader has the report
        self.released: dict[AttemptName, None] = {}
        self.devices: list[str] = []  # the devices in the order of the places' slots
        self.left: list[str] = []  # devices that may still have the memory of an earlier job

    @property
    def unanswered(self) -> list[Report]:
        return [*self.join_reports, *(report for reports in self.frames.values() for report in reports)]

    def apply(self, record: Any) -> None:
        if type(record) is _Reports:
            self.frames[record.no] = record.reports
            if self.places:
                self._follow(record.reports)
        elif type(record) is _Answered:
            for no in [no for no in self.frames if no <= record.no]:
                del self.frames[no]
        elif type(record) is _Placed:
            for place in record.places:
                self.places[name_in(place)] = place
            if record.ended is not None:
                self._follow([record.ended])
        elif type(record) is _Quarantined:
            self.quarantined.add(record.name)
        elif type(record) is Kept:
            if record.name in self.places:
                self.kept[record.name] = record
        elif type(record) is _Join:
            self.join_n, self.join_reports, self.frames = record.n, record.reports, {}
            self.devices, self.left = record.devices, record.left
            self.released |= dict.fromkeys(record.released)
            self._follow(record.reports)
        elif type(record) is _Live:
            self.ledger, self.join_reports = record.ledger, []

    def records(self) -> list[_Record]:
        """Return the fewest records that lead to this state."""
        return [
            *([_Live(self.ledger)] if self.ledger else []),
            _Join(self.join_n, self.join_reports, self.devices, self.left, list(self.released)),
            *(_Placed([place], self.ended.get(name)) for name, place in self.places.items()),
            *map(_Quarantined, self.quarantined),
            *self.kept.values(),
            *(_Reports(no, reports) for no, reports in self.frames.items()),
        ]

    def _follow(self, reports: list[Report]) -> None:
        """Drop the places that are over by these reports; leave those with quarantined slots only these slots.

        Remember which of them exited: `quarantined` alone does not say whether an attempt may still run.
        """
        for report in reports:
            name = name_in(report)
            if report.kind in _LAST_REPORTS:
                if name in self.quarantined:
                    self.released[name] = None
                    if len(self.released) > RELEASED_MAX:
                        del self.released[next(iter(self.released))]
                self.places.pop(name, None)
                self.kept.pop(name, None)
                self.quarantined.discard(name)
                self.ended.pop(name, None)
            elif report.kind in _END_REPORTS and name in self.places:
                self.ended[name] = report
            elif report.kind == "quarantined" and report.detail and name in self.places:
                slots = [int(slot) for slot in report.detail.split(",")]
                self.places[name] = msgspec.structs.replace(self.places[name], slots=slots)
                self.quarantined.add(name)


class MemoryJournal:
    """The journal of a worker that leaves nothing when it dies, such as a simulated one: it is only in memory."""

    def __init__(self, join_n: int = 0) -> None:
        self.state = JournalState()
        self.state.join_n = join_n
        self.torn_bytes = 0

    @classmethod
    def of_this_start(cls) -> MemoryJournal:
        """Return a journal for a worker without a past.

        Its join number is the wall clock's seconds, which outgrow the joins.
        """
        return cls(join_n=int(time.time()))

    def placed(self, places: list[Place]) -> None:
        """Record placements before the driver gets them, so that a restarted agent knows what its supervisor runs."""
        self._append(_Placed(places))

    def keep(self, name: AttemptName, ports: Sequence[int], *, was_ready: bool) -> None:
        """Record the ports of a placed attempt, and whether it was ready once."""
        self._append(Kept(name, list(ports), was_ready))

    def reports(self, frame: ReportFrame) -> None:
        """Record a frame of reports before it is sent."""
        self._append(_Reports(frame.no, frame.reports))

    def answered(self, no: int) -> None:
        self._append(_Answered(no))

    def join(self, n: int, reports: list[Report], devices: Sequence[str] = (), left: Sequence[str] = ()) -> None:
        """Record a join on the disk before it is sent; its reports replace all unanswered ones.

        `devices` names this host's devices, in the order of the session's slots. `left` names the devices, present or
        not, that may still have the memory of a job that is no attempt any more.
        """
        self._append(_Join(n, reports, list(devices), list(left)))

    def live(self, ledger: str) -> None:
        self._append(_Live(ledger))

    @property
    def is_behind(self) -> bool:
        """Whether it lacks what happened since the disk became full."""
        return False

    def is_in_place(self) -> bool:
        """Return whether the next agent can find what is written now."""
        return True

    def flush(self) -> None:
        """Write the collected records with one call; nothing for a journal in memory."""

    def close(self) -> None:
        pass

    def _append(self, record: _Record) -> None:
        self.state.apply(record)


class Journal(MemoryJournal):
    """The journal as a file. Methods that write raise JournalUnwritable if the disk refuses; if it is full, `is_behind`
    is set instead."""

    def __init__(self, path: Path, more_room: Callable[[], bool] = lambda: False) -> None:
        """Open or create the file. `more_room` frees some of a full disk, and returns False if it has none left.

        Raises JournalInUse, JournalUnreadable, OSError.
        """
        super().__init__()
        self.path = path
        self._more_room = more_room
        self._is_behind = False
        self._try_at_s = 0.0
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._pending: list[bytes] = []
        # the lock is a file of its own, because the journal's file is replaced at every compaction
        self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _lock_alone(self._lock):
            os.close(self._lock)
            raise JournalInUse(path)
        try:
            self._file = self._open()
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def is_behind(self) -> bool:
        return self._is_behind

    def is_in_place(self) -> bool:
        return self._file.is_in_place()

    def join(self, n: int, reports: list[Report], devices: Sequence[str] = (), left: Sequence[str] = ()) -> None:
        super().join(n, reports, devices, left)
        self.flush()
        if self._is_behind:
            return  # once it is replaced, it is on the disk
        try:
            self._file.sync()
        except OSError as error:
            raise JournalUnwritable(self.path, error) from error

    def flush(self) -> None:
        if self._is_behind:
            self._catch_up()
            return
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        if not self._has_room(lambda: self._file.append(pending)):
            self._is_behind = True
        elif self._file.is_large:
            self._has_room(self._replace)  # what was appended is there

    def _catch_up(self) -> None:
        self._pending = []
        if (now := boottime_s()) < self._try_at_s:
            return
        self._is_behind = not self._has_room(self._replace)
        self._try_at_s = now + TRY_AGAIN_S

    def _replace(self) -> None:
        self._file.replace(map(_encode, self.state.records()))

    def _has_room(self, write: Callable[[], None]) -> bool:
        """Write, with the reserve if need be; return False if that is used up."""
        try:
            self._with_room(write)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise JournalUnwritable(self.path, error) from error
            return False
        return True

    def _with_room(self, write: Callable[[], T]) -> T:
        """Write until there is room, or no more can be freed. Raises OSError."""
        while True:
            try:
                return write()
            except OSError as error:
                if error.errno not in NO_ROOM or not self._more_room():
                    raise

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._file.close()
            os.close(self._lock)

    def _append(self, record: _Record) -> None:
        self.state.apply(record)
        self._pending.append(_encode(record))

    def _open(self) -> RecordFile:
        try:
            found = read_records(self.path, FORM)
            for body in found.bodies:
                self.state.apply(_decode(body))
        except (NotThisForm, *UNREADABLE):
            raise JournalUnreadable(self.path) from None
        self.torn_bytes = found.torn_bytes
        return self._with_room(lambda: RecordFile(self.path, FORM, map(_encode, self.state.records()), synced=True))
