"""The processes of the demo: an embedded server, a scheduler that can be killed, and a worker of simulated hosts."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from moorage.bus.contexts import CONTEXT_VARIABLE, URL_VARIABLE
from moorage.bus.embedded import EmbeddedServer
from moorage.cli.local.local_tools import end_jobs_now
from moorage.schemas.settings_file import OWN_FLEET_VARIABLE
from moorage.system.parentage import die_with_parent


class Stack:
    """The processes of the demo. They keep their files in one folder, which is removed with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = folder / "record"
        self.server: EmbeddedServer | None = None
        self.scheduler: asyncio.subprocess.Process | None = None
        self.processes: list[asyncio.subprocess.Process] = []
        self.spawning: asyncio.Task[asyncio.subprocess.Process] | None = None
        self.worker: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        assert self.server is not None
        return self.server.url

    async def start(self, fleet: bytes) -> None:
        self.record.touch()
        (self.folder / "fleet.json").write_bytes(fleet)
        self.server = await EmbeddedServer.start(self.folder / "nats", anonymous=False)
        await self.start_scheduler()
        # a canary in the agent's environment: a job that sees it has inherited what it must not
        environment = {**self._environment, "MOORAGE_DEMO_CANARY": "sings"}
        self.worker = await self._spawn(
            "worker",
            [
                "-m",
                "moorage.cli",
                "worker",
                "--simulate",
                str(self.folder / "fleet.json"),
                "--state",
                str(self.folder / "worker"),
            ],
            environment,
        )

    async def start_scheduler(self) -> None:
        assert self.server is not None
        environment = {**self._environment, "MOORAGE_LEDGER_URL": self.server.ledger_url}
        self.scheduler = await self._spawn("scheduler", ["-m", "moorage.scheduler"], environment)

    @property
    def _environment(self) -> dict[str, str]:
        """Ours, with the server, whose URL has a password: arguments are for every user of the machine to read."""
        others = {key: value for key, value in os.environ.items() if key != CONTEXT_VARIABLE}
        return {**others, URL_VARIABLE: self.url, OWN_FLEET_VARIABLE: "1"}

    async def _spawn(self, *words: Any) -> asyncio.subprocess.Process:
        self.spawning = asyncio.create_task(self._start(*words))
        return await asyncio.shield(self.spawning)

    async def _start(self, name: str, arguments: list[str], environment: dict[str, str]) -> asyncio.subprocess.Process:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *arguments,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        self.processes.append(process)
        return process

    async def kill_scheduler(self) -> None:
        """Kill the scheduler with SIGKILL and start a new one, which reads the ledger and becomes leader after the
        takeover time."""
        assert self.scheduler is not None
        self.scheduler.kill()
        await self.scheduler.wait()
        await self.start_scheduler()

    def failed(self) -> str:
        """Return that the scheduler or the worker has ended, with the last lines of its log; "" while both run."""
        for name, process in (("scheduler", self.scheduler), ("worker", self.worker)):
            if process is not None and process.returncode is not None:
                said = (self.folder / f"{name}.log").read_text(errors="replace").strip().splitlines()[-3:]
                return f"the {name} ended with {process.returncode}: {' / '.join(said)}"
        return ""

    async def stop(self) -> None:
        if self.spawning is not None:  # one whose start was cut off is known when it has started
            await asyncio.gather(self.spawning, return_exceptions=True)
        for process in sorted(self.processes, key=lambda process: process is not self.worker):
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                try:
                    async with asyncio.timeout(15):
                        await process.wait()
                except TimeoutError:
                    process.kill()
                    await process.wait()
        await end_jobs_now(self.folder / "worker")
        if self.server is not None:
            await self.server.stop()
