"""The GPU time of one job, as `show` has it: from its transitions in memory, or from its history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.ledger.fairshare import GPU_MILLI
from moorage.scheduler.core.ledger.state import HISTORY_WORDS, RESIZED, Job
from moorage.scheduler.follower.granted import granted_to, in_seconds, part_of
from moorage.scheduler.history.unpacking import Found
from moorage.schemas.answers.jobs import GpuTime, JobPeaks
from moorage.schemas.frames import UNKNOWN, UNKNOWN_MS, Change
from moorage.schemas.job import ON_WORKER, STATES, Request

_RESIZED: Final = HISTORY_WORDS[RESIZED]


def usage_of_job(engine: Engine, job: Job) -> GpuTime | None:
    """Return what a job in memory was granted and has used of GPUs, as far as its history is there; None if nothing."""
    sums = granted_to(engine.state, job, engine.reader.request_of)
    if sums is None:
        return None
    granted = in_seconds(sums)
    return used_of_job(job.used, granted["gpu_s"], granted["memory_mib_s"])


def usage_of_history(found: Found, changes: Sequence[Change], request: Request) -> GpuTime | None:
    """Return the GPU time that a job was granted, and what it used, from its history; None if none or if resized.

    The memory that it was granted is left out, because the history does not say how much its GPUs have.
    """
    if any(change.state == _RESIZED for change in changes):
        return None  # the history does not say which part of a device it had at which time
    held: dict[int, tuple[int, int]] = {}  # by replica: (since when, number of devices)
    gpu_ms = 0
    for change in changes:
        if change.state not in STATES:
            continue
        since_ms, gpus = held.pop(change.replica, (change.time_ms, 0))
        gpu_ms += (change.time_ms - since_ms) * gpus
        if change.worker and change.state in ON_WORKER:
            held[change.replica] = change.time_ms, len(change.gpus) or gpus
    if not gpu_ms:
        return None
    return used_of_job(found.used, gpu_ms * part_of(request).milli / GPU_MILLI / 1000)


def used_of_job(used: tuple[int, int] | None, gpu_s: float, memory_mib_s: float | None = None) -> GpuTime:
    """Return what a job was granted, and what it used; None for what no worker has measured yet."""
    gpu_ms, used_mib_s = used or (UNKNOWN_MS, None)
    return GpuTime(
        gpu_s=gpu_s,
        memory_mib_s=memory_mib_s,
        used_gpu_s=None if gpu_ms == UNKNOWN_MS else gpu_ms / 1000,
        used_memory_mib_s=used_mib_s,
    )


def peaks_of(peaks: tuple[int, int, int, int] | None) -> JobPeaks | None:
    """Return what a job's attempts had at most, from its row; None while nothing of that is known."""
    if peaks is None:
        return None
    memory_mib, largest_mib, gpu_memory_mib, cpu_ms = (None if each == UNKNOWN else each for each in peaks)
    return JobPeaks(
        memory_mib=memory_mib,
        largest_mib=largest_mib if memory_mib is None else None,
        gpu_memory_mib=gpu_memory_mib,
        cpu_s=None if cpu_ms is None else cpu_ms / 1000,
    )
