"""Answers of the reading verbs, built from the folded state and the fleet view."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, Final, TypeVar

import msgspec

from moorage.scheduler.answers.awaited import awaited, not_before, waits_for_others
from moorage.scheduler.answers.counts import Counts
from moorage.scheduler.answers.reported import last_reported, reported_of
from moorage.scheduler.answers.reruns import reruns
from moorage.scheduler.answers.usage import peaks_of, usage_of_history, usage_of_job
from moorage.scheduler.answers.use import use_of_job, use_rows, used_now
from moorage.scheduler.answers.view import View
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.fleet.host import EXCLUSIVE, Host
from moorage.scheduler.core.fleet.slots import slots_of
from moorage.scheduler.core.ledger import fairkeys
from moorage.scheduler.core.ledger.ceilings import CEILINGS
from moorage.scheduler.core.ledger.fairshare import usage_milli
from moorage.scheduler.core.ledger.finished import job_key
from moorage.scheduler.core.ledger.gang_sets import NO_SET
from moorage.scheduler.core.ledger.records import GOODBYE, MODE_NAMES
from moorage.scheduler.core.ledger.state import (
    AT_EXITED,
    AT_MS,
    AT_PLACED,
    AT_RUNNING,
    ATTEMPT,
    BY,
    CHANGED,
    CODE,
    EXEC,
    FENCE,
    HISTORY_WORDS,
    IS_TERMINAL,
    LISTED_MAX,
    NOT_READY,
    PLACED,
    QUEUED,
    READY,
    REPLICA,
    RESULT,
    REV,
    RUNNING,
    STATE,
    WHY,
    WORKER,
    Attempt,
    Job,
    Replica,
    StandingOrder,
    Transition,
    Worker,
    code_of,
    decided_code,
    exit_code_of,
)
from moorage.scheduler.core.lifecycle.admission import no_job
from moorage.scheduler.core.lifecycle.max_running import wanted_of
from moorage.scheduler.core.lifecycle.retrying import words_of
from moorage.scheduler.core.lifecycle.stale_ledger import BEHIND_RENEWALS
from moorage.scheduler.core.operate.orders import as_hold, counters_of, limit_of, share_of
from moorage.scheduler.core.operate.relimiting import running_of
from moorage.scheduler.core.operate.resizing import resized_of
from moorage.scheduler.core.outputs.outputs import (
    CHANGES_SURE,
    SHOWN_BYTES_MAX,
    SIMULATED_LOOKS,
    changes_since,
    enforced_on,
    fitting,
    gpu_names,
    is_exception,
    were_simulated,
)
from moorage.scheduler.core.request_reader import asked_now
from moorage.scheduler.history.unpacking import Found, Frame, is_simulated, unsuccessful
from moorage.schemas import actors
from moorage.schemas.always import sending, sent
from moorage.schemas.answers.fleet import (
    JOBS_FAIL_HERE,
    DeviceTrouble,
    DrainTimes,
    DriverDownRow,
    Fits,
    FleetAnswer,
    Keeps,
    StalledJob,
    StartsFail,
    WorkerInfo,
)
from moorage.schemas.answers.jobs import (
    BoundsNow,
    CheckpointInfo,
    Explained,
    JobRow,
    Kept,
    PromisedStart,
    ReplicaCounts,
    ReplicaInfo,
    ReplicaStall,
    Scaled,
    ShownJob,
)
from moorage.schemas.answers.operators import Audit, Drift, TenantsAnswer
from moorage.schemas.attempt import AttemptName
from moorage.schemas.cells import FOREIGN, FREE, FROZEN, LEASED, LOST, NOT_LENT, SHARERS_MAX, SICK
from moorage.schemas.codec import decode_request, encode
from moorage.schemas.errors import Problem, Refused, is_as_asked
from moorage.schemas.frames import AGENT_STOPPED, DISK_FULL, Change
from moorage.schemas.job import STATES, SUCCEEDED, Request
from moorage.schemas.operate import TenantRow
from moorage.schemas.ranges import Ranges, both, count_of, format_ranges, joined, numbers_in, ranges_of, without

R = TypeVar("R", bound=JobRow)
F = TypeVar("F", ShownJob, Explained)

#: of a job's row these are sent whatever they are, unless nothing but its end is known
_TOLD: Final = ("attempt", "age_ms", "worker", "simulated", "code", "why")
#: the row of `ls` of a job in memory, and its answer to `show`
_ROW: Final = sending(JobRow, *_TOLD, "priority")
_SHOWN: Final = sending(
    ShownJob, *_TOLD, "priority", "own_subject", "accepted_ledger", "accepted_ms", "replica_states", "changes"
)

LS_MAX: Final = 1000
#: bytes of workers' rows in one answer: half of what a server accepts, some 2,000 hosts of 8 GPUs
FLEET_BYTES: Final = 512 * 1024
#: ranges of replicas in each state that an answer names
RANGES_SHOWN: Final = 500
CONTENDED_AT: Final = 5
#: a running attempt that has stored no checkpoint so many ms after the first was due is told to have none
LATE_MS: Final = 5_000
RUNS: Final = STATES[RUNNING]
#: the revision of the first row behind ACCEPTED, which histories in memory do not have
_FIRST_REV: Final = 2
#: rows of a history whose words are no reason for the job's state: RUNNING has an address there
NO_REASONS: Final = frozenset((RUNNING, READY, NOT_READY, EXEC, CHANGED))
#: transitions of a replica that was cancelled
_CANCELS: Final = frozenset(("CANCELLING", "CANCELLED"))
#: stalled jobs that an answer about the fleet names
STALLED_MAX: Final = 20


def show(engine: Engine, tenant: str, name: str, *, follow: bool = True) -> ShownJob | Problem:
    """Return one job in full: its request, replicas and last transitions; of one not in memory, its `finished_row`.

    With `follow`, later events of the job are also sent on the job's own subject. A caller that receives the tenant's
    events does not need that.
    """
    job = engine.state.job(tenant, name)
    if job is None:
        return finished_row(engine, tenant, name, ShownJob)
    request = asked_now(job)
    if follow:
        job.own_subject = True
    return _summary(
        engine,
        job,
        _SHOWN,
        scaled=scaled(engine, job),
        own_subject=follow or engine.output_writer.own_subject(job),
        usage=usage_of_job(engine, job),
        peaks=peaks_of(job.peaks),
        promised=_promised(engine, job),
        started_ms=_started_ms([(row[REV], row[AT_MS], row[STATE] == RUNNING) for row in job.history]),
        ended_ms=job.ended_ms,
        accepted_ledger=job.ledger,
        accepted_ms=job.accepted_ms,
        request=request,
        again=reruns(engine, tenant, name, request)[1],
        capabilities=_capabilities(engine, request),
        replica_states=_on_each(engine, job)
        if request.each_worker
        else [_replica(engine, replica) for replica in listed(job)],
        alive=_alive(job),
        changes=_newest(engine, job),
        kept=_kept_until(engine, job.history[-1][AT_MS], _output_until(engine, job))
        if job.over and job.history
        else None,
    )


def _alive(job: Job) -> dict[str, str]:
    """Return which replicas of several are in which state that is no end."""
    if job.size < 2:
        return {}
    of: dict[int, list[int]] = {}
    for index, row in job.rows.items():
        if not IS_TERMINAL[row.state]:
            of.setdefault(row.state, []).append(index)
    ranges = {state: ranges_of(numbers) for state, numbers in of.items()}
    if job.fresh and not job.stands:
        ranges[QUEUED] = joined(sorted((*ranges.get(QUEUED, ()), *job.fresh)))
    return {STATES[state]: format_ranges(each, RANGES_SHOWN) for state, each in sorted(ranges.items())}


def _promised(engine: Engine, job: Job) -> PromisedStart | None:
    """Return by when a job was promised to start, and whether it did; None without a promise."""
    promise = job.promised
    if promise is None:
        return None
    started_ms = next((row[AT_MS] for row in job.history if row[STATE] == RUNNING), None)
    is_over = engine.state.time_ms > promise.by_ms
    kept = started_ms <= promise.by_ms if started_ms is not None else False if is_over and not job.started else None
    return PromisedStart(
        by_ms=promise.by_ms, told_ms=promise.told_ms, p50_ms=promise.p50_ms, runs=promise.runs, kept=kept
    )


def _started_ms(rows: list[tuple[int, int, bool]]) -> int | None:
    """Return when the first attempt began to run; None if none has, or if the oldest rows are there no more.

    `rows` are the transitions: (revision, when in ledger ms, whether it began to run).
    """
    return next((at_ms for _, at_ms, begins in rows if begins), None) if rows and rows[0][0] <= _FIRST_REV else None


def _newest(engine: Engine, job: Job) -> list[Change]:
    """Return the last transitions in memory, as many as fit; `history` has all of them."""
    changes = changes_since(engine.state, job, 0)
    fit = len(changes) if len(changes) <= CHANGES_SURE else fitting(changes[::-1], SHOWN_BYTES_MAX)
    return changes[-fit:]


def show_history(engine: Engine, frame: Frame, found: Found, changes: list[Change], row: ShownJob) -> ShownJob:
    """Return a finished job with this row of the table as `show` has it from its history, which is in this frame.

    The request is missing if the history was written without it.
    """
    request = request_in(found)
    fit = fitting(changes[::-1], SHOWN_BYTES_MAX)
    shown = from_history(
        engine,
        frame,
        found,
        changes,
        sending(ShownJob, "accepted_ms", "accepted_ledger", "changes"),
        accepted_ms=found.accepted_ms,
        accepted_ledger=found.ledger,
        peaks=peaks_of(found.peaks),
        waited=found.waited,
        started_ms=_started_ms([(change.rev, change.time_ms, change.state == RUNS) for change in changes]),
        changes=changes[-fit:],
        kept=row.kept,
    )
    if request is None:
        return shown
    return msgspec.structs.replace(
        shown,
        request=request,
        capabilities=_capabilities(engine, request),
        usage=None if found.parts else usage_of_history(found, changes, request),
        again=reruns(engine, frame.tenant, found.job, request)[1],
    )


def from_history(engine: Engine, frame: Frame, found: Found, changes: list[Change], kind: type[R], /, **more: Any) -> R:
    """Return the row of a job whose history is in this frame, with `more` fields that its kind has."""
    ran = [change for change in changes if change.worker]
    request = request_in(found)
    known: dict[str, Any] = {}
    if request is not None:
        kind = sending(kind, "priority")
        known = {
            "gpu": request.token,
            "priority": request.priority,
            "replicas": _ended_replicas(frame, found, request),
        }
    return sending(kind, *_TOLD)(
        job=found.job,
        tenant=frame.tenant,
        compacted=True,
        reported=last_reported(found.reported),
        state=found.state,
        rev=found.rev,
        ended_ms=changes[-1].time_ms,
        age_ms=engine.state.time_ms - found.accepted_ms,
        attempt=max(change.attempt for change in changes),
        worker=ran[-1].worker if ran else "",
        ran_ms=_ran_ms([(change.attempt, change.time_ms, change.state == RUNS) for change in ran]),
        simulated=any(is_simulated(frame, change) for change in ran),
        code=decided_code(found.state, [(change.state, change.attempt, change.code) for change in ran]),
        why=_newest_reason(
            (each.replica, each.state == "PLACED", each.why)
            for each in reversed(changes)
            if each.state in STATES
            and each.state != STATES[RUNNING]  # and no operator's order; see NO_REASONS
            and not _asked_of_others(found.state, each.state, each.by)
        ),
        **known,
        **more,
    )


def _capabilities(engine: Engine, request: Request) -> Any:
    """Return the capabilities of a request's driver, as its worker's hello has them; None if no worker reports them."""
    driver = request.workload.driver
    for cls in engine.fleet.classes.values():
        host = next(iter(cls.hosts.values()), None) if driver in cls.drivers else None
        told = host.worker.hello.get("capabilities", {}).get(driver) if host is not None else None
        if told is not None:
            return told
    return None


def request_in(found: Found) -> Request | None:
    """Return the request kept in the history; None if it was kept without."""
    try:
        return decode_request(bytes(found.request))
    except Refused:
        return None


def _kept_until(engine: Engine, ended_ms: int, output: dict[str, int]) -> Kept:
    """Return until when, in ledger ms, the remains of an ended job are kept; `output` is by worker."""
    config = engine.config
    return Kept(
        job_ms=ended_ms + config.finished_keep_ms,
        history_ms=ended_ms + int(config.history_keep * 1000),
        output_ms=output,
    )


def _output_until(engine: Engine, job: Job) -> dict[str, int]:
    """Return, by worker, when it deletes the job's newest output or result, unless it runs out of room before."""
    until: dict[str, int] = {}
    for row in job.history[-CEILINGS.history :] if not job.is_listed else job.history:
        if row[WORKER] < 0:
            continue
        worker = engine.state.worker_by_num[row[WORKER]]
        keeps = worker.inventory.keeps
        keep_s = keeps.get("output_s", keeps.get("result_s"))
        if keep_s is not None:
            until[worker.id] = row[AT_MS] + int(keep_s * 1000)
    return until


