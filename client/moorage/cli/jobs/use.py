"""What running jobs use of their GPUs: `moorage use`, and the column USE of `moorage ls`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TextIO

import msgspec

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import print_err, print_out
from moorage.cli.framework.options import ROWS, RowOptions, with_client
from moorage.cli.framework.render import table
from moorage.cli.framework.screen import Screen
from moorage.cli.jobs.selectors import HELP_ONE, LISTED, one_id, replica_in
from moorage.client.errors import ClientError
from moorage.schemas.frames.use import UseLine, UsePage
from moorage.schemas.job import RUNNING, TERMINAL
from moorage.schemas.ranges import numbers_in
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.schemas.answers.jobs import Used

#: cells of a spark line, and the seconds that it shows: the longest time that a worker keeps
CELLS: Final = 28
LAST_S: Final = 600
_SPARKS: Final = "▁▂▃▄▅▆▇█"
_ASCII: Final = "_.-:=+*#"
#: replicas whose workers are asked
ROWS_MAX: Final = 64
#: the first is replica and GPU, as 0/3
_COLUMNS: Final = ("AT", "WORKER", "WATTS", "USE", "%", "MEMORY", "MIB", "OF")
_NUMBERS: Final = ("WATTS", "%", "MIB", "OF")
#: seconds between two looks with --watch: a worker reads its devices once a second
WATCH_S: Final = 2.0
#: errors that --watch outlasts: no replica runs, as between two attempts, or its worker is away
_PASSING: Final = ("failed-precondition", "worker-lost")


def use(
    job: Annotated[str, Parameter(help=HELP_ONE, lists=LISTED)],
    /,
    *,
    replica: Annotated[int | None, Parameter(help="Only this replica; by default the first 64 that run.")] = None,
    watch: Annotated[bool, Parameter(help="Draw it again every 2 seconds until the job has ended.")] = False,
    options: RowOptions = ROWS,
) -> int:
    """Show what a running job uses of its GPUs, now and in the last ten minutes.

    USE is the share of time in which a GPU computes, encodes or decodes, of the whole GPU for a job that has it alone,
    of the job's own processes for a share. MEMORY is what the job holds, of the GPU's memory. The numbers are the
    newest, and a line has ten minutes, its right end is now. AT is replica and GPU. Only the tenant of the job is told.
    """

    async def work(client: AsyncClient) -> int | None:
        import asyncio

        [word], number = replica_in([job], replica)
        name = await one_id(client, word, "use")
        screen = Screen(sys.stdout)
        while True:
            try:
                rows = await use_rows(client, name, None if number is None else int(number))
            except ClientError as error:
                if not watch or error.code not in _PASSING:
                    raise
                if screen.live and not options.json and options.format is None:
                    screen.draw([error.why])
            else:
                plain = [row.plain(name) for row in rows] if options.json or options.format else []
                if not options.shown({"kind": "use", "job": name, "rows": plain}, plain):
                    if screen.live and watch:
                        screen.draw(use_table(rows, sys.stdout).splitlines())
                    else:
                        print_out(use_table(rows, sys.stdout))
            if not watch:
                return None
            await asyncio.sleep(WATCH_S)
            shown = await client._wire.show(name)
            if shown.state in TERMINAL:
                print_err(f"{name} has ended: {shown.state}")
                return None

    return with_client(options, work)


class UseRow(NamedTuple):
    """A GPU of a running replica, and the answer that it stands in."""

    replica: int
    page: UsePage
    line: UseLine

    def plain(self, job: str) -> dict[str, Any]:
        """Return the row as `--json` has it."""
        page = self.page
        about = {"job": job, "replica": self.replica, "worker": page.worker, "span_s": page.span_s}
        return {**about, "simulated": page.simulated, **msgspec.to_builtins(self.line)}


async def use_rows(client: AsyncClient, job: str, replica: int | None, tenant: str | None = None) -> list[UseRow]:
    """Return a row for each GPU of each running replica, or of this one, with its use over `LAST_S` seconds.

    The job is the client's tenant's, or that of a `tenant` whose key it has.
    Raises what the question for a replica that does not run raises, if none runs.
    """
    import asyncio

    shown = await client._wire.show(job, tenant=tenant)
    running = [row.replica for row in shown.replica_states if row.state == RUNNING]
    # where none runs, the first is asked: replicas that are run again need not begin with 0
    asked = [replica] if replica is not None else running[:ROWS_MAX] or [next(numbers_in(shown.numbers), 0)]

    async def ask(one: int) -> list[UseRow]:
        arguments = {"job": job, "replica": one, "last_s": LAST_S, "points": CELLS}
        page = msgspec.convert((await client._wire.answer("use", arguments, tenant)).data, UsePage)
        return [UseRow(one, page, line) for line in page.devices]

    return [row for rows in await asyncio.gather(*map(ask, asked)) for row in rows]


def use_table(rows: Sequence[UseRow], stream: TextIO) -> str:
    """Return the rows as a table with spark lines; a sentence if no worker measures the job."""
    if not rows:
        return (
            "nothing is measured of this job so far: it has no GPU, its GPU cannot be read (a VM), or it has just begun"
        )
    return table(
        _COLUMNS,
        [_cells(row, stream) for row in rows],
        numbers=_NUMBERS,
        optional=("WORKER", "WATTS", "OF"),
        stream=stream,
    )


def _cells(row: UseRow, stream: TextIO) -> list[Any]:
    page, line = row.page, row.line
    full = line.memory_total_mib or max((each or 0 for each in line.memory_mib), default=0)
    return [
        f"{row.replica}/{line.index}",
        page.worker + (" sim" if page.simulated else ""),
        _newest(line.power_w),
        spark(line.percent, 100, stream),
        shared(_newest(line.percent), line.shared_by),
        spark(line.memory_mib, full, stream),
        _newest(line.memory_mib),
        line.memory_total_mib or None,
    ]


def spark(numbers: Sequence[int | None], full: int, stream: TextIO) -> str:
    """Return one character a number, from nothing to `full`; a blank where nothing was read."""
    signs = _SPARKS
    try:
        _SPARKS.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        signs = _ASCII
    top = len(signs) - 1
    return "".join(
        " " if number is None else signs[min(max(round(number / max(full, 1) * top), 0), top)] for number in numbers
    )


def use_cell(used: Used | None) -> str:
    """Return what a job of `ls` uses of its GPUs: `87%`, or from the least to the most used one, `0-97%`.

    `87%/2` is the use of a GPU by the 2 jobs that share it, if the driver does not tell them apart.
    """
    if used is None:
        return "-"
    least, most = used.percent_min, used.percent_max
    by = f"/{used.shared_by}" if used.shared_by else ""
    return f"{most}%{by}" if least == most else f"{least}-{most}%{by}"


def use_words(used: Used | None) -> str:
    """Return a job's use of its GPUs in words: `0-97% of 4 GPUs, 240844 MiB`; "" if none is measured."""
    return f"{use_cell(used)} of {many(used.devices, 'GPU')}, {used.memory_mib} MiB" if used is not None else ""


def shared(percent: int | None, by: int) -> int | str | None:
    """Return a percent, with how many jobs share the device if it is that of all of them."""
    return percent if percent is None or not by else f"{percent} shared by {by}"


def _newest(numbers: Sequence[int | None]) -> int | None:
    return next((number for number in reversed(numbers) if number is not None), None)
