"""A record while it is being built: the steps so far, and what the state will be once they are folded.

The state changes only when a whole record is folded. Code that decides several things about
one replica in one record must therefore read the replica from the draft, not from the state.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from moorage.scheduler.core.ledger.acts import AnyAct, Avoid, Freeze, Gone, Lacks, Level, Tombstone, Untomb, encode_act
from moorage.scheduler.core.ledger.fairshare import rate_of
from moorage.scheduler.core.ledger.ids_in_bodies import written_id
from moorage.scheduler.core.ledger.record import Record
from moorage.scheduler.core.ledger.records import (
    NO_JOB,
    RECORD_BYTES_MAX,
    STEP_WIDTH,
    Op,
    ending,
    exiting,
    moving,
    packed,
)
from moorage.scheduler.core.ledger.schedules import Schedule
from moorage.scheduler.core.ledger.state import (
    AT_CLAIMED,
    AT_EXITED,
    AT_RUNNING,
    BYTES_APIECE,
    CLAIMED,
    EXITED,
    FAILED,
    FROZEN,
    IS_TERMINAL,
    LISTED_MAX,
    LOST_KEPT,
    PLACED,
    QUEUED,
    REPLICAS_APIECE,
    RUNNING,
    SUCCEEDED,
    TIMED_OUT,
    Job,
    Member,
    Replica,
    State,
    Tenant,
    Worker,
    extra_of,
)
from moorage.scheduler.core.overlay import DraftJob, DraftReplica, DraftTenant, DraftWorker
from moorage.schemas.frames import Fact, Stalled
from moorage.schemas.printable import shown
from moorage.schemas.ranges import Ranges, both, count_of, without

#: an upper estimate of a step's encoded bytes: op, number, replica and three arguments
STEP_BYTES: Final = 30
NOTE_CHARS_MAX: Final = 200
#: room reserved for acts, evidence and the record's own fields
SLACK_BYTES: Final = 96 * 1024
#: a record with more bytes than this takes no more steps
FULL_BYTES: Final = RECORD_BYTES_MAX - SLACK_BYTES
#: a record with more steps or new jobs is full too: building and folding it blocks the event loop
STEPS_MAX: Final = 2_048
ACCEPTS_MAX: Final = 1_024
#: how much of a record cancels, deadlines and rejections may fill together (the last job may exceed it). A job may
#: have thousands of rows, and renewals, requests and placements need room in the same record
BULK_STEPS: Final = STEPS_MAX // 2
BULK_BYTES: Final = FULL_BYTES // 2
_PLACE: Final = int(Op.PLACE)
_ACT: Final = int(Op.ACT)
_ACCEPT: Final = int(Op.ACCEPT)
_A_OF_LAST: Final = 3 - STEP_WIDTH  #: where the last step has its argument a
#: the ends that count towards `max_failed`
_FAILURES: Final = (FAILED, TIMED_OUT)

#: read in place of a tenant that the ledger does not know
_NOBODY: Final = Tenant("")


class Draft:
    """The record that is being built, and the state as it will be after it."""

    __slots__ = (
        "_bulk",
        "_jobs",
        "_masks",
        "_note_numbers",
        "_phase",
        "_ready",
        "_replicas",
        "_tenants",
        "_workers",
        "accepts",
        "actors",
        "acts",
        "avoided",
        "avoids",
        "bytes",
        "counts",
        "ended",
        "ends",
        "evidence",
        "extra_all",
        "facts",
        "failed",
        "freezes",
        "gone",
        "idle",
        "lacking",
        "left_queue",
        "moved",
        "next_num",
        "notes",
        "numbered",
        "reprioritized",
        "schedules",
        "stalls",
        "started",
        "state",
        "steps",
        "time_ms",
        "tombstones",
        "turned",
    )

    def __init__(self, state: State, time_ms: int) -> None:
        self.state = state
        self.time_ms = time_ms
        self.turned = False  # a member was frozen, or runs on
        # consecutive jobs of one tenant are one item; in the order of job numbers
        self.accepts: list[tuple[str, list[Any]]] = []
        self.extra_all = 0
        self.next_num = state.next_num
        self.steps: list[int] = []
        self.facts: list[int] = []
        self.notes: list[str] = []
        self.acts: list[AnyAct] = []
        self.evidence: list[int] = []
        self.actors: list[int] = []
        self.bytes = 0
        self.counts = False  # whether this record starts usage accounting or changes its half-life
        self.ends: set[int] = set()  # numbers of jobs with a member that this record asks to end
        self.idle: list[tuple[Member, Fact]] = []  # members that report idle GPUs, for events
        self.stalls: list[tuple[Job, Stalled]] = []  # stalls that begin or are over, for events
        self.gone: set[Member] = set()
        self.numbered = 0  # workers that the ledger did not know before
        self.started: set[Job] = set()  # jobs whose first replica starts with this record
        self.left_queue = 0  # entries of the queue that this record ends
        #: how many more transitions this record has than steps: one step may end many replicas, one of no job none
        self.moved = 0
        #: by tenant: unknown jobs whose cancels this record remembers (True) or forgets
        self.tombstones: dict[str, dict[str, bool]] = {}
        self.reprioritized: set[int] = set()  # numbers of jobs that get another priority with this record
        #: by job number: workers with devices that the job avoids from this record on. Such a job stays in its old
        #: queue group until the record is folded. Ordered, because fold numbers the new shapes in this order
        self.avoided: dict[int, set[int]] = {}
        #: by worker number and job number: the slots that the job avoids from this record on; only what it changes
        self.avoids: dict[int, dict[int, int]] = {}
        #: by tenant and name: schedules that this record changes, as they will be; None for one that it removes
        self.schedules: dict[tuple[str, str], Schedule | None] = {}
        self.freezes: dict[int, list[Freeze]] = {}  # by job number: this record's words on freezing and resuming it
        #: by job number: workers that refused the job in this record because they lack what it needs
        self.lacking: dict[int, list[int]] = {}
        self.failed: dict[Job, int] = {}  # how many replicas of a job end FAILED or TIMED_OUT with this record
        #: exit code and reason of the attempts of gang members that end in this record
        self.ended: dict[Replica, tuple[int, str]] = {}
        # the rows that this record changes
        self._tenants: dict[str, DraftTenant] = {}
        self._workers: dict[int, DraftWorker] = {}
        self._jobs: dict[Job, DraftJob] = {}
        self._replicas: dict[Replica, DraftReplica] = {}
        self._note_numbers: dict[str, int] = {}
        self._phase: dict[Member, int] = {}
        self._masks: dict[Member, int] = {}
        self._ready: dict[Member, bool] = {}
        self._bulk = BULK_STEPS * STEP_WIDTH, BULK_BYTES  # the steps and bytes at which `bulk_full` becomes true

    # ------------------------------------------------------------------------- what will be, once folded

    def tenant(self, name: str) -> Tenant | DraftTenant:
        """Return a read-only view of a tenant as it will be after this record; an empty one if it is not known."""
        return self._tenants.get(name) or self.state.tenants.get(name) or _NOBODY

    def worker(self, worker: Worker) -> Worker | DraftWorker:
        """Return a read-only view of a worker as it will be after this record."""
        return self._workers.get(worker.num) or worker

    def job(self, job: Job) -> Job | DraftJob:
        """Return a read-only view of a job as it will be after this record."""
        return self._jobs.get(job) or job

    def replica(self, replica: Replica) -> Replica | DraftReplica:
        """Return a read-only view of a replica as it will be after this record."""
        return self._replicas.get(replica) or replica

    def change_tenant(self, name: str) -> DraftTenant:
        """Return the tenant's entry in this draft, for changes."""
        row = self._tenants.get(name)
        if row is None:
            row = self._tenants[name] = DraftTenant(self.state.tenants.get(name) or _NOBODY)
        return row

    def change_worker(self, worker: Worker) -> DraftWorker:
        """Return the worker's entry in this draft, for changes."""
        row = self._workers.get(worker.num)
        if row is None:
            row = self._workers[worker.num] = DraftWorker(worker)
        return row

    def change_job(self, job: Job) -> DraftJob:
        """Return the job's entry in this draft, for changes."""
        row = self._jobs.get(job)
        if row is None:
            row = self._jobs[job] = DraftJob(job)
        return row

    def _change(self, replica: Replica) -> DraftReplica:
        row = self._replicas.get(replica)
        if row is None:
            row = self._replicas[replica] = DraftReplica(replica)
        return row

    def is_live(self, job: Job) -> bool:
        """Return whether any replica of a job has not ended after this record."""
        return bool(self.job(job).fresh) or any(not IS_TERMINAL[self.replica(row).state] for row in job.rows.values())

    def jobs_over(self) -> Counter[str]:
        """Count, by tenant, the jobs that are over with this record: none of their replicas lives or holds devices.

        It reads all that the record changes.
        """
        gone = Counter(member.replica.job for member in self.gone)
        changed = {*self._jobs, *gone, *(replica.job for replica in self._replicas)}
        ended = (job for job in changed if not job.over and not self.is_live(job) and job.held == gone[job])
        return Counter(job.tenant for job in ended)

    def leaving(self) -> Iterator[int]:
        """Yield the number of its job for each replica that this record takes off its worker."""
        for replica, row in self._replicas.items():
            if replica.state != QUEUED and (row.state == QUEUED or IS_TERMINAL[row.state]):
                yield replica.job.num

    def phase_of(self, member: Member) -> int:
        """Return a member's phase as it will be after this record."""
        return self._phase.get(member, member.phase)

    def mask_of(self, member: Member) -> int:
        """Return the slots that a member holds as it will be after this record."""
        return self._masks.get(member, member.mask)

    @property
    def load(self) -> int:
        """What the jobs accepted in this record count towards the memory bound."""
        return self.next_num - self.state.next_num + self.extra_all

    def load_of(self, tenant: str) -> int:
        """Return what the jobs of one tenant that this record accepts count towards the memory bound."""
        row = self._tenants.get(tenant)
        return row.load if row is not None else 0

    @property
    def empty(self) -> bool:
        return not (self.accepts or self.steps or self.facts or self.acts)

    @property
    def full(self) -> bool:
        """Whether the record takes no more events: it is near its size limit (ledger-rules H5), or slow to fold."""
        return (
            self.bytes > FULL_BYTES
            or len(self.steps) + self.moved * STEP_WIDTH > STEPS_MAX * STEP_WIDTH
            or self.next_num - self.state.next_num > ACCEPTS_MAX
        )

    @property
    def steps_left(self) -> int:
        """How many more steps may be added, checking `full` before each."""
        if self.full:
            return 0
        in_steps = STEPS_MAX - self.moved - len(self.steps) // STEP_WIDTH
        return 1 + min(in_steps, (FULL_BYTES - self.bytes) // STEP_BYTES)

    def begin_bulk(self) -> None:
        """Start the bulk part: from here on `bulk_full` limits how much cancels, deadlines and rejections may write."""
        self._bulk = len(self.steps) + (self.moved + BULK_STEPS) * STEP_WIDTH, self.bytes + BULK_BYTES

    @property
    def bulk_full(self) -> bool:
        """Whether the bulk part is full; the remaining bulk work goes into the next record."""
        steps = len(self.steps) + self.moved * STEP_WIDTH
        return self.full or steps >= self._bulk[0] or self.bytes > self._bulk[1]

    # ------------------------------------------------------------------------------------------ steps

    def note(self, text: str, *, always: bool = False) -> int:
        """Add a note to this record, unless it has it already; return its number from 1 on, or 0 if there is none.

        When the record is full, a new text is dropped unless `always`: the transition matters, its explanation does
        not.
        """
        if not text:
            return 0
        text = shown(text)[:NOTE_CHARS_MAX]  # texts come from tenants and workers, and are shown in terminals
        known = self._note_numbers.get(text)
        if known is not None:
            return known
        if self.bytes > FULL_BYTES and not always:
            return 0
        self.notes.append(text)
        self.bytes += len(text.encode()) + 3
        number = self._note_numbers[text] = len(self.notes)
        return number

    @contextlib.contextmanager
    def by(self, actor: str) -> Iterator[None]:
        """Attribute every step made inside the block to this actor (see `records.actor`; "" for none)."""
        first = len(self.steps)
        yield
        if actor and len(self.steps) > first:
            self.actors += (first, len(self.steps), self.note(actor, always=True))
            self.bytes += 2 * STEP_BYTES

    def step(self, op: int, num: int, index: int, a: int = 0, b: int = 0, c: int = 0) -> None:
        self.steps += (op, num, index, a, b, c)
        self.bytes += STEP_BYTES

    def _step_of_none(self, op: int) -> None:
        """Say that an act, or new jobs, were decided after the steps before."""
        self.step(op, NO_JOB, 0)
        self.moved -= 1

    def lacks(self, job: Job, worker: Worker) -> None:
        """Record that a worker lacks what a job needs."""
        self.add(Lacks(job.num, worker.num))
        self.lacking.setdefault(job.num, []).append(worker.num)

    def avoid(self, job: Job, worker: Worker, slots: int) -> None:
        """Record that a job avoids these slots of a worker from now on; 0 lifts the avoidance of that worker."""
        self.add(Avoid(job.num, worker.num, slots))
        of_worker = self.avoids.setdefault(worker.num, {})
        before = of_worker.get(job.num, dict(job.avoid).get(worker.num, 0))
        of_worker[job.num] = before | slots if slots else 0
        workers = self.avoided.setdefault(job.num, set())
        if slots:
            workers.add(worker.num)
        else:
            workers.discard(worker.num)

    def add(self, act: AnyAct) -> None:
        if self.steps or self.accepts:
            self._step_of_none(_ACT)
        self.acts.append(act)
        if isinstance(act, Freeze):
            self.freezes.setdefault(act.job, []).append(act)
        self.bytes += len(encode_act(act))

    def accept(self, tenant: str, name: str, body: bytes, numbers: Ranges, traceparent: str) -> int:
        """Accept a new job with replicas of these numbers, and return the number that fold will give the job."""
        accepts, size, count = self.accepts, len(body), count_of(numbers)
        replicas = count if len(numbers) == 1 and not numbers[0][0] else [[first, last] for first, last in numbers]
        written = written_id(name, body)
        steps = self.steps
        if is_later := bool(steps) and steps[-STEP_WIDTH] != _ACCEPT:
            self._step_of_none(_ACCEPT)
        if accepts and accepts[-1][0] == tenant and not is_later:
            accepts[-1][1].extend((written, body, replicas, traceparent))
        else:  # fold numbers jobs in this order, so a tenant may have several items
            if steps:
                steps[_A_OF_LAST] += 1
            accepts.append((tenant, [written, body, replicas, traceparent]))
            self.bytes += len(tenant) + 8
        row = self.change_tenant(tenant)
        row.live += 1
        row.load += 1
        self.bytes += size + len(written) + len(traceparent) + 12 * len(numbers)
        if count >= REPLICAS_APIECE or size >= BYTES_APIECE:
            extra = extra_of(count, len(body))
            row.load += extra
            self.extra_all += extra
        num = self.next_num
        self.next_num = num + 1
        return num

    def end_session(self, worker: Worker, why: str) -> None:
        """Write GONE. The old session's report numbers are dropped: they must not count for the next session."""
        self.add(Gone(worker.num, why))
        self.change_worker(worker).session = ""
        facts = self.facts
        self.facts = [x for at in range(0, len(facts), 2) if facts[at] != worker.num for x in facts[at : at + 2]]

    def tombstone(self, tenant: str, job: str, sequence: int) -> None:
        self.add(Tombstone(tenant, job, sequence))
        self.tombstones.setdefault(tenant, {})[job] = True

    def untomb(self, tenant: str, job: str) -> None:
        self.add(Untomb(tenant, job))
        self.tombstones.setdefault(tenant, {})[job] = False

    def claim(self, replica: Replica, member: Member, master: str, ran_ms: int = 0) -> None:
        """Record that a member has its devices, and has run for so many ms already; `master` is the gang's address."""
        self.step(Op.CLAIM, replica.job.num, replica.index, ran_ms, 0, self.note(master, always=True) if master else 0)
        self._phase[member] = AT_CLAIMED
        self._change(replica).state = CLAIMED

    def start(self, replica: Replica, member: Member, ran_ms: int = 0, address: str = "") -> None:
        """Record that a member has started, and has run for so many ms already; at the address its ports are
        reached."""
        self.step(
            Op.START, replica.job.num, replica.index, ran_ms, 0, self.note(address, always=True) if address else 0
        )
        self.started.add(replica.job)
        self._phase[member] = AT_RUNNING
        self._change(replica).state = RUNNING

    def ran(self, replica: Replica, member: Member, ran_ms: int, result: int | None) -> None:
        """Record that a placed member was claimed, ran for so many ms and succeeded: most attempts of short jobs."""
        self.step(Op.RAN, replica.job.num, replica.index, exiting(SUCCEEDED, result), ran_ms)
        self.started.add(replica.job)
        self._phase[member] = AT_EXITED
        row = self._change(replica)
        row.state = SUCCEEDED
        row.member = None

    def is_ready(self, member: Member) -> bool:
        """Return whether a member is ready for work after this record."""
        return self._ready.get(member, member.ready)

    def ready(self, member: Member, is_ready: bool, why: str) -> None:
        """Record that the worker reports a running member ready, or not ready any more."""
        replica = member.replica
        self.step(Op.READY, replica.job.num, replica.index, int(is_ready), 0, self.note(why))
        self._ready[member] = is_ready

    def freeze(self, replica: Replica, member: Member, to: int) -> None:
        """Record that the worker reports a replica FROZEN, and its devices free, or RUNNING again."""
        self.step(Op.FREEZE, replica.job.num, replica.index, to)
        self._change(replica).state = to
        self.turned = True
        if to == FROZEN:
            self._hold(member, 0)

    def resume(self, replica: Replica, member: Member, why: str, *, leased: bool) -> None:
        """Record that a frozen member's devices are leased to it again, or that its worker does not give them."""
        self.step(Op.RESUME, replica.job.num, replica.index, int(leased), 0, self.note(why))
        self._hold(member, member.home if leased else 0)

    def _hold(self, member: Member, mask: int) -> None:
        tenant, before = self.change_tenant(member.replica.job.tenant), self.mask_of(member)
        tenant.gpus += mask.bit_count() - before.bit_count()
        if self.state.half_life_ms:
            tenant.rate_milli += rate_of(member, mask) - rate_of(member, before)
        self._masks[member] = mask

    def exit(self, replica: Replica, member: Member, to: int, code: int, why: str, result: int | None = None) -> None:
        """Record that the attempt ended and its processes are gone. The member remains until its devices are free."""
        self.step(Op.EXIT, replica.job.num, replica.index, exiting(to, result), code, self.note(why) if why else 0)
        if to in _FAILURES:
            self._fails(replica.job)
        if to == EXITED:
            self.ended[replica] = code, why
        self._phase[member] = AT_EXITED
        row = self._change(replica)
        row.state = to
        row.member = None

    def free(self, member: Member) -> None:
        """Record that the devices of a member whose attempt is over were seen free."""
        replica = member.replica
        self.step(Op.FREE, replica.job.num, replica.index, packed(member.fence))
        self.gone.add(member)
        self._leave(member)

    def over(self, op: int, replica: Replica, member: Member, to: int, why: str, code: int = 0) -> None:
        """Write REFUSE, WITHDRAW or LOSE: the attempt ended and holds no devices any more."""
        self.step(op, replica.job.num, replica.index, to, code, self.note(why))
        if to in _FAILURES:
            self._fails(replica.job)
        if to == EXITED:
            self.ended[replica] = 0, why
        row = self._change(replica)
        row.state = to
        row.member = None
        self.gone.add(member)
        self._leave(member)

    def keep_lost(self, replica: Replica, why: str) -> None:
        """Write LOSE for a job with `on_partition` keep: the member keeps its devices."""
        self.step(Op.LOSE, replica.job.num, replica.index, LOST_KEPT, 0, self.note(why))
        self._change(replica).state = LOST_KEPT

    def _leave(self, member: Member) -> None:
        tenant = self.change_tenant(member.replica.job.tenant)
        mask = self.mask_of(member)
        tenant.gpus -= mask.bit_count()
        if self.state.half_life_ms:
            tenant.rate_milli -= rate_of(member, mask)

    def quarantine(self, member: Member, mask: int) -> None:
        replica = member.replica
        self.step(Op.QUARANTINE, replica.job.num, replica.index, packed(member.fence), mask)
        if self.mask_of(member) != member.home:
            self._hold(member, member.home)

    def end(self, replica: Replica, to: int, becomes: int, why: str, notice_s: int = 0) -> None:
        """Ask a replica's member to end: `to` is ENDING or CANCELLING, `becomes` the state after that.

        A member with a checkpoint signal gets it at once, and is ended `notice_s` later.
        """
        self.step(Op.END, replica.job.num, replica.index, to, ending(becomes, notice_s), self.note(why))
        self._change(replica).state = to
        self.ends.add(replica.job.num)

    def move(self, replica: Replica, to: int, why: str, code: int = 0) -> None:
        row = self._change(replica)
        if to in _FAILURES:
            self._fails(replica.job)
        if row.state == QUEUED:
            self.left_queue += 1
        self.step(Op.MOVE, replica.job.num, replica.index, to, code, self.note(why))
        row.state = to

    def _fails(self, job: Job) -> None:
        self.failed[job] = self.failed.get(job, 0) + 1

    def move_fresh(self, job: Job, to: int, why: str, code: int = 0, only: Ranges | None = None) -> bool:
        """End the replicas that were never placed, or those `only`; return False if there are none."""
        row = self.change_job(job)
        moved = row.fresh if only is None else both(row.fresh, only)
        for first, last in moved:
            self.step(Op.MOVE_FRESH, job.num, first, moving(to, code), last, self.note(why))
            if job.size <= LISTED_MAX:
                self.moved += last - first
            self.left_queue += 1
        row.fresh = without(row.fresh, moved)
        return bool(moved)

    def backoff(self, replica: Replica, not_before: int, count: int, streak: int = 0) -> None:
        self.step(Op.BACKOFF, replica.job.num, replica.index, not_before, count, streak)
        self._change(replica).not_before = not_before

    def gang(self, job: Job, phase: int, after: int = 0, count: int = 0) -> None:
        self.step(Op.GANG, job.num, 0, phase, after, count)
        row = self.change_job(job)
        row.gang, row.after, row.count = phase, after, count

    def step_gang(self, num: int, phase: int) -> None:
        """Write a GANG step for a job, which this same draft may have accepted."""
        job = self.state.jobs.get(num)
        if job is not None:
            self.gang(job, phase)
        else:
            self.step(Op.GANG, num, 0, phase)

    def placed(self, num: int, index: int, worker_num: int, mask: int, mode: int) -> None:
        """Place a replica; `mode` is as from `records.placing`. What the tenant uses is counted by the caller."""
        self.steps += (_PLACE, num, index, worker_num, mask, mode)
        self.bytes += STEP_BYTES
        job = self.state.jobs.get(num)
        row = job.rows.get(index) if job is not None else None
        if row is not None:  # else it was never placed, and has no row before the record is folded
            self._change(row).state = PLACED

    # ----------------------------------------------------------------------------------------- record

    def record(self, leader: int, rid: int) -> Record:
        state = self.state
        level = max([state.level, *(act.level for act in self.acts if isinstance(act, Level))])
        early = [act.tag for act in self.acts if level < act.LEVEL]
        if early:  # a defect of the scheduler: older followers would stop at such a record
            raise AssertionError(f"{early} may not stand in a record of feature level {level}")
        return Record(
            level,
            state.epoch,
            leader,
            rid,
            self.time_ms,
            state.digest,
            self.accepts,
            self.steps,
            self.facts,
            self.notes,
            self.acts,
            self.evidence,
            self.actors,
        )
