"""What a service manager and a container's health check are told: by the words on a real socket, and a real file."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from moorage.system.notify import Manager, managed


@pytest.fixture
def manager(tmp_path: Path) -> socket.socket:
    there = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    there.bind(str(tmp_path / "notify"))
    there.setblocking(False)
    return there


async def heard(there: socket.socket) -> str:
    return (await asyncio.wait_for(asyncio.get_running_loop().sock_recv(there, 100), 30)).decode()


async def test_it_says_ready_only_when_it_is_then_beats_and_says_that_it_stops(
    manager: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    ready = asyncio.Event()
    async with managed(ready):
        await asyncio.sleep(0)
        assert "NOTIFY_SOCKET" not in os.environ, "a child would tell it, too"
        with pytest.raises(BlockingIOError):
            manager.recv(100)
        ready.set()
        words = [await heard(manager) for _ in range(3)]
    assert words == ["READY=1", "WATCHDOG=1", "WATCHDOG=1"]
    rest: list[str] = []
    while not rest or rest[-1] != "STOPPING=1":
        rest.append(await heard(manager))
    assert set(rest[:-1]) <= {"WATCHDOG=1"}
    manager.close()


async def test_a_name_without_a_file_and_no_watchdog() -> None:
    name = f"moorage-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.bind("\0" + name)
        there.setblocking(False)
        told = Manager({"NOTIFY_SOCKET": "@" + name, "WATCHDOG_USEC": "10000", "WATCHDOG_PID": "1"})
        assert not told.watched, "another process is watched"
        ready = asyncio.Event()
        ready.set()
        telling = asyncio.create_task(told.notify_ready(ready))
        assert await heard(there) == "READY=1"
        telling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await telling
        assert await heard(there) == "STOPPING=1"


async def test_the_file_of_a_health_check_is_there_once_it_is_ready(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    ready = asyncio.Event()
    telling = asyncio.create_task(Manager({"MOORAGE_ALIVE_FILE": str(alive)}).notify_ready(ready))
    await asyncio.sleep(0)
    assert not alive.exists()
    ready.set()
    for _ in range(3):
        await asyncio.sleep(0)
    assert alive.exists()
    telling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await telling


async def test_without_a_manager_there_is_nothing_to_do() -> None:
    await Manager({}).notify_ready(asyncio.Event())


async def test_a_manager_that_is_gone_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ready = asyncio.Event()
    ready.set()
    gone = Manager({"NOTIFY_SOCKET": str(tmp_path / "gone"), "MOORAGE_ALIVE_FILE": str(tmp_path / "no" / "alive")})
    telling = asyncio.create_task(gone.notify_ready(ready))
    await asyncio.sleep(0)
    assert not telling.done()
    assert "cannot be told READY=1: No such file" in caplog.text
    assert "seems dead" in caplog.text
    telling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await telling
