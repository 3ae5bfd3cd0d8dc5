"""The SDK: submit, follow and operate from Python. `AsyncClient` is where to start, `Client` without asyncio.

Names are imported when they are first used, so that `import moorage.client` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from moorage.bus.simulated_clock import SimulatedClock
    from moorage.client.client import AsyncClient
    from moorage.client.errors import (
        BatchRejected,
        ClientError,
        Conflict,
        JobFailed,
        NoOutput,
        NoScheduler,
        NotFound,
        NotPermitted,
        QueueFull,
        Rejected,
        TimedOut,
        Unreachable,
    )
    from moorage.client.job import Job, Result
    from moorage.client.sim_fleet import Ran, SimFleet, Task
    from moorage.client.sync import Client, SyncJob
    from moorage.client.watch import Piece, Watch
    from moorage.schemas.frames import Accepted, Change, Event
    from moorage.schemas.gpu import GpuSpec, Share
    from moorage.schemas.job import Request, Resources, Run, Secret

__all__ = [
    "Accepted",
    "AsyncClient",
    "BatchRejected",
    "Change",
    "Client",
    "ClientError",
    "Conflict",
    "Event",
    "GpuSpec",
    "Job",
    "JobFailed",
    "NoOutput",
    "NoScheduler",
    "NotFound",
    "NotPermitted",
    "Piece",
    "QueueFull",
    "Ran",
    "Rejected",
    "Request",
    "Resources",
    "Result",
    "Run",
    "Secret",
    "Share",
    "SimFleet",
    "SimulatedClock",
    "SyncJob",
    "Task",
    "TimedOut",
    "Unreachable",
    "Watch",
]

_HOME: Final = {
    "moorage.bus.simulated_clock": ("SimulatedClock",),
    "moorage.client.client": ("AsyncClient",),
    "moorage.client.errors": (
        "BatchRejected",
        "ClientError",
        "Conflict",
        "JobFailed",
        "NoScheduler",
        "NoOutput",
        "NotFound",
        "NotPermitted",
        "QueueFull",
        "Rejected",
        "TimedOut",
        "Unreachable",
    ),
    "moorage.client.job": ("Job", "Result"),
    "moorage.client.sim_fleet": ("Ran", "SimFleet", "Task"),
    "moorage.client.sync": ("Client", "SyncJob"),
    "moorage.client.watch": ("Piece", "Watch"),
    "moorage.schemas.frames": ("Accepted", "Change", "Event"),
    "moorage.schemas.gpu": ("GpuSpec", "Share"),
    "moorage.schemas.job": ("Request", "Resources", "Run", "Secret"),
}
_MODULE_OF: Final = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)
