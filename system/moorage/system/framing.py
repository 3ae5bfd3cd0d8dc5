"""Cut a stream of bytes into frames, on sockets and in journals.

A frame is the length of its body and the body's CRC-32 (4 bytes each, big endian), and the body.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from typing import Final

_HEADER: Final = struct.Struct(">II")
#: bytes of a frame beside its body
HEADER_BYTES: Final = _HEADER.size


class FrameRefused(Exception):
    """The bytes are no frame, or a longer one than is allowed: what comes after them cannot be read."""


class FrameTooLarge(FrameRefused):
    """A body is longer than allowed."""

    def __init__(self, length_bytes: int, most_bytes: int) -> None:
        super().__init__(f"a frame of {length_bytes} bytes, at most {most_bytes} are allowed")
        self.length_bytes = length_bytes


class FrameDamaged(FrameRefused):
    """A body is not the one that was framed."""

    def __init__(self) -> None:
        super().__init__("a frame whose checksum is wrong")


def framed(body: bytes, most_bytes: int) -> bytes:
    """Return the frame of a body. Raises FrameTooLarge for one of more than `most_bytes`."""
    if len(body) > most_bytes:
        raise FrameTooLarge(len(body), most_bytes)
    return _HEADER.pack(len(body), zlib.crc32(body)) + body


def body_at(data: bytes | bytearray, at: int, most_bytes: int) -> bytes | None:
    """Return the body of the frame that begins at a place; None if the frame is not whole.

    Raises FrameTooLarge for a body of more than `most_bytes`, FrameDamaged.
    """
    if len(data) - at < HEADER_BYTES:
        return None
    length_bytes, crc = _HEADER.unpack_from(data, at)
    if length_bytes > most_bytes:
        raise FrameTooLarge(length_bytes, most_bytes)
    body = bytes(data[at + HEADER_BYTES : at + HEADER_BYTES + length_bytes])
    if len(body) < length_bytes:
        return None
    return _checked(body, crc)


async def read_frame(reader: asyncio.StreamReader, most_bytes: int) -> bytes | None:
    """Return the body of the next frame; None if the connection has ended, at a frame's end or within a frame.

    Raises FrameTooLarge for a body of more than `most_bytes`, FrameDamaged.
    """
    try:
        length_bytes, crc = _HEADER.unpack(await reader.readexactly(HEADER_BYTES))
        if length_bytes > most_bytes:
            raise FrameTooLarge(length_bytes, most_bytes)
        return _checked(await reader.readexactly(length_bytes), crc)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _checked(body: bytes, crc: int) -> bytes:
    if zlib.crc32(body) != crc:
        raise FrameDamaged
    return body


class FrameReader:
    """Cuts a stream that arrives in pieces into bodies of at most `most_bytes`."""

    __slots__ = ("_buffer", "_most_bytes")

    def __init__(self, most_bytes: int) -> None:
        self._buffer = bytearray()
        self._most_bytes = most_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies completed by `data`. Raises FrameTooLarge, FrameDamaged."""
        buffer = self._buffer
        buffer += data
        bodies: list[bytes] = []
        start = 0
        while (body := body_at(buffer, start, self._most_bytes)) is not None:
            bodies.append(body)
            start += HEADER_BYTES + len(body)
        del buffer[:start]
        return bodies