def scaled(engine: Engine, job: Job) -> Scaled | None:
    """Return how many members are wanted of a service whose number follows its calls; None for other jobs."""
    request = engine.reader.request_of(job)
    if request.scale is None or job.over:
        return None
    wanted, least, most = wanted_of(job, request), request.scale.min, request.scale.max
    if job.scaled is None:
        return Scaled(wanted=wanted, min=least, max=most)
    since_ms = engine.state.time_ms - job.scaled.since_ms
    return Scaled(wanted=wanted, min=least, max=most, since_ms=since_ms, why=job.scaled.why)


def finished_row(engine: Engine, tenant: str, name: str, kind: type[F]) -> F | Problem:
    """Return what the table of finished jobs has of a job; a `not-found` problem if it has none."""
    row = engine.state.finished.find(job_key(tenant, name))
    if row is None:
        return no_job(tenant, name, engine.services.newest(tenant, name))
    return kind(
        job=name,
        tenant=tenant,
        state=STATES[row[2]],
        ended_ms=row[1] * 1000,
        compacted=True,
        kept=_kept_until(engine, row[1] * 1000, {}),
    )


def last_worker_of(engine: Engine, job: Job) -> str:
    """Return the worker of the newest of a job's transitions that has one; "" if none has."""
    last = next((row[WORKER] for row in reversed(job.history) if row[WORKER] >= 0), None)
    return "" if last is None else engine.state.worker_by_num[last].id


