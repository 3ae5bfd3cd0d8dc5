"""The ledger state: the result of folding all records, and nothing else.

Hello and load frames are not in it (see `fleet.py`): they make a soft view, which is rebuilt after a takeover. Fields
that are marked soft belong to the leader's policy; they are not in the digest and not in snapshots.

The digest of the state is the sum of the hashes of all rows (jobs, replicas, members, workers, tenants, usage). Each
row keeps the hash that is in the sum in its field `row`, so that only changed rows have to be hashed again.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from moorage.scheduler.core.finished import FinishedTable
from moorage.scheduler.core.records import GangPhase
from moorage.scheduler.core.resizes import Resize
from moorage.scheduler.core.usage_table import UsageTable
from moorage.schemas.job import STATE_NUMBER, STATES, TERMINAL, TRANSITIONS, derive_state

QUEUED: Final = STATE_NUMBER["QUEUED"]
PLACED: Final = STATE_NUMBER["PLACED"]
CLAIMED: Final = STATE_NUMBER["CLAIMED"]
RUNNING: Final = STATE_NUMBER["RUNNING"]
EXITED: Final = STATE_NUMBER["EXITED"]
ENDING: Final = STATE_NUMBER["ENDING"]
CANCELLING: Final = STATE_NUMBER["CANCELLING"]
LOST_KEPT: Final = STATE_NUMBER["LOST_KEPT"]
SUCCEEDED: Final = STATE_NUMBER["SUCCEEDED"]
FAILED: Final = STATE_NUMBER["FAILED"]
TIMED_OUT: Final = STATE_NUMBER["TIMED_OUT"]
CANCELLED: Final = STATE_NUMBER["CANCELLED"]
EXPIRED: Final = STATE_NUMBER["EXPIRED"]
REJECTED: Final = STATE_NUMBER["REJECTED"]
FROZEN: Final = STATE_NUMBER["FROZEN"]

IS_TERMINAL: Final = tuple(name in TERMINAL for name in STATES)
LEGAL: Final = tuple(frozenset(STATE_NUMBER[to] for to in TRANSITIONS[name]) for name in STATES)

#: states in which a member on a worker has not ended, and so has no exit code
UNENDED: Final = frozenset((PLACED, CLAIMED, RUNNING, FROZEN, ENDING, CANCELLING, LOST_KEPT))
#: in which an attempt of which START is the last step may end
AFTER_RUNNING: Final = LEGAL[RUNNING] - {FROZEN}
#: between which a step FREEZE leads, both ways
FREEZES: Final = frozenset((RUNNING, FROZEN))

#: entries of a job's story that are no state of a replica. These numbers are in ledgers and histories: a new one gets
#: the next lower number
HELD: Final = -1
RELEASED: Final = -2
PRIORITY: Final = -3
FREEZE: Final = -4
RESUME: Final = -5
NOT_FROZEN: Final = -6
RESIZED: Final = -7
#: the words for the numbers in a story; negative ones count from the end
STORY_WORDS: Final = (*STATES, "RESIZED", "NOT_FROZEN", "RESUME", "FREEZE", "PRIORITY", "RELEASED", "HELD")

#: so many of a job's last transitions stay in memory once the history holds the older ones
STORY_KEPT: Final = 64
#: a story with more transitions than this (and so many more for each replica) is written to the history in parts,
#: before the job is over
STORY_PART: Final = 96
STORY_PART_REPLICA: Final = 4
#: while no history can be written, the oldest transitions beyond this (and so many more for each replica) are dropped
STORY_MAX: Final = 128
STORY_MAX_REPLICA: Final = 8
#: one job avoids devices of at most so many workers; of more, some are forgotten
AVOID_MAX: Final = 16
#: the inflation of usage at the moment from which it counts, see `fairshare`
INFLATION_ONE: Final = 1 << 32
#: parts of one job's story that can be found again; beyond it the oldest are forgotten
PARTS_MAX: Final = 1024

# a member's phase
AT_PLACED: Final = 0
AT_CLAIMED: Final = 1
AT_RUNNING: Final = 2
AT_EXITED: Final = 3  # the attempt is over, the device not yet seen free

# the columns of a transition
REV: Final = 0
AT_MS: Final = 1  # ledger time
REPLICA: Final = 2  # its index; below 0: the job
ATTEMPT: Final = 3
STATE: Final = 4  # or one of the negative numbers above
WORKER: Final = 5  # its number; below 0: none
SLOTS: Final = 6  # a mask
CODE: Final = 7  # the exit code
WHY: Final = 8
FENCE: Final = 9
BY: Final = 10  # its actor as `records.actor` writes it; empty for the scheduler
RESULT: Final = 11  # which message has the result, 0 for none; only in the rows of attempts of which that is known
#: one transition, a plain tuple as there are millions
Transition = tuple[int, int, int, int, int, int, int, int, str, int, str, *tuple[int, ...]]
MemberKey = tuple[str, str, int, int]
#: what is wrong with a device: kind, detail, since which ledger ms, 1 if members on it have to leave
Ailment = tuple[str, str, int, int]


class StandingOrder(NamedTuple):
    """Who gave an operator's order that is in force, why, and since which ledger millisecond."""

    actor: str
    why: str
    since_ms: int


