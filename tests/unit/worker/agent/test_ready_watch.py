"""How the worker looks whether an attempt is ready: real files in virtual time, and real ports."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import Place
from moorage.schemas.job import Request
from moorage.schemas.service import READY_FILE
from moorage.testing.bus.bus import SimulatedClock
from moorage.worker.agent.ready_watch import FIRST_S, ReadyWatch
from moorage.worker.driver import Driver
from moorage.worker.session.attempt_messages import Attempt, Event, Log, SeenReady
from tests.scenes import in_virtual_time

NAME: AttemptName = ("acme", "a", 0, 1, 10)
HANG_S = 200.0
OK = b"HTTP/1.1 204 No Content\r\n\r\n"


class InFolder(Driver):
    """A driver of which the watch only asks for the folder."""

    name = "process"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def folder_of(self, name: AttemptName) -> str:
        return str(self.folder)


class Desk:
    """The agent of a watch: its clock is the loop's, and what it is told is in `seen`."""

    def __init__(self, folder: Path, ready: dict[str, Any], *ports: int) -> None:
        run = {"argv": ["server"], "ports": len(ports), "ready": ready}
        fields = {"service": {"name": "embed"}} if "call" in ready else {}
        request = msgspec.convert({"run": run, **fields}, Request)
        assert request.trouble is None, request.trouble
        self.attempt = Attempt(NAME, Place(*NAME, [], "none", False, b""), request, 0.0)
        self.attempt.phase, self.attempt.ports = "running", ports
        self.held = {NAME: self.attempt}
        self.seen: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()
        self.tasks: list[asyncio.Task[None]] = []
        self.dropped = Counter[str]()
        self.watch = ReadyWatch(self, {"process": InFolder(folder)}, self.held, None)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def post(self, subject: str, payload: bytes, reply: str = "") -> None: ...
    def wake(self) -> None: ...
    def say(self, line: Log) -> None: ...
    def call_driver(self, driver: Driver, step: Any) -> str:
        return ""

    def enqueue(self, event: Event) -> None:
        assert isinstance(event, SeenReady)
        for _, why, ends in event.items:
            self.attempt.was_ready = self.attempt.was_ready or not why
            self.seen.put_nowait((why, ends))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))

    async def next(self) -> tuple[str, bool]:
        async with asyncio.timeout(HANG_S):
            return await self.seen.get()

    async def over(self) -> None:
        """Wait until nothing looks any more."""
        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*self.tasks)


@asynccontextmanager
async def watched(folder: Path, ready: dict[str, Any], *ports: int) -> AsyncIterator[Desk]:
    desk = Desk(folder, {"every_s": 1, **ready}, *ports)
    desk.watch.watch(desk.attempt)
    try:
        yield desk
    finally:
        desk.held.clear()
        await desk.over()


@asynccontextmanager
async def answering(answer: bytes, host: str = "127.0.0.1") -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server on a port of its own that gives this answer to each request line."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, host, 0)
    async with server:
        yield server.sockets[0].getsockname()[1], asked


async def test_a_port_on_which_something_listens_is_ready_until_nothing_does(tmp_path: Path) -> None:
    async with answering(OK) as (port, _):
        pass
    async with watched(tmp_path, {"tcp": "PORT"}, port) as desk:
        why, ends = await desk.next()
        assert (why.startswith(f"nothing listens on port {port}"), ends) == (True, False)
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", port)
        assert await desk.next() == ("", False)
        server.close()
        await server.wait_closed()
        assert (await desk.next())[0].startswith(f"nothing listens on port {port}")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (OK, ""),
        (b"HTTP/1.0 302 Found\r\n\r\n", ""),
        (b"HTTP/1.1 503 Loading\r\n\r\n", "is answered with 503"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "is answered with 404"),
        (b"220 smtp\r\n", "does not answer in HTTP"),
        (b"x" * 100_000, "does not answer in HTTP"),
        (b"", "does not answer in HTTP"),
    ],
)
async def test_a_get_is_to_be_answered_well(answer: bytes, why: str, tmp_path: Path) -> None:
    async with answering(answer) as (port, asked), watched(tmp_path, {"http": "PORT_1/health?x=1"}, 1, port) as desk:
        found, _ = await desk.next()
        assert found.endswith(why) if why else found == ""
        assert asked[0] == b"GET /health?x=1 HTTP/1.1\r\n"


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this host has no address of IPv6")
@pytest.mark.parametrize("way", ["tcp", "http"])
async def test_a_program_may_listen_on_the_loopback_of_ipv6_alone(way: str, tmp_path: Path) -> None:
    async with answering(OK, "::1") as (port, _), watched(tmp_path, {way: "PORT"}, port) as desk:
        assert await desk.next() == ("", False)


