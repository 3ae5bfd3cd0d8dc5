"""Checks what a ledger state can prove by itself: in tests after every record, in production for a backup.

It is cheap enough for both: every row is read once.
"""

from __future__ import annotations

from moorage.scheduler.core.ledger import bits
from moorage.scheduler.core.ledger.fairshare import rate_of
from moorage.scheduler.core.ledger.holding import devices_of, held_by, used_by
from moorage.scheduler.core.ledger.records import GangPhase, Mode
from moorage.scheduler.core.ledger.state import (
    AT_EXITED,
    CLAIMED,
    EXITED,
    HAS_DEVICES,
    IS_TERMINAL,
    ON_WORKER,
    PLACED,
    QUEUED,
    RUNNING,
    SUCCEEDED,
    Job,
    State,
    Worker,
    extra_of,
)
from moorage.schemas.job import STATES
from moorage.schemas.ranges import count_of, is_in, without


class Broken(AssertionError):
    """An invariant does not hold: a defect of moorage, never of a caller."""


def validate(state: State) -> None:
    """Check the invariants that a single state can show. Raises `Broken`.

    A device has at most one exclusive lease, or sharers of one mode. An attempt holds all of its devices, or is frozen
    and holds none. A replica has at most one live attempt; attempts of a gang are in one phase; the digest is right;
    the counts of jobs and attempts are right.
    """
    live_attempts: dict[tuple[int, int], int] = {}
    held: dict[int, int] = {}
    gpus: dict[str, int] = {}
    rates: dict[str, int] = {}
    if sum(attempt.preemptible for attempt in state.attempts()) != state.preemptibles:
        raise Broken(f"{state.preemptibles} attempts count as preemptible")
    if {worker.num: worker for worker in state.workers.values()} != state.worker_by_num:
        raise Broken("workers by number are not those by id")
    if any(num >= state.next_worker for num in state.worker_by_num):
        raise Broken(f"worker number {max(state.worker_by_num)} is to be given again: {state.next_worker} is next")
    for worker in state.workers.values():
        _validate_worker(worker, live_attempts)
        for attempt in worker.attempts.values():
            job = attempt.replica.job
            held[job.num] = held.get(job.num, 0) + 1
            gpus[job.tenant] = gpus.get(job.tenant, 0) + attempt.mask.bit_count()
            if state.half_life_ms:
                rates[job.tenant] = rates.get(job.tenant, 0) + rate_of(attempt)
    ended = 0
    for job in state.jobs.values():
        _validate_job(state, job)
        if job.held != held.get(job.num, 0):
            raise Broken(f"job {job.name} counts {job.held} attempts, but {held.get(job.num, 0)} are filed")
        if len(job.attempts) != job.held:
            raise Broken(f"job {job.name} counts {job.held} attempts, but lists {len(job.attempts)}")
        ended += job.over
    if ended != len(state.ended):
        raise Broken(f"{ended} jobs are over but {len(state.ended)} are listed as ended")
    on_hold = {job.num: job for job in state.jobs.values() if job.hold is not None and not job.over}
    if state.on_hold != on_hold:
        raise Broken(f"jobs {sorted(on_hold)} are on hold, listed are {sorted(state.on_hold)}")
    extra = [(extra_of(job.size, len(job.body)), job.over) for job in state.jobs.values()]
    found = sum(more for more, _ in extra), sum(more for more, over in extra if over)
    if found != (state.extra, state.extra_ended):
        raise Broken(f"jobs count {found} more than one each, counted {state.extra, state.extra_ended}")
    bounded = {name: row.limits for name, row in state.tenants.items() if row.limits is not None}
    budgets = {name for name, limits in bounded.items() if limits.budget_ms}
    if state.budgeted != budgets:
        raise Broken(f"tenants {sorted(budgets)} have a budget, listed are {sorted(state.budgeted)}")
    if state.by_model != {name for name, limits in bounded.items() if limits.gpus_of}:
        raise Broken(f"tenants {sorted(state.by_model)} are listed as limited by model")
    if state.used != (used := used_by(state.attempts())):
        raise Broken(f"the state counts {state.used}, attempts use {used}")
    if state.full_digest() != state.digest:
        raise Broken(f"digest {state.digest:x} is not that of the rows, {state.full_digest():x}")
    for name, tenant in state.tenants.items():
        live = sum([not job.over for job in tenant.jobs.values()])
        more = sum(extra_of(job.size, len(job.body)) for job in tenant.jobs.values() if not job.over)
        if tenant.extra != more:
            raise Broken(f"the jobs of tenant {name} count {more} more than one each, counted {tenant.extra}")
        if tenant.live != live:
            raise Broken(f"tenant {name} counts {tenant.live} jobs that are not over, there are {live}")
        waits = sum(job.waits for job in tenant.jobs.values())
        if tenant.waits != waits:
            raise Broken(f"tenant {name} counts {tenant.waits} replicas that wait, there are {waits}")
        if tenant.gpus != gpus.get(name, 0):
            raise Broken(f"tenant {name} counts {tenant.gpus} GPUs, its attempts hold {gpus.get(name, 0)}")
        limited = state.attempts() if tenant.limits is not None else ()
        own = [attempt for attempt in limited if attempt.replica.job.tenant == name]
        beside = held_by(own)
        if tenant.held != beside:
            raise Broken(f"tenant {name} counts {tenant.held} beside GPUs, its attempts hold {beside}")
        if tenant.devices != (devices := devices_of(own)):
            raise Broken(f"tenant {name} counts devices {tenant.devices}, its attempts hold {devices}")
        if tenant.used or state.used:
            used = used_by(attempt for attempt in state.attempts() if attempt.replica.job.tenant == name)
            if tenant.used != used:
                raise Broken(f"tenant {name} counts {tenant.used}, its attempts use {used}")
        if tenant.rate_milli != rates.get(name, 0):
            raise Broken(f"tenant {name} counts a rate of {tenant.rate_milli}, not {rates.get(name, 0)}")
        if tenant.usage_base + tenant.rate_milli * state.inflation < 0:
            raise Broken(f"tenant {name} has used less than nothing")


