"""What stands in `data` of the answers that have no struct on the wire, for the protocol page."""

from __future__ import annotations

from typing import Final

PLAN: Final[dict[str, str]] = {
    "starts": "now, later, unknown (not now, and there is no estimate), never, refused, or none (no request was given)",
    "ledger": "the record that was seen; as `if_seq` of a submit it holds the request to this plan",
    "replicas_now": "how many replicas would start now, of `replicas`; left out where 0",
    "replicas": "of the request",
    "places": "where they go: `replica`, `worker`, `gpus` (uuids), `mode`",
    "in_ms": "when it starts, if later: `p50_ms`, and where known `p90_ms` and `runs`, how many runs it rests on",
    "on": "the worker of a later start",
    "waiting": "why it, or the rest of it, waits: as `explain` says it",
    "warnings": "those that an acceptance would have",
    "preempts": "jobs that would be ended for it: `own` by name, `own_jobs`, `other_jobs`",
    "starting": "jobs that wait and that the edits let start, in the same way",
    "empty": "with `drain`: in how many ms each of these workers is empty; null where nobody knows",
    "problem": "with refused: the [Problem](#problem) that a submit would be answered with",
}
FLEET: Final[dict[str, str]] = {
    "epoch": "number of the leader",
    "leader": "its name",
    "ledger": "the last record",
    "workers": "a page of them by name, each as in the next table",
    "next": "the last worker of this page, if there are more: ask again with it as `after`",
    "fits_now": "by model: `gpus` in all, `free`, and `largest`: what starts now, exclusive, on one host",
    "queued": "replicas that wait",
    "live_jobs": "jobs that are not over",
    "finished_kept": "jobs that are over and still in memory",
    "finished_window_ms": "for how long back",
    "keeps": "for how long ended jobs and their history are kept, in seconds, and their bounds",
    "history": "the writer of the history: what waits, was written, refused, dropped",
    "lent_twice": "GPUs that two workers lend; left out where there are none",
    "feature_level": "of the ledger's records",
    "contained": "what the scheduler failed on and set aside: `counts` by kind, whether the `plain_ranker` stands in or"
    " `safe_mode` holds, the `tenants` and `workers` that wait for it, and the `last` failure with its time",
    "request_queue": "the fullest stream of the durable queue: `messages`, `bytes`, `bytes_max` (0: no bound), and its"
    " `tenant` where it is one tenant's own",
    "schedulers": "each scheduler: `release`, `level`, `ledger`, whether it `leads`, settings other than the default",
}
WORKER: Final[dict[str, str]] = {
    "worker": "its id",
    "state": "up, stale, draining, cordoned, claimed-locally, not-heard, lost or left",
    "flag": "what an operator has set: open, draining or cordoned; `by` whom",
    "by": "",
    "simulated": "",
    "models": "names of its GPUs",
    "gpus": "how many; `free` are not leased and may be given out",
    "free": "",
    "cells": "a character for each GPU, as `moorage fleet` prints it",
    "members": "attempts that it holds",
    "cpu_milli": "of the host, and what of it no job asked for",
    "cpu_free_milli": "",
    "memory_mib": "in the same way",
    "memory_free_mib": "",
    "labels": "as in hello",
    "drivers": "",
    "capabilities": "of its drivers, by name, as in hello; empty for a worker of a release before 0.3",
    "release": "",
    "keeps": "",
    "heard_ms_ago": "since its last renewal; null where none came to this leader",
    "quarantined": "slots that an operator has to release",
    "troubles": "GPUs that are not given out: `slot`, what is wrong, since when",
    "drain": "of a drain with a time: `begins_in_ms`, `leave_in_ms`, `ends_in_ms`, `by`, `why`; else left out",
    "devices": "for the `worker` that was asked for: each GPU with its `slot` and what [hello](#hello) says of it",
}


def table(rows: dict[str, str]) -> str:
    return "| field | what |\n| --- | --- |\n" + "".join(f"| `{name}` | {text} |\n" for name, text in rows.items())


def answers() -> str:
    """The part of the protocol page."""
    return (
        "\n## Data of answers\n\nWhat is left out is null, empty or 0. A later release may add fields.\n"
        f"\n### Data of `plan`\n\n{table(PLAN)}"
        f"\n### Data of `admin.fleet`\n\n{table(FLEET)}\nA worker:\n\n{table(WORKER)}"
    )
