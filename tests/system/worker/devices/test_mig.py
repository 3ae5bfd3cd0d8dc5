"""MIG slices as a worker lists them, through the real pynvml, over NVML and CUDA as stubs in C."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from moorage.schemas.frames import Device
from moorage.schemas.gpu import GpuSpec
from moorage.worker.devices.pool import GpuPool
from moorage.worker.devices.readers.cdi import read_registry
from moorage.worker.devices.readers.cdi_devices import cdi_names
from moorage.worker.devices.readers.faults import Fault
from moorage.worker.devices.readers.nvml import open_nvml
from moorage.worker.lend.offer import matching
from moorage.worker.sharing.attempt_processes import AttemptProcesses
from tests.nvidia.stub import Board, Slice, Stub
from tests.waiting import until

WHOLE = "GPU-11111111-2222-3333-4444-555555555555"
DIVIDED = "GPU-22222222-2222-3333-4444-555555555555"
SMALL, LARGE = "MIG-0a000000-0000-0000-0000-000000000001", "MIG-0b000000-0000-0000-0000-000000000002"
HOLD = Path(__file__).parents[3] / "release" / "gpu" / "hold_memory.py"


def machine(folder: Path) -> Stub:
    slices = [Slice(SMALL, 0), Slice(LARGE, 3, 40192, "NVIDIA H100 80GB HBM3 MIG 3g.40gb")]
    return Stub(folder, Board(DIVIDED, slices=slices), Board(WHOLE, used_mib=7))


async def test_slices_are_devices_behind_the_whole_ones_and_their_gpu_is_none(tmp_path: Path) -> None:
    with machine(tmp_path).load():
        found = await open_nvml()
        devices = found.devices()
        assert [(each.uuid, each.profile, each.memory_mib, each.index, each.mig) for each in devices] == [
            (WHOLE, "", 81559, 1, False),
            (SMALL, "1g.10gb", 9856, 0, True),
            (LARGE, "3g.40gb", 40192, 0, True),
        ]
        assert [each.peers for each in devices] == [[], [], []]
        assert [found.memory_baseline_mib(slot) for slot in range(3)] == [7, 0, 0]
        GpuPool(devices).validate()
        found.close()


async def test_a_gpu_in_mig_mode_without_slices_is_a_device_that_is_closed(tmp_path: Path) -> None:
    with Stub(tmp_path, Board(DIVIDED, more={"mig": 1})).load():
        found = await open_nvml()
        assert [(each.uuid, each.profile, each.mig) for each in found.devices()] == [(DIVIDED, "", True)]
        found.close()


async def test_a_slice_has_its_own_memory_and_processes_and_its_gpus_health(tmp_path: Path) -> None:
    stub = machine(tmp_path / "stub")
    with stub.load():
        found = await open_nvml()
        environment = os.environ | stub.environment | {"CUDA_VISIBLE_DEVICES": LARGE}
        job = await asyncio.create_subprocess_exec(
            sys.executable, HOLD, "hold", str(tmp_path / "pid"), "1000", env=environment
        )
        try:
            await until((tmp_path / "pid").exists, what="memory held")
            whole, small, large = await found.sample()
            assert [each.memory_used_mib for each in (whole, small, large)] == [7, 0, 1300]
            assert [len(each.processes) for each in (whole, small, large)] == [0, 0, 1]
            assert [await found.memory_is_free(slot) for slot in range(3)] == [True, True, False]
            assert (await found.held(2), await found.held(1)) == ({job.pid: 1300}, {})
        finally:
            job.kill()
            await job.wait()
        assert await found.memory_is_free(2)
        stub.boards[0].set(more={"recovery": 1})
        assert [[fault.kind for fault in each.faults] for each in await found.sample()] == [
            [],
            ["reset-needed"],
            ["reset-needed"],
        ]
        found.close()


async def test_what_happens_to_a_gpu_happens_to_all_its_slices(tmp_path: Path) -> None:
    stub = machine(tmp_path)
    with stub.load():
        found = await open_nvml()
        heard: list[tuple[int, str]] = []

        def report(slot: int, fault: Fault) -> None:
            heard.append((slot, fault.detail))

        found.watch(report)
        stub.event(DIVIDED, 8, 79)
        await until(lambda: len(heard) == 2, what="the event of two slices")
        stub.event(WHOLE, 8, 13)
        await until(lambda: len(heard) == 3, what="the event of a whole GPU")
        assert heard == [(slot, "Xid 79: the GPU has fallen off the bus") for slot in (1, 2)] + [(0, "Xid 13")]
        found.close()
        await asyncio.sleep(0)


def test_a_local_lease_takes_whole_gpus_unless_it_asks_for_a_slice() -> None:
    whole = Device(0, "nvidia", "NVIDIA H100 80GB HBM3", WHOLE, memory_mib=81_559)
    part = Device(1, "nvidia", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", SMALL, memory_mib=9_856, profile="1g.10gb")
    for spec, slots in (
        (GpuSpec(model="H100"), {0}),
        (GpuSpec(count=2), {0}),
        (GpuSpec(profile="1g.10gb"), {1}),
        (GpuSpec(profile="7g.80gb"), set[int]()),
        (GpuSpec(min_memory_mib=8_000), {0, 1}),
    ):
        assert matching(spec, [whole, part]) == slots, spec


def test_a_slice_has_the_cdi_name_of_its_uuid_alone(tmp_path: Path) -> None:
    """A name of its GPU's file would bring the whole GPU, without what the slice needs."""
    edits = {"containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}}
    devices = [{"name": name} | edits for name in ("0", WHOLE, SMALL)]
    spec = {"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": devices}
    (tmp_path / "nvidia.json").write_bytes(msgspec.json.encode(spec))
    part = Device(0, "nvidia", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", SMALL, profile="1g.10gb")
    whole = Device(0, "nvidia", "NVIDIA H100 80GB HBM3", WHOLE)
    found = cdi_names([part, whole], [("/dev/nvidia0",), ("/dev/nvidia0",)], read_registry([tmp_path]))
    assert found == [[f"nvidia.com/gpu={SMALL}"], [f"nvidia.com/gpu={WHOLE}", "nvidia.com/gpu=0"]]


def test_a_process_id_that_is_used_again_is_the_new_attempts() -> None:
    ours, gone, after = AttemptProcesses(), ("t", "a", 0, 1, 1), ("t", "b", 0, 1, 2)
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        ours.started(gone, process.pid)
        ours.started(after, process.pid)
        ours.ended(gone)
        assert ours.attempts_of([process.pid], os.getpid()) == {process.pid: after}
        ours.ended(after)
        process.kill()
    assert ours.attempts_of([os.getpid()], os.getpid()) == {}, "the supervisor itself is no attempt's"
