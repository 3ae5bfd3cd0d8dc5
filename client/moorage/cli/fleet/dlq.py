"""`moorage dlq`: the dead letters, queued requests that were refused; for operators."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import fail, print_err, print_out
from moorage.cli.framework.exit_codes import EXIT_FAILED
from moorage.cli.framework.files import read_within
from moorage.cli.framework.options import RowOptions, with_client
from moorage.cli.framework.render import facts, table, utc
from moorage.client.errors import NotFound, Rejected, rejected
from moorage.schemas.answers.letters import LetterDone
from moorage.schemas.errors import Problem
from moorage.schemas.frames import Accepted
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient


@dataclass(frozen=True)
class LetterOptions(RowOptions):
    """The common options; without --tenant, the verb is about the dead letters of all tenants."""

    tenant: Annotated[
        str | None,
        Parameter(help="Only this tenant's, in list and with the word all. Default: all tenants.", value="NAME"),
    ] = None


LETTERS: Final = LetterOptions()
WHICH: Final = "Numbers of dlq list, several with commas, or all (with --tenant, all of one tenant)."
WHY: Final = "For the scheduler's log."
ALL: Final = "all"
MESSAGE_CHARS_MAX: Final = 60
BODY_BYTES_MAX: Final = 64 * 1024


def list_letters(*, options: LetterOptions = LETTERS) -> int:
    """List the queued requests that could not be read or were refused, oldest first.

    The sender of a queued request gets no answer. So refused requests are kept here for 30 days: at most 100,000 in
    all, and 10,000 of one tenant.
    """

    async def work(client: AsyncClient) -> int | None:
        rows = [row async for row in client.admin.dead_letters(tenant=options.tenant)]
        if options.shown({"kind": "answer", "verb": "dlq", "data": {"letters": rows}}, rows):
            return None
        if not rows:
            print_err("no dead letters" + (f" of tenant {options.tenant}" if options.tenant else ""))
            return None
        cells = [[row.sequence, row.tenant, row.verb, row.job or "-", row.code, _short(row.message)] for row in rows]
        print_out(table(["LETTER", "TENANT", "VERB", "JOB", "CODE", "WHY"], cells, numbers=("LETTER",)))
        return None

    return with_client(options, work)


def show(
    letter: Annotated[int, Parameter(help="Its number in dlq list.")], /, *, options: LetterOptions = LETTERS
) -> int:
    """Show a dead letter: where it was published, why it was refused, and the message as it came."""

    async def work(client: AsyncClient) -> int | None:
        found = await client.admin.dead_letter(letter)
        if options.shown({"kind": "answer", "verb": "dlq", "data": found}, [found]):
            return None
        problem = found.problem or Problem(found.code, found.message)
        told = [
            ("letter", found.sequence),
            ("subject", found.subject),
            ("queued", f"{utc(found.time_ms)}, number {found.queued}"),
            ("refused", f"{problem.code}: {problem.message}"),
            *((name, getattr(problem, name)) for name in ("field", "found", "allowed") if getattr(problem, name)),
            *((("failed", found.evidence),) if found.evidence else ()),
            ("message", found.body + ("  (no text; --json has its bytes)" if found.data is not None else "")),
        ]
        print_out(facts(told))
        print_err(
            f"to submit a corrected request: moorage dlq resend {found.sequence} -f FILE; to delete this "
            f"request: moorage dlq drop {found.sequence}"
        )
        return None

    return with_client(options, work)


def resend(
    *letters: Annotated[str, Parameter(help=WHICH)],
    file: Annotated[
        Path | None, Parameter(names=("-f", "--file"), help="A request to send instead of the refused one; - is stdin.")
    ] = None,
    why: Annotated[str, Parameter(help=WHY)] = "",
    options: LetterOptions = LETTERS,
) -> int:
    """Submit dead letters again, each for its own tenant and under its own job id; what is accepted leaves the list.

    If the file of --file names a job id, that one is taken; --file takes exactly one letter. What is refused again
    stays in the list. The exit code is then 1, or with a single letter that of its error.
    """
    body: dict[str, Any] | None = None
    if file is not None:
        try:
            body = _body(file)
        except ValueError as error:
            return fail(_rejected(f"{file} is not a request: {error}", "moorage dlq resend --help"), json=options.json)

    async def work(client: AsyncClient) -> int | None:
        chosen = await _chosen(client, letters, options)
        if body is not None and len(chosen) != 1:
            raise _rejected(
                f"a file replaces one request, but {len(chosen)} dead letters are named", "name one dead letter"
            )
        return await _each(chosen, lambda each: client.admin.resend(each, body=body, why=why), options, _resent)

    return with_client(options, work, sends=True)


def drop(
    *letters: Annotated[str, Parameter(help=WHICH)],
    why: Annotated[str, Parameter(help=WHY)] = "",
    options: LetterOptions = LETTERS,
) -> int:
    """Delete dead letters for good; the scheduler's log keeps who did it and why."""

    async def work(client: AsyncClient) -> int | None:
        chosen = await _chosen(client, letters, options)
        return await _each(
            chosen, lambda each: client.admin.drop(each, why=why), options, lambda _: "dropped", "not found"
        )

    return with_client(options, work, sends=True)


