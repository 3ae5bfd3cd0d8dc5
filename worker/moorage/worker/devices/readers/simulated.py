"""Simulate a host and its devices, for demonstrations, tests and plans. Everything here is marked as simulated."""

from __future__ import annotations

from typing import Final

from moorage.schemas.frames import Device
from moorage.system.simulated_hosts import SimulatedHost
from moorage.worker.devices.readers.base import Inventory, ReportFault, SlotReading, is_free
from moorage.worker.devices.readers.faults import Fault, Health, of_xid
from moorage.worker.devices.readers.simulated_faults import FaultFile, Played

BASELINE_MIB: Final = 4


class SimulatedInventory(Inventory):
    """The devices of a `SimulatedHost`, idle unless set otherwise.

    `faults` has the faults to play on them, under the name `worker` (by default the host's). By default memory is free
    at once. `keep_memory` simulates memory that stays in use after its processes have ended; `set_reading` replaces the
    idle reading.
    """

    simulated = True

    def __init__(self, host: SimulatedHost, faults: FaultFile | None = None, worker: str = "") -> None:
        self.host: Final = host
        self._worker = worker or host.name
        self._readings = [_idle() for _ in host.devices]
        self._faults = faults
        self._played: dict[int, Played] = {}
        self._version = 0
        self._report: ReportFault = lambda slot, fault: None

    def devices(self) -> list[Device]:
        return list(self.host.devices)

    async def sample(self) -> list[SlotReading]:
        self._play()
        return list(self._readings)

    def _play(self) -> None:
        """Apply the control file if it has changed."""
        if self._faults is None or self._faults.look() == self._version:
            return
        self._version = self._faults.version
        before, self._played = self._played, self._faults.of(self._worker)
        for slot in range(len(self._readings)):
            now, was = self._played.get(slot), before.get(slot)
            if now == was:
                continue
            self.set_reading(slot, now.reading(BASELINE_MIB) if now is not None else None)
            if now is not None and now.xid is not None and now.xid != (was.xid if was is not None else None):
                self._report(slot, of_xid(now.xid))

    def watch(self, report: ReportFault) -> None:
        self._report = report

    def happen(self, slot: int, fault: Fault) -> None:
        """Report an event of a device, as a driver does."""
        self._report(slot, fault)

    async def memory_is_free(self, slot: int) -> bool:
        self._play()
        return is_free(self._readings[slot], BASELINE_MIB)

    def memory_baseline_mib(self, slot: int) -> int:
        if not 0 <= slot < len(self._readings):
            raise IndexError(f"the simulated host has no slot {slot}")
        return BASELINE_MIB

    def set_reading(self, slot: int, reading: SlotReading | None) -> None:
        """Set what `sample` returns for a slot from now on; None is idle again."""
        self._readings[slot] = reading or _idle()

    def keep_memory(self, slot: int, memory_mib: int) -> None:
        """Keep memory of the slot in use, whichever processes end, until `set_reading(slot, None)`."""
        self.set_reading(slot, SlotReading(memory_used_mib=BASELINE_MIB + memory_mib))

    def set_health(self, slot: int, health: Health) -> None:
        """Replace a slot's reading by that of an idle device with this health."""
        self.set_reading(slot, SlotReading(health=health) if health == "unresponsive" else _idle(health))


def _idle(health: Health = "ok") -> SlotReading:
    return SlotReading(
        util_percent=0,
        memory_used_mib=BASELINE_MIB,
        temperature_c=95 if health == "thermal" else 30,
        health=health,
        uncorrected_errors=int(health == "ecc"),
    )
