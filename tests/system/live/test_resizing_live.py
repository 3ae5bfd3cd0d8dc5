"""An operator's commands over real processes: `moorage admin freeze`, `resume` and `resize` of a real job.

The command knows no prefix but the default one, so these tests have a server of their own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from moorage.bus.embedded import EmbeddedServer
from moorage.schemas.subjects import PREFIX_DEFAULT
from tests.nvidia.stub import Board, Stub
from tests.system.cli.node import moorage
from tests.system.live.stack import QUICK, caller, stack
from tests.waiting import until

GPU = "GPU-11111111-2222-3333-4444-555555555555"
HOLD = str(Path(__file__).parents[2] / "release" / "gpu" / "hold_memory.py")


@pytest.mark.slow
async def test_a_job_is_frozen_resumed_and_resized_by_the_command(fresh_server: EmbeddedServer, tmp_path: Path) -> None:
    stub = Stub(tmp_path / "stub", Board(GPU))
    async with stack(fresh_server, PREFIX_DEFAULT) as made, caller(made) as acme:
        await made.scheduler(config=QUICK)
        await acme.leader()
        await made.agent("w", None, worker="w", environment=stub.environment)
        await acme.workers_up("w")

        async def admin(*words: str, code: int = 0) -> str:
            ran = await moorage("admin", *words, "--nats", fresh_server.url, "--tenant", "acme")
            assert ran.code == code, ran.err
            return ran.err if code else ran.out.strip()

        async def held(job: str, **gpu: Any) -> None:
            file = tmp_path / job
            run = {"argv": [sys.executable, HOLD, "hold", str(file), "1000"], "env": stub.environment, "grace_s": 30}
            await acme.submit(job, gpu=gpu, run=run)
            await until(file.exists, what=f"{job} holds its memory")
            await acme.reaches(job, "RUNNING")

        def away() -> int:
            return len(list((stub.folder / "away").iterdir()))

        await held("alone")
        await admin("freeze", "alone", "--why", "room for an hour")
        await acme.reaches("alone", "FROZEN")
        assert away() == 1
        await admin("resume", "alone")
        await acme.reaches("alone", "RUNNING")
        await until(lambda: away() == 0, what="its memory is back")
        await acme.api("cancel", {"job": "alone"})
        await acme.reaches("alone", "CANCELLED")

        part = {"sharing": "time-slice", "share": {"memory_mib": 4000, "compute_percent": 40}}
        await held("shares", **part)
        await held("beside", **part)
        said = await admin("resize", "shares", "--compute", "60%", "--memory", "8192M")
        assert "60 % of compute, 8192 MiB of memory of each GPU, the job is RUNNING" in said
        assert "has not that much compute free" in await admin("resize", "shares", "--compute", "61%", code=1)
        for job in ("shares", "beside"):
            await acme.api("cancel", {"job": job})
            await acme.reaches(job, "CANCELLED")
