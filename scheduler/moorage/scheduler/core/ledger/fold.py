"""`fold(state, record, seq)`: applies a record to the state. No policy, clock, randomness, floats or set order.

The leader folds its own record while the ledger stores it; a standby, a restart and a replay fold the same bytes. A
record of an older epoch changes nothing but the sequence (third line of the fence, ledger-rules H1).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

from moorage.scheduler.core.ledger import fairshare
from moorage.scheduler.core.ledger.folding import Folded, FoldError
from moorage.scheduler.core.ledger.record import Record, id_of
from moorage.scheduler.core.ledger.records import FORMAT, FORMAT_MIN, STEP_WIDTH, Op
from moorage.scheduler.core.ledger.state import IS_TERMINAL, STORY_MAX, Job, State, new_job
from moorage.scheduler.core.ledger.steps import FoldingSteps
from moorage.schemas.ranges import ONE, Ranges, first_numbers, joined

_ACT: Final = int(Op.ACT)
_ACCEPT: Final = int(Op.ACCEPT)
MORE_NAMED: Final = "the steps of a record name more acts or new jobs than it has"


def fold(state: State, record: Record, seq: int) -> Folded:
    """Apply one record, and return what it changed. A record of an older epoch changes only the sequence.

    Raises `FoldError` if the record does not fit the state, which must then be thrown away.
    """
    if not FORMAT_MIN <= record.format <= FORMAT:
        other = "a newer" if record.format > FORMAT else "an older"
        raise FoldError(
            f"record {seq} has format {record.format}; this release reads {FORMAT_MIN} to {FORMAT}: use {other} release"
        )
    if record.epoch < state.epoch:
        state.seq = seq  # a stale leader's record: counted, never applied
        return Folded()
    if record.digest != state.digest:
        raise FoldError(f"record {seq} follows state {record.digest:x}, but this state is {state.digest:x}")
    return begin(state, record, seq).end()


def begin(state: State, record: Record, seq: int) -> Begun:
    """Apply all of a record that may not fit the state; `end` of what this returns does the rest, and never fails.

    Raises `FoldError` if it does not fit: the state must then be thrown away.
    """
    folding = Begun(state, seq, record.time, record.epoch, record.format, record.notes)
    try:
        folding.open()
        folding.run(record)
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise FoldError(f"record {seq} says what cannot be: {error!r}") from error
    return folding


class Begun(FoldingSteps):
    """Folds one record; collects the changed rows, so that each row is hashed once."""

    __slots__ = ("_accepts", "_acts")

    def open(self) -> None:
        """Let time pass until the record's."""
        state = self.state
        state.time_ms = self.time
        if state.half_life_ms and fairshare.advance(state):
            self.rows.update(dict.fromkeys(state.tenants.values()))

    def run(self, record: Record) -> None:
        state = self.state
        self._acts, self._accepts = iter(record.acts), iter(record.accepts)
        if record.acts or record.accepts:
            acts_first, accepts_first = decided_first(record)
            for act in islice(self._acts, acts_first):
                act.fold(self)
            if accepts_first:
                self.accept(islice(self._accepts, accepts_first))
        if record.epoch != state.epoch:
            raise FoldError(f"record {self.seq} is of epoch {record.epoch}, which no epoch record before it began")
        if record.steps:
            self.steps(record.steps, record.actors)
        if record.facts:
            self.facts(record.facts)

    def facts(self, facts: list[int]) -> None:
        for at in range(0, len(facts), 2):
            worker = self.state.worker_by_num[facts[at]]
            worker.no = facts[at + 1]
            self.rows[worker] = None

    def end(self) -> Folded:
        """Finish the record: the table of ended jobs, the digest and the sequence."""
        state = self.state
        finished, before = state.finished, state.finished.row
        finished.add_all(self.finished)
        for _ in range(self.expired):
            finished.drop_oldest()
        state.digest += finished.row - before
        self._renew_digest()
        state.seq = self.seq
        return self.out

    def _renew_digest(self) -> None:
        """Replace the digest of each changed row in the state's digest, note the jobs that are over now."""
        state, out = self.state, self.out
        for job in out.jobs.values():
            if len(job.story) >= STORY_MAX:
                self.shorten_story(job)
        digest, ended, preempting = state.digest, state.ended, bool(state.preempting)
        for replica in self.replicas:
            new = 0 if IS_TERMINAL[replica.state] else replica.digest_row()
            digest += new - replica.row
            replica.row = new
        for job in out.jobs.values():
            if preempting and job.preempts is not None and job.live == 0:
                job.preempts = None
                state.preempting.pop(job.num, None)
            new = job.digest_row()
            digest += new - job.row
            job.row = new
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

    def _in_order(self, op: int, a: int) -> None:
        """Fold the acts, or the new jobs, that were decided between two steps."""
        self.state.transitions -= 1
        if op == _ACT and (act := next(self._acts, None)) is not None:
            act.fold(self)
        elif op == _ACCEPT and (accepts := list(islice(self._accepts, a))):
            self.accept(accepts)
        else:
            raise FoldError(MORE_NAMED)

    def accept(self, accepts: Iterable[tuple[str, list[Any]]]) -> None:
        state, accepted, changed = self.state, self.out.accepted, self.out.jobs
        jobs, num, time, seq = state.jobs, state.next_num, self.time, self.seq
        for tenant_name, flat in accepts:  # with fair share a tenant may have hundreds of items of one job each
            tenant = state.tenants.get(tenant_name) or state.tenant(tenant_name)
            names, first, waits = tenant.jobs, num, 0
            parts = iter(flat)
            for written, body, replicas, trace in zip(parts, parts, parts, parts, strict=True):
                name = id_of(written, body)
                if name in names:
                    raise FoldError(f"job {tenant_name}/{name} is accepted twice")
                numbers = ONE if replicas == 1 else numbers_of(replicas)
                names[name] = jobs[num] = changed[num] = job = new_job(
                    num, tenant_name, name, body, numbers, trace, time, seq
                )
                if job.extra:
                    state.extra += job.extra
                    tenant.extra += job.extra
                accepted.append(job)
                waits += job.size
                num += 1
            tenant.live += num - first
            tenant.waits += waits
            self.rows[tenant] = None
        state.next_num = num

    def accept_one(self, tenant_name: str, name: str, body: bytes, numbers: Ranges, traceparent: str) -> Job:
        """Accept one job; as `accept`, for one who has its id and its numbers at hand."""
        state, num = self.state, self.state.next_num
        tenant = state.tenants.get(tenant_name) or state.tenant(tenant_name)
        if name in tenant.jobs:
            raise FoldError(f"job {tenant_name}/{name} is accepted twice")
        job = new_job(num, tenant_name, name, body, numbers, traceparent, self.time, self.seq)
        tenant.jobs[name] = state.jobs[num] = self.out.jobs[num] = job
        if job.extra:
            state.extra += job.extra
            tenant.extra += job.extra
        tenant.live += 1
        tenant.waits += job.size
        self.rows[tenant] = None
        self.out.accepted.append(job)
        state.next_num = num + 1
        return job


def decided_first(record: Record) -> tuple[int, int]:
    """Return how many of a record's acts, and of its `accepts`, no step names: they come before all steps.

    Raises `FoldError` if the steps name more than there are.
    """
    ops = record.steps[::STEP_WIDTH]
    acts, accepts = len(record.acts) - ops.count(_ACT), len(record.accepts)
    if _ACCEPT in ops:
        accepts -= sum(record.steps[at * STEP_WIDTH + 3] for at, op in enumerate(ops) if op == _ACCEPT)
    if acts < 0 or accepts < 0:
        raise FoldError(MORE_NAMED)
    return acts, accepts


def numbers_of(replicas: int | list[list[int]]) -> Ranges:
    """Return the numbers of a job's replicas as an accept says them: how many from 0 on, or ranges."""
    if isinstance(replicas, int):
        return first_numbers(replicas)
    return joined((first, last) for first, last in replicas)
