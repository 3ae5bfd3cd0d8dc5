"""Explains in full why a job waits: reason, evidence, the jobs that hold what it needs, and its queue position."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from moorage.scheduler.answers.awaited import waits_for_others, why_not_queued
from moorage.scheduler.answers.explain import HOLDERS_MAX, Explanation, explain, holders
from moorage.scheduler.answers.overtaken import overtaken
from moorage.scheduler.answers.reported import reported_of
from moorage.scheduler.answers.reruns import reruns
from moorage.scheduler.answers.view import View
from moorage.scheduler.answers.views import (
    CONTENDED_AT,
    NO_REASONS,
    finished_row,
    held_by,
    replicas_of,
    scaled,
    stalled_rows,
    standing_reasons,
    summary,
)
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.fleet.filters import shown as names_of
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.fleet.slots import slots_of
from moorage.scheduler.core.ledger import fairkeys
from moorage.scheduler.core.ledger.holding import ends_ms, is_spent, spent_at, uses_any
from moorage.scheduler.core.ledger.holding import needs_of as held_beside
from moorage.scheduler.core.ledger.limits import PERIODS
from moorage.scheduler.core.ledger.state import (
    ATTEMPT,
    AVOID_MAX,
    CODE,
    FROZEN,
    PLACED,
    QUEUED,
    REPLICA,
    RUNNING,
    STATE,
    WHY,
    WORKER,
    Attempt,
    Job,
    Replica,
    Tenant,
)
from moorage.scheduler.core.lifecycle.frozen import is_over_limit
from moorage.scheduler.core.lifecycle.max_running import wanted_of
from moorage.scheduler.core.lifecycle.refusals import avoids_all, was_refused
from moorage.scheduler.core.lifecycle.retrying import row_after
from moorage.scheduler.core.operate.orders import as_hold, limit_of
from moorage.scheduler.core.queue import models
from moorage.scheduler.core.queue.limits import BUDGET, GPUS, taken, words
from moorage.scheduler.core.queue.limits import has as parts_of
from moorage.scheduler.core.queue.limits import most as most_of_tenant
from moorage.scheduler.core.queue.limits import needs as needs_of
from moorage.scheduler.core.queue.limits import short as short_of
from moorage.scheduler.core.request_reader import later_words
from moorage.scheduler.core.schedule.preempt import leaving_for
from moorage.schemas import errors, reasons
from moorage.schemas.actors import SCHEDULER
from moorage.schemas.always import sending, sent
from moorage.schemas.answers.jobs import Explained, Fix, Holders, Leave
from moorage.schemas.errors import Problem, is_as_asked
from moorage.schemas.exit_words import exit_words
from moorage.schemas.frames import ABOUT_THE_JOB, NOT_PERMITTED, START_FAILED
from moorage.schemas.gpu import format_token
from moorage.schemas.names import word_of
from moorage.schemas.ranges import is_in
from moorage.schemas.reasons import REASONS, Reason
from moorage.schemas.units import many

#: a question for monitors looks at so many hosts at most, all queue groups together (at one group at least, as any
#: question why a job waits), and at so many groups
LOOKED_MAX: Final = 4_000
GROUPS_MAX: Final = 64
#: reasons that may end once running jobs end
_HELD_BY_JOBS: Final = (reasons.BUSY, reasons.FRAGMENTED, reasons.HOST_BUSY, reasons.GANG)
#: replicas in queue groups that were not looked at, and those that wait out a pause
OTHERS: Final = "(others)"
_WAITS: Final = sending(Explained, "held_by")


def explain_job(engine: Engine, tenant: str, name: str) -> Explained | Problem:
    """Return why a job is in its state: for a waiting job the dominant reason, the counts and its queue position.

    Of a job that has left memory it is what `finished_row` returns.

    This walks the fleet: for questions, not for each record. `whatif.fixes` finds what would help.
    """
    job = engine.state.job(tenant, name)
    if job is None:
        return finished_row(engine, tenant, name, Explained)
    told = _not_waiting(engine, job) if job.first_waiting is None else _waiting(engine, job, job.first_waiting)
    if job.live and (service := engine.reader.request_of(job).service) is not None:
        told = replace(
            told, service=service.name, models=service.models, members_ready=len(list(_ready_members(engine, job)))
        )
    told = replace(told, reported=values) if (values := reported_of(engine, job)) else told
    return replace(told, replicas=replicas_of(job)) if job.size > 1 else told


def _ready_members(engine: Engine, job: Job) -> Iterator[Attempt]:
    """Yield the members that run and are ready for calls, as far as the job has a check for that."""
    has_check = engine.reader.request_of(job).workload.ready is not None
    for member in job.attempts:
        if member.is_current and member.replica.state == RUNNING and (member.ready or not has_check):
            yield member


def _waiting(engine: Engine, job: Job, first: Replica) -> Explained:
    """Return why a job with this first waiting replica waits, without how many replicas are in which state."""
    asked = engine.reader.request_of(job)
    asks = asked.token if asked.groups or asked.each_worker else format_token(asked.effective_gpu, job.size)
    if waits_for_others(job):
        why = why_not_queued(engine, job)
        if held := _on_hold(engine, job):
            why = replace(why, because=f"{why.because}; and {held.because}", hold=held.hold)
        return replace(why, asks=asks, waiting_replicas=job.waits)
    waiting = engine.queue.waiting.get(job.num)
    if waiting is not None and waiting.pins and not waiting.rests:
        first = job.rows.get(waiting.first) or Replica(job, waiting.first)
    found, why = _why(engine, job, first)
    models = "|".join(engine.reader.shape_of(job).models) or "GPU"
    return replace(
        _in_line(engine, job, _avoided(engine, job, why)),
        asks=asks,
        scaled=scaled(engine, job),
        waiting_replicas=job.waits if waiting is None or not waiting.pins else waiting.count,
        needs=f"{found.missing} more {models} on one host" if found.missing else "",
    )


def _why(engine: Engine, job: Job, replica: Replica) -> tuple[Explanation, Explained]:
    """Return what the filters find for a job with this waiting replica, and the reason with its evidence."""
    shape = engine.reader.shape_of(job)
    excluded = View(engine).excluded(engine.reader.priority_of(job), shape, job.tenant)
    leaving = View(engine).left_too_soon(job.num)
    with engine.fleet.avoiding(shape.avoid):
        closed = engine.fleet.closed_to(job.num, shape)
        failing = engine.planner.order.barred_by_failures(job.num)
        lacking = _without_data(engine, job, leaving | failing)
        waiting = engine.queue.waiting.get(job.num)
        others = frozenset[int]() if waiting is None else waiting.others
        refusing = _refusing(engine, job)
        found = explain(engine.fleet, shape, excluded, leaving, refusing, closed, failing, lacking, others)
    if job.preempts is not None and not job.preempts[1]:
        names = [engine.state.worker_by_num[num].id for num in job.preempts[0]]
        hosts = names_of(names)
        found.because = "; ".join(filter(None, (found.because, f"{hosts} are kept for it, as it has lost a rank")))
    return found, _reason(engine, job, found, excluded, replica)


def _without_data(engine: Engine, job: Job, closed: frozenset[int]) -> frozenset[int]:
    """Return the hosts that do not do for a job now, as it waits for one with its data."""
    order, time_ms, shape = engine.planner.order, engine.state.time_ms, engine.reader.shape_of(job)
    failed = order.failed_of(job.num)
    return order.data.kept_from(job.num, shape, closed | failed, time_ms) if shape.data else frozenset()


def waiting_by_reason(engine: Engine) -> dict[str, int]:
    """Return how many replicas wait for which reason, for monitors: those in the queue each as the first job of their
    group.

    The largest groups are looked at, as many as `LOOKED_MAX` allows; the rest of all that wait are `OTHERS`.
    """
    view, counts = View(engine), Counter[str]()
    for job in engine.indexing.unqueued():
        held = held_reason(engine, job)
        if held is not None:
            counts[held.name] += job.waits
    for replica, count in view.heads()[: groups_looked_at(engine)]:
        counts[_why(engine, replica.job, replica)[1].reason] += count
    counts[OTHERS] = max(0, view.queued() - counts.total())
    return dict(+counts)


def groups_looked_at(engine: Engine) -> int:
    """Return at how many queue groups a question for monitors looks."""
    return max(1, min(GROUPS_MAX, LOOKED_MAX // max(1, len(engine.fleet.hosts))))


def reason_of(engine: Engine, job: Job, replica: Replica) -> str:
    """Return the name of the reason for which a job with this waiting replica waits. This walks the fleet."""
    return _why(engine, job, replica)[1].reason


def held_reason(engine: Engine, job: Job) -> Reason | None:
    """Return a reason that needs no look at the fleet: jobs that it waits for, a hold, its own bound; else None."""
    hold = engine.state.tenants[job.tenant].hold
    if hold is None or job.awaits or job.hold is not None:
        return engine.indexing.why_unqueued(job)
    return reasons.SCHEDULER_FAILED if hold.actor == SCHEDULER else reasons.HELD


def may_be_cured(told: Explained) -> bool:
    """Return whether a change of the request may start the explained job at once.

    Not if workers refused what it runs: they would refuse it whatever GPUs it asked for.
    """
    reason = REASONS.get(told.reason)
    return reason is not None and bool(reason.cures) and not told.because.startswith(ABOUT_THE_JOB)


def _not_waiting(engine: Engine, job: Job) -> Explained:
    """Return how a job without waiting replicas ended, which workers its replicas have to leave, and which stall."""
    told = Explained(
        job=job.name,
        tenant=job.tenant,
        state=job.state,
        scaled=scaled(engine, job),
        leaves=_leaves(engine, job),
        stalled=stalled_rows(engine, job),
    )
    if not job.live:
        return _ended(engine, job, told)
    why = _why_silent(engine, job) or _why_frozen(engine, job) or _why_awake(engine, job) or _why_unready(engine, job)
    return sent(told, why=why or _last_why(job))


def _why_silent(engine: Engine, job: Job) -> str:
    """Return which worker of a job is silent, and what follows if it stays so; "" if none is."""
    for member in job.attempts:
        host = engine.fleet.hosts.get(member.worker.num)
        silent_ms = engine.built_ms - host.last_ms if host is not None and host.stale else 0
        if host is not None and silent_ms > host.loads_within_ms:
            lost_ms = max(engine.config.lost_ms, member.worker.lost_ms)
            return (
                f"worker {member.worker.id} is silent, for {silent_ms // 1000}s now: after {lost_ms // 1000}s it counts"
                " as lost, and the job is tried again elsewhere, if its request allows that"
            )
    return ""


def _why_frozen(engine: Engine, job: Job) -> str:
    """Return for what the first frozen replica of a job waits; "" if none is frozen."""
    tenant = engine.state.tenants[job.tenant]
    for member in job.attempts:
        is_current = member.replica.attempt is member and member.replica.state == FROZEN
        sleeps = engine.reader.request_of(job).sleeps
        if is_current and (sleeps or member.mask != member.home):
            if member.freeze:
                use = "it is called" if sleeps else "it uses its GPUs"
                until, waking = use if member.wakes else "an operator resumes it", engine.sleeping.waking(member)
                told = filter(None, (waking, engine.sleeping.wakes(job))) if sleeps else ()
                return "; ".join((f"it is frozen until {until}", *told))
            if (hold := job.hold or tenant.hold) is not None:
                return f"it is to run on, and is {held_by(hold)}"
            if is_over_limit(tenant, member):
                bounds = f"{tenant.gpus_max} GPUs" if tenant.gpus_max else "what it may have"
                return f"it is to run on, and tenant {job.tenant} has {tenant.gpus} of {bounds} leased"
            if member.name in engine.planner.frozen.refused:
                return f"it is to run on, behind a job of tenant {job.tenant} that waits for the tenant's limit"
            if sleeps:
                return f"it is called, and {engine.sleeping.waits(member).why}"
            host = engine.fleet.hosts.get(member.worker.num)
            is_shut = host is not None and member.home & host.shut  # no end of another one gives it all of its GPUs
            if not is_shut and any(other.mask & member.home for other in member.worker.attempts.values()):
                return "it is to run on, and waits for the end of the job on its GPUs"
            return "it is to run on, and waits until its worker gives its GPUs"
    return ""


def _why_unready(engine: Engine, job: Job) -> str:
    """Return which check an attempt that runs has not met since its start, and when it ends for that, or does not meet
    any more; "" for none."""
    ready = engine.reader.request_of(job).workload.ready
    if engine.reader.request_of(job).service is not None and next(_ready_members(engine, job), None) is not None:
        return ""
    for member in job.attempts if ready is not None else ():
        if member.is_current and member.replica.state == RUNNING and not member.ever_ready and ready is not None:
            ran_s = (engine.state.time_ms - member.began_ms) / 1000
            ends = f"at {ready.within_s:g} s it ends as not-ready" if ran_s < ready.within_s else "it ends as not-ready"
            return f"not ready since its start {ran_s:.0f} s ago: its check is {ready.words}; {ends}"
        if member.is_current and member.replica.state == RUNNING and member.unready_ms and ready is not None:
            return (
                f"ready no more for {(engine.state.time_ms - member.unready_ms) / 1000:.0f} s: its check is"
                f" {ready.words}"
            )
    return ""


def _why_awake(engine: Engine, job: Job) -> str:
    """Return why the first replica of a service that sleeps stays awake though it was to be frozen; "" if none does."""
    if not engine.reader.request_of(job).sleeps:
        return ""
    whys = (engine.sleeping.stays_awake(member) for member in job.attempts)
    return next((f"it stays awake: {why}" for why in whys if why), "")


def _reason(engine: Engine, job: Job, found: Explanation, excluded: frozenset[int], replica: Replica) -> Explained:
    """Return the dominant reason and its evidence; operators' orders take precedence over filters."""
    shape, time_ms = engine.reader.shape_of(job), engine.state.time_ms
    told = _explained(job, found.reason, found.because)
    if standing := _standing(engine, job, found.reason):
        found.reason = REASONS[standing.reason]
        told = standing
    held = holders(found.held_on, shape, job.tenant, of_host=found.reason is reasons.HOST_BUSY)
    held_by = found.troubles + (_holder_lines(held, job.name) if found.held_on else [])
    if found.reason is reasons.RESERVED:
        held_by = _kept_for(engine, job, excluded)
    if found.reason is reasons.LIMIT:
        held_by = told.held_by
    told = replace(told, workers_left=found.counts, holders=held, held_by=held_by)
    if found.reason is reasons.RULES:
        told = _ruled_out(engine, shape, told)
    reason = found.reason
    if reason is reasons.PLACING and replica.not_before > time_ms:
        reason = pause_after(job, replica)
        starts_in_ms = replica.not_before - time_ms
        told = replace(told, reason=reason.name, means=reason.means, starts_in_ms=starts_in_ms)
    if reason is reasons.PLACING and not engine.stale_ledger.may_place(time_ms, engine.built_ms):
        because, left_ms = engine.stale_ledger.waits_for(time_ms, engine.built_ms)
        restored = _explained(job, reasons.RESTORED, because)
        told = replace(
            told, reason=restored.reason, means=restored.means, because=restored.because, starts_in_ms=left_ms
        )
    if reason is reasons.DATA:
        data = engine.planner.order.data
        left_s = max(0, data.until_ms(job) - time_ms) // 1000
        is_bound = data.is_bound(job, shape, time_ms)
        then = (
            "those with room have not its paths of data_dirs"
            if is_bound
            else f"in {left_s + 1} s any worker with room will do"
        )
        told = replace(told, because=then)
    last = _last_why(job)
    if not told.because and (last.startswith(ABOUT_THE_JOB) or reason in (reasons.BACKOFF, reasons.CONTENDED)):
        by_row = _row_used(engine, job, replica)
        told = sent(told, because=(last or _last_end(job)) + by_row)
    if shape.parts and reason in _HELD_BY_JOBS and engine.planner.preempting.allowed():
        told = replace(told, because=f"{told.because}; no job ends for a gang of several groups, whatever its priority")
    if reason is reasons.BUSY and not told.because:
        because = View(engine).preempts_later(job, found.held_on[:HOLDERS_MAX])
        if passed := overtaken(engine, job, found.held_on):
            told = replace(told, reason=reasons.OVERTAKEN.name, means=reasons.OVERTAKEN.means)
        told = replace(told, because="; ".join(filter(None, (passed, because))))
    return told


