"""What running jobs use of their GPUs now, by their workers' renewals, and which worker has the minutes before."""

from __future__ import annotations

import msgspec

from moorage.scheduler.answers.logs import Kept, no_replica
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.ledger.state import AT_RUNNING, Attempt, Job
from moorage.schemas.answers.fleet import ModelUse
from moorage.schemas.answers.jobs import DeviceUsed, Used
from moorage.schemas.errors import Problem, problem
from moorage.schemas.frames import DeviceUse, ReadUse, ReportsAsked, UseAsked
from moorage.schemas.names import word_of
from moorage.schemas.ranges import is_in


def find_use(engine: Engine, tenant: str, asked: UseAsked) -> Kept | Problem:
    """Return which worker to ask for the use of a running replica; a problem if it does not run."""
    found = find_running(engine, tenant, asked, "has what an ended job has used")
    if isinstance(found, Problem):
        return found
    return Kept(found.worker, ReadUse(found.worker.session, *found.name, asked.last_s, asked.points))


def find_running(engine: Engine, tenant: str, asked: UseAsked | ReportsAsked, ended: str) -> Attempt | Problem:
    """Return the attempt of a replica that runs, else the problem; `ended` is what `show` says of a job that has
    ended."""
    job = engine.state.job(tenant, asked.job)
    if job is None:
        return problem(
            "not-found",
            f"no job {asked.job} of tenant {tenant} runs",
            job=asked.job,
            next=f"moorage show {word_of(asked.job)} {ended}",
        )
    asked = msgspec.structs.replace(asked, replica=job.meant(asked.replica))
    if not is_in(job.numbers, asked.replica):
        return no_replica(asked, job.numbers)
    row = job.rows.get(asked.replica)
    attempt = row.attempt if row is not None else None
    if attempt is None or attempt.phase != AT_RUNNING:
        return problem(
            "failed-precondition",
            f"replica {asked.replica} of job {asked.job} does not run now",
            found=job.state,
            allowed="RUNNING",
            job=asked.job,
            next=f"moorage show {word_of(asked.job)}",
        )
    return attempt


def devices_used(engine: Engine, attempt: Attempt) -> list[DeviceUse]:
    """Return the newest reading of each device of an attempt; [] if there is none."""
    host = engine.fleet.hosts.get(attempt.worker.num)
    use = None if host is None or attempt.phase != AT_RUNNING else host.use.get(attempt.name)
    return [] if use is None else use.devices


def use_rows(engine: Engine, attempt: Attempt) -> list[DeviceUsed]:
    """Return the newest reading of an attempt, a row for each device."""
    pool = attempt.worker.pool_at(attempt.fence).devices
    return [
        DeviceUsed(
            index=pool[use.slot].index,
            percent=use.percent,
            memory_mib=use.memory_mib,
            memory_total_mib=pool[use.slot].memory_mib,
            power_w=use.power_w,
            shared_by=use.shared_by,
        )
        for use in devices_used(engine, attempt)
        if 0 <= use.slot < len(pool)
    ]


def use_of_job(engine: Engine, job: Job) -> Used | None:
    """Return the least, mean and most used of a job's devices, in percent, and their memory; None if none is read."""
    attempts = [replica.attempt for replica in job.rows.values() if replica.attempt is not None] if job.held else []
    found = [use for attempt in attempts for use in devices_used(engine, attempt)]
    percents = [use.percent for use in found if use.percent is not None]
    if not percents:
        return None
    return Used(
        devices=len(found),
        percent=round(sum(percents) / len(percents)),
        percent_min=min(percents),
        percent_max=max(percents),
        memory_mib=sum(use.memory_mib or 0 for use in found),
        idle=percents.count(0),
        shared_by=max(use.shared_by for use in found),
    )


def used_now(engine: Engine) -> list[ModelUse]:
    """Return by model the leased devices with a reading, how many GPUs' worth of them is at work, and how many idle.

    A device with several sharers counts once for each.
    """
    found: dict[str, list[int]] = {}
    for host in engine.fleet.hosts.values():
        pool = host.worker.inventory.gpu_pool if host.use else ()
        for use in (use for each in host.use.values() for use in each.devices):
            if use.percent is not None and 0 <= use.slot < len(pool):
                row = found.setdefault(pool[use.slot].name, [0, 0, 0])
                row[0] += 1
                row[1] += use.percent // (use.shared_by or 1)
                row[2] += not use.percent
    return [
        ModelUse(model=name, read=read, at_work=round(percent / 100, 2), idle=idle)
        for name, (read, percent, idle) in sorted(found.items())
    ]
