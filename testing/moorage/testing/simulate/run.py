"""Runs one trace with one set of settings, from the first arrival to the last end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.events import Order
from moorage.testing.simulate.measures import Report, Timeline, report_of
from moorage.testing.simulate.trace import SimHost, TraceEvent, TraceJob
from moorage.testing.simulate.world import Moment, Run, World

#: moments between two progress reports; one moment may take a tenth of a second if many jobs wait
PROGRESS_MOMENTS: Final = 20


class Simulated(NamedTuple):
    """The results of a run: the report, each job, and the fleet over time."""

    report: Report
    runs: list[Run]
    points: list[Moment]
    placed: dict[tuple[str, str], dict[str, tuple[int, str, list[int]]]]


def simulate(
    trace: str,
    hosts: Sequence[SimHost],
    jobs: Sequence[TraceJob],
    config: Config,
    settings: Mapping[str, Any],
    *,
    orders: Sequence[Order] = (),
    events: Sequence[TraceEvent] = (),
    until_ms: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Simulated:
    """Run a trace to its end, to `until_ms`, or until `KeyboardInterrupt`; the report says where it was cut.

    `until_ms` counts from the trace's beginning; the run stops after the first moment at or after it. `jobs` are in
    order of arrival. `settings` is what the report says of `config`, `orders` are operators' orders before the first
    arrival. `progress` is called with the part of the jobs that have ended, 0..1.
    """
    timeline = Timeline()
    world = World(hosts, jobs, config, timeline.add, orders, events)
    cut_ms: int | None = None
    moments = 0
    try:
        while world.step():
            moments += 1
            if until_ms is not None and world.now_ms >= until_ms:
                cut_ms = world.now_ms
                break
            if progress is not None and moments % PROGRESS_MOMENTS == 0:
                progress(world.ended / len(jobs))
    except KeyboardInterrupt:
        cut_ms = world.now_ms
    runs = list(world.runs.values())
    report = report_of(
        trace,
        dict(settings),
        len(hosts) + sum(event.kind == "join" for event in events),
        world.gpus,
        runs,
        timeline,
        decisions=world.decided,
        records=world.records,
        cut_at_ms=cut_ms,
        never=world.never() if cut_ms is None else {},
    )
    return Simulated(report, runs, timeline.points, world.placed)
