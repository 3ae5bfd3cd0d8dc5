"""Everything that is said or answered on a subject, apart from the request itself.

Frames are lenient (unknown fields of a newer minor version pass), requests are strict. `kind` tells frames of one
subject apart and `v` is the protocol's version; both are looked at before anything else. Structs marked as arrays
travel as JSON or msgpack arrays in the order of their fields, since a frame may hold hundreds of them.
Durations are seconds, times are ledger milliseconds unless the name ends in `_wall_s`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

VERSION: Final = 1


class Device(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One slot of a worker's pool. `index` is the device's own index (sparse allowed), `name` as the driver says it.

    Identity is (vendor, uuid). `numa` is the NUMA node or -1; `peers` the indices reached over NVLink.
    """

    index: int
    vendor: str
    name: str
    uuid: str
    memory_mib: int = 0
    pci: str = ""
    numa: int = -1
    compute: str = ""
    peers: list[int] = []
    mig: bool = False


#: how the detail of a `refused` fact begins where the worker's own rules forbid the job
NOT_PERMITTED: Final = "not-permitted: "
#: in rules by tenant, every tenant that is not named
OTHERS: Final = "*"


class Hello(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="hello"):
    """A worker's full description of itself: at start, at reconnect and at roll-call. Public, but for `drivers_for`.

    `modes` are the sharing modes on offer, `drivers` the ways it can run a job; `gpu_pool` is in slot order.
    """

    worker: str
    boot: str
    v: int = VERSION
    release: str = ""
    hostname: str = ""
    drivers: list[str] = []
    modes: list[str] = msgspec.field(default_factory=lambda: ["exclusive", "time-slice"])
    sharers_max: dict[str, int] = {}
    labels: dict[str, str] = {}
    cpu_milli: int = 0
    memory_mib: int = 0
    gpu_pool: list[Device] = []
    interface: str | None = None
    address: str = ""
    simulated: bool = False
    #: slots the scheduler may use, by position; None means all (a service may keep some for its own claims)
    lent_slots: list[int] | None = None
    #: how long and how much output and results it keeps: `output_s`, `output_bytes`, `result_s`, `result_bytes`
    keeps: dict[str, float] = {}
    #: drivers by tenant that it lets its jobs have, `*` for all others; empty: any. Told with a join, never in public
    drivers_for: dict[str, list[str]] = {}


