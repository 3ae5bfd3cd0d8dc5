"""A schedule as recorded in the ledger: what is to run, when, and what became of its newest run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from moorage.scheduler.core.ledger.digests import number_of
from moorage.scheduler.core.ledger.lasting import Lasting
from moorage.schemas.job import AFTER_MAX


@dataclass(slots=True, eq=False, repr=False)
class Schedule:
    """A tenant's schedule. `wish` is the sequence of the record that last set, paused or resumed it.

    nats-server counts the time (`durable/schedule_stream.py`); each message that it publishes is a run, and the
    message's sequence is the number of that run. A run is folded once: `through` is the last number.
    """

    tenant: str
    name: str
    cron: str
    tz: str
    overlap: str  # skip or queue
    body: bytes  # the request, without a job id
    by: str  # the actor as `records.actor` writes it
    paused: bool = False
    wish: int = 0
    since_ms: int = 0
    through: int = 0
    runs: int = 0  # runs that made a job
    skipped: int = 0  # runs that made none
    why: str = ""  # why the newest run made no job
    job: str = ""  # the newest job
    #: with overlap queue, its jobs that lived at the newest run, oldest first: each waits for those before it
    live: list[str] = field(default_factory=list)
    last_ms: int = 0  # when the newest run was recorded
    due_ms: int = 0  # when it was due, as the run before it said
    next_ms: int = 0
    row: int = 0

    def ran(self, sequence: int, why: str, next_ms: int, time_ms: int) -> None:
        """Note a run: `why` it made no job, "" if it made one; `next_ms` says when the next is due, 0 if not known."""
        self.through, self.why, self.last_ms = sequence, why, time_ms
        if why:
            self.skipped += 1
        else:
            self.runs += 1
            self.job = f"{self.name}-{sequence}"
            if self.overlap == "queue":
                self.live = [*self.live, self.job][-AFTER_MAX:]
        self.due_ms = 0
        if next_ms:  # a run that was asked for says nothing about the times
            self.due_ms, self.next_ms = self.next_ms, next_ms

    LASTING: ClassVar = Lasting(
        {"tenant": str, "name": str, "cron": str, "tz": str, "overlap": str, "body": bytes, "by": str},
        {
            "paused": bool, "wish": int, "since_ms": int, "through": int, "runs": int, "skipped": int, "why": str,
            "job": str, "last_ms": int, "due_ms": int, "next_ms": int,
        },
        {"live": (list[str], [])},
    )  # fmt: skip

    def digest_row(self, level: int) -> int:
        return number_of(("schedule", *self.LASTING.values(self)))
