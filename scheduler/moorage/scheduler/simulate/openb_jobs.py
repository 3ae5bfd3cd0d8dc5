"""The openb traces in time: hosts and tasks as `openb` reads them, as the simulator's hosts and jobs.

A task comes at its `creation_time` and runs to its `deletion_time`. A part of a GPU is an MPS share with a cap on
compute, in whole percent rounded up; so a device takes as many sharers as MPS does, at most. The saturation experiment
of the paper needs no times and is not this.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from moorage.scheduler.simulate.openb import TraceTask, read_hosts, read_tasks
from moorage.scheduler.simulate.trace import SimHost, TraceJob, milliseconds, trouble, uniform_host
from moorage.schemas.gpu import GpuSpec, Share
from moorage.schemas.job import Request, Resources, Run

TENANT: Final = "openb"
_RUN: Final = Run(driver="noop")


def openb_hosts(path: Path) -> list[SimHost]:
    """The hosts of a node list. Raises TraceError."""
    return [
        uniform_host(host.name, host.gpus, host.model, cpu_milli=host.cpu_milli, memory_mib=host.memory_mib)
        for host in read_hosts(path)
    ]


def openb_jobs(path: Path) -> Iterator[TraceJob]:
    """The tasks of a pod list that says when each came and went. Raises TraceError and Refused."""
    for number, task in enumerate(read_tasks(path), 2):
        if task.ended_s is None:
            raise trouble(path, number, "no deletion_time: this list has no times, so it cannot be simulated in time")
        at_ms = milliseconds(path, number, "creation_time", task.created_s)
        runs_ms = milliseconds(path, number, "deletion_time", max(0.0, task.ended_s - task.created_s))
        yield TraceJob(at_ms, runs_ms, TENANT, request_of(task))


def request_of(task: TraceTask) -> Request:
    """What a task asks for; a model in whole words, as `=T4`."""
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
