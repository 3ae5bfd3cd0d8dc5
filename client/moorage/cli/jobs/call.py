"""`moorage call`: call a service once and print its answer as it comes, or with each line of a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import emit, print_err, print_error
from moorage.cli.framework.exit_codes import exit_code_of
from moorage.cli.framework.interrupts import detachable
from moorage.cli.framework.options import DEFAULTS, Options, guarded, with_client
from moorage.cli.jobs.flag_values import pairs

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.schemas.served import Answer

Kind = Literal["text", "json", "bytes"]
KINDS: Final = get_args(Kind)
STDIN: Final = "-"
FILE_MARK: Final = "@"
#: no service takes more
BYTES_MAX: Final = 1 << 30


def call(
    service: Annotated[
        str, Parameter(help="The service's name, as --service of its job has it; NAME.METHOD for one of its methods.")
    ],
    data: Annotated[
        str, Parameter(help="What to send: a text, - for standard input, or @FILE. By default nothing.")
    ] = "",
    /,
    *,
    kind: Annotated[
        Kind | None,
        Parameter(
            help="What the data are. By default json for a file FILE.json, bytes for other files and standard input, "
            "else text.",
            names=("--as",),
        ),
    ] = None,
    within: Annotated[
        str,
        Parameter(help="How long to wait for the answer, or for each part of it: 500ms, 2m.", value="DURATION"),
    ] = "30s",
    priority: Annotated[
        int | None,
        Parameter(help="0 to 100: a higher one has a place before those that wait with a lower one. Default: 50."),
    ] = None,
    affinity: Annotated[
        str | None,
        Parameter(
            help="Calls with one text go to one member while it has a free place: a user, a session, a document.",
            value="TEXT",
        ),
    ] = None,
    header: Annotated[
        list[str] | None, Parameter(help="A header of the call, for the service's function.", value="NAME=VALUE")
    ] = None,
    each: Annotated[
        str | None,
        Parameter(
            help="Call with each line of this file, or - for standard input: a text, in a .jsonl a JSON value. A line "
            "of JSON is written for each.",
            value="FILE",
        ),
    ] = None,
    lines: Annotated[
        str | None, Parameter(help="With --each: only with these lines, the first of which is 0.", value="FROM-TO")
    ] = None,
    to: Annotated[
        Path | None, Parameter(help="With --each: write to this file. Default: standard output.", value="FILE")
    ] = None,
    at_once: Annotated[int, Parameter(help="With --each: most calls that wait at the same time.", value="NUMBER")] = 64,
    submit: Annotated[
        bool,
        Parameter(help="With --each: submit a job that does it, so that the calls wait on disk, and print its id."),
    ] = False,
    job: Annotated[str | None, Parameter(help="With --submit: the job's id.", value="ID")] = None,
    options: Options = DEFAULTS,
) -> int:
    """Call a service once, and print its answer; of an answer in parts each part as it comes.

    A call that nobody had room for is tried again until the time is over. One that may have run is never sent again.
    Text and bytes are printed as they are, and any other value as a line of JSON. --json has the headers, too.
    With --each, calls that nobody took are made again without end, and one that was cut off three times in all: it may
    run more than once. The line of an item has its number, and the value or the error; any error makes the exit code 1.
    """
    if each is not None:
        from moorage.cli.jobs.call_each import Each, call_each

        what = Each(
            service, each, data, lines, to, at_once, within, priority, affinity, tuple(header or ()), submit, job
        )
        return guarded(options, lambda: call_each(what, options))

    sent: Any = None
    headers: dict[str, str] = {}

    async def work(client: AsyncClient) -> int | None:
        from contextlib import aclosing

        from msgspec import to_builtins

        from moorage.client.errors import CallFailed, TimedOut, timed_out

        called = client.service(service, priority=priority, headers=headers, affinity=affinity)
        printed = _Printed()
        try:
            async with aclosing(called.answers(sent, timeout=within)) as parts:  # type: ignore[type-var]
                async for part in parts:
                    if options.json:
                        emit(_frame(service, part))
                    else:
                        printed.write(part.value)
        except TimedOut as error:
            raise timed_out(error.why, next_step=error.problem.next or "wait longer with --within") from None
        except CallFailed as error:
            if not options.json:
                raise
            emit({**to_builtins(error.problem), "status": error.status, "headers": error.headers})
            print_error(error.problem, error.fixes)
            return exit_code_of(error)
        printed.end()
        return None

    def act() -> int:
        nonlocal sent, headers
        headers = dict(pairs("header", header or []))
        sent = _sent(data, kind)  # before there is a connection, and a loop that a slow writer would hold up
        return with_client(options, lambda client: detachable(work(client), lambda: None), sends=True)

    return guarded(options, act)


def _sent(data: str, kind: Kind | None) -> Any:
    """Return what the words of the command line name, as the SDK sends it. Raises `Rejected`."""
    import msgspec

    from moorage.client.errors import rejected

    if data == STDIN:
        if sys.stdin.isatty():
            print_err("reading standard input; Ctrl-D ends it")
        raw, default = sys.stdin.buffer.read(BYTES_MAX + 1), "bytes"
    elif data.startswith(FILE_MARK):
        path = Path(data[1:])
        try:
            with path.open("rb") as file:
                raw, default = file.read(BYTES_MAX + 1), "json" if path.suffix == ".json" else "bytes"
        except OSError as error:
            raise rejected(
                "invalid-argument",
                f"{path} cannot be read: {error.strerror or error}",
                found=data,
                next="name a file behind the @; a text that begins with @ comes through standard input, with --as text",
            ) from None
    else:
        raw, default = data.encode(errors="surrogateescape"), "text"
    if len(raw) > BYTES_MAX:
        raise rejected(
            "too-large",
            f"the data of a call have more than {BYTES_MAX >> 20} MiB",
            found=data[:80],
            allowed="64 MiB, unless the service says more",
            next="put the data where the service can fetch them, and send their address",
        )
    try:
        if (kind or default) == "json":
            return msgspec.json.decode(raw)
        return raw.decode() if (kind or default) == "text" else raw
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise rejected(
            "invalid-argument",
            f"the data are not {kind or default}: {error}",
            found=data[:80],
            allowed=", ".join(KINDS),
            next="--as bytes sends them as they are",
        ) from None


def _frame(service: str, part: Answer) -> dict[str, Any]:
    """Return an answer, or a part of one, for --json. Bytes are in base64."""
    import base64

    found = _plain(part.value)
    value = {"base64": base64.b64encode(found).decode()} if isinstance(found, bytes) else {"value": found}
    return {"kind": "answer", "service": service, **value, "headers": part.headers}


def _plain(value: Any) -> Any:
    """Return the bytes of an array, and any other value as it is."""
    from moorage.schemas.arrays import encoded_array

    array = encoded_array(value)
    return value if array is None else array[0]


class _Printed:
    """What an answer has printed so far: text and bytes as they are, so that the parts of a text are one text."""

    def __init__(self) -> None:
        self._is_open = False  # a line without its end

    def write(self, part: Any) -> None:
        import msgspec

        part = _plain(part)
        if isinstance(part, str | bytes):
            raw = part.encode() if isinstance(part, str) else part
            self._is_open = isinstance(part, str) and not part.endswith("\n") if raw else self._is_open
        else:
            raw = (b"\n" if self._is_open else b"") + msgspec.json.encode(part) + b"\n"
            self._is_open = False
        sys.stdout.buffer.write(raw)
        sys.stdout.buffer.flush()

    def end(self) -> None:
        """End the last line of a text."""
        if self._is_open:
            sys.stdout.buffer.write(b"\n")
            sys.stdout.buffer.flush()
