"""`moorage follow`: hands what becomes of jobs to a command or a web address, each thing at least once.

What was told is noted in a state file behind each hand-over, so another run goes on from there. If it was killed in
between, the last ones are told again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import print_err, print_out
from moorage.cli.framework.exit_codes import shell_code
from moorage.cli.framework.interrupts import end_in_order
from moorage.cli.framework.options import ROWS, RowOptions, with_client
from moorage.cli.jobs.selectors import ANY_JOB, LISTED, Chosen
from moorage.client.errors import ClientError, Rejected, rejected
from moorage.system.backoff import Backoff
from moorage.system.daemon_threads import in_thread

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.client.follow.telling import Reached, Told

#: seconds before a hand-over that failed is tried again; the time doubles with each try
PAUSE_S: Final = 1.0
PAUSE_S_MAX: Final = 60.0
#: longest time that a web address may take to answer
POST_S: Final = 30.0
#: takes one thing; returns why it was not taken, "" if it was
Hand = Callable[["Told", RowOptions], Awaitable[str]]


def follow(
    pattern: Annotated[
        str | None, Parameter(help="Only jobs whose id matches, as 'train-*'. By default all.", lists=LISTED)
    ] = None,
    /,
    *,
    chosen: Chosen = ANY_JOB,
    exec_: Annotated[
        str | None,
        Parameter(help="Run this in a shell for each; JSON is on its stdin.", names=("--exec",), value="CMD"),
    ] = None,
    post: Annotated[str | None, Parameter(help="Post each as JSON to this web address.", value="URL")] = None,
    state_file: Annotated[
        Path | None,
        Parameter(help="Where to note what was told: the next run with this file goes on from there.", value="FILE"),
    ] = None,
    options: RowOptions = ROWS,
) -> int:
    """Tell what becomes of jobs from now on, or from where the last run with this state file was, until Ctrl-C.

    Without --state it tells the end of each job. An end is told once for the whole job; of other states, such as
    RUNNING, each replica's way into it, and none of jobs with more than 1,024 replicas.

    Each is handed over at least once, and what becomes of one job in order: if CMD ends with an exit code, or URL does
    not answer with 2xx, the same is handed over again until it is taken, and the next one waits. After a kill, the last
    second is told again.

    CMD has MOORAGE_JOB, MOORAGE_STATE, MOORAGE_TEXT (a line for people), MOORAGE_TENANT, MOORAGE_CODE, MOORAGE_WHY,
    MOORAGE_WORKER, MOORAGE_REPLICA and MOORAGE_REV. Without CMD and URL, lines are printed.
    """

    async def work(client: AsyncClient) -> int | None:
        from moorage.client.follow.telling import Reached, Telling

        hand = _hand(exec_, post)
        fresh = Reached(client.tenant, pattern or "", chosen.labels, _states(chosen.states))
        reached, save = (fresh, _forget) if state_file is None else _kept(state_file, fresh)

        async def hand_over(told: Told) -> None:
            backoff = Backoff(PAUSE_S, PAUSE_S_MAX)
            while why := await hand(told, options):
                print_err(f"{told.job} {told.state} was not taken: {why}; again in {backoff.coming_s:g}s")
                await asyncio.sleep(backoff.next_s())

        def trouble(error: ClientError) -> None:
            print_err(f"no answer, asking again: {error.why}")

        def began() -> None:
            print_err(f"telling what becomes of the jobs of {client.tenant}; Ctrl-C ends it")

        end_in_order(lambda _: None)
        with contextlib.suppress(asyncio.CancelledError):  # Ctrl-C is how it ends
            await Telling(client, reached, hand_over, save).run(began, trouble)
        return None

    return with_client(options, work)


def _states(names: Sequence[str]) -> list[str]:
    """Return the states to tell, all ends if none is named. Raises `Rejected`."""
    from moorage.client.follow.telling import states_wanted
    from moorage.schemas.job import STATES

    unknown = next((name for name in names if name not in STATES), None)
    if unknown is not None:
        raise rejected(
            "invalid-argument", f"no job is ever {unknown}", found=unknown, allowed=", ".join(STATES),
            next="for example --state FAILED,TIMED_OUT",
        )  # fmt: skip
    return states_wanted(names)


# ----------------------------------------------------------------------------------------------------- hand over


def _hand(command: str | None, url: str | None) -> Hand:
    if command is not None and url is not None:
        raise rejected("invalid-argument", "--exec and --post exclude each other", next="run two, each with its file")
    if command is not None:
        return lambda told, _: _run(command, told)
    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise rejected("invalid-argument", f"no web address: {url}", found=url, next="--post https://…")
        # a thread for which Ctrl-C does not wait, unlike one of `asyncio.to_thread`: it takes up to `POST_S`
        return lambda told, _: in_thread("post", partial(_post, url, told))
    return _print


async def _print(news: Told, options: RowOptions) -> str:
    if not options.shown(news, [news]):
        print_out(news.text)
    return ""


def _variables(told: Told) -> dict[str, str]:
    fields = ("tenant", "job", "state", "text", "replica", "worker", "code", "why", "rev")
    values = {name: getattr(told, name) for name in fields}
    if told.code is not None:
        values["code"] = shell_code(told.code)
    return {f"MOORAGE_{name.upper()}": "" if value is None else str(value) for name, value in values.items()}


async def _run(command: str, told: Told) -> str:
    from moorage.schemas.codec import encode

    process = await asyncio.create_subprocess_shell(
        command, stdin=asyncio.subprocess.PIPE, env={**os.environ, **_variables(told)}
    )
    try:
        await process.communicate(encode(told) + b"\n")
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise
    return f"the command ended with {process.returncode}" if process.returncode else ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Makes each redirect an error: a POST that follows one becomes a GET without a body, and the event is lost."""

    def redirect_request(self, *_: Any) -> None:
        return None


@cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirect)


def _post(url: str, told: Told) -> str:
    from moorage.schemas.codec import encode

    headers = {"Content-Type": "application/json", "Idempotency-Key": f"{told.tenant}/{told.job}/{told.rev}"}
    asked = urllib.request.Request(url, encode(told), headers)
    try:
        with _opener().open(asked, timeout=POST_S):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            elsewhere = error.headers.get("Location")
            moved = f"; it redirects to {elsewhere}: name that address" if elsewhere else ""
            return f"{url} answered {error.code} {error.reason}{moved}"
    except (OSError, ValueError) as error:
        return f"{url}: {getattr(error, 'reason', error)}"


# ---------------------------------------------------------------------------------------------------- the state file


def _forget(_: Reached) -> None:
    """Note nothing: without a state file."""


def _kept(file: Path, fresh: Reached) -> tuple[Reached, Callable[[Reached], None]]:
    """Return how far the runs with this file have come, and what notes it there. Raises `Rejected`.

    The lock beside the file ends with this process.
    """
    import msgspec

    from moorage.schemas.unreadable import UNREADABLE
    from moorage.system.private_files import replace_private

    try:
        lock = os.open(file.with_name(f".{file.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _refused(file, "is in use by another run", "give this one a file of its own") from None
    except OSError as error:
        raise _refused(file, f"cannot be written: {error.strerror}", "name a file in a folder that exists") from None
    reached = fresh
    if file.exists():
        try:
            reached = msgspec.json.decode(file.read_bytes(), type=type(fresh))
        except (*UNREADABLE, OSError) as error:
            raise _refused(file, f"cannot be read: {error}", "move it away: then it begins from now on") from None
        for name in ("tenant", "ids", "labels", "states"):
            if getattr(reached, name) != getattr(fresh, name):
                found = getattr(reached, name)
                raise _refused(file, f"is of another choice of jobs: its {name} are {_words(found)}", "another file")

    def save(reached: Reached) -> None:
        replace_private(file, msgspec.json.encode(reached).decode())

    return reached, save


def _words(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{key}={each}" for key, each in value.items()]
    return ", ".join(value) if isinstance(value, list) else str(value)


def _refused(file: Path, why: str, fix: str) -> Rejected:
    return rejected("failed-precondition", f"the state file {file} {why}", found=str(file), next=fix)
