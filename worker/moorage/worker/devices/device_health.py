"""Judge the health of one worker's devices: which are closed, which have failed, and when they may be used again.

By its readings and events, a well device becomes *closed* (nothing new is placed on it, running jobs go on) or *failed*
(its jobs leave it). A failed device goes through *probation* back to well, if it is without a fault for a while. That
time is `probation_s`; it doubles with every failure within a day, up to a day, so a device that fails again and again
stays away longer each time. A failure that only a reset cures waits for the next boot of the machine, which starts the
probation, or for an operator's order, which ends it at once.

This module has no I/O. State that must survive a restart of the agent is in `DeviceRecord`s, which `device_watch`
stores; times are seconds of CLOCK_BOOTTIME.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from moorage.schemas.frames import Device, Unwell
from moorage.schemas.printable import shortened
from moorage.worker.devices.readers.base import SlotReading
from moorage.worker.devices.readers.faults import DETAIL_CHARS_MAX, Fault, Gravity, gravest

PROBATION_S: Final = 600.0
PROBATION_S_MAX: Final = 86400.0
#: failures are forgotten after this long without another one
FORGET_S: Final = 86400.0
#: a device that does not answer for this long has failed
UNRESPONSIVE_S: Final = 30.0


class DeviceRecord(msgspec.Struct, omit_defaults=True):
    """One device's past. `failed_s` says when it last failed, or when the worker started after a reboot since then.

    It is -1 if no failure is remembered: there was none, it was forgotten after a day, or an operator declared the
    device well.
    """

    kind: str = ""
    detail: str = ""
    needs_reset: bool = False
    failed_s: float = -1.0
    clean_s: float = -1.0  # since when it has no fault; -1: it has one
    failures: int = 0
    errors: int = 0  # uncorrected memory errors that are already counted
    check: str = ""  # why its check failed: it stays closed until an operator declares it well


class Verdict(NamedTuple):
    """The state of a device now: nothing new is to be placed on it unless `kind` is "ok".

    With `ends` its jobs must leave it.
    """

    kind: str
    detail: str
    ends: bool = False
    #: whether renewals report it, so that the ledger has it; a hot or briefly silent device is not reported
    recorded: bool = False


OK: Final = Verdict("ok", "")
#: a job that gets the whole device finds no memory on it, because CUDA opens slices only
DIVIDED: Final = Verdict(
    "mig", "the GPU is in MIG mode, and its slices are not offered: nvidia-smi -mig 0", recorded=True
)


def is_divided(device: Device) -> bool:
    """Return whether it is a whole GPU in MIG mode, not one of its slices, whose uuid begins with MIG-."""
    return device.mig and not device.uuid.startswith("MIG-")


class DeviceHealth:
    """The health of a worker's devices, by slot.

    `boot` is the machine's boot id; `past` is an earlier result of `records`, from the boot `past_boot`.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        *,
        boot: str,
        now: float,
        past: dict[str, DeviceRecord] | None = None,
        past_boot: str = "",
        probation_s: float = PROBATION_S,
    ) -> None:
        self._ids = [f"{device.vendor}/{device.uuid or device.index}" for device in devices]
        self._records = [(past or {}).get(name) or DeviceRecord() for name in self._ids]
        self._divided = [is_divided(device) for device in devices]
        self._faults: list[Fault | None] = [None] * len(devices)
        self._silent_s = [-1.0] * len(devices)
        self._probation_s = probation_s
        self.boot = boot
        self.changed = False  # whether a record changed; its reader sets it back once the records are stored
        self.well_n = 0  # number of the operator's latest order that was applied
        if past and past_boot != boot:
            for record in self._records:
                self._booted(record, now)

    def _booted(self, record: DeviceRecord, now: float) -> None:
        """Record that the machine was rebooted: its clock and the error counters began again."""
        record.errors = 0
        if record.failed_s >= 0:
            record.needs_reset = False
            record.failed_s, record.clean_s = now, now
        self.changed = True

    # ------------------------------------------------------------------------------------------------ what is seen

    def read(self, slot: int, reading: SlotReading, now: float) -> None:
        """Handle one reading of a device: lasting faults, new uncorrected memory errors, and whether it answers."""
        record, faults = self._records[slot], reading.faults
        if reading.uncorrected_errors > record.errors:
            record.errors = reading.uncorrected_errors
            self.changed = True
            faults += (Fault("ecc", Gravity.FAILED, "an uncorrectable memory error"),)
        elif reading.uncorrected_errors < record.errors:  # the driver was loaded again
            record.errors = reading.uncorrected_errors
            self.changed = True
        if reading.health != "unresponsive":
            self._silent_s[slot] = -1.0
        elif self._silent_s[slot] < 0:
            self._silent_s[slot] = now
        elif now - self._silent_s[slot] >= UNRESPONSIVE_S:
            faults += (Fault("unresponsive", Gravity.FAILED, "the GPU does not answer"),)
        worst = gravest(faults)
        self._faults[slot] = worst
        if worst is not None and worst.gravity >= Gravity.FAILED:
            self.happened(slot, worst, now)
        elif record.failed_s >= 0 and record.clean_s < 0 and worst is None and reading.health != "unresponsive":
            record.clean_s = now
            self.changed = True
        elif record.clean_s >= 0 and worst is not None:
            record.clean_s = -1.0
            self.changed = True
        self._forget(slot, now)

    def happened(self, slot: int, fault: Fault, now: float) -> None:
        """Handle a fault of a device: as an event, or from a reading. Does nothing below `Gravity.FAILED`.

        It is one more failure only if the device was without a fault before.
        """
        if fault.gravity < Gravity.FAILED:
            return
        record = self._records[slot]
        if record.failed_s < 0 or record.clean_s >= 0:  # a new failure, not one that still lasts
            record.failures += 1
            record.failed_s = now
            self.changed = True
        if record.clean_s >= 0 or not record.kind or (fault.gravity == Gravity.RESET and not record.needs_reset):
            record.kind, record.detail = fault.kind, shortened(fault.detail, DETAIL_CHARS_MAX)
            self.changed = True
        record.clean_s = -1.0
        record.needs_reset |= fault.gravity == Gravity.RESET

    def check_failed(self, slot: int, why: str) -> None:
        """Close a device whose check failed, until an operator declares it well; its readings show nothing of it."""
        self._records[slot].check = shortened(why, DETAIL_CHARS_MAX)
        self.changed = True

    def _forget(self, slot: int, now: float) -> None:
        record = self._records[slot]
        if record.failed_s < 0:
            return
        over_s = record.clean_s + self.probation_of(slot)
        if record.clean_s >= 0 and not record.needs_reset and now >= max(over_s, record.failed_s + FORGET_S):
            self._records[slot] = DeviceRecord(errors=record.errors, check=record.check)
            self.changed = True

    # --------------------------------------------------------------------------------------------------- the verdict

    def probation_of(self, slot: int) -> float:
        """Return how many seconds a failed device must be without a fault before it is used again."""
        flaps = max(0, self._records[slot].failures - 1)
        return min(PROBATION_S_MAX, self._probation_s * float(1 << min(flaps, 16)))

    def verdict(self, slot: int, now: float) -> Verdict:
        record, fault = self._records[slot], self._faults[slot]
        if record.failed_s >= 0:
            if record.clean_s < 0 or record.needs_reset:
                return Verdict(record.kind, record.detail, ends=True, recorded=True)
            if now < record.clean_s + self.probation_of(slot):
                return Verdict("probation", shortened(f"after {record.detail}", DETAIL_CHARS_MAX), recorded=True)
        if self._divided[slot]:
            return DIVIDED
        if self._records[slot].check:
            return Verdict("check", self._records[slot].check, recorded=True)
        if fault is None or fault.gravity < Gravity.CLOSED:
            return OK
        return Verdict(fault.kind, fault.detail, recorded=fault.kind in ("reset-needed", "fabric"))

    def unwell(self, now: float) -> list[Unwell]:
        """Return, for the renewal, the devices that must not be given out and whose state survives a takeover."""
        told = ((slot, self.verdict(slot, now)) for slot in range(len(self._records)))
        return [Unwell(slot, v.kind, v.detail, v.ends) for slot, v in told if v.recorded]

    def well(self, slots: Sequence[int], n: int) -> list[int]:
        """Apply an operator's order, numbered `n`, that these devices are well. Return the slots.

        Return [] and do nothing for an order that was applied already; unknown slots are left out.
        """
        if n <= self.well_n:
            return []
        self.well_n = n
        known = [slot for slot in slots if 0 <= slot < len(self._records)]
        for slot in known:
            self._records[slot] = DeviceRecord(errors=self._records[slot].errors)
            self._silent_s[slot] = -1.0
            self._faults[slot] = None
        self.changed = True
        return known

    def records(self) -> dict[str, DeviceRecord]:
        """Return the records to store, by device id, without those of devices on which nothing has happened."""
        empty = DeviceRecord()
        return {name: record for name, record in zip(self._ids, self._records, strict=True) if record != empty}
