"""`moorage run` and `moorage logs`: follow a job to its end, and exit with its code."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.codes import LOOK_KILLED, fix_of_end
from moorage.cli.framework.console import emit, is_live, paint, print_err, print_error, report, word_here
from moorage.cli.framework.exit_codes import exit_code_of, exit_code_of_result
from moorage.cli.framework.interrupts import AGAIN_S, detachable, was_ctrl_c
from moorage.cli.framework.options import DEFAULTS, Options, guarded, with_client
from moorage.cli.jobs.acceptance import (
    PLACE_HELP,
    accepted,
    begin_below_ctrl_c,
    place_now,
    print_interrupted,
    print_unread_stdin,
    print_warnings,
    worker_of_place,
)
from moorage.cli.jobs.bringing import with_files
from moorage.cli.jobs.from_shell import own_program, warn_of_timeout
from moorage.cli.jobs.job_flags import NO_FLAGS, JobFlags, offered, refusing, request_of
from moorage.cli.jobs.newest import with_any, with_newest
from moorage.cli.jobs.progress import Progress
from moorage.cli.jobs.selectors import ANY_JOB, HELP, LISTED, Chosen, SomeReplicas, ids_of, replica_in, with_named
from moorage.cli.jobs.sweep_flags import sweep_of
from moorage.cli.jobs.unkept import print_unkept
from moorage.client.errors import ClientError, JobFailed, rejected
from moorage.client.login import who
from moorage.schemas.exit_words import was_killed
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.client.follow.job_history import Result
    from moorage.client.follow.watch import AsyncWatch
    from moorage.client.output import Joiner, Piece
    from moorage.schemas.job import Request

NoPrefix = Annotated[bool, Parameter(help="Print output as it comes, without [replica] before each line.")]

#: a job that waits longer than this is asked why, and then again so often
WHY_AFTER_S: Final = 1.0
WHY_AGAIN_S: Final = 5.0
#: how often the line on a terminal says how long it is by now
TICK_S: Final = 1.0
#: how long a job goes on, after stored output of it could not be read, before that is said
SILENT_SAID_S: Final = 1.0
#: stands for each attempt
ALL: Final = "all"
ATTEMPT_DIGITS_MAX: Final = 15
#: jobs whose output is followed at once
AT_ONCE: Final = 64


def run(
    *command: Annotated[str, Parameter(help="What to run, after --.", command=True)],
    terminal: Annotated[
        bool,
        Parameter(
            help="Give the command this terminal, with its keys. Ctrl-P Ctrl-Q leaves it, and moorage attach takes it "
            "again; a lost one ends the command's input after 60 s.",
            names=("-it", "--terminal"),
        ),
    ] = False,
    no_prefix: NoPrefix = False,
    place: Annotated[bool, Parameter(help=PLACE_HELP)] = False,
    flags: JobFlags = NO_FLAGS,
    options: Options = DEFAULTS,
) -> int:
    """Run a command on GPUs, follow it, return its exit code.

    The command's output goes to stdout and stderr, progress to stderr: outside a terminal one line at the end, none
    with -q. Stdin is passed on with -it alone. Each line of several replicas begins with the number of its replica,
    [0]. Ctrl-C detaches and the job continues to run; a second Ctrl-C within 2 s cancels it. USR1, USR2, ALRM and URG
    are passed on, as moorage signal sends them.
    The command has to be on the worker: a full path, a name in a job's PATH there, or a file of --with.
    """

    async def work(client: AsyncClient, request: Request, worker: str) -> int | None:
        job_id = request.job or ""
        submitted = False

        async def submit() -> None:
            nonlocal submitted
            job = await accepted(client, client.submit(request), [job_id])
            submitted = True
            assert job.accepted is not None
            if options.json:
                emit(job.accepted)
            print_warnings(job.accepted)
            if not terminal:
                print_unread_stdin()
            if worker:
                await place_now(client, job_id, worker)

        def detach() -> bool:
            if submitted:
                return _print_detached(job_id, cancels=was_ctrl_c())
            print_interrupted([job_id])
            return False

        async def cancel() -> None:
            if submitted:
                begin_below_ctrl_c()
                answer = await client._wire.answer("cancel", {"job": job_id, "reason": "Ctrl-C", "by": who()})
                print_err(f"cancelling job {job_id}, which was {answer.data['was']}")

        async def pass_on(name: str) -> None:
            """Send the job a signal that this command got, as a program that runs here gets it itself."""
            try:
                if not submitted:
                    report(f"{name} came before the job was submitted: no job gets it")
                    return
                await client.job(job_id).signal(name, by=who())
                report(f"{name} goes to the processes of job {job_id} that handle it")
            except ClientError as error:
                report(f"{name} reaches no job: {error.problem.message}")

        labelled = request.copies > 1 and not no_prefix
        try:
            if terminal:
                following = _hold(client, job_id, submit)
            else:
                following = _follow(client, job_id, options, submit, labelled=labelled, replicas=request.copies)
            code = await detachable(following, detach, cancel, pass_on)
            if code == 0 and request.workload.keep:
                await print_unkept(client, job_id)
            return code
        except BrokenPipeError:  # as of `| head`: its reader wants no more, and the job goes on
            if submitted:
                _print_detached(job_id)
            raise

    def act() -> int:
        sweep = sweep_of(flags, command)
        words = own_program(command, flags.driver, flags.setup)
        own = refusing(flags)
        worker = worker_of_place(flags) if place else ""
        warn_of_timeout(options.timeout, flags.time_limit)
        request = request_of(with_any(own), words, sweep)

        async def follow(client: AsyncClient) -> int | None:
            wanted, asked = await with_newest(client, own, words, request, sweep)
            chosen = await offered(client.plan, wanted, words, asked, sweep)
            if terminal:
                chosen = _with_terminal(chosen, options)
            sent = await with_files(client, flags.with_, chosen, sweep, data=flags.data)
            return await work(client, sent, worker)

        return with_client(options, follow, sends=True)

    gc.enable()
    return guarded(options, act)


def logs(
    *jobs: Annotated[str, Parameter(help=HELP, lists=LISTED)],
    chosen: Chosen = ANY_JOB,
    tail: Annotated[
        int | None, Parameter(help="Print at most this many lines of each stream's earlier output.")
    ] = None,
    replica: SomeReplicas = None,
    service: Annotated[
        str | None, Parameter(help="The output of this service's jobs, of both versions of a rollout.", value="NAME")
    ] = None,
    failed: Annotated[
        bool, Parameter(help="Only the replicas that have failed, at most 1000: what is kept of them now.")
    ] = False,
    attempt: Annotated[
        str | None,
        Parameter(help="Print what is kept of this attempt, or of all, and exit with 0.", value="NUMBER|all"),
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

    It shows the newest attempt of each replica; --attempt has an earlier one, or all. A worker keeps the output of
    each attempt up to a bound for each stream, and for some time after its end. Its settings say how much and how
    long, and `moorage show` says until when. Each line of several replicas begins with its replica, [0]; of several
    jobs, with the job, [train-42] or [train-42/0]. Of several jobs the exit code is that of the first that did not
    succeed.
    """

    words: Sequence[str] = jobs
    numbers = replica
    no: int | None = None

    async def work(client: AsyncClient) -> int | None:
        if tail is not None and tail < 0:
            raise rejected("invalid-argument", "--tail must be 0 or more lines", found=tail, next="moorage logs --help")
        from moorage.client.replicas import replicas_of
        from moorage.schemas.ranges import count_of

        only = replicas_of(numbers)
        names = await (ids_of(client, words, chosen) if service is None else _versions(client, service))
        if failed:
            return await _kept_of_failed(client, names, options, tail, plain=no_prefix)
        if len(names) != 1:
            if attempt == ALL:
                why = f"--attempt {ALL} is of one job"
                raise rejected("invalid-argument", why, found=f"{len(names)} jobs", next="name one of them")
            following = _each(client, names, options, tail, numbers, no, follow=not no_follow, plain=no_prefix)
            return await detachable(
                following, lambda: print_err("this command no longer follows the jobs, which go on")
            )
        [name] = names
        if options.json or only is not None:
            replicas = 1 if only is None else count_of(only)
        else:
            replicas = await _replicas_of(client, name)
        labelled = replicas > 1 and not no_prefix
        if attempt == ALL:
            return await _kept_of_all(client, name, options, tail, numbers, labelled=labelled)
        if no_follow or no is not None:
            return await _kept(client, name, options, tail, numbers, no, labelled=labelled)
        following = _follow(client, name, options, tail=tail, replica=numbers, labelled=labelled, replicas=replicas)
        return await detachable(following, lambda: _print_detached(name))

    gc.enable()

    def act() -> int:
        nonlocal words, numbers, no
        words, numbers = replica_in(jobs, replica)
        if attempt is not None and attempt != ALL:
            no = _number_of(attempt)
        if failed and (numbers is not None or attempt is not None or follow):
            why = "--failed chooses the replicas and their last attempts, of which it prints what is kept"
            raise rejected("invalid-argument", why, next="leave out --replica, --attempt and --follow")
        if service is None:
            return with_named(options, words, work, chosen)
        if words or chosen != ANY_JOB:
            why = "--service chooses the jobs"
            raise rejected("invalid-argument", why, found=" ".join(words), next="leave out the jobs, or --service")
        return with_client(options, work)

    return guarded(options, act)


