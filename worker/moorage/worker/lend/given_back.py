"""Return the devices of an ended lease to the pool once they are seen free; until then they may be quarantined."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from moorage.system.proctree import boottime_s
from moorage.worker.devices.pool import GpuLease, GpuPool
from moorage.worker.devices.readers.base import PROBE_QUARANTINED_S, PROBE_S, Inventory
from moorage.worker.lend.holder import Holder

#: the party that closes a slot, as the pool records it
CLOSED_BY: Final = "asked back"

log = logging.getLogger("moorage.worker")


class Returning:
    """The devices of one worker that holders have given back, or should have. `spawn` runs each wait as a task."""

    def __init__(
        self,
        worker: str,
        pool: GpuPool,
        inventory: Inventory,
        free_wait_s: float,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._worker = worker
        self._pool = pool
        self._inventory = inventory
        self._free_wait_s = free_wait_s
        self._spawn = spawn
        self._freeing: set[GpuLease] = set()
        self._unseen: set[int] = set()  # slots whose device could not be read; each is logged once
        self._marked: dict[int, set[Holder]] = {}  # slots that we quarantined, and because of which holders

    def free(self, leases: list[GpuLease], holder: Holder) -> None:
        """Give these leases back to the pool, each once its device is seen free; return at once.

        A whole device is free once its memory is back at the idle baseline, a share once no process of the holder is on
        the device. A device that is not free after `free_wait_s` is quarantined until it is.
        """
        self._freeing.update(leases)
        for lease in leases:
            self._spawn(self._free_when_seen(lease, holder))

    def close(self) -> None:
        """Give the leases that wait for free devices back to the pool now, unchecked. The waits must have ended."""
        for lease in self._freeing:
            lease.release()
        self._freeing.clear()

    def overdue(self, holder: Holder) -> None:
        """Quarantine the devices of a holder whose deadline has passed.

        The quarantine ends when they are given back and free, or by `stays`.
        """
        asked = holder.asked_back
        for slot in holder.slots:
            self._mark(slot, holder, f"asked back from pid {holder.pid}: {asked.reason if asked else ''}")
        log.error("worker %s: %r was asked to give its GPUs back and did not", self._worker, holder)

    async def _free_when_seen(self, lease: GpuLease, holder: Holder) -> None:
        slot = lease.slot
        ends_s = boottime_s() + self._free_wait_s
        waited_out = False
        while not await self._is_free(slot, holder):
            if not waited_out and boottime_s() >= ends_s:
                waited_out = True
                self._mark(slot, holder, f"memory kept after the lease of pid {holder.pid}")
                log.error(
                    "worker %s: GPU %d is in quarantine: its memory stays in use after %r", self._worker, slot, holder
                )
            await asyncio.sleep(PROBE_QUARANTINED_S if waited_out else PROBE_S)
        self._unseen.discard(slot)
        self._freeing.discard(lease)
        lease.release()
        self._unmark(slot, holder)  # it may be marked as overdue, too

    async def _is_free(self, slot: int, holder: Holder) -> bool:
        """Return whether a whole device has its idle memory, or none of the holder's processes is on a shared one.

        A device that cannot be read is not free.
        """
        try:
            return await self._look(slot, holder)
        except Exception as error:
            if slot not in self._unseen:
                self._unseen.add(slot)
                log.error("worker %s: GPU %d cannot be read: %r", self._worker, slot, error)
            return False

    async def _look(self, slot: int, holder: Holder) -> bool:
        if holder.family is None:
            return await self._inventory.memory_is_free(slot)
        holder.family.look()
        reading = (await self._inventory.sample())[slot]
        return reading.health != "unresponsive" and not any(holder.family.has(each.pid) for each in reading.processes)

    def stays(self, holder: Holder) -> None:
        """Lift the quarantine of a holder that may keep its devices after all, if no other holder keeps it up."""
        for slot in holder.slots:
            self._unmark(slot, holder)

    def _mark(self, slot: int, holder: Holder, reason: str) -> None:
        self._marked.setdefault(slot, set()).add(holder)
        self._pool.quarantine(slot, reason, CLOSED_BY)

    def _unmark(self, slot: int, holder: Holder) -> None:
        """Remove one holder's mark. Several sharers may have marked a device: the last removal lifts its quarantine."""
        marks = self._marked.get(slot, set())
        marks.discard(holder)
        if not marks and self._marked.pop(slot, None) is not None:
            self._pool.unquarantine(slot, CLOSED_BY)
