"""A job that is frozen through everything: a real scheduler, a worker that is killed meanwhile, and a real job."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.bus.embedded import EmbeddedServer
from tests.system.live.one_gpu import one_gpu
from tests.waiting import until


@pytest.mark.slow
async def test_a_frozen_job_stays_so_while_its_agent_is_killed_and_runs_on_by_an_operators_word(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path
) -> None:
    async with one_gpu(nats_server, unique, tmp_path) as it:
        acme, file = it.acme, tmp_path / "train"
        await acme.submit("train", gpu={}, run=it.holding("train", 3000))
        await until(file.exists, what="it holds its memory")
        await acme.reaches("train", "RUNNING")
        await it.order("freeze", "train")
        await acme.reaches("train", "FROZEN")
        assert it.away() == 1
        await it.agent.kill()
        await it.start_agent()
        await it.order("resume", "train")
        await acme.reaches("train", "RUNNING")
        await until(lambda: it.away() == 0, what="its memory is back")
        assert int(file.read_text()) > 0
        await acme.api("cancel", {"job": "train"})
        await acme.reaches("train", "CANCELLED")