class Window(NamedTuple):
    """A worker's maintenance, in ledger milliseconds.

    Nothing is placed on it from `from_ms` on, jobs have to leave by `leave_ms`, and at `until_ms` it opens again (0:
    only by an operator's order).
    """

    from_ms: int
    leave_ms: int
    until_ms: int
    by: str
    why: str

    def digest_row(self) -> int:
        return hash((self.from_ms, self.leave_ms, self.until_ms, zlib.crc32(f"{self.by} {self.why}".encode())))


#: towards the bounds of memory a job counts once more for each so many replicas, and for each so many bytes of request
REPLICAS_APIECE: Final = 16
BYTES_APIECE: Final = 8 * 1024
#: the fraction of the bound of memory that is kept for small tenants, see `State.room`
LAST_PART: Final = 10


def extra_of(replicas: int, size: int) -> int:
    """What a job counts towards the bounds of memory in addition to one, by its replicas and bytes of request."""
    return replicas // REPLICAS_APIECE + size // BYTES_APIECE


class Job:
    """An accepted request; the states are those of its replicas. Made by `new_job`."""

    __slots__ = (
        "accepted_ms",
        "after",
        "avoid",
        "body",
        "count",
        "deadline_ms",
        "derived",
        "extra",
        "gang",
        "held",
        "hold",
        "kept",
        "key",
        "ledger",
        "live",
        "master",
        "name",
        "num",
        "over",
        "own_subject",
        "parts",
        "preempts",
        "priority",
        "replicas",
        "resizes",
        "rev",
        "row",
        "shape",
        "started",
        "story",
        "tenant",
        "told",
        "traceparent",
        "used",
    )

    def __init__(
        self, num: int, tenant: str, name: str, body: bytes, traceparent: str, accepted_ms: int, ledger: int, live: int
    ) -> None:
        self.num = num
        self.tenant = tenant
        self.name = name
        self.body = body
        self.traceparent = traceparent
        self.accepted_ms = accepted_ms
        self.ledger = ledger  # the record that accepted it
        self.live = live  # replicas in no terminal state
        self.replicas: tuple[Replica, ...] = ()
        self.rev = 1
        self.held = 0  # members that hold devices, also those whose attempt is over
        self.over = False  # nothing can happen to it any more
        self.started = False  # some replica has run
        self.gang = int(GangPhase.NONE)
        self.after = 0  # the state of a gang's replicas once the attempt that is ending is over
        self.count = 0  # which count grows then (see `records.Count`)
        self.master = ""  # address:port of rank 0
        #: devices that failed under it: worker number, slot mask
        self.avoid: tuple[tuple[int, int], ...] = ()
        self.hold: StandingOrder | None = None  # while an operator holds it, none of it is placed
        #: until it is placed: the workers that are held for it, and the jobs that were ended for it
        self.preempts: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self.priority = -1  # set by an operator; below 0 the request's own counts
        self.resizes: tuple[Resize, ...] = ()  # by operators, the oldest first
        #: of its GPUs, as workers report it: milliseconds of one at work, and MiB seconds of memory
        self.used: tuple[int, int] | None = None
        self.story: list[Transition] = []
        #: earlier parts of the story: history sequence, first and last revision
        self.parts: tuple[tuple[int, int, int], ...] = ()
        self.row = 0
        self.kept = 0  # soft: the sequence at which the history holds its whole story; 0 until that is acknowledged
        self.shape: Any = None  # soft: the interned shape of what is asked
        self.deadline_ms: int | None = None  # soft: the ledger ms of its deadline
        self.key = b""  # soft: `finished.job_key`, where it is known already
        self.told = 0  # soft: revision up to which events were sent
        self.own_subject: bool | None = None  # soft: whether its events also go to its own subject
        self.extra = 0  # soft: `extra_of` it
        self.derived: tuple[int, str] = (0, "")  # soft: a revision, and the job's state derived from its replicas then

    def digest_row(self) -> int:
        row = hash((self.num, self.rev, self.gang, self.after, self.started, zlib.crc32(self.name.encode())))
        if self.hold is not None or self.priority >= 0:  # as ever without: old ledgers keep their digests
            row = hash((row, _order_row(self.hold), self.priority))
        if self.preempts is not None:
            row = hash((row, self.preempts))
        if self.used is not None:
            row = hash((row, self.used))
        if self.resizes:
            row = hash((row, self.resizes))
        return hash((row, self.avoid)) if self.avoid else row

    @property
    def part(self) -> tuple[int, int] | None:
        """Return the memory in MiB and the percent of compute that an operator gave it of each device; None: none."""
        return self.resizes[-1][2:] if self.resizes else None

    @property
    def state(self) -> str:
        if len(self.replicas) == 1:
            return STATES[self.replicas[0].state]
        rev, state = self.derived
        if rev != self.rev:
            state = derive_state({STATES[replica.state] for replica in self.replicas})
            self.derived = self.rev, state
        return state


