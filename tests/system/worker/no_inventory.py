"""A host without GPUs, for tests of what looks at devices."""

from __future__ import annotations

from moorage.schemas.frames import Device
from moorage.worker.devices.readers.base import Inventory, SlotReading


class NoInventory(Inventory):
    """No devices, so no slots."""

    def devices(self) -> list[Device]:
        return []

    async def sample(self) -> list[SlotReading]:
        return []

    async def memory_is_free(self, slot: int) -> bool:
        raise IndexError(f"a host without GPUs has no slot {slot}")
