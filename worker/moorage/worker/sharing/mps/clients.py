"""Connect the agent with `managed` and `watched`: track the attempts of one worker that are clients of MPS daemons."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from moorage.schemas.attempt import AttemptName
from moorage.worker.devices.pool import GpuPool
from moorage.worker.driver import LOST, Driver
from moorage.worker.session.attempt_messages import Attempt, OverGrant
from moorage.worker.session.attempt_table import MPS_FAULT
from moorage.worker.session.shell import Shell
from moorage.worker.sharing.mps.managed import ManagedMps
from moorage.worker.sharing.mps.watched import MPS, OperatorsMps

log = logging.getLogger("moorage.worker")


class MpsClients:
    """The MPS clients of one worker. Without `mps`, which knows their daemons, it does nothing."""

    def __init__(
        self,
        shell: Shell,
        mps: ManagedMps | OperatorsMps | None,
        drivers: Mapping[str, Driver],
        pool: GpuPool,
    ) -> None:
        self.mps = mps
        self._shell = shell
        self._drivers = drivers
        self._pool = pool
        if mps is not None:
            mps.attach(self._on_lost, lambda slot: pool.unquarantine(slot, MPS))

    async def open(self) -> None:
        """Take over the daemons of an earlier agent, and quarantine GPUs whose daemon has no client.

        The attempts of the earlier agent must have been taken over before. Raises SupervisorMissing.
        """
        if self.mps is not None:
            await self.mps.open()
            for slot in self.mps.left_over:
                self._keep_closed(slot)

    async def close(self) -> None:
        """Release the daemons: those with clients run on, the others are ended."""
        if self.mps is not None:
            await self.mps.close()

    def admit(self, attempt: Attempt) -> None:
        """Accept an attempt as a client if it shares by mps. Raises Refused if it cannot share here, or not now."""
        if self.mps is not None:
            self.mps.admit(attempt, self._uid_of(attempt))

    def admit_again(self, attempt: Attempt) -> None:
        """Accept an attempt that an earlier agent has started as a client, if it shares by mps."""
        if self.mps is not None:
            self.mps.admit_again(attempt, self._uid_of(attempt))

    async def leave(self, name: AttemptName) -> bool:
        """Record that an attempt is over, and end the daemon if it was the last client.

        Return whether the attempt's GPU may be freed: False if the daemon was to end and has not.
        """
        return self.mps is None or await self.mps.leave(name)

    def forget(self, name: AttemptName) -> None:
        """Drop an attempt that has ended, before its lease is released. If it was the last client of the GPU's MPS
        daemon and the daemon has not ended, quarantine the GPU, so that no other attempt gets it before."""
        if self.mps is not None and (slot := self.mps.forget(name)) is not None:
            self._keep_closed(slot)

    def _uid_of(self, attempt: Attempt) -> int | None:
        driver = self._drivers[attempt.driver]
        return driver.uid_of(attempt.tenant, attempt.request) if driver.joins_mps else None

    def _keep_closed(self, slot: int) -> None:
        self._pool.quarantine(slot, "its MPS daemon ends", MPS)

    def _on_lost(self, names: Sequence[AttemptName], pids: Sequence[int]) -> None:
        """Have the clients of a failed daemon end: the one whose process it blames by its own fault, others as lost."""
        found = {pid: name for driver in self._drivers.values() for pid, name in driver.attempts_of(pids).items()}
        blamed = next((pid for pid in pids if found.get(pid) in names), None)
        guilty = found[blamed] if blamed is not None else None
        if guilty is not None:
            log.error("mps: process %d of job %s of tenant %s had a fatal GPU error", blamed, guilty[1], guilty[0])
        why = f"{MPS_FAULT}its process {blamed} had a fatal GPU error, which ended the MPS server"
        self._shell.enqueue(OverGrant([(name, why if name == guilty else LOST) for name in names]))
