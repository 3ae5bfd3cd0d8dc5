"""What stands in `data` of the answers to `plan` and `admin.fleet`, for the protocol page."""

from __future__ import annotations

from typing import Final

from moorage.schemas.described import notes
from moorage.schemas.plan import Plan
from tools.wire_types import table

FLEET: Final[dict[str, str]] = {
    "epoch": "the leader's epoch",
    "leader": "name of the leader",
    "ledger": "number of the last record",
    "workers": "workers of this page by name, each as in the next table",
    "next": "the last worker of this page, if there are more: ask again with it as `after`",
    "fits_now": "GPUs by model: `gpus` in all, `free`, and `largest`, the most that start now, exclusive, on one host",
    "stalled_jobs": "number of running jobs that stall, see `stall_s` of a request",
    "stalled": "the first of them: `tenant`, `job`, for how many `seconds`, and `why`",
    "used_now": "leased GPUs by model: `read`, those with a reading, `at_work`, how many GPUs' worth works, `idle`",
    "queued": "number of replicas that wait",
    "live_jobs": "number of jobs that have not ended",
    "finished_kept": "number of ended jobs in memory",
    "finished_window_ms": "age of the oldest ended job in memory, ms",
    "keeps": "seconds for which ended jobs and their history are kept, and their bounds",
    "follower": "what writes the history and counts GPU time: how many records of the ledger it is behind, its `gaps` "
    "(from and until when in ms, how many records), the stories that wait, and what was written since it began; "
    "while it cannot go on, its `trouble` and what to do `next`",
    "feature_level": "feature level of the ledger's records",
    "ledger_copies": "the ledger's copies: how many are `wanted`, on which servers they are `lacking`, and"
    " `seen_ms_ago`; of one copy its server, the `holder`, and the `servers` of a cluster around it",
    "contained": "work that the scheduler failed on and set aside: `counts` by kind, whether `pack` ranks as the"
    " `plain_ranker`, which verbs of which tenants are `refused` for now, the `workers` that are kept out, and"
    " the `last` failure with its time",
    "request_queue": "the fullest stream of the durable queue: `messages`, `bytes`, `bytes_max` (0: no bound), and its"
    " `tenant` if it is one tenant's own",
    "appends": "appends to the ledger in this term: `records`, and the `seconds` that they took together",
    "schedulers": "the schedulers, each with `release`, `level`, `ledger`, `leads`, and settings that are no default",
}
WORKER: Final[dict[str, str]] = {
    "worker": "id of the worker",
    "state": "up, stale, disk-full, draining, cordoned, starts-fail, claimed-locally, not-heard, lost or left",
    "flag": "the operator's setting: open, draining or cordoned",
    "by": "name of the operator who set it",
    "why": "the reason that was given for draining or cordoned",
    "since_ms": "for how many ms it has been draining or cordoned",
    "simulated": "whether its GPUs are simulated",
    "models": "names of its GPUs",
    "gpus": "number of its GPUs",
    "free": "number of GPUs that are not leased and may be given out",
    "cells": "a character for each GPU, as `moorage fleet` prints it",
    "members": "number of attempts on it",
    "cpu_milli": "CPU of the host, thousandths of a core",
    "cpu_free_milli": "CPU that no job asked for, thousandths of a core",
    "memory_mib": "memory of the host, MiB",
    "memory_free_mib": "memory that no job asked for, MiB",
    "labels": "its labels, as in hello",
    "drivers": "its drivers, as in hello",
    "capabilities": "capabilities of its drivers, by name, as in hello",
    "release": "its release of moorage",
    "keeps": "how much output and results it keeps, as in hello",
    "heard_ms_ago": "ms since its last renewal; null if this leader received none",
    "quarantined": "positions of GPUs in quarantine, which an operator has to release",
    "troubles": "GPUs that are not given out: `slot`, the cause, and since when",
    "drivers_down": "drivers that start nothing: `driver`, `why`, `for_s`; left out without one",
    "warning": "what is wrong with the host and closes nothing; left out without one",
    "drain": "times of a drain: `begins_in_ms`, `leave_in_ms`, `ends_in_ms`, `by`, `why`; left out without one",
    "devices": "GPUs of the `worker` that the question names, each with its `slot` and its fields of [hello](#hello)",
}


def _fields(rows: dict[str, str]) -> str:
    return table([("field", "what"), *((f"`{name}`", text) for name, text in rows.items())]) + "\n"


def answers() -> str:
    """The part of the protocol page."""
    return (
        "\n## Data of answers\n\nWhat is left out is null, empty or 0. A later release may add fields.\n"
        f"\n### Data of `plan`\n\n{_fields(notes(Plan))}"
        f"\n### Data of `admin.fleet`\n\n{_fields(FLEET)}\nA worker:\n\n{_fields(WORKER)}"
    )