def summary(engine: Engine, job: Job) -> JobRow:
    """Return a job's row of `ls`, without its labels and the reason for which it waits."""
    return _summary(engine, job, _ROW)


def _summary(engine: Engine, job: Job, kind: type[R], **more: Any) -> R:
    request = engine.reader.request_of(job)
    attempts = [replica.attempt for replica in job.rows.values()] if job.held else []
    held = {attempt.worker.id: None for attempt in attempts if attempt is not None}
    return kind(
        job=job.name,
        tenant=job.tenant,
        state=job.state,
        rev=job.rev,
        gpu=request.token,
        priority=engine.reader.priority_of(job) if job.priority >= 0 else request.priority,
        attempt=job.attempt_no,
        age_ms=engine.state.time_ms - job.accepted_ms,
        ran_ms=_ran(engine, job),
        ready=None if request.workload.ready is None else sum(ready_now(attempt) for attempt in attempts),
        worker=next(iter(held), "") or last_worker_of(engine, job),
        workers=max(1, len(held)),
        simulated=_is_simulated(engine, job),
        code=exit_code_of(job),
        why=held_by(job.hold) if job.hold and job.live else _why(job),
        waiting=job.waits if job.held else 0,
        after=awaited(engine, job) if waits_for_others(job) else [],
        not_before_ms=not_before(job),
        stalled=stalled_rows(engine, job),
        replicas=replicas_of(job) if job.size > 1 else None,
        hold=as_hold(job.hold) if job.hold is not None else None,
        resized=resized_of(job) if job.resizes else None,
        bounds=_bounds(engine, job) if job.bounds else None,
        use=use_of_job(engine, job) if job.held else None,
        reported=reported_of(engine, job),
        **more,
    )


