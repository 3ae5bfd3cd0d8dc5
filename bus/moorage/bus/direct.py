"""nats-py's client, but a message goes to its handler where it is read, and one that is published leaves at once.

Reading: nats-py takes a message's line and its payload in two steps of its parser, each with a cut of its buffer, puts
the message in its subscription's queue, and in a later turn of the loop a task takes it there and awaits a coroutine.
Handlers of ours only enqueue (`transport.Handler`), so that they may run at once: `DirectParser` takes what plain
messages one read has brought in one go, and leaves whatever else there is to nats-py's own parser.

`DirectClient.read_at_once` does so where the loop hands over what it has read; nats-py's task, which would take it
from a buffer in a later turn, then has to wake for what is left alone.

Writing: nats-py takes a message by coroutines that await each other, and wakes a task that writes in a later turn of
the loop, behind whatever else this one still does. `DirectClient.put` takes a plain message by one call, and `write`
writes now.

The hooks are private names of nats-py. Where a release of it has none of the name that reads, its queue and its task
do their work as before.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final

from moorage.bus.nats_py import (
    AWAITING_CONTROL_LINE,
    Client,
    Msg,
    Parser,
    Subscription,
    TcpTransport,
    nats,
    sub_cmd,
    unsub_cmd,
)
from moorage.bus.plain_messages import END_BYTES, hand_out, plain_line
from moorage.bus.transport import Delivery, Handler

#: what no subject holds: it would end the line that names it, or a part of that
_blank: Final = re.compile(r"[ \t\r\n]").search


def callback_of(handler: Handler) -> Callable[[Msg], Awaitable[None]]:
    """What to subscribe with: `DirectClient` calls the handler itself, any other client by this coroutine."""

    async def on_message(msg: Msg) -> None:
        handler(Delivery(msg.subject, msg.reply, msg.data, msg.headers))

    on_message.handler = handler  # type: ignore[attr-defined]
    return on_message


def header_block(headers: Mapping[str, str]) -> bytes:
    """Headers as they stand in a message; empty where one holds a line's end, which nats-py knows to deal with."""
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if not text or {text.count("\r"), text.count("\n")} != {len(headers)}:
        return b""
    return b"NATS/1.0\r\n%b\r\n" % text.encode()


class DirectSubscription(Subscription):
    """The subscription object that `DirectClient.listen` registers with nats-py. It has no queue and no task: the
    client calls the handler itself."""

    def __init__(self, client: DirectClient, sid: int, subject: str, handler: Handler) -> None:
        # not nats-py's own, which makes a queue; what reads one asks whether there is any
        self._conn, self._id, self._subject, self._queue = client, sid, subject, ""
        self._cb = callback_of(handler)
        self._max_msgs = self._received = 0
        self._closed = False
        self._pending_queue = self._pending_next_msgs_calls = None  # type: ignore[assignment]
        self._wait_for_msgs_task = self._message_iterator = None

    def end(self) -> None:
        """As `unsubscribe`, at once."""
        client: DirectClient = self._conn
        if client._subs.pop(self._id, None) is not None and client._status == Client.CONNECTED:
            client.command(unsub_cmd(self._id, 0))


class NotEncrypted(nats.errors.Error):
    """The server offers no TLS where the context wants it."""


