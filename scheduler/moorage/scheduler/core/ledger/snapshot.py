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
from moorage.scheduler.core.ledger.records import PREEMPTIBLE
from moorage.scheduler.core.ledger.resizes import Resize
from moorage.scheduler.core.ledger.schedules import Schedule
from moorage.scheduler.core.ledger.state import (
    QUEUED,
    Ailment,
    Awaits,
    Job,
    Member,
    Pool,
    Replica,
    Scaled,
    StandingOrder,
    State,
    Tenant,
    Window,
    Worker,
    new_job,
    new_member,
)
from moorage.schemas.ranges import Ranges, count_of
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
    numbers: Ranges
    fresh: Ranges
    rows: list[list[int]]  # of each replica with a row: its number, then as `Replica` has them
    well: int
    bad: dict[int, bytes] | None
    ends: int
    attempt: int
    placed_ms: int
    codes: dict[int, int] | None


class _Worker(msgspec.Struct, array_like=True):
    id: str
    machine: str
    boot: str
    n: int
    no: int
    session: str
    joined_ms: int
    hello: dict[str, Any]
    flag: tuple[str, int, str, str]  # since when it has it, who ordered that, and why
    quarantined: int
    # job number, replica, attempt, fence, mask, mode as in `records.placing`, phase, whether it is the current attempt,
    # rate
    members: list[list[int]]
    former: list[Pool]
    num: int
    left: tuple[int, str]  # when and why its last session ended


class _Schedule(msgspec.Struct, array_like=True):
    tenant: str
    name: str
    cron: str
    tz: str
    overlap: str
    body: bytes
    by: str
    paused: bool
    wish: int
    since_ms: int
    through: int
    runs: int
    skipped: int
    why: str
    job: str
    last_ms: int
    due_ms: int
    next_ms: int


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
    leased: list[tuple[int, int, int, int, int]]  # likewise, slots held now, and when they were last leased again
    next_worker: int
    lacking: list[tuple[int, tuple[int, ...]]]  # job number, workers that lack what it needs
    reached: list[tuple[int, int, int, bool, str]]  # job number, replica, fence, whether it is ready, its address
    scaled: list[tuple[int, Scaled]]  # job number, how many members are wanted
    shut: list[tuple[int, int]]  # worker number, ledger ms at which it opens, as starts fail on it
    awaits: list[tuple[int, Awaits, int]]  # job number, what it waits for, ledger ms of when the last came true
    schedules: list[_Schedule]
    ran_through: int


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Snapshot).decode