def _bounds(engine: Engine, job: Job) -> BoundsNow:
    """Return what stands in place of the request's fields since a `change`."""
    most, limit_ms = job.bounds_at()
    limits = [engine.reader.limit_ms_of(job, each.fence) for each in running_of(job)]
    known = [each for each in limits if each is not None]
    longest = max(known) if known and len(known) == len(limits) else None
    own_s = engine.reader.request_of(job).workload.timeout_s
    return BoundsNow(
        max_running=most if most >= 0 else None,
        timeout_s=limit_ms / 1000 if limit_ms >= 0 else None,
        running_timeout_s=None if longest is None or longest / 1000 == own_s else longest / 1000,
    )


def ready_now(attempt: Attempt | None) -> bool:
    """Return whether a replica with this attempt runs and is ready for work."""
    return attempt is not None and attempt.ready and attempt.replica.state == RUNNING


def _ran(engine: Engine, job: Job) -> int | None:
    """Return for how many ms the newest attempt has run, or ran; None of a job that waits or has not run."""
    if job.state == STATES[QUEUED] or not job.history:
        return None
    on_workers = [(row[ATTEMPT], row[AT_MS], row[STATE] == RUNNING) for row in job.history if row[WORKER] >= 0]
    return _ran_ms(on_workers, engine.state.time_ms if job.live else None)


def _ran_ms(on_workers: list[tuple[int, int, bool]], now_ms: int | None = None) -> int | None:
    """Return the ms since the newest attempt began to run, the first of its replicas; None if none ran.

    `on_workers` are the transitions on workers: (attempt, when in ledger ms, whether it began to run). Without `now_ms`
    the job is over: it ran until the last one of that attempt, and may have waited for another one since.
    """
    newest, began_ms = min(((-attempt, at_ms) for attempt, at_ms, begins in on_workers if begins), default=(0, None))
    if began_ms is None:
        return None
    ended_ms = max(at_ms for attempt, at_ms, _ in on_workers if attempt == -newest) if now_ms is None else now_ms
    return ended_ms - began_ms


def stalled_rows(engine: Engine, job: Job) -> list[ReplicaStall]:
    """Return the stalls of a job."""
    stalls = engine.sessions.stalls.of_job(job)
    return [ReplicaStall(replica=each.replica, seconds=each.seconds, why=each.why) for each in stalls]


def _why(job: Job) -> str:
    """Return the newest reason that still applies.

    What an operator said of an order (a row with a negative state) is no reason for the end of a job, and what somebody
    said who cancelled some of its replicas is none for the others.
    """
    rows = (row for row in reversed(job.history) if not _asked_of_others(job.state, HISTORY_WORDS[row[STATE]], row[BY]))
    rows = (row for row in rows if row[STATE] not in NO_REASONS)
    if not job.is_listed:
        return next((row[WHY] for row in rows if row[WHY] and is_exception(row)), "")
    rows = (row for row in rows if job.live or row[STATE] >= 0)
    return _newest_reason((row[REPLICA], row[STATE] == PLACED, row[WHY]) for row in rows)


def _newest_reason(newest_first: Iterable[tuple[int, bool, str]]) -> str:
    """Return the newest reason that still applies, one of the requester before the worker's "ended as asked"."""
    reasons = standing_reasons(newest_first)
    return next((why for why in reasons if not is_as_asked(why)), reasons[0] if reasons else "")


def _asked_of_others(job: str, state: str, by: str) -> bool:
    """Return whether somebody cancelled a replica with this transition, and the job is in another state, `job`."""
    return bool(by) and state in _CANCELS and job not in _CANCELS