def _validate_worker(worker: Worker, live_attempts: dict[tuple[int, int], int]) -> None:
    exclusive = 0
    shared: dict[int, int] = {}
    for filed, attempt in worker.attempts.items():
        if filed != attempt.name:
            raise Broken(f"attempt {attempt.name} is filed under {filed}")
        is_frozen = attempt.mask == 0 and attempt.home != 0
        if attempt.mask != attempt.home and not is_frozen:
            raise Broken(f"{worker.id}: {attempt.name} holds slots {attempt.mask:b} of {attempt.home:b}")
        if is_frozen and attempt.phase != AT_EXITED and attempt.replica.state in HAS_DEVICES:
            raise Broken(f"{attempt.name} is {STATES[attempt.replica.state]} without its devices")
        if attempt.mode == Mode.EXCLUSIVE:
            if exclusive & attempt.mask:
                raise Broken(f"{worker.id}: two exclusive leases on slots {exclusive & attempt.mask:b}")
            exclusive |= attempt.mask
        elif attempt.mode > Mode.EXCLUSIVE:
            mask = attempt.mask
            while mask:
                slot = mask & -mask
                if shared.setdefault(slot, attempt.mode) != attempt.mode:
                    raise Broken(f"{worker.id}: two sharing modes on slot mask {slot:b}")
                mask ^= slot
        if attempt.phase != AT_EXITED:
            unit = (attempt.replica.job.num, attempt.replica.index)
            live_attempts[unit] = live_attempts.get(unit, 0) + 1
            if live_attempts[unit] > 1:
                raise Broken(f"replica {unit} has two live attempts")
            if attempt.replica.attempt is not attempt:
                raise Broken(f"attempt {filed} is not its replica's")
    if any(exclusive & slot for slot in shared):
        raise Broken(f"{worker.id}: a shared device is leased exclusively too")


def _validate_job(state: State, job: Job) -> None:
    if job.awaits and job.live:
        if job.rows or job.attempt_no:
            raise Broken(f"job {job.name} waits for {job.awaits}, and was placed")
        if unknown := [num for num, _ in job.awaits if num and (num >= job.num or num not in state.jobs)]:
            raise Broken(f"job {job.name} waits for jobs {unknown}, which are none that it can wait for")
    if state.tenants[job.tenant].jobs.get(job.name) is not job:
        raise Broken(f"job {job.name} is not found by its name")
    live = count_of(job.fresh) + len(job.rows)
    ended = job.well + sum(bits.count(each) for each in (job.bad or {}).values())
    if live + ended != job.size or job.size != count_of(job.numbers):
        raise Broken(f"job {job.name} of {job.size} has {live} live replicas, and {ended} that have ended")
    if without(job.fresh, job.numbers) or any(is_in(job.fresh, index) for index in job.rows):
        raise Broken(f"job {job.name}: {job.fresh} were never placed, of {job.numbers}")
    for index, replica in job.rows.items():
        held, at = replica.attempt, replica.state
        if index != replica.index or IS_TERMINAL[at] or not replica.attempt_no:
            raise Broken(f"{job.name}/{index} has a row, and is {STATES[at]} after {replica.attempt_no} attempts")
        if (at in ON_WORKER) != (held is not None):
            raise Broken(f"{job.name}/{replica.index} is {STATES[replica.state]} and holds {held}")
        if held is not None and held.worker.attempts.get(held.name) is not held:
            raise Broken(f"{job.name}/{replica.index}: its attempt is not filed at its worker")
    if live != job.live:
        raise Broken(f"job {job.name}: {live} live replicas, counted {job.live}")
    if job.back != sum(replica.state == QUEUED for replica in job.rows.values()):
        raise Broken(f"job {job.name} counts {job.back} replicas that came back")
    if job.gang == GangPhase.HOLDING:
        allowed: tuple[int, ...] = (PLACED, CLAIMED)
    elif job.gang == GangPhase.STARTED:
        allowed = (CLAIMED, RUNNING, EXITED, SUCCEEDED)
    else:
        return
    if job.fresh or job.states - {*allowed}:
        raise Broken(f"gang {job.name} in phase {GangPhase(job.gang).name} has {job.state} attempts")
