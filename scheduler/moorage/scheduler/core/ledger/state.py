"""The ledger state: the result of folding all records.

Load frames are not part of it (see `fleet.py`), and of a worker's hellos only that of its join. Fields marked *soft*
belong to this process alone; they are neither in the digest nor in snapshots. The digest is the sum of the hashes of
all rows (jobs, replicas, attempts, workers, tenants, schedules, finished jobs). Each row keeps its hash in `row`, so
that only changed rows are hashed again.
"""

from __future__ import annotations

from collections import Counter as Counting
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple

import msgspec
from msgspec.structs import astuple

from moorage.scheduler.core.ledger import bits
from moorage.scheduler.core.ledger.ceilings import CEILINGS, Ceilings
from moorage.scheduler.core.ledger.digests import number_of
from moorage.scheduler.core.ledger.finished import FinishedTable
from moorage.scheduler.core.ledger.inventory import NO_INVENTORY, Inventory, inventory_in
from moorage.scheduler.core.ledger.lasting import Lasting
from moorage.scheduler.core.ledger.limits import NOTHING_HELD, Counter, Held, Limits, Needs, Spent, Used, counter_rows
from moorage.scheduler.core.ledger.records import GangPhase
from moorage.scheduler.core.ledger.schedules import Schedule
from moorage.schemas.attempt import AttemptName
from moorage.schemas.capabilities import UNKNOWN, Capabilities
from moorage.schemas.codec import is_json
from moorage.schemas.frames import Device, Peaks
from moorage.schemas.job import STATE_NUMBER, STATE_TABLE, STATES, derive_state
from moorage.schemas.ranges import NOTHING, ONE, Ranges, count_of, is_in, joined, numbers_in, without

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

IS_TERMINAL: Final = tuple(row.terminal for row in STATE_TABLE)
LEGAL: Final = tuple(frozenset(STATE_NUMBER[to] for to in row.follows) for row in STATE_TABLE)

# the columns of the table of states, by number
ON_WORKER: Final = frozenset(number for number, row in enumerate(STATE_TABLE) if row.on_worker)
HAS_DEVICES: Final = frozenset(number for number, row in enumerate(STATE_TABLE) if row.has_devices)
RUNS: Final = frozenset(number for number, row in enumerate(STATE_TABLE) if row.runs)
MAY_END: Final = frozenset(number for number, row in enumerate(STATE_TABLE) if row.may_end)
LEAVING: Final = frozenset(number for number, row in enumerate(STATE_TABLE) if row.leaving)
WORKED: Final = frozenset(number for number, row in enumerate(STATE_TABLE) if row.worked)
#: ends that count towards `max_failed`
FAILURES: Final = frozenset((FAILED, TIMED_OUT))
#: states of an attempt that does not run yet
STARTING: Final = MAY_END - RUNS
#: states in which an attempt is reported ready or not: a worker that comes back reports it of what it kept
TELLS_READY: Final = RUNS | {LOST_KEPT}
#: what a FREEZE step changes: from which state to which
FREEZES: Final = frozenset(((RUNNING, FROZEN), (FROZEN, RUNNING), (LOST_KEPT, FROZEN)))

#: entries of a job's history that are not states of a replica. Ledgers and histories contain these numbers: give a new
#: entry the next lower number
HELD: Final = -1
RELEASED: Final = -2
PRIORITY: Final = -3
FREEZE: Final = -4
RESUME: Final = -5
NOT_FROZEN: Final = -6
RESIZED: Final = -7
READY: Final = -8
NOT_READY: Final = -9
EXEC: Final = -10
CHANGED: Final = -11
#: the names of the numbers in a history; negative numbers count from the end
HISTORY_WORDS: Final = (
    *STATES,
    "CHANGED",
    "EXEC",
    "NOT_READY",
    "READY",
    "RESIZED",
    "NOT_FROZEN",
    "RESUME",
    "FREEZE",
    "PRIORITY",
    "RELEASED",
    "HELD",
)

#: so many of a job's last runs are remembered, by which a new leader estimates how long others will take
RAN_MAX: Final = 16
#: an attempt that fails within so many ms of its start may be its worker's fault
QUICK_MS: Final = 10_000
#: one that ran for so many did well, however it ended
WELL_MS: Final = 60_000
#: jobs, of each worker, and workers, of each replica, of which such failures are remembered: the newest
QUICK_MAX: Final = 64
QUICK_OF_REPLICA_MAX: Final = 16
#: of `Job.well_on`: several workers
SEVERAL: Final = -1
#: an attempt that is ready again after so few ms was ready all the while
READY_GAP_MS: Final = 2_000
#: those among them of which it is known when they were stored
SAVED_MAX: Final = 2
#: the feature level from which what they told lasts
STORED_LEVEL: Final = 2
#: attempts of a replica whose checkpoints are remembered: as many as the next one looks for
STORED_MAX: Final = 16
#: a job avoids devices of at most this many workers; beyond it the scheduler forgets some
AVOID_MAX: Final = 16
#: changes of a job's time limit that are remembered; attempts from before the oldest of them keep its limit
BOUNDS_MAX: Final = 16
#: the inflation factor of usage when counting begins, see `fairshare`
INFLATION_ONE: Final = 1 << 32
#: how many parts of one job's history can be found again; beyond it the oldest are forgotten
PARTS_MAX: Final = 4096

# an attempt's phase
AT_PLACED: Final = 0
AT_CLAIMED: Final = 1
AT_RUNNING: Final = 2
AT_EXITED: Final = 3  # the attempt ended, its devices are not free yet

# the columns of a transition
REV: Final = 0
AT_MS: Final = 1  # ledger time
REPLICA: Final = 2  # the replica's index; negative: the whole job
ATTEMPT: Final = 3
STATE: Final = 4  # or one of the negative numbers above
WORKER: Final = 5  # the worker's number; negative: none
SLOTS: Final = 6  # a mask; with the worker `RANGE`, the last of several replicas
CODE: Final = 7  # the exit code
WHY: Final = 8
FENCE: Final = 9
BY: Final = 10  # the actor as `records.actor` writes it; empty for the scheduler
RESULT: Final = 11  # message number of the result, 0 for none; only in rows of attempts whose result is known
#: in place of a worker: the transition is of all replicas from that in `REPLICA` to that in `SLOTS`
RANGE: Final = -2
#: so many replicas of a job count towards bounds of memory: of a larger one, few have rows
LISTED_MAX: Final = CEILINGS.listed
#: one transition; a plain tuple because there are millions of them
Transition = tuple[int, int, int, int, int, int, int, int, str, int, str, *tuple[int, ...]]
#: in place of a job's number in `Job.awaits`: the job waits for a time
TIME: Final = 0
#: what a job waits for before it is queued, see `Job.awaits`
Awaits = tuple[tuple[int, int], ...]
#: an unhealthy device: kind, detail, ledger ms since when, and 1 if its attempts have to leave
Ailment = tuple[str, str, int, int]


