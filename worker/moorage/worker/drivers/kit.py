"""What a worker has for the drivers that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from moorage.worker.drivers.supervisor_link import SupervisorLink
from moorage.worker.job_files import JobFiles
from moorage.worker.mps.managed import ManagedMps
from moorage.worker.policy import Policy
from moorage.worker.settings import WorkerSettings


class Kit(NamedTuple):
    """What a worker has for the driver that is made for it. `own` are the settings that the driver declares.

    `supervisor` is the link to the process that starts, watches and fences members outside the agent. `files`
    fetches what jobs bring along. `nodes` are the files in /dev that each device alone has, by its uuid. `mps` has the
    MPS daemons, where the worker runs them.
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
    mps: ManagedMps | None = None
