"""Checks before a record is sent that it can be folded: every later leader must be able to fold it.

`check` reads the acts, facts, accepts and steps, and changes nothing. It does not check what the leader takes from its
own state: the format, the epoch and the digest. It follows the steps like `FoldingSteps`, but only with what a step
depends on: a replica's state, whether it holds devices, and which members linger.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from moorage.scheduler.core.ledger.folding import Checking, FoldError
from moorage.scheduler.core.ledger.ids_in_bodies import id_of
from moorage.scheduler.core.ledger.record import Record
from moorage.scheduler.core.ledger.records import STATE_MASK, STEP_WIDTH, Op, unpacked
from moorage.scheduler.core.ledger.state import (
    AFTER_RUNNING,
    CLAIMED,
    FREEZES,
    LEGAL,
    LOST_KEPT,
    PLACED,
    QUEUED,
    RUNNING,
    Replica,
    State,
)

_PLACE, _RUN, _CLAIM, _START, _BEGIN = map(int, (Op.PLACE, Op.RUN, Op.CLAIM, Op.START, Op.BEGIN))
_EXIT, _DONE, _FREE, _QUARANTINE = map(int, (Op.EXIT, Op.DONE, Op.FREE, Op.QUARANTINE))
_END, _MOVE, _BACKOFF, _GANG, _FREEZE = map(int, (Op.END, Op.MOVE, Op.BACKOFF, Op.GANG, Op.FREEZE))
_OVER: Final = frozenset(map(int, (Op.REFUSE, Op.WITHDRAW, Op.LOSE)))
_EXITS: Final = frozenset({_EXIT, _DONE, _RUN})
_NOTED: Final = frozenset({_CLAIM, _EXIT, _DONE, _END, _MOVE, _RUN, *_OVER})
#: a replica is identified by job number times this, plus its index
_INDEX_MAX: Final = 1 << 20
_FREE_OF_DEVICES: Final = -1


def check(state: State, record: Record) -> None:
    """Raise `FoldError` if `fold` could not apply what the leader decided in this record."""
    if len(record.steps) % STEP_WIDTH:
        raise FoldError("the record ends within a step")
    checking = Checking(state)
    for act in record.acts:
        act.check(checking)
    workers = checking.workers
    for at in range(0, len(record.facts), 2):
        if record.facts[at] not in workers:
            raise FoldError(f"facts of worker {record.facts[at]}, which is not known")
    new = _check_accepts(state, record, checking.gone) if record.accepts else []
    if record.steps:
        _check_steps(state, record, new, workers)


def _check_accepts(state: State, record: Record, gone: set[tuple[str, str]]) -> list[int]:
    """Return the number of replicas of each new job."""
    new: list[int] = []
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
            new.append(flat[at + 2])
    return new


def _check_steps(state: State, record: Record, new: list[int], workers: Set[int]) -> None:
    jobs, first, notes = state.jobs, state.next_num, len(record.notes)
    #: by replica: its state, and the worker whose devices it holds, after the steps so far
    states: dict[int, int] = {}
    holds: dict[int, int] = {}
    # by replica and fence: whether the member lingers, if these steps changed that
    lingering: dict[tuple[int, int], bool] = {}
    fences: dict[int, int] = {}  # by replica: the fence of a placement in this record
    flat = iter(record.steps)
    for op, num, index, a, _, c in zip(flat, flat, flat, flat, flat, flat, strict=True):
        key = num * _INDEX_MAX + index
        replica: Replica | None = None
        # nearly all steps are one of these two, and the only one of their replica
        if op == _PLACE and num >= first and key not in states:
            if num - first < len(new) and 0 <= index < new[num - first] and a in workers:
                states[key], holds[key] = PLACED, a
                continue
        elif op == _RUN and a & STATE_MASK in AFTER_RUNNING and not c and key not in states and num in jobs:
            replicas = jobs[num].replicas
            if 0 <= index < len(replicas) and replicas[index].state == PLACED and replicas[index].member is not None:
                states[key], holds[key] = a & STATE_MASK, _FREE_OF_DEVICES
                continue
        if op in _EXITS:
            a &= STATE_MASK
        if num < first:
            job = jobs.get(num)
            if job is None or not 0 <= index < len(job.replicas):
                raise FoldError(f"step {op} names no replica: job {num}, replica {index}")
            replica = job.replicas[index]
        elif num - first >= len(new) or not 0 <= index < new[num - first]:
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
            states[key], holds[key], fences[key] = PLACED, a, state.seq + 1
            continue
        if op in (_FREE, _QUARANTINE):
            a = unpacked(a)
            if not _lingers(replica, key, a, lingering):
                raise FoldError(f"step {op} of job {num}, replica {index}: it does not linger")
            if op == _FREE:
                lingering[(key, a)] = False
            continue
        if op in (_BACKOFF, _GANG):
            continue
        if op != _MOVE and held == _FREE_OF_DEVICES:
            raise FoldError(f"step {op} of job {num}, replica {index}, which no worker has")
        to = CLAIMED if op in (_CLAIM, _BEGIN) else RUNNING if op == _START else a
        if op == _FREEZE:
            legal = {now, to} == FREEZES
        elif op == _RUN:
            legal = now == PLACED and a in AFTER_RUNNING
        elif op in (_CLAIM, _START, _BEGIN, _EXIT, _DONE, _END, _MOVE) or op in _OVER:
            legal = to in LEGAL[now]
        else:
            raise FoldError(f"step {op} is not known")
        if not legal:
            raise FoldError(f"step {op}: job {num}, replica {index}, cannot go from state {now} to {to}")
        states[key] = RUNNING if op == _BEGIN else to
        if op in (_RUN, _DONE, _EXIT) or (op in _OVER and a != LOST_KEPT):
            holds[key] = _FREE_OF_DEVICES
            if op == _EXIT:
                fence = fences.get(key, replica.fence if replica is not None else state.seq + 1)
                lingering[(key, fence)] = True


def _lingers(replica: Replica | None, key: int, fence: int, lingering: dict[tuple[int, int], bool]) -> bool:
    changed = lingering.get((key, fence))
    if changed is not None or replica is None:
        return bool(changed)
    job = replica.job
    return job.lingering is not None and (job.tenant, job.name, replica.index, fence) in job.lingering
