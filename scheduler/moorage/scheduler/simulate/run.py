"""One trace through one set of settings, from the first arrival to the last end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.events import Order
from moorage.scheduler.simulate.measures import Report, Timeline, report_of
from moorage.scheduler.simulate.trace import SimHost, TraceJob
from moorage.scheduler.simulate.world import Moment, Run, World

#: moments between two words of progress, of which one may take a tenth of a second where many wait
PROGRESS_MOMENTS: Final = 20


class Simulated(NamedTuple):
    """What a run came to, and what it came from: each job, and the fleet over time."""

    report: Report
    runs: list[Run]
    points: list[Moment]


def simulate(
    trace: str,
    hosts: Sequence[SimHost],
    jobs: Sequence[TraceJob],
    config: Config,
    settings: Mapping[str, Any],
    *,
    orders: Sequence[Order] = (),
    until_ms: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Simulated:
    """Run to the end, to `until_ms` of the trace, or until `KeyboardInterrupt`: then the report says where it was cut.

    `jobs` in the order of their coming; `settings` are what the report says of `config`, `orders` what operators have
    said before the first comes. `progress` hears the part of the jobs that have ended, 0..1.
    """
    timeline = Timeline()
    world = World(hosts, jobs, config, timeline.add, orders)
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
        len(hosts),
        world.gpus,
        runs,
        timeline,
        decisions=world.decided,
        records=world.records,
        cut_at_ms=cut_ms,
        never=world.never() if cut_ms is None else {},
    )
    return Simulated(report, runs, timeline.points)
