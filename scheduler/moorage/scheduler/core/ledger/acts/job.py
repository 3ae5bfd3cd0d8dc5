"""Acts on jobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Final

from moorage.scheduler.core.ledger import bits, fairkeys, fairshare
from moorage.scheduler.core.ledger.acts.base import Act
from moorage.scheduler.core.ledger.finished import job_key
from moorage.scheduler.core.ledger.folding import FoldError, Folding
from moorage.scheduler.core.ledger.gang_sets import note_set
from moorage.scheduler.core.ledger.records import BY_WORKER
from moorage.scheduler.core.ledger.state import (
    AT_RUNNING,
    AVOID_MAX,
    CHANGED,
    EXEC,
    FAILURES,
    FREEZE,
    IS_TERMINAL,
    NOT_FROZEN,
    PRIORITY,
    QUEUED,
    RESIZED,
    RESUME,
    STORED_LEVEL,
    SUCCEEDED,
    Attempt,
    Job,
    Promise,
    Replica,
    Scaled,
    Wants,
    bounds_after,
    without_job,
)
from moorage.scheduler.core.ledger.state import Resize as ResizeRow
from moorage.schemas.frames import UNKNOWN_MS, Peaks, sum_known
from moorage.schemas.gpu import MEMORY_MIB_MAX
from moorage.schemas.job import PRIORITY_MAX, REPLICAS_MAX, STATES
from moorage.schemas.ranges import is_in, joined, without

#: changes of one job's share that are remembered, to compute its usage before each
RESIZES_MAX: Final = 64
_SUM_MAX: Final = 1 << 62


class OfJob(Act):
    """An act on a job in memory."""

    job: int


class Avoid(OfJob, tag="avoid"):
    """From now on a job avoids these slots of a worker too, which failed under it or refused it.

    Without slots it avoids none there any more. Beyond `AVOID_MAX` workers, of the others that of the lowest number is
    forgotten.
    """

    IS_DECISION: ClassVar[bool] = True
    worker: int
    slots: int

    def fold(self, folding: Folding) -> None:
        job = folding.job(self.job, "avoids a device for")
        if not self.slots:
            job.lacking = tuple(num for num in job.lacking if num != self.worker)
            job.refused = tuple(num for num in job.refused if num != self.worker)
        others = [row for row in job.avoid if row[0] != self.worker]
        if self.slots:
            slots = dict(job.avoid).get(self.worker, 0) | self.slots
            others = [*others[-(AVOID_MAX - 1) :], (self.worker, slots)]
        job.avoid = tuple(sorted(others))
        folding.out.jobs[job.num] = job


class Lacks(OfJob, tag="lacks"):
    """A worker lacks what a job needs, as its refusal says. The worker of the oldest of `AVOID_MAX` is forgotten."""

    worker: int

    def fold(self, folding: Folding) -> None:
        job = folding.job(self.job, "finds a worker lacking for")
        job.lacking = tuple([*(num for num in job.lacking if num != self.worker), self.worker][-AVOID_MAX:])
        folding.out.jobs[job.num] = job


class Preempt(OfJob, tag="preempt"):
    """Workers are reserved for a job, and these jobs end for it; without workers it is given up."""

    IS_DECISION: ClassVar[bool] = True
    workers: list[int]
    victims: list[int]

    def fold(self, folding: Folding) -> None:
        job, preempting = folding.job(self.job, "preempts for"), folding.state.preempting
        preempting.pop(job.num, None)
        job.preempts = (tuple(self.workers), tuple(self.victims)) if self.workers else None
        if self.workers:
            preempting[job.num] = job
        folding.out.jobs[job.num] = job


class Reserves(OfJob, tag="reserves"):
    """Workers are reserved for a job, which is expected to start there at `start_ms`; without workers, none are.

    Written when the job or the workers change, and when the start moves by more than a minute.
    """

    LEVEL: ClassVar[int] = 2
    IS_DECISION: ClassVar[bool] = True
    workers: list[int]
    start_ms: int

    def fold(self, folding: Folding) -> None:
        found = None
        if self.workers:  # else the job may have left memory
            found = folding.job(self.job, "reserves for").num, tuple(self.workers), self.start_ms
        folding.state.reserved = found


class Stored(OfJob, tag="stored"):
    """An attempt has stored a checkpoint with this digest, as its worker told; none, if it is empty.

    It may tell others while it runs: the newest counts. `step` is the job's own count, -1 if it is unknown. Of a gang,
    an empty digest with a step says that the sets of that step cannot be read any more.
    """

    LEVEL: ClassVar[int] = STORED_LEVEL
    replica: int
    attempt: int
    digest: str
    step: int = -1

    def fold(self, folding: Folding) -> None:
        replica = folding.job(self.job, "stored a checkpoint of").rows.get(self.replica)
        if replica is None:
            raise FoldError(f"act {self.tag} of job {self.job} names replica {self.replica}, which is over")
        if self.digest or self.step < 0:
            replica.note_checkpoint(self.attempt, self.digest, folding.time, self.step)
        folding.replicas[replica] = None
        if replica.job.gang and self.step >= 0:
            folding.replicas |= dict.fromkeys(note_set(replica.job, replica, self.attempt, self.step, self.digest))


class Stays(OfJob, tag="stays"):
    """A member of a service that ends for a job goes on until another one serves, at the latest until `by_ms`."""

    IS_DECISION: ClassVar[bool] = True
    victim: int
    replica: int
    by_ms: int

    def fold(self, folding: Folding) -> None:
        job = folding.job(self.job, "lets a member stay for")
        if job.preempts is None:
            raise FoldError(f"act {self.tag} of job {self.job}, for which none ends")
        hosts, victims, *stay = job.preempts
        job.preempts = hosts, victims, (*(stay[0] if stay else ()), self.victim, self.replica, self.by_ms)
        folding.out.jobs[job.num] = job


class Priority(OfJob, tag="priority"):
    """An operator gives a job another priority."""

    IS_DECISION: ClassVar[bool] = True
    priority: int
    by: str
    why: str

    def fold(self, folding: Folding) -> None:
        said = f"{self.priority}: {self.why}" if self.why else str(self.priority)
        job = folding.ordered(self.job, PRIORITY, self.by, said)
        job.priority, job.ceiling = self.priority, -1


class Change(OfJob, tag="change"):
    """A job's tenant puts other bounds in place of its request's: `max_running`, the priority, the time limit.

    Those below 0 stay as they are. `ceiling` is the highest priority that its tenant may set from now on, below 0 if
    the priority stays.
    """

    IS_DECISION: ClassVar[bool] = True
    max_running: int
    priority: int
    timeout_ms: int
    ceiling: int
    by: str
    why: str

    def fold(self, folding: Folding) -> None:
        if self.priority > self.ceiling or max(self.priority, self.ceiling) > PRIORITY_MAX:
            raise FoldError(f"act {self.tag} of job {self.job} gives the priority {self.priority} of {self.ceiling}")
        job = folding.ordered(self.job, CHANGED, self.by, self.why)
        if self.priority >= 0:
            job.priority, job.ceiling = self.priority, self.ceiling
        if self.max_running >= 0 or self.timeout_ms >= 0:
            job.bounds = bounds_after(job.bounds, folding.seq, self.max_running, self.timeout_ms)


class Relimit(OfJob, tag="relimit"):
    """A job's running attempts have another time limit in ms, from their start on, and so have later ones."""

    LEVEL: ClassVar[int] = 2
    IS_DECISION: ClassVar[bool] = True
    timeout_ms: int
    by: str
    why: str

    def fold(self, folding: Folding) -> None:
        if self.timeout_ms <= 0:
            raise FoldError(f"act {self.tag} of job {self.job} gives {self.timeout_ms} ms")
        job = folding.ordered(self.job, CHANGED, self.by, self.why)
        job.bounds = bounds_after(job.bounds, folding.seq, -1, self.timeout_ms)
        job.relimit = self.timeout_ms, folding.seq
        for attempt in job.attempts:
            attempt.runs_as = None
            folding.out.touched.append(attempt)


