"""What tenants are shown of their schedules."""

from __future__ import annotations

import msgspec

from moorage.scheduler.core.ledger.schedules import Schedule
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.durable.due_times import newest_due_ms, next_due_ms, upcoming_ms
from moorage.schemas import actors
from moorage.schemas.codec import decode_accepted
from moorage.schemas.schedules import ScheduleRow


def schedule_row(state: State, row: Schedule, *, with_request: bool = False) -> ScheduleRow:
    """Return a schedule as answers have it."""
    job = state.job(row.tenant, row.job) if row.job else None
    by, said = actors.split(row.by)
    return ScheduleRow(
        name=row.name,
        cron=row.cron,
        tz=row.tz,
        overlap="queue" if row.overlap == "queue" else "skip",
        paused=row.paused,
        since_ms=row.since_ms,
        by=by,
        said=said,
        runs=row.runs,
        skipped=row.skipped,
        why=row.why,
        job=row.job,
        state=job.state if job is not None else "",
        last_ms=row.last_ms,
        due_ms=_due_ms(row),
        next_ms=0 if row.paused else row.next_ms or upcoming_ms(row, max(state.time_ms, row.since_ms)),
        request=msgspec.to_builtins(decode_accepted(row.body)) if with_request else None,
    )


def _due_ms(row: Schedule) -> int:
    """Return when the newest run was due, in ms since 1970; 0 if that is not known, or if somebody asked for it.

    No earlier run says when a schedule's first one was due, so that is counted from when the schedule was added.
    """
    due_ms = row.due_ms
    if not due_ms and row.next_ms and row.runs + row.skipped == 1:
        due_ms = next_due_ms(row, row.since_ms)
    return newest_due_ms(row, due_ms, min(row.last_ms, row.next_ms - 1)) if due_ms else 0


def schedules_of(state: State, tenant: str) -> list[ScheduleRow]:
    """Return a tenant's schedules by name, without their requests."""
    rows = state.schedules.get(tenant, {})
    return [schedule_row(state, rows[name]) for name in sorted(rows)]
