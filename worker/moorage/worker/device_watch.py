"""The devices' health as the agent keeps it: in the pool, in a file for the next agent, and in what it tells.

`device_health` judges; here its judgement is carried out. A device that is unwell is out of the pool's use alone, and
so is one that somebody outside holds: placements there are refused, the others of the host go on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Container, Sequence
from pathlib import Path
from typing import Final

import msgspec

from moorage.schemas.errors import refuse
from moorage.schemas.frames import Device, Unwell
from moorage.schemas.unreadable import UNREADABLE
from moorage.worker.device_health import DeviceHealth, DeviceRecord
from moorage.worker.inventory.base import SlotReading
from moorage.worker.inventory.faults import Fault
from moorage.worker.pool import GpuPool, SlotState

log = logging.getLogger("moorage.worker")

#: who keeps a slot of the pool closed
CLOSED_BY: Final = "health"
#: what a load frame says of a device that a VM has
HANDED_ON: Final = "handed on to a VM"


class _File(msgspec.Struct):
    boot: str
    devices: dict[str, DeviceRecord]


_decode: Final = msgspec.json.Decoder(_File).decode


class DeviceWatch:
    """`told` are the devices that are unwell, as the renewals say them. Without a `file` nothing outlives the agent."""

    def __init__(
        self, devices: Sequence[Device], boot: str, pool: GpuPool, probation_s: float, now: float, file: Path | None
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
        self._ours: frozenset[int] = frozenset()  # slots that are out of use by our doing
        self._foreign: dict[int, str] = {}
        #: the pids among these that the leases of a slot explain; without it, all of a slot that is leased
        self.explained: Callable[[int, Collection[int]], Container[int]] = lambda slot, pids: pids

    # ---------------------------------------------------------------------------------------- what is seen and heard

    def seen(self, readings: Sequence[SlotReading], now: float) -> bool:
        """Take in a reading of every device; whether what is told has changed."""
        for slot, reading in enumerate(readings):
            self.health.read(slot, reading, now)
        self._foreign = {}
        if any(reading.processes for reading in readings):
            for state, reading in zip(self._pool.slot_states(), readings, strict=True):
                if who := self._foreign_of(state, reading):
                    self._foreign[state.slot] = who
        return self._settle(now)

    def happened(self, slot: int, fault: Fault, now: float) -> bool:
        """As `seen`, for an event."""
        self.health.happened(slot, fault, now)
        return self._settle(now)

    def well(self, slots: Sequence[int], n: int, now: float) -> list[int]:
        """An operator's word; those slots for which it is news."""
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

    # ------------------------------------------------------------------------------------------- what is made of it

    def check_foreign(self, slots: Sequence[int]) -> None:
        """Raise `Refused` for a slot on which somebody outside was seen at the last look."""
        for slot in slots if self._foreign else ():
            if slot in self._foreign:
                raise refuse("failed-precondition", f"foreign: GPU {slot} is used by {self._foreign[slot]}")

    def shown(self, state: SlotState, reading: SlotReading, now: float) -> tuple[str, str, str]:
        """Health, who is there from outside, and detail, for the load frame."""
        foreign = self._foreign.get(state.slot, "") if state.sharers else self._foreign_of(state, reading)
        verdict = self.health.verdict(state.slot, now)
        if verdict.kind != "ok":
            return verdict.kind, foreign, verdict.detail
        if state.quarantine:
            return "quarantined", foreign, ""
        if reading.handed_on:
            return "ok", "", HANDED_ON
        # memory errors are judged when they are new: what is known, and has been clean since, is well
        return "ok" if reading.health == "ecc" else reading.health, foreign, ""

    def _foreign_of(self, state: SlotState, reading: SlotReading) -> str:
        """The first process there that no lease explains; of a lease to a process of this host nothing is known."""
        if not reading.processes or state.local:
            return ""
        ours: Container[int] = (os.getpid(),)
        if state.sharers:
            ours = self.explained(state.slot, [process.pid for process in reading.processes])
        return reading.foreign(ours)

    def _write(self) -> None:
        if self._file is None:
            self.health.changed = False
            return
        fresh = self._file.with_name(self._file.name + ".new")
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh.write_bytes(msgspec.json.encode(_File(self.health.boot, self.health.records())))
            os.rename(fresh, self._file)
        except OSError as error:
            log.error("the health of devices is not kept: %s", error)


def _read(file: Path | None) -> _File | None:
    if file is None:
        return None
    try:
        return _decode(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE) as error:
        log.error("%s tells nothing of devices: %s", file, error)
        return None
