"""The SDK: submit, follow and operate from Python. `AsyncClient` is where to start, `Client` without asyncio.

Each handle has both forms, too: `AsyncJob` and `Job`. What is told while jobs go on is in `moorage.client.events`, and
what a service's function imports in `moorage.serve`.

Names are imported when they are first used, so that `import moorage.client` costs next to nothing.
"""

from __future__ import annotations

# before msgspec, so that a script that is interrupted at its start ends by KeyboardInterrupt
import datetime  # noqa: F401
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from moorage.client.admin import AsyncAdmin
    from moorage.client.answers import (
        ActRow,
        ActsAnswer,
        Audit,
        Cancelled,
        Drift,
        Explanation,
        FleetInfo,
        JobInfo,
        JobList,
        JobRow,
        ReplicaInfo,
        Used,
    )
    from moorage.client.call_options import CallOptions
    from moorage.client.client import AsyncClient
    from moorage.client.command import Executed
    from moorage.client.errors import (
        BadContext,
        BatchRejected,
        CallFailed,
        CallRefused,
        ClientError,
        Conflict,
        FailedReplica,
        ItemFailed,
        JobFailed,
        NoAgent,
        NoOutput,
        NoScheduler,
        NotFound,
        NotPermitted,
        Overloaded,
        QueueFull,
        Rejected,
        TimedOut,
        Unreachable,
    )
    from moorage.client.executor import AsyncExecutor, CallFuture, Executor
    from moorage.client.fleet import AsyncFleet
    from moorage.client.follow.job_history import Result
    from moorage.client.follow.watch import AsyncWatch
    from moorage.client.forward import AsyncForward
    from moorage.client.gpus import Gpu
    from moorage.client.job import AsyncJob
    from moorage.client.lease import AsyncLease
    from moorage.client.schedules import AsyncSchedules
    from moorage.client.services import AsyncService
    from moorage.client.sync import Admin, Client, Fleet, Forward, Job, Lease, Schedules, Service, Watch
    from moorage.schemas.answers.fleet import Fits, WorkerInfo
    from moorage.schemas.frames import Accepted, UseLine, UsePage
    from moorage.schemas.gpu import GpuSpec, Share
    from moorage.schemas.job import Request, Resources, Run, Secret
    from moorage.schemas.plan import Plan
    from moorage.schemas.schedules import ScheduleRow
    from moorage.schemas.served import Answer

__all__ = [
    "Accepted",
    "ActRow",
    "ActsAnswer",
    "Admin",
    "Answer",
    "AsyncAdmin",
    "AsyncClient",
    "AsyncExecutor",
    "AsyncFleet",
    "AsyncForward",
    "AsyncJob",
    "AsyncLease",
    "AsyncSchedules",
    "AsyncService",
    "AsyncWatch",
    "Audit",
    "BadContext",
    "BatchRejected",
    "CallFailed",
    "CallFuture",
    "CallOptions",
    "CallRefused",
    "Cancelled",
    "Client",
    "ClientError",
    "Conflict",
    "Drift",
    "Executed",
    "Executor",
    "Explanation",
    "FailedReplica",
    "Fits",
    "Fleet",
    "FleetInfo",
    "Forward",
    "Gpu",
    "GpuSpec",
    "ItemFailed",
    "Job",
    "JobFailed",
    "JobInfo",
    "JobList",
    "JobRow",
    "Lease",
    "NoAgent",
    "NoOutput",
    "NoScheduler",
    "NotFound",
    "NotPermitted",
    "Overloaded",
    "Plan",
    "QueueFull",
    "Rejected",
    "ReplicaInfo",
    "Request",
    "Resources",
    "Result",
    "Run",
    "ScheduleRow",
    "Schedules",
    "Secret",
    "Service",
    "Share",
    "TimedOut",
    "Unreachable",
    "UseLine",
    "UsePage",
    "Used",
    "Watch",
    "WorkerInfo",
]

_HOME: Final = {
    "moorage.client.answers": (
        "ActRow",
        "ActsAnswer",
        "Audit",
        "Cancelled",
        "Drift",
        "Explanation",
        "FleetInfo",
        "JobInfo",
        "JobList",
        "JobRow",
        "ReplicaInfo",
        "Used",
    ),
    "moorage.schemas.answers.fleet": ("Fits", "WorkerInfo"),
    "moorage.client.admin": ("AsyncAdmin",),
    "moorage.client.call_options": ("CallOptions",),
    "moorage.client.client": ("AsyncClient",),
    "moorage.client.fleet": ("AsyncFleet",),
    "moorage.client.command": ("Executed",),
    "moorage.client.executor": ("AsyncExecutor", "CallFuture", "Executor"),
    "moorage.client.forward": ("AsyncForward",),
    "moorage.client.errors": (
        "BadContext",
        "BatchRejected",
        "CallFailed",
        "CallRefused",
        "ClientError",
        "Conflict",
        "FailedReplica",
        "ItemFailed",
        "JobFailed",
        "NoAgent",
        "NoScheduler",
        "NoOutput",
        "NotFound",
        "NotPermitted",
        "Overloaded",
        "QueueFull",
        "Rejected",
        "TimedOut",
        "Unreachable",
    ),
    "moorage.client.follow.job_history": ("Result",),
    "moorage.client.follow.watch": ("AsyncWatch",),
    "moorage.client.job": ("AsyncJob",),
    "moorage.client.lease": ("AsyncLease",),
    "moorage.client.sync": ("Admin", "Client", "Fleet", "Forward", "Job", "Lease", "Schedules", "Service", "Watch"),
    "moorage.client.schedules": ("AsyncSchedules",),
    "moorage.client.services": ("AsyncService",),
    "moorage.client.gpus": ("Gpu",),
    "moorage.schemas.frames": ("Accepted", "UseLine", "UsePage"),
    "moorage.schemas.gpu": ("GpuSpec", "Share"),
    "moorage.schemas.job": ("Request", "Resources", "Run", "Secret"),
    "moorage.schemas.plan": ("Plan",),
    "moorage.schemas.schedules": ("ScheduleRow",),
    "moorage.schemas.served": ("Answer",),
}
_MODULE_OF: Final = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    """Return all public names, also those not imported yet, for completion by Tab."""
    return sorted({*globals(), *__all__})
