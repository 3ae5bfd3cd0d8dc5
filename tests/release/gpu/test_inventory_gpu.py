"""On a real NVIDIA host: what the inventory says is what nvidia-smi says."""

from __future__ import annotations

import asyncio

import pytest

from moorage.worker.devices.pool import GpuPool
from moorage.worker.devices.readers.nvml import open_nvml
from tests.release.gpu.nvidia_smi import asked_of_nvidia_smi

pytestmark = pytest.mark.gpu

QUERY = "index,uuid,name,memory.total,pci.bus_id,memory.used"


def test_the_inventory_agrees_with_nvidia_smi() -> None:
    asked = asked_of_nvidia_smi(QUERY)

    async def scene() -> None:
        found = await open_nvml()
        try:
            devices = found.devices()
            described = [[str(each.index), each.uuid, each.name, str(each.memory_mib), each.pci] for each in devices]
            assert described == [row[:5] for row in asked]
            assert found.faults == []
            assert all(device.vendor == "nvidia" and device.compute for device in devices)
            readings = await found.sample()
            assert [reading.health for reading in readings] == ["ok"] * len(asked)
            assert all(reading.util_percent is None or 0 <= reading.util_percent <= 100 for reading in readings)
            assert GpuPool(devices).capacity() == len(asked)
        finally:
            found.close()

    asyncio.run(scene())


def test_memory_on_an_idle_device_is_free_and_near_what_nvidia_smi_shows() -> None:
    asked = asked_of_nvidia_smi(QUERY)

    async def scene() -> None:
        found = await open_nvml()
        try:
            readings = await found.sample()
            for slot, row in enumerate(asked):
                if readings[slot].processes:
                    continue
                assert await found.memory_is_free(slot)
                assert abs(readings[slot].memory_used_mib - int(row[5])) <= 64
        finally:
            found.close()

    asyncio.run(scene())
