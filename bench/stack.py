"""What the measurements run on: an embedded server that fsyncs, a scheduler process, a fleet process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from moorage.bus.connection import Connection, connect
from moorage.bus.embedded import EmbeddedServer
from moorage.bus.errors import BusError
from moorage.cli.demo import end_supervisor
from moorage.schemas.subjects import Subjects

HERE = Path(__file__).resolve().parent
SUBJECTS = Subjects()


class Stack:
    """Processes by role; `cpu_s` and `rss_mib` read them from /proc."""

    def __init__(self, url: str, pids: dict[str, int], folder: Path) -> None:
        self.url = url
        self.pids = pids
        self.folder = folder

    def cpu_s(self, role: str) -> float:
        fields = Path(f"/proc/{self.pids[role]}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mib(self, role: str) -> float:
        for line in Path(f"/proc/{self.pids[role]}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        raise RuntimeError(f"{role} has no VmRSS")


@contextlib.asynccontextmanager
async def stack(fleet: str, *, driver: str = "noop") -> AsyncIterator[Stack]:
    """A fresh stack with a simulated fleet such as `256x8xH100`; everything is gone at the end."""
    processes: list[asyncio.subprocess.Process] = []
    with tempfile.TemporaryDirectory(prefix="moorage-bench-") as name:
        folder = Path(name)
        server = await EmbeddedServer.start(folder / "nats")
        try:
            environment = {**os.environ, "MOORAGE_LEDGER_URL": server.ledger_url}
            scheduler = await _spawn(
                folder, "scheduler", ["-m", "moorage.scheduler", "--nats", server.url], environment
            )
            processes.append(scheduler)
            arguments = [str(HERE / "fleet.py"), server.url, str(folder / "worker"), fleet, driver]
            worker = await _spawn(folder, "worker", arguments, dict(os.environ))
            processes.append(worker)
            pids = {"server": server.pid, "scheduler": scheduler.pid, "worker": worker.pid, "callers": os.getpid()}
            async with await connect(server.url, "bench ready") as connection:
                await _until_up(connection, folder)
            yield Stack(server.url, pids, folder)
        finally:
            for process in reversed(processes):
                if process.returncode is None:
                    process.terminate()
                    await process.wait()
            await end_supervisor(folder / "worker")  # it outlives its agent, unless somebody ends it
            await server.stop()


async def _spawn(
    folder: Path, name: str, arguments: list[str], environment: dict[str, str]
) -> asyncio.subprocess.Process:
    with (folder / f"{name}.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, *arguments, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
        )


async def _until_up(connection: Connection, folder: Path) -> None:
    """All workers of the fleet are heard; their number stands in the worker's log once it began."""
    async with asyncio.timeout(20):
        while True:
            wanted = (folder / "worker.log").read_text() if (folder / "worker.log").exists() else ""
            if wanted.strip().isdigit():
                with contextlib.suppress(BusError, KeyError):
                    answer = await connection.request(SUBJECTS.admin("fleet"), b"{}", 5.0)
                    rows = msgspec.json.decode(answer.data)["data"]["workers"]
                    if sum(1 for row in rows if row["state"] == "up") == int(wanted):
                        return
            await asyncio.sleep(0.1)
