"""Measure what jobs use of their GPUs, from the readings for load frames."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from moorage.schemas.frames import UNKNOWN_MS
from moorage.system.proctree import sees_all_pids
from moorage.worker.devices.readers.base import SlotReading
from moorage.worker.drivers.base import Driver
from moorage.worker.session.member_messages import Member, MemberName, Metered

#: a member's use at a reading: the sum of percents over its devices, None unless all report it, and MiB
_Use = tuple[int | None, int]


class UsageMeter:
    """The meter of one worker; `held` are its members.

    A job that has its devices alone uses what the devices report; a sharer uses what its processes use. If a device
    does not report its load, as a MIG slice, only memory is measured. Nothing is measured for a device that does not
    answer, for a VM, and for sharers whose driver or board cannot attribute processes.
    """

    def __init__(self, held: Mapping[MemberName, Member], drivers: Mapping[str, Driver]) -> None:
        self._held = held
        self._drivers = drivers
        self._sees_all_pids = sees_all_pids()
        self._before: set[MemberName] = set()  # running at the last reading
        self._read_s = 0.0

    def read(self, readings: Sequence[SlotReading], now_s: float) -> Metered | None:
        """Handle a reading of each slot.

        Return what was used since the last reading by the jobs that ran at both; None if nothing was measured.
        """
        passed_ms, self._read_s = int((now_s - self._read_s) * 1000), now_s
        running = {
            name: member
            for name, member in self._held.items()
            if member.slots and member.phase in ("running", "ending") and not member.frozen  # a guest may use them
            if not any(readings[slot].handed_on or readings[slot].health == "unresponsive" for slot in member.slots)
        }
        items: list[tuple[MemberName, int, int]] = []
        whose: dict[tuple[str, int], dict[int, MemberName | None] | None] = {}
        for name, member in running.items():
            if name not in self._before:
                continue
            used: _Use | None
            if member.place.mode == "exclusive":
                used = _of_devices([readings[slot] for slot in member.slots])
            else:
                used = self._of_processes(member, readings, whose)
            if used is not None:
                percent, memory_mib = used
                gpu_ms = UNKNOWN_MS if percent is None else percent * passed_ms // 100
                items.append((name, gpu_ms, memory_mib * passed_ms))
        self._before = set(running)
        return Metered(items) if items else None

    def _of_processes(
        self,
        member: Member,
        readings: Sequence[SlotReading],
        whose: dict[tuple[str, int], dict[int, MemberName | None] | None],
    ) -> _Use | None:
        """Return what the processes of a sharer use; None if that cannot be measured.

        `whose` caches the members that were found for other sharers of this reading.
        """
        percents: list[int | None] = []
        memory_mib = 0
        for slot in member.slots:
            used_by, key = readings[slot].used_by, (member.driver, slot)
            if used_by is None:
                return None
            if key not in whose:
                whose[key] = self._whose(self._drivers[member.driver], list(used_by))
            names = whose[key]
            if names is None:
                return None
            own = [use for pid, use in used_by.items() if names.get(pid) == member.name]
            percents += [use.percent for use in own]
            memory_mib += sum(use.memory_mib for use in own)
        return _sum(percents), memory_mib

    def _whose(self, driver: Driver, pids: Sequence[int]) -> dict[int, MemberName | None] | None:
        """Return the member of each process; None if the driver or this PID namespace cannot tell."""
        if not driver.can_measure():
            return None
        if not self._sees_all_pids and not all(os.path.exists(f"/proc/{pid}") for pid in pids):
            return None  # in another PID namespace the same pid may be another process
        return driver.members_of(pids)


def _of_devices(readings: Sequence[SlotReading]) -> _Use:
    return _sum([each.util_percent for each in readings]), sum(each.memory_used_mib for each in readings)


def _sum(percents: Sequence[int | None]) -> int | None:
    """Return the sum of percents; None if one is unknown."""
    told = [each for each in percents if each is not None]
    return sum(told) if len(told) == len(percents) else None
