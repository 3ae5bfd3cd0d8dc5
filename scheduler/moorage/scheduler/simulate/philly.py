"""Reader of the Philly jobs as prepared for the Gavel simulator: `vc,job,arrival_s,duration_s,num_gpu`.

A request for more than a host's GPUs is a gang of whole hosts; arrivals count from each virtual cluster's own
beginning, so one cluster is one trace. Cite: Jeon et al., "Analysis of Large-Scale Multi-Tenant GPU Clusters for DNN
Training Workloads", USENIX ATC 2019; Narayanan et al., "Heterogeneity-Aware Cluster Scheduling Policies for Deep
Learning Workloads" (Gavel), OSDI 2020.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from moorage.scheduler.simulate.trace import SimHost, TraceJob, milliseconds, trouble, uniform_host
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import Request, Run

COLUMNS: Final = ("vc", "job", "arrival_s", "duration_s", "num_gpu")
HOST_GPUS: Final = 8
MODEL: Final = "V100"
#: GPUs of the virtual clusters as the published comparisons size them (data, not a default: others are given a fleet)
CLUSTERS: Final = {"6c71a0": 192, "b436b2": 400, "0e4a51": 128, "2869ce": 64}
_RUN: Final = Run(driver="noop")


def read_philly(path: Path, cluster: str) -> Iterator[TraceJob]:
    """The jobs of one virtual cluster; its name is their tenant. Raises Refused."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        if not set(COLUMNS) <= set(rows.fieldnames or ()):
            raise trouble(path, 1, "these are no columns of a philly trace", allowed=",".join(COLUMNS))
        seen: set[str] = set()
        found = False
        for number, row in enumerate(rows, 2):
            seen.add(row["vc"])
            if row["vc"] != cluster:
                continue
            found = True
            try:
                gpus, at_s, runs_s = int(row["num_gpu"]), float(row["arrival_s"]), float(row["duration_s"])
            except (ValueError, TypeError) as error:
                raise trouble(path, number, str(error)) from None
            at_ms, runs_ms = (
                milliseconds(path, number, *pair) for pair in (("arrival_s", at_s), ("duration_s", runs_s))
            )
            yield TraceJob(at_ms, runs_ms, cluster, _request(row["job"], gpus))
        if not found:
            raise trouble(path, 0, f"no virtual cluster {cluster!r}", found=cluster, allowed=", ".join(sorted(seen)))


def _request(job: str, gpus: int) -> Request:
    if gpus <= HOST_GPUS:
        return Request(job=job, gpu=GpuSpec(count=gpus), run=_RUN)
    hosts = -(-gpus // HOST_GPUS)
    return Request(job=job, replicas=hosts, gpu=GpuSpec(count=HOST_GPUS, scheduling="gang"), run=_RUN)


def hosts_of(gpus: int) -> list[SimHost]:
    """So many GPUs in hosts of 8."""
    return [uniform_host(f"n{number:03}", HOST_GPUS, MODEL) for number in range(-(-gpus // HOST_GPUS))]
