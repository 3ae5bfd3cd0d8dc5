"""Give the segments of a worker their heartbeats and their tokens, ten times a second, and tell them each second what
NVML says that their processes hold, while the agent runs.

What the driver reports of a process is added to the attempt whose segment has a slot of that process; a process without
a slot is added to no attempt. If it reports nothing for a device, as for a MIG slice, or none of an attempt's slots has
a known pid, tokens come at a constant rate by the share. Without an agent launches pass, and the memory limit stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from moorage.schemas.attempt import AttemptName
from moorage.system.proctree import sees_all_pids
from moorage.worker.devices.readers.base import HeldUnknown, Inventory
from moorage.worker.driver import Driver
from moorage.worker.sharing.limiter.controller import PASSED_S_MIN, RATE, Controller
from moorage.worker.sharing.limiter.owners import Owners
from moorage.worker.sharing.limiter.segment import Segment, Slot

#: between two refills; a job's process takes the worker for dead if the last heartbeat is two seconds old
STEP_S: Final = 0.1
#: between two searches for processes that have ended
LOOK_S: Final = 1.0
#: before a device is asked again that reports nothing of its processes
RETRY_S: Final = 10.0
#: for how many seconds of a constant rate a bucket has room, as in the reference; it has room for the dearest launch in
#: any case
CAPACITY_S: Final = 2.0
CAPACITY_MIN: Final = 10.0

log = logging.getLogger("moorage.worker")


@dataclass
class _Attempt:
    last_s: float
    name: AttemptName
    driver: Driver
    owners: Owners
    slots: list[Slot] = field(default_factory=list)
    controllers: dict[int, Controller] = field(default_factory=dict)
    opened: int = 0
    is_told: bool = False


class Feeder:
    """The segments of the drivers of one worker that have a limiter; `inventory` has the devices."""

    def __init__(self, drivers: Iterable[Driver], inventory: Inventory) -> None:
        self._drivers = [(driver, driver.limits) for driver in drivers if driver.limits is not None]
        self._inventory = inventory
        self._sees_all_pids = sees_all_pids()
        self._slots = {_bare(device.uuid): slot for slot, device in enumerate(inventory.devices())}
        self._attempts: dict[Segment, _Attempt] = {}
        self._unmeasured: dict[str, float] = {}  # by device: when it was last asked in vain
        self._looked_s = 0.0

    async def run(self) -> None:
        """Take a step each `STEP_S` seconds, until cancelled. A fault is logged, once while it is the same."""
        fault = ""
        while True:
            try:
                await self.step(time.monotonic())
            except Exception as error:  # the others must have their heartbeats, and this one its next try
                if fault != (fault := repr(error)):
                    log.exception("the limiter: a step failed")
            await asyncio.sleep(STEP_S)

    async def step(self, now_s: float) -> None:
        """Give every segment its heartbeat and its tokens; each `LOOK_S` seconds look at the processes, too.

        A segment that cannot be written is logged once; the others are not affected.
        """
        known = {
            segment: (name, driver, limits.owners)
            for driver, limits in self._drivers
            for name, segment in limits.segments.items()
        }
        self._attempts = {one: self._attempts.get(one) or _Attempt(now_s, *about) for one, about in known.items()}
        measured: dict[str, dict[int, float] | None] = {}
        for segment, attempt in list(self._attempts.items()):
            try:
                segment.beat()
                if now_s - attempt.last_s >= PASSED_S_MIN:
                    await self._refill(segment, attempt, now_s, measured)
                    attempt.last_s = now_s
            except (OSError, struct.error) as error:  # struct.error: a job has written numbers that are too large
                if not attempt.is_told and not segment.is_closed:
                    log.warning("job %s: the limiter's segment cannot be refilled: %s", attempt.name[1], error)
                    attempt.is_told = True
        if now_s >= self._looked_s + LOOK_S:
            self._looked_s = now_s
            with contextlib.suppress(OSError):  # out of descriptors: try again later
                self._look()
            with contextlib.suppress(OSError):
                await self._write_held()

    async def _refill(
        self, segment: Segment, attempt: _Attempt, now_s: float, measured: dict[str, dict[int, float] | None]
    ) -> None:
        passed_s = now_s - attempt.last_s
        attempt.slots = segment.slots()
        pids = {pid for slot in attempt.slots if (pid := attempt.owners.pid_of(slot))}
        is_known = bool(pids) or not attempt.slots
        for device, uuid in enumerate(map(_bare, segment.uuids)):
            rate = segment.rate(device)
            if not rate:
                attempt.controllers.pop(device, None)
                continue
            if uuid not in measured:
                measured[uuid] = await self._measured(uuid, now_s)
            used = measured[uuid]
            if used is None or not is_known:
                attempt.controllers.pop(device, None)
                segment.refill(device, rate * min(passed_s, CAPACITY_S), max(CAPACITY_MIN, rate * CAPACITY_S))
                continue
            target = min(rate / RATE, 1.0)
            controller = attempt.controllers.get(device)
            if controller is None:
                controller = attempt.controllers[device] = Controller(target)
                controller.begin(segment, device)
            controller.target = target
            controller.step(segment, device, sum(used.get(pid, 0.0) for pid in pids), passed_s)

    async def _measured(self, uuid: str, now_s: float) -> dict[int, float] | None:
        """Return the part of a device that each process uses, 0..1; None if it is unknown. A change is logged."""
        if uuid in self._unmeasured and now_s < self._unmeasured[uuid] + RETRY_S:
            return None
        try:
            if uuid not in self._slots:
                raise HeldUnknown("this worker has it no more")
            percents = await self._inventory.worked(self._slots[uuid])
            self._check_pids(percents)
        except HeldUnknown as unknown:
            if uuid not in self._unmeasured:
                log.warning(
                    "the limiter: device %s: %s: launches of its jobs come at a constant rate, not by what they use",
                    uuid,
                    unknown.reason,
                )
            self._unmeasured[uuid] = now_s
            return None
        if self._unmeasured.pop(uuid, None) is not None:
            log.warning("the limiter: device %s: what processes use of it is known again", uuid)
        return {pid: percent / 100 for pid, percent in percents.items()}

    def _check_pids(self, pids: Collection[int]) -> None:
        """Raise HeldUnknown if one is of another PID namespace: here its number may be that of another process."""
        absent = [pid for pid in pids if not os.path.exists(f"/proc/{pid}")]
        if absent and not self._sees_all_pids:
            raise HeldUnknown(f"NVML names pid {absent[0]}, which is not in the worker's PID namespace")

    def _look(self) -> None:
        """Release the counted memory of processes that have ended. Log which attempts had launches without tokens.

        Raises OSError.
        """
        dead: set[int] = set()
        for _, limits in self._drivers:
            own = [attempt.slots for attempt in self._attempts.values() if attempt.owners is limits.owners]
            dead |= limits.owners.look([slot for slots in own for slot in slots])
        for segment, attempt in self._attempts.items():
            if segment.is_closed:
                continue
            for slot in attempt.slots:
                if slot.owner in dead:
                    segment.mark_dead(slot)
            opened = segment.counts().opened
            if opened > attempt.opened:
                why = "because the agent gave no heartbeat"
                log.warning("job %s: %d kernel launches were not throttled, %s", attempt.name[1], opened, why)
                attempt.opened = opened

    async def _write_held(self) -> None:
        """Write into each segment with a limit what its processes hold by NVML. Raises OSError."""
        on: dict[int, list[tuple[Segment, int, _Attempt]]] = {}
        for segment, attempt in self._attempts.items():
            for device, uuid in enumerate(() if segment.is_closed else map(_bare, segment.uuids)):
                if uuid in self._slots and segment.limit(device):
                    on.setdefault(self._slots[uuid], []).append((segment, device, attempt))
        await asyncio.gather(*(self._write_held_of(slot, limited) for slot, limited in on.items()))

    async def _write_held_of(self, slot: int, limited: list[tuple[Segment, int, _Attempt]]) -> None:
        """Write this for one device. Segments keep what they have if NVML fails. Raises OSError."""
        readings = [segment.begin_reading() for segment, _, _ in limited]
        try:
            held = {pid: mib << 20 for pid, mib in (await self._inventory.held(slot)).items()}
            self._check_pids(held)
        except HeldUnknown:
            return
        for (segment, device, attempt), reading in zip(limited, readings, strict=True):
            if segment.is_closed:
                continue
            pids = {one.owner: attempt.owners.pid_of(one) for one in reading.slots}
            segment.write_held(reading, device, {owner: held[pid] for owner, pid in pids.items() if pid in held})
            if 0 in pids.values():
                continue  # of those without a slot it cannot be told which they are
            attempts = attempt.driver.attempts_of(held.keys() - pids.values())
            segment.write_others(device, sum(held[pid] for pid, name in attempts.items() if name == attempt.name))


def _bare(uuid: str) -> str:
    return uuid.partition("-")[2]  # a segment does not tell a GPU from a MIG slice
