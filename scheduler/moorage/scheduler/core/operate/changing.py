"""Changes that a tenant makes to its own job in place: its number of replicas, how many of them run at once, its
priority, its time limit."""

from __future__ import annotations

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import ChangeOrder
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.finished import job_key
from moorage.scheduler.core.ledger.state import Job, StandingOrder, State
from moorage.scheduler.core.lifecycle.admission import no_job
from moorage.scheduler.core.lifecycle.beyond import beyond_time
from moorage.scheduler.core.operate.copies import Copies
from moorage.scheduler.core.operate.relimiting import Relimiting
from moorage.scheduler.core.request_reader import RequestReader
from moorage.scheduler.core.schedule.indexing import Indexing
from moorage.schemas.errors import Problem, problem
from moorage.schemas.frames import Answer
from moorage.schemas.job import PRIORITY_MAX, Request
from moorage.schemas.names import word_of
from moorage.schemas.operate import Changed


class Changing:
    """Carries out changes, on the state and this record's draft."""

    def __init__(
        self,
        state: State,
        indexing: Indexing,
        reader: RequestReader,
        copies: Copies,
        relimiting: Relimiting,
    ) -> None:
        self._state = state
        self._indexing = indexing
        self._reader = reader
        self._copies = copies
        self._relimiting = relimiting

    def change(self, draft: Draft, event: ChangeOrder) -> Answer | Problem:
        """Record what changes, and let the queue follow at once. Return the answer, or why that cannot be."""
        asked = event.asked
        job = self._state.job(event.tenant, asked.job)
        if job is None or job.over or not job.live:
            return self._gone(event, job)
        if (fixed := self._reader.why_fixed(job)) is not None:
            return fixed
        own = self._reader.requests.read(job.body)[1].request
        most, limit_ms = job.bounds[-1][1:] if job.bounds else (-1, -1)
        had_copies = own if job.wants is None else own.with_copies(*job.wants[:2])
        before = had_copies.with_bounds(most, limit_ms)
        if asked.max_running is not None:
            most = asked.max_running
        if asked.timeout_s is not None:
            limit_ms = round(asked.timeout_s * 1000)
        wanted = before.with_bounds(most, limit_ms)
        if asked.replicas is not None:
            found = self._copies.changed(draft, job, wanted, asked.replicas)
            if isinstance(found, Problem):
                return found
            wanted = found
        if wanted.trouble is not None and before.trouble is None:
            field, message, found_word, allowed = wanted.trouble
            return problem(
                "invalid-argument", message, field=f"$.{field}", found=found_word, allowed=allowed, job=job.name
            )
        if asked.running and (refused := self._relimiting.refusal(draft, job, limit_ms, by_tenant=True)) is not None:
            return refused
        if asked.timeout_s is not None and not asked.running:
            tenant = self._state.read_tenant(event.tenant)
            if (too_long := beyond_time(tenant, asked.timeout_s, job.name)) is not None:
                return too_long
        ceiling = _ceiling(job)
        if asked.priority is not None and asked.priority > ceiling:
            return _too_high(job, asked.priority, ceiling)
        had = job.priority if job.priority >= 0 else own.priority
        priority = had if asked.priority is None else asked.priority
        if asked.hold is False and job.hold is not None and not is_own(job.hold):
            return _not_its_own(job)
        is_other = wanted.replicas != before.replicas
        if asked.running:
            is_other |= self._relimiting.record(draft, job, limit_ms, event.by, asked.reason)
            before = before.with_bounds(-1, limit_ms)
        said = _words(before, wanted, had, priority)
        if said:
            self._record(draft, job, event, (before, wanted), (had, priority), said)
        if wanted.replicas != before.replicas:
            self._copies.record(draft, job, wanted, event)
        is_other |= self._held(draft, job, event)
        attempts = sum(replica.attempt is not None for replica in job.rows.values())
        answer = Changed(
            job=job.name,
            changed=bool(said) or is_other,
            state=job.state,
            priority=priority,
            max_running=wanted.max_running,
            timeout_s=wanted.workload.timeout_s,
            members=attempts,
            replicas=wanted.replicas,
            held=job.hold is not None,
            relimited=asked.running,
        )
        return Answer("change", 0, answer)

    def _held(self, draft: Draft, job: Job, event: ChangeOrder) -> bool:
        """Hold or release a job as asked; return whether that changes it."""
        on = event.asked.hold
        if on is None or on == (job.hold is not None):
            return False
        draft.add((acts.Hold if on else acts.Unhold)(job.tenant, job.num, event.by, event.asked.reason))
        self._indexing.look(job)
        return True

    def _record(
        self,
        draft: Draft,
        job: Job,
        event: ChangeOrder,
        requests: tuple[Request, Request],
        priorities: tuple[int, int],
        said: list[str],
    ) -> None:
        before, wanted = requests
        had, priority = priorities
        limit_s = wanted.workload.timeout_s
        most = -1 if wanted.max_running == before.max_running else wanted.max_running or -1
        limit_ms = -1 if limit_s is None or limit_s == before.workload.timeout_s else round(limit_s * 1000)
        kind = self._reader.kind_of(job)
        ceiling = _ceiling(job) if priority != had else -1
        why = ", ".join(said)
        why = f"{why}: {event.asked.reason}" if event.asked.reason else why
        draft.add(acts.Change(job.num, most, priority if priority != had else -1, limit_ms, ceiling, event.by, why))
        if most >= 0 and job.size > 1:
            self._indexing.let_place(job)
        if priority != had:
            self._indexing.regroup(job, kind)

    def _gone(self, event: ChangeOrder, job: Job | None) -> Problem:
        name = event.asked.job
        if job is None and self._state.finished.find(job_key(event.tenant, name)) is None:
            return no_job(event.tenant, name)
        service = None if job is None else self._reader.request_of(job).service
        if service is None:
            fix = f"moorage again {word_of(name)} runs it once more, as a new job"
        else:  # its name may be that of the service, which another job has by now
            fix = f"moorage services {service.name} names the job that has its service now"
        return problem(
            "failed-precondition",
            f"job {name} is over: there is nothing of it to change",
            found=job.state if job is not None else "over",
            job=name,
            next=fix,
        )


