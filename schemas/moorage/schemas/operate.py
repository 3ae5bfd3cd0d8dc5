"""What an operator may ask of jobs, tenants and workers on `moorage.admin.<operator>.<verb>`, and how it is answered.

Every act says who asks (`by`) and why, both for the ledger, the job's history and `explain`. What is recorded as `by`
is the operator in the subject; the name that the act gives is behind it as `said`. Where the state asked for exists
already, the answer is `"changed": false` and nothing is recorded. Two kinds are no such states: a second `requeue` ends
the attempt that runs by then, and acts on dead letters are in the scheduler's log, not in the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from moorage.schemas.codec import Decoder
from moorage.schemas.decode_errors import asked_as
from moorage.schemas.errors import Problem
from moorage.schemas.gpu import MEMORY_MIB_MAX, check_pattern
from moorage.schemas.job import (
    CHECKPOINT_SIGNALS,
    DURATION_S_MAX,
    HOST_COUNTER,
    PRIORITY_MAX,
    REPLICAS_MAX,
    check_duration,
    check_uses,
)
from moorage.schemas.names import JOB, TENANT, WORKER, is_job, is_tenant, is_worker
from moorage.schemas.ranges import NUMBERS_MAX, parse_ranges
from moorage.schemas.service import Scale

BY_CHARS_MAX: Final = 64
WHY_CHARS_MAX: Final = 200
#: 0 is no limit
GPUS_LIMIT_MAX: Final = 1_000_000
JOBS_LIMIT_MAX: Final = 1_000_000
#: how far ahead a drain may begin, and how long it may last
WINDOW_S_MAX: Final = 366 * 86400
LEVEL_MAX: Final = 1_000
SCHEDULERS_MAX: Final = 64
WEIGHT_MAX: Final = 10_000

#: letters in one answer
LETTERS_PAGE_MAX: Final = 200
SEQUENCE_MAX: Final = 2**53


class _Act(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The fields that every act has. Raises ValueError for a text that is too long or has control characters."""

    by: str = ""
    why: str = ""

    def __post_init__(self) -> None:
        for name, text, bound in (("by", self.by, BY_CHARS_MAX), ("why", self.why, WHY_CHARS_MAX)):
            if len(text) > bound or not text.isprintable():
                raise ValueError(f"{name} must be at most {bound} printable characters, found {text[:80]!r}")


class HoldAct(_Act, frozen=True, kw_only=True):
    """`hold`: do not place a job, or without a job the tenant's whole queue, until `release`; running attempts
    continue.

    The `deadline_s` and `start_within_s` of a held job keep counting. Refused with `not-found`, and with
    `failed-precondition` for a job that is over.
    """

    tenant: str
    job: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_tenant(self.tenant)
        if self.job is not None:
            _check_job(self.job)


class _WorkerAct(_Act, frozen=True, kw_only=True):
    worker: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_worker(self.worker):
            raise ValueError(f"worker must match {WORKER.pattern}, found {self.worker[:80]!r}")


