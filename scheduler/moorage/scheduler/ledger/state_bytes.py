"""The state at one record as bytes, from which a restart continues with the later records.

A follower writes it, never the leader's loop. A snapshot is valid only once a ledger record names it with its digest
(ledger-rules H12). `load` returns a state with the same digest, or raises. Each class of the state lists what lasts of
its rows (`LASTING`, see `lasting`); what follows from other rows, as counts and tables by number, is made anew here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from moorage.scheduler.core.ledger import facts, fairshare, holding, limits, records
from moorage.scheduler.core.ledger.ceilings import CEILINGS, Ceilings
from moorage.scheduler.core.ledger.finished import ROW_BYTES, FinishedTable
from moorage.scheduler.core.ledger.records import FORMAT_MIN
from moorage.scheduler.core.ledger.schedules import Schedule
from moorage.scheduler.core.ledger.state import (
    CANCELLED,
    QUEUED,
    Attempt,
    Job,
    Replica,
    State,
    Tenant,
    Worker,
    new_job,
)
from moorage.schemas.ranges import count_of
from moorage.schemas.unreadable import UNREADABLE

#: by how much a snapshot's format is above the ledger's feature level: whoever can fold the records can begin from the
#: snapshots, and no one else. A release that changes what stands in a snapshot raises `FORMAT`, and writes the former
#: one until the level is raised
FORMAT_ABOVE_LEVEL: Final = 1

_FIELDS: Final[list[tuple[str, Any]]] = [
    ("format", int),
    ("state", State.LASTING.row),
    ("jobs", list[tuple[Job.LASTING.row, list[Replica.LASTING.row]]]),  # type: ignore[name-defined]
    ("ended", list[int]),
    ("tenants", list[Tenant.LASTING.row]),  # type: ignore[name-defined]
    ("workers", list[tuple[Worker.LASTING.row, list[Attempt.LASTING.row]]]),  # type: ignore[name-defined]
    ("schedules", list[Schedule.LASTING.row]),  # type: ignore[name-defined]
    ("finished", bytes),
    ("finished_row_bytes", int),
]
_Snapshot: Final = msgspec.defstruct("_Snapshot", _FIELDS, array_like=True)
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Snapshot).decode
_parts_of: Final = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_format: Final = msgspec.msgpack.Decoder(int).decode


class BadSnapshot(Exception):
    """The bytes are not a snapshot of this format, or not the state that they claim to be."""


class OtherSnapshot(BadSnapshot):
    """The snapshot has the format of another release."""


def dump(state: State, *, with_facts: bool = False) -> bytes:
    """Return the whole ledger state as msgpack, without soft fields; `with_facts` those of the next level, too."""
    level = max(state.level, facts.LEVEL) if with_facts else state.level
    job_of, replica_of, worker_of = Job.LASTING.dump, Replica.LASTING.dump, Worker.LASTING.dump
    snapshot = _Snapshot(
        FORMAT_ABOVE_LEVEL + state.level,
        State.LASTING.dump(state, level),
        [(job_of(job, level), [replica_of(row, level) for row in job.rows.values()]) for job in state.jobs.values()],
        list(state.ended),
        [Tenant.LASTING.dump(tenant, level) for tenant in state.tenants.values()],
        [
            (worker_of(each, level), [Attempt.LASTING.dump(m, level) for m in each.attempts.values()])
            for each in state.workers.values()
        ],
        [Schedule.LASTING.dump(row, level) for rows in state.schedules.values() for row in rows.values()],
        state.finished.dump(),
        ROW_BYTES,
    )
    return _encode(snapshot)


def snapshot_digest(snapshot: bytes) -> str:
    """Return BLAKE2b-128 of a snapshot's bytes, as in the record that names it."""
    return hashlib.blake2b(snapshot, digest_size=16).hexdigest()


def load(snapshot: bytes, ceilings: Ceilings = CEILINGS, *, with_facts: bool = False) -> State:
    """Return the state in a snapshot, which was written `with_facts` or not.

    Raises `BadSnapshot` for other bytes, or if the rows do not have their digest; `OtherSnapshot` is one of these.
    """
    try:
        format_ = _decode_format(_parts_of(snapshot)[0])
        level = format_ - FORMAT_ABOVE_LEVEL
        if not FORMAT_MIN <= level <= records.FORMAT:
            newer = level > records.FORMAT
            next_ = "use a newer release" if newer else "begin with a new ledger (it is from before 0.3.0)"
            reads = " to ".join(str(FORMAT_ABOVE_LEVEL + each) for each in sorted({FORMAT_MIN, records.FORMAT}))
            raise OtherSnapshot(f"the snapshot has format {format_}, this release reads {reads}: {next_}")
        return _loaded(_decode(snapshot), State(ceilings), with_facts=with_facts)
    # any damage is possible, as rows refer to each other by number
    except (*UNREADABLE, LookupError, TypeError) as error:
        raise BadSnapshot(f"not a snapshot that this release can read: {error!r}") from None


