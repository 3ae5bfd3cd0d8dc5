"""`moorage submit`: submits requests, given by flags or by a file, or in place of a waiting job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import emit, say, tell, tell_error
from moorage.cli.framework.exit_codes import EXIT_FAILED, exit_code_of
from moorage.cli.framework.files import cannot_read, read_within
from moorage.cli.framework.interrupts import detachable
from moorage.cli.framework.options import ROWS, RowOptions, guarded, with_client
from moorage.cli.jobs.acceptance import say_accepted, say_interrupted, say_stdin
from moorage.cli.jobs.job_flags import NO_FLAGS, JobFlags, offered, request_of, with_files

if TYPE_CHECKING:
    from moorage.cli.jobs.instead import Change
    from moorage.client.client import AsyncClient
    from moorage.client.job import Job
    from moorage.schemas.job import Request

FILE_BYTES_MAX: Final = 64 * 1024 * 1024


def submit(
    *command: Annotated[str, Parameter(help="What to run, after --.", command=True)],
    file: Annotated[
        str | None,
        Parameter(
            help="A file of requests as JSON: one object, an array, or one object on each line; - is stdin.",
            names=("--file", "-f"),
            value="FILE",
        ),
    ] = None,
    instead_of: Annotated[
        str | None,
        Parameter(
            help="Submit this waiting job's request, changed by the other options, as a new job, and cancel this one.",
            value="JOB",
        ),
    ] = None,
    but: Annotated[
        str | None,
        Parameter(help="With --instead-of: fields of the request to change, as a JSON object.", value="JSON"),
    ] = None,
    flags: JobFlags = NO_FLAGS,
    options: RowOptions = ROWS,
) -> int:
    """Submit a job and return once it is in the ledger; does not wait for its end.

    Prints the job's id. If the verb fails, submit again with the same id and content: at most one job is created.
    """

    def act() -> int:
        from moorage.client.errors import rejected
        from moorage.client.job_ids import fresh_job_id
        from moorage.client.request_builder import build_request

        if instead_of is not None:
            from moorage.cli.jobs.instead import instead

            if file is not None:
                raise rejected("invalid-argument", "--instead-of takes the request of that job", next="leave out -f")
            change = instead(instead_of, flags, command, but)
            return with_client(options, lambda client: _one_of(client, change, options))
        if but is not None:
            raise rejected("invalid-argument", "--but needs --instead-of", next="--instead-of JOB --but '{…}'")
        if file is None:
            request = request_of(flags, command)

            async def one(client: AsyncClient) -> int | None:
                chosen = await offered(client.plan, flags, command, request)
                say_stdin()
                return await _one(client, await with_files(client, flags, chosen), options)

            return with_client(options, one)
        if command or flags != NO_FLAGS:
            raise rejected(
                "invalid-argument", "a file holds the whole request", next="leave out the flags, or leave out -f"
            )
        content = _read(file)
        if not isinstance(content, list):
            request = build_request(content)
            return with_client(options, lambda client: _one(client, request, options))
        named = [{"job": fresh_job_id(), **body} for body in content]

        async def work(client: AsyncClient) -> int | None:
            return await detachable(
                _many(client, named, options), lambda: say_interrupted([body["job"] for body in named])
            )

        return with_client(options, work)

    return guarded(options, act)


async def _one_of(client: AsyncClient, change: Change, options: RowOptions) -> int | None:
    from moorage.client.errors import Rejected
    from moorage.schemas.errors import MoorageError

    gone, request = await change(client)
    try:
        return await _one(client, request, options)
    except MoorageError as error:
        import msgspec

        if isinstance(error, Rejected):
            say(f"job {gone} was cancelled, and the request in its place was refused; the request:")
        else:
            say(
                f"job {gone} was cancelled; whether job {request.job} in its place was accepted is not known. "
                "Submit this request again, with moorage submit -f FILE: it is not accepted twice"
            )
        say(msgspec.json.encode(request).decode())
        raise


async def _one(client: AsyncClient, request: Request, options: RowOptions) -> int | None:
    async def ask() -> None:
        job = await client.submit(request)
        assert job.accepted is not None
        if not options.shown(job.accepted, [job.accepted]):
            tell(job.job)
            say_accepted(job, request)

    return await detachable(ask(), lambda: say_interrupted([request.job]))


async def _many(client: AsyncClient, requests: list[dict[str, Any]], options: RowOptions) -> int | None:
    """Submit several requests, each accepted or refused by itself, and print the answers in their order."""
    from moorage.client.errors import BatchRejected, error_of

    jobs: list[Job | None] = []
    problems = {}
    try:
        jobs += await client.submit_many(requests)
    except BatchRejected as refused:
        jobs, problems = refused.jobs, refused.problems
    code = 0
    for at, job in enumerate(jobs):
        if job is not None:
            if not options.shown(job.accepted, [job.accepted]):
                tell(job.job)
            continue
        if options.json:
            emit(problems[at])
        tell_error(problems[at])
        code = code or exit_code_of(error_of(problems[at])) or EXIT_FAILED
    if not options.json:
        say(f"{len(jobs) - len(problems)} of {len(jobs)} jobs accepted")
    return code


def _read(file: str) -> Any:
    """Return the JSON of a file or of stdin: an object, or a list of objects from an array or from one a line. Raises
    `Rejected`."""
    from moorage.client.errors import rejected

    where = "stdin" if file == "-" else file
    try:
        text = read_within(file, FILE_BYTES_MAX)
    except OSError as error:
        raise cannot_read(where, error.strerror, "name a file of JSON, or - for stdin") from None
    if len(text) > FILE_BYTES_MAX:
        raise rejected("too-large", f"{where} has more than {FILE_BYTES_MAX} bytes", next="split the file")
    content = _json_of(text, where)
    bodies = content if isinstance(content, list) else [content]
    if not bodies or not all(isinstance(body, dict) for body in bodies):
        raise rejected(
            "invalid-argument",
            f"{where} must hold requests alone, and at least one",
            next='a request is an object as {"run": {"argv": ["nvidia-smi"]}}, or an array of them, or one a line',
        )
    return content


def _json_of(text: bytes, where: str) -> Any:
    """Return one JSON value, or a list of values if there is one in each line. Raises `Rejected`."""
    import msgspec

    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        wrong: Exception = error
    at, values = "", []
    for number, line in lines if len(lines) > 1 else ():
        try:
            values.append(msgspec.json.decode(line))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            if not values:  # its first line is no value: it was not meant to be one a line
                break
            wrong, at = error, f"line {number} of "
            break
    else:
        if values:
            return values
    from moorage.client.errors import rejected

    raise rejected(
        "invalid-argument",
        f"{at}{where} is not JSON: {wrong}",
        next=('a request is an object like {"run": {"argv": ["nvidia-smi"]}}'),
    )
