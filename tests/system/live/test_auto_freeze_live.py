"""A job that is frozen for want of use through everything: a real scheduler, a real worker, and a real job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from moorage.bus.embedded import EmbeddedServer
from moorage.worker.agent.run import start
from moorage.worker.freezing import cuda
from moorage.worker.settings import WorkerSettings
from moorage.worker.sharing.limiter import limits
from moorage.worker.sharing.limiter.segment import Segment
from tests.nvidia.limited import built
from tests.nvidia.stub import Board, Stub, libraries
from tests.system.live.stack import QUICK, caller, stack
from tests.system.worker.agent.test_agent_process import state_folder
from tests.system.worker.freezing.test_auto_freeze import WORKS
from tests.waiting import until

GPU = "GPU-11111111-2222-3333-4444-555555555555"


@pytest.mark.slow
@pytest.mark.xdist_group("limiter")
async def test_fact_60_an_unused_job_is_frozen_and_its_first_use_resumes_it_but_not_an_operators_order(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LIBRARY", built() / "limiter.bin")
    monkeypatch.setattr(cuda, "LIBRARY", str(libraries() / "libcuda.so.1"))
    stub = Stub(tmp_path / "stub", Board(GPU))
    async with stack(nats_server, unique) as made, caller(made) as acme, state_folder() as state:
        await made.scheduler(config=QUICK)
        await acme.leader()
        with stub.load():
            settings = WorkerSettings(
                state, "w", made.subjects.prefix, load_s=0.2, leases=False, limiter=True, auto_freeze=True,
                auto_freeze_s={"low": 1},
            )  # fmt: skip
            worker = await start(settings, nats_server.url)
            try:
                await acme.workers_up("w")
                (tmp_path / "asked").write_text("")
                done = tmp_path / "done"

                async def order(verb: str) -> dict[str, Any]:
                    return dict(await acme.admin(verb, {"tenant": "acme", "job": "train", "by": "ana"}))

                def away() -> int:
                    return len(list((stub.folder / "away").iterdir()))

                def allocated(times: int) -> bool:
                    return done.exists() and done.read_text() == "0\n" * times

                def use(times: int) -> None:
                    (tmp_path / "asked").write_text("x" * times)

                run = {
                    "argv": [sys.executable, "-c", WORKS, str(tmp_path)], "env": stub.environment, "grace_s": 30,
                }  # fmt: skip
                await acme.submit("train", gpu={}, run=run, qos="low")
                await acme.reaches("train", "FROZEN")
                assert (away(), allocated(1)) == (1, True)
                use(1)
                await until(lambda: allocated(2), what="its first use has it resumed")
                await until(lambda: away() == 1, what="it is frozen again, as it is not used")
                assert (await order("freeze"))["changed"]
                use(2)
                segments = [each for each in limits.folder_of(state).iterdir() if each.is_file()]
                seen = Segment.adopt(segments[0])
                await until(seen.is_wanted, what="its call waits")
                seen.close()
                assert not (await order("freeze"))["changed"], "it is an operator's order"
                assert (away(), allocated(2)) == (1, True)
                await order("resume")
                await until(lambda: allocated(3), what="an operator resumes it")
                await acme.api("cancel", {"job": "train"})
                await acme.reaches("train", "CANCELLED")
            finally:
                await worker.stop()
