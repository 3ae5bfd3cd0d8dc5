"""Traces: jobs with their arrival and run times, and the hosts that they run on.

Moorage's own format is JSON lines, one line for each job:

    {"at_s": 12.5, "runs_s": 3600, "tenant": "vision", "request": {"job": "train-1", "gpu": {"count": 8}}}

`at_s` counts from the trace's beginning and `runs_s` is how long one attempt runs, both in seconds; `tenant` is
`default` where it is left out. `request` is the request as it would be submitted; `run` may be left out, and `job`,
which is then `job-` and the number of the line. A job that came before the trace's beginning has `at_s` 0, how long
before in `waited_s`, and in `stands` by replica what runs of it then: for how many seconds, host and slots.
A line without `runs_s` is an event: `join`, `leave`, `order`, `cancel`, `look`, `ran` or `usage` (`from_ledger`
writes them).
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
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from moorage.schemas.errors import Refused
from moorage.schemas.frames import Device
from moorage.schemas.gpu import parse_token
from moorage.schemas.hello_check import SLOTS_MAX
from moorage.schemas.job import DURATION_S_MAX, PRIORITY_MAX, REPLICAS_MAX, Request, Resources, Run
from moorage.schemas.names import JOB, SIMULATED_UUID, TENANT, is_job, is_tenant
from moorage.schemas.operate import act_of
from moorage.schemas.ranges import NUMBERS_MAX
from moorage.testing.simulate.rows import DURATION_MS_MAX, LINE_MAX, Row, read_rows, too_long, trouble

#: the most jobs of one trace; each is in memory while it waits or runs
JOBS_MAX: Final = 5_000_000
#: the bounds of `Resources`
CPU_MILLI_MAX: Final = 10**9
MEMORY_MIB_MAX: Final = 2**31
_NOOP: Final = Run(driver="noop")


class TraceJob(msgspec.Struct, frozen=True, gc=False):
    """One job: its arrival and the run time of an attempt, in ms, and its request (`request.job` names it).

    Of a trace from a ledger, `attempts` has the run times and exit codes of those attempts that there were, and
    `placed` when and where each began: ms, host and slots. Keys are as `0/1`: replica and attempt. Of a job that came
    before the trace's beginning, `waited_ms` is how long before, and `stands` has by replica what ran of it then: for
    how many ms it had run, host and slots.
    """

    at_ms: int
    runs_ms: int
    tenant: str
    request: Request
    attempts: dict[str, tuple[int, int]] = {}
    placed: dict[str, tuple[int, str, list[int]]] = {}
    waited_ms: int = 0
    stands: dict[int, tuple[int, str, list[int]]] = {}


class TraceEvent(msgspec.Struct, frozen=True, gc=False):
    """What happened beside arrivals: a host joined or left, an operator's order, a cancel."""

    at_ms: int
    #: join, leave, order, cancel, look: the core is to look for room; ran: how long attempts ran before; usage: what
    #: tenants have used of late, in thousandths of a GPU
    kind: str
    data: dict[str, Any]


class Trace(NamedTuple):
    """A trace in JSON lines: its jobs, what happened beside, and what its head says."""

    jobs: list[TraceJob]
    events: list[TraceEvent]
    head: dict[str, Any]


class SimHost(msgspec.Struct, frozen=True, gc=False):
    """One host and its GPUs in slot order; 0 CPU or memory means that it is not counted."""

    name: str
    devices: tuple[Device, ...]
    cpu_milli: int = 0
    memory_mib: int = 0
    labels: dict[str, str] = {}


class Ran(msgspec.Struct, frozen=True, gc=False):
    """How long the last attempts of a job ran, which came so many seconds before the trace's beginning."""

    tenant: str
    request: Request
    ran_s: list[float]
    accepted_s: float


def uniform_host(name: str, gpus: int, model: str, cpu_milli: int = 0, memory_mib: int = 0) -> SimHost:
    """Return a host with `gpus` equal GPUs of unknown memory; with its CPU and memory."""
    devices = tuple(Device(index, "nvidia", model, f"{SIMULATED_UUID}{name}-{index}", 0) for index in range(gpus))
    return SimHost(name, devices, cpu_milli, memory_mib)


