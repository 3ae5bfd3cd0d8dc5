"""What the fleet lacks and what it has too much of, for whoever adds and removes hosts.

This walks the fleet once for each of the largest queue groups: for questions, not for each record.
"""

from __future__ import annotations

from typing import Final

from moorage.scheduler.answers.idle_hosts import IdleHosts
from moorage.scheduler.answers.view import View
from moorage.scheduler.answers.waiting import groups_looked_at, held_reason, reason_of
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.fleet.growing import Growing
from moorage.scheduler.core.ledger.state import Job
from moorage.schemas.answers.operators import Demand, DemandRow
from moorage.schemas.gpu import format_token
from moorage.schemas.reasons import REASONS

#: rows, and idle hosts, in one answer
ROWS_MAX: Final = 200


def demand(engine: Engine, idle: IdleHosts, mono_ms: int) -> Demand:
    """Return what waits, by tenant, shape and reason, with whether more hosts would help; and the idle hosts."""
    growing, view = Growing(engine.config.growing), View(engine)
    rows: dict[tuple[str, str, str], DemandRow] = {}
    counted = 0

    def add(job: Job, name: str, replicas: int) -> None:
        nonlocal counted
        counted += replicas
        shape, reason = engine.reader.shape_of(job), REASONS.get(name)
        helps = reason is not None and (reason.more_hosts or (reason.is_never and bool(growing)))
        if growing:
            helps = helps and growing.fits(shape)
        asked = engine.reader.request_of(job)
        token = asked.token if asked.groups else format_token(asked.effective_gpu)
        key, waits_ms = (job.tenant, token, name), max(0, engine.state.time_ms - job.may_start_ms)
        before = rows.get(key)
        rows[key] = DemandRow(
            tenant=job.tenant,
            models=list(shape.models),
            shape=token,
            together=max(shape.together, before.together if before else 1),
            replicas=replicas + (before.replicas if before else 0),
            gpus=replicas * shape.count + (before.gpus if before else 0),
            for_ms=max(waits_ms, before.for_ms if before else 0),
            reason=name,
            more_hosts_help=helps,
        )

    for job in engine.indexing.unqueued():
        if job.waits and (held := held_reason(engine, job)) is not None:
            add(job, held.name, job.waits)
    for replica, count in view.heads()[: groups_looked_at(engine)]:
        add(replica.job, reason_of(engine, replica.job, replica), count)
    found = sorted(rows.values(), key=lambda row: (not row.more_hosts_help, -row.gpus, -row.replicas, row.tenant))
    helped = [row for row in found if row.more_hosts_help]
    largest = max(helped, key=lambda row: row.gpus // max(1, row.replicas), default=None)
    return Demand(
        rows=found[:ROWS_MAX],
        gpus=sum(row.gpus for row in helped),
        largest=largest.shape if largest is not None else "",
        others=max(0, view.queued() - counted),
        idle=idle.rows(engine, mono_ms)[:ROWS_MAX],
    )
