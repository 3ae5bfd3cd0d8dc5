"""What the records of a ledger tell a trace: events that decide, without a command, environment or user's label.

They are made record by record, and need nothing but the state and the record: a follower that begins again anywhere
makes the same ones. A base has what stands at a record; a trace can begin with any base, and goes on with the events
of each record behind it.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, Final

import msgspec

from moorage.scheduler.core.fleet.slots import slots_of
from moorage.scheduler.core.ledger import fairshare
from moorage.scheduler.core.ledger.acts import Hold
from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.core.ledger.record import Record
from moorage.scheduler.core.ledger.state import (
    ATTEMPT,
    CANCELLED,
    CANCELLING,
    CODE,
    ENDING,
    IS_TERMINAL,
    LEAVING,
    ON_WORKER,
    PLACED,
    QUEUED,
    RANGE,
    REPLICA,
    SLOTS,
    STATE,
    WHY,
    WORKER,
    Job,
    Replica,
    State,
    Worker,
)
from moorage.scheduler.core.request_reader import asked_now, workload_of
from moorage.scheduler.core.schedule.runtime import LEARNED_AT_START_MAX
from moorage.schemas.job import Request
from moorage.schemas.ranges import RANGES_MAX, first_numbers, format_ranges, joined

#: the fields of a request that decide where and when it runs
KEPT: Final = (
    "gpu", "priority", "resources", "retries", "retries_on_lost", "retry", "deadline_s", "start_within_s",
    "start_after_s", "max_running", "max_failed", "preemptible", "requires", "where", "prefers", "same", "spread_over",
    "uses", "repair_s", "fair_key", "fair_weight",
)  # fmt: skip
#: acts that a trace has as events, or that follow from others
TOLD: Final = frozenset(
    ("worker", "join", "gone", "limit", "share", "flag", "hold", "unhold", "epoch", "snapshot", "compact", "reserves",
     "used", "peaked", "promised", "preempt", "half-life", "cursor", "reported", "ran", "met", "expire", "tombstone",
     "untomb", "stays", "stored", "exec", "forget", "forget-tenants", "schedule", "schedule-pause", "schedule-remove",
     "level", "settings")
)  # fmt: skip
_VERBS: Final = {"cordoned": "cordon", "open": "uncordon", "draining": "drain"}

#: an event's kind and what it is about, all of it plain
Event = list[Any]


class Batch(msgspec.Struct, array_like=True):
    """Events of the records of ledger `ledger` behind record `after`, up to `through`, whose time is `at_ms`; each row
    is a record's time and its events.

    A base has what stands after record `through`, for a trace that begins with it. A large batch comes in parts, which
    count together or not at all; `more` says that another one follows. `base_ms` is the time of the newest base.
    """

    ledger: str
    after: int
    through: int
    at_ms: int
    rows: list[tuple[int, list[Event]]]
    base: bool = False
    part: int = 0
    more: bool = False
    base_ms: int = 0


class TraceEvents:
    """Makes the events of records one after another. `state` is folded by the caller."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._seen = {job.num: job.rev for job in state.jobs.values()}  # by job: its last revision that was read
        self._events: list[Event] = []

    def base(self) -> Batch:
        """Return what stands now: hosts, limits, use of GPUs, and jobs that are not over with what runs of them."""
        state = self._state
        for worker in state.worker_by_num.values():
            if worker.session:
                self._join(worker)
            if worker.flag in _VERBS and worker.flag != "open":
                self._order(_VERBS[worker.flag], worker=worker.id)
        for tenant in state.tenants.values():
            self._rights(tenant.name)
            if tenant.hold is not None:
                self._order("hold", tenant=tenant.name)
        for tenant in state.tenants.values():
            if used := fairshare.usage_milli(state, tenant):
                self._events.append(["usage", tenant.name, used])
        ended = islice(state.ended, max(0, len(state.ended) - LEARNED_AT_START_MAX), None)
        live = [job for job in state.jobs.values() if not job.over]
        for job in [*(state.jobs[num] for num in ended), *live]:  # as a new leader learns how long jobs run
            if job.ran:
                request = _request_of(job, asked_now(job))
                self._events.append(["ran", job.tenant, job.accepted_ms, request, list(job.ran)])
        for job in live:
            if job.live:
                self._arrives(job)
                for replica in job.rows.values():
                    self._stands(replica)
        if state.settings[0]:
            self._events.append(["settings", state.settings[0], dict(state.settings[1])])
        made, self._events = self._events, []
        return Batch(state.ledger_id, state.seq, state.seq, state.time_ms, [(state.time_ms, made)], base=True)

    def follow(self, record: Record, folded: Folded) -> list[Event]:
        """Return the events of a record that has just been folded."""
        arrive = {job.num for job in folded.accepted}
        for act in record.acts:
            if not (isinstance(act, Hold) and act.job in arrive):  # one that comes on hold is asked for so
                self._act(act, str(act.__struct_config__.tag))
        for job in folded.accepted:
            self._arrives(job)
            self._seen[job.num] = 1
        if folded.placed:  # time alone may have let the core place this, as its use of GPUs fades
            self._happens(look={})
        for job in folded.jobs.values():
            new = job.rev - self._seen.get(job.num, 1)
            self._seen[job.num] = job.rev
            for row in job.history[-new:] if new > 0 else ():
                self._move(job, row)
        for job in folded.ended:
            self._events.append(["end", job.num, job.state == "SUCCEEDED"])
        if len(self._seen) > 1000 + 2 * len(self._state.jobs):
            self._seen = {job.num: job.rev for job in self._state.jobs.values()}
        made, self._events = self._events, []
        return made

    def _act(self, act: Any, tag: str) -> None:
        state = self._state
        if tag == "settings":
            self._events.append(["settings", act.release, dict(act.values)])
        elif tag == "join":
            self._join(state.worker_by_num[act.worker])
        elif tag == "gone" and (worker := state.worker_by_num.get(act.worker)) is not None:
            if not worker.session:  # else it has joined again at once
                self._happens(leave={"host": worker.id})
        elif tag in ("limit", "share"):
            self._rights(act.tenant, tag)
        elif tag == "flag" and (worker := state.worker_by_num.get(act.worker)) is not None and act.flag in _VERBS:
            self._order(_VERBS[act.flag], worker=worker.id)
        elif tag in ("hold", "unhold"):
            job = state.jobs.get(act.job) if act.job else None
            named = {} if job is None else {"job": job.name}
            self._order("hold" if tag == "hold" else "release", tenant=act.tenant, **named)
        elif tag not in TOLD:
            self._events.append(["untold", tag])

    def _happens(self, **what: Any) -> None:
        self._events.append(["event", what])

    def _order(self, verb: str, **arguments: Any) -> None:
        self._happens(order={"verb": verb, **arguments})

    def _rights(self, tenant: str, tag: str = "") -> None:
        row = self._state.read_tenant(tenant)
        if tag == "limit" or (not tag and (row.gpus_max or row.jobs_max)):
            self._order("limit", tenant=tenant, gpus=row.gpus_max, jobs=row.jobs_max)
        if tag == "share" or (not tag and (row.weight or row.guaranteed)):
            self._order("share", tenant=tenant, weight=row.weight, gpus=row.guaranteed)

    def _join(self, worker: Worker) -> None:
        has = worker.inventory
        devices: list[dict[str, Any]] = msgspec.to_builtins(has.gpu_pool)
        kept = ("index", "vendor", "name", "memory_mib", "compute_capability", "labels")
        found = {
            "name": worker.id,
            "devices": [{key: device[key] for key in kept if key in device} for device in devices],
            "cpu_milli": has.cpu_milli,
            "memory_mib": has.memory_mib,
            "labels": dict(has.labels),
        }
        self._happens(join=found)

    def _arrives(self, job: Job) -> None:
        asked = asked_now(job)
        kinds = {"service": asked.service, "after": asked.after, "each worker": asked.each_worker}
        self._events.extend(["untold", kind] for kind, asks in kinds.items() if asks)
        self._events.append(["job", job.num, job.accepted_ms, job.tenant, _request_of(job, asked)])

    def _stands(self, replica: Replica) -> None:
        """Say where an attempt runs as a base is made, and since when. One that is asked to end, or frozen, is told as
        if it waited."""
        attempt = replica.attempt
        if attempt is not None and attempt.mask == attempt.home and replica.state not in LEAVING:
            stands = attempt.worker.id, slots_of(attempt.mask), attempt.began_ms or self._state.time_ms
            self._events.append(["runs", replica.job.num, replica.index, attempt.no, *stands])

    def _move(self, job: Job, row: Any) -> None:
        """Read a transition of a job: when and where an attempt was placed, how long it held its devices, its code."""
        index, state = row[REPLICA], row[STATE]
        if state in (CANCELLING, CANCELLED):
            if row[WORKER] == RANGE and row[SLOTS] - index + 1 < job.size:
                self._events.append(["cancel", job.num, "of some replicas"])
            else:
                self._events.append(["cancel", job.num, "deadline" if row[WHY].startswith("deadline") else ""])
        if index < 0 or state < 0 or row[WORKER] == RANGE:
            return
        if state == PLACED:
            worker = self._state.worker_by_num[row[WORKER]]
            self._events.append(["placed", job.num, index, row[ATTEMPT], worker.id, slots_of(row[SLOTS])])
        elif state == QUEUED or IS_TERMINAL[state] or state not in ON_WORKER:
            cut = state == CANCELLED or "timeout" in row[WHY] or row[WHY] in ("lost", "deadline")
            self._events.append(["left", job.num, index, None if cut else row[CODE]])
        elif state in (ENDING, CANCELLING):  # how long it would have run is not known
            self._events.append(["left", job.num, index, None])


