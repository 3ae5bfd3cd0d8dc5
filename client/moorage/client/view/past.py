"""One moment of the past as a `View`, from the history of jobs alone: leases, the queue, and how jobs had ended.

What GPUs did and how they were then, nobody has kept: use and health are not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moorage.client.view.model import counted
from moorage.client.view.view import View, Waiting, WorkerCells
from moorage.schemas.answers.fleet import WorkerInfo
from moorage.schemas.answers.jobs import JobRow
from moorage.schemas.cells import FREE, LEASED, SHARERS_MAX
from moorage.schemas.job import QUEUED


def past_view(at_ms: int, rows: Sequence[JobRow], ended: Mapping[str, int], workers: Sequence[WorkerInfo] = ()) -> View:
    """Return the view of a moment, from the rows of `ls` with `at_ms`.

    `workers` are those that the fleet has now, of `fleet`: they say how many GPUs a worker has. Of others only the GPUs
    that were leased are known.
    """
    leases: dict[str, dict[int, int]] = {}
    for row in rows:
        for worker, slots in row.leases:
            held = leases.setdefault(worker, {})
            for slot in slots:
                held[slot] = held.get(slot, 0) + 1
    now = {row.worker: row for row in workers}
    shown = []
    for name in sorted(leases.keys() | now.keys()):
        held, known = leases.get(name, {}), now.get(name)
        size = max(known.gpus if known is not None else 0, max(held, default=-1) + 1)
        cells = "".join(_sign(held.get(slot, 0)) for slot in range(size))
        models = " + ".join(known.models) if known is not None else ""
        simulated = known is not None and known.simulated
        shown.append(WorkerCells(name, "up", simulated, models, cells, [None] * size))
    simulations = [worker.simulated for worker in shown]
    waits = [row for row in rows if row.state == QUEUED]
    by_tenant: dict[str, list[JobRow]] = {}
    for row in waits:
        by_tenant.setdefault(row.tenant, []).append(row)
    waiting = []
    for tenant, found in by_tenant.items():
        oldest = max(found, key=lambda row: row.age_ms)
        waiting.append(Waiting(tenant, len(found), oldest.job, oldest.gpu, oldest.age_ms, because="not kept"))
    return View(
        at_ms=at_ms,
        leader="",
        epoch=0,
        heard_ms_ago=0,
        simulated="all" if simulations and all(simulations) else "some" if any(simulations) else "",
        queued=len(waits),
        running=sum(len(row.leases) for row in rows),
        counts=counted(shown),
        use=None,
        troubles=[],
        fits=[],
        waiting=sorted(waiting, key=lambda row: -row.oldest_ms),
        waits=len(waits),
        idle=[],
        workers=shown,
        jobs=sorted(rows, key=lambda row: (row.state != QUEUED, -row.age_ms)),
        live=len(rows),
        unseen=[],
        past=True,
        ended=dict(ended),
    )


def _sign(jobs: int) -> str:
    return FREE if not jobs else LEASED if jobs == 1 else str(min(jobs, SHARERS_MAX))