def _row_used(engine: Engine, job: Job, replica: Replica) -> str:
    """Return which row of `retry` allows the attempt after the last one, and how often it has; "" for none."""
    request, ended = engine.reader.request_of(job), replica.ended
    if not request.retry or ended is None:
        return ""
    lost = not ended.by_worker or errors.reason_of(ended.why) in ("lost", "fence")
    row = row_after(request, ended.code, ended.why, lost=lost)
    number = 0 if row is None else request.retry.index(row) + 1
    return f"; attempt {replica.tries_of(number)} of {row.times} after {', '.join(row.causes)}" if row else ""


def _rows_used_up(engine: Engine, job: Job, code: int, why: str) -> str:
    """Return what the rows of `retry` say of the end of a job that failed; "" without them."""
    request = engine.reader.request_of(job)
    if not request.retry or job.state != "FAILED":
        return ""
    fits = row_after(request, code, why, lost=errors.reason_of(why) in ("lost", "fence"))
    if fits is None:
        return "no row of its retry is for such an end; --retry adds one"
    return f"its retry allows {many(fits.times, 'more attempt')} after {', '.join(fits.causes)}"


def _explained(job: Job, reason: Reason, because: str) -> Explained:
    """Return an explanation with this reason."""
    return _WAITS(
        job=job.name, tenant=job.tenant, state=job.state, reason=reason.name, means=reason.means, because=because
    )