def _request_of(job: Job, asked: Request) -> dict[str, Any]:
    """Return what decides of a job's request."""
    plain = msgspec.to_builtins(asked)
    request = {key: plain[key] for key in KEPT if plain.get(key) is not None}
    request["job"] = job.name
    if job.hold is not None:
        request["hold"] = True
    request |= _copies(job, asked, plain)
    limit_s = asked.workload.timeout_s
    request["run"] = {"driver": "noop"} if limit_s is None else {"driver": "noop", "timeout_s": limit_s}
    request["labels"] = {"workload": workload_of(asked)}
    return request


def _copies(job: Job, asked: Request, plain: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that say how many replicas there are: those that have not ended."""
    if asked.groups:
        kept = ("name", "replicas", "gpu", "resources")
        return {"groups": [{key: group[key] for key in kept if key in group} for group in plain["groups"]]}
    if asked.is_gang:
        return {"replicas": plain.get("replicas", 1)}
    if asked.service is not None or asked.each_worker:
        return {"replicas": asked.copies} if asked.copies > 1 else {}
    numbers = joined(sorted((*job.fresh, *((index, index) for index in job.rows))))
    if numbers == first_numbers(job.live) or len(numbers) > RANGES_MAX:
        return {"replicas": job.live} if job.live > 1 else {}
    return {"indices": format_ranges(numbers)}
