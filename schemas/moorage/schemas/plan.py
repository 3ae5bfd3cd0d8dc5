"""What `plan` answers: the data of its answer on the wire, which the scheduler fills and the SDK returns."""

from __future__ import annotations

from typing import Any

import msgspec

from moorage.schemas.errors import Problem


class Plan(msgspec.Struct, omit_defaults=True):
    """What would happen to a request, and to the queue if the plan assumes changes.

    `starts` is `now`, `later`, `unknown`, `never`, `refused`, or `none`. It is `now` if any replica starts:
    `replicas_now` of its `replicas` do, and `waiting` says why the rest waits. It is `none` without a request, and for
    one that is a job already; then `warnings` has that job's state. It is also `never` if a cancel of the request's job
    came before it. A tenant sees its own jobs by name, and those of others as numbers.
    """

    starts: str  # `now`, `later`, `unknown` (not now, and there is no estimate), `never`, `refused`, or `none`
    ledger: int  # number of the record that the plan rests on: the `if_seq` of a submit that depends on it
    #: time until a later start, ms: `p50_ms`, and if known `p90_ms` and `runs`, the number of runs behind it
    in_ms: dict[str, int] | None = None
    on: str = ""  # the worker of a later start
    #: placements of the replicas: `replica`, `worker`, `gpus` (uuids), `mode`, and `models` of these if they differ
    places: list[dict[str, Any]] = []
    replicas_now: int = 0  # number of replicas that would start now
    replicas: int = 0  # number of replicas of the request
    warnings: list[str] = []  # warnings that an acceptance would have
    preempts: dict[str, Any] | None = None  # jobs that would be ended for it: `own` by name, `own_jobs`, `other_jobs`
    #: waiting jobs that the changes of fleet and rights let start, with the fields of `preempts`
    starting: dict[str, Any] | None = None
    empty: dict[str, int | None] | None = None  # ms until each drained worker is empty; null if unknown
    waiting: dict[str, Any] | None = None  # why the job, or the rest of it, waits, in the format of `explain`
    problem: Problem | None = None  # what a submit would be answered with; only with `refused`
