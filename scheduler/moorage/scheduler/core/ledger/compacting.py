"""The fold of `acts.Compact`, which is compiled: each job passes through it once."""

from __future__ import annotations

from typing import Any

from moorage.scheduler.core.finished import job_key
from moorage.scheduler.core.ledger.folding import FoldError, Folding
from moorage.scheduler.core.state import AT_MS
from moorage.schemas.job import STATES


def compact(folding: Folding, flat: list[Any], kept: list[int]) -> None:
    """Let the oldest jobs that are over leave memory for a row each of the table of finished jobs."""
    state = folding.state
    ended, jobs, tenants = state.ended, state.jobs, state.tenants
    digest, before = state.digest, state.finished.row
    rows: list[tuple[bytes, bytes, int, int, int]] = []
    pairs = iter(flat)
    for num, request, where in zip(pairs, pairs, kept, strict=True):
        if not ended or ended.popleft() != num:
            raise FoldError(f"record {folding.seq}: job {num} is not the oldest ended one")
        job = jobs.pop(num)
        tenant, name, story, replicas = job.tenant, job.name, job.story, job.replicas
        if job.extra:
            state.extra -= job.extra
            state.extra_ended -= job.extra
        del tenants[tenant].jobs[name]
        final = replicas[0].state if len(replicas) == 1 else STATES.index(job.state)
        ended_ms = story[-1][AT_MS] if story else folding.time
        rows.append((job.key or job_key(tenant, name), request, ended_ms, final, where))
        digest -= job.row
        for replica in replicas:
            digest -= replica.row
            del replica.job  # they point at each other: so they go at once, and leave the collector nothing
    state.finished.add_all(rows)
    state.digest = (digest + state.finished.row - before) & 0xFFFFFFFFFFFFFFFF