def new_job(num: int, tenant: str, name: str, body: bytes, replicas: int, traceparent: str, ms: int, seq: int) -> Job:
    """A job as the record `seq` of ledger time `ms` accepts it, all its replicas queued."""
    job = Job(num, tenant, name, body, traceparent, ms, seq, replicas)
    if replicas >= REPLICAS_APIECE or len(body) >= BYTES_APIECE:
        job.extra = extra_of(replicas, len(body))
    job.replicas = (Replica(job, 0),) if replicas == 1 else tuple(Replica(job, index) for index in range(replicas))
    return job


class Replica:
    """One of a job's copies: its state, its attempt, and how many retries and losses it has used."""

    __slots__ = (
        "after",
        "attempt",
        "fence",
        "index",
        "job",
        "losses",
        "member",
        "not_before",
        "refusals",
        "retries",
        "row",
        "state",
    )

    def __init__(self, job: Job, index: int) -> None:
        self.job = job
        self.index = index
        self.state = QUEUED
        self.attempt = 0
        self.fence = 0
        self.retries = 0
        self.losses = 0
        self.refusals = 0
        self.not_before = 0  # ledger ms: backoff after a failure, loss or refusal
        self.after = 0  # what ENDING or CANCELLING becomes
        self.member: Member | None = None
        self.row = 0

    def digest_row(self) -> int:
        return hash(
            (
                self.job.num,
                self.index,
                self.state,
                self.attempt,
                self.fence,
                self.retries,
                self.losses,
                self.refusals,
                self.not_before,
                self.after,
            )
        )


class Member:
    """An attempt on a worker. It holds devices from its placement until they are seen free.

    Made by `new_member`.
    """

    __slots__ = (
        "attempt",
        "fence",
        "freeze",
        "key",
        "mask",
        "missed",
        "mode",
        "notice_s",
        "phase",
        "rate_milli",
        "replica",
        "row",
        "runs_as",
        "wakes",
        "worker",
    )

    def __init__(
        self, replica: Replica, worker: Worker, attempt: int, fence: int, mask: int, mode: int, key: MemberKey
    ) -> None:
        self.replica = replica
        self.worker = worker
        self.attempt = attempt
        self.fence = fence
        self.mask = mask
        self.mode = mode
        self.key = key
        self.phase = AT_PLACED
        self.rate_milli = 0  # of its tenant's fair share; 0: each of its devices is a whole one
        self.notice_s = 0  # asked to end with such a notice
        self.freeze = self.wakes = False  # it is to be frozen; its first use resumes it, as it was unused
        self.row = 0
        self.missed = 0  # soft: renewals in a row that did not list it
        self.runs_as: Any = None  # soft: what `backfill` goes by, to say when it ends

    def digest_row(self) -> int:
        row = hash(
            (self.replica.job.num, self.replica.index, self.fence, self.worker.num, self.mask, self.mode, self.phase)
        )
        row = hash((row, self.rate_milli)) if self.rate_milli else row
        row = hash((row, self.notice_s)) if self.notice_s else row
        return hash((row, -1, 1) if self.wakes else (row, -1)) if self.freeze else row


def new_member(replica: Replica, worker: Worker, mask: int, mode: int, fence: int) -> Member:
    """A replica's current attempt, on a worker's slots."""
    job = replica.job
    return Member(replica, worker, replica.attempt, fence, mask, mode, (job.tenant, job.name, replica.index, fence))