def pause_after(job: Job, replica: Replica) -> Reason:
    """Return the reason for a replica's backoff: too many workers refused the job, claims collided, or a failure."""
    last = _last_why(job)
    if last.startswith(ABOUT_THE_JOB):
        return reasons.REFUSED if len(job.avoid) >= AVOID_MAX else reasons.BACKOFF
    claimed = replica.refusals >= CONTENDED_AT and not last.startswith(START_FAILED)
    return reasons.CONTENDED if claimed else reasons.BACKOFF


def _in_line(engine: Engine, job: Job, told: Explained) -> Explained:
    """Add its priority, queue position and its tenant's turn; no position while an operator holds it."""
    view, priority = View(engine), engine.reader.priority_of(job)
    position, queued = view.place_of(job)
    is_out = job.hold is not None or told.reason in (reasons.LATER_RELEASE.name, reasons.EACH_WORKER.name)
    told = replace(told, priority=priority, queued=queued - is_out, queued_of="jobs")
    if is_out:
        return told
    told = replace(told, position=position)
    if (counts_as := view.counts_as(job)) > priority:
        told = replace(told, counts_as=counts_as, waited_ms=engine.state.time_ms - job.waits_from_ms)
    turn = engine.planner.order.turn_of(job.tenant)
    return told if turn is None or turn[1] <= 1 else replace(told, turn=turn[0], tenants=turn[1])


