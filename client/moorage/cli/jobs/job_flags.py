"""A request in flags, as `submit`, `run` and `plan` take it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, get_args, get_type_hints

from moorage.cli.framework.arguments import DURATION, JOBS_LISTED, Parameter
from moorage.cli.framework.batches import batch, queue, sleep_by
from moorage.cli.framework.console import print_err
from moorage.cli.jobs.flag_values import (
    after,
    array,
    data_sources,
    fair_key,
    groups,
    labels,
    max_failed,
    mebibytes,
    milli_cores,
    no_retry,
    of_option,
    pairs,
    places,
    ready,
    replicas,
    retry,
    seconds_to,
    service,
    uses,
    warn_of_decimal,
)
from moorage.cli.jobs.from_shell import variables
from moorage.client.durations import seconds
from moorage.client.errors import Rejected, rejected
from moorage.client.fields import RUN_FIELDS

if TYPE_CHECKING:
    from moorage.client.planning import Plans
    from moorage.client.sweeps import Sweep
    from moorage.schemas.job import Request

#: durations that no run can meet where they are nothing
_ABOVE_ZERO: Final = ("time_limit", "deadline")
#: what --array takes, beyond the numbers and ranges of a request
_NUMBERS: Final = "for example --array 0-99, 0-99,205, or 0-99:10, each tenth (steps)"


@dataclass(frozen=True)
class Flag(Parameter):
    """An option that says a field of a request. `field` is the keyword of `submit` that it sets, by default of its own
    name; `reads` makes the value of what was given. With `of` it sets nothing by itself: it is read together with
    others, and `of` is the path that a refusal names."""

    field: str = ""
    reads: Callable[[Any], Any] | None = None
    of: str = ""


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
        Flag(help="The job's id. A submit with the same id and content makes no second job.", value="ID", of="job"),
    ] = None
    at: Annotated[
        str | None,
        Flag(
            help="Start at this time at the earliest: 'tomorrow 03:00', 22:00, 2026-12-24T18:00, or 2h from now.",
            value="WHEN",
            timed=True,
            field="start_after_s",
            reads=seconds_to,
        ),
    ] = None
    hold: Annotated[
        bool, Flag(help="Let it wait on hold, until moorage change JOB --release; its times count meanwhile.")
    ] = False
    after: Annotated[
        list[str] | None,
        Flag(
            help="Start only once this job has SUCCEEDED; with :any once it has ended, with :failed if it has ended "
            "otherwise. If that cannot come true any more, the job is CANCELLED.",
            value="JOB[:any|:failed]",
            reads=after,
            lists=JOBS_LISTED,
        ),
    ] = None
    replicas: Annotated[
        str | None,
        Flag(
            help="Copies of the command, each with its own GPUs; with --service also 1-8, as many as its calls need, "
            "with --gang 2-8, as many as have room.",
            value="NUMBER",
            reads=replicas,
        ),
    ] = None
    array: Annotated[
        str | None,
        Flag(
            help="A replica for each number, as in 1-100, 0-99,205 or 0-99:10, each tenth, which it reads in "
            "MOORAGE_INDEX; 0-99%4 runs 4 at once.",
            value="NUMBERS[%N]",
            of="indices",
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
        int | None, Flag(help="At most so many replicas run at once, as --array 0-99%N says too.")
    ] = None
    max_failed: Annotated[
        str | None,
        Flag(
            help="Cancel the other replicas once so many have failed; `all` never does. By default 20, or 5 % of them "
            "if that is more.",
            value="NUMBER",
            reads=max_failed,
        ),
    ] = None
    gang: Annotated[bool, Parameter(help="All replicas start together, or none does.")] = False
    hosts: Annotated[
        int | None,
        Parameter(
            help="A gang of so many replicas, each on a host of its own: 2 hosts with 4 GPUs each are --hosts 2 "
            "--gpu 4xH100. Submitted with --each, each row is such a gang, and a job of its own.",
            value="NUMBER",
        ),
    ] = None
    spread: Annotated[
        bool, Parameter(help="Prefer a different host for each replica; where none has room, several run on one.")
    ] = False
    nvlink: Annotated[bool, Parameter(help="The GPUs of a replica are joined by NVLink; it waits for such ones.")] = (
        False
    )
    same: Annotated[
        list[str] | None,
        Flag(
            help="All ranks of the gang on workers with one value of this label, as rack. It is `site` anyway, "
            "where workers have that label; `any` lets them run in any places.",
            value="LABEL",
        ),
    ] = None
    spread_over: Annotated[
        str | None,
        Flag(
            help="Replicas spread over the values of this label of workers, as zone, as evenly as there is room.",
            value="LABEL",
        ),
    ] = None
    each_worker: Annotated[
        bool,
        Flag(
            help="One replica on each worker that fits, also on those that join later, which never runs on another "
            "one. moorage cancel ends the job."
        ),
    ] = False
    once: Annotated[
        bool,
        Flag(
            help="With --each-worker: on the workers of now alone. The job ends with the last of them.",
            of="each_worker",
        ),
    ] = False
    priority: Annotated[int | None, Flag(help="0..100, higher first; 50 if it is not given.")] = None
    cpu: Annotated[float | None, Flag(help="Cores per replica: 4 or 0.5.", value="CORES", of="resources.cpu_milli")] = (
        None
    )
    memory: Annotated[
        str | None, Flag(help="Host memory per replica: 16Gi or 512Mi.", value="SIZE", of="resources.memory_mib")
    ] = None
    requires: Annotated[
        list[str] | None,
        Flag(
            help="A label that the worker must have: zone=a, zone=a,b for either value, zone!=b, or gpu.driver>=570. "
            "Repeatable. Each worker has host.name, host.arch, gpu.model, gpu.driver and gpu.cuda.",
            value="LABEL",
            of="requires",
        ),
    ] = None
    on: Annotated[
        list[str] | None, Flag(help="On this worker alone; repeated, on one of them.", value="WORKER", of="requires")
    ] = None
    prefers: Annotated[
        list[str] | None,
        Flag(
            help="Rather on such a worker, where one has room: gpu.model=H100, zone!=b. Repeatable, the most important "
            "first.",
            value="LABEL",
        ),
    ] = None
    not_on: Annotated[list[str] | None, Flag(help="Not on this worker. Repeatable.", value="WORKER", of="where")] = None
    uses: Annotated[
        list[str] | None,
        Flag(
            help="So many of an operator's counter for each replica, as licences: matlab=1. It waits until they are "
            "left.",
            value="COUNTER=N",
            reads=uses,
        ),
    ] = None
    fair_key: Annotated[
        str | None,
        Flag(
            help="For whom of your tenant it is, as a user or a customer: keys that wait share what the tenant gets.",
            value="KEY",
            reads=fair_key,
        ),
    ] = None
    fair_weight: Annotated[
        int | None,
        Flag(help="Weight of --fair-key among your tenant's keys from now on, 1..100; 1 at first.", value="NUMBER"),
    ] = None
    label: Annotated[
        list[str] | None,
        Flag(help="A label to give to the job: team=vision.", value="LABEL", field="labels", reads=labels),
    ] = None
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
        Flag(help="Folder to start in: absolute, or below the attempt's folder, which is the default.", value="PATH"),
    ] = None
    with_: Annotated[
        list[str] | None,
        Flag(
            help="A file or folder to bring to the job's folder, or job:ID, what that job kept.",
            names=("--with",),
            value="PATH",
            of="run.files",
        ),
    ] = None
    keep: Annotated[
        list[str] | None,
        Flag(help="Files to keep of its folder, as 'out/**'; see moorage get.", value="PATTERN"),
    ] = None
    data: Annotated[
        list[str] | None,
        Flag(
            help="What the job reads, fetched once a worker into $MOORAGE_DATA_NAME: /path of the worker, https://…, "
            "s3://…, hf:org/name@rev, job:ID/path, or ./folder of this machine.",
            value="NAME=SOURCE",
            reads=data_sources,
        ),
    ] = None
    setup: Annotated[
        str | None,
        Flag(
            help="A shell command that prepares a worker, once before the first replica there; what it writes to "
            "$MOORAGE_SETUP stays for the others.",
            value="CMD",
        ),
    ] = None
    setup_limit: Annotated[
        str | None, Flag(help="Longest time that --setup may run; 30m by default.", value="DURATION", field="setup_s")
    ] = None
    user: Annotated[str | None, Flag(help="Run the job as this user of the worker's host.", value="NAME")] = None
    driver: Annotated[
        str | None,
        Flag(
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
    image: Annotated[str | None, Flag(help="Image of the container or the virtual machine.", value="IMAGE")] = None
    time_limit: Annotated[
        str | None, Flag(help="Longest time that one attempt may run.", value="DURATION", field="limit")
    ] = None
    deadline: Annotated[
        str | None, Flag(help="Longest time from acceptance to the end.", value="DURATION", field="deadline_s")
    ] = None
    start_within: Annotated[
        str | None,
        Flag(
            help="The job expires if it has not started within this time after its acceptance.",
            value="DURATION",
            field="start_within_s",
        ),
    ] = None
    or_refuse: Annotated[
        float | None,
        Flag(
            help="Refuse the job at once if by the forecast it does not start within --start-within, or now without "
            "that: in half of the cases, with 0.9 in nine of ten.",
            value="PART",
            alone="0.5",
        ),
    ] = None
    grace: Annotated[
        str | None,
        Flag(help="Time between SIGTERM and SIGKILL when the job is ended.", value="DURATION", field="grace_s"),
    ] = None
    checkpoint: Annotated[
        str | None,
        Flag(
            help="A folder or file of the job's folder that is stored while it runs; the next attempt begins with it.",
            value="PATH",
        ),
    ] = None
    checkpoint_every: Annotated[
        str | None,
        Flag(
            help="How often it is stored, once it has changed; 10m by default, 0s at an attempt's end alone.",
            value="DURATION",
            field="checkpoint_every_s",
        ),
    ] = None
    checkpoint_step: Annotated[
        str | None,
        Flag(help=r"Finds the step in the names in it, which show then tells: step-(\d+).", value="PATTERN"),
    ] = None
    checkpoint_signal: Annotated[
        str | None,
        Flag(help="Sent before a time limit, a drain or a preemption ends the job: SIGUSR1.", value="SIGNAL"),
    ] = None
    checkpoint_before: Annotated[
        str | None,
        Flag(
            help="Time between that signal and the end; 60s by default.", value="DURATION", field="checkpoint_before_s"
        ),
    ] = None
    stall: Annotated[
        str | None,
        Flag(
            help="An attempt counts as stalled after this time without output while its GPUs do no work.",
            value="DURATION",
            field="stall_s",
        ),
    ] = None
    on_stall: Annotated[
        Literal["warn", "end"] | None,
        Flag(help="What to do with a stalled attempt: say so once, or end it as a failure."),
    ] = None
    retries: Annotated[int | None, Flag(help="How many further attempts are made after a failure.")] = None
    repair: Annotated[
        str | None,
        Flag(
            help="Once a rank of a gang is lost, keep the hosts of the others for it for so long: all ranks end, and "
            "start again there.",
            value=DURATION,
            field="repair_s",
        ),
    ] = None
    group: Annotated[
        list[str] | None,
        Flag(
            help="A group of a gang, beside others: trainer=2x8xH100 or head=-,cpu=4 (no GPUs), with its own command "
            "behind a colon, as 'head=-: ./head.sh'.",
            value="NAME=GPUS[,cpu=N][,memory=SIZE][: COMMAND]",
            reads=groups,
            field="groups",
        ),
    ] = None
    retry: Annotated[
        list[str] | None,
        Flag(
            help="So many further attempts after these ends alone: oom, lost, signal, setup, start, exit:N, or failure "
            "for any other; with ,pause=30s before each.",
            value="CAUSE[,CAUSE…]:TIMES",
            reads=retry,
        ),
    ] = None
    no_retry_on: Annotated[
        list[str] | None,
        Parameter(help="No further attempt after these, first of all: an exit code, or a cause.", value="CODE"),
    ] = None
    restart: Annotated[
        Literal["never", "on-failure", "always"] | None,
        Flag(
            help="Start the job again when it has ended, for a service that stays: with a pause of 1 s, then twice as "
            "long each time up to 5 min. moorage cancel and --deadline end it."
        ),
    ] = None
    max_restarts: Annotated[int | None, Flag(help="With --restart: at most so often.", value="NUMBER")] = None
    restart_unready: Annotated[
        str | None,
        Flag(
            help="With --restart and --ready: an attempt that was ready and is so no more for this time starts again.",
            value="DURATION",
            field="restart_unready_s",
        ),
    ] = None
    ready: Annotated[
        str | None,
        Flag(
            help="When an attempt is READY for work: tcp:PORT, http:PORT/health, file:PATH or call (it answers calls);"
            " with ,within=10m before it counts as failed (2m by default), ,every=30s between two looks (5s), and"
            " ,for=10s for which it is ready before another one ends for it (5s of a next version).",
            value="CHECK",
            reads=ready,
        ),
    ] = None
    ports: Annotated[
        int | None,
        Flag(help="So many ports of its worker for each replica: PORT, PORT_1 and so on.", value="NUMBER"),
    ] = None
    calls: Annotated[
        bool,
        Flag(
            help="The job calls services of its tenant, as Client() and moorage call do there: it gets a key for that "
            "and nothing else."
        ),
    ] = False
    if_seq: Annotated[
        int | None,
        Flag(
            help="Accept the job only if nothing was decided after this ledger record, which plan prints.",
            value="LEDGER",
        ),
    ] = None
    on_no_match: Annotated[
        Literal["wait", "reject"] | None,
        Flag(
            help="What to do with the job if no known worker could ever run it, not even one that is away: run and "
            "submit refuse it by default, schedule add waits."
        ),
    ] = None
    on_partition: Annotated[
        Literal["kill", "keep"] | None,
        Flag(help="What the worker does with the job when it is cut off from the schedulers: kill it, or let it run."),
    ] = None
    qos: Annotated[
        Literal["low", "medium", "high", "critical"] | None,
        Flag(help="How soon the job is frozen when it does not use its GPUs; low is soonest."),
    ] = None
    preemptible: Annotated[
        bool,
        Flag(help="End the job, and queue it again, when a job without this flag could start in its place."),
    ] = False
    service: Annotated[
        str | None,
        Flag(
            help="The job answers the calls of this service, as moorage serve does: N of them at a time, 1 by default, "
            "each with data and an answer of at most SIZE, 64 MiB by default.",
            value="NAME[:N][,input=SIZE][,answer=SIZE]",
            of="service",
        ),
    ] = None
    models: Annotated[
        str | None,
        Flag(
            help="With --service: names of what it serves, by which callers of the HTTP door reach it.",
            value="MODEL[,MODEL…]",
            of="service.models",
        ),
    ] = None
    batch: Annotated[
        str | None,
        Flag(
            help="With --service: its function gets a list of at most N calls, and answers with a list. A call waits "
            "at most this time for others, by default for none. N calls then count as one of --service NAME:N.",
            value="N[,DURATION]",
            of="service.batch",
        ),
    ] = None
    queue: Annotated[
        str | None,
        Flag(
            help="With --service: N calls wait at each of its members for a place, and those whose callers say no time "
            "at most this long, 30s by default. By default twice as many wait as run; more are refused.",
            value="N[,DURATION]",
            of="service.queue",
        ),
    ] = None
    sleep_after: Annotated[
        str | None,
        Flag(
            help="With --service: a member without calls for so long is frozen, and gives up its GPUs until the next "
            "call. Where that cannot be, with --replicas 0-N, the last member ends.",
            value=DURATION,
            of="service.sleep_after_s",
        ),
    ] = None
    wake_within: Annotated[
        str | None,
        Flag(
            help="With --sleep-after: a call is to have a member awake in this time. While no calls come, a member "
            "ends (with --replicas 0-N), sleeps or stays awake: the first from which it was seen to be back in time.",
            value=DURATION,
            of="service.wake_within_s",
        ),
    ] = None
    sleep_by: Annotated[
        str | None,
        Flag(
            help="With --sleep-after: its members' HTTP server sleeps by the requests of vllm or sglang, or by these: "
            "a path each, and behind a space the JSON of its body. So it sleeps where no driver freezes jobs, too.",
            value="ENGINE or SLEEP,WAKE",
            of="service.sleep_by",
        ),
    ] = None
    awake_at_least: Annotated[
        str | None,
        Flag(
            help="With --sleep-after: a member keeps its GPUs for so long, 30s by default, before another service that "
            "sleeps and is called has them.",
            value=DURATION,
            of="service.awake_s",
        ),
    ] = None
    pack: Annotated[
        bool,
        Flag(
            help="Put the members of the service together, not on the hosts with the fewest of them.", of="service.pack"
        ),
    ] = False


NO_FLAGS: Final = JobFlags()
#: options of a service that are durations, and their fields
_SLEEPS: Final = {"sleep_after": "sleep_after_s", "awake_at_least": "awake_s", "wake_within": "wake_within_s"}
#: the word of --same for ranks that share no label\'s value
ANY_PLACE: Final = "any"
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
    own = [group.get("argv") for group in fields.get("groups", ())]
    if not command and own and all(own):
        command = own[0]  # which no group runs for want of its own
    if not command and needs_argv(flags.driver):
        raise rejected(
            "invalid-argument",
            "no command to run",
            field="$.run.argv",
            next="name it after --, as: moorage run --gpu 1xH100 -- sleep 60",
        )
    together = scheduling_of(flags) | ({"topology": "nvlink"} if flags.nvlink else {})
    if "fair_weight" in fields and not fields.get("fair_key"):
        message = "--fair-weight is the weight of a --fair-key"
        raise rejected("invalid-argument", message, field="$.fair_weight", next="add --fair-key KEY")
    same = fields.pop("same", None)
    if same is not None and len(same) > 1 and ANY_PLACE in same:
        message = f"--same {ANY_PLACE} lets the ranks run in any places, so no label goes with it"
        raise rejected("invalid-argument", message, field="$.same", found=", ".join(same), next="take one of them")
    if same == [ANY_PLACE]:
        same = []
    if same is not None and fields.get("groups"):
        fields["same"] = same
    elif same is not None and together.get("scheduling") != "gang":
        message = "--same is about the ranks of a gang"
        raise rejected("invalid-argument", message, field="$.same", next="add --gang, or --hosts N")
    gang = together.get("scheduling") == "gang"
    ranks = {"replicas": fields.pop("replicas")} if gang and isinstance(fields.get("replicas"), dict) else {}
    repair = {"repair_s": fields.pop("repair_s")} if gang and "repair_s" in fields else {}
    request = _built(list(command), flags, fields)
    if not together:
        return request
    if ranks and request.copies != 1:
        raise rejected(
            "invalid-argument", "--gpu and --replicas both say how many ranks there are", field="$.replicas",
            found=f"--gpu {flags.gpu} --replicas {flags.replicas}", next=f"--gpu 1xH100 --replicas {flags.replicas}",
        )  # fmt: skip
    if request.gpu is None:
        message = "--gang, --hosts, --spread and --nvlink need --gpu"
        raise rejected("invalid-argument", message, field="$.gpu", next="add --gpu 1xH100")
    import msgspec

    gpu = msgspec.structs.replace(request.gpu, **together)
    if same is not None:
        ranks["same"] = same
    try:
        return build_request(request, gpu, fields=ranks | repair)
    except Rejected as refused:
        if not (refused.problem.field or "").startswith("$.same"):
            raise
        raise of_option("--same", refused) from None


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
        print_err(f"no worker could ever give {flags.gpu}, or a limit refuses it; the job asks for {instead} instead")
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
            command, flags.gpu if flags.gpu is not None else len(flags.gpu_device or ()) or None, flags.job, fields
        )
    except Rejected as refused:
        field = refused.problem.field or ""
        option = "--gpu" if flags.gpu is not None and field == "$.gpu" else _option_of(field)
        if flags.gpu_device and "gpu_device_ids" in field:
            option = "--gpu-device"
        if option is None:
            raise
        has_no_numbers = field == "$.indices" and "twice" not in refused.problem.message
        raise of_option(option, refused, _NUMBERS if has_no_numbers else "") from None


def scheduling_of(flags: JobFlags) -> dict[str, Any]:
    """Return the fields of `gpu` that --gang, --hosts or --spread sets; none without them. Raises `Rejected` if two of
    them do not go together."""
    if flags.hosts is not None and (flags.spread or flags.pack):
        word = "spread" if flags.spread else "pack"
        raise rejected(
            "invalid-argument", f"--hosts and --{word} cannot be used together", next=f"leave out --{word}",
        )  # fmt: skip
    both = [word for word, is_set in (("gang", flags.gang), ("spread", flags.spread), ("pack", flags.pack)) if is_set]
    if len(both) > 1:
        words = " and ".join(f"--{word}" for word in both[:2])
        why, fix = f"{words} cannot be used together", "take one of them"
        if both[:2] == ["gang", "spread"]:
            why += ": a gang takes as few hosts as it can, so that its ranks are near each other"
            fix = "leave out --spread; with --hosts 2, each of two ranks has a host of its own"
        raise rejected("invalid-argument", why, next=fix)
    if flags.gang or flags.hosts is not None:
        return {"scheduling": "gang", "distinct_hosts": flags.hosts is not None}
    return {"scheduling": "spread", "distinct_hosts": False} if flags.spread else {}


def _ranks(flags: JobFlags, hosts: int) -> int:
    """Return the number of replicas that --hosts asks for. Raises `Rejected` if other flags ask for another number."""
    from moorage.client.gpus import gpu_spec

    for option, given in (("--array", flags.array), ("--each", flags.each), ("--each-line", flags.each_line)):
        if given is not None:
            raise rejected(
                "invalid-argument", f"{option} and --hosts cannot be used together: a gang runs once, on all its hosts",
                found=given, next="moorage submit --hosts 2 --each FILE: each row is a gang, and a job of its own",
            )  # fmt: skip
    of_token = 1 if flags.gpu is None else gpu_spec(flags.gpu)[0]
    if hosts < 1 or of_token not in (1, hosts) or flags.replicas not in (None, str(hosts)):
        also = f"--replicas {flags.replicas}" if flags.replicas not in (None, str(hosts)) else f"--gpu {flags.gpu}"
        raise rejected(
            "invalid-argument", f"--hosts {hosts} is a gang of {hosts} replicas, one on each host", found=also,
            allowed="1..1024 hosts", next="--hosts 2 --gpu 4xH100 is two replicas with 4 GPUs each; torchrun starts "
            "as many processes in each as it has GPUs",
        )  # fmt: skip
    return hosts


def fields_of(flags: JobFlags) -> dict[str, Any]:
    """Return the other fields of a request that the flags set: all but GPUs, job id and scheduling. Raises
    `Rejected`."""
    fields: dict[str, Any] = {}
    for name, flag in _flags().items():
        given = getattr(flags, name)
        if flag.of or given is None or given is False or given == []:
            continue
        fields[flag.field or name] = (
            _duration(name, given) if flag.value == DURATION else given if flag.reads is None else flag.reads(given)
        )
    if flags.array is not None:
        fields = array(flags.array) | fields
        if flags.max_running is not None and "%" in flags.array:
            raise rejected(
                "invalid-argument", "--array NUMBERS%N and --max-running say the same", found=flags.array,
                next="take one of them",
            )  # fmt: skip
    if flags.once:
        if not flags.each_worker:
            message = "--once says that --each-worker means the workers of now alone"
            raise rejected("invalid-argument", message, field="$.each_worker", next="add --each-worker")
        fields["each_worker"] = "once"
    fields |= places(flags.requires or (), flags.on or (), flags.not_on or ())
    if flags.no_retry_on:
        fields["retry"] = [no_retry(flags.no_retry_on), *fields.get("retry", ())]
    if flags.hosts is not None:
        fields["replicas"] = _ranks(flags, flags.hosts)
    if flags.service is not None:
        fields["service"] = service(flags.service) | ({"pack": True} if flags.pack else {})
        if flags.models is not None:
            fields["service"]["models"] = flags.models.split(",")
        if flags.batch is not None:
            fields["service"]["batch"] = batch(flags.batch)
        if flags.queue is not None:
            fields["service"]["queue"] = queue(flags.queue)
        if flags.sleep_by is not None:
            fields["service"]["sleep_by"] = sleep_by(flags.sleep_by)
        for option, field in _SLEEPS.items():
            if (given := getattr(flags, option)) is not None:
                fields["service"][field] = _duration(option, given)
    elif flags.pack:
        raise rejected(
            "invalid-argument", "--pack is about the members of a service", field="$.service",
            next="name the service with --service, or leave --pack out: other jobs are packed anyway",
        )  # fmt: skip
    elif given := [
        name for name in ("models", "batch", "queue", "sleep_by", *_SLEEPS) if getattr(flags, name) is not None
    ]:
        option = "--" + given[0].replace("_", "-")
        raise rejected(
            "invalid-argument", f"{option} is about the calls of a service", field="$.service",
            next=f"name the service with --service, or leave {option} out",
        )  # fmt: skip
    if flags.setup_limit is not None and flags.setup is None:
        raise rejected(
            "invalid-argument", "--setup-limit is about the command of --setup", field="$.run.setup_s",
            next="give the command with --setup, or leave --setup-limit out",
        )  # fmt: skip
    if resources := _resources(flags):
        fields["resources"] = resources
    env: dict[str, Any] = dict(variables(flags.env or (), flags.env_file or ()))
    for name, secret in pairs("secret", flags.secret or (), "SECRET"):
        if name in env:
            raise rejected(
                "invalid-argument", f"{name} is a variable of --env and one of --secret", field=f"$.run.env.{name}",
                next="leave one out",
            )  # fmt: skip
        env[name] = {"secret": secret}
    if env:
        fields["env"] = env
    if flags.driver_config is not None or flags.gpu_device:
        fields["driver_config"] = _blocks(flags)
    return fields


@cache
def _flags() -> dict[str, Flag]:
    """Return the flags that say a field of a request, by their names in `JobFlags`."""
    hints = get_type_hints(JobFlags, include_extras=True)
    return {name: one for name, hint in hints.items() for one in get_args(hint)[1:] if isinstance(one, Flag)}


def _option_of(path: str) -> str | None:
    """Return the option that says what is at a path of a request, such as `$.run.ready.tcp`; None without one."""
    if path.startswith("$.run.env"):
        return "--secret" if path.endswith(".secret") else "--env"
    paths = {"$.instead_of": "--instead-of", "$.run.files_of": "--with", "$.where": "--requires"}
    for name, flag in _flags().items():
        keyword = flag.field or name
        own = flag.of or ("run." if keyword in RUN_FIELDS else "") + ("timeout_s" if keyword == "limit" else keyword)
        paths.setdefault(f"$.{own}", flag.names[0] if flag.names else _dashed(name))
    while path:
        if path in paths:
            return paths[path]
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return None


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")


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


def _duration(name: str, text: str) -> float:
    """Return the seconds of a flag. Raises `Rejected`."""
    option = _dashed(name)
    try:
        value = seconds(text)
    except Rejected as refused:
        raise of_option(option, refused) from None
    if name in _ABOVE_ZERO and not value:
        raise rejected(
            "invalid-argument",
            f"{option} {text} leaves no time to run",
            found=text,
            allowed="a time above 0s",
            next=f"{option} 10m; without this option the time has no bound",
        )
    return value


def _resources(flags: JobFlags) -> dict[str, int]:
    resources: dict[str, int] = {}
    if flags.cpu is not None:
        resources["cpu_milli"] = milli_cores(flags.cpu)
    if flags.memory is not None:
        resources["memory_mib"] = mebibytes(flags.memory)
        warn_of_decimal(flags.memory, resources["memory_mib"])
    return resources
