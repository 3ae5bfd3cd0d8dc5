"""The openb traces over time: the hosts and tasks that `openb` reads, as the simulator's hosts and jobs.

A task arrives at its `creation_time` and runs to its `deletion_time`. A part of a GPU becomes an MPS share with a
compute cap in whole percent, rounded up; so a device takes at most as many sharers as MPS. The paper's saturation
experiment needs no times and is something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from moorage.schemas.gpu import GpuSpec, Share
from moorage.schemas.job import Request, Resources, Run
from moorage.schemas.names import JOB, is_job
from moorage.testing.simulate.openb import TraceTask, numbered_tasks, read_hosts
from moorage.testing.simulate.trace import SimHost, TraceJob, milliseconds, once, uniform_host

TENANT: Final = "openb"
_RUN: Final = Run(driver="noop")


def openb_hosts(path: Path) -> list[SimHost]:
    """Return the hosts of a node list. Raises Refused."""
    return [
        uniform_host(host.name, host.gpus, host.model, cpu_milli=host.cpu_milli, memory_mib=host.memory_mib)
        for host in read_hosts(path)
    ]


def openb_jobs(path: Path) -> Iterator[TraceJob]:
    """Yield the tasks of a pod list as jobs; a task without an arrival time arrives at 0.

    Raises Refused, also for a task without an end time.
    """
    return once(path, _numbered(path))


def _numbered(path: Path) -> Iterator[tuple[int, TraceJob]]:
    for row, task in numbered_tasks(path):
        if task.ended_s is None:
            raise row.trouble("no deletion_time: this list has no times, so it cannot be simulated in time")
        if not is_job(task.name):
            raise row.wrong("name", JOB.pattern)
        at_ms = milliseconds(path, row.line, "creation_time", task.created_s)
        ran_s = max(0.0, task.ended_s - task.created_s)
        runs_ms = milliseconds(path, row.line, "deletion_time after creation_time", ran_s)
        try:
            request = request_of(task)
        except ValueError as error:  # its own bounds, as of models
            raise row.trouble(str(error)) from None
        yield row.line, TraceJob(at_ms, runs_ms, TENANT, request)


def request_of(task: TraceTask) -> Request:
    """Return what a task asks for; a model in whole words, as `=T4`. Raises ValueError beyond a request's bounds."""
    gpu = None
    if task.gpus:
        models = [f"={model}" for model in task.models]
        gpu = GpuSpec(
            count=task.gpus,
            model=models or None,
            sharing="mps" if task.is_share else None,
            share=Share(compute_percent=-(-task.gpu_milli // 10)) if task.is_share else None,
        )
    return Request(job=task.name, gpu=gpu, resources=Resources(task.cpu_milli, task.memory_mib), run=_RUN)
