"""`moorage wait` and `moorage events`: until jobs are over, and what happens meanwhile."""

from __future__ import annotations

import gc
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

from moorage.cli.arguments import Parameter
from moorage.cli.console import EXIT_FAILED, say, tell
from moorage.cli.jobs import why_of
from moorage.cli.options import ROWS, RowOptions, detachable, with_client
from moorage.cli.render import many, state
from moorage.cli.selectors import HELP, HELP_ONE, LISTED, ids_of, one_id

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.client.job import Result
    from moorage.schemas.frames import Event

#: a wait without a limit of its own
FOR_DEFAULT: Final = "365d"


def exit_code_of_result(result: Result) -> int:
    """The job's own code; 128 + the signal that ended it, as a shell has it; 1 where nothing ran; 0 for SUCCEEDED."""
    if result.state == "SUCCEEDED":
        return 0
    if result.code is None or result.code == 0:
        return EXIT_FAILED
    return result.code if result.code > 0 else 128 - result.code


def wait(
    *jobs: Annotated[str, Parameter(help=HELP, lists=LISTED)],
    at_most: Annotated[
        str, Parameter(help="Give up after so long, with exit code 6; the jobs go on.", value="DURATION")
    ] = FOR_DEFAULT,
    options: RowOptions = ROWS,
) -> int:
    """Wait until jobs are over (without a word: the last one); ends with the code of the first that did not succeed.

    Prints a line a job as they end, or with --json what `show` answers then. Ctrl-C ends the waiting, and no job.
    """

    async def work(client: AsyncClient) -> int | None:
        names = await ids_of(client, jobs or ["last"])
        if not names:
            say(f"no job of tenant {client.tenant} to wait for: all are over")
        handles = [client.job(name) for name in names]
        results: dict[str, Result] = {}
        async for job in client.as_completed(handles, at_most):
            result = results[job.id] = _known(job.known_result)
            if options.json or options.format:
                answer = await client.answer("show", {"job": job.id})
                options.shown(answer, [answer.data])
            else:
                tell(
                    "\t".join(
                        (job.id, result.state, "-" if result.code is None else str(result.code), result.why or "-")
                    )
                )
        if len(names) > 1 and not (options.json or options.format):
            failed = sum(result.state != "SUCCEEDED" for result in results.values())
            say(f"{many(len(names), 'job')} over, {failed} not SUCCEEDED")
        return next((code for name in names if (code := exit_code_of_result(results[name]))), 0)

    def detach() -> None:
        if sys.stderr.isatty():
            say("")  # below the terminal's ^C
        say("no longer waiting; the jobs go on")

    gc.enable()
    return with_client(options, lambda client: detachable(work(client), detach))


def _known(result: Result | None) -> Result:
    assert result is not None  # `as_completed` yields only jobs that are over
    return result


def events(
    job: Annotated[str | None, Parameter(help=HELP_ONE + " Without one: all jobs of the tenant.", lists=LISTED)] = None,
    /,
    *,
    options: RowOptions = ROWS,
) -> int:
    """Transitions as they happen: of one job from its first to its last, or of the whole tenant from now on.

    Those of a job that is over come from its history, as long as that is kept (a week by default).

    A line a transition, or with --json a frame a line. Those of a tenant go on until Ctrl-C.
    """

    async def work(client: AsyncClient) -> int | None:
        if job is not None:
            async for event in client.job(await one_id(client, job, "events")).events():
                _tell(event, options)
            return None
        async for event in client.events():
            _tell(event, options)
        return None

    gc.enable()
    return with_client(options, work)


def _tell(event: Event, options: RowOptions) -> None:
    if options.shown(event, [event]):
        return
    for row in rows_of(event):
        tell("\t".join(map(str, row)))


def rows_of(event: Event) -> list[list[Any]]:
    """A row a transition: time, job, replica, attempt, state, worker, code, GPUs, why."""
    rows: list[list[Any]] = []
    for change in event.changes:
        when = datetime.fromtimestamp(change.time_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
        worker = change.worker + (" sim" if change.worker and event.simulated else "")
        rows.append(
            [
                when,
                event.job,
                change.replica if change.replica >= 0 else "-",
                change.attempt,
                state(change.state, sys.stdout),
                worker or "-",
                "-" if change.code is None else change.code,
                len(change.gpus) or "-",
                why_of(change.state, change.why, change.by, change.said),
            ]
        )
    return rows
