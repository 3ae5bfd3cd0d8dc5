"""Send reports (wire word: facts) to the ledger in numbered frames: one in flight, repeated under the same number
(H18).

No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from moorage.schemas.attempt import AttemptName, name_in
from moorage.schemas.frames import Report, ReportFrame
from moorage.worker.session.lease_session import NEVER_S

#: limits of one frame. Most reports have some 70 bytes, but a detail may have 800, so bytes are limited too, far below
#: the server's 1 MiB. A larger frame would never arrive, and would be sent again for ever
REPORTS_PER_FRAME_MAX: Final = 4096
REPORTS_BYTES_MAX: Final = 512 * 1024
#: bytes of a report without its names and detail, and of a character that is not ASCII
REPORT_BYTES: Final = 48
CHAR_BYTES_MAX: Final = 4
#: length of details in a join whose reports do not fit; the scheduler decides by the words at their beginning
JOIN_DETAIL_CHARS_MAX: Final = 32
#: if more reports than this wait, new placements are ignored; the leader sends them again
REPORTS_WAITING_MAX: Final = 8192
RESEND_S_FIRST: Final = 1.0
RESEND_S_MAX: Final = 4.0
#: how long the reports that attempts are claimed wait for those that they have started, and these for those that they
#: have ended, in case that happens so soon: then one report in one frame and record replaces two or three
START_WAIT_S: Final = 0.005
END_WAIT_S: Final = 0.002


class ReportOutbox:
    """Collects reports while a frame is in flight, so that frames grow under load.

    When idle, reports leave at once, with two exceptions. Claims wait for a moment, because the process starts very
    soon after, and an extra append would delay that start. Starts wait for a moment, because an attempt that ends
    within END_WAIT_S would otherwise need a second frame. An attempt that ends before its start has left is reported by
    one report, `ran`.
    """

    __slots__ = (
        "_begun",
        "_begun_until_s",
        "_joining",
        "answered_no",
        "gathered",
        "in_flight",
        "last_no",
        "resend_at_s",
        "resend_s",
    )

    def __init__(self) -> None:
        self.gathered: list[Report] = []
        self.in_flight: ReportFrame | None = None
        self.last_no = 0
        self.answered_no = 0
        self.resend_s = RESEND_S_FIRST
        self.resend_at_s = 0.0
        self._joining: list[Report] = []
        #: claims and starts that may wait for the next reports of their attempts; they leave before `gathered`
        self._begun: dict[AttemptName, list[Report]] = {}
        self._begun_until_s = 0.0

    def claimed(self, report: Report, now: float) -> None:
        """Add the claim of an attempt that is started in the same turn."""
        self._begins(report, now + START_WAIT_S)

    def started(self, report: Report, now: float, *, told: bool = False) -> None:
        """Add the start of an attempt. One that is to be `told` does not wait for the end, which would stand for it."""
        if told:
            self.gathered += [*self._begun.pop(name_in(report), []), report]
        else:
            self._begins(report, now + END_WAIT_S)

    def _begins(self, report: Report, until_s: float) -> None:
        begun = self._begun
        self._begun_until_s = min(self._begun_until_s, until_s) if begun or self.gathered else until_s
        begun.setdefault(name_in(report), []).append(report)

    def exited(self, report: Report, ran_ms: int) -> None:
        """Add the end of an attempt that ran for so many ms. If its start has not left yet, they become one report."""
        begun = self._begun.pop(name_in(report), [])
        if begun and begun[-1].kind == "started":
            self.gathered.append(replace(report, kind="ran", ran_ms=ran_ms))
        else:
            self.gathered += [*begun, report]

    def _all_gathered(self) -> list[Report]:
        """Return the reports in no frame, in order, and forget which of them could wait."""
        if not self._begun:
            return self.gathered
        begun, self._begun = self._begun, {}
        return [report for reports in begun.values() for report in reports] + self.gathered

    @property
    def due_s(self) -> float:
        """When the reports that wait for a moment must leave.

        Infinity if there are none, if a report leaves at once, or if a frame is in flight.
        """
        return self._begun_until_s if self._waits else NEVER_S

    @property
    def _waits(self) -> bool:
        return self.in_flight is None and bool(self._begun) and not self.gathered

    @property
    def next_no(self) -> int:
        """The number of the next frame. A report added now is in it if the waiting reports fit into one frame."""
        return self.last_no + 1

    @property
    def is_full(self) -> bool:
        return len(self.gathered) + 2 * len(self._begun) >= REPORTS_WAITING_MAX

    @property
    def is_empty(self) -> bool:
        return not (self.gathered or self._begun or self._joining) and self.in_flight is None

    def cut(self, session: str, now: float) -> ReportFrame | None:
        """Put reports into the next frame and return it: it is in flight from now on.

        None if a frame is in flight, if there are no reports, or if all of them still wait for a moment.
        """
        if self.in_flight is not None or not (self.gathered or self._begun):
            return None
        if self._waits and now < self._begun_until_s:
            return None
        self.last_no += 1
        reports = self._all_gathered()
        count = _fitting(reports)
        self.gathered = reports[count:]
        self.in_flight = ReportFrame(session, self.last_no, reports[:count])
        self.resend_s = RESEND_S_FIRST
        self.resend_at_s = now + RESEND_S_FIRST
        return self.in_flight

    def hurry(self, now: float) -> None:
        """Make the unanswered frame due again now, and shorten the next waits, because there is a new leader."""
        if self.in_flight is not None:
            self.resend_s = RESEND_S_FIRST / 2
            self.resend_at_s = now

    def resend(self, now: float) -> ReportFrame | None:
        """Return the frame in flight if its answer is overdue, else None; the wait doubles up to RESEND_S_MAX."""
        if self.in_flight is None or now < self.resend_at_s:
            return None
        self.resend_s = min(self.resend_s * 2, RESEND_S_MAX)
        self.resend_at_s = now + self.resend_s
        return self.in_flight

    def awaits(self, no: int) -> bool:
        """Return whether an answer `no` answers the frame in flight; False for a duplicate."""
        return self.in_flight is not None and no >= self.in_flight.no

    def answered(self) -> None:
        """Record that the frame in flight is in the ledger."""
        assert self.in_flight is not None
        self.answered_no = self.in_flight.no
        self.in_flight = None

    def start_join(self) -> list[Report]:
        """Return all reports that were not acknowledged, in order, for the join; they are kept until `joined`.

        If they do not fit into one frame, they are shortened. Frame numbers start again: reports that are added from
        now on belong to the new session, after the join.
        """
        if self.in_flight is not None:
            self._joining += self.in_flight.reports
            self.in_flight = None
        self._joining += self._all_gathered()
        self.gathered = []
        self.last_no = self.answered_no = 0
        if _fitting(self._joining, len(self._joining)) < len(self._joining):
            self._joining = _shortened(self._joining)
        return list(self._joining)

    def joined(self) -> None:
        """Record that the join is in the ledger with its reports."""
        self._joining = []

    def unanswered(self) -> list[Report]:
        flying = self.in_flight.reports if self.in_flight is not None else []
        begun = [report for reports in self._begun.values() for report in reports]
        return [*self._joining, *flying, *begun, *self.gathered]


def _fitting(reports: Sequence[Report], count_max: int = REPORTS_PER_FRAME_MAX) -> int:
    """Return how many of these reports, from the first on, fit into one frame; at least one."""
    size_bytes = 0
    for count, report in enumerate(reports[:count_max]):
        detail_bytes = len(report.detail) * (1 if report.detail.isascii() else CHAR_BYTES_MAX)
        size_bytes += REPORT_BYTES + len(report.tenant) + len(report.job) + detail_bytes
        size_bytes += len(report.checkpoint or "")
        if size_bytes > REPORTS_BYTES_MAX and count:
            return count
    return min(len(reports), count_max)


def _shortened(reports: Sequence[Report]) -> list[Report]:
    """Return the reports in fewer bytes, for a join, which cannot be split into several frames.

    A claim and a start are left out if there is the end that implies them. Details are cut.
    """
    ended = {
        (report.tenant, report.job, report.replica, report.fence)
        for report in reports
        if report.kind in ("exited", "ran")
    }
    return [
        report
        if len(report.detail) <= JOIN_DETAIL_CHARS_MAX
        else replace(report, detail=report.detail[:JOIN_DETAIL_CHARS_MAX])
        for report in reports
        if report.kind not in ("claimed", "started")
        or (report.tenant, report.job, report.replica, report.fence) not in ended
    ]
