"""Other time limits for attempts that run: who may give which, and what a reservation allows.

The limit is the job's: all its attempts that run have it, from their own starts on, and so have later ones. Workers get
it with the record (`core.outputs`), and again until they have applied it.
"""

from __future__ import annotations

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.state import AT_EXITED, LEAVING, Attempt, Job, State
from moorage.scheduler.core.lifecycle.beyond import beyond_time
from moorage.scheduler.core.request_reader import RequestReader
from moorage.scheduler.core.schedule.runtime import after_ms
from moorage.scheduler.core.schedule.verdicts import Verdicts
from moorage.schemas.errors import Problem, problem
from moorage.schemas.names import word_of


class Relimiting:
    """Decides which time limit a job's running attempts may have. `verdicts` have the reservation now, if any, and
    `patience_ms` is how long a job waits until hosts may be reserved for it."""

    def __init__(self, state: State, reader: RequestReader, verdicts: Verdicts, patience_ms: int) -> None:
        self._state = state
        self._reader = reader
        self._verdicts = verdicts
        self._patience_ms = patience_ms

    def refusal(self, draft: Draft, job: Job, limit_ms: int, *, by_tenant: bool) -> Problem | None:
        """Return why a job's attempts cannot have this limit in ms; None if they can.

        By an operator neither the tenant's limit nor a reservation keeps it from growing.
        """
        if not draft.may(acts.Relimit):
            return _refused(
                job,
                f"the ledger is at feature level {self._state.level}, and running attempts get another time limit from"
                f" level {acts.Relimit.LEVEL} on",
                "an operator raises it once all schedulers can: moorage admin feature-level",
            )
        if limit_ms <= 0:
            return _refused(job, "it would be over at once", f"moorage cancel {word_of(job.name)} ends it")
        running = running_of(job)
        driver = self._reader.request_of(job).workload.driver
        for attempt in running:
            if not attempt.worker.can(driver).relimits:
                return _refused(
                    job,
                    f"worker {attempt.worker.id} cannot change the time limit of an attempt that runs in {driver}",
                    f"moorage change {word_of(job.name)} --time-limit without --running is for the next attempts",
                )
        had = [self._reader.limit_ms_of(job, each.fence) for each in running] or [self._next_ms(job)]
        if not by_tenant or all(each is not None and limit_ms <= each for each in had):
            return None
        if (beyond := beyond_time(self._state.read_tenant(job.tenant), limit_ms / 1000, job.name)) is not None:
            return beyond
        return self._past_reservation(job, running, limit_ms)

    def record(self, draft: Draft, job: Job, limit_ms: int, by: str, why: str) -> bool:
        """Write a limit that `refusal` allows, unless all attempts have it already; return whether it is written."""
        limits = [self._reader.limit_ms_of(job, each.fence) for each in running_of(job)]
        if all(each == limit_ms for each in (*limits, self._next_ms(job))):
            return False
        said = f"running timeout_s {limit_ms / 1000:g}"
        draft.add(acts.Relimit(job.num, limit_ms, by, f"{said}: {why}" if why else said))
        return True

    def _next_ms(self, job: Job) -> int | None:
        limit_s = self._reader.request_of(job).workload.timeout_s
        return None if limit_s is None else round(limit_s * 1000)

    def _past_reservation(self, job: Job, running: list[Attempt], limit_ms: int) -> Problem | None:
        """Return why an attempt that was let onto reserved hosts may not stay so long: they are awaited from a time on.

        Those that were there before the reserved job was overdue go on: the reservation is made anew.
        """
        held = self._verdicts.reservation
        other = None if held is None else self._state.jobs.get(held.num)
        if held is None or other is None or other is job:
            return None
        overdue_ms = other.waits_from_ms + self._patience_ms
        rest_ms = after_ms(self._reader.request_of(job))
        for attempt in running:
            is_let_in = attempt.worker.num in held.hosts and attempt.began_ms > overdue_ms
            if is_let_in and attempt.began_ms + limit_ms + rest_ms > held.start_ms:
                most_s = max(0, (held.start_ms - attempt.began_ms - rest_ms) // 1000)
                return _refused(
                    job,
                    f"it runs on {attempt.worker.id}, which is reserved for another job, and was let in to end before"
                    f" that; its limit may be at most {most_s} s",
                    f"ask an operator: moorage admin time-limit {word_of(job.name)}",
                )
        return None


def running_of(job: Job) -> list[Attempt]:
    """Return the attempts of a job that run, or will."""
    rows = job.rows.values() if job.held else ()
    return [
        row.attempt
        for row in rows
        if row.attempt is not None and row.attempt.phase != AT_EXITED and row.state not in LEAVING
    ]


def _refused(job: Job, why: str, next_step: str) -> Problem:
    return problem(
        "failed-precondition",
        f"the time limit of job {job.name} cannot be changed so: {why}",
        field="$.timeout_s",
        job=job.name,
        next=next_step,
    )
