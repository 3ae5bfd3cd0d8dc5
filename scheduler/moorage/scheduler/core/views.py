"""What the reading verbs show, built from folded state and the soft view; plain data for the wire."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.explain import explain
from moorage.scheduler.core.finished import job_key
from moorage.scheduler.core.fleet import Host
from moorage.scheduler.core.outputs import changes_since, gpu_names, slots_of
from moorage.scheduler.core.queue import entry
from moorage.scheduler.core.records import MODE_NAMES
from moorage.scheduler.core.state import AT_EXITED, QUEUED, Job, Replica, Worker
from moorage.schemas.codec import decode_request
from moorage.schemas.errors import Problem, problem
from moorage.schemas.gpu import format_token
from moorage.schemas.job import STATES

LS_MAX: Final = 1000
CONTENDED_AT: Final = 5


def show(engine: Engine, tenant: str, name: str) -> dict[str, Any] | Problem:
    """One job, whole: its request, replicas and last transitions."""
    job = engine.state.job(tenant, name)
    if job is None:
        return _finished(engine, tenant, name)
    request = decode_request(job.body)
    if request.events == "job":
        job.own_subject = True  # somebody follows it: also where it came with many others
    return {
        **summary(engine, job),
        "accepted_ledger": job.ledger,
        "request": msgspec.to_builtins(request),
        "replica_states": [_replica(engine, replica) for replica in job.replicas],
        "changes": msgspec.to_builtins(changes_since(engine.state, job, 0)),
    }


def _finished(engine: Engine, tenant: str, name: str) -> dict[str, Any] | Problem:
    row = engine.state.finished.find(job_key(tenant, name))
    if row is None:
        return problem(
            "not-found", f"no job {name} of tenant {tenant}", job=name, next="moorage ls shows the jobs there are"
        )
    return {"job": name, "tenant": tenant, "state": STATES[row[2]], "ended_ms": row[1] * 1000, "compacted": True}


def summary(engine: Engine, job: Job) -> dict[str, Any]:
    """One line of `ls`."""
    request = engine.request_of(job)
    last = job.story[-1] if job.story else None
    worker = next((replica.member.worker.id for replica in job.replicas if replica.member is not None), "")
    if not worker and last is not None and last[5] >= 0:
        worker = engine.state.worker_by_num[last[5]].id
    return {
        "job": job.name,
        "tenant": job.tenant,
        "state": job.state,
        "rev": job.rev,
        "gpu": format_token(request.effective_gpu, request.replicas),
        "priority": request.priority,
        "attempt": max(replica.attempt for replica in job.replicas),
        "age_ms": engine.state.time_ms - job.accepted_ms,
        "worker": worker,
        "simulated": _is_simulated(engine, job),
        "code": next((row[7] for row in reversed(job.story) if row[4] > 7 and row[5] >= 0), None),
        "why": next((row[8] for row in reversed(job.story) if row[8]), ""),
    }


def _is_simulated(engine: Engine, job: Job) -> bool:
    """Whether some replica was placed on a simulated worker."""
    workers = engine.state.worker_by_num
    return any(row[5] >= 0 and workers[row[5]].hello.get("simulated", False) for row in job.story)


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
        data["gpus"] = gpu_names(member.worker, member.mask)
        data["mode"] = MODE_NAMES[member.mode]
    return data


def ls(engine: Engine, tenant: str, arguments: dict[str, Any]) -> dict[str, Any] | Problem:
    """The tenant's jobs in memory, newest first; `states` filters, `limit` 1..1000 bounds."""
    limit = arguments.get("limit", 100)
    if not isinstance(limit, int) or not 1 <= limit <= LS_MAX:
        return problem("invalid-argument", "limit must be 1..1000", field="$.limit", found=limit, allowed="1..1000")
    states = arguments.get("states", [])
    if not isinstance(states, list) or any(state not in STATES for state in states):
        return problem("invalid-argument", "states must list job states", field="$.states", allowed=", ".join(STATES))
    row = engine.state.tenants.get(tenant)
    jobs: list[dict[str, Any]] = []
    counts: dict[str, int] = {}
    for job in reversed(row.jobs.values()) if row is not None else ():
        counts[job.state] = counts.get(job.state, 0) + 1
        if len(jobs) < limit and (not states or job.state in states):
            jobs.append(summary(engine, job))
    return {"jobs": jobs, "counts": counts, "finished_kept": len(engine.state.finished)}