class StandingOrder(NamedTuple):
    """An operator's order in force: the actor, the reason, and the ledger ms since when."""

    actor: str
    why: str
    since_ms: int


class Ended(NamedTuple):
    """How an attempt ended of which the replica has not ended: by which revision, and what was said of it."""

    rev: int
    code: int
    why: str
    ran_ms: int  # from its start; -1 if it never started
    ever_ready: bool
    was_asked: bool
    by_worker: bool  # else its worker was lost, or did not hold it
    ready_ms: int = 0  # for how long it was ready when it was so last


class Scaled(NamedTuple):
    """How many members of a service are wanted: since which ledger ms, and why."""

    wanted: int
    since_ms: int
    why: str


class Wants(NamedTuple):
    """The number of replicas that a job's tenant put in place of its request's: `most`; of a service that follows its
    calls between `least` and that, else `least` is negative. `top` is the highest number that one ever had, `leaving`
    are those that are taken away as they end."""

    least: int
    most: int
    top: int
    leaving: Ranges = ()


class Promise(NamedTuple):
    """By which ledger ms a job was promised to start, and when that was; the median and the bound for nine of ten cases
    of the forecast behind it, in ms from then, and on how many runs they rest."""

    told_ms: int
    by_ms: int
    p50_ms: int
    p90_ms: int
    runs: int


class Bounds(NamedTuple):
    """What a job's tenant put in place of its request's `max_running` and time limit by the record `seq`; below 0: the
    request's. With `seq` 0 it holds for attempts of all earlier records, too."""

    seq: int
    max_running: int
    timeout_ms: int


def bounds_after(rows: tuple[Bounds, ...], seq: int, max_running: int, timeout_ms: int) -> tuple[Bounds, ...]:
    """Return a job's bounds after a change by the record `seq`; a number below 0 stays as it was.

    Attempts differ by their time limits alone: another `max_running` takes the place of the last.
    """
    last = rows[-1] if rows else Bounds(seq, -1, -1)
    most = max_running if max_running >= 0 else last.max_running
    if rows and (timeout_ms < 0 or timeout_ms == last.timeout_ms):
        return (*rows[:-1], last._replace(max_running=most))
    rows = (*rows, Bounds(seq, most, timeout_ms if timeout_ms >= 0 else last.timeout_ms))
    return rows if len(rows) <= BOUNDS_MAX else (rows[1]._replace(seq=0), *rows[2:])


class Window(NamedTuple):
    """A worker's maintenance window, in ledger milliseconds.

    Nothing is placed from `from_ms` on, jobs must leave by `leave_ms`, and the worker reopens at `until_ms` (0: only
    when an operator says so).
    """

    from_ms: int
    leave_ms: int
    until_ms: int
    by: str
    why: str


class Resize(NamedTuple):
    """The part of each device that a job has from a ledger millisecond on, and the record that gave it."""

    since_ms: int
    seq: int
    memory_mib: int
    compute_percent: int


class Pool(NamedTuple):
    """The devices that a worker had up to a join: those of the attempts placed by a record before `until`."""

    until: int  # sequence of the record with that join
    devices: list[Device]  # as in a hello; empty if they are forgotten
    simulated: bool


NO_POOL: Final = Pool(0, [], False)
#: with which the reason of a cordon begins by which a worker is listed no more, and open once it joins. No operator can
#: write it, as it is not printable; a scheduler of an earlier release takes it for a cordon
_UNLISTED: Final = "\x1f"
#: what such a worker is instead: an operator had it forgotten, or a machine has got its key by a join token
FORGOTTEN: Final = "forgotten"
ADMITTED: Final = "admitted"
#: how many earlier inventories of a worker are known; beyond it the devices of the oldest are forgotten
POOLS_MAX: Final = 16
#: a job counts one more towards the memory bound for each 16 replicas, and for each 8 KiB of its request
REPLICAS_APIECE: Final = 16
BYTES_APIECE: Final = 8 * 1024
#: one part in this many of the memory bound is kept for small tenants, see `State.room`
LAST_PART: Final = 10


def without_job(awaits: Awaits, num: int) -> Awaits:
    """Return what a job waits for without the end of this one; 0 is the time."""
    return tuple(each for each in awaits if each[0] != num)


def extra_of(replicas: int, size: int) -> int:
    """Return what a job counts towards the memory bound beyond one, by its replicas and request bytes.

    Replicas that were never placed are a range, so no more of them count than may have rows.
    """
    return min(replicas, LISTED_MAX) // REPLICAS_APIECE + size // BYTES_APIECE


