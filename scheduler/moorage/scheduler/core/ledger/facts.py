"""The facts that last from feature level 2 on, as the histories of jobs have them.

They say of attempts what decisions need and their rows did not tell before: since when one runs, whether it was ever
ready, how the last one ended. A history is for answers; it is cut, so no decision reads it.

Below that level facts are soft: each record that is folded keeps them, but no snapshot has them and the digest does not
count them. They are found here once after such a snapshot. In the record that raises the level all schedulers find them
anew, so that all have the same. Then they read no more than what all have alike, whichever release wrote the snapshot
that they began with: the newest rows, of which no release drops one, and no time that a release tells in its own way.
That is when an attempt started of which one record tells both start and end: it counts from its placement. What began
before the oldest row that is read counts as having begun with that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moorage.scheduler.core.ledger.ceilings import Ceilings
from moorage.scheduler.core.ledger.records import BY_WORKER, MOVED, WITH_SUPERVISOR
from moorage.scheduler.core.ledger.state import (
    AT_MS,
    BY,
    CANCELLED,
    CANCELLING,
    CLAIMED,
    CODE,
    ENDING,
    FENCE,
    FROZEN,
    LISTED_MAX,
    NOT_FROZEN,
    NOT_READY,
    ON_WORKER,
    PLACED,
    RAN_MAX,
    READY,
    READY_GAP_MS,
    REPLICA,
    REV,
    RUNNING,
    SLOTS,
    STATE,
    WHY,
    WORKED,
    WORKER,
    Ended,
    Job,
    State,
    Transition,
)
from moorage.schemas.frames import ABOUT_THE_JOB

#: the feature level from which on they last
LEVEL: Final = 2


def find_all(state: State, *, alike: bool = False) -> None:
    """Set the facts of all jobs, replicas and attempts from the histories of the jobs; `alike` as all schedulers do."""
    for job in state.jobs.values():
        rows = job.history[max(0, len(job.history) - kept_rows(state.ceilings, job)) :] if alike else job.history
        _of_job(job, rows)
        _of_attempts(job, rows, alike=alike)
    for worker in state.workers.values():
        worker.quick, worker.well_ms = (), 0  # no history tells it as briefly


def kept_rows(ceilings: Ceilings, job: Job) -> int:
    """Return how many of the newest rows of a history stay as it is cut."""
    return (ceilings.history + ceilings.history_each * min(job.size, LISTED_MAX)) * 3 // 4


def _of_job(job: Job, rows: list[Transition]) -> None:
    avoids = {num for num, _ in job.avoid}
    job.lent, job.wants = (0, 0), None  # no history has that, and no ledger of a lower level the latter
    job.peaks, job.reported, job.well_on, job.promised = None, None, 0, None  # nor has it these
    job.ended_ms = 0 if job.live or not job.history else job.history[-1][AT_MS]
    job.ever_ready = any(row[STATE] in (READY, NOT_READY) for row in rows)
    about = [row[WORKER] for row in rows if row[WORKER] in avoids and row[WHY].startswith(ABOUT_THE_JOB)]
    job.refused = tuple(dict.fromkeys(about))
    leaves = -1 if job.relocating is None else job.relocating[0]
    job.has_moved = any(
        row[REPLICA] == leaves and row[STATE] in (CANCELLING, CANCELLED) and row[WHY].startswith(MOVED) for row in rows
    )
    placed = next((at for at in range(len(rows) - 1, -1, -1) if rows[at][STATE] == PLACED), -1)
    ends_ms = [row[AT_MS] for row in rows[placed + 1 :] if _is_end(row)]
    job.placed_many = job.on_workers + len(ends_ms) if job.attempt_no else 0
    job.left_ms = ends_ms[0] if ends_ms else 0


def _is_end(row: Transition) -> bool:
    """Return whether an attempt ended with a transition."""
    return bool(row[FENCE]) and row[STATE] >= 0 and row[STATE] not in ON_WORKER


@dataclass(slots=True)
class _Run:
    """An attempt as its job's history has it."""

    began_ms: int
    state: int = PLACED
    started: bool = False
    ever_ready: bool = False
    ready_ms: int = 0
    unready_ms: int = 0
    has_frozen: bool = False
    leased_ms: int = 0
    not_frozen: str = ""

    def note_ready(self, at_ms: int, *, is_ready: bool) -> None:
        """Note that it was ready from this ledger ms on, or not any more."""
        if not self.ready_ms or (is_ready and not (self.unready_ms and at_ms - self.unready_ms <= READY_GAP_MS)):
            self.ready_ms = at_ms
        self.unready_ms = 0 if is_ready else at_ms