def _ended(engine: Engine, job: Job, told: Explained) -> Explained:
    """Add the exit code and the reason of the end; without a reason, the job ended by itself."""
    row = summary(engine, job)
    why = row.why or (f"it ended by itself, {exit_words(row.code)}" if row.code else "")
    why = "; ".join(filter(None, (why, _rows_used_up(engine, job, row.code or 0, row.why))))
    return replace(sent(told, code=row.code, why=why), fixes=_behind_rerun(engine, job, why))


def _behind_rerun(engine: Engine, job: Job, why: str) -> list[Fix]:
    """Return the fix of a job that was cancelled because of another one's end, if that was run again since."""
    awaited = engine.reader.request_of(job).awaited
    for each in awaited:
        other = engine.state.job(job.tenant, each.job)
        if other is None or not why.startswith(f"after {each.job}: "):
            continue
        again = reruns(engine, job.tenant, each.job, engine.reader.request_of(other))[1]
        if again:
            names = [{"job": again[-1] if one is each else one.job, "when": one.when} for one in awaited]
            change = json.dumps({"after": [one if one["when"] != "succeeded" else one["job"] for one in names]})
            say = f"{each.job} was run again, as {again[-1]}"
            command = f"moorage again {word_of(job.name)} --but '{change}'"
            return [Fix(say=say, command=command, who="tenant")]
    return []