async def _versions(client: AsyncClient, service: str) -> list[str]:
    from moorage.cli.jobs.services import versions_of

    return await versions_of(client, service)


async def _kept_of_failed(
    client: AsyncClient, jobs: list[str], options: Options, tail: int | None, *, plain: bool
) -> int:
    """Print what is kept of the output of each job's failed replicas."""
    from moorage.client.failures import failed_numbers
    from moorage.schemas.ranges import format_ranges, ranges_of

    for job in jobs:
        numbers = await failed_numbers(client._wire, await client._wire.show(job))
        if not numbers:
            print_err(f"no replica of job {job} has failed")
            continue
        which, named = format_ranges(ranges_of(numbers)), len(jobs) > 1
        await _kept(client, job, options, tail, which, None, labelled=not plain, named=named, replicas=len(numbers))
    return 0


async def _each(
    client: AsyncClient,
    jobs: list[str],
    options: Options,
    tail: int | None,
    replica: str | None,
    attempt: int | None,
    *,
    follow: bool,
    plain: bool,
) -> int:
    """Print the output of several jobs: what is kept of one after the other, or, with `follow`, of all as it comes.

    Returns the exit code of the first that did not succeed.
    """
    from moorage.schemas.errors import MoorageError

    if not jobs:
        print_err(f"tenant {client.tenant} has no job that has not ended")
    follows = follow and attempt is None
    at_once = asyncio.Semaphore(AT_ONCE if follows else 1)

    async def one(job: str) -> int:
        async with at_once:
            try:
                replicas = await _replicas_of(client, job)
                if not follows:
                    return await _kept(
                        client, job, options, tail, replica, attempt, labelled=not plain, named=True, replicas=replicas
                    )
                return await _follow(
                    client, job, options, tail=tail, replica=replica, labelled=not plain, named=True, replicas=replicas
                )
            except MoorageError as error:  # of one; the others are printed
                report(f"warning[{error.code}]: {job}: {error.problem.message}")
                return exit_code_of(error)

    codes = await asyncio.gather(*(one(job) for job in jobs))
    return next((code for code in codes if code), 0)


