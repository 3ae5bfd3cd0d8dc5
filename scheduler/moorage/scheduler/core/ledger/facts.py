"""The facts of attempts that last from feature level 2 on, as the histories of their jobs have them.

Below that level they are soft: each record that is folded keeps them, but no snapshot has them and the digest does not
count them. They are found here once after such a snapshot. In the record that raises the level all schedulers find them
anew, so that all have the same. A history that was cut does not have all: what began before its oldest row counts as
having begun with that.
"""

from __future__ import annotations

from typing import Final

from moorage.scheduler.core.ledger.state import (
    AT_MS,
    FENCE,
    NOT_READY,
    PLACED,
    READY,
    REPLICA,
    RUNNING,
    STATE,
    Attempt,
    Job,
    State,
)

#: the feature level from which on they last
LEVEL: Final = 2


def find_all(state: State) -> None:
    """Set the facts of all attempts from the histories of their jobs."""
    for job in state.jobs.values():
        if job.attempts:
            _find(job)


def _find(job: Job) -> None:
    attempts: dict[tuple[int, int], Attempt] = {(each.replica.index, each.fence): each for each in job.attempts}
    oldest_ms, started = job.history[0][AT_MS] if job.history else job.accepted_ms, set[Attempt]()
    for attempt in attempts.values():
        attempt.began_ms, attempt.ever_ready = oldest_ms, attempt.ready
    for row in job.history:
        found, state = attempts.get((row[REPLICA], row[FENCE])), row[STATE]
        if found is None:
            continue
        if state == PLACED or (state == RUNNING and found not in started):
            found.began_ms = row[AT_MS]
        if state == RUNNING:
            started.add(found)
        elif state in (READY, NOT_READY):
            found.ever_ready = True
