"""The SDK: submit, follow and operate from Python. `AsyncClient` is where to start, `Client` without asyncio.

Names are imported when they are first used, so that `import moorage.client` costs next to nothing.
"""

from __future__ import annotations

# before msgspec, so that a script that is interrupted at its start ends by KeyboardInterrupt
import datetime  # noqa: F401
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from moorage.bus.lend.client import AskedBack
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
    from moorage.client.follow.job_history import Result
    from moorage.client.follow.watch import Watch
    from moorage.client.forward import Forward
    from moorage.client.gpus import Gpu
    from moorage.client.handlers import Progress
    from moorage.client.job import Job
    from moorage.client.lease import Lease
    from moorage.client.output import Piece
    from moorage.client.schedules import Schedules
    from moorage.client.services import Service
    from moorage.client.steps import (
        Claimed,
        Ended,
        Ending,
        Frozen,
        IsReady,
        NotReady,
        Placed,
        Queued,
        Running,
        Step,
        Submitted,
    )
    from moorage.client.sync import Client, SyncForward, SyncJob, SyncLease, SyncService, SyncWatch
    from moorage.schemas.answers.fleet import Fits, WorkerInfo
    from moorage.schemas.frames import Accepted, Change, Event, UseLine, UsePage
    from moorage.schemas.gpu import GpuSpec, Share
    from moorage.schemas.job import Request, Resources, Run, Secret
    from moorage.schemas.plan import Plan
    from moorage.schemas.schedules import ScheduleRow
    from moorage.schemas.served import Answer, CallError, endpoint

__all__ = [
    "Accepted",
    "ActRow",
    "ActsAnswer",
    "Answer",
    "AskedBack",
    "AsyncClient",
    "AsyncExecutor",
    "Audit",
    "BadContext",
    "BatchRejected",
    "CallError",
    "CallFailed",
    "CallFuture",
    "CallRefused",
    "Cancelled",
    "Change",
    "Claimed",
    "Client",
    "ClientError",
    "Conflict",
    "Drift",
    "Ended",
    "Ending",
    "Event",
    "Executed",
    "Executor",
    "Explanation",
    "FailedReplica",
    "Fits",
    "FleetInfo",
    "Forward",
    "Frozen",
    "Gpu",
    "GpuSpec",
    "IsReady",
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
    "NotReady",
    "Overloaded",
    "Piece",
    "Placed",
    "Plan",
    "Progress",
    "QueueFull",
    "Queued",
    "Rejected",
    "ReplicaInfo",
    "Request",
    "Resources",
    "Result",
    "Run",
    "Running",
    "ScheduleRow",
    "Schedules",
    "Secret",
    "Service",
    "Share",
    "Step",
    "Submitted",
    "SyncForward",
    "SyncJob",
    "SyncLease",
    "SyncService",
    "SyncWatch",
    "TimedOut",
    "Unreachable",
    "UseLine",
    "UsePage",
    "Used",
    "Watch",
    "WorkerInfo",
    "endpoint",
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
    "moorage.client.client": ("AsyncClient",),
    "moorage.client.command": ("Executed",),
    "moorage.client.executor": ("AsyncExecutor", "CallFuture", "Executor"),
    "moorage.client.forward": ("Forward",),
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
    "moorage.client.handlers": ("Progress",),
    "moorage.client.output": ("Piece",),
    "moorage.client.follow.job_history": ("Result",),
    "moorage.client.follow.watch": ("Watch",),
    "moorage.client.job": ("Job",),
    "moorage.client.lease": ("Lease",),
    "moorage.client.steps": (
        "Claimed",
        "Ended",
        "Ending",
        "Frozen",
        "IsReady",
        "NotReady",
        "Placed",
        "Queued",
        "Running",
        "Step",
        "Submitted",
    ),
    "moorage.client.sync": ("Client", "SyncForward", "SyncJob", "SyncLease", "SyncService", "SyncWatch"),
    "moorage.client.schedules": ("Schedules",),
    "moorage.client.services": ("Service",),
    "moorage.client.gpus": ("Gpu",),
    "moorage.schemas.frames": ("Accepted", "Change", "Event", "UseLine", "UsePage"),
    "moorage.schemas.gpu": ("GpuSpec", "Share"),
    "moorage.schemas.job": ("Request", "Resources", "Run", "Secret"),
    "moorage.schemas.plan": ("Plan",),
    "moorage.schemas.schedules": ("ScheduleRow",),
    "moorage.schemas.served": ("Answer", "CallError", "endpoint"),
    "moorage.bus.lend.client": ("AskedBack",),
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
