"""Reconnecting under uvloop, which the scheduler runs on: its dead transports raise other errors than asyncio's."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from moorage.bus.connection import Connection, connect
from moorage.bus.embedded import EmbeddedServer
from moorage.bus.errors import BusError
from moorage.bus.transport import Delivery
from tests.waiting import until

uvloop = pytest.importorskip("uvloop")

CONNECTIONS = 6
KILLS = 6


def test_every_connection_comes_back_however_often_the_server_is_killed(fresh_data_dir: Path) -> None:
    async def chatter(connection: Connection) -> None:
        """Requests in flight at the moment of the kill."""
        while True:
            with contextlib.suppress(BusError):
                await connection.request("$JS.API.INFO", b"", 2)

    async def main() -> None:
        server = await EmbeddedServer.start(fresh_data_dir)
        port = server.port
        connections = [await connect(server.url, f"c{number}") for number in range(CONNECTIONS)]
        heard: list[list[Delivery]] = [[] for _ in connections]
        for number, connection in enumerate(connections):
            await connection.subscribe(f"to.{number}", heard[number].append)
        talking = [asyncio.create_task(chatter(connection)) for connection in connections]
        try:
            for _ in range(KILLS):
                await server.kill()
                server = await EmbeddedServer.start(fresh_data_dir, port=port)
                for number, connection in enumerate(connections):
                    heard[number].clear()

                    async def back(number: int = number, connection: Connection = connection) -> bool:
                        await connection.send([(f"to.{number}", b"", "")])
                        return bool(heard[number])

                    await until(back, 30, f"connection {number} hears again")
        finally:
            for task in talking:
                task.cancel()
            await asyncio.gather(*talking, return_exceptions=True)
            for connection in connections:
                await connection.close()
            await server.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
