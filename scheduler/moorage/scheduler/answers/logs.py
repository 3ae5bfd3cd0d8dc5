"""Finds the worker that keeps the output and folder of an attempt, from the folded state or the job's history."""

from __future__ import annotations

import shlex
from typing import NamedTuple

import msgspec

from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.ledger.finished import job_key
from moorage.scheduler.core.ledger.state import (
    AT_EXITED,
    AT_MS,
    ATTEMPT,
    FENCE,
    IS_TERMINAL,
    RANGE,
    REPLICA,
    SLOTS,
    WORKER,
    Job,
    Transition,
    Worker,
)
from moorage.scheduler.core.lifecycle.admission import no_job
from moorage.scheduler.history.unpacking import changes_of
from moorage.schemas.errors import Problem, problem
from moorage.schemas.frames import (
    Change,
    LogPage,
    LogsAsked,
    ReadLog,
    ReadReports,
    ReadUse,
    ReportsAsked,
    Rescue,
    RescueAsked,
    UseAsked,
)
from moorage.schemas.job import Request
from moorage.schemas.names import word_of
from moorage.schemas.ranges import RANGES_SAID, Ranges, format_ranges, ranges_of


class Kept(NamedTuple):
    """The worker that has or had the attempt, and the question to send to it."""

    worker: Worker
    ask: ReadLog | ReadUse | ReadReports | Rescue


def find_log(engine: Engine, tenant: str, asked: LogsAsked | RescueAsked) -> Kept | LogPage | Problem | None:
    """Return which worker to ask for a page of output, or to store a folder; an empty page if the replica was never
    placed; or a problem.

    None for a job, or one of very many replicas, that has left memory: then use `find_in_history`.
    """
    job = engine.state.job(tenant, asked.job)
    if job is None:
        if engine.state.finished.find(job_key(tenant, asked.job)) is not None:
            return None
        return no_job(tenant, asked.job, engine.services.newest(tenant, asked.job))
    asked = msgspec.structs.replace(asked, replica=job.meant(asked.replica))
    state = job.state_of(asked.replica)
    if state is None:
        return no_replica(asked, job.numbers)
    if not job.is_listed and IS_TERMINAL[state] and not any(_is_of(row, asked.replica) for row in job.history):
        return None  # the history has its end
    last = _last_attempt(job, asked.replica)
    attempt = asked.attempt if asked.attempt is not None else last
    if attempt == 0:
        return _nothing(asked, over=IS_TERMINAL[state])
    if attempt > last:
        return _no_attempt(asked, last)
    found = _holder(engine, job, asked.replica, attempt)
    if found is None:
        return _no_holder(asked, attempt)
    worker, fence, ended_ms = found
    if not ended_ms and isinstance(asked, RescueAsked):
        return _runs(asked)
    driver = engine.reader.request_of(job).workload.driver
    return Kept(worker, _read(worker, tenant, asked, attempt, fence, driver, ended_ms))


def find_in_history(
    engine: Engine, tenant: str, asked: LogsAsked | RescueAsked, changes: list[Change], request: Request | None
) -> Kept | LogPage | Problem:
    """Return what `find_log` does, from a job's history; `request` is None if the history was kept without it."""
    rows = changes_of(changes, asked.replica)
    if not rows:
        return no_replica(asked, ranges_of(row.replica for row in changes if row.replica >= 0))
    last = max(change.attempt for change in rows)
    attempt = asked.attempt if asked.attempt is not None else last
    if attempt == 0:
        return _nothing(asked, over=True)
    if attempt > last:
        return _no_attempt(asked, last)
    of_attempt = [change for change in rows if change.attempt == attempt]
    held = next((change for change in of_attempt if change.worker), None)
    worker = engine.state.workers.get(held.worker) if held is not None else None
    if held is None or worker is None:
        return _no_holder(asked, attempt)
    driver = request.workload.driver if request is not None else ""
    return Kept(worker, _read(worker, tenant, asked, attempt, held.fence, driver, of_attempt[-1].time_ms))


