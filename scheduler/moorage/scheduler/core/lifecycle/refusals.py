"""Finds workers that a job avoids because they refused what it runs; a job also avoids devices that failed under it."""

from __future__ import annotations

from moorage.scheduler.core.ledger.state import Job, Worker


def every_slot(worker: Worker) -> int:
    """Return the mask of all slots of a worker; a worker without GPUs counts as having slot 0."""
    return (1 << max(1, len(worker.inventory.gpu_pool))) - 1


def was_refused(job: Job, worker: Worker) -> bool:
    """Return whether this worker refused the job because of what it runs."""
    return worker.num in job.refused or worker.num in job.lacking


def avoids_all(job: Job, worker: Worker) -> bool:
    """Return whether a job avoids all slots that a worker has; it may avoid more, if the worker had more before."""
    return not every_slot(worker) & ~dict(job.avoid).get(worker.num, 0)