def explain_job(engine: Engine, tenant: str, name: str) -> dict[str, Any] | Problem:
    """Why a job is where it is: for a waiting one the dominant reason, the counts, its place in the queue."""
    job = engine.state.job(tenant, name)
    if job is None:
        return _finished(engine, tenant, name)
    data: dict[str, Any] = {"job": name, "tenant": tenant, "state": job.state}
    waiting = [replica for replica in job.replicas if replica.state == QUEUED]
    if not waiting:
        data["why"] = next((row[8] for row in reversed(job.story) if row[8]), "")
        return data
    replica, shape = waiting[0], engine.shape_of(job)
    found = explain(engine.fleet, shape, engine.planner.barred(engine.request_of(job).priority, shape))
    data.update(found.as_data())
    if found.reason == "placing" and replica.not_before > engine.state.time_ms:
        data["reason"] = "contended" if replica.refusals >= CONTENDED_AT else "backoff"
        data["starts_in_ms"] = replica.not_before - engine.state.time_ms
    data["waiting_replicas"] = len(waiting)
    data["position"] = 1 + engine.queue.position(engine.request_of(job).priority, entry(job.num, replica.index))
    data["queued"] = engine.queue.size
    data["asks"] = format_token(engine.request_of(job).effective_gpu, len(job.replicas))
    return data


def fleet(engine: Engine, mono_ms: int) -> dict[str, Any]:
    """Every worker: its session, what is free and who is sick; and what of the biggest kind would start now."""
    workers = [_worker(engine, worker, mono_ms) for worker in engine.state.worker_by_num]
    oldest = engine.state.finished.oldest_ms()
    return {
        "epoch": engine.state.epoch,
        "leader": engine.state.leader,
        "ledger": engine.state.seq,
        "workers": workers,
        "queued": engine.queue.size,
        "live_jobs": engine.state.live,
        "finished_kept": len(engine.state.finished) + len(engine.state.ended),
        "finished_window_ms": engine.state.time_ms - oldest if oldest is not None else 0,
        "fits_now": fits_now(engine),
    }


def fits_now(engine: Engine) -> list[dict[str, Any]]:
    """The largest exclusive request that starts now on one host, by model."""
    best: dict[str, list[int]] = {}
    for cls in engine.fleet.classes.values():
        by_name: dict[str, int] = {}
        for slot, device in enumerate(cls.devices):
            by_name[device[2]] = by_name.get(device[2], 0) | 1 << slot
        for name, mask in by_name.items():
            row = best.setdefault(name, [0, 0, 0])
            for host in cls.hosts.values():
                free = (host.open & mask).bit_count() if host.usable else 0
                row[0] += mask.bit_count()
                row[1] += free
                row[2] = max(row[2], free)
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
        "by": worker.by,
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
        "release": worker.hello.get("release", ""),
        "heard_ms_ago": mono_ms - host.last_ms if host is not None and host.heard else None,
        "quarantined": slots_of(worker.quarantined),
    }


def worker_state(worker: Worker, host: Host | None) -> str:
    if not worker.session or host is None:
        return "lost"
    if not host.heard:
        return "not-heard"
    if worker.flag != "open":
        return worker.flag
    if host.stale:
        return "stale"
    return "claimed-locally" if host.waiting else "up"


def cells(host: Host | None, size: int) -> str:
    """A character a GPU: `·` free, `#` leased, 2-9 sharers, `!` sick or quarantined, `x` used by others, `?` lost."""
    if host is None:
        return "?" * size
    text = ""
    for slot in range(size):
        bit = 1 << slot
        device = host.shared.get(slot)
        if (host.sick | host.worker.quarantined) & bit:
            text += "!"
        elif device is not None:
            text += str(min(device.users, 9))
        elif not host.free & bit:
            text += "#" if host.lent & bit else "-"
        elif host.busy & bit:
            text += "x"
        else:
            text += "·"
    return text


def audit(engine: Engine, reports: dict[int, Any]) -> dict[str, Any]:
    """The ledger against what each worker's last renewal said it holds; `drift` is empty when they agree.

    A member placed or ended since that renewal is no drift: only what the two have disagreed on for longer than two
    renewals is shown by the caller asking twice.
    """
    drift = []
    for worker in engine.state.worker_by_num:
        if not worker.session:
            continue
        report = reports.get(worker.num)
        if report is None:
            drift.append({"worker": worker.id, "kind": "silent", "member": ""})
            continue
        held = {(h.tenant, h.job, h.replica, h.fence): h.phase for h in report.held}
        for key, member in worker.members.items():
            if key not in held and member.phase not in (0, AT_EXITED) and report.no == worker.no:
                drift.append({"worker": worker.id, "kind": "ledger-only", "member": _name(key)})
        for key, phase in held.items():
            if key not in worker.members and phase != "exited":
                drift.append({"worker": worker.id, "kind": "worker-only", "member": _name(key)})
    return {
        "drift": drift,
        "workers": sum(1 for worker in engine.state.worker_by_num if worker.session),
        "members": sum(len(worker.members) for worker in engine.state.worker_by_num),
        "leases": sum(m.mask.bit_count() for m in engine.state.members()),
    }


def _name(key: tuple[str, str, int, int]) -> str:
    return f"{key[0]}/{key[1]}/{key[2]} fence {key[3]}"
