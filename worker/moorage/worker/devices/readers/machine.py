"""List all devices of a machine, reader by reader: NVIDIA's, then others' through DRM, then those of packages.

A slot is a position in that list. `Device.index` stays what the vendor's own runtime counts, so two vendors may both
have a 0; a device is identified by (vendor, uuid).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from moorage.schemas.errors import Refused, refuse
from moorage.schemas.frames import Device
from moorage.schemas.own_class import NotOffered, own_class, place_of
from moorage.system.daemon_threads import in_thread
from moorage.worker.devices.readers import GROUP, READERS
from moorage.worker.devices.readers.base import Host, Inventory, ReportFault, SlotReading
from moorage.worker.devices.readers.cdi import folders, read_registry
from moorage.worker.devices.readers.cdi_devices import CdiInventory, SpecWatch, cdi_names
from moorage.worker.devices.readers.faults import Fault

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
        self.versions = {name: text for part in self._parts for name, text in part.versions.items()}

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
            def on_fault(own_slot: int, fault: Fault) -> None:
                if (part, own_slot) in slots:
                    report(slots[(part, own_slot)], fault)

            return on_fault

        for part in self._parts:
            part.watch(of(part))

    def close(self) -> None:
        for part in self._parts:
            part.close()

    async def closed(self) -> None:
        await asyncio.gather(*(part.closed() for part in self._parts))

    def _home(self, slot: int) -> tuple[Inventory, int]:
        if not 0 <= slot < len(self._homes):
            raise IndexError(f"this machine has no slot {slot}")
        return self._homes[slot]


async def open_machine(
    machine: str, readers: Sequence[str] = tuple(READERS), *, root: Path = Path("/")
) -> CombinedInventory:
    """Open every device of this machine that these readers find, in their order.

    A machine without any is fine. Devices that cannot be slots are logged. `machine` and `root` are those of `Host`.
    Raises Refused for a name that is no reader, and what a reader's `open` raises, such as NvmlUnavailable.
    """
    kinds = {word: _reader(word) for word in readers}
    async with contextlib.AsyncExitStack() as stack:
        parts: list[Inventory] = []
        for word, kind in kinds.items():
            listed = {sysfs_address(device.pci) for part in parts for device in part.devices()}
            part = await _opened(word, kind, Host(root, machine, frozenset(listed)))
            stack.callback(part.close)
            parts.append(part)
        specs = await in_thread("cdi-open", lambda: read_registry(folders(root)))
        for fault in [fault for part in parts for fault in part.faults]:
            log.warning("a device is not offered to jobs: %s", fault)
        for told in specs.faults[:FAULTS_TOLD_MAX]:
            log.warning("CDI: %s", told)
        devices = [device for part in parts for device in part.devices()]
        nodes = [part.nodes(slot) for part in parts for slot in range(len(part.devices()))]
        if len(devices) > DEVICES_MAX:
            left_out = len(devices) - DEVICES_MAX
            log.warning(
                "the last %d devices are not offered to jobs: a worker has at most %d devices", left_out, DEVICES_MAX
            )
        by_specs = any(isinstance(part, CdiInventory) for part in parts)  # those devices come and go with their spec
        watch = None if by_specs else SpecWatch(devices[:DEVICES_MAX], nodes[:DEVICES_MAX], root)
        found = CombinedInventory(parts, cdi_names(devices, nodes, specs), watch)
        stack.pop_all()
    return found


def _reader(word: str) -> type[Inventory]:
    """Return the reader of this name, of moorage, of a package, or as `module:Class`. Raises Refused."""
    try:
        return own_class(place_of(word, READERS, GROUP), Inventory)
    except NotOffered as error:
        raise refuse(
            "failed-precondition", f"no reader of devices {word}", field="$.readers", allowed=error.allowed
        ) from None
    except ValueError as error:
        raise refuse("failed-precondition", str(error), field="$.readers", found=word) from None


async def _opened(word: str, kind: type[Inventory], host: Host) -> Inventory:
    """Return what a reader finds. Raises Refused for whatever a reader that is not moorage's raises."""
    try:
        return await kind.open(host)
    except Exception as error:
        if word in READERS or isinstance(error, Refused):
            raise
        log.debug("the reader of devices %s failed", word, exc_info=error)
        raise refuse(
            "failed-precondition",
            f"the reader of devices {word} failed: {type(error).__name__}: {error}",
            field="$.readers",
            found=word,
            next="mend it, or leave it out of readers of [worker]",
        ) from error


def sysfs_address(pci: str) -> str:
    """Return a PCI address in sysfs's form, `0000:17:00.0`, from NVML's, `00000000:17:00.0`; a wider domain stays."""
    domain, _, rest = pci.lower().partition(":")
    return f"{domain.lstrip('0').zfill(4)}:{rest}"
