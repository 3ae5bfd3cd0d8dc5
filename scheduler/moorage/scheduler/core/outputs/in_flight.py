"""The record that is being appended, with everything to answer once it is acknowledged."""

from __future__ import annotations

from typing import Any

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import Ask, Batch, FromWorker, Submit
from moorage.scheduler.core.fleet.host import Host
from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.core.ledger.record import Record
from moorage.scheduler.core.ledger.state import Member
from moorage.scheduler.core.lifecycle.admission import NewJob
from moorage.scheduler.core.outputs.outputs import Outputs
from moorage.schemas.frames import Exec, Renew


class InFlight:
    """The record in flight; there is never more than one (ledger-rules H1)."""

    __slots__ = (
        "answered",
        "asks",
        "awaiting",
        "draft",
        "execs",
        "folded",
        "joined",
        "new",
        "outputs",
        "record",
        "renewed",
        "replies",
    )

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.record: Record | None = None
        self.new: list[NewJob] = []  # in the order of their numbers
        self.replies: list[tuple[Any, str, bool]] = []  # frame, reply, json
        self.joined: list[tuple[FromWorker, str]] = []
        self.renewed: list[tuple[FromWorker, Renew, Host]] = []
        self.asks: list[Ask] = []
        self.execs: list[tuple[Member, Exec]] = []  # commands to run in running members
        self.awaiting: list[int] = []  # numbers of new jobs that wait for something else than a host
        # requests of batches whose answer this record decides, other than new jobs
        self.answered: list[tuple[Batch, int]] = []
        self.folded: Folded | None = None  # what it has changed; None until that is finished
        self.outputs: Outputs | None = None  # what is sent once it is acknowledged

    def reply_submit(self, event: Submit, outcome: Any) -> None:
        """Answer a request that is not a new job, at once or with its batch."""
        event.answer(outcome, self.replies)
        if event.batch is not None:
            self.answered.append((event.batch, event.position))
