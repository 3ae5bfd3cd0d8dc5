"""List all devices of a machine: NVIDIA's through NVML (or CDI specs without NVML), then others' through DRM.

A slot is a position in that list. `Device.index` stays what the vendor's own runtime counts, so two vendors may both
have a 0; a device is identified by (vendor, uuid).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from moorage.schemas.frames import Device
from moorage.system.daemon_threads import in_thread
from moorage.worker.devices.readers.base import Inventory, ReportFault, SlotReading
from moorage.worker.devices.readers.cdi import folders, read_registry
from moorage.worker.devices.readers.cdi_devices import CdiInventory, SpecWatch, cdi_names
from moorage.worker.devices.readers.drm import open_drm
from moorage.worker.devices.readers.faults import Fault
from moorage.worker.devices.readers.nvml import NvmlInventory, open_nvml

#: a worker's slots are one 64-bit mask in the ledger
DEVICES_MAX: Final = 64
#: most broken CDI files that are logged at a start
FAULTS_TOLD_MAX: Final = 16

log = logging.getLogger("moorage.worker.devices.readers")


class CombinedInventory(Inventory):
    """Several inventories as one; their devices keep their order. At most `DEVICES_MAX` devices are slots.

    `cdi` has each device's names in the host's CDI specs, and `specs` sees whether they still have it. Raises
    ValueError if two parts list the same (vendor, uuid).
    """

    def __init__(
        self, parts: Sequence[Inventory], cdi: Sequence[list[str]] = (), specs: SpecWatch | None = None
    ) -> None:
        self._specs = specs
        self._parts = tuple(parts)
        self._homes = [(part, slot) for part in self._parts for slot in range(len(part.devices()))][:DEVICES_MAX]
        self._devices = [device for part in self._parts for device in part.devices()][:DEVICES_MAX]
        if len({(device.vendor, device.uuid) for device in self._devices}) != len(self._devices):
            raise ValueError("two inventories list the same device")
        for slot, names in enumerate(cdi[:DEVICES_MAX]):
            self._devices[slot] = msgspec.structs.replace(self._devices[slot], cdi=names or self._devices[slot].cdi)

    @property
    def simulated(self) -> bool:
        return any(part.simulated for part in self._parts)

    def devices(self) -> list[Device]:
        return list(self._devices)

    def nodes(self, slot: int) -> tuple[str, ...]:
        part, own_slot = self._home(slot)
        return part.nodes(own_slot)

    async def sample(self) -> list[SlotReading]:
        samples = await asyncio.gather(*(part.sample() for part in self._parts))
        readings = [reading for sample in samples for reading in sample][:DEVICES_MAX]
        for slot, fault in (await self._specs.faults()).items() if self._specs is not None else ():
            readings[slot] = replace(readings[slot], faults=(*readings[slot].faults, fault))
        return readings

    async def memory_is_free(self, slot: int) -> bool:
        part, own_slot = self._home(slot)
        return await part.memory_is_free(own_slot)

    def memory_baseline_mib(self, slot: int) -> int:
        part, own_slot = self._home(slot)
        return part.memory_baseline_mib(own_slot)

    async def held(self, slot: int) -> dict[int, int]:
        part, own_slot = self._home(slot)
        return await part.held(own_slot)

    async def worked(self, slot: int) -> dict[int, int]:
        part, own_slot = self._home(slot)
        return await part.worked(own_slot)

    def watch(self, report: ReportFault) -> None:
        slots = {home: slot for slot, home in enumerate(self._homes)}

        def of(part: Inventory) -> ReportFault:
            def told(own_slot: int, fault: Fault) -> None:
                if (part, own_slot) in slots:
                    report(slots[(part, own_slot)], fault)

            return told

        for part in self._parts:
            part.watch(of(part))

    def close(self) -> None:
        for part in self._parts:
            part.close()

    async def closed(self) -> None:
        """Return once NVML is shut down; call `close` before. Raises TimeoutError as `NvmlInventory.closed` does."""
        await asyncio.gather(*(part.closed() for part in self._parts if isinstance(part, NvmlInventory)))

    def _home(self, slot: int) -> tuple[Inventory, int]:
        if not 0 <= slot < len(self._homes):
            raise IndexError(f"this machine has no slot {slot}")
        return self._homes[slot]


async def open_machine(machine: str, *, root: Path = Path("/")) -> CombinedInventory:
    """Open every device of this machine: those of NVML (without it, of CDI files), and other cards with a render node.

    A machine without any is fine. Devices that cannot be slots are logged. `machine` is the machine's id (`HostFacts`),
    for devices without a uuid. `root` is the root of the file systems.
    Raises NvmlUnavailable if NVML is there and fails or hangs, DrmUnavailable if sysfs hangs.
    """
    nvml = await open_nvml(sysfs=root / "sys", proc=root / "proc")
    try:
        drm = await open_drm(root=root, listed={sysfs_address(device.pci) for device in nvml.devices()})
    except BaseException:
        nvml.close()
        raise
    try:
        specs = await in_thread("cdi-open", lambda: read_registry(folders(root)))
    except BaseException:
        nvml.close()
        raise
    for fault in (*nvml.faults, *drm.faults):
        log.warning("a device is not offered to jobs: %s", fault)
    for fault in specs.faults[:FAULTS_TOLD_MAX]:
        log.warning("CDI: %s", fault)
    parts = (nvml if nvml.is_there else CdiInventory(specs, machine, root), drm)
    devices = [device for part in parts for device in part.devices()]
    nodes = [part.nodes(slot) for part in parts for slot in range(len(part.devices()))]
    if len(devices) > DEVICES_MAX:
        left_out = len(devices) - DEVICES_MAX
        log.warning(
            "the last %d devices are not offered to jobs: a worker has at most %d devices", left_out, DEVICES_MAX
        )
    watch = SpecWatch(devices[:DEVICES_MAX], nodes[:DEVICES_MAX], root) if nvml.is_there else None
    return CombinedInventory(parts, cdi_names(devices, nodes, specs), watch)


def sysfs_address(pci: str) -> str:
    """Return a PCI address in sysfs's form, `0000:17:00.0`, from NVML's, `00000000:17:00.0`; a wider domain stays."""
    domain, _, rest = pci.lower().partition(":")
    return f"{domain.lstrip('0').zfill(4)}:{rest}"
