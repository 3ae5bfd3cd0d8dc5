"""`moorage submit`, and the flags that it shares with `run`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from moorage.cli.arguments import Parameter
from moorage.cli.console import emit, say, tell, tell_error
from moorage.cli.exit_codes import EXIT_FAILED, exit_code_of
from moorage.cli.interrupts import detachable
from moorage.cli.options import ROWS, RowOptions, guarded, with_client
from moorage.cli.render import waits
from moorage.schemas.frames import Accepted
from moorage.schemas.gpu import format_token

if TYPE_CHECKING:
    from moorage.cli.instead import Change
    from moorage.client.client import AsyncClient
    from moorage.client.errors import Rejected
    from moorage.client.job import Job
    from moorage.schemas.job import Request

FILE_BYTES_MAX: Final = 64 * 1024 * 1024
_MIB: Final = 1024 * 1024
#: fields of a request, and the options that say them
_OPTIONS: Final = {
    "$.job": "--job",
    "$.priority": "--priority",
    "$.replicas": "--replicas",
    "$.retries": "--retries",
    "$.if_seq": "--if-seq",
    "$.resources.cpu_milli": "--cpu",
    "$.resources.memory_mib": "--memory",
    "$.labels": "--label",
    "$.requires": "--requires",
    "$.run.cwd": "--cwd",
    "$.run.user": "--user",
    "$.run.driver": "--driver",
}
#: what a warning means that is a code alone
_WARNINGS: Final = {
    "cancelled-before": "a cancel of this id came before it, so it is CANCELLED; submit it under another id",
}
#: bounds that no run can meet where they are nothing
_ABOVE_ZERO: Final = ("time_limit", "deadline")
_SIZE_UNITS: Final = {"K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4, "Ki": 1024, "Mi": _MIB, "Gi": 1024**3}


@dataclass(frozen=True)
class JobFlags:
    """A request, in flags. Durations as 90s, 10m, 1h30m."""

    __group__: ClassVar[str] = "Job"

    gpu: Annotated[
        str | None,
        Parameter(help="2xH100:80G, 1xL40S|A100, 3x2xA100, 1xL40S@mps=50%; alone: one.", value="GPUS", alone="1"),
    ] = None
    job: Annotated[str | None, Parameter(help="The job's id; the same id and content is the same job.", value="ID")] = (
        None
    )
    replicas: Annotated[int | None, Parameter(help="Copies of the command, each with its own GPUs.")] = None
    gang: Annotated[bool, Parameter(help="All replicas start together or not at all.")] = False
    spread: Annotated[bool, Parameter(help="Each replica on a host of its own.")] = False
    priority: Annotated[int | None, Parameter(help="0..100, higher first.")] = None
    cpu: Annotated[float | None, Parameter(help="Cores per replica: 4 or 0.5.", value="CORES")] = None
    memory: Annotated[str | None, Parameter(help="Host memory per replica: 16G or 512M.", value="SIZE")] = None
    requires: Annotated[list[str] | None, Parameter(help="A worker's label: zone=a or zone=a,b.", value="LABEL")] = None
    label: Annotated[list[str] | None, Parameter(help="A label of the job: team=vision.", value="LABEL")] = None
    env: Annotated[list[str] | None, Parameter(help="A variable for the command.", value="NAME=VALUE")] = None
    secret: Annotated[
        list[str] | None, Parameter(help="A variable whose value the worker looks up.", value="NAME=SECRET")
    ] = None
    cwd: Annotated[str | None, Parameter(help="Folder on the worker to start in, absolute. Else /.", value="PATH")] = (
        None
    )
    user: Annotated[str | None, Parameter(help="User on the worker's host.", value="NAME")] = None
    driver: Annotated[
        str | None, Parameter(help="How a worker runs it: process, or noop on simulated ones.", value="NAME")
    ] = None
    time_limit: Annotated[str | None, Parameter(help="Longest time that one attempt may run.", value="DURATION")] = None
    deadline: Annotated[str | None, Parameter(help="Longest time from acceptance to the end.", value="DURATION")] = None
    start_within: Annotated[str | None, Parameter(help="Expire unless started within.", value="DURATION")] = None
    grace: Annotated[str | None, Parameter(help="Time between SIGTERM and SIGKILL.", value="DURATION")] = None
    retries: Annotated[int | None, Parameter(help="Further attempts after a failure.")] = None
    if_seq: Annotated[
        int | None, Parameter(help="Only if nothing was decided since this record, which plan shows.", value="LEDGER")
    ] = None
    on_no_match: Annotated[
        Literal["wait", "reject"] | None, Parameter(help="When no known worker could ever run it.")
    ] = None
    on_partition: Annotated[Literal["kill", "keep"] | None, Parameter(help="When the worker is cut off.")] = None


NO_FLAGS: Final = JobFlags()


def request_of(flags: JobFlags, command: Sequence[str]) -> Request:
    """The checked request, with its job id. Raises `Rejected` with invalid-argument."""
    from moorage.client.errors import rejected
    from moorage.client.request_builder import build_request

    fields = fields_of(flags)
    if not command and flags.driver != "noop":
        raise rejected(
            "invalid-argument",
            "no command to run",
            field="$.run.argv",
            next="name it after --, as: moorage run --gpu 1xH100 -- sleep 60",
        )
    request = _built(list(command), flags, fields)
    scheduling = scheduling_of(flags)
    if scheduling is None:
        return request
    if request.gpu is None:
        raise rejected("invalid-argument", "--gang and --spread need --gpu", field="$.gpu", next="add --gpu 1xH100")
    import msgspec

    return build_request(request, msgspec.structs.replace(request.gpu, scheduling=scheduling))


def _built(command: list[str], flags: JobFlags, fields: dict[str, Any]) -> Request:
    """As `build_request`; what a flag said is refused by the flag's name, beside the field's. Raises `Rejected`."""
    from moorage.client.errors import Rejected
    from moorage.client.request_builder import build_request

    try:
        return build_request(command, flags.gpu, flags.job, fields)
    except Rejected as refused:
        option = _OPTIONS.get(refused.problem.field or "")
        if option is None:
            raise
        raise _of_option(option, refused) from None


def _of_option(option: str, refused: Rejected) -> Rejected:
    """The refusal of a value, with the option that said it."""
    import msgspec

    from moorage.client.errors import Rejected

    return Rejected(msgspec.structs.replace(refused.problem, message=f"{option}: {refused.problem.message}"))


def scheduling_of(flags: JobFlags) -> Literal["gang", "spread"] | None:
    """Raises `Rejected`."""
    from moorage.client.errors import rejected

    if flags.gang and flags.spread:
        raise rejected("invalid-argument", "--gang and --spread exclude each other", next="take one of them")
    return "gang" if flags.gang else "spread" if flags.spread else None


def fields_of(flags: JobFlags) -> dict[str, Any]:
    """What the flags say beside GPUs, job id and scheduling, as fields of a request. Raises `Rejected`."""
    from moorage.client.durations import seconds
    from moorage.client.errors import Rejected, rejected

    fields: dict[str, Any] = {
        name: value
        for name in (
            "replicas",
            "priority",
            "cwd",
            "user",
            "driver",
            "retries",
            "if_seq",
            "on_no_match",
            "on_partition",
        )
        if (value := getattr(flags, name)) is not None
    }
    for name, field in (
        ("time_limit", "timeout_s"),
        ("deadline", "deadline_s"),
        ("start_within", "start_within_s"),
        ("grace", "grace_s"),
    ):
        if (duration := getattr(flags, name)) is None:
            continue
        option = "--" + name.replace("_", "-")
        try:
            fields[field] = seconds(duration)
        except Rejected as refused:
            raise _of_option(option, refused) from None
        if name in _ABOVE_ZERO and not fields[field]:
            raise rejected(
                "invalid-argument",
                f"{option} {duration} leaves no time to run in",
                found=duration,
                allowed="above 0s",
                next=f"{option} 10m, or leave it out: no bound",
            )
    resources: dict[str, int] = {}
    if flags.cpu is not None:
        resources["cpu_milli"] = milli_cores(flags.cpu)
    if flags.memory is not None:
        resources["memory_mib"] = mebibytes(flags.memory)
    if resources:
        fields["resources"] = resources
    env: dict[str, Any] = dict(pairs("env", flags.env or ()))
    env |= {name: {"secret": secret} for name, secret in pairs("secret", flags.secret or (), "SECRET")}
    if env:
        fields["env"] = env
    if flags.label:
        fields["labels"] = dict(pairs("label", flags.label))
    if flags.requires:
        fields["requires"] = {name: text.split(",") for name, text in pairs("requires", flags.requires)}
    return fields


def milli_cores(cores: float) -> int:
    """Cores → thousandths of one, rounded up: a claim of little is no claim of nothing. Raises `Rejected`."""
    from moorage.client.errors import rejected

    if not math.isfinite(cores):
        raise rejected(
            "invalid-argument", f"--cpu is no number of cores: {cores}", found=str(cores), next="--cpu 4, or --cpu 0.5"
        )
    return math.ceil(round(cores * 1000, 6))


def mebibytes(size: str) -> int:
    """`16G` (1e9 bytes), `16Gi` or `512M` → MiB, rounded up. A number alone is refused but for 0: who writes 16 may
    mean GiB. Raises `Rejected`."""
    from moorage.client.errors import rejected

    number = size.rstrip("KMGTiB")
    unit = size[len(number) :].removesuffix("B")
    try:
        amount = float(number)
        if not math.isfinite(amount):
            raise ValueError(size)
        if not unit and amount:
            raise rejected(
                "invalid-argument", f"a size without a unit: {size!r}", found=size, next=f"write {size}G, or {size}Mi"
            )
        return math.ceil(amount * _SIZE_UNITS[unit or "Mi"] / _MIB)
    except (ValueError, KeyError):
        raise rejected(
            "invalid-argument", f"not a size: {size!r}", found=size, next="write it as 16G, 512M or 16Gi"
        ) from None


def pairs(option: str, texts: Sequence[str], value_is: str = "value") -> list[tuple[str, str]]:
    """`NAME=value` texts of an option, split. Raises `Rejected`, which shows no value: it may be meant to be secret."""
    from moorage.client.errors import rejected

    found = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise rejected(
                "invalid-argument",
                f"--{option} needs NAME={value_is}",
                found=name[:40],
                next=f"--{option} NAME={value_is}",
            )
        found.append((name, value))
    return found


def submit(
    *command: Annotated[str, Parameter(help="What to run, after --.", command=True)],
    file: Annotated[
        str | None,
        Parameter(help="Requests as JSON, one or an array; - is stdin.", names=("--file", "-f"), value="FILE"),
    ] = None,
    instead_of: Annotated[
        str | None,
        Parameter(help="Cancel this waiting job, and submit it again with what the flags change.", value="JOB"),
    ] = None,
    but: Annotated[
        str | None, Parameter(help="With --instead-of: fields of the request, as JSON.", value="JSON")
    ] = None,
    flags: JobFlags = NO_FLAGS,
    options: RowOptions = ROWS,
) -> int:
    """Submit a job and go on; returns once it is in the ledger.

    Prints the job's id. After a failure, send the same id and content again: it stays one job.
    """

    def act() -> int:
        from moorage.client.errors import rejected
        from moorage.client.request_builder import build_request

        if instead_of is not None:
            from moorage.cli.instead import instead

            if file is not None:
                raise rejected("invalid-argument", "--instead-of takes the request of that job", next="leave out -f")
            change = instead(instead_of, flags, command, but)
            return with_client(options, lambda client: _one_of(client, change, options))
        if but is not None:
            raise rejected("invalid-argument", "--but needs --instead-of", next="--instead-of JOB --but '{…}'")
        if file is None:
            request = request_of(flags, command)
            return with_client(options, lambda client: _one(client, request, options))
        if command or flags != NO_FLAGS:
            raise rejected(
                "invalid-argument", "a file says the whole request", next="leave out the flags, or leave out -f"
            )
        content = _read(file)
        if not isinstance(content, list):
            request = build_request(content)
            return with_client(options, lambda client: _one(client, request, options))
        requests = [build_request(body) for body in content]

        async def work(client: AsyncClient) -> int | None:
            return await detachable(_many(client, requests, options), lambda: say_interrupted(requests))

        return with_client(options, work)

    return guarded(options, act)


async def _one_of(client: AsyncClient, change: Change, options: RowOptions) -> int | None:
    from moorage.schemas.errors import MoorageError

    gone, request = await change(client)
    try:
        return await _one(client, request, options)
    except MoorageError:
        import msgspec

        say(f"{gone} was cancelled, and this is not handed in: {msgspec.json.encode(request).decode()}")
        raise


async def _one(client: AsyncClient, request: Request, options: RowOptions) -> int | None:
    async def ask() -> None:
        job = await client.submit(request)
        assert job.accepted is not None
        if not options.shown(job.accepted, [job.accepted]):
            tell(job.id)
            _talk(job, request)

    return await detachable(ask(), lambda: say_interrupted([request]))


def say_interrupted(requests: Sequence[Request]) -> None:
    """Nobody can know whether what was sent is in the ledger; their ids make it safe to ask, and to send again."""
    if len(requests) == 1:
        job = requests[0].job
        say(f"interrupted before the answer: {job} may have been accepted")
        say(f"  look: moorage show {job}   cancel: moorage cancel {job}")
    else:
        say(f"interrupted before the answer: any of the {len(requests)} jobs may have been accepted")
        say("  look: moorage ls; jobs that have an id in the file can be sent again: they are the same jobs")


def _talk(job: Job, request: Request) -> None:
    accepted = job.accepted
    assert accepted is not None
    known = f"known already, {accepted.state}" if accepted.duplicate else "accepted"
    without = "no GPU" if request.replicas == 1 else f"{request.replicas} replicas without GPUs"
    asks = format_token(request.effective_gpu, request.replicas) if request.effective_gpu else without
    say(f"{known}: {asks}, ledger record {accepted.ledger}")
    tell_warnings(accepted)
    if accepted.waiting is not None and "reason" in accepted.waiting:
        say(f"waits: {waits(accepted.waiting)}")
    say(f"follow: moorage logs {job.id}   why: moorage explain {job.id}")


def tell_warnings(accepted: Accepted) -> None:
    for warning in accepted.warnings:
        tell_warning(warning)


def tell_warning(warning: str) -> None:
    """One of those that an acceptance or a plan has: a code, and mostly more behind a colon."""
    code, _, text = warning.partition(":")
    text = text.strip() or _WARNINGS.get(code, "see moorage explain")
    say(f"warning[{code}]: {'no known worker could run it: ' if code == 'no-match' else ''}{text}")


async def _many(client: AsyncClient, requests: list[Request], options: RowOptions) -> int | None:
    """An array: each request is accepted or refused by itself, told in their order."""
    from moorage.client.errors import BatchRejected, error_of

    jobs: list[Job | None] = []
    problems = {}
    try:
        jobs += await client.submit_many(requests)
    except BatchRejected as refused:
        jobs, problems = refused.jobs, refused.problems
    code = 0
    for at, job in enumerate(jobs):
        if job is not None:
            if not options.shown(job.accepted, [job.accepted]):
                tell(job.id)
            continue
        if options.json:
            emit(problems[at])
        tell_error(problems[at])
        code = code or exit_code_of(error_of(problems[at])) or EXIT_FAILED
    if not options.json:
        say(f"{len(jobs) - len(problems)} of {len(jobs)} accepted")
    return code


def _read(file: str) -> Any:
    """The JSON of a file or of stdin: an object, or a list of them. Raises `Rejected`."""
    import msgspec

    from moorage.client.errors import rejected

    where = "stdin" if file == "-" else file
    try:
        if file == "-":
            text = sys.stdin.buffer.read(FILE_BYTES_MAX + 1)
        else:
            with Path(file).open("rb") as opened:
                text = opened.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise rejected(
            "invalid-argument", f"{where} cannot be read: {error.strerror}", next="name a file of JSON, or - for stdin"
        ) from None
    if len(text) > FILE_BYTES_MAX:
        raise rejected("too-large", f"{where} has more than {FILE_BYTES_MAX} bytes", next="split it")
    try:
        content = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise rejected(
            "invalid-argument", f"{where} is not JSON: {error}", next='it looks like {"run": {"argv": ["nvidia-smi"]}}'
        ) from None
    bodies = content if isinstance(content, list) else [content]
    if not bodies or not all(isinstance(body, dict) for body in bodies):
        raise rejected(
            "invalid-argument",
            f"{where} holds no request",
            next='a request is an object as {"run": {"argv": ["nvidia-smi"]}}, or an array of them',
        )
    return content
