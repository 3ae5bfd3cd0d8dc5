"""An attempt that was ready and is so no more for `run.restart_unready_s` is ended, and starts again: it may hang.

Since when it is not ready stands in its row. A leader ends none before it has known that for `HEARD_MS` itself, so that
its worker could tell what a leader before may have missed. Members that move, and those on workers that are drained or
were told to end, are left to that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from moorage.scheduler.core.draft import Draft, steps_to_end
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.ledger.records import Count
from moorage.scheduler.core.ledger.state import RUNNING, Attempt, Job, State
from moorage.scheduler.core.lifecycle.relocating import must_leave
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.schemas.attempt import AttemptName
from moorage.schemas.job import Request

#: for so long this leader has to know that an attempt is not ready, in ms
HEARD_MS: Final = 15_000


class Unready:
    """Follows the jobs whose requests say so."""

    def __init__(self, state: State, fleet: Fleet, lifecycle: Lifecycle) -> None:
        self._state = state
        self._fleet = fleet
        self._lifecycle = lifecycle
        self._limits_ms: dict[int, int] = {}  # by job number
        self._known: dict[
            AttemptName, tuple[int, int]
        ] = {}  # since when it is not ready, and is known to be, ledger ms

    def add(self, job: Job, request: Request) -> None:
        """Take note of a live job."""
        limit_s = request.workload.restart_unready_s
        if limit_s is not None:
            self._limits_ms[job.num] = round(limit_s * 1000)

    def pass_time(self, draft: Draft) -> None:
        """End the attempts that are due; to be called once a second."""
        known = self._known
        self._known = {}
        for attempt, limit_ms in self._unready():
            since_ms, heard_ms = known.get(attempt.name, (-1, draft.time_ms))
            if since_ms != attempt.unready_ms:
                since_ms, heard_ms = attempt.unready_ms, draft.time_ms
            self._known[attempt.name] = since_ms, heard_ms
            if draft.time_ms - since_ms < limit_ms or draft.time_ms - heard_ms < min(limit_ms, HEARD_MS):
                continue
            if not draft.has_room(steps_to_end((attempt,))):
                return  # the rest follow a second later
            why = f"it was not ready for {limit_ms / 1000:g} s"
            self._lifecycle.leave(draft, attempt, why, Count.RETRY, notice_s=0)

    def _unready(self) -> Iterator[tuple[Attempt, int]]:
        """Yield the attempts that may be ended for being ready no more, with the time that they may be so."""
        for num, limit_ms in list(self._limits_ms.items()):
            job = self._state.jobs.get(num)
            if job is None or job.over:
                del self._limits_ms[num]
                continue
            if job.relocating is not None:
                continue
            for row in list(job.rows.values()):
                attempt = row.attempt
                if attempt is not None and row.state == RUNNING and attempt.unready_ms and not self._leaves(attempt):
                    yield attempt, limit_ms

    def _leaves(self, attempt: Attempt) -> bool:
        leaves = must_leave(self._fleet, attempt.worker)
        return attempt.worker.num not in self._fleet.hosts or (leaves is not None and leaves.now)
