"""Which change to try against each cause of waits, as an edit of a trace: one or two for each cause that has a cure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from moorage.schemas.waited import Cause, WaitedRow
from moorage.testing.simulate.proof import edited
from moorage.testing.simulate.trace import SimHost, TraceEvent, TraceJob

#: what all jobs are given against waits for higher priorities
EQUAL: Final = 50
#: causes with less of all waits than this part are left
PART_MIN: Final = 0.01
_OPENED: Final = frozenset(("cordon", "drain"))


class Tried(NamedTuple):
    """A changed trace: against which cause, the change in words, whose waits it is about (None: all)."""

    cause: str
    change: str
    jobs: Sequence[TraceJob]
    events: Sequence[TraceEvent]
    settings: Mapping[str, str] = {}
    tenant: str | None = None


def changes_for(
    waits: Iterable[WaitedRow], jobs: Sequence[TraceJob], events: Sequence[TraceEvent], settings: Mapping[str, str]
) -> list[Tried]:
    """Return the changes to try against what most was waited for, the largest sum first.

    `waits` are sums by cause, tenant and model; `settings` are those of the trace. Left out are causes without a cure
    that a trace can play, and sums below `PART_MIN` of all.
    """
    by_cause, most = Counter[str](), dict[str, Counter[tuple[str, str]]]()
    for row in waits:
        cause = row.cause or ""
        by_cause[cause] += int(row.wait_s)
        most.setdefault(cause, Counter())[row.tenant or "", row.model or ""] += int(row.wait_s)
    found: list[Tried] = []
    for cause, wait_s in by_cause.most_common():
        if wait_s and wait_s >= PART_MIN * by_cause.total():
            (tenant, model), _ = most[cause].most_common(1)[0]
            found += _against(cause, tenant, model, jobs, list(events), settings)
    return found


def _against(
    cause: str,
    tenant: str,
    model: str,
    jobs: Sequence[TraceJob],
    events: list[TraceEvent],
    settings: Mapping[str, str],
) -> list[Tried]:
    match cause:
        case Cause.LIMIT:
            gpus = max((_gpus(event) for event in events if _is_order(event, "limit", tenant)), default=0)
            tried: list[tuple[str, int | None]] = [(f"no limit of {tenant}", None)]
            if gpus:
                tried.insert(0, (f"limit {2 * gpus} of {tenant}", 2 * gpus))
            return [
                Tried(cause, say, jobs, edited(events, quotas={tenant: (0, most)}), tenant=tenant)
                for say, most in tried
            ]
        case Cause.FULL | Cause.NO_HOST:
            host = _host_like(model, events)
            said = "" if host is None else f"host{{}} as {host.name}"
            more = [] if host is None else [replace(host, name=f"added-{number}") for number in range(2)]
            return [
                Tried(
                    cause, f"+{count} {said.format('s' if count > 1 else '')}", jobs, edited(events, add=more[:count])
                )
                for count in range(1, len(more) + 1)
            ]
        case Cause.RESERVED:
            after_s = 4 * float(settings.get("reserve_after", 30.0)) or 60.0
            named = {**settings, "reserve_after": f"{after_s:g}"}
            return [Tried(cause, f"reserve_after {after_s:g}", jobs, events, named)]
        case Cause.CLOSED:
            opened = [event for event in events if not (event.kind == "order" and event.data["verb"] in _OPENED)]
            return [Tried(cause, "no cordons and drains", jobs, opened)]
        case Cause.FRAGMENTED:
            other = "headroom" if settings.get("ranker", "fragments") != "headroom" else "fragments"
            return [Tried(cause, f"ranker {other}", jobs, events, {**settings, "ranker": other})]
        case Cause.PRIORITY:
            equal = [replace(job, request=replace(job.request, priority=EQUAL)) for job in jobs]
            return [Tried(cause, f"all at priority {EQUAL}", equal, events)]
        case Cause.SHARE | Cause.GUARANTEE:
            plain = [event for event in events if not (event.kind == "order" and event.data["verb"] == "share")]
            return [Tried(cause, "equal shares, no guarantees", jobs, plain)]
    return []


def _is_order(event: TraceEvent, verb: str, tenant: str) -> bool:
    return event.kind == "order" and event.data["verb"] == verb and event.data.get("tenant") == tenant


def _gpus(event: TraceEvent) -> int:
    return int(event.data.get("gpus") or 0)


def _host_like(model: str, events: Sequence[TraceEvent]) -> SimHost | None:
    """Return the host of which there are most among those that have such GPUs; None if none has."""
    models = [] if model in ("any", "none", "") else model.casefold().split("|")
    kinds, first = Counter[tuple[Any, ...]](), dict[tuple[Any, ...], SimHost]()
    for event in events:
        if event.kind == "join":
            host = msgspec.convert(event.data, SimHost)
            names = [device.name.casefold() for device in host.devices]
            if not models or any(each in name for each in models for name in names):
                kind = (*names, host.cpu_milli, host.memory_mib)
                kinds[kind] += 1
                first.setdefault(kind, host)
    return first[kinds.most_common(1)[0][0]] if kinds else None
