"""What `ls`, `show`, `explain`, `history`, `cancel`, `uncancel` and `wake` answer about jobs."""

from __future__ import annotations

from typing import Any

import msgspec

from moorage.schemas.always import always, nothing
from moorage.schemas.capabilities import Capabilities, Enforced
from moorage.schemas.frames.reported import Values
from moorage.schemas.frames.told import Change
from moorage.schemas.frames.use import Used as Used
from moorage.schemas.job import Request
from moorage.schemas.operate import Hold, Limit, Resized
from moorage.schemas.waited import WaitedPart


class DeviceUsed(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The newest reading of a GPU of an attempt."""

    index: int = always(int)  # the device's own index
    percent: int | None = always(nothing)
    memory_mib: int | None = always(nothing)
    memory_total_mib: int = always(int)
    power_w: int | None = always(nothing)
    shared_by: int = 0  # number of jobs on it whose use cannot be told apart; left out if it can


class Awaited(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A job that another one waits for."""

    job: str
    when: str = always(str)  # which end counts: succeeded, any or failed
    state: str = always(str)  # its state now


class ReplicaStall(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A stall of a running job, as its request's `stall_s` defines it."""

    replica: int = always(int)  # -1: all of a gang
    seconds: int = always(int)  # for how long
    why: str = always(str)


class ReplicaCounts(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How many replicas of a job are in which state."""

    of: int = always(int)
    states: dict[str, int] = always(dict[str, int])
    ended: dict[str, str] = {}  # ranges of replicas that ended without success, by state


class BoundsNow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What its tenant has changed of a job's request by `change`: it stands in `request`, too. Null: not changed."""

    max_running: int | None = None
    timeout_s: float | None = None
    #: the longest time limit of the attempts that run now, where that is another one than `run.timeout_s` of `request`
    running_timeout_s: float | None = None


class JobRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One job of `ls`. Of a job that ended long ago only `job`, `tenant` and `state` are sure."""

    job: str
    tenant: str
    state: str
    rev: int = 0  # revision of its last change
    gpu: str = ""  # the token of what it asks for
    priority: int | None = None  # null if its request is no longer kept
    attempt: int = 0  # the newest of its replicas' attempts; 0 before the first
    age_ms: int = 0  # ms since it was accepted
    worker: str = ""  # the first worker that has it now, or had it last
    workers: int = 1  # how many workers have it now
    simulated: bool = False
    code: int | None = None  # its exit code; null while it runs
    why: str = ""  # why it ended, or what its newest transition says
    hold: Hold | None = None
    reported: Values = {}  # the newest values that its first replica which reports has reported of itself
    use: Used | None = None  # null unless it runs and its workers read its GPUs
    labels: dict[str, str] = {}
    reason: str = ""  # why it waits
    ran_ms: int | None = None  # how long its newest attempt runs, or ran; null if it has none
    after: list[Awaited] = []  # jobs that it waits for before it is queued
    not_before_ms: int = 0  # ledger time from which it may start; 0: it may now
    ready: int | None = None  # how many running replicas are ready; left out for a job without `run.ready`
    waiting: int = 0  # number of replicas that wait while others run
    stalled: list[ReplicaStall] = []
    replicas: ReplicaCounts | None = None  # left out for a job of one replica
    resized: Resized | None = None  # the part of each GPU since an operator's `resize`
    bounds: BoundsNow | None = None  # what a `change` has put in place of its request's
    compacted: bool = False  # whether it has left the scheduler's memory
    ended_ms: int = 0  # when it ended; 0 if it has not, and of `ls` also while it is in memory
    leases: list[tuple[str, list[int]]] = []  # with `at_ms`: worker and slots of each attempt


class CheckpointInfo(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The checkpoint with which an attempt began, and the newest that it has stored while it runs.

    Of each, when its worker told it, ms since 1970 by the ledger's clock, and the job's own step, if it is known.
    """

    from_ms: int | None = None  # null: it began with none, or its scheduler does not know
    from_step: int | None = None
    from_attempt: int | None = None  # the attempt that has stored it
    stored_ms: int | None = None  # null: it has stored none while it runs
    step: int | None = None
    not_stored: str = ""  # why a newer one could not be stored


class ReplicaInfo(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One replica of a job: its attempt, and the worker and GPUs that it has now."""

    replica: int
    state: str
    attempt: int = 0
    fence: int = 0
    retries: int = 0
    losses: int = 0
    refusals: int = 0
    restarts: int = 0  # how often a job that stays has started again
    #: of a request with `retry`, by the causes of each row: how many further attempts it has allowed, and at most
    tries: dict[str, list[int]] = {}
    worker: str = ""
    gpus: list[str] = []  # uuids of its GPUs
    waits_for: list[str] = []  # uuids of the GPUs for which a frozen attempt waits
    mode: str = ""  # sharing mode of its GPUs
    ready: bool | None = None  # whether it is ready; null for a job without `run.ready`
    address: str = ""  # where the ports are reached that its worker gave it
    enforced: Enforced | None = None  # how it is kept to its part of a shared GPU
    use: list[DeviceUsed] = []
    reported: Values = {}  # the newest values that it has reported of itself
    report_refused: str = ""  # why a line that it reported was refused last
    stopped: int = 0  # how many of its processes a signal such as SIGSTOP has stopped
    checkpoint: CheckpointInfo | None = None  # of a job that has one
    ran_on: str = ""  # worker of its last attempt, if the question names replicas and it has ended
    ended_ms: int = 0
    result: int | None = None  # as in `Change`
    code: int | None = None
    why: str = ""


class Scaled(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How many members a service is to have, whose number follows its calls."""

    wanted: int = always(int)
    min: int = always(int)
    max: int = always(int)
    since_ms: int | None = None  # for how many ms; left out before the first change
    why: str | None = None


class GpuTime(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a job was granted of GPUs, and what it used. A job from the history has no `memory_mib_s`."""

    gpu_s: float = always(float)
    memory_mib_s: float | None = None
    used_gpu_s: float | None = always(nothing)  # null while no worker has measured it
    used_memory_mib_s: float | None = always(nothing)


class JobPeaks(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The most memory that one of a job's ended attempts had at once, and their CPU time; null: no worker knows it."""

    memory_mib: int | None = None  # of all processes of an attempt together
    largest_mib: int | None = None  # of the largest process; it stands for `memory_mib` where that is not counted
    gpu_memory_mib: int | None = None  # of all GPUs of an attempt, as read once a second
    cpu_s: float | None = None  # the sum of all attempts


class PromisedStart(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """By when a job was told to start, ms since 1970: nine of ten such jobs are to start by then."""

    by_ms: int = always(int)
    told_ms: int = always(int)
    p50_ms: int = always(int)  # the median of the forecast behind it, in ms from `told_ms`
    runs: int = always(int)  # number of earlier runs behind it
    kept: bool | None = None  # left out while neither has happened


class Kept(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Until when the remains of an ended job are kept, ms since 1970."""

    job_ms: int = always(int)  # in the scheduler's memory
    history_ms: int = always(int)
    output_ms: dict[str, int] = always(dict[str, int])  # output and results, by worker


class ShownJob(JobRow, frozen=True, omit_defaults=True, kw_only=True):
    """One job in full. A `compacted` job may have nothing but its end."""

    own_subject: bool = False  # whether its events are also sent on its own subject
    accepted_ledger: int = 0  # number of the record that holds its request
    accepted_ms: int = 0
    request: Request | None = None  # null once it is no longer kept
    again: list[str] = []  # the jobs in memory that are runs again of it
    capabilities: Capabilities | None = None  # of its driver; null if no worker reports them
    replica_states: list[ReplicaInfo] = []
    alive: dict[str, str] = {}  # ranges of the replicas that are not over, by state; left out for a job of one replica
    changes: list[Change] = []  # its last transitions; `history` has all
    usage: GpuTime | None = None
    peaks: JobPeaks | None = None
    promised: PromisedStart | None = None  # while it is in memory
    waited: list[WaitedPart] = []  # where its waits went, if the answer is from its history; else `usage` says it
    started_ms: int | None = None  # when its first attempt began to run, of those in memory or in its history
    scaled: Scaled | None = None
    kept: Kept | None = None
    kept_until_ms: int | None = None  # until when its history is kept, if the answer is from it


class JobsAnswer(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A page of jobs, newest first."""

    jobs: list[JobRow] = always(list[JobRow])
    counts: dict[str, int] = {}  # jobs that are asked for in each state; on the first page alone
    finished_kept: int = 0  # number of ended jobs in memory; on the first page alone
    ended: dict[str, int] = {}  # with `at_ms`: jobs that ended in the hour before, by state
    next: str = ""  # ask again with it as `after`; left out on the last page


class HistoryAnswer(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Transitions of a job."""

    job: str
    tenant: str
    state: str
    rev: int = always(int)  # revision of its last change
    changes: list[Change] = always(list[Change])
    complete: bool = always(bool)  # whether no transition after the asked revision is missing
    more: bool = always(bool)  # whether there are more: ask again with the last revision as `after_rev`
    kept_until_ms: int | None = None  # until when it is kept; left out for a job in memory


class HolderRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A job of the tenant that has GPUs which another one waits for."""

    job: str
    gpus: int = always(int)


class Holders(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Who has what a job waits for. Jobs of other tenants are numbers."""

    own: list[HolderRow] = always(list[HolderRow])  # the tenant's jobs with most GPUs
    own_jobs: int = always(int)
    other_jobs: int = always(int)
    other_gpus: int = always(int)
    workers: list[str] = always(list[str])  # a few of the workers, with how much is leased or free there
    hosts: int = always(int)  # how many workers there are
    more: bool = False  # whether further workers were not looked at


class Start(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A forecast of a start or an end, ms from now: its median, and in eight of ten cases from `p10_ms` to `p90_ms`.

    Without `p10_ms` it may be earlier, as of some run before it only the time limit is known. Without `p90_ms` it may
    be later, too. With 1 to 19 `runs` and no time limit before it there is the median alone.
    """

    p10_ms: int | None = None
    p50_ms: int = always(int)
    p90_ms: int | None = None
    #: number of earlier runs of the same commands behind it; 0 if only time limits and grace periods are
    runs: int = always(int)


class Fix(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A change with which a job would start earlier."""

    say: str = always(str)  # the change in words
    request: dict[str, Any] = {}  # fields of the request that change
    gpu: str = ""  # the GPUs of the changed request as a token, if that suffices
    gang: bool = False  # whether its replicas become a gang
    command: str = ""  # the command that does it; left out for a change of the request
    who: str = ""  # who can give the command: tenant or operator


class Leave(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A worker that running replicas have to leave."""

    worker: str
    in_ms: int = always(int)
    why: str = always(str)


class Explained(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Why a job waits, or how it ended. `reason` is left out for a job that does not wait.

    `job`, `tenant` and `state` are left out in a plan, an acceptance and an event, which name the job themselves.
    """

    job: str = ""
    tenant: str = ""
    state: str = ""
    replicas: ReplicaCounts | None = None
    asks: str = ""  # the token of what it asks for
    reason: str = ""  # the main reason
    means: str = ""  # what the reason means
    because: str = ""  # amounts and names behind it
    workers_left: dict[str, int] = {}  # workers that remain after each condition
    holders: Holders | None = None
    held_by: list[str] = []  # who has what it needs, in words
    needs: str = ""  # what lacks on the best host
    hold: Hold | None = None
    limit: Limit | None = None  # the tenant's limit, if that is the reason
    gpus_leased: int | None = None  # GPUs that the tenant has, if its limit is the reason
    gpus_needed: int | None = None  # GPUs that the job needs, if the limit is the reason
    starts_in_ms: int | None = None  # ms until a pause ends
    starts: Start | None = None
    starts_unknown: str = ""  # why there is no forecast
    ends: Start | None = None  # when the last replica of a job of several ends
    waiting_replicas: int = 0
    priority: int | None = None
    position: int | None = None  # place in the queue, from 1; left out for a job on hold
    queued: int | None = None  # number of jobs in the queue
    queued_of: str = ""  # what `queued` counts
    counts_as: int | None = None  # effective priority, if higher than its own
    waited_ms: int | None = None  # how long it has waited, with `counts_as`
    turn: int | None = None  # the tenant's turn among the tenants that wait
    tenants: int | None = None  # number of tenants that wait
    avoids: list[str] = []  # GPUs that failed under it
    refused_by: list[str] = []  # workers that refused it
    after: list[Awaited] = []
    chain: list[Awaited] = []  # the first job that it waits for, the first that this one waits for, and so on
    not_before_ms: int = 0
    scaled: Scaled | None = None
    fixes: list[Fix] = []
    why: str = ""  # of a job that does not wait: the newest reason that still applies
    code: int | None = None
    leaves: list[Leave] = []
    service: str = ""  # the service whose calls it answers
    models: tuple[str, ...] = ()  # what that serves
    members_ready: int | None = None  # how many of its replicas are ready for calls
    reported: Values = {}  # the newest values that its first replica which reports has reported of itself
    stalled: list[ReplicaStall] = []
    compacted: bool = False
    ended_ms: int = 0
    kept: Kept | None = None


class Cancelled(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The answer to a cancel: whether the job is `cancelled` by it, and the state that it `was` in.

    `cancelled` is false if the job had ended or was being cancelled. `was` is UNKNOWN for an id that is not known, of a
    cancel with `before`: it is remembered for `remembered_s` seconds, and a submit with that id is refused until then.
    """

    job: str
    cancelled: bool = always(bool)
    was: str = always(str)
    remembered_s: float = 0.0


class Uncancelled(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The answer to `uncancel`."""

    job: str
    lifted: bool = always(bool)  # whether a cancel of the job was remembered until now


class ServiceVersion(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A live job of a service: one of its versions, and how its members do."""

    job: str
    label: str = ""  # its label `version`
    accepted_ms: int = 0  # ledger time when it was accepted
    members: int = 0  # how many it is to have
    running: int = 0
    ready: int = 0  # of those that run; as many as run where its request says no `ready`


class ServiceUse(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The members of a service now, and its calls of about the last minute, as this leader has heard."""

    members: int = 0  # that take calls
    places: int = 0  # calls that these run at the same time
    running: int = 0  # calls that run
    waiting: int = 0  # calls that wait in members' rooms
    calls: int = 0  # calls that are over, however they ended
    errors: dict[str, int] = {}  # calls answered with an error, by its code
    waited_ms: list[int | None] = []  # half of the calls, and 19 of 20, had waited no longer; null for over 60,000
    ran_ms: list[int | None] = []  # the same of how long they ran
    last_error: str = ""  # the newest that a member tells, as `500:ValueError: no such word`


class ServiceRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A live service: the newest job that has it, and what it serves."""

    service: str
    job: str
    http: bool = False  # whether its members are HTTP servers
    models: tuple[str, ...] = ()
    members: int = 0  # replicas that run; 0 also while it is asleep
    accepted_ms: int = 0  # ledger time when that job was accepted
    versions: list[ServiceVersion] = []  # its live jobs, the oldest first: two while one replaces the other
    use: ServiceUse | None = None  # left out where the leader has heard of no member


class ServicesAnswer(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The answer to `services`: those of the tenant, by name."""

    services: list[ServiceRow] = always(list[ServiceRow])


class Woken(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The answer to a caller that found no member of a service."""

    service: str
    job: str  # the job that serves it
    wanted: int  # how many members that is to have
    why: str = ""  # why none of them has its place yet; left out if one has, and if the leader has more urgent work
