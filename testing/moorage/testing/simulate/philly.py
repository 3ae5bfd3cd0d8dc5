"""Reader of the Philly jobs as prepared for the Gavel simulator: `vc,job,arrival_s,duration_s,num_gpu`.

A request for more than a host's GPUs is a gang of whole hosts, rounded up; arrivals count from each virtual cluster's
own beginning, so one cluster is one trace. Cite: Jeon et al., "Analysis of Large-Scale Multi-Tenant GPU Clusters for
DNN Training Workloads", USENIX ATC 2019; Narayanan et al., "Heterogeneity-Aware Cluster Scheduling Policies for Deep
Learning Workloads" (Gavel), OSDI 2020.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import GANG_MAX, Request, Run
from moorage.schemas.names import JOB, is_job
from moorage.testing.simulate.rows import Row, read_rows, trouble
from moorage.testing.simulate.trace import SimHost, TraceJob, once, uniform_host

COLUMNS: Final = ("vc", "job", "arrival_s", "duration_s", "num_gpu")
HOST_GPUS: Final = 8
MODEL: Final = "V100"
#: GPUs of the virtual clusters as in the published comparisons
CLUSTERS: Final = {"6c71a0": 192, "b436b2": 400, "0e4a51": 128, "2869ce": 64}
#: how many virtual clusters an error names
CLUSTERS_TOLD: Final = 20
_RUN: Final = Run(driver="noop")


def read_philly(path: Path, cluster: str) -> Iterator[TraceJob]:
    """Yield the jobs of one virtual cluster; its name is their tenant. Raises Refused, also if it has no job."""
    return once(path, _numbered(path, cluster))


def _numbered(path: Path, cluster: str) -> Iterator[tuple[int, TraceJob]]:
    seen: set[str] = set()
    for row in read_rows(path, COLUMNS):
        seen.add(name := row.raw("vc"))
        if name == cluster:
            at_ms, runs_ms = row.ms("arrival_s"), row.ms("duration_s")
            yield row.line, TraceJob(at_ms, runs_ms, cluster, _request(row))
    if cluster not in seen:
        named = sorted(seen)[:CLUSTERS_TOLD]
        allowed = ", ".join(named) + (f" and {len(seen) - len(named)} more" if len(seen) > len(named) else "")
        raise trouble(path, 0, f"no virtual cluster {cluster!r}", found=cluster, allowed=allowed, next="--cluster NAME")


def _request(row: Row) -> Request:
    gpus = row.whole("num_gpu", 1, HOST_GPUS * GANG_MAX)
    job = row.raw("job")
    if not is_job(job):
        raise row.wrong("job", JOB.pattern)
    if gpus <= HOST_GPUS:
        return Request(job=job, gpu=GpuSpec(count=gpus), run=_RUN)
    hosts = -(-gpus // HOST_GPUS)
    return Request(job=job, replicas=hosts, gpu=GpuSpec(count=HOST_GPUS, scheduling="gang"), run=_RUN)


def hosts_of(gpus: int) -> list[SimHost]:
    """Return as few hosts of 8 GPUs as have at least `gpus` GPUs in all."""
    return [uniform_host(f"n{number:03}", HOST_GPUS, MODEL) for number in range(-(-gpus // HOST_GPUS))]
