"""A request in flags, as `submit`, `run` and `plan` take it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from moorage.cli.framework.arguments import Parameter, lacks_unit
from moorage.cli.framework.console import say
from moorage.cli.jobs.from_shell import variables
from moorage.client.durations import seconds
from moorage.client.errors import Rejected, rejected
from moorage.schemas.units import size_bytes

if TYPE_CHECKING:
    from moorage.client.planning import Plans
    from moorage.client.sweeps import Sweep
    from moorage.schemas.job import Request

_MIB: Final = 1024 * 1024
_DECIMAL: Final = re.compile(r"[\d.]+ ?G")
#: flags that are a request's field of the same name
_SAME_NAME: Final = (
    "max_running",
    "priority",
    "cwd",
    "keep",
    "checkpoint",
    "checkpoint_signal",
    "user",
    "driver",
    "image",
    "retries",
    "if_seq",
    "on_no_match",
    "on_partition",
    "on_stall",
    "qos",
    "restart",
    "max_restarts",
    "ports",
)
#: flags that are durations, and the fields that they are
#: each STEP-th number, as arrays of Slurm and PBS have it
_STEPS: Final = re.compile(r"(\d{1,7})-(\d{1,7}):(\d{1,7})", re.ASCII)
#: what --array takes, beyond the numbers and ranges of a request
_NUMBERS: Final = "for example --array 0-99, 0-99,205, or 0-99:10, each tenth (steps)"
#: which of several values a field's path names
_AT: Final = re.compile(r"\[\d+\]")
_DURATIONS: Final = {
    "time_limit": "limit",
    "deadline": "deadline_s",
    "start_within": "start_within_s",
    "grace": "grace_s",
    "checkpoint_before": "checkpoint_before_s",
    "stall": "stall_s",
}
#: those of them that no run can meet where they are nothing
_ABOVE_ZERO: Final = ("time_limit", "deadline")
#: fields of a request, and the options that say them
_OPTIONS: Final = {
    "$.job": "--job",
    "$.priority": "--priority",
    "$.replicas": "--replicas",
    "$.indices": "--array",
    "$.max_running": "--max-running",
    "$.max_failed": "--max-failed",
    "$.retries": "--retries",
    "$.if_seq": "--if-seq",
    "$.qos": "--qos",
    "$.after": "--after",
    "$.start_after_s": "--at",
    "$.after[0].job": "--after",
    "$.preemptible": "--preemptible",
    "$.service": "--service",
    "$.instead_of": "--instead-of",
    "$.service.name": "--service",
    "$.service.concurrency": "--service",
    "$.service.pack": "--pack",
    "$.service.input_bytes": "--service",
    "$.resources.cpu_milli": "--cpu",
    "$.resources.memory_mib": "--memory",
    "$.labels": "--label",
    "$.requires": "--requires",
    "$.run.cwd": "--cwd",
    "$.run.files": "--with",
    "$.run.files_of": "--with",
    "$.run.keep[0]": "--keep",
    "$.run.checkpoint": "--checkpoint",
    "$.run.checkpoint_signal": "--checkpoint-signal",
    "$.run.checkpoint_before_s": "--checkpoint-before",
    "$.run.user": "--user",
    "$.run.driver": "--driver",
    "$.run.image": "--image",
    "$.run.stall_s": "--stall",
    "$.run.on_stall": "--on-stall",
    "$.run.restart": "--restart",
    "$.run.max_restarts": "--max-restarts",
    "$.run.ports": "--ports",
    "$.run.ready": "--ready",
    "$.run.ready.tcp": "--ready",
    "$.run.ready.http": "--ready",
    "$.run.ready.file": "--ready",
    "$.run.ready.call": "--ready",
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
    at: Annotated[
        str | None,
        Parameter(
            help="Start at this time at the earliest: 'tomorrow 03:00', 22:00, 2026-12-24T18:00, or 2h from now.",
            value="WHEN",
            timed=True,
        ),
    ] = None
    after: Annotated[
        list[str] | None,
        Parameter(
            help="Start only once this job has SUCCEEDED; with :any once it has ended, with :failed if it has ended "
            "otherwise. If that cannot come true any more, the job is CANCELLED.",
            value="JOB[:any|:failed]",
        ),
    ] = None
    replicas: Annotated[
        str | None,
        Parameter(
            help="Copies of the command, each with its own GPUs; with --service also 1-8, as many as its calls need.",
            value="NUMBER",
        ),
    ] = None
    array: Annotated[
        str | None,
        Parameter(
            help="A replica for each number, as in 1-100, 0-99,205 or 0-99:10, each tenth, which it reads in "
            "MOORAGE_INDEX; 0-99%4 runs 4 at once.",
            value="NUMBERS[%N]",
        ),
    ] = None
    each_line: Annotated[
        str | None,
        Parameter(
            help="A replica for each line of the file, in MOORAGE_ITEM and as {item} in the command; {{ is a brace; "
            "- is stdin.",
            value="FILE",
        ),
    ] = None
    each: Annotated[
        str | None,
        Parameter(
            help="A replica for each row of a .csv with a header, or line of a .jsonl: a column lr is MOORAGE_ITEM_LR, "
            "and {lr} in the command.",
            value="FILE",
        ),
    ] = None
    max_running: Annotated[
        int | None, Parameter(help="At most so many replicas run at once, as --array 0-99%N says too.")
    ] = None
    max_failed: Annotated[
        str | None,
        Parameter(
            help="Cancel the other replicas once so many have failed; `all` never does. By default 20, or 5 % of them "
            "if that is more.",
            value="NUMBER",
        ),
    ] = None
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
    env: Annotated[
        list[str] | None,
        Parameter(help="A variable for the command; without a value, the one that it has here.", value="NAME[=VALUE]"),
    ] = None
    env_file: Annotated[
        list[str] | None, Parameter(help="A file with NAME=VALUE lines, variables for the command.", value="FILE")
    ] = None
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
            help="A file or folder to bring to the job's folder, or job:ID, what that job kept.",
            names=("--with",),
            value="PATH",
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
    checkpoint: Annotated[
        str | None,
        Parameter(help="A folder of the job's folder that the next attempt gets from the last one.", value="FOLDER"),
    ] = None
    checkpoint_signal: Annotated[
        str | None,
        Parameter(help="Sent before a time limit, a drain or a preemption ends the job: SIGUSR1.", value="SIGNAL"),
    ] = None
    checkpoint_before: Annotated[
        str | None,
        Parameter(help="Time between that signal and the end; 60s by default.", value="DURATION"),
    ] = None
    stall: Annotated[
        str | None,
        Parameter(
            help="An attempt counts as stalled after this time without output while its GPUs do no work.",
            value="DURATION",
        ),
    ] = None
    on_stall: Annotated[
        Literal["warn", "end"] | None,
        Parameter(help="What to do with a stalled attempt: say so once, or end it as a failure."),
    ] = None
    retries: Annotated[int | None, Parameter(help="How many further attempts are made after a failure.")] = None
    restart: Annotated[
        Literal["never", "on-failure", "always"] | None,
        Parameter(
            help="Start the job again when it has ended, for a service that stays: with a pause of 1 s, then twice as "
            "long each time up to 5 min. moorage cancel and --deadline end it."
        ),
    ] = None
    max_restarts: Annotated[int | None, Parameter(help="With --restart: at most so often.", value="NUMBER")] = None
    ready: Annotated[
        str | None,
        Parameter(
            help="When an attempt is READY for work: tcp:PORT, http:PORT/health, file:PATH or call (it answers calls);"
            " with ,within=10m before it counts as failed (2m by default), and ,every=30s between two looks (5s).",
            value="CHECK",
        ),
    ] = None
    ports: Annotated[
        int | None,
        Parameter(help="So many ports of its worker for each replica: PORT, PORT_1 and so on.", value="NUMBER"),
    ] = None
    if_seq: Annotated[
        int | None,
        Parameter(
            help="Accept the job only if nothing was decided after this ledger record, which plan prints.",
            value="LEDGER",
        ),
    ] = None
    on_no_match: Annotated[
        Literal["wait", "reject"] | None,
        Parameter(
            help="What to do with the job if no known worker could ever run it: run and submit refuse it by default, "
            "schedule add waits."
        ),
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
    preemptible: Annotated[
        bool,
        Parameter(help="End the job, and queue it again, when a job without this flag could start in its place."),
    ] = False
    service: Annotated[
        str | None,
        Parameter(
            help="The job answers the calls of this service, as moorage serve does: N of them at a time, 1 by default, "
            "each with data of at most SIZE, 64 MiB by default.",
            value="NAME[:N][,input=SIZE]",
        ),
    ] = None
    pack: Annotated[
        bool, Parameter(help="Put the members of the service together, not on the hosts with the fewest of them.")
    ] = False


NO_FLAGS: Final = JobFlags()
#: what somebody at a command line means by a request that no worker could ever run: a slip
ON_NO_MATCH: Final = "reject"


def refusing(flags: JobFlags) -> JobFlags:
    """Return the flags with which what no known worker could ever run is refused, unless they say otherwise."""
    return flags if flags.on_no_match is not None else replace(flags, on_no_match=ON_NO_MATCH)


def request_of(flags: JobFlags, command: Sequence[str], sweep: Sweep | None = None) -> Request:
    """Return the checked request, with its job id and the items of the sweep, unless they are in a file, which
    `with_files` sends. Raises `Rejected` with invalid-argument."""
    from moorage.client.request_builder import build_request

    flags = replace(flags, driver=drivers_of(flags)[0] if flags.driver is not None else None)
    fields = fields_of(flags)
    if sweep is not None:
        fields |= sweep.fields(fields.get("replicas"), fields.get("indices"))
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
    drivers = (flags.driver or "").split(",")
    if flags.driver is not None and not all(drivers):
        raise rejected(
            "invalid-argument", "--driver has an empty name", found=flags.driver, next="--driver docker,process"
        )
    return drivers


def choices_of(flags: JobFlags, command: Sequence[str], request: Request, sweep: Sweep | None = None) -> list[Request]:
    """Return what --or-gpu and --driver list, each as the request in its place, the first wish first. All of them have
    the job id of `request`. Raises `Rejected`."""
    if flags.or_gpu and flags.gpu is None:
        raise rejected("invalid-argument", "--or-gpu needs --gpu", next="name the GPUs that you prefer with --gpu")
    if not flags.or_gpu and len(drivers_of(flags)) == 1:
        return [request]
    flags = replace(flags, job=request.job)
    return [
        request_of(replace(flags, gpu=gpu, driver=driver or None), command, sweep)
        for gpu in (flags.gpu, *(flags.or_gpu or ()))
        for driver in drivers_of(flags)
    ]


async def offered(
    plan: Plans, flags: JobFlags, command: Sequence[str], request: Request, sweep: Sweep | None = None
) -> Request:
    """Return the first of the choices that some worker could run; if none could, see `planning.first_possible`.

    `plan` is the client's method of that name. Raises `Rejected`, and what `plan` raises.
    """
    choices = choices_of(flags, command, request, sweep)
    if len(choices) == 1:
        return request
    from moorage.client.planning import first_possible

    chosen = await first_possible(plan, choices)
    at = choices.index(chosen) // len(drivers_of(flags))
    if at and flags.or_gpu:
        instead = flags.or_gpu[at - 1]
        say(f"no worker could ever give {flags.gpu}, or a limit refuses it; the job asks for {instead} instead")
    return chosen


def needs_argv(driver: str | None) -> bool:
    """Return whether a job of this driver is known to need a command. For a driver that is not known here, its worker
    decides."""
    from moorage.schemas.capabilities import DRIVER_DEFAULT, KNOWN, UNKNOWN

    return KNOWN.get(driver or DRIVER_DEFAULT, UNKNOWN).needs_argv


def _built(command: list[str], flags: JobFlags, fields: dict[str, Any]) -> Request:
    """Do the same as `build_request`, but name the flag in a refusal. Raises `Rejected`."""
    from moorage.client.request_builder import build_request

    try:
        return build_request(
            command, flags.gpu or (len(flags.gpu_device) if flags.gpu_device else None), flags.job, fields
        )
    except Rejected as refused:
        field = refused.problem.field or ""
        one = _AT.sub("[0]", field)
        option = "--gpu-device" if flags.gpu_device and "gpu_device_ids" in field else _OPTIONS.get(one)
        if option is None:
            raise
        has_no_numbers = field == "$.indices" and "twice" not in refused.problem.message
        raise _of_option(option, refused, _NUMBERS if has_no_numbers else "") from None


def _of_option(option: str, refused: Rejected, way_on: str = "") -> Rejected:
    """Return the refusal of a value with the name of its option, and another way on if there is one."""
    import msgspec

    told = refused.problem
    return Rejected(msgspec.structs.replace(told, message=f"{option}: {told.message}", next=way_on or told.next))


def _replicas(text: str) -> int | dict[str, int]:
    """Return the number of replicas, or the bounds between which it follows the calls. Raises `Rejected`."""
    first, dash, last = text.partition("-")
    if not all(
        part.isascii() and part.isdecimal() and len(part) <= 8 for part in ((first, last) if dash else (first,))
    ):
        raise rejected(
            "invalid-argument", "--replicas must be a number, or two with - between them", field="$.replicas",
            found=text, allowed="NUMBER, or MIN-MAX with --service", next="for example --replicas 4, or 1-8",
        )  # fmt: skip
    return {"min": int(first), "max": int(last)} if dash else int(first)


def _array(text: str) -> dict[str, Any]:
    """Return the fields of a request that --array says: `0-99%4` is 100 replicas, of which 4 run at once, and `0-99:10`
    ten, each tenth number.

    Raises `Rejected`.
    """
    indices, percent, most = text.partition("%")
    indices = _without_steps(indices)
    if not percent:
        return {"indices": indices}
    if not (most.isdecimal() and most.isascii() and indices.strip()):
        raise rejected(
            "invalid-argument", "--array: how many replicas run at once must follow the percent sign",
            field="$.max_running", found=text, allowed="NUMBERS or NUMBERS%N", next="for example --array 0-99%4",
        )  # fmt: skip
    return {"indices": indices, "max_running": int(most[:8])}


def _without_steps(text: str) -> str:
    """Return the numbers of --array with each `FIRST-LAST:STEP` written out, as a request has no steps. What is no such
    range stays as it is. Raises `Rejected` for more than `RANGES_MAX` numbers of one."""
    from moorage.schemas.ranges import RANGES_MAX

    parts = []
    for part in text.split(","):
        found = _STEPS.fullmatch(part.strip())
        if found is None:
            parts.append(part)
            continue
        first, last, step = map(int, found.groups())
        numbers = range(first, last + 1, max(step, 1))
        if step == 0 or not numbers or len(numbers) > RANGES_MAX:
            raise rejected(
                "invalid-argument", f"--array {part} must go up, by steps from 1 on, to at most {RANGES_MAX} numbers",
                field="$.indices", found=part, allowed="FIRST-LAST:STEP", next="for example --array 0-99:10",
            )  # fmt: skip
        parts.append(",".join(map(str, numbers)))
    return ",".join(parts)


def _max_failed(text: str) -> int | None:
    """Return the number of failed replicas that cancels the others; None for `all`. Raises `Rejected`."""
    if text == "all":
        return None
    if not text.isdecimal() or not text.isascii() or int(text[:8]) < 1:
        raise rejected(
            "invalid-argument", "--max-failed must be a number from 1 on, or all", field="$.max_failed", found=text,
            next="leave it out for 20, or 5 % of the replicas if that is more",
        )  # fmt: skip
    return int(text[:8])


def scheduling_of(flags: JobFlags) -> Literal["gang", "spread"] | None:
    """Return the scheduling that --gang or --spread asks for; None without both. Raises `Rejected` if both are
    given."""
    both = [word for word, is_set in (("gang", flags.gang), ("spread", flags.spread), ("pack", flags.pack)) if is_set]
    if len(both) > 1:
        words = " and ".join(f"--{word}" for word in both[:2])
        raise rejected("invalid-argument", f"{words} cannot be used together", next="take one of them")
    return "gang" if flags.gang else "spread" if flags.spread else None


def fields_of(flags: JobFlags) -> dict[str, Any]:
    """Return the other fields of a request that the flags set: all but GPUs, job id and scheduling. Raises
    `Rejected`."""
    fields = {name: value for name in _SAME_NAME if (value := getattr(flags, name)) is not None}
    if flags.replicas is not None:
        fields["replicas"] = _replicas(flags.replicas)
    if flags.array is not None:
        fields = _array(flags.array) | fields
        if flags.max_running is not None and "%" in flags.array:
            raise rejected(
                "invalid-argument", "--array NUMBERS%N and --max-running say the same", found=flags.array,
                next="take one of them",
            )  # fmt: skip
    if flags.max_failed is not None:
        fields["max_failed"] = _max_failed(flags.max_failed)
    fields |= _durations(flags)
    if flags.at is not None:
        fields["start_after_s"] = _seconds_to(flags.at)
    if flags.preemptible:
        fields["preemptible"] = True
    if flags.service is not None:
        fields["service"] = _service(flags.service) | ({"pack": True} if flags.pack else {})
    elif flags.pack:
        raise rejected(
            "invalid-argument", "--pack is about the members of a service", field="$.service",
            next="name the service with --service, or leave --pack out: other jobs are packed anyway",
        )  # fmt: skip
    if flags.ready is not None:
        fields["ready"] = _ready(flags.ready)
    if flags.after:
        fields["after"] = [_after(word) for text in flags.after for word in text.split(",")]
    if resources := _resources(flags):
        fields["resources"] = resources
    env: dict[str, Any] = dict(variables(flags.env or (), flags.env_file or ()))
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


def _service(text: str) -> dict[str, Any]:
    """Return the service of --service. Raises `Rejected`."""
    head, comma, more = text.partition(",")
    name, colon, places = head.partition(":")
    word, equals, size = more.partition("=")
    if (colon and not (places.isascii() and places.isdigit())) or (comma and (word, equals) != ("input", "=")):
        raise rejected(
            "invalid-argument",
            "--service: a number of calls must follow the colon, and the size of their data the comma",
            found=text,
            allowed="NAME, NAME:N or NAME:N,input=SIZE",
            next="for example --service embed:8, or embed:8,input=256MiB",
        )
    made: dict[str, Any] = {"name": name}
    if colon:
        made["concurrency"] = int(places[:8])
    if comma:
        try:
            made["input_bytes"] = size_bytes(size)
        except ValueError as error:
            raise rejected(
                "invalid-argument", f"--service: {error}", found=text, next="for example --service embed:8,input=256MiB"
            ) from None
    return made


#: what --ready takes
_CHECKS: Final = "tcp:PORT, http:PORT/PATH, file:PATH or call, and behind it ,within=2m and ,every=5s"


def _ready(text: str) -> dict[str, Any]:
    """Return the check of --ready. Raises `Rejected`."""
    check, *more = text.split(",")
    way, colon, what = check.partition(":")
    found: dict[str, Any] = {}
    if way == "call" and not colon:
        found["call"] = True
    elif way in ("tcp", "http", "file") and what:
        found[way] = what
    for word in more:
        name, _, duration = word.partition("=")
        if name in ("within", "every"):
            if lacks_unit(duration):
                raise rejected(
                    "invalid-argument", f"--ready: a duration without a unit: {word!r}", found=text,
                    next=f"write {word}s, or {word}m",
                )  # fmt: skip
            try:
                found[f"{name}_s"] = seconds(duration)
            except Rejected as refused:
                raise _of_option("--ready", refused) from None
        else:
            found.clear()
    if not found or (len(found) == 1 and "within_s" in found):
        raise rejected(
            "invalid-argument", "--ready: not a check", found=text, allowed=_CHECKS,
            next="for example --ports 1 --ready http:PORT/health,within=10m",
        )  # fmt: skip
    return found


def _seconds_to(moment: str) -> float:
    """Return the seconds from now until the moment of --at. Raises `Rejected`."""
    from datetime import datetime

    from moorage.client.moments import seconds_until

    try:
        return round(seconds_until(moment, datetime.now()), 3)
    except Rejected as refused:
        raise _of_option("--at", refused) from None


def _after(text: str) -> str | dict[str, str]:
    """Return the job of --after, and which end of it counts. Raises `Rejected`."""
    from moorage.schemas.job import WHENS
    from moorage.schemas.names import ALL, EXACTLY, LAST

    name, colon, when = text.partition(":")
    if name in (LAST, ALL) or "*" in name:
        raise rejected(
            "invalid-argument", f"--after: {name} names no job for good, and a job waits for one", field="$.after",
            found=text, allowed="an id in full", next=f"moorage ls shows ids; --after ={name} if a job is called that",
        )  # fmt: skip
    name = name.removeprefix(EXACTLY)
    if colon and when not in WHENS:
        raise rejected(
            "invalid-argument",
            "--after: behind the colon stands which end of the job counts",
            field="$.after",
            found=text,
            allowed="JOB, JOB:any or JOB:failed",
            next=f"for example --after {name or 'train-42'}:any",
        )
    return {"job": name, "when": when} if colon else name


def _blocks(flags: JobFlags) -> dict[str, Any]:
    """Return the `driver_config` of --driver-config, with the devices of --gpu-device added for the job's driver.
    Raises `Rejected`."""
    import msgspec

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

    Raises `Rejected` for infinity, NaN and a number whose thousandths no float holds.
    """
    if not math.isfinite(cores * 1000):
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