def is_own(hold: StandingOrder) -> bool:
    """Return whether a job's own tenant holds it, not an operator or the scheduler."""
    return hold.actor.startswith("tenant:")


def _not_its_own(job: Job) -> Problem:
    return problem(
        "failed-precondition",
        f"job {job.name} is held by an operator or the scheduler, and its tenant may not release it",
        field="$.hold",
        found="false",
        job=job.name,
        next="ask an operator: moorage admin release",
    )


def _ceiling(job: Job) -> int:
    """Return the highest priority that a job's tenant may set: that which an operator has set, if one has."""
    return job.ceiling if job.ceiling >= 0 else job.priority if job.priority >= 0 else PRIORITY_MAX


def _words(before: Request, wanted: Request, had: int, priority: int) -> list[str]:
    """Return what changes, for the job's history; [] if nothing does."""
    said = [f"max_running {wanted.max_running}"] if wanted.max_running != before.max_running else []
    said += [f"priority {priority}"] if priority != had else []
    limit_s = wanted.workload.timeout_s
    return said + ([f"timeout_s {limit_s:g}"] if limit_s is not None and limit_s != before.workload.timeout_s else [])


def _too_high(job: Job, priority: int, ceiling: int) -> Problem:
    return problem(
        "failed-precondition",
        f"an operator has set the priority of job {job.name} to {ceiling}, and its tenant may not go above that",
        field="$.priority",
        found=priority,
        allowed=f"0..{ceiling}",
        job=job.name,
        next="ask an operator: moorage admin priority",
    )
