"""Members of a service as real processes, and a bare caller."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.bus.connection import Connection
from moorage.bus.transport import Delivery
from moorage.schemas.service import ERROR, MEMBER
from tests.system.cli import forks
from tests.system.cli.node import environment
from tests.system.live.stack import RealProcess
from tests.waiting import until

ANSWER_S: Final = 60.0
#: what members serve with in these tests
FUNCTIONS: Final = Path(__file__).parent / "functions.py"


class Gate:
    """Calls of the functions `held`, `aheld` and `die` with this as their data run until the test opens it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / f"gate-{len(list(folder.glob('gate-*')))}"
        self._folder.mkdir()

    @property
    def data(self) -> bytes:
        return os.fsencode(self._folder)

    @property
    def begun(self) -> int:
        """How many calls have begun to run."""
        noted = self._folder / "runs"
        return noted.stat().st_size if noted.exists() else 0

    async def runs(self, calls: int = 1) -> None:
        """Wait until so many calls run."""
        await until(lambda: self.begun >= calls, what=f"{calls} calls run")

    def open(self) -> None:
        """Let the calls end, and those that come later too."""
        (self._folder / "open").touch()


async def waiting(caller: Connection, prefix: str, service: str) -> asyncio.Event:
    """Return an event that is set once a call waits at a member of the service for a place."""
    waits = asyncio.Event()
    await caller.subscribe(f"{prefix}.calls.default.{service}.have", lambda _: waits.set())
    return waits


class MemberProcess(RealProcess):
    """A process `moorage serve`."""

    @property
    def said(self) -> str:
        return self.words()

    async def ready(self) -> None:
        await until(lambda: "serves" in self.said or self.process.returncode is not None, what=f"ready: {self.said}")
        assert self.process.returncode is None, self.said

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), ANSWER_S)

    def program(self) -> int:
        """The pid of its program."""
        [child] = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return int(child)


@contextlib.asynccontextmanager
async def member(
    url: str, folder: Path, *words: str, prefix: str = "moorage", env: Mapping[str, str] | None = None
) -> AsyncIterator[MemberProcess]:
    """`moorage serve` with these words on this server, ended with the block."""
    log = folder / f"member-{len(list(folder.glob('member-*')))}.log"
    argv = ("-m", "moorage.cli", "serve", "--nats", url, "--prefix", prefix, *words)
    with log.open("wb") as out:
        process = await forks.python(*argv, env={**environment(), **(env or {})}, out=out, cwd=FUNCTIONS.parent)
    made = MemberProcess(process, log)
    try:
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 60)
        if process.returncode is None:
            process.kill()
            await process.wait()


async def call(
    caller: Connection, subject: str, data: bytes = b"", headers: Mapping[str, str] | None = None, timeout_s: float = 60
) -> Delivery:
    return await caller.request(subject, data, timeout_s, headers)


def error_of(answer: Delivery) -> str:
    """The error of an answer; "" for none."""
    return (answer.headers or {}).get(ERROR, "")


def body_of(answer: Delivery) -> Any:
    return msgspec.json.decode(answer.data)


def member_of(answer: Delivery) -> str:
    return (answer.headers or {})[MEMBER]