async def _replicas_of(client: AsyncClient, job: str) -> int:
    shown = await client.job(job).show()
    return max(len(shown.replica_states), shown.request.copies if shown.request is not None else 1)


def _number_of(attempt: str) -> int:
    """Return the number of an attempt. Raises `Rejected` for what is none."""
    if not (attempt.isascii() and attempt.isdecimal() and len(attempt) <= ATTEMPT_DIGITS_MAX):
        why = f"--attempt: not a whole number, nor {ALL}: {attempt!r}"
        raise rejected("invalid-argument", why, found=attempt, allowed=f"1, 2, …, {ALL}", next="moorage show JOB")
    return int(attempt)


async def _kept_of_all(
    client: AsyncClient, job: str, options: Options, tail: int | None, replica: str | None, *, labelled: bool
) -> int:
    """Print what is kept of each attempt, oldest first, with a line on stderr before each."""
    newest = (await client.job(job).show()).attempt
    for attempt in range(1, newest + 1):
        report(f"attempt {attempt} of {newest}:")
        try:
            await _kept(client, job, options, tail, replica, attempt, labelled=labelled)
        except ClientError as error:  # of one of them, as its worker is away; that of the others may be there
            print_error(error.problem)
    return 0


async def _kept(
    client: AsyncClient,
    job: str,
    options: Options,
    tail: int | None,
    replica: str | None,
    attempt: int | None,
    *,
    labelled: bool,
    named: bool = False,
    replicas: int = 1,
) -> int:
    from moorage.client.output import Joiner
    from moorage.client.replicas import replicas_of

    progress = Progress(job, quiet=options.json or named, labelled=labelled, named=named, replicas=replicas)
    joiner, given, wrote = Joiner(client._wire.read, job, tail), 0, False
    only = replicas_of(replica)
    shown = await client.job(job).show()
    newest = await joiner.newest(shown, only)
    async for piece in joiner.kept_of(newest, only, attempt):
        given += 1
        wrote = wrote or bool(piece.text) or bool(piece.dropped)
        if options.json:
            emit(_piece_row(job, piece) if named else piece)
        else:
            progress.output(piece)
    progress.close()
    print_cuts(joiner)
    if joiner.trouble is not None and not given:
        raise joiner.trouble
    if joiner.trouble is not None:
        print_err(f"warning[{joiner.trouble.code}]: {joiner.trouble.problem.message}")
    elif not wrote and not options.json:
        print_err(f"no output of job {job}, which is {shown.state}{f': {shown.why}' if shown.why else ''}")
        if attempt is None and any((number or 0) > 1 for number in newest.values()):
            print_err(f"fix: moorage logs {word_here(job)} --attempt all, for its attempts before")
    return 0


