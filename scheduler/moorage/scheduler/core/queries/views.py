"""Answers of the reading verbs, built from the folded state and the fleet view as plain data for the wire."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, Final

import msgspec

from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.fleet.host import EXCLUSIVE, Host
from moorage.scheduler.core.ledger.beside import beside
from moorage.scheduler.core.ledger.fairshare import usage_milli
from moorage.scheduler.core.ledger.finished import job_key
from moorage.scheduler.core.ledger.records import GOODBYE, MODE_NAMES, Mode
from moorage.scheduler.core.ledger.state import (
    AT_EXITED,
    AT_MS,
    AT_PLACED,
    ATTEMPT,
    CODE,
    FENCE,
    PLACED,
    REPLICA,
    STATE,
    WHY,
    WORKER,
    Job,
    Replica,
    StandingOrder,
    Worker,
    code_of,
)
from moorage.scheduler.core.lifecycle.stale_ledger import BEHIND_RENEWALS
from moorage.scheduler.core.operate.orders import as_hold, limit_of, share_of
from moorage.scheduler.core.operate.resizing import resized_of
from moorage.scheduler.core.outputs.outputs import (
    CHANGES_SURE,
    SHOWN_BYTES_MAX,
    changes_since,
    enforced_on,
    fitting,
    gpu_names,
    slots_of,
)
from moorage.scheduler.core.outputs.told_story import Found, Frame, is_simulated
from moorage.scheduler.core.queries.usage import usage_of_job, usage_of_story
from moorage.scheduler.core.queries.use import use_of_job, use_rows, used_now
from moorage.scheduler.core.queries.view import View
from moorage.schemas import actors
from moorage.schemas.cells import FOREIGN, FREE, FROZEN, GUEST, LEASED, LOST, NOT_LENT, SHARERS_MAX, SICK
from moorage.schemas.codec import decode_request, encode
from moorage.schemas.errors import ENDED_AS_ASKED, Problem, Refused, problem
from moorage.schemas.frames import Change
from moorage.schemas.gpu import format_token
from moorage.schemas.job import STATES, Request
from moorage.schemas.operate import TenantRow

LS_MAX: Final = 1000
#: bytes of workers' rows in one answer: half of what a server accepts, some 2,000 hosts of 8 GPUs
FLEET_BYTES: Final = 512 * 1024
LS_HELP: Final = "moorage ls --help"
CONTENDED_AT: Final = 5


def show(engine: Engine, tenant: str, name: str, *, follow: bool = True) -> dict[str, Any] | Problem:
    """Return one job in full: its request, replicas and last transitions; of one not in memory, its `finished_row`.

    With `follow`, later events of the job are also sent on the job's own subject. A caller that receives the tenant's
    events does not need that.
    """
    job = engine.state.job(tenant, name)
    if job is None:
        return finished_row(engine, tenant, name)
    request = decode_request(job.body)
    if follow:
        job.own_subject = True
    return {
        **summary(engine, job),
        "own_subject": follow or engine.own_subject(job),
        **usage_of_job(engine, job),
        "accepted_ledger": job.ledger,
        "request": msgspec.to_builtins(request),
        **_capabilities(engine, request),
        "replica_states": [_replica(engine, replica) for replica in job.replicas],
        "changes": _newest(engine, job),
        **(
            {"kept": _kept_until(engine, job.story[-1][AT_MS], _output_until(engine, job))}
            if job.over and job.story
            else {}
        ),
    }


def _newest(engine: Engine, job: Job) -> list[dict[str, Any]]:
    """Return the last transitions in memory, as many as fit; `history` has all of them."""
    changes = changes_since(engine.state, job, 0)
    fit = len(changes) if len(changes) <= CHANGES_SURE else fitting(changes[::-1], SHOWN_BYTES_MAX)
    data: list[dict[str, Any]] = msgspec.to_builtins(changes[-fit:])
    return data


def of_story(engine: Engine, frame: Frame, found: Found, changes: list[Change]) -> dict[str, Any]:
    """Return what `show` adds to the row of a finished job from its history, which stands in this frame.

    The request is missing if the history was written without it.
    """
    ran = [change for change in changes if change.worker]
    fit = fitting(changes[::-1], SHOWN_BYTES_MAX)
    data: dict[str, Any] = {
        "state": found.state,
        "rev": found.rev,
        "accepted_ms": found.accepted_ms,
        "accepted_ledger": found.ledger,
        "ended_ms": changes[-1].time_ms,
        "age_ms": engine.state.time_ms - found.accepted_ms,
        "attempt": max(change.attempt for change in changes),
        "worker": ran[-1].worker if ran else "",
        "simulated": any(is_simulated(frame, change) for change in ran),
        "code": _code(found.state, [(change.state, change.attempt, change.code) for change in ran]),
        "why": next(
            iter(
                standing_reasons(
                    (each.replica, each.state == "PLACED", each.why)
                    for each in reversed(changes)
                    if each.state in STATES  # and no operator's order
                )
            ),
            "",
        ),
        "changes": msgspec.to_builtins(changes[-fit:]),
    }
    request = request_in(found)
    if request is None:
        return data
    return data | {
        "gpu": format_token(request.effective_gpu, request.replicas),
        "priority": request.priority,
        "request": msgspec.to_builtins(request),
        **_capabilities(engine, request),
        **({} if found.parts else usage_of_story(found, changes, request)),
    }


def _capabilities(engine: Engine, request: Request) -> dict[str, Any]:
    """Return the capabilities of a request's driver, as a part of an answer; empty if no worker reports them."""
    driver = request.workload.driver
    for cls in engine.fleet.classes.values():
        host = next(iter(cls.hosts.values()), None) if driver in cls.drivers else None
        told = host.worker.hello.get("capabilities", {}).get(driver) if host is not None else None
        if told is not None:
            return {"capabilities": told}
    return {}


