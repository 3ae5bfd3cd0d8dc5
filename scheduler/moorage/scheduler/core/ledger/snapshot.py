"""The state at one record as bytes, from which a restart continues with the later records.

A follower writes it, never the leader's loop. A snapshot is valid only once a ledger record names it with its digest
(ledger-rules H12). `load` returns a state with the same digest, or raises.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec

from moorage.scheduler.core.ledger import fairshare
from moorage.scheduler.core.ledger.finished import ROW_BYTES, FinishedTable
from moorage.scheduler.core.ledger.records import GUEST
from moorage.scheduler.core.ledger.resizes import Resize
from moorage.scheduler.core.ledger.state import (
    IS_TERMINAL,
    Ailment,
    Job,
    Member,
    Pool,
    Replica,
    StandingOrder,
    State,
    Tenant,
    Window,
    Worker,
    new_job,
    new_member,
)
from moorage.schemas.unreadable import UNREADABLE

SNAPSHOT_FORMAT: Final = 1


class BadSnapshot(Exception):
    """The bytes are not a snapshot of this format, or not the state that they claim to be."""


class _Job(msgspec.Struct, array_like=True):
    num: int
    tenant: str
    name: str
    body: bytes
    trace: str
    accepted_ms: int
    ledger: int
    rev: int
    started: bool
    over: bool
    gang: int
    after: int
    count: int
    master: str
    story: list[tuple[Any, ...]]  # rows of `Transition`, of different lengths
    replicas: list[list[int]]


class _Worker(msgspec.Struct, array_like=True):
    id: str
    machine: str
    boot: str
    n: int
    no: int
    session: str
    joined_ms: int
    hello: dict[str, Any]
    flag: str
    by: str
    quarantined: int
    # job number, replica, attempt, fence, mask, mode as in `records.placing`, phase, whether it is the current attempt,
    # rate
    members: list[list[int]]
    former: list[Pool]
    num: int
    left: tuple[int, str]  # when and why its last session ended


class _Snapshot(msgspec.Struct, array_like=True):
    format: int
    ledger_id: str
    seq: int
    epoch: int
    epoch_seq: int
    leader: str
    time_ms: int
    next_num: int
    digest: int
    transitions: int
    named: list[Any]
    jobs: list[_Job]
    ended: list[int]
    finished: bytes
    tenants: list[tuple[str, int, int, dict[str, int]]]
    workers: list[_Worker]
    finished_row_bytes: int
    job_orders: list[tuple[int, int, StandingOrder | None]]  # job number, priority, hold; of jobs with either
    tenant_orders: list[
        tuple[str, int, int, StandingOrder | None, StandingOrder | None]
    ]  # tenant, GPUs, jobs, limit, hold
    half_life: tuple[int, int]  # the half-life of usage, and ledger ms since when usage is counted
    # tenant, weight, guaranteed GPUs, order, usage
    shares: list[tuple[str, int, int, StandingOrder | None, bytes]]
    #: worker number, slots declared healthy, sequence of that order, ailments by slot, maintenance window
    worker_health: list[tuple[int, int, int, dict[int, Ailment], list[Any] | None]]
    job_avoids: list[tuple[int, tuple[tuple[int, int], ...]]]
    notices: list[tuple[int, int, int, int]]  # job number, replica, fence, seconds
    level: int
    restored: tuple[str, int, int]  # former ledger id, when, and in which epoch
    behind: str
    preempts: list[tuple[int, tuple[int, ...], tuple[int, ...]]]  # job number, workers, jobs that end for it
    used: list[tuple[int, tuple[int, int]]]  # job number, GPU milliseconds and MiB seconds
    resizes: list[tuple[int, tuple[Resize, ...]]]  # job number, operators' changes of its share
    freezes: list[tuple[int, int, int]]  # job number, replica, fence
    wakes: list[tuple[int, int, int]]  # those of them that their first use resumes
    next_worker: int
    lacking: list[tuple[int, tuple[int, ...]]]  # job number, workers that lack what it needs
    shut: list[tuple[int, int, str]]  # worker number, ledger ms at which it opens, why starts fail on it


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Snapshot).decode


def dump(state: State) -> bytes:
    """Return the whole ledger state as msgpack, without soft fields."""
    jobs = [
        _Job(
            job.num, job.tenant, job.name, job.body, job.traceparent, job.accepted_ms, job.ledger, job.rev, job.started,
            job.over, job.gang, job.after, job.count, job.master, job.story,
            [
                [r.state, r.attempt, r.fence, r.retries, r.losses, r.refusals, r.not_before, r.after]
                for r in job.replicas
            ],
        )
        for job in state.jobs.values()
    ]  # fmt: skip
    workers = [
        _Worker(
            w.id, w.machine, w.boot, w.n, w.no, w.session, w.joined_ms, w.hello, w.flag, w.by, w.quarantined,
            [
                [r.job.num, r.index, m.attempt, m.fence, m.mask, _mode(m), m.phase, int(r.member is m), m.rate_milli]
                for m in w.members.values()
                for r in (m.replica,)
            ],
            list(w.former), w.num, (w.left_ms, w.left_why),
        )
        for w in state.workers.values()
    ]  # fmt: skip
    tenants = [(t.name, t.submit_cursor, t.cancel_cursor, t.tombstones) for t in state.tenants.values()]
    job_orders = [
        (job.num, job.priority, job.hold) for job in state.jobs.values() if job.hold is not None or job.priority >= 0
    ]
    tenant_orders = [(t.name, t.gpus_max, t.jobs_max, t.limit, t.hold) for t in state.tenants.values() if t.ordered]
    preempts = [(job.num, *job.preempts) for job in state.preempting.values() if job.preempts is not None]
    shares = [
        (t.name, t.weight, t.guaranteed, t.share, _signed(t.usage_base))
        for t in state.tenants.values()
        if t.share is not None or t.usage_base
    ]
    worker_health = [
        (w.num, w.well, w.well_n, w.unwell, list(w.window) if w.window is not None else None)
        for w in state.workers.values()
        if w.unwell or w.well or w.well_n or w.window is not None
    ]
    job_avoids = [(job.num, job.avoid) for job in state.jobs.values() if job.avoid]
    notices = [
        (member.replica.job.num, member.replica.index, member.fence, member.notice_s)
        for member in state.members()
        if member.notice_s
    ]
    freezes = [_named(member) for member in state.members() if member.freeze]
    wakes = [_named(member) for member in state.members() if member.freeze and member.wakes]
    return _encode(
        _Snapshot(
            SNAPSHOT_FORMAT, state.ledger_id, state.seq, state.epoch, state.epoch_seq, state.leader, state.time_ms,
            state.next_num, state.digest, state.transitions, [state.snapshot, state.snapshot_before], jobs,
            list(state.ended), state.finished.dump(), tenants, workers, ROW_BYTES, job_orders,
            tenant_orders, (state.half_life_ms, state.counts_from_ms), shares, worker_health, job_avoids, notices,
            state.level, (state.former_id, state.restored_ms, state.restored_epoch), state.behind,
            preempts, [(job.num, job.used) for job in state.jobs.values() if job.used is not None],
            [(job.num, job.resizes) for job in state.jobs.values() if job.resizes],
            freezes, wakes, state.next_worker, [(job.num, job.lacking) for job in state.jobs.values() if job.lacking],
            [(worker.num, worker.until_ms, worker.why) for worker in state.shut.values()],
        )
    )  # fmt: skip


def _mode(member: Member) -> int:
    return member.mode | GUEST if member.guest else member.mode


def _named(member: Member) -> tuple[int, int, int]:
    return member.replica.job.num, member.replica.index, member.fence


def _signed(number: int) -> bytes:
    """Return an integer of any size as bytes: usage exceeds the 64 bits of msgpack."""
    return number.to_bytes(number.bit_length() // 8 + 1, "big", signed=True)


def snapshot_digest(snapshot: bytes) -> str:
    """Return BLAKE2b-128 of a snapshot's bytes, as in the record that names it."""
    return hashlib.blake2b(snapshot, digest_size=16).hexdigest()


