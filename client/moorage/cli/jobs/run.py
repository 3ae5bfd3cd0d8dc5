"""`moorage run` and `moorage logs`: follow a job to its end, and exit with its code."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Final

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import emit, is_live, paint, say, tell_error
from moorage.cli.framework.exit_codes import exit_code_of_result
from moorage.cli.framework.interrupts import AGAIN_S, detachable, was_ctrl_c
from moorage.cli.framework.options import DEFAULTS, Options, guarded, with_client
from moorage.cli.jobs.acceptance import say_interrupted, say_stdin, tell_warnings
from moorage.cli.jobs.job_flags import NO_FLAGS, JobFlags, offered, request_of, with_files
from moorage.cli.jobs.progress import Progress
from moorage.cli.jobs.selectors import HELP_ONE, LISTED, one_id
from moorage.client.login import who

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.client.follow.story import Result
    from moorage.client.follow.watch import Watch
    from moorage.client.output import Joiner
    from moorage.schemas.job import Request

NoPrefix = Annotated[bool, Parameter(help="Print output as it comes, without [replica] before each line.")]

#: a job that waits longer than this is asked why, and then again so often
WHY_AFTER_S: Final = 1.0
WHY_AGAIN_S: Final = 5.0
#: how often the line on a terminal says how long it is by now
TICK_S: Final = 1.0


def run(
    *command: Annotated[str, Parameter(help="What to run, after --.", command=True)],
    no_prefix: NoPrefix = False,
    flags: JobFlags = NO_FLAGS,
    options: Options = DEFAULTS,
) -> int:
    """Run a command on GPUs, follow it, return its exit code.

    The command's output goes to stdout and stderr, progress to stderr; stdin is not passed on. Each line of several
    replicas begins with the number of its replica, [0]. Ctrl-C detaches and the job continues to run; a second Ctrl-C
    within 2 s cancels it.
    The command has to be on the worker: a full path, a name in a job's PATH there, or a file of --with.
    """

    async def work(client: AsyncClient, request: Request) -> int | None:
        job_id = request.job or ""
        submitted = False

        async def submit() -> None:
            nonlocal submitted
            job = await client.submit(request)
            submitted = True
            assert job.accepted is not None
            if options.json:
                emit(job.accepted)
            tell_warnings(job.accepted)
            say_stdin()

        def detach() -> bool:
            if submitted:
                return _say_detached(job_id, cancels=was_ctrl_c())
            say_interrupted([job_id])
            return False

        async def cancel() -> None:
            if submitted:
                if sys.stderr.isatty():
                    say("")  # below the terminal's ^C
                answer = await client._wire.answer("cancel", {"job": job_id, "reason": "Ctrl-C", "by": who()})
                say(f"cancelling job {job_id}, which was {answer.data['was']}")

        labelled = request.replicas > 1 and not no_prefix
        try:
            following = _follow(client, job_id, options, submit, labelled=labelled, replicas=request.replicas)
            return await detachable(following, detach, cancel)
        except BrokenPipeError:  # as of `| head`: its reader wants no more, and the job goes on
            if submitted:
                _say_detached(job_id)
            raise

    def act() -> int:
        request = request_of(flags, command)

        async def follow(client: AsyncClient) -> int | None:
            chosen = await offered(client.plan, flags, command, request)
            return await work(client, await with_files(client, flags, chosen))

        return with_client(options, follow)

    gc.enable()
    return guarded(options, act)


def logs(
    job: Annotated[str, Parameter(help=HELP_ONE, lists=LISTED)],
    /,
    *,
    tail: Annotated[
        int | None, Parameter(help="Print at most this many lines of each stream's earlier output.")
    ] = None,
    replica: Annotated[int | None, Parameter(help="Only this replica, from 0.")] = None,
    attempt: Annotated[
        int | None,
        Parameter(help="Print what is kept of this attempt, and exit with 0."),
    ] = None,
    follow: Annotated[
        bool,
        Parameter(help="Wait for more output until the job has ended; this is the default.", names=("-f", "--follow")),
    ] = False,
    no_follow: Annotated[
        bool, Parameter(help="Print what is kept now, do not wait for more, and exit with 0.")
    ] = False,
    no_prefix: NoPrefix = False,
    options: Options = DEFAULTS,
) -> int:
    """Print a job's output: first what is kept, then new output until the job has ended; exits with its code.

    It shows the newest attempt of each replica; an earlier one has --attempt. A worker keeps the output of each attempt
    up to a bound for each stream, and for some time after its end. Its settings say how much and how long, and
    `moorage show` says until when. Each line of several replicas begins with its replica, [0].
    """

    async def work(client: AsyncClient) -> int | None:
        if tail is not None and tail < 0:
            from moorage.client.errors import rejected

            raise rejected("invalid-argument", "--tail must be 0 or more lines", found=tail, next="moorage logs --help")
        name = await one_id(client, job, "logs")
        replicas = 1 if options.json or replica is not None else await _replicas_of(client, name)
        labelled = replicas > 1 and not no_prefix
        if no_follow or attempt is not None:
            return await _kept(client, name, options, tail, replica, attempt, labelled=labelled)
        following = _follow(client, name, options, tail=tail, replica=replica, labelled=labelled, replicas=replicas)
        return await detachable(following, lambda: _say_detached(name))

    gc.enable()
    return with_client(options, work)


async def _replicas_of(client: AsyncClient, job: str) -> int:
    shown = await client.job(job).show()
    return max(len(shown.replica_states), shown.request.replicas if shown.request is not None else 1)


async def _kept(
    client: AsyncClient,
    job: str,
    options: Options,
    tail: int | None,
    replica: int | None,
    attempt: int | None,
    *,
    labelled: bool,
) -> int:
    from moorage.client.output import Joiner, newest_attempts

    progress = Progress(job, quiet=options.json, labelled=labelled)
    joiner, given = Joiner(client._wire.read, job, tail), 0
    async for piece in joiner.kept_of(newest_attempts((await client.job(job).show()).data), replica, attempt):
        given += 1
        if options.json:
            emit(piece)
        else:
            progress.output(piece)
    progress.close()
    tell_cuts(joiner)
    if joiner.trouble is not None and not given:
        raise joiner.trouble
    if joiner.trouble is not None:
        say(f"warning[{joiner.trouble.code}]: {joiner.trouble.problem.message}")
    return 0


def _say_detached(job: str, *, cancels: bool = False) -> bool:
    """Print how to go on. Returns whether a user at a terminal was told that another Ctrl-C cancels the job."""
    tells = cancels and is_live(sys.stderr)
    say(f"this command no longer follows job {job}, which goes on")
    say(f"  follow the job: moorage logs {job}")
    say(f"  cancel the job: moorage cancel {job}{f', or Ctrl-C again within {AGAIN_S:g} s' if tells else ''}")
    return tells


async def _follow(
    client: AsyncClient,
    job: str,
    options: Options,
    submit: Callable[[], Awaitable[None]] | None = None,
    *,
    tail: int | None = None,
    replica: int | None = None,
    labelled: bool = False,
    replicas: int = 1,
) -> int:
    """Begin to watch, then submit, so that no output is missed; show all of it. Returns the exit code."""
    from moorage.client.errors import JobFailed
    from moorage.schemas.frames import Event
    from moorage.schemas.job import QUEUED, SUCCEEDED

    progress = Progress(job, quiet=options.json, whole=tail is None, labelled=labelled, replicas=replicas)
    async with client.watch(job, past=True, tail=tail, replica=replica, notes=not options.json) as watch:
        if submit is not None:
            await submit()
        asking: asyncio.Task[None] | None = None
        ticking = asyncio.create_task(_tick(progress))
        try:
            async for item in watch:
                if options.json:
                    emit(item)
                elif isinstance(item, Event):
                    progress.event(item)
                    if item.state == QUEUED and asking is None:
                        asking = asyncio.create_task(_say_why(client, job, watch, progress))
                else:
                    progress.output(item)
        finally:
            progress.close()
            beside = {ticking, *([asking] if asking is not None else [])}
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)
        result = watch.result()
        tell_missing(watch, asked_for=submit is None)
    if result.state == SUCCEEDED:
        return 0
    if options.json:
        return exit_code_of_result(result)
    failed = JobFailed(result, request=await _limits(client, result))
    if result.code is None or result.state != "FAILED":
        tell_error(failed.problem, failed.fixes)
    else:
        say(paint(failed.why, "red", sys.stderr))
    return exit_code_of_result(result)


async def _limits(client: AsyncClient, result: Result) -> Request | None:
    """Return the request of a job that ended by a time limit, which names the limit; None for other jobs, and
    if it cannot be read."""
    from moorage.client.errors import ClientError
    from moorage.schemas.job import EXPIRED, TIMED_OUT

    if result.state in (TIMED_OUT, EXPIRED):
        with contextlib.suppress(ClientError):  # the end itself is known, and is told without the value
            return (await client.job(result.job).show()).request
    return None


def tell_missing(watch: Watch, *, asked_for: bool) -> None:
    """Print which output is missing and why; it is an error if the user asked for the output alone."""
    if watch.lost:
        say(
            f"warning[output]: {watch.lost} pieces of the job's output were not printed: they could not be read, or "
            "arrived faster than this command prints; moorage logs prints what the worker stored"
        )
    joiner = watch.joiner
    if joiner is None:
        return
    tell_cuts(joiner)
    trouble = joiner.trouble
    if trouble is not None and asked_for:
        tell_error(trouble.problem, trouble.fixes)
    elif trouble is not None:
        say(f"warning[{trouble.code}]: {trouble.problem.message}")


def tell_cuts(joiner: Joiner) -> None:
    """Print of which streams the worker did not store all."""
    for replica, attempt, stream in sorted(joiner.truncated, key=str):
        name = f"std{stream} of replica {replica}, attempt {attempt}"
        dropped = joiner.truncated[replica, attempt, stream]
        if dropped:
            say(
                f"warning[output]: {name} has more bytes than the worker's output_cap_bytes allows: its beginning and "
                f"its end are stored, {dropped} bytes between them are dropped"
            )
        else:
            say(
                f"warning[output]: {name} has more bytes than the worker's output_cap_bytes allows, or the worker's "
                "disk was full; the rest of the output was not stored"
            )


async def _tick(progress: Progress) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        progress.tick()


async def _say_why(client: AsyncClient, job: str, watch: Watch, progress: Progress) -> None:
    """While the job waits, ask every WHY_AGAIN_S why, and show the answer. Never returns: cancel it."""
    from moorage.client.errors import ClientError
    from moorage.schemas.job import QUEUED

    await asyncio.sleep(WHY_AFTER_S)
    while True:
        if watch.state == QUEUED:
            try:
                progress.waiting((await client.job(job).explain()).data)
            except ClientError:
                pass  # it is told by the watch if it lasts
        await asyncio.sleep(WHY_AGAIN_S)
