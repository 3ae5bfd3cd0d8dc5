"""Compares a change with what is, on several shaken copies of a trace: one run of either is an anecdote.

In a copy each job comes up to `SHAKEN_MS` sooner or later, with its cancel. The first copy is the trace itself. Both
sides play the same copies, so their differences come from the change, or from how starts happen to fall together: what
differs in sign from copy to copy is the latter.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.events import Order
from moorage.testing.simulate.trace import SimHost, TraceEvent, TraceJob
from moorage.testing.simulate.world import World

SHAKEN_MS: Final = 60_000
COPIES_MAX: Final = 100
#: with fewer copies there is no percentage
COPIES_SURE: Final = 3
#: tenants that are compared on their own, those with the longest waits
TENANTS_MAX: Final = 20
_HOUR_MS: Final = 3_600_000

JobName = tuple[str, str]


class Side(NamedTuple):
    """What one side of a comparison plays: hosts from the beginning, jobs, what happens beside, settings, orders."""

    hosts: Sequence[SimHost]
    jobs: Sequence[TraceJob]
    events: Sequence[TraceEvent]
    config: Config
    orders: Sequence[Order] = ()


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """What a change does to the mean wait of some jobs: hours without and with it, a number for each copy."""

    tenant: str | None  # null: of all jobs
    jobs: int
    then_h: list[float]
    now_h: list[float]

    @property
    def is_sure(self) -> bool:
        """Whether there are copies enough, and all of them moved the same way."""
        signs = {(now > then) - (now < then) for then, now in zip(self.then_h, self.now_h, strict=True)}
        return len(self.then_h) >= COPIES_SURE and len(signs) == 1

    @property
    def sooner(self) -> str:
        """How much sooner jobs would have started, in words."""
        if not self.is_sure:
            return "no clear effect" if len(self.then_h) >= COPIES_SURE else self.told
        by_h = sorted(then - now for then, now in zip(self.then_h, self.now_h, strict=True))
        word = "sooner" if by_h[-1] > 0 else "later"
        nearest, middle, furthest = sorted(abs(each) for each in (by_h[0], statistics.median(by_h), by_h[-1]))
        if not furthest:
            return "no sooner"
        return f"{_hours(middle)} {word} ({_hours(nearest)} … {_hours(furthest)})"

    @property
    def told(self) -> str:
        """The effect in words: a percentage only where all of at least `COPIES_SURE` copies moved the same way."""
        copies = len(self.then_h)
        if not any(self.then_h) and not any(self.now_h):
            return "nothing waits"
        if self.then_h == self.now_h:
            return "no effect"
        if copies < COPIES_SURE:
            said = f"{_hours(statistics.fmean(self.then_h))} to {_hours(statistics.fmean(self.now_h))}"
            return f"{said}, of {copies} {'copy' if copies == 1 else 'copies'}: too few to say"
        if not self.is_sure:
            return "no clear effect"
        if not all(self.then_h):  # nothing of which a part could be told
            return f"{_hours(statistics.median(self.then_h))} to {_hours(statistics.median(self.now_h))}"
        parts = sorted(100 * (now - then) / then for then, now in zip(self.then_h, self.now_h, strict=True))
        nearest, furthest = sorted((parts[0], parts[-1]), key=abs)
        middle = statistics.median(parts)
        if abs(middle) < 0.5:
            return "less than 1 %"
        return f"{_percent(middle)} % ({_percent(nearest)} … {_percent(furthest)})"


def copies(side: Side, number: int) -> tuple[list[TraceJob], list[TraceEvent]]:
    """Return the jobs and events of a copy, in order of time. What stood as the trace began is not moved."""
    if not number:
        return list(side.jobs), list(side.events)
    rng = random.Random(number)
    moved: dict[JobName, int] = {}
    jobs = list[TraceJob]()
    for job in side.jobs:
        by_ms = rng.randint(-SHAKEN_MS, SHAKEN_MS)
        at_ms = max(1, job.at_ms + by_ms) if job.at_ms else 0
        moved[job.tenant, job.request.job or ""] = at_ms - job.at_ms
        jobs.append(replace(job, at_ms=at_ms))
    events = [
        replace(event, at_ms=event.at_ms + moved.get((event.data["tenant"], event.data["job"]), 0))
        if event.kind == "cancel"
        else event
        for event in side.events
    ]
    return sorted(jobs, key=lambda job: job.at_ms), sorted(events, key=lambda event: event.at_ms)


def compare(
    before: Side,
    after: Mapping[str, Side],
    count: int,
    *,
    until_ms: int | None = None,
    among: Mapping[str, Collection[JobName]] | None = None,
    progress: Callable[[float], None] | None = None,
) -> dict[str, list[Effect]]:
    """Return the effects of each change by its name, of all jobs first, then by tenant.

    `among` has, for some changes, the jobs whose waits are compared. `count` copies, 1..`COPIES_MAX`, are played up to
    `until_ms` from the trace's beginning. `KeyboardInterrupt` ends it with the copies that are whole, or goes on to the
    caller if none is.
    """
    found: dict[str, dict[str | None, list[tuple[float, float, int]]]] = {name: {} for name in after}
    steps, done = count * (1 + len(after)), 0

    def play(side: Side, number: int) -> dict[JobName, int]:
        nonlocal done
        jobs, events = copies(side, number)
        ended = waits_of(side, jobs, events, until_ms)
        done += 1
        if progress is not None:
            progress(done / steps)
        return ended

    for number in range(count):
        try:
            base = play(before, number)
            changed = {name: play(side, number) for name, side in after.items()}
        except KeyboardInterrupt:
            if not number:
                raise
            break
        for name, waits in changed.items():
            chosen = (among or {}).get(name, base)
            for tenant, row in _means({job: base[job] for job in chosen}, waits).items():
                found[name].setdefault(tenant, []).append(row)
    return {name: _effects(rows) for name, rows in found.items()}


def waits_of(
    side: Side, jobs: Sequence[TraceJob], events: Sequence[TraceEvent], until_ms: int | None
) -> dict[JobName, int]:
    """Return how long each job waited, in ms; one that had not begun as the clock stopped: -1 and how long until then
    as a negative number."""
    world = World(side.hosts, jobs, side.config, None, side.orders, events)
    while world.step():
        if until_ms is not None and world.now_ms >= until_ms:
            break
    found: dict[JobName, int] = {}
    for name, run in world.runs.items():
        left_ms = run.started_ms if run.started_ms >= 0 else run.ended_ms
        stopped_ms = world.now_ms if until_ms is None else until_ms
        found[name] = left_ms - run.job.at_ms if left_ms >= 0 else -1 - max(0, stopped_ms - run.job.at_ms)
    return found


def _means(then: Mapping[JobName, int], now: Mapping[JobName, int]) -> dict[str | None, tuple[float, float, int]]:
    """Return the mean waits of both sides in hours, and the number of jobs, by tenant and of all. A job that begins on
    neither side is left out: how long it waits is how long was played."""
    sums: dict[str | None, list[int]] = {}
    for name, wait_ms in then.items():
        other_ms = now.get(name, wait_ms)
        if wait_ms < 0 and other_ms < 0:
            continue
        for tenant in (None, name[0]):
            row = sums.setdefault(tenant, [0, 0, 0])
            row[0] += wait_ms if wait_ms >= 0 else -1 - wait_ms
            row[1] += other_ms if other_ms >= 0 else -1 - other_ms
            row[2] += 1
    return {tenant: (one / n / _HOUR_MS, two / n / _HOUR_MS, n) for tenant, (one, two, n) in sums.items()}


def _effects(rows: Mapping[str | None, list[tuple[float, float, int]]]) -> list[Effect]:
    most = max((len(each) for each in rows.values()), default=0)
    found = [
        Effect(tenant=tenant, jobs=each[0][2], then_h=[row[0] for row in each], now_h=[row[1] for row in each])
        for tenant, each in rows.items()
        if len(each) == most
    ]
    found.sort(key=lambda effect: (effect.tenant is not None, -sum(effect.then_h) * effect.jobs))
    tenants = found if len(found) > 2 else found[:1]  # one tenant is all
    return tenants[: TENANTS_MAX + 1]


def _hours(hours: float) -> str:
    return f"{hours:.2f}h" if hours >= 1 or not hours else f"{hours * 60:.1f}m"


def _percent(number: float) -> str:
    return f"{number:+.0f}".replace("-", "−")
