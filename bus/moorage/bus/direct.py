"""nats-py's client, but a message goes to its handler where it is read, and one that is published leaves at once.

Reading: nats-py takes a message's line and its payload in two steps of its parser, each with a cut of its buffer, puts
the message in its subscription's queue, and in a later turn of the loop a task takes it there and awaits a coroutine.
Handlers of ours only enqueue (`transport.Handler`), so that they may run at once: `DirectParser` takes what plain
messages one read has brought in one go, and leaves whatever else there is to nats-py's own parser.

Writing: nats-py wakes a task that writes in a later turn of the loop, behind whatever else this one still does.
`DirectClient.write` writes now.

The hooks are private names of nats-py. Where a release of it has none of the name that reads, its queue and its task
do their work as before.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

from moorage.bus.transport import Delivery, Handler

#: a plain message's line as a server writes it: subject, subscription, reply subject, bytes of the payload
_line: Final = re.compile(rb"MSG (\S+) (\d+) (?:(\S+) )?(\d+)\r\n").match
_END_BYTES: Final = 2
#: so much of a message waits here for its end; a larger one does in nats-py's parser, which copies nothing twice
_PART_BYTES_MAX: Final = 64 * 1024


def callback_of(handler: Handler) -> Callable[[Msg], Awaitable[None]]:
    """What to subscribe with: `DirectClient` calls the handler itself, any other client by this coroutine."""

    async def on_message(msg: Msg) -> None:
        handler(Delivery(msg.subject, msg.reply, msg.data, msg.headers))

    on_message.handler = handler  # type: ignore[attr-defined]
    return on_message


class NotEncrypted(nats.errors.Error):
    """The server offers no TLS where the context wants it."""


class DirectClient(Client):
    """`encrypted` says that nothing may be said without TLS: nats-py takes what the server's first line says, also
    for a URL of tls://, and anybody on the way can write that line."""

    def __init__(self, *, encrypted: bool = False) -> None:
        super().__init__()
        self._ps = DirectParser(self)
        self._encrypted = encrypted
        #: whether anything took a connection where the context says
        self.was_heard = False

    async def _process_connect_init(self) -> None:
        self.was_heard = True
        try:
            await super()._process_connect_init()
        except Exception:
            # nats-py waits for the end of this socket, which after a TLS handshake that failed nobody is told of
            if isinstance(self._transport, TcpTransport) and self._transport._io_writer is not None:
                self._transport._io_writer.transport.abort()
                self._transport._io_writer = None
            raise

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # a handshake that came first, and a web socket's, are over by now
        is_plain = isinstance(self._transport, TcpTransport) and not self.options["tls_handshake_first"]
        if initial_connection and is_plain and self._encrypted and not info.get("tls_required"):
            if not info.get("tls_available"):
                raise NotEncrypted
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)

    async def _process_pong(self) -> None:
        """The answer to a PING that nobody waits for any more is none to the next one; nats-py would read no more."""
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    def write(self) -> None:
        """Hand to the socket what was published so far; what the socket has no room for follows as ever."""
        transport = self._transport
        if not isinstance(transport, TcpTransport) or transport._io_writer is None:  # a web socket: nats-py knows how
            return
        stream = transport._io_writer.transport
        if self._pending and not stream.is_closing() and not stream.get_write_buffer_size():
            pending, self._pending, self._pending_data_size = self._pending, [], 0
            stream.writelines(pending)

    def handler_of(self, sid: int) -> Handler | None:
        """None where the subscription has ended, or is nats-py's own."""
        handler: Handler | None = getattr(getattr(self._subs.get(sid), "_cb", None), "handler", None)
        return handler

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        handler = self.handler_of(sid)
        if handler is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        try:
            found: Any = await self._process_headers(headers) if headers else None
            handler(Delivery(subject.decode(), reply.decode(), data, found))
        except Exception as error:  # as nats-py tells of a callback that fails
            await self._error_cb(error)


class DirectParser(Parser):
    """Plain messages for handlers of ours go there as they stand in what was read."""

    nc: DirectClient

    async def parse(self, data: bytes = b"") -> None:
        if self.state == AWAITING_CONTROL_LINE:
            data = await self._messages(bytes(self.buf) + data if self.buf else data)
        if data:
            await super().parse(data)

    async def _messages(self, data: bytes) -> bytes:
        """Hand over the messages that `data` begins with; what is left for nats-py's parser."""
        self.buf.clear()
        handler_of, now_s, at, size = self.nc.handler_of, time.monotonic(), 0, len(data)
        while (line := _line(data, at)) is not None:
            subject, sid, reply, length = line.groups(b"")
            begin = line.end()
            end = begin + int(length)
            if end + _END_BYTES > size:
                if end - at > _PART_BYTES_MAX:
                    break
                self.buf += data[at:]
                return b""
            at = end + _END_BYTES
            handler = handler_of(int(sid))
            if handler is None:
                await self.nc._process_msg(int(sid), subject, reply, data[begin:end], b"")
                continue
            try:
                handler(Delivery(subject.decode(), reply.decode(), data[begin:end], None, now_s))
            except Exception as error:  # as nats-py tells of a callback that fails
                await self.nc._error_cb(error)
        return data[at:]
