"""The GPUs of a simulated machine: whose processes hold their memory, and what of it comes back late.

A device's memory is in use while a process of its lease lives and for a while after: at once, within seconds, or later
than the worker waits before it takes the device out of use. Who is given a device must not meet what another left.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from dataclasses import dataclass
from typing import Final

from moorage.system.simulated_hosts import SimulatedHost
from moorage.worker.devices.readers.base import SlotReading, is_free
from moorage.worker.devices.readers.simulated import BASELINE_MIB, SimulatedInventory

#: seconds until the memory of a process that ended is free: mostly at once, and at times past `free_wait_s`
FREED_AFTER_S: Final = (0.0, 0.0, 0.0, 0.4, 3.0, 14.0)
USED_MIB: Final = 9_000


@dataclass(slots=True)
class Ran:
    """One process of a job, as the machine saw it. `end_s` stays None while it lives; `code` None: it was killed."""

    machine: str
    key: str
    uuids: tuple[str, ...]
    start_s: float
    end_s: float | None = None
    code: int | None = None


@dataclass(slots=True)
class LocalHold:
    """A device that code of the worker's own process holds; `mode` as in its claim."""

    uuid: str
    mode: str
    ticket: int


class Memory:
    """Of all devices of one machine, by uuid. `rng` decides when it is back; without faults that is at once."""

    def __init__(self, rng: random.Random, *, is_late: bool) -> None:
        self._rng = rng
        self.is_late = is_late
        self._left: dict[str, list[tuple[float, Ran]]] = {}

    def ended(self, ran: Ran) -> None:
        """The process is gone, or frozen; what it had on its devices may not be."""
        wait_s = self._rng.choice(FREED_AFTER_S) if self.is_late and ran.uuids else 0.0
        if wait_s:
            until_s = asyncio.get_running_loop().time() + wait_s
            for uuid in ran.uuids:
                self._left.setdefault(uuid, []).append((until_s, ran))

    def came_back(self, ran: Ran) -> None:
        """The process is resumed: what was left of its memory is in use again, not to be freed."""
        self._left = {uuid: [entry for entry in kept if entry[1] is not ran] for uuid, kept in self._left.items()}

    def hurry(self, within_s: float) -> None:
        """What is kept comes back soon, and what ends from now on leaves nothing."""
        self.is_late, soon_s = False, asyncio.get_running_loop().time() + within_s
        self._left = {uuid: [(min(until_s, soon_s), ran) for until_s, ran in kept] for uuid, kept in self._left.items()}

    def rebooted(self) -> None:
        self._left.clear()

    def left(self, uuid: str) -> list[Ran]:
        """The dead whose memory this device still keeps."""
        if uuid not in self._left:
            return []
        now = asyncio.get_running_loop().time()
        self._left[uuid] = [entry for entry in self._left[uuid] if entry[0] > now]
        return [ran for _, ran in self._left[uuid]]


class MachineInventory(SimulatedInventory):
    """The production simulation's inventory over the memory of this machine."""

    def __init__(self, host: SimulatedHost, memory: Memory, *, is_metered: bool) -> None:
        super().__init__(host)
        self.simulated = not is_metered  # as of a real board its readings are looked at for use
        self._memory = memory

    async def sample(self) -> list[SlotReading]:
        readings = await super().sample()
        if self.simulated:
            return readings
        return [dataclasses.replace(each, util_percent=0) for each in readings]

    async def memory_is_free(self, slot: int) -> bool:
        return is_free(self._reading(slot), BASELINE_MIB) and await super().memory_is_free(slot)

    def _reading(self, slot: int) -> SlotReading:
        kept_mib = USED_MIB if self._memory.left(self.host.devices[slot].uuid) else 0
        return SlotReading(memory_used_mib=BASELINE_MIB + kept_mib)