def dump(state: State) -> bytes:
    """Return the whole ledger state as msgpack, without soft fields."""
    jobs = [
        _Job(
            job.num, job.tenant, job.name, job.body, job.traceparent, job.accepted_ms, job.ledger, job.rev, job.started,
            job.over, job.gang, job.after, job.count, job.master, job.story,
            job.numbers, job.fresh,
            [
                [r.index, r.state, r.attempt, r.fence, r.retries, r.losses, r.refusals, r.not_before, r.after,
                 r.restarts, r.streak]
                for r in job.rows.values()
            ],
            job.well, {state: bytes(bits) for state, bits in job.bad.items()} if job.bad else None, job.ends,
            job.attempt, job.placed_ms, job.codes,
        )
        for job in state.jobs.values()
    ]  # fmt: skip
    workers = [
        _Worker(
            w.id, w.machine, w.boot, w.n, w.no, w.session, w.joined_ms, w.hello,
            (w.flag, w.flag_ms, w.by, w.why), w.quarantined,
            [
                [r.job.num, r.index, m.attempt, m.fence, m.home, _mode(m), m.phase, int(r.member is m), m.rate_milli]
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
    notices = [(*_named(member), member.notice_s) for member in state.members() if member.notice_s]
    freezes = [_named(member) for member in state.members() if member.freeze]
    wakes = [_named(member) for member in state.members() if member.freeze and member.wakes]
    leased = [(*_named(m), m.mask, m.leased) for m in state.members() if m.leased or m.mask != m.home]
    return _encode(
        _Snapshot(
            SNAPSHOT_FORMAT, state.ledger_id, state.seq, state.epoch, state.epoch_seq, state.leader, state.time_ms,
            state.next_num, state.digest, state.transitions, [state.snapshot, state.snapshot_before], jobs,
            list(state.ended), state.finished.dump(), tenants, workers, ROW_BYTES, job_orders,
            tenant_orders, (state.half_life_ms, state.counts_from_ms), shares, worker_health, job_avoids, notices,
            state.level, (state.former_id, state.restored_ms, state.restored_epoch), state.behind,
            preempts, [(job.num, job.used) for job in state.jobs.values() if job.used is not None],
            [(job.num, job.resizes) for job in state.jobs.values() if job.resizes],
            freezes, wakes, leased, state.next_worker,
            [(job.num, job.lacking) for job in state.jobs.values() if job.lacking],
            [(*_named(m), m.ready, m.address) for m in state.members() if m.ready or m.address],
            [(job.num, job.scaled) for job in state.jobs.values() if job.scaled is not None],
            [(worker.num, worker.until_ms) for worker in state.shut.values()],
            [(job.num, job.awaits, job.ready_ms) for job in state.jobs.values() if job.awaits or job.ready_ms],
            [
                _Schedule(*(getattr(row, field) for field in _Schedule.__struct_fields__))
                for rows in state.schedules.values()
                for row in rows.values()
            ],
            state.ran_through,
        )
    )  # fmt: skip


def _mode(member: Member) -> int:
    return member.mode | PREEMPTIBLE if member.preemptible else member.mode


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
        job = state.jobs[num]
        job.priority, job.hold = priority, hold
        if hold is not None and not job.over:
            state.on_hold[num] = job
    for num, used in found.used:
        state.jobs[num].used = used
    for num, scaled in found.scaled:
        state.jobs[num].scaled = scaled
    for num, resizes in found.resizes:
        state.jobs[num].resizes = resizes
    for num, awaits, ready_ms in found.awaits:
        state.jobs[num].awaits, state.jobs[num].ready_ms = awaits, ready_ms
    for num, workers, jobs in found.preempts:
        job = state.preempting[num] = state.jobs[num]
        job.preempts = (workers, jobs)
    leased = {(num, index, fence): held for num, index, fence, *held in found.leased}
    for worker in found.workers:
        _load_worker(state, worker, leased)
    state.next_worker = found.next_worker
    state.ran_through = found.ran_through
    for each in found.schedules:
        schedule = Schedule(each.tenant, each.name, each.cron, each.tz, each.overlap, each.body, each.by)
        for field in _Schedule.__struct_fields__:
            setattr(schedule, field, getattr(each, field))
        state.schedules.setdefault(each.tenant, {})[each.name] = schedule
        state.wishes = max(state.wishes, each.wish)
    _load_health(state, found)
    state.ended.extend(found.ended)
    state.finished = FinishedTable.load(found.finished)
    _digest_rows(state)
    if state.digest != found.digest:
        raise BadSnapshot(f"the rows have digest {state.digest:x}, the snapshot says {found.digest:x}")
    return state


def _load_job(state: State, row: _Job) -> None:
    job = new_job(row.num, row.tenant, row.name, row.body, row.numbers, row.trace, row.accepted_ms, row.ledger)
    job.rev, job.started, job.over, job.gang = row.rev, row.started, row.over, row.gang
    job.after, job.count, job.master = row.after, row.count, row.master
    job.story = row.story
    job.fresh, job.well, job.ends, job.attempt = row.fresh, row.well, row.ends, row.attempt
    job.placed_ms, job.codes = row.placed_ms, row.codes
    if row.bad:
        job.bad = {state: bytearray(bits) for state, bits in row.bad.items()}
    for index, *values in row.rows:
        replica = job.rows[index] = Replica(job, index)
        (
            replica.state,
            replica.attempt,
            replica.fence,
            replica.retries,
            replica.losses,
            replica.refusals,
            replica.not_before,
            replica.after,
            replica.restarts,
            replica.streak,
        ) = values
    job.live = count_of(job.fresh) + len(job.rows)
    job.back = sum(replica.state == QUEUED for replica in job.rows.values())
    state.jobs[job.num] = job
    tenant = state.tenant(row.tenant)
    tenant.jobs[row.name] = job
    tenant.live += not job.over
    tenant.waits += job.waits
    state.extra += job.extra
    if job.over:
        state.extra_ended += job.extra
    else:
        tenant.extra += job.extra


def _ended(job: Job, index: int) -> Replica:
    """Return a replica that has ended, for its members whose devices are not free yet."""
    replica, state = Replica(job, index), job.state_of(index)
    if state is None:
        raise BadSnapshot(f"a worker has replica {index} of job {job.tenant}/{job.name}, which has none")
    replica.state = state
    return replica


def _load_worker(state: State, row: _Worker, leased: dict[tuple[int, int, int], list[int]]) -> None:
    worker = Worker(row.num, row.id, row.machine)
    worker.boot, worker.n, worker.no, worker.session = row.boot, row.n, row.no, row.session
    worker.joined_ms, worker.hello = row.joined_ms, row.hello
    worker.flag, worker.flag_ms, worker.by, worker.why = row.flag
    worker.quarantined, worker.former = row.quarantined, tuple(row.former)
    worker.left_ms, worker.left_why = row.left
    state.workers[row.id] = state.worker_by_num[row.num] = worker
    for num, index, attempt, fence, mask, mode, phase, own, rate_milli in row.members:
        job = state.jobs[num]
        replica = job.rows.get(index) or _ended(job, index)
        member = new_member(replica, worker, mask, mode & ~PREEMPTIBLE, fence)
        member.attempt, member.phase, member.preemptible = attempt, phase, bool(mode & PREEMPTIBLE)
        state.preemptibles += member.preemptible
        member.rate_milli = rate_milli
        if leased:
            member.mask, member.leased = leased.get(_named(member), (mask, 0))
        worker.members[member.name] = member
        replica.job.held += 1
        tenant = state.tenants[replica.job.tenant]
        tenant.gpus += member.mask.bit_count()
        if state.half_life_ms:
            tenant.rate_milli += fairshare.rate_of(member)
        if own:
            replica.member = member
        else:
            if replica.job.lingering is None:
                replica.job.lingering = {}
            replica.job.lingering[replica.index, member.fence] = member


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
    for num, until_ms in found.shut:
        worker = state.shut[num] = state.worker_by_num[num]
        worker.until_ms = until_ms
    notices = {(num, index, fence): notice_s for num, index, fence, notice_s in found.notices}
    for member in state.members() if notices else ():
        member.notice_s = notices.get(_named(member), 0)
    reached = {(num, index, fence): (ready, at) for num, index, fence, ready, at in found.reached}
    for member in state.members() if reached else ():
        member.ready, member.address = reached.get(_named(member), (False, ""))
    freezes, wakes = set(found.freezes), set(found.wakes)
    for member in state.members() if freezes else ():
        member.freeze, member.wakes = _named(member) in freezes, _named(member) in wakes


def _digest_rows(state: State) -> None:
    rows: list[Job | Replica | Worker | Member | Tenant | Schedule] = []
    for job in state.jobs.values():
        rows += (job, *job.rows.values())
    for worker in state.workers.values():
        rows += (worker, *worker.members.values())
    rows += state.tenants.values()
    for schedules in state.schedules.values():
        rows += schedules.values()
    total = state.finished.row
    for row in rows:
        row.row = row.digest_row()
        total += row.row
    state.digest = total & 0xFFFFFFFFFFFFFFFF
