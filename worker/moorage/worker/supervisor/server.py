"""Serve the supervisor's socket: decide which processes may connect, and carry the bytes of each connection.

The socket has mode 0600 in a folder of mode 0700, and the peer's uid must be the supervisor's own (SO_PEERCRED of
unix(7)). A process that descends from the supervisor belongs to a job and is refused, even with the same uid; so is a
process of which that cannot be known.
"""

import asyncio
import os
import socket
from typing import Final, Protocol, cast

from moorage.schemas.unreadable import UNREADABLE
from moorage.system.framing import FrameReader, FrameRefused
from moorage.system.pidfds import has_ended, open_peer
from moorage.system.proctree import read_process
from moorage.system.unix_socket import peer_of
from moorage.worker.supervisor.protocol import (
    FRAME_BYTES_MAX,
    Message,
    Output,
    Refused,
    Request,
    decode_request,
    encode_messages,
)

STREAM_BUFFER_BYTES_MAX: Final = 1024 * 1024
"""If more bytes than this are unsent, pieces of output are dropped; the agent sees the gap by their offsets."""
BUFFER_BYTES_MAX: Final = 32 * 1024 * 1024
"""If more bytes than this are unsent, the connection is closed; the agent connects again and lists."""
ANCESTORS_MAX: Final = 1000
"""A peer with more ancestors is refused."""
WALKS_MAX: Final = 8
"""How often the ancestors of one peer are read, because one of them ended meanwhile."""


class Handler(Protocol):
    def opened(self, connection: "Connection") -> bool: ...

    def closed(self, connection: "Connection") -> None: ...

    def asked(self, connection: "Connection", request: Request) -> None: ...


def refusal(peer: socket.socket) -> str | None:
    """Return why this peer may not use the supervisor, None if it may.

    A peer of which it is not known that it is no job's may not: one that has ended, or whose ancestors cannot be read.
    """
    pid, uid = peer_of(peer)
    if uid != os.geteuid():
        return f"uid {uid} is not the supervisor's"
    try:
        pidfd = open_peer(peer, pid)
    except OSError as error:
        return f"pid {pid} cannot be told from a job's: {error.strerror or error}"
    if pidfd < 0:
        return f"pid {pid} has ended, or is in another PID namespace: it cannot be told from a job's"
    try:
        for _ in range(WALKS_MAX):
            found = _walk(pid)
            # while it lives, its pid and the parents that were read are its own
            if has_ended(pidfd):
                return f"pid {pid} has ended: it cannot be told from a job's"
            if found is not _CHANGED:
                return found
    finally:
        os.close(pidfd)
    return f"the ancestors of pid {pid} keep changing: it cannot be told from a job's"


_CHANGED: Final = "an ancestor ended meanwhile"


def _walk(pid: int) -> str | None:
    """Return why a process may not use the supervisor, None if it may; `_CHANGED` if an ancestor ended meanwhile."""
    me, first = os.getpid(), pid
    below = None
    for _ in range(ANCESTORS_MAX):
        process = read_process(pid)
        # a parent that started after its child is a later process with the parent's pid
        if process is None or (below is not None and process.start_ticks > below.start_ticks):
            return _CHANGED
        if process.parent in (0, 1):
            return None
        if process.parent == me:
            return f"pid {first} is a job's"
        below, pid = process, process.parent
    return f"pid {first} has more than {ANCESTORS_MAX} ancestors: it cannot be told from a job's"


class Connection(asyncio.Protocol):
    """One peer. `send` collects messages, `flush` sends the messages of one turn of the loop as one frame."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(FRAME_BYTES_MAX)
        self._pending: list[Message] = []
        self._pending_output_bytes = 0
        self._welcome = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's derives from nothing of asyncio's
        reason = refusal(transport.get_extra_info("socket"))
        if reason is None and not self._handler.opened(self):
            reason = "too many connections"
        if reason is None:
            self._welcome = True
        else:
            self._refuse("not-permitted", reason)

    def _refuse(self, code: str, message: str) -> None:
        self.send(Refused(n=0, code=code, message=message))
        self.flush()
        self.close()

    def data_received(self, data: bytes) -> None:
        if not self._welcome:
            return
        try:
            for body in self._reader.feed(data):
                self._handler.asked(self, decode_request(body))
        except (FrameRefused, *UNREADABLE) as error:
            self._welcome = False
            self._refuse("invalid-frame", str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._handler.closed(self)

    def send(self, message: Message) -> None:
        """Add a message to the next frame.

        Output is dropped while more than `STREAM_BUFFER_BYTES_MAX` are unsent, and any message once the connection is
        lost.
        """
        transport = self._transport
        if transport is None:
            return
        if isinstance(message, Output):
            unsent_bytes = transport.get_write_buffer_size() + self._pending_output_bytes
            if unsent_bytes > STREAM_BUFFER_BYTES_MAX:
                return
            self._pending_output_bytes += len(message.data)
        self._pending.append(message)

    def flush(self) -> None:
        """Send the collected messages; abort the connection if more than `BUFFER_BYTES_MAX` are then unsent."""
        pending, self._pending = self._pending, []
        self._pending_output_bytes = 0
        if self._transport is None or not pending:
            return
        self._transport.write(encode_messages(pending))
        if self._transport.get_write_buffer_size() > BUFFER_BYTES_MAX:
            self._transport.abort()

    def close(self) -> None:
        """Close the connection once everything flushed is sent; messages that `flush` has not sent are lost."""
        if self._transport is not None:
            self._transport.close()
