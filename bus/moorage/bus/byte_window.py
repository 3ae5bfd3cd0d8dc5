"""The two ends of one direction of a byte stream over messages: a window for the sender, a check for the receiver.

See `schemas.frames.running`, which describes the messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from moorage.schemas.frames import PIECE_BYTES_MAX, WINDOW_BYTES, Mark, piece

#: what is consumed is acknowledged at the latest after so many bytes
ACK_BYTES: Final = WINDOW_BYTES // 4

#: sends one message
Send = Callable[[bytes], Awaitable[None]]


class BytesLost(Exception):
    """A message was lost, repeated, or beyond the window: the stream cannot go on."""


class ByteSender:
    """The sending end: numbers the bytes, and waits while `WINDOW_BYTES` of them are not acknowledged."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sent = 0
        self._handed = 0
        self._acked = 0
        self._room = asyncio.Event()

    async def put(self, mark: Mark, data: bytes) -> None:
        """Send these bytes, in pieces, as the window allows. One caller at a time."""
        left = memoryview(data)
        while left:
            room = min(WINDOW_BYTES - (self._sent - self._acked), PIECE_BYTES_MAX, len(left))
            if room <= 0:
                self._room.clear()
                await self._room.wait()
                continue
            at, self._sent = self._sent, self._sent + room
            await self._send(piece(mark, at, bytes(left[:room])))
            self._handed = self._sent
            left = left[room:]

    @property
    def sent(self) -> int:
        """How many bytes were sent: the receiver has them before whatever is sent after them."""
        return self._handed

    def acked(self, offset: int) -> None:
        """Take note that the receiver has consumed the bytes up to an offset."""
        if self._acked < offset <= self._sent:
            self._acked = offset
            self._room.set()


class ByteReceiver:
    """The receiving end: checks that no byte is missing, and says when bytes are to be acknowledged."""

    def __init__(self) -> None:
        self._next = 0
        self._consumed = 0
        self._acked = 0

    def take(self, offset: int, size: int) -> None:
        """Take note of so many bytes that came. Raises `BytesLost`."""
        if offset != self._next:
            raise BytesLost(f"bytes {self._next} to {offset} were lost on the way")
        if self._next + size - self._acked > WINDOW_BYTES:
            raise BytesLost(f"more than {WINDOW_BYTES} bytes came unasked")
        self._next += size

    def reaches(self, offset: int) -> None:
        """Take note that the sender has sent the bytes up to an offset. Raises `BytesLost` if they did not come."""
        if offset > self._next:
            raise BytesLost(f"bytes {self._next} to {offset} were lost on the way")

    def acknowledgement(self) -> bytes:
        """Return the message that acknowledges what is consumed; an earlier one may have been lost."""
        self._acked = self._consumed
        return piece(Mark.ACK, self._consumed)

    def consumed(self, size: int) -> bytes | None:
        """Take note that so many bytes are consumed; return the message that acknowledges them, if one is due."""
        self._consumed += size
        if self._consumed - self._acked < ACK_BYTES:
            return None
        return self.acknowledgement()