class Resize(OfJob, tag="resize"):
    """An operator gives a job another share of each device that it has, and of those that it gets later.

    `rate_milli` is what each of its present attempts counts in its tenant's fair share from now on; 0: each device as a
    whole GPU.
    """

    IS_DECISION: ClassVar[bool] = True
    memory_mib: int
    compute_percent: int
    rate_milli: int
    by: str
    why: str

    def fold(self, folding: Folding) -> None:
        if not (0 <= self.memory_mib <= MEMORY_MIB_MAX and 1 <= self.compute_percent <= 100 and self.rate_milli >= 0):
            raise FoldError(f"act {self.tag} of job {self.job} gives {self.memory_mib} MiB, {self.compute_percent} %")
        said = f"{self.compute_percent} % of compute, {self.memory_mib} MiB"
        job = folding.ordered(self.job, RESIZED, self.by, f"{said}: {self.why}" if self.why else said)
        row = ResizeRow(folding.time, folding.seq, self.memory_mib, self.compute_percent)
        job.resizes = (*job.resizes, row)[-RESIZES_MAX:]
        state = folding.state
        for attempt in job.attempts:
            before, attempt.rate_milli = fairshare.rate_of(attempt), self.rate_milli
            if state.half_life_ms:
                folding.use(state.tenants[job.tenant], fairshare.rate_of(attempt) - before)
            if (tenant := state.tenants[job.tenant]).keys is not None:
                fairkeys.use(state, tenant, job, fairshare.rate_of(attempt) - before, 0)
            folding.attempts[attempt] = None
            folding.out.touched.append(attempt)


