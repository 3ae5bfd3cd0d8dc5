"""Compares what a simulation placed with what the ledger's trace says, and edits what a trace says beside its jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from moorage.testing.simulate.trace import SimHost, TraceEvent, TraceJob

Place = tuple[int, str, list[int]]


class Difference(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A placement that came out otherwise: ms from the trace's beginning, host and slots; null: there was none."""

    tenant: str
    job: str
    attempt: str  # replica/attempt
    kind: str
    then: Place | None = None
    now: Place | None = None


class Proof(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How many placements of the ledger came out the same: at the same ms, on the same host and slots."""

    placements: int
    same: int
    within_2s: int  # at most two seconds apart, wherever
    kinds: dict[str, int] = {}  # of the others
    first: Difference | None = None  # the earliest of them


def prove(jobs: Iterable[TraceJob], placed: Mapping[tuple[str, str], Mapping[str, Place]]) -> Proof:
    """Compare each placement that the trace has with those of a simulation of it."""
    count = same = near = 0
    kinds = Counter[str]()
    found: list[tuple[int, Difference]] = []
    for job in jobs:
        name = job.request.job or ""
        now = placed.get((job.tenant, name), {})
        for key in {**job.placed, **now}:
            then, mine = job.placed.get(key), now.get(key)
            if then is not None:
                count += 1
                near += mine is not None and abs(mine[0] - then[0]) <= 2000
            if (
                then is not None
                and mine is not None
                and (then[0], then[1], list(then[2])) == (*mine[:2], list(mine[2]))
            ):
                same += 1
                continue
            kind = _kind(then, mine)
            kinds[kind] += 1
            at_ms = min(each[0] for each in (then, mine) if each is not None)
            told = Difference(tenant=job.tenant, job=name, attempt=key, kind=kind, then=then, now=mine)
            found.append((at_ms, told))
    first = min(found, key=lambda row: row[0], default=None)
    return Proof(
        placements=count, same=same, within_2s=near, kinds=dict(kinds), first=None if first is None else first[1]
    )


def _kind(then: Place | None, now: Place | None) -> str:
    if then is None:
        return "placed here alone"
    if now is None:
        return "never placed here"
    return "another time" if then[0] != now[0] else "another host" if then[1] != now[1] else "other GPUs"


def edited(
    events: Sequence[TraceEvent],
    *,
    add: Sequence[SimHost] = (),
    without: Iterable[str] = (),
    quotas: Mapping[str, tuple[int, int | None]] | None = None,
) -> list[TraceEvent]:
    """Return a trace's events with hosts added at its beginning, and without others; `quotas` has tenants' limits as
    (from which ms on, GPUs or None for no limit) in place of those that operators set from then on."""
    gone, limits = set(without), quotas or {}
    found: list[TraceEvent] = [TraceEvent(0, "join", msgspec.to_builtins(host)) for host in add]
    for event in events:
        data: dict[str, Any] = event.data
        if gone & {data.get("name"), data.get("host"), data.get("worker")}:
            continue
        is_limit = event.kind == "order" and data.get("verb") == "limit"
        if is_limit and data["tenant"] in limits and event.at_ms >= limits[data["tenant"]][0]:
            continue
        found.append(event)
    for tenant, (at_ms, gpus) in limits.items():
        found.append(TraceEvent(at_ms, "order", {"verb": "limit", "tenant": tenant, "gpus": gpus or 0}))
    return sorted(found, key=lambda event: event.at_ms)
