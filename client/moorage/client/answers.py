"""What the scheduler answers to `show`, `ls`, `explain`, `fleet`, `audit` and `cancel`, as structs.

The first four have in `data` the whole answer as on the wire, with what no field here names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from moorage.schemas.answers.fleet import FleetAnswer
from moorage.schemas.answers.operators import Audit as Audit
from moorage.schemas.answers.operators import Drift as Drift
from moorage.schemas.frames import Change
from moorage.schemas.job import Request
from moorage.schemas.operate import Hold


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """What a running job uses of its `devices` now: the mean, the least and the most used one, in percent of the time,
    and the memory of all, in MiB. `Job.use` has the minutes before."""

    devices: int
    percent: int
    percent_min: int
    percent_max: int
    memory_mib: int


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """One job of `ls`.

    `gpu` is the token of what it asks for, `attempt` the newest of its replicas' attempts (0 before the first),
    `worker` the first worker that has it now or had it last, `workers` how many have it now. `code` is its exit code,
    None while it runs; `use` is None unless it runs and its workers read its devices. `ran_ms` is how long its newest
    attempt runs, or ran; None if it has none. `reason` is why it waits, `not_before_ms` the ledger milliseconds from
    which it may start (0: it may now), and `after` which jobs it waits for
    before it is queued, as in `Explanation`. Of a job that ended long ago only `job`, `tenant` and `state` are sure.
    """

    job: str
    tenant: str
    state: str
    rev: int = 0
    gpu: str = ""
    priority: int = 0
    attempt: int = 0
    age_ms: int = 0
    worker: str = ""
    workers: int = 1
    simulated: bool = False
    code: int | None = None
    why: str = ""
    hold: Hold | None = None
    use: Used | None = None
    labels: dict[str, str] = {}
    reason: str = ""
    ran_ms: int | None = None
    after: list[dict[str, str]] = []
    not_before_ms: int = 0


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of a job: its attempt, and the worker and GPUs that it has now."""

    replica: int
    state: str
    attempt: int
    fence: int
    retries: int = 0
    losses: int = 0
    refusals: int = 0
    worker: str = ""
    gpus: list[str] = []
    mode: str = ""


class JobInfo(JobRow, frozen=True, kw_only=True):
    """One job in full. `changes` are its last transitions, `usage` what it was granted and has used of GPUs, `kept`
    until when its remains are kept, in milliseconds since 1970. `request` is None once it is no longer kept,
    and a `compacted` job has nothing but its end."""

    request: Request | None = None
    replica_states: list[ReplicaInfo] = []
    changes: list[Change] = []
    usage: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    capabilities: dict[str, Any] = {}
    compacted: bool = False
    accepted_ms: int = 0
    ended_ms: int = 0
    data: dict[str, Any] = {}


class JobList(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of a tenant, newest first, and how many there are in each state."""

    jobs: list[JobRow] = []
    counts: dict[str, int] = {}
    finished_kept: int = 0
    data: dict[str, Any] = {}


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job waits: the main `reason` and what it `means`; both are "" for a job that does not wait.

    `workers_left` has how many workers remain after each condition. `held_by` says who has what it needs. It is at
    `position` of `queued`. `starts` is a forecast: `p50_ms` and `p90_ms` from now, and the `runs` behind it.
    `fixes` are changes of the request with which it would start earlier. `after` has the jobs that it waits for before
    it is queued (`job`, `when`, `state`), and `chain` the first of them, the first that this one waits for, and so on.
    """

    job: str
    tenant: str
    state: str
    why: str = ""
    reason: str = ""
    means: str = ""
    because: str = ""
    needs: str = ""
    asks: str = ""
    workers_left: dict[str, int] = {}
    held_by: list[str] = []
    waiting_replicas: int = 0
    priority: int | None = None
    position: int | None = None
    queued: int | None = None
    starts: dict[str, Any] = {}
    fixes: list[dict[str, Any]] = []
    after: list[dict[str, str]] = []
    chain: list[dict[str, str]] = []
    data: dict[str, Any] = {}


class FleetInfo(FleetAnswer, kw_only=True):
    """The workers in the order of their names, what fits now, and counts of jobs. `epoch` is the leader's term."""

    data: dict[str, Any] = msgspec.field(default_factory=dict)


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a cancel: whether the job is `cancelled` by it, and the state that it `was` in.

    `cancelled` is false if the job had ended or was being cancelled. `was` is UNKNOWN for an id that is not known, of a
    cancel with `before`: it is remembered for `remembered_s` seconds, and a submit with that id is refused until then.
    """

    job: str
    cancelled: bool
    was: str
    remembered_s: float = 0.0


T = TypeVar("T", JobInfo, JobList, Explanation, FleetInfo)


def told(kind: type[T], data: Mapping[str, Any]) -> T:
    """Return an answer's data as a struct."""
    return msgspec.convert({**data, "data": data}, kind)
