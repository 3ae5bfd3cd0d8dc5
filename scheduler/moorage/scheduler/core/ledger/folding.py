"""A record being folded: each step and new job changes the state at once, and each act changes it by itself.

`fold` folds whole records; a leader folds each of its decisions as it is made (`core.draft`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from moorage.scheduler.core.ledger import fairkeys, fairshare, holding
from moorage.scheduler.core.ledger.gang_sets import NO_SET, common_of
from moorage.scheduler.core.ledger.records import (
    BY_WORKER,
    ENDS,
    MODE_BITS,
    MOVED,
    NO_JOB,
    NOT_BY_ITSELF,
    NOTICE_BITS,
    PREEMPTIBLE,
    REPORTED,
    STATE_BITS,
    STATE_MASK,
    STEP_WIDTH,
    WITH_SUPERVISOR,
    Count,
    GangPhase,
    Op,
    id_of,
    start_note,
    unpacked,
)
from moorage.scheduler.core.ledger.state import (
    AT_CLAIMED,
    AT_EXITED,
    AT_RUNNING,
    AVOID_MAX,
    CANCELLED,
    CANCELLING,
    CLAIMED,
    ENDING,
    EXITED,
    FAILED,
    FAILURES,
    FREEZES,
    FROZEN,
    IS_TERMINAL,
    LEGAL,
    LISTED_MAX,
    LOST_KEPT,
    NOT_READY,
    ON_WORKER,
    PLACED,
    QUEUED,
    QUICK_MAX,
    QUICK_MS,
    QUICK_OF_REPLICA_MAX,
    RAN_MAX,
    RANGE,
    READY,
    READY_GAP_MS,
    RUNNING,
    SEVERAL,
    STORED_LEVEL,
    SUCCEEDED,
    TELLS_READY,
    WELL_MS,
    WORKED,
    Attempt,
    Ended,
    Job,
    Replica,
    State,
    Tenant,
    Worker,
    extra_of,
    new_job,
)
from moorage.schemas.errors import reason_of
from moorage.schemas.frames import ABOUT_THE_JOB
from moorage.schemas.job import STATES
from moorage.schemas.ranges import ONE, Ranges, both, count_of, first_numbers, is_in, joined, without

_MODE_MASK: Final = (1 << MODE_BITS) - 1
_PLACE: Final = int(Op.PLACE)
_FAILS: Final = frozenset((FAILED, QUEUED, EXITED))
_NOTICE_MASK: Final = (1 << NOTICE_BITS) - 1
ACT: Final = int(Op.ACT)
ACCEPT: Final = int(Op.ACCEPT)
MORE_NAMED: Final = "the steps of a record name more acts or new jobs than it has"


class FoldError(Exception):
    """The record does not fit this state: another ledger, another version, or a defect. Stop; never skip it."""


@dataclass(slots=True, eq=False, repr=False)
class Folded:
    """What a record changed, for the leader's answers, frames and events."""

    accepted: list[Job] = field(default_factory=list)
    jobs: dict[int, Job] = field(default_factory=dict)  # jobs with a new revision
    placed: list[Attempt] = field(default_factory=list)
    #: attempts whose wanted state changed: to end, or a gang to start
    touched: list[Attempt] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)
    compacted: list[Job] = field(default_factory=list)  # ended ones that left memory
    workers: list[Worker] = field(default_factory=list)  # joined, left or changed
    was_out: dict[Worker, int] = field(default_factory=dict)  # of those, `out` before the record
    #: for how many ms attempts ran that ended by themselves and were never frozen
    ran: dict[Job, list[int]] = field(default_factory=dict)
    forgotten: list[Worker] = field(default_factory=list)
    gave: list[Worker] = field(default_factory=list)  # on which an attempt left, or has other slots now


