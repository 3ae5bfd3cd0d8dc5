"""`moorage wait` and `moorage events`: wait until jobs are over, and print what happens."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import is_live, print_err, print_out
from moorage.cli.framework.exit_codes import exit_code_of_result, shell_code
from moorage.cli.framework.interrupts import detachable
from moorage.cli.framework.options import ROWS, RowOptions, with_client
from moorage.cli.framework.render import Rows, state, utc_ms, waits
from moorage.cli.jobs.acceptance import begin_below_ctrl_c
from moorage.cli.jobs.progress import Progress
from moorage.cli.jobs.replica_words import Eta, shown_words
from moorage.cli.jobs.selectors import ANY_JOB, HELP, HELP_ONE, LISTED, Chosen, ids_of, one_id, with_named
from moorage.cli.jobs.show import at, why_of
from moorage.cli.jobs.unkept import print_unkept
from moorage.client.errors import ClientError, rejected
from moorage.schemas.job import REJECTED, STATES
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.client.follow.job_history import Result
    from moorage.schemas.frames import Event

E = TypeVar("E")

#: of the columns of rows that come one by one, so that the first ones stand below each other: a state's longest name,
#: and a host of a simulated fleet
WIDTHS: Final = {
    "STATE": max(map(len, STATES)),
    "WORKER": len("sim-0000 sim"),
    "UTC": len("21:48:05.123"),
}
JOB_WIDTH: Final = 14
#: a wait without a limit of its own
FOR_DEFAULT: Final = "365d"


#: jobs that are asked for patterns of --keep that matched nothing: each is a question more
UNKEPT_MAX: Final = 16
#: how often the line on the terminal says how long it is by now, and how many of those until it asks again
TICK_S: Final = 1.0
ASK_AGAIN_TICKS: Final = 5


def wait(
    *jobs: Annotated[str, Parameter(help=HELP, lists=LISTED)],
    at_most: Annotated[
        str,
        Parameter(
            help="Stop waiting for the jobs after this time, with exit code 6; the jobs are not changed. --timeout is "
            "for each answer alone.",
            value="DURATION",
        ),
    ] = FOR_DEFAULT,
    chosen: Chosen = ANY_JOB,
    options: RowOptions = ROWS,
) -> int:
    """Wait until jobs have ended; exits with 0 if all succeeded, else with the code of one that did not.

    Of several that did not succeed, this is the first in the order in which they were named; `all` and `train-*` name
    the newest job first.

    Prints a line for each job as it ends, or with --json the answer of `show`. Ctrl-C ends the wait, not
    the jobs.
    """

    async def work(client: AsyncClient) -> int | None:
        names = await ids_of(client, jobs, chosen)
        if not names:
            print_err(f"tenant {client.tenant} has no job to wait for: all its jobs have ended")
        handles = [client.job(name) for name in names]
        results: dict[str, Result] = {}
        rows = Rows(("JOB", "STATE", "CODE", "WHY"), numbers=("CODE",), widths=WIDTHS)
        async with Meanwhile(client, names) as meanwhile:
            async for job in client.as_completed(handles, at_most):
                result = results[job.job] = _known(job.known_result)
                meanwhile.over(job.job)
                if options.json or options.format:
                    answer = await client._wire.answer("show", {"job": job.job})
                    options.shown(answer, [answer.data])
                else:
                    code = None if result.code is None else shell_code(result.code)
                    print_out(rows.line((job.job, result.state, code, await _why_of(client, result))))
                    if result.state == "SUCCEEDED" and len(results) <= UNKEPT_MAX:
                        await print_unkept(client, job.job)
        if len(names) > 1 and not (options.json or options.format):
            failed = sum(result.state != "SUCCEEDED" for result in results.values())
            print_err(f"{many(len(names), 'job')} ended, {failed} of them not SUCCEEDED")
        return next((code for name in names if (code := exit_code_of_result(results[name]))), 0)

    def detach() -> None:
        begin_below_ctrl_c()
        print_err("this command no longer waits; the jobs go on")

    gc.enable()
    return with_named(options, jobs, lambda client: detachable(work(client), detach), chosen)


def _known(result: Result | None) -> Result:
    assert result is not None  # `as_completed` yields only jobs that are over
    return result


async def _why_of(client: AsyncClient, result: Result) -> str:
    """Return why a job ended; of one of several replicas that did not succeed, how many of them did not, too."""
    from moorage.client.replicas import failed_words

    several = not result.changes or any(change.replica > 0 for change in result.changes)
    if result.state == "SUCCEEDED" or not several:
        return result.why
    try:
        shown = await client._wire.show(result.job)
    except ClientError:
        return result.why  # the end itself is known
    return ": ".join(filter(None, (failed_words(shown.replicas), shown.why or result.why)))


class Meanwhile:
    """Shows one line on a terminal about the jobs that are waited for; shows nothing elsewhere."""

    def __init__(self, client: AsyncClient, jobs: Sequence[str]) -> None:
        self._client = client
        self._left = dict.fromkeys(jobs)
        self._of = len(self._left)
        self._progress = Progress("", quiet=not is_live(sys.stderr))
        self._telling: asyncio.Task[None] | None = None
        self._etas: dict[str, Eta] = {}

    async def __aenter__(self) -> Meanwhile:
        if is_live(sys.stderr):
            self._telling = asyncio.create_task(self._print_event())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.wait({self._telling})
        self._progress.erase()

    def over(self, job: str) -> None:
        """Count this job as over, and make room for its row."""
        self._left.pop(job, None)
        self._progress.erase()

    async def _print_event(self) -> None:
        at, words = 0, ""
        while True:
            await asyncio.sleep(TICK_S)
            if at % ASK_AGAIN_TICKS == 0:
                words = await self._words()
            if not self._left:
                return
            self._progress.show_line(words)
            at += 1

    async def _words(self) -> str:
        first = next(iter(self._left), "")
        try:
            data = await self._client.job(first).explain()
        except ClientError:
            return f"waiting for {first}"  # what is wrong is told by who waits for it, if it lasts
        why = waits(data) if data.reason else ""
        if data.replicas is not None:
            eta = self._etas.setdefault(first, Eta()).words(data.replicas.states)
            why = "  ".join(filter(None, (shown_words(data.replicas), eta, why)))
        over = f"{self._of - len(self._left)} of {self._of} jobs ended" if self._of > 1 else ""
        return "  ".join(filter(None, (over, first, state(data.state, sys.stderr), why)))


def events(
    job: Annotated[str | None, Parameter(help=HELP_ONE + " By default all jobs of the tenant.", lists=LISTED)] = None,
    /,
    *,
    fleet: Annotated[
        bool,
        Parameter(help="What happens to the fleet, for operators: joins, losses, drains, GPUs out, takeovers."),
    ] = False,
    since: Annotated[
        str | None,
        Parameter(help="With --fleet: what happened so far back, as 12h, and no more.", value="DURATION"),
    ] = None,
    options: RowOptions = ROWS,
) -> int:
    """Print state changes as they happen: of one job from its first to its last, or of the whole tenant from now on.

    The state changes of an ended job come from its history, which is kept for a week by default.

    Prints a line for each change, or with --json a frame per line. For a tenant it runs until Ctrl-C, and says where
    the connection was lost meanwhile.
    """

    async def work(client: AsyncClient) -> int | None:
        if since is not None and not fleet:
            raise rejected(
                "invalid-argument", "--since is about the fleet's past", next="moorage events --fleet --since 12h"
            )
        if fleet:
            if job is not None:
                raise rejected("invalid-argument", "--fleet is about no job", next="leave out the job, or --fleet")
            if since is not None:
                await _print_past(client, since, options)
                return None
            print_err("telling what happens to the fleet from now on; Ctrl-C ends it")
            async for told in _with_gaps(client, client.fleet.events()):
                if not options.shown(told, [told]):
                    print_out(f"{utc_ms(told.time_ms)}\t{told.words}")
            return None
        if job is not None:
            name = await one_id(client, job, "events")
            rows = _rows(len(name))
            async for event in client.job(name).events():
                _print_event(event, options, rows)
            return None
        rows = _rows(JOB_WIDTH)
        print_err(f"telling the state changes of tenant {client.tenant} from now on; Ctrl-C ends it")
        async for event in _with_gaps(client, client.events()):
            _print_event(event, options, rows)
        return None

    gc.enable()
    return with_client(options, work)


async def _print_past(client: AsyncClient, since: str, options: RowOptions) -> None:
    import msgspec

    from moorage.client.durations import seconds
    from moorage.schemas.answers.operators import PastAnswer

    answer = await client._wire.operate("acts", {"events": True, "since_s": seconds(since)})
    told = msgspec.convert(answer.data, PastAnswer)
    if options.shown(answer, told.events):
        return
    for event in told.events:
        print_out(f"{utc_ms(event.time_ms)}\t{event.words}")
    if not told.events:
        print_err(f"nothing happened to the fleet since {utc_ms(told.from_ms)}")
    if told.left_out:
        print_err(f"{told.left_out} older ones are not shown: give a shorter --since")
    for from_ms, until_ms in told.gaps:
        print_err(f"not known: from {utc_ms(from_ms)} to {utc_ms(until_ms)}: a restore, or what moorage doctor says")


async def _with_gaps(client: AsyncClient, events: AsyncIterator[E]) -> AsyncIterator[E]:
    """Yield the events, and say where some may be missing: those of a job are asked for again, and all others not."""
    reconnects = client._wire.link.reconnects
    async for event in events:
        if client._wire.link.reconnects != reconnects:
            reconnects = client._wire.link.reconnects
            print_err("the connection was lost meanwhile: some of what happened before may be missing (moorage ls)")
        yield event


#: what a narrow terminal leaves out of them, the first one first
_OPTIONAL: Final = ("GPUS", "TRY", "REPLICA")
COLUMNS: Final = ("UTC", "JOB", "REPLICA", "TRY", "STATE", "WORKER", "CODE", "GPUS", "WHY")


def _rows(job_width: int) -> Rows:
    return Rows(
        COLUMNS,
        numbers=("CODE",),
        optional=_OPTIONAL,
        shortened=("JOB",),
        widths={**WIDTHS, "JOB": job_width},
    )


def _print_event(event: Event, options: RowOptions, rows: Rows) -> None:
    if options.shown(event, [event]):
        return
    for row in rows_of(event, whole=not sys.stdout.isatty()):
        print_out(rows.line(row))


def rows_of(event: Event, *, whole: bool) -> list[list[Any]]:
    """Return a row for each transition of the event, with the cells of `COLUMNS`. A `whole` time has the date, too.

    A request of the durable queue that was refused made no job, so it has no transitions, and no time of one.
    """
    rows: list[list[Any]] = []
    if event.state == REJECTED and not event.rev:
        rows.append(["-", event.job, "-", "-", event.state, "-", "-", "-", event.why])
    for change in event.changes:
        when = utc_ms(change.time_ms)
        worker = change.worker + (" sim" if change.worker and event.simulated else "")
        rows.append(
            [
                when if whole else when[11:-1],
                event.job,
                change.replica if change.replica >= 0 else "-",
                change.attempt,
                change.state,
                worker or "-",
                "-" if change.code is None else shell_code(change.code),
                len(change.gpus) or "-",
                why_of(change.state, change.why or at(change.address), change.by, change.said),
            ]
        )
    return rows
