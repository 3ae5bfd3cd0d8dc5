"""Collect the parts of a worker that a driver may use."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from moorage.schemas.attempt import AttemptName
from moorage.schemas.gpu import Share
from moorage.worker.attempt.attempt_folders import AttemptFolders
from moorage.worker.attempt.call_keys import CallKeys
from moorage.worker.attempt.job_files import JobFiles
from moorage.worker.attempt.orphaned_calls import OrphanedCalls
from moorage.worker.devices.readers.base import Inventory
from moorage.worker.devices.refused_nodes import GpuNodes
from moorage.worker.drivers.policy import Policy
from moorage.worker.drivers.supervisor_link import SupervisorLink, owner_of
from moorage.worker.freezing.freezer import Freezer
from moorage.worker.freezing.gate import Gate, needs_gate
from moorage.worker.settings import WorkerSettings
from moorage.worker.sharing.limiter.limits import Limits
from moorage.worker.sharing.mps.managed import ManagedMps

log = logging.getLogger("moorage.worker")


class Kit(NamedTuple):
    """The parts of a worker for the driver that is made for it.

    `own` are the settings that the driver declares. `supervisor` is the link to the process that starts, watches and
    fences attempts outside the agent. `files` fetches the files that jobs bring along. `nodes` maps a device's uuid to
    the files in /dev that belong to this device alone. `inventory` are the worker's devices. `mps` runs the MPS
    daemons; None if the worker does not run them. `freezer` freezes processes; None if the worker cannot do that.
    `gpu_nodes` says which device nodes the kernel is to refuse to an attempt; None if it refuses none: by the setting
    `device_fence`, or on a host without GPUs. `calls` gives keys to attempts that answer calls,
    and `orphans` answers their calls once they have ended.
    """

    worker: str
    settings: WorkerSettings
    policy: Policy
    supervisor: SupervisorLink
    devices: int
    simulated: bool
    own: Any = None
    files: JobFiles | None = None
    nodes: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    inventory: Inventory | None = None
    mps: ManagedMps | None = None
    freezer: Freezer | None = None
    gpu_nodes: GpuNodes | None = None
    calls: CallKeys | None = None
    orphans: OrphanedCalls | None = None

    def limits(self, driver: str) -> Limits | None:
        """Return the limiter for this driver's jobs; None without the setting `limiter`, or in a simulated worker.

        Raises Refused if the settings ask for the limiter and this host cannot have it.
        """
        if self.simulated or not self.settings.limiter:
            return None
        gated = None if self.freezer is None else partial(needs_gate, self.settings.freezes_after_s)
        return Limits(self.settings, owner_of(self.worker, driver), gated)

    def gate(self, limits: Limits | None) -> Gate | None:
        """Return what sees the next use of a frozen job's GPUs; None without the limiter."""
        return None if limits is None else Gate(limits.segments)

    def folders(self, driver: str) -> AttemptFolders:
        """Return the folders of this driver's attempts."""
        return AttemptFolders(self.settings, owner_of(self.worker, driver))


def keep_to(limits: Limits | None, name: AttemptName, share: Share) -> None:
    """Have the limiter, if there is one, keep an attempt to a new share. Log a warning if that fails."""
    try:
        if limits is not None:
            limits.change(name, share)
    except OSError as error:
        log.warning("job %s: the limiter still enforces the former share: %s", name[1], error)