def _loaded(found: Any, state: State, *, with_facts: bool) -> State:
    State.LASTING.fill(state, found.state)
    digest = state.digest
    for values in found.tenants:
        Tenant.LASTING.fill(state.tenant(*Tenant.LASTING.arguments(values)), values)
    limited = [each for each in state.tenants.values() if each.limits is not None]
    state.budgeted = frozenset(each.name for each in limited if each.limits is not None and each.limits.budget_ms)
    state.by_model = frozenset(each.name for each in limited if each.limits is not None and each.limits.gpus_of)
    if state.half_life_ms:
        fairshare.advance(state)
    for values, replicas in found.jobs:
        _load_job(state, values, replicas)
    for values, attempts in found.workers:
        _load_worker(state, values, attempts)
    for values in found.schedules:
        schedule = Schedule(*Schedule.LASTING.arguments(values))
        Schedule.LASTING.fill(schedule, values)
        state.schedules.setdefault(schedule.tenant, {})[schedule.name] = schedule
        state.wishes = max(state.wishes, schedule.wish)
    state.ended.extend(found.ended)
    state.finished = FinishedTable.load(found.finished)
    if state.level < facts.LEVEL and not with_facts:
        facts.find_all(state)
    _digest_rows(state)
    if state.digest != digest:
        raise BadSnapshot(f"the rows have digest {state.digest:x}, the snapshot says {digest:x}")
    return state


def _load_job(state: State, values: Sequence[Any], replicas: list[Sequence[Any]]) -> None:
    job = new_job(*Job.LASTING.arguments(values))
    Job.LASTING.fill(job, values)
    job.folded, job.is_listed = job.rev, job.size <= state.ceilings.listed
    for nth, each in enumerate(replicas):
        replica = Replica(job, *Replica.LASTING.arguments(each))
        Replica.LASTING.fill(replica, each)
        replica.nth = nth
        job.rows[replica.index] = replica
    job.live = count_of(job.fresh) + len(job.rows)
    job.back = sum(replica.state == QUEUED for replica in job.rows.values())
    state.jobs[job.num] = job
    if job.preempts is not None:
        state.preempting[job.num] = job
    tenant = state.tenant(job.tenant)
    tenant.jobs[job.name] = job
    tenant.live += not job.over
    tenant.waits += job.waits
    state.extra += job.extra
    if job.over:
        state.extra_ended += job.extra
        return
    tenant.extra += job.extra
    if job.hold is not None:
        state.on_hold[job.num] = job


def _ended(job: Job, index: int) -> Replica:
    """Return a replica that has ended, for its attempts whose devices are not free yet."""
    replica, state = Replica(job, index), job.state_of(index)
    if state is None and not job.added:
        raise BadSnapshot(f"a worker has replica {index} of job {job.tenant}/{job.name}, which has none")
    replica.state = CANCELLED if state is None else state  # one that moved: its number is no longer one of the job
    return replica


def _load_worker(state: State, values: Sequence[Any], attempts: list[Sequence[Any]]) -> None:
    worker = Worker(*Worker.LASTING.arguments(values))
    Worker.LASTING.fill(worker, values)
    worker.read_hello()
    worker.unwell_mask = sum(1 << slot for slot in worker.unwell)
    state.workers[worker.id] = state.worker_by_num[worker.num] = worker
    if worker.window is not None:
        state.windows[worker.num] = worker
    if worker.until_ms:
        state.shut[worker.num] = worker
    for each in attempts:
        num, index, is_current, no, fence, home, mode = Attempt.LASTING.arguments(each)
        job = state.jobs[num]
        replica = job.rows.get(index) or _ended(job, index)
        name = job.tenant, job.name, index, no, fence
        attempt = Attempt(replica, worker, no, fence, home, home, mode, name)
        Attempt.LASTING.fill(attempt, each)
        state.preemptibles += attempt.preemptible
        worker.attempts[attempt.name] = attempt
        job.held += 1
        tenant = state.tenants[job.tenant]
        tenant.gpus += attempt.mask.bit_count()
        holding.take(state, tenant, attempt, 1)
        if state.half_life_ms:
            tenant.rate_milli += fairshare.rate_of(attempt)
        if is_current:
            replica.attempt = attempt
            continue
        if job.lingering is None:
            job.lingering = {}
        job.lingering[index, fence] = attempt


def _digest_rows(state: State) -> None:
    total = state.finished.row + limits.counter_rows(state.counters)
    for row in state.rows():
        row.row = row.digest_row(state.level)
        total += row.row
    state.digest = total & 0xFFFFFFFFFFFFFFFF
