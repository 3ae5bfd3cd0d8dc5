"""Checks before a record is sent that it can be folded: every later leader must be able to fold it.

`check` reads the acts, facts, accepts and steps, and changes nothing. Acts and new jobs are checked before the steps,
wherever they stand. It does not check what the leader takes from its own state: the format, the epoch and the digest.
It follows the steps like `FoldingSteps`, but only with what a step depends on: a replica's state, whether it holds
devices, and which members linger.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from moorage.scheduler.core.ledger.fold import decided_first, numbers_of
from moorage.scheduler.core.ledger.folding import Checking, FoldError
from moorage.scheduler.core.ledger.ids_in_bodies import id_of
from moorage.scheduler.core.ledger.record import Record
from moorage.scheduler.core.ledger.records import ENDS, NO_JOB, STATE_MASK, STEP_WIDTH, Op, unpacked
from moorage.scheduler.core.ledger.state import (
    CLAIMED,
    FREEZES,
    FROZEN,
    IS_TERMINAL,
    LEGAL,
    LOST_KEPT,
    PLACED,
    QUEUED,
    RUNNING,
    SUCCEEDED,
    TELLS_READY,
    Job,
    Replica,
    State,
)
from moorage.schemas.ranges import NOTHING, ONE, Ranges, both, is_in, joined, ranges_of, without

_PLACE, _RAN, _CLAIM, _START = map(int, (Op.PLACE, Op.RAN, Op.CLAIM, Op.START))
_EXIT, _FREE, _QUARANTINE = map(int, (Op.EXIT, Op.FREE, Op.QUARANTINE))
_END, _MOVE, _BACKOFF, _GANG = map(int, (Op.END, Op.MOVE, Op.BACKOFF, Op.GANG))
_FREEZE, _RESUME, _READY = map(int, (Op.FREEZE, Op.RESUME, Op.READY))
_MOVE_FRESH: Final = int(Op.MOVE_FRESH)
_AWAIT: Final = int(Op.AWAIT)
#: steps of a job, or of a member whose replica may have ended
_OF_JOB: Final = frozenset({_FREE, _QUARANTINE, _GANG, _AWAIT})
_OVER: Final = frozenset(map(int, (Op.REFUSE, Op.WITHDRAW, Op.LOSE)))
_ACCEPT: Final = int(Op.ACCEPT)
_IN_ORDER: Final = frozenset({int(Op.ACT), _ACCEPT})
_EXITS: Final = frozenset({_EXIT, _RAN})
_NOTED: Final = frozenset({_CLAIM, _START, _READY, _EXIT, _END, _MOVE, _RESUME, *_OVER})
#: a replica is identified by job number times this, plus its index
_INDEX_MAX: Final = 1 << 20
_FREE_OF_DEVICES: Final = -1


def check(state: State, record: Record) -> None:
    """Raise `FoldError` if `fold` could not apply what the leader decided in this record."""
    if len(record.steps) % STEP_WIDTH:
        raise FoldError("the record ends within a step")
    checking = Checking(state)
    decided_first(record)
    for act in record.acts:
        act.check(checking)
    workers = checking.workers
    for at in range(0, len(record.facts), 2):
        if record.facts[at] not in workers:
            raise FoldError(f"facts of worker {record.facts[at]}, which is not known")
    new = _check_accepts(state, record, checking.gone) if record.accepts else []
    if record.steps:
        _check_steps(state, record, new, workers)


def _check_accepts(state: State, record: Record, gone: set[tuple[str, str]]) -> list[Ranges]:
    """Return the numbers of the replicas of each new job."""
    new: list[Ranges] = []
    fresh: set[tuple[str, str]] = set()
    for tenant_name, flat in record.accepts:
        tenant = state.tenants.get(tenant_name)
        known = tenant.jobs if tenant is not None else {}
        for at in range(0, len(flat), 4):
            name = id_of(flat[at], flat[at + 1])
            key = (tenant_name, name)
            if key in fresh or (name in known and key not in gone):
                raise FoldError(f"job {tenant_name}/{name} is accepted twice")
            fresh.add(key)
            new.append(ONE if flat[at + 2] == 1 else numbers_of(flat[at + 2]))
    return new


def _check_steps(state: State, record: Record, new: list[Ranges], workers: Set[int]) -> None:
    jobs, first, notes = state.jobs, state.next_num, len(record.notes)
    #: by replica: its state, and the worker whose devices it holds, after the steps so far
    states: dict[int, int] = {}
    holds: dict[int, int] = {}
    # by replica and fence: whether the member lingers, if these steps changed that
    lingering: dict[tuple[int, int], bool] = {}
    fences: dict[int, int] = {}  # by replica: the fence of a placement in this record
    leased: dict[int, bool] = {}  # by replica: whether it has its devices, after these steps froze or resumed it
    ready: dict[int, bool] = {}  # by replica: whether it is ready after these steps, if they say so
    moved: dict[int, Ranges] = {}  # by job: replicas that were never placed, and have ended in this record
    placed: set[int] = set()  # jobs with a placement in this record
    flat = iter(record.steps)
    for op, num, index, a, b, c in zip(flat, flat, flat, flat, flat, flat, strict=True):
        key = num * _INDEX_MAX + index
        replica: Replica | None = None
        # nearly all steps are one of these two, and the only one of their replica
        if op == _PLACE and num >= first and key not in states and not moved:
            fresh = new[num - first] if num - first < len(new) else NOTHING
            if fresh and (fresh[0][0] <= index <= fresh[0][1] or is_in(fresh, index)) and a in workers:
                states[key], holds[key] = PLACED, a
                placed.add(num)
                continue
        elif op == _RAN and a & STATE_MASK == SUCCEEDED and key not in states and num in jobs:
            row = jobs[num].rows.get(index)
            if row is not None and row.state == PLACED and row.member is not None:
                states[key], holds[key], lingering[(key, row.fence)] = SUCCEEDED, _FREE_OF_DEVICES, True
                continue
        if op in _IN_ORDER and num == NO_JOB:
            if op == _ACCEPT and a < 1:
                raise FoldError(f"step {op} takes {a} new jobs")
            continue
        if op in _EXITS:
            a &= STATE_MASK
        job = jobs.get(num)
        if job is not None:
            replica, fresh = job.rows.get(index), job.fresh
        elif first <= num < first + len(new):
            fresh = new[num - first]
        else:
            raise FoldError(f"step {op} names no replica: job {num}, replica {index}")
        if num in moved:
            fresh = without(fresh, moved[num])
        if op == _MOVE_FRESH:
            if num in placed:
                fresh = without(fresh, ranges_of(key % _INDEX_MAX for key in states if key // _INDEX_MAX == num))
            ended = both(fresh, ((index, b),))
            to = a & STATE_MASK
            if not ended or to not in LEGAL[QUEUED] or not IS_TERMINAL[to] or not 0 <= c <= notes:
                raise FoldError(f"step {op} of job {num}, replicas {index} to {b}, to state {to}")
            moved[num] = joined(sorted((*moved.get(num, ()), *ended)))
            continue
        if replica is None and key not in states and op not in _OF_JOB and not (op == _PLACE and is_in(fresh, index)):
            raise FoldError(f"step {op} names no replica: job {num}, replica {index}")
        if c and op in _NOTED and not 0 < c <= notes:
            raise FoldError(f"step {op} names note {c} of {notes}")
        now = states.get(key, -1)
        if now < 0:
            now = replica.state if replica is not None else QUEUED
            member = replica.member if replica is not None else None
            holds[key] = member.worker.num if member is not None else _FREE_OF_DEVICES
        held = holds[key]
        if op == _PLACE:
            if now != QUEUED or a not in workers:
                raise FoldError(f"step {op} of job {num}, replica {index}, which is in state {now}, on worker {a}")
            states[key], holds[key], fences[key], ready[key] = PLACED, a, state.seq + 1, False
            placed.add(num)
            continue
        if op in (_FREE, _QUARANTINE):
            a = unpacked(a)
            if not _lingers(job, index, key, a, lingering):
                raise FoldError(f"step {op} of job {num}, replica {index}: it does not linger")
            if op == _FREE:
                lingering[(key, a)] = False
            continue
        if op == _GANG:
            continue
        if op == _READY:
            before = replica.member if replica is not None and key not in fences else None
            was = ready.get(key, before is not None and before.ready)
            if now not in TELLS_READY or a not in (0, 1) or was is bool(a):
                raise FoldError(f"step {op} of job {num}, replica {index}, in state {now}, ready {was}: {a}")
            ready[key] = bool(a)
            continue
        if op == _AWAIT:
            if num < first or not 0 <= a < num or (0 < a < first and a not in jobs) or (a and b not in ENDS):
                raise FoldError(f"step {op}: job {num} cannot wait for job {a} with {b}")
            continue
        if op == _BACKOFF:
            if IS_TERMINAL[now]:
                raise FoldError(f"step {op} of job {num}, replica {index}, which has ended")
            continue
        if op != _MOVE and held == _FREE_OF_DEVICES:
            raise FoldError(f"step {op} of job {num}, replica {index}, which no worker has")
        to = CLAIMED if op == _CLAIM else RUNNING if op == _START else FROZEN if op == _RESUME else a
        if op in (_FREEZE, _RESUME):
            before = replica.member if replica is not None else None
            has = leased.get(key, before is None or bool(before.mask))
            if op == _FREEZE:
                legal = (now, to) in FREEZES and (to == FROZEN or has)
            else:
                legal = now == FROZEN and a in (0, 1) and has is not bool(a)
            leased[key] = to == RUNNING or (op == _RESUME and bool(a))
        elif op == _RAN:
            legal = now == PLACED and a == SUCCEEDED
        elif op in (_CLAIM, _START, _EXIT, _END, _MOVE) or op in _OVER:
            legal = to in LEGAL[now]
        else:
            raise FoldError(f"step {op} is not known")
        if not legal:
            raise FoldError(f"step {op}: job {num}, replica {index}, cannot go from state {now} to {to}")
        states[key] = to
        if op in _EXITS or (op in _OVER and a != LOST_KEPT):
            holds[key] = _FREE_OF_DEVICES
            if op in _EXITS:
                fence = fences.get(key, replica.fence if replica is not None else state.seq + 1)
                lingering[(key, fence)] = True


def _lingers(job: Job | None, index: int, key: int, fence: int, lingering: dict[tuple[int, int], bool]) -> bool:
    changed = lingering.get((key, fence))
    if changed is not None or job is None:
        return bool(changed)
    return job.lingering is not None and (index, fence) in job.lingering
