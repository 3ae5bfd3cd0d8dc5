"""One worker in full, as the live screen opens it: its state, its GPUs, and whose jobs it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moorage.cli.fleet.workers import trouble_lines, worker_of
from moorage.cli.framework.render import facts
from moorage.cli.jobs.job_rows import jobs_table
from moorage.client.answers import JobList
from moorage.client.reading import as_struct
from moorage.schemas.job import TERMINAL
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient


async def worker_text(client: AsyncClient, worker: str) -> str:
    """Return the worker as text. Raises `NotFound`, `NotPermitted`, `NoScheduler`."""
    _, row = await worker_of(client, worker)
    asked = {"worker": worker, "history": False, "limit": 1000}
    listed = as_struct(JobList, (await client._wire.operate("ls", asked)).data)
    live = [each for each in listed.jobs if each.state not in TERMINAL]
    about = facts(
        [
            ("worker", row.worker),
            ("state", row.state),
            ("simulated", "yes" if row.simulated else ""),
            ("gpus", f"{row.cells}  {', '.join(row.models)}"),
            *(("wrong", line) for line in trouble_lines([row])),
        ]
    )
    tenants = sorted({each.tenant for each in live})
    whose = f"{many(len(live), 'job')} of {', '.join(tenants)}" if live else "no job is on it"
    table = jobs_table(live, of_all=True) if live else ""
    return "\n\n".join(filter(None, (about, whose, table)))