def standing_reasons(newest_first: Iterable[tuple[int, bool, str]]) -> list[str]:
    """Return the reasons in a history that still apply, newest first; those from before a later attempt do not.

    Each transition is (replica, or negative for the job; whether an attempt began with it; reason).
    """
    begun: set[int] = set()
    reasons = []
    for replica, begins, why in newest_first:
        if begins:
            begun.add(replica)
        elif why and replica not in begun and not (begun and (replica < 0 or -1 in begun)):
            reasons.append(why)
    return reasons


def _is_simulated(engine: Engine, job: Job) -> bool:
    """Return whether any replica was placed on a simulated worker."""
    return were_simulated(engine.state, job.history if job.is_listed else job.history[-SIMULATED_LOOKS:])


def replicas_of(job: Job) -> ReplicaCounts:
    """Return how many replicas are in which state, and which of them ended without success."""
    none = job.unreached
    own = {STATES[state]: without(numbers, none) for state, numbers in job.unsuccessful}
    ended = {state: format_ranges(numbers, RANGES_SHOWN) for state, numbers in own.items() if numbers}
    return ReplicaCounts(of=job.copies, states=job.counts, ended=ended)


def _ended_replicas(frame: Frame, found: Found, request: Request) -> ReplicaCounts | None:
    """Return the same of a job in the history stream; None for a job of one."""
    if request.copies == 1 or request.scale is not None:
        return None
    ended = unsuccessful(frame, found)
    counts = {state: count_of(numbers) for state, numbers in ended.items()}
    # of a service more may have ended than its request asks for: the members that moved
    counts = {SUCCEEDED: max(0, request.copies - sum(counts.values()))} | counts
    named = {state: format_ranges(numbers, RANGES_SHOWN) for state, numbers in ended.items()}
    states = {state: count for state, count in counts.items() if count}
    return ReplicaCounts(of=request.copies, states=states, ended=named)


def states_of(engine: Engine, job: Job, only: Ranges) -> tuple[list[ReplicaInfo], list[int]]:
    """Return the rows of these replicas in `show`, and the numbers of those whose end only the history has."""
    last = {row[REPLICA]: row for row in job.history if row[WORKER] >= 0}
    found, missing = list[ReplicaInfo](), list[int]()
    for index in numbers_in(both(only, job.numbers)):
        row, told, state = job.rows.get(index), last.get(index), job.state_of(index)
        if row is not None:
            found.append(_replica(engine, row))
        elif state == QUEUED or told is not None:
            ended = told or (0, 0, index, 0, QUEUED, -1, 0, 0, "", 0, "")
            found.append(_ended(engine, index, STATES[state or QUEUED], ended))
        else:
            missing.append(index)
    return found, missing


def _ended(engine: Engine, index: int, state: str, row: Transition) -> ReplicaInfo:
    worker = engine.state.worker_by_num[row[WORKER]].id if row[WORKER] >= 0 else ""
    code = code_of(row[STATE], row[CODE]) if worker else None
    result = next(iter(row[RESULT:]), None)
    return ended_row(index, state, row[ATTEMPT], row[FENCE], worker, code, row[AT_MS], row[WHY], result)


def ended_row(
    index: int,
    state: str,
    attempt: int,
    fence: int,
    worker: str,
    code: int | None,
    ms: int,
    why: str,
    result: int | None,
) -> ReplicaInfo:
    """Return the row in `show` of a replica without an attempt, with what ended its last one. `result` is as in
    `Change`."""
    return sending(ReplicaInfo, "attempt", "fence")(
        replica=index,
        state=state,
        attempt=attempt,
        fence=fence,
        ran_on=worker,
        ended_ms=ms if worker else 0,
        result=result,
        code=code,
        why=why,
    )


def _on_each(engine: Engine, job: Job) -> list[ReplicaInfo]:
    """Return the rows of the replicas of a job for each worker, as far as they began or wait for one that is here."""
    begun = without(without(job.numbers, job.fresh), job.unreached)
    waiting = engine.queue.waiting.get(job.num)
    here = () if waiting is None else without(waiting.fresh, begun)
    return states_of(engine, job, joined(sorted((*begun, *here))))[0][:LISTED_MAX]


def listed(job: Job) -> list[Replica]:
    """Return the replicas that `show` lists: of few all, of many those that were placed and have not ended."""
    if not job.is_listed:
        return list(job.rows.values())[:LISTED_MAX]
    last = {row[REPLICA]: row for row in job.history if row[FENCE]}
    found = list(job.replicas)
    for replica in found:
        if IS_TERMINAL[replica.state] and (row := last.get(replica.index)) is not None:
            replica.attempt_no, replica.fence = row[ATTEMPT], row[FENCE]
    return found


