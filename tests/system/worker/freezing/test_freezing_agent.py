"""A worker that freezes its jobs: real processes, supervisor and pynvml, with stubs of NVML and libcuda."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.codec import encode
from moorage.schemas.frames import End, Freeze, Place
from moorage.worker.agent.run import FROZEN_FILE, start
from moorage.worker.drivers.conformance.leader import ScriptedLeader
from moorage.worker.freezing import cuda
from moorage.worker.settings import WorkerSettings
from tests.nvidia.stub import Board, Stub
from tests.system.worker.agent.test_agent_process import state_folder
from tests.waiting import until

GPU = "GPU-11111111-2222-3333-4444-555555555555"
HOLD = str(Path(__file__).parents[3] / "release" / "gpu" / "hold_memory.py")
NAME: AttemptName = ("acme", "train", 0, 1, 10)


@pytest.mark.slow
async def test_a_job_is_frozen_outlives_its_agent_so_and_is_resumed(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = Stub(tmp_path / "stub", Board(GPU))
    monkeypatch.setattr(cuda, "LIBRARY", str(stub.libraries / "libcuda.so.1"))
    async with ScriptedLeader(nats_url, unique, lease_s=120) as leader, state_folder() as state:
        seat = leader.seat("w1")

        numbers = count(1)  # of the orders to resume

        def kinds() -> list[str]:
            return [fact.kind for fact in seat.facts]

        async def ask(on: bool, answer: str) -> None:
            """Freeze or resume the job, and wait for this answer: one more than there are."""
            before, order = kinds().count(answer), Freeze(*NAME, on, 0 if on else next(numbers))

            async def answered() -> bool:
                """As leaders do, give the order again: nothing happens while the worker looks at the devices."""
                await leader.want("w1", order)
                renewals = len(seat.renewals)
                await until(lambda: kinds().count(answer) > before or len(seat.renewals) > renewals + 1)
                return kinds().count(answer) > before

            await until(answered, what=f"{answer} after {kinds()}")

        def away() -> list[str]:
            return [path.name for path in (stub.folder / "away").iterdir()]

        async def listed(phase: str) -> None:
            await until(lambda: [held.phase for held in seat.renewals[-1].held] == [phase], what=f"listed as {phase}")

        with stub.load():
            settings = WorkerSettings(state, "w1", unique, modes=("exclusive",), load_s=0.2, leases=False)
            worker = await start(settings, nats_url)
            try:
                await leader.joined("w1")
                assert seat.joins[-1].hello.capabilities["process"].freezes
                file = tmp_path / "pid"
                run: dict[str, Any] = {"argv": [sys.executable, HOLD, "hold", str(file), "4000"], "grace_s": 5}
                request = encode({"gpu": {}, "run": run | {"env": stub.environment}})
                await leader.want("w1", Place(*NAME, [0], "exclusive", False, request))
                await leader.heard("w1", "started", NAME)
                pid = int(await until(lambda: file.exists() and file.read_text(), what="it holds its memory"))

                await ask(True, "frozen")
                await listed("frozen")
                assert away() == [f"{pid}.{GPU}"]
                await ask(True, "frozen")  # again: nothing happens, and it is answered
                await worker.stop()
                assert (state / FROZEN_FILE).exists()

                worker = await start(settings, nats_url)
                await leader.joined("w1", 2)
                await listed("frozen")
                assert away() == [f"{pid}.{GPU}"]
                await ask(False, "resumed")
                await listed("running")
                assert (away(), (state / FROZEN_FILE).exists()) == ([], False)

                stub.extra = ("checkpoint-fail call=Checkpoint code=801",)
                stub.write()
                await ask(True, "not-frozen")
                assert "801" in next(fact.detail for fact in seat.facts if fact.kind == "not-frozen")
                stub.extra = ()
                stub.write()

                await ask(True, "frozen")
                await leader.want("w1", End(*NAME, "cancelling"))
                await leader.heard("w1", "freed", NAME)
                await until(lambda: not (state / FROZEN_FILE).exists(), what="nothing is remembered of it")
                assert worker.host.failed.done() is False
            finally:
                await worker.stop()
