"""Claim the members' devices in the pool, and check when they are free again."""

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
from moorage.worker.session.member_messages import Log, Member, NotFree, SeenFree
from moorage.worker.session.shell import Shell
from moorage.worker.sharing.mps.clients import MpsClients

#: the pool records for each quarantine who set it: this is for memory that an ended member left in use
MEMORY_KEPT: Final = "memory"
#: this is for a device of an earlier agent's ended member, if the device has another slot now
LEFT_BEHIND: Final = "left behind"


class MemberClaims:
    """The pool leases of one worker's members, and the quarantine of their slots."""

    def __init__(
        self,
        shell: Shell,
        pool: GpuPool,
        inventory: Inventory,
        rendezvous: Rendezvous,
        clients: MpsClients,
        ports: ServicePorts,
    ) -> None:
        self._shell = shell
        self._pool = pool
        self._inventory = inventory
        self._rendezvous = rendezvous
        self._clients = clients
        self._ports = ports
        self._leases: dict[AttemptName, PoolLease] = {}
        self._quarantined: dict[int, set[AttemptName]] = {}
        self._left_behind: dict[int, str] = {}  # by slot: a device's name
        self._absent: list[str] = []

    def take(self, member: Member) -> None:
        """Claim all slots of a member at once, and its ports, or none. Raises SlotsRefused, Refused if it cannot share
        by mps, and what `ServicePorts.take` raises."""
        mode = cast(Sharing, member.place.mode)
        lease = self._pool.try_claim_slots(member.slots, mode, member.job)
        try:
            member.ports = self._ports.take(member.name, member.request.workload.ports)
            member.address = self._ports.address(member.ports)
            self._clients.admit(member)
        except BaseException:
            self._ports.give_back(member.name)
            lease.release()
            raise
        self._leases[member.name] = lease

    def take_again(self, member: Member) -> None:
        """Claim the slots of an earlier agent's member, even if they may no longer be leased to jobs.

        If another member has a slot, this one has no lease: a frozen one had given its devices up, and of any other it
        is logged.
        """
        self._ports.take_again(member.name, member.ports)
        member.address = self._ports.address(member.ports)
        try:
            mode = cast(Sharing, member.place.mode)
            self._leases[member.name] = self._pool.take_again(member.slots, mode, member.job)
        except SlotsRefused as refused:
            member.leased = False
            if not member.frozen:
                text = f"{member.name} holds slots that the pool refuses: {refused}"
                self._shell.say(Log("error", "pool-differs", text))
        self._clients.admit_again(member)

    def give_up(self, member: Member) -> None:
        """Return the devices of a frozen member to the pool."""
        self._leases.pop(member.name).release()

    def take_back(self, member: Member) -> None:
        """Claim the slots of a frozen member again, all or none. Raises SlotsRefused."""
        self._leases[member.name] = self._pool.try_claim_slots(member.slots, "exclusive", member.job)

    def address(self, member: Member) -> str:
        """Return the rendezvous address of the member's gang if the member is rank 0, else ""."""
        return self._rendezvous.reserve(member.name, member.master_port_wanted)

    def start_alone(self, member: Member) -> Start | None:
        """Return the START of a single replica that asks for `distributed`, else None: no leader sends START to such a
        replica.
        """
        gpu = member.request.gpu
        if member.place.hold or gpu is None or gpu.distributed is None:
            return None
        port = self._rendezvous.reserve_port(member.name, gpu.distributed.master_port)
        return Start(*member.name, LOCAL_ADDRESS, port, 1)

    def release(self, members: Sequence[Member]) -> None:
        """Return the devices of members to the pool, and end the quarantine that was theirs alone.

        The members must have ended, and their devices must have been seen free.
        """
        for member in members:
            name = member.name
            self._clients.forget(name)
            lease = self._leases.pop(name, None)
            if lease is not None:
                lease.release()
            self._rendezvous.release(name)
            self._ports.give_back(name)
            for slot in member.quarantined:
                holders = self._quarantined.get(slot, set())
                holders.discard(name)
                if not holders:
                    self._quarantined.pop(slot, None)
                    self._pool.unquarantine(slot, MEMORY_KEPT)

    def quarantine(self, member: Member, slots: Sequence[int]) -> None:
        """Put these slots of a member into quarantine. Free its other slots unless it is stuck."""
        for slot in slots:
            self._quarantined.setdefault(slot, set()).add(member.name)
            why = f"memory kept after {member.job}" if not member.stuck else "cannot be ended"
            self._pool.quarantine(slot, why, MEMORY_KEPT)
        lease = self._leases.get(member.name)
        if lease is not None and not member.stuck:
            lease.release()  # its other devices are free; those in quarantine stay out of use
        self._shell.say(Log("error", "quarantined", f"slots {list(slots)} of {member.name} are in quarantine"))

    def probe(self, members: Sequence[Member]) -> None:
        """Begin to check whether the members' devices are free; `SeenFree` and `NotFree` follow."""
        for member in members:
            lease = self._leases.get(member.name)
            if lease is not None and lease.phase == "held" and member.phase == "exited":
                lease.ended()
        self._shell.spawn(self._look(members))

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

    async def _look(self, members: Sequence[Member]) -> None:
        """Check members' devices. After an error, report them as not free: they are checked again or quarantined."""
        try:
            await self._probe(members)
        except Exception as error:
            self._shell.say(Log("error", "no-look", f"the devices cannot be read: {error!r}"))
            items = [(member.name, tuple(member.quarantined or member.slots)) for member in members]
            self._shell.enqueue(NotFree(items))

    async def _probe(self, members: Sequence[Member]) -> None:
        free: list[AttemptName] = []
        taken: list[tuple[AttemptName, tuple[int, ...]]] = []
        readings: list[SlotReading] | None = None
        for member in members:
            slots = member.quarantined or member.slots
            if member.place.mode == "exclusive":
                not_free = tuple([slot for slot in slots if not await self._inventory.memory_is_free(slot)])
            else:
                if readings is None:
                    readings = await self._inventory.sample()
                not_free = tuple(slot for slot in slots if not _pids_are_alive(readings[slot]))
                if not not_free and not await self._clients.leave(member.name):
                    not_free = tuple(slots)
            if not_free:
                taken.append((member.name, not_free))
            else:
                free.append(member.name)
        if free:
            self._shell.enqueue(SeenFree(free))
        if taken:
            self._shell.enqueue(NotFree(taken))


def _pids_are_alive(reading: SlotReading) -> bool:
    """Return whether all processes that the device lists are alive; False if it does not answer.

    No process of the member is left. So if the device lists a dead pid, it may be one of them, whose
    memory the GPU driver has not freed yet.
    """
    if reading.health == "unresponsive":
        return False
    return all(_is_alive(process.pid) for process in reading.processes)


def _is_alive(pid: int) -> bool:
    process = read_process(pid)
    return process is not None and not process.dead