def _replica(engine: Engine, replica: Replica) -> ReplicaInfo:
    attempt = replica.attempt
    row = sending(ReplicaInfo, "attempt", "fence", "retries", "losses", "refusals")(
        replica=replica.index,
        state=STATES[replica.state],
        attempt=replica.attempt_no,
        fence=replica.fence,
        retries=replica.retries,
        losses=replica.losses,
        refusals=replica.refusals,
        restarts=replica.restarts,
    )
    request = engine.reader.request_of(replica.job)
    if request.retry and not IS_TERMINAL[replica.state]:
        row = msgspec.structs.replace(sent(row), tries=words_of(request, replica))
    if attempt is None:
        return row
    host = engine.fleet.hosts.get(attempt.worker.num)
    told = None if host is None else host.reported.get(attempt.name)
    return msgspec.structs.replace(
        sent(row, gpus=gpu_names(attempt.worker, attempt.mask, attempt.fence)),
        worker=attempt.worker.id,
        waits_for=gpu_names(attempt.worker, attempt.home, attempt.fence) if attempt.mask != attempt.home else [],
        mode=MODE_NAMES[attempt.mode],
        ready=attempt.ready if replica.state == RUNNING and request.workload.ready is not None else None,
        address=attempt.address,
        enforced=enforced_on(attempt.worker.inventory.capabilities, request),
        use=use_rows(engine, attempt),
        reported={} if told is None else told.values,
        report_refused="" if told is None else told.refused,
        stopped=host.stopped.get(attempt.name, 0) if host is not None and replica.state == RUNNING else 0,
        checkpoint=None if request.workload.checkpoint is None else _checkpoint(engine, attempt, request),
    )


def _checkpoint(engine: Engine, attempt: Attempt, request: Request) -> CheckpointInfo | None:
    """Return what is known of the checkpoints of an attempt; None for nothing."""
    saved = {no: (ms, step if step >= 0 else None) for no, ms, step in attempt.replica.saved}
    before = max((no for no in saved if no < attempt.no), default=0)
    from_ms, from_step = saved.get(before, (None, None))
    if attempt.replica.job.gang:
        before, began = attempt.begun or NO_SET
        from_ms, from_step = from_ms if from_step == began else None, began or None
    stored_ms, step = saved.get(attempt.no, (None, None))
    info = CheckpointInfo(
        from_ms=from_ms, from_step=from_step, from_attempt=before or None, stored_ms=stored_ms, step=step,
        not_stored=attempt.unstored or ("" if stored_ms else _none_found(engine, attempt, request)),
    )  # fmt: skip
    return info if info != CheckpointInfo() else None


def _none_found(engine: Engine, attempt: Attempt, request: Request) -> str:
    """Return that an attempt has stored no checkpoint though one has been due for long; "" if it need not have."""
    run, ran_ms = request.workload, engine.state.time_ms - attempt.began_ms
    if attempt.phase != AT_RUNNING or not run.checkpoint_every_s or ran_ms < run.checkpoint_every_s * 1000 + LATE_MS:
        return ""
    return f"it runs for {ran_ms // 1000}s, and no {run.checkpoint} was seen in its folder"


def held_by(hold: StandingOrder) -> str:
    """Return a text such as `held by operator:ana (says root): maintenance`."""
    return f"held by {actors.words(*actors.split(hold.actor))}" + (f": {hold.why}" if hold.why else "")


def tenants(engine: Engine, counts: Counts) -> TenantsAnswer:
    """Return the tenants with live jobs, leases or operators' orders, those with most GPUs first.

    At most `LS_MAX` are listed; `of` is their number. `waits` is how long the jobs waited that started in this term,
    for monitors (see `waited`), `ended` how many jobs ended in it, by tenant and state, and `services` what became of
    calls.
    """
    state = engine.state
    rows = [
        TenantRow(
            row.name,
            row.live,
            row.gpus,
            as_hold(row.hold),
            limit_of(state, row),
            share_of(row),
            usage_milli(state, row),
            fairkeys.live(row),
        )
        for row in state.tenants.values()
        if row.live or row.gpus or row.ordered
    ]
    rows.sort(key=lambda row: (-row.gpus, -row.jobs, row.tenant))
    calls = counts.calls.rows(engine.built_ms)
    return TenantsAnswer(
        tenants=rows[:LS_MAX],
        of=len(rows),
        waits=counts.waits,
        ended=counts.outcomes.as_data(),
        services=calls,
        counters=counters_of(state),
        promises=counts.promises.rows,
    )


def by_name(engine: Engine) -> list[Worker]:
    """Return all workers but those that an operator had forgotten, sorted by name.

    The ledger numbers them in the order in which they first joined.
    """
    listed = (worker for worker in engine.state.workers.values() if not worker.is_unlisted)
    return sorted(listed, key=attrgetter("id"))