def _last_why(job: Job) -> str:
    """Return the newest reason that still applies, other than "ended as asked"; empty for none."""
    rows = (row for row in reversed(job.history) if row[STATE] not in NO_REASONS)
    reasons = standing_reasons((row[REPLICA], row[STATE] == PLACED, row[WHY]) for row in rows)
    return next((why for why in reasons if not is_as_asked(why)), "")


def _last_end(job: Job) -> str:
    """Return how the newest attempt ended that another one follows, of which no reason is kept; "" if there is none."""
    for row in reversed(job.history):
        if row[STATE] == QUEUED and row[WORKER] >= 0:
            how = f"with code {row[CODE]}" if row[CODE] >= 0 else f"of signal {-row[CODE]}"
            return f"attempt {row[ATTEMPT]} ended by itself, {how}"
    return ""


def _avoided(engine: Engine, job: Job, told: Explained) -> Explained:
    """Add the GPUs that failed under the job, and the workers that refused it."""
    workers, refusing = engine.state.worker_by_num, _refusing(engine, job)
    failed = [
        f"{workers[num].id}: GPU {', '.join(map(str, slots_of(mask)))}"
        for num, mask in job.avoid
        if num not in refusing
    ]
    return replace(told, avoids=failed, refused_by=[workers[num].id for num in sorted(refusing)])


def _refusing(engine: Engine, job: Job) -> frozenset[int]:
    """Return the numbers of the workers that refused the job because of what it runs.

    It avoids all devices that they have, or, if it asks for none, the workers. They may have joined again with others.
    """
    avoided = [engine.state.worker_by_num[num] for num, _ in job.avoid]
    refused = [each for each in avoided if was_refused(job, each)]
    if not refused:
        return frozenset()
    return engine.reader.shape_of(job).refusing | {each.num for each in refused if avoids_all(job, each)}


