"""On a real NVIDIA host: what the inventory says is what nvidia-smi says."""

from __future__ import annotations

import asyncio

import pytest

from moorage.worker.devices.readers.nvml import open_nvml
from tests.release.gpu.nvidia_smi import asked_of_nvidia_smi

pytestmark = pytest.mark.gpu


def test_memory_on_an_idle_device_is_free_and_near_what_nvidia_smi_shows() -> None:
    used = [int(mib) for [mib] in asked_of_nvidia_smi("memory.used")]

    async def scene() -> None:
        found = await open_nvml()
        try:
            readings = await found.sample()
            for slot, used_mib in enumerate(used):
                if readings[slot].processes:
                    continue
                assert await found.memory_is_free(slot)
                assert abs(readings[slot].memory_used_mib - used_mib) <= 64
        finally:
            found.close()

    asyncio.run(scene())
