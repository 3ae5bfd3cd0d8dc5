"""What a worker finds on its devices that no lease explains: by a stub of NVML, and on simulated readings."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from moorage.schemas.frames import Finding
from moorage.system.simulated_hosts import simulated_hosts
from moorage.worker.agent.inspection import FINDINGS_MAX, inspect
from moorage.worker.devices.pool import GpuPool
from moorage.worker.devices.readers.base import FREE_TOLERANCE_MIB, DeviceProcess, SlotReading
from moorage.worker.devices.readers.nvml import open_nvml
from moorage.worker.devices.readers.simulated import BASELINE_MIB, SimulatedInventory
from tests.nvidia.stub import Board, Stub

PYTHON = DeviceProcess(4711, "python", 512)


def look(pool: GpuPool, inventory: SimulatedInventory) -> list[Finding]:
    readings = asyncio.run(inventory.sample())
    states = pool.slot_states()
    return inspect(inventory.devices(), states, states, readings, [BASELINE_MIB] * pool.capacity())[0]


def test_processes_and_memory_by_nvml_where_nobody_has_a_lease(tmp_path: Path) -> None:
    (tmp_path / "4711").mkdir()
    (tmp_path / "4711" / "comm").write_text("python\n")
    boards = [Board(f"GPU-{number}", used_mib=10) for number in range(5)]
    stub = Stub(tmp_path / "stub", *boards)

    async def scenario() -> tuple[list[Finding], int]:
        inventory = await open_nvml(sysfs=tmp_path, proc=tmp_path)
        pool = GpuPool(inventory.devices())
        lease = pool.try_claim_slots((0, 4), "exclusive", "train")
        boards[0].set(pids={4711: 512})  # the job's own
        boards[1].set(pids={4711: 512})  # a foreign process
        boards[2].set(used_mib=10 + FREE_TOLERANCE_MIB + 100)  # of no process
        boards[3].set(mps_pids=[os.getpid()])  # the service's own context
        boards[4].set(errors={"memory": 15})  # NVML_ERROR_GPU_IS_LOST
        before = pool.slot_states()
        readings = await inventory.sample()
        baselines = [inventory.memory_baseline_mib(slot) for slot in range(5)]
        found = inspect(inventory.devices(), before, pool.slot_states(), readings, baselines)
        lease.ended()
        lease.release()
        after = inspect(inventory.devices(), pool.slot_states(), pool.slot_states(), readings, baselines)
        assert [finding.slot for finding in after[0]] == [0, 1, 2], "freed now: its process is foreign, too"
        moved = inspect(inventory.devices(), before, pool.slot_states(), readings, baselines)
        assert [finding.slot for finding in moved[0]] == [1, 2], "what changed meanwhile is not judged"
        inventory.close()
        return found

    with stub.load():
        findings, more = asyncio.run(scenario())
    assert findings == [
        Finding("nvml-foreign", 1, "GPU-1", 4711, "python", 512),
        Finding("nvml-memory", 2, "GPU-2", 0, "", FREE_TOLERANCE_MIB + 100),
        Finding("nvml-missing", 4, "GPU-4"),
    ]
    assert more == 0


@pytest.fixture
def inventory() -> SimulatedInventory:
    return SimulatedInventory(simulated_hosts("4xH100")[0])


def test_an_idle_fleet_has_nothing_to_tell(inventory: SimulatedInventory) -> None:
    assert look(GpuPool(inventory.devices()), inventory) == []


def test_what_is_known_or_the_services_own_is_left_out(inventory: SimulatedInventory) -> None:
    pool = GpuPool(inventory.devices(), lent=(0, 1))
    for slot in range(3):
        inventory.set_reading(slot, SlotReading(memory_used_mib=600, processes=(PYTHON,)))
    pool.quarantine(0, "memory kept after train")
    claimed = pool.try_claim()
    assert claimed is not None
    assert claimed.slot == 1
    assert look(pool, inventory) == [], "quarantined, claimed here, not lent"
    pool.unquarantine(0)
    assert [finding.slot for finding in look(pool, inventory)] == [0]
    claimed.release()


def test_the_daemon_of_mps_holds_devices_that_nobody_leases(inventory: SimulatedInventory) -> None:
    inventory.set_reading(0, SlotReading(memory_used_mib=40, processes=(DeviceProcess(7, "nvidia-cuda-mps"),)))
    assert look(GpuPool(inventory.devices()), inventory) == []


def test_a_free_device_that_does_not_answer_is_no_drift_of_a_lease(inventory: SimulatedInventory) -> None:
    inventory.set_health(0, "unresponsive")
    assert look(GpuPool(inventory.devices()), inventory) == [], "the fleet shows it as sick"


def test_the_findings_are_bounded_and_what_is_left_out_is_counted(inventory: SimulatedInventory) -> None:
    many = tuple(DeviceProcess((1 << 30) + number, "x") for number in range(200))
    for slot in range(4):
        inventory.set_reading(slot, SlotReading(processes=many))
    pool = GpuPool(inventory.devices())
    readings, states = asyncio.run(inventory.sample()), pool.slot_states()
    findings, more = inspect(inventory.devices(), states, states, readings, [BASELINE_MIB] * 4)
    assert (len(findings), more) == (FINDINGS_MAX, 800 - FINDINGS_MAX)