def started_ms(job: Job, member: Member) -> int:
    """Ledger time at which a member began to run; that of the job's acceptance if it is no longer in memory."""
    for row in reversed(job.story):
        if row[STATE] == RUNNING and row[REPLICA] == member.replica.index and row[FENCE] == member.fence:
            return row[AT_MS]
    return job.accepted_ms


class Worker:
    """A worker as the ledger knows it: its lease session, the inventory of that session, and what it holds."""

    __slots__ = (
        "boot",
        "by",
        "flag",
        "hello",
        "id",
        "joined_ms",
        "left_ms",
        "left_why",
        "machine",
        "members",
        "n",
        "no",
        "num",
        "quarantined",
        "row",
        "session",
        "unwell",
        "unwell_mask",
        "well",
        "well_n",
        "window",
    )

    def __init__(self, num: int, worker_id: str, machine: str) -> None:
        self.num = num
        self.id = worker_id
        self.machine = machine
        self.boot = ""
        self.n = 0  # number of the last join
        self.no = 0  # fact frames folded through, in this session
        self.session = ""  # empty: no session, nothing may be placed here
        self.joined_ms = 0
        self.left_ms = 0  # soft: when its last session ended; 0 where that is not known
        self.left_why = ""  # soft, with it: why
        self.hello: dict[str, Any] = {}
        self.flag = "open"
        self.by = ""
        self.quarantined = 0  # slot mask: a device that did not come back free
        self.unwell: dict[int, Ailment] = {}  # by slot, as the worker judges it
        self.unwell_mask = 0
        self.well = 0  # slots that an operator says are well, until the worker has taken it
        self.well_n = 0  # the number of that order: its record's sequence
        self.window: Window | None = None  # maintenance that is to come, or on
        self.members: dict[MemberKey, Member] = {}
        self.row = 0

    @property
    def in_json(self) -> bool:
        """Whether it joined in JSON (else msgpack): every frame to it is in that form for the whole session."""
        return "json" in self.hello

    @property
    def lost_ms(self) -> int:
        """The silence after which it is lost, as it was told with its join; 0 if the ledger does not say."""
        return int(self.hello.get("lost_ms", 0))

    def digest_row(self) -> int:
        session = int(self.session[:14] or "0", 16)
        row = hash((self.num, self.n, self.no, session, zlib.crc32(self.flag.encode()), self.quarantined))
        if self.unwell or self.well or self.window is not None:  # as ever without: old ledgers keep their digests
            ill = zlib.crc32(repr(sorted(self.unwell.items())).encode())
            row = hash((row, ill, self.well, self.well_n, self.window.digest_row() if self.window else 0))
        return row


def every_slot(worker: Worker) -> int:
    """The slots that a job avoids which this worker refused: all; where it has no devices the first, as 0 lifts it."""
    return (1 << max(1, len(worker.hello.get("gpu_pool", ())))) - 1