class Freeze(OfJob, tag="freeze"):
    """A job's running replicas are to be frozen (`word` FREEZE), or to run again (RESUME).

    An operator's word is for all replicas (`replica` -1). A worker's is for one, whose GPUs are not used, or are to be
    used again. NOT_FROZEN: one replica runs on, and its worker reports why it cannot be frozen.
    """

    IS_DECISION: ClassVar[bool] = True
    replica: int
    word: int
    by: str
    why: str

    def fold(self, folding: Folding) -> None:
        job = folding.job(self.job, "acts on")
        row = job.rows.get(self.replica)
        folding.ordered(self.job, self.word, self.by, self.why, None if row is None else row.attempt)
        if self.word not in (FREEZE, RESUME, NOT_FROZEN) or (
            self.replica != -1 and not is_in(job.numbers, self.replica)
        ):
            raise FoldError(f"act {self.tag} of job {self.job} says {self.word} of replica {self.replica}")
        for attempt in self.attempts(job):
            if attempt.phase == AT_RUNNING:
                if self.word == NOT_FROZEN:
                    attempt.not_frozen = self.why
                attempt.freeze = self.word == FREEZE
                attempt.wakes = attempt.freeze and self.by == BY_WORKER
                folding.attempts[attempt] = None
                folding.out.touched.append(attempt)

    def attempts(self, job: Job) -> list[Attempt]:
        """Return the attempts of those replicas that it is about."""
        if self.replica != -1:
            row = job.rows.get(self.replica)
            return [] if row is None or row.attempt is None else [row.attempt]
        return [row.attempt for row in job.rows.values() if row.attempt is not None]


class Exec(OfJob, tag="exec"):
    """A tenant runs a command in a running replica of its job; `why` is the command, cut."""

    IS_DECISION: ClassVar[bool] = True
    replica: int
    by: str
    why: str

    def fold(self, folding: Folding) -> None:
        job = folding.job(self.job, "runs a command in")
        if not is_in(job.numbers, self.replica):
            raise FoldError(f"act {self.tag} of job {self.job} is about replica {self.replica}, which it has not")
        said = f"replica {self.replica}: {self.why}" if job.size > 1 else self.why
        folding.ordered(self.job, EXEC, self.by, said)


class Met(Act, tag="met"):
    """What these jobs waited for has come true: the end of another job (`ended`), or for 0 the time.

    A job that waits for nothing more may start from now on.
    """

    IS_DECISION: ClassVar[bool] = True
    ended: int
    waiting: list[int]

    def fold(self, folding: Folding) -> None:
        for num in self.waiting:
            job = folding.job(num, "counts an end for")
            if self.ended not in dict(job.awaits):
                raise FoldError(f"act {self.tag}: job {num} does not wait for job {self.ended}")
            job.awaits = without_job(job.awaits, self.ended)
            if not job.awaits:
                job.ready_ms = folding.time
            folding.out.jobs[num] = job


class Compact(Act, tag="compact"):
    """The oldest ended jobs leave memory; `flat` has for each its number and its request's digest."""

    flat: list[int | bytes]

    def fold(self, folding: Folding) -> None:
        state = folding.state
        ended, jobs, tenants = state.ended, state.jobs, state.tenants
        pairs: Iterator[Any] = iter(self.flat)
        for num, request in zip(pairs, pairs, strict=True):
            if not ended or ended.popleft() != num:
                raise FoldError(f"record {folding.seq}: job {num} is not the oldest ended one")
            job = jobs.pop(num)
            tenant, name = job.tenant, job.name
            if job.extra:
                state.extra -= job.extra
                state.extra_ended -= job.extra
            del tenants[tenant].jobs[name]
            final = STATES.index(job.state) if job.bad else SUCCEEDED
            folding.finished.append((job.key or job_key(tenant, name), request, job.ended_ms or folding.time, final))
            folding.out.compacted.append(job)
            state.digest -= job.row