# --------------------------------------------------------------------------------------------------------------- inside


async def _chosen(client: AsyncClient, words: Sequence[str], options: RowOptions) -> list[int]:
    """Return the numbers of the dead letters that the flags name. Raises `Rejected`."""
    parts = [part for word in words for part in word.split(",") if part]
    if not parts:
        raise _rejected("no refused request is named", "moorage dlq list has their numbers; all means each")
    if parts == [ALL]:
        return [row.sequence async for row in client.admin.dead_letters(tenant=options.tenant)]
    for part in parts:
        if not (part.isascii() and part.isdigit() and int(part)):
            raise _rejected(
                f"{part!r} is not the number of a refused request", "moorage dlq list has their numbers; all means each"
            )
    return list(dict.fromkeys(map(int, parts)))


async def _each(
    chosen: Sequence[int],
    act: Callable[[int], Awaitable[LetterDone]],
    options: RowOptions,
    told: Callable[[LetterDone], str],
    failing: str = "refused again or no longer there",
) -> int:
    failed = 0
    for letter in chosen:
        try:
            done = await act(letter)
        except (Rejected, NotFound) as error:
            if len(chosen) == 1:
                raise
            failed += 1
            message = f"dead letter {letter}: {error.problem.message}"
            fail(type(error)(msgspec.structs.replace(error.problem, message=message)), json=options.json)
            continue
        if not options.shown({"kind": "answer", "verb": "dlq", "data": done}, [done]):
            print_out(f"{letter}\t{told(done)}")
    if len(chosen) != 1 and not (options.json or options.format):
        print_err(many(len(chosen), "dead letter") + (f", {failed} {failing}" if failed else ""))
    return EXIT_FAILED if failed else 0


def _resent(done: LetterDone) -> str:
    if done.verb == "cancel":
        return f"the cancel was sent again for tenant {done.tenant}"
    accepted = msgspec.convert(done.answer, Accepted)
    return f"job {accepted.job} of tenant {done.tenant} is {accepted.state}"


def _short(text: str) -> str:
    line = text.splitlines()[0] if text else ""
    return line if len(line) <= MESSAGE_CHARS_MAX else line[: MESSAGE_CHARS_MAX - 1] + "…"


def _body(file: Path) -> dict[str, Any]:
    """Return a file's content. Raises ValueError unless it is a JSON object of at most `BODY_BYTES_MAX`."""
    try:
        raw = read_within(file, BODY_BYTES_MAX)
    except OSError as error:
        raise ValueError(error.strerror) from None
    if len(raw) > BODY_BYTES_MAX:
        raise ValueError(f"it has more than {BODY_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _rejected(message: str, next: str) -> Rejected:
    return rejected("invalid-argument", message, next=next)