class CordonAct(_WorkerAct, frozen=True, kw_only=True):
    """`cordon`: place nothing new on a worker until `uncordon`; running attempts continue. Refused with `not-found`.

    `slots`, positions in hello's `gpu_pool`, name some of its devices: then these alone are given to no job.
    """

    slots: list[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_slots(self.slots)


class UncordonAct(_WorkerAct, frozen=True, kw_only=True):
    """`uncordon`: undo `cordon` and `drain`, also a drain that is to come. Refused with `not-found`.

    `slots` name devices that were cordoned by themselves; without them, the worker opens, and these stay as they are.
    """

    slots: list[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_slots(self.slots)


def _check_slots(slots: list[int] | None) -> None:
    if slots is not None and not (slots and all(0 <= slot < 64 for slot in slots)):
        raise ValueError(f"slots must be positions 0..63 of a worker's devices, at least one, found {slots[:8]}")


class DrainAct(_WorkerAct, frozen=True, kw_only=True):
    """`drain`: place nothing new on a worker, from now on or `from_s` seconds from now.

    With `within_s`, the attempts on it must end within that many seconds of the beginning, and their jobs are placed
    elsewhere; with `from_s` or `for_s` they must have ended when the drain begins, unless `within_s` gives more time.
    With `for_s` the worker is open again that long after the beginning. A later drain replaces an earlier one. Seconds
    count from the leader's record. With `if_idle` the drain is refused with `failed-precondition` unless the worker has
    nothing to do: then nothing begins there after the answer, so that its machine may go.
    """

    from_s: float | None = None
    within_s: float | None = None
    for_s: float | None = None
    if_idle: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("from_s", self.from_s), ("within_s", self.within_s), ("for_s", self.for_s)):
            if value is not None and not 0 <= value <= WINDOW_S_MAX:
                raise ValueError(f"{name} must be 0..{WINDOW_S_MAX} seconds, found {value:g}")
        if self.for_s is not None and (self.within_s or 0) >= self.for_s:
            raise ValueError(f"for_s must be above within_s = {self.within_s or 0:g}, found {self.for_s:g}")

    @property
    def has_window(self) -> bool:
        return self.from_s is not None or self.within_s is not None or self.for_s is not None


class ForgetAct(_WorkerAct, frozen=True, kw_only=True):
    """`forget`: list a worker that has left or was lost no more, and end an order on it, such as a drain.

    It is known again once it joins, and open. Refused with `not-found`, and with `failed-precondition` while it has a
    session, or while jobs with `on_partition` keep wait for it.
    """


class AdmitAct(_WorkerAct, frozen=True, kw_only=True):
    """`admit`: record that a machine with a join token gets the key of this worker, of a pool. The joiner's one order.

    Refused with `failed-precondition` while the worker has a session, or while jobs with `on_partition` keep wait.
    """

    pool: str
    token: str = ""  # the first characters of the token's public key
    host: str = ""  # the machine's own name, as it says

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_worker(self.pool):
            raise ValueError(f"pool must match {WORKER.pattern}, found {self.pool[:80]!r}")
        for name, text in (("token", self.token), ("host", self.host)):
            if len(text) > BY_CHARS_MAX or not text.isprintable():
                raise ValueError(f"{name} must be at most {BY_CHARS_MAX} printable characters, found {text[:80]!r}")


class ReleaseAct(_Act, frozen=True, kw_only=True):
    """`release`: undo `hold` of a `tenant` or a `job` of it; or put quarantined devices of a `worker` back to use.

    `slots`, positions in hello's `gpu_pool`, name some of the worker's devices; without it, all of them. An empty list
    is refused.
    """

    tenant: str | None = None
    job: str | None = None
    worker: str | None = None
    slots: list[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.worker is None) == (self.tenant is None):
            both = "both" if self.worker is not None else "neither"
            raise ValueError(
                "release must have either worker (its quarantined devices) or tenant (its hold, or with job that of"
                f" one job), found {both}"
            )
        if self.worker is not None:
            if self.job is not None:
                raise ValueError("release must name no job beside worker: a job is released with its tenant")
            if not is_worker(self.worker):
                raise ValueError(f"worker must match {WORKER.pattern}, found {self.worker[:80]!r}")
        if self.slots is not None and (
            self.worker is None or not self.slots or not all(0 <= slot < 64 for slot in self.slots)
        ):
            raise ValueError(
                f"slots must be positions 0..63 of a worker's devices, at least one, found {self.slots[:8]}"
            )
        if self.tenant is not None:
            _check_tenant(self.tenant)
        if self.job is not None:
            _check_job(self.job)


def check_replicas(text: str | None) -> None:
    """Raise ValueError if a text is not replicas such as `0-99,205`; None is all of them."""
    if text is not None:
        try:
            parse_ranges(text)
        except ValueError as error:
            raise ValueError(f"replicas must be {error}") from None


class _JobAct(_Act, frozen=True, kw_only=True):
    tenant: str
    job: str

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_tenant(self.tenant)
        _check_job(self.job)


class RequeueAct(_JobAct, frozen=True, kw_only=True):
    """`requeue`: end what runs or is placed of a job, within the job's grace; it then waits for a new attempt.

    With `replicas`, as in `0-9,205`, only these. This costs no retry. A replica that is kept through a partition is
    given up, on the operator's word that it is over.
    Refused with `not-found`, and with `failed-precondition` for a job that is over.
    """

    replicas: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_replicas(self.replicas)


class PlaceAct(_JobAct, frozen=True, kw_only=True):
    """`place`: start what waits of a job on this worker now, also on a cordoned one, before jobs that come earlier.

    As many replicas as have room there, or a whole gang; the others wait as before. Its tenant's limits and what the
    job asks for hold. Refused with `not-found`, and with `failed-precondition` where nothing of it can start there now.
    A placement has no place for `why` in the ledger, so this order takes none.
    """

    on: str  # the worker

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_worker(self.on):
            raise ValueError(f"on must match {WORKER.pattern}, found {self.on[:80]!r}")
        if self.why:
            raise ValueError(f"why must be empty: a placement has no place for it, found {self.why[:80]!r}")


class FreezeAct(_JobAct, frozen=True, kw_only=True):
    """`freeze`: have the workers freeze what runs of a job, until `resume`; it keeps its devices and is then FROZEN.

    The memory of its GPUs is in its hosts' RAM meanwhile. All its clocks go on: `deadline_s`, `timeout_s`. A new
    attempt is not frozen. What cannot be frozen runs on, and the job's history has why (NOT_FROZEN). Refused with
    `not-found`, and with `failed-precondition` for a gang, for a job of which nothing runs, and where it runs as a
    client of MPS, without GPUs or by a driver that freezes nothing.
    """


class ResumeAct(_JobAct, frozen=True, kw_only=True):
    """`resume`: undo `freeze`. A replica that cannot be resumed is lost, and tried again as after a lost worker."""


class PriorityAct(_JobAct, frozen=True, kw_only=True):
    """`priority`: give a job another priority, 0..100, in place of the priority of its request."""

    priority: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.priority <= PRIORITY_MAX:
            raise ValueError(f"priority must be 0..{PRIORITY_MAX}, found {self.priority}")


class ResizeAct(_JobAct, frozen=True, kw_only=True):
    """`resize`: give a job another part of each shared GPU that it has, and of those that it gets later.

    A field that is left out stays as it is. Refused with `not-found`; with `failed-precondition` for a job that shares
    no GPU, where the other sharers leave no room, and where a worker cannot change what an attempt has.
    """

    memory_mib: int | None = None  # MiB of each GPU, 1..16777216
    compute_percent: int | None = None  # percentage of each GPU's compute time, 1..100

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory_mib is None and self.compute_percent is None:
            raise ValueError("resize must have memory_mib or compute_percent, found neither")
        for name, value, bound in (
            ("memory_mib", self.memory_mib, MEMORY_MIB_MAX),
            ("compute_percent", self.compute_percent, 100),
        ):
            if value is not None and not 1 <= value <= bound:
                raise ValueError(f"{name} must be 1..{bound}, found {value}")


#: the limits of a tenant, with the most of each
LIMITS_MAX: Final[dict[str, float]] = {
    "gpus": GPUS_LIMIT_MAX,
    "jobs": JOBS_LIMIT_MAX,
    "cores": 1_000_000,
    "memory_mib": 2**40,
    "running": REPLICAS_MAX,
    "running_per_key": REPLICAS_MAX,
    "job_gpus": GPUS_LIMIT_MAX,
    "time_limit_s": DURATION_S_MAX,
    "gpu_hours": 1e9,
}
#: the most that a GPU counts in a budget
GPU_WEIGHT_MAX: Final = 1000
#: patterns of models with a limit, or a weight, of their own
LIMITED_MODELS_MAX: Final = 32
Period = Literal["day", "week", "month"]


class TimeLimitAct(_JobAct, frozen=True, kw_only=True):
    """`time-limit`: give a job's running attempts, and its later ones, another time limit, from their starts on.

    It is `change` with `running` of the job's tenant, but it may go beyond the tenant's limit, and past a reservation.
    Refused with `failed-precondition` where a worker cannot change a running attempt's limit, and below feature level
    2.
    """

    timeout_s: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_duration("timeout_s", self.timeout_s)


class LimitAct(_Act, frozen=True, kw_only=True):
    """`limit`: set what a tenant may have at once, how large and long its jobs may be, and its budget of GPU-hours.

    0 or null means no limit; a field that is left out stays as it is. What already exceeds a new limit is not ended,
    and waits or is refused from then on. A sharer of a device counts as a whole GPU. All but `gpus` and `jobs` need
    feature level 2.
    """

    tenant: str
    gpus: int | msgspec.UnsetType | None = msgspec.UNSET  # leased at once
    jobs: int | msgspec.UnsetType | None = msgspec.UNSET  # that are not over
    cores: float | msgspec.UnsetType | None = msgspec.UNSET  # of the host, that its jobs ask for at once
    memory_mib: int | msgspec.UnsetType | None = msgspec.UNSET  # of the host, likewise
    running: int | msgspec.UnsetType | None = msgspec.UNSET  # replicas on workers; a gang counts as one
    running_per_key: int | msgspec.UnsetType | None = msgspec.UNSET  # replicas on workers of each `fair_key`
    job_gpus: int | msgspec.UnsetType | None = msgspec.UNSET  # GPUs that one job may ask for at once
    #: leased at once of models, by patterns as in a request's `gpu.model`. A model that is not named stays as it is, 0
    #: removes that limit, and null all of them
    gpus_of: dict[str, int] | msgspec.UnsetType | None = msgspec.UNSET
    time_limit_s: float | msgspec.UnsetType | None = msgspec.UNSET  # the longest of a job, which has to name one
    #: GPU-hours that it may lease in a day, week (from Monday) or month, in UTC. What runs then goes on
    gpu_hours: float | msgspec.UnsetType | None = msgspec.UNSET
    period: Period = "month"  # of `gpu_hours`
    #: jobs with GPUs once these are spent. As preemptible they start, but what may not be preemptible waits
    on_spent: Literal["wait", "refuse", "preemptible"] = "wait"
    #: what a GPU of a model counts in `gpu_hours`, as `{"L4": 0.2}`; other models count 1. Of several patterns that
    #: match the longest counts. A model that is not named stays as it is, with 0 it counts 1 again, with null all do
    gpu_weights: dict[str, float] | msgspec.UnsetType | None = msgspec.UNSET

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_tenant(self.tenant)
        names = [*LIMITS_MAX, "gpus_of", "gpu_weights"]
        if all(getattr(self, name) is msgspec.UNSET for name in names):
            raise ValueError(f"limit must have one of {', '.join(names)}, found none of them")
        if isinstance(self.gpus_of, dict):
            check_models("gpus_of", self.gpus_of, GPUS_LIMIT_MAX)
        if isinstance(self.gpu_weights, dict):
            check_models("gpu_weights", self.gpu_weights, GPU_WEIGHT_MAX)
        for name, bound in LIMITS_MAX.items():
            value = getattr(self, name)
            if isinstance(value, int | float) and not 0 <= value <= bound:
                raise ValueError(f"{name} must be 0..{bound:.0f} or null, found {value}")


def check_models(field: str, values: Mapping[str, float], bound: float) -> None:
    """Raise ValueError for patterns of models that no request has, for too many, or for values beyond a bound."""
    if not 1 <= len(values) <= LIMITED_MODELS_MAX:
        raise ValueError(f"{field} must name 1..{LIMITED_MODELS_MAX} models, found {len(values)}")
    for pattern, value in values.items():
        check_pattern(field, pattern)
        if not 0 <= value <= bound:
            raise ValueError(f"{field}.{pattern} must be 0..{bound:.0f}, found {value}")


class CounterAct(_Act, frozen=True, kw_only=True):
    """`counter`: set how many there are of a counter that jobs name in `uses`: licences, calls of an interface.

    0 or null removes it. What uses it goes on; jobs wait until enough are left. It needs feature level 2.
    """

    name: str
    most: int | None
    per: Literal["fleet", "tenant"] = "fleet"  # so many in all, or for each tenant

    def __post_init__(self) -> None:
        super().__post_init__()
        check_uses({self.name: self.most or 1})
        if self.name.startswith(HOST_COUNTER):
            raise ValueError(f"name must not begin with {HOST_COUNTER}: workers have those, found {self.name}")


class FeatureLevelAct(_Act, frozen=True, kw_only=True):
    """`feature-level`: the leader writes ledger records of this level from now on; it is never lowered.

    Schedulers that cannot fold such records stop. Refused with `failed-precondition` while a scheduler that was heard
    in the last seconds cannot fold them, and while fewer than `schedulers` were heard.
    """

    level: int
    schedulers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, bound in (("level", self.level, LEVEL_MAX), ("schedulers", self.schedulers, SCHEDULERS_MAX)):
            if not 1 <= value <= bound:
                raise ValueError(f"{name} must be 1..{bound}, found {value}")


class ShareAct(_Act, frozen=True, kw_only=True):
    """`share`: set a tenant's weight in the fair share, and how many GPUs it is guaranteed.

    If tenants want more GPUs than there are, they get them in the ratio of their weights (1 if none is set). Past usage
    is included and decays with time. Guaranteed GPUs are given out before any others; other tenants borrow those that
    are idle. 0 or null unsets a field; a field that is left out stays as it is.
    """

    tenant: str
    weight: int | msgspec.UnsetType | None = msgspec.UNSET
    gpus: int | msgspec.UnsetType | None = msgspec.UNSET

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_tenant(self.tenant)
        if self.weight is msgspec.UNSET and self.gpus is msgspec.UNSET:
            raise ValueError("share must have weight or gpus, found neither")
        for name, value, bound in (("weight", self.weight, WEIGHT_MAX), ("gpus", self.gpus, GPUS_LIMIT_MAX)):
            if isinstance(value, int) and not 0 <= value <= bound:
                raise ValueError(f"{name} must be 0..{bound} or null, found {value}")


Act = (
    HoldAct
    | ReleaseAct
    | RequeueAct
    | PlaceAct
    | FreezeAct
    | ResumeAct
    | PriorityAct
    | ResizeAct
    | TimeLimitAct
    | LimitAct
    | CounterAct
    | FeatureLevelAct
    | ShareAct
    | CordonAct
    | UncordonAct
    | DrainAct
    | ForgetAct
    | AdmitAct
)
#: what each verb of an operator asks for
ACTS: Final[dict[str, type[Act]]] = {
    "hold": HoldAct,
    "release": ReleaseAct,
    "requeue": RequeueAct,
    "place": PlaceAct,
    "freeze": FreezeAct,
    "resume": ResumeAct,
    "priority": PriorityAct,
    "resize": ResizeAct,
    "time-limit": TimeLimitAct,
    "limit": LimitAct,
    "counter": CounterAct,
    "feature-level": FeatureLevelAct,
    "share": ShareAct,
    "cordon": CordonAct,
    "uncordon": UncordonAct,
    "drain": DrainAct,
    "forget": ForgetAct,
    "admit": AdmitAct,
}
#: all verbs of operators: questions, acts, and dead letters
ADMIN_VERBS: Final = ("fleet", "ls", "plan", "audit", "acts", "tenants", "usage", "dlq", *ACTS)


class DlqAct(_Act, frozen=True, kw_only=True):
    """`dlq`: `list` dead letters (of a `tenant`, from behind `after`), `show`, `resend` or `drop` one by `sequence`.

    `resend` submits the message as it came, or `body` in its place, under the same job id. It is answered once a
    record holds it, and the letter is then gone; refused again, it stays. `drop` cannot be undone.
    """

    act: Literal["list", "show", "resend", "drop"] = "list"
    tenant: str | None = None
    sequence: int = 0
    after: int = 0
    limit: int = LETTERS_PAGE_MAX
    body: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tenant is not None:
            _check_tenant(self.tenant)
        if (self.act == "list") != (self.sequence == 0) or not 0 <= self.sequence <= SEQUENCE_MAX:
            allowed = "0 with list, and a dead letter's number with any other act"
            raise ValueError(f"sequence must be {allowed}, found {self.sequence}")
        if not 0 <= self.after <= SEQUENCE_MAX:
            raise ValueError(f"after must be 0..{SEQUENCE_MAX}, found {self.after}")
        if not 1 <= self.limit <= LETTERS_PAGE_MAX:
            raise ValueError(f"limit must be 1..{LETTERS_PAGE_MAX}, found {self.limit}")
        if self.body is not None and self.act != "resend":
            raise ValueError(f"body must be left out unless act is resend, found act {self.act}")

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> DlqAct:
        """Return the act with these decoded arguments. Raises `Refused`, which names the wrong field."""
        return asked_as(cls, arguments, "moorage dlq --help")


def act_of(verb: str, arguments: dict[str, Any]) -> Act:
    """Return the act of a verb in `ACTS` with these decoded arguments. Raises `Refused`, which names the wrong
    field."""
    kind = ACTS[verb]
    command = verb if issubclass(kind, _WorkerAct) and kind not in (ForgetAct, AdmitAct) else f"admin {verb}"
    return asked_as(kind, arguments, f"moorage {command} --help")


def _check_tenant(tenant: str) -> None:
    if not is_tenant(tenant):
        raise ValueError(f"tenant must match {TENANT.pattern}, found {tenant[:80]!r}")


def _check_job(job: str) -> None:
    if not is_job(job):
        raise ValueError(f"job must match {JOB.pattern}, found {job[:80]!r}")


# --------------------------------------------------------------------------------------------------------- answers


class Hold(msgspec.Struct, frozen=True, omit_defaults=True):
    """A hold of a job or a tenant: by which operator, why, and since which ledger millisecond.

    `by` is `operator:NAME` as the key proves, or `operator` without keys; `said` is the name that the caller gave.
    """

    since_ms: int
    by: str = ""
    said: str = ""
    why: str = ""


class Limit(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tenant's limits (0: no limit) and the operator that set them."""

    gpus: int = 0
    jobs: int = 0
    since_ms: int = 0
    by: str = ""
    said: str = ""
    why: str = ""
    cores: float = 0
    memory_mib: int = 0
    running: int = 0
    job_gpus: int = 0
    time_limit_s: float = 0
    gpu_hours: float = 0
    period: str = ""  # of `gpu_hours`, as the next two
    on_spent: str = ""
    spent_hours: float = 0  # in this period
    running_per_key: int = 0
    gpus_of: dict[str, int] = {}
    gpu_weights: dict[str, float] = {}  # of `gpu_hours`


class Counter(msgspec.Struct, frozen=True, omit_defaults=True):
    """A counter: how many there are, in all or for each tenant, how many of them all use, and who set it."""

    name: str
    most: int
    per: str = "fleet"
    used: int = 0
    since_ms: int = 0
    by: str = ""
    said: str = ""
    why: str = ""


class Drain(msgspec.Struct, frozen=True, omit_defaults=True):
    """A drain with times, in ledger milliseconds: it begins at `from_ms`, and jobs must have ended at `leave_ms`.

    It ends at `until_ms`; if that is 0, it lasts until an operator uncordons the worker.
    """

    from_ms: int
    leave_ms: int
    until_ms: int = 0
    by: str = ""
    said: str = ""
    why: str = ""


class Share(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tenant's weight and guaranteed GPUs (0: not set) and the operator that set them."""

    weight: int = 0
    gpus: int = 0
    since_ms: int = 0
    by: str = ""
    said: str = ""
    why: str = ""


class ChangeAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The question of `moorage.api.<tenant>.change`: other bounds for a job that is not over.

    They stand in place of its request's; a field that is left out stays as it is. The request itself stays what was
    submitted, and with it its identity.
    """

    job: str
    #: number of replicas, 1..1000000; of a service also `{"min": 2, "max": 6}`: as many as its calls need. Not of a
    #: gang, nor where each replica has an item. Of those that are too many the last ones that wait are cancelled, then
    #: running ones
    replicas: int | Scale | None = None
    max_running: int | None = None  # most replicas that run at once, 1..1000000
    priority: int | None = None  # 0..100; no higher than one that an operator has set
    timeout_s: float | None = None  # most seconds that an attempt may run that is placed from now on
    #: true: `timeout_s` holds for the attempts that run, too, from their start on
    running: bool = False

    #: true: what waits of it stays on hold from now on; false: it is released, unless an operator holds it
    hold: bool | None = None
    reason: str = ""
    by: str = ""  # the caller's name, for the job's history

    def __post_init__(self) -> None:
        _check_job(self.job)
        asked = (self.replicas, self.max_running, self.priority, self.timeout_s, self.hold)
        if all(each is None for each in asked):
            raise ValueError("change must have replicas, max_running, priority, timeout_s or hold, found none of them")
        if self.running and self.timeout_s is None:
            raise ValueError("change must have timeout_s with running, found none")
        if isinstance(self.replicas, int) and not 1 <= self.replicas <= REPLICAS_MAX:
            raise ValueError(f"replicas must be 1..{REPLICAS_MAX}, found {self.replicas}")
        if self.max_running is not None and not 1 <= self.max_running <= REPLICAS_MAX:
            raise ValueError(f"max_running must be 1..{REPLICAS_MAX}, found {self.max_running}")
        if self.priority is not None and not 0 <= self.priority <= PRIORITY_MAX:
            raise ValueError(f"priority must be 0..{PRIORITY_MAX}, found {self.priority}")
        check_duration("timeout_s", self.timeout_s)
        if len(self.reason) > WHY_CHARS_MAX or not self.reason.isprintable():
            raise ValueError(f"reason must be at most {WHY_CHARS_MAX} printable characters")


class Changed(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The answer to `change`: the job's bounds as they are now; null stands for no bound.

    `changed` is false if they were so before: then nothing was recorded. `members` are the attempts that are placed or
    run, and keep the limit of time that they have, unless `relimited` says that they have `timeout_s` now.
    """

    job: str
    changed: bool
    state: str
    priority: int
    max_running: int | None = None
    timeout_s: float | None = None
    members: int = 0
    replicas: int | Scale | None = None  # what is asked for now; a scheduler of before does not say it
    held: bool = False  # it is on hold
    relimited: bool = False  # the attempts that run have the new limit of time, too


class SignalAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The question of `moorage.api.<tenant>.signal`: send a signal to the processes of a job that handle it.

    It goes to the topmost processes of each running attempt's tree that handle the signal, and to no process that it
    would end. `signal` is one of those that `checkpoint_signal` may be, with or without SIG. `by` is the caller's name
    for the job's history.
    """

    job: str
    signal: str
    replica: int | None = None  # null: all that run
    by: str = ""

    def __post_init__(self) -> None:
        _check_job(self.job)
        if self.replica is not None and not 0 <= self.replica < NUMBERS_MAX:
            raise ValueError(f"replica must be 0..{NUMBERS_MAX - 1}, found {self.replica}")
        if self.number_name not in CHECKPOINT_SIGNALS:
            raise ValueError(f"signal must be one of {', '.join(CHECKPOINT_SIGNALS)}, found {self.signal[:80]!r}")

    @property
    def number_name(self) -> str:
        """The signal as `SIGUSR1`."""
        name = self.signal.upper()
        return name if name.startswith("SIG") else f"SIG{name}"


class SignalSent(msgspec.Struct, frozen=True, gc=False):
    """The data of the answer to `signal`: the replicas whose workers are asked to send it, with their workers."""

    job: str
    signal: str
    replicas: list[tuple[int, str]]


class Resized(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of each GPU that a job has since an operator's `resize` (memory 0 is not counted).

    `attempts` are those that run or are placed, by how they take it: `live` (at once), `next-attempt` (what runs keeps
    what it started with), or `counted` (nothing but the guard of memory keeps them to it). Two words are those of
    memory and of compute.
    """

    memory_mib: int
    compute_percent: int
    since_ms: int = 0
    attempts: dict[str, int] = {}


class Replaced(msgspec.Struct, frozen=True, omit_defaults=True):
    """What stood of earlier orders on a worker until one ended it, or took its place.

    `flag` is cordoned or draining, `why` its reason. `drain` has the times of a drain, also of one to come; `gpus` are
    positions of devices of which the cordon stays.
    """

    flag: str = ""
    why: str = ""
    drain: Drain | None = None
    gpus: list[int] = []


class Done(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="done"):
    """The answer to an operator's act. `changed` is false if nothing had to change: then nothing was recorded.

    `members` of a worker are those that it holds, and `ending` those of them that have been asked to end; of a job,
    those that run or are placed, which go on after `hold` and end after `requeue`; of `freeze` and `resume` those that
    they concern. `gpus` is how many a tenant leases now. `state` is the job's state before the act; `hold`, `priority`,
    `limit`, `share` and the ledger's feature `level` are as they are now.
    """

    verb: str
    changed: bool
    worker: str = ""
    tenant: str = ""
    job: str = ""
    state: str = ""
    members: int | None = None
    gpus: int = 0
    priority: int | None = None
    hold: Hold | None = None
    limit: Limit | None = None
    counter: Counter | None = None
    drain: Drain | None = None
    #: positions of the worker's devices that were released
    slots: list[int] = []
    level: int | None = None
    share: Share | None = None
    #: the part of each GPU that the job has now
    resized: Resized | None = None
    ending: int = 0
    #: the time limit that the job's attempts have now
    timeout_s: float | None = None
    #: of an order on a worker, what it has ended or replaced
    replaced: Replaced | None = None


decode_done: Final[Decoder[Done | Problem]] = Decoder(Done | Problem)


class DeadLetter(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="dead-letter"):
    """A queued message that was refused: the subject it was published to, its sequence in the queue, the reason, and
    the message as it came (base64 in JSON). `trace` is its traceparent, `evidence` the traceback where the scheduler
    itself failed on it."""

    subject: str
    sequence: int
    problem: Problem
    body: bytes
    trace: str = ""
    evidence: str = ""


class TenantRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tenant as `tenants` lists it: jobs that are not over, GPUs leased, and what an operator has set.

    `usage_milli` is its decayed usage as thousandths of a GPU used all the time; 0 while no tenant has a share.
    """

    tenant: str
    jobs: int = 0
    gpus: int = 0
    hold: Hold | None = None
    limit: Limit | None = None
    share: Share | None = None
    usage_milli: int = 0
    fair_keys: int = 0  # of how many fair keys jobs run or wait; their names are the tenant's own