def request_in(found: Found) -> Request | None:
    """Return the request kept in the history; None if it was kept without."""
    try:
        return decode_request(bytes(found.request))
    except Refused:
        return None


def _kept_until(engine: Engine, ended_ms: int, output: dict[str, int]) -> dict[str, Any]:
    """Return until when, in ledger ms, the remains of an ended job are kept; `output` is by worker."""
    config = engine.config
    return {
        "job_ms": ended_ms + config.finished_keep_ms,
        "history_ms": ended_ms + int(config.history_keep * 1000),
        "output_ms": output,
    }


def _output_until(engine: Engine, job: Job) -> dict[str, int]:
    """Return, by worker, when it deletes the job's newest output or result, unless it runs out of room before."""
    until: dict[str, int] = {}
    for row in job.story:
        if row[WORKER] < 0:
            continue
        worker = engine.state.worker_by_num[row[WORKER]]
        keeps = worker.hello.get("keeps", {})
        keep_s = keeps.get("output_s", keeps.get("result_s"))
        if keep_s is not None:
            until[worker.id] = row[AT_MS] + int(keep_s * 1000)
    return until


def finished_row(engine: Engine, tenant: str, name: str) -> dict[str, Any] | Problem:
    """Return what the table of finished jobs has of a job; a `not-found` problem if it has none."""
    row = engine.state.finished.find(job_key(tenant, name))
    if row is None:
        return problem("not-found", f"no job {name} of tenant {tenant}", job=name, next="moorage ls")
    return {
        "job": name,
        "tenant": tenant,
        "state": STATES[row[2]],
        "ended_ms": row[1] * 1000,
        "compacted": True,
        "kept": _kept_until(engine, row[1] * 1000, {}),
    }


