"""`moorage ls`: the jobs of a tenant, or, for operators, of all."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import paint, print_err, print_out
from moorage.cli.framework.options import ROWS, RowOptions, with_client
from moorage.cli.framework.wrapping import folded
from moorage.cli.jobs.job_rows import counts_line, matching
from moorage.cli.jobs.listing import Listing
from moorage.cli.jobs.selectors import ANY_JOB, EACH, Chosen
from moorage.client.answers import JobList
from moorage.client.reading import as_struct

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient

LIMIT_MAX: Final = 1000


def ls(
    *ids: Annotated[str, Parameter(help="Only jobs whose id matches one of these, as 'train-*-r1', or begins so.")],
    chosen: Chosen = ANY_JOB,
    worker: Annotated[
        str, Parameter(help="Only jobs that this worker has, and ended ones that ran there last.", value="WORKER")
    ] = "",
    reason: Annotated[
        str, Parameter(help="Only jobs that wait for this reason, as moorage explain names it.", value="REASON")
    ] = "",
    limit: Annotated[int, Parameter(help="Show at most this many jobs, 1..1000.")] = 100,
    history: Annotated[
        bool, Parameter(help="Go on with jobs that ended so long ago that only the history has them.")
    ] = False,
    watch: Annotated[
        bool, Parameter(help="Show again whenever a job changes; in a pipe, print one row for each change.")
    ] = False,
    options: RowOptions = ROWS,
) -> int:
    """List jobs: first what runs, then what waits, then what has ended, each newest first.

    With --json and --format the newest is first, whatever its state. An operator's key lists the jobs of all tenants
    with --tenant all.
    """
    asked: dict[str, Any] = {
        "states": chosen.states,
        "labels": chosen.labels,
        "ids": ",".join(each if EACH in each else each + EACH for each in ids),
        "worker": worker,
        "reason": reason,
        "limit": limit,
        "history": history,
    }

    async def work(client: AsyncClient) -> int | None:
        listing = Listing(
            client, {name: value for name, value in asked.items() if value or name in ("limit", "history")}
        )
        if watch:
            from moorage.cli.jobs.ls_watch import watch_jobs

            await watch_jobs(client, listing, options)
            return None
        answer = await listing.ask(runs_first=not options.json and options.format is None)
        if options.shown(answer, answer.data["jobs"]):
            return None
        listed = as_struct(JobList, answer.data)
        rows, counts = listed.jobs, listed.counts
        if not rows:
            print_err(listing.none())
            return None
        print_out(listing.table(rows))
        there = matching(counts, chosen.states)
        if len(rows) < there and not reason:
            more = f"more: --limit {min(there, LIMIT_MAX)}" if limit < LIMIT_MAX else "to see the others: --state STATE"
            print_err(f"{len(rows)} of {there:,}; {more}")
        if sys.stdout.isatty():
            print_err(paint(folded(counts_line(counts), sys.stderr), "dim", sys.stderr))
        return None

    return with_client(options, work)
