"""What a restart of the server does to its clients: the same assertions on the simulated bus and on nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import pytest

from moorage.bus import connection as real
from moorage.bus.errors import Disconnected, RequestTimeout
from moorage.bus.jetstream import EXPECTED_LAST_SEQUENCE, MESSAGE_ID, Ack, JetStream
from moorage.bus.transport import Delivery
from moorage.testing.bus.bus import SimulatedBus, SimulatedClock
from tests.servers import MortalServer
from tests.waiting import until


class Restarting(Protocol):
    """A server with two connections, and how it goes away and comes back."""

    async def connect(self, name: str) -> Any: ...

    async def go(self) -> None: ...

    async def come_back(self) -> None: ...


class SimulatedRestart:
    def __init__(self) -> None:
        self.bus = SimulatedBus()

    async def connect(self, name: str) -> Any:
        return self.bus.connect(name)

    async def go(self) -> None:
        for link in self.bus.connections:
            link.lose()

    async def come_back(self) -> None:
        for link in self.bus.connections:
            link.restore()


class RealRestart:
    def __init__(self, server: MortalServer) -> None:
        self.server = server
        self.opened: list[real.Connection] = []

    async def connect(self, name: str) -> Any:
        self.opened.append(await real.connect(self.server.url, name))
        return self.opened[-1]

    async def go(self) -> None:
        await self.server.kill()

    async def come_back(self) -> None:
        await self.server.start()
        await asyncio.gather(*(link.flush(30) for link in self.opened))


Run = Callable[[Callable[[Restarting], Awaitable[None]]], None]


@pytest.fixture(params=["simulated", "nats-server"])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "simulated":
        return lambda scene: SimulatedClock().run(scene(SimulatedRestart()))  # type: ignore[arg-type]
    server = request.getfixturevalue("mortal_server")

    def on_real(scene: Callable[[Restarting], Awaitable[None]]) -> None:
        async def closing() -> None:
            restarting = RealRestart(server)
            try:
                await scene(restarting)
            finally:
                await asyncio.gather(*(link.close() for link in restarting.opened))

        asyncio.run(closing())

    return on_real


def test_what_is_awaited_fails_and_subscriptions_come_back_once(run: Run) -> None:
    async def scene(server: Restarting) -> None:
        a, b = await server.connect("a"), await server.connect("b")
        heard: list[bytes] = []
        silent: list[Delivery] = []
        await a.subscribe("x", lambda delivery: heard.append(delivery.data))
        await b.subscribe("silent", silent.append)
        await asyncio.gather(a.flush(10), b.flush(10))
        waiting = asyncio.ensure_future(a.request("silent", b"", 60))
        await until(lambda: silent, what="the question")
        await server.go()
        with pytest.raises(Disconnected):
            await waiting
        await until(lambda: not b.is_connected, what="b noticed")
        assert await b.send([("x", b"lost", "")] * 3) == 0
        with pytest.raises(RequestTimeout):
            await b.request("silent", b"", 0.2)
        await server.come_back()
        await until(lambda: a.is_connected and b.is_connected, what="both are back")
        await asyncio.gather(a.flush(10), b.flush(10))
        await b.send([("x", b"heard", "")])
        await until(lambda: heard, what="a message")
        assert heard == [b"heard"]
        assert (a.reconnects, b.reconnects) == (1, 1)

    run(scene)


def test_streams_their_fences_and_their_message_ids_outlive_a_restart(run: Run) -> None:
    async def scene(server: Restarting) -> None:
        a = await server.connect("a")
        js = JetStream(a)
        await js.ensure_stream({"name": "KEPT", "allow_direct": True})
        assert await js.append("KEPT", b"1", {MESSAGE_ID: "one"}) == Ack("KEPT", 1)
        await server.go()
        await until(lambda: not a.is_connected, what="a noticed")
        await server.come_back()
        await until(lambda: a.is_connected, what="a is back")
        assert await js.append("KEPT", b"1", {MESSAGE_ID: "one"}) == Ack("KEPT", 1, duplicate=True)
        refused = await js.append("KEPT", b"2", {EXPECTED_LAST_SEQUENCE: "0"})
        assert not isinstance(refused, Ack)
        assert await js.append("KEPT", b"2", {EXPECTED_LAST_SEQUENCE: "1"}) == Ack("KEPT", 2)
        assert [message.data for message in await js.direct_get_batch("KEPT", seq=1)] == [b"1", b"2"]

    run(scene)


def test_a_full_stream_refuses_the_new_and_takes_them_again_once_it_is_purged(run: Run) -> None:
    async def scene(server: Restarting) -> None:
        js = JetStream(await server.connect("a"))
        await js.ensure_stream({"name": "FULL", "subjects": ["full.*"], "discard": "new", "max_msgs": 2})
        stored = [await js.append("full.a", b""), await js.append("full.b", b"")]
        assert stored == [Ack("FULL", 1), Ack("FULL", 2)]
        refused = await js.append("full.a", b"")
        assert (getattr(refused, "code", 0), getattr(refused, "err_code", 0)) == (503, 10077)
        assert await js.purge("FULL", subject="full.a", below_seq=2) == 1
        assert await js.append("full.a", b"") == Ack("FULL", 3)

    run(scene)
