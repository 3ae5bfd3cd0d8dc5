"""`moorage ls`: the jobs of a tenant, or, for operators, of all."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import paint, print_err, print_out
from moorage.cli.framework.fleets import are_several, show_each
from moorage.cli.framework.options import ROWS, RowOptions, with_client
from moorage.cli.framework.wrapping import folded
from moorage.cli.jobs.job_rows import counts_line, matching, metrics_table, whole_table
from moorage.cli.jobs.listing import Listing
from moorage.cli.jobs.selectors import ANY_JOB, EACH, HELD, Chosen
from moorage.client.answers import JobList
from moorage.client.durations import seconds
from moorage.client.errors import rejected
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
    running: Annotated[bool, Parameter(help="Only jobs that are on workers now: not what waits or has ended.")] = False,
    since: Annotated[
        str | None, Parameter(help="Only jobs that were submitted in this time, as 1h or 2d.", value="DURATION")
    ] = None,
    limit: Annotated[int, Parameter(help="Show at most this many jobs, 1..1000.")] = 100,
    history: Annotated[
        bool, Parameter(help="Go on with jobs that ended so long ago that only the history has them.")
    ] = False,
    watch: Annotated[
        bool, Parameter(help="Show again whenever a job changes; in a pipe, print one row for each change.")
    ] = False,
    metrics: Annotated[
        bool, Parameter(help="Show what each job has reported of itself last, as its loss, in a column each.")
    ] = False,
    options: RowOptions = ROWS,
) -> int:
    """List jobs: first what runs, then what waits, then what has ended, each newest first.

    With --json and --format the newest is first, whatever its state. An operator's key lists the jobs of all tenants
    with --tenant all.
    """
    if running and chosen.state:
        why = "--running stands for the states of jobs that are on workers"
        raise rejected("invalid-argument", why, found="--state", next="leave out --running, or --state")
    if metrics and watch:
        why = "--watch has the columns of ls"
        raise rejected("invalid-argument", why, found="--metrics", next="leave out --metrics, or --watch")
    since_ms = None if since is None else seconds(since) * 1000
    if since_ms is not None and watch:
        why = "--watch shows jobs as they change, whenever they were submitted"
        raise rejected("invalid-argument", why, found="--since", next="leave out --since, or --watch")
    states = list(HELD) if running else chosen.states
    asked: dict[str, Any] = {
        "states": states,
        "labels": chosen.labels,
        "ids": ",".join(each if EACH in each else each + EACH for each in ids),
        "worker": worker,
        "reason": reason,
        "limit": limit,
        "history": history,
    }

    def listing_of(client: AsyncClient) -> Listing:
        return Listing(client, {name: value for name, value in asked.items() if value or name in ("limit", "history")})

    if are_several(options) and not watch:
        return show_each(
            options,
            lambda client: listing_of(client).ask(runs_first=not options.json and options.format is None),
            lambda answer: answer.data["jobs"],
            lambda answer: whole_table(as_struct(JobList, answer.data).jobs),
        )

    async def work(client: AsyncClient) -> int | None:
        listing = listing_of(client)
        if watch:
            from moorage.cli.jobs.ls_watch import watch_jobs

            await watch_jobs(client, listing, options)
            return None
        answer = await listing.ask(runs_first=not options.json and options.format is None)
        if since_ms is not None:
            answer.data["jobs"] = [row for row in answer.data["jobs"] if row["age_ms"] < since_ms]
        if options.shown(answer, answer.data["jobs"]):
            return None
        listed = as_struct(JobList, answer.data)
        rows, counts = listed.jobs, listed.counts
        if not rows:
            print_err(listing.none() if since is None else f"no such job was submitted within {since}")
            return None
        print_out(metrics_table(rows, of_all=listing.of_all) if metrics else listing.table(rows))
        there = matching(counts, states)
        if len(rows) < there and not reason and since is None:
            more = f"more: --limit {min(there, LIMIT_MAX)}" if limit < LIMIT_MAX else "to see the others: --state STATE"
            print_err(f"{len(rows)} of {there:,}; {more}")
        if sys.stdout.isatty():
            print_err(paint(folded(counts_line(counts), sys.stderr), "dim", sys.stderr))
        return None

    return with_client(options, work)
