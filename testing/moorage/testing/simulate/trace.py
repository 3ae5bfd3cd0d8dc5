"""Traces: jobs with their arrival and run times, and the hosts that they run on.

Moorage's own format is JSON lines, one line for each job:

    {"at_s": 12.5, "runs_s": 3600, "tenant": "vision", "request": {"job": "train-1", "gpu": {"count": 8}}}

`at_s` counts from the trace's beginning and `runs_s` is how long one attempt runs, both in seconds; `tenant` is
`default` where it is left out. `request` is the request as it would be submitted; `run` may be left out, and `job`,
which is then `job-` and the number of the line.
A CSV file can describe simpler jobs, with these columns (the first two are needed, the others may be left out):

    at_s,runs_s,tenant,job,gpu,replicas,gang,priority,cpu_milli,memory_mib,workload,timeout_s

where `gpu` is a token as `2xH100:80G` (empty: no GPU) and `gang` is 1 or true for a gang, 0, false or empty for none.
Each job of a tenant has a name of its own. A reader of another format yields `TraceJob`s.
"""

from __future__ import annotations

import itertools
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.schemas.frames import Device
from moorage.schemas.gpu import parse_token
from moorage.schemas.job import DURATION_S_MAX, PRIORITY_MAX, REPLICAS_MAX, Request, Resources, Run
from moorage.schemas.names import JOB, SIMULATED_UUID, TENANT, is_job, is_tenant
from moorage.testing.simulate.rows import DURATION_MS_MAX, LINE_MAX, Row, read_rows, too_long, trouble

#: the most jobs of one trace; each is in memory while it waits or runs
JOBS_MAX: Final = 5_000_000
#: the bounds of `Resources`
CPU_MILLI_MAX: Final = 10**9
MEMORY_MIB_MAX: Final = 2**31
_NOOP: Final = Run(driver="noop")


class TraceJob(msgspec.Struct, frozen=True, gc=False):
    """One job: its arrival and the run time of an attempt, in ms, and its request (`request.job` names it)."""

    at_ms: int
    runs_ms: int
    tenant: str
    request: Request


class SimHost(msgspec.Struct, frozen=True, gc=False):
    """One host and its GPUs in slot order; 0 CPU or memory means that it is not counted."""

    name: str
    devices: tuple[Device, ...]
    cpu_milli: int = 0
    memory_mib: int = 0


def uniform_host(name: str, gpus: int, model: str, **host: int) -> SimHost:
    """Return a host with `gpus` equal GPUs of unknown memory; `host` are its own `cpu_milli` and `memory_mib`."""
    devices = tuple(Device(index, "nvidia", model, f"{SIMULATED_UUID}{name}-{index}", 0) for index in range(gpus))
    return SimHost(name, devices, **host)


class _Line(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    at_s: float
    runs_s: float
    request: dict[str, Any] = {}
    tenant: str = "default"


_COLUMNS: Final = (
    "at_s",
    "runs_s",
    "tenant",
    "job",
    "gpu",
    "replicas",
    "gang",
    "priority",
    "cpu_milli",
    "memory_mib",
    "workload",
    "timeout_s",
)
_NEEDED: Final = ("at_s", "runs_s")
_read_line: Final = msgspec.json.Decoder(_Line).decode


def milliseconds(path: Path, line: int, name: str, seconds: float) -> int:
    """Return a trace's seconds as ms. Raises Refused for negative or infinite ones, and for more than ten years."""
    ms = seconds * 1000
    if not 0 <= ms <= DURATION_MS_MAX:
        allowed = f"seconds, 0..{DURATION_MS_MAX // 1000}"
        raise trouble(path, line, f"{name} is {seconds}, allowed: {allowed}", found=seconds, allowed=allowed)
    return round(ms)


def once(path: Path, numbered: Iterable[tuple[int, TraceJob]]) -> Iterator[TraceJob]:
    """Yield the jobs without their lines. Raises Refused if a tenant has two jobs of one name."""
    lines: dict[tuple[str, str | None], int] = {}
    for line, job in numbered:
        name = job.request.job
        if (first := lines.setdefault((job.tenant, name), line)) != line:
            raise trouble(
                path,
                line,
                f"job {name} of tenant {job.tenant} is already on line {first}",
                found=name,
                allowed="each name once for a tenant",
                next="rename one of the two, or take it out",
            )
        yield job


def read_own(path: Path) -> Iterator[TraceJob]:
    """Yield the jobs of a trace in JSON lines. Raises Refused, which names the line, and OSError."""
    return once(path, _of_lines(path))


def _of_lines(path: Path) -> Iterator[tuple[int, TraceJob]]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE_MAX + 1), b""), 1):
            if len(line) > LINE_MAX:
                raise too_long(path, number, "bytes")
            text = line.removeprefix(BOM_UTF8) if number == 1 else line
            if not text.strip():
                continue
            try:
                said = _read_line(text)
                fields = {"run": {"driver": "noop"}, **said.request}
                if fields.get("job") is None:
                    fields["job"] = f"job-{number}"
                request = msgspec.convert(fields, Request)
            except msgspec.ValidationError as error:  # its message says what was found and what is allowed
                raise trouble(path, number, str(error)) from None
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                found = text[:60].decode(errors="replace").strip()
                raise trouble(path, number, f"not JSON: {error}", found=found, allowed="a JSON object a line") from None
            if not is_tenant(said.tenant):
                raise trouble(path, number, f"a tenant must match {TENANT.pattern}", found=said.tenant)
            at_ms = milliseconds(path, number, "at_s", said.at_s)
            yield number, TraceJob(at_ms, milliseconds(path, number, "runs_s", said.runs_s), said.tenant, request)