class Expire(Act, tag="expire"):
    """The oldest `rows` rows of the table of finished jobs are dropped."""

    rows: int

    def fold(self, folding: Folding) -> None:
        folding.expired += self.rows
        if folding.expired > len(folding.state.finished) + len(folding.finished):
            raise FoldError(f"{folding.expired} rows of finished jobs expire, which are not there")


class Scale(OfJob, tag="scale"):
    """So many members of a service are wanted from now on: its calls say so, or its next version needs a place."""

    IS_DECISION: ClassVar[bool] = True
    wanted: int
    why: str

    def fold(self, folding: Folding) -> None:
        if not 0 <= self.wanted <= REPLICAS_MAX:
            raise FoldError(f"act {self.tag} of job {self.job} wants {self.wanted} members")
        job = folding.job(self.job, "scales")
        job.scaled = Scaled(self.wanted, folding.time, self.why)
        folding.out.jobs[job.num] = job


class Lends(OfJob, tag="lends"):
    """So many places a service has lent to its next version so far, and so many of these ahead, for want of room."""

    LEVEL: ClassVar[int] = 2
    lent: int
    ahead: int

    def fold(self, folding: Folding) -> None:
        if not 0 <= self.ahead <= self.lent <= REPLICAS_MAX:
            raise FoldError(f"act {self.tag} of job {self.job} says {self.lent} and {self.ahead}")
        job = folding.job(self.job, "lends places of")
        job.lent = (self.lent, self.ahead)
        folding.out.jobs[job.num] = job


class Replicas(OfJob, tag="replicas"):
    """A job's tenant asks for another number of replicas, see `state.Wants`.

    So many (`added`) are added behind the highest number that one ever had (`top`). Those of `leaving`, first and last
    numbers of ranges, are taken away as they end.
    """

    LEVEL: ClassVar[int] = 2
    IS_DECISION: ClassVar[bool] = True
    least: int
    most: int
    top: int
    added: int
    leaving: list[int]
    by: str
    why: str

    def fold(self, folding: Folding) -> None:
        flat = iter(self.leaving)
        leaving = joined(sorted(zip(flat, flat, strict=True)))
        job = folding.ordered(self.job, CHANGED, self.by, self.why)
        fits = self.added >= 0 and job.numbers[-1][1] <= self.top and self.top + self.added < REPLICAS_MAX
        if job.over or not job.live or without(leaving, job.numbers) or self.most < 1 or not fits:
            raise FoldError(f"act {self.tag} of job {self.job} asks for {self.most}, {self.added} of them new")
        job.wants = Wants(self.least, self.most, self.top + self.added, joined(sorted((*job.leaving, *leaving))))
        job.shape = None  # a gang asks for so many ranks from now on
        if self.added:
            new = ((self.top + 1, self.top + self.added),)
            job.live += self.added
            job.fresh = joined(sorted((*job.fresh, *new)))
            folding.state.tenants[job.tenant].waits += self.added
            folding.renumber(job, joined(sorted((*job.numbers, *new))))


class Relocate(OfJob, tag="relocate"):
    """A replica is to leave its worker once another one of its job serves: one more, or one that waits for calls."""

    IS_DECISION: ClassVar[bool] = True
    AGAIN: ClassVar[bool] = False
    old: int
    new: int

    def fold(self, folding: Folding) -> None:
        job, new = folding.job(self.job, "moves a replica of"), ((self.new, self.new),)
        may = self.new not in job.rows or job.rows[self.new].state == QUEUED
        may = may and (is_in(job.fresh, self.new) or self.new in job.rows or not is_in(job.numbers, self.new))
        if job.relocating is not None or job.over or self.old not in job.rows or not may:
            raise FoldError(f"act {self.tag} of job {self.job} moves replica {self.old} to {self.new}")
        job.relocating, job.has_moved = (self.old, self.new), False
        folding.out.jobs[job.num] = job
        if is_in(job.numbers, self.new):
            return
        job.live += 1
        if self.AGAIN:
            row = job.rows[self.new] = Replica(job, self.new, job.rev, attempt_no=job.attempt_no)
            folding.replicas[row] = None
            job.back += 1
        else:
            job.added += 1
            job.fresh = joined(sorted((*job.fresh, *new)))
        if job.wants is not None:
            job.wants = job.wants._replace(top=max(job.wants.top, self.new))
        folding.state.tenants[job.tenant].waits += 1
        folding.renumber(job, joined(sorted((*job.numbers, *new))))