@dataclass(slots=True, eq=False, repr=False)
class Job:
    """An accepted request with its replicas. Made by `new_job`.

    Its replicas are in three places: those that were never placed are ranges of numbers (`fresh`), those that were
    placed and have not ended are `rows`, and those that have ended are counted, with a bit for each that did not
    succeed. So a job of a million replicas that wait, or have ended, takes no more memory than one of a few.
    """

    num: int
    tenant: str
    name: str
    body: bytes
    traceparent: str
    accepted_ms: int
    ledger: int  # sequence of the record that accepted it
    numbers: Ranges  # the numbers of all replicas
    size: int
    live: int  # number of replicas that have not ended
    fresh: Ranges  # numbers of the replicas that were never placed and have not ended
    rows: dict[int, Replica] = field(default_factory=dict)  # by number: replicas that were placed and have not ended
    well: int = 0  # number of replicas that SUCCEEDED
    #: by state: which replicas ended so, but for SUCCEEDED; None for none. See `bits`
    bad: dict[int, bytearray] | None = None
    #: number of replicas whose attempt ended FAILED or TIMED_OUT; those that ended so while they waited are none
    failed: int = 0
    ends: int = 0  # a digest of all ends, in their order
    #: by state: the exit code with which the first of its replicas ended so; only of jobs that are not listed
    codes: dict[int, int] | None = None
    attempt_no: int = 0  # the highest attempt of a replica
    back: int = 0  # number of `rows` that are QUEUED: they have been placed before
    placed_ms: int = 0  # ledger ms of the last placement
    rev: int = 1
    held: int = 0  # number of attempts that hold devices, including ended attempts
    #: those of ended attempts, by replica and fence, in the order of their ends; None for none yet
    lingering: dict[tuple[int, int], Attempt] | None = None
    over: bool = False  # no further step is possible
    started: bool = False  # whether any replica has ever run
    gang: int = int(GangPhase.NONE)
    after: int = 0  # what a gang's replicas become once the current attempt has ended
    count: int = 0  # which counter grows at that point (see `records.Count`)
    master: str = ""  # address:port of rank 0
    #: devices that failed while it used them, and all of a worker that refused it: worker number, slot mask
    avoid: tuple[tuple[int, int], ...] = ()
    #: workers that refused it because they lack what it needs, in the order of their refusals; none may take it
    lacking: tuple[int, ...] = ()
    hold: StandingOrder | None = None  # an operator's hold: none of its replicas is placed
    #: what it waits for before it may be queued: the numbers of jobs, and which end of each counts (see
    #: `records.Ends`); or 0, and the ledger ms before which it may not start
    awaits: Awaits = ()
    ready_ms: int = 0  # ledger ms of when the last of them came true; 0 of a job that never waited so
    #: until it is placed: the workers reserved for it, and the jobs that were ended for it; then, if any of their
    #: attempts may stay until another one serves: job, replica and ledger ms of the end for each
    preempts: tuple[tuple[int, ...], ...] | None = None
    priority: int = -1  # set by an operator or its tenant; negative: the request's priority applies
    #: of a priority that its tenant set: the highest that it may set. Negative: an operator set `priority`, if any
    ceiling: int = -1
    bounds: tuple[Bounds, ...] = ()  # its tenant's changes of its bounds, oldest first
    #: the time limit in ms of its attempts that were placed up to a record, and that record's sequence: the newest
    #: change that was of running attempts, too
    relimit: tuple[int, int] | None = None
    resizes: tuple[Resize, ...] = ()  # operators' changes of its GPU share, oldest first
    scaled: Scaled | None = None  # of a service whose number of attempts follows its calls, once it changed
    #: of a service: the replica that leaves its worker once the other one serves; None if none moves
    relocating: tuple[int, int] | None = None
    added: int = 0  # how many replicas it has got beyond those of its request, each in the place of another
    #: GPU use that workers reported: milliseconds of busy GPU, and MiB seconds of memory
    used: tuple[int, int] | None = None
    #: what its attempts had at most, and their CPU time, as workers reported (see `Peaks`); None while none has
    peaks: tuple[int, int, int, int] | None = None
    promised: Promise | None = None  # the first start that it was promised
    #: which replica reported of itself, the first of those that have ended, and its newest values as JSON
    reported: tuple[int, str] | None = None
    history: list[Transition] = field(default_factory=list)
    ended_ms: int = 0  # ledger ms of the end of its last replica; 0 until then
    ever_ready: bool = False  # one of its attempts was ready for work at some time
    #: of a service that its next version replaces: how many members it has given up so far, and how many of these for
    #: want of room, for which none of the new ones serves yet
    lent: tuple[int, int] = (0, 0)
    wants: Wants | None = None  # once its tenant has changed the number of its replicas
    has_moved: bool = False  # of `relocating`: the replica that leaves was cancelled, as the other one serves
    refused: tuple[int, ...] = ()  # of the workers in `avoid`, those that refused it for what it runs
    #: as of its last placement, how many replicas were on workers; ledger ms of the first end of an attempt since, or 0
    placed_many: int = 0
    left_ms: int = 0
    ran: tuple[int, ...] = ()  # for how many ms its last attempts ran that ended by themselves and were never frozen
    #: where an attempt of it did well: 0 nowhere yet, `SEVERAL`, or one worker's number and 1
    well_on: int = 0
    row: int = 0
    shape: Any = None  # soft: the interned shape of its request
    needs: Needs | None = None  # soft: see `holding.needs_of`
    deadline_ms: int | None = None  # soft: the ledger ms of its deadline
    key: bytes = b""  # soft: `finished.job_key`, once computed
    told: int = 0  # soft: revision up to which events were sent
    folded: int = 1  # soft: its revision at the end of the last record that changed it
    always: bool | None = None  # soft: whether its replicas start again even after they ended well
    own_subject: bool | None = None  # soft: whether its events also go to its own subject
    #: soft: ledger ms since which it may start, or may start more after it had `max_running`
    since_ms: int = 0
    extra: int = 0  # soft: `extra_of` it
    fair: str = ""  # soft: its fair key as its leader counts it, see `fairkeys`
    is_listed: bool = True  # soft: each transition of a replica is a row of its history, see `Ceilings.listed`
    derived: tuple[int, str] = (0, "")  # soft: a revision, and the job's state at that revision
    stands: bool = False  # soft: it runs on each worker that joins; what waits for one to come is not counted

    LASTING: ClassVar = Lasting(
        {
            "num": int, "tenant": str, "name": str, "body": bytes, "numbers": Ranges, "traceparent": str,
            "accepted_ms": int, "ledger": int,
        },
        {
            "rev": int, "gang": int, "after": int, "started": bool, "fresh": Ranges, "ends": int, "attempt_no": int,
            "placed_ms": int, "over": bool, "count": int, "master": str, "history": list[tuple[Any, ...]], "well": int,
        },
        {
            "bad": (dict[int, bytearray] | None, None),
            "codes": (dict[int, int] | None, None),
            "failed": (int, 0),
            "hold": (StandingOrder | None, None),
            "priority": (int, -1),
            "ceiling": (int, -1),
            "bounds": (tuple[Bounds, ...], ()),
            "preempts": (tuple[tuple[int, ...], ...] | None, None),
            "used": (tuple[int, int] | None, None),
            "resizes": (tuple[Resize, ...], ()),
            "lacking": (tuple[int, ...], ()),
            "awaits": (Awaits, ()),
            "ready_ms": (int, 0),
            "scaled": (Scaled | None, None),
            "relocating": (tuple[int, int] | None, None),
            "added": (int, 0),
            "avoid": (tuple[tuple[int, int], ...], ()),
        },
        {
            2: {
                "ended_ms": (int, 0), "ever_ready": (bool, False), "has_moved": (bool, False),
                "refused": (tuple[int, ...], ()), "placed_many": (int, 0), "left_ms": (int, 0),
                "ran": (tuple[int, ...], ()), "lent": (tuple[int, int], (0, 0)),
                "wants": (Wants | None, None),
                "peaks": (tuple[int, int, int, int] | None, None),
                "relimit": (tuple[int, int] | None, None),
                "reported": (tuple[int, str] | None, None),
                "promised": (Promise | None, None),
                "well_on": (int, 0),
            }
        },
    )  # fmt: skip

    def digest_row(self, level: int) -> int:
        has: tuple[object, ...] = (
            self.num,
            self.rev,
            self.gang,
            self.after,
            self.started,
            self.name,
            self.fresh,
            self.ends,
            self.attempt_no,
            self.placed_ms,
        )
        if level >= 2:
            has += (self.ever_ready, self.has_moved, self.refused, self.ended_ms, self.placed_many, self.left_ms)
            has += (self.ran, self.well_on)
        row = number_of(has)
        # what most jobs lack is left out: it costs nothing, and a later release may add to it
        if self.hold is not None or self.priority >= 0:
            row = number_of((row, "order", self.hold, self.priority))
        if self.preempts is not None:
            row = number_of((row, "preempts", self.preempts))
        if self.used is not None:
            row = number_of((row, "used", self.used))
        if self.resizes:
            row = number_of((row, "resizes", self.resizes))
        if self.bounds or self.ceiling >= 0:
            row = number_of((row, "bounds", self.bounds, self.ceiling))
        if self.lacking:
            row = number_of((row, "lacking", self.lacking))
        if self.awaits or self.ready_ms:
            row = number_of((row, "awaits", self.awaits, self.ready_ms))
        if self.scaled is not None:
            row = number_of((row, "scaled", self.scaled))
        if self.relocating is not None or self.added:
            row = number_of((row, "relocating", self.relocating, self.added, self.numbers))
        row = number_of((row, "avoid", self.avoid)) if self.avoid else row
        if level < 2:
            return row
        row = number_of((row, "lent", self.lent)) if any(self.lent) else row
        row = number_of((row, "peaks", self.peaks)) if self.peaks is not None else row
        row = number_of((row, "relimit", self.relimit)) if self.relimit is not None else row
        row = number_of((row, "reported", self.reported)) if self.reported is not None else row
        row = number_of((row, "promised", self.promised)) if self.promised is not None else row
        return number_of((row, "wants", self.wants, self.numbers)) if self.wants is not None else row

    def note_reported(self, replica: int, values: str) -> None:
        """Note the newest values that a replica reported, as JSON. Of several replicas those of the first one stay."""
        if self.reported is None or replica <= self.reported[0]:
            self.reported = replica, values

    def note_peaks(self, peaks: Peaks) -> None:
        """Note what an ended attempt had at most, beside what others had."""
        self.peaks = astuple(peaks if self.peaks is None else Peaks(*self.peaks).beside(peaks))

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts that hold devices for the job, first of current attempts, then of ended ones."""
        if not self.held:
            return []
        own = [replica.attempt for replica in self.rows.values() if replica.attempt is not None]
        return [*own, *self.lingering.values()] if self.lingering else own

    @property
    def changed_seq(self) -> int:
        """The sequence of the newest record that changed what its running attempts have; 0 if none has."""
        resized = self.resizes[-1].seq if self.resizes else 0
        return resized if self.relimit is None else max(resized, self.relimit[1])

    @property
    def part(self) -> tuple[int, int] | None:
        """The part of each device that an operator gave the job: MiB of memory, percent of compute; None if unset."""
        return self.resizes[-1][2:] if self.resizes else None

    def bounds_at(self, fence: int | None = None) -> tuple[int, int]:
        """Return `max_running` and the time limit in ms of an attempt with this fence, of the next one for None.

        A number below 0 stands for the request's. A change is for attempts that later records place, but for a time
        limit of those that run.
        """
        if self.relimit is not None and fence is not None and fence <= self.relimit[1]:
            return self.bounds[-1].max_running, self.relimit[0]
        for row in reversed(self.bounds):
            if fence is None or row.seq < fence:
                return row.max_running, row.timeout_ms
        return -1, -1

    @property
    def state(self) -> str:
        if self.size == 1:
            for replica in self.rows.values():
                return STATES[replica.state]
            return "QUEUED" if self.fresh else STATES[next(iter(self.bad))] if self.bad else "SUCCEEDED"
        rev, state = self.derived
        if rev != self.rev:
            state = derive_state({STATES[number] for number in self.states})
            self.derived = self.rev, state
        return state

    @property
    def states(self) -> set[int]:
        """The states that some replica is in."""
        states = {replica.state for replica in self.rows.values()}
        states.update(self.bad or ())
        if self.fresh:
            states.add(QUEUED)
        if self.well:
            states.add(SUCCEEDED)
        return states

    @property
    def counts(self) -> dict[str, int]:
        """How many replicas are in which state."""
        found = Counting(replica.state for replica in self.rows.values())
        found.update({state: bits.count(each) for state, each in (self.bad or {}).items()})
        found.update({QUEUED: 0 if self.stands else count_of(self.fresh), SUCCEEDED: self.well})
        for row in self.history if self.stands else ():
            if row[WORKER] == RANGE:  # no worker came
                found[row[STATE]] -= row[SLOTS] - row[REPLICA] + 1
        return {STATES[state]: count for state, count in sorted(found.items()) if count}

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """All replicas in order; those without a row have only their state. For questions about a job of few."""
        found = [self.rows.get(index) or Replica(self, index) for index in numbers_in(self.fresh)]
        for state, ended in self.ended:
            for index in numbers_in(ended):
                found.append(replica := Replica(self, index))
                replica.state = state
        return tuple(sorted((*found, *self.rows.values()), key=_by_index))

    @property
    def unsuccessful(self) -> list[tuple[int, Ranges]]:
        """The replicas that have ended without success, by state."""
        return [(state, bits.ranges(each)) for state, each in sorted((self.bad or {}).items())]

    @property
    def ended(self) -> list[tuple[int, Ranges]]:
        """The replicas that have ended, by state: of jobs of many as many ranges as there are gaps."""
        return [*self.unsuccessful, (SUCCEEDED, self._succeeded)] if self.well else self.unsuccessful

    @property
    def _succeeded(self) -> Ranges:
        left = without(self.numbers, self.fresh)
        for each in (self.bad or {}).values():
            left = without(left, bits.ranges(each))
        return without(left, tuple((index, index) for index in sorted(self.rows)))

    def state_of(self, index: int) -> int | None:
        """Return the state of a replica; None if the job has no such replica."""
        row = self.rows.get(index)
        if row is not None:
            return row.state
        if not is_in(self.numbers, index):
            return None
        if is_in(self.fresh, index):
            return QUEUED
        return next((state for state, each in (self.bad or {}).items() if bits.has(each, index)), SUCCEEDED)

    def meant(self, index: int) -> int:
        """Return the number of the replica that a caller means: 0, which they say by default, is the only one of a job
        of one, such as a service whose member has moved."""
        return index if index or self.size > 1 else self.numbers[0][0]

    @property
    def waits(self) -> int:
        """The number of QUEUED replicas, without those for which no worker may ever come."""
        return self.back if self.stands else count_of(self.fresh) + self.back

    @property
    def unreached(self) -> Ranges:
        """Of a job that stands: the numbers that ended before a worker came for them."""
        rows = (row for row in self.history if row[WORKER] == RANGE) if self.stands else ()
        return joined(sorted((row[REPLICA], row[SLOTS]) for row in rows))

    @property
    def copies(self) -> int:
        """The number of its replicas, of one that stands those that began."""
        return sum(self.counts.values()) if self.stands else self.size

    @property
    def on_workers(self) -> int:
        """The number of replicas that are placed and have not ended."""
        return len(self.rows) - self.back

    @property
    def may_start_ms(self) -> int:
        """The ledger ms from which it may start: its acceptance, or when what it waited for came true."""
        return self.ready_ms or self.accepted_ms

    @property
    def waits_from_ms(self) -> int:
        """The ledger ms from which its waiting counts: from when it may start, or a later placement of one of many.

        That of a service also counts from the last change of how many members are wanted.
        """
        from_ms = self.ready_ms or self.accepted_ms
        if self.size == 1 or self.gang:
            return max(from_ms, self.since_ms) if self.since_ms else from_ms
        wanted_ms = self.scaled.since_ms if self.scaled is not None else 0
        return max(from_ms, self.placed_ms, self.since_ms, wanted_ms)

    @property
    def first_waiting(self) -> Replica | None:
        """The first QUEUED replica, which is in the queue before the others; None for none.

        One that was never placed has no row: what is returned is then a copy, for reading.
        """
        waiting = [replica for replica in self.rows.values() if replica.state == QUEUED]
        return min([*waiting, *(Replica(self, first) for first, _ in self.fresh[:1])], key=_by_index, default=None)

    @property
    def leaving(self) -> Ranges:
        """The numbers of replicas that are taken away as they end."""
        return NOTHING if self.wants is None else self.wants.leaving

    def end(self, first: int, last: int, state: int, code: int, time_ms: int) -> None:
        """Count the ends, at this ledger ms, of the replicas from `first` to `last`, which are neither rows nor `fresh`
        any more."""
        count = last - first + 1
        self.live -= count
        if not self.live:
            self.ended_ms = time_ms
        self.ends = number_of((self.ends, first, last, state))
        if state == SUCCEEDED:
            self.well += count
            return
        if self.bad is None:
            self.bad = {}
        if state not in self.bad:
            self.bad[state] = bytearray()
        bits.mark(self.bad[state], first, last)
        if code and not self.is_listed:
            self.codes = {state: code} | (self.codes or {})


class _EachWorker(msgspec.Struct, frozen=True, gc=False):
    each_worker: bool | str = False


def _stands(body: bytes) -> bool:
    """Return whether a request is for each worker, also for those that join later."""
    if b"each_worker" not in body:
        return False
    try:
        decode = msgspec.json.decode if is_json(body) else msgspec.msgpack.decode
        return decode(body, type=_EachWorker).each_worker is True
    except msgspec.MsgspecError:
        return False


def _by_index(replica: Replica) -> int:
    return replica.index


def new_job(num: int, tenant: str, name: str, body: bytes, numbers: Ranges, traceparent: str, ms: int, seq: int) -> Job:
    """Return a job with all replicas queued, as accepted by record `seq` at ledger time `ms`."""
    size = 1 if numbers is ONE else count_of(numbers)
    job = Job(num, tenant, name, body, traceparent, ms, seq, numbers, size, size, numbers)
    if size >= REPLICAS_APIECE or len(body) >= BYTES_APIECE:
        job.extra = extra_of(size, len(body))
        job.stands = _stands(body)
    return job


@dataclass(slots=True, eq=False, repr=False)
class Replica:
    """One of a job's copies: its state, its attempt, and how many retries, losses and restarts it has used."""

    job: Job
    index: int
    nth: int = 0  # soft: it grows in the order of its job's `rows`
    state: int = QUEUED
    attempt_no: int = 0  # of its latest attempt
    fence: int = 0
    retries: int = 0
    losses: int = 0
    refusals: int = 0
    restarts: int = 0  # of a job that stays
    streak: int = 0  # how many of them came one after another, each soon after its attempt's start
    #: while it is QUEUED, the ledger ms before which it is not placed: its backoff. While it is on a worker, 0, or for
    #: one that was asked to leave, and has counted for that, the ms of the backoff that begins once it has left
    not_before: int = 0
    after: int = 0  # the state that follows ENDING or CANCELLING
    attempt: Attempt | None = None
    ended: Ended | None = None  # how its last attempt ended, until the next one is placed
    deaths: int = 0  # how many of its attempts were lost with their host's supervisor
    #: the digests of the checkpoints that its last attempts stored, by attempt, "" for none; of others, those up to
    #: `untold` may have stored one of which no worker told
    stored: tuple[tuple[int, str], ...] = ()
    untold: int = 0
    #: of the newest of `stored`, by attempt: the ledger ms at which its worker told it, and its step, -1 for unknown
    saved: tuple[tuple[int, int, int], ...] = ()
    #: of a rank of a gang: the sets that count or may come to: attempt, step, digest (see `gang_sets`)
    sets: tuple[tuple[int, int, str], ...] = ()
    #: how many of `retries` and `losses` each row of its request's `retry` has allowed, by the row's number from 1
    tries: tuple[tuple[int, int], ...] = ()
    #: workers on which its attempts failed within seconds of their start, with the ledger ms of the last such end
    failed_on: tuple[tuple[int, int], ...] = ()
    row: int = 0

    LASTING: ClassVar = Lasting(
        {"index": int},
        {
            "state": int, "attempt_no": int, "fence": int, "retries": int, "losses": int, "refusals": int,
            "not_before": int, "after": int, "restarts": int, "streak": int,
        },
        None,
        {
            2: {
                "ended": (Ended | None, None), "deaths": (int, 0), "stored": (tuple[tuple[int, str], ...], ()),
                "untold": (int, 0), "saved": (tuple[tuple[int, int, int], ...], ()),
                "tries": (tuple[tuple[int, int], ...], ()), "sets": (tuple[tuple[int, int, str], ...], ()),
                "failed_on": (tuple[tuple[int, int], ...], ()),
            }
        },
    )  # fmt: skip

    def digest_row(self, level: int) -> int:
        has: tuple[object, ...] = (
            self.job.num,
            self.index,
            self.state,
            self.attempt_no,
            self.fence,
            self.retries,
            self.losses,
            self.refusals,
            self.not_before,
            self.after,
        )
        row = number_of(has if level < 2 else (*has, self.ended, self.deaths))
        row = number_of((row, "restarts", self.restarts, self.streak)) if self.restarts else row
        if level < 2:
            return row
        row = number_of((row, "stored", self.stored, self.untold)) if self.stored or self.untold else row
        row = number_of((row, "saved", self.saved)) if self.saved else row
        row = number_of((row, "sets", self.sets)) if self.sets else row
        row = number_of((row, "tries", self.tries)) if self.tries else row
        return number_of((row, "quick", self.failed_on)) if self.failed_on else row

    def tries_of(self, number: int) -> int:
        """Return how many further attempts a row of `retry` has allowed. What no row is known of counts for each: a
        scheduler that began below the level from which they last knows no more."""
        untold = self.retries + self.losses - sum(count for _, count in self.tries)
        return dict(self.tries).get(number, 0) + max(untold, 0)

    def note_checkpoint(self, attempt: int, digest: str, time_ms: int, step: int = -1) -> None:
        """Note which checkpoint an attempt has stored last, and when, "" for none. The oldest of `STORED_MAX` is
        forgotten."""
        others = [each for each in self.stored if each[0] != attempt]
        self.stored = (*others[1 - STORED_MAX :], (attempt, digest))
        if digest:
            earlier = [each for each in self.saved if each[0] != attempt]
            self.saved = (*earlier[1 - SAVED_MAX :], (attempt, time_ms, step))

    def stored_by(self, attempt: int) -> str:
        """Return the digest of the checkpoint that an attempt has stored last; "" for none."""
        return next((digest for no, digest in self.stored if no == attempt), "")


