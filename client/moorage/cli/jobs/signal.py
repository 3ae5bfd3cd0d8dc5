"""`moorage signal`: a signal for the processes of a running job that handle it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import print_out
from moorage.cli.framework.options import ROWS, RowOptions, with_client
from moorage.cli.jobs.selectors import HELP_ONE, LISTED, one_id, replica_of
from moorage.client.login import who

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient


def signal(
    job: Annotated[str, Parameter(help=f"{HELP_ONE} /N behind it: replica N, else all.", value="JOB", lists=LISTED)],
    name: Annotated[str, Parameter(help="Such as USR1, USR2, HUP or INT, with or without SIG.", value="SIGNAL")],
    /,
    options: RowOptions = ROWS,
) -> int:
    """Send a signal to the processes of a running job that handle it; returns once its workers are asked.

    It goes to the topmost processes of the job that have a handler for it, and ends none that has not. moorage cancel
    ends a job.
    """

    async def work(client: AsyncClient) -> int | None:
        words, number = replica_of(job)
        replica = number if "/" in job else None
        handle = client.job(await one_id(client, words, "signal", acts=True))
        sent = await handle.signal(name, replica=replica, by=who())
        if not options.shown(sent, [{"replica": each, "worker": worker} for each, worker in sent.replicas]):
            for each, worker in sent.replicas:
                print_out(f"{sent.job}/{each}\t{worker} sends {sent.signal}")
        return None

    return with_client(options, work, sends=True)