def fleet(engine: Engine, mono_ms: int, after: str = "", only: str = "") -> FleetAnswer:
    """Return the workers by name (session, free GPUs, problems), and the largest request that would start now.

    As many workers as fit one answer, from behind the one called `after`; if there are more, `next` is the last name.
    With `only`, that worker alone, with all details of its devices.
    """
    workers: list[WorkerInfo] = []
    size, more = 0, False
    for worker in by_name(engine):
        if worker.id <= after or (only and worker.id != only):
            continue
        if more := size > FLEET_BYTES:
            break
        workers.append(_worker(engine, worker, mono_ms, with_devices=bool(only)))
        size += len(encode(workers[-1]))
    state, stalls, config = engine.state, list(engine.sessions.stalls.jobs()), engine.config
    oldest = state.finished.oldest_ms()
    return FleetAnswer(
        epoch=state.epoch,
        leader=state.leader,
        ledger=state.seq,
        workers=workers,
        next=workers[-1].worker if more else "",
        queued=View(engine).queued(),
        live_jobs=state.live,
        finished_kept=len(state.finished) + len(state.ended),
        finished_window_ms=min(state.time_ms - oldest, config.finished_keep_ms) if oldest is not None else 0,
        fits_now=fits_now(engine),
        used_now=used_now(engine),
        stalled_jobs=len(stalls),
        stalled=[
            StalledJob(tenant=job.tenant, job=job.name, seconds=found[0].seconds, why=found[0].why)
            for job, found in stalls[:STALLED_MAX]
        ],
        keeps=Keeps(
            finished_keep=config.finished_keep,
            finished_rows=config.finished_rows,
            history_keep=config.history_keep,
            history_bytes=config.history_bytes,
        ),
    )


def fits_now(engine: Engine) -> list[Fits]:
    """Return, by model, the number of GPUs, of free ones, and of GPUs that one request could have now on one host.

    CPU and memory are not considered.
    """
    best: dict[str, list[int]] = {}
    for cls in engine.fleet.classes.values():
        by_name: dict[str, int] = {}
        for slot, device in enumerate(cls.devices):
            by_name[device[2]] = by_name.get(device[2], 0) | 1 << slot
        for name, mask in by_name.items():
            row = best.setdefault(name, [0, 0, 0])
            for host in cls.hosts.values():
                free = host.open & mask if host.usable and not host.disk_full else 0
                row[0] += mask.bit_count()
                row[1] += free.bit_count()
                row[2] = max(row[2], (free & cls.takes[EXCLUSIVE]).bit_count())
    return [
        Fits(model=name, gpus=total, free=free, largest=largest)
        for name, (total, free, largest) in sorted(best.items())
    ]


def _worker(engine: Engine, worker: Worker, mono_ms: int, *, with_devices: bool) -> WorkerInfo:
    host, has, now_ms = engine.fleet.hosts.get(worker.num), worker.inventory, engine.state.time_ms
    pool = has.gpu_pool
    by, said = actors.split(worker.by)
    is_closed = worker.flag != "open" and not worker.until_ms
    return WorkerInfo(
        worker=worker.id,
        state=worker_state(worker, host),
        flag=worker.flag,
        by=by,
        said=said,
        why=worker.why if is_closed else None,
        since_ms=now_ms - worker.flag_ms if is_closed else None,
        simulated=has.simulated,
        models=sorted({device.name for device in pool}),
        gpus=len(pool),
        free=host.open.bit_count() if host is not None and not (host.disk_full or host.agent_stopped) else 0,
        cells=cells(host, len(pool)),
        members=len(worker.attempts),
        cpu_milli=has.cpu_milli,
        cpu_free_milli=host.cpu_free if host is not None else 0,
        memory_mib=has.memory_mib,
        memory_free_mib=host.memory_free if host is not None else 0,
        labels=has.labels,
        drivers=has.drivers,
        capabilities=worker.hello.get("capabilities", {}),
        release=has.release,
        lease_s=engine.config.lease_of(has.lease_s),
        heard_ms_ago=mono_ms - host.last_ms if host is not None and host.heard else None,
        quarantined=slots_of(worker.quarantined),
        troubles=troubles(worker, host, now_ms),
        drain=drain_of(worker, now_ms) if worker.window is not None else None,
        starts_fail=starts_fail_of(worker, now_ms) if worker.until_ms else None,
        drivers_down=drivers_down_of(host) if host is not None else [],
        warning="; ".join(filter(None, (host.warning if host is not None else "", _marked(engine, worker)))),
        keeps=has.keeps,
        devices=_devices(worker) if with_devices else None,
    )


def _marked(engine: Engine, worker: Worker) -> str:
    """Return why a worker comes last for jobs that others could hold; "" if it does not."""
    return JOBS_FAIL_HERE if engine.lifecycle.starts.quick.is_avoided(worker.num) else ""


def _devices(worker: Worker) -> list[Any]:
    """Return the devices by slot, as the worker described them: `DeviceRow` with whatever else its release reports."""
    return [{"slot": slot, **device} for slot, device in enumerate(worker.hello.get("gpu_pool", ()))]