def load(snapshot: bytes) -> State:
    """Return the state in a snapshot. Raises `BadSnapshot` for other bytes, or if the rows do not have their digest."""
    try:
        found = _decode(snapshot)
        return _loaded(found)
    # any damage is possible, as rows refer to each other by number
    except (*UNREADABLE, LookupError, TypeError) as error:
        raise BadSnapshot(f"not a snapshot that this release can read: {error!r}") from None


def _loaded(found: _Snapshot) -> State:
    if found.format != SNAPSHOT_FORMAT:
        raise BadSnapshot(f"the snapshot has format {found.format}, this release reads {SNAPSHOT_FORMAT}")
    state = State()
    state.ledger_id, state.seq, state.epoch, state.epoch_seq = (
        found.ledger_id,
        found.seq,
        found.epoch,
        found.epoch_seq,
    )
    state.leader, state.time_ms, state.next_num = found.leader, found.time_ms, found.next_num
    state.transitions = found.transitions
    state.level, state.behind = found.level, found.behind
    state.former_id, state.restored_ms, state.restored_epoch = found.restored
    named = [tuple(entry) if entry is not None else None for entry in found.named]
    state.snapshot, state.snapshot_before = named[0], named[1]
    for name, submit_cursor, cancel_cursor, tombstones in found.tenants:
        tenant = state.tenant(name)
        tenant.submit_cursor, tenant.cancel_cursor, tenant.tombstones = submit_cursor, cancel_cursor, tombstones
    for row in found.jobs:
        _load_job(state, row)
    for name, gpus_max, jobs_max, limit, hold in found.tenant_orders:
        tenant = state.tenant(name)
        tenant.gpus_max, tenant.jobs_max, tenant.limit, tenant.hold = gpus_max, jobs_max, limit, hold
    for name, weight, guaranteed, share, usage in found.shares:
        tenant = state.tenant(name)
        tenant.weight, tenant.guaranteed, tenant.share = weight, guaranteed, share
        tenant.usage_base = int.from_bytes(usage, "big", signed=True)
    state.half_life_ms, state.counts_from_ms = found.half_life
    if state.half_life_ms:
        fairshare.advance(state)
    for num, priority, hold in found.job_orders:
        state.jobs[num].priority, state.jobs[num].hold = priority, hold
    for num, used in found.used:
        state.jobs[num].used = used
    for num, resizes in found.resizes:
        state.jobs[num].resizes = resizes
    for num, workers, jobs in found.preempts:
        job = state.preempting[num] = state.jobs[num]
        job.preempts = (workers, jobs)
    for worker in found.workers:
        _load_worker(state, worker)
    state.next_worker = found.next_worker
    _load_health(state, found)
    state.ended.extend(found.ended)
    state.finished = FinishedTable.load(found.finished)
    _digest_rows(state)
    if state.digest != found.digest:
        raise BadSnapshot(f"the rows have digest {state.digest:x}, the snapshot says {found.digest:x}")
    return state


