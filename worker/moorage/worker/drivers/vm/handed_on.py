"""Show the devices of a machine of which VMs may have some: those stay in their slots, neither missing nor free.

A GPU is handed on and given back here, through `vm/passthrough.py`. NVIDIA's driver can be unbound from a GPU only once
this process has closed NVML, so all readings wait meanwhile, for `driver_changes.CHANGE_S` at most, and NVML is opened
again afterwards. The journals record
what is handed on, and a file keeps the list of devices, so an agent that starts while VMs run finds the same slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from moorage.schemas.frames import Device
from moorage.system.daemon_threads import in_thread
from moorage.worker.devices.readers.base import HeldUnknown, Inventory, ReportFault, SlotReading
from moorage.worker.devices.readers.faults import Fault, Gravity
from moorage.worker.devices.readers.machine import DEVICES_MAX, CombinedInventory, sysfs_address
from moorage.worker.drivers.vm.driver_changes import DriverChanges
from moorage.worker.drivers.vm.passthrough import NotHandedOn, Passthrough, lock_path, write_synced

#: file below the folder of the journals: the devices in slot order
DEVICES_FILE: Final = "devices"
#: containers get a device by its file, so a device whose file now belongs to another one must not be used
MOVED: Final = Fault("missing", Gravity.CLOSED, "its file in /dev has another number than before: restart the worker")
GONE: Final = SlotReading(health="unresponsive")

log = logging.getLogger("moorage.worker.devices.readers")


class _Slot(msgspec.Struct, frozen=True):
    device: Device
    nodes: tuple[str, ...] = ()

    @property
    def identity(self) -> tuple[str, str]:
        return self.device.vendor, self.device.uuid

    @property
    def address(self) -> str:
        return sysfs_address(self.device.pci)


class HandingInventory(Inventory):
    """The devices of this machine, with those that VMs have. Make it with `open_handing`."""

    def __init__(
        self,
        inner: CombinedInventory,
        open_inner: Callable[[], Awaitable[CombinedInventory]],
        passthrough: Passthrough,
        changes: DriverChanges,
        folder: Path,
        before: list[_Slot],
        away: set[str],
    ) -> None:
        kept = {each.identity: each for each in before}  # others have other numbers while some are away
        found = [_Slot(device, inner.nodes(slot)) for slot, device in enumerate(inner.devices())]
        found = [kept.get(each.identity, each) for each in found]
        known = {each.identity for each in found}
        for at, each in enumerate(before):
            if each.address in away and each.identity not in known:
                found.insert(at, each)
        self._slots: Final = found[:DEVICES_MAX]
        self._inner: CombinedInventory | None = inner
        self._open_inner = open_inner
        self.passthrough: Final = passthrough
        self._changes: Final = changes
        self._folder: Final = folder
        #: the PCI addresses of devices that are handed on, or could not be given back
        self.away = away
        self._homes: list[int | None] = []
        self._find_homes(inner)
        self._changing = asyncio.Lock()
        self._asked = 0
        self._unasked = asyncio.Event()
        self._unasked.set()
        self._report: ReportFault | None = None
        self._closed = False

    # -- the devices, as of any inventory

    def devices(self) -> list[Device]:
        return [each.device for each in self._slots]

    def nodes(self, slot: int) -> tuple[str, ...]:
        return self._slots[slot].nodes

    async def sample(self) -> list[SlotReading]:
        async with self._asking() as inner:
            own = await inner.sample() if inner is not None else []
            return [self._reading(slot, own) for slot in range(len(self._slots))]

    async def memory_is_free(self, slot: int) -> bool:
        async with self._asking() as inner:
            home = self._homes[slot]
            if inner is None or home is None or self._slots[slot].address in self.away:
                return False
            return await inner.memory_is_free(home)

    def memory_baseline_mib(self, slot: int) -> int:
        home = self._homes[slot]
        return 0 if self._inner is None or home is None else self._inner.memory_baseline_mib(home)

    async def held(self, slot: int) -> dict[int, int]:
        async with self._asking() as inner:
            if self._slots[slot].address in self.away:
                return {}  # no process of this host can use it
            home = self._homes[slot]
            if inner is None or home is None:
                raise HeldUnknown("the device cannot be read")
            return await inner.held(home)

    async def worked(self, slot: int) -> dict[int, int]:
        async with self._asking() as inner:
            home = self._homes[slot]
            if inner is None or home is None or self._slots[slot].address in self.away:
                raise HeldUnknown("the device cannot be read")
            return await inner.worked(home)

    def watch(self, report: ReportFault) -> None:
        self._report = report
        self._watch_inner()

    def close(self) -> None:
        self._closed = True
        if self._inner is not None:
            self._inner.close()

    # -- handing on

    def why_not(self) -> str:
        """Return "" if this host can hand devices on, else one line that says why not."""
        try:
            self.passthrough.check_host()
        except NotHandedOn as error:
            return error.problem.message
        return ""

    def lock_of(self, address: str) -> Path:
        """Return the file that a VM locks while it may use the device."""
        return lock_path(self._folder, address)

    async def hand_on(self, device: Device) -> list[str]:
        """Bind a device's functions to vfio-pci; return their PCI addresses, the device's own first.

        Raises NotHandedOn if the device cannot be handed on, also if the kernel does not unbind it in time: then the
        device is away until that is over, and readings of the others go on. Until the VM has locked the device, every
        `take_back` must get the device's address in `spared`. This call must not be cancelled.
        """
        address = sysfs_address(device.pci)
        self._check_alone(device)
        async with self._alone():
            if address in self.away:
                raise NotHandedOn(f"{address} is handed on already, or could not be given back")
            journal = self._folder / address
            try:
                await in_thread("passthrough-check", partial(self.passthrough.functions, address, os.getpid()))
                await self._close_inner()
                write_synced(self._folder / DEVICES_FILE, msgspec.json.encode(self._slots))
                return await self._changes.take(address)
            except OSError as error:
                named = f"{error.filename}: " if error.filename else ""
                raise NotHandedOn(f"{named}{error.strerror or error}") from None
            finally:
                if journal.exists():
                    self.away.add(address)
                await self._reopen()

    async def take_back(self, spared: Collection[str] = ()) -> list[str]:
        """Give back to the host every device that no VM has locked, except the PCI addresses in `spared`.

        Return one line for each device that cannot be given back; empty if there is none.
        """
        if self.away <= set(spared):
            return []
        async with self._alone():
            before = self.away
            self.away, faults = await self._changes.give_back(spared)
            if before != self.away:
                try:
                    await self._close_inner()
                except NotHandedOn as error:  # the returned devices stay unresponsive, as their health shows
                    log.error("%s", error.problem.message)
                await self._reopen()
            return faults

    def _check_alone(self, device: Device) -> None:
        """Raise NotHandedOn if other devices of this host would be taken away too, or would be mistaken afterwards."""
        for other in self.devices():
            if other == device or other.vendor != device.vendor:
                continue
            if other.pci == device.pci:
                raise NotHandedOn(f"{device.pci} is divided into slices")
            if not other.uuid.startswith("GPU-"):
                why = f"jobs know GPU {other.index} of {other.vendor} only by its number, and the numbers would change"
                raise NotHandedOn(why)

    # -- inside

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[CombinedInventory | None]:
        """Give the host's present devices for one reading; None if they cannot be opened now."""
        async with self._changing:
            if self._inner is None:
                await self._reopen()
            self._asked += 1
            self._unasked.clear()
        try:
            yield self._inner
        finally:
            self._asked -= 1
            if not self._asked:
                self._unasked.set()

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Wait until no reading is in progress, and allow none meanwhile."""
        async with self._changing:
            await self._unasked.wait()
            yield

    async def _close_inner(self) -> None:
        """Close the devices. Raises NotHandedOn if a driver does not answer, and so is still in use."""
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.close()
            try:
                await inner.closed()
            except TimeoutError:
                raise NotHandedOn("NVML does not answer, so it cannot be closed") from None

    async def _reopen(self) -> None:
        if self._inner is not None or self._closed:
            return
        try:
            inner = await self._open_inner()
        except Exception as error:  # of any kind: the devices are unresponsive until the next reading opens them
            log.error("the devices cannot be opened again after a VM: %s", error)
            return
        self._find_homes(inner)
        self._inner = inner
        self._watch_inner()

    def _find_homes(self, inner: CombinedInventory) -> None:
        places = {(device.vendor, device.uuid): at for at, device in enumerate(inner.devices())}
        self._homes = [places.get(each.identity) for each in self._slots]
        self._moved = {
            slot
            for slot, home in enumerate(self._homes)
            if home is not None and set(inner.nodes(home)) != set(self._slots[slot].nodes)
        }

    def _watch_inner(self) -> None:
        report, inner = self._report, self._inner
        if report is None or inner is None:
            return
        slots = {home: slot for slot, home in enumerate(self._homes) if home is not None}

        def on_fault(home: int, fault: Fault) -> None:
            if self._inner is inner and home in slots:
                report(slots[home], fault)

        inner.watch(on_fault)

    def _reading(self, slot: int, own: list[SlotReading]) -> SlotReading:
        if self._slots[slot].address in self.away:
            return SlotReading(handed_on=True)
        home = self._homes[slot]
        if home is None or home >= len(own):
            return GONE
        reading = own[home]
        if slot in self._moved:
            return dataclasses.replace(reading, faults=(*reading.faults, MOVED))
        return reading


async def open_handing(
    folder: Path,
    *,
    open_inner: Callable[[], Awaitable[CombinedInventory]],
    passthrough: Passthrough | None = None,
) -> HandingInventory:
    """Open every device that `open_inner` finds, with those that VMs have; journals are in `folder`. Raises as it does.

    Devices that an earlier agent handed on, and that no VM has any more, are given back first.
    """
    passthrough = passthrough or Passthrough()
    changes = DriverChanges(passthrough, folder)
    away, faults = await changes.give_back()
    for fault in faults:
        log.error("%s", fault)
    inner = await open_inner()
    return HandingInventory(inner, open_inner, passthrough, changes, folder, _kept(folder) if away else [], away)


def _kept(folder: Path) -> list[_Slot]:
    try:
        return msgspec.json.decode((folder / DEVICES_FILE).read_bytes(), type=list[_Slot])
    except (OSError, msgspec.DecodeError):
        return []
