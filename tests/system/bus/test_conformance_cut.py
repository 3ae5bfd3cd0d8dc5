"""A client that does not read is cut by its server and comes back: one scene, simulated and on nats-server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Final, Protocol

import pytest

from moorage.bus import connection as real
from moorage.bus.errors import Disconnected, NoResponders, RequestTimeout
from moorage.bus.transport import Delivery
from moorage.testing.bus.bus import PENDING_BYTES_MAX, SimulatedBus, SimulatedClock
from moorage.testing.bus.processes import Process
from tests.waiting import until

FRAME: Final = b"x" * (512 * 1024)
#: more than the server keeps for one client, and than the kernel's buffers between the two hold
FRAMES: Final = (PENDING_BYTES_MAX + 32 * 1024 * 1024) // len(FRAME)


class Reader(Protocol):
    """A client in a process of its own, as far as that can be stopped. `connection` is there once it has begun."""

    connection: Any

    async def do(self, what: Callable[[], Coroutine[Any, Any, Any]]) -> Any: ...

    def begin(self, what: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Future[Any]: ...

    async def stop(self) -> None: ...

    def go_on(self) -> None: ...


class SimulatedReader:
    def __init__(self, bus: SimulatedBus) -> None:
        self.bus = bus
        self.process = Process("reader")

    async def open(self) -> None:
        async def connect() -> Any:
            return self.bus.connect("reader")

        self.connection = await self.do(connect)

    async def do(self, what: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return await self.begin(what)

    def begin(self, what: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Future[Any]:
        return self.process.run(what())

    async def stop(self) -> None:
        self.process.stop()

    def go_on(self) -> None:
        self.process.go_on()


class RealReader:
    """An event loop in a thread: stopped, it reads no more than a stopped process does."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.may_go_on = threading.Event()

    async def open(self) -> None:
        self.thread.start()
        self.connection = await self.do(lambda: real.connect(self.url, "reader"))

    async def close(self) -> None:
        self.go_on()
        await self.do(self.connection.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        await asyncio.to_thread(self.thread.join)
        self.loop.close()

    async def do(self, what: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return await self.begin(what)

    def begin(self, what: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Future[Any]:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(what(), self.loop))

    async def stop(self) -> None:
        stopped: Future[None] = Future()

        def block() -> None:
            stopped.set_result(None)
            self.may_go_on.wait()

        self.loop.call_soon_threadsafe(block)
        await asyncio.wrap_future(stopped)

    def go_on(self) -> None:
        self.may_go_on.set()


Scene = Callable[[Reader, Callable[[str], Coroutine[Any, Any, Any]]], Coroutine[Any, Any, None]]


@pytest.fixture(params=["simulated", "nats-server"])
def run(request: pytest.FixtureRequest) -> Callable[[Scene], None]:
    if request.param == "simulated":
        return simulated
    url = request.getfixturevalue("nats_url")
    return lambda scene: asyncio.run(on_real(url, scene))


def simulated(scene: Scene) -> None:
    bus = SimulatedBus()

    async def connect(name: str) -> Any:
        return bus.connect(name)

    async def within() -> None:
        reader = SimulatedReader(bus)
        await reader.open()
        await scene(reader, connect)

    SimulatedClock().run(within())


async def on_real(url: str, scene: Scene) -> None:
    opened: list[real.Connection] = []

    async def connect(name: str) -> Any:
        opened.append(await real.connect(url, name))
        return opened[-1]

    reader = RealReader(url)
    await reader.open()
    try:
        await scene(reader, connect)
    finally:
        await reader.close()
        for each in opened:
            await each.close()


def test_who_does_not_read_is_cut_alone_and_comes_back(run: Callable[[Scene], None], unique: str) -> None:
    async def scene(reader: Reader, connect: Callable[[str], Coroutine[Any, Any, Any]]) -> None:
        sender, other = await connect("sender"), await connect("other")
        heard: list[int] = []
        others: list[int] = []

        def numbers(into: list[int]) -> Callable[[Delivery], None]:
            return lambda delivery: into.append(int(delivery.subject.rpartition(".")[2]))

        await reader.do(lambda: reader.connection.subscribe(f"{unique}.*", numbers(heard)))
        await other.subscribe(f"{unique}.*", numbers(others))
        await other.subscribe(f"{unique}-silent", lambda _: None)
        await sender.flush()
        await sender.send([(f"{unique}.0", b"", "")])
        await until(lambda: heard == [0], what="the first")
        asked = reader.begin(lambda: reader.connection.request(f"{unique}-silent", b"", 60))
        await reader.do(reader.connection.flush)
        await reader.stop()
        for number in range(1, FRAMES + 1):
            await sender.send([(f"{unique}.{number}", FRAME, "")])
        await until(lambda: len(others) == FRAMES + 1, 60, "all, for whoever reads")
        await other.close()

        async def is_cut() -> bool:
            try:
                await sender.request(f"{unique}.{FRAMES + 1}", b"", 0.2)
            except NoResponders:
                return True
            except RequestTimeout:
                return False
            raise AssertionError("nobody answers here")

        await until(is_cut, 60, "the server cuts it")
        reader.go_on()
        with pytest.raises(Disconnected):
            await asked
        await until(lambda: reader.connection.is_connected and reader.connection.reconnects == 1, 60)
        before = len(heard)
        assert heard == list(range(before))
        assert before <= FRAMES

        async def is_back() -> bool:
            await sender.send([(f"{unique}.{FRAMES + 2}", b"", "")])
            return heard[before:] != []

        await until(is_back, 60, "its subscription")
        assert set(heard[before:]) == {FRAMES + 2}
        assert reader.connection.reconnects == 1

    run(scene)