def _read(
    worker: Worker,
    tenant: str,
    asked: LogsAsked | RescueAsked,
    attempt: int,
    fence: int,
    driver: str,
    ended_ms: int,
) -> ReadLog | Rescue:
    if isinstance(asked, RescueAsked):
        return Rescue(worker.session, tenant, asked.job, asked.replica, attempt, fence, driver, asked.path)
    return ReadLog(
        worker.session,
        tenant,
        asked.job,
        asked.replica,
        attempt,
        fence,
        driver,
        asked.stream,
        asked.offset,
        asked.limit,
        ended_ms,
    )


def _last_attempt(job: Job, index: int) -> int:
    """Return the last attempt of a replica; of one that has ended, by the history in memory."""
    row = job.rows.get(index)
    if row is not None:
        return row.attempt_no
    return next((row[ATTEMPT] for row in reversed(job.history) if row[REPLICA] == index), 0)


def _is_of(row: Transition, index: int) -> bool:
    """Return whether a transition is of this replica, alone or among others."""
    return row[REPLICA] == index or (row[WORKER] == RANGE and row[REPLICA] <= index <= row[SLOTS])


def _nothing(asked: LogsAsked | RescueAsked, *, over: bool) -> LogPage | Problem:
    if isinstance(asked, LogsAsked):
        return LogPage(0, asked.stream, over=over, replica=asked.replica)
    return problem("not-kept", f"replica {asked.replica} of job {asked.job} has never run", job=asked.job)


def _runs(asked: RescueAsked) -> Problem:
    which = f"{word_of(asked.job)}/{asked.replica}"
    return problem(
        "failed-precondition",
        f"replica {asked.replica} of job {asked.job} runs",
        allowed="an attempt that has ended",
        job=asked.job,
        next=f"moorage exec {which} -- tar c {shlex.quote(asked.path or '.')} | tar x",
    )


def no_replica(asked: LogsAsked | RescueAsked | UseAsked | ReportsAsked, replicas: Ranges) -> Problem:
    """Return the problem that the job of a question has only these replicas."""
    return problem(
        "invalid-argument",
        f"job {asked.job} has no replica {asked.replica}",
        field="$.replica",
        found=asked.replica,
        allowed=format_ranges(replicas, RANGES_SAID),
        job=asked.job,
        next=f"moorage show {word_of(asked.job)}",
    )


def _no_attempt(asked: LogsAsked | RescueAsked, last: int) -> Problem:
    return problem(
        "not-found",
        f"replica {asked.replica} of job {asked.job} has had no attempt {asked.attempt}",
        field="$.attempt",
        found=asked.attempt,
        allowed=f"1..{last}",
        job=asked.job,
    )


def _no_holder(asked: LogsAsked | RescueAsked, attempt: int) -> Problem:
    return problem(
        "not-found",
        f"the worker that ran attempt {attempt} of replica {asked.replica} of job {asked.job} is no longer known",
        job=asked.job,
        next=f"moorage events {word_of(asked.job)} has what happened to it",
    )


def _holder(engine: Engine, job: Job, replica: int, no: int) -> tuple[Worker, int, int] | None:
    """Return (worker, fence, ledger ms of the end) of an attempt; the end is 0 while it runs. None if unknown."""
    row = job.rows.get(replica)
    attempt = row.attempt if row is not None else None
    if attempt is not None and attempt.no == no and attempt.phase != AT_EXITED:
        return attempt.worker, attempt.fence, 0
    rows = [row for row in job.history if row[REPLICA] == replica and row[ATTEMPT] == no]
    held = next((row for row in rows if row[WORKER] >= 0), None)
    if held is None:
        return None
    return engine.state.worker_by_num[held[WORKER]], held[FENCE], rows[-1][AT_MS]
