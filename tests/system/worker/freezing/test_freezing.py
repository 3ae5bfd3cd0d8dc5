"""Freezing of processes that use a GPU: the helper and its journal over real processes, with the stub of libcuda."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec
import pytest

from moorage.schemas.attempt import AttemptName
from moorage.system.proctree import MARK_NAMES, read_process
from moorage.worker.devices.readers.base import HeldUnknown
from moorage.worker.freezing import cuda, freezer
from moorage.worker.freezing.freezer import Freezer
from tests.nvidia.stub import Board, Stub
from tests.waiting import until

GPU = "GPU-11111111-2222-3333-4444-555555555555"
NAME: AttemptName = ("acme", "train", 0, 1, 10)
HOLD = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
print("holds", flush=True)
for line in sys.stdin:
    cuda.cuCtxSetCurrent(context)
    pointer = ctypes.c_ulonglong()
    print(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(int(line))), flush=True)
"""


class Scene:
    """Processes that hold memory of one GPU, and a freezer whose attempt they are."""

    def __init__(self, folder: Path) -> None:
        self.stub = Stub(folder / "gpu", Board(GPU))
        self.file = folder / "frozen.json"
        self.freezer = self.another()
        self.children: list[subprocess.Popen[str]] = []

    def another(self, root: Path = Path("/")) -> Freezer:
        """Return the freezer of another agent of this worker."""
        return Freezer(self.file, self.held, root)

    def hold(self, count: int = 1) -> list[int]:
        for _ in range(count):
            child = subprocess.Popen(
                [sys.executable, "-IS", "-c", HOLD],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env=self.stub.environment | dict(zip(MARK_NAMES, map(str, NAME), strict=True)),
            )  # fmt: skip
            self.children.append(child)
            assert child.stdout is not None
            assert child.stdout.readline() == "holds\n"
        return [child.pid for child in self.children]

    async def held(self, slot: int) -> dict[int, int]:
        found = [path.name.split(".") for path in (self.stub.folder / "held").iterdir()]
        return {int(pid): 300 for pid, *_ in found}

    def attempts_of(self, pids: Collection[int]) -> dict[int, AttemptName | None]:
        return {pid: NAME for pid in pids if pid in [child.pid for child in self.children]}

    async def take_over(self, living: Collection[AttemptName]) -> tuple[set[AttemptName], dict[AttemptName, str]]:
        """Have another agent take over: what is frozen then, and what is broken, and why."""
        self.freezer = self.another()
        self.freezer.begin(living)
        found = {name: await self.freezer.settle(name) for name in self.freezer.unsettled}
        frozen = {name for name, (outcome, _) in found.items() if outcome == "frozen"}
        return frozen, {name: why for name, (outcome, why) in found.items() if outcome == "broken"}

    async def freeze(self) -> tuple[str, str]:
        return await self.freezer.freeze(NAME, [0], self.attempts_of)

    def states(self) -> list[int]:
        files = [self.stub.folder / f"frozen.{child.pid}" for child in self.children]
        return [int(file.read_text()) if file.exists() else 0 for file in files]

    def calls(self) -> list[str]:
        """Return the calls that changed a process, with its place among the children."""
        pids = [str(child.pid) for child in self.children]
        rows = [line.split() for line in (self.stub.folder / "calls").read_text().splitlines()]
        return [f"{row[0]} {pids.index(row[1])}" for row in rows if row[0] != "GetState" and row[1:2]]

    def put(self, pid: int, state: int) -> None:
        """Have the driver say that a process is in this state."""
        fresh = self.stub.folder / f"fresh.{pid}"
        fresh.write_text(str(state))
        fresh.rename(self.stub.folder / f"frozen.{pid}")

    def asked(self, pid: int) -> int:
        return (self.stub.folder / "calls").read_text().splitlines().count(f"GetState {pid}")

    def fail(self, *lines: str) -> None:
        self.stub.extra = lines
        self.stub.write()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    (tmp_path / "gpu").mkdir()
    found = Scene(tmp_path)
    monkeypatch.setattr(cuda, "LIBRARY", str(found.stub.libraries / "libcuda.so.1"))
    monkeypatch.setenv("STUB_NVIDIA", str(found.stub.folder))
    found.freezer = found.another()
    try:
        yield found
    finally:
        for child in found.children:
            child.kill()
            child.communicate()


