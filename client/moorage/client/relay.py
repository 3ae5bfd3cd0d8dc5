"""Carry TCP connections as channels of one pair of byte streams: a message is a letter, a channel and a length, and
then bytes.

`moorage forward` has the one end. The other is this very file, run as a command in the job, by the job's own Python:
so it uses the standard library alone, and reaches what the job reaches. Each end sends at most `WINDOW_BYTES` of a
channel that the other has not written to its socket, so a slow connection stops no other one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import struct
import sys
from collections.abc import Awaitable, Callable, Coroutine

HEAD = struct.Struct(">cII")
#: open a channel, bytes, the end of one direction, room for so many bytes more, and the end of a channel at once
OPEN, DATA, EOF, ROOM, CLOSE = b"o", b"d", b"e", b"r", b"c"
WINDOW_BYTES = 256 * 1024
PIECE_BYTES = 32 * 1024
#: connections of one forward at once; further ones are closed, and `tell` hears of it
CHANNELS_MAX = 512
CONNECT_S = 10.0


class Channel:
    """One connection, as its other end sees it."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[bytes] = asyncio.Queue()  # bounded by the window
        self.room = WINDOW_BYTES
        self.has_room = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class Channels:
    """The channels of one pair of streams. `send` sends bytes to the other end; `connect` opens a connection for a
    channel that the other end has opened, and an end without it opens channels alone. `tell` is told why connections
    are closed: once, until one is opened."""

    def __init__(
        self,
        send: Callable[[bytes], Awaitable[None]],
        connect: Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] | None = None,
        tell: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._put = send
        self._connect = connect
        self._tell = tell
        self._told = ""
        self._sending = asyncio.Lock()
        self._buffer = bytearray()
        self._open: dict[int, Channel] = {}
        self._number = 0

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry a new connection of this end until it is over."""
        if len(self._open) >= CHANNELS_MAX:
            self._say_why(f"{CHANNELS_MAX} connections are open, and further ones are closed at once")
            writer.close()
            return
        self._say_why("")
        self._number += 1
        number, channel = self._number, Channel()
        # the task is there before the other end knows of the channel: its CLOSE may come while OPEN is still being sent
        task = self._begin(number, channel, self._begun(number, channel, reader, writer))
        await asyncio.wait({task})
        if task.cancelled() or task.exception() is not None:
            writer.transport.abort()

    def _begin(self, number: int, channel: Channel, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run a channel until it is over, also where it is closed before its first step."""
        self._open[number] = channel
        channel.task = asyncio.ensure_future(work)
        channel.task.add_done_callback(lambda _: self._open.pop(number, None))
        return channel.task

    async def _begun(
        self, number: int, channel: Channel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await self._say(OPEN, number)
        await self._carry(number, channel, reader, writer)

    def _say_why(self, why: str) -> None:
        if why and why != self._told:
            self._tell(why)
        self._told = why

    async def received(self, data: bytes) -> None:
        """Take the next bytes from the other end. Raises ValueError if they are no messages."""
        self._buffer += data
        while len(self._buffer) >= HEAD.size:
            what, number, size = HEAD.unpack_from(self._buffer)
            length = size if what == DATA else 0
            if size > WINDOW_BYTES:
                raise ValueError("a message of a relay is too long")
            if len(self._buffer) < HEAD.size + length:
                return
            rest = bytes(self._buffer[HEAD.size : HEAD.size + length])
            del self._buffer[: HEAD.size + length]
            self._on(what, number, size, rest)

    def _on(self, what: bytes, number: int, size: int, rest: bytes) -> None:
        channel = self._open.get(number)
        if what == OPEN and self._connect is not None and channel is None:
            channel = Channel()
            self._begin(number, channel, self._answer(number, channel, self._connect))
        elif channel is None:
            return  # it is over here, and the other end does not know it yet
        elif what == DATA and rest:
            channel.incoming.put_nowait(rest)
        elif what == EOF:
            channel.incoming.put_nowait(b"")
        elif what == ROOM:
            channel.room += size
            channel.has_room.set()
        elif what == CLOSE and channel.task is not None:
            channel.task.cancel()

    async def close(self) -> None:
        """End all channels."""
        tasks = {channel.task for channel in self._open.values() if channel.task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _say(self, what: bytes, number: int, size: int = 0, rest: bytes = b"") -> None:
        async with self._sending:
            await self._put(HEAD.pack(what, number, size) + rest)

    async def _answer(
        self,
        number: int,
        channel: Channel,
        connect: Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]],
    ) -> None:
        try:
            reader, writer = await asyncio.wait_for(connect(), CONNECT_S)
        except (OSError, asyncio.TimeoutError) as error:  # noqa: UP041 (the job may have an older Python)
            self._say_why(_why_closed(error))
            await self._say(CLOSE, number)
            return
        self._say_why("")
        await self._carry(number, channel, reader, writer)

    async def _carry(
        self, number: int, channel: Channel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        both = [asyncio.ensure_future(self._up(number, channel, reader))]
        both.append(asyncio.ensure_future(self._down(number, channel, writer)))
        try:
            await asyncio.gather(*both)
        except OSError:  # the connection broke
            await self._say(CLOSE, number)
        except asyncio.CancelledError:  # the other end closed it, or all of it ends
            writer.transport.abort()
        finally:
            for task in both:
                task.cancel()
            await asyncio.wait(both)
            writer.close()

    async def _up(self, number: int, channel: Channel, reader: asyncio.StreamReader) -> None:
        while True:
            data = await reader.read(PIECE_BYTES)
            if not data:
                await self._say(EOF, number)
                return
            while channel.room < len(data):
                channel.has_room.clear()
                await channel.has_room.wait()
            channel.room -= len(data)
            await self._say(DATA, number, len(data), data)

    async def _down(self, number: int, channel: Channel, writer: asyncio.StreamWriter) -> None:
        while True:
            data = await channel.incoming.get()
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()
            await self._say(ROOM, number, len(data))


def _why_closed(error: BaseException) -> str:
    """Return why no connection was made to the port in the job, which may have two addresses there."""
    text = str(error)
    if isinstance(error, ConnectionRefusedError) or f"[Errno {errno.ECONNREFUSED}]" in text:
        return "nothing listens there: Connection refused"
    return f"no connection to it within {CONNECT_S:g} s" if isinstance(error, asyncio.TimeoutError) else text


async def relay(port: int) -> None:
    """Be the end in the job: open each channel to this port, until standard input ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)

    async def send(data: bytes) -> None:
        writer.write(data)
        await writer.drain()

    def print_trouble(why: str) -> None:
        print(f"port {port} of the job: {why}", file=sys.stderr, flush=True)

    channels = Channels(send, lambda: asyncio.open_connection("localhost", port), print_trouble)
    with contextlib.suppress(OSError, ValueError):
        while True:
            data = await reader.read(65536)
            if not data:
                break
            await channels.received(data)
    await channels.close()


def main(word: str) -> None:
    """Relay to a port, or to the one that a variable of the job names."""
    port = word if word.isdigit() else os.environ.get(word, "")
    if not port.isdigit():
        sys.exit(f"the job has no variable {word} that is a port")
    asyncio.run(relay(int(port)))


if __name__ == "__main__":
    main(sys.argv[1])
