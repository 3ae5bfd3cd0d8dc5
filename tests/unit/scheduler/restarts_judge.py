"""Judges what a leader does with jobs that stay, by the words of the request alone: nothing here is the scheduler's.

A replica whose attempt has ended waits 1 s, then twice as long each time, at most 5 min, and 1 s again after an attempt
that ran for 10 min; its restarts are counted, and only `max_restarts`, a cancel or the deadline ends it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from moorage.scheduler.core.ledger.state import State
from moorage.schemas.codec import decode_request
from moorage.schemas.job import Run

SECOND_MS: Final = 1_000
LONGEST_MS: Final = 5 * 60 * SECOND_MS
LONG_RUN_MS: Final = 10 * 60 * SECOND_MS

_Name = tuple[str, str, int]


@dataclass
class _Seen:
    """What the judge knows of one replica: its last count, how many short attempts in a row, since when it runs, when
    its last attempt was over."""

    restarts: int = 0
    short: int = 0
    began_ms: int | None = None
    queued_ms: int = 0
    may_start_ms: int = 0


@dataclass
class RestartsJudge:
    """Look at each state with `look`, and at the changes that events tell with `told`."""

    seen: dict[_Name, _Seen] = field(default_factory=dict)
    restarts: int = 0  # of all replicas: a world in which none starts again shows nothing

    def told(self, tenant: str, job: str, run: Run | None, changes: Iterable[dict[str, Any]]) -> None:
        """Raises AssertionError for a change that a job that stays may not make."""
        if run is None or run.restart == "never":
            return
        for change in changes:
            seen = self.seen.setdefault((tenant, job, change["replica"]), _Seen())
            state, at_ms = change["state"], change["time_ms"]
            if state == "PLACED":
                assert at_ms >= seen.may_start_ms, f"{job}: placed {seen.may_start_ms - at_ms} ms too early"
                seen.began_ms = None
            elif state == "RUNNING":
                seen.began_ms = at_ms if seen.began_ms is None else seen.began_ms
            elif state == "QUEUED":
                seen.queued_ms = at_ms
            elif state == "FAILED":
                assert run.max_restarts is not None, f"{job} stays, and failed"
            elif state == "SUCCEEDED":
                assert run.restart != "always" or run.max_restarts is not None or change.get("by") != "worker", job

    def look(self, state: State) -> None:
        """Raises AssertionError for a replica that starts again too early or too often."""
        for job in state.jobs.values():
            run = decode_request(job.body).workload
            for replica in job.rows.values():
                name = (job.tenant, job.name, replica.index)
                assert not replica.restarts or run.restart != "never", f"{name} starts again, and should not"
                assert run.max_restarts is None or replica.restarts <= run.max_restarts, name
                seen = self.seen.setdefault(name, _Seen())
                grew = replica.restarts - seen.restarts
                assert grew in (0, 1), f"{name}: {grew} restarts in one record"
                if grew:
                    self._restarted(seen)
                seen.restarts = replica.restarts

    def _restarted(self, seen: _Seen) -> None:
        ran_ms = 0 if seen.began_ms is None else seen.queued_ms - seen.began_ms
        seen.short = 0 if ran_ms >= LONG_RUN_MS else seen.short
        seen.may_start_ms = seen.queued_ms + min(SECOND_MS << min(seen.short, 20), LONGEST_MS)
        seen.short += 1
        self.restarts += 1
