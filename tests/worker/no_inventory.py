"""A host without GPUs, for tests of what looks at devices."""

from __future__ import annotations

from moorage.schemas.frames import Device
from moorage.worker.devices.readers.base import ReportFault, SlotReading


class NoInventory:
    """No devices, so no slots."""

    simulated = False

    def devices(self) -> list[Device]:
        return []

    def nodes(self, slot: int) -> tuple[str, ...]:
        raise IndexError(f"a host without GPUs has no slot {slot}")

    async def sample(self) -> list[SlotReading]:
        return []

    async def memory_is_free(self, slot: int) -> bool:
        raise IndexError(f"a host without GPUs has no slot {slot}")

    def memory_baseline_mib(self, slot: int) -> int:
        raise IndexError(f"a host without GPUs has no slot {slot}")

    async def held(self, slot: int) -> dict[int, int]:
        raise IndexError(f"a host without GPUs has no slot {slot}")

    async def worked(self, slot: int) -> dict[int, int]:
        raise IndexError(f"a host without GPUs has no slot {slot}")

    def watch(self, report: ReportFault) -> None:
        """Do nothing: there are no devices."""

    def close(self) -> None:
        """Do nothing: nothing was opened."""
