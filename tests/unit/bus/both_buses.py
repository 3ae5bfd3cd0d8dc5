"""A scene that runs on the simulated bus and on nats-server.

A scene is a coroutine of `connect(name)` and a name of its own for subjects and streams; `on_both` makes it two tests.
A module of scenes imports the fixture `world` as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

import pytest

from moorage.bus import connection as real
from moorage.bus.connection import Connection
from moorage.bus.transport import Delivery
from moorage.testing.bus.bus import SimulatedBus, SimulatedClock, SimulatedConnection
from tests.waiting import until

Connect = Callable[[str], Awaitable[Any]]
Scene = Callable[[Connect, str], Coroutine[Any, Any, None]]


class World(Protocol):
    def run(self, scene: Scene, unique: str) -> None: ...


class SimulatedWorld:
    def __init__(self) -> None:
        self.bus = SimulatedBus()

    def run(self, scene: Scene, unique: str) -> None:
        async def connect(name: str) -> SimulatedConnection:
            return self.bus.connect(name)

        SimulatedClock().run(scene(connect, unique))


class RealWorld:
    def __init__(self, url: str) -> None:
        self.url = url

    def run(self, scene: Scene, unique: str) -> None:
        opened: list[Connection] = []

        async def connect(name: str) -> Connection:
            opened.append(await real.connect(self.url, name))
            return opened[-1]

        async def closing() -> None:
            try:
                await scene(connect, unique)
            finally:
                for each in opened:
                    await each.close()

        asyncio.run(closing())


@pytest.fixture(params=["simulated", "nats-server"])
def world(request: pytest.FixtureRequest) -> World:
    return SimulatedWorld() if request.param == "simulated" else RealWorld(request.getfixturevalue("nats_url"))


def on_both(scene: Scene) -> Callable[[World, str], None]:
    def test(world: World, unique: str) -> None:
        world.run(scene, unique)

    test.__name__, test.__doc__ = scene.__name__, scene.__doc__
    return test


async def all_heard(connection: Any, *subscribers: Any) -> None:
    """Wait until what was sent so far has been handed to handlers: a marker after it, on each subscriber."""
    for subscriber in subscribers:
        marks: list[Delivery] = []
        subject = f"mark.{id(marks)}"
        subscription = await subscriber.subscribe(subject, marks.append)
        await connection.send([(subject, b"", "")])
        await until(lambda marks=marks: marks, what="the marker")
        await subscription.unsubscribe()


def answering(connection: Any, payload: bytes | None = None) -> Callable[[Delivery], None]:
    """A handler that answers with `payload`, or with what came."""
    tasks: set[asyncio.Task[int]] = set()

    def answer(delivery: Delivery) -> None:
        task = asyncio.ensure_future(connection.send([(delivery.reply, payload or delivery.data, "")]))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    return answer
