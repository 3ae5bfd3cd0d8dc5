"""Define the frames between the agent and a process of its host that borrows GPUs, on the agent's UNIX stream socket.

A frame (`system.framing`) has one message, as msgpack. A borrower's connection is one
lease: `Borrow`, then `Granted` (or an error frame), then perhaps `AskedBack`, then `GiveBack` and `Returned`, or the
end of the connection. There is no heartbeat: the lease lasts while the socket is open and the process lives.
"""

from __future__ import annotations

import asyncio
import math
from typing import Final, TypeAlias

import msgspec

from moorage.schemas.errors import Problem
from moorage.schemas.frames import Device
from moorage.schemas.gpu import GpuSpec, Sharing
from moorage.schemas.unreadable import UNREADABLE
from moorage.system.framing import FrameRefused, framed, read_frame

PROTOCOL: Final = 1
SOCKET_NAME: Final = "lease.sock"
FRAME_BYTES_MAX: Final = 64 * 1024
PURPOSE_CHARS_MAX: Final = 200
#: the deadline of an AskedBack that withdraws what was asked before
NEVER_S: Final = math.inf


class Borrow(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="borrow"):
    """Ask for `gpu.count` devices, whole or in the spec's shared mode. `purpose` appears in the worker's log."""

    gpu: GpuSpec
    purpose: str = ""
    protocol: int = PROTOCOL


class GiveBack(msgspec.Struct, frozen=True, tag_field="kind", tag="give-back"):
    """The holder tells the agent that it ends its lease, and has freed the devices' memory."""


class Granted(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="granted"):
    worker: str
    devices: list[Device]
    mode: Sharing = "exclusive"
    simulated: bool = False
    by_uuid: bool = False  # show NVIDIA devices to CUDA by uuid, not by number


class AskedBack(msgspec.Struct, frozen=True, tag_field="kind", tag="asked-back"):
    """Ask the holder to give back until `deadline_boottime_s` (seconds of CLOCK_BOOTTIME, one clock at both ends).

    With `NEVER_S` the holder may keep the devices: what was asked before does not hold any more.
    """

    reason: str
    deadline_boottime_s: float


class Returned(msgspec.Struct, frozen=True, tag_field="kind", tag="returned"):
    """Confirm that the lease is over. Its devices are used again once their memory is free."""


Request: TypeAlias = Borrow | GiveBack
Answer: TypeAlias = Granted | AskedBack | Returned | Problem

_encode: Final = msgspec.msgpack.Encoder().encode
_decode_request: Final = msgspec.msgpack.Decoder(Request).decode
_decode_answer: Final = msgspec.msgpack.Decoder(Answer).decode


def frame(message: Request | Answer) -> bytes:
    """Return the frame of a message. Raises FrameTooLarge."""
    return framed(_encode(message), FRAME_BYTES_MAX)


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """Return the next request; None if the connection has ended, at a frame's end or within a frame.

    Raises FrameRefused for a frame that is too long or cannot be decoded.
    """
    body = await read_frame(reader, FRAME_BYTES_MAX)
    try:
        return None if body is None else _decode_request(body)
    except UNREADABLE as error:
        raise FrameRefused(str(error)) from None


async def read_answer(reader: asyncio.StreamReader) -> Answer | None:
    """Return the next answer; None if the connection has ended, at a frame's end or within a frame.

    Raises FrameRefused for a frame that is too long or cannot be decoded.
    """
    body = await read_frame(reader, FRAME_BYTES_MAX)
    try:
        return None if body is None else _decode_answer(body)
    except UNREADABLE as error:
        raise FrameRefused(str(error)) from None