async def test_the_memory_of_a_frozen_process_is_away_and_comes_back_with_it(scene: Scene) -> None:
    scene.hold()
    assert await scene.freeze() == ("frozen", "")
    assert scene.states() == [cuda.CHECKPOINTED]
    assert await scene.held(0) == {}
    assert await scene.freezer.resume(NAME) == ("running", "")
    assert scene.states() == [cuda.RUNNING]
    assert len(await scene.held(0)) == 1
    assert not scene.file.exists()


async def test_several_processes_of_one_attempt_on_gpus_are_not_frozen(scene: Scene) -> None:
    """Calls of one wait for another that is locked, as with NCCL: freezing them hung, and so did resuming them."""
    scene.hold(2)
    outcome, why = await scene.freeze()
    assert (outcome, "2 of its processes hold GPUs" in why) == ("running", True)
    assert scene.calls() == []
    assert not scene.file.exists()


async def test_of_several_processes_a_locked_one_is_unlocked_before_another_is_asked(
    scene: Scene,
) -> None:
    """With NCCL a call on one waits while another is locked, so whoever asks all of them first waits for ever."""
    first, second = scene.hold(2)
    found = [read_process(pid) for pid in (first, second)]
    processes = [(process.pid, process.start_ticks) for process in found if process is not None]
    scene.put(first, cuda.LOCKED)  # by a helper that hung at the second one, and was killed
    scene.file.write_bytes(msgspec.json.encode([(NAME, processes, False)]))
    scene.fail("checkpoint-ring on=1")
    assert await scene.take_over([NAME]) == (set(), {})
    assert scene.states() == [cuda.RUNNING] * 2
    assert scene.calls() == ["Unlock 0"]


async def test_a_frozen_process_works_on_once_it_is_resumed(scene: Scene) -> None:
    scene.hold()
    await scene.freeze()
    child = scene.children[0]
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("1048576\n")
    child.stdin.flush()
    await scene.freezer.resume(NAME)
    assert await asyncio.to_thread(child.stdout.readline) == "0\n"
    assert len(await scene.held(0)) == 1


@pytest.mark.parametrize("call", ["Lock", "Checkpoint"])
async def test_what_fails_is_undone(scene: Scene, call: str) -> None:
    (pid,) = scene.hold()
    scene.fail(f"checkpoint-fail call={call} code=801 pid={pid}")
    outcome, why = await scene.freeze()
    assert (outcome, scene.states()) == ("running", [cuda.RUNNING])
    assert "801" in why
    assert call.lower() in why
    assert len(await scene.held(0)) == 1
    assert not scene.file.exists()


