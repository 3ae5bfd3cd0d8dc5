"""A record while it is being built: the steps so far, and what the state will be once they are folded.

The state changes only when a record is folded after its acknowledgement (ledger-rules H4). But one tick may decide
several things about the same replica, so the draft knows what its own steps will change: ask it, and not the state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from moorage.scheduler.core.fairshare import rate_of
from moorage.scheduler.core.ids_in_bodies import written_id
from moorage.scheduler.core.ledger.acts import AnyAct, Avoid, Gone, Level, Tombstone, encode_act
from moorage.scheduler.core.ledger.record import Record
from moorage.scheduler.core.overlay import DraftJob, DraftReplica, DraftTenant, DraftWorker
from moorage.scheduler.core.records import (
    ID_IN_BODY_LEVEL,
    RECORD_BYTES_MAX,
    STEP_WIDTH,
    Op,
    ending,
    exiting,
    packed,
)
from moorage.scheduler.core.state import (
    AT_CLAIMED,
    AT_EXITED,
    AT_PLACED,
    AT_RUNNING,
    BYTES_APIECE,
    CLAIMED,
    EXITED,
    LOST_KEPT,
    PLACED,
    QUEUED,
    REPLICAS_APIECE,
    RUNNING,
    SUCCEEDED,
    Job,
    Member,
    Replica,
    State,
    Tenant,
    Worker,
    extra_of,
)
from moorage.schemas.frames import RESULT_LEVEL, Fact, result_of
from moorage.schemas.printable import shown

#: an upper estimate of a step's encoded bytes: op, number, replica and three arguments
STEP_BYTES: Final = 30
#: the most that one member's facts write, counted while they are held back: CLAIM, START and EXIT
RUN_BYTES: Final = 3 * STEP_BYTES
NOTE_CHARS_MAX: Final = 200
#: room that is kept for acts, evidence and the record's own fields
SLACK_BYTES: Final = 96 * 1024
#: a record with more bytes than this takes no more steps
FULL_BYTES: Final = RECORD_BYTES_MAX - SLACK_BYTES
#: nor does one with so many steps or jobs: the event loop waits while it is built and folded
STEPS_MAX: Final = 2_048
ACCEPTS_MAX: Final = 1_024
#: the part of a record that cancels, deadlines and rejections may fill together (the last job may exceed it). A job has
#: up to 1,024 replicas, and there must be room left for renewals, requests and placements
BULK_STEPS: Final = STEPS_MAX // 2
BULK_BYTES: Final = FULL_BYTES // 2
_PLACE, _RUN, _DONE = int(Op.PLACE), int(Op.RUN), int(Op.DONE)
#: the details of an exit fact that say nothing beyond its code
_WELL: Final = ("exit", "")

#: what is read of a tenant that the ledger does not know
_NOBODY: Final = Tenant("")


class _Run:
    """The facts of one member in this record, held back so that one step can say all of them."""

    __slots__ = ("claimed", "code", "exited", "note", "started", "to")

    def __init__(self, claimed: bool) -> None:
        self.claimed = claimed
        self.started = False
        self.exited = False
        self.to = self.code = self.note = 0


class Draft:
    """The record of this tick."""

    __slots__ = (
        "_bulk",
        "_jobs",
        "_note_numbers",
        "_phase",
        "_replicas",
        "_runs",
        "_tenants",
        "_workers",
        "accepts",
        "actors",
        "acts",
        "avoided",
        "bytes",
        "counts",
        "ended",
        "ends",
        "evidence",
        "extra_all",
        "facts",
        "gone",
        "idle",
        "left_queue",
        "next_num",
        "notes",
        "numbered",
        "reprioritized",
        "started",
        "state",
        "steps",
        "time_ms",
        "tombstones",
    )

    def __init__(self, state: State, time_ms: int) -> None:
        self.state = state
        self.time_ms = time_ms
        self.accepts: list[tuple[str, list[Any]]] = []  # runs of one tenant, in the order of the jobs' numbers
        self.extra_all = 0
        self.next_num = state.next_num
        self.steps: list[int] = []
        self.facts: list[int] = []
        self.notes: list[str] = []
        self.acts: list[AnyAct] = []
        self.evidence: list[int] = []
        self.actors: list[int] = []
        self.bytes = 0
        self.counts = False  # whether this record turns the counting of usage on, or changes its half-life
        self.ends: set[int] = set()  # jobs by number of which this record asks some member to end
        self.idle: list[tuple[Member, Fact]] = []  # reports that a member shows no use of its devices, to be told
        self.gone: set[Member] = set()
        self.numbered = 0  # workers that were never seen before
        self.started: set[Job] = set()  # jobs of which some replica runs first with this record
        self.left_queue = 0  # replicas that this record ends while they stand in the queue
        self.tombstones: dict[str, set[str]] = {}  # by tenant: cancels of unknown jobs that this record remembers
        self.reprioritized = False  # whether an operator gives some job another priority in this record
        #: jobs by number that avoid other devices from now on, and the workers of what they did not avoid before: they
        #: stand in the group of before until the record is folded. In order, as it numbers shapes
        self.avoided: dict[int, set[int]] = {}
        self.ended: dict[
            Replica, tuple[int, str]
        ] = {}  # with which code, and why, the attempt of a gang's rank is over
        # the rows that this record changes
        self._tenants: dict[str, DraftTenant] = {}
        self._workers: dict[int, DraftWorker] = {}
        self._jobs: dict[Job, DraftJob] = {}
        self._replicas: dict[Replica, DraftReplica] = {}
        self._note_numbers: dict[str, int] = {}
        self._phase: dict[Member, int] = {}
        self._runs: dict[Member, _Run] = {}
        self._bulk = BULK_STEPS * STEP_WIDTH, BULK_BYTES  # how far the steps and bytes of `bulk_full` may go

    # ------------------------------------------------------------------------- what will be, once folded

    def level_allows(self, level: int) -> bool:
        """Whether a record may hold what needs this feature level."""
        return self.state.level >= level

    def tenant(self, name: str) -> Tenant | DraftTenant:
        """Return a tenant as this record leaves it, to read."""
        return self._tenants.get(name) or self.state.tenants.get(name) or _NOBODY

    def worker(self, worker: Worker) -> Worker | DraftWorker:
        """Return a worker as this record leaves it, to read."""
        return self._workers.get(worker.num) or worker

    def job(self, job: Job) -> Job | DraftJob:
        """Return a job as this record leaves it, to read."""
        return self._jobs.get(job) or job

    def replica(self, replica: Replica) -> Replica | DraftReplica:
        """Return a replica as this record leaves it, to read."""
        return self._replicas.get(replica) or replica

    def change_tenant(self, name: str) -> DraftTenant:
        """Return a tenant as this record leaves it, to change."""
        row = self._tenants.get(name)
        if row is None:
            row = self._tenants[name] = DraftTenant(self.state.tenants.get(name) or _NOBODY)
        return row

    def change_worker(self, worker: Worker) -> DraftWorker:
        """Return a worker as this record leaves it, to change."""
        row = self._workers.get(worker.num)
        if row is None:
            row = self._workers[worker.num] = DraftWorker(worker)
        return row

    def change_job(self, job: Job) -> DraftJob:
        """Return a job as this record leaves it, to change."""
        row = self._jobs.get(job)
        if row is None:
            row = self._jobs[job] = DraftJob(job)
        return row

    def _change(self, replica: Replica) -> DraftReplica:
        row = self._replicas.get(replica)
        if row is None:
            row = self._replicas[replica] = DraftReplica(replica)
        return row

    def phase_of(self, member: Member) -> int:
        """Return the phase in which this record leaves a member."""
        return self._phase.get(member, member.phase)

    @property
    def load(self) -> int:
        """What the jobs that it accepts count towards `jobs_max`."""
        return self.next_num - self.state.next_num + self.extra_all

    def load_of(self, tenant: str) -> int:
        """What those of one tenant count."""
        row = self._tenants.get(tenant)
        return row.load if row is not None else 0

    @property
    def empty(self) -> bool:
        return not (self.accepts or self.steps or self.facts or self.acts)

    @property
    def full(self) -> bool:
        """Whether it takes no more: it would come near the bound of a record (ledger-rules H5), or take too long."""
        return (
            self.bytes > FULL_BYTES
            or len(self.steps) > STEPS_MAX * STEP_WIDTH
            or self.next_num - self.state.next_num > ACCEPTS_MAX
        )

    @property
    def steps_left(self) -> int:
        """How many more steps it takes one by one until it is full."""
        if self.full:
            return 0
        in_steps = STEPS_MAX - len(self.steps) // STEP_WIDTH
        return 1 + min(in_steps, (FULL_BYTES - self.bytes) // STEP_BYTES)

    def begin_bulk(self) -> None:
        """From here on, whoever checks `bulk_full` may fill the part of the record that is for bulk."""
        self._bulk = len(self.steps) + BULK_STEPS * STEP_WIDTH, self.bytes + BULK_BYTES

    @property
    def bulk_full(self) -> bool:
        """Whether that part is full: what comes by the thousand goes on in the next record."""
        return self.full or len(self.steps) >= self._bulk[0] or self.bytes > self._bulk[1]

    # ------------------------------------------------------------------------------------------ steps

    def note(self, text: str, *, always: bool = False) -> int:
        """The 1-based number of a note; 0 stands for none. One text is written once, however many steps name it.

        Beyond the record's bound a new text is left out unless `always`: the transition counts, not its story.
        """
        if not text:
            return 0
        text = shown(text)[:NOTE_CHARS_MAX]  # of tenants, workers and what runs there, and shown in many places
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
        """Note this actor (see `records.actor`; "" for none) for every step that is made inside."""
        self.settle()
        first = len(self.steps)
        yield
        self.settle()
        if actor and len(self.steps) > first:
            self.actors += (first, len(self.steps), self.note(actor, always=True))
            self.bytes += 2 * STEP_BYTES

    def step(self, op: int, num: int, index: int, a: int = 0, b: int = 0, c: int = 0) -> None:
        self.steps += (op, num, index, a, b, c)
        self.bytes += STEP_BYTES

    def avoid(self, job: Job, worker: Worker, slots: int) -> None:
        """Write that a job avoids these slots of a worker from now on; without any, that it avoids none of them."""
        self.add(Avoid(job.num, worker.num, slots))
        workers = self.avoided.setdefault(job.num, set())
        if slots:
            workers.add(worker.num)
        else:
            workers.discard(worker.num)

    def add(self, act: AnyAct) -> None:
        self.acts.append(act)
        self.bytes += len(encode_act(act))

    def accept(self, tenant: str, name: str, body: bytes, replicas: int, traceparent: str) -> int:
        """Accept a new job; returns the number that fold will give it."""
        accepts, size = self.accepts, len(body)
        written = written_id(name, body) if self.level_allows(ID_IN_BODY_LEVEL) else name
        if accepts and accepts[-1][0] == tenant:
            accepts[-1][1].extend((written, body, replicas, traceparent))
        else:  # fold counts the jobs in this order: one tenant's may stand in parts
            accepts.append((tenant, [written, body, replicas, traceparent]))
            self.bytes += len(tenant) + 8
        row = self.change_tenant(tenant)
        row.live += 1
        row.load += 1
        self.bytes += size + len(written) + len(traceparent) + 12
        if replicas >= REPLICAS_APIECE or size >= BYTES_APIECE:
            extra = extra_of(replicas, len(body))
            row.load += extra
            self.extra_all += extra
        num = self.next_num
        self.next_num = num + 1
        return num

    def end_session(self, worker: Worker, why: str) -> None:
        """GONE: facts of the old session are folded, but its frame numbers must not count for the next session."""
        self.add(Gone(worker.num, why))
        self.change_worker(worker).session = ""
        facts = self.facts
        self.facts = [x for at in range(0, len(facts), 2) if facts[at] != worker.num for x in facts[at : at + 2]]

    def tombstone(self, tenant: str, job: str, sequence: int) -> None:
        self.add(Tombstone(tenant, job, sequence))
        self.tombstones.setdefault(tenant, set()).add(job)

    def result_of(self, detail: str) -> int | None:
        """Return which message has the result of an attempt, by the detail of its end; None where no record may hold
        it, or the worker has not reported it."""
        return result_of(detail) if self.state.level >= RESULT_LEVEL else None

    def complete_runs(self, members: list[Member], results: list[int | None]) -> bool:
        """These have been claimed, started, ended with success and these results, and are free: one step each.

        False, and nothing was done, unless each is there once, is placed and no gang's, and this record has no step
        about it or its replica yet.
        """
        steps, changed, started = self.steps, self._replicas, self.started
        unique = set(members)
        if len(unique) != len(members) or not self.gone.isdisjoint(unique):
            return False
        for member in members:
            replica = member.replica
            if member.phase != AT_PLACED or replica.state != PLACED or replica in changed or replica.job.gang:
                return False
        for member, result in zip(members, results, strict=True):
            replica = member.replica
            job = replica.job
            steps += (_RUN, job.num, replica.index, SUCCEEDED if result is None else exiting(SUCCEEDED, result), 0, 0)
            row = changed[replica] = DraftReplica(replica)
            row.state = SUCCEEDED
            row.member = None
            started.add(job)
            self._leave(member)
        self.gone |= unique
        self.bytes += STEP_BYTES * len(members)
        return True

    def take_normal_fact(self, member: Member, fact: Fact) -> bool:
        """The fast path for facts: take the next one of a run without any trouble (claimed, started, exited, freed).

        False for any other fact, and for a gang's member: then nothing was done.
        """
        kind, replica, run = fact.kind, member.replica, self._runs.get(member)
        if run is None:
            if kind != "claimed" or member.phase != AT_PLACED or replica.job.gang or replica in self._replicas:
                return False
            if replica.state != PLACED:
                return False
            self._runs[member] = _Run(True)
            self.bytes += RUN_BYTES
            self._phase[member] = AT_CLAIMED
            self._change(replica).state = CLAIMED
        elif kind == "started":
            if not run.claimed or run.started or run.exited:
                return False
            run.started = True
            self.started.add(replica.job)
            self._phase[member] = AT_RUNNING
            self._change(replica).state = RUNNING
        elif kind == "exited":
            if not run.started or run.exited or fact.code:
                return False
            result = None
            if fact.detail not in _WELL and (result := self.result_of(fact.detail)) is None:
                return False
            run.exited = True
            run.to = exiting(SUCCEEDED, result)
            self._phase[member] = AT_EXITED
            row = self._change(replica)
            row.state = SUCCEEDED
            row.member = None
        elif kind == "freed" and run.exited:
            self.free(member)
        else:
            return False
        return True

    def claim(self, replica: Replica, member: Member, master: str) -> None:
        if master or replica.job.gang:
            self.step(Op.CLAIM, replica.job.num, replica.index, 0, 0, self.note(master, always=True))
        else:
            self._runs[member] = _Run(True)
            self.bytes += RUN_BYTES
        self._phase[member] = AT_CLAIMED
        self._change(replica).state = CLAIMED

    def start(self, replica: Replica, member: Member) -> None:
        run = self._runs.get(member)
        if run is not None and run.claimed:
            run.started = True
        else:
            self.step(Op.START, replica.job.num, replica.index)
        self.started.add(replica.job)
        self._phase[member] = AT_RUNNING
        self._change(replica).state = RUNNING

    def freeze(self, replica: Replica, member: Member, to: int) -> None:
        """Its worker reports that it is FROZEN, or that it is RUNNING again."""
        self._settle(member)
        self.step(Op.FREEZE, replica.job.num, replica.index, to)
        self._change(replica).state = to

    def exit(self, replica: Replica, member: Member, to: int, code: int, why: str, result: int | None = None) -> None:
        """The attempt is over, its tree gone; the member lingers until its devices are seen free."""
        run = self._runs.get(member)
        if run is not None and not run.started:
            self._settle(member)
            run = None
        if run is None:
            run = self._runs[member] = _Run(False)
            self.bytes += RUN_BYTES
        run.exited = True
        run.to, run.code, run.note = exiting(to, result), code, self.note(why)
        if to == EXITED:
            self.ended[replica] = code, why
        self._phase[member] = AT_EXITED
        row = self._change(replica)
        row.state = to
        row.member = None

    def free(self, member: Member) -> None:
        replica = member.replica
        run = self._runs.get(member)
        if run is not None and run.exited:
            del self._runs[member]
            op = _RUN if run.claimed else _DONE
            self.steps += (op, replica.job.num, replica.index, run.to, run.code, run.note)
            self.bytes += STEP_BYTES - RUN_BYTES
        else:
            self.step(Op.FREE, replica.job.num, replica.index, packed(member.fence, member.worker.num))
        self.gone.add(member)
        self._leave(member)

    def settle(self) -> None:
        """Write the steps that were held back: before any step that must come after them, and at the end."""
        for member in list(self._runs):
            self._settle(member)

    def _settle(self, member: Member | None) -> None:
        run = self._runs.pop(member, None) if member is not None else None
        if member is None or run is None:
            return
        self.bytes -= RUN_BYTES
        num, index = member.replica.job.num, member.replica.index
        if run.started:
            self.step(Op.BEGIN, num, index)
        elif run.claimed:
            self.step(Op.CLAIM, num, index)
        if run.exited:
            self.step(Op.EXIT, num, index, run.to, run.code, run.note)

    def over(self, op: int, replica: Replica, member: Member, to: int, why: str, code: int = 0) -> None:
        """REFUSE, WITHDRAW or LOSE: the attempt is over, and holds no devices any more."""
        self._settle(member)
        self.step(op, replica.job.num, replica.index, to, code, self.note(why))
        if to == EXITED:
            self.ended[replica] = 0, why
        row = self._change(replica)
        row.state = to
        row.member = None
        self.gone.add(member)
        self._leave(member)

    def keep_lost(self, replica: Replica, why: str) -> None:
        """LOSE with on_partition keep: the member keeps its devices."""
        self._settle(replica.member)
        self.step(Op.LOSE, replica.job.num, replica.index, LOST_KEPT, 0, self.note(why))
        self._change(replica).state = LOST_KEPT

    def _leave(self, member: Member) -> None:
        tenant = self.change_tenant(member.replica.job.tenant)
        tenant.gpus -= member.mask.bit_count()
        if self.state.half_life_ms:
            tenant.rate_milli -= rate_of(member)

    def quarantine(self, member: Member, mask: int) -> None:
        self._settle(member)
        replica = member.replica
        self.step(Op.QUARANTINE, replica.job.num, replica.index, packed(member.fence, member.worker.num), mask)

    def end(self, replica: Replica, to: int, becomes: int, why: str, notice_s: int = 0) -> None:
        """Ask the member to end; `to` is ENDING or CANCELLING. It gets its checkpoint signal `notice_s` earlier."""
        self._settle(replica.member)
        self.step(Op.END, replica.job.num, replica.index, to, ending(becomes, notice_s), self.note(why))
        self._change(replica).state = to
        self.ends.add(replica.job.num)

    def move(self, replica: Replica, to: int, why: str, code: int = 0) -> None:
        self._settle(replica.member)
        row = self._change(replica)
        if row.state == QUEUED:
            self.left_queue += 1
        self.step(Op.MOVE, replica.job.num, replica.index, to, code, self.note(why))
        row.state = to

    def backoff(self, replica: Replica, not_before: int, count: int) -> None:
        self._settle(replica.member)
        self.step(Op.BACKOFF, replica.job.num, replica.index, not_before, count)
        self._change(replica).not_before = not_before

    def gang(self, job: Job, phase: int, after: int = 0, count: int = 0) -> None:
        for replica in job.replicas:
            self._settle(replica.member)
        self.step(Op.GANG, job.num, 0, phase, after, count)
        row = self.change_job(job)
        row.gang, row.after, row.count = phase, after, count

    def step_gang(self, num: int, phase: int) -> None:
        """GANG for a job that this draft may just have accepted."""
        job = self.state.jobs.get(num)
        if job is not None:
            self.gang(job, phase)
        else:
            self.step(Op.GANG, num, 0, phase)

    def placed(self, num: int, index: int, worker_num: int, mask: int, mode: int) -> None:
        """Place a replica; one accepted in this very draft has no object yet."""
        self.steps += (_PLACE, num, index, worker_num, mask, mode)
        self.bytes += STEP_BYTES
        job = self.state.jobs.get(num)
        if job is not None:
            self._change(job.replicas[index]).state = PLACED

    # ----------------------------------------------------------------------------------------- record

    def record(self, leader: int, rid: int) -> Record:
        state = self.state
        self.settle()
        level = max([state.level, *(act.level for act in self.acts if isinstance(act, Level))])
        early = [act.tag for act in self.acts if level < act.LEVEL]
        if early:  # a defect of ours: followers of an older release would stop at such a record
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
