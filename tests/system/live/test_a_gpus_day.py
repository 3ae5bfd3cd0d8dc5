"""A GPU's day through everything: it is used, shared, guarded, frozen and lent, over stubs of NVIDIA's libraries.

Scheduler, worker and jobs are real. What each of these does in all its cases is tested where it is decided, in
`tests/unit/scheduler/lifecycle`, `tests/unit/worker/session` and `tests/system/worker/{freezing,sharing}`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from moorage.bus.embedded import EmbeddedServer
from tests.nvidia.stub import Board, Stub
from tests.system.live.stack import QUICK, Caller, RealProcess, Stack, caller, stack
from tests.waiting import until

GPU: Final = "GPU-11111111-2222-3333-4444-555555555555"
HOLD: Final = str(Path(__file__).parents[2] / "release" / "gpu" / "hold_memory.py")
SHARE: Final = {"memory_mib": 4000, "compute_percent": 40}
SHARES: Final = {"sharing": "time-slice", "share": SHARE, "enforce": {"memory": "guarded"}}


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

    async def hold(self, job: str, mib: int, **fields: Any) -> None:
        """Submit a job that takes memory of its GPU."""
        argv = [sys.executable, HOLD, "hold", str(self._folder / job), str(mib)]
        await self.acme.submit(job, run={"argv": argv, "env": self.stub.environment, "grace_s": 30}, **fields)

    async def holds(self, job: str) -> None:
        """Wait until the job has its memory."""
        await until((self._folder / job).exists, what=f"{job} holds its memory")

    async def order(self, verb: str, job: str, **more: Any) -> Any:
        """Have an operator change a job."""
        answer = await self.acme.admin(verb, {"tenant": "acme", "job": job, "by": "ana", **more})
        assert answer.get("changed"), answer
        return answer

    async def end(self, job: str) -> None:
        await self.acme.api("cancel", {"job": job})
        await self.acme.reaches(job, "CANCELLED")

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


@pytest.mark.slow
async def test_a_gpu_is_used_shared_guarded_frozen_and_lent_through_a_kill_of_its_agent(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path
) -> None:
    async with one_gpu(nats_server, unique, tmp_path) as it:
        await its_use_is_seen(it)
        await its_sharers_are_kept_to_their_parts(it)
        it.stub.boards[0].set(errors={})
        await it.agent.kill()
        await it.start_agent()
        await its_job_is_frozen_and_another_has_it(it)


async def its_use_is_seen(it: OneGpu) -> None:
    acme = it.acme
    await acme.submit("busy", gpu={}, run={"argv": ["sleep", "600"]})
    await acme.reaches("busy", "RUNNING")
    it.stub.boards[0].set(used_mib=5000, more={"util": 87, "power": 350})

    async def row() -> dict[str, Any] | None:
        rows = (await acme.show("busy"))["replica_states"][0].get("use", [])
        return next((row for row in rows if row["percent"] == 87), None)

    found = await until(row, what="a renewal brings the reading")
    assert (found["index"], found["memory_total_mib"], found["memory_mib"] >= 5000) == (0, 81559, True)
    (listed,) = (await acme.api("ls", {}))["data"]["jobs"]
    assert (listed["use"]["devices"], listed["use"]["percent_min"], listed["use"]["percent_max"]) == (1, 87, 87)

    async def over_time() -> bool:
        page = (await acme.api("use", {"job": "busy", "last_s": 20, "points": 20}))["data"]
        return [line for line in page["devices"][0]["percent"] if line is not None][-2:] == [87, 87]

    await until(over_time, what="two seconds of it")
    it.stub.boards[0].set(used_mib=0, more={"util": 0, "power": 70})
    await it.end("busy")
    assert "use" not in (await acme.show("busy"))["replica_states"][0]


async def its_sharers_are_kept_to_their_parts(it: OneGpu) -> None:
    acme = it.acme
    await it.hold("fits", 3000, gpu=SHARES)
    await it.holds("fits")
    await it.hold("greedy", 9000, gpu=SHARES)
    await it.holds("greedy")
    assert (await acme.reaches("greedy", "FAILED"))["why"] == (
        "over-memory: it holds 9300 MiB of GPU 0, 4000 are granted"
    )
    (fits,) = (await acme.reaches("fits", "RUNNING"))["replica_states"]
    assert fits["enforced"]["memory"] == "guarded"

    resized = (await it.order("resize", "fits", memory_mib=8192, compute_percent=60))["resized"]
    assert (resized["memory_mib"], resized["compute_percent"]) == (8192, 60)
    sub = await acme.nc.subscribe(acme.subjects.event("acme", "fits"))
    it.stub.boards[0].set(errors={"processes": 999})

    async def falls() -> bool:
        event = msgspec.json.decode((await sub.next_msg(60)).data)
        return bool(event.get("enforced") == {"memory": "advisory", "compute": "advisory"})

    await until(falls, what="the level falls")
    assert await acme.state("fits") == "RUNNING"
    await acme.submit("next", "true", gpu=SHARES)
    assert (await acme.api("explain", {"job": "next"}))["data"]["reason"] == "enforce"
    for job in ("next", "fits"):
        await it.end(job)


async def its_job_is_frozen_and_another_has_it(it: OneGpu) -> None:
    acme = it.acme
    await it.hold("train", 3000, gpu={})
    await it.holds("train")
    await acme.reaches("train", "RUNNING")
    await it.hold("spot", 3000, gpu={}, preemptible=True)
    await it.order("freeze", "train")
    await acme.reaches("train", "FROZEN")
    await it.holds("spot")
    await acme.reaches("spot", "RUNNING")
    assert it.away() == 1

    await it.agent.kill()
    await it.start_agent()
    await it.order("resume", "train")
    await acme.reaches("train", "RUNNING")
    await until(lambda: it.away() == 0, what="its memory is back")
    (spot,) = (await acme.reaches("spot", "QUEUED"))["replica_states"]
    assert (spot["retries"], spot["losses"]) == (0, 0)
    await it.end("train")
    await acme.reaches("spot", "RUNNING")
    await it.end("spot")