class Folding:
    """Folds one record; collects the changed rows, so that each row is hashed once."""

    __slots__ = (
        "_numbers",
        "_weighed",
        "accepts",
        "acts",
        "attempts",
        "epoch",
        "expired",
        "finished",
        "format",
        "notes",
        "out",
        "raised",
        "replicas",
        "rows",
        "seq",
        "state",
        "time",
    )

    def __init__(self, state: State, seq: int, time: int, epoch: int, format: int, notes: list[str]) -> None:
        self.state = state
        self.seq = seq
        self.time = time
        self.epoch = epoch
        self.format = format
        self.notes = notes
        self.out = Folded()
        self.replicas: dict[Replica, None] = {}
        self.attempts: dict[Attempt, None] = {}
        self.rows: dict[Worker | Tenant, None] = {}
        self.finished: list[tuple[bytes, bytes, int, int]] = []  # rows that the table of finished jobs gets
        self.raised = False  # it raises the feature level: what lasts from that level on is counted in all rows
        self.expired = 0  # how many of its oldest it loses then
        #: the acts and new jobs of a whole record that its steps name
        self.acts: Iterator[Any] = iter(())
        self.accepts: Iterator[tuple[str, list[Any]]] = iter(())

    # ------------------------------------------------------------------------------------ from first to last

    def open(self) -> None:
        """Let time pass until the record's."""
        state = self.state
        state.time_ms = self.time
        if state.half_life_ms and fairshare.advance(state):
            self.rows.update(dict.fromkeys(state.tenants.values()))

    def reports(self, reports: list[int]) -> None:
        for at in range(0, len(reports), 2):
            worker = self.state.worker_by_num[reports[at]]
            worker.no = reports[at + 1]
            self.rows[worker] = None

    def end(self) -> Folded:
        """Finish the record, which was weighed: the table of ended jobs, the digest and the sequence."""
        state = self.state
        finished, before = state.finished, state.finished.row
        finished.add_all(self.finished)
        for _ in range(self.expired):
            finished.drop_oldest()
        state.digest += finished.row - before
        self._renew_digest()
        state.seq = self.seq
        return self.out

    def weigh(self) -> None:
        """Make the numbers of the rows that this record has changed. A leader can still take back all of it."""
        state, jobs = self.state, self.out.jobs.values()
        for job in jobs if state.preempting else ():
            if job.preempts is not None and job.live == 0:
                job.preempts = None
                state.preempting.pop(job.num, None)
        level, rows = state.level, state.rows() if self.raised else (*jobs, *self.attempts, *self.rows)
        self._weighed = [*self.replicas, *rows]
        self._numbers = [0 if IS_TERMINAL[each.state] else each.digest_row(level) for each in self.replicas]
        self._numbers += [each.digest_row(level) for each in self._weighed[len(self.replicas) :]]

    def _renew_digest(self) -> None:
        """Replace the digest of each changed row in the state's digest, note the jobs that are over now."""
        state, out = self.state, self.out
        digest, ended, history = state.digest, state.ended, state.ceilings.history
        for row, new in zip(self._weighed, self._numbers, strict=True):
            digest += new - row.row
            row.row = new
        for job in out.jobs.values():
            if len(job.history) >= history:
                self.shorten_history(job)
            job.folded = job.rev
            # a job may leave memory only once all replicas have ended and all devices were reported free
            if job.live == 0 and job.held == 0 and not job.over:
                job.over = True
                tenant = state.tenants[job.tenant]
                tenant.live -= 1
                if job.hold is not None:
                    del state.on_hold[job.num]
                if job.extra:
                    tenant.extra -= job.extra
                    state.extra_ended += job.extra
                ended.append(job.num)
                out.ended.append(job)
        state.digest = digest & 0xFFFFFFFFFFFFFFFF

    # ------------------------------------------------------------------------------------ what acts change

    def worker(self, num: int) -> Worker:
        """Return a worker, marked as changed."""
        worker = self.state.worker_by_num[num]
        self.touch_worker(worker)
        return worker

    def touch_worker(self, worker: Worker) -> None:
        """Mark a worker that is to change."""
        self.rows[worker] = None
        self.out.workers.append(worker)
        self.out.was_out.setdefault(worker, worker.out)

    def tenant(self, name: str) -> Tenant:
        """Return a tenant, marked as changed; it is created if it is not known."""
        tenant = self.state.tenant(name)
        self.rows[tenant] = None
        return tenant

    def job(self, num: int, does: str) -> Job:
        """Return a job; `does` is what the record does to it, for the error if it does not exist."""
        job = self.state.jobs.get(num)
        if job is None:
            raise FoldError(f"record {self.seq} {does} job {num}, which is not there")
        return job

    def ordered(self, num: int, word: int, by: str, why: str, attempt: Attempt | None = None) -> Job:
        """Return a job after adding an act on it, or on one attempt of it, to its history, as a revision of its own."""
        job = self.job(num, "acts on")
        job.rev += 1
        replica, no, fence = (-1, 0, 0) if attempt is None else (attempt.replica.index, attempt.no, attempt.fence)
        job.history.append((job.rev, self.time, replica, no, word, -1, 0, 0, why, fence, by))
        self.out.jobs[num] = job
        return job

    def renumber(self, job: Job, numbers: Ranges) -> None:
        """Give a job these numbers of replicas instead of those that it has."""
        job.numbers, job.size, before = numbers, count_of(numbers), job.extra
        job.is_listed = job.size <= self.state.ceilings.listed
        job.extra = extra_of(job.size, len(job.body))
        self.state.extra += job.extra - before
        self.state.tenants[job.tenant].extra += job.extra - before
        job.derived = 0, ""

    def shorten_history(self, job: Job) -> None:
        """Drop the oldest transitions of a long history; the history stream has them.

        What this record adds stays, and so much before it as a follower of the ledger may still have to write.
        """
        history, replicas, ceilings = job.history, min(job.size, LISTED_MAX), self.state.ceilings
        most = ceilings.history + ceilings.history_each * replicas
        if len(history) >= most:  # three quarters stay, as `facts` expects
            said = len(history) - (job.rev - job.folded)  # each revision is a row
            unwritten = ceilings.part + ceilings.part_each * replicas
            del history[: max(0, min(len(history) - most * 3 // 4, said - unwritten))]

    # --------------------------------------------------------------------------------------- accepts

    def _in_order(self, op: int, a: int) -> None:
        """Fold the acts, or the new jobs, that were decided between two steps."""
        self.state.transitions -= 1
        if op == ACT and (act := next(self.acts, None)) is not None:
            act.fold(self)
        elif op == ACCEPT and (accepts := list(islice(self.accepts, a))):
            self.accept_all(accepts)
        else:
            raise FoldError(MORE_NAMED)

    def accept_all(self, accepts: Iterable[tuple[str, list[Any]]]) -> None:
        """Accept jobs as a record has them."""
        for tenant, flat in accepts:
            parts = iter(flat)
            for written, body, replicas, trace in zip(parts, parts, parts, parts, strict=True):
                self.accept(tenant, id_of(written, body), body, ONE if replicas == 1 else numbers_of(replicas), trace)

    def accept(self, tenant_name: str, name: str, body: bytes, numbers: Ranges, traceparent: str) -> Job:
        """Accept one job, and return it."""
        state, num = self.state, self.state.next_num
        tenant = state.tenants.get(tenant_name) or state.tenant(tenant_name)
        if name in tenant.jobs:
            raise FoldError(f"job {tenant_name}/{name} is accepted twice")
        job = new_job(num, tenant_name, name, body, numbers, traceparent, self.time, self.seq)
        job.is_listed = job.size <= state.ceilings.listed
        tenant.jobs[name] = state.jobs[num] = self.out.jobs[num] = job
        if job.extra:
            state.extra += job.extra
            tenant.extra += job.extra
        tenant.live += 1
        tenant.waits += 0 if job.stands else job.size
        self.rows[tenant] = None
        self.out.accepted.append(job)
        state.next_num = num + 1
        return job

    # ------------------------------------------------------------------------------------------ steps

    def steps(self, steps: Sequence[int], actors: list[int]) -> None:
        """Fold the steps of a record, by the actors that it names for some of them."""
        names = self._names(actors) if actors else {}
        if len(steps) % STEP_WIDTH:
            raise FoldError(f"record {self.seq} ends within a step")
        self.state.transitions += len(steps) // STEP_WIDTH
        flat, step = iter(steps), self.step
        if not names:
            for op, num, index, a, b, c in zip(flat, flat, flat, flat, flat, flat, strict=True):
                step(op, num, index, a, b, c, "")
            return
        for at, (op, num, index, a, b, c) in enumerate(zip(flat, flat, flat, flat, flat, flat, strict=True)):
            step(op, num, index, a, b, c, names.get(at * STEP_WIDTH, ""))

    def step(self, op: int, num: int, index: int, a: int, b: int, c: int, by: str) -> None:
        """Fold one step, by this actor; "" is the one who usually takes it. The caller counts it."""
        job = self.state.jobs.get(num)
        if job is None:
            if num != NO_JOB:
                raise self._unnamed(op, num, index)
            self._in_order(op, a)
            return
        self.out.jobs[num] = job
        known = _BY_OP.get(op)
        if known is None:
            of_job = _OF_JOB.get(op)
            if of_job is None:
                next_ = "use a newer release" if op > max(Op) else "begin with a new ledger (it is from before 0.3.0)"
                raise FoldError(f"record {self.seq} holds step {op}, which this release does not know: {next_}")
            of_job(self, job, index, a, b, c, by)
            return
        replica = job.rows.get(index)
        if replica is None:
            if op != _PLACE:
                raise self._unnamed(op, num, index)
            replica = self._first_placed(job, index)
        self.replicas[replica] = None
        fold_step, usual = known
        fold_step(self, op, job, replica, a, b, c, by or usual)

    def step_of(self, op: int, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        """Fold a step of a replica that has a row; as `step`, for one who has the row at hand."""
        job = replica.job
        self.out.jobs[job.num] = job
        self.replicas[replica] = None
        fold_step, usual = _BY_OP[op]
        fold_step(self, op, job, replica, a, b, c, by or usual)

    def free(self, attempt: Attempt) -> None:
        """Fold a FREE; as `step`, for one who has the attempt at hand, which lingers."""
        job = attempt.replica.job
        self.out.jobs[job.num] = job
        self._drop(attempt)

    def _unnamed(self, op: int, num: int, index: int) -> FoldError:
        return FoldError(f"record {self.seq}: step {op} names no replica: job {num}, replica {index}")

    def _first_placed(self, job: Job, index: int) -> Replica:
        """Return the new row of a replica that was never placed."""
        fresh = job.fresh
        first, last = fresh[0] if fresh else (-1, -1)
        if first == index:  # the usual case: they are placed in order
            job.fresh = ((first + 1, last), *fresh[1:]) if first < last else fresh[1:]
        elif is_in(fresh, index):
            job.fresh = without(fresh, ((index, index),))
        else:
            raise self._unnamed(_PLACE, job.num, index)
        replica = job.rows[index] = Replica(job, index)
        replica.nth = job.rev  # each placement is a revision
        return replica

    def _names(self, flat: list[int]) -> dict[int, str]:
        """Return the actor of each step that has one, by position."""
        notes = self.notes
        found: dict[int, str] = {}
        for at in range(0, len(flat), 3):
            for position in range(flat[at], flat[at + 1], STEP_WIDTH):
                found[position] = notes[flat[at + 2] - 1]
        return found

    # --------------------------------------------------------------------------- an attempt's way

    def _place(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        if replica.state != QUEUED:
            raise self._illegal(replica, PLACED)
        state, seq, index, history = self.state, self.seq, replica.index, job.history
        worker = state.worker_by_num[a]
        replica.attempt_no = no = replica.attempt_no + 1
        if no > job.attempt_no:
            job.attempt_no = no
        if no > 1:
            job.back -= 1
            replica.not_before, replica.ended = 0, None
        job.placed_ms = self.time
        replica.fence = seq
        replica.state = PLACED
        name = (job.tenant, job.name, index, no, seq)
        attempt = Attempt(replica, worker, no, seq, b, b, c & _MODE_MASK & ~PREEMPTIBLE, name)
        if c & PREEMPTIBLE:
            attempt.preemptible = True
            state.preemptibles += 1
        attempt.began_ms = self.time
        if job.gang and state.level >= STORED_LEVEL:
            attempt.begun = common_of(job) or NO_SET
        replica.attempt = worker.attempts[name] = attempt
        if c > _MODE_MASK:
            attempt.rate_milli = c >> MODE_BITS
        if state.preempting and job.preempts is not None and (job.gang or not job.waits):
            del state.preempting[job.num]
            job.preempts = None
        tenant = state.tenants[job.tenant]
        tenant.waits -= not (job.stands and no == 1)
        if tenant.limits is not None or state.counters or state.used:
            self._count(tenant, attempt, 1)
        if state.half_life_ms:
            self.use(tenant, fairshare.rate_of(attempt))
        if tenant.keys is not None:
            fairkeys.use(state, tenant, job, fairshare.rate_of(attempt), 1)
        job.held += 1
        job.rev = rev = job.rev + 1
        tenant.gpus += b.bit_count()
        job.placed_many = len(job.rows) - job.back
        job.left_ms = 0
        history.append((rev, self.time, index, no, PLACED, a, b, 0, "", seq, by))
        self.attempts[attempt] = None
        self.out.placed.append(attempt)

    def _ran(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        """Fold CLAIM, START and EXIT in one step: most attempts of short jobs."""
        attempt, to = replica.attempt, a & STATE_MASK
        if attempt is None or replica.state != PLACED or to != SUCCEEDED:
            raise self._illegal(replica, to)
        rev, index, no, worker, mask, fence = (
            job.rev,
            replica.index,
            replica.attempt_no,
            attempt.worker.num,
            attempt.mask,
            attempt.fence,
        )
        attempt.began_ms = began = self._began(attempt, b) if b else self.time
        job.history += (
            (rev + 1, began, index, no, CLAIMED, worker, mask, 0, "", fence, by),
            (rev + 2, began, index, no, RUNNING, worker, mask, 0, "", fence, by),
            (rev + 3, self.time, index, no, to, worker, mask, 0, "", fence, by, *_result(a)),
        )
        job.rev = rev + 3
        job.started = True
        self._linger(job, replica, attempt)
        self._learn(job, self.time - began)
        self._did_well(job, attempt)
        replica.state = to
        del job.rows[index]
        if not job.left_ms:
            job.left_ms = self.time
        if job.wants is None:
            job.end(index, index, to, 0, self.time)
        else:
            self._end_replicas(job, index, index, to, 0)
        self.state.transitions += 2

    def _claim(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        attempt = self._held(replica, op)
        if c:
            job.master = self.notes[c - 1]
        attempt.phase = AT_CLAIMED
        self.attempts[attempt] = None
        self._move(job, replica, CLAIMED, 0, "", attempt, by, self._began(attempt, a) if a else self.time)

    def _start(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        attempt = self._held(replica, op)
        began = self._began(attempt, a) if a else self.time
        if attempt.phase < AT_RUNNING:  # else it was kept through a partition
            attempt.phase, attempt.began_ms = AT_RUNNING, began
        self.attempts[attempt] = None
        job.started = True
        attempt.address = self._note(c)
        # earlier releases write no `b`, and read none
        note = start_note(attempt.address, self._note(b)) if b else attempt.address
        self._move(job, replica, RUNNING, 0, note, attempt, by, began)

    def _ready(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        attempt = self._held(replica, op)
        if replica.state not in TELLS_READY or a not in (0, 1) or attempt.ready is bool(a):
            raise self._illegal(replica, replica.state)
        attempt.ready = bool(a)
        if a and not (attempt.unready_ms and self.time - attempt.unready_ms <= READY_GAP_MS):
            attempt.ready_ms = self.time
        attempt.unready_ms = 0 if a else self.time
        attempt.ever_ready = job.ever_ready = True  # none is reported not ready before it was
        self.attempts[attempt] = None
        job.rev = rev = job.rev + 1  # it stays in its state
        told = (rev, self.time, replica.index, replica.attempt_no, READY if a else NOT_READY, -1, 0, 0)
        job.history.append((*told, self._note(c), attempt.fence, by))

    def _freeze(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        attempt = self._held(replica, op)
        if (replica.state, a) not in FREEZES or (a == RUNNING and not attempt.mask):
            raise self._illegal(replica, a)
        if a == FROZEN:
            self._hold(attempt, 0)
            attempt.has_frozen, attempt.leased_ms = True, 0
        self._move(job, replica, a, 0, "", attempt, by)

    def _resume(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        attempt = self._held(replica, op)
        if replica.state != FROZEN or a not in (0, 1) or bool(attempt.mask) is bool(a):
            raise self._illegal(replica, FROZEN)
        self._hold(attempt, attempt.home if a else 0)
        job.rev = rev = job.rev + 1  # it stays frozen, and holds other devices from now on
        told = (rev, self.time, replica.index, replica.attempt_no, FROZEN, attempt.worker.num, attempt.mask)
        job.history.append((*told, 0, self._note(c), attempt.fence, by))
        attempt.leased_ms = self.time if a else 0
        if a:
            attempt.leased = self.seq
            self.out.touched.append(attempt)

    def _hold(self, attempt: Attempt, mask: int) -> None:
        """Give an attempt these slots instead of those that it holds."""
        tenant = self.state.tenants[attempt.replica.job.tenant]
        if holding.spend(self.state, tenant):
            self.rows[tenant] = None
        holding.move(tenant, attempt, mask)
        tenant.gpus += mask.bit_count() - attempt.mask.bit_count()
        if self.state.half_life_ms:
            self.use(tenant, fairshare.rate_of(attempt, mask) - fairshare.rate_of(attempt))
        if tenant.keys is not None:
            rate_milli = fairshare.rate_of(attempt, mask) - fairshare.rate_of(attempt)
            fairkeys.use(self.state, tenant, attempt.replica.job, rate_milli, 0)
        attempt.mask = mask
        self.attempts[attempt] = None
        self.out.gave.append(attempt.worker)

    def _exit(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        attempt = self._held(replica, op)
        if not replica.stored or all(no != attempt.no for no, _ in replica.stored):
            replica.untold = attempt.no
        self._move(job, replica, a & STATE_MASK, b, self._note(c), attempt, by, -1, _result(a))
        self._linger(job, replica, attempt)

    def _linger(self, job: Job, replica: Replica, attempt: Attempt) -> None:
        """Take an attempt from its replica: it is over, and its devices were not seen free yet."""
        attempt.phase = AT_EXITED
        self.attempts[attempt] = None
        replica.attempt = None
        if job.lingering is None:
            job.lingering = {}
        job.lingering[replica.index, attempt.fence] = attempt

    def _free(self, job: Job, index: int, a: int, b: int, c: int, by: str) -> None:
        self._drop(self._lingering(job, index, a))

    def _over(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        """Fold REFUSE, WITHDRAW or LOSE: the attempt is over and does not linger, unless a partition keeps it."""
        attempt, why = self._held(replica, op), self._note(c)
        if op == Op.LOSE and self.state.level < STORED_LEVEL and not replica.stored_by(attempt.no):
            replica.untold = attempt.no  # its worker may have told an earlier leader
        if a != LOST_KEPT:
            replica.attempt = None
            self._remove(attempt)
        if op == Op.REFUSE and why.startswith(ABOUT_THE_JOB):
            num = attempt.worker.num
            if any(num == avoided for avoided, _ in job.avoid):
                job.refused = (*(other for other in job.refused if other != num), num)[-AVOID_MAX:]
        self._move(job, replica, a, b, why, attempt, by)

    # ------------------------------------------------------------------- what the scheduler or an actor decides

    def _end(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        attempt = self._held(replica, op)
        why = self._note(c)
        self._notes_move(job, replica, a, why)
        replica.after = b & _NOTICE_MASK
        notice_s = b >> NOTICE_BITS
        if attempt.notice_s != notice_s:
            attempt.notice_s = notice_s
            self.attempts[attempt] = None
        self._move(job, replica, a, 0, why, attempt, by)
        self.out.touched.append(attempt)

    def _moved(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        why = self._note(c)
        self._notes_move(job, replica, a, why)
        self._move(job, replica, a, b, why, None, by)

    @staticmethod
    def _notes_move(job: Job, replica: Replica, to: int, why: str) -> None:
        """Note that a replica is cancelled because another one serves in its place, if it is."""
        if job.relocating is not None and job.relocating[0] == replica.index and to in (CANCELLING, CANCELLED):
            job.has_moved |= why.startswith(MOVED)

    def _backoff(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        replica.not_before = a
        if b in (Count.RETRY, Count.LOSS):
            replica.retries += b == Count.RETRY
            replica.losses += b == Count.LOSS
            if c < 0:
                tries = dict(replica.tries)
                replica.tries = tuple(sorted((tries | {-c: tries.get(-c, 0) + 1}).items()))
        elif b == Count.REFUSAL:
            replica.refusals += 1
        elif b == Count.RESTART:
            replica.restarts += 1
            replica.streak = c

    def _move_fresh(self, job: Job, index: int, a: int, b: int, c: int, by: str) -> None:
        to, code, why = a & STATE_MASK, a >> STATE_BITS, self._note(c)
        moved = both(job.fresh, ((index, b),))
        if not moved or to not in LEGAL[QUEUED] or not IS_TERMINAL[to]:
            raise FoldError(f"record {self.seq}: {job.tenant}/{job.name}: {index} to {b} cannot go to {STATES[to]}")
        job.fresh = without(job.fresh, moved)
        self.state.tenants[job.tenant].waits -= 0 if job.stands else count_of(moved)
        for first, last in moved:
            self._end_replicas(job, first, last, to, code)
            if job.is_listed:
                for number in range(first, last + 1):
                    job.rev += 1
                    job.history.append((job.rev, self.time, number, 0, to, -1, 0, code, why, 0, by))
            else:
                job.rev += 1
                job.history.append((job.rev, self.time, first, 0, to, RANGE, last, code, why, 0, by))

    def _await(self, job: Job, index: int, a: int, b: int, c: int, by: str) -> None:
        # an earlier job, so no job can wait for itself through others
        if job.ledger != self.seq or a >= job.num or (a and (a not in self.state.jobs or b not in ENDS)):
            raise FoldError(f"record {self.seq}: {job.tenant}/{job.name} cannot wait for job {a} with {b}")
        job.awaits = (*job.awaits, (a, b))

    def _gang(self, job: Job, index: int, a: int, b: int, c: int, by: str) -> None:
        job.gang, job.after, job.count = a, b, c
        if a == GangPhase.HOLDING:
            job.master = ""  # of the previous attempt
        elif a == GangPhase.STARTED:
            self.out.touched.extend(peer.attempt for peer in job.rows.values() if peer.attempt is not None)

    def _quarantine(self, job: Job, index: int, a: int, b: int, c: int, by: str) -> None:
        held = self._lingering(job, index, a)
        if held.mask != held.home:
            self._hold(held, held.home)
        self.touch_worker(held.worker)
        held.worker.quarantined |= b

    # ------------------------------------------------------------------------------------- what they share

    def _began(self, attempt: Attempt, ran_ms: int) -> int:
        """Return when an attempt began that has run for so many ms: not before its placement."""
        return max(attempt.began_ms, self.time - ran_ms)

    def _move(
        self,
        job: Job,
        replica: Replica,
        to: int,
        code: int,
        why: str,
        attempt: Attempt | None,
        by: str,
        since: int = -1,
        result: tuple[int, ...] = (),
    ) -> None:
        """Write a change of a replica into its job's history, `since` a ledger ms; below 0 it is this record's."""
        if to not in LEGAL[replica.state]:
            raise self._illegal(replica, to)
        back = (to == QUEUED) - (replica.state == QUEUED)
        if back:
            job.back += back
            self.state.tenants[job.tenant].waits += back
        was, replica.state = replica.state, to
        job.rev = rev = job.rev + 1
        if attempt is not None and to not in ON_WORKER:
            ran_ms = self.time - attempt.began_ms if attempt.phase == AT_RUNNING else -1
            job.left_ms = job.left_ms or self.time
            replica.deaths += why == WITH_SUPERVISOR
            if not IS_TERMINAL[to]:
                ready_ms = (attempt.unready_ms or self.time) - attempt.ready_ms if attempt.ready_ms else 0
                is_asked, by_worker = was == ENDING, by == BY_WORKER
                replica.ended = Ended(rev, code, why, ran_ms, attempt.ever_ready, is_asked, by_worker, ready_ms)
            if ran_ms >= 0 and to in WORKED and not attempt.has_frozen:
                self._learn(job, ran_ms)
            if ran_ms >= WELL_MS or to == SUCCEEDED or (to == EXITED and was == RUNNING and not (code or why)):
                self._did_well(job, attempt)
            elif 0 <= ran_ms <= QUICK_MS and code and was == RUNNING and by == BY_WORKER and to in _FAILS:
                self._failed_quickly(job, replica, attempt, why)
        if IS_TERMINAL[to]:
            del job.rows[replica.index]
            self._end_replicas(job, replica.index, replica.index, to, code)
            job.failed += was != QUEUED and to in FAILURES
        worker, mask, fence = (attempt.worker.num, attempt.mask, attempt.fence) if attempt is not None else (-1, 0, 0)
        job.history.append(
            (
                rev,
                self.time if since < 0 else since,
                replica.index,
                replica.attempt_no,
                to,
                worker,
                mask,
                code,
                why,
                fence,
                by,
                *result,
            )
        )

    def _learn(self, job: Job, ran_ms: int) -> None:
        job.ran = (*job.ran[1 - RAN_MAX :], ran_ms) if job.ran else (ran_ms,)
        self.out.ran.setdefault(job, []).append(ran_ms)

    def _did_well(self, job: Job, attempt: Attempt) -> None:
        """Note where an attempt did well: what failed there quickly before it began tells no more of its worker."""
        worker, here = attempt.worker, attempt.worker.num + 1
        job.well_on = here if job.well_on in (0, here) else SEVERAL
        if worker.quick:
            worker.well_ms = max(worker.well_ms, attempt.began_ms)
            worker.quick = tuple(row for row in worker.quick if row[1] > worker.well_ms)
            self.rows[worker] = None

    def _failed_quickly(self, job: Job, replica: Replica, attempt: Attempt, why: str) -> None:
        """Note where an attempt failed within seconds of its start, by itself."""
        if reason_of(why) in NOT_BY_ITSELF:
            return
        worker, others = attempt.worker, (row for row in attempt.worker.quick if row[0] != job.num)
        worker.quick = (*tuple(others)[1 - QUICK_MAX :], (job.num, self.time))
        self.rows[worker] = None
        elsewhere = tuple(row for row in replica.failed_on if row[0] != worker.num)
        replica.failed_on = (*elsewhere[1 - QUICK_OF_REPLICA_MAX :], (worker.num, self.time))

    def _end_replicas(self, job: Job, first: int, last: int, to: int, code: int) -> None:
        if job.wants is not None and (gone := both(job.wants.leaving, ((first, last),))):
            job.live -= count_of(gone)
            job.wants = job.wants._replace(leaving=without(job.wants.leaving, gone))
            self.renumber(job, without(job.numbers, gone))
            for first_left, last_left in without(((first, last),), gone):
                job.end(first_left, last_left, to, code, self.time)
            if not job.live:  # all that were left may be taken away
                job.ended_ms = self.time
        else:
            job.end(first, last, to, code, self.time)

    def _note(self, number: int) -> str:
        """Return a note of the record by its number; empty for 0."""
        return self.notes[number - 1] if number else ""

    def _illegal(self, replica: Replica, to: int) -> FoldError:
        name = f"{replica.job.tenant}/{replica.job.name}/{replica.index}"
        return FoldError(f"record {self.seq}: {name} cannot go from {STATES[replica.state]} to {STATES[to]}")

    def _held(self, replica: Replica, op: int) -> Attempt:
        attempt = replica.attempt
        if attempt is None:
            name = f"{replica.job.tenant}/{replica.job.name}/{replica.index}"
            raise FoldError(f"record {self.seq}: {Op(op).name} of {name}, which no worker has")
        return attempt

    def _lingering(self, job: Job, index: int, packed: int) -> Attempt:
        fence = unpacked(packed)
        attempt = job.lingering.get((index, fence)) if job.lingering else None
        if attempt is None:
            name = f"{job.tenant}/{job.name}/{index} fence {fence}"
            raise FoldError(f"record {self.seq}: {name} does not linger")
        return attempt

    def _drop(self, attempt: Attempt) -> None:
        """Remove an attempt whose devices were reported free."""
        worker = attempt.worker
        if worker.quarantined & attempt.mask:
            self.touch_worker(worker)
            worker.quarantined &= ~attempt.mask
        self._remove(attempt)

    def _remove(self, attempt: Attempt) -> None:
        del attempt.worker.attempts[attempt.name]
        self.out.gave.append(attempt.worker)
        if attempt.preemptible:
            self.state.preemptibles -= 1
        job = attempt.replica.job
        job.held -= 1
        if job.lingering:
            job.lingering.pop((attempt.replica.index, attempt.fence), None)
        state, tenant = self.state, self.state.tenants[job.tenant]
        if tenant.limits is not None or state.counters or state.used:
            self._count(tenant, attempt, -1)
        tenant.gpus -= attempt.mask.bit_count()
        if state.half_life_ms:
            self.use(tenant, -fairshare.rate_of(attempt))
        if tenant.keys is not None:
            fairkeys.use(state, tenant, job, -fairshare.rate_of(attempt), -1)
        state.digest -= attempt.row
        self.attempts.pop(attempt, None)
        attempt.row = 0

    def _count(self, tenant: Tenant, attempt: Attempt, sign: int) -> None:
        """Count what an attempt that comes or goes holds beside GPUs."""
        if holding.spend(self.state, tenant):
            self.rows[tenant] = None
        holding.take(self.state, tenant, attempt, sign)

    def use(self, tenant: Tenant, rate_milli: int) -> None:
        """Change what a tenant uses from now on by `rate_milli`; its past usage stays."""
        tenant.rate_milli += rate_milli
        tenant.usage_base -= rate_milli * self.state.inflation
        self.rows[tenant] = None


def numbers_of(replicas: int | list[list[int]]) -> Ranges:
    """Return the numbers of a job's replicas as an accept says them: how many from 0 on, or ranges."""
    if isinstance(replicas, int):
        return first_numbers(replicas)
    return joined((first, last) for first, last in replicas)


def _result(a: int) -> tuple[int, ...]:
    """Return the last column of an ended attempt's row, if it has one; see `records.exiting`."""
    return ((a >> STATE_BITS) - 1,) if a > STATE_MASK else ()


_FoldStep = Callable[[Folding, int, Job, Replica, int, int, int, str], None]
_FOLD: Final[dict[Op, _FoldStep]] = {
    Op.PLACE: Folding._place,
    Op.CLAIM: Folding._claim,
    Op.START: Folding._start,
    Op.EXIT: Folding._exit,
    Op.REFUSE: Folding._over,
    Op.WITHDRAW: Folding._over,
    Op.LOSE: Folding._over,
    Op.END: Folding._end,
    Op.MOVE: Folding._moved,
    Op.BACKOFF: Folding._backoff,
    Op.RAN: Folding._ran,
    Op.FREEZE: Folding._freeze,
    Op.RESUME: Folding._resume,
    Op.READY: Folding._ready,
}
#: with the default actor: the worker for reports, the scheduler for the rest
_BY_OP: Final = {int(op): (fold_step, BY_WORKER if op in REPORTED else "") for op, fold_step in _FOLD.items()}
#: steps of a job, or of an attempt whose replica may have ended: they need no row
_OF_JOB: Final[dict[int, Callable[[Folding, Job, int, int, int, int, str], None]]] = {
    int(Op.FREE): Folding._free,
    int(Op.GANG): Folding._gang,
    int(Op.QUARANTINE): Folding._quarantine,
    int(Op.MOVE_FRESH): Folding._move_fresh,
    int(Op.AWAIT): Folding._await,
}
