"""What a trace says: jobs with the time at which each comes and how long it runs, and the hosts they run on.

Our own format is JSON lines, a job a line:

    {"at_s": 12.5, "runs_s": 3600, "tenant": "vision", "request": {"job": "train-1", "gpu": {"count": 8}}}

`at_s` counts from the trace's beginning and `runs_s` is how long one attempt runs, both in seconds; `tenant` is
`default` where it is left out. `request` is the request as it would be submitted (contract §4); `run` may be left out.
A CSV says the same of simpler jobs, with these columns (the first two are needed, the others may be left out):

    at_s,runs_s,tenant,job,gpu,replicas,gang,priority,cpu_milli,memory_mib,workload,timeout_s

where `gpu` is a token as `2xH100:80G` (empty: no GPU) and `gang` is 1 for a gang. Whoever reads another format makes
`TraceJob`s of it.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.schemas.errors import Refused, refuse
from moorage.schemas.frames import Device
from moorage.schemas.gpu import parse_token
from moorage.schemas.job import Request, Resources, Run
from moorage.schemas.names import is_tenant

#: jobs of one trace: each stands in memory while it waits or runs
JOBS_MAX: Final = 5_000_000
LINE_BYTES_MAX: Final = 64 * 1024
_DURATION_MS_MAX: Final = 10 * 366 * 86_400_000
_NOOP: Final = Run(driver="noop")


class TraceJob(msgspec.Struct, frozen=True, gc=False):
    """One job: when it comes and how long an attempt runs, in ms, and what it asks for (`request.job` names it)."""

    at_ms: int
    runs_ms: int
    tenant: str
    request: Request


class SimHost(msgspec.Struct, frozen=True, gc=False):
    """One host and its GPUs in slot order; 0 CPU or memory is not counted."""

    name: str
    devices: tuple[Device, ...]
    cpu_milli: int = 0
    memory_mib: int = 0


def uniform_host(name: str, gpus: int, model: str, memory_mib: int = 0, **host: int) -> SimHost:
    """A host with so many GPUs alike; `host` are its `cpu_milli` and `memory_mib`."""
    devices = tuple(Device(index, "nvidia", model, f"SIM-{name}-{index}", memory_mib) for index in range(gpus))
    return SimHost(name, devices, **host)


class _Line(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    at_s: float
    runs_s: float
    request: dict[str, Any] = {}
    tenant: str = "default"


_COLUMNS: Final = (
    "at_s", "runs_s", "tenant", "job", "gpu", "replicas", "gang", "priority", "cpu_milli", "memory_mib", "workload",
    "timeout_s",
)  # fmt: skip
_read_line: Final = msgspec.json.Decoder(_Line).decode


def trouble(path: Path, line: int, why: str, **fields: Any) -> Refused:
    """`raise trouble(path, 3, "…")`: what is wrong with a trace, and where."""
    at = f"{path.name} line {line}: " if line else f"{path.name}: "
    return refuse("invalid-argument", at + why, **{"next": "moorage simulate --help shows the formats", **fields})


def milliseconds(path: Path, line: int, name: str, seconds: float) -> int:
    """Seconds of a trace as ms. Raises Refused for what is negative, endless or beyond ten years."""
    ms = seconds * 1000
    if not 0 <= ms <= _DURATION_MS_MAX:
        raise trouble(path, line, f"{name} must be 0..{_DURATION_MS_MAX // 1000} seconds", found=seconds)
    return round(ms)


def read_own(path: Path) -> Iterator[TraceJob]:
    """Our own JSON lines. Raises Refused, which names the line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if len(line) > LINE_BYTES_MAX:
                raise trouble(path, number, f"a line has at most {LINE_BYTES_MAX} bytes")
            try:
                said = _read_line(line)
                fields = {"job": f"job-{number}", "run": {"driver": "noop"}, **said.request}
                request = msgspec.convert(fields, Request)
            except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
                raise trouble(path, number, str(error)) from None
            yield _job(path, number, said.at_s, said.runs_s, said.tenant, request)


def read_csv(path: Path) -> Iterator[TraceJob]:
    """Our own CSV. Raises Refused, which names the line."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = csv.DictReader(file)
        unknown = [name for name in rows.fieldnames or () if name not in _COLUMNS]
        if unknown or not {"at_s", "runs_s"} <= set(rows.fieldnames or ()):
            raise trouble(path, 1, "these are no columns of a trace", found=unknown, allowed=", ".join(_COLUMNS))
        for number, row in enumerate(rows, 2):
            try:
                at_s, runs_s = float(row["at_s"]), float(row["runs_s"])
                request = _request_of(row, f"job-{number - 1}")
            except (ValueError, TypeError) as error:
                raise trouble(path, number, str(error)) from None
            except Refused as refused:
                raise trouble(path, number, refused.problem.message, found=refused.problem.found) from None
            yield _job(path, number, at_s, runs_s, row.get("tenant") or "default", request)


def _request_of(row: dict[str, str], name: str) -> Request:
    whole = {key: int(row[key]) for key in ("replicas", "priority", "cpu_milli", "memory_mib") if row.get(key)}
    spec, replicas = None, whole.get("replicas", 1)
    if row.get("gpu"):
        times, spec = parse_token(row["gpu"])
        replicas = whole.get("replicas", times)
    if row.get("gang") == "1" and spec is not None:
        spec = msgspec.structs.replace(spec, scheduling="gang")
    cpu_milli, memory_mib = whole.get("cpu_milli", 0), whole.get("memory_mib", 0)
    return Request(
        job=row.get("job") or name,
        replicas=replicas,
        priority=whole.get("priority", 50),
        gpu=spec,
        resources=Resources(cpu_milli, memory_mib) if cpu_milli or memory_mib else None,
        run=Run(driver="noop", timeout_s=float(row["timeout_s"])) if row.get("timeout_s") else _NOOP,
        labels={"workload": row["workload"]} if row.get("workload") else {},
    )


def _job(path: Path, line: int, at_s: float, runs_s: float, tenant: str, request: Request) -> TraceJob:
    if not is_tenant(tenant):
        raise trouble(path, line, "a tenant must match [a-z0-9-]{1,32}", found=tenant)
    at_ms, runs_ms = milliseconds(path, line, "at_s", at_s), milliseconds(path, line, "runs_s", runs_s)
    return TraceJob(at_ms, runs_ms, tenant, request)


def in_order(path: Path, jobs: Iterable[TraceJob]) -> list[TraceJob]:
    """All jobs by the time of their coming; equal times keep the trace's order. Raises Refused for too many or none."""
    listed = list(itertools.islice(jobs, JOBS_MAX + 1))
    if not listed or len(listed) > JOBS_MAX:
        raise trouble(path, 0, f"a trace has 1..{JOBS_MAX} jobs", found=len(listed))
    listed.sort(key=lambda job: job.at_ms)
    names: set[tuple[str, str | None]] = set()
    for job in listed:
        key = (job.tenant, job.request.job)
        if key in names:
            raise trouble(path, 0, f"job {job.request.job} of tenant {job.tenant} stands there twice")
        names.add(key)
    return listed
