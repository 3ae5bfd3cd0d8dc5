"""The state of one job, as this process last saw it."""

from __future__ import annotations

import time
from typing import Any

from moorage.client.follow.result import Result
from moorage.schemas.frames import Event
from moorage.schemas.job import ACCEPTED


class Seen:
    """The part of a `Job` that events and answers update: the job's state as this process last saw it."""

    __slots__ = ("_began_s", "_gpu", "_result", "id", "state", "worker")

    def __init__(self, id: str, state: str, began_s: float | None) -> None:
        self.id = id
        self.state = state
        self.worker = ""
        self._gpu = ""
        self._began_s = began_s
        self._result: Result | None = None

    @property
    def known_result(self) -> Result | None:
        """How the job ended, if `result` or a wait for several jobs found that by this handle; else None."""
        return self._result

    def _saw(self, event: Event) -> None:
        """Keep the state and worker of an event."""
        self.state = event.state
        for change in event.changes:
            if change.state == ACCEPTED and self._began_s is None:
                self._began_s = time.monotonic() - max(time.time() - change.time_ms / 1000, 0)
            self.worker = change.worker or self.worker

    def _learn(self, row: dict[str, Any]) -> None:
        """Keep the job's present state, from an answer of `show` or `ls`."""
        self.state = row["state"]
        self._gpu = row.get("gpu", self._gpu)
        self.worker = row.get("worker", self.worker)
        if "age_ms" in row:
            self._began_s = time.monotonic() - row["age_ms"] / 1000

    def _ended(self, result: Result) -> None:
        """Keep how the job ended. From now on `result` returns at once, unless it has to read a handler's value."""
        self.state, self._result = result.state, result
