"""Output of commands in containers that are over while a process that they left keeps their streams open."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moorage.schemas.errors import Refused
from moorage.schemas.frames import Exec, Mark, Terminal
from moorage.testing import SimulatedClock
from moorage.worker.drivers.container.exec_command import LATE_S, ContainerExecution
from moorage.worker.drivers.start_codes import CODE_NOT_FOUND

SAID = b"sh: nosuch: not found\n"


class Engine:
    """An engine whose command is over at once, with this output, and whose connection stays open."""

    def __init__(self, said: bytes) -> None:
        self._said = said

    async def make_command(self, container: str, asked: Exec) -> str:
        return "command"

    async def start_command(self, command: str, *, is_terminal: bool) -> tuple[asyncio.StreamReader, None]:
        reader = asyncio.StreamReader()
        reader.feed_data(self._said if is_terminal else b"\2\0\0\0" + len(self._said).to_bytes(4, "big") + self._said)
        return reader, None

    async def command_state(self, command: str) -> tuple[int, int]:
        return 0, CODE_NOT_FOUND


class Host:
    def __init__(self, said: bytes) -> None:
        self.engine = Engine(said)


def executed(said: bytes, *, tty: bool) -> tuple[int, bytes, float]:
    """Return the code and the output of such a command, and how long that took."""

    async def act() -> tuple[int, bytes, float]:
        host: Any = Host(said)
        asked = Exec("acme", "j", 0, 1, 1, "5e55", ["sh", "-c", "sleep 1000 & nosuch"], tty, "")
        began_s, found = asyncio.get_running_loop().time(), b""

        async def take(mark: Mark, data: bytes) -> None:
            nonlocal found
            found += data

        execution = await ContainerExecution.begin(host, "c", asked, Terminal(24, 80))
        code = await execution.run(take)
        return code, found, asyncio.get_running_loop().time() - began_s

    return SimulatedClock().run(act())


@pytest.mark.parametrize("tty", [False, True])
def test_a_command_that_leaves_a_process_ends_with_its_own_code_and_output(tty: bool) -> None:
    code, said, took_s = executed(SAID, tty=tty)
    assert (code, said, took_s) == (CODE_NOT_FOUND, SAID, LATE_S)


def test_a_program_that_the_engine_cannot_start_is_refused_though_the_streams_stay_open() -> None:
    with pytest.raises(Refused, match="OCI runtime exec failed"):
        executed(b"OCI runtime exec failed: exec failed: no such file or directory\n", tty=False)
