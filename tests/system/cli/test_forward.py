"""`moorage forward`: connections to a port of a job, their bytes, their ends, and what cannot be reached."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from moorage.client.relay import WINDOW_BYTES, Channels
from tests.system.cli.node import Node, start
from tests.waiting import until

#: answers each connection with the sum and the number of the bytes that came, after their end
SERVER = """
import hashlib, os, socket, threading
def answer(peer):
    data = b"".join(iter(lambda: peer.recv(65536), b""))
    peer.sendall(hashlib.sha256(data).hexdigest().encode() + b" " + data)
    peer.close()
listener = socket.create_server(("127.0.0.1", int(os.environ["PORT"])))
print("listens", flush=True)
while True:
    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()
"""


@pytest.fixture
def job(node: Node, node_loop: asyncio.AbstractEventLoop, request: pytest.FixtureRequest) -> Iterator[str]:
    """A job that listens on its own port."""
    name = f"forward-{abs(hash(request.node.name)) % 10**8}"

    async def begin() -> None:
        ran = await node.run("submit", "--gpu", "--ports", "1", "--job", name, "--", "python3", "-c", SERVER)
        assert ran.code == 0, ran.err

        async def listens() -> bool:
            return "listens" in (await node.run("logs", name, "--no-follow")).out

        await until(listens, 60.0, "the job listens")

    node_loop.run_until_complete(begin())
    yield name
    node_loop.run_until_complete(node.run("cancel", name))


@contextlib.asynccontextmanager
async def forwarded(node: Node, *words: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """A forward that listens, with its port."""
    calling = await start("forward", *words, env=node.env())
    try:
        assert calling.stderr is not None
        line = (await asyncio.wait_for(calling.stderr.readline(), 60.0)).decode()
        assert line.startswith("http://127.0.0.1:"), line + (await calling.stderr.read()).decode()
        yield calling, int(line.split()[0].rpartition(":")[2])
    finally:
        if calling.returncode is None:
            calling.kill()
        await calling.wait()


async def _sum(port: int, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def give() -> None:
        writer.write(sent)
        await writer.drain()
        writer.write_eof()

    giving = asyncio.create_task(give())
    got = await reader.read(-1)
    await giving
    writer.close()
    return got


def test_many_connections_to_a_notebook_port_have_their_own_bytes(
    node: Node, node_loop: asyncio.AbstractEventLoop, job: str
) -> None:
    async def work() -> None:
        async with forwarded(node, job, "PORT") as (calling, port):
            stalled = await asyncio.open_connection("127.0.0.1", port)  # reads nothing, and stops no other
            stalled[1].write(bytes(4 * WINDOW_BYTES))
            stalled[1].write_eof()
            sent = [os.urandom(size) for size in (0, 1, 100_000, 5_000_000, 3)]
            for each, got in zip(sent, await asyncio.gather(*(_sum(port, each) for each in sent)), strict=True):
                assert got == hashlib.sha256(each).hexdigest().encode() + b" " + each
            stalled[1].close()
            calling.send_signal(signal.SIGINT)
            await asyncio.wait_for(calling.wait(), 60.0)
        shown = await node.run("show", job)
        assert "# moorage forward PORT" in shown.out

    node_loop.run_until_complete(work())


def test_what_does_not_listen_closes_the_connection(node: Node, node_loop: asyncio.AbstractEventLoop, job: str) -> None:
    async def work() -> None:
        async with forwarded(node, job, "0:1") as (_, port):  # nothing listens on port 1
            assert await asyncio.wait_for(_closed(port), 60.0)
        ran = await node.run("forward", job, "nine:9")
        assert (ran.code, "PORT must name a port" in ran.err) == (2, True)
        ran = await node.run("forward", job, "NO_SUCH")
        assert ran.code == 1
        assert "no variable NO_SUCH" in ran.err

    node_loop.run_until_complete(work())


async def _closed(port: int) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True
    finally:
        writer.close()


async def test_a_slow_connection_holds_no_more_than_its_window() -> None:
    sent = bytearray()

    async def send(data: bytes) -> None:
        sent.extend(data)

    channels = Channels(send)
    server = await asyncio.start_server(channels.accept, "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(bytes(4 * WINDOW_BYTES))
    await until(lambda: len(sent) > WINDOW_BYTES * 7 // 8, 60.0, "the window fills")
    assert len(sent) < WINDOW_BYTES + 4096
    writer.transport.abort()
    server.close()
    await channels.close()
