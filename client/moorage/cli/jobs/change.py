"""`moorage change`: what of a job may change in place, while it waits or runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import print_err, print_out
from moorage.cli.framework.options import ROWS, RowOptions, guarded
from moorage.cli.framework.render import age
from moorage.cli.jobs.flag_values import replicas as copies_of
from moorage.cli.jobs.job_flags import JobFlags, fields_of
from moorage.cli.jobs.selectors import HELP, LISTED, LIVE, ids_of, with_named
from moorage.client.errors import rejected
from moorage.client.login import who
from moorage.client.new_limit import is_difference

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.schemas.operate import Changed


def change(
    *jobs: Annotated[str, Parameter(help=HELP, lists=LISTED)],
    replicas: Annotated[
        str | None,
        Parameter(
            help="So many replicas: more begin; of too many, the last ones that wait are cancelled, then running ones. "
            "Of a service also MIN-MAX, as many as its calls need. Not of a gang, nor where each has an item.",
            value="NUMBER",
        ),
    ] = None,
    max_running: Annotated[int | None, Parameter(help="At most so many replicas run at once.")] = None,
    priority: Annotated[
        int | None, Parameter(help="0..100, higher first; at most what an operator has set, if one has.")
    ] = None,
    time_limit: Annotated[
        str | None,
        Parameter(
            help="Longest time that an attempt may run which starts from now on. +2h or -30m: so much more or less "
            "for what runs, too.",
            value="DURATION",
        ),
    ] = None,
    running: Annotated[
        bool, Parameter(help="--time-limit holds for what runs, too, from each attempt's start on.")
    ] = False,
    hold: Annotated[bool, Parameter(help="Keep what waits of it from starting; what runs goes on.")] = False,
    release: Annotated[bool, Parameter(help="Undo --hold, here or of submit.")] = False,
    reason: Annotated[str, Parameter(help="Why, as text that the job's state changes show.")] = "",
    options: RowOptions = ROWS,
) -> int:
    """Change jobs in place, while they wait or run; returns once it is in the ledger.

    What runs beyond a lower --max-running runs on. For anything else, submit in the job's place: submit --instead-of.
    """

    def act() -> int:
        if hold and release:
            raise rejected("invalid-argument", "--hold and --release cannot be used together", next="take one of them")
        if all(each is None for each in (replicas, max_running, priority, time_limit)) and not hold and not release:
            raise rejected(
                "invalid-argument", "nothing to change",
                next="name --replicas, --max-running, --priority, --time-limit, --hold or --release; "
                "anything else: moorage submit --instead-of JOB",
            )  # fmt: skip
        if running and time_limit is None:
            raise rejected("invalid-argument", "--running is about --time-limit", next="give both, or neither")
        copies = None if replicas is None else copies_of(replicas)
        limit = time_limit
        if limit is not None and not is_difference(limit):
            limit = fields_of(JobFlags(time_limit=limit))["limit"]

        async def work(client: AsyncClient) -> int | None:
            for name in await ids_of(client, jobs, acts=True, states=LIVE):
                job = client.job(name)
                now = await job.change(
                    replicas=copies,
                    max_running=max_running,
                    priority=priority,
                    limit=limit,
                    running=running,
                    hold=True if hold else False if release else None,
                    reason=reason,
                    by=who(),
                )
                if options.shown(now, [now]):
                    continue
                bounds = _bounds(now) if replicas is None else f"{_copies(now)}, {_bounds(now)}"
                print_out(f"{name}\t{'now' if now.changed else 'unchanged'}: {bounds}; the job is {now.state}")
                if limit is not None and now.members and not now.relimited:
                    has = "attempt keeps what it has" if now.members == 1 else "attempts keep what they have"
                    print_err(f"the limit holds from the next attempt on: {now.members:,} {has}")
            return None

        return with_named(options, jobs, work, sends=True)

    return guarded(options, act)


def _copies(now: Changed) -> str:
    copies = now.replicas
    if copies is None or isinstance(copies, int):
        return "1 replica" if copies == 1 else f"{copies or 0:,} replicas"
    return f"{copies.min} to {copies.max} replicas"


def _bounds(now: Changed) -> str:
    said = [] if now.max_running is None else [f"at most {now.max_running} at once"]
    said.append(f"priority {now.priority}" + ", on hold" * now.held)
    return ", ".join(said + ([] if now.timeout_s is None else [f"time limit {age(round(now.timeout_s * 1000))}"]))
