"""Operators' orders on jobs and tenants: hold, release, requeue, place, priority, resize, time-limit, freeze,
resume, limit, share.

What an order changes is in the record, and the queue follows at once, so that the record that answers a hold places
nothing held. Orders are carried out after the backoffs that are due have put their replicas back into the queue: then
every waiting replica is in the queue, or has a timer in the future.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec
from msgspec import UnsetType

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import Order
from moorage.scheduler.core.ledger import acts, records
from moorage.scheduler.core.ledger.finished import job_key
from moorage.scheduler.core.ledger.holding import spent_at
from moorage.scheduler.core.ledger.limits import ON_SPENT, PERIODS, ByModel, Limits
from moorage.scheduler.core.ledger.limits import Counter as CounterRow
from moorage.scheduler.core.ledger.records import Mode
from moorage.scheduler.core.ledger.state import (
    FREEZE,
    RESUME,
    RUNS,
    Attempt,
    Job,
    StandingOrder,
    State,
    Tenant,
)
from moorage.scheduler.core.lifecycle.admission import lacks, no_job
from moorage.scheduler.core.lifecycle.freezing import can_freeze
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.scheduler.core.operate.placing_by_name import PlacingByName
from moorage.scheduler.core.operate.relimiting import Relimiting
from moorage.scheduler.core.operate.resizing import Resizing
from moorage.scheduler.core.request_reader import RequestReader
from moorage.scheduler.core.schedule.indexing import Indexing
from moorage.schemas import actors
from moorage.schemas.errors import Problem, problem
from moorage.schemas.names import word_of
from moorage.schemas.operate import (
    AdmitAct,
    CordonAct,
    Counter,
    CounterAct,
    Done,
    DrainAct,
    FeatureLevelAct,
    ForgetAct,
    FreezeAct,
    Hold,
    HoldAct,
    Limit,
    LimitAct,
    PlaceAct,
    PriorityAct,
    ReleaseAct,
    RequeueAct,
    ResizeAct,
    ResumeAct,
    Share,
    ShareAct,
    TimeLimitAct,
    UncordonAct,
)
from moorage.schemas.ranges import parse_ranges


def _given(value: int | UnsetType | None, before: int) -> int:
    """Return the value that an order asks for: None means none, written 0; an omitted field stays as it was."""
    return before if isinstance(value, UnsetType) else value or 0


_HOUR_MS: Final = 3_600_000


class Orders:
    """Carries out operators' orders, on the state and this record's draft."""

    def __init__(
        self,
        state: State,
        indexing: Indexing,
        lifecycle: Lifecycle,
        reader: RequestReader,
        resizing: Resizing,
        relimiting: Relimiting,
        by_name: PlacingByName,
    ) -> None:
        self.state = state
        self.indexing = indexing
        self.lifecycle = lifecycle
        self.reader = reader
        self.resizing = resizing
        self._relimiting = relimiting
        self._by_name = by_name

    def act(self, draft: Draft, event: Order) -> Done | Problem:
        """Carry out an order that is not about a worker, in the draft. Return the answer or a problem.

        The answer's `changed` is false if there was nothing to change.
        """
        asked = event.act
        by = event.by
        if isinstance(asked, FeatureLevelAct):
            return self._raise_level(draft, asked, by, event.announced)
        if isinstance(asked, LimitAct):
            return self._limit(draft, asked, by)
        if isinstance(asked, CounterAct):
            return self._counter(draft, asked, by)
        if isinstance(asked, ShareAct):
            return self._share(draft, asked, by)
        if isinstance(asked, HoldAct | ReleaseAct) and asked.job is None:
            return self._hold_tenant(draft, asked, by)
        of_workers = CordonAct | UncordonAct | DrainAct | ForgetAct | AdmitAct
        assert not isinstance(asked, of_workers), "those are for `WorkerOrders`"
        assert asked.tenant is not None
        assert asked.job is not None
        job = self.state.job(asked.tenant, asked.job)
        if job is None or job.over or job.live == 0:
            return self._no_job(event.verb, asked.tenant, asked.job, job)
        if isinstance(asked, RequeueAct):
            return self._requeue(draft, job, asked, by)
        if isinstance(asked, PlaceAct):
            return self._by_name.place(draft, job, asked, by)
        if isinstance(asked, FreezeAct | ResumeAct):
            return self._freeze(draft, job, asked, by)
        if isinstance(asked, PriorityAct):
            return self._prioritize(draft, job, asked, by)
        if isinstance(asked, ResizeAct):
            return self._resize(draft, job, asked, by)
        if isinstance(asked, TimeLimitAct):
            return self._relimit(draft, job, asked, by)
        return self._hold_job(draft, job, asked, by)

    def _no_job(self, verb: str, tenant: str, name: str, job: Job | None) -> Problem:
        if job is None and self.state.finished.find(job_key(tenant, name)) is None:
            return no_job(tenant, name)
        again = (
            f"moorage again {word_of(name)} runs it once more, as a new job"
            if verb == "requeue"
            else "moorage show says how it ended"
        )
        return problem(
            "failed-precondition",
            f"job {name} is over: there is nothing of it to {verb}",
            found=job.state if job is not None else "over",
            job=name,
            next=again,
        )

    # ------------------------------------------------------------------------------------------------- hold, release

    def _hold_tenant(self, draft: Draft, asked: HoldAct | ReleaseAct, by: str) -> Done:
        on, name = isinstance(asked, HoldAct), asked.tenant or ""
        changed = (self.state.read_tenant(name).hold is not None) != on
        if changed:
            draft.add((acts.Hold if on else acts.Unhold)(name, 0, by, asked.why))
        now = as_hold(self.state.read_tenant(name).hold)
        return self._done_of("hold" if on else "release", changed, name, hold=now)

    def _hold_job(self, draft: Draft, job: Job, asked: HoldAct | ReleaseAct, by: str) -> Done:
        on = isinstance(asked, HoldAct)
        changed = (job.hold is not None) != on
        if changed:
            draft.add((acts.Hold if on else acts.Unhold)(job.tenant, job.num, by, asked.why))
            self.indexing.look(job)
        return self._done("hold" if on else "release", job, changed, hold=as_hold(job.hold))

    # ------------------------------------------------------------------------------------- requeue, priority, limit

    def _requeue(self, draft: Draft, job: Job, asked: RequeueAct, by: str) -> Done | Problem:
        state = job.state
        only = None if asked.replicas is None else parse_ranges(asked.replicas)
        if only is not None and (lacking := lacks(job, only)) is not None:
            return lacking
        if self.reader.shape_of(job).is_gang:
            only = None
        with draft.by(by):
            did = self.lifecycle.start_over(draft, job, f"requeued: {asked.why}" if asked.why else "requeued", only)
        return Done("requeue", did > 0, tenant=job.tenant, job=job.name, state=state, members=did)

    def _freeze(self, draft: Draft, job: Job, asked: FreezeAct | ResumeAct, by: str) -> Done | Problem:
        """Ask a job's workers to freeze or resume it; the answer says only that they are asked."""
        on, verb = isinstance(asked, FreezeAct), "freeze" if isinstance(asked, FreezeAct) else "resume"
        running = [
            replica.attempt for replica in job.rows.values() if replica.attempt is not None and replica.state in RUNS
        ]
        changed = any(attempt.freeze != on or attempt.wakes for attempt in running)
        if on and (why := self._why_not_frozen(job, running)) is not None:
            return why
        if changed:
            draft.add(acts.Freeze(job.num, -1, FREEZE if on else RESUME, by, asked.why))
        return Done(verb, changed, tenant=job.tenant, job=job.name, state=job.state, members=len(running))

    def _why_not_frozen(self, job: Job, running: list[Attempt]) -> Problem | None:
        shape, request = self.reader.shape_of(job), self.reader.request_of(job)
        found, allowed = "", "a job that runs on GPUs, each replica by itself"
        if shape.is_gang or job.gang:
            found = "it is a gang, whose ranks share memory and wait for each other"
        elif not running:
            found, allowed = f"it is {job.state}", "a job of which something runs"
        elif any(not attempt.home for attempt in running):
            found = "it has no GPUs"
        elif any(attempt.mode != Mode.EXCLUSIVE for attempt in running) and not request.sleeps:
            found, allowed = "it shares its GPUs, so freezing it would free none", "a job that has its GPUs alone"
        else:
            for worker in (attempt.worker for attempt in running):
                if not can_freeze(worker, request):
                    found = f"the driver {request.workload.driver} of worker {worker.id} freezes no jobs"
                    allowed = "the driver process with NVIDIA's driver 570 or newer"
        if not found:
            return None
        return problem(
            "failed-precondition",
            f"job {job.name} cannot be frozen: {found}",
            found=found,
            allowed=allowed,
            job=job.name,
            next="to take it off its GPUs, hold it and requeue it: it starts again from the beginning",
        )

    def _prioritize(self, draft: Draft, job: Job, asked: PriorityAct, by: str) -> Done:
        before = self.reader.kind_of(job)
        # one that equals the request's is recorded, too: the job's tenant may not go above it
        changed = (job.priority, job.ceiling) != (asked.priority, -1)
        if changed:
            draft.add(acts.Priority(job.num, asked.priority, by, asked.why))
            self.indexing.regroup(job, before)
        return self._done("priority", job, changed, priority=asked.priority)

    def _resize(self, draft: Draft, job: Job, asked: ResizeAct, by: str) -> Done | Problem:
        before, part = self.reader.kind_of(job), job.part
        resized = self.resizing.resize(draft, job, asked, by)
        if isinstance(resized, Problem):
            return resized
        changed = job.part != part
        if changed:
            self.indexing.regroup(job, before)
        return self._done("resize", job, changed, resized=resized)

    def _relimit(self, draft: Draft, job: Job, asked: TimeLimitAct, by: str) -> Done | Problem:
        limit_ms = round(asked.timeout_s * 1000)
        if (fixed := self.reader.why_fixed(job)) is not None:
            return fixed
        if (refused := self._relimiting.refusal(draft, job, limit_ms, by_tenant=False)) is not None:
            return refused
        changed = self._relimiting.record(draft, job, limit_ms, by, asked.why)
        return self._done("time-limit", job, changed, timeout_s=asked.timeout_s)

    def _limit(self, draft: Draft, asked: LimitAct, by: str) -> Done | Problem:
        name, tenant = asked.tenant, self.state.read_tenant(asked.tenant)
        gpus, jobs = _given(asked.gpus, tenant.gpus_max), _given(asked.jobs, tenant.jobs_max)
        before = tenant.limits or Limits()
        limits = limits_asked(asked, before)
        if limits != before and not draft.may(acts.Limits):
            return problem(
                "failed-precondition",
                f"the ledger is at feature level {self.state.level}, and limits of a tenant beside GPUs and jobs can be"
                f" set from level {acts.Limits.LEVEL} on",
                next="raise it once all schedulers can: moorage admin feature-level",
            )
        changed = (gpus, jobs) != (tenant.gpus_max, tenant.jobs_max)
        if changed:
            draft.add(acts.Limit(name, gpus, jobs, by, asked.why))
        if limits != before:
            draft.add(acts.Limits(name, limits.numbers, by, asked.why, limits.gpus_of, limits.weights))
            if limits.gpus_of != before.gpus_of:
                self.indexing.fleet.opens()
        changed |= limits != before
        return self._done_of("limit", changed, name, limit=limit_of(self.state, self.state.read_tenant(name)))

    def _counter(self, draft: Draft, asked: CounterAct, by: str) -> Done | Problem:
        most, of_tenant = asked.most or 0, int(asked.per == "tenant")
        before = self.state.counters.get(asked.name)
        changed = (most, of_tenant) != before[:2] if before is not None else bool(most)
        if changed and not draft.may(acts.Counter):
            return problem(
                "failed-precondition",
                f"the ledger is at feature level {self.state.level}, and counters can be set from level"
                f" {acts.Counter.LEVEL} on",
                next="raise it once all schedulers can: moorage admin feature-level",
            )
        if changed:
            draft.add(acts.Counter(asked.name, most, of_tenant, by, asked.why))
        now = self.state.counters.get(asked.name)
        return Done("counter", changed, counter=None if now is None else _counter(self.state, asked.name, now))

    def _raise_level(self, draft: Draft, asked: FeatureLevelAct, by: str, announced: dict[str, int]) -> Done | Problem:
        """Raise the feature level if enough schedulers know it; `announced` includes the leader's own release."""
        now, wanted = self.state.level, asked.level
        if wanted == now:
            return Done("feature-level", False, level=now)
        if wanted < now or wanted > records.FORMAT:
            return problem(
                "failed-precondition",
                f"the feature level is {now}, and this scheduler's release knows levels up to {records.FORMAT}",
                field="$.level",
                found=wanted,
                allowed=f"{now}..{records.FORMAT}",
                next="a level is never lowered" if wanted < now else "upgrade the schedulers first",
            )
        behind = sorted(name for name, level in announced.items() if level < wanted)
        if behind or len(announced) < asked.schedulers:
            why = f"{', '.join(behind)} cannot" if behind else f"only {', '.join(sorted(announced)) or 'none'} can"
            return problem(
                "failed-precondition",
                f"not every scheduler can follow a ledger of feature level {wanted}: of those heard {why}",
                field="$.level",
                found=f"{len(announced) - len(behind)} schedulers",
                allowed=f"at least {asked.schedulers}, and none that cannot",
                next="upgrade or stop the others; moorage admin feature-level lists the schedulers heard from",
            )
        draft.add(acts.Level(wanted, by, asked.why))
        return Done("feature-level", True, level=wanted)

    # --------------------------------------------------------------------------------------------------- fair share

    def _share(self, draft: Draft, asked: ShareAct, by: str) -> Done | Problem:
        name, tenant = asked.tenant, self.state.read_tenant(asked.tenant)
        weight, gpus = _given(asked.weight, tenant.weight), _given(asked.gpus, tenant.guaranteed)
        changed = (weight, gpus) != (tenant.weight, tenant.guaranteed)
        if changed:
            draft.add(acts.Share(name, weight, gpus, by, asked.why))
        return self._done_of("share", changed, name, share=as_share(weight, gpus, self.state.read_tenant(name).share))

    # ------------------------------------------------------------------------------------------------------- inside

    def _done_of(self, verb: str, changed: bool, tenant: str, **now: object) -> Done:
        return Done(verb, changed, tenant=tenant, gpus=self.state.read_tenant(tenant).gpus, **now)  # type: ignore[arg-type]

    def _done(self, verb: str, job: Job, changed: bool, **now: object) -> Done:
        attempts = sum(replica.attempt is not None for replica in job.rows.values())
        return Done(verb, changed, tenant=job.tenant, job=job.name, state=job.state, members=attempts, **now)  # type: ignore[arg-type]


