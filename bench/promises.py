"""`python -m bench.promises`: of the Philly jobs that wait, how many are promised a start, and how many such are kept.

Each virtual cluster is played by the production core, and its leader promises starts as it does live: by a forecast to
a job that has waited ten seconds, moved by what earlier promises came to. With `--each 4` one job of four may be
promised a start. Counted are jobs that wait longer than a minute. Beside it stands what the forecast's own bound for
nine of ten cases would have come to, and what the leader itself counts. Asked are 87 to 93 of a hundred promises kept,
at 1.5 times that bound or less. Takes minutes to hours.
"""

from __future__ import annotations

import argparse
import statistics

from bench.forecasts import LIMIT_S, WAITED_MS, with_command
from bench.queueing import jobs_of
from moorage.scheduler.answers.promises import AFTER_MS, SCORES_MIN, Promises
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.events import Promising
from moorage.scheduler.core.outputs.outputs import Outputs
from moorage.scheduler.whatif.forecast import Forecast, decode_forecast, forecast
from moorage.testing.simulate.philly import CLUSTERS, hosts_of
from moorage.testing.simulate.world import World


class Promised(World):
    """A world whose leader promises starts."""

    def __init__(self, cluster: str, each: int) -> None:
        jobs = [with_command(job) for job in jobs_of(cluster, 0)]
        super().__init__(hosts_of(CLUSTERS[cluster]), jobs, Config())
        self.promises = Promises(self.engine)
        self.chosen = {(job.tenant, job.request.job or "") for job in jobs[::each]}
        self.told: dict[tuple[str, str], tuple[int, Promising, bool]] = {}  # when, what, and whether it was moved
        self._forecast: Forecast | None = None

    def on_outputs(self, out: Outputs) -> None:
        super().on_outputs(out)
        for job in out.started:
            self.promises.started(job, self.engine.state.time_ms)

    def next_ms(self) -> int | None:
        at_ms = super().next_ms()
        if at_ms is not None and (waiting := self.promises._candidates):
            at_ms = min(at_ms, max(self.time_ms + 1, waiting[0][0] + AFTER_MS))
        return at_ms

    def step(self) -> bool:
        if not super().step():
            return False
        promises, state = self.promises, self.engine.state
        promises.look(self.time_ms)
        for candidate in list(promises._candidates):
            job = state.jobs.get(candidate[1])
            if job is None or (job.tenant, job.name) not in self.chosen:
                promises._candidates.remove(candidate)
        if promises.wants(None, self.time_ms):
            job = state.jobs[promises._candidates[0][1]]
            self._forecast = decode_forecast(forecast(self.engine, self.time_ms, [(job.tenant, job.name)], LIMIT_S))
            if (found := promises.choose(self._forecast, self.time_ms)) is None:
                promises._candidates.popleft()  # no bound is known: it is not told
            else:
                moved = len(promises._of(job.tenant, is_sweep=False)) >= SCORES_MIN
                self.told[job.tenant, job.name] = self.time_ms, found, moved
                self.engine.offer(found)
                self.settle()
        return True


def measure(cluster: str, each: int) -> str:
    """Return the row of one virtual cluster."""
    world = Promised(cluster, each)
    while world.step():
        pass
    runs = {name: world.runs[name] for name in world.chosen}
    waited = {name for name, run in runs.items() if run.started_ms - run.job.at_ms > WAITED_MS}
    kept = raw = moved = moved_kept = 0
    later = []
    for name in waited & world.told.keys():
        at_ms, promise, is_moved = world.told[name]
        started_ms = world.time_ms - world.now_ms + runs[name].started_ms
        is_kept = started_ms <= promise.by_ms
        kept += is_kept
        raw += started_ms <= at_ms + promise.p90_ms
        moved += is_moved
        moved_kept += is_moved and is_kept
        if is_moved and promise.p90_ms:
            later.append((promise.by_ms - at_ms) / promise.p90_ms)
    told = len(waited & world.told.keys())
    live = world.promises.sums
    ratio = statistics.median(later) if later else 0.0
    return (
        f"| {cluster} | {len(waited)} | {told / max(1, len(waited)):.0%} | {kept / max(1, told):.0%} |"
        f" {moved_kept / max(1, moved):.0%} of {moved} | {raw / max(1, told):.0%} | {ratio:.2f} |"
        f" {live[0]} and {live[1]} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", nargs="*", choices=list(CLUSTERS), default=list(CLUSTERS))
    parser.add_argument("--each", type=int, default=4)
    options = parser.parse_args()
    print("| virtual cluster | waited > 1 min | told | kept | once moved | raw p90 | T / p90 | kept, missed live |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for cluster in options.clusters:
        print(measure(cluster, options.each), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