def summary(engine: Engine, job: Job) -> dict[str, Any]:
    """Return a job's row of `ls`."""
    request = engine.request_of(job)
    last = job.story[-1] if job.story else None
    members = [replica.member for replica in job.replicas] if job.held else []
    held = {member.worker.id: None for member in members if member is not None}
    worker = next(iter(held), "")
    if not worker and last is not None and last[WORKER] >= 0:
        worker = engine.state.worker_by_num[last[WORKER]].id
    return {
        "job": job.name,
        "tenant": job.tenant,
        "state": job.state,
        "rev": job.rev,
        "gpu": format_token(request.effective_gpu, request.replicas),
        "priority": engine.priority_of(job) if job.priority >= 0 else request.priority,
        "attempt": max([replica.attempt for replica in job.replicas]) if job.rev > 1 else 0,
        "age_ms": engine.state.time_ms - job.accepted_ms,
        "worker": worker,
        **({"workers": len(held)} if len(held) > 1 else {}),
        "simulated": _is_simulated(engine, job),
        # unknown until all replicas have ended
        "code": None
        if job.live
        else _code(
            job.state,
            [
                (STATES[row[STATE]], row[ATTEMPT], code_of(row[STATE], row[CODE]))
                for row in job.story
                if row[WORKER] >= 0
            ],
        ),
        "why": held_by(job.hold) if job.hold and job.live else _why(job),
        **({"hold": msgspec.to_builtins(as_hold(job.hold))} if job.hold is not None else {}),
        **({"resized": msgspec.to_builtins(resized_of(job))} if job.resizes else {}),
        **({"use": used} if job.held and (used := use_of_job(engine, job)) else {}),
    }


def _code(over: str, on_workers: list[tuple[str, int, int | None]]) -> int | None:
    """Return the exit code of a job that ended in the state `over`: that of the first replica which ended so.

    The SDK decides the same way (`decided`). `on_workers` are the transitions on workers: (state, attempt, code). A job
    that SUCCEEDED has code 0. A gang ends as a whole, on no worker, so its code is that of the first failing rank.
    """
    if over == "SUCCEEDED":
        return 0
    ended = [code for state, _, code in on_workers if state == over]
    if ended or over != "FAILED" or not on_workers:
        return next((code for code in ended if code), ended[-1] if ended else None)
    last = on_workers[-1][1]
    return next((code for state, attempt, code in on_workers if state == "EXITED" and attempt == last and code), None)


def _why(job: Job) -> str:
    """Return the newest reason that still applies, preferring the requester's over the worker's "ended as asked".

    What an operator said of an order (a row with a negative state) is no reason for the end of a job.
    """
    rows = (row for row in reversed(job.story) if job.live or row[STATE] >= 0)
    reasons = standing_reasons((row[REPLICA], row[STATE] == PLACED, row[WHY]) for row in rows)
    return next((why for why in reasons if why != ENDED_AS_ASKED), reasons[0] if reasons else "")


