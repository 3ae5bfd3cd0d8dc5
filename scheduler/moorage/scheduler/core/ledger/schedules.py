"""A schedule as recorded in the ledger: what is to run, when, and what became of its newest run."""

from __future__ import annotations

from typing import ClassVar

from moorage.scheduler.core.ledger.digests import number_of
from moorage.scheduler.core.ledger.lasting import Lasting
from moorage.schemas.job import AFTER_MAX


class Schedule:
    """A tenant's schedule. `wish` is the sequence of the record that last set, paused or resumed it.

    nats-server counts the time (`durable/schedule_stream.py`); each message that it publishes is a run, and the
    message's sequence is the number of that run. A run is folded once: `through` is the last number.
    """

    __slots__ = (
        "body",
        "by",
        "cron",
        "due_ms",
        "job",
        "last_ms",
        "live",
        "name",
        "next_ms",
        "overlap",
        "paused",
        "row",
        "runs",
        "since_ms",
        "skipped",
        "tenant",
        "through",
        "tz",
        "why",
        "wish",
    )

    def __init__(self, tenant: str, name: str, cron: str, tz: str, overlap: str, body: bytes, by: str) -> None:
        self.tenant = tenant
        self.name = name
        self.cron = cron
        self.tz = tz
        self.overlap = overlap  # skip or queue
        self.body = body  # the request, without a job id
        self.by = by  # the actor as `records.actor` writes it
        self.paused = False
        self.wish = 0
        self.since_ms = 0
        self.through = 0
        self.runs = 0  # runs that made a job
        self.skipped = 0  # runs that made none
        self.why = ""  # why the newest run made no job
        self.job = ""  # the newest job
        #: with overlap queue, its jobs that lived at the newest run, oldest first: each waits for those before it
        self.live: list[str] = []
        self.last_ms = 0  # when the newest run was recorded
        self.due_ms = 0  # when it was due, as the run before it said
        self.next_ms = 0
        self.row = 0

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

    def digest_row(self) -> int:
        return number_of(("schedule", *self.LASTING.values(self)))
