"""Words for a worker that gets no new jobs by an operator's order, and for a GPU that cannot be used, the same on
each screen."""

from __future__ import annotations

from moorage.client.durations import age
from moorage.schemas.actors import words
from moorage.schemas.answers.fleet import DeviceTrouble, DrainTimes, WorkerInfo
from moorage.schemas.frames import AGENT_STOPPED, DISK_FULL
from moorage.schemas.units import many


def closed_words(worker: WorkerInfo) -> str:
    """Return for how long a worker of the answer `fleet` has been draining or cordoned, what is on it, why and by whom:
    `draining for 2h, 3 attempts on it, empty in 28m: new disk (by operator:ana)`; "" for one that no order closes."""
    if worker.since_ms is None:
        return ""
    on_it = many(worker.members, "attempt") if worker.members else "no attempt"
    parts = [f"{worker.flag} for {age(worker.since_ms)}", f"{on_it} on it"]
    if worker.flag == "draining" and worker.drain is not None:
        parts += _times(worker.drain)
    return ", ".join(parts) + _ordered(worker)


def planned_words(worker: WorkerInfo) -> str:
    """Return when a worker of the answer `fleet` will be drained, why and by whom; "" without a drain to come."""
    drain = worker.drain
    if drain is None or not drain.begins_in_ms:
        return ""
    return ", ".join([f"drained in {age(drain.begins_in_ms)}", *_times(drain)]) + _ordered(drain)


def device_words(trouble: DeviceTrouble) -> str:
    """Return what is wrong with a GPU of a worker of the answer `fleet`, and for how long."""
    detail = trouble.detail
    what = f"used by {detail}" if trouble.kind == "foreign" else f"{trouble.kind}: {detail}".rstrip(": ")
    return what + (f", since {age(trouble.since_ms)}" if trouble.since_ms is not None else "")


def down_words(worker: WorkerInfo) -> list[str]:
    """Return which drivers of a worker of the answer `fleet` start nothing, and why; what holds for all only once."""
    words: dict[str, None] = {}
    for down in worker.drivers_down:
        if down.why.startswith(AGENT_STOPPED):  # it reported this once, so nobody knows since when
            words[down.why] = None
            continue
        what = down.why if down.why.startswith(DISK_FULL) else f"driver-down: {down.driver}: {down.why}"
        words[f"{what}, since {age(1000 * down.for_s)}"] = None
    return list(words)


def _times(drain: DrainTimes) -> list[str]:
    """Return when the last job has to be gone, and when the worker opens by itself."""
    parts = []
    if drain.leave_in_ms > drain.begins_in_ms:
        parts.append(f"empty in {age(drain.leave_in_ms)}")
    if drain.ends_in_ms is not None:
        parts.append(f"open again in {age(drain.ends_in_ms)}")
    return parts


def _ordered(order: WorkerInfo | DrainTimes) -> str:
    """Return the reason before the name: a narrow screen cuts the end off."""
    return f"{': ' + order.why if order.why else ''} (by {words(order.by, order.said)})"
