"""What a caller that says `after` counts on, told record by record by the judge: from the ends in the ledger alone.

A job is placed only once each job that it names has ended as it asks. One that is told to end because of another one
names a job that has ended, and not as it asked. That none waits for ever is what the end of a world asks of all jobs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from moorage.scheduler.core.ledger.finished import job_key
from moorage.scheduler.core.ledger.state import AT_MS, WHY, Job, State
from moorage.schemas.codec import decode_request
from moorage.schemas.job import STATES, TERMINAL, After
from moorage.testing.requests import NOBODYS, after_of

#: of the requests, those that name others; and of the names, those that nobody has
ASKED: Final = 0.3
UNKNOWN: Final = 0.1


def some_of(chance: random.Random, names: list[str]) -> list[dict[str, str]]:
    """What a request says: one to three of the newest names, and now and then one of nobody's."""
    return after_of(chance, names[-10:], UNKNOWN)


def is_known_to_all(asked: list[dict[str, Any]]) -> bool:
    return all(each["job"] != NOBODYS for each in asked)


class Afters:
    """`after` each record, on the judge's own state; `violated` is the judge's."""

    def __init__(self, violated: Callable[[str], None]) -> None:
        self._violated = violated
        self.followed = 0  # placements of jobs that named others

    def after(self, state: State) -> None:
        for worker in state.workers.values():
            for attempt in worker.attempts.values():
                if attempt.fence == state.seq:
                    self._check_placed(state, attempt.replica.job)
        for job in state.jobs.values():
            if job.history and job.history[-1][AT_MS] == state.time_ms and job.history[-1][WHY].startswith("after "):
                self._check_told(state, job, job.history[-1][WHY])

    def _check_placed(self, state: State, job: Job) -> None:
        asked = decode_request(job.body).awaited
        self.followed += bool(asked)
        for each in asked:
            end = _end_of(state, job.tenant, each.job)
            if not end or not _is_as_asked(each, end):
                self._violated(f"{job.tenant}/{job.name} was placed after {each.job}: {end or 'which has not ended'}")

    def _check_told(self, state: State, job: Job, why: str) -> None:
        ends = [(each, _end_of(state, job.tenant, each.job)) for each in decode_request(job.body).awaited]
        if why not in [f"after {each.job}: {end}" for each, end in ends if end and not _is_as_asked(each, end)]:
            self._violated(f"{job.tenant}/{job.name} was told to end: {why}, and has {ends}")


def _is_as_asked(each: After, end: str) -> bool:
    return {"succeeded": end == "SUCCEEDED", "any": True, "failed": end != "SUCCEEDED"}[each.when]


def _end_of(state: State, tenant: str, name: str) -> str:
    job = state.job(tenant, name)
    if job is not None:
        return job.state if job.state in TERMINAL else ""
    row = state.finished.find(job_key(tenant, name))
    return "" if row is None else STATES[row[2]]