def _kept_for(engine: Engine, job: Job, excluded: frozenset[int]) -> list[str]:
    """Return the jobs for which hosts are reserved (named if of the same tenant), and a few of the hosts."""
    first = View(engine).reserved_for(excluded)
    who = [] if first is None else [f"{_named(first, job)}, which comes first and has waited long"]
    who += [
        f"{_named(other, job)}, for which other jobs ended"
        for other in engine.state.preempting.values()
        if other is not job and other.preempts is not None and excluded.intersection(other.preempts[0])
    ][:HOLDERS_MAX]
    workers = ", ".join(engine.state.worker_by_num[num].id for num in sorted(excluded)[:HOLDERS_MAX])
    more = f" and {len(excluded) - HOLDERS_MAX} more" if len(excluded) > HOLDERS_MAX else ""
    return [*who, f"reserved: {workers}{more}"]


def _named(other: Job, job: Job) -> str:
    """Return the name of another job as this job's tenant may see it."""
    return f"job {other.name}" if other.tenant == job.tenant else "a job of another tenant"


def _ruled_out(engine: Engine, shape: Shape, told: Explained) -> Explained:
    """Add a few workers that do not allow the tenant this driver, with the drivers that they allow."""
    hosts = [
        host
        for cls in engine.fleet.classes.values()
        if cls.fit(shape).reason == reasons.RULES.name
        for host in cls.hosts.values()
    ]
    return replace(
        told,
        because=f"{NOT_PERMITTED}tenant {told.tenant} may not have the driver {shape.driver} on"
        f" {many(len(hosts), 'worker')}",
        held_by=[
            f"{host.worker.id}: lets it have {', '.join(sorted(host.cls.kit.permitted(shape.tenant))) or 'no driver'}"
            for host in hosts[:HOLDERS_MAX]
        ],
    )


def _leaves(engine: Engine, job: Job) -> list[Leave]:
    """Return the workers that running replicas have to leave, and in how many ms."""
    workers = {replica.attempt.worker.num: replica.attempt.worker for replica in job.rows.values() if replica.attempt}
    return [
        Leave(worker=worker.id, in_ms=max(0, worker.window.leave_ms - engine.state.time_ms), why=worker.window.why)
        for worker in workers.values()
        if worker.window is not None
    ]


def _holder_lines(found: Holders, asks: str) -> list[str]:
    """Return the holders as text lines, the tenant's own first; `asks` is the name of the waiting job."""
    lines = [_holder(row.job, row.gpus, asks) for row in found.own]
    if found.own_jobs > len(found.own):
        lines.append(f"{many(found.own_jobs - len(found.own), 'more job')} of yours")
    if found.other_jobs:
        lines.append(f"{many(found.other_jobs, 'job')} of other tenants: {many(found.other_gpus, 'GPU')}")
    hidden = found.hosts - len(found.workers)
    return [*lines, *found.workers, *([many(hidden, "more worker")] if hidden else [])]


def _holder(name: str, gpus: int, asks: str) -> str:
    """Return how many GPUs a job holds, which may be the waiting job `asks` itself."""
    return f"{'its own replicas' if name == asks else f'job {name}'}: {many(gpus, 'GPU')}"


def _scaled_words(engine: Engine, job: Job) -> str:
    """Return why a service has as many members as it has."""
    request = engine.reader.request_of(job)
    wanted = many(wanted_of(job, request), "member")
    if job.scaled is None:
        return f"{wanted} of it, as replicas.min says, until its calls need more"
    return f"{wanted} of it since {(engine.state.time_ms - job.scaled.since_ms) // 1000} s: {job.scaled.why}"


def _preempted(engine: Engine, job: Job) -> str:
    """Return which preempted jobs this job waits for: its own tenant's by name, of others only how many."""
    ending = sorted({member.replica.job for member in leaving_for(engine.state, job)}, key=lambda other: other.num)
    mine = [f"job {other.name}" for other in ending if other.tenant == job.tenant]
    others = len(ending) - len(mine)
    shown = mine[:HOLDERS_MAX] + ([f"{others} of other tenants"] if others else [])
    more = f" and {len(mine) - HOLDERS_MAX} more" if len(mine) > HOLDERS_MAX else ""
    return (
        f"it waits for preempted jobs to end: {', '.join(shown)}{more}" if ending else "the preempted jobs have ended"
    )


