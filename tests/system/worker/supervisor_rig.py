"""A supervisor on a folder of its own, with a client that gathers its events, for tests with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import pytest

from moorage.system.cgroup import CgroupBase
from moorage.system.proctree import Process, read_process
from moorage.worker.supervisor.capped_output import output_path
from moorage.worker.supervisor.client import Supervised, SupervisorGone, SupervisorUnavailable, python_variables
from moorage.worker.supervisor.protocol import Ended, Event, StartAttempt, Started

WAIT_S: Final = 60.0
SHELL_PATH: Final = "/usr/local/bin:/usr/bin:/bin"


def cgroups_work() -> bool:
    base = CgroupBase.open(f"moorage-test-{os.getpid()}")
    if base is not None:
        base.remove()
    return base is not None


CGROUPS_WORK: Final = cgroups_work()


class Rig:
    """One state folder, its supervisor, and a client that gathers events."""

    def __init__(self, state: Path, arguments: tuple[str, ...]) -> None:
        self.state = state
        self.arguments = arguments
        self.events: list[Event] = []
        self._client: Supervised | None = None

    @property
    def client(self) -> Supervised:
        assert self._client is not None
        return self._client

    async def connect(self, spawn_if_absent: bool = True) -> Supervised:
        self._client = await Supervised.connect(self.state, spawn_if_absent, arguments=self.arguments)
        return self._client

    async def until(self, enough: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not enough():
                self.events += await self.client.next_events()

    def ends(self) -> dict[str, Ended]:
        return {event.key: event for event in self.events if isinstance(event, Ended)}

    def starts(self) -> dict[str, Started]:
        return {event.key: event for event in self.events if isinstance(event, Started)}

    async def started(self, key: str) -> Started:
        await self.until(lambda: key in self.starts() or key in self.ends())
        return self.starts()[key]

    async def ended(self, key: str) -> Ended:
        await self.until(lambda: key in self.ends())
        return self.ends()[key]

    async def run(self, attempt: StartAttempt) -> Ended:
        await self.client.start([attempt])
        return await self.ended(attempt.key)

    def text(self, key: str) -> str:
        path = output_path(self.state, key, "stdout")
        return path.read_text() if path.exists() else ""

    async def line(self, key: str, count: int = 1) -> list[str]:
        """The first whole lines of an attempt's output."""
        await poll(lambda: self.text(key).count("\n") >= count)
        return self.text(key).splitlines()


OTHER: Final = """
import sys
from moorage.worker.supervisor import supervisor
from moorage.worker.supervisor.main import main
supervisor.PROTOCOL = int(sys.argv.pop(1))
sys.exit(main())
"""


async def start_other(state: Path, protocol: int) -> None:
    """Start a supervisor that speaks this version of the protocol, as one of another release would."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", OTHER, str(protocol), "--state", str(state), "--detach"),
        env=python_variables(),
        start_new_session=True,
    )
    assert await process.wait() == 0


async def poll(condition: Callable[[], bool]) -> None:
    """Wait for what no event tells."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        await asyncio.sleep(0.005)


def sh(key: str, script: str, **fields: Any) -> StartAttempt:
    # by its tenant no other test process's supervisor takes it for a former attempt of its own, and clears it away
    marks = {"MOORAGE_TENANT": f"test-{os.getpid()}", "MOORAGE_JOB": key, "MOORAGE_FENCE": "1"}
    fields.setdefault("env", {"PATH": SHELL_PATH, **marks})
    return StartAttempt(key=key, argv=("/bin/sh", "-c", script), **fields)


def lives(pid: int, process: Process | None = None) -> bool:
    """Whether that process runs; a zombie does not."""
    now = read_process(pid)
    return now is not None and not now.dead and (process is None or process.start_ticks == now.start_ticks)


@contextlib.asynccontextmanager
async def rig_at(state: Path, *arguments: str) -> AsyncIterator[Rig]:
    rig = Rig(state, arguments)
    await rig.connect()
    try:
        yield rig
    finally:
        rig.client.close()
        with contextlib.suppress(SupervisorUnavailable):
            last = await Supervised.connect(state, spawn_if_absent=False)
            cgroup, pid = last.cgroup, last.identity.pid
            with contextlib.suppress(SupervisorGone):  # behind much output it may be gone before its answer is read
                await last.shutdown(0)
            await poll(lambda: not lives(pid))
            assert cgroup is None or not Path(cgroup).exists()


def arguments_of(proof: str) -> tuple[str, ...]:
    """A supervisor's arguments for a way of proof, `cgroup` or `walk`; skips what this machine does not have.

    `forked` is `walk` without the compiled launcher.
    """
    if proof == "cgroup":
        if not CGROUPS_WORK:
            pytest.skip("no writable cgroup v2 here")
        return ()
    return ("--no-cgroup", "--forked") if proof == "forked" else ("--no-cgroup",)


def with_rig(tmp_path: Path, arguments: tuple[str, ...], scenario: Callable[[Rig], Awaitable[None]]) -> None:
    async def main() -> None:
        async with rig_at(tmp_path / "state", *arguments) as rig:
            await scenario(rig)

    run(main())


def rigged(scenario: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Give a test a supervisor of its own, as `rig`, in each way of proof that the fixture `arguments` has."""
    of_test = inspect.signature(scenario).parameters

    @functools.wraps(scenario)
    def test(**fixtures: Any) -> None:
        async def main() -> None:
            async with rig_at(fixtures["tmp_path"] / "state", *fixtures["arguments"]) as rig:
                await scenario(rig, **{name: value for name, value in fixtures.items() if name in of_test})

        run(main())

    names = dict.fromkeys(["tmp_path", "arguments", *of_test])
    del names["rig"]
    fixtures = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    test.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
    return test


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)
