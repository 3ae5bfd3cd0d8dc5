"""What no wait would help: a job beyond a limit of its tenant, which is refused as it is submitted."""

from __future__ import annotations

from typing import Final

from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.holding import ends_ms, is_spent, spent_at
from moorage.scheduler.core.ledger.limits import PERIODS, REFUSE
from moorage.scheduler.core.ledger.state import State, Tenant
from moorage.scheduler.core.queue import limits, models
from moorage.schemas.errors import Problem, problem
from moorage.schemas.job import Request
from moorage.schemas.units import many

_FIELDS: Final = {limits.CORES: "$.resources.cpu_milli", limits.MEMORY: "$.resources.memory_mib"}


def beyond(state: State, tenant: Tenant, request: Request, shape: Shape, job: str) -> Problem | None:
    """Return why a job could never start under the limits of a tenant that has some beside GPUs; None if it could."""
    found = tenant.limits
    assert found is not None
    if found.job_gpus and shape.gpus > found.job_gpus:
        return _refused(tenant, job, "$.gpu.count", many(shape.gpus, "GPU"), f"{found.job_gpus} GPUs for one job")
    most, needs = limits.most(tenant), limits.needs(shape)
    for part, field in _FIELDS.items():
        if most[part] and needs[part] > most[part]:
            return _refused(tenant, job, field, limits.words(part, needs[part]), limits.words(part, most[part]))
    if (time_limit := beyond_time(tenant, request.workload.timeout_s, job)) is not None:
        return time_limit
    if shape.gpus and found.refuses == REFUSE and is_spent(state, tenant):
        anew_s = (ends_ms(state.time_ms, found.period) - state.time_ms) // 1000
        return problem(
            "failed-precondition",
            f"tenant {tenant.name} has spent its budget of {found.budget_ms / 3_600_000:g} GPU-hours",
            allowed="jobs without GPUs, until it begins anew",
            retry_after_s=float(anew_s),
            job=job,
            next="ask an operator to raise it: moorage admin limit --gpu-hours",
        )
    return None


def beyond_model(fleet: Fleet, tenant: Tenant, shape: Shape, job: str) -> Problem | None:
    """Return why a job that names models could never start under its tenant's limits of these; None if it could."""
    bounds = dict(tenant.limits.gpus_of) if tenant.limits is not None else {}
    named = [each for each in ([part.shape for part in shape.parts] or [shape]) if each.models]
    for each in named if bounds else ():
        short = models.short(fleet, tenant, each, bounds)
        if short and models.must_take(fleet, each, short):
            model, need = min(short.items())
            allowed = f"{bounds[model]} GPUs of {model} at once"
            return _refused(tenant, job, "$.gpu.count", f"{many(need, 'GPU')} of {model}", allowed)
    return None


def without_counter(state: State, shape: Shape, job: str) -> Problem | None:
    """Return why the counters could never be enough for a job; None if they could."""
    for name, each in shape.uses:
        counter, needs = state.counters.get(name), each * shape.ranks
        if counter is not None and needs <= counter.most:
            continue
        there = "there is no such counter" if counter is None else f"there are {counter.most} of it"
        return problem(
            "failed-precondition",
            f"the job uses {needs} of the counter {name}, and {there}",
            field=f"$.uses.{name}",
            found=needs,
            allowed=f"at most {counter.most}" if counter is not None else ", ".join(sorted(state.counters)) or "none",
            job=job,
            next=f"ask an operator: moorage admin counter {name} {needs}; or --on-no-match wait",
        )
    return None


def budget_warning(state: State, tenant: Tenant) -> str:
    """Return a warning once four fifths of a tenant's budget are spent; "" before, and without one."""
    limits = tenant.limits
    if limits is None or not limits.budget_ms:
        return ""
    percent = 100 * spent_at(tenant, state.time_ms).gpu_ms // limits.budget_ms
    period = PERIODS[limits.period]
    return f"budget: tenant {tenant.name} has spent {percent} % of its GPU-hours of this {period}" * (percent >= 80)


def beyond_time(tenant: Tenant, timeout_s: float | None, job: str) -> Problem | None:
    """Return why a tenant may not give a job this time limit; None if it may."""
    most_ms = 0 if tenant.limits is None else tenant.limits.time_limit_ms
    if not most_ms or (timeout_s is not None and timeout_s * 1000 <= most_ms):
        return None
    found = "no time limit" if timeout_s is None else f"a time limit of {timeout_s:g} s"
    return _refused(tenant, job, "$.run.timeout_s", found, f"one of {most_ms / 1000:g} s", "give it with --time-limit")


def _refused(tenant: Tenant, job: str, field: str, found: str, allowed: str, way: str = "ask for less") -> Problem:
    return problem(
        "failed-precondition",
        f"the job has {found}, and the limit of tenant {tenant.name} is {allowed}",
        field=field,
        found=found,
        allowed=f"at most {allowed}",
        job=job,
        next=f"{way}, or ask an operator to raise the limit",
    )
