"""`moorage submit`: submits requests, given by flags or by a file, or in place of a waiting job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from moorage.cli.framework.arguments import JOBS_LISTED, Parameter
from moorage.cli.framework.console import emit, here, print_err, print_error, print_out, report
from moorage.cli.framework.exit_codes import EXIT_FAILED, exit_code_of
from moorage.cli.framework.fleets import are_several, ask_each, each_of
from moorage.cli.framework.interrupts import detachable
from moorage.cli.framework.options import ROWS, RowOptions, guarded, with_client
from moorage.cli.jobs.acceptance import (
    PLACE_HELP,
    accepted,
    begin_below_ctrl_c,
    place_now,
    print_accepted,
    print_interrupted,
    print_unread_stdin,
    worker_of_place,
)
from moorage.cli.jobs.bringing import packed_address, refuse_jobs, send_files, with_files, with_packed
from moorage.cli.jobs.from_shell import own_program, warn_of_timeout
from moorage.cli.jobs.job_file import Said, is_for_people, naming, read_job_file
from moorage.cli.jobs.job_flags import NO_FLAGS, ON_NO_MATCH, JobFlags, offered, refusing, request_of
from moorage.cli.jobs.newest import with_any, with_newest
from moorage.cli.jobs.sweep_flags import sweep_of
from moorage.cli.jobs.trials import LABEL, has_trials, items_of_trials, of_one_trial, trials_of
from moorage.client.errors import BatchRejected, Rejected, error_of, rejected
from moorage.schemas.errors import MoorageError
from moorage.schemas.names import REPLACED_BY

if TYPE_CHECKING:
    from moorage.cli.jobs.instead import Change
    from moorage.client.client import AsyncClient
    from moorage.client.job import AsyncJob
    from moorage.schemas.job import Request
    from moorage.schemas.plan import Plan


def submit(
    *command: Annotated[str, Parameter(help="What to run, after --.", command=True)],
    file: Annotated[
        str | None,
        Parameter(
            help="A file with a job: in YAML or TOML these options by name, and command; in JSON the request, an array "
            "of requests, or one on each line; - is stdin.",
            names=("--file", "-f"),
            value="FILE",
        ),
    ] = None,
    instead_of: Annotated[
        str | None,
        Parameter(
            help="Submit this job's request, changed by the other options, as a new job, and cancel this one, which "
            "must be waiting; or a service that runs: it ends as far as the new one is ready.",
            value="JOB",
            lists=JOBS_LISTED,
        ),
    ] = None,
    but: Annotated[
        str | None,
        Parameter(help="With --instead-of: fields of the request to change, as a JSON object.", value="JSON"),
    ] = None,
    dry_run: Annotated[bool, Parameter(help="Print the request as JSON, and send nothing.")] = False,
    place: Annotated[bool, Parameter(help=PLACE_HELP)] = False,
    flags: JobFlags = NO_FLAGS,
    options: RowOptions = ROWS,
) -> int:
    """Submit a job and return once it is in the ledger; does not wait for its end.

    Prints the job's id. If the verb fails, submit again with the same id and content: at most one job is created. With
    --nats A --nats B the job goes to the fleet where it would start sooner, as plan says there.
    """

    def act() -> int:
        refused = [name for name, given in (("--instead-of", instead_of), ("--dry-run", dry_run)) if given]
        if place and refused:
            worker_of_place(flags, refused)
        if instead_of is not None:
            from moorage.cli.jobs.instead import instead

            if file is not None or dry_run:
                what = "leave out -f and --dry-run; moorage plan says what would happen"
                raise rejected("invalid-argument", "--instead-of takes the request of that job", next=what)
            change = instead(instead_of, flags, command, but)
            return with_client(options, lambda client: _one_of(client, change, options), sends=True)
        if but is not None:
            raise rejected("invalid-argument", "--but needs --instead-of", next="--instead-of JOB --but '{…}'")
        said = Said(flags, tuple(command))
        if file is not None:
            if not is_for_people(file):
                _check_flags_of_requests(flags, command)  # before stdin is read
            found = read_job_file(file)
            if not isinstance(found, Said):
                if place:
                    worker_of_place(flags, [f"-f {file}"])
                return _submit_requests(file, found, flags, command, options, dry_run=dry_run)
            said = found.under(flags, command)
        worker = worker_of_place(said.flags, ["a gang for each item"] * has_trials(said.flags)) if place else ""
        if are_several(options) and not dry_run:
            return _submit_request(said, _sooner(said, options, file, flags), file, flags, dry_run=False, worker=worker)
        return _submit_request(said, options, file, flags, dry_run=dry_run, worker=worker)

    return guarded(options, act)


def _sooner(said: Said, options: RowOptions, file: str | None, given: JobFlags) -> RowOptions:
    """Return the options for the fleet where the job would start first, and say what each fleet says.

    Where the job has an id, each has to answer: it may be a job of that fleet already. Raises `Rejected`.
    """
    from moorage.cli.framework.interrupts import run
    from moorage.cli.jobs.plan import told_starts

    flags = refusing(said.flags)
    command = own_program(said.command, flags.driver, flags.setup)
    if has_trials(flags):
        raise rejected("invalid-argument", "trials are submitted to one fleet", next="give --nats once")
    sweep = sweep_of(flags, command)
    with naming(file, given):
        request = request_of(with_any(flags), command, sweep)

    async def ask(client: AsyncClient) -> Plan:
        _, asked = await with_newest(client, flags, command, request, sweep)
        return await client.plan(asked)

    answers = run(ask_each(options, ask))
    plans = []
    for (name, each), answer in zip(each_of(options), answers, strict=True):
        if isinstance(answer, MoorageError):
            print_err(f"{name}: {answer.problem.message}")
        else:
            print_err(f"{name}: starts {told_starts(answer)}")
            plans.append((_lateness(answer), name, each))
    silent = len(answers) - len(plans)
    if silent and (flags.job is not None or not plans):
        raise next(each for each in answers if isinstance(each, MoorageError))
    _, name, chosen = min(plans, key=lambda plan: plan[0])
    print_err(f"submitted to {name}")
    return chosen


def _lateness(planned: Plan) -> tuple[int, float]:
    """Return what is smaller for a fleet where a job starts sooner, or that has it already."""
    order = ("none", "now", "later", "unknown", "never", "refused").index(planned.starts)
    if planned.starts == "now":
        return order, -planned.replicas_now / max(1, planned.replicas)
    return order, float(planned.in_ms.p50_ms) if planned.in_ms is not None else 0.0


def _submit_request(
    said: Said, options: RowOptions, file: str | None, given: JobFlags, *, dry_run: bool, worker: str
) -> int:
    flags = refusing(said.flags)
    warn_of_timeout(options.timeout, flags.time_limit)
    command = own_program(said.command, flags.driver, flags.setup)
    if has_trials(flags):
        return _submit_trials(flags, command, options, dry_run=dry_run)
    sweep = sweep_of(flags, command)
    with naming(file, given):
        request = request_of(flags if dry_run else with_any(flags), command, sweep)
    if dry_run:
        emit(_of_file(with_packed(flags.with_, request, sweep, data=flags.data)))
        return 0

    async def one(client: AsyncClient) -> int | None:
        wanted, asked = await with_newest(client, flags, command, request, sweep)
        chosen = await offered(client.plan, wanted, command, asked, sweep)
        print_unread_stdin()
        sent = await with_files(client, flags.with_, chosen, sweep, data=flags.data)
        code = await _one(client, sent, options)
        if worker and code is None:
            await place_now(client, sent.job or "", worker)
        return code

    return with_client(options, one, sends=True)


def _submit_trials(flags: JobFlags, command: Sequence[str], options: RowOptions, *, dry_run: bool) -> int:
    """Submit a gang for each item of the file, each accepted or refused by itself."""
    items = items_of_trials(flags, command)
    flags = of_one_trial(flags)
    request = request_of(flags if dry_run else with_any(flags), command)
    if dry_run:
        for trial in trials_of(with_packed(flags.with_, request, data=flags.data), items):
            emit(_of_file(trial))
        return 0
    trials_of(request, items)  # what is wrong with an item or an id is said before anything is sent

    async def all_of(client: AsyncClient) -> int | None:
        wanted, asked = await with_newest(client, flags, command, request, None)
        chosen = await offered(client.plan, wanted, command, asked)
        print_unread_stdin()
        trials = trials_of(await with_files(client, flags.with_, chosen, data=flags.data), items)
        ids = [str(trial.job) for trial in trials]
        of_all = f"--label {LABEL}={trials[0].labels[LABEL]}"
        check = f"moorage ls {of_all}{here()}; submit again with --job {chosen.job}: no job is then created twice"
        many = _many(client, trials, {}, options, ids, check=check, follow=f"moorage wait {of_all}")
        return await detachable(many, lambda: print_interrupted(ids, check=check))

    return with_client(options, all_of, sends=True)


def _submit_requests(
    file: str,
    content: dict[str, Any] | list[dict[str, Any]],
    flags: JobFlags,
    command: Sequence[str],
    options: RowOptions,
    *,
    dry_run: bool,
) -> int:
    """Submit requests as they are on the wire, with the files of --with and --keep."""
    from moorage.client.files_of import divided, files_of
    from moorage.client.job_ids import fresh_job_id
    from moorage.client.request_builder import build_request

    _check_flags_of_requests(flags, command)
    fields: dict[str, Any] = {"keep": flags.keep} if flags.keep else {}
    plain, jobs = divided(flags.with_ or ())
    paths = list(map(str, plain))
    if paths:
        fields["files"] = packed_address(paths)
    default = {"on_no_match": ON_NO_MATCH}
    bodies = content if isinstance(content, list) else [content]
    named = [{"job": fresh_job_id(), **default, **body} for body in bodies]
    if dry_run:
        refuse_jobs(jobs)
        with naming(file):
            for body in named:
                emit(_of_file(build_request(body, fields=fields)))
        return 0
    with naming(file):
        only = None if isinstance(content, list) else build_request(named[0], fields=fields)

    async def work(client: AsyncClient) -> int | None:
        if paths:
            fields["files"] = await send_files(client, paths, "")
        if jobs:
            fields["files_of"] = await files_of(client._wire, jobs)
        if only is not None:
            return await _one(client, build_request(only, fields=fields), options)
        ids = [body["job"] for body in named]
        return await detachable(_many(client, named, fields, options, ids), lambda: print_interrupted(ids))

    return with_client(options, work, sends=True)


def _of_file(request: Request) -> dict[str, Any]:
    """Return a request as -f takes it back: `on_no_match` stands there always, as a file has another default of it."""
    import msgspec

    return {**msgspec.to_builtins(request), "on_no_match": request.on_no_match}


def _check_flags_of_requests(flags: JobFlags, command: Sequence[str]) -> None:
    """Raise `Rejected` if the command line says more than a request on the wire takes of it."""
    if command or flags != JobFlags(with_=flags.with_, keep=flags.keep):
        raise rejected(
            "invalid-argument", "a file of requests holds all of them, but for --with and --keep",
            next="leave out the other flags, or leave out -f; a file with options in YAML takes them all",
        )  # fmt: skip


async def _one_of(client: AsyncClient, change: Change, options: RowOptions) -> int | None:
    """Cancel a job and submit a request in its place. If this is cut short, the request is printed: it is
    kept nowhere else."""
    from moorage.schemas.errors import MoorageError

    gone, cancelled = "", False
    request: Request | None = None

    async def ask() -> None:
        nonlocal gone, cancelled, request
        gone, request = await change(client)
        if gone:
            why = REPLACED_BY.format(request.job)
            await client._wire.read("cancel", {"job": gone, "reason": why, "by": ""})
            cancelled = True
        await _submit(client, request, options)

    def print_rest(error: MoorageError | None = None) -> None:
        import msgspec

        if request is None or (isinstance(error, Rejected) and not cancelled):  # nothing was changed
            return
        if not gone:
            if error is None:
                print_interrupted([request.job])
            return
        if error is None:
            begin_below_ctrl_c()
        if isinstance(error, Rejected):
            report(f"job {gone} was cancelled, and the request in its place was refused; the request:")
        elif cancelled:
            report(
                f"job {gone} was cancelled; whether job {request.job} in its place was accepted is not known. "
                "Submit this request again, with moorage submit -f FILE: it is not accepted twice"
            )
        else:
            report(
                f"job {gone} may have been cancelled, and job {request.job} in its place was not submitted. "
                "Submit this request, with moorage submit -f FILE"
            )
        report(msgspec.json.encode(_of_file(request)).decode())

    try:
        return await detachable(ask(), print_rest)
    except MoorageError as error:
        print_rest(error)
        raise


async def _one(client: AsyncClient, request: Request, options: RowOptions) -> int | None:
    return await detachable(_submit(client, request, options), lambda: print_interrupted([request.job]))


async def _submit(client: AsyncClient, request: Request, options: RowOptions) -> None:
    job = await accepted(client, client.submit(request), [request.job])
    assert job.accepted is not None
    if not options.shown(job.accepted, [job.accepted]):
        print_out(job.job)
        print_accepted(job, request)


async def _many(
    client: AsyncClient,
    requests: Sequence[dict[str, Any] | Request],
    fields: dict[str, Any],
    options: RowOptions,
    ids: list[str],
    *,
    check: str = "",
    follow: str = "",
) -> int | None:
    """Submit several requests, each accepted or refused by itself, and print the answers in their order, then how to
    `follow` those that were accepted. `check` is as in `print_interrupted`."""
    jobs: list[AsyncJob | None] = []
    problems = {}
    try:
        jobs += await accepted(client, client.submit_many(requests, **fields), ids, check)
    except BatchRejected as refused:
        jobs, problems = refused.jobs, refused.problems
    code = 0
    for at, job in enumerate(jobs):
        if job is not None:
            if not options.shown(job.accepted, [job.accepted]):
                print_out(job.job)
            continue
        if options.json:
            emit(problems[at])
        print_error(problems[at])
        code = code or exit_code_of(error_of(problems[at])) or EXIT_FAILED
    if not options.json:
        print_err(f"{len(jobs) - len(problems)} of {len(jobs)} jobs accepted")
    if follow and len(problems) < len(jobs):
        print_err(f"follow: {follow}{here()}")
    return code