def _on_hold(engine: Engine, job: Job) -> Explained | None:
    """Return the operator's hold on a job or its tenant, with its sentence; None for none."""
    hold = job.hold or engine.state.tenants[job.tenant].hold
    if hold is None:
        return None
    of = f"job {job.name}" if job.hold is not None else f"the queue of tenant {job.tenant}"
    return replace(_explained(job, reasons.HELD, f"{of} is {held_by(hold)}"), hold=as_hold(hold))


def _standing(engine: Engine, job: Job, reason: Reason) -> Explained | None:
    """Return the operator's hold, limit or preemption that keeps a job waiting, with its details; None for none."""
    shape = engine.reader.shape_of(job)
    hold, held = _on_hold(engine, job), held_reason(engine, job)
    if hold is not None and held is not None:
        return replace(hold, reason=held.name, means=held.means)
    if held is reasons.SCALED:
        frozen = _why_frozen(engine, job)
        because = _scaled_words(engine, job) + (f"; its frozen member: {frozen}" if frozen else "")
        return _explained(job, held, because)
    if held is reasons.MAX_RUNNING:
        because = f"{many(job.on_workers, 'replica')} of it on workers, and max_running lets no more start"
        return _explained(job, held, because)
    if held is reasons.EACH_WORKER:
        return _explained(job, held, _each_worker_words(engine, job))
    if held is reasons.LATER_RELEASE:
        return _explained(job, held, later_words(engine.reader.later[job.num]))
    if held is not None:
        return _explained(job, held, "")
    if job.preempts is not None and job.preempts[1]:
        return _explained(job, reasons.PREEMPTING, _preempted(engine, job))
    if reason.is_never:
        return None
    if (spent := _over_budget(engine, job, shape)) is not None:
        return spent
    if shape.uses and (names := taken(engine.state, tenant_of(engine, job), shape)):
        return replace(_explained(job, reasons.COUNTER, _counter_words(engine, job, names[0])), held_by=[])
    return _over_limit(engine, job, shape, reason)


def _each_worker_words(engine: Engine, job: Job) -> str:
    """Return on how many workers a job for each of them has begun, and the names of those that it waits for."""
    once = engine.reader.request_of(job).each_worker == "once"
    waits = [
        worker.id
        for num, worker in engine.state.worker_by_num.items()
        if ((row := job.rows.get(num)) is not None and row.state == QUEUED) or (once and is_in(job.fresh, num))
    ]
    begun = f"it has begun on {many(job.copies - job.waits, 'worker')}"
    if not waits:
        return begun
    names = names_of(sorted(waits))
    return f"{begun}; it waits for {names} to come back, or until an operator forgets such a worker"


def tenant_of(engine: Engine, job: Job) -> Tenant:
    """Return the tenant of a job."""
    return engine.state.tenants[job.tenant]


def _counter_words(engine: Engine, job: Job, name: str) -> str:
    """Return how many there are of a counter and who uses them: the tenant's own jobs by name, others by number."""
    state, counter = engine.state, engine.state.counters.get(name)
    if counter is None:
        return f"there is no counter {name}"
    own = [each for each in tenant_of(engine, job).jobs.values() if each.held and uses_any(each)]
    holding = [each.name for each in own if name in dict(held_beside(each).uses)]
    used = (tenant_of(engine, job) if counter.of_tenant else state).used.get(name, 0)
    others = state.used.get(name, 0) - tenant_of(engine, job).used.get(name, 0)
    shown = [f"job {each}" for each in holding[:HOLDERS_MAX]]
    shown += [f"{len(holding) - HOLDERS_MAX} more of its jobs"] if len(holding) > HOLDERS_MAX else []
    shown += [f"other tenants, {others}"] if others and not counter.of_tenant else []
    of = f" of tenant {job.tenant}" if counter.of_tenant else ""
    needs = dict(engine.reader.shape_of(job).uses)[name] * engine.reader.shape_of(job).ranks
    return f"{name}: {used} of {counter.most}{of} in use, and this needs {needs}; by {', '.join(shown) or 'nobody'}"


def _over_budget(engine: Engine, job: Job, shape: Shape) -> Explained | None:
    """Return that a job waits for its tenant's next budget; None if it does not."""
    tenant, state = engine.state.tenants[job.tenant], engine.state
    if tenant.limits is None or not shape.gpus or not is_spent(state, tenant):
        return None
    limits, spent_h = tenant.limits, spent_at(tenant, state.time_ms).gpu_ms / 3_600_000
    because = (
        f"tenant {job.tenant} has spent {spent_h:,.1f} of {limits.budget_ms / 3_600_000:,.6g} GPU-hours of this"
        f" {PERIODS[limits.period]}"
    )
    in_ms = ends_ms(state.time_ms, limits.period) - state.time_ms
    return replace(_explained(job, reasons.BUDGET, because), limit=limit_of(state, tenant), starts_in_ms=in_ms)