def _print_detached(job: str, *, cancels: bool = False) -> bool:
    """Print how to go on. Returns whether a user at a terminal has read that Ctrl-C now cancels the job."""
    tells = cancels and is_live(sys.stderr)
    report(f"this command no longer follows job {job}, which goes on")
    word = word_here(job)
    report(f"  follow the job: moorage logs {word}")
    report(f"  cancel the job: moorage cancel {word}{f', or Ctrl-C again within {AGAIN_S:g} s' if tells else ''}")
    return tells


async def _follow(
    client: AsyncClient,
    job: str,
    options: Options,
    submit: Callable[[], Awaitable[None]] | None = None,
    *,
    tail: int | None = None,
    replica: str | None = None,
    labelled: bool = False,
    named: bool = False,
    replicas: int = 1,
) -> int:
    """Begin to watch, then submit, so that no output is missed; show all of it. Returns the exit code.

    With `named` it is one of several jobs: its output begins with its name, and of its progress only the end is told.
    """
    from moorage.client.replicas import replicas_of
    from moorage.schemas.frames import Event
    from moorage.schemas.job import QUEUED, SUCCEEDED

    progress = Progress(
        job,
        quiet=options.json or named,
        whole=tail is None,
        labelled=labelled,
        named=named,
        replicas=replicas,
        only=replicas_of(replica),
        looks_back=submit is None,
    )
    async with client.watch(job, past=True, tail=tail, replica=replica, notes=not options.json) as watch:
        if submit is not None:
            await submit()
        asking: asyncio.Task[None] | None = None
        ticking = asyncio.create_task(_tick(progress))
        silent = asyncio.create_task(_print_silent(watch, progress))
        try:
            async for item in watch:
                if options.json:
                    emit(_piece_row(job, item) if named and not isinstance(item, Event) else item)
                elif isinstance(item, Event):
                    progress.event(item)
                    if item.state == QUEUED and asking is None and not named:
                        asking = asyncio.create_task(_print_why(client, job, watch, progress))
                else:
                    progress.output(item)
        finally:
            progress.close()
            beside = {ticking, silent, *([asking] if asking is not None else [])}
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)
        result = watch.result()
        print_missing(watch, asked_for=submit is None)
    if result.state == SUCCEEDED:
        return 0
    if options.json:
        return exit_code_of_result(result)
    failed = JobFailed(result, request=await _limits(client, result))
    if named:
        print_err(paint(f"{job} {result.state}: {failed.why}", "red", sys.stderr))
        return exit_code_of_result(result)
    if result.code is None or result.state != "FAILED":
        print_error(failed.problem, failed.fixes)
    else:
        print_err(paint(failed.why, "red", sys.stderr))
        if result.why.startswith("not-here:"):
            print_err(f"fix: {fix_of_end(result.why).format(job=word_here(job))}")
        elif was_killed(result.code) and not result.why:
            print_err(f"fix: {LOOK_KILLED.format(job=word_here(job))}")
    return exit_code_of_result(result)


def _with_terminal(request: Request, options: Options) -> Request:
    """Return the request with a terminal that this command is to hold. Raises `Rejected`."""
    import msgspec

    if request.copies > 1 or options.json:
        raise rejected(
            "invalid-argument", "-it holds one terminal, and prints what it shows", field="$.run.stdin",
            found="--json" if options.json else f"{request.copies} replicas", allowed="one replica, without --json",
            next="leave -it out, or open a shell beside a replica with moorage shell JOB/N",
        )  # fmt: skip
    run = request.workload
    env = {"TERM": os.environ.get("TERM") or "xterm", **run.env}
    return msgspec.structs.replace(request, run=msgspec.structs.replace(run, stdin="stream", env=env))


