"""A TCP proxy on loopback that can be cut: while it is, nothing passes either way and nobody is told.

A cut link looks like a partition, not like a reset: established connections stay open and silent, new ones are taken
and never answered. What was on its way when the link is healed goes on, as TCP's own retransmission would have it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

HOST: Final = "127.0.0.1"
CHUNK_BYTES: Final = 64 * 1024


class Proxy:
    """One door to one server. `open` it, give `port` to the client."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = 0
        self.passed_bytes = 0
        self.taken = 0  # connections, also those that are not answered
        self._healed = asyncio.Event()
        self._healed.set()
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._on_client, HOST, 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        self._healed.clear()

    def reset(self) -> None:
        """Cut it, and end the connections that it has: both sides see that at once."""
        self.cut()
        for link in list(self._links):
            link.cancel()

    def heal(self) -> None:
        self._healed.set()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for link in list(self._links):
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def _on_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link is not None
        self._links.add(link)
        self.taken += 1
        try:
            await self._healed.wait()
            with contextlib.suppress(OSError):
                back_reader, back_writer = await asyncio.open_connection(HOST, self.target_port)
                await self._both(reader, writer, back_reader, back_writer)
        except asyncio.CancelledError:
            pass  # closed: the streams' own callback would tell it as an error
        finally:
            self._links.discard(link)
            writer.transport.abort()

    async def _both(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        back_reader: asyncio.StreamReader,
        back_writer: asyncio.StreamWriter,
    ) -> None:
        pumps = [
            asyncio.create_task(self._pump(reader, back_writer)),
            asyncio.create_task(self._pump(back_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            back_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES):
                await self._healed.wait()
                self.passed_bytes += len(chunk)
                writer.write(chunk)
                await writer.drain()
            await self._healed.wait()  # an end is news, too