def _over_limit(engine: Engine, job: Job, shape: Shape, reason: Reason) -> Explained | None:
    """Return by which limit of its tenant a job waits; None for none."""
    tenant, need = engine.state.tenants[job.tenant], shape.gpus
    short = [part for part in short_of(engine.state, tenant, shape) if part not in (GPUS, BUDGET)]
    if short:
        held, bounds, needed = parts_of(tenant), most_of_tenant(tenant), needs_of(shape)
        parts = [f"{words(part, held[part])} of {words(part, bounds[part])}" for part in short]
        because = f"tenant {job.tenant} has {', '.join(parts)}, and this needs {words(short[0], needed[short[0]])}"
        return replace(_explained(job, reasons.LIMIT, because), limit=limit_of(engine.state, tenant))
    if fairkeys.is_full(tenant, job.fair, shape.ranks) and tenant.limits is not None:
        used = tenant.keys.get(job.fair) if tenant.keys else None
        has = f"{used.running if used is not None else 0} of {tenant.limits.running_key} replicas at once"
        whose = f"fair key {job.fair}" if job.fair else "what has no fair key"
        because = f"{whose} of tenant {job.tenant} has {has}"
        return replace(_explained(job, reasons.LIMIT, because), limit=limit_of(engine.state, tenant))
    if (by_model := _over_model(engine, job, shape, reason)) is not None:
        return by_model
    if not tenant.gpus_max or not need:
        return None
    # with room left under the limit, an earlier job of this tenant may need more than that room
    first = View(engine).first_for_limit(job.tenant)
    if tenant.gpus + need <= tenant.gpus_max and (first is None or reason is not reasons.PLACING):
        return None
    own: dict[str, int] = {}
    for other in tenant.jobs.values():
        if other.held:
            gpus = sum(member.mask.bit_count() for row in other.rows.values() if (member := row.attempt) is not None)
            if gpus:
                own[other.name] = gpus
    most = sorted(own.items(), key=lambda row: (-row[1], row[0]))[:HOLDERS_MAX]
    has = f"tenant {job.tenant} has {tenant.gpus} of {tenant.gpus_max} GPUs leased"
    return replace(
        _explained(job, reasons.LIMIT, f"{has}, and {_needs(engine, job, first)}"),
        limit=limit_of(engine.state, tenant),
        gpus_leased=tenant.gpus,
        gpus_needed=need,
        held_by=[_holder(name, gpus, job.name) for name, gpus in most],
    )


def _over_model(engine: Engine, job: Job, shape: Shape, reason: Reason) -> Explained | None:
    """Return by which limit of GPUs of a model a job waits, its own or that of a job before it; None for none."""
    tenant, fleet = engine.state.tenants[job.tenant], engine.fleet
    if job.tenant not in engine.state.by_model:
        return None
    short, of = models.short(fleet, tenant, shape), "this"
    must = bool(short) and models.must_take(fleet, shape, short)
    if short and not must:
        closed = (fleet.hosts[num] for num in models.closed(fleet, tenant, shape))
        if not any(host.usable and host.replicas_of(shape, "now") for host in closed):
            return None  # with a higher limit it would wait, too
    first = View(engine).first_for_limit(job.tenant)
    if not short and first is not None and first is not job and reason is reasons.PLACING:
        short, of = models.short(fleet, tenant, engine.reader.shape_of(first)), f"job {first.name}, which goes first,"
        must = True
    if not short or tenant.limits is None:
        return None
    model, need = min(short.items())
    has = f"{models.count(tenant.devices, model)} of {dict(tenant.limits.gpus_of)[model]} GPUs of {model}"
    because = f"tenant {job.tenant} has {has} leased, and {of} needs {need}"
    because += "" if must else "; hosts without them have no room for it"
    return replace(_explained(job, reasons.LIMIT, because), limit=limit_of(engine.state, tenant))


def _needs(engine: Engine, job: Job, first: Job | None) -> str:
    """Return what exceeds the tenant's limit: this job, or an earlier job of the tenant."""
    tenant, need = engine.state.tenants[job.tenant], engine.reader.shape_of(job).gpus
    if first is None or first is job or tenant.gpus + need > tenant.gpus_max:
        return f"this needs {need}"
    return f"job {first.name}, which goes first, needs {engine.reader.shape_of(first).gpus} of them"
