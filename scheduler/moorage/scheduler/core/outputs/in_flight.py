"""The record that is being appended, with everything to answer once it is acknowledged."""

from __future__ import annotations

from dataclasses import dataclass, field
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


@dataclass(slots=True, eq=False, repr=False)
class InFlight:
    """The record in flight; there is never more than one (ledger-rules H1)."""

    draft: Draft
    record: Record | None = None
    new: list[NewJob] = field(default_factory=list)  # in the order of their numbers
    replies: list[tuple[Any, str, bool]] = field(default_factory=list)  # frame, reply, json
    joined: list[tuple[FromWorker, str]] = field(default_factory=list)
    renewed: list[tuple[FromWorker, Renew, Host]] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    execs: list[tuple[Member, Exec]] = field(default_factory=list)  # commands to run in running members
    awaiting: list[int] = field(default_factory=list)  # numbers of new jobs that wait for something else than a host
    # requests of batches whose answer this record decides, other than new jobs
    answered: list[tuple[Batch, int]] = field(default_factory=list)
    folded: Folded | None = None  # what it has changed; None until that is finished
    outputs: Outputs | None = None  # what is sent once it is acknowledged

    def reply_submit(self, event: Submit, outcome: Any) -> None:
        """Answer a request that is not a new job, at once or with its batch."""
        event.answer(outcome, self.replies)
        if event.batch is not None:
            self.answered.append((event.batch, event.position))
