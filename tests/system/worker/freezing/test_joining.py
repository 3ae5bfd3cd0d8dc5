"""A worker with frozen jobs joins before the GPU driver has answered: real processes, stubs of NVML and libcuda."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.codec import encode
from moorage.schemas.frames import Freeze, Place
from moorage.testing.conformance.leader import ScriptedLeader
from moorage.worker.agent.run import start
from moorage.worker.freezing import cuda
from moorage.worker.settings import WorkerSettings
from tests.nvidia.stub import Board, Stub
from tests.system.worker.agent.test_agent_process import state_folder
from tests.waiting import until

GPU = "GPU-11111111-2222-3333-4444-555555555555"
HOLD = str(Path(__file__).parents[3] / "release" / "gpu" / "hold_memory.py")
NAME: AttemptName = ("acme", "train", 0, 1, 10)


@pytest.mark.slow
async def test_a_worker_joins_while_the_driver_does_not_answer_for_its_frozen_job(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked first, for up to a minute for each frozen job: then its fence ended all jobs of the host."""
    stub = Stub(tmp_path / "stub", Board(GPU))
    monkeypatch.setattr(cuda, "LIBRARY", str(stub.libraries / "libcuda.so.1"))
    async with ScriptedLeader(nats_url, unique, lease_s=120) as leader, state_folder() as state:
        with stub.load():
            settings = WorkerSettings(state, "w1", unique, modes=("exclusive",), load_s=0.2, leases=False)
            worker = await start(settings, nats_url)
            try:
                file = tmp_path / "pid"
                await leader.joined("w1")
                run: dict[str, Any] = {"argv": [sys.executable, HOLD, "hold", str(file), "4000"], "grace_s": 5}
                request = encode({"gpu": {}, "run": run | {"env": stub.environment}})
                await leader.want("w1", Place(*NAME, [0], "exclusive", False, request))
                await until(lambda: file.exists() and file.read_text(), what="it holds its memory")
                await leader.want("w1", Freeze(*NAME, True))
                await leader.await_report("w1", "frozen", NAME)
                await worker.stop()
                asked = (stub.folder / "calls").read_text().count("GetState")

                stub.extra = ("checkpoint-hang call=GetState",)
                stub.write()
                async with asyncio.timeout(50):  # it looked for 60
                    worker = await start(settings, nats_url)
                    await leader.joined("w1", 2)
                await until(lambda: (stub.folder / "calls").read_text().count("GetState") > asked, what="it looks")
                assert [held.phase for held in leader.seat("w1").joins[-1].holding] == ["frozen"]
            finally:
                await worker.stop()
