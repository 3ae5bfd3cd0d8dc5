"""What a job waits for before it is queued: the jobs that have to end first, the chain behind them, or a time."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.ledger.state import TIME, Job
from moorage.schemas import reasons
from moorage.schemas.answers.jobs import Awaited, Explained
from moorage.schemas.job import WHENS
from moorage.schemas.units import many

#: links of a chain that one answer names
CHAIN_MAX: Final = 16
#: how a job that waits says which end of another one counts
_WHICH: Final = {"succeeded": "", "any": ", whatever its end", "failed": ", if it does not succeed"}


def waits_for_others(job: Job) -> bool:
    """Return whether a job is in no queue yet, because it waits for the end of others, or for a time."""
    return bool(job.awaits) and job.live > 0


def awaited(engine: Engine, job: Job) -> list[Awaited]:
    """Return the jobs that have to end before this one is queued, with the end that counts and their states."""
    jobs = engine.state.jobs
    return [Awaited(job=jobs[num].name, when=WHENS[which], state=jobs[num].state) for num, which in job.awaits if num]


def not_before(job: Job) -> int:
    """Return the ledger ms before which a job is not queued; 0 for none."""
    return dict(job.awaits).get(TIME, 0) if job.live else 0


def chain_of(engine: Engine, job: Job) -> list[Awaited]:
    """Return what a job waits for first, what that one waits for first, and so on, at most `CHAIN_MAX` of them."""
    chain: list[Awaited] = []
    link: Job | None = job
    while link is not None and waits_for_others(link) and len(chain) < CHAIN_MAX:
        found = awaited(engine, link)
        chain += found[:1]
        link = engine.state.job(job.tenant, found[0].job) if found else None
    return chain


def why_not_queued(engine: Engine, job: Job) -> Explained:
    """Return why a job `waits_for_others`."""
    chain, found, from_ms = chain_of(engine, job), awaited(engine, job), not_before(job)
    named = [f"{each.job} ({each.state}{_WHICH[each.when]})" for each in chain]
    because = f"it waits for {', which waits for '.join(named)}"
    if len(chain) == CHAIN_MAX:
        because += ", and so on"
    if len(found) > 1:
        because += f"; and for {many(len(found) - 1, 'more job')}"
    if not found:
        because = f"it may start from {_utc(from_ms)} on"
    elif from_ms:
        because += f"; and may start from {_utc(from_ms)} on"
    reason = reasons.AFTER if found else reasons.NOT_BEFORE
    return Explained(
        job=job.name,
        tenant=job.tenant,
        state=job.state,
        reason=reason.name,
        means=reason.means,
        because=because,
        after=found,
        chain=chain,
        not_before_ms=from_ms,
    )


def _utc(ms: int) -> str:
    return datetime.fromtimestamp(ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
