"""Judges what a leader tells of readiness: what the worker saw, while the attempt runs, in turns, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from moorage.scheduler.core.ledger.state import RUNNING, State
from tests.unit.scheduler.honest_worker import Worker

#: after these words of a history no attempt of the replica runs, or a new one begins, which is not ready yet
_ANEW: Final = frozenset({"PLACED", "QUEUED", "SUCCEEDED", "FAILED", "TIMED_OUT", "CANCELLED"})


@dataclass
class ReadinessJudge:
    ready: dict[tuple[str, str, int], bool] = field(default_factory=dict)  # as the events say
    seen: int = 0  # READY and NOT_READY: a world that tells none shows nothing

    def told(self, tenant: str, job: str, changes: Iterable[dict[str, Any]]) -> None:
        """Raises AssertionError for an attempt that is ready twice, or not ready any more before it ever was."""
        for change in changes:
            name, word = (tenant, job, change["replica"]), change["state"]
            if word in _ANEW:
                self.ready[name] = False
            elif word in ("READY", "NOT_READY"):
                assert self.ready.get(name, False) is (word == "NOT_READY"), f"{name}: {word} twice"
                self.ready[name] = word == "READY"
                self.seen += 1

    def look(self, state: State, workers: Iterable[Worker]) -> None:
        """Raises AssertionError unless the ledger knows what each worker saw, once all of its reports are answered."""
        for worker in workers:
            known = state.workers[worker.id]
            if worker.gathered or worker.flying is not None or not worker.session or known.session != worker.session:
                continue
            for key, attempt in known.attempts.items():
                held = worker.held.get(key)
                if held is not None and held.phase == "running" and attempt.replica.state == RUNNING:
                    assert attempt.ready is held.ready, f"{key} is ready: {held.ready}, the ledger says {attempt.ready}"
                    assert not attempt.address or attempt.address.startswith(f"{worker.id}.local:"), attempt.address