def standing_reasons(newest_first: Iterable[tuple[int, bool, str]]) -> list[str]:
    """Return the reasons in a story that still apply, newest first; those from before a later attempt do not.

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
    workers = engine.state.worker_by_num
    return any(row[WORKER] >= 0 and workers[row[WORKER]].pool_at(row[FENCE]).simulated for row in job.story)


def _replica(engine: Engine, replica: Replica) -> dict[str, Any]:
    member = replica.member
    data: dict[str, Any] = {
        "replica": replica.index,
        "state": STATES[replica.state],
        "attempt": replica.attempt,
        "fence": replica.fence,
        "retries": replica.retries,
        "losses": replica.losses,
        "refusals": replica.refusals,
    }
    if member is not None:
        data["worker"] = member.worker.id
        data["gpus"] = gpu_names(member.worker, member.mask, member.fence)
        if member.guest:
            data["guest"] = True
        elif member.mode == Mode.EXCLUSIVE and beside(member):
            data["lends"] = True
        data["mode"] = MODE_NAMES[member.mode]
        if (enforced := enforced_on(member.worker.hello, engine.request_of(replica.job))) is not None:
            data["enforced"] = msgspec.to_builtins(enforced)
        if used := use_rows(engine, member):
            data["use"] = used
    return data


def ls(engine: Engine, tenant: str, arguments: dict[str, Any]) -> dict[str, Any] | Problem:
    """Return the tenant's jobs in memory, newest first, filtered by `states`; `limit` is 1..1000.

    With `jobs`, at most 1000 names: only those of them that are in memory, without counts.
    """
    if (names := arguments.get("jobs")) is not None:
        return _named(engine, tenant, names)
    limit = arguments.get("limit", 100)
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= LS_MAX:
        limits = "1..1000"
        return problem(
            "invalid-argument", "limit must be 1..1000", field="$.limit", found=limit, allowed=limits, next=LS_HELP
        )
    states = arguments.get("states", [])
    if not isinstance(states, list):
        no_list = "states must be a list of job states"
        return problem("invalid-argument", no_list, field="$.states", found=states, next=LS_HELP)
    for state in states:
        if state not in STATES:
            no_state = f"{str(state)[:80]!r} is not a state of a job"
            allowed = ", ".join(STATES)
            return problem("invalid-argument", no_state, field="$.states", found=state, allowed=allowed, next=LS_HELP)
    row = engine.state.tenants.get(tenant)
    jobs: list[dict[str, Any]] = []
    counts: dict[str, int] = {}
    for job in reversed(row.jobs.values()) if row is not None else ():
        state = job.state
        counts[state] = counts.get(state, 0) + 1
        if len(jobs) < limit and (not states or state in states):
            jobs.append(summary(engine, job))
    return {"jobs": jobs, "counts": counts, "finished_kept": len(engine.state.finished)}


def _named(engine: Engine, tenant: str, names: Any) -> dict[str, Any] | Problem:
    if not isinstance(names, list) or len(names) > LS_MAX or not all(isinstance(name, str) for name in names):
        return problem("invalid-argument", f"jobs must be a list of at most {LS_MAX} ids", field="$.jobs")
    row = engine.state.tenants.get(tenant)
    jobs = {} if row is None else row.jobs
    return {"jobs": [summary(engine, jobs[name]) for name in names if name in jobs]}


def held_by(hold: StandingOrder) -> str:
    """Return a text such as `held by operator:ana (says root): maintenance`."""
    return f"held by {actors.words(*actors.split(hold.actor))}" + (f": {hold.why}" if hold.why else "")


def tenants(engine: Engine) -> dict[str, Any]:
    """Return the tenants with live jobs, leases or operators' orders, those with most GPUs first.

    At most `LS_MAX` are listed; `of` is their number. `waits` is how long the jobs waited that started in this term,
    for monitors (see `waited`).
    """
    state = engine.state
    rows = [
        TenantRow(
            row.name, row.live, row.gpus, as_hold(row.hold), limit_of(row), share_of(row), usage_milli(state, row)
        )
        for row in state.tenants.values()
        if row.live or row.gpus or row.ordered
    ]
    rows.sort(key=lambda row: (-row.gpus, -row.jobs, row.tenant))
    return {"tenants": msgspec.to_builtins(rows[:LS_MAX]), "of": len(rows), "waits": View(engine).waits}


def by_name(engine: Engine) -> list[Worker]:
    """Return all workers sorted by name; the ledger numbers them in the order in which they first joined."""
    return sorted(engine.state.workers.values(), key=attrgetter("id"))


def fleet(engine: Engine, mono_ms: int, after: str = "", only: str = "") -> dict[str, Any]:
    """Return the workers by name (session, free GPUs, problems), and the largest request that would start now.

    As many workers as fit one answer, from behind the one called `after`; if there are more, `next` is the last name.
    With `only`, that worker alone, with all details of its devices.
    """
    workers: list[dict[str, Any]] = []
    size, more = 0, False
    for worker in by_name(engine):
        if worker.id <= after or (only and worker.id != only):
            continue
        if more := size > FLEET_BYTES:
            break
        workers.append(_worker(engine, worker, mono_ms) | ({"devices": _devices(worker)} if only else {}))
        size += len(encode(workers[-1]))
    state = engine.state
    oldest = state.finished.oldest_ms()
    return {
        "epoch": engine.state.epoch,
        "leader": engine.state.leader,
        "ledger": engine.state.seq,
        "workers": workers,
        **({"next": workers[-1]["worker"]} if more else {}),
        "queued": View(engine).queued(),
        "live_jobs": engine.state.live,
        "finished_kept": len(engine.state.finished) + len(engine.state.ended),
        "finished_window_ms": min(engine.state.time_ms - oldest, engine.config.finished_keep_ms)
        if oldest is not None
        else 0,
        "fits_now": fits_now(engine),
        "used_now": used_now(engine),
        "keeps": {
            "finished_keep": engine.config.finished_keep,
            "finished_rows": engine.config.finished_rows,
            "history_keep": engine.config.history_keep,
            "history_bytes": engine.config.history_bytes,
        },
    }


def fits_now(engine: Engine) -> list[dict[str, Any]]:
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
                free = host.open & mask if host.usable else 0
                row[0] += mask.bit_count()
                row[1] += free.bit_count()
                row[2] = max(row[2], (free & cls.takes[EXCLUSIVE]).bit_count())
    return [
        {"model": name, "gpus": total, "free": free, "largest": largest}
        for name, (total, free, largest) in sorted(best.items())
    ]


def _worker(engine: Engine, worker: Worker, mono_ms: int) -> dict[str, Any]:
    host = engine.fleet.hosts.get(worker.num)
    pool = worker.hello.get("gpu_pool", [])
    return {
        "worker": worker.id,
        "state": worker_state(worker, host),
        "flag": worker.flag,
        **_by(worker.by),
        "simulated": bool(worker.hello.get("simulated", False)),
        "models": sorted({device["name"] for device in pool}),
        "gpus": len(pool),
        "free": host.open.bit_count() if host is not None else 0,
        "cells": cells(host, len(pool)),
        "members": len(worker.members),
        "cpu_milli": worker.hello.get("cpu_milli", 0),
        "cpu_free_milli": host.cpu_free if host is not None else 0,
        "memory_mib": worker.hello.get("memory_mib", 0),
        "memory_free_mib": host.memory_free if host is not None else 0,
        "labels": worker.hello.get("labels", {}),
        "drivers": worker.hello.get("drivers", []),
        "capabilities": worker.hello.get("capabilities", {}),
        "release": worker.hello.get("release", ""),
        "heard_ms_ago": mono_ms - host.last_ms if host is not None and host.heard else None,
        "quarantined": slots_of(worker.quarantined),
        "troubles": troubles(worker, host, engine.state.time_ms),
        **({"drain": drain_of(worker, engine.state.time_ms)} if worker.window is not None else {}),
        **({"starts_fail": starts_fail_of(worker, engine.state.time_ms)} if worker.until_ms else {}),
        **({"drivers_down": drivers_down_of(host)} if host is not None and host.down else {}),
        "keeps": worker.hello.get("keeps", {}),
    }


def _devices(worker: Worker) -> list[dict[str, Any]]:
    """Return the devices by slot, as the worker described them."""
    return [{"slot": slot, **device} for slot, device in enumerate(worker.hello.get("gpu_pool", ()))]


def worker_state(worker: Worker, host: Host | None) -> str:
    if not worker.session or host is None:
        return "left" if worker.left_why == GOODBYE else "lost"
    if not host.heard:
        return "not-heard"
    if worker.flag != "open":
        return worker.flag
    if host.stale:
        return "stale"
    return "claimed-locally" if host.waiting else "up"


def troubles(worker: Worker, host: Host | None, now_ms: int) -> list[dict[str, Any]]:
    """Return the devices that are not given out, or whose worker warns of something, with the problem and its detail.

    `recorded` is true for what the ledger has, false for what the last load frame reported. Despite its name,
    `since_ms` is for how many ms a worker has reported the device as unhealthy; other problems have none.
    """
    pool = worker.hello.get("gpu_pool", ())
    rows: dict[int, dict[str, Any]] = {}
    for slot, (kind, detail) in host.warnings.items() if host is not None else ():
        rows[slot] = {"kind": kind, "detail": detail, "recorded": False}
    for slot, (kind, detail) in host.troubles.items() if host is not None else ():
        rows[slot] = {"kind": kind, "detail": detail, "recorded": False}
    for slot in slots_of(worker.quarantined):
        detail = "its memory did not come back, or what ran there could not be ended"
        rows[slot] = {"kind": "quarantined", "detail": detail, "recorded": True}
    for slot, (kind, detail, since_ms, _) in worker.unwell.items():
        rows[slot] = {"kind": kind, "detail": detail, "since_ms": now_ms - since_ms, "recorded": True}
    return [
        {"slot": slot, "gpu": pool[slot]["uuid"] if slot < len(pool) else "", **rows[slot]} for slot in sorted(rows)
    ]


def drivers_down_of(host: Host) -> list[dict[str, Any]]:
    """Return the drivers whose engine does not answer, with why, and for how many seconds that has been so."""
    return [{"driver": driver, "why": why, "for_s": for_s} for driver, (why, for_s) in sorted(host.down.items())]


def starts_fail_of(worker: Worker, now_ms: int) -> dict[str, Any]:
    """Return in how many ms a worker opens that is closed because starts fail on it, and why the last one failed."""
    return {"opens_in_ms": max(0, worker.until_ms - now_ms), "why": worker.why}


def drain_of(worker: Worker, now_ms: int) -> dict[str, Any]:
    """Return a planned or bounded drain: in how many ms it begins, jobs must have left, and it ends."""
    window = worker.window
    assert window is not None
    return {
        "begins_in_ms": max(0, window.from_ms - now_ms),
        "leave_in_ms": max(0, window.leave_ms - now_ms),
        **({"ends_in_ms": max(0, window.until_ms - now_ms)} if window.until_ms else {}),
        **_by(window.by),
        "why": window.why,
    }


def _by(actor: str) -> dict[str, str]:
    by, said = actors.split(actor)
    return {"by": by, "said": said} if said else {"by": by}


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
        elif (host.frozen | host.twice) & bit:
            text += GUEST if host.guests & bit else FROZEN
        elif not host.free & bit:
            text += LEASED if host.lent & bit else NOT_LENT
        elif host.busy & bit:
            text += FOREIGN
        else:
            text += FREE
    return text


def audit(engine: Engine) -> dict[str, Any]:
    """Compare the ledger with what each worker's renewals reported; `drift` is empty if they agree.

    Only a difference shown by a worker's last two renewals is drift: a newer one may still be on its way. A worker is
    reported silent once it has had time for a renewal.
    """
    drift = []
    patience_ms = BEHIND_RENEWALS * engine.config.renew_s * 1000
    for worker in engine.state.workers.values():
        if not worker.session:
            continue
        report, host = View(engine).report_of(worker.num), engine.fleet.hosts.get(worker.num)
        if report is None:
            if host is None or engine.built_ms - host.last_ms > patience_ms:
                drift.append({"worker": worker.id, "kind": "silent", "member": ""})
            continue
        for key, member in worker.members.items():
            if member.missed > 1 and member.phase not in (AT_PLACED, AT_EXITED):
                drift.append({"worker": worker.id, "kind": "ledger-only", "member": _name(key)})
        for key in sorted(report.twice - worker.members.keys()):
            drift.append({"worker": worker.id, "kind": "worker-only", "member": _name(key)})
    return {
        "drift": drift,
        "workers": sum(1 for worker in engine.state.workers.values() if worker.session),
        "members": sum(len(worker.members) for worker in engine.state.workers.values()),
        "leases": sum(m.mask.bit_count() for m in engine.state.members()),
    }


def _name(key: tuple[str, str, int, int]) -> str:
    return f"{key[0]}/{key[1]}/{key[2]} fence {key[3]}"
