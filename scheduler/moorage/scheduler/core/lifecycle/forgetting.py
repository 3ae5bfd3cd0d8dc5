"""Forgets workers that stay away, so that ids of pods and of cloud machines do not fill the ledger over the years.

Tenants are forgotten once nothing is known of them.

A worker is forgotten once it has been away for as long as the history is kept, or an operator has said so, and no job
in memory names it: what ran there, what a job avoids there, or whose end a job waits for. Its number is not given
again. What waits for that worker alone, of a job for each worker, ends then: it would wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.ledger.acts import Flag, Forget, ForgetTenants
from moorage.scheduler.core.ledger.acts.tenant import is_blank
from moorage.scheduler.core.ledger.acts.worker import may_be_forgotten
from moorage.scheduler.core.ledger.state import QUEUED, WORKER, Job, State, Worker
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.schemas.ranges import is_in

#: how often the workers that are away are checked, in seconds
FORGET_EVERY_S: Final = 3600
#: the most jobs read in a second for the workers that they name
JOBS_AT_ONCE: Final = 5_000
#: the most workers, or tenants, forgotten in one record; others follow a second later
FORGET_MAX: Final = 512
#: why a replica ends that waits for a worker alone
GONE: Final = "its worker is gone for good"


class Forgetting:
    """Reads the jobs in memory a part each second, whenever some worker has been away for `away_ms`."""

    def __init__(self, state: State, away_ms: int, lifecycle: Lifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._away_ms = away_ms
        self._next_ms = 0  # ledger time of the next check
        self._gone: tuple[int, ...] = ()  # numbers of workers to forget
        self._away: set[int] = set()  # those of them that no job read so far names
        self._unread: Iterator[int] | None = None  # numbers of the jobs not read yet
        self._blank: list[str] = []  # tenants to forget

    @property
    def is_due(self) -> bool:
        """Whether the next record looks, or goes on to."""
        return not self._next_ms or self._unread is not None or bool(self._away or self._blank)

    def look_soon(self) -> None:
        """Look within the next seconds, as an operator has had a worker forgotten."""
        self._next_ms = 0

    def pass_time(self, draft: Draft) -> None:
        """Forget workers that stay away. To be called once a second, after the frames of workers."""
        if self._blank:
            self._forget_tenants(draft)
        elif not self._away:
            if draft.time_ms < self._next_ms:
                return
            self._next_ms = draft.time_ms + FORGET_EVERY_S * 1000
            self._blank = [tenant.name for tenant in self._state.tenants.values() if is_blank(self._state, tenant)]
            self._away = {worker.num for worker in self._state.workers.values() if self._is_away(draft, worker)}
            self._gone = tuple(sorted(self._away))
            self._unread = iter(list(self._state.jobs)) if self._away else None
        if self._unread is not None:
            some = list(islice(self._unread, JOBS_AT_ONCE))
            for num in some:
                job = self._state.jobs.get(num)
                if job is not None:
                    self._give_up(draft, job)
                    self._away -= _named(job)
            if len(some) == JOBS_AT_ONCE:
                return
            self._unread = None
        if self._away:
            self._forget(draft)

    def _give_up(self, draft: Draft, job: Job) -> None:
        """End the replicas of a job for each worker that wait for one which is to be forgotten."""
        if not job.live or b"each_worker" not in job.body or not self._lifecycle.request_of(job).each_worker:
            return
        for num in self._gone:
            row = job.rows.get(num)
            if is_in(job.fresh, num) or (row is not None and row.state == QUEUED):
                self._lifecycle.cancel(draft, job, GONE, ((num, num),))

    def _forget_tenants(self, draft: Draft) -> None:
        """Write the act for some tenants that are still blank. Cancels, orders and submits come later in the record."""
        some, self._blank = self._blank[:FORGET_MAX], self._blank[FORGET_MAX:]
        rows = [self._state.tenants.get(name) for name in some]
        blank = [row.name for row in rows if row is not None and is_blank(self._state, row)]
        if blank:
            draft.add(ForgetTenants(blank))

    def _forget(self, draft: Draft) -> None:
        """Write the acts. No job can name them meanwhile: only a worker with a session is named by a new step."""
        taken = {act.worker for act in draft.acts if hasattr(act, "worker")}
        for num in sorted(self._away)[:FORGET_MAX]:
            self._away.discard(num)
            worker = self._state.worker_by_num.get(num)
            if worker is not None and num not in taken and self._is_away(draft, worker):
                if worker.flag != "open":
                    draft.add(Flag(num, "open", ""))  # a standby of an earlier release forgets no other one
                draft.add(Forget(num))

    def _is_away(self, draft: Draft, worker: Worker) -> bool:
        if worker.is_unlisted:
            return not worker.session
        return may_be_forgotten(worker) and draft.time_ms - worker.left_ms >= self._away_ms


def _named(job: Job) -> set[int]:
    """Return the numbers of the workers that a job names."""
    named = {row[WORKER] for row in job.history}
    named.update(num for num, _ in job.avoid)
    named.update(job.lacking)
    if job.preempts is not None:
        named.update(job.preempts[0])
    return named
