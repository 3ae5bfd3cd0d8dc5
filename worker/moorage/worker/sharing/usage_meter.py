"""Measure what jobs use of their GPUs, from the readings for load frames."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import UNKNOWN_MS, AttemptUse, DeviceUse
from moorage.system.proctree import sees_all_pids
from moorage.worker.devices.readers.base import SlotReading
from moorage.worker.driver import Driver
from moorage.worker.session.attempt_messages import Attempt, Metered
from moorage.worker.sharing.recent_use import RecentUse
from moorage.worker.sharing.stillness import Stillness


class UsageMeter:
    """The meter of one worker; `held` are its attempts. `recent` has what each of them uses now and used of late, and
    `stillness` for how long it has shown no sign of work.

    A job that has its devices alone uses what the devices report; a sharer uses what its processes use. If a device
    does not report its load, as a MIG slice, only memory is measured. Under MPS the driver reports the server's load
    alone: each client has the device's, as shared by so many, and an equal part of it counts for its job. Nothing is
    measured for a device that does not answer, for a VM, and for sharers whose driver or board cannot attribute
    processes.
    """

    def __init__(
        self, held: Mapping[AttemptName, Attempt], drivers: Mapping[str, Driver], *, hears_output: bool = True
    ) -> None:
        self._held = held
        self._drivers = drivers
        self.recent = RecentUse()
        self.stillness = Stillness(held, hears_output=hears_output)
        self._sees_all_pids = sees_all_pids()
        self._running: set[AttemptName] = set()  # at the last reading
        self._before: set[AttemptName] = set()  # and at the one before it
        self._read_s = 0.0

    def newest(self) -> list[AttemptUse]:
        """Return the newest reading of each running attempt, for a renewal."""
        return self.recent.newest(self.stillness.seconds())

    def read(self, readings: Sequence[SlotReading], now_s: float) -> Metered | None:
        """Handle a reading of each slot.

        Return what was used since the last reading by the jobs that ran at both; None if nothing was measured.
        """
        passed_ms, self._read_s = int((now_s - self._read_s) * 1000), now_s
        uses = self.measure(readings, now_s)
        items: list[tuple[AttemptName, int, int, int]] = []
        for name, each in uses.items():
            if name in self._before:
                percent = _sum([use.percent and use.percent // (use.shared_by or 1) for use in each])
                gpu_ms = UNKNOWN_MS if percent is None else percent * passed_ms // 100
                memory_mib = sum(use.memory_mib or 0 for use in each)
                items.append((name, gpu_ms, memory_mib * passed_ms, memory_mib))
        return Metered(items) if items else None

    def measure(self, readings: Sequence[SlotReading], now_s: float) -> dict[AttemptName, list[DeviceUse]]:
        """Return and record what each running attempt uses by this reading of each slot; without those not measured."""
        running = {
            name: attempt
            for name, attempt in self._held.items()
            if attempt.slots and attempt.phase in ("running", "ending") and not attempt.frozen
            if not any(readings[slot].handed_on or readings[slot].health == "unresponsive" for slot in attempt.slots)
        }
        whose: dict[tuple[str, int], dict[int, AttemptName | None] | None] = {}
        uses: dict[AttemptName, list[DeviceUse]] = {}
        for name, attempt in running.items():
            if attempt.place.mode == "exclusive":
                uses[name] = [_of_device(slot, readings[slot]) for slot in attempt.slots]
            elif (shared := self._of_processes(attempt, readings, whose)) is not None:
                uses[name] = shared
        self._before, self._running = self._running, set(running)
        self.recent.record(now_s, uses)
        self.stillness.read(readings, uses, now_s)
        return uses

    def _of_processes(
        self,
        attempt: Attempt,
        readings: Sequence[SlotReading],
        whose: dict[tuple[str, int], dict[int, AttemptName | None] | None],
    ) -> list[DeviceUse] | None:
        """Return what the processes of a sharer use of each device; None if that cannot be measured.

        `whose` caches the attempts that were found for other sharers of this reading.
        """
        uses: list[DeviceUse] = []
        for slot in attempt.slots:
            used_by, key = readings[slot].used_by, (attempt.driver, slot)
            if used_by is None:
                return None
            if key not in whose:
                whose[key] = self._whose(self._drivers[attempt.driver], list(used_by))
            names = whose[key]
            if names is None:
                return None
            own = [use for pid, use in used_by.items() if names.get(pid) == attempt.name]
            percent, shared_by = _sum([use.percent for use in own]), 0
            if percent is None and attempt.place.mode == "mps" and readings[slot].util_percent is not None:
                percent, shared_by = readings[slot].util_percent, self._sharers(slot)
            power = readings[slot].power_w, readings[slot].power_limit_w
            uses.append(DeviceUse(slot, percent, sum(use.memory_mib for use in own), *power, shared_by))
        return uses

    def _sharers(self, slot: int) -> int:
        """Return how many attempts run on a device."""
        return sum(slot in attempt.slots and attempt.phase in ("running", "ending") for attempt in self._held.values())

    def _whose(self, driver: Driver, pids: Sequence[int]) -> dict[int, AttemptName | None] | None:
        """Return the attempt of each process; None if the driver or this PID namespace cannot tell."""
        if not driver.can_measure():
            return None
        if not self._sees_all_pids and not all(os.path.exists(f"/proc/{pid}") for pid in pids):
            return None  # in another PID namespace the same pid may be another process
        return driver.attempts_of(pids)


def _of_device(slot: int, reading: SlotReading) -> DeviceUse:
    return DeviceUse(slot, reading.util_percent, reading.memory_used_mib, reading.power_w, reading.power_limit_w)


def _sum(percents: Sequence[int | None]) -> int | None:
    """Return the sum of percents; None if one is unknown."""
    told = [each for each in percents if each is not None]
    return sum(told) if len(told) == len(percents) else None
