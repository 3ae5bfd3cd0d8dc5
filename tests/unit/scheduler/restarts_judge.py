"""Judges what a leader does with jobs that stay, by the words of the request alone: nothing here is the scheduler's.

A replica whose attempt has ended waits 1 s, then twice as long each time, at most 5 min, and 1 s again after an attempt
that ran for 10 min; its restarts are counted, and only `max_restarts`, a cancel or the deadline ends it. No
replica's count is above what its request allows, and an attempt adds to its counts once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from moorage.scheduler.core.ledger.state import Job, State
from moorage.schemas.codec import decode_request
from moorage.schemas.job import Request, Run

SECOND_MS: Final = 1_000
LONGEST_MS: Final = 5 * 60 * SECOND_MS
LONG_RUN_MS: Final = 10 * 60 * SECOND_MS

_Name = tuple[str, str, int]


@dataclass
class _Seen:
    """What the judge knows of one replica: its last counts, how many short attempts in a row, since when it runs, when
    its last attempt was over."""

    restarts: int = 0
    attempt: int = 0
    counted: int = 0  # retries, losses and restarts before this attempt
    short: int = 0
    began_ms: int | None = None
    queued_ms: int = 0
    may_start_ms: int = 0


@dataclass
class RestartsJudge:
    """Look at each state with `look`, and, to know how long attempts ran, at the changes of events with `told`."""

    seen: dict[_Name, _Seen] = field(default_factory=dict)
    restarts: int = 0  # of all replicas: a world in which none starts again shows nothing
    _requests: dict[int, tuple[Job, Request]] = field(default_factory=dict)

    def forget(self) -> None:
        """A ledger was restored: what was seen may not have happened."""
        self.seen.clear()
        self._requests.clear()

    def run_of(self, job: Job) -> Run:
        """What the job's request says of its run."""
        return self._request_of(job).workload

    def _request_of(self, job: Job) -> Request:
        known, request = self._requests.get(job.num, (None, None))
        if request is None or known is not job:
            request = decode_request(job.body)
            self._requests[job.num] = job, request
        return request

    def told(self, tenant: str, job: str, run: Run | None, changes: Iterable[dict[str, Any]]) -> None:
        """Raises AssertionError for a change that a job that stays may not make."""
        if run is None or not run.stays:
            return
        for change in changes:
            seen = self.seen.setdefault((tenant, job, change["replica"]), _Seen())
            state, at_ms = change["state"], change["time_ms"]
            if state == "PLACED":
                assert at_ms >= seen.may_start_ms, f"{job}: placed {seen.may_start_ms - at_ms} ms too early"
                seen.began_ms, seen.queued_ms = None, 0
            elif state == "RUNNING":
                seen.began_ms = at_ms if seen.began_ms is None else seen.began_ms
            elif state == "QUEUED":
                seen.queued_ms = at_ms
            elif state == "FAILED":
                assert run.max_restarts is not None, f"{job} stays, and failed"
            elif state == "SUCCEEDED":
                assert run.restart != "always" or run.max_restarts is not None or change.get("by") != "worker", job

    def look(self, state: State) -> None:
        """Raises AssertionError for a replica that starts again too early or too often, or that counts too much."""
        for job in state.jobs.values():
            request = self._request_of(job)
            run = request.workload
            for replica in job.rows.values():
                name = (job.tenant, job.name, replica.index)
                assert not replica.restarts or run.stays, f"{name} starts again, and should not"
                most = run.max_restarts
                assert most is None or replica.restarts <= most, f"{name}: {replica.restarts} restarts of {most}"
                assert replica.retries <= request.retries, f"{name}: {replica.retries} retries of {request.retries}"
                lost = request.retries_on_lost
                assert replica.losses <= lost, f"{name}: {replica.losses} losses of {lost}"
                counted = replica.retries + replica.losses + replica.restarts
                seen = self.seen.setdefault(name, _Seen())
                if not seen.attempt:  # not looked at yet: what it counts may be older, as in a ledger that was restored
                    seen.restarts, seen.attempt, seen.counted = replica.restarts, replica.attempt_no, counted
                assert counted <= seen.counted + 1, f"{name}: attempt {seen.attempt} has counted more than once"
                if replica.attempt_no > seen.attempt:
                    seen.counted = counted
                early_ms = seen.may_start_ms - state.time_ms
                assert replica.attempt_no <= seen.attempt or early_ms <= 0, f"{name} starts {early_ms} ms too early"
                grew = replica.restarts - seen.restarts
                assert grew in (0, 1), f"{name}: {grew} restarts in one record"
                if grew:
                    self._restarted(seen, seen.queued_ms or state.time_ms)
                seen.restarts, seen.attempt = replica.restarts, replica.attempt_no

    def _restarted(self, seen: _Seen, over_ms: int) -> None:
        ran_ms = 0 if seen.began_ms is None else over_ms - seen.began_ms
        seen.short = 0 if ran_ms >= LONG_RUN_MS else seen.short
        seen.may_start_ms = over_ms + min(SECOND_MS << min(seen.short, 20), LONGEST_MS)
        seen.short += 1
        self.restarts += 1