def _of_attempts(job: Job, rows: list[Transition], *, alike: bool) -> None:
    oldest_ms = next((row[AT_MS] for row in rows if row[STATE] not in (CLAIMED, RUNNING)), job.placed_ms)
    runs: dict[tuple[int, int], _Run] = {}
    ended: dict[tuple[int, int], Ended] = {}
    deaths: dict[int, int] = {}
    ran: list[int] = []
    for at, row in enumerate(rows):
        if not row[FENCE]:
            continue
        key, state = (row[REPLICA], row[FENCE]), row[STATE]
        run = runs.get(key)
        if run is None:
            run = runs[key] = _Run(row[AT_MS] if state == PLACED else oldest_ms)
        if _is_end(row):
            ran_ms = row[AT_MS] - run.began_ms if run.started else -1
            was_asked, by_worker = run.state == ENDING, row[BY] == BY_WORKER
            ready_ms = (run.unready_ms or row[AT_MS]) - run.ready_ms if run.ready_ms else 0
            ended[key] = Ended(row[REV], row[CODE], row[WHY], ran_ms, run.ever_ready, was_asked, by_worker, ready_ms)
            if ran_ms >= 0 and state in WORKED and not run.has_frozen:
                ran.append(ran_ms)
            deaths[row[REPLICA]] = deaths.get(row[REPLICA], 0) + (row[WHY] == WITH_SUPERVISOR)
        elif state in (READY, NOT_READY):
            run.ever_ready = True
            run.note_ready(row[AT_MS], is_ready=state == READY)
        elif state == NOT_FROZEN:
            run.not_frozen = row[WHY]
        elif state == FROZEN:
            run.has_frozen, run.leased_ms = True, row[AT_MS] if row[SLOTS] else 0
        elif state == RUNNING and not run.started:
            then = rows[at + 1] if at + 1 < len(rows) else None
            is_over = alike and then is not None and (then[REPLICA], then[FENCE]) == key and _is_end(then)
            run.started, run.began_ms = True, run.began_ms if is_over else row[AT_MS]
        run.state = state if state >= 0 else run.state
    job.ran = tuple(ran[-RAN_MAX:])
    for replica in job.rows.values():
        replica.ended = ended.get((replica.index, replica.fence))
        replica.deaths = deaths.get(replica.index, 0)
        replica.stored, replica.saved, replica.untold = (), (), replica.attempt_no  # no history has that
        replica.sets = ()
        replica.tries = ()  # nor which row allowed an attempt: then each counts for all rows
        replica.failed_on = ()
    for attempt in job.attempts:
        run = runs.get((attempt.replica.index, attempt.fence), _Run(oldest_ms))
        attempt.began_ms, attempt.ever_ready, attempt.has_frozen = run.began_ms, run.ever_ready, run.has_frozen
        attempt.leased_ms, attempt.not_frozen, attempt.begun = run.leased_ms, run.not_frozen, None
        if attempt.ready and (not run.ready_ms or run.unready_ms):
            run.note_ready(oldest_ms, is_ready=True)  # no row that is read tells it
        attempt.ready_ms, attempt.unready_ms = run.ready_ms, run.unready_ms
