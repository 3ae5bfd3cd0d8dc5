"""What `admin.fleet` answers: the workers, what is free, and how the leader, the ledger and the queue do."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from moorage.schemas.always import always, nothing
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.frames.fleet import Device, LedgerCopies


class DeviceRow(Device, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """A GPU of the worker that the question names: its slot, and what its worker says of it."""

    slot: int  # its position in the worker's pool


class DeviceTrouble(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A GPU that is not given out, or of which its worker warns."""

    slot: int
    gpu: str = always(str)  # uuid of the GPU; "" if the worker has no such slot now
    kind: str  # the kind of fault: foreign, quarantined, or a `health` of a load frame
    detail: str = always(str)
    since_ms: int | None = None  # for how many ms its worker has reported it as unhealthy; left out otherwise
    recorded: bool = always(bool)  # whether the ledger has it; else the last load frame reported it


class DrainTimes(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """When a planned or bounded drain begins and ends."""

    begins_in_ms: int = always(int)  # ms until it begins; 0 once it has begun
    leave_in_ms: int = always(int)  # ms until all jobs must have left
    ends_in_ms: int | None = None  # ms until the worker opens again; left out if an operator has to open it
    by: str = always(str)  # who ordered it, as the subject proves it
    said: str = ""  # the name that this user gave
    why: str = always(str)


#: stands in the `warning` of a worker
JOBS_FAIL_HERE: Final = "jobs that do well elsewhere fail here within seconds: others get them while they may"


class StartsFail(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A worker that gets no jobs for a while, because starts fail on it."""

    opens_in_ms: int = always(int)
    why: str = always(str)  # why the last start failed


class DriverDownRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A driver of a worker that starts nothing."""

    driver: str
    why: str = always(str)
    for_s: int = always(int)  # for how many seconds that has been so


class WorkerInfo(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One worker. CPU is in thousandths of a core, memory in MiB."""

    worker: str  # id of the worker
    #: up, stale, disk-full, agent-stopped, draining, cordoned, starts-fail, leaving, claimed-locally, not-heard, lost
    #: or left
    state: str
    flag: str = always(str)  # the operator's setting: open, draining or cordoned
    by: str = always(str)  # the operator who set it, as the subject proves it
    said: str = ""  # the name that this operator gave
    why: str | None = None  # the reason that was given for draining or cordoned; left out for an open worker
    since_ms: int | None = None  # for how many ms it has been draining or cordoned; left out for an open worker
    simulated: bool = always(bool)  # whether its GPUs are simulated
    models: list[str] = always(list[str])  # names of its GPUs
    gpus: int = always(int)  # number of its GPUs
    free: int = always(int)  # number of GPUs that are not leased and may be given out
    cells: str = always(str)  # a character for each GPU, as `moorage fleet` explains them
    members: int = always(int)  # number of attempts on it
    cpu_milli: int = always(int)  # CPU of the host
    cpu_free_milli: int = always(int)  # CPU that no job asked for
    memory_mib: int = always(int)  # memory of the host
    memory_free_mib: int = always(int)  # memory that no job asked for
    labels: dict[str, str] = always(dict[str, str])  # its labels, as in hello
    drivers: list[str] = always(list[str])  # its drivers, as in hello
    #: capabilities of its drivers, by name, as in hello
    capabilities: dict[str, Capabilities] = always(dict[str, Capabilities])
    release: str = always(str)  # its release of moorage
    #: so long its jobs go on without an answer of a scheduler; null from a scheduler that does not tell
    lease_s: float | None = None
    heard_ms_ago: int | None = always(nothing)  # ms since its last renewal; null if this leader received none
    quarantined: list[int] = always(list[int])  # slots in quarantine, which an operator has to release
    troubles: list[DeviceTrouble] = always(list[DeviceTrouble])  # GPUs that are not given out, or warned of
    drain: DrainTimes | None = None  # times of a planned or bounded drain
    starts_fail: StartsFail | None = None
    drivers_down: list[DriverDownRow] = []  # drivers that start nothing
    warning: str = ""  # what is wrong with the host and closes nothing
    keeps: dict[str, float] = always(dict[str, float])  # how much output and results it keeps, as in hello
    #: its GPUs by slot; left out unless the question names the worker
    devices: list[DeviceRow] | None = None


class Fits(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The GPUs of one model: all, the free ones, and the largest exclusive request that would start now on one host."""

    model: str
    gpus: int = always(int)
    free: int = always(int)
    largest: int = always(int)


class ModelUse(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How the leased GPUs of one model are used. A GPU with several sharers counts once for each."""

    model: str
    read: int = always(int)  # number of leased GPUs with a reading
    at_work: float = always(float)  # how many GPUs' worth of them works
    idle: int = always(int)  # how many of them do nothing


class StalledJob(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A running job that stalls, as its request's `stall_s` defines it."""

    tenant: str
    job: str
    seconds: int = always(int)  # for how long
    why: str = always(str)


class Keeps(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How long ended jobs and their history are kept, and their bounds."""

    finished_keep: float = always(float)  # seconds for which an ended job stays in memory
    finished_rows: int = always(int)  # most ended jobs in memory
    history_keep: float = always(float)  # seconds for which the history is kept
    history_bytes: int = always(int)  # most bytes of the history


class FollowerRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What follows the ledger: it writes the history and counts GPU time."""

    behind: int = always(int)  # number of records of the ledger that it has not read
    gaps: list[list[int]] = always(list[list[int]])  # from and until when (ms) it missed how many records
    waiting: int = always(int)  # histories that wait to be written
    frames: int = always(int)  # frames of the history written since it began
    stories: int = always(int)  # histories written since it began
    trouble: str = ""  # why it cannot go on now
    next: str | None = None  # what to do about its trouble; left out without one


class ContainedFailures(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Work that the scheduler failed on and set aside."""

    counts: dict[str, int] = always(dict[str, int])  # number of failures in this term by kind of input
    plain_ranker: bool = always(bool)  # whether `pack` ranks, because the ranker of the settings failed
    refused: list[str] = always(list[str])  # the verbs of tenants that are refused for now, as `submit of a`
    workers: list[str] = always(list[str])  # workers whose messages are refused
    last: str | None = None  # the last failure: where, and what
    last_ms: int | None = None  # ledger time of the last failure


class RequestQueueRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The fullest stream of the durable queue."""

    tenant: str = ""  # the stream's tenant; left out for the stream of all tenants
    messages: int = always(int)
    bytes: int = always(int)
    bytes_max: int = always(int)  # most bytes; 0: no bound


class TenantRate(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A tenant that has sent more than `requests_per_s` of the scheduler allows, in this leader's term."""

    tenant: str = always(str)
    refused: int = always(int)  # messages that were read and refused for that
    rationed: bool = always(bool)  # whether it floods now: then the server delivers few of its messages


class TenantBucketsRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Tenants whose buckets of the object store could not be made."""

    tenants: list[str] = always(list[str])  # their names, sorted
    trouble: str = always(str)  # why not
    next: str | None = None  # what to do about it; left out where that is not known


class AppendFigures(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Appends to the ledger in this term."""

    records: int = always(int)  # number of records
    seconds: float = always(float)  # seconds that they took together, until they were stored


class SchedulerRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A scheduler that leads or stands by."""

    scheduler: str
    release: str = always(str)
    level: int = always(int)  # newest feature level that it can write and read
    ledger: int = always(int)  # the last record that it has read
    leads: bool = False
    settings: dict[str, Any] = {}  # its settings that are no default
    clock_off_s: float = 0.0  # seconds by which its wall clock is ahead of the leader's; negative: behind


class FleetAnswer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The workers in the order of their names, what fits now, counts of jobs, and how the scheduler does."""

    epoch: int = always(int)  # the leader's epoch
    leader: str = always(str)  # name of the leader
    time_ms: int | None = None  # the leader's wall clock as it answered, ms since 1970
    ledger: int = always(int)  # number of the ledger's last record
    workers: list[WorkerInfo] = always(list[WorkerInfo])  # the workers of this page
    next: str = ""  # the last worker of this page, if there are more: ask again with it as `after`
    queued: int = always(int)  # number of replicas that wait
    live_jobs: int = always(int)  # number of jobs that have not ended
    finished_kept: int = always(int)  # number of ended jobs in memory
    finished_window_ms: int = always(int)  # age of the oldest ended job in memory
    fits_now: list[Fits] = always(list[Fits])  # GPUs by model
    used_now: list[ModelUse] = always(list[ModelUse])  # leased GPUs by model
    stalled_jobs: int = always(int)  # number of running jobs that stall
    stalled: list[StalledJob] = always(list[StalledJob])  # the first of the jobs that stall
    keeps: Keeps = always(Keeps)
    feature_level: int | None = None  # feature level of the ledger's records
    schedulers: list[SchedulerRow] | None = None
    contained: ContainedFailures | None = None
    follower: FollowerRow | None = None
    appends: AppendFigures | None = None
    ledger_copies: LedgerCopies | None = None
    request_queue: RequestQueueRow | None = None  # left out until it was counted
    buckets: TenantBucketsRow | None = None  # left out where all are made, or none is to be made
    rates: list[TenantRate] | None = None  # tenants beyond their rate, those with most first; left out without any
