"""A faster nats-py client: it calls a handler as soon as a message is read, and writes published messages at once.

Reading: nats-py parses a message's line and its payload in two steps, and cuts its buffer in each. It puts the message
into the queue of its subscription. In a later turn of the loop a task takes it from there and awaits a coroutine. Our
handlers only enqueue (`transport.Handler`), so they may run at once: `DirectParser` handles all plain messages of one
read in a loop, and leaves other data to nats-py's own parser.

`DirectClient.read_at_once` does this in the call in which the loop passes on the data that it has read. nats-py's task,
which would take the data from a buffer in a later turn, then only wakes for the remaining data.

Writing: nats-py passes a message through several coroutines, and wakes a task that writes in a later turn of the loop,
after all other work of the present turn. `DirectClient.put` takes a plain message by one call, and `write` writes now.

The hooks are private names of nats-py. If a release of nats-py lacks the name that reads, its queue and its task work
as usual.
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

#: characters that a subject cannot have, because they end a line of the protocol or separate its parts
_blank: Final = re.compile(r"[ \t\r\n]").search


def callback_of(handler: Handler) -> Callable[[Msg], Awaitable[None]]:
    """Return the coroutine to subscribe with. `DirectClient` calls the handler itself, other clients this coroutine."""

    async def on_message(msg: Msg) -> None:
        handler(Delivery(msg.subject, msg.reply, msg.data, msg.headers))

    on_message.handler = handler  # type: ignore[attr-defined]
    return on_message


def header_block(headers: Mapping[str, str]) -> bytes:
    """Return the headers in the form of the protocol; empty if there is none, or if one contains a newline.

    Headers with a newline are left to nats-py.
    """
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if not text or {text.count("\r"), text.count("\n")} != {len(headers)}:
        return b""
    return b"NATS/1.0\r\n%b\r\n" % text.encode()


class DirectSubscription(Subscription):
    """The subscription object that `DirectClient.listen` registers with nats-py. It has no queue and no task: the
    client calls the handler itself."""

    def __init__(self, client: DirectClient, sid: int, subject: str, handler: Handler) -> None:
        # without `super().__init__()`, which makes a queue; nats-py's methods check whether there is one
        self._conn, self._id, self._subject, self._queue = client, sid, subject, ""
        self._cb = callback_of(handler)
        self._max_msgs = self._received = 0
        self._closed = False
        self._pending_queue = self._pending_next_msgs_calls = None  # type: ignore[assignment]
        self._wait_for_msgs_task = self._message_iterator = None

    def end(self) -> None:
        """Unsubscribe at once, without a coroutine."""
        client: DirectClient = self._conn
        if client._subs.pop(self._id, None) is not None and client._status == Client.CONNECTED:
            client.command(unsub_cmd(self._id, 0))


class NotEncrypted(nats.errors.Error):
    """The server offers no TLS, but the context requires it."""


class DirectClient(Client):
    """nats-py's client with faster reads and writes.

    With `encrypted` the client sends nothing without TLS. nats-py alone follows the server's first line, even for a
    URL of tls://, and an attacker on the network can write that line.
    """

    def __init__(self, *, encrypted: bool = False) -> None:
        super().__init__()
        self._ps = DirectParser(self)
        self._tasks: set[asyncio.Task[None]] = set()
        #: set while all publishers call `write` in the same turn, so that nats-py's task need not wake
        self.gathers = False
        self._writes_soon = False
        self._in_read = False
        self._behind_read: list[Callable[[], None]] = []
        self._encrypted = encrypted
        #: whether any server accepted a connection at the context's address
        self.was_heard = False

    async def _process_connect_init(self) -> None:
        self.was_heard = True
        if isinstance(self._transport, TcpTransport):
            self._transport.writelines = _writes_joined(self._transport)  # type: ignore[method-assign]
        try:
            await super()._process_connect_init()
        except Exception:
            # nats-py waits for the end of this socket, but is not notified of it after a failed TLS handshake
            if isinstance(self._transport, TcpTransport) and self._transport._io_writer is not None:
                self._transport._io_writer.transport.abort()
                self._transport._io_writer = None
            raise
        if isinstance(self._transport, TcpTransport) and self._transport._io_writer is not None:
            stream = self._transport._io_writer.transport
            if stream.get_extra_info("ssl_object") is not None:
                # the reader began without TLS. At its end it would keep the transport open, which TLS cannot do, and
                # asyncio would log a warning
                protocol: Any = stream.get_protocol()
                protocol._over_ssl = True

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # with tls_handshake_first, and for a web socket, the handshake is done by now
        is_plain = isinstance(self._transport, TcpTransport) and not self.options["tls_handshake_first"]
        if initial_connection and is_plain and self._encrypted and not info.get("tls_required"):
            if not info.get("tls_available"):
                raise NotEncrypted
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)

    async def _process_pong(self) -> None:
        """Accept the PONG of a PING whose wait has ended. It would make nats-py stop reading."""
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    def read_at_once(self) -> None:
        """From now on, call the handlers of messages directly in the socket's read. Call this once connected."""
        transport, parser = self._transport, self._ps
        reader: Any = transport._io_reader if isinstance(transport, TcpTransport) else None
        if not (isinstance(parser, DirectParser) and hasattr(reader, "_waiter") and hasattr(reader, "_buffer")):
            return  # a web socket, or another release of nats-py: its own task reads
        feed = reader.feed_data

        def feed_data(data: bytes) -> None:
            # only if nats-py's task waits for data: then all earlier data is handled, and the order is kept
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
        """Call a function once the messages of the present read are handled; see `Link.after_read`."""
        if self._in_read:
            self._behind_read.append(call)
        else:
            asyncio.get_running_loop().call_soon(call)

    def tell(self, error: Exception) -> None:
        """Report the error of a handler as nats-py reports that of a callback, but from outside of a task."""
        self._in_background(self._tell(error))

    async def _tell(self, error: Exception) -> None:
        await self._error_cb(error)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def listen(self, subject: str, handler: Handler) -> DirectSubscription | None:
        """Subscribe a handler without nats-py's queue and task for its messages.

        Return None if this is not possible now: nats-py's `subscribe` then does it, or raises the error.
        """
        if self._status != Client.CONNECTED or not _HANDS_OVER:
            return None
        self._sid += 1
        subscription = self._subs[self._sid] = DirectSubscription(self, self._sid, subject, handler)
        self.command(sub_cmd(subject, "", self._sid))
        return subscription

    def command(self, line: bytes) -> None:
        """Write a line of the protocol in the next turn of the loop, after all messages that were `put` before."""
        self._pending.append(line)
        self._pending_data_size += len(line)
        self.write_soon()

    def put(self, subject: str, payload: bytes, reply: str, headers: bytes = b"") -> bool:
        """Keep a message for the next `write`. Return False if this is not possible: `publish` raises the error.

        `headers` are made by `header_block`.
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
        """Write all kept messages in the next turn of the loop, including those that are `put` until then."""
        if not self._writes_soon:
            self._writes_soon = True
            asyncio.get_running_loop().call_soon(self._write_now)

    def _write_now(self) -> None:
        self._writes_soon = False
        try:
            self._hand_over()
        except (OSError, RuntimeError):
            return  # the socket is dead; its reader reports that
        if self._pending and not self.is_closed:
            self._in_background(self._flush_rest())

    async def _flush_rest(self) -> None:
        try:
            await self._flush_pending()
        except (nats.errors.Error, OSError, RuntimeError):
            pass  # the socket is dead; its reader reports that

    async def write(self) -> None:
        """Write all kept messages to the socket now. If its buffer is full, nats-py writes the rest later."""
        self._hand_over()
        if self._pending:
            await self._flush_pending()

    def _hand_over(self) -> None:
        """Write the pending messages, unless the socket has no room or is a web socket: then nats-py writes them."""
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
        """Return the handler of a subscription; None if the subscription has ended or has none of our handlers."""
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
        except Exception as error:  # nats-py reports the error of a callback in the same way
            await self._error_cb(error)


def _writes_joined(transport: TcpTransport) -> Callable[[list[bytes]], None]:
    """Return a replacement of the transport's `writelines`, built on its `write`.

    From Python 3.12 until 3.13.6, asyncio's `writelines` raises TypeError on a lost socket; `write` does not.
    """
    return lambda payload: transport.write(b"".join(payload))  # type: ignore[no-untyped-call]


#: whether this release of nats-py has the method that passes messages to handlers; if not, its queues and tasks do it
_HANDS_OVER: Final = hasattr(Client, "_process_msg")


class DirectParser(Parser):
    """Passes plain messages from the read data directly to our handlers."""

    nc: DirectClient

    async def parse(self, data: bytes = b"") -> None:
        while data and self.state == AWAITING_CONTROL_LINE:
            data, failed = hand_out(data, self.buf, self.nc.handler_of)
            if failed is not None:
                await self.nc._error_cb(failed)
            elif (line := plain_line(data)) is not None and line.end() + int(line[4]) + END_BYTES <= len(data):
                # a message of a subscription that nats-py made, or that has ended
                subject, sid, reply, length = line.groups(b"")
                begin, end = line.end(), line.end() + int(length)
                await self.nc._process_msg(int(sid), subject, reply, data[begin:end], b"")
                data = data[end + END_BYTES :]
            else:
                break
        if data:
            await super().parse(data)

    def take_all(self, data: bytes) -> bytes:
        """Pass on the plain messages at the beginning of `data`, and return the rest, which is for `parse`."""
        while data and self.state == AWAITING_CONTROL_LINE:
            data, failed = hand_out(data, self.buf, self.nc.handler_of)
            if failed is None:
                break
            self.nc.tell(failed)
        return data
