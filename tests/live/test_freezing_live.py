"""A job that is frozen through everything: a real scheduler, a worker that is killed meanwhile, and a real job."""

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
async def test_a_frozen_job_stays_so_while_its_agent_is_killed_and_runs_on_by_an_operators_word(
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

        async def order(verb: str) -> dict[str, Any]:
            return dict(await acme.admin(verb, {"tenant": "acme", "job": "train", "by": "ana"}))

        file = tmp_path / "train"
        run = {"argv": [sys.executable, HOLD, "hold", str(file), "3000"], "env": stub.environment, "grace_s": 30}
        await acme.submit("train", gpu={}, run=run)
        await until(file.exists, what="it holds its memory")
        await acme.reaches("train", "RUNNING")
        assert (await order("freeze"))["changed"]
        await acme.reaches("train", "FROZEN")
        assert away() == 1
        await agent.kill()
        await made.agent("w", None, worker="w", environment=stub.environment)
        await order("resume")
        await acme.reaches("train", "RUNNING")
        await until(lambda: away() == 0, what="its memory is back")
        assert int(file.read_text()) > 0
        await acme.api("cancel", {"job": "train"})
        await acme.reaches("train", "CANCELLED")
