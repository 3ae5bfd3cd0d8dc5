"""What a worker has for the drivers that it makes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from moorage.schemas.gpu import Share
from moorage.worker.drivers.supervisor_link import SupervisorLink, owner_of
from moorage.worker.freezing.freezer import Freezer
from moorage.worker.inventory.handed_on import HandingInventory
from moorage.worker.job_files import JobFiles
from moorage.worker.limiter.limits import Limits
from moorage.worker.member_messages import MemberName
from moorage.worker.mps.managed import ManagedMps
from moorage.worker.policy import Policy
from moorage.worker.settings import WorkerSettings

log = logging.getLogger("moorage.worker")


class Kit(NamedTuple):
    """What a worker has for the driver that is made for it. `own` are the settings that the driver declares.

    `supervisor` is the link to the process that starts, watches and fences members outside the agent. `files`
    fetches what jobs bring along. `nodes` are the files in /dev that each device alone has, by its uuid. `hands` hands
    devices on to VMs; None where that is not possible, as for simulated ones. `mps` has the MPS daemons, where the
    worker runs them. `freezer` freezes processes, where the GPUs' driver can do that.
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
    hands: HandingInventory | None = None
    mps: ManagedMps | None = None
    freezer: Freezer | None = None

    def limits(self, driver: str) -> Limits | None:
        """Return what limits a driver's jobs from within, if the settings say so. Raises Refused where none can."""
        if self.simulated or not self.settings.limiter:
            return None
        return Limits(self.settings, owner_of(self.worker, driver), can_freeze=self.freezer is not None)


def keep_to(limits: Limits | None, name: MemberName, share: Share) -> None:
    """Have the limiter, where there is one, hold an attempt to another share; log why where it cannot."""
    try:
        if limits is not None:
            limits.change(name, share)
    except OSError as error:
        log.warning("%s: the limiter holds it to its former share: %s", name[1], error)