class RelocateAgain(Relocate, tag="relocate-again"):
    """As `Relocate`, where one more has a number whose replica was taken away. Its attempts go on behind all of the
    job's."""

    LEVEL: ClassVar[int] = 2
    AGAIN: ClassVar[bool] = True


class Relocated(OfJob, tag="relocated"):
    """A replica moves no more. The number of one that has ended (`gone`) is no longer one of the job; -1: none is.

    The devices of its attempt may not be free yet: these are found by the number and the fence.
    """

    IS_DECISION: ClassVar[bool] = True
    gone: int

    def fold(self, folding: Folding) -> None:
        job = folding.job(self.job, "moves no replica of")
        state = job.state_of(self.gone) if self.gone >= 0 else SUCCEEDED
        if job.relocating is None or job.over or state is None or not IS_TERMINAL[state]:
            raise FoldError(f"act {self.tag} of job {self.job} takes replica {self.gone} away")
        job.relocating, job.has_moved = None, False
        folding.out.jobs[job.num] = job
        if self.gone < 0:
            return
        if job.bad and state in job.bad:
            bits.drop(job.bad[state], self.gone)
            job.bad = {each: found for each, found in job.bad.items() if bits.count(found)} or None
            if state in FAILURES:
                job.failed = max(job.failed - 1, 0)
        else:
            job.well -= 1
        folding.renumber(job, without(job.numbers, ((self.gone, self.gone),)))


class Used(OfJob, tag="used"):
    """A worker reports the GPU use that it measured of an ended attempt; it is added to that of the job.

    `gpu_ms` is -1 if the worker could measure only memory.
    """

    gpu_ms: int
    memory_mib_s: int

    def fold(self, folding: Folding) -> None:
        if not (UNKNOWN_MS <= self.gpu_ms < _SUM_MAX and 0 <= self.memory_mib_s < _SUM_MAX):
            raise FoldError(f"act {self.tag} of job {self.job} says {self.gpu_ms} and {self.memory_mib_s}")
        job = folding.job(self.job, "says what was used by")
        gpu_ms, memory_mib_s = job.used or (UNKNOWN_MS, 0)
        total_ms, total_mib_s = sum_known(gpu_ms, self.gpu_ms), memory_mib_s + self.memory_mib_s
        job.used = min(total_ms, _SUM_MAX - 1), min(total_mib_s, _SUM_MAX - 1)
        folding.out.jobs[job.num] = job


class Peaked(OfJob, tag="peaked"):
    """A worker reports what an ended attempt had at most: the numbers of `Peaks`."""

    LEVEL: ClassVar[int] = 2
    memory_mib: int
    largest_mib: int
    gpu_memory_mib: int
    cpu_ms: int

    def fold(self, folding: Folding) -> None:
        peaks = Peaks(self.memory_mib, self.largest_mib, self.gpu_memory_mib, self.cpu_ms)
        if not peaks.fits:
            raise FoldError(f"act {self.tag} of job {self.job} says {peaks}")
        job = folding.job(self.job, "says what was at most used by")
        job.note_peaks(peaks)
        folding.out.jobs[job.num] = job


class Promised(OfJob, tag="promised"):
    """A job that waits was told by when it starts; it has one promise, as a promise that is renewed is none.

    `by_ms` is ledger time; the median and the bound for nine of ten cases of the forecast behind it are in ms from the
    record, which rest on that many runs.
    """

    LEVEL: ClassVar[int] = 2
    by_ms: int
    p50_ms: int
    p90_ms: int
    runs: int

    def fold(self, folding: Folding) -> None:
        job = folding.job(self.job, "promises a start of")
        job.promised = Promise(folding.time, self.by_ms, self.p50_ms, self.p90_ms, self.runs)
        folding.out.jobs[job.num] = job


class LastReported(OfJob, tag="reported"):
    """A worker reports the newest values that an ended attempt of this replica reported of itself, as JSON."""

    LEVEL: ClassVar[int] = 2
    replica: int
    values: str

    def fold(self, folding: Folding) -> None:
        job = folding.job(self.job, "says what was reported by")
        job.note_reported(self.replica, self.values)
        folding.out.jobs[job.num] = job


JobAct = (
    Avoid | Lacks | Preempt | Reserves | Stored | Stays | Priority | Change | Relimit | Resize | Freeze | Scale
    | Relocate | Relocated | Lends | Replicas | Met | Exec | Compact | Expire | Used | Peaked | Promised
    | LastReported | RelocateAgain
)  # fmt: skip
