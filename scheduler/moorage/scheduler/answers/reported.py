"""What jobs have reported of themselves, as their loss, and which worker has the rows of a running one."""

from __future__ import annotations

import msgspec

from moorage.scheduler.answers.logs import Kept
from moorage.scheduler.answers.use import find_running
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.ledger.state import Attempt, Job
from moorage.schemas.errors import Problem
from moorage.schemas.frames import ReadReports, ReportsAsked, Values

_decode = msgspec.json.Decoder(Values).decode


def reported_of(engine: Engine, job: Job) -> Values:
    """Return the newest values of the first replica of a job that runs and has reported any, else of one that has
    ended."""
    for replica in job.rows.values() if job.held else ():
        if replica.attempt is not None and (values := _told(engine, replica.attempt)):
            return values
    return last_reported(job.reported)


def last_reported(last: tuple[int, str] | None) -> Values:
    """Return the values of a job's row, {} if nothing was reported."""
    return {} if last is None else _decode(last[1])


def _told(engine: Engine, attempt: Attempt) -> Values:
    host = engine.fleet.hosts.get(attempt.worker.num)
    told = None if host is None else host.reported.get(attempt.name)
    return {} if told is None else told.values


def find_reports(engine: Engine, tenant: str, asked: ReportsAsked) -> Kept | Problem:
    """Return which worker to ask for the rows that a running replica has reported; a problem if it does not run."""
    found = find_running(engine, tenant, asked, "has what an ended job reported last")
    if isinstance(found, Problem):
        return found
    return Kept(found.worker, ReadReports(found.worker.session, *found.name))