async def test_a_process_whose_kernel_outlasts_the_lock_runs_on(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a kernel of 12 s a lock of 3 s answered 600 on an H200, 2026-11-27."""
    monkeypatch.setattr(freezer, "LOCK_S", 0.2)
    (pid,) = scene.hold()
    scene.fail(f"kernel pid={pid}")
    outcome, why = await scene.freeze()
    assert (outcome, scene.states(), "lock" in why, "600" in why) == ("running", [cuda.RUNNING], True, True)
    assert len(await scene.held(0)) == 1


@pytest.mark.parametrize("call", ["Checkpoint", "Restore", "Unlock"])
async def test_a_process_that_cannot_run_on_is_told(scene: Scene, call: str) -> None:
    scene.hold()
    if call != "Checkpoint":
        await scene.freeze()
    scene.fail(f"checkpoint-fail call={call} code=999 breaks={int(call == 'Checkpoint')}")
    outcome, why = await (scene.freeze() if call == "Checkpoint" else scene.freezer.resume(NAME))
    assert outcome == "broken"
    assert "pid" in why


@pytest.mark.slow
async def test_a_helper_that_gives_no_answer_is_ended_and_what_it_did_is_undone(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.hold()
    scene.fail("checkpoint-hang call=Checkpoint")
    monkeypatch.setattr(freezer, "HELPER_S", 8.0)
    outcome, why = await scene.freeze()
    assert (outcome, scene.states()) == ("running", [cuda.RUNNING])
    assert "did not freeze" in why


@pytest.mark.slow
async def test_while_the_driver_hangs_at_one_attempt_another_is_frozen(scene: Scene) -> None:
    """Its helper waited until the other one was killed, and was killed with it: the job was lost."""
    first, second = scene.hold(2)
    scene.fail(f"checkpoint-hang call=Checkpoint pid={first}")

    def begin(pid: int, fence: int) -> asyncio.Task[tuple[str, str]]:
        name: AttemptName = ("acme", "train", 0, 1, fence)
        return asyncio.create_task(
            scene.freezer.freeze(name, [0], lambda pids: {each: name for each in pids if each == pid})
        )

    hangs = begin(first, 10)
    await until(lambda: "Checkpoint 0" in scene.calls())
    assert await begin(second, 11) == ("frozen", "")
    hangs.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await hangs


async def test_what_a_killed_agent_had_begun_runs_on_and_what_it_had_frozen_stays_frozen(scene: Scene) -> None:
    scene.hold()
    scene.fail("checkpoint-hang call=Checkpoint")
    begun = asyncio.create_task(scene.freeze())
    await until(lambda: "Checkpoint 0" in scene.calls())
    kept = scene.file.read_bytes()
    begun.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await begun
    scene.file.write_bytes(kept)  # a killed agent would not have tidied
    scene.fail()
    assert await scene.take_over([NAME]) == (set(), {})
    assert scene.states() == [cuda.RUNNING]
    assert (await scene.freeze())[0] == "frozen"
    assert await scene.take_over([NAME]) == ({NAME}, {})
    assert scene.states() == [cuda.CHECKPOINTED]
    assert await scene.freezer.resume(NAME) == ("running", "")
    assert scene.states() == [cuda.RUNNING]


async def test_an_attempt_that_is_over_is_forgotten(scene: Scene) -> None:
    scene.hold()
    await scene.freeze()
    assert await scene.take_over([]) == (set(), {})
    assert not scene.file.exists()


async def test_where_the_file_is_damaged_what_is_frozen_is_resumed_and_the_file_kept(scene: Scene) -> None:
    """It stayed frozen for ever: as a job that runs, it was never resumed."""
    scene.hold()
    await scene.freeze()
    scene.file.write_bytes(b"[[")
    assert await scene.take_over([NAME]) == (set(), {})
    assert scene.states() == [cuda.RUNNING]
    assert not scene.file.exists()
    assert scene.file.with_name("frozen.json.damaged").read_bytes() == b"[["


async def test_where_the_file_is_damaged_a_job_that_cannot_be_resumed_is_told_and_one_without_cuda_runs_on(
    scene: Scene,
) -> None:
    (pid,) = scene.hold()
    await scene.freeze()
    scene.file.write_bytes(b"[[")
    scene.fail(f"checkpoint-fail call=Restore code=2 pid={pid}")
    frozen, broken = await scene.take_over([NAME])
    assert (frozen, list(broken)) == (set(), [NAME])
    scene.file.write_bytes(b"[[")
    scene.fail(f"checkpoint-fail call=GetState code=201 pid={pid}")
    assert await scene.take_over([NAME]) == (set(), {})


async def test_a_full_disk_stops_no_start(scene: Scene) -> None:
    scene.hold()
    await scene.freeze()
    scene.file.with_name(".frozen.json.new").mkdir()
    assert await scene.take_over([NAME]) == ({NAME}, {})


async def test_a_process_that_took_a_pid_over_is_left_alone(scene: Scene) -> None:
    (pid,) = scene.hold()
    process = read_process(pid)
    assert process is not None
    asked = {"do": "freeze", "processes": [[pid, process.start_ticks + 1]], "lock_ms": 1, "library": cuda.LIBRARY}
    assert cuda.carry_out(asked) == ("running", "its processes have ended")
    assert scene.calls() == []


async def test_what_does_not_fit_is_not_frozen(scene: Scene) -> None:
    """It holds 300 MiB; what fits is in test_room.py."""
    scene.hold()
    root = scene.file.with_name("root")
    (root / "proc").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text("MemAvailable: 1355775 kB\n")
    scene.freezer = scene.another(root)
    outcome, why = await scene.freeze()
    assert (outcome, scene.calls(), scene.file.exists()) == ("running", [], False)
    assert why.startswith("no-ram: its 300 MiB")


async def test_an_attempt_without_a_process_on_its_gpu_is_not_frozen(scene: Scene) -> None:
    assert await scene.freeze() == ("running", "none of its processes holds a GPU")


async def test_where_the_driver_does_not_tell_the_processes_nothing_is_frozen(scene: Scene) -> None:
    async def unknown(slot: int) -> dict[int, int]:
        raise HeldUnknown("no answer")

    scene.hold()
    outcome, why = await Freezer(scene.file, unknown).freeze(NAME, [0], scene.attempts_of)
    assert (outcome, "no answer" in why, scene.calls()) == ("running", True, [])


async def test_where_the_journal_cannot_be_written_nothing_is_frozen(scene: Scene) -> None:
    scene.hold()
    scene.file.parent.joinpath(".frozen.json.new").mkdir()
    outcome, why = await scene.freeze()
    assert (outcome, "cannot be written" in why, scene.calls()) == ("running", True, [])


def test_an_older_driver_is_refused_with_its_reason(scene: Scene) -> None:
    assert cuda.library_fault(cuda.LIBRARY) == ""
    assert "there is no libnothing.so" in cuda.library_fault("libnothing.so")
    assert "570" in cuda.library_fault(str(scene.stub.libraries / "libnvidia-ml.so.1"))
    asked = {"processes": [], "lock_ms": 1, "library": "libnothing.so"}
    assert cuda.carry_out(asked | {"do": "freeze"})[0] == "running"
    assert cuda.carry_out(asked | {"do": "resume"})[0] == "broken"


@pytest.mark.parametrize(("passing", "then"), [(cuda.CHECKPOINTING, cuda.CHECKPOINTED), (cuda.RESTORING, cuda.LOCKED)])
async def test_a_process_on_its_way_is_waited_for_and_resumed(scene: Scene, passing: int, then: int) -> None:
    """A newer driver goes on with the call of a helper that was killed, and says so."""
    (pid,) = scene.hold()
    assert (await scene.freeze())[0] == "frozen"
    scene.put(pid, passing)
    before = scene.asked(pid)
    resuming = asyncio.create_task(scene.freezer.resume(NAME))
    await until(lambda: scene.asked(pid) > before + 1, what="it is asked again")
    scene.put(pid, then)
    assert await resuming == ("running", "")
    assert scene.states() == [cuda.RUNNING]


@pytest.mark.parametrize("state", [cuda.CHECKPOINTING, cuda.RESTORING, 6])
async def test_a_process_that_does_not_run_in_the_end_is_broken(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, state: int
) -> None:
    (pid,) = scene.hold()
    process = read_process(pid)
    assert process is not None
    monkeypatch.setattr(cuda, "PASSING_S", 0.0)
    scene.put(pid, state)
    asked = {"do": "resume", "processes": [[pid, process.start_ticks]], "lock_ms": 1, "library": cuda.LIBRARY}
    assert cuda.carry_out(asked) == (
        "broken", f"the driver says that pid {pid} does not run, but is in its state {state}"
    )  # fmt: skip


async def test_what_the_journal_cannot_say_is_frozen_runs_on(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next agent would resume it while another job has its devices."""
    scene.hold()
    write, written = Freezer._write, 0

    def once(freezer: Freezer) -> None:
        nonlocal written
        written += 1
        if written == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(freezer)

    monkeypatch.setattr(Freezer, "_write", once)
    outcome, why = await scene.freeze()
    assert (outcome, "No space left" in why) == ("running", True)
    assert not scene.file.exists()


async def test_what_was_resumed_is_not_frozen_to_the_next_agent_where_the_journal_could_not_say_so(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job would get the devices of a job that runs."""

    def full(freezer: Freezer) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    scene.hold()
    assert await scene.freeze() == ("frozen", "")
    with monkeypatch.context() as patched:
        patched.setattr(Freezer, "_write", full)
        assert await scene.freezer.resume(NAME) == ("running", "")
    assert scene.file.exists()
    assert await scene.take_over([NAME]) == (set(), {})
    assert scene.states() == [cuda.RUNNING]
    assert not scene.file.exists()


async def test_what_the_driver_cannot_tell_of_stays_frozen(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.hold()
    await scene.freeze()
    scene.fail("checkpoint-fail call=GetState code=999")
    assert await scene.take_over([NAME]) == ({NAME}, {})
    monkeypatch.setattr(cuda, "LIBRARY", "libnothing.so")
    assert await scene.take_over([NAME]) == ({NAME}, {})
    assert scene.file.exists()