async def test_a_port_of_a_fixed_number(tmp_path: Path) -> None:
    async with answering(OK) as (port, _), watched(tmp_path, {"tcp": port}) as desk:
        assert await desk.next() == ("", False)


def test_a_file_in_the_folder_and_nowhere_else(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret").touch()

    async def scene() -> None:
        async with watched(folder, {"file": "out/ready"}) as desk:
            assert await desk.next() == ("there is no file out/ready", False)
            (folder / "out").symlink_to(tmp_path)
            os.rename(tmp_path / "secret", tmp_path / "ready")
            assert await desk.next() == ("there is no file out/ready, 120 s after its start", True)
            assert desk.now() == 120
        (folder / "out").unlink()
        (folder / "out").mkdir()
        (folder / "out" / "ready").touch()
        async with watched(folder, {"file": "out/ready"}) as desk:
            assert await desk.next() == ("", False)

    SimulatedClock().run(scene())


@in_virtual_time
async def test_the_word_of_moorage_serve(tmp_path: Path) -> None:
    async with watched(tmp_path, {"call": True}) as desk:
        assert await desk.next() == ("its service does not take calls yet", False)
        (tmp_path / READY_FILE).touch()
        assert await desk.next() == ("", False)
        assert desk.now() == FIRST_S


@in_virtual_time
async def test_it_looks_seldom_at_last_and_tells_an_answer_once(tmp_path: Path) -> None:
    async with watched(tmp_path, {"file": "ready", "every_s": 10, "within_s": 600}) as desk:
        assert await desk.next() == ("there is no file ready", False)
        await asyncio.sleep(300.5)
        assert desk.seen.empty()
        (tmp_path / "ready").touch()
        began_s = desk.now()
        assert await desk.next() == ("", False)
        assert desk.now() - began_s <= 10
        await asyncio.sleep(3600)
        assert desk.seen.empty()


@in_virtual_time
async def test_it_ends_after_its_time_and_only_if_it_never_was_ready(tmp_path: Path) -> None:
    async with watched(tmp_path, {"file": "ready", "within_s": 30}) as desk:
        assert (await desk.next())[1] is False
        assert await desk.next() == ("there is no file ready, 30 s after its start", True)
        assert desk.now() == 30
        await desk.over()
    (tmp_path / "ready").touch()
    async with watched(tmp_path, {"file": "ready", "within_s": 30}) as desk:
        assert await desk.next() == ("", False)
        await asyncio.sleep(1000)
        (tmp_path / "ready").unlink()
        assert await desk.next() == ("there is no file ready", False)
        await asyncio.sleep(1000)
        assert desk.seen.empty(), "it was ready, so it is not ended for that"
        (tmp_path / "ready").touch()
        assert await desk.next() == ("", False)


@in_virtual_time
async def test_an_attempt_that_is_frozen_is_not_asked(tmp_path: Path) -> None:
    async with watched(tmp_path, {"file": "ready", "within_s": 30}) as desk:
        desk.attempt.frozen = True  # before the first look, which is a task of its own
        await asyncio.sleep(3600)
        assert desk.seen.empty(), "it cannot answer, and is not blamed for that"
        (tmp_path / "ready").touch()
        desk.attempt.frozen = False
        assert await desk.next() == ("", False)


@in_virtual_time
async def test_one_that_does_not_run_is_not_looked_at(tmp_path: Path) -> None:
    async with watched(tmp_path, {"file": "ready"}) as desk:
        assert (await desk.next())[1] is False
        desk.attempt.phase = "ending"
        await desk.over()
        assert desk.now() == FIRST_S
