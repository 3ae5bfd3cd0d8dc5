"""A record while it is being built: what it says so far, each step of it folded into the state as it is made.

The state is therefore at any time what it will be once the record is stored. `take_back` sets it back to what it was
before the record.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

from moorage.scheduler.core.ledger.acts import AnyAct, Avoid, Gone, Lacks, Replicas, encode_act
from moorage.scheduler.core.ledger.acts.base import Act
from moorage.scheduler.core.ledger.folding import Folded, Folding, numbers_of
from moorage.scheduler.core.ledger.gang_sets import NO_SET, common_of
from moorage.scheduler.core.ledger.record import Record
from moorage.scheduler.core.ledger.records import (
    COUNT_BITS,
    KIND,
    NO_JOB,
    STEP_WIDTH,
    Op,
    ending,
    exiting,
    moving,
    packed,
    written_id,
)
from moorage.scheduler.core.ledger.state import (
    AT_EXITED,
    CANCELLED,
    FAILURES,
    LOST_KEPT,
    QUEUED,
    STORED_LEVEL,
    SUCCEEDED,
    Attempt,
    Job,
    Replica,
    State,
    Worker,
)
from moorage.scheduler.core.ledger.undo import Undo
from moorage.scheduler.core.ledger.ways import ACCEPTS, ACTS, STEPS, WIDTH
from moorage.schemas.frames import Report, Stalled
from moorage.schemas.groups import GROUPS_MAX
from moorage.schemas.job import STARTS_WITH
from moorage.schemas.printable import shortened, shown
from moorage.schemas.ranges import ONE, Ranges, both, count_of
from moorage.schemas.service import Turn

#: an upper estimate of a step's encoded bytes: op, number, replica and three arguments
STEP_BYTES: Final = 30
NOTE_CHARS_MAX: Final = 200
#: the longest address with its ports, see `lifecycle.readiness`: one that is cut is another one
ADDRESS_CHARS_MAX: Final = 400
#: an upper estimate of the bytes of an act that ends nothing by itself
ACT_BYTES: Final = 200
_PLACE: Final = int(Op.PLACE)
_CLAIM: Final = int(Op.CLAIM)
_START: Final = int(Op.START)
_RAN: Final = int(Op.RAN)
_EXIT: Final = int(Op.EXIT)
_FREE: Final = int(Op.FREE)
_ACT: Final = int(Op.ACT)
_ACCEPT: Final = int(Op.ACCEPT)
_A_OF_LAST: Final = 3 - STEP_WIDTH  #: where the last step has its argument a


def steps_to_end(attempts: Iterable[Attempt]) -> int:
    """Return the most steps that it takes to end these attempts, and to move what follows from it.

    It is two for each; a gang ends as a whole, with three for each of its ranks.
    """
    jobs = [attempt.replica.job for attempt in attempts]
    gangs = {job.num: 3 * job.size + 2 for job in jobs if job.gang}
    return 2 * sum(not job.gang for job in jobs) + sum(gangs.values())


class Draft:
    """The record that is being built. Without `begin` it is only read: for questions, between records."""

    __slots__ = (
        "_actor",
        "_bulk",
        "_bytes_max",
        "_ceilings",
        "_first",
        "_folding",
        "_next_max",
        "_note_numbers",
        "_steps_max",
        "_undo",
        "accepts",
        "actors",
        "acts",
        "avoided",
        "bytes",
        "digest",
        "ends",
        "enlarged",
        "evidence",
        "examined",
        "failed",
        "idle",
        "is_short",
        "jobs_left",
        "left_queue",
        "moved",
        "notes",
        "preempting",
        "reports",
        "rescaled",
        "seq",
        "stalls",
        "started",
        "state",
        "steps",
        "time_ms",
        "turned",
        "turns",
        "ways",
        "woken",
    )

    def __init__(self, state: State, time_ms: int) -> None:
        self.state = state
        self.seq = state.seq + 1  # the place in the ledger for which the record is folded
        self.time_ms = time_ms
        self.is_short = False  # something that was to end had no room
        self.turned = False  # an attempt was frozen, or runs on
        self.digest = state.digest  # before this record
        # consecutive jobs of one tenant are one item; in the order of job numbers
        self.accepts: list[tuple[str, list[Any]]] = []
        self.steps: list[int] = []
        self.reports: list[int] = []
        self.notes: list[str] = []
        self.acts: list[AnyAct] = []
        self.evidence: list[int] = []
        self.examined: set[int] = set()  # numbers of workers whose report of their devices it has handled
        self.actors: list[int] = []
        self.ways: list[int] = []
        self.bytes = 0
        self.jobs_left: dict[int, int] = {}  # by worker whose session it ends: how many jobs that had
        self.ends: set[int] = set()  # numbers of jobs with an attempt that this record asks to end
        self.idle: list[tuple[Attempt, Report]] = []  # attempts that report idle GPUs, for events
        self.stalls: list[tuple[Job, Stalled]] = []  # stalls that begin or are over, for events
        self.turns: list[tuple[str, str, Turn]] = []  # the turns of members that sleep: tenant, service, turn
        self.woken: list[tuple[str, str]] = []  # tenant and service of which a caller has the first member started
        self.enlarged: list[Job] = []  # jobs with one more replica, which waits from the end of this record on
        self.started: list[Job] = []  # jobs whose first replica starts with this record
        self.rescaled: list[Job] = []  # services of which another number of members is wanted from this record on
        self.left_queue = 0  # entries of the queue that this record ends
        #: how many more transitions this record has than steps: one step may end many replicas, one of no job none
        self.moved = 0
        #: jobs for which others ended before this record, with the hosts that are theirs until it is whole
        self.preempting = [(job, job.preempts[0]) for job in state.preempting.values() if job.preempts is not None]
        #: by job number: workers with devices that the job avoids from this record on. Such a job stays in its old
        #: queue group until the record is whole. Ordered, because its new shape is numbered in this order
        self.avoided: dict[int, set[int]] = {}
        #: jobs of which a replica ends FAILED or TIMED_OUT with this record. Ordered, as they may be given up with it
        self.failed: dict[Job, None] = {}
        self._first = state.next_num  # the number of the first job that this record accepts
        self._note_numbers: dict[str, int] = {}
        self._actor = ""
        self._ceilings = ceilings = state.ceilings
        #: what the record may have before it is `full`
        self._bytes_max, self._steps_max = ceilings.full_bytes, ceilings.steps * STEP_WIDTH
        self._next_max = state.next_num + ceilings.accepts
        #: the steps and bytes at which `bulk_full` becomes true
        self._bulk = ceilings.bulk_steps * STEP_WIDTH, ceilings.bulk_bytes

    def begin(self) -> None:
        """Begin a record: from now on all that is written here changes the state, and can be taken back."""
        state = self.state
        self._undo = Undo(state, self.time_ms)
        self._folding = Folding(state, self.seq, self.time_ms, state.epoch, state.level, self.notes)

    def pass_time(self) -> None:
        """Let the state's time be that of the record; this comes before all that is written."""
        self._folding.open()

    def take_back(self) -> None:
        """Set the state back to what it was before this record."""
        self._undo.back()

    def finish(self) -> Folded:
        """Finish the record in the state; return what it has changed. It cannot be taken back any more."""
        return self._folding.end()

    # ------------------------------------------------------------------------------------------ what it holds

    @property
    def changed(self) -> dict[int, Job]:
        """By number, the jobs that this record has changed so far."""
        return self._folding.out.jobs

    def jobs_over(self) -> Counter[str]:
        """Count, by tenant, the jobs that are over with this record: none of their replicas lives or holds devices.

        It reads all that the record changes.
        """
        return Counter(job.tenant for job in self.changed.values() if not (job.over or job.live or job.held))

    @property
    def empty(self) -> bool:
        return not (self.accepts or self.steps or self.reports or self.acts)

    @property
    def full(self) -> bool:
        """Whether the record takes no more events: it is near its size limit (ledger-rules H5), or slow to fold."""
        return (
            self.bytes > self._bytes_max
            or len(self.steps) + self.moved * STEP_WIDTH > self._steps_max
            or self.state.next_num > self._next_max
        )

    @property
    def half_full(self) -> bool:
        """Whether half of the record is taken: the other half is for what belongs together and is large."""
        return self.full or self.bytes > self._ceilings.bulk_bytes

    def has_room(self, steps: int, acts: int = 0) -> bool:
        """Return whether so many more steps and acts have room, which belong together; what is left out follows later.

        What is too large for half a record, such as the end of a wide gang, goes into one that is less than half full.
        """
        size, most = steps * STEP_BYTES + acts * ACT_BYTES, self._ceilings.full_bytes
        has_room = self.bytes + size <= most or not self.half_full or self.empty
        self.is_short |= not has_room
        return has_room

    @property
    def steps_left(self) -> int:
        """How many more steps may be added, checking `full` before each."""
        if self.full:
            return 0
        ceilings = self._ceilings
        in_steps = ceilings.steps - self.moved - len(self.steps) // STEP_WIDTH
        return 1 + min(in_steps, (ceilings.full_bytes - self.bytes) // STEP_BYTES)

    def begin_bulk(self) -> None:
        """Start the bulk part: from here on `bulk_full` limits how much cancels, deadlines and rejections may write."""
        ceilings = self._ceilings
        steps = len(self.steps) + (self.moved + ceilings.bulk_steps) * STEP_WIDTH
        self._bulk = steps, self.bytes + ceilings.bulk_bytes

    @property
    def bulk_full(self) -> bool:
        """Whether the bulk part is full; the remaining bulk work goes into the next record."""
        steps = len(self.steps) + self.moved * STEP_WIDTH
        return self.full or steps >= self._bulk[0] or self.bytes > self._bulk[1]

    # ------------------------------------------------------------------------------------------ steps

    def names(self, job: Job, index: int) -> bool:
        """Return whether the record has a step of this replica so far."""
        flat = iter(self.steps)
        for op, num, first, _, last, _ in zip(flat, flat, flat, flat, flat, flat, strict=True):
            if num == job.num and (first == index or (op == Op.MOVE_FRESH and first <= index <= last)):
                return True
        return False

    def note(self, text: str, *, always: bool = False, most: int = NOTE_CHARS_MAX) -> int:
        """Add a note to this record, unless it has it already; return its number from 1 on, or 0 if there is none.

        It is cut to `most` characters. When the record is full, a new text is dropped unless `always`: the transition
        matters, its explanation does not.
        """
        if not text:
            return 0
        text = shortened(shown(text), most)  # texts come from tenants and workers, and are shown in terminals
        known = self._note_numbers.get(text)
        if known is not None:
            return known
        if self.bytes > self._ceilings.full_bytes and not always:
            return 0
        self.notes.append(text)
        self.bytes += len(text.encode()) + 3
        number = self._note_numbers[text] = len(self.notes)
        return number

    def _address(self, address: str, count: int = 1) -> int:
        return self.note(address, always=True, most=count * ADDRESS_CHARS_MAX)

    @contextlib.contextmanager
    def by(self, actor: str) -> Iterator[None]:
        """Attribute every step made inside the block to this actor (see `records.actor`; "" for none)."""
        first, outer = len(self.steps), self._actor
        self._actor = outer or shown(actor)[:NOTE_CHARS_MAX]
        yield
        self._actor = outer
        if actor and len(self.steps) > first:
            self.actors += (first, len(self.steps), self.note(actor, always=True))
            self.bytes += 2 * STEP_BYTES

    def mark(self) -> tuple[int, int, int]:
        """Return how many jobs, acts and steps the record has so far: for `came`."""
        return self.state.next_num - self._first, len(self.acts), len(self.steps)

    def came(self, way: str, mark: tuple[int, int, int]) -> None:
        """Write how the request or order came for which all since `mark` was written; "" is not known."""
        if not way or (now := self.mark()) == mark:
            return
        accepts, acts, steps = mark
        if accepts < now[0]:
            self._came(ACCEPTS, accepts, now[0], way)
        if acts < now[1]:
            self._came(ACTS, acts, now[1], way)
        if (accepts, acts) == now[:2] and steps < now[2]:
            self._came(STEPS, steps, now[2], way)

    def _came(self, which: int, first: int, end: int, way: str) -> None:
        ways, note = self.ways, self.note(way, always=True)
        if ways and ways[-WIDTH] == which and ways[-2] == first and ways[-1] == note:
            ways[-2] = end
        else:
            ways += (which, first, end, note)
            self.bytes += STEP_BYTES

    def step(self, op: int, num: int, index: int, a: int = 0, b: int = 0, c: int = 0) -> None:
        self._undo.step(op, num, index, a)
        self.state.transitions += 1
        self._folding.step(op, num, index, a, b, c, self._actor)
        self.steps += (op, num, index, a, b, c)
        self.bytes += STEP_BYTES

    def _step_of(self, op: int, replica: Replica, a: int = 0, b: int = 0, c: int = 0) -> None:
        """As `step`, of a replica that has a row."""
        job = replica.job
        self._undo.replica(job, replica)
        self.state.transitions += 1
        self._folding.step_of(op, replica, a, b, c, self._actor)
        self.steps += (op, job.num, replica.index, a, b, c)
        self.bytes += STEP_BYTES

    def _step_of_none(self, op: int) -> None:
        """Say that an act, or new jobs, were decided after the steps before."""
        self.steps += (op, NO_JOB, 0, 0, 0, 0)
        self.bytes += STEP_BYTES
        self.moved -= 1

    def lacks(self, job: Job, worker: Worker) -> None:
        """Record that a worker lacks what a job needs."""
        self.add(Lacks(job.num, worker.num))

    def avoid(self, job: Job, worker: Worker, slots: int) -> None:
        """Record that a job avoids these slots of a worker from now on; 0 lifts the avoidance of that worker."""
        self.add(Avoid(job.num, worker.num, slots))
        workers = self.avoided.setdefault(job.num, set())
        if slots:
            workers.add(worker.num)
        else:
            workers.discard(worker.num)

    def may(self, kind: type[Act]) -> bool:
        """Return whether acts of this class may be written: older schedulers that follow the ledger know them."""
        return self.state.level >= kind.LEVEL

    def tell(self, act: AnyAct) -> None:
        """Write an act. Below its feature level the record lacks it, and this leader's state alone has what it says."""
        if self.may(type(act)):
            self.add(act)
        else:
            self._undo.act(act)
            act.fold(Folding(self.state, self.seq, self.time_ms, self.state.epoch, self.state.level, []))

    def add(self, act: AnyAct) -> None:
        if self.steps or self.accepts:
            self._step_of_none(_ACT)
        self._undo.act(act)
        act.fold(self._folding)
        self.acts.append(act)
        self.bytes += len(encode_act(act))

    def accept(self, tenant: str, name: str, body: bytes, numbers: Ranges, traceparent: str) -> Job:
        """Accept a new job with replicas of these numbers, and return it."""
        accepts, size = self.accepts, len(body)
        if numbers is ONE:
            replicas: int | list[list[int]] = 1
        else:
            is_plain = len(numbers) == 1 and not numbers[0][0]
            replicas = count_of(numbers) if is_plain else [[first, last] for first, last in numbers]
            numbers = numbers_of(replicas)
        written = written_id(name, body)
        flat = [written, body, replicas, traceparent]
        steps = self.steps
        if is_later := steps and steps[-STEP_WIDTH] != _ACCEPT:
            self._step_of_none(_ACCEPT)
        if accepts and accepts[-1][0] == tenant and not is_later:
            accepts[-1][1].extend(flat)
        else:  # jobs are numbered in this order, so a tenant may have several items
            if steps:
                steps[_A_OF_LAST] += 1
            accepts.append((tenant, flat))
            self.bytes += len(tenant) + 8
        self.bytes += size + len(written) + len(traceparent) + 12 * len(numbers)
        self._undo.tenant(tenant)
        return self._folding.accept(tenant, name, body, numbers, traceparent)

    def count(self, worker: Worker, number: int) -> None:
        """Record that a worker's reports were taken up to this one."""
        self.reports += (worker.num, number)
        self.bytes += 10

    def end_session(self, worker: Worker, why: str) -> None:
        """Write GONE. The old session's report numbers are dropped: they must not count for the next session."""
        on_it = {attempt.replica.job.num for attempt in worker.attempts.values() if attempt.phase != AT_EXITED}
        self.jobs_left[worker.num] = len(on_it)
        self.add(Gone(worker.num, why))
        reports = self.reports
        self.reports = [
            x for at in range(0, len(reports), 2) if reports[at] != worker.num for x in reports[at : at + 2]
        ]

    def claim(self, replica: Replica, master: str, ran_ms: int = 0) -> None:
        """Record that an attempt has its devices and has run for so many ms; `master` is the gang's address, or those
        of its groups."""
        self._step_of(_CLAIM, replica, ran_ms, 0, self._address(master, GROUPS_MAX) if master else 0)

    def start(self, replica: Replica, ran_ms: int = 0, address: str = "", told: str = "") -> None:
        """Record that an attempt has started, and has run for so many ms already; at the address its ports are
        reached. `told` is what its worker told of how it began."""
        self._starts(replica.job)
        noted = self.note(told) if told else 0
        self._step_of(_START, replica, ran_ms, noted, self._address(address) if address else 0)

    def ran(self, replica: Replica, ran_ms: int, result: int | None) -> None:
        """Record that a placed attempt was claimed, ran for so many ms and succeeded: most attempts of short jobs."""
        self._starts(replica.job)
        self._step_of(_RAN, replica, exiting(SUCCEEDED, result), ran_ms)

    def _starts(self, job: Job) -> None:
        if not job.started:
            self.started.append(job)

    def ready(self, attempt: Attempt, is_ready: bool, why: str) -> None:
        """Record that the worker reports a running attempt ready, or not ready any more."""
        replica = attempt.replica
        self.step(Op.READY, replica.job.num, replica.index, int(is_ready), 0, self.note(why))

    def freeze(self, replica: Replica, to: int) -> None:
        """Record that the worker reports a replica FROZEN, and its devices free, or RUNNING again."""
        self.step(Op.FREEZE, replica.job.num, replica.index, to)
        self.turned = True

    def resume(self, replica: Replica, why: str, *, leased: bool) -> None:
        """Record that a frozen attempt's devices are leased to it again, or that its worker does not give them."""
        self.step(Op.RESUME, replica.job.num, replica.index, int(leased), 0, self.note(why))

    def exit(self, replica: Replica, to: int, code: int, why: str, result: int | None = None) -> None:
        """Record that the attempt ended and its processes are gone. The attempt remains until its devices are free."""
        self._step_of(_EXIT, replica, exiting(to, result), code, self.note(why) if why else 0)
        self._fails(replica.job, to)

    def free(self, attempt: Attempt) -> None:
        """Record that the devices of an attempt that is over were seen free."""
        replica = attempt.replica
        job = replica.job
        self._undo.attempt(job, attempt)
        self.state.transitions += 1
        self._folding.free(attempt)
        self.steps += (_FREE, job.num, replica.index, packed(attempt.fence), 0, 0)
        self.bytes += STEP_BYTES

    def over(self, op: int, replica: Replica, to: int, why: str, code: int = 0) -> None:
        """Write REFUSE, WITHDRAW or LOSE: the attempt ended and holds no devices any more."""
        self.step(op, replica.job.num, replica.index, to, code, self.note(why))
        self._fails(replica.job, to)

    def keep_lost(self, replica: Replica, why: str) -> None:
        """Write LOSE for a job with `on_partition` keep: the attempt keeps its devices."""
        self.step(Op.LOSE, replica.job.num, replica.index, LOST_KEPT, 0, self.note(why))

    def quarantine(self, attempt: Attempt, mask: int) -> None:
        replica = attempt.replica
        self.step(Op.QUARANTINE, replica.job.num, replica.index, packed(attempt.fence), mask)

    def end(self, replica: Replica, to: int, becomes: int, why: str, notice_s: int = 0) -> None:
        """Ask a replica's attempt to end: `to` is ENDING or CANCELLING, `becomes` the state after that.

        An attempt with a checkpoint signal gets it at once, and is ended `notice_s` later.
        """
        self.step(Op.END, replica.job.num, replica.index, to, ending(becomes, notice_s), self.note(why))
        self.ends.add(replica.job.num)

    def move(self, replica: Replica, to: int, why: str, code: int = 0) -> None:
        if replica.state == QUEUED:
            self.left_queue += 1
        self.step(Op.MOVE, replica.job.num, replica.index, to, code, self.note(why))
        self._fails(replica.job, to)

    def _fails(self, job: Job, to: int) -> None:
        if to in FAILURES:
            self.failed[job] = None

    def move_fresh(self, job: Job, to: int, why: str, code: int = 0, only: Ranges | None = None) -> bool:
        """End the replicas that were never placed, or those `only`; return False if there are none."""
        moved = job.fresh if only is None else both(job.fresh, only)
        for first, last in moved:
            self.step(Op.MOVE_FRESH, job.num, first, moving(to, code), last, self.note(why))
            if job.is_listed:
                self.moved += last - first
            self.left_queue += 1
        return bool(moved)

    def backoff(self, replica: Replica, not_before: int, count: int, streak: int = 0) -> None:
        """Write a pause: `count` as `lifecycle.retrying` makes it; `streak` is that of a restart."""
        kind, row = count & KIND, count >> COUNT_BITS
        self.step(Op.BACKOFF, replica.job.num, replica.index, not_before, kind, -row if row else streak)

    def takes_ranks(self, job: Job, ranks: int) -> None:
        """Record with how many ranks a gang starts that takes as many as have room: it keeps that number."""
        top = job.numbers[-1][1]
        why = f"{STARTS_WITH}{ranks} ranks, as many as have room"
        self.add(Replicas(job.num, ranks, ranks, top, 0, [ranks, top] if ranks <= top else [], "", why))
        if ranks <= top:
            self.move_fresh(job, CANCELLED, why, only=((ranks, top),))

    def gang(self, job: Job, phase: int, after: int = 0, count: int = 0) -> None:
        self.step(Op.GANG, job.num, 0, phase, after, count)

    def placed(self, num: int, index: int, worker_num: int, mask: int, mode: int) -> None:
        """Place a replica; `mode` is as from `records.placing`."""
        self._undo.place(num, index, worker_num)
        self.state.transitions += 1
        self._folding.step(_PLACE, num, index, worker_num, mask, mode, self._actor)
        job = self.state.jobs[num]
        if job.gang and self.state.level < STORED_LEVEL and (attempt := job.rows[index].attempt) is not None:
            attempt.begun = common_of(job) or NO_SET  # no later leader knows it
        self.steps += (_PLACE, num, index, worker_num, mask, mode)
        self.bytes += STEP_BYTES

    # ----------------------------------------------------------------------------------------- record

    def record(self, leader: int, rid: int) -> Record:
        """Return the record; nothing may be written behind it, and `finish` does what cannot be taken back."""
        for num in self.reports[::2]:
            self._undo.worker(num)
        self._folding.reports(self.reports)
        self._folding.weigh()
        level = self.state.level
        early = [act.tag for act in self.acts if level < act.LEVEL]
        if early:  # a defect of the scheduler: older followers would stop at such a record
            raise AssertionError(f"{early} may not stand in a record of feature level {level}")
        return Record(
            level,
            self.state.epoch,
            leader,
            rid,
            self.time_ms,
            self.digest,
            self.accepts,
            self.steps,
            self.reports,
            self.notes,
            self.acts,
            self.evidence,
            self.actors,
            self.ways,
        )
