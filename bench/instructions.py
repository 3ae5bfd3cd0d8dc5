"""Instructions a job of the scheduler's core, by callgrind: a figure that a busy machine does not change.

`python -m bench.instructions [--tree FOLDER]... [--in-flight 1 100] [--level 2]` prints the least of several hash seeds
for each checkout (this one if none is named), and how far the seeds are apart. Time, workers and jobs are simulated and
the same in each run. Counted is what the engine does; not the simulated workers, imports or the garbage collector,
which does not run under load. Needs valgrind, and a Python whose symbols are not stripped.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.unit.scheduler.driving import Driving

HOSTS: Final = 64
WARM_UP: Final = 100
JOBS: Final = {1: 150}
JOBS_ELSE: Final = 600
REQUEST: Final[dict[str, Any]] = {
    "gpu": {"count": 1, "model": ["H100"]},
    "labels": {"team": "a"},
    "run": {"driver": "process", "argv": ["python", "train.py", "--steps", "100"], "env": {"SEED": "7"}},
    "retries": 2,
}
ROOMS: Final = ("schemas", "system", "bus", "client", "scheduler", "worker", "ranking", "testing")
#: callgrind counts inside this function of the interpreter alone, which nothing else calls
COUNTED: Final = "sys_call_tracing"


class Run:
    """A fleet of 8-GPU hosts, and jobs of one GPU that end with the record after their start."""

    def __init__(self, in_flight: int, level: int = 1) -> None:
        self.drive = _engine_alone(level)
        self.in_flight, self.made, self.live = in_flight, 0, 0

    def jobs(self, count: int, call: Callable[..., Any]) -> None:
        """Submit so many jobs and let them end; `call` makes each call of the engine."""
        drive, end = self.drive, self.made + count
        workers = list(drive.workers.values())
        while self.made < end or self.live:
            flying = []
            for worker in workers:
                for attempt in [attempt for attempt, held in worker.held.items() if held.phase == "running"]:
                    worker.finish(attempt, 0)
                    self.live -= 1
                if worker.gathered and not worker.flying and (frame := worker.report_frame()) is not None:
                    call(drive.send, worker.id, frame)
                    flying.append((worker, frame.no))
            for _ in range(min(self.in_flight - self.live, end - self.made)):
                self.made += 1
                self.live += 1
                name = f"job-{self.made:06d}"
                call(partial(drive.offer_submit, name, body=json.dumps({"job": name, **REQUEST}).encode()))
            drive.now += 1
            out = call(drive.record)
            for _, payload, _ in out.messages:
                frame = _wanted(payload)
                drive.workers[frame.worker].obey(frame)
            for worker, no in flying:
                worker.report_answered(no)


def _wanted(payload: bytes) -> Any:
    from tests.unit.scheduler import driving

    return driving._decode_wanted(payload)


def _engine_alone(level: int) -> Driving:
    """A driver of the core that keeps records, at this feature level of the ledger, and checks nothing."""
    from moorage.scheduler.core.engine import Engine
    from tests.unit.scheduler import driving

    class Alone(driving.Driving):
        def make_engine(self, state: Any) -> Engine:
            state.level = level
            return Engine(state, self.config, driving.SUBJECTS, 7 + state.epoch, self.now, self._explain)

        def store(self, payload: bytes) -> int:
            self.records.append(payload)
            return len(self.records)

        def check(self) -> None:
            """Nothing: no second state follows."""

    return Alone.with_hosts(*[8] * HOSTS)


def _measured(in_flight: int, level: int) -> None:
    """What callgrind runs: some jobs that do not count, then those that do."""
    run, jobs = Run(in_flight, level), JOBS.get(in_flight, JOBS_ELSE)
    gc.collect()
    gc.freeze()
    gc.disable()
    run.jobs(WARM_UP, lambda function, *arguments: function(*arguments))
    run.jobs(jobs, lambda function, *arguments: sys.call_tracing(function, arguments))


def a_job(tree: Path, in_flight: int, seed: int, level: int = 1) -> int:
    """Return the instructions a job in a checkout, with one hash seed."""
    command: list[str] = [
        "valgrind", "--tool=callgrind", "--collect-atstart=no", f"--toggle-collect={COUNTED}",
        "--callgrind-out-file=/dev/null", sys.executable, "-P", __file__, "--measured", str(in_flight),
        "--level", str(level),
    ]  # fmt: skip
    rooms = [tree, *(tree / room for room in ROOMS)]  # before those of this environment
    env = os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": ":".join(map(str, rooms))}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or found is None or not int(found[1]):
        sys.exit(f"nothing was counted in {tree}: {done.stderr[-2000:]}")
    return int(found[1]) // JOBS.get(in_flight, JOBS_ELSE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, action="append", help="a checkout; once for each")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 100], help="jobs that are live at once")
    parser.add_argument("--seeds", type=int, default=3, help="how many hash seeds")
    parser.add_argument("--level", type=int, default=1, help="the ledger's feature level")
    parser.add_argument("--measured", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measured:
        _measured(options.measured, options.level)
        return
    for in_flight in options.in_flight:
        for tree in options.tree or [Path.cwd()]:
            found = sorted(a_job(tree.resolve(), in_flight, seed, options.level) for seed in range(options.seeds))
            apart = 100 * (found[-1] - found[0]) / found[0]
            print(
                f"{in_flight:4} in flight  {found[0]:>9,} instructions a job, {apart:.2f} % apart  {tree}", flush=True
            )


if __name__ == "__main__":
    main()
