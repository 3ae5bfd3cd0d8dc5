"""The proxy: bytes pass, a cut link is silent and not reset, and what waited comes once it is healed."""

from __future__ import annotations

import asyncio

import pytest

from tests.release.chaos.proxy import HOST, Proxy


async def test_a_cut_link_is_silent_and_goes_on_where_it_was() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, HOST, 0)
    proxy = Proxy(server.sockets[0].getsockname()[1])
    await proxy.open()
    try:
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        proxy.cut()
        writer.write(b"two")
        late_reader, late_writer = await asyncio.open_connection(HOST, proxy.port)
        late_writer.write(b"new")
        for silent in (reader, late_reader):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(silent.read(1), 0.1)
        proxy.heal()
        assert await reader.readexactly(3) == b"two"
        assert await late_reader.readexactly(3) == b"new"
        writer.close()
        late_writer.close()
    finally:
        await proxy.close()
        server.close()
        await server.wait_closed()
