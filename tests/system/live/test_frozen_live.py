"""A preemptible job on the GPU of a frozen one: real scheduler, worker and jobs, the stub of NVIDIA's libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.bus.embedded import EmbeddedServer
from tests.system.live.one_gpu import one_gpu
from tests.waiting import until


@pytest.mark.slow
async def test_a_preemptible_job_has_the_gpu_through_a_kill_of_the_agent_until_the_frozen_job_is_resumed(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path
) -> None:
    async with one_gpu(nats_server, unique, tmp_path) as it:
        acme = it.acme
        await acme.submit("train", gpu={}, run=it.holding("train", 3000))
        await until((tmp_path / "train").exists, what="it holds its memory")
        await acme.reaches("train", "RUNNING")
        await acme.submit("spot", gpu={}, run=it.holding("spot", 3000), preemptible=True)
        await it.order("freeze", "train")
        await acme.reaches("train", "FROZEN")
        await until((tmp_path / "spot").exists, what="the other holds memory of the GPU")
        await acme.reaches("spot", "RUNNING")
        assert it.away() == 1

        await it.agent.kill()
        await it.start_agent()
        await it.order("resume", "train")
        await acme.reaches("train", "RUNNING")
        await until(lambda: it.away() == 0, what="its memory is back")
        shown = await acme.reaches("spot", "QUEUED")
        assert (shown["replica_states"][0]["retries"], shown["replica_states"][0]["losses"]) == (0, 0)
        await acme.api("cancel", {"job": "train"})
        await acme.reaches("train", "CANCELLED")
        await acme.reaches("spot", "RUNNING")
        await acme.api("cancel", {"job": "spot"})
        await acme.reaches("spot", "CANCELLED")
