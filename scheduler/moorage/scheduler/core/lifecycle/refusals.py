"""Finds workers that a job avoids because they refused what it runs; a job also avoids devices that failed under it."""

from __future__ import annotations

from moorage.scheduler.core.ledger.state import WHY, WORKER, Job, Worker
from moorage.schemas.frames import ABOUT_THE_JOB


def every_slot(worker: Worker) -> int:
    """Return the mask of all slots of a worker; a worker without GPUs counts as having slot 0."""
    return (1 << max(1, len(worker.hello.get("gpu_pool", ())))) - 1


def was_refused(job: Job, worker: Worker) -> bool:
    """Return whether this worker refused the job because of what it runs, by the part of its history in memory."""
    return worker.num in job.lacking or any(
        row[WORKER] == worker.num and row[WHY].startswith(ABOUT_THE_JOB) for row in job.history
    )


def avoids_all(job: Job, worker: Worker) -> bool:
    """Return whether a job avoids all slots that a worker has; it may avoid more, if the worker had more before."""
    return not every_slot(worker) & ~dict(job.avoid).get(worker.num, 0)