class SlotLoad(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One slot's load, in the order of hello's `gpu_pool`. Holds no job and no tenant: the frame is public."""

    index: int
    leased: bool = False
    sharers: int = 0
    mode: str = ""
    util_percent: int = 0
    memory_used_mib: int = 0
    temperature_c: int | None = None
    #: ok, thermal, ecc, xid, remap, reset-needed, missing, unresponsive, probation, quarantined
    health: str = "ok"
    foreign: str = ""  # who holds the device from outside, as "pid 8812 python (user bob)", else empty
    detail: str = ""  # what made it so, as "Xid 79: the GPU has fallen off the bus"


class Load(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="load"):
    """A worker's periodic report: every 2 s, and at most 5 a second when leases change. Public.

    `n` counts up in one boot, `generation` grows with every change of the pool: an older one is telemetry only.
    """

    worker: str
    boot: str
    n: int
    generation: int
    v: int = VERSION
    pending_claimers: int = 0
    gpu_pool: list[SlotLoad] = []
    simulated: bool = False


class FleetFrame(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="fleet"):
    """The leader's digest of the fleet for observers: one frame instead of one a worker. Names no job and no tenant."""

    epoch: int
    ledger: int
    v: int = VERSION
    workers: list[dict[str, Any]] = []
    queued: int = 0
    running: int = 0


# --------------------------------------------------------------------------------------- worker <-> leader


class Held(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A member as its worker holds it; `phase` is claimed, running, ending or exited (device not yet seen free)."""

    tenant: str
    job: str
    replica: int
    attempt: int
    fence: int
    phase: str


FactKind = Literal["claimed", "refused", "withdrawn", "not-held", "started", "exited", "freed", "quarantined"]


class Fact(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What happened to a member at its worker. Only a fact frees a GPU.

    `code` is the exit status for `exited` (negative: minus the signal), else 0. `detail` is one short word or line:
    for `exited` the reason (exit, timeout, end, fence, start-failed, lost), for `refused` why, for `claimed` of rank
    0 of a gang `address:port`, for `quarantined` the slots as `0,3`.
    """

    kind: FactKind
    tenant: str
    job: str
    replica: int
    attempt: int
    fence: int
    code: int = 0
    detail: str = ""


class Unwell(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A device that must not be given out, as its worker judges it; `slot` is a position in hello's `gpu_pool`.

    `kind` is a word of `SlotLoad.health`, `detail` one line. `ends`: what runs on it is asked to leave it as well.
    """

    slot: int
    kind: str
    detail: str = ""
    ends: bool = False


class Join(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="join"):
    """Asked once clearing is proven: a new lease session for this boot.

    `n` comes from the journal and only grows; `facts` are all unanswered ones under their old names; `holding` are
    the members that live on here and that the new session adopts. What is not listed is over. `reign` is the highest
    heard of the ledger `ledger`: a leader whose ledger ends below it has an older backup of it.
    """

    machine: str
    boot: str
    n: int
    hello: Hello
    v: int = VERSION
    facts: list[Fact] = []
    holding: list[Held] = []
    reign: int = 0
    ledger: str = ""


class Joined(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="joined"):
    """The new session and its numbers. `session` is a capability: never in a public frame.

    The worker fences itself `lease_s` after it sent the last renewal that was answered; `grace_s` bounds the ending.
    `formerly` is the id of the ledger that `ledger` was restored from, on an operator's word.
    """

    session: str
    n: int
    reign: int
    renew_s: float
    lease_s: float
    grace_s: float
    ledger: str
    v: int = VERSION
    formerly: str = ""


class Renew(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="renew"):
    """A renewal of the lease session, with what the worker holds for the scheduler.

    `n` counts up in the session. `no` is the number of the last fact frame that was answered. `busy` lists slot
    positions that local claimers hold; `waiting` says that a local claimer waits, so that the worker is full.
    `unwell` are the devices that are in no state to be given out, whole each time; `well_n` is the newest word of an
    operator on devices that the worker has taken (see `Wanted`). `reign` is the highest that it heard.
    """

    session: str
    n: int
    no: int = 0
    generation: int = 0
    held: list[Held] = []
    busy: list[int] = []
    waiting: bool = False
    v: int = VERSION
    unwell: list[Unwell] = []
    well_n: int = 0
    reign: int = 0


class Renewed(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="renewed"):
    """Leaves only after a ledger acknowledgement later than the renewal's arrival: so it proves the reign.

    `draining`: an operator drains the worker, which asks back what it lends to processes of its host.
    """

    n: int
    reign: int
    v: int = VERSION
    draining: bool = False


class FactFrame(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="facts"):
    """One numbered frame of facts, one in flight; sent again with the same number until answered."""

    session: str
    no: int
    facts: list[Fact]
    v: int = VERSION


class FactAck(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="recorded"):
    """The frames up to `no` are in the ledger."""

    no: int
    reign: int
    v: int = VERSION


class Goodbye(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="goodbye"):
    """The worker leaves for good, everything it held is over: its id is free at once. Sent on `.join`."""

    session: str
    v: int = VERSION


class Place(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The scheduler's proposal: claim these slots (positions in hello's `gpu_pool`) or refuse at once.

    `mode` is exclusive, mps, time-slice or none. `hold` means claim and wait for START (a gang). `body` is the
    request as it came, JSON or msgpack. `ends_in_s` is when the job's deadline comes, counted from this frame; the
    leader ends it then, and the worker tells it before where the request names a checkpoint signal.
    """

    tenant: str
    job: str
    replica: int
    attempt: int
    fence: int
    slots: list[int]
    mode: str
    hold: bool
    body: bytes
    traceparent: str = ""
    ends_in_s: float | None = None


class Start(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A gang's member may run now: every rank is held and STARTED is in the ledger. All ranks get the same address."""

    tenant: str
    job: str
    replica: int
    attempt: int
    fence: int
    master_addr: str
    master_port: int
    world_size: int


class End(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """End or withdraw a member, and remember that it is over: a later placement of the same fence is refused.

    Not held: answered `withdrawn`. Held, not started: released, `withdrawn`. Running: ended within `grace_s`
    (None: the job's own), then `exited` and `freed`. With `notice_s` a running one that has a checkpoint signal gets
    that first, and is asked to end so many seconds later.
    """

    tenant: str
    job: str
    replica: int
    attempt: int
    fence: int
    why: str
    grace_s: float | None = None
    notice_s: float = 0.0


class Wanted(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="wanted"):
    """What the ledger wants of a worker and its renewal does not yet show. Idempotent by member, sent until done.

    A frame of another session, or of a lower reign than one heard, is dropped and counted. `well` are slots that an
    operator says are well, whatever was seen of them before; `well_n` numbers that word, and the renewal repeats it.
    """

    worker: str
    session: str
    reign: int
    v: int = VERSION
    place: list[Place] = []
    start: list[Start] = []
    end: list[End] = []
    well: list[int] = []
    well_n: int = 0


class RollCall(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="roll-call"):
    """A new leader asks every worker for its hello and a renewal, now."""

    reign: int
    v: int = VERSION


class Standing(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="standing"):
    """A scheduler that leads or stands by, each two seconds: its release, the newest feature level that it can write
    and fold, and the ledger record that it has folded. Public."""

    scheduler: str
    release: str
    level: int
    ledger: int
    leads: bool = False
    v: int = VERSION


class Look(msgspec.Struct, frozen=True, tag_field="kind", tag="look"):
    """An audit asks every worker to look at its devices now. `ask` is a random number that the answer repeats."""

    ask: int
    reign: int
    v: int = VERSION


class Finding(msgspec.Struct, frozen=True, array_like=True):
    """Something on a device that no lease explains; `slot` is a position in hello's `gpu_pool`.

    `kind` is nvml-foreign (a process on a device that nobody leases: `pid`, short `name`, `memory_mib` where the driver
    tells), nvml-memory (`memory_mib` more than its idle baseline on such a device, and no process of it is seen) or
    nvml-missing (a leased device does not answer).
    """

    kind: str
    slot: int
    uuid: str
    pid: int = 0
    name: str = ""
    memory_mib: int = 0


class Looked(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="looked"):
    """What a worker found on its devices, at most 256 findings; `more` is how many were left out."""

    worker: str
    ask: int
    v: int = VERSION
    findings: list[Finding] = []
    more: int = 0


# ------------------------------------------------------------------------------------------ leader -> callers


class Accepted(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="accepted"):
    """The request is in the ledger, at sequence `ledger`. `duplicate`: it was there before, with the same content."""

    job: str
    ledger: int
    state: str
    duplicate: bool = False
    warnings: list[str] = []
    v: int = VERSION
    #: of a job that has to wait, as `explain` says it; left out where the leader has more urgent things to do
    waiting: dict[str, Any] | None = None


class Change(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One transition of one replica. `rev` is the job's own revision number: no gap, no double.

    `by` is whose doing it was: `tenant:<tenant>` or `operator` as the subject proves it, `worker` for what the one
    in `worker` reported, nothing for the scheduler's own (a placement, a deadline, a loss). `said` is the name that
    the tenant or operator gave itself, at most 64 characters; nobody has proven it.
    """

    rev: int
    time_ms: int
    replica: int
    attempt: int
    state: str
    worker: str = ""
    gpus: list[str] = []
    code: int | None = None
    why: str = ""
    fence: int = 0
    by: str = ""
    said: str = ""


class Event(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="event"):
    """What a ledger record changed for one job: its state now and the transitions since the event before."""

    tenant: str
    job: str
    rev: int
    state: str
    ledger: int
    changes: list[Change] = []
    why: str = ""
    simulated: bool = False
    v: int = VERSION
    #: with no changes: why it still waits, as `explain` says it, where that is not as it was
    waiting: dict[str, Any] | None = None


class Events(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="events"):
    """One frame a tick with every change of a tenant."""

    tenant: str
    ledger: int
    jobs: list[Event]
    v: int = VERSION


class Moved(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A transition as the history packs it: `state` is a position in the frame's `states`, `worker` a key of its
    `workers` or -1, `slots` a bit mask of that worker's GPUs, `by` as `Change` has it, then a blank and what was said.

    A `state` below 0 counts from the end of `states`: -1 is the last one (an operator's act on the job).
    """

    rev: int
    time_ms: int
    replica: int
    attempt: int
    state: int
    worker: int
    slots: int
    code: int
    why: str
    fence: int
    by: str = ""


class Story(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A job's transitions in a frame of the history. Its first, ACCEPTED, is revision 1 at `accepted_ms`.

    `over`: the job is, and nothing will follow; else this is a part of a long story. `parts` are the earlier ones:
    stream sequence, first and last revision. The request is left out of parts, where it is long, and in a flood.
    """

    job: str
    rev: int
    state: str
    over: bool
    accepted_ms: int
    ledger: int
    parts: list[tuple[int, int, int]]
    moves: list[Moved]
    request: Any = None


class HistoryWorker(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A worker that a history frame names; `gpus` are the uuids of the slots that were used, by position."""

    worker: str
    gpus: dict[int, str] = {}
    simulated: bool = False


class HistoryFrame(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="history"):
    """Stories of a tenant's jobs that are over, and parts of long ones: at most four frames a second.

    A job may stand in several frames, since a new leader writes again what it cannot know to be written: (job, rev)
    tells doubles apart.
    """

    tenant: str
    states: list[str]
    workers: dict[int, HistoryWorker]
    jobs: list[Story]
    v: int = VERSION


class Answer(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="answer"):
    """What a reading verb answers: `data` as the verb's page says, as of ledger record `ledger`."""

    verb: str
    ledger: int
    data: Any
    v: int = VERSION


class Output(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="log"):
    """A piece of a replica's output, on `moorage.log.<tenant>.<job>.<replica>`. Said, so it may be lost.

    `offset` counts bytes of this stream (out or err) in this attempt, `next` is the offset behind this piece (0 where
    an older worker does not say it); `text` is decoded with replacement, and where that changes it `data` has the bytes
    (base64 in JSON).
    """

    attempt: int
    stream: Literal["out", "err"]
    offset: int
    text: str
    v: int = VERSION
    end: bool = False
    next: int = 0
    data: bytes | None = None


# ------------------------------------------------------------------------------------------ output of the past

#: bytes of output in one page
LOG_PAGE_BYTES_MAX: Final = 256 * 1024
LOG_PAGE_BYTES_DEFAULT: Final = 64 * 1024
LOG_OFFSET_MAX: Final = 1 << 50

_Count = Annotated[int, msgspec.Meta(ge=0, le=LOG_OFFSET_MAX)]


class LogsAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `moorage.api.<tenant>.logs` is asked: a page of the output that a job's worker keeps.

    `attempt` null is the replica's newest. `offset` counts bytes of the stream from its beginning, a negative one from
    its end. `limit` bounds the page, in bytes.
    """

    job: str
    replica: Annotated[int, msgspec.Meta(ge=0, le=1023)] = 0
    attempt: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)] | None = None
    stream: Literal["out", "err"] = "out"
    offset: Annotated[int, msgspec.Meta(ge=-LOG_OFFSET_MAX, le=LOG_OFFSET_MAX)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=LOG_PAGE_BYTES_MAX)] = LOG_PAGE_BYTES_DEFAULT


class ReadLog(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="read-log"):
    """The leader asks a worker for a page of a member's output. The session shows that it is the leader who asks.

    `ended_ms` is the ledger time of the attempt's end, 0 while it runs.
    """

    session: str
    tenant: str
    job: str
    replica: Annotated[int, msgspec.Meta(ge=0, le=1023)]
    attempt: _Count
    fence: _Count
    driver: str
    stream: Literal["out", "err"]
    offset: Annotated[int, msgspec.Meta(ge=-LOG_OFFSET_MAX, le=LOG_OFFSET_MAX)]
    limit: Annotated[int, msgspec.Meta(ge=1, le=LOG_PAGE_BYTES_MAX)]
    ended_ms: int = 0
    v: int = VERSION


class LogPage(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="log-page"):
    """A page of output: the bytes from `offset` up to `next`, which is where the next page begins.

    They are in `text` where they are UTF-8, else as they are in `data` (base64 in JSON). `size` is what is kept of the
    stream by now, in bytes; `truncated` says that its worker dropped what came behind that. `over`: the stream has
    ended, and this page goes up to its end. `attempt` 0: the replica has not been placed yet.
    """

    attempt: _Count
    stream: Literal["out", "err"]
    offset: _Count = 0
    next: _Count = 0
    size: _Count = 0
    text: str = ""
    data: bytes | None = None
    over: bool = False
    truncated: bool = False
    replica: int = 0
    worker: str = ""
    v: int = VERSION
