"""What waits for a record, and for the acknowledgement of the one that was built."""

from __future__ import annotations

from typing import Any

from moorage.scheduler.core.admission import NewJob
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import Ask, Cancel, FromWorker, Operate, Order, PartKept, Resign, SnapshotTaken
from moorage.scheduler.core.fleet import Host
from moorage.scheduler.core.records import Record
from moorage.schemas.frames import Renew

#: what reaches the engine beside requests
Rest = Cancel | FromWorker | Operate | Order | Ask | SnapshotTaken | PartKept | Resign


def presses(event: Rest) -> bool:
    """Whether an event must not wait for the next heartbeat: renewals alone may."""
    return not (isinstance(event, FromWorker) and isinstance(event.frame, Renew))


class InFlight:
    """What waits for the acknowledgement of the record that was built."""

    __slots__ = ("asks", "draft", "joined", "new", "record", "renewed", "replies")

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.record: Record | None = None
        self.new: dict[tuple[str, str], NewJob] = {}
        self.replies: list[tuple[Any, str, bool]] = []  # frame, reply, json
        self.joined: list[tuple[FromWorker, str]] = []
        self.renewed: list[tuple[FromWorker, Renew, Host]] = []
        self.asks: list[Ask] = []
