"""Claim the attempts' devices in the pool, and check when they are free again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, cast

from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import Start
from moorage.schemas.gpu import Sharing
from moorage.system.proctree import read_process
from moorage.worker.attempt.rendezvous import LOCAL_ADDRESS, Rendezvous
from moorage.worker.attempt.service_ports import ServicePorts
from moorage.worker.devices.pool import GpuPool, PoolLease, SlotsRefused
from moorage.worker.devices.readers.base import PROBE_S, Inventory, SlotReading
from moorage.worker.freezing.engines import Engines
from moorage.worker.session.attempt_messages import Attempt, Log, NotFree, SeenFree
from moorage.worker.session.shell import Shell
from moorage.worker.sharing.mps.clients import MpsClients

#: the pool records for each quarantine who set it: this is for memory that an ended attempt left in use
MEMORY_KEPT: Final = "memory"
#: this is for a device of an earlier agent's ended attempt, if the device has another slot now
LEFT_BEHIND: Final = "left behind"


class AttemptClaims:
    """The pool leases of one worker's attempts, and the quarantine of their slots."""

    def __init__(
        self,
        shell: Shell,
        pool: GpuPool,
        inventory: Inventory,
        engines: Engines,
        rendezvous: Rendezvous,
        clients: MpsClients,
        ports: ServicePorts,
    ) -> None:
        self._shell = shell
        self._pool = pool
        self._inventory = inventory
        self._engines = engines
        self._rendezvous = rendezvous
        self._clients = clients
        self._ports = ports
        self._leases: dict[AttemptName, PoolLease] = {}
        self._quarantined: dict[int, set[AttemptName]] = {}
        self._left_behind: dict[int, str] = {}  # by slot: a device's name
        self._absent: list[str] = []

    def take(self, attempt: Attempt) -> None:
        """Claim all slots of an attempt at once, and its ports, or none. Raises SlotsRefused, Refused if it cannot
        share by mps, and what `ServicePorts.take` raises."""
        mode = cast(Sharing, attempt.place.mode)
        lease = self._pool.try_claim_slots(attempt.slots, mode, attempt.job)
        try:
            attempt.ports = self._ports.take(attempt.name, attempt.request.workload.ports)
            attempt.address = self._ports.address(attempt.ports)
            self._clients.admit(attempt)
        except BaseException:
            self._ports.give_back(attempt.name)
            lease.release()
            raise
        self._leases[attempt.name] = lease

    def take_again(self, attempt: Attempt) -> None:
        """Claim the slots of an earlier agent's attempt, even if they may no longer be leased to jobs.

        If another attempt has a slot, this one has no lease: a frozen one had given its devices up, and of any other it
        is logged.
        """
        self._ports.take_again(attempt.name, attempt.ports)
        attempt.address = self._ports.address(attempt.ports)
        try:
            mode = cast(Sharing, attempt.place.mode)
            self._leases[attempt.name] = self._pool.take_again(attempt.slots, mode, attempt.job)
        except SlotsRefused as refused:
            attempt.leased = False
            if not attempt.frozen:
                text = f"{attempt.name} holds slots that the pool refuses: {refused}"
                self._shell.say(Log("error", "pool-differs", text))
        self._clients.admit_again(attempt)

    def give_up(self, attempt: Attempt) -> None:
        """Return the devices of a frozen attempt to the pool."""
        self._leases.pop(attempt.name).release()

    def take_back(self, attempt: Attempt) -> None:
        """Claim the slots of a frozen attempt again, all or none. Raises SlotsRefused."""
        mode = cast(Sharing, attempt.place.mode)
        self._leases[attempt.name] = self._pool.try_claim_slots(attempt.slots, mode, attempt.job)

    def address(self, attempt: Attempt) -> str:
        """Return the rendezvous address of the attempt's gang if the attempt is rank 0, else ""."""
        return self._rendezvous.reserve(attempt.name, attempt.master_port_wanted)

    def start_alone(self, attempt: Attempt) -> Start | None:
        """Return the START of a single replica that asks for `distributed`, else None: no leader sends START to such a
        replica.
        """
        gpu = attempt.request.gpu
        if attempt.place.hold or gpu is None or gpu.distributed is None:
            return None
        port = self._rendezvous.reserve_port(attempt.name, gpu.distributed.master_port)
        return Start(*attempt.name, LOCAL_ADDRESS, port, 1)

    def release(self, attempts: Sequence[Attempt]) -> None:
        """Return the devices of attempts to the pool, and end the quarantine that was theirs alone.

        The attempts must have ended, and their devices must have been seen free.
        """
        for attempt in attempts:
            name = attempt.name
            self._clients.forget(name)
            lease = self._leases.pop(name, None)
            if lease is not None:
                lease.release()
            self._rendezvous.release(name)
            self._ports.give_back(name)
            for slot in attempt.quarantined:
                holders = self._quarantined.get(slot, set())
                holders.discard(name)
                if not holders:
                    self._quarantined.pop(slot, None)
                    self._pool.unquarantine(slot, MEMORY_KEPT)

    def quarantine(self, attempt: Attempt, slots: Sequence[int]) -> None:
        """Put these slots of an attempt into quarantine. Free its other slots unless it is stuck."""
        for slot in slots:
            self._quarantined.setdefault(slot, set()).add(attempt.name)
            why = f"memory kept after {attempt.job}" if not attempt.stuck else "cannot be ended"
            self._pool.quarantine(slot, why, MEMORY_KEPT)
        lease = self._leases.get(attempt.name)
        if lease is not None and not attempt.stuck:
            lease.release()  # its other devices are free; those in quarantine stay out of use
        self._shell.say(Log("error", "quarantined", f"slots {list(slots)} of {attempt.name} are in quarantine"))

    def probe(self, attempts: Sequence[Attempt]) -> None:
        """Begin to check whether the attempts' devices are free; `SeenFree` and `NotFree` follow."""
        for attempt in attempts:
            lease = self._leases.get(attempt.name)
            if lease is not None and lease.phase == "held" and attempt.phase == "exited":
                lease.ended()
        self._shell.spawn(self._look(attempts))

    @property
    def left(self) -> list[str]:
        """The names of devices on which a job of an earlier agent may still use memory."""
        return [*self._left_behind.values(), *self._absent]

    def close_until_free(self, names: Sequence[str], devices: Sequence[str]) -> None:
        """Put these devices into quarantine until `look_for_free` sees their memory free.

        A job of an earlier agent may still use it. `devices` are the names of this host's devices. Names that the host
        does not have now are remembered, because such a device may come back.
        """
        self._absent = [name for name in dict.fromkeys(names) if name not in devices]
        for slot, name in enumerate(devices):
            if name in names:
                self._left_behind[slot] = name
                self._pool.quarantine(slot, "memory kept after a job of before", LEFT_BEHIND)

    def look_for_free(self) -> None:
        """Begin to check the devices that `close_until_free` closed, once the jobs that used them have ended."""
        if self._left_behind:
            self._shell.spawn(self._look_for_free())

    def open(self, slots: Sequence[int]) -> None:
        """End the quarantine that `close_until_free` put on these slots, without a check of their memory."""
        for slot in self._left_behind.keys() & set(slots):
            del self._left_behind[slot]
            self._pool.unquarantine(slot, LEFT_BEHIND)

    async def _look_for_free(self) -> None:
        while self._left_behind:
            for slot in sorted(self._left_behind):
                try:
                    is_free = await self._inventory.memory_is_free(slot)
                except Exception as error:
                    self._shell.say(Log("error", "no-look", f"the devices cannot be read: {error!r}"))
                    break
                if is_free:
                    self.open([slot])
            await asyncio.sleep(PROBE_S)

    async def _look(self, attempts: Sequence[Attempt]) -> None:
        """Check attempts' devices. After an error, report them as not free: they are checked again or quarantined."""
        try:
            await self._probe(attempts)
        except Exception as error:
            self._shell.say(Log("error", "no-look", f"the devices cannot be read: {error!r}"))
            items = [(attempt.name, tuple(attempt.quarantined or attempt.slots)) for attempt in attempts]
            self._shell.enqueue(NotFree(items))

    async def _probe(self, attempts: Sequence[Attempt]) -> None:
        free: list[AttemptName] = []
        taken: list[tuple[AttemptName, tuple[int, ...]]] = []
        readings: list[SlotReading] | None = None
        for attempt in attempts:
            slots = attempt.quarantined or attempt.slots
            if attempt.place.mode == "exclusive":
                not_free = tuple([slot for slot in slots if not await self._engines.memory_is_free(slot)])
            elif attempt.phase != "exited":  # it is frozen, beside others
                not_free = tuple([slot for slot in slots if not await self._engines.has_left(attempt, slot)])
            else:
                if readings is None:
                    readings = await self._inventory.sample()
                not_free = tuple(slot for slot in slots if not _pids_are_alive(readings[slot]))
                if not not_free and not await self._clients.leave(attempt.name):
                    not_free = tuple(slots)
            if not_free:
                taken.append((attempt.name, not_free))
            else:
                free.append(attempt.name)
        if free:
            self._shell.enqueue(SeenFree(free))
        if taken:
            self._shell.enqueue(NotFree(taken))


def _pids_are_alive(reading: SlotReading) -> bool:
    """Return whether all processes that the device lists are alive; False if it does not answer.

    No process of the attempt is left. So if the device lists a dead pid, it may be one of them, whose
    memory the GPU driver has not freed yet.
    """
    if reading.health == "unresponsive":
        return False
    return all(_is_alive(process.pid) for process in reading.processes)


def _is_alive(pid: int) -> bool:
    process = read_process(pid)
    return process is not None and not process.dead