def as_hold(order: StandingOrder | None) -> Hold | None:
    """Return a hold in the form of answers, None for none."""
    return Hold(order.since_ms, *actors.split(order.actor), order.why) if order is not None else None


def counters_of(state: State) -> list[Counter]:
    """Return the counters in the form of answers."""
    return [_counter(state, name, each) for name, each in sorted(state.counters.items())]


def _counter(state: State, name: str, row: CounterRow) -> Counter:
    per: Literal["fleet", "tenant"] = "tenant" if row.of_tenant else "fleet"
    return Counter(name, row.most, per, state.used.get(name, 0), row.since_ms, *actors.split(row.by), row.why)


def limits_asked(asked: LimitAct, now: Limits) -> Limits:
    """Return a tenant's limits beside those of GPUs and jobs as an order asks for them; what it leaves out stays."""

    def given(value: float | msgspec.UnsetType | None, per: int, before: int) -> int:
        return before if value is msgspec.UNSET else round((value or 0) * per)

    budget_ms = given(asked.gpu_hours, _HOUR_MS, now.budget_ms)
    of_budget = (now.period, now.refuses)
    if asked.gpu_hours is not msgspec.UNSET:
        of_budget = (PERIODS.index(asked.period), ON_SPENT.index(asked.on_spent)) if budget_ms else (0, 0)
    return Limits(
        given(asked.cores, 1000, now.cores_milli),
        given(asked.memory_mib, 1, now.memory_mib),
        given(asked.running, 1, now.running),
        given(asked.job_gpus, 1, now.job_gpus),
        given(asked.time_limit_s, 1000, now.time_limit_ms),
        budget_ms,
        *of_budget,
        running_key=given(asked.running_per_key, 1, now.running_key),
        gpus_of=_by_model(asked.gpus_of, 1, now.gpus_of),
        weights=_by_model(asked.gpu_weights, 1000, now.weights),
    )