@dataclass(slots=True, eq=False, repr=False)
class Attempt:
    """An attempt of a replica on a worker. It has its devices until its worker reports them free, or is lost.

    A frozen one has none, until they are leased to it again: `mask` has the slots that it holds now, `home` those on
    which it was placed.
    """

    replica: Replica
    worker: Worker
    no: int  # its number among those of its replica, or gang
    fence: int
    mask: int
    home: int
    mode: int
    name: AttemptName
    phase: int = AT_PLACED
    rate_milli: int = 0  # what it counts in its tenant's fair share; 0: each device counts as a whole GPU
    notice_s: int = 0  # the notice with which it was asked to end
    freeze: bool = False  # it is wanted frozen; the replica becomes FROZEN when the worker reports it
    wakes: bool = False  # it is wanted frozen because it was unused, and no operator ordered it: use resumes it
    #: of a gang, the attempt and step with whose sets all ranks begin, `NO_SET` for none; None if that is not known
    begun: tuple[int, int] | None = None
    leased: int = 0  # sequence of the record that last leased its devices to it again; 0: none has
    preemptible: bool = False  # it ends for jobs that are not, and for frozen ones that need its devices
    ready: bool = False  # its worker has seen that it is ready for work
    address: str = ""  # `address:port,port` at which its own ports are reached
    #: ledger ms of its placement and, once it has started, of its start. Time in which it was frozen counts, as it does
    #: for its limits
    began_ms: int = 0
    ever_ready: bool = False  # its worker has seen it ready for work at some time
    ready_ms: int = 0  # ledger ms since which it was ready when it was so last, but for gaps of `READY_GAP_MS`; else 0
    unready_ms: int = 0  # ledger ms since which it is ready no more; 0 while it is, and before it ever was
    has_frozen: bool = False  # it was frozen at some time
    leased_ms: int = 0  # ledger ms at which its devices were leased to it again after it froze; 0 if they were not
    not_frozen: str = ""  # why its worker could not freeze it, when it was last to be
    row: int = 0
    missed: int = 0  # soft: consecutive renewals that did not list it
    unstored: str = ""  # soft: why its newest checkpoint could not be stored while it runs
    runs_as: Any = None  # soft: the `schedule.runtime` entry that estimates its end

    @property
    def is_current(self) -> bool:
        """Whether it is its replica's current attempt, not one that has ended and still holds devices."""
        return self.replica.attempt is self

    LASTING: ClassVar = Lasting(
        {
            "replica.job.num": int, "replica.index": int, "is_current": bool, "no": int, "fence": int, "home": int,
            "mode": int,
        },
        {"mask": int, "phase": int},
        {
            "rate_milli": (int, 0),
            "notice_s": (int, 0),
            "freeze": (bool, False),
            "wakes": (bool, False),
            "leased": (int, 0),
            "preemptible": (bool, False),
            "ready": (bool, False),
            "address": (str, ""),
        },
        {
            2: {
                "began_ms": (int, 0), "ever_ready": (bool, False), "has_frozen": (bool, False), "leased_ms": (int, 0),
                "not_frozen": (str, ""), "ready_ms": (int, 0), "unready_ms": (int, 0),
                "begun": (tuple[int, int] | None, None),
            }
        },
    )  # fmt: skip

    def digest_row(self, level: int) -> int:
        replica, worker = self.replica, self.worker
        has: tuple[object, ...] = (
            replica.job.num, replica.index, self.fence, worker.num, self.mask, self.mode, self.phase
        )  # fmt: skip
        if level >= 2:
            has += (self.began_ms, self.ever_ready, self.has_frozen, self.leased_ms, self.not_frozen)
        row = number_of(has)
        row = number_of((row, "rate", self.rate_milli)) if self.rate_milli else row
        row = number_of((row, "notice", self.notice_s)) if self.notice_s else row
        row = number_of((row, "freeze", self.wakes)) if self.freeze else row
        row = number_of((row, "leased", self.home, self.leased)) if self.leased or self.mask != self.home else row
        row = number_of((row, "ready", self.ready, self.address)) if self.ready or self.address else row
        row = number_of((row, "preemptible")) if self.preemptible else row
        if level < 2:
            return row
        row = number_of((row, "begun", self.begun)) if self.begun is not None else row
        return number_of((row, "ready", self.ready_ms, self.unready_ms)) if self.ready_ms or self.unready_ms else row


