"""Apply the devices' health: in the pool, in a file for the next agent, and in the worker's frames.

`device_health` judges the devices; this module carries that out. A device that renewals report as unwell is closed in
the pool; placements on a device that a foreign process uses are refused. The host's other devices stay in use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Sequence
from pathlib import Path
from typing import Final

import msgspec

from moorage.schemas.errors import refuse
from moorage.schemas.frames import Device, Unwell
from moorage.schemas.unreadable import UNREADABLE
from moorage.system.private_files import replace_private
from moorage.worker.devices.device_health import DeviceHealth, DeviceRecord
from moorage.worker.devices.pool import GpuPool, SlotState
from moorage.worker.devices.readers.base import SlotReading
from moorage.worker.devices.readers.faults import Fault, Gravity

log = logging.getLogger("moorage.worker")

#: the party that closes a slot, as the pool records it
CLOSED_BY: Final = "health"
#: detail of a load frame for a device that a VM has
HANDED_ON: Final = "handed on to a VM"


#: returns those of these pids that a slot's leases explain, where it is leased, and members that sleep there
Explained = Callable[[int, Collection[int], bool], Container[int]]


class _File(msgspec.Struct):
    boot: str
    devices: dict[str, DeviceRecord]


_decode: Final = msgspec.json.Decoder(_File).decode


class DeviceWatch:
    """Watches a worker's devices. `told` are the unwell devices as renewals report them.

    Without a `file` nothing is stored. A process that is not `explained` is foreign.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        boot: str,
        pool: GpuPool,
        probation_s: float,
        now: float,
        file: Path | None,
        explained: Explained,
    ) -> None:
        past = _read(file)
        self.health = DeviceHealth(
            devices,
            boot=boot,
            now=now,
            past=past.devices if past is not None else None,
            past_boot=past.boot if past is not None else "",
            probation_s=probation_s,
        )
        self.told: list[Unwell] = []
        self._pool = pool
        self._file = file
        self._explained = explained
        self._write_failed = False
        self._ours: frozenset[int] = frozenset()  # slots that this object has closed in the pool
        self._foreign: dict[int, str] = {}
        #: by slot: a warning about a job that the kernel keeps from its own GPU
        self.cut_off: dict[int, str] = {}

    # ---------------------------------------------------------------------------------------- what is seen and heard

    def seen(self, readings: Sequence[SlotReading], now: float) -> bool:
        """Handle a reading of every device; return whether `told` has changed."""
        for slot, reading in enumerate(readings):
            self.health.read(slot, reading, now)
        self._foreign = {}
        if any(reading.processes for reading in readings):
            for state, reading in zip(self._pool.slot_states(), readings, strict=True):
                if who := self._foreign_of(state, reading):
                    self._foreign[state.slot] = who
        return self._settle(now)

    def happened(self, slot: int, fault: Fault, now: float) -> bool:
        """Handle an event of a device; return whether `told` has changed."""
        self.health.happened(slot, fault, now)
        return self._settle(now)

    def check_failed(self, slot: int, why: str, now: float) -> bool:
        """Close a device whose check failed, until `well`; return whether `told` has changed."""
        self.health.check_failed(slot, why)
        return self._settle(now)

    def well(self, slots: Sequence[int], n: int, now: float) -> list[int]:
        """Apply an operator's order, numbered `n`, that devices are well, and return the slots.

        Return [] if the order was applied already.
        """
        news = self.health.well(slots, n)
        self._settle(now)
        return news

    def _settle(self, now: float) -> bool:
        before, self.told = self.told, self.health.unwell(now)
        unwell = {each.slot: f"{each.kind}: {each.detail}" for each in self.told}
        for slot in self._ours - unwell.keys():
            self._pool.unquarantine(slot, CLOSED_BY)
        for slot in unwell.keys() - self._ours:
            self._pool.quarantine(slot, unwell[slot], CLOSED_BY)
        self._ours = frozenset(unwell)
        if self.health.changed:
            self._write()
        return self.told != before

    # ------------------------------------------------------------------------------------------------- what follows

    def check_foreign(self, slots: Sequence[int]) -> None:
        """Raise `Refused` for a slot on which the last reading showed a foreign process."""
        for slot in slots if self._foreign else ():
            if slot in self._foreign:
                raise refuse("failed-precondition", f"foreign: GPU {slot} is used by {self._foreign[slot]}")

    def shown(self, state: SlotState, reading: SlotReading, now: float) -> tuple[str, str, str]:
        """Return health, foreign process ("" for none) and detail, for the load frame."""
        foreign = self._foreign.get(state.slot, "") if state.sharers else self._foreign_of(state, reading)
        verdict = self.health.verdict(state.slot, now)
        if verdict.kind != "ok":
            return verdict.kind, foreign, verdict.detail
        if state.quarantine:
            return "quarantined", foreign, ""
        if reading.handed_on:
            return "ok", "", HANDED_ON
        # memory errors count when they are new: a device that has been clean since its known errors is well
        return "ok" if reading.health == "ecc" else reading.health, foreign, ""

    def warning(self, slot: int, reading: SlotReading) -> str:
        """Return what is wrong with a device and closes nothing, after its kind, for the load frame; "" for nothing."""
        notes = (fault for fault in reading.faults if fault.gravity == Gravity.NOTE)
        return self.cut_off.get(slot) or next((f"{fault.kind}: {fault.detail}" for fault in notes), "")

    def _foreign_of(self, state: SlotState, reading: SlotReading) -> str:
        """Return the first process that no lease explains; "" for none, and for a device that a local claim has."""
        if not reading.processes or state.local:
            return ""
        pids = [process.pid for process in reading.processes]
        return reading.foreign(self._explained(state.slot, pids, bool(state.sharers)))

    def _write(self) -> None:
        """Store the records. A failure is logged once, and the next reading tries again."""
        if self._file is None:
            self.health.changed = False
            return
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            records = msgspec.json.encode(_File(self.health.boot, self.health.records()))
            replace_private(self._file, records, is_synced=False)
        except OSError as error:
            if not self._write_failed:  # said once, not with each reading
                log.error("the health of the devices cannot be stored, and is lost if the agent ends: %s", error)
            self._write_failed = True
        else:
            self._write_failed = self.health.changed = False


def _read(file: Path | None) -> _File | None:
    if file is None:
        return None
    try:
        return _decode(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE) as error:
        log.error("the record of the devices' health, %s, cannot be read: %s", file, error)
        return None
