"""The compute mode of GPUs that jobs share: set, restored, and after a kill."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from moorage.worker.devices.readers.nvml import open_nvml
from moorage.worker.sharing.compute_modes import DEFAULT, EXCLUSIVE_PROCESS, FILE_NAME, ComputeModes, ModeFault
from tests.nvidia.stub import Board, Stub
from tests.system.worker.sharing.test_memory_guard import GPU, OTHER, name_of, scene
from tests.waiting import until

PROHIBITED = 2  # nvml.h: NVML_COMPUTEMODE_PROHIBITED
BOTH = [GPU, OTHER]
KILLED = """
import asyncio, sys
from pathlib import Path
from moorage.worker.sharing.compute_modes import ComputeModes
modes = ComputeModes(Path(sys.argv[1]), "boot", shares=True)
asyncio.run(modes.open(sys.argv[2:], has_mps=False))
print("open", flush=True)
"""


def mode_of(uuid: str) -> int:
    import pynvml

    return int(pynvml.nvmlDeviceGetComputeMode(pynvml.nvmlDeviceGetHandleByUUID(uuid)))


def exclusive(uuid: str = GPU) -> Board:
    return Board(uuid, more={"compute": EXCLUSIVE_PROCESS})


class Modes:
    def __init__(self, folder: Path) -> None:
        self.file = folder / FILE_NAME

    def made(self, *, shares: bool = True, boot: str = "boot") -> ComputeModes:
        return ComputeModes(self.file, boot, shares=shares)


async def test_a_mode_in_which_jobs_cannot_share_is_set_and_restored(tmp_path: Path) -> None:
    with Stub(tmp_path / "stub", exclusive(), Board(OTHER)).load():
        inventory, modes = await open_nvml(), Modes(tmp_path)
        one = modes.made()
        await one.open(BOTH, has_mps=False)
        assert (mode_of(GPU), modes.file.exists()) == (0, True)
        await one.close()
        assert (mode_of(GPU), mode_of(OTHER), modes.file.exists()) == (EXCLUSIVE_PROCESS, 0, False)
        inventory.close()


async def test_what_is_changed_is_in_the_file_before_it_is_changed(tmp_path: Path) -> None:
    board = exclusive()
    board.hangs = {"set_compute_mode"}
    with Stub(tmp_path / "stub", board, Board(OTHER)).load():
        inventory, modes = await open_nvml(), Modes(tmp_path)
        one = modes.made()
        opening = asyncio.create_task(one.open(BOTH, has_mps=False))
        await until(modes.file.exists, what="it is in the file")
        assert mode_of(GPU) == EXCLUSIVE_PROCESS
        board.set(hangs=set())
        await opening
        await one.close()
        assert mode_of(GPU) == EXCLUSIVE_PROCESS
        inventory.close()


async def test_a_worker_that_does_not_share_changes_nothing(tmp_path: Path) -> None:
    with Stub(tmp_path / "stub", exclusive(), Board(OTHER)).load():
        inventory, modes = await open_nvml(), Modes(tmp_path)
        await modes.made(shares=False).open(BOTH, has_mps=False)
        assert (mode_of(GPU), modes.file.exists()) == (EXCLUSIVE_PROCESS, False)
        inventory.close()


@pytest.mark.slow
@pytest.mark.parametrize(("shares", "boot", "left"), [(True, "boot", 3), (False, "boot", 3), (True, "next", 0)])
async def test_the_agent_after_one_that_was_killed_restores_what_that_changed(
    shares: bool, boot: str, left: int, tmp_path: Path
) -> None:
    stub = Stub(tmp_path / "stub", exclusive(), Board(OTHER))
    modes = Modes(tmp_path)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, str(modes.file), GPU, OTHER, env=os.environ | stub.environment,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert await process.stdout.readline() == b"open\n"
    await process.wait()
    with stub.load():
        inventory = await open_nvml()
        assert mode_of(GPU) == 0
        one = modes.made(shares=shares, boot=boot)
        await one.open(BOTH, has_mps=False)
        await one.close()
        assert mode_of(GPU) == left, "a mode is not kept over a boot, and is not restored after one"
        inventory.close()


@pytest.mark.parametrize("what", ["compute_mode", "set_compute_mode"])
async def test_a_driver_that_cannot_is_left_alone(what: str, tmp_path: Path) -> None:
    board = exclusive()
    board.errors = {what: 3}
    with Stub(tmp_path / "stub", board, Board(OTHER)).load():
        inventory, modes = await open_nvml(), Modes(tmp_path)
        one = modes.made()
        await one.open(BOTH, has_mps=False)
        await one.close()
        assert not modes.file.exists()
        board.set(errors={})
        assert mode_of(GPU) == EXCLUSIVE_PROCESS
        inventory.close()


async def test_a_mode_that_an_operator_chose_since_stays(tmp_path: Path) -> None:
    import pynvml

    with Stub(tmp_path / "stub", exclusive(), Board(OTHER)).load():
        inventory, modes = await open_nvml(), Modes(tmp_path)
        one = modes.made()
        await one.open(BOTH, has_mps=False)
        pynvml.nvmlDeviceSetComputeMode(pynvml.nvmlDeviceGetHandleByUUID(GPU), 2)
        await one.close()
        assert (mode_of(GPU), modes.file.exists()) == (2, False)
        inventory.close()


@pytest.mark.parametrize("shares", [True, False])
async def test_a_daemons_gpu_comes_back_for_sharers_and_at_last_as_it_was(shares: bool, tmp_path: Path) -> None:
    """The one file has what to put back of both: of MPS daemons, and of time-slice."""
    with Stub(tmp_path / "stub", Board(GPU, more={"compute": PROHIBITED}), Board(OTHER)).load():
        inventory, modes = await open_nvml(), Modes(tmp_path)
        first = modes.made(shares=shares)
        await first.open(BOTH, has_mps=True)
        between = DEFAULT if shares else PROHIBITED
        assert mode_of(GPU) == between
        for uuid in BOTH:
            await first.take(uuid)
        await first.close()
        assert (mode_of(GPU), mode_of(OTHER)) == (EXCLUSIVE_PROCESS, EXCLUSIVE_PROCESS), "daemons have them still"
        one = modes.made(shares=shares)
        await one.open(BOTH, has_mps=True)
        assert one.of_mps == BOTH
        assert (mode_of(GPU), mode_of(OTHER)) == (EXCLUSIVE_PROCESS, EXCLUSIVE_PROCESS), "the next agent leaves them"
        for uuid in BOTH:
            await one.give_back(uuid)
        assert (mode_of(GPU), mode_of(OTHER), one.of_mps) == (between, DEFAULT, [])
        await one.close()
        assert (mode_of(GPU), mode_of(OTHER), modes.file.exists()) == (PROHIBITED, DEFAULT, False)
        inventory.close()


async def test_what_daemons_had_is_put_back_by_a_worker_that_runs_none(tmp_path: Path) -> None:
    with Stub(tmp_path / "stub", Board(GPU, more={"compute": PROHIBITED}), Board(OTHER)).load():
        inventory, modes = await open_nvml(), Modes(tmp_path)
        await modes.made(shares=False).take(GPU)
        assert mode_of(GPU) == EXCLUSIVE_PROCESS
        await modes.made(shares=False).open(BOTH, has_mps=False)
        assert (mode_of(GPU), modes.file.exists()) == (PROHIBITED, False)
        inventory.close()


async def test_a_gpu_whose_mode_cannot_be_put_back_is_not_forgotten(tmp_path: Path) -> None:
    board = Board(GPU)
    with Stub(tmp_path / "stub", board, Board(OTHER)).load():
        inventory, modes = await open_nvml(), Modes(tmp_path)
        one = modes.made(shares=False)
        await one.take(GPU)
        board.set(errors={"set_compute_mode": 4})
        with pytest.raises(ModeFault):
            await one.give_back(GPU)
        assert modes.made(shares=False).of_mps == [GPU]
        board.set(errors={})
        await one.give_back(GPU)
        assert (mode_of(GPU), modes.file.exists()) == (DEFAULT, False)
        inventory.close()


@pytest.mark.slow
async def test_a_worker_restores_the_mode_as_it_stops_but_not_under_jobs_that_share(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    for job, left in (("", EXCLUSIVE_PROCESS), ("shares", 0)):
        folder = tmp_path / (job or "none")
        folder.mkdir()
        kept = {"slot_modes": {"1": "exclusive mps"}}
        async with scene(nats_url, unique + job, folder, exclusive(), exclusive(OTHER), **kept) as one:
            assert mode_of(GPU) == 0
            assert mode_of(OTHER) == EXCLUSIVE_PROCESS, "no jobs share it by time-slice"
            if job:
                await one.hold(job, 100, 1000)
                await until(lambda: one.agent.attempts.held[name_of("shares")].phase == "running", what="it runs")
        assert (folder / "stub" / f"mode.{GPU}").read_text() == str(left)