_Number = Annotated[int, msgspec.Meta(ge=0, lt=NUMBERS_MAX)]
_Slot = Annotated[int, msgspec.Meta(ge=0, lt=SLOTS_MAX)]


class _Line(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    at_s: float
    runs_s: float
    request: dict[str, Any] = {}
    tenant: str = "default"
    attempts: dict[str, tuple[float, int]] = {}
    placed: dict[str, tuple[float, str, list[int]]] = {}
    waited_s: float = 0.0
    stands: dict[_Number, tuple[float, str, list[_Slot]]] = {}


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


#: what a line that is no job may say besides `at_s`
EVENTS: Final = ("join", "leave", "order", "cancel", "look", "ran", "usage")


def _beside(text: bytes) -> dict[str, Any] | None:
    """Return what a line says that is no job: an event, or the trace's head; else None."""
    if b'"runs_s"' in text:
        return None
    try:
        said = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return said if "runs_s" not in said and not {"trace", *EVENTS}.isdisjoint(said) else None


def _check(kind: str, data: dict[str, Any]) -> None:
    """Raise KeyError, TypeError, ValidationError or Refused for an event that cannot happen."""
    if kind == "join":
        msgspec.convert(data, SimHost)
    elif kind == "order":
        act_of(data["verb"], {"by": "trace", **{name: value for name, value in data.items() if name != "verb"}})
    elif kind == "ran":
        msgspec.convert(data, Ran)
    elif kind == "usage":
        msgspec.convert(data, dict[str, int])
    elif kind in ("leave", "cancel"):
        for name in ("host",) if kind == "leave" else ("tenant", "job"):
            if not isinstance(data[name], str):
                raise TypeError(f"{name} must be a name")


def _of_lines(path: Path) -> Iterator[tuple[int, TraceJob]]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE_MAX + 1), b""), 1):
            if len(line) > LINE_MAX:
                raise too_long(path, number, "bytes")
            text = line.removeprefix(BOM_UTF8) if number == 1 else line
            if not text.strip() or _beside(text) is not None:
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
            runs_ms = milliseconds(path, number, "runs_s", said.runs_s)
            attempts = {
                key: (milliseconds(path, number, "attempts", runs_s), code)
                for key, (runs_s, code) in said.attempts.items()
            }
            placed = {key: (round(at_s * 1000), host, slots) for key, (at_s, host, slots) in said.placed.items()}
            if said.at_s and (said.waited_s or said.stands):
                message = "waited_s and stands are of jobs that came before the trace's beginning"
                raise trouble(path, number, message, found=said.at_s, allowed="at_s 0")
            waited_ms = milliseconds(path, number, "waited_s", said.waited_s)
            stands = {
                index: (milliseconds(path, number, "stands", ran_s), host, slots)
                for index, (ran_s, host, slots) in said.stands.items()
            }
            yield number, TraceJob(at_ms, runs_ms, said.tenant, request, attempts, placed, waited_ms, stands)


def read_whole(path: Path) -> Trace:
    """Return a trace in JSON lines with what happened beside its jobs. Raises Refused, which names the line, and
    OSError."""
    events: list[TraceEvent] = []
    head: dict[str, Any] = {}
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE_MAX + 1), b""), 1):
            text = line.removeprefix(BOM_UTF8) if number == 1 else line
            said = _beside(text)
            if said is None:
                continue
            if "trace" in said:
                head = said
                continue
            kind = next((kind for kind in EVENTS if isinstance(said.get(kind), dict)), None)
            at_s = said.get("at_s")
            if kind is None or isinstance(at_s, bool) or not isinstance(at_s, int | float):
                found = text[:60].decode(errors="replace").strip()
                allowed = f"at_s with runs_s, or with one of {', '.join(EVENTS)}"
                raise trouble(path, number, "a line that is neither a job nor an event", found=found, allowed=allowed)
            try:
                _check(kind, said[kind])
            except (KeyError, TypeError, msgspec.ValidationError, Refused) as error:
                raise trouble(path, number, f"{kind}: {error}", found=text[:60].decode(errors="replace")) from None
            events.append(TraceEvent(milliseconds(path, number, "at_s", at_s), kind, said[kind]))
    events.sort(key=lambda event: event.at_ms)
    return Trace(in_order(path, read_own(path)), events, head)


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
