"""Keep the state of a connection to the lease socket."""

from __future__ import annotations

import asyncio

from moorage.bus.lend.protocol import Answer, AskedBack, frame
from moorage.schemas.gpu import Sharing
from moorage.worker.lend.family import Family


class Holder:
    """A connection to the lease socket. `slots` is empty unless it has a lease.

    `family` is set while it has a lease of shared devices.

    `drained` is the request of a drain, and `wanted` the earliest other one: it stays when the drain ends.
    """

    __slots__ = ("drained", "family", "mode", "overdue", "pid", "purpose", "slots", "uid", "wanted", "writer")

    def __init__(self, pid: int, uid: int, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.uid = uid
        self.writer = writer
        self.purpose = ""
        self.slots: tuple[int, ...] = ()
        self.mode: Sharing = "exclusive"
        self.family: Family | None = None
        self.drained: AskedBack | None = None
        self.wanted: AskedBack | None = None
        self.overdue: asyncio.TimerHandle | None = None

    @property
    def asked_back(self) -> AskedBack | None:
        """The request with the earliest deadline; None if the lease is not asked back."""
        asked = [each for each in (self.wanted, self.drained) if each is not None]
        return min(asked, key=lambda each: each.deadline_boottime_s, default=None)

    def send(self, answer: Answer) -> None:
        """Send an answer without waiting; do nothing if the connection is closing.

        A holder that never reads costs little: answers are few and small.
        """
        if not self.writer.is_closing():
            self.writer.write(frame(answer))

    def __repr__(self) -> str:
        return f"<Holder pid {self.pid} uid {self.uid} slots {list(self.slots)} {self.purpose!r}>"
