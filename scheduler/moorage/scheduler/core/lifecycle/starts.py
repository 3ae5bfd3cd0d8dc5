"""Closes a host for a while on which jobs fail as they start, so that it does not fail a whole queue.

A host that cannot start jobs is free again at once, and so would be given the next job. It is closed after several jobs
in a row that failed to start there within seconds, if that is not the jobs' fault: they have since started on another
host, or belong to two tenants. One tenant's jobs that start nowhere close no host. A start there ends the row. Until
then a job that failed there is placed on any other host with room first.

A job that starts there and fails within seconds is evidence of a second kind, see `quick_failures`.

Which jobs failed to start where is known to this process alone. That a host is closed, and until when, is in the
ledger.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from moorage.scheduler.core.config import FAILED_KEPT_MAX
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.ledger.acts import Flag, Shut
from moorage.scheduler.core.ledger.state import Attempt, Job, State, Worker
from moorage.scheduler.core.lifecycle.flags import set_flag
from moorage.scheduler.core.lifecycle.quick_failures import QuickFailures
from moorage.scheduler.core.queue.queue import Queue
from moorage.scheduler.core.request_reader import RequestReader
from moorage.schemas.attempt import name_in
from moorage.schemas.frames import Report
from moorage.schemas.printable import shortened, shown
from moorage.schemas.reasons import STARTS_FAIL

#: a start that fails later than this after its placement is no evidence against its host
SOON_MS: Final = 10_000
#: for how long a host is closed the first time; each further time without a start between twice as long, up to a bound
CLOSED_MS: Final = 60_000
CLOSED_MS_MAX: Final = 30 * 60_000
WHY_CHARS_MAX: Final = 120


class _Failed(NamedTuple):
    """A job that failed to start on a host: its tenant, and whether it has started on another host since."""

    tenant: str
    started: bool = False


class FailedStarts(NamedTuple):
    """What failed on workers, by their numbers, since the last start there."""

    failed: dict[int, dict[int, _Failed]]  # by job number, the newest `FAILED_KEPT_MAX` jobs
    times: dict[int, int]  # how often it was closed
    why: dict[int, str]  # why the last job failed


class Starts:
    """Counts the failed starts of each host; `most` jobs close it."""

    def __init__(self, state: State, fleet: Fleet, most: int, reader: RequestReader, queue: Queue) -> None:
        self._state = state
        self._fleet = fleet
        self._most = most
        self.known = FailedStarts({}, {}, {})
        self.quick = QuickFailures(state, fleet, most, reader, queue, self._close)

    @property
    def watches(self) -> bool:
        """Whether starts must be told to `heard`: some host has failed to start a job since its last start."""
        return bool(self.known.failed or self.known.times)

    def on_reports(self, draft: Draft, worker: Worker, reports: list[Report]) -> None:
        """Take the starts among a worker's reports: they end its row, and clear their jobs of earlier failures."""
        for report in reports:
            if report.kind not in ("started", "ran") or (report.kind == "started" and report.checkpoint is not None):
                continue
            attempt = worker.attempts.get(name_in(report))
            if attempt is not None:
                self.left(worker)
                self._started(draft, attempt.replica.job)

    def _started(self, draft: Draft, job: Job) -> None:
        for num, row in list(self.known.failed.items()):
            failed = row.get(job.num)
            if failed is not None and not failed.started:
                row[job.num] = failed._replace(started=True)
                self._judge(draft, self._state.worker_by_num[num])

    def failed(self, draft: Draft, attempt: Attempt, why: str) -> None:
        """Note that an attempt failed to start on its worker, if that took no longer than `SOON_MS`."""
        if draft.time_ms - attempt.began_ms > SOON_MS:
            return
        worker, job = attempt.worker, attempt.replica.job
        row = self.known.failed.setdefault(worker.num, {})
        row[job.num] = row.pop(job.num) if job.num in row else _Failed(job.tenant)
        if len(row) > FAILED_KEPT_MAX:
            del row[next(iter(row))]
        self.known.why[worker.num] = why
        self._judge(draft, worker)

    def failed_of(self, num: int) -> frozenset[int]:
        """Return the numbers of the workers on which this job failed as it started, and nothing has since."""
        failed, quick = self.known.failed, self.quick.failed_of(num)
        return quick.union(worker for worker, row in failed.items() if num in row) if failed else quick

    def has_failed(self, num: int) -> bool:
        """Return whether any job failed as it started on this worker (by number), and nothing has since."""
        return num in self.known.failed or num in self.quick.standing

    def left(self, worker: Worker) -> None:
        """Forget what failed on a worker: a job has started there, its session is over, or an operator opens it."""
        for table in self.known:
            table.pop(worker.num, None)

    def mended(self, draft: Draft, worker: Worker) -> None:
        """Open a worker that starts fail on, because it was restarted or has changed its description."""
        if worker.flag == STARTS_FAIL.name:
            set_flag(draft, self._fleet, worker, Flag(worker.num, "open", ""))

    def pass_time(self, draft: Draft) -> None:
        """Open the workers whose time is over."""
        for worker in list(self._state.shut.values()):
            if draft.time_ms >= worker.until_ms and not draft.full:
                self.mended(draft, worker)
        self.quick.pass_time(draft)

    def _judge(self, draft: Draft, worker: Worker) -> None:
        row = self.known.failed[worker.num].values()
        tenants = {failed.tenant for failed in row}
        is_the_hosts = sum(failed.started for failed in row) >= self._most or (
            len(row) >= self._most and len(tenants) > 1
        )
        if is_the_hosts and self._close(draft, worker, shortened(shown(self.known.why[worker.num]), WHY_CHARS_MAX)):
            del self.known.failed[worker.num]

    def _close(self, draft: Draft, worker: Worker, why: str) -> bool:
        """Close a worker for a while, if it is open; return whether it was."""
        if worker.flag != "open" or not worker.session:
            return False
        times = self.known.times.get(worker.num, 0)
        until_ms = draft.time_ms + min(CLOSED_MS << min(times, 16), CLOSED_MS_MAX)
        set_flag(draft, self._fleet, worker, Shut(worker.num, until_ms, why))
        self.known.times[worker.num] = times + 1
        return True