class Tenant:
    """What the ledger knows of a tenant: its jobs by name, how far its queue was read, its tombstones."""

    __slots__ = (
        "cancel_cursor",
        "extra",
        "gpus",
        "gpus_max",
        "guaranteed",
        "hold",
        "jobs",
        "jobs_max",
        "limit",
        "live",
        "name",
        "rate_milli",
        "row",
        "share",
        "submit_cursor",
        "tombstones",
        "usage_base",
        "weight",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.jobs: dict[str, Job] = {}
        self.submit_cursor = 0
        self.cancel_cursor = 0
        self.tombstones: dict[str, int] = {}  # job -> queue sequence of its cancel; from the endpoint minus its time
        self.live = 0  # jobs that are not over
        self.extra = 0  # soft: the sum of their `extra`
        self.gpus = 0  # devices that its members hold; a shared one counts for each sharer
        self.gpus_max = 0  # 0: no limit
        self.jobs_max = 0
        self.limit: StandingOrder | None = None  # who set the two
        self.hold: StandingOrder | None = None  # while an operator holds it, none of its queue is placed
        self.weight = 0  # of its fair share; 0: none set
        self.guaranteed = 0  # GPUs that are its own when it wants them; what it has beyond them is borrowed
        self.share: StandingOrder | None = None  # who set the two
        self.rate_milli = 0  # what its members use now; 0 while no usage is counted
        self.usage_base = 0  # its usage without what the rate adds as time goes by, see `fairshare`
        self.row = 0

    @property
    def ordered(self) -> bool:
        """Whether an operator has set anything for this tenant."""
        return self.hold is not None or self.limit is not None or self.share is not None

    def digest_row(self) -> int:
        name = zlib.crc32(self.name.encode())
        row = hash((name, self.submit_cursor, self.cancel_cursor, len(self.tombstones)))
        if self.ordered:
            row = hash((row, _order_row(self.hold), _order_row(self.limit), self.gpus_max, self.jobs_max))
        if self.share is not None or self.usage_base or self.rate_milli:
            row = hash((row, _order_row(self.share), self.weight, self.guaranteed, self.rate_milli, self.usage_base))
        return row


def _order_row(order: StandingOrder | None) -> int:
    return 0 if order is None else hash((zlib.crc32(f"{order.actor} {order.why}".encode()), order.since_ms))


class State:
    """Everything that the ledger says, at sequence `seq`."""

    def __init__(self) -> None:
        self.ledger_id = ""
        self.former_id = ""  # of the ledger that this one was restored from, and of those before it, by blanks
        self.restored_ms = -1  # ledger time of that; below 0 for none
        self.restored_epoch = 0
        self.behind = ""  # why nobody may lead this ledger: it was found to be an older backup
        self.level = 1  # feature level: the format of the records that a leader writes
        self.seq = 0
        self.epoch = 0
        self.epoch_seq = 0  # sequence of the newest epoch record, which fences every append
        self.leader = ""
        self.time_ms = 0
        self.next_num = 1
        self.digest = 0
        self.transitions = 0
        self.snapshot: tuple[str, int, str] | None = None  # name, sequence, digest
        self.snapshot_before: tuple[str, int, str] | None = None
        self.jobs: dict[int, Job] = {}  # live ones, and ended ones that are not compacted yet
        self.ended: deque[int] = deque()  # numbers, in the order in which they ended
        self.extra = 0  # soft: the sum of `extra` of all `jobs`
        self.extra_ended = 0  # soft: of those in `ended`
        self.finished = FinishedTable()
        self.usage = UsageTable()  # of the jobs that have left memory
        self.tenants: dict[str, Tenant] = {}
        self.workers: dict[str, Worker] = {}
        self.worker_by_num: list[Worker] = []
        self.preempting: dict[int, Job] = {}  # by number: those with `preempts`
        self.windows: dict[int, Worker] = {}  # by number: workers with a maintenance window
        self.reprioritized = 0  # soft: grows with every priority that an operator has given
        self.half_life_ms = 0  # of usage; 0: none is counted, nobody has a share
        self.counts_from_ms = 0
        self.inflation = INFLATION_ONE  # what a moment's usage counts now, see `fairshare`

    def tenant(self, name: str) -> Tenant:
        row = self.tenants.get(name)
        if row is None:
            row = self.tenants[name] = Tenant(name)
        return row

    def follows(self, ledger_id: str) -> bool:
        """Whether an operator's restores have led from that ledger to this one."""
        return ledger_id in self.former_id.split()

    def former_of(self, ledger_id: str) -> str:
        """The ledger that this one is said to come from to who knows one: that one, if it does, else the last."""
        return ledger_id if self.follows(ledger_id) else self.former_id.partition(" ")[0]

    def job(self, tenant: str, name: str) -> Job | None:
        row = self.tenants.get(tenant)
        return row.jobs.get(name) if row is not None else None

    @property
    def live(self) -> int:
        """Jobs that are not over."""
        return len(self.jobs) - len(self.ended)

    @property
    def load(self) -> int:
        """What the live jobs count towards the bound of memory: each one, large ones more."""
        return self.live + self.extra - self.extra_ended

    def room(self, most: int, tenant: str, new: int = 0, new_of_tenant: int = 0) -> int:
        """How much more of a tenant fits under the bound `most`, beside new jobs that count `new`; 0 or below for none.

        The last tenth is for tenants that have less than a tenth, so that no tenant can keep the others out.
        """
        row, last, free = self.tenants.get(tenant), most // LAST_PART, most - self.load - new
        held = new_of_tenant + (row.live + row.extra if row is not None else 0)
        return max(free - last, min(free, last - held))

    def members(self) -> Iterator[Member]:
        for worker in self.worker_by_num:
            yield from worker.members.values()

    def full_digest(self) -> int:
        """The digest computed from all rows anew; the incremental one must be equal."""
        total = self.finished.row + self.usage.full_row()
        for job in self.jobs.values():
            total += job.digest_row()
            for replica in job.replicas:
                total += replica.digest_row()
        for member in self.members():
            total += member.digest_row()
        for worker in self.worker_by_num:
            total += worker.digest_row()
        for tenant in self.tenants.values():
            total += tenant.digest_row()
        return total & 0xFFFFFFFFFFFFFFFF
