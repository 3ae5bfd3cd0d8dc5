"""Folding of steps: changes of replicas, and of the members that hold devices for them.

As in `fold`: no policy, clock, randomness, floats or set order. `records.Op` has the meaning of a step's numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from moorage.scheduler.core.ledger import fairshare
from moorage.scheduler.core.ledger.beside import beside, is_at_rest
from moorage.scheduler.core.ledger.folding import FoldError, Folding
from moorage.scheduler.core.ledger.records import (
    BY_WORKER,
    GUEST,
    MODE_BITS,
    NOTICE_BITS,
    REPORTED,
    STATE_BITS,
    STATE_MASK,
    STEP_WIDTH,
    Count,
    GangPhase,
    Op,
    unpacked,
)
from moorage.scheduler.core.ledger.state import (
    AFTER_RUNNING,
    AT_CLAIMED,
    AT_EXITED,
    AT_RUNNING,
    CLAIMED,
    FREEZES,
    IS_TERMINAL,
    LEGAL,
    LOST_KEPT,
    PLACED,
    QUEUED,
    RUNNING,
    Job,
    Member,
    Replica,
    Tenant,
)
from moorage.schemas.job import STATES

_MODE_MASK: Final = (1 << MODE_BITS) - 1
_NOTICE_MASK: Final = (1 << NOTICE_BITS) - 1


class FoldingSteps(Folding):
    __slots__ = ()

    def _steps(self, steps: list[int], actors: list[int]) -> None:
        jobs, changed, replicas, seq = self.state.jobs, self.out.jobs, self.replicas, self.seq
        names = self._names(actors) if actors else {}
        if len(steps) % STEP_WIDTH:
            raise FoldError(f"record {seq} ends within a step")
        self.state.transitions += len(steps) // STEP_WIDTH
        flat, at = iter(steps), 0
        for op, num, index, a, b, c in zip(flat, flat, flat, flat, flat, flat, strict=True):
            try:
                job = jobs[num]
                replica = job.replicas[index]
            except (KeyError, IndexError):
                raise FoldError(f"record {seq}: step {op} names no replica: job {num}, replica {index}") from None
            changed[num] = job
            replicas[replica] = None
            try:
                fold_step, by = _BY_OP[op]
            except KeyError:
                raise FoldError(f"record {seq} holds step {op}, which this release does not know") from None
            if names:
                by = names.get(at, by)
                at += STEP_WIDTH
            fold_step(self, op, job, replica, a, b, c, by)

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
        state, seq, index, story = self.state, self.seq, replica.index, job.story
        worker = state.worker_by_num[a]
        replica.attempt = attempt = replica.attempt + 1
        replica.fence = seq
        replica.not_before = 0
        replica.state = PLACED
        key = (job.tenant, job.name, index, seq)
        member = Member(replica, worker, attempt, seq, b, c & _MODE_MASK & ~GUEST, key)
        member.guest = bool(c & GUEST)
        replica.member = worker.members[key] = member
        if c > _MODE_MASK:
            member.rate_milli = c >> MODE_BITS
        if state.preempting and state.preempting.pop(job.num, None) is not None:
            job.preempts = None
        tenant = state.tenants[job.tenant]
        if state.half_life_ms:
            self._use(tenant, fairshare.rate_of(member))
        job.held += 1
        job.rev = rev = job.rev + 1
        tenant.gpus += b.bit_count()
        story.append((rev, self.time, index, attempt, PLACED, a, b, 0, "", seq, by))
        self.members[member] = None
        self.out.placed.append(member)

    def _run(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        """Fold CLAIM, START, EXIT and FREE in one step: most attempts of short jobs."""
        member = replica.member
        if member is None or replica.state != PLACED:
            raise self._illegal(replica, CLAIMED)
        to = a & STATE_MASK
        if to not in AFTER_RUNNING:
            raise self._illegal(replica, to)
        why = self._note(c) if c else ""
        rev, time, index, attempt, state = job.rev, self.time, replica.index, replica.attempt, self.state
        holder, mask, fence, story = member.worker, member.mask, member.fence, job.story
        worker = holder.num
        story += (
            (rev + 1, time, index, attempt, CLAIMED, worker, mask, 0, "", fence, by),
            (rev + 2, time, index, attempt, RUNNING, worker, mask, 0, "", fence, by),
            (rev + 3, time, index, attempt, to, worker, mask, b, why, fence, by, *_result(a)),
        )
        job.rev = rev + 3
        job.started = True
        replica.state = to
        replica.member = None
        if IS_TERMINAL[to]:
            job.live -= 1
        state.transitions += 3
        if holder.quarantined or state.half_life_ms or member.guest:
            self._drop(member)
            return
        del holder.members[member.key]  # the same as `_drop`, without what cannot apply here
        job.held -= 1
        state.tenants[job.tenant].gpus -= mask.bit_count()
        state.digest -= member.row
        self.members.pop(member, None)
        member.row = 0

    def _claim(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        member = self._held(replica, op)
        if c:
            job.master = self.notes[c - 1]
        member.phase = AT_CLAIMED
        self.members[member] = None
        self._move(job, replica, CLAIMED, 0, "", member, by)

    def _start(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        member = self._held(replica, op)
        member.phase = AT_RUNNING
        self.members[member] = None
        job.started = True
        self._move(job, replica, RUNNING, 0, "", member, by)

    def _freeze(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        if {replica.state, a} != FREEZES:
            raise self._illegal(replica, a)
        self._move(job, replica, a, 0, "", self._held(replica, op), by)

    def _begin(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        """Fold CLAIM and START in one step."""
        self._move(job, replica, CLAIMED, 0, "", self._held(replica, op), by)
        self._start(op, job, replica, a, b, c, by)
        self.state.transitions += 1

    def _exit(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        member = self._held(replica, op)
        member.phase = AT_EXITED
        self.members[member] = None
        replica.member = None
        if job.lingering is None:
            job.lingering = {}
        job.lingering[member.key] = member
        self._move(job, replica, a & STATE_MASK, b, self._note(c), member, by, *_result(a))

    def _done(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        """Fold EXIT and FREE in one step."""
        member = self._held(replica, op)
        self._exit(op, job, replica, a, b, c, by)
        self._drop(member)
        self.state.transitions += 1

    def _free(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        self._drop(self._lingering(job, replica.index, a))

    def _over(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        """Fold REFUSE, WITHDRAW or LOSE: the attempt is over and does not linger, unless a partition keeps it."""
        member = self._held(replica, op)
        if a != LOST_KEPT:
            replica.member = None
            self._remove(member)
        self._move(job, replica, a, b, self._note(c), member, by)

    # ------------------------------------------------------------------- what the scheduler or an actor decides

    def _end(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        member = self._held(replica, op)
        replica.after = b & _NOTICE_MASK
        notice_s = b >> NOTICE_BITS
        if member.notice_s != notice_s:
            member.notice_s = notice_s
            self.members[member] = None
        self._move(job, replica, a, 0, self._note(c), member, by)
        self.out.touched.append(member)

    def _moved(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        self._move(job, replica, a, b, self._note(c), None, by)

    def _backoff(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        replica.not_before = a
        if b == Count.RETRY:
            replica.retries += 1
        elif b == Count.LOSS:
            replica.losses += 1
        elif b == Count.REFUSAL:
            replica.refusals += 1

    def _gang(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        job.gang, job.after, job.count = a, b, c
        if a == GangPhase.HOLDING:
            job.master = ""  # of the previous attempt
        elif a == GangPhase.STARTED:
            self.out.touched.extend(peer.member for peer in job.replicas if peer.member is not None)

    def _quarantine(self, op: int, job: Job, replica: Replica, a: int, b: int, c: int, by: str) -> None:
        held = self._lingering(job, replica.index, a)
        held.worker.quarantined |= b
        self.touch_worker(held.worker)

    # ------------------------------------------------------------------------------------- what they share

    def _move(
        self, job: Job, replica: Replica, to: int, code: int, why: str, member: Member | None, by: str, *result: int
    ) -> None:
        if to not in LEGAL[replica.state]:
            raise self._illegal(replica, to)
        replica.state = to
        job.rev = rev = job.rev + 1
        if IS_TERMINAL[to]:
            job.live -= 1
        worker, mask, fence = (member.worker.num, member.mask, member.fence) if member is not None else (-1, 0, 0)
        job.story.append(
            (rev, self.time, replica.index, replica.attempt, to, worker, mask, code, why, fence, by, *result)
        )

    def _note(self, number: int) -> str:
        """Return a note of the record by its number; empty for 0."""
        return self.notes[number - 1] if number else ""

    def _illegal(self, replica: Replica, to: int) -> FoldError:
        name = f"{replica.job.tenant}/{replica.job.name}/{replica.index}"
        return FoldError(f"record {self.seq}: {name} cannot go from {STATES[replica.state]} to {STATES[to]}")

    def _held(self, replica: Replica, op: int) -> Member:
        member = replica.member
        if member is None:
            name = f"{replica.job.tenant}/{replica.job.name}/{replica.index}"
            raise FoldError(f"record {self.seq}: {Op(op).name} of {name}, which no worker has")
        return member

    def _lingering(self, job: Job, index: int, packed: int) -> Member:
        key = (job.tenant, job.name, index, unpacked(packed))
        member = job.lingering.get(key) if job.lingering else None
        if member is None:
            raise FoldError(f"record {self.seq}: {key} does not linger")
        return member

    def _drop(self, member: Member) -> None:
        """Remove a member whose devices were reported free."""
        worker = member.worker
        if worker.quarantined & member.mask:
            worker.quarantined &= ~member.mask
            self.touch_worker(worker)
        self._remove(member)

    def _remove(self, member: Member) -> None:
        del member.worker.members[member.key]
        if member.guest:  # those that are to run on, or to end, have waited for it
            self.out.touched += [owner for owner in beside(member) if not is_at_rest(owner)]
        job = member.replica.job
        job.held -= 1
        if job.lingering:
            job.lingering.pop(member.key, None)
        tenant = self.state.tenants[job.tenant]
        tenant.gpus -= member.mask.bit_count()
        if self.state.half_life_ms:
            self._use(tenant, -fairshare.rate_of(member))
        self.state.digest -= member.row
        self.members.pop(member, None)
        member.row = 0

    def _use(self, tenant: Tenant, rate_milli: int) -> None:
        fairshare.use(self.state, tenant, rate_milli)
        self.rows[tenant] = None


def _result(a: int) -> tuple[int, ...]:
    """Return the last column of an ended attempt's row, if it has one; see `records.exiting`."""
    return ((a >> STATE_BITS) - 1,) if a > STATE_MASK else ()


_FoldStep = Callable[[FoldingSteps, int, Job, Replica, int, int, int, str], None]
_FOLD: Final[dict[Op, _FoldStep]] = {
    Op.PLACE: FoldingSteps._place,
    Op.CLAIM: FoldingSteps._claim,
    Op.START: FoldingSteps._start,
    Op.EXIT: FoldingSteps._exit,
    Op.REFUSE: FoldingSteps._over,
    Op.WITHDRAW: FoldingSteps._over,
    Op.LOSE: FoldingSteps._over,
    Op.FREE: FoldingSteps._free,
    Op.END: FoldingSteps._end,
    Op.MOVE: FoldingSteps._moved,
    Op.BACKOFF: FoldingSteps._backoff,
    Op.GANG: FoldingSteps._gang,
    Op.QUARANTINE: FoldingSteps._quarantine,
    Op.BEGIN: FoldingSteps._begin,
    Op.DONE: FoldingSteps._done,
    Op.RUN: FoldingSteps._run,
    Op.FREEZE: FoldingSteps._freeze,
}
#: with the default actor: the worker for reports, the scheduler for the rest
_BY_OP: Final = {int(op): (fold_step, BY_WORKER if op in REPORTED else "") for op, fold_step in _FOLD.items()}
