"""Writes down by when a job that waits was told to start, so that the promise can be scored by its first start."""

from __future__ import annotations

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import Promising
from moorage.scheduler.core.ledger.acts import Promised


def promise(draft: Draft, event: Promising) -> None:
    """Promise a start to a job that has none yet and still waits for its first."""
    job = draft.state.jobs.get(event.job)
    if job is None or job.over or job.started or job.attempts or job.promised is not None:
        return
    draft.tell(Promised(job.num, event.by_ms, event.p50_ms, event.p90_ms, event.runs))
