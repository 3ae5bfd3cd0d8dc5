"""Frames out: what is put while one write is in flight leaves together in the next one.

No timer: an idle outbox writes at once, a busy one gathers for as long as the write before takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final, Protocol

from moorage.bus.errors import BusError
from moorage.bus.transport import Outgoing

#: Waiting for the write in flight; beyond either bound the newest message is refused and counted.
WAITING_BYTES_MAX: Final = 32 * 1024 * 1024
WAITING_MESSAGES_MAX: Final = 262_144


class Sender(Protocol):
    async def send(self, batch: Iterable[Outgoing]) -> int: ...


class Outbox:
    """A coalescing publisher over `send`. Use it from one event loop; `close` ends its task.

    Counters: `refused` messages over the bound, `lost` messages handed to a closed or broken connection,
    `writes` batches handed over, `sent` messages in them.
    """

    def __init__(
        self, sender: Sender, bytes_max: int = WAITING_BYTES_MAX, messages_max: int = WAITING_MESSAGES_MAX
    ) -> None:
        self._sender = sender
        self._bytes_max = bytes_max
        self._messages_max = messages_max
        self._waiting: list[Outgoing] = []
        self._waiting_bytes = 0
        self._writing: asyncio.Task[None] | None = None
        self._progress = asyncio.Event()
        self._accepted = 0
        self._done = 0
        self._closed = False
        self.refused = 0
        self.lost = 0
        self.writes = 0
        self.sent = 0

    def put(self, subject: str, payload: bytes, reply: str = "") -> bool:
        """Enqueue one message. False: refused, as the outbox is at its bound or closed; the caller repairs it later."""
        waiting_bytes = self._waiting_bytes + len(payload)
        if self._closed or waiting_bytes > self._bytes_max or len(self._waiting) >= self._messages_max:
            self.refused += 1
            return False
        self._waiting.append((subject, payload, reply))
        self._waiting_bytes = waiting_bytes
        self._accepted += 1
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write())
        return True

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def flush(self) -> None:
        """Return when all that was put before this call has been handed to the connection (or counted as lost)."""
        target = self._accepted
        while self._done < target:
            self._progress.clear()
            await self._progress.wait()

    async def close(self) -> None:
        """Refuse further messages and write what waits."""
        self._closed = True
        await self.flush()

    async def _write(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                self._waiting_bytes = 0
                try:
                    handed = await self._sender.send(batch)
                except BusError:
                    handed = 0
                finally:
                    self._done += len(batch)
                    self._progress.set()
                self.writes += 1
                self.sent += handed
                self.lost += len(batch) - handed
        finally:
            self._writing = None