def read_csv(path: Path) -> Iterator[TraceJob]:
    """Yield the jobs of a trace in CSV. Raises Refused, which names line and column."""
    return once(path, _of_rows(path))


def _of_rows(path: Path) -> Iterator[tuple[int, TraceJob]]:
    for number, row in enumerate(read_rows(path, _NEEDED, _COLUMNS), 1):
        at_ms, runs_ms, tenant = row.ms("at_s"), row.ms("runs_s"), row.raw("tenant") or "default"
        if not is_tenant(tenant):
            raise row.wrong("tenant", TENANT.pattern)
        try:
            request = _request_of(row, f"job-{number}")
        except ValueError as error:  # its own bounds
            raise row.trouble(str(error)) from None
        yield row.line, TraceJob(at_ms, runs_ms, tenant, request)


def _request_of(row: Row, name: str) -> Request:
    spec, times, token = None, 1, row.raw("gpu")
    if token:
        try:
            times, spec = parse_token(token)
        except ValueError as error:
            raise row.trouble(f"gpu is {token[:60]!r}: {error}", found=token) from None
    if row.flag("gang") and spec is not None:
        spec = msgspec.structs.replace(spec, scheduling="gang")
    job = row.raw("job") or name
    if not is_job(job):
        raise row.wrong("job", JOB.pattern)
    cpu_milli = row.whole("cpu_milli", most=CPU_MILLI_MAX, empty=0)
    memory_mib = row.whole("memory_mib", most=MEMORY_MIB_MAX, empty=0)
    timeout_s, workload = row.seconds("timeout_s", DURATION_S_MAX), row.raw("workload")
    return Request(
        job=job,
        replicas=row.whole("replicas", 1, REPLICAS_MAX, empty=times),
        priority=row.whole("priority", 0, PRIORITY_MAX, empty=50),
        gpu=spec,
        resources=Resources(cpu_milli, memory_mib) if cpu_milli or memory_mib else None,
        run=_NOOP if timeout_s is None else Run(driver="noop", timeout_s=timeout_s),
        labels={"workload": workload} if workload else {},
    )


def in_order(path: Path, jobs: Iterable[TraceJob]) -> list[TraceJob]:
    """Return all jobs by arrival; equal times keep the trace's order. Raises Refused for too many jobs, or none."""
    listed = list(itertools.islice(jobs, JOBS_MAX + 1))
    if not listed:
        raise trouble(path, 0, "there are no jobs in it", found=0, allowed=f"1..{JOBS_MAX} jobs")
    if len(listed) > JOBS_MAX:
        raise trouble(path, 0, "there are too many jobs in it", found=f"more than {JOBS_MAX}", allowed=f"1..{JOBS_MAX}")
    listed.sort(key=lambda job: job.at_ms)
    return listed
