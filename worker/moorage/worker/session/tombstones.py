"""Remember attempts that are over: a leader that asks for one again gets its end again (H8, H10, H11). No I/O."""

from __future__ import annotations

from typing import Final, NamedTuple

from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import Report, ReportKind
from moorage.worker.session.report_outbox import ReportOutbox

#: ends that are remembered, some 500 bytes each. Beyond that the oldest is dropped, and all fences up to its own count
#: as over: no frame can be late by that many ends of one worker and still be waited for
TOMBSTONES_MAX: Final = 8_192

_Base = tuple[str, str, int]


class Tombstone(NamedTuple):
    """The end of a replica's newest attempt here; all its attempts with fences up to `fence` are over."""

    fence: int
    attempt: int
    kind: ReportKind
    code: int
    detail: str
    #: number of the report frame that has it
    no: int


class Tombstones:
    """The ends within one lease session, the newest for each replica. Reports go into `outbox`."""

    __slots__ = ("_floor_fence", "_most", "_outbox", "_tombstones")

    def __init__(self, outbox: ReportOutbox, most: int = TOMBSTONES_MAX) -> None:
        self._outbox = outbox
        self._most = most
        self._tombstones: dict[_Base, Tombstone] = {}
        self._floor_fence = -1

    def __len__(self) -> int:
        return len(self._tombstones)

    def of(self, name: AttemptName) -> Tombstone | None:
        """Return the end that covers this attempt: its own, or that of a later attempt of its replica, or None."""
        tombstone = self._tombstones.get(name[:3])
        return tombstone if tombstone is not None and name[4] <= tombstone.fence else None

    def holds(self, name: AttemptName) -> bool:
        """Return whether the end of exactly this attempt is remembered."""
        tombstone = self._tombstones.get(name[:3])
        return tombstone is not None and tombstone.fence == name[4]

    def is_forgotten(self, name: AttemptName) -> bool:
        """Return whether an attempt is certainly over, although its end is no longer remembered."""
        return name[4] <= self._floor_fence

    def report(self, name: AttemptName, kind: ReportKind, code: int, detail: str) -> None:
        """Report that an attempt is over, and remember it."""
        self._outbox.gathered.append(Report(kind, *name, code, detail))
        self.remember(name, kind, code, detail)

    def remember(self, name: AttemptName, kind: ReportKind, code: int, detail: str) -> None:
        """Remember an end that is in the next frame of reports, unless a later end of its replica is remembered."""
        base, fence = name[:3], name[4]
        tombstones = self._tombstones
        if base in tombstones:
            if tombstones[base].fence > fence:
                return
            del tombstones[base]  # to be inserted at the end, as the youngest
        tombstones[base] = Tombstone(fence, name[3], kind, code, detail, self._outbox.next_no)
        if len(tombstones) > self._most:
            oldest = next(iter(tombstones))
            if tombstones[oldest].no <= self._outbox.answered_no:
                # this is safe: a placement with such a fence that is not held is answered `withdrawn`. That stays
                # true for the rest of the session, and costs the job no retry.
                self._floor_fence = max(self._floor_fence, tombstones.pop(oldest).fence)

    def report_again(self, name: AttemptName, tombstone: Tombstone) -> None:
        """Report an attempt's end again, by the tombstone that covers it.

        Do nothing while a frame with it is under way. An attempt that is older than the tombstone's is reported
        as withdrawn.
        """
        gathered = self._outbox.gathered
        if tombstone.fence != name[4]:
            gathered.append(Report("withdrawn", *name))
            return
        if tombstone.no > self._outbox.answered_no:
            return
        gathered.append(Report(tombstone.kind, *name, tombstone.code, tombstone.detail))
        if tombstone.kind == "exited":
            gathered.append(Report("freed", *name))
        self._tombstones[name[:3]] = tombstone._replace(no=self._outbox.next_no)

    def clear(self) -> None:
        """Forget everything: a join reports all ends, so the next session begins without any."""
        self._tombstones.clear()
        self._floor_fence = -1
