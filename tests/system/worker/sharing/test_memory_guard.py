"""The guard of shared GPUs' memory: real processes, supervisor and pynvml, over NVML and CUDA as stubs in C."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.codec import decode_request, encode
from moorage.schemas.frames import Load, Place, Resized
from moorage.schemas.gpu import Share
from moorage.system.device_environment import MPS_MEMORY_LIMIT
from moorage.testing.conformance.leader import ScriptedLeader
from moorage.worker.agent.agent import Agent
from moorage.worker.agent.run import Worker, start
from moorage.worker.drivers.process.driver import ProcessDriver
from moorage.worker.settings import WorkerSettings
from moorage.worker.sharing import attempt_processes, memory_guard
from moorage.worker.sharing.limiter import limits
from moorage.worker.sharing.limiter.controller import RATE
from tests.nvidia.limited import built
from tests.nvidia.stub import Board, Stub
from tests.system.worker.agent.test_agent_process import state_folder
from tests.waiting import until

GPU = "GPU-11111111-2222-3333-4444-555555555555"
OTHER = "GPU-22222222-2222-3333-4444-555555555555"
CONTEXT_MIB = 300
HOLD = str(Path(__file__).parents[3] / "release" / "gpu" / "hold_memory.py")


#: the guard looks so often in these tests
LOOK_S = 0.1


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_guard, "LOOK_S", LOOK_S)
    monkeypatch.setattr(memory_guard, "WELL_MIN", 2)


def name_of(job: str) -> AttemptName:
    return ("acme", job, 0, 1, 10)


class Scene:
    """A worker on the GPUs of a stub, and the leader that places jobs there."""

    def __init__(
        self, stub: Stub, leader: ScriptedLeader, running: Worker, url: str, settings: WorkerSettings, folder: Path
    ) -> None:
        self.stub = stub
        self.leader = leader
        self.running = running
        self.folder = folder
        self._url = url
        self._settings = settings

    @property
    def agent(self) -> Agent:
        return self.running.agents[0]

    async def restart(self) -> None:
        """Have another agent in place of this one; jobs go on."""
        await self.running.stop()
        await self.start()

    async def start(self) -> None:
        self.running = await start(self._settings, self._url)

    async def begin(
        self, job: str, mib: int, share_mib: int | None, *argv: str, mode: str = "time-slice", slot: int = 0, **env: str
    ) -> None:
        """Run a job that will hold so much beside its context.

        Of one that is over its grant without grace nothing else can be waited for than its end:
        the guard may end it before it could tell anyone that it holds its memory.
        """
        gpu: dict[str, Any] = {"sharing": mode}
        if mode == "mps":
            for which in ("mps_pipe_dir", "mps_log_dir"):
                (self.folder / which).mkdir()
                gpu[which] = str(self.folder / which)
        if share_mib is not None:
            gpu["share"] = {"memory_mib": share_mib}
        command = [*argv, sys.executable, HOLD, "hold", str(self.folder / job), str(mib)]
        await self.run(job, command, gpu, slot, **env)

    async def hold(self, job: str, mib: int, share_mib: int | None, *argv: str, **more: Any) -> int:
        """Begin it and wait until it holds that; returns the pid of the process that does."""
        await self.begin(job, mib, share_mib, *argv, **more)
        file = self.folder / job
        return int(await until(lambda: file.exists() and file.read_text(), what=f"{job} holds its memory"))

    async def run(self, job: str, argv: list[str], gpu: dict[str, Any], slot: int = 0, **env: str) -> None:
        """Place a job on a device of the stub."""
        run = {"argv": argv, "env": self.stub.environment | env, "grace_s": 20}
        place = Place(*name_of(job), [slot], gpu["sharing"], False, encode({"gpu": gpu, "run": run}))
        await self.leader.want("w1", place)

    def level(self, mode: str = "time-slice") -> str:
        """What the newest join told of the memory in a mode."""
        hello = self.leader.seat("w1").joins[-1].hello
        return hello.capabilities["process"].enforced[mode].memory

    async def looked(self, looks: int = 5) -> None:
        """Wait until the guard has looked so many times, at all that ran when it began the first of them."""
        well = self.agent.guard._well
        before = well["time-slice"] + 1  # one may be under way
        await until(lambda: well["time-slice"] >= before + looks, what=f"{looks} looks of the guard")

    async def loads(self, frames: int = 5) -> list[Load]:
        """Return the next frames in which the worker tells what its devices do."""
        loads = self.leader.seat("w1").loads
        before = len(loads)
        await until(lambda: len(loads) >= before + frames, what=f"{frames} frames of the load")
        return loads[before:]

    def exits(self) -> dict[str, str]:
        return {report.job: report.detail for report in self.leader.seat("w1").reports if report.kind == "exited"}


@contextlib.asynccontextmanager
async def scene(url: str, prefix: str, folder: Path, *boards: Board, **more: Any) -> AsyncIterator[Scene]:
    extra = more.pop("extra", ())
    stub = Stub(folder / "stub", *(boards or (Board(GPU), Board(OTHER))), extra=extra)
    async with ScriptedLeader(url, prefix) as leader, state_folder() as state:
        with stub.load():
            # the stub shows every process all its devices, so a fence would have the numbers count from another
            settings = WorkerSettings(
                state,
                "w1",
                prefix,
                modes=("exclusive", "mps", "time-slice"),
                load_s=0.2,
                leases=False,
                device_fence="off",
                **more,
            )
            one = Scene(stub, leader, await start(settings, url), url, settings, folder)
            try:
                await leader.joined("w1")
                yield one
                if one.running.host.failed.done():
                    one.running.host.failed.result()
            finally:
                await one.running.stop()


async def test_a_job_over_its_grant_ends_alone(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with scene(nats_url, unique, tmp_path, guard_grace_s=0.4) as one:
        assert one.level() == "guarded"
        fits = await one.hold("fits", 4000 - CONTEXT_MIB, 4000)
        await one.looked()
        await one.hold("greedy", 6000, 4000, "/bin/sh", "-c", "trap '' TERM; \"$@\" & wait; wait", "sh")
        exited = await one.leader.await_report("w1", "exited", name_of("greedy"))
        assert exited.detail == f"over-memory: it holds {6000 + CONTEXT_MIB} MiB of GPU 0, 4000 are granted"
        await one.leader.await_report("w1", "freed", name_of("greedy"))
        await one.looked()
        assert one.exits() == {"greedy": exited.detail}
        assert one.agent.attempts.held[name_of("fits")].phase == "running"
        os.kill(fits, signal.SIGKILL)
        exited = await one.leader.await_report("w1", "exited", name_of("fits"))
        told = "exit; neighbour-over-memory: another job on GPU 0 held more memory than its share"
        assert exited.detail == told, "it may have failed of that, and its user sees whose fault that was"


@pytest.mark.slow
async def test_a_job_that_runs_is_held_to_another_part_from_an_operators_order_on(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LIBRARY", built() / "limiter.bin")
    async with scene(nats_url, unique, tmp_path, guard_grace_s=0.4, limiter=True) as one:
        name, agent = name_of("late"), one.agent
        hello = one.leader.seat("w1").joins[-1].hello
        assert hello.capabilities["process"].resizes == {"time-slice": "live", "mps": "live next-attempt"}
        await one.hold("late", 1000, 4000)
        driver = agent.drivers["process"]
        assert isinstance(driver, ProcessDriver)
        assert driver.limits is not None
        segment = driver.limits.segments[name]
        place = agent.attempts.held[name].place

        async def resize(n: int, share: Share) -> None:
            body = encode(decode_request(place.body).with_part((share.memory_mib, share.compute_percent)))
            await one.leader.want("w1", resize=[msgspec.structs.replace(place, body=body, resized=n)])
            seat = one.leader.seat("w1")
            shown = [Resized(*name, n)]
            await until(
                lambda: seat.renewals[-1].resized == shown or seat.report("exited", name), what="it has the part"
            )

        await resize(7, Share(6000, 40))
        assert (segment.limit(0), segment.rate(0)) == (6000 << 20, RATE * 0.4)
        assert agent.journal.state.places[name].resized == 7, "the next agent knows it too"
        assert one.exits() == {}
        await resize(8, Share(1200, 40))
        await one.looked(10)
        assert one.exits() == {}, "it obeys, and gets no more"
        await resize(9, Share(700, 40))
        exited = await one.leader.await_report("w1", "exited", name)
        assert exited.detail == f"over-memory: it holds {1000 + CONTEXT_MIB} MiB of GPU 0, 700 are granted"
        name = name_of("client")
        pid = await one.hold("client", 1000, 4000, mode="mps", slot=1)
        segment, place = driver.limits.segments[name], agent.attempts.held[name].place
        assert f"{MPS_MEMORY_LIMIT}=".encode() not in Path(f"/proc/{pid}/environ").read_bytes(), "it could not grow"
        await resize(10, Share(6000, 40))
        assert (segment.limit(0), segment.rate(0)) == (6000 << 20, 0), "MPS has the compute"


@pytest.mark.parametrize("mode", ["time-slice", pytest.param("mps", marks=pytest.mark.slow)])
async def test_the_context_counts_inside_the_grant(nats_url: str, unique: str, tmp_path: Path, mode: str) -> None:
    async with scene(nats_url, unique, tmp_path, guard_grace_s=0.0) as one:
        await one.begin("one-more", 4000 - CONTEXT_MIB + 1, 4000, mode=mode)
        exited = await one.leader.await_report("w1", "exited", name_of("one-more"))
        assert exited.detail.startswith("over-memory: it holds 4001 MiB")


@pytest.mark.parametrize("groups", [True, False], ids=["cgroups", "no cgroups"])
async def test_a_job_holds_what_its_processes_hold_together_in_a_session_of_its_own_with_no_parent_too(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: bool
) -> None:
    if not groups:
        monkeypatch.setattr(attempt_processes, "_group", lambda pid: "")
    async with scene(nats_url, unique, tmp_path, guard_grace_s=0.0) as one:
        script = f'{sys.executable} {HOLD} hold {tmp_path}/first 1500 & exec "$@"'
        await one.begin("two", 1500, 3000, "/bin/sh", "-c", script, "sh")
        exited = await one.leader.await_report("w1", "exited", name_of("two"))
        assert exited.detail.startswith(f"over-memory: it holds {2 * (1500 + CONTEXT_MIB)} MiB")
        await one.begin("away", 5000, 3000, "/bin/sh", "-c", '(setsid "$@" &); sleep 600', "sh", slot=1)
        exited = await one.leader.await_report("w1", "exited", name_of("away"))
        assert exited.detail.startswith("over-memory: ")


@pytest.mark.parametrize("groups", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["cgroups", "no cgroups"])
async def test_a_process_that_hides_whose_it_is_is_found_by_its_cgroup_or_killed_alone(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: bool
) -> None:
    """A session of its own, no parent of the job, and none of the job's variables."""
    if not groups:
        monkeypatch.setattr(attempt_processes, "_group", lambda pid: "")
    async with scene(nats_url, unique, tmp_path, guard_grace_s=0.4) as one:
        await one.hold("neighbour", 1000, 3000)
        variables = " ".join(f"{key}={value}" for key, value in one.stub.environment.items())
        script = f'(setsid env -i {variables} CUDA_VISIBLE_DEVICES=0 "$@" &) ; sleep 600'
        pid = await one.hold("hides", 1000, 3000, "/bin/sh", "-c", script, "sh")
        whose = one.agent.drivers["process"].attempts_of([pid]).get(pid)
        assert groups or whose is None
        if whose is None:
            await until(lambda: not os.path.exists(f"/proc/{pid}"), what="it is killed alone")
        else:
            await one.looked(10)
            assert os.path.exists(f"/proc/{pid}")
        assert one.exits() == {}


