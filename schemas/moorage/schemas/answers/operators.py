"""What `admin.tenants`, `admin.audit`, `admin.acts` and `usage` answer, the last one to tenants, too."""

from __future__ import annotations

import msgspec

from moorage.schemas.always import always
from moorage.schemas.frames import FleetEvent
from moorage.schemas.operate import Counter, Limit, TenantRow


class WaitRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How long jobs of one tenant and class waited."""

    tenant: str
    gpus: str  # the class: how many GPUs a job needs at once: none, share, 1, 2-7 or 8+
    jobs: list[int] = always(list[int])  # number of jobs in each bucket; one more is for longer waits
    sum_s: float = always(float)  # seconds that they waited in all


class Waits(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How long jobs waited from their acceptance to their first start in this term."""

    buckets_s: list[float] = always(list[float])  # upper bounds of the buckets, seconds
    rows: list[WaitRow] = always(list[WaitRow])


class ServiceCalls(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What became of the calls of one service in this leader's term, for monitors.

    It is added up from the load frames of the members, so it lacks what a leader did not hear: the last second of a
    member that was killed, and what came before the first frame that it heard. Lists count in the classes of
    `CALL_MS` and `BATCH_SIZES`, with one more above the last bound.
    """

    tenant: str
    service: str  # `(others)`, with that tenant, for those beyond the first 200 of the term
    members: int = always(int)  # members that take calls now
    calls: int = always(int)  # calls that are over, however they ended
    refused: int = always(int)  # calls answered with `busy`
    expired: int = always(int)  # calls answered with `expired`
    woken: int = always(int)  # times that a caller had its first member started
    errors: dict[str, int] = always(dict[str, int])  # calls answered with an error, by its code
    waited: list[int] = always(list[int])  # calls that have begun, by how long they had waited
    waited_ms: int = always(int)
    ran: list[int] = always(list[int])  # calls that have begun and are over, by how long they ran
    ran_ms: int = always(int)
    batches: list[int] = always(list[int])  # batches given to the service, by their calls
    batched: int = always(int)  # calls in these


class DemandRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What waits for one reason: replicas of one tenant that ask for the same GPUs."""

    tenant: str
    models: list[str] = always(list[str])  # models that would do, as asked for; empty: any
    shape: str = always(str)  # what one replica asks for, as 4xH100; "-" is no GPU
    together: int = always(int)  # replicas that start together at most, as of a gang
    replicas: int = always(int)  # replicas that wait
    gpus: int = always(int)  # GPUs that they ask for in all
    for_ms: int = always(int)  # for how long the first of them has waited
    reason: str = always(str)
    #: whether one more host may end the wait: like those of the fleet, or with the setting `growing`, of its shapes
    more_hosts_help: bool = always(bool)


class IdleHost(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A host with nothing to do."""

    worker: str
    pool: str = ""  # its label `pool`
    idle_ms: int = always(int)  # for how long this leader has seen it so
    draining: bool = always(bool)  # whether it is drained or cordoned: nothing begins there


class Demand(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What the fleet lacks, and which hosts have nothing to do; at most 200 of each."""

    rows: list[DemandRow] = always(list[DemandRow])  # those that more hosts help first, then those with most GPUs
    gpus: int = always(int)  # GPUs of the rows that more hosts help
    largest: str = ""  # the shape with most GPUs of these; "" without one
    others: int = always(int)  # replicas that wait and are in no row
    idle: list[IdleHost] = always(list[IdleHost])  # the longest idle first


class PromiseRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What became of promised starts in this leader's term: nine of ten are to be kept.

    Void are those whose job its tenant held, changed or cancelled. Not told are jobs that waited for a minute or more
    without a promise.
    """

    tenant: str
    kept: int = always(int)
    missed: int = always(int)
    void: int = always(int)
    not_told: int = always(int)


class PromisesAnswer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What became of promised starts, by tenant; a tenant gets its own row alone."""

    rows: list[PromiseRow] = always(list[PromiseRow])


class TenantsAnswer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The tenants with live jobs, leases or operators' orders, those with most GPUs first; and counts for monitors."""

    tenants: list[TenantRow] = always(list[TenantRow])  # at most 1,000
    of: int = always(int)  # how many there are
    waits: Waits = always(Waits)
    ended: dict[str, dict[str, int]] = always(dict[str, dict[str, int]])  # jobs that ended, by tenant and state
    waiting: dict[str, int] = always(dict[str, int])  # replicas that wait, by reason
    demand: Demand = always(Demand)  # what the fleet lacks, and which hosts are idle
    services: list[ServiceCalls] = always(list[ServiceCalls])  # by tenant and name; `(others)` is the last one
    counters: list[Counter] = []
    promises: list[PromiseRow] = []  # the first 200 tenants by name, and `(others)`


class Drift(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One difference that an audit found. Of a device there is also its uuid, its slot, and the process on it."""

    worker: str
    kind: str  # one of those that `moorage audit` explains
    member: str = always(str)  # the attempt or the device
    gpu: str = ""  # uuid of the device
    slot: int = -1  # position of the device in the worker's pool
    pid: int = 0  # process that uses the device
    name: str = ""  # name of that process
    memory_mib: int = 0  # memory in use on the device


class DeviceDrift(Drift, frozen=True, omit_defaults=True, kw_only=True):
    """A difference on a device, in which all fields are sent."""

    gpu: str = always(str)
    slot: int = always(int)
    pid: int = always(int)
    name: str = always(str)
    memory_mib: int = always(int)


class Audit(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What the ledger and the workers say of one another. `drift` is empty if they agree."""

    drift: list[Drift] = always(list[Drift])
    workers: int = always(int)  # number of workers that were compared
    members: int = always(int)  # number of attempts that were compared
    leases: int = always(int)  # number of GPUs that were compared
    without_lease: int = always(int)  # number of frozen attempts without a lease
    looked: int = always(int)  # number of workers that have checked their devices
    not_looked: list[str] = always(list[str])  # workers that have not
    left_out: int = always(int)  # number of further differences on devices


class ActRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An order of an operator that changed something, as the ledger has it; or a tenant's `exec` of a command in a
    running job, its read of the output of another person's job (`logs`), or of what that left (`rescue`)."""

    seq: int  # number of its record
    at_ms: int  # ledger time of the record
    by: str  # operator:NAME as the key proves, or operator without keys; tenant:NAME, tenant:NAME/PERSON
    verb: str  # as drain; release and resume undo hold and freeze
    said: str = ""  # the name that the caller gave
    tenant: str = ""
    job: str = ""
    worker: str = ""
    what: str = ""  # what it set, or the uuids of GPUs, as text
    why: str = ""  # the reason that the operator gave
    came: str = ""  # how it came: `subject`, `import ACCOUNT KEY`, `subject, no reply`, `open`; left out if unknown
    from_ms: int = 0  # of a drain with a window: when it begins
    leave_ms: int = 0  # when jobs have left
    until_ms: int = 0  # when the worker opens again by itself


class ActsAnswer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The newest orders of operators, the oldest of them first: at most 500; with `after`, the oldest behind that."""

    acts: list[ActRow] = always(list[ActRow])
    left_out: int = always(int)  # older ones that were asked for, too; with `after`, newer ones
    from_ms: int = always(int)  # of orders since then, as asked for or as far back as known; 0: of all
    until_ms: int = always(int)  # the ledger time now
    gaps: list[list[int]] = []  # times (from, until) of which no order is known
    next: str = ""  # where the last one stands: ask again with it as `after` for what came since


class PastAnswer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The newest events of the fleet, the oldest of them first: at most 1,000. `jobs` is in none of them."""

    events: list[FleetEvent] = always(list[FleetEvent])
    left_out: int = always(int)  # older ones that were asked for, too
    from_ms: int = always(int)  # of events since then, as asked for or as far back as known; 0: of all
    until_ms: int = always(int)  # the ledger time now
    gaps: list[list[int]] = []  # times (from, until) of which no event is known


class UsageRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A sum of GPU time. It has those of tenant, person, model and hour by which the question sums."""

    tenant: str | None = None
    person: str | None = None  # who of the tenant submitted the jobs; "" of those of whom nats-server proves nobody
    model: str | None = None
    hour_ms: int | None = None  # begin of the hour, ms since 1970
    gpu_s: float = always(float)  # GPU seconds that were granted; a sharer counts by its share
    memory_mib_s: float = always(float)  # memory of GPUs that was granted, MiB seconds
    used_gpu_s: float = always(float)  # GPU seconds at work, as workers measured them of attempts that are over
    used_memory_mib_s: float = always(float)  # memory of GPUs that was used, MiB seconds


class UsageAnswer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """GPU time over whole hours, including jobs that are not over."""

    rows: list[UsageRow] = always(list[UsageRow])
    from_ms: int = always(int)  # begin of the first hour
    until_ms: int = always(int)  # the ledger time now
    gaps: list[list[int]] = []  # times (from, until) of which nothing was counted
    restores: list[list[int]] = []  # those of the gaps that are restores of the ledger
    limit: Limit | None = None  # of one tenant that has limits, with what is spent of its budget
    next: list[str | int] = []  # the last key of this page, if there are more rows: ask again with it as `after`