async def _hold(client: AsyncClient, job: str, submit: Callable[[], Awaitable[None]]) -> int:
    """Submit a job, and hold the terminal of each of its attempts; return the job's exit code, or 0 once the user has
    left the terminal."""
    from moorage.cli.jobs.exec import hold, print_left
    from moorage.schemas.frames import Event
    from moorage.schemas.job import QUEUED, RUNNING, SUCCEEDED

    progress, was_held = Progress(job), False
    async with client.watch(job) as watch:
        await submit()
        asking: asyncio.Task[None] | None = None
        try:
            async for item in watch:
                assert isinstance(item, Event)
                progress.event(item)
                if item.state == QUEUED and asking is None:
                    asking = asyncio.create_task(_print_why(client, job, watch, progress))
                if not any(change.state == RUNNING for change in item.changes):  # only where an attempt begins
                    continue
                progress.close()  # the rest of the screen is the job's
                try:
                    if await hold(client, job) is None:
                        print_left(job)
                        return 0
                    was_held = True
                except ClientError as error:
                    if error.code != "failed-precondition":
                        raise
                    # it is over before its terminal was asked for, or is frozen: its output is kept
        finally:
            progress.close()
            if asking is not None:
                asking.cancel()
                await asyncio.wait((asking,))
        result = watch.result()
    if not was_held:
        await _kept(client, job, DEFAULTS, None, None, None, labelled=False)
    if result.state == SUCCEEDED:
        return 0
    failed = JobFailed(result, request=await _limits(client, result))
    print_err(paint(failed.why, "red", sys.stderr))
    return exit_code_of_result(result)


def _piece_row(job: str, piece: Piece) -> dict[str, Any]:
    """Return a piece of output with its job, which a piece alone does not name."""
    import msgspec

    data: dict[str, Any] = {"job": job, **msgspec.to_builtins(piece)}
    return data


async def _limits(client: AsyncClient, result: Result) -> Request | None:
    """Return the request of a job that ended by a time limit, which names the limit; None for other jobs, and
    if it cannot be read."""
    from moorage.schemas.job import EXPIRED, TIMED_OUT

    if result.state in (TIMED_OUT, EXPIRED):
        with contextlib.suppress(ClientError):  # the end itself is known, and is told without the value
            return (await client.job(result.job).show()).request
    return None


def print_missing(watch: AsyncWatch, *, asked_for: bool) -> None:
    """Print which output is missing and why; it is an error if the user asked for the output alone."""
    if watch.lost:
        print_err(
            f"warning[output]: {watch.lost} pieces of the job's output were not printed: they could not be read, or "
            "arrived faster than this command prints; moorage logs prints what the worker stored"
        )
    joiner = watch.joiner
    if joiner is None:
        return
    print_cuts(joiner)
    trouble = joiner.trouble
    if trouble is not None and asked_for:
        print_error(trouble.problem, trouble.fixes)
    elif trouble is not None:
        print_err(f"warning[{trouble.code}]: {trouble.problem.message}")


def print_cuts(joiner: Joiner) -> None:
    """Print of which streams the worker did not store all, and how many replicas are left out."""
    if joiner.left_out:
        left = many(joiner.left_out, "more replica")
        print_err(f"the output of {left} that ended is not printed; moorage logs JOB --replica 0-99 prints some")
    for replica, attempt, stream in sorted(joiner.truncated, key=str):
        name = f"std{stream} of replica {replica}, attempt {attempt}"
        dropped = joiner.truncated[replica, attempt, stream]
        if dropped:
            print_err(
                f"warning[output]: {name} has more bytes than the worker's output_cap_bytes allows: its beginning and "
                f"its end are stored, {dropped} bytes between them are dropped"
            )
        else:
            print_err(
                f"warning[output]: {name} has more bytes than the worker's output_cap_bytes allows, or the worker's "
                "disk was full; the rest of the output was not stored"
            )


async def _print_silent(watch: AsyncWatch, progress: Progress) -> None:
    """Print once that stored output cannot be read now, if the job goes on for a while after that was found."""
    joiner = watch.joiner
    if joiner is None:
        return
    found: asyncio.Future[ClientError] = asyncio.get_running_loop().create_future()
    joiner.on_trouble = lambda error: None if found.done() else found.set_result(error)
    trouble = await found
    await asyncio.sleep(SILENT_SAID_S)
    progress.erase()
    print_err(f"warning[{trouble.code}]: {trouble.problem.message}; this command prints what comes")


async def _tick(progress: Progress) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        progress.tick()


async def _print_why(client: AsyncClient, job: str, watch: AsyncWatch, progress: Progress) -> None:
    """While the job waits, ask every WHY_AGAIN_S why, and show the answer. Never returns: cancel it."""
    from moorage.schemas.job import QUEUED

    await asyncio.sleep(WHY_AFTER_S)
    while True:
        if watch.state == QUEUED:
            try:
                progress.waiting(await client.job(job).explain())
            except ClientError:
                pass  # it is told by the watch if it lasts
        await asyncio.sleep(WHY_AGAIN_S)