async def test_an_old_mps_server_owns_the_memory_and_the_level_of_mps_alone_says_so(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    board = Board(GPU, more={"major": 6, "minor": 1})
    async with scene(nats_url, unique, tmp_path, board) as one:
        assert (one.level("mps"), one.level("time-slice")) == ("advisory", "guarded")


async def test_an_mps_server_that_owns_the_memory_against_all_promises_lowers_the_level(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(nats_url, unique, tmp_path, extra=("old_mps pid=1",)) as one:
        assert one.level("mps") == "guarded"
        await one.hold("client", 500, 2000, mode="mps")
        await until(lambda: one.level("mps") == "advisory", what="the level falls")
        assert one.level("time-slice") == "guarded"


async def test_a_foreign_process_is_seen_on_a_leased_device(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with scene(nats_url, unique, tmp_path) as one:
        loads = one.leader.seat("w1").loads
        await one.hold("shares", 1000, 2000)
        await one.hold("alone", 1000, None, mode="exclusive", slot=1)
        shown = {slot.foreign for load in await one.loads() for slot in load.gpu_pool}
        assert shown == {""}, "a job's own processes are none"
        file = tmp_path / "foreign"
        environment = os.environ | one.stub.environment | {"CUDA_VISIBLE_DEVICES": "1"}
        foreign = await asyncio.create_subprocess_exec(sys.executable, HOLD, "hold", str(file), "100", env=environment)
        try:
            await until(lambda: loads[-1].gpu_pool[1].foreign, what="the foreign process seen")
            assert loads[-1].gpu_pool[1].foreign.startswith(f"pid {foreign.pid} python")
            assert loads[-1].gpu_pool[0].foreign == ""
        finally:
            foreign.kill()
            await foreign.wait()
        await until(lambda: not loads[-1].gpu_pool[1].foreign, what="and gone")


async def test_processes_of_another_pid_namespace_lower_the_level_and_no_job_is_spared(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with scene(nats_url, unique, tmp_path, guard_grace_s=0.0) as one:
        await one.hold("shares", 1000, 2000)
        one.stub.boards[0].set(pids={2**22 + 1: 500})  # above the kernel's greatest pid
        await until(lambda: one.level() == "advisory", what="the level falls")
        assert "PID namespace" in one.agent.guard.why_not["time-slice"]
        await one.begin("greedy", 5000, 2000)
        exited = await one.leader.await_report("w1", "exited", name_of("greedy"))
        assert exited.detail.startswith("over-memory: "), "what can be told is ended all the same"
