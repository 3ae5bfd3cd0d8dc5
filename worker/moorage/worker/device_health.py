"""The health of one worker's devices: what is closed, what has failed, and when it may be used again. Pure.

A device goes from well to *closed* (nothing new, what runs goes on) or *failed* (what runs leaves it) by what its
readings and events say; from failed through *probation* back to well, once nothing was wrong with it for a while. That
while is `probation_s` and doubles with every failure within a day, up to a day, so that a device that flaps stays away
ever longer. A failure that only a reset cures waits for one: the next boot of the machine starts the probation, and so
does nothing else but an operator's word, which ends it at once.

What must survive a restart of the agent is in `DeviceRecord`s, which the shell keeps; times are seconds of
CLOCK_BOOTTIME.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from moorage.schemas.frames import Device, Unwell
from moorage.worker.inventory.base import SlotReading
from moorage.worker.inventory.faults import DETAIL_CHARS_MAX, Fault, Gravity, gravest

PROBATION_S: Final = 600.0
PROBATION_S_MAX: Final = 86400.0
#: a failure is forgotten after so long without another
FORGET_S: Final = 86400.0
#: a device that does not answer for so long has failed
UNRESPONSIVE_S: Final = 30.0


class DeviceRecord(msgspec.Struct, omit_defaults=True):
    """One device's past. `failed_s` -1: it has not failed, or was told to be well."""

    kind: str = ""
    detail: str = ""
    needs_reset: bool = False
    failed_s: float = -1.0
    clean_s: float = -1.0  # since when nothing is wrong with it; -1: something is
    failures: int = 0
    errors: int = 0  # uncorrected memory errors that are known already


class Verdict(NamedTuple):
    """What is to be thought of a device now: `kind` ok means that it may be given out."""

    kind: str
    detail: str
    ends: bool = False
    #: whether it is told with the renewals and so recorded; what is only hot, or silent for a moment, is not
    recorded: bool = False


OK: Final = Verdict("ok", "")
#: a job that is given the whole device finds no memory on it: CUDA opens slices alone
DIVIDED: Final = Verdict(
    "mig", "the GPU is in MIG mode, and its slices are not offered: nvidia-smi -mig 0", recorded=True
)


def is_divided(device: Device) -> bool:
    """Whether it is a whole GPU in MIG mode, and not one of its slices, whose identity begins with MIG-."""
    return device.mig and not device.uuid.startswith("MIG-")


class DeviceHealth:
    """All devices of a worker, by slot. `boot` is the machine's boot id; `past` what `records` gave before."""

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
        self.changed = False  # since `records` was taken
        self.well_n = 0  # the newest word of an operator that was taken
        if past and past_boot != boot:
            for record in self._records:
                self._booted(record, now)

    def _booted(self, record: DeviceRecord, now: float) -> None:
        """The machine was reset: its clock began anew, and error counters with it."""
        record.errors = 0
        if record.failed_s >= 0:
            record.needs_reset = False
            record.failed_s, record.clean_s = now, now
        self.changed = True

    # ------------------------------------------------------------------------------------------------ what is seen

    def read(self, slot: int, reading: SlotReading, now: float) -> None:
        """One reading of a device: what lasts, and uncorrected memory errors that are new."""
        record, faults = self._records[slot], reading.faults
        if reading.uncorrected_errors > record.errors:
            record.errors = reading.uncorrected_errors
            self.changed = True
            faults += (Fault("ecc", Gravity.FAILED, "an uncorrectable memory error"),)
        elif reading.uncorrected_errors < record.errors:  # the driver was loaded anew
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
        """A fault that is an event; one that lasts comes again with every reading and counts once."""
        if fault.gravity < Gravity.FAILED:
            return
        record = self._records[slot]
        if record.failed_s < 0 or record.clean_s >= 0:  # a new failure, not the same that goes on
            record.failures += 1
            record.failed_s = now
            self.changed = True
        if record.clean_s >= 0 or not record.kind or (fault.gravity == Gravity.RESET and not record.needs_reset):
            record.kind, record.detail = fault.kind, fault.detail[:DETAIL_CHARS_MAX]
            self.changed = True
        record.clean_s = -1.0
        record.needs_reset |= fault.gravity == Gravity.RESET

    def _forget(self, slot: int, now: float) -> None:
        record = self._records[slot]
        if record.failed_s < 0:
            return
        over_s = record.clean_s + self.probation_of(slot)
        if record.clean_s >= 0 and not record.needs_reset and now >= max(over_s, record.failed_s + FORGET_S):
            self._records[slot] = DeviceRecord(errors=record.errors)
            self.changed = True

    # ------------------------------------------------------------------------------------------- what is made of it

    def probation_of(self, slot: int) -> float:
        """How long it must be clean before it is used again, in seconds."""
        flaps = max(0, self._records[slot].failures - 1)
        return min(PROBATION_S_MAX, self._probation_s * float(1 << min(flaps, 16)))

    def verdict(self, slot: int, now: float) -> Verdict:
        record, fault = self._records[slot], self._faults[slot]
        if record.failed_s >= 0:
            if record.clean_s < 0 or record.needs_reset:
                return Verdict(record.kind, record.detail, ends=True, recorded=True)
            if now < record.clean_s + self.probation_of(slot):
                return Verdict("probation", f"after {record.detail}"[:DETAIL_CHARS_MAX], recorded=True)
        if self._divided[slot]:
            return DIVIDED
        if fault is None or fault.gravity < Gravity.CLOSED:
            return OK
        return Verdict(fault.kind, fault.detail, recorded=fault.kind == "reset-needed")

    def unwell(self, now: float) -> list[Unwell]:
        """For the renewal: what must not be given out, and survives a takeover."""
        told = ((slot, self.verdict(slot, now)) for slot in range(len(self._records)))
        return [Unwell(slot, v.kind, v.detail, v.ends) for slot, v in told if v.recorded]

    def well(self, slots: Sequence[int], n: int) -> list[int]:
        """An operator's word, numbered `n`, that these devices are well; those that it was news for, once a word."""
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
        """What to keep, by device; only those with a past."""
        self.changed = False
        empty = DeviceRecord()
        return {name: record for name, record in zip(self._ids, self._records, strict=True) if record != empty}
