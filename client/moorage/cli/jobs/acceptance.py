"""Messages about requests that were accepted, or of which this is not known."""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import termios
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from moorage.cli.framework.console import here, print_err, report, word_here
from moorage.cli.framework.render import is_asleep, waits
from moorage.client.answers import explained_in
from moorage.client.errors import ClientError, NoScheduler, NotPermitted, Unreachable, rejected, word_to_explain
from moorage.schemas.frames import Accepted
from moorage.schemas.names import exactly
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.cli.jobs.job_flags import JobFlags
    from moorage.client.client import AsyncClient
    from moorage.client.job import AsyncJob
    from moorage.schemas.answers.jobs import Explained
    from moorage.schemas.job import Request

T = TypeVar("T")
PLACE_HELP: Final = (
    "With one --on, an operator's right: start it there at once, though the worker is cordoned or others come earlier."
)

#: what a warning means that is a code alone
_WARNINGS: Final = {
    "fleet-not-yet-heard": (
        "not every worker has reported to this leader yet; with --on-no-match reject the job is rejected later, if no "
        "worker could run it"
    ),
}


def begin_below_ctrl_c() -> None:
    """Begin a line of a terminal below its ^C."""
    if sys.stderr.isatty():
        print_err("")


async def accepted(client: AsyncClient, submitting: Awaitable[T], jobs: Sequence[str | None], check: str = "") -> T:
    """Return the answer to a submit. If none comes in time, say that these jobs may be in the ledger or not."""
    try:
        return await submitting
    except (NoScheduler, Unreachable):
        if client._wire.unclear:
            print_interrupted(jobs, "no answer came", check)
        raise


def print_interrupted(jobs: Sequence[str | None], why: str = "", check: str = "") -> None:
    """Print that these jobs may be in the ledger or not; their ids make it safe to ask, and to send again.

    Without `why`, Ctrl-C was pressed. `check` says how to look and to send again where several jobs are of no file.
    """
    if not why:
        begin_below_ctrl_c()
        why = "interrupted before the scheduler answered"
    if len(jobs) == 1:
        # if it never arrived, the id alone could mean another that begins with it
        word = exactly(jobs[0] or "") + here()
        report(f"{why}: job {jobs[0]} may have been accepted")
        report(f"  check: moorage show {word}   cancel: moorage cancel --before {word}")
    else:
        report(f"{why}: any of the {len(jobs)} jobs may have been accepted")
        of_file = "moorage ls; jobs that have an id in the file can be submitted again: no job is then created twice"
        report(f"  check: {check or of_file}")


def print_cancel_interrupted(job: str, *, before: bool) -> None:
    """Print that this job may have been cancelled or not; to cancel it again is harmless."""
    begin_below_ctrl_c()
    word = exactly(job) + here()
    report(f"interrupted before the scheduler answered: job {job} may have been cancelled")
    report(f"  check: moorage show {word}   cancel: moorage cancel {'--before ' if before else ''}{word}")


def worker_of_place(flags: JobFlags, refused: Sequence[str] = ()) -> str:
    """Return the one worker of --on, for --place. Raises `Rejected` where that is another number of them, or beside
    options that are `refused`."""
    if len(flags.on or ()) != 1 or refused:
        raise rejected(
            "invalid-argument", "--place starts one job on one worker", found=" ".join([*(flags.on or ()), *refused]),
            allowed="--place --on WORKER, once" + (f", without {' and '.join(refused)}" if refused else ""),
            next="moorage admin place JOB --on WORKER starts one that waits",
        )  # fmt: skip
    return (flags.on or [""])[0]


async def place_now(client: AsyncClient, job: str, worker: str) -> None:
    """Have an operator's act start a job that was accepted on a worker, also a cordoned one. Raises what that ends
    with, and says first that the job stays accepted."""
    try:
        done = await client.admin.place(job, worker)
    except ClientError as error:
        word = word_here(job)
        report(f"job {job} stays accepted: moorage cancel {word} ends it")
        if isinstance(error, NotPermitted):
            report(f"an operator starts it there: moorage admin place {word} --on {worker} --tenant {client.tenant}")
        raise
    report(f"{many(done.members or 0, 'replica')} placed on {worker}")


def print_unread_stdin() -> None:
    """Print that a job does not get this command's stdin, if that is a file or a pipe with data."""
    try:
        about = os.fstat(0)
        if stat.S_ISFIFO(about.st_mode) or stat.S_ISSOCK(about.st_mode):
            size = bytearray(4)
            fcntl.ioctl(0, termios.FIONREAD, size)
            is_given = any(size)
        else:
            is_given = stat.S_ISREG(about.st_mode) and about.st_size > os.lseek(0, 0, os.SEEK_CUR)
    except OSError:  # closed
        return
    if is_given:
        print_err("warning[stdin]: stdin is not passed on to the job: bring data as a file, with --with")


def print_accepted(job: AsyncJob, request: Request) -> None:
    """Print what the scheduler answered, and how to follow the job."""
    accepted = job.accepted
    assert accepted is not None
    known = f"a job with this id and content exists already, {accepted.state}" if accepted.duplicate else "accepted"
    without = "no GPU" if request.copies == 1 else f"{request.copies} replicas without GPUs"
    asks = request.token if request.effective_gpu or request.groups else without
    if any(map(ends_at_once, accepted.warnings)):
        print_warnings(accepted)
        print_err(
            f"why: moorage explain {word_to_explain(job.job)}{here()}   run again: moorage again {word_here(job.job)}"
        )
        return
    record = f", ledger record {accepted.ledger}" if accepted.ledger else ""  # which a compacted job has not
    print_err(f"{known}: {asks}{record}")
    print_warnings(accepted)
    print_failure_limit(request)
    if accepted.waiting is not None and (why := explained_in(accepted.waiting)).reason:
        print_err(_waits(why))
    print_err(f"follow: moorage logs {word_here(job.job)}   why: moorage explain {word_to_explain(job.job)}{here()}")


def print_failure_limit(request: Request) -> None:
    """Print after how many failures the job cancels its other replicas, unless the request says so."""
    most = request.failed_max
    is_gang = request.gpu is not None and request.gpu.effective_scheduling == "gang"
    if request.max_failed == 0 and most is not None and most < request.copies and not is_gang:
        print_err(f"stops once {most} of {request.copies} replicas have failed; --max-failed all goes on")


def _waits(why: Explained) -> str:
    """Return why a job waits, or how many of its replicas start at once and why the others wait."""
    if is_asleep(why):
        return waits(why)
    if why.replicas is None or not 0 < why.waiting_replicas < why.replicas.of:
        return f"waits: {waits(why)}"
    others = msgspec.structs.replace(why, position=None)  # a job that starts is the first
    return f"{why.replicas.of - why.waiting_replicas} start now, {why.waiting_replicas} wait: {waits(others)}"


def ends_at_once(warning: str) -> bool:
    """Return whether a warning says that a job of --after has ended otherwise: `after train-42: FAILED`."""
    return warning.startswith("after ")


def print_warnings(accepted: Accepted) -> None:
    for warning in accepted.warnings:
        print_warning(warning)


def print_warning(warning: str) -> None:
    """Print a warning of an acceptance or of a plan: a code, in most cases with details after a colon."""
    code, _, text = warning.partition(":")
    if ends_at_once(warning):
        print_err(f"cancelled at once: {code.removeprefix('after ')} {text.strip()}")
        return
    text = text.strip() or _WARNINGS.get(code, "see moorage explain")
    print_err(f"warning[{code}]: {'no known worker could run this job: ' if code == 'no-match' else ''}{text}")
