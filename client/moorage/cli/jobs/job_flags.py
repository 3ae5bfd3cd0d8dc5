"""A request in flags, as `submit`, `run` and `plan` take it."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import is_live, say
from moorage.schemas.units import many, size_bytes

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.client.errors import Rejected
    from moorage.client.planning import Plans
    from moorage.schemas.job import Request

_MIB: Final = 1024 * 1024
_DECIMAL: Final = re.compile(r"[\d.]+ ?G")
#: flags that are a request's field of the same name
_SAME_NAME: Final = (
    "replicas",
    "priority",
    "cwd",
    "keep",
    "user",
    "driver",
    "image",
    "retries",
    "if_seq",
    "on_no_match",
    "on_partition",
    "qos",
)
#: flags that are durations, and the fields that they are
_DURATIONS: Final = {
    "time_limit": "limit",
    "deadline": "deadline_s",
    "start_within": "start_within_s",
    "grace": "grace_s",
}
#: those of them that no run can meet where they are nothing
_ABOVE_ZERO: Final = ("time_limit", "deadline")
#: fields of a request, and the options that say them
_OPTIONS: Final = {
    "$.job": "--job",
    "$.priority": "--priority",
    "$.replicas": "--replicas",
    "$.retries": "--retries",
    "$.if_seq": "--if-seq",
    "$.qos": "--qos",
    "$.guest": "--guest",
    "$.resources.cpu_milli": "--cpu",
    "$.resources.memory_mib": "--memory",
    "$.labels": "--label",
    "$.requires": "--requires",
    "$.run.cwd": "--cwd",
    "$.run.files": "--with",
    "$.run.keep[0]": "--keep",
    "$.run.user": "--user",
    "$.run.driver": "--driver",
    "$.run.image": "--image",
}


@dataclass(frozen=True)
class JobFlags:
    """The flags of a request. Durations are written as 90s, 10m, 1h30m."""

    __group__: ClassVar[str] = "Job"

    gpu: Annotated[
        str | None,
        Parameter(
            help="2xH100:80G, 1xL40S|A100 (either model), 3x2xA100 (3 replicas with 2 each), 1xL40S@mps=50%; "
            "without a value: one GPU.",
            names=("--gpu", "--gpu-count"),
            value="GPUS",
            alone="1",
        ),
    ] = None
    or_gpu: Annotated[
        list[str] | None,
        Parameter(
            help="Ask for these GPUs instead if no worker could ever give those of --gpu. If it is repeated, the "
            "first that a worker could give is taken.",
            value="GPUS",
        ),
    ] = None
    gpu_device: Annotated[
        list[str] | None,
        Parameter(help="This very GPU, by uuid or index; for containers by CDI name.", value="ID"),
    ] = None
    job: Annotated[
        str | None,
        Parameter(help="The job's id. A submit with the same id and content makes no second job.", value="ID"),
    ] = None
    replicas: Annotated[int | None, Parameter(help="Copies of the command, each with its own GPUs.")] = None
    gang: Annotated[bool, Parameter(help="All replicas start together, or none does.")] = False
    spread: Annotated[
        bool, Parameter(help="Prefer a different host for each replica; where none has room, several run on one.")
    ] = False
    priority: Annotated[int | None, Parameter(help="0..100, higher first; 50 if it is not given.")] = None
    cpu: Annotated[float | None, Parameter(help="Cores per replica: 4 or 0.5.", value="CORES")] = None
    memory: Annotated[str | None, Parameter(help="Host memory per replica: 16Gi or 512Mi.", value="SIZE")] = None
    requires: Annotated[
        list[str] | None,
        Parameter(help="A label that the worker must have: zone=a, or zone=a,b for either value.", value="LABEL"),
    ] = None
    label: Annotated[list[str] | None, Parameter(help="A label to give to the job: team=vision.", value="LABEL")] = None
    env: Annotated[list[str] | None, Parameter(help="A variable for the command.", value="NAME=VALUE")] = None
    secret: Annotated[
        list[str] | None,
        Parameter(help="A variable whose value the worker reads from its secrets.", value="NAME=SECRET"),
    ] = None
    cwd: Annotated[
        str | None,
        Parameter(
            help="Folder to start in: absolute, or below the attempt's folder, which is the default.", value="PATH"
        ),
    ] = None
    with_: Annotated[
        list[str] | None,
        Parameter(
            help="A file or folder to bring to the job's folder; .moorage is left out.", names=("--with",), value="PATH"
        ),
    ] = None
    keep: Annotated[
        list[str] | None,
        Parameter(help="Files to keep of its folder, as 'out/**'; see moorage get.", value="PATTERN"),
    ] = None
    user: Annotated[str | None, Parameter(help="Run the job as this user of the worker's host.", value="NAME")] = None
    driver: Annotated[
        str | None,
        Parameter(
            help="How a worker runs the job: process, docker, …; noop on simulated workers. Of NAME,NAME the first "
            "that a worker could run it with is taken.",
            value="NAME",
        ),
    ] = None
    driver_config: Annotated[
        str | None,
        Parameter(
            help='Settings for drivers as JSON, an object for each driver: {"docker": {…}}.',
            names=("--driver-config", "--driver-config-json"),
            value="JSON",
        ),
    ] = None
    image: Annotated[str | None, Parameter(help="Image of the container or the virtual machine.", value="IMAGE")] = None
    time_limit: Annotated[str | None, Parameter(help="Longest time that one attempt may run.", value="DURATION")] = None
    deadline: Annotated[str | None, Parameter(help="Longest time from acceptance to the end.", value="DURATION")] = None
    start_within: Annotated[
        str | None,
        Parameter(
            help="The job expires if it has not started within this time after its acceptance.", value="DURATION"
        ),
    ] = None
    grace: Annotated[
        str | None, Parameter(help="Time between SIGTERM and SIGKILL when the job is ended.", value="DURATION")
    ] = None
    retries: Annotated[int | None, Parameter(help="How many further attempts are made after a failure.")] = None
    if_seq: Annotated[
        int | None,
        Parameter(
            help="Accept the job only if nothing was decided after this ledger record, which plan prints.",
            value="LEDGER",
        ),
    ] = None
    on_no_match: Annotated[
        Literal["wait", "reject"] | None,
        Parameter(help="What to do with the job if no known worker could ever run it."),
    ] = None
    on_partition: Annotated[
        Literal["kill", "keep"] | None,
        Parameter(
            help="What the worker does with the job when it is cut off from the schedulers: kill it, or let it run."
        ),
    ] = None
    qos: Annotated[
        Literal["low", "medium", "high", "critical"] | None,
        Parameter(help="How soon the job is frozen when it does not use its GPUs; low is soonest."),
    ] = None
    guest: Annotated[
        bool, Parameter(help="The job may use the GPUs of a frozen job. It is ended when that job needs them again.")
    ] = False


NO_FLAGS: Final = JobFlags()


def request_of(flags: JobFlags, command: Sequence[str]) -> Request:
    """Return the checked request, with its job id. Raises `Rejected` with invalid-argument."""
    from moorage.client.errors import rejected
    from moorage.client.request_builder import build_request

    flags = replace(flags, driver=drivers_of(flags)[0] if flags.driver is not None else None)
    fields = fields_of(flags)
    if not command and needs_argv(flags.driver):
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


def drivers_of(flags: JobFlags) -> list[str]:
    """Return the drivers that --driver lists; `[""]` without --driver. Raises `Rejected` for an empty name."""
    from moorage.client.errors import rejected

    drivers = (flags.driver or "").split(",")
    if flags.driver is not None and not all(drivers):
        raise rejected(
            "invalid-argument", "--driver has an empty name", found=flags.driver, next="--driver docker,process"
        )
    return drivers


def choices_of(flags: JobFlags, command: Sequence[str], request: Request) -> list[Request]:
    """Return what --or-gpu and --driver list, each as the request in its place, the first wish first. All of them have
    the job id of `request`. Raises `Rejected`."""
    from moorage.client.errors import rejected

    if flags.or_gpu and flags.gpu is None:
        raise rejected("invalid-argument", "--or-gpu needs --gpu", next="name the GPUs that you prefer with --gpu")
    if not flags.or_gpu and len(drivers_of(flags)) == 1:
        return [request]
    flags = replace(flags, job=request.job)
    return [
        request_of(replace(flags, gpu=gpu, driver=driver or None), command)
        for gpu in (flags.gpu, *(flags.or_gpu or ()))
        for driver in drivers_of(flags)
    ]


async def offered(plan: Plans, flags: JobFlags, command: Sequence[str], request: Request) -> Request:
    """Return the first of the choices that some worker could run; if none could, see `planning.first_possible`.

    `plan` is the client's method of that name. Raises `Rejected`, and what `plan` raises.
    """
    choices = choices_of(flags, command, request)
    if len(choices) == 1:
        return request
    from moorage.client.planning import first_possible

    chosen = await first_possible(plan, choices)
    at = choices.index(chosen) // len(drivers_of(flags))
    if at and flags.or_gpu:
        instead = flags.or_gpu[at - 1]
        say(f"no worker could ever give {flags.gpu}, or a limit refuses it; the job asks for {instead} instead")
    return chosen


def not_brought(paths: Sequence[str], request: Request) -> str:
    """Return the word of a request's command that is a file here and that --with `paths` do not bring to the folder in
    which the job starts; "" for none."""
    from moorage.schemas.capabilities import DRIVER_DEFAULT

    run = request.workload  # what the default driver starts, or an image runs, begins in a folder with the job's files
    if not (run.driver == DRIVER_DEFAULT or run.image) or run.files or os.path.isabs(run.cwd or ""):
        return ""
    for at, word in enumerate(run.argv):
        name = os.path.normpath(os.path.join(run.cwd or "", word))
        is_path = "/" in word or at > 0  # the first word alone is looked for in the worker's PATH
        if not is_path or os.path.isabs(word) or name.startswith("..") or not os.path.isfile(word):
            continue
        folders = [path for path in paths if os.path.isdir(path)]
        names = {os.path.basename(path) for path in paths}
        if name not in names and not any(os.path.exists(os.path.join(folder, name)) for folder in folders):
            return word
    return ""


async def with_files(client: AsyncClient, flags: JobFlags, request: Request) -> Request:
    """Send the files of --with and return the request that brings them. Raises `Rejected`."""
    if word := not_brought(flags.with_ or (), request):
        folder, name = os.path.split(os.path.normpath(word))
        fix = f"add --with {folder}, and write {name} in the command" if folder else f"add --with {name}"
        say(f"warning[files]: {word} is a file on this machine, but not in the folder in which the job starts: {fix}")
    if not flags.with_:
        return request
    from moorage.cli.jobs.progress import Progress
    from moorage.client.request_builder import build_request
    from moorage.client.sending import send

    progress = Progress(request.job or "", quiet=not is_live(sys.stderr))
    sent = await send(
        client._wire,
        flags.with_,
        lambda packed, size: progress.stands(
            f"sending {many(packed.files, 'file')}, {packed.size >> 20} MiB: {size >> 20} MiB compressed so far"
        ),
    )
    progress.erase()
    for warning in sent.warnings:
        say(f"warning[files]: {warning}")
    return build_request(request, fields={"files": sent.address})


def needs_argv(driver: str | None) -> bool:
    """Return whether a job of this driver is known to need a command. For a driver that is not known here, its worker
    decides."""
    from moorage.schemas.capabilities import DRIVER_DEFAULT, KNOWN, UNKNOWN

    return KNOWN.get(driver or DRIVER_DEFAULT, UNKNOWN).needs_argv


def _built(command: list[str], flags: JobFlags, fields: dict[str, Any]) -> Request:
    """Do the same as `build_request`, but name the flag in a refusal. Raises `Rejected`."""
    from moorage.client.errors import Rejected
    from moorage.client.request_builder import build_request

    try:
        return build_request(
            command, flags.gpu or (len(flags.gpu_device) if flags.gpu_device else None), flags.job, fields
        )
    except Rejected as refused:
        field = refused.problem.field or ""
        option = "--gpu-device" if flags.gpu_device and "gpu_device_ids" in field else _OPTIONS.get(field)
        if option is None:
            raise
        raise _of_option(option, refused) from None


def _of_option(option: str, refused: Rejected) -> Rejected:
    """Return the refusal of a value with the name of its option."""
    import msgspec

    from moorage.client.errors import Rejected

    return Rejected(msgspec.structs.replace(refused.problem, message=f"{option}: {refused.problem.message}"))


def scheduling_of(flags: JobFlags) -> Literal["gang", "spread"] | None:
    """Return the scheduling that --gang or --spread asks for; None without both. Raises `Rejected` if both are
    given."""
    from moorage.client.errors import rejected

    if flags.gang and flags.spread:
        raise rejected("invalid-argument", "--gang and --spread cannot be used together", next="take one of them")
    return "gang" if flags.gang else "spread" if flags.spread else None


def fields_of(flags: JobFlags) -> dict[str, Any]:
    """Return the other fields of a request that the flags set: all but GPUs, job id and scheduling. Raises
    `Rejected`."""
    fields = {name: value for name in _SAME_NAME if (value := getattr(flags, name)) is not None}
    fields |= _durations(flags)
    if flags.guest:
        fields["guest"] = True
    if resources := _resources(flags):
        fields["resources"] = resources
    env: dict[str, Any] = dict(pairs("env", flags.env or ()))
    env |= {name: {"secret": secret} for name, secret in pairs("secret", flags.secret or (), "SECRET")}
    if env:
        fields["env"] = env
    if flags.driver_config is not None or flags.gpu_device:
        fields["driver_config"] = _blocks(flags)
    if flags.label:
        fields["labels"] = dict(pairs("label", flags.label))
    if flags.requires:
        fields["requires"] = {name: text.split(",") for name, text in pairs("requires", flags.requires)}
    return fields


def _blocks(flags: JobFlags) -> dict[str, Any]:
    """Return the `driver_config` of --driver-config, with the devices of --gpu-device added for the job's driver.
    Raises `Rejected`."""
    import msgspec

    from moorage.client.errors import rejected
    from moorage.schemas.capabilities import DRIVER_DEFAULT

    example = '--driver-config \'{"docker": {"image": "…"}}\''
    try:
        blocks = msgspec.json.decode(flags.driver_config or "{}")
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise rejected("invalid-argument", f"--driver-config is not JSON: {error}", next=example) from None
    if not isinstance(blocks, dict):
        raise rejected(
            "invalid-argument", "--driver-config must be an object with one object for each driver", next=example
        )
    if flags.gpu_device:
        driver = flags.driver or DRIVER_DEFAULT
        block = blocks.get(driver, {})
        if not isinstance(block, dict) or "gpu_device_ids" in block:
            raise rejected(
                "invalid-argument",
                f"--driver-config names devices for the driver {driver} as well",
                next="leave out --gpu-device",
            )
        blocks[driver] = {**block, "gpu_device_ids": flags.gpu_device}
    return blocks


def _durations(flags: JobFlags) -> Iterator[tuple[str, float]]:
    """Yield each duration of the flags: its field and its seconds. Raises `Rejected`."""
    from moorage.client.durations import seconds
    from moorage.client.errors import Rejected, rejected

    for name, field in _DURATIONS.items():
        if (duration := getattr(flags, name)) is None:
            continue
        option = "--" + name.replace("_", "-")
        try:
            value = seconds(duration)
        except Rejected as refused:
            raise _of_option(option, refused) from None
        if name in _ABOVE_ZERO and not value:
            raise rejected(
                "invalid-argument",
                f"{option} {duration} leaves no time to run",
                found=duration,
                allowed="a time above 0s",
                next=f"{option} 10m; without this option the time has no bound",
            )
        yield field, value


def _resources(flags: JobFlags) -> dict[str, int]:
    resources: dict[str, int] = {}
    if flags.cpu is not None:
        resources["cpu_milli"] = milli_cores(flags.cpu)
    if flags.memory is not None:
        resources["memory_mib"] = mebibytes(flags.memory)
        warn_of_decimal(flags.memory, resources["memory_mib"])
    return resources


def milli_cores(cores: float) -> int:
    """Return cores as thousandths of a core, rounded up, so that a small number never becomes 0.

    Raises `Rejected` for infinity and NaN.
    """
    from moorage.client.errors import rejected

    if not math.isfinite(cores):
        raise rejected(
            "invalid-argument",
            f"--cpu is not a number of cores: {cores}",
            found=str(cores),
            next="--cpu 4, or --cpu 0.5",
        )
    return math.ceil(round(cores * 1000, 6))


def mebibytes(size: str) -> int:
    """Return a size as MiB, rounded up, from `16G` (16e9 bytes), `16Gi` or `512M`. A number without a unit is refused
    unless it is 0, because 16 may be meant as GiB. Raises `Rejected`."""
    from moorage.client.errors import rejected

    try:
        found = size_bytes(size)
    except ValueError:
        raise rejected(
            "invalid-argument", f"not a size: {size!r}", found=size, next="write it as 16Gi or 512Mi; 16G is 16e9 bytes"
        ) from None
    if found and size.strip()[-1].isdigit():
        raise rejected(
            "invalid-argument", f"a size without a unit: {size!r}", found=size, next=f"write {size}G, or {size}Mi"
        )
    return math.ceil(found / _MIB)


def warn_of_decimal(size: str, mib: int) -> None:
    """Say how many MiB a size such as `16G` was read as, and what `16Gi` would be, which most tools mean by it."""
    if found := _DECIMAL.fullmatch(size.strip()):
        binary = f"{found[0]}i"
        say(f"warning[memory]: {found[0]} is {mib:,} MiB, as G is 1e9 bytes; {binary} is {mebibytes(binary):,} MiB")


def pairs(option: str, texts: Sequence[str], value_is: str = "value") -> list[tuple[str, str]]:
    """Return the `NAME=value` texts of an option, split. Raises `Rejected`, which shows no value, because a value may
    be secret."""
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