class DirectClient(Client):
    """`encrypted` says that nothing may be said without TLS: nats-py takes what the server's first line says, also
    for a URL of tls://, and anybody on the way can write that line."""

    def __init__(self, *, encrypted: bool = False) -> None:
        super().__init__()
        self._ps = DirectParser(self)
        self._tasks: set[asyncio.Task[None]] = set()
        #: whoever publishes calls `write` in this turn: nats-py's task need not wake
        self.gathers = False
        self._writes_soon = False
        self._in_read = False
        self._behind_read: list[Callable[[], None]] = []
        self._encrypted = encrypted
        #: whether anything took a connection where the context says
        self.was_heard = False

    async def _process_connect_init(self) -> None:
        self.was_heard = True
        if isinstance(self._transport, TcpTransport):
            self._transport.writelines = _writes_joined(self._transport)  # type: ignore[method-assign]
        try:
            await super()._process_connect_init()
        except Exception:
            # nats-py waits for the end of this socket, which after a TLS handshake that failed nobody is told of
            if isinstance(self._transport, TcpTransport) and self._transport._io_writer is not None:
                self._transport._io_writer.transport.abort()
                self._transport._io_writer = None
            raise
        if isinstance(self._transport, TcpTransport) and self._transport._io_writer is not None:
            stream = self._transport._io_writer.transport
            if stream.get_extra_info("ssl_object") is not None:
                # its reader began without TLS, would keep open at its end what cannot be, and asyncio warns of that
                protocol: Any = stream.get_protocol()
                protocol._over_ssl = True

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # a handshake that came first, and a web socket's, are over by now
        is_plain = isinstance(self._transport, TcpTransport) and not self.options["tls_handshake_first"]
        if initial_connection and is_plain and self._encrypted and not info.get("tls_required"):
            if not info.get("tls_available"):
                raise NotEncrypted
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)

    async def _process_pong(self) -> None:
        """Take the PONG of a PING that is no longer waited for, which would stop nats-py from reading."""
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    def read_at_once(self) -> None:
        """From now on what the socket brings goes to its handlers as it comes in. Call it once connected."""
        transport, parser = self._transport, self._ps
        reader: Any = transport._io_reader if isinstance(transport, TcpTransport) else None
        if not (isinstance(parser, DirectParser) and hasattr(reader, "_waiter") and hasattr(reader, "_buffer")):
            return  # a web socket, or another release: nats-py reads
        feed = reader.feed_data

        def feed_data(data: bytes) -> None:
            # its task waits for more: all that came before was handed over, and may not be overtaken by this
            if not reader._buffer and reader._waiter is not None and not reader._waiter.done():
                self._in_read = True
                data = parser.take_all(data)
                self._in_read = False
                behind, self._behind_read = self._behind_read, []
                for call in behind:
                    call()
            if data:
                feed(data)

        reader.feed_data = feed_data

    def after_read(self, call: Callable[[], None]) -> None:
        """As `Link.after_read`."""
        if self._in_read:
            self._behind_read.append(call)
        else:
            asyncio.get_running_loop().call_soon(call)

    def tell(self, error: Exception) -> None:
        """As nats-py tells of a callback that fails, but from outside of any task."""
        self._in_background(self._tell(error))

    async def _tell(self, error: Exception) -> None:
        await self._error_cb(error)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def listen(self, subject: str, handler: Handler) -> DirectSubscription | None:
        """Subscribe a handler of ours, without the queue and the task by which nats-py would hand over its messages.

        None where anything stands against it: nats-py's `subscribe` knows what.
        """
        if self._status != Client.CONNECTED or not _HANDS_OVER:
            return None
        self._sid += 1
        subscription = self._subs[self._sid] = DirectSubscription(self, self._sid, subject, handler)
        self.command(sub_cmd(subject, "", self._sid))
        return subscription

    def command(self, line: bytes) -> None:
        """Have a line of the protocol written in the next turn of the loop, behind what was put until now."""
        self._pending.append(line)
        self._pending_data_size += len(line)
        self.write_soon()

    def put(self, subject: str, payload: bytes, reply: str, headers: bytes = b"") -> bool:
        """Take a message for the next `write`; False where anything stands against it: `publish` knows what.

        `headers` are as `header_block` makes them.
        """
        size = len(headers) + len(payload)
        if self._status != Client.CONNECTED or size > self._max_payload or not subject:
            return False
        if _blank(subject) or _blank(reply) or self._pending_data_size + size > self._max_pending_size:
            return False
        if headers:
            parts = (subject.encode(), reply.encode(), len(headers), size, headers, payload)
            message = b"HPUB %b %b %d %d\r\n%b%b\r\n" % parts
        else:
            message = b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply.encode(), size, payload)
        self._pending.append(message)
        self._pending_data_size += len(message)
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += size
        return True

    def write_soon(self) -> None:
        """Have what was put written in the next turn of the loop, with all that others put until then."""
        if not self._writes_soon:
            self._writes_soon = True
            asyncio.get_running_loop().call_soon(self._write_now)

    def _write_now(self) -> None:
        self._writes_soon = False
        try:
            self._hand_over()
        except (OSError, RuntimeError):
            return  # the socket is dead, as its reader will tell
        if self._pending and not self.is_closed:
            self._in_background(self._flush_rest())

    async def _flush_rest(self) -> None:
        try:
            await self._flush_pending()
        except (nats.errors.Error, OSError, RuntimeError):
            pass  # the same

    async def write(self) -> None:
        """Hand to the socket what was published so far; what the socket has no room for follows as ever."""
        self._hand_over()
        if self._pending:
            await self._flush_pending()

    def _hand_over(self) -> None:
        """What stays pending is for nats-py, which knows how: the socket has no room, or it is a web socket."""
        transport = self._transport
        if self._pending and isinstance(transport, TcpTransport) and transport._io_writer is not None:
            stream = transport._io_writer.transport
            if not stream.is_closing() and not stream.get_write_buffer_size():
                pending, self._pending, self._pending_data_size = self._pending, [], 0
                stream.writelines(pending)

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        if self.gathers and not force_flush:
            return None
        return await super()._flush_pending(force_flush)

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


def _writes_joined(transport: TcpTransport) -> Callable[[list[bytes]], None]:
    """What nats-py writes with. The `writelines` of asyncio raises TypeError on a socket that is lost, from Python 3.12
    until 3.13.6; its `write` does not, and the reader tells of the loss."""
    return lambda payload: transport.write(b"".join(payload))  # type: ignore[no-untyped-call]


#: otherwise, in another release of nats-py, its queues and tasks do
_HANDS_OVER: Final = hasattr(Client, "_process_msg")


class DirectParser(Parser):
    """Plain messages for handlers of ours go there as they stand in what was read."""

    nc: DirectClient

    async def parse(self, data: bytes = b"") -> None:
        while data and self.state == AWAITING_CONTROL_LINE:
            data, failed = hand_out(data, self.buf, self.nc.handler_of)
            if failed is not None:
                await self.nc._error_cb(failed)
            elif (line := plain_line(data)) is not None and line.end() + int(line[4]) + END_BYTES <= len(data):
                # of a subscription of nats-py's own, or one that has ended
                subject, sid, reply, length = line.groups(b"")
                begin, end = line.end(), line.end() + int(length)
                await self.nc._process_msg(int(sid), subject, reply, data[begin:end], b"")
                data = data[end + END_BYTES :]
            else:
                break
        if data:
            await super().parse(data)

    def take_all(self, data: bytes) -> bytes:
        """Hand over the messages that `data` begins with; what is left is for `parse`, with what may come behind it."""
        while data and self.state == AWAITING_CONTROL_LINE:
            data, failed = hand_out(data, self.buf, self.nc.handler_of)
            if failed is None:
                break
            self.nc.tell(failed)
        return data
