"""What the measurements run on: an embedded server that fsyncs, a scheduler process, a fleet process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Protocol

import msgspec

from moorage.bus.connection import Connection, connect
from moorage.bus.embedded import EmbeddedServer
from moorage.bus.errors import BusError
from moorage.cli.local.local_tools import end_jobs_now
from moorage.schemas.subjects import Subjects

HERE = Path(__file__).resolve().parent
SUBJECTS = Subjects()
UP_WITHIN_S = 60


class Served(Protocol):
    """A server: its process, and what leads to its two accounts, a URL or the name of a context."""

    @property
    def pid(self) -> int: ...
    @property
    def url(self) -> str: ...
    @property
    def ledger_url(self) -> str: ...


class Stack:
    """Processes by role; `cpu_s` and `rss_mib` read them from /proc."""

    def __init__(self, server: Served, folder: Path) -> None:
        self.url = server.url
        self.folder = folder
        self.pids = {"server": server.pid, "callers": os.getpid()}
        self._ledger_url = server.ledger_url
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, role: str, arguments: list[str]) -> None:
        """A process of this Python, whose output goes to the role's log."""
        environment = {**os.environ, "MOORAGE_LEDGER_URL": self._ledger_url}
        with (self.folder / f"{role}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *arguments, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._processes[role] = process
        self.pids[role] = process.pid

    async def start_scheduler(self) -> None:
        await self.start("scheduler", ["-m", "moorage.scheduler", "--nats", self.url])

    async def kill(self, role: str) -> None:
        """End a process without a word of warning."""
        process = self._processes.pop(role)
        process.kill()
        await process.wait()

    async def end(self) -> None:
        for process in reversed(self._processes.values()):
            if process.returncode is None:
                process.terminate()
                await process.wait()

    def cpu_s(self, role: str) -> float:
        fields = Path(f"/proc/{self.pids[role]}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mib(self, role: str) -> float:
        for line in Path(f"/proc/{self.pids[role]}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        raise RuntimeError(f"{role} has no VmRSS")


@contextlib.asynccontextmanager
async def stack(
    fleet: str,
    *,
    driver: str = "noop",
    script: str = "fleet.py",
    before: Callable[[Path], Awaitable[None]] | None = None,
) -> AsyncIterator[Stack]:
    """A fresh stack with a simulated fleet such as `256x8xH100`; everything is gone at the end.

    `script` is the fleet's. `before` may fill the server's data folder.
    """
    with tempfile.TemporaryDirectory(prefix="moorage-bench-") as name:
        folder = Path(name)
        if before is not None:
            await before(folder / "nats")
        server = await EmbeddedServer.start(folder / "nats")
        it = Stack(server, folder)
        try:
            await it.start_scheduler()
            await it.start("worker", [str(HERE / script), server.url, str(folder / "worker"), fleet, driver])
            async with await connect(server.url, "bench ready") as connection:
                await until_up(connection, folder, asked=script == "fleet.py")
            yield it
        finally:
            await it.end()
            await end_jobs_now(folder / "worker")  # it outlives its agent, unless somebody ends it
            await server.stop()


async def until_up(connection: Connection, folder: Path, *, asked: bool) -> None:
    """All workers of the fleet are heard; their number stands in the worker's log once it began, or once all joined."""
    async with asyncio.timeout(UP_WITHIN_S):
        while True:
            wanted = (folder / "worker.log").read_text() if (folder / "worker.log").exists() else ""
            if wanted.strip().isdigit():
                if not asked:
                    return
                with contextlib.suppress(BusError, KeyError):
                    answer = await connection.request(SUBJECTS.admin("fleet"), b"{}", 5.0)
                    rows = msgspec.json.decode(answer.data)["data"]["workers"]
                    if sum(1 for row in rows if row["state"] == "up") == int(wanted):
                        return
            await asyncio.sleep(0.1)
