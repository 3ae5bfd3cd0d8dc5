"""How many replicas of a job may run at once: its `max_running`, or as many as its service's calls need."""

from __future__ import annotations

from moorage.scheduler.core.ledger.state import Job
from moorage.schemas.job import Request


def wanted_of(job: Job, request: Request) -> int:
    """Return how many members are wanted of a service that follows its calls, or that gives way to its next version; of
    any other job, the number of its replicas."""
    if job.scaled is not None:
        return job.scaled.wanted
    return request.copies if request.scale is None else request.scale.min


def top_of(job: Job, request: Request) -> int:
    """Return the highest number that a replica of a job ever had."""
    return job.wants.top if job.wants is not None else request.numbers[-1][1] + job.added


def most_of(job: Job, request: Request) -> int | None:
    """Return how many replicas of a job may run at once: one more while a member moves; None for all of them."""
    most = request.max_running if request.scale is None and job.scaled is None else wanted_of(job, request)
    if most is not None and request.max_running is not None:
        most = min(most, request.max_running)
    return most if most is None or job.relocating is None else most + 1