def code_of(to: int | None, code: int) -> int | None:
    """Return the exit code in a transition on a worker to the state `to`; None if it has none.

    Until an attempt has ended, and for one that was lost, refused or withdrawn, the transition's code is 0. It is no
    exit code then: an attempt after which its replica is QUEUED or FAILED did not exit with 0.
    """
    return None if to in ON_WORKER or (not code and to in (QUEUED, FAILED)) else code


def decided_code(over: str, on_workers: list[tuple[str, int, int | None]]) -> int | None:
    """Return the exit code of a job that ended in the state `over`: that of the first replica which ended so.

    The SDK decides the same way (`decided`). `on_workers` are the transitions on workers: (state, attempt, code). A job
    that SUCCEEDED has code 0. A gang ends as a whole, on no worker, so its code is that of the first failing rank.
    """
    if over == "SUCCEEDED":
        return 0
    ended = [code for state, _, code in on_workers if state == over]
    if ended or over != "FAILED" or not on_workers:
        return next((code for code in ended if code), ended[-1] if ended else None)
    last = on_workers[-1][1]
    return next((code for state, attempt, code in on_workers if state == "EXITED" and attempt == last and code), None)


def exit_code_of(job: Job) -> int | None:
    """Return the exit code of a job in memory; None until all of its replicas have ended, and if it has none."""
    if job.live:
        return None
    if not job.is_listed:
        return (job.codes or {}).get(STATE_NUMBER[job.state], 0 if job.state == "SUCCEEDED" else None)
    rows = [row for row in job.history if row[WORKER] >= 0]
    return decided_code(job.state, [(STATES[row[STATE]], row[ATTEMPT], code_of(row[STATE], row[CODE])) for row in rows])


