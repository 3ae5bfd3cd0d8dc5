"""A scheduler, a worker with one GPU by the stub of NVIDIA's libraries, and real jobs that hold its memory."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from moorage.bus.embedded import EmbeddedServer
from tests.nvidia.stub import Board, Stub
from tests.system.live.stack import QUICK, Caller, RealProcess, Stack, caller, stack

GPU: Final = "GPU-11111111-2222-3333-4444-555555555555"
HOLD: Final = str(Path(__file__).parents[2] / "release" / "gpu" / "hold_memory.py")


class OneGpu:
    """The processes, the stub, and a caller of the tenant acme. The worker is `w`, its agent the newest one."""

    agent: RealProcess

    def __init__(self, made: Stack, acme: Caller, stub: Stub, folder: Path) -> None:
        self._made = made
        self.acme = acme
        self.stub = stub
        self._folder = folder

    async def start_agent(self) -> None:
        """Start the worker's agent, or the next one after a kill, and wait until the worker is up."""
        self.agent = await self._made.agent("w", None, worker="w", environment=self.stub.environment)
        await self.acme.workers_up("w")

    def holding(self, job: str, mib: int) -> dict[str, Any]:
        """Return the `run` of a job that takes memory of its GPU, and then makes the file `job` in the test folder."""
        argv = [sys.executable, HOLD, "hold", str(self._folder / job), str(mib)]
        return {"argv": argv, "env": self.stub.environment, "grace_s": 30}

    async def order(self, verb: str, job: str) -> None:
        """Have an operator freeze or resume a job, which changes it."""
        assert (await self.acme.admin(verb, {"tenant": "acme", "job": job, "by": "ana"}))["changed"]

    def away(self) -> int:
        """Return how many processes have their GPU memory in the host's RAM."""
        return len(list((self.stub.folder / "away").iterdir()))


@contextlib.asynccontextmanager
async def one_gpu(server: EmbeddedServer, prefix: str, folder: Path) -> AsyncIterator[OneGpu]:
    """Everything started, and the worker up."""
    stub = Stub(folder / "stub", Board(GPU))
    async with stack(server, prefix) as made, caller(made) as acme:
        await made.scheduler(config=QUICK)
        await acme.leader()
        it = OneGpu(made, acme, stub, folder)
        await it.start_agent()
        yield it
