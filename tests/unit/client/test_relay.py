"""Connections are carried as channels: each is answered or closed, and the reason is told once."""

from __future__ import annotations

import asyncio
import contextlib

from moorage.client.relay import Channels


async def refused() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    raise ConnectionRefusedError(111, "Connection refused")


class Pair:
    """The ends of a forward, without a job between them; `connect` opens the connection of the far one."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.connect = refused
        self.near = Channels(self._to_far)
        self.far = Channels(self._to_near, lambda: self.connect(), self.told.append)
        self.answered = asyncio.Event()

    async def _to_far(self, data: bytes) -> None:
        await self.far.received(data)
        await self.answered.wait()  # what is sent arrives, and is answered, before this sender goes on

    async def _to_near(self, data: bytes) -> None:
        await self.near.received(data)
        self.answered.set()

    async def read(self, port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            try:
                return await asyncio.wait_for(reader.read(), 10)
            except ConnectionResetError:
                return b""


async def test_a_channel_that_is_closed_while_it_is_still_being_opened_is_over() -> None:
    pair = Pair()
    async with await asyncio.start_server(pair.near.accept, "127.0.0.1") as server:
        assert await pair.read(server.sockets[0].getsockname()[1]) == b""
        assert (pair.near._open, pair.far._open) == ({}, {})


async def test_why_connections_are_closed_is_told_once_until_one_is_opened() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    pair = Pair()
    async with (
        await asyncio.start_server(greet, "127.0.0.1") as real,
        await asyncio.start_server(pair.near.accept, "127.0.0.1") as server,
    ):
        port, to = server.sockets[0].getsockname()[1], real.sockets[0].getsockname()[1]
        assert [await pair.read(port), await pair.read(port)] == [b"", b""]
        assert pair.told == ["nothing listens there: Connection refused"]
        pair.connect = lambda: asyncio.open_connection("127.0.0.1", to)
        assert await pair.read(port) == b"hello"
        pair.connect = refused
        assert await pair.read(port) == b""
        assert len(pair.told) == 2