@dataclass(slots=True, eq=False, repr=False)
class Worker:
    """A worker as recorded in the ledger: its lease session, its inventory in that session, and its attempts."""

    num: int
    id: str
    machine: str
    boot: str = ""
    n: int = 0  # number of the last join
    no: int = 0  # the last report frame of this session that was folded
    session: str = ""  # empty: no session, so nothing may be placed here
    joined_ms: int = 0
    left_ms: int = 0  # when its last session ended; 0 if it never had one
    left_why: str = ""  # why its last session ended
    hello: dict[str, Any] = field(default_factory=dict)  # as recorded: `inventory` is what it says
    former: tuple[Pool, ...] = ()  # the devices that it had before those of `hello`, oldest first
    flag: str = "open"
    flag_ms: int = 0  # ledger ms since when it has that flag
    by: str = ""  # who ordered that
    why: str = ""  # the reason of that order, or of the last start that failed
    until_ms: int = 0  # ledger ms at which it opens by itself, while starts fail on it; else 0
    quarantined: int = 0  # slot mask: devices that were not free after a job ended
    unwell: dict[int, Ailment] = field(default_factory=dict)  # by slot: devices that the worker reports as unhealthy
    unwell_mask: int = 0
    well: int = 0  # slots that an operator declared healthy, until the worker confirms
    well_n: int = 0  # sequence of the record with that order
    window: Window | None = None  # a planned or current maintenance window
    #: jobs that failed on it within seconds of their start, by number, with the ledger ms of that; oldest first
    quick: tuple[tuple[int, int], ...] = ()
    well_ms: int = 0  # since then, none of `quick`: when the last attempt began that did well on it
    attempts: dict[AttemptName, Attempt] = field(default_factory=dict)
    #: what its hello says, and the devices of that
    inventory: Inventory = NO_INVENTORY
    pool: Pool = NO_POOL
    row: int = 0

    def read_hello(self) -> None:
        """Find what the recorded hello says. Call it wherever that is set."""
        self.inventory = inventory_in(self.hello)
        self.pool = Pool(0, self.inventory.gpu_pool, self.inventory.simulated)

    @property
    def is_unlisted(self) -> bool:
        """Whether it is listed nowhere, as it was forgotten, or has not joined yet."""
        return self.why.startswith(_UNLISTED)

    @property
    def out(self) -> int:
        """The slots of devices that are in quarantine, or that the worker reports as unhealthy."""
        return self.quarantined | self.unwell_mask

    def can(self, driver: str) -> Capabilities:
        """Return the capabilities of a driver as the worker reports them."""
        return self.inventory.capabilities.get(driver, UNKNOWN)

    def pool_at(self, fence: int) -> Pool:
        """Return the devices to which the slots of an attempt with this fence belong."""
        for pool in self.former:
            if fence < pool.until:
                return pool
        return self.pool

    @property
    def lost_ms(self) -> int:
        """The silence after which the worker is lost, in ms, as sent with its join; 0 if the ledger does not say."""
        return self.inventory.lost_ms

    LASTING: ClassVar = Lasting(
        {"num": int, "id": str, "machine": str},
        {
            "boot": str, "n": int, "no": int, "session": str, "joined_ms": int, "left_ms": int, "left_why": str,
            "hello": dict[str, Any], "former": tuple[Pool, ...], "flag": str, "flag_ms": int, "by": str, "why": str,
            "quarantined": int,
        },
        {
            "until_ms": (int, 0),
            "unwell": (dict[int, Ailment], {}),
            "well": (int, 0),
            "well_n": (int, 0),
            "window": (Window | None, None),
        },
        {2: {"quick": (tuple[tuple[int, int], ...], ()), "well_ms": (int, 0)}},
    )  # fmt: skip

    def digest_row(self, level: int) -> int:
        row = number_of((self.num, self.n, self.no, self.session, self.flag, self.quarantined))
        if self.unwell or self.well or self.window is not None:
            row = number_of((row, "health", sorted(self.unwell.items()), self.well, self.well_n, self.window))
        if self.until_ms:
            row = number_of((row, "shut", self.until_ms))
        if level >= 2 and (self.quick or self.well_ms):
            row = number_of((row, "quick", self.quick, self.well_ms))
        return row


