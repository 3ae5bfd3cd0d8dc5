"""Writes a trace from the records of a ledger: what arrived, what happened, and how long each attempt held its devices.

It has what decides, of a command the workload's name alone, and no environment or user's label. `simulate` plays it,
and with `--prove` says whether each placement comes out the same. What a ledger does not tell is counted in the
trace's head.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from moorage.scheduler.core.fleet.slots import slots_of
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
    State,
    Worker,
)
from moorage.scheduler.core.request_reader import asked_now, workload_of

#: as long as what is not known to end: ten years
FOREVER_S: Final = 10 * 365 * 86_400.0
#: the fields of a request that decide where and when it runs
KEPT: Final = (
    "gpu", "priority", "resources", "retries", "retries_on_lost", "retry", "deadline_s", "start_within_s",
    "start_after_s", "max_running", "preemptible", "requires", "where", "uses",
)  # fmt: skip
#: acts that a trace has as events, or that follow from others
TOLD: Final = frozenset(
    ("worker", "join", "gone", "limit", "share", "flag", "hold", "unhold", "epoch", "snapshot", "compact", "reserves",
     "used", "peaked", "promised", "preempt", "half-life", "cursor", "reported", "ran", "met", "expire", "tombstone",
     "untomb", "stays", "stored", "exec", "forget", "forget-tenants", "schedule", "schedule-pause", "schedule-remove",
     "level", "settings")
)  # fmt: skip
_VERBS: Final = {"cordoned": "cordon", "open": "uncordon", "draining": "drain"}


class TraceWriter:
    """Reads records one after another; `lines` yields the trace. `state` is folded by the caller.

    What stands as it begins comes first: hosts, limits, and jobs that are not over, in the order in which they ran.
    """

    def __init__(self, state: State, *, anonymous: bool = False) -> None:
        self._state = state
        self._anonymous = anonymous
        self._salt = hashlib.blake2b(state.ledger_id.encode()).digest() if anonymous else b""
        self._begin_ms = state.time_ms
        self._from_seq = state.seq
        self._events: list[dict[str, Any]] = []
        self._jobs: dict[int, dict[str, Any]] = {}
        self._since: dict[tuple[int, int], tuple[int, int]] = {}  # by job and replica: attempt, and when it was placed
        self._seen: dict[int, int] = {}  # by job: its last revision that was read
        self._cancelled: set[int] = set()
        self._untold = Counter[str]()
        self._settings = dict(state.settings[1])
        self._release = state.settings[0]
        self._carry()

    def _carry(self) -> None:
        state = self._state
        for worker in state.worker_by_num.values():
            if worker.session:
                self._join(worker)
            if worker.flag in _VERBS and worker.flag != "open":
                self._order(_VERBS[worker.flag], worker=self._name(worker.id))
        for tenant in state.tenants.values():
            self._rights(tenant.name)
            if tenant.hold is not None:
                self._order("hold", tenant=self._name(tenant.name))
        live = [job for job in state.jobs.values() if not job.over]
        for job in sorted(live, key=lambda job: (not job.attempts, job.placed_ms, job.num)):
            self._arrives(job)
            self._seen[job.num] = job.rev
            for attempt in job.attempts:
                self._since[job.num, attempt.replica.index] = attempt.no, self._begin_ms

    def _at_s(self, ms: int | None = None) -> float:
        return ((self._state.time_ms if ms is None else ms) - self._begin_ms) / 1000

    def _name(self, name: str) -> str:
        """Return a name as the trace has it: itself, or what it is everywhere in an anonymous one."""
        if not self._anonymous:
            return name
        return "x" + hashlib.blake2b(name.encode(), key=self._salt, digest_size=6).hexdigest()

    # ------------------------------------------------------------------------------------------- reading

    def follow(self, record: Record, folded: Folded) -> None:
        """Read a record that has just been folded."""
        arrive = {job.num for job in folded.accepted}
        for act in record.acts:
            if not (isinstance(act, Hold) and act.job in arrive):  # one that comes on hold is asked for so
                self._act(act, str(act.__struct_config__.tag))
        for job in folded.accepted:
            self._arrives(job)
        if folded.placed:  # time alone may have let the core place this, as its use of GPUs fades
            self._event(look={})
        for job in folded.jobs.values():
            new = job.rev - self._seen.get(job.num, 1)
            self._seen[job.num] = job.rev
            if job.num in self._jobs:
                for row in job.history[-new:] if new > 0 else ():
                    self._move(job, row)
        for job in folded.ended:
            self._ended(job)

    def _act(self, act: Any, tag: str) -> None:
        state = self._state
        if tag == "settings":
            if self._release and dict(act.values) != self._settings:
                self._untold["change of settings"] += 1
            elif not self._release:
                self._release, self._settings = act.release, dict(act.values)
        elif tag == "join":
            self._join(state.worker_by_num[act.worker])
        elif tag == "gone" and (worker := state.worker_by_num.get(act.worker)) is not None:
            if not worker.session:  # else it has joined again at once
                self._event(leave={"host": self._name(worker.id)})
        elif tag in ("limit", "share"):
            self._rights(act.tenant, tag)
        elif tag == "flag" and (worker := state.worker_by_num.get(act.worker)) is not None and act.flag in _VERBS:
            self._order(_VERBS[act.flag], worker=self._name(worker.id))
        elif tag in ("hold", "unhold"):
            job = state.jobs.get(act.job) if act.job else None
            named = {} if job is None else {"job": self._name(job.name)}
            self._order("hold" if tag == "hold" else "release", tenant=self._name(act.tenant), **named)
        elif tag not in TOLD:
            self._untold[tag] += 1

    def _event(self, **what: Any) -> None:
        self._events.append({"at_s": self._at_s(), **what})

    def _order(self, verb: str, **arguments: Any) -> None:
        self._event(order={"verb": verb, **arguments})

    def _rights(self, tenant: str, tag: str = "") -> None:
        row, name = self._state.read_tenant(tenant), self._name(tenant)
        if tag == "limit" or (not tag and (row.gpus_max or row.jobs_max)):
            self._order("limit", tenant=name, gpus=row.gpus_max, jobs=row.jobs_max)
        if tag == "share" or (not tag and (row.weight or row.guaranteed)):
            self._order("share", tenant=name, weight=row.weight, gpus=row.guaranteed)

    def _join(self, worker: Worker) -> None:
        has = worker.inventory
        named = [
            msgspec.structs.replace(each, uuid=f"SIM-{self._name(worker.id)}-{at}")
            for at, each in enumerate(has.gpu_pool)
        ]
        devices: list[dict[str, Any]] = msgspec.to_builtins(named)
        kept = ["index", "vendor", "name", "uuid", "memory_mib", "compute_capability"]
        kept += [] if self._anonymous else ["labels"]
        found = {
            "name": self._name(worker.id),
            "devices": [{key: device[key] for key in kept if key in device} for device in devices],
            "cpu_milli": has.cpu_milli,
            "memory_mib": has.memory_mib,
            "labels": {} if self._anonymous else has.labels,
        }
        self._event(join=found)

    def _arrives(self, job: Job) -> None:
        asked = asked_now(job)
        plain = msgspec.to_builtins(asked)
        request = {key: plain[key] for key in KEPT if plain.get(key) is not None}
        request["job"] = self._name(job.name)
        if job.hold is not None:
            request["hold"] = True
        if asked.copies > 1:
            request["replicas"] = asked.copies
        limit_s = asked.workload.timeout_s
        request["run"] = {"driver": "noop"} if limit_s is None else {"driver": "noop", "timeout_s": limit_s}
        request["labels"] = {"workload": self._name(workload_of(asked))}
        if self._anonymous:
            request.pop("requires", None)
            request.pop("where", None)
        if asked.service is not None or asked.after:
            self._untold["service" if asked.service is not None else "after"] += 1
        at_ms = max(job.accepted_ms, self._begin_ms)
        self._jobs[job.num] = {
            "at_s": self._at_s(at_ms), "runs_s": FOREVER_S, "tenant": self._name(job.tenant), "request": request,
            "attempts": {}, "placed": {},
        }  # fmt: skip

    def _move(self, job: Job, row: Any) -> None:
        """Read a transition of a job: when and where an attempt was placed, how long it held its devices, its code."""
        line, index, state, now_ms = self._jobs[job.num], row[REPLICA], row[STATE], self._state.time_ms
        if state in (CANCELLING, CANCELLED) and job.num not in self._cancelled:
            self._cancelled.add(job.num)
            if row[WORKER] == RANGE and row[SLOTS] - index + 1 < job.size:
                self._untold["cancel of some replicas"] += 1
            elif not row[WHY].startswith("deadline"):
                self._event(cancel={"tenant": line["tenant"], "job": line["request"]["job"]})
        if index < 0 or state < 0 or row[WORKER] == RANGE:
            return
        if state == PLACED:
            worker = self._state.worker_by_num[row[WORKER]]
            key = f"{index}/{row[ATTEMPT]}"
            line["placed"][key] = (self._at_s(), self._name(worker.id), slots_of(row[SLOTS]))
            self._since[job.num, index] = row[ATTEMPT], now_ms
        elif state == QUEUED or IS_TERMINAL[state] or state not in ON_WORKER:
            self._leaves(job, index, state, row)
        elif state in (ENDING, CANCELLING):  # how long it would have run is not known
            self._since.pop((job.num, index), None)

    def _leaves(self, job: Job, index: int, state: int, row: Any) -> None:
        held = self._since.pop((job.num, index), None)
        if held is None or state == CANCELLED or "timeout" in row[WHY] or row[WHY] in ("lost", "deadline"):
            return
        attempt, from_ms = held
        self._jobs[job.num]["attempts"][f"{index}/{attempt}"] = (self._state.time_ms - from_ms) / 1000, row[CODE]

    def _ended(self, job: Job) -> None:
        line = self._jobs.get(job.num)
        if line is not None and line["attempts"] and job.state == "SUCCEEDED":
            line["runs_s"] = max(runs_s for runs_s, _ in line["attempts"].values())

    # -------------------------------------------------------------------------------------------- writing

    @property
    def jobs(self) -> int:
        return len(self._jobs)

    @property
    def untold(self) -> dict[str, int]:
        """How often the ledger had what a trace does not say, by kind."""
        return dict(self._untold)

    @property
    def records(self) -> int:
        return self._state.seq - self._from_seq

    @property
    def since(self) -> str:
        return f"record {self._from_seq}"

    @property
    def span_ms(self) -> int:
        """How much ledger time the trace has."""
        return self._state.time_ms - self._begin_ms

    @property
    def is_cut(self) -> bool:
        """Whether the ledger has lost records from before the trace."""
        return self._from_seq > 1

    def lines(self) -> Iterator[bytes]:
        """Yield the head, and the lines in the order of time."""
        head = {
            "trace": 1, "ledger": self._name(self._state.ledger_id), "from_seq": self._from_seq,
            "until_seq": self._state.seq, "until_s": self._at_s(), "jobs": len(self._jobs), "untold": self.untold,
        }  # fmt: skip
        if self._release:
            head |= {"release": self._release, "settings": self._settings}
        encode = msgspec.json.encode
        yield encode(head) + b"\n"
        rows = [*self._events, *self._jobs.values()]
        for row in sorted(rows, key=lambda row: (row["at_s"], "runs_s" in row)):
            yield encode(row) + b"\n"
