"""Find the process of this host for each slot of a segment, and the slots whose process has ended."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

from moorage.system.proctree import all_processes, read_process, sees_all_pids
from moorage.worker.sharing.limiter.segment import Slot, owner_of


class Owners:
    """The processes of all segments of a worker. Call `look` about every second, and `pid_of` at any time."""

    def __init__(self) -> None:
        self.sees_all_pids = sees_all_pids()
        self._own_ns = os.stat("/proc/self/ns/pid").st_ino
        self._hosts: dict[int, int] = {}  # by owner, in another PID namespace: its pid here

    def pid_of(self, slot: Slot) -> int:
        """Return the pid of a slot's process in this process's PID namespace; 0 if unknown. It may have ended."""
        return slot.pid if slot.pid_ns == self._own_ns else self._hosts.get(slot.owner, 0)

    def look(self, slots: Collection[Slot]) -> set[int]:
        """Check the processes of all slots; return the owners that have ended. Raises OSError.

        An owner in another PID namespace is found by a scan of /proc. If this process does not see all processes of the
        host, such an owner is never returned.
        """
        unknown: set[int] = set()
        inner = {slot.owner for slot in slots if slot.pid_ns != self._own_ns}
        self._hosts = {owner: pid for owner, pid in self._hosts.items() if owner in inner}
        for slot in slots:
            pid = self.pid_of(slot)
            found = read_process(pid) if pid else None
            if found is None or owner_of(slot.pid, found.start_ticks) != slot.owner:
                self._hosts.pop(slot.owner, None)
                # a process of another namespace is found by its pid there, if this process sees all processes
                if slot.pid_ns == self._own_ns or self.sees_all_pids:
                    unknown.add(slot.owner)
        if sought := inner & unknown:
            self._hosts |= _found(sought)
        return unknown - self._hosts.keys()


def _found(owners: set[int]) -> dict[int, int]:
    """Return the pid in this PID namespace of each of these owners; those without a process have no entry."""
    found: dict[int, int] = {}
    for process in all_processes():
        with contextlib.suppress(OSError, ValueError, StopIteration), open(f"/proc/{process.pid}/status") as status:
            line = next(each for each in status if each.startswith("NSpid:"))
            owner = owner_of(int(line.split()[-1]), process.start_ticks)
            if owner in owners:
                found[owner] = process.pid
    return found