@dataclass(slots=True, eq=False, repr=False)
class Tenant:
    """A tenant as recorded in the ledger: its jobs by name, how far its queue was read, its limits and usage."""

    name: str
    jobs: dict[str, Job] = field(default_factory=dict)
    submit_cursor: int = 0
    cancel_cursor: int = 0
    # job name -> queue sequence of its cancel; negative ms for a cancel by request
    tombstones: dict[str, int] = field(default_factory=dict)
    live: int = 0  # jobs that have not ended
    extra: int = 0  # soft: the sum of the `extra` of its jobs
    waits: int = 0  # soft: the sum of the `waits` of its jobs
    gpus: int = 0  # devices that its attempts hold; each sharer counts a shared device
    gpus_max: int = 0  # 0: no limit
    jobs_max: int = 0
    limit: StandingOrder | None = None  # the order that set its limits
    limits: Limits | None = None  # the others
    spent: Spent | None = None  # of its budget
    held: Held = NOTHING_HELD  # what its attempts hold beside GPUs, while it has such limits
    #: while it has such limits, how many devices of each name its attempts hold; replaced, never changed
    devices: Used = field(default_factory=dict)
    used: Used = field(default_factory=dict)  # the counters that its attempts use; replaced, never changed
    hold: StandingOrder | None = None  # an operator's hold: none of its jobs is placed
    weight: int = 0  # in the fair share; 0: unset
    guaranteed: int = 0  # GPUs that it can always get back; what it uses beyond them is borrowed
    share: StandingOrder | None = None  # the order that set weight and guarantee
    keys: dict[str, Any] | None = None  # soft: what its fair keys use; None while no job has named one
    rate_milli: int = 0  # what its attempts use now, in thousandths of a GPU; 0 while usage is not counted
    usage_base: int = 0  # its usage up to the last change of the rate, see `fairshare`
    row: int = 0

    @property
    def ordered(self) -> bool:
        """Whether an operator's order on this tenant is in force."""
        return self.hold is not None or self.limit is not None or self.share is not None

    @property
    def usage_text(self) -> str:
        """Its usage as text: the number exceeds 64 bits."""
        return str(self.usage_base)

    @usage_text.setter
    def usage_text(self, text: str) -> None:
        self.usage_base = int(text)

    LASTING: ClassVar = Lasting(
        {"name": str},
        {"submit_cursor": int, "cancel_cursor": int, "tombstones": dict[str, int]},
        {
            "gpus_max": (int, 0),
            "jobs_max": (int, 0),
            "limit": (StandingOrder | None, None),
            "hold": (StandingOrder | None, None),
            "weight": (int, 0),
            "guaranteed": (int, 0),
            "share": (StandingOrder | None, None),
            "usage_text": (str, "0"),
        },
        {2: {"limits": (Limits | None, None), "spent": (Spent | None, None)}},
    )

    def digest_row(self, level: int) -> int:
        row = number_of((self.name, self.submit_cursor, self.cancel_cursor, len(self.tombstones)))
        if self.ordered:
            row = number_of((row, "orders", self.hold, self.limit, self.gpus_max, self.jobs_max))
        if self.share is not None or self.usage_base or self.rate_milli:
            row = number_of((row, "share", self.share, self.weight, self.guaranteed, self.rate_milli, self.usage_text))
        if level >= 2 and (self.limits is not None or self.spent is not None):
            row = number_of((row, "limits", self.limits, self.spent))
        return row


#: read in place of a tenant that the ledger does not know
_NOBODY: Final = Tenant("")


