"""`moorage change`: what of a job may change in place, while it waits or runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import print_err, print_out
from moorage.cli.framework.options import ROWS, RowOptions, guarded
from moorage.cli.framework.render import age
from moorage.cli.jobs.job_flags import JobFlags, fields_of
from moorage.cli.jobs.selectors import HELP, LISTED, LIVE, ids_of, with_named
from moorage.client.errors import rejected
from moorage.client.login import who

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.schemas.operate import Changed


def change(
    *jobs: Annotated[str, Parameter(help=HELP, lists=LISTED)],
    max_running: Annotated[int | None, Parameter(help="At most so many replicas run at once.")] = None,
    priority: Annotated[
        int | None, Parameter(help="0..100, higher first; at most what an operator has set, if one has.")
    ] = None,
    time_limit: Annotated[
        str | None, Parameter(help="Longest time that an attempt may run which starts from now on.", value="DURATION")
    ] = None,
    reason: Annotated[str, Parameter(help="Why, as text that the job's state changes show.")] = "",
    options: RowOptions = ROWS,
) -> int:
    """Change jobs in place, while they wait or run; returns once it is in the ledger.

    What runs beyond a lower --max-running runs on. For anything else, submit in the job's place: submit --instead-of.
    """

    def act() -> int:
        if max_running is None and priority is None and time_limit is None:
            raise rejected(
                "invalid-argument", "nothing to change", next="name --max-running, --priority or --time-limit; "
                "anything else: moorage submit --instead-of JOB",
            )  # fmt: skip
        limit_s = None if time_limit is None else fields_of(JobFlags(time_limit=time_limit))["limit"]

        async def work(client: AsyncClient) -> int | None:
            for name in await ids_of(client, jobs, acts=True, states=LIVE):
                job = client.job(name)
                now = await job.change(
                    max_running=max_running, priority=priority, limit=limit_s, reason=reason, by=who()
                )
                if options.shown(now, [now]):
                    continue
                print_out(f"{name}\t{'now' if now.changed else 'unchanged'}: {_bounds(now)}; the job is {now.state}")
                if limit_s is not None and now.members:
                    has = "attempt keeps what it has" if now.members == 1 else "attempts keep what they have"
                    print_err(f"the limit holds from the next attempt on: {now.members:,} {has}")
            return None

        return with_named(options, jobs, work, sends=True)

    return guarded(options, act)


def _bounds(now: Changed) -> str:
    said = [] if now.max_running is None else [f"at most {now.max_running} at once"]
    said.append(f"priority {now.priority}")
    return ", ".join(said + ([] if now.timeout_s is None else [f"time limit {age(round(now.timeout_s * 1000))}"]))
