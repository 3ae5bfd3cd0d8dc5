"""Confirms jobs that start after others, by what their requests say and by how those others ended, and by nothing else.

A job waits until each job that it names has ended as it asks. Once one of them has ended otherwise, it is over. While
it waits it is nobody's rival: it is left out of what the reference looks at.
"""

from __future__ import annotations

from typing import Protocol

from moorage.scheduler.answers.waiting import explain_job
from moorage.scheduler.core.ledger.finished import job_key
from moorage.scheduler.core.ledger.state import Job, State
from moorage.schemas.codec import decode_request
from moorage.schemas.errors import Problem
from moorage.schemas.job import STATES, TERMINAL
from tests.release.workloads.record import Record


class World(Protocol):
    @property
    def drive(self) -> Record: ...


def end_of(state: State, tenant: str, name: str) -> str:
    """The final state of a job; "" of one that has not ended, or that nobody has."""
    job = state.job(tenant, name)
    if job is not None:
        return job.state if job.state in TERMINAL else ""
    row = state.finished.find(job_key(tenant, name))
    return "" if row is None else STATES[row[2]]


def missing(state: State, job: Job) -> list[str]:
    """The jobs whose end it waits for."""
    return [each.job for each in decode_request(job.body).awaited if not end_of(state, job.tenant, each.job)]


def hopeless(state: State, job: Job) -> list[str]:
    """How jobs ended that were to end otherwise, in the words of its own end."""
    found = []
    for each in decode_request(job.body).awaited:
        end = end_of(state, job.tenant, each.job)
        well = end == "SUCCEEDED"
        if end and ((each.when == "succeeded" and not well) or (each.when == "failed" and well)):
            found.append(f"after {each.job}: {end}")
    return found


def confirm(world: World) -> list[str]:
    """What is wrong in rest."""
    state, wrong = world.drive.state, []
    for job in state.jobs.values():
        if not decode_request(job.body).after:
            continue
        ends, left = hopeless(state, job), missing(state, job)
        if job.live and ends:
            wrong.append(f"{job.name} waits, and can never start: {ends}")
        elif job.live and left:
            told = explain_job(world.drive.engine, job.tenant, job.name)
            if isinstance(told, Problem) or told.reason != "after" or told.after[0].job not in left:
                wrong.append(f"{job.name} waits for {left}, and is told {told}")
        if job.attempt_no and (ends or left):
            wrong.append(f"{job.name} was placed before its time: {ends} {left}")
    return wrong