def _by_model(asked: Mapping[str, float] | UnsetType | None, per: int, now: ByModel) -> ByModel:
    if isinstance(asked, UnsetType):
        return now
    found = {**dict(now), **{model: round(value * per) for model, value in asked.items()}} if asked else {}
    return tuple(sorted((model, value) for model, value in found.items() if value))


def as_share(weight: int, gpus: int, order: StandingOrder | None) -> Share | None:
    if order is None or not (weight or gpus):
        return None
    return Share(weight, gpus, order.since_ms, *actors.split(order.actor), order.why)


def share_of(tenant: Tenant) -> Share | None:
    return as_share(tenant.weight, tenant.guaranteed, tenant.share)


def limit_of(state: State, tenant: Tenant) -> Limit | None:
    """Return a tenant's limits in the form of answers, with what it has spent of its budget; None for none."""
    order, more = tenant.limit, tenant.limits or Limits()
    if order is None:
        return None
    found = Limit(
        tenant.gpus_max,
        tenant.jobs_max,
        order.since_ms,
        *actors.split(order.actor),
        order.why,
        cores=more.cores_milli / 1000 if more.cores_milli else 0,
        memory_mib=more.memory_mib,
        running=more.running,
        running_per_key=more.running_key,
        job_gpus=more.job_gpus,
        time_limit_s=more.time_limit_ms / 1000 if more.time_limit_ms else 0,
        gpus_of=dict(more.gpus_of),
    )
    if not more.budget_ms:
        return found
    return msgspec.structs.replace(
        found,
        gpu_hours=more.budget_ms / _HOUR_MS,
        gpu_weights={model: milli / 1000 for model, milli in more.weights},
        period=PERIODS[more.period],
        on_spent=ON_SPENT[more.refuses],
        spent_hours=round(spent_at(tenant, state.time_ms).gpu_ms / _HOUR_MS, 3),
    )
