"""Keep the state of a connection to the lease socket."""

from __future__ import annotations

import asyncio

from moorage.schemas.gpu import Sharing
from moorage.worker.leases.protocol import Answer, AskedBack, frame


class Holder:
    """A connection to the lease socket. `slots` is empty unless it has a lease."""

    __slots__ = ("asked_back", "mode", "overdue", "pid", "purpose", "slots", "uid", "writer")

    def __init__(self, pid: int, uid: int, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.uid = uid
        self.writer = writer
        self.purpose = ""
        self.slots: tuple[int, ...] = ()
        self.mode: Sharing = "exclusive"
        self.asked_back: AskedBack | None = None
        self.overdue: asyncio.TimerHandle | None = None

    def say(self, answer: Answer) -> None:
        """Send an answer without waiting; do nothing if the connection is closing.

        A holder that never reads costs little: answers are few and small.
        """
        if not self.writer.is_closing():
            self.writer.write(frame(answer))

    def __repr__(self) -> str:
        return f"<Holder pid {self.pid} uid {self.uid} slots {list(self.slots)} {self.purpose!r}>"
