"""What is told while jobs, handlers and leases go on: events and steps of jobs, their output, progress.

`Watch` and `AsyncClient.events` yield an `Event`, a `Change` of a replica or a `Piece` of output; `Job.steps` yields a
`Step` of one class for each kind of transition, for `match`; `on_progress` is given `Progress`, `on_asked_back` an
`AskedBack`.
"""

from __future__ import annotations

from moorage.bus.lend.client import AskedBack
from moorage.client.handlers import Progress
from moorage.client.output import Piece
from moorage.client.steps import (
    Claimed,
    Ended,
    Ending,
    Frozen,
    IsReady,
    NotReady,
    Placed,
    Queued,
    Running,
    Step,
    Submitted,
)
from moorage.schemas.frames import Change, Event

__all__ = [
    "AskedBack",
    "Change",
    "Claimed",
    "Ended",
    "Ending",
    "Event",
    "Frozen",
    "IsReady",
    "NotReady",
    "Piece",
    "Placed",
    "Progress",
    "Queued",
    "Running",
    "Step",
    "Submitted",
]
