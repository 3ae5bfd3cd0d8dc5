"""Who keeps the output of an attempt: found from the folded state alone."""

from __future__ import annotations

from typing import NamedTuple

from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.state import IS_TERMINAL, Job, Worker
from moorage.schemas.errors import Problem, problem
from moorage.schemas.frames import LogPage, LogsAsked, ReadLog


class Kept(NamedTuple):
    """The worker that ran the attempt, and what to ask it."""

    worker: Worker
    ask: ReadLog


def find_log(engine: Engine, tenant: str, asked: LogsAsked) -> Kept | LogPage | Problem:
    """Whom to ask for a page. A replica that was not placed yet, or ended before it was, has an empty one."""
    job = engine.state.job(tenant, asked.job)
    if job is None:
        return problem(
            "not-found",
            f"no job {asked.job} of tenant {tenant} whose output could be found",
            job=asked.job,
            next="moorage ls shows the jobs there are; those that ended longest ago are remembered by name alone",
        )
    if asked.replica >= len(job.replicas):
        return problem(
            "invalid-argument",
            f"job {job.name} has no replica {asked.replica}",
            field="$.replica",
            found=asked.replica,
            allowed=f"0..{len(job.replicas) - 1}",
            job=job.name,
        )
    replica = job.replicas[asked.replica]
    attempt = asked.attempt if asked.attempt is not None else replica.attempt
    if attempt == 0:
        return LogPage(0, asked.stream, over=IS_TERMINAL[replica.state], replica=asked.replica)
    if attempt > replica.attempt:
        return problem(
            "not-found",
            f"replica {asked.replica} of job {job.name} has had no attempt {attempt}",
            field="$.attempt",
            found=attempt,
            allowed=f"1..{replica.attempt}",
            job=job.name,
        )
    found = _holder(engine, job, asked.replica, attempt)
    if found is None:
        return problem(
            "not-found",
            f"who ran attempt {attempt} of replica {asked.replica} of job {job.name} is no longer in memory",
            job=job.name,
            next=f"moorage show {job.name} has the transitions that are",
        )
    worker, fence, ended_ms = found
    driver = engine.request_of(job).workload.driver
    return Kept(
        worker,
        ReadLog(
            worker.session,
            tenant,
            job.name,
            asked.replica,
            attempt,
            fence,
            driver,
            asked.stream,
            asked.offset,
            asked.limit,
            ended_ms,
        ),
    )


def _holder(engine: Engine, job: Job, replica: int, attempt: int) -> tuple[Worker, int, int] | None:
    """(worker, fence, ledger time of the end or 0) of an attempt."""
    member = job.replicas[replica].member
    if member is not None and member.attempt == attempt:
        return member.worker, member.fence, 0
    rows = [row for row in job.story if row[2] == replica and row[3] == attempt]
    held = next((row for row in rows if row[5] >= 0), None)
    if held is None:
        return None
    return engine.state.worker_by_num[held[5]], held[9], rows[-1][1]
