"""`fold(state, record, seq)`: small and total. No policy, clock, randomness, floats or set order in here.

The leader folds its own record after the acknowledgement; a standby, a restart and a replay fold the same bytes. A
record of an older epoch is a counted no-op (third line of the fence, ledger-rules H1).
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

from moorage.scheduler.core import fairshare
from moorage.scheduler.core.ledger.acts import FoldingActs
from moorage.scheduler.core.ledger.folding import Folded, FoldError
from moorage.scheduler.core.records import (
    BY_WORKER,
    FORMAT,
    MODE_BITS,
    NOTICE_BITS,
    REPORTED,
    STEP_WIDTH,
    Count,
    GangPhase,
    Op,
    Record,
)
from moorage.scheduler.core.state import (
    AT_CLAIMED,
    AT_EXITED,
    AT_RUNNING,
    CLAIMED,
    IS_TERMINAL,
    LEGAL,
    LOST_KEPT,
    PLACED,
    QUEUED,
    RUNNING,
    STORY_PART,
    Job,
    Member,
    Replica,
    State,
    Tenant,
    extra_of,
    new_job,
)
from moorage.schemas.job import STATES

_PLACE, _CLAIM, _START, _EXIT = int(Op.PLACE), int(Op.CLAIM), int(Op.START), int(Op.EXIT)
_REFUSE, _WITHDRAW, _LOSE, _FREE = int(Op.REFUSE), int(Op.WITHDRAW), int(Op.LOSE), int(Op.FREE)
_END, _MOVE, _BACKOFF, _GANG, _QUARANTINE = (
    int(Op.END),
    int(Op.MOVE),
    int(Op.BACKOFF),
    int(Op.GANG),
    int(Op.QUARANTINE),
)
_BEGIN, _DONE, _RUN = int(Op.BEGIN), int(Op.DONE), int(Op.RUN)
_MODE_MASK = (1 << MODE_BITS) - 1
#: who did a step of each op, where no actor is named: the worker that reported it, or the scheduler
_BY_OP = {int(op): BY_WORKER if op in REPORTED else "" for op in Op}


def fold(state: State, record: Record, seq: int) -> Folded:
    """Apply one record. Raises `FoldError` when it cannot follow; the state is then to be thrown away."""
    out = Folded()
    if record.format not in (FORMAT - 1, FORMAT):
        other = "a newer" if record.format > FORMAT else "an older"
        raise FoldError(
            f"record {seq} has format {record.format}; this release reads {FORMAT - 1} and {FORMAT}:"
            f" use {other} release"
        )
    if record.epoch < state.epoch:
        state.seq = seq  # a stale leader's record: counted, never applied
        return out
    if record.digest != state.digest:
        raise FoldError(f"record {seq} follows state {record.digest:x}, but this state is {state.digest:x}")
    try:
        _Folding(state, record, seq, out).run()
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise FoldError(f"record {seq} says what cannot be: {error!r}") from error
    return out


class _Folding(FoldingActs):
    """One record being folded; keeps the rows it touches so that the digest is renewed once a row."""

    __slots__ = ()

    def run(self) -> None:
        state, record = self.state, self.record
        state.time_ms = record.time
        if state.half_life_ms and fairshare.advance(state):
            self.rows.update(dict.fromkeys(state.tenants.values()))
        for act in record.acts:
            self._act(act)
        if record.epoch != state.epoch:
            raise FoldError(f"record {self.seq} is of epoch {record.epoch}, which no epoch record before it began")
        for tenant, flat in record.accepts:
            self._accept(tenant, flat)
        if record.facts:
            facts = record.facts
            for at in range(0, len(facts), 2):
                worker = state.worker_by_num[facts[at]]
                worker.no = facts[at + 1]
                self.rows[worker] = None
        if record.steps:
            self._steps(record.steps)
        self._renew_digest()
        state.seq = self.seq

    def _renew_digest(self) -> None:
        """Each touched row once: the rows' own `digest_row`, written out here where there are thousands of them."""
        state, out = self.state, self.out
        digest, ended = state.digest, state.ended
        for replica in self.replicas:
            new = hash(
                (
                    replica.job.num,
                    replica.index,
                    replica.state,
                    replica.attempt,
                    replica.fence,
                    replica.retries,
                    replica.losses,
                    replica.refusals,
                    replica.not_before,
                    replica.after,
                )
            )
            digest += new - replica.row
            replica.row = new
        for job in out.jobs.values():
            if job.preempts is not None and job.live == 0:
                job.preempts = None
                state.preempting.pop(job.num, None)
            new = hash((job.num, job.rev, job.gang, job.after, job.started, crc32(job.name.encode())))
            if job.hold is not None or job.priority >= 0 or job.avoid or job.preempts is not None:
                new = job.digest_row()
            digest += new - job.row
            job.row = new
            # a job is over once all replicas are and every device was seen free: only then may it leave memory
            if job.live == 0 and job.held == 0 and not job.over:
                job.over = True
                tenant, extra = state.tenants[job.tenant], extra_of(len(job.replicas), len(job.body))
                tenant.live -= 1
                tenant.extra -= extra
                state.extra_ended += extra
                ended.append(job.num)
                out.ended.append(job)
        for member in self.members:
            new = member.digest_row()
            digest += new - member.row
            member.row = new
        for row in self.rows:
            new = row.digest_row()
            digest += new - row.row
            row.row = new
        state.digest = digest & 0xFFFFFFFFFFFFFFFF

    # --------------------------------------------------------------------------------------- accepts

    def _accept(self, tenant_name: str, flat: list[Any]) -> None:
        state, accepted, replicas, changed = self.state, self.out.accepted, self.replicas, self.out.jobs
        tenant = state.tenant(tenant_name)
        names, jobs, num, time, seq = tenant.jobs, state.jobs, state.next_num, self.time, self.seq
        parts = iter(flat)
        for name, body, count, trace in zip(parts, parts, parts, parts, strict=True):
            if name in names:
                raise FoldError(f"job {tenant_name}/{name} is accepted twice")
            names[name] = jobs[num] = changed[num] = job = new_job(
                num, tenant_name, name, body, count, trace, time, seq
            )
            for replica in job.replicas:
                replicas[replica] = None
            extra = extra_of(count, len(body))
            state.extra += extra
            tenant.extra += extra
            accepted.append(job)
            num += 1
        tenant.live += num - state.next_num
        state.next_num = num
        self.rows[tenant] = None

    # ----------------------------------------------------------------------------------------- steps

    def _steps(self, steps: list[int]) -> None:
        state, out, seq, time = self.state, self.out, self.seq, self.time
        jobs, workers, tenants, notes = state.jobs, state.worker_by_num, state.tenants, self.record.notes
        changed, replicas, members, placed = out.jobs, self.replicas, self.members, out.placed
        actors = self._actors() if self.record.actors else {}
        if len(steps) % STEP_WIDTH:
            raise FoldError(f"record {seq} ends within a step")
        state.transitions += len(steps) // STEP_WIDTH
        flat, at = iter(steps), -STEP_WIDTH
        for op, num, index, a, b, c in zip(flat, flat, flat, flat, flat, flat, strict=True):
            at += STEP_WIDTH
            try:
                job = jobs[num]
                replica = job.replicas[index]
            except (KeyError, IndexError):
                raise FoldError(f"record {seq}: step {op} names no replica: job {num}, replica {index}") from None
            changed[num] = job
            replicas[replica] = None
            by = _BY_OP.get(op, "")
            if actors:
                by = actors.get(at, by)
            if op == _PLACE:
                if replica.state != QUEUED:
                    raise self._illegal(replica, PLACED)
                replica.attempt = attempt = replica.attempt + 1
                replica.fence = seq
                replica.not_before = 0
                replica.state = PLACED
                key = (job.tenant, job.name, index, seq)
                member = Member(replica, workers[a], attempt, seq, b, c & _MODE_MASK, key)
                replica.member = workers[a].members[key] = member
                if c > _MODE_MASK:
                    member.rate_milli = c >> MODE_BITS
                if state.preempting and state.preempting.pop(num, None) is not None:
                    job.preempts = None
                if state.half_life_ms:
                    self._use(tenants[job.tenant], fairshare.rate_of(member))
                job.held += 1
                job.rev = rev = job.rev + 1
                tenants[job.tenant].gpus += b.bit_count()
                self._tell(job, (rev, time, index, attempt, PLACED, a, b, 0, "", seq, by))
                members[member] = None
                placed.append(member)
            elif op == _RUN:
                self._run(job, replica, a, b, notes[c - 1] if c else "", by)
            elif op == _BEGIN:
                member = self._held(replica, op)
                member.phase = AT_RUNNING
                members[member] = None
                job.started = True
                self._move(job, replica, CLAIMED, 0, "", member, by)
                self._move(job, replica, RUNNING, 0, "", member, by)
                state.transitions += 1
            elif op == _DONE:
                member = self._held(replica, op)
                replica.member = None
                self._move(job, replica, a, b, notes[c - 1] if c else "", member, by)
                self._drop(member)
                state.transitions += 1
            elif op == _CLAIM:
                member = self._held(replica, op)
                if c:
                    job.master = notes[c - 1]
                member.phase = AT_CLAIMED
                members[member] = None
                self._move(job, replica, CLAIMED, 0, "", member, by)
            elif op == _START:
                member = self._held(replica, op)
                member.phase = AT_RUNNING
                members[member] = None
                job.started = True
                self._move(job, replica, RUNNING, 0, "", member, by)
            elif op == _EXIT:
                member = self._held(replica, op)
                member.phase = AT_EXITED
                members[member] = None
                replica.member = None
                self._move(job, replica, a, b, notes[c - 1] if c else "", member, by)
            elif op == _FREE:
                self._drop(self._lingering(job, index, a))
            elif op in (_REFUSE, _WITHDRAW, _LOSE):
                member = self._held(replica, op)
                why = notes[c - 1] if c else ""
                if a != LOST_KEPT:
                    replica.member = None
                    self._remove(member)
                self._move(job, replica, a, b, why, member, by)
            elif op == _END:
                member = self._held(replica, op)
                replica.after = b & (1 << NOTICE_BITS) - 1
                if member.notice_s != b >> NOTICE_BITS:
                    member.notice_s = b >> NOTICE_BITS
                    members[member] = None
                self._move(job, replica, a, 0, notes[c - 1] if c else "", member, by)
                out.touched.append(member)
            elif op == _MOVE:
                self._move(job, replica, a, b, notes[c - 1] if c else "", None, by)
            elif op == _BACKOFF:
                replica.not_before = a
                if b == Count.RETRY:
                    replica.retries += 1
                elif b == Count.LOSS:
                    replica.losses += 1
                elif b == Count.REFUSAL:
                    replica.refusals += 1
            elif op == _GANG:
                job.gang = a
                job.after = b
                job.count = c
                if a == GangPhase.HOLDING:
                    job.master = ""  # of the attempt before
                elif a == GangPhase.STARTED:
                    out.touched.extend(peer.member for peer in job.replicas if peer.member is not None)
            elif op == _QUARANTINE:
                held = self._lingering(job, index, a)
                held.worker.quarantined |= b
                self._touch_worker(held.worker)
            else:
                raise FoldError(f"record {seq} holds step {op}, which this release does not know")

    def _run(self, job: Job, replica: Replica, to: int, code: int, why: str, by: str) -> None:
        """CLAIM, START, EXIT and FREE: what most attempts of short jobs are, in one record."""
        member = replica.member
        if member is None or replica.state != PLACED:
            raise self._illegal(replica, CLAIMED)
        if to not in LEGAL[RUNNING]:
            raise self._illegal(replica, to)
        rev, time, index, attempt = job.rev, self.time, replica.index, replica.attempt
        worker, mask, fence, story = member.worker.num, member.mask, member.fence, job.story
        if len(story) >= STORY_PART:
            self._long(job)
        story += (
            (rev + 1, time, index, attempt, CLAIMED, worker, mask, 0, "", fence, by),
            (rev + 2, time, index, attempt, RUNNING, worker, mask, 0, "", fence, by),
            (rev + 3, time, index, attempt, to, worker, mask, code, why, fence, by),
        )
        job.rev = rev + 3
        job.started = True
        replica.state = to
        replica.member = None
        if IS_TERMINAL[to]:
            job.live -= 1
        self._drop(member)
        self.state.transitions += 3

    def _actors(self) -> dict[int, str]:
        """Who did the step at each position, of those that an actor did."""
        flat, notes = self.record.actors, self.record.notes
        found: dict[int, str] = {}
        for at in range(0, len(flat), 3):
            for position in range(flat[at], flat[at + 1], STEP_WIDTH):
                found[position] = notes[flat[at + 2] - 1]
        return found

    def _move(self, job: Job, replica: Replica, to: int, code: int, why: str, member: Member | None, by: str) -> None:
        if to not in LEGAL[replica.state]:
            raise self._illegal(replica, to)
        replica.state = to
        job.rev = rev = job.rev + 1
        if IS_TERMINAL[to]:
            job.live -= 1
        worker, mask, fence = (member.worker.num, member.mask, member.fence) if member is not None else (-1, 0, 0)
        self._tell(job, (rev, self.time, replica.index, replica.attempt, to, worker, mask, code, why, fence, by))

    def _illegal(self, replica: Replica, to: int) -> FoldError:
        name = f"{replica.job.tenant}/{replica.job.name}/{replica.index}"
        return FoldError(f"record {self.seq}: {name} cannot go from {STATES[replica.state]} to {STATES[to]}")

    def _held(self, replica: Replica, op: int) -> Member:
        member = replica.member
        if member is None:
            name = f"{replica.job.tenant}/{replica.job.name}/{replica.index}"
            raise FoldError(f"record {self.seq}: {Op(op).name} of {name}, which holds nothing")
        return member

    def _lingering(self, job: Job, index: int, packed: int) -> Member:
        fence, worker_num = packed >> 16, packed & 0xFFFF
        key = (job.tenant, job.name, index, fence)
        member = self.state.worker_by_num[worker_num].members.get(key)
        if member is None or member.phase != AT_EXITED:
            raise FoldError(f"record {self.seq}: {key} does not linger on worker {worker_num}")
        return member

    def _drop(self, member: Member) -> None:
        """Its devices were seen free."""
        worker = member.worker
        if worker.quarantined & member.mask:
            worker.quarantined &= ~member.mask
            self._touch_worker(worker)
        self._remove(member)

    def _remove(self, member: Member) -> None:
        del member.worker.members[member.key]
        job = member.replica.job
        job.held -= 1
        tenant = self.state.tenants[job.tenant]
        tenant.gpus -= member.mask.bit_count()
        if self.state.half_life_ms:
            self._use(tenant, -fairshare.rate_of(member))
        self.state.digest -= member.row
        self.members.pop(member, None)
        member.row = 0

    def _use(self, tenant: Tenant, rate_milli: int) -> None:
        """From this record on a tenant uses so much more, or less; what it has used until now stays."""
        tenant.rate_milli += rate_milli
        tenant.usage_base -= rate_milli * self.state.inflation
        self.rows[tenant] = None
