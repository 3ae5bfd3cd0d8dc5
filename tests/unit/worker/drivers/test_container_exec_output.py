"""Commands in containers whose process is seen late, or that are over while what they left keeps their streams open."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from moorage.schemas.errors import Refused
from moorage.schemas.frames import Exec, Mark, Terminal
from moorage.testing import SimulatedClock
from moorage.worker.drivers.container import exec_command
from moorage.worker.drivers.container.engine import EngineError
from moorage.worker.drivers.container.exec_command import LATE_BYTES_MAX, LATE_S, SEEN_S, ContainerExecution
from moorage.worker.start_codes import CODE_NOT_FOUND
from moorage.worker.supervisor.commands import Guard

SAID = b"sh: nosuch: not found\n"


class Engine:
    """An engine whose command is over at once, with this output. A process that it left writes more at such intervals,
    and keeps the connection open."""

    def __init__(self, said: bytes, more: bytes, every_s: float, code: int) -> None:
        self._said = said
        self._more = more
        self._every_s = every_s
        self._code = code
        self.leftover: asyncio.Task[None] | None = None

    async def make_command(self, container: str, asked: Exec) -> str:
        return "command"

    async def start_command(self, command: str, *, is_terminal: bool) -> tuple[asyncio.StreamReader, None]:
        reader = asyncio.StreamReader()

        def write(data: bytes) -> None:
            reader.feed_data(data if is_terminal else b"\2\0\0\0" + len(data).to_bytes(4, "big") + data)

        async def write_on() -> None:
            while self._more:
                await asyncio.sleep(self._every_s)
                write(self._more)

        write(self._said)
        self.leftover = asyncio.get_running_loop().create_task(write_on())
        return reader, None

    async def resize_command(self, command: str, rows: int, columns: int) -> None:
        pass

    async def command_state(self, command: str) -> tuple[int, int]:
        return 0, self._code


class Host:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine


def executed(
    said: bytes, *, tty: bool, more: bytes = b"", every_s: float = 1.0, code: int = CODE_NOT_FOUND
) -> tuple[int, bytes, float]:
    """Return the code and the output of such a command, and how long that took."""

    async def act() -> tuple[int, bytes, float]:
        host: Any = Host(Engine(said, more, every_s, code))
        asked = Exec("acme", "j", 0, 1, 1, "5e55", ["sh", "-c", "sleep 1000 & nosuch"], tty, "")
        began_s, found = asyncio.get_running_loop().time(), b""

        async def take(mark: Mark, data: bytes) -> None:
            nonlocal found
            found += data

        execution = await ContainerExecution.begin(host, "c", asked, Terminal(24, 80))
        assert asyncio.get_running_loop().time() == began_s, "what came at once says whether it was started"
        async with asyncio.timeout(60.0):
            ended = await execution.run(take)
        took_s = asyncio.get_running_loop().time() - began_s
        host.engine.leftover.cancel()
        return ended, found, took_s

    return SimulatedClock().run(act())


@pytest.mark.parametrize("tty", [False, True])
def test_a_command_that_leaves_a_process_ends_with_its_own_code_and_output(tty: bool) -> None:
    code, said, took_s = executed(SAID, tty=tty)
    assert (code, said, took_s) == (CODE_NOT_FOUND, SAID, LATE_S)


@pytest.mark.parametrize("code", [0, CODE_NOT_FOUND])
def test_a_command_ends_though_a_process_that_it_left_writes_on(code: int) -> None:
    ended, said, took_s = executed(SAID, tty=False, more=b"now\n", code=code)
    assert (ended, said.removeprefix(SAID).strip(b"now\n"), took_s) == (code, b"", LATE_S)
    ended, said, took_s = executed(SAID, tty=False, more=65536 * b"y", every_s=0.01, code=code)
    assert (ended, len(said) // LATE_BYTES_MAX) == (code, 1)
    assert took_s < LATE_S


def test_a_program_that_the_engine_cannot_start_is_refused_though_the_streams_stay_open() -> None:
    with pytest.raises(Refused, match="OCI runtime exec failed"):
        executed(b"OCI runtime exec failed: exec failed: no such file or directory\n", tty=False)


def test_a_command_that_the_engine_names_too_late_for_its_caller_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller was told that it was not started, so nobody else ends it."""
    guarded: list[Guard] = []

    class Slow(Engine):
        looks = 0

        async def command_state(self, command: str) -> tuple[int, int | None]:  # type: ignore[override]
            self.looks += 1
            if self.looks == 1:
                await asyncio.sleep(2 * SEEN_S)
            if self.looks < 4:
                raise EngineError(500, "busy")
            return 77, None

    class Running:
        @classmethod
        async def begin(cls, state: object, asked: Guard) -> Running:
            guarded.append(asked)
            return cls()

        def close(self) -> None:
            guarded.append(guarded[-1])

    monkeypatch.setattr(exec_command, "RunningCommand", Running)

    async def act() -> None:
        engine, background = Slow(b"", b"", 1.0, 0), list[asyncio.Task[None]]()
        host: Any = SimpleNamespace(
            engine=engine,
            link=SimpleNamespace(state=None),
            begin=lambda work: background.append(asyncio.get_running_loop().create_task(work)),
        )
        asked = Exec("acme", "j", 0, 1, 1, "5e55", ["sleep", "1000"], False, "")
        with pytest.raises(Refused, match="was not started"):
            await ContainerExecution.begin(host, "c", asked, Terminal(24, 80))
        await asyncio.wait(background)
        assert engine.leftover is not None
        engine.leftover.cancel()

    SimulatedClock().run(act())
    assert guarded == [Guard(container="c", pid=77)] * 2, "its guard is let go of, which ends it"