def _load_job(state: State, row: _Job) -> None:
    job = new_job(row.num, row.tenant, row.name, row.body, len(row.replicas), row.trace, row.accepted_ms, row.ledger)
    job.rev, job.started, job.over, job.gang = row.rev, row.started, row.over, row.gang
    job.after, job.count, job.master = row.after, row.count, row.master
    job.story = row.story
    for replica, values in zip(job.replicas, row.replicas, strict=True):
        (
            replica.state,
            replica.attempt,
            replica.fence,
            replica.retries,
            replica.losses,
            replica.refusals,
            replica.not_before,
            replica.after,
        ) = values
    job.live = sum(1 for replica in job.replicas if not IS_TERMINAL[replica.state])
    state.jobs[job.num] = job
    tenant = state.tenant(row.tenant)
    tenant.jobs[row.name] = job
    tenant.live += not job.over
    state.extra += job.extra
    if job.over:
        state.extra_ended += job.extra
    else:
        tenant.extra += job.extra


def _load_worker(state: State, row: _Worker) -> None:
    worker = Worker(row.num, row.id, row.machine)
    worker.boot, worker.n, worker.no, worker.session = row.boot, row.n, row.no, row.session
    worker.joined_ms, worker.hello, worker.flag, worker.by = row.joined_ms, row.hello, row.flag, row.by
    worker.quarantined, worker.former = row.quarantined, tuple(row.former)
    worker.left_ms, worker.left_why = row.left
    state.workers[row.id] = state.worker_by_num[row.num] = worker
    for num, index, attempt, fence, mask, mode, phase, own, rate_milli in row.members:
        replica = state.jobs[num].replicas[index]
        member = new_member(replica, worker, mask, mode & ~GUEST, fence)
        member.attempt, member.phase, member.guest = attempt, phase, bool(mode & GUEST)
        member.rate_milli = rate_milli
        worker.members[member.key] = member
        replica.job.held += 1
        tenant = state.tenants[replica.job.tenant]
        tenant.gpus += mask.bit_count()
        if state.half_life_ms:
            tenant.rate_milli += fairshare.rate_of(member)
        if own:
            replica.member = member
        else:
            if replica.job.lingering is None:
                replica.job.lingering = {}
            replica.job.lingering[member.key] = member


def _load_health(state: State, found: _Snapshot) -> None:
    for num, well, well_n, unwell, window in found.worker_health:
        worker = state.worker_by_num[num]
        worker.well, worker.well_n, worker.unwell = well, well_n, unwell
        worker.unwell_mask = sum(1 << slot for slot in unwell)
        if window is not None:
            worker.window = Window(*window)
            state.windows[num] = worker
    for num, avoid in found.job_avoids:
        state.jobs[num].avoid = avoid
    for num, lacking in found.lacking:
        state.jobs[num].lacking = lacking
    for num, until_ms, why in found.shut:
        worker = state.shut[num] = state.worker_by_num[num]
        worker.until_ms, worker.why = until_ms, why
    notices = {(num, index, fence): notice_s for num, index, fence, notice_s in found.notices}
    for member in state.members() if notices else ():
        member.notice_s = notices.get((member.replica.job.num, member.replica.index, member.fence), 0)
    freezes, wakes = set(found.freezes), set(found.wakes)
    for member in state.members() if freezes else ():
        member.freeze, member.wakes = _named(member) in freezes, _named(member) in wakes


def _digest_rows(state: State) -> None:
    rows: list[Job | Replica | Worker | Member | Tenant] = []
    for job in state.jobs.values():
        rows += (job, *job.replicas)
    for worker in state.workers.values():
        rows += (worker, *worker.members.values())
    rows += state.tenants.values()
    total = state.finished.row
    for row in rows:
        row.row = row.digest_row()
        total += row.row
    state.digest = total & 0xFFFFFFFFFFFFFFFF
