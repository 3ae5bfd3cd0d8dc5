"""Dividing a GPU into other MIG slices, through the real pynvml, over a stub of NVML in C whose layouts can be set."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moorage.schemas.errors import Refused
from moorage.worker.devices.readers.mig_layout import MigGpu, parse_layout
from moorage.worker.devices.readers.nvml import open_nvml
from tests.nvidia.stub import CALLS, Board, Stub
from tests.waiting import until

GPU = "GPU-11111111-2222-3333-4444-555555555555"
FORMER = ["1g.10gb", "3g.40gb"]
HOLD = str(Path(__file__).parents[3] / "release" / "gpu" / "hold_memory.py")
#: changes a layout by its own, so that it can be killed meanwhile
CHANGES = """
import sys, pynvml
from moorage.worker.devices.readers.mig_layout import MigGpu, parse_layout
pynvml.nvmlInit()
MigGpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)).change(parse_layout(sys.argv[1]))
"""


def opened() -> MigGpu:
    import pynvml

    pynvml.nvmlInit()
    return MigGpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(0))


def board(**more: int) -> Board:
    return Board(GPU, more={"divides": 1, **more})


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("1g.10gb", ["1g.10gb"]),
        ("3g.40gb,4x1g.10gb", ["3g.40gb", *["1g.10gb"] * 4]),
        ("2x1g.10gb+me, 1g.20gb", ["1g.10gb+me", "1g.10gb+me", "1g.20gb"]),
        ("off", []),
    ],
)
def test_a_layout_is_profiles_with_counts(text: str, layout: list[str]) -> None:
    assert parse_layout(text) == layout


@pytest.mark.parametrize("text", ["", "1g", "0x1g.10gb", "1g.10gb,", "99x1g.10gb", "on", "1g.10gb;rm"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="not a MIG layout"):
        parse_layout(text)


def test_a_gpu_is_divided_divided_otherwise_and_whole_again(tmp_path: Path) -> None:
    with Stub(tmp_path, board()).load():
        gpu = opened()
        assert gpu.layout() == []
        assert gpu.change(FORMER), "it comes into MIG mode"
        assert gpu.layout() == FORMER
        assert not gpu.change(FORMER), "it is so already"
        assert gpu.change(["1g.10gb"] * 7)
        assert gpu.layout() == ["1g.10gb"] * 7
        assert gpu.change([])
        assert (gpu.layout(), gpu._is_on(), gpu.change([])) == ([], False, False)


async def test_the_inventory_lists_what_was_made(tmp_path: Path) -> None:
    with Stub(tmp_path, board()).load():
        opened().change(["3g.40gb", "2g.20gb", "1g.10gb"])
        found = await open_nvml()
        assert [(each.profile, each.memory_mib) for each in found.devices()] == [
            ("3g.40gb", 40192), ("2g.20gb", 20096), ("1g.10gb", 9856),
        ]  # fmt: skip
        found.close()


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (["1g.5gb"], "no such slices"),
        (["3g.40gb"] * 3, "no such slices"),
        (["7g.80gb", "1g.10gb"], "making 7g.80gb,1g.10gb"),
        (["4g.40gb", "3g.40gb", "1g.10gb"], "making"),
    ],
)
def test_a_layout_that_does_not_fit_leaves_the_former_one(layout: list[str], why: str, tmp_path: Path) -> None:
    with Stub(tmp_path, board()).load():
        gpu = opened()
        gpu.change(FORMER)
        with pytest.raises(Refused, match=why):
            gpu.change(layout)
        assert gpu.layout() == FORMER


def test_a_slice_that_a_process_uses_is_not_destroyed_and_the_others_come_back(tmp_path: Path) -> None:
    stub = Stub(tmp_path / "stub", board())
    with stub.load():
        gpu = opened()
        gpu.change(["3g.40gb", "2g.20gb", "1g.10gb"])
        held = stub.folder / "held"
        with subprocess.Popen(["sleep", "600"]) as process:
            (held / f"{process.pid}.MIG-1-{GPU}").write_text("1000 0\n")
            with pytest.raises(Refused, match="destroying") as refused:
                gpu.change(["7g.80gb"])
            assert "nvidia-smi" in refused.value.problem.next
            process.kill()
        assert gpu.layout() == ["1g.10gb", "2g.20gb", "3g.40gb"]


def test_an_error_in_a_look_at_the_gpu_is_refused(tmp_path: Path) -> None:
    stub = Stub(tmp_path, board())
    with stub.load():
        gpu = opened()
        gpu.change(FORMER)
        stub.extra = (f"fail call=nvmlDeviceGetGpuInstances uuid={GPU} code=15",)
        stub.write()
        for look in (gpu.layout, gpu._count, lambda: gpu.change(["7g.80gb"])):
            with pytest.raises(Refused, match="NVML refused listing the slices"):
                look()
        stub.extra = (f"fail call=nvmlDeviceGetGpuInstanceProfileInfoV uuid={GPU} code=15",)
        stub.write()
        with pytest.raises(Refused, match="NVML refused listing the GPU's profiles"):
            opened()


def test_what_was_refused_is_told_though_the_former_slices_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = Stub(tmp_path, board())
    with stub.load():
        gpu = opened()
        gpu.change(FORMER)
        create = gpu._create_all

        def then_fails(layout: list[str]) -> None:
            stub.extra = (f"fail call=nvmlDeviceGetGpuInstances uuid={GPU} code=15",)
            stub.write()
            create(layout)

        monkeypatch.setattr(gpu, "_create_all", then_fails)
        with pytest.raises(Refused, match="making 7g"):
            gpu.change(["7g.80gb", "1g.10gb"])


def test_a_slice_without_a_whole_compute_instance_is_not_made_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Stub(tmp_path, board()).load():
        gpu = opened()
        gpu.change(FORMER)
        full = gpu._compute_profiles
        monkeypatch.setattr(gpu, "_compute_profiles", lambda at: [each for each in full(at) if each.sliceCount < 7])
        with pytest.raises(Refused, match="no compute instance that has all of a slice 7g"):
            gpu.change(["7g.80gb"])
        assert gpu.layout() == FORMER


def test_an_instance_without_its_slice_is_removed(tmp_path: Path) -> None:
    with Stub(tmp_path, board()).load():
        gpu = opened()
        gpu.change(["3g.40gb"])
        gpu._api.nvmlDeviceCreateGpuInstance(gpu._raw, gpu.profiles["1g.10gb"].id)
        assert (gpu.layout(), gpu._count()) == (["3g.40gb"], 2)
        assert gpu.change(["3g.40gb"])
        assert (gpu.layout(), gpu._count()) == (["3g.40gb"], 1)


def test_a_gpu_that_takes_another_mode_at_its_reset_alone_says_so(tmp_path: Path) -> None:
    with Stub(tmp_path, board(divides=2)).load(), pytest.raises(Refused, match="next reset"):
        opened().change(FORMER)


def test_a_gpu_that_cannot_be_divided(tmp_path: Path) -> None:
    with Stub(tmp_path, Board(GPU)).load():
        gpu = opened()
        assert (gpu.layout(), gpu.change([])) == ([], False)
        with pytest.raises(Refused, match="cannot be divided"):
            gpu.change(["1g.10gb"])


@pytest.mark.slow
@pytest.mark.parametrize("call", ["nvmlDeviceCreateGpuInstance", "nvmlGpuInstanceCreateComputeInstance"])
async def test_a_change_that_is_killed_in_the_middle_is_whole_when_it_is_made_again(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CALLS, "create", (call,))
    stub = Stub(tmp_path, board())
    with stub.load():
        gpu = opened()
        gpu.change(FORMER)
        stub.boards[0].set(hangs={"create"})
        before = stub.calls(call, GPU)
        environment: dict[str, Any] = {**os.environ, **stub.environment}
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", CHANGES, "2x3g.40gb", env=environment)
        await until(lambda: stub.calls(call, GPU) > before, what="it hangs in the middle")
        process.kill()
        await process.wait()
        stub.boards[0].set(hangs=set())
        assert gpu.layout() == []
        assert gpu.change(["3g.40gb"] * 2)
        assert gpu.layout() == ["3g.40gb"] * 2