def worker_state(worker: Worker, host: Host | None) -> str:
    if not worker.session or host is None:
        return "left" if worker.left_why == GOODBYE else "lost"
    if not host.heard:
        return "not-heard"
    if worker.flag != "open":
        return worker.flag
    if host.leaves_ms is not None:
        return "leaving"
    if host.agent_stopped:
        return AGENT_STOPPED
    if host.stale:
        return "stale"
    if host.disk_full:
        return DISK_FULL
    return "claimed-locally" if host.waiting else "up"


def troubles(worker: Worker, host: Host | None, now_ms: int) -> list[DeviceTrouble]:
    """Return the devices that are not given out, or whose worker warns of something, with the problem and its detail.

    Despite its name, `since_ms` is for how many ms a worker has reported the device as unhealthy.
    """
    pool = worker.inventory.gpu_pool
    rows: dict[int, tuple[str, str, int | None, bool]] = {}  # by slot: kind, detail, since when, whether recorded
    if host is not None:
        for slot, (kind, detail) in (*host.warnings.items(), *host.troubles.items()):
            rows[slot] = kind, detail, None, False
    for slot in slots_of(worker.quarantined):
        rows[slot] = "quarantined", "its memory did not come back, or what ran there could not be ended", None, True
    for slot, (kind, detail, since_ms, _) in worker.unwell.items():
        rows[slot] = kind, detail, now_ms - since_ms, True
    return [
        DeviceTrouble(
            slot=slot,
            gpu=pool[slot].uuid if slot < len(pool) else "",
            kind=kind,
            detail=detail,
            since_ms=since,
            recorded=recorded,
        )
        for slot, (kind, detail, since, recorded) in sorted(rows.items())
    ]


def drivers_down_of(host: Host) -> list[DriverDownRow]:
    """Return the drivers whose engine does not answer, with why, and for how many seconds that has been so."""
    return [DriverDownRow(driver=driver, why=why, for_s=for_s) for driver, (why, for_s) in sorted(host.down.items())]


def starts_fail_of(worker: Worker, now_ms: int) -> StartsFail:
    """Return in how many ms a worker opens that is closed because starts fail on it, and why the last one failed."""
    return StartsFail(opens_in_ms=max(0, worker.until_ms - now_ms), why=worker.why)


def drain_of(worker: Worker, now_ms: int) -> DrainTimes:
    """Return a planned or bounded drain: in how many ms it begins, jobs must have left, and it ends."""
    window = worker.window
    assert window is not None
    by, said = actors.split(window.by)
    return DrainTimes(
        begins_in_ms=max(0, window.from_ms - now_ms),
        leave_in_ms=max(0, window.leave_ms - now_ms),
        ends_in_ms=max(0, window.until_ms - now_ms) if window.until_ms else None,
        by=by,
        said=said,
        why=window.why,
    )


def cells(host: Host | None, size: int) -> str:
    """Return one character for each GPU, from `moorage.schemas.cells`; without a host all are LOST."""
    if host is None:
        return LOST * size
    text = ""
    for slot in range(size):
        bit = 1 << slot
        device = host.shared.get(slot)
        if (host.sick | host.worker.quarantined | host.worker.unwell_mask) & bit:
            text += FOREIGN if host.troubles.get(slot, ("",))[0] == "foreign" else SICK
        elif device is not None:
            text += str(min(device.users, SHARERS_MAX))
        elif not host.free & bit:
            text += LEASED if host.lent & bit else NOT_LENT
        elif host.awaited & bit:
            text += FROZEN
        elif host.busy & bit:
            text += FOREIGN
        else:
            text += FREE
    return text


def audit(engine: Engine) -> Audit:
    """Compare the ledger with what each worker's renewals reported; `drift` is empty if they agree.

    Only a difference shown by a worker's last two renewals is drift: a newer one may still be on its way. A worker is
    reported silent once it has had time for a renewal.
    """
    drift: list[Drift] = []
    patience_ms = BEHIND_RENEWALS * engine.config.renew_s * 1000
    for worker in engine.state.workers.values():
        if not worker.session:
            continue
        renewal, host = engine.sessions.renewals.get(worker.num), engine.fleet.hosts.get(worker.num)
        if renewal is None:
            if host is None or engine.built_ms - host.last_ms > patience_ms:
                drift.append(Drift(worker=worker.id, kind="silent"))
            continue
        for key, attempt in worker.attempts.items():
            if attempt.missed > 1 and attempt.phase not in (AT_PLACED, AT_EXITED):
                drift.append(Drift(worker=worker.id, kind="ledger-only", member=_name(key)))
        for key in sorted(renewal.twice - worker.attempts.keys()):
            drift.append(Drift(worker=worker.id, kind="worker-only", member=_name(key)))
    return Audit(
        drift=drift,
        workers=sum(1 for worker in engine.state.workers.values() if worker.session),
        members=sum(len(worker.attempts) for worker in engine.state.workers.values()),
        leases=sum(m.mask.bit_count() for m in engine.state.attempts()),
        without_lease=sum(m.mask != m.home for m in engine.state.attempts()),
    )


def _name(name: AttemptName) -> str:
    tenant, job, replica, _, fence = name
    return f"{tenant}/{job}/{replica} fence {fence}"
