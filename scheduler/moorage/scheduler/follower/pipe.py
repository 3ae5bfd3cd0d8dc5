"""What a leader and its follower, a child process, say to each other on the child's stdin and stdout.

Each frame is its length in four bytes and msgpack. The child ends when its stdin ends, as when the leader dies.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from moorage.scheduler.follower.follower import Position, Question
from moorage.schemas.errors import Problem

_HEAD_BYTES: Final = 4


class Asked(msgspec.Struct, array_like=True):
    """The leader asks; the answer has the same number."""

    number: int
    question: Question


class Told(msgspec.Struct, array_like=True):
    """The follower tells its position, and with `number` above 0 an answer or a problem."""

    position: Position
    number: int = 0
    data: dict[str, Any] | None = None
    refused: Problem | None = None


encode: Final = msgspec.msgpack.Encoder().encode
decode_asked: Final = msgspec.msgpack.Decoder(Asked).decode
decode_told: Final = msgspec.msgpack.Decoder(Told).decode


def framed(frame: Asked | Told) -> bytes:
    """Return a frame as it is written."""
    payload = encode(frame)
    return len(payload).to_bytes(_HEAD_BYTES, "big") + payload


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """Return the next frame's msgpack; None once the other side has ended."""
    try:
        size = int.from_bytes(await reader.readexactly(_HEAD_BYTES), "big")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