class State:
    """Everything that the ledger has recorded up to sequence `seq`."""

    def __init__(self, ceilings: Ceilings = CEILINGS) -> None:
        self.ceilings = ceilings
        self.ledger_id = ""
        self.former_id = ""  # ids of the ledgers that this one was restored from, newest first, separated by blanks
        self.restored_ms = -1  # ledger time of the last restore; negative: never restored
        self.restored_epoch = 0
        self.behind = ""  # why this ledger must not be led: it was found to be an older backup
        self.level = 1  # feature level: the format of the records that a leader writes
        self.seq = 0
        self.epoch = 0
        self.epoch_seq = 0  # sequence of the newest epoch record; appends by older leaders fail against it
        self.leader = ""
        self.time_ms = 0
        self.next_num = 1
        self.digest = 0
        self.transitions = 0
        self.snapshot: tuple[str, int, str] | None = None  # name, sequence, digest
        self.snapshot_before: tuple[str, int, str] | None = None
        self.jobs: dict[int, Job] = {}  # live jobs, and ended ones that were not compacted yet
        self.ended: deque[int] = deque()  # numbers of ended jobs, in order of their end
        self.extra = 0  # soft: the sum of `extra` of all `jobs`
        self.extra_ended = 0  # soft: the sum of `extra` of the jobs in `ended`
        self.finished = FinishedTable()
        self.tenants: dict[str, Tenant] = {}
        self.schedules: dict[str, dict[str, Schedule]] = {}  # by tenant and name; a tenant with none has no entry
        self.ran_through = 0  # the highest number of a run of any schedule
        self.wishes = 0  # soft: sequence of the last record that added, paused, resumed or removed a schedule
        self.workers: dict[str, Worker] = {}
        self.worker_by_num: dict[int, Worker] = {}
        self.next_worker = 0  # a number is never given again, so it names one worker for ever
        self.preempting: dict[int, Job] = {}  # by number: jobs with `preempts`
        self.on_hold: dict[int, Job] = {}  # soft, by number: jobs with a hold of their own that are not over
        #: soft: release and settings of the leader that the ledger tells; "" before the first
        self.settings: tuple[str, tuple[tuple[str, str], ...]] = ("", ())
        #: soft: job number, workers and ledger ms of the reservation that the ledger tells
        self.reserved: tuple[int, tuple[int, ...], int] | None = None
        self.preemptibles = 0  # soft: the number of attempts that are preemptible
        self.windows: dict[int, Worker] = {}  # by number: workers with a maintenance window
        self.shut: dict[int, Worker] = {}  # by number: workers that are closed because starts fail on them
        self.budgeted: frozenset[str] = frozenset()  # soft: names of the tenants with a budget; replaced, never changed
        self.by_model: frozenset[str] = frozenset()  # soft: likewise, of those with a limit of GPUs of a model
        self.counters: dict[str, Counter] = {}  # by name; replaced, never changed
        self.used: Used = {}  # of them by all attempts; likewise
        self.half_life_ms = 0  # of usage; 0: usage is not counted and tenants have no shares
        self.counts_from_ms = 0
        self.inflation = INFLATION_ONE  # the weight of current usage, see `fairshare`

    LASTING: ClassVar = Lasting(
        {},
        {
            "ledger_id": str, "former_id": str, "restored_ms": int, "restored_epoch": int, "behind": str, "level": int,
            "seq": int, "epoch": int, "epoch_seq": int, "leader": str, "time_ms": int, "next_num": int, "digest": int,
            "transitions": int, "snapshot": tuple[str, int, str] | None, "snapshot_before": tuple[str, int, str] | None,
            "ran_through": int, "next_worker": int, "half_life_ms": int, "counts_from_ms": int,
        },
        None,
        {2: {"counters": (dict[str, Counter], {})}},
    )  # fmt: skip

    def tenant(self, name: str) -> Tenant:
        row = self.tenants.get(name)
        if row is None:
            row = self.tenants[name] = Tenant(name)
        return row

    def read_tenant(self, name: str) -> Tenant:
        """Return a tenant, to be read only; an empty one if it is not known."""
        return self.tenants.get(name) or _NOBODY

    def follows(self, ledger_id: str) -> bool:
        """Return whether this ledger was restored, directly or through others, from that ledger."""
        return ledger_id in self.former_id.split()

    def former_of(self, ledger_id: str) -> str:
        """Return which former id to send to a process that last saw `ledger_id`.

        It is that id if this ledger descends from it, else the latest former id; "" if this ledger was never restored.
        """
        return ledger_id if self.follows(ledger_id) else self.former_id.partition(" ")[0]

    def job(self, tenant: str, name: str) -> Job | None:
        row = self.tenants.get(tenant)
        return row.jobs.get(name) if row is not None else None

    def schedule(self, tenant: str, name: str) -> Schedule | None:
        rows = self.schedules.get(tenant)
        return rows.get(name) if rows is not None else None

    @property
    def live(self) -> int:
        """The number of jobs that have not ended."""
        return len(self.jobs) - len(self.ended)

    @property
    def load(self) -> int:
        """What all live jobs count towards the memory bound: one each, large jobs more."""
        return self.live + self.extra - self.extra_ended

    def room(self, most: int, tenant: str, new: int = 0, new_of_tenant: int = 0) -> int:
        """Return how much load a tenant may add under the bound `most`; 0 or less: none.

        `new` is the load of jobs accepted in the record in progress, `new_of_tenant` this tenant's part of it. The last
        tenth of the bound is open only to tenants that use less than a tenth: one tenant cannot keep others out.
        """
        row, last, free = self.tenants.get(tenant), most // LAST_PART, most - self.load - new
        held = new_of_tenant + (row.live + row.extra if row is not None else 0)
        return max(free - last, min(free, last - held))

    def attempts(self) -> Iterator[Attempt]:
        for worker in self.workers.values():
            yield from worker.attempts.values()

    def rows(self) -> Iterator[Job | Replica | Attempt | Worker | Tenant | Schedule]:
        """Yield all rows that count in the digest, but for those of the table of finished jobs."""
        for job in self.jobs.values():
            yield job
            yield from job.rows.values()
        yield from self.attempts()
        yield from self.workers.values()
        yield from self.tenants.values()
        for rows in self.schedules.values():
            yield from rows.values()

    def full_digest(self) -> int:
        """Return the digest computed from all rows; it must equal the incremental digest."""
        total = self.finished.row + counter_rows(self.counters) + sum(row.digest_row(self.level) for row in self.rows())
        return total & 0xFFFFFFFFFFFFFFFF


def why_unlisted(word: str, why: str) -> str:
    """Return the reason of a cordon by which a worker is `FORGOTTEN` or `ADMITTED`."""
    return f"{_UNLISTED}{word}: {why}"


def told_flag(flag: str, why: str) -> tuple[str, str]:
    """Return a worker's flag and its reason as operators are told: also `FORGOTTEN` and `ADMITTED`."""
    if not why.startswith(_UNLISTED):
        return flag, why
    word, _, why = why.removeprefix(_UNLISTED).partition(": ")
    return word, why
