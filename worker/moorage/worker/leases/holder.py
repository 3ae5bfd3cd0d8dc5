"""Who has, or waits for, a lease of this host's devices."""

from __future__ import annotations

import asyncio

from moorage.schemas.gpu import Sharing
from moorage.worker.leases.protocol import Answer, AskedBack, frame


class Holder:
    """A connection that has, or waits for, a lease."""

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
        """A holder that does not read loses nothing but words: there are few, and each is small."""
        if not self.writer.is_closing():
            self.writer.write(frame(answer))

    def __repr__(self) -> str:
        return f"<Holder pid {self.pid} uid {self.uid} slots {list(self.slots)} {self.purpose!r}>"
