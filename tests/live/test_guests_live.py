"""A guest on the GPU of a frozen job: a real scheduler and worker, real jobs, and the stub of NVIDIA's libraries."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from moorage.bus.embedded import EmbeddedServer
from tests.live.stack import QUICK, caller, stack
from tests.nvidia.stub import Board, Stub
from tests.waiting import until

GPU = "GPU-11111111-2222-3333-4444-555555555555"
HOLD = str(Path(__file__).parents[1] / "gpu" / "hold_memory.py")


@pytest.mark.slow
async def test_a_guest_has_the_gpu_of_a_frozen_job_through_a_kill_of_the_agent_until_that_job_is_resumed(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path
) -> None:
    stub = Stub(tmp_path / "stub", Board(GPU))
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler(config=QUICK)
        await acme.leader()
        agent = await made.agent("w", None, worker="w", environment=stub.environment)
        await acme.workers_up("w")

        def away() -> int:
            return len(list((stub.folder / "away").iterdir()))

        async def hold(job: str, **fields: Any) -> None:
            file = tmp_path / job
            run = {"argv": [sys.executable, HOLD, "hold", str(file), "3000"], "env": stub.environment, "grace_s": 30}
            await acme.submit(job, gpu={}, run=run, **fields)

        async def order(verb: str) -> None:
            assert (await acme.admin(verb, {"tenant": "acme", "job": "train", "by": "ana"}))["changed"]

        await hold("train")
        await until((tmp_path / "train").exists, what="it holds its memory")
        await acme.reaches("train", "RUNNING")
        await hold("guest", guest=True)
        await order("freeze")
        await acme.reaches("train", "FROZEN")
        await until((tmp_path / "guest").exists, what="its guest holds memory of the GPU")
        await acme.reaches("guest", "RUNNING")
        assert away() == 1

        await agent.kill()
        await made.agent("w", None, worker="w", environment=stub.environment)
        await acme.workers_up("w")
        await order("resume")
        await acme.reaches("train", "RUNNING")
        await until(lambda: away() == 0, what="its memory is back")
        shown = await acme.reaches("guest", "QUEUED")
        assert (shown["replica_states"][0]["retries"], shown["replica_states"][0]["losses"]) == (0, 0)
        await acme.api("cancel", {"job": "train"})
        await acme.reaches("train", "CANCELLED")
        await acme.reaches("guest", "RUNNING")
        await acme.api("cancel", {"job": "guest"})
        await acme.reaches("guest", "CANCELLED")
