"""Commands that tenants run in their running jobs, and signals for them: which may, the act in the ledger, the order to
the worker."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Final, NamedTuple

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import Execute, SignalOrder
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.finished import job_key
from moorage.scheduler.core.ledger.state import AT_RUNNING, FROZEN, RUNNING, Attempt, Job, State
from moorage.scheduler.core.lifecycle.admission import no_job
from moorage.schemas.errors import Problem, problem
from moorage.schemas.frames import Exec, ExecGiven, Signal
from moorage.schemas.job import STATES, TERMINAL, Request
from moorage.schemas.names import word_of
from moorage.schemas.operate import SignalSent
from moorage.schemas.printable import carried
from moorage.schemas.ranges import RANGES_SAID, format_ranges, is_in

#: characters of a command in the job's history
COMMAND_CHARS: Final = 160
#: what the history has before the name of a signal that was sent
SIGNAL: Final = "signal"
#: what the history has in place of a command where a caller took the job's terminal
ATTACHED: Final = "the terminal is held"


class Executing(NamedTuple):
    """A command to run, or a signal to send: the orders to workers of these attempts, and the answer to its caller."""

    orders: list[tuple[Attempt, Exec | Signal]]
    given: ExecGiven | SignalSent


def execute(draft: Draft, state: State, event: Execute, request_of: Callable[[Job], Request]) -> Executing | Problem:
    """Record that a command is run in a job, or return why it cannot be."""
    asked = event.asked
    job = state.job(event.tenant, asked.job)
    if job is None:
        return _no_job(state, event)
    request, index = request_of(job), job.meant(asked.replica)
    if not is_in(job.numbers, index):
        return _no_replica(job, asked.replica)
    if asked.attach and request.workload.stdin != "stream":
        return problem(
            "failed-precondition",
            f"job {job.name} has no terminal to hold: its standard input is {request.workload.stdin}",
            field="$.attach",
            found=request.workload.stdin,
            allowed="stream, as moorage run -it has it",
            job=job.name,
            next=f"moorage shell {word_of(job.name)} opens a shell beside it",
        )
    row = job.rows.get(index)
    attempt = None if row is None else row.attempt
    now = job.state_of(index) if row is None else row.state
    if attempt is None or now != RUNNING or attempt.phase != AT_RUNNING:
        return _not_running(job, index, now)
    driver = request.workload.driver
    can = attempt.worker.can(driver)
    if not can.execs:
        return problem(
            "failed-precondition",
            f"no command can be run in job {job.name}: the driver {driver} of worker {attempt.worker.id} runs none",
            found=driver,
            allowed="a driver whose worker reports execs",
            job=job.name,
            next=can.exec_instead or "moorage logs shows its output, moorage use what it uses of its GPUs",
        )
    said = ATTACHED if asked.attach else _one_line(carried(shlex.join(asked.argv)))
    draft.add(acts.Exec(job.num, index, event.by, said))
    order = Exec(*attempt.name, event.stream, asked.argv, asked.tty, asked.term)
    given = ExecGiven(job.name, index, attempt.no, attempt.worker.id, event.stream)
    return Executing([(attempt, order)], given)


def send_signal(
    draft: Draft, state: State, event: SignalOrder, request_of: Callable[[Job], Request]
) -> Executing | Problem:
    """Record that a signal is sent to a job's running attempts, or return why it cannot be."""
    asked = event.asked
    job = state.job(event.tenant, asked.job)
    if job is None:
        return _no_job(state, event)
    index = None if asked.replica is None else job.meant(asked.replica)
    if index is not None and not is_in(job.numbers, index):
        return _no_replica(job, index)
    found = [
        row.attempt
        for row in job.rows.values()
        if row.attempt is not None and row.state == RUNNING and row.attempt.phase == AT_RUNNING
        if index in (None, row.index)
    ]
    if not found:
        at = next(iter(job.rows.values()), None) if index is None else job.rows.get(index)
        here = index if index is not None else 0 if at is None else at.index
        return _not_running(job, here, job.state_of(here) if at is None else at.state)
    driver = request_of(job).workload.driver
    for attempt in found:
        if not attempt.worker.can(driver).signals:
            return problem(
                "failed-precondition",
                f"no signal can be sent to job {job.name}: driver {driver} of worker {attempt.worker.id} sends none",
                found=driver,
                allowed="a driver whose worker reports signals",
                job=job.name,
                next="moorage exec runs a command in it, where its driver can",
            )
    name = asked.number_name
    for attempt in found:
        draft.add(acts.Exec(job.num, attempt.replica.index, event.by, f"{SIGNAL} {name}"))
    sent = SignalSent(job.name, name, sorted((each.replica.index, each.worker.id) for each in found))
    return Executing([(each, Signal(*each.name, name)) for each in found], sent)


def _no_replica(job: Job, index: int) -> Problem:
    return problem(
        "not-found",
        f"job {job.name} has no replica {index}",
        field="$.replica",
        found=index,
        allowed=format_ranges(job.numbers, RANGES_SAID),
        job=job.name,
        next=f"moorage show {word_of(job.name)}",
    )


def _one_line(command: str) -> str:
    """Return the first line of a command, as a history has one line for each entry: a program may be an argument."""
    line, newline, _ = command[:COMMAND_CHARS].partition("\n")
    return f"{line}…" if newline else line


def _no_job(state: State, event: Execute | SignalOrder) -> Problem:
    name = event.asked.job
    if state.finished.find(job_key(event.tenant, name)) is None:
        return no_job(event.tenant, name)
    return problem(
        "failed-precondition", f"job {name} is over: nothing of it runs", found="over", job=name,
        next="moorage logs shows what it wrote",
    )  # fmt: skip


def _not_running(job: Job, replica: int, now: int | None) -> Problem:
    found = "gone" if now is None else STATES[now]
    if found in TERMINAL:
        after = "moorage logs shows what it wrote"
    elif now == FROZEN:
        after = "it runs commands again once it is resumed (moorage admin resume)"
    else:
        found = "starting" if now == RUNNING else found
        after = (
            f"moorage explain {word_of(job.name)} says what it waits for; a command runs only while the attempt runs"
        )
    which = f"replica {replica} of job {job.name}" if job.size > 1 else f"job {job.name}"
    return problem(
        "failed-precondition", f"{which} is not running: {found}", found=found, allowed="RUNNING", job=job.name,
        next=after,
    )  # fmt: skip
