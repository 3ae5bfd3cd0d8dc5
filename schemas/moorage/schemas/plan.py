"""What `plan` answers: the data of its answer on the wire, which the scheduler fills and the SDK returns."""

from __future__ import annotations

import msgspec

from moorage.schemas.always import always
from moorage.schemas.answers.jobs import Explained, Start
from moorage.schemas.capabilities import Enforced
from moorage.schemas.errors import Problem
from moorage.schemas.sizes import SizedRow


class PlannedPlace(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Where a replica would start."""

    replica: int
    worker: str
    gpus: list[str] = always(list[str])  # uuids of its GPUs
    mode: str = always(str)  # sharing mode of its GPUs
    models: list[str] = []  # models of its GPUs, if they differ
    enforced: Enforced | None = None  # how it would be kept to its part of a shared GPU


class PlannedJobs(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Jobs that a plan concerns. Those of other tenants are a number."""

    own: list[str] = always(list[str])  # names of the tenant's own jobs, the first of them
    own_jobs: int = always(int)
    other_jobs: int = always(int)


class Plan(msgspec.Struct, omit_defaults=True):
    """What would happen to a request, and to the queue if the plan assumes changes.

    `starts` is `now`, `later`, `unknown`, `never`, `refused`, or `none`. It is `now` if any replica starts:
    `replicas_now` of its `replicas` do, and `waiting` says why the rest waits. It is `none` without a request, and for
    one that is a job already; then `warnings` has that job's state. It is also `never` if a cancel of the request's job
    came before it. A tenant sees its own jobs by name, and those of others as numbers.
    """

    starts: str  # `now`, `later`, `unknown` (not now, and there is no estimate), `never`, `refused`, or `none`
    ledger: int  # number of the record that the plan rests on: the `if_seq` of a submit that depends on it
    in_ms: Start | None = None  # time until a later start: `p50_ms`, and if known `p90_ms` and `runs`
    on: str = ""  # the worker of a later start
    places: list[PlannedPlace] = []  # by replica: `worker`, `gpus` (uuids), `mode`, and `models` if they differ
    replicas_now: int = 0  # number of replicas that would start now
    replicas: int = 0  # number of replicas of the request
    warnings: list[str] = []  # warnings that an acceptance would have
    preempts: PlannedJobs | None = None  # jobs that would be ended for it: `own` by name, `own_jobs`, `other_jobs`
    starting: PlannedJobs | None = None  # waiting jobs that the changes of fleet and rights let start
    empty: dict[str, int | None] | None = None  # ms until each drained worker is empty; null if unknown
    waiting: Explained | None = None  # why the job, or the rest of it, waits, in the format of `explain`
    sized: SizedRow | None = None  # what jobs of this workload with the same GPUs used, as far as it is known
    problem: Problem | None = None  # what a submit would be answered with; only with `refused`
