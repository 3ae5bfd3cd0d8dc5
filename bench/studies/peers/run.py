"""`python -m bench.studies.peers.run`: ours beside other schedulers on this machine, one after the other in each round.

Writes bench/RESULTS-peers.md. A peer that cannot be installed is named with what to do about it; the others go on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import uvloop

from bench import book
from bench.bounds import bound_of
from bench.kept import spread
from bench.studies.peers import environments, ours
from bench.studies.peers.environments import NoPeer, measured, python_of
from bench.studies.peers.stick import told

ROOT = Path(__file__).resolve().parents[3]
Figures = dict[str, float]

#: GPUs that do not exist: of those a peer has a process or a thread for each
SLOTS = 8
SLOTS_MANY = 64
#: processes of a peer cost nothing while only room is set aside
SLOTS_OF_GROUPS = 512

MEASURED: dict[str, Callable[[], Figures]] = {
    "moorage, no-op, 2,048 slots": lambda: _run(ours.noop("256x8xH100", ours.JOBS)),
    "moorage, no-op, 8 slots": lambda: _run(ours.noop("1x8xH100", ours.JOBS_FEW_SLOTS)),
    "Ray, warm tasks, 8 slots": lambda: measured(python_of("ray"), "on_ray.py", "tasks", SLOTS),
    "moorage, functions with results, 8 slots": lambda: _run(ours.functions(SLOTS)),
    "Ray, tasks with results, 8 slots": lambda: measured(python_of("ray"), "on_ray.py", "results", SLOTS),
    "moorage, functions with results, 64 slots": lambda: _run(ours.functions(SLOTS_MANY)),
    "Ray, tasks with results, 64 slots": lambda: measured(python_of("ray"), "on_ray.py", "results", SLOTS_MANY),
    "Dask distributed, 8 slots": lambda: measured(python_of("distributed"), "on_dask.py", "tasks", SLOTS),
    "moorage, gangs of 8": lambda: _run(ours.gangs()),
    "Ray, placement groups of 8": lambda: measured(python_of("ray"), "on_ray.py", "groups", SLOTS_OF_GROUPS),
    "moorage, a process a job, 8 slots": lambda: _run(ours.processes(SLOTS)),
    "HyperQueue, a process a job, 8 slots": lambda: measured(
        python_of("hyperqueue"), "on_hyperqueue.py", "processes", SLOTS
    ),
    "moorage, an array of 10,000, 64 slots": lambda: _run(ours.array(SLOTS_MANY)),
    "HyperQueue, an array of 10,000, 64 slots": lambda: measured(
        python_of("hyperqueue"), "on_hyperqueue.py", "array", SLOTS_MANY
    ),
    "Slurm, a process a job, 8 slots": lambda: measured(environments.slurm(), "on_slurm.py", "processes", SLOTS),
}

#: what is compared: ours, the peer, and which figure; how many times it must be is in `bounds`
RATIOS: tuple[tuple[str, str, str], ...] = (
    ("moorage, no-op, 2,048 slots", "Ray, warm tasks, 8 slots", "jobs/s"),
    ("moorage, no-op, 8 slots", "Ray, warm tasks, 8 slots", "jobs/s"),
    ("moorage, no-op, 2,048 slots", "Ray, warm tasks, 8 slots", "p50 ms"),
    ("moorage, no-op, 8 slots", "Ray, warm tasks, 8 slots", "p50 ms"),
    ("moorage, functions with results, 8 slots", "Ray, tasks with results, 8 slots", "calls/s"),
    ("moorage, functions with results, 64 slots", "Ray, tasks with results, 64 slots", "calls/s"),
    ("moorage, functions with results, 8 slots", "Ray, tasks with results, 8 slots", "p50 ms"),
    ("moorage, no-op, 2,048 slots", "Dask distributed, 8 slots", "jobs/s"),
    ("moorage, gangs of 8", "Ray, placement groups of 8", "groups/s"),
    ("moorage, a process a job, 8 slots", "HyperQueue, a process a job, 8 slots", "jobs/s"),
    ("moorage, a process a job, 8 slots", "HyperQueue, a process a job, 8 slots", "/bin/true a second"),
    ("moorage, a process a job, 8 slots", "HyperQueue, a process a job, 8 slots", "p50 ms"),
    ("moorage, an array of 10,000, 64 slots", "HyperQueue, an array of 10,000, 64 slots", "replicas/s"),
    ("moorage, a process a job, 8 slots", "Slurm, a process a job, 8 slots", "jobs/s"),
)

HEAD = """# Results beside others

Written by `python -m bench.studies.peers.run`: all on one machine, in turn in each round; min, median and max. The settings
stand in each peer's runner in `bench/studies/peers`; a few were tried for each, not all that there are.

- Ours is durable: a submit is fsynced before it is answered. The peers are not: Ray and Dask keep nothing, HyperQueue
  runs without its journal, and Slurm saves its state now and then.
- GPUs are made up everywhere. Where no process is started, ours are slots of simulated workers, so 2,048 of them cost
  only their bookkeeping. A peer has a process or a thread for each slot, and was measured with 8. With 8 slots ours is
  bound by them: a slot is busy for two records of the ledger at least.
- A function with a result returns a small JSON value, and the caller checks it. Ours is synced to the server's disk
  before its job has succeeded. p50 and p99 are from the call to the checked value, one call in flight.
- submit→start is one job in flight, from the submit's call to the job's own clock; Slurm's has sbatch's own start in
  it. If a process is started, the job is {stick}.
  For the rate, ours and HyperQueue's jobs are that program and Slurm's a shell script. /bin/true, whose C library takes
  0.3 to 0.9 ms of a processor to start on a virtual machine, is a row of its own.
- HyperQueue's wait for a job never returns if the job is over already, so the job's own stamp is waited for. Its p50
  hangs on where a submit falls between its ticks: by its own wait, where that returned, it was 2.9 to 3.2 ms.
"""


def _run(work: Coroutine[Any, Any, Figures]) -> Figures:
    return uvloop.run(work)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="what has this in its name, as Ray or array")
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    arguments = parser.parse_args()
    busy = book.busy_percent()
    found: dict[tuple[str, str], list[float]] = {}
    missing: dict[str, str] = {}
    for number in range(arguments.rounds):
        for name, measure in MEASURED.items():
            if name in missing or not (arguments.only is None or any(each in name for each in arguments.only)):
                continue
            try:
                figures = measure()
            except NoPeer as why:
                missing[name] = str(why)
                print(f"{name}: {why}", file=sys.stderr, flush=True)
                continue
            for figure, value in figures.items():
                found.setdefault((name, figure), []).append(value)
            print(f"{number + 1}/{arguments.rounds} {name}: {figures}", file=sys.stderr, flush=True)
    text = report(found, missing, busy, arguments.rounds)
    print(text)
    if not arguments.dry:
        (ROOT / "bench" / "RESULTS-peers.md").write_text(text)
        compared = {name_of(us, them, figure): values for us, them, figure, values in ratios(found)}
        book.keep("peers", "python -m bench.studies.peers.run", {"ours / theirs": compared}, busy, "RESULTS-peers.md")
    return 0


def ratios(found: dict[tuple[str, str], list[float]]) -> Iterator[tuple[str, str, str, list[float]]]:
    """Ours over theirs, round by round, of what was measured: ours, theirs, figure, ratios."""
    for us, them, figure in RATIOS:
        mine, theirs = found.get((us, figure), []), found.get((them, figure), [])
        if mine and theirs:
            yield us, them, figure, [a / b for a, b in zip(mine, theirs, strict=False)]


def name_of(us: str, them: str, figure: str) -> str:
    """A ratio's name in the book."""
    return f"{figure}: {us} / {them}"


def report(found: dict[tuple[str, str], list[float]], missing: dict[str, str], busy: float, rounds: int) -> str:
    """The page."""
    versions = ", ".join(f"{runner[3:-3]} {version}" for runner, version in environments.versions.items())
    lines = [
        HEAD.format(stick=told()),
        f"- {book.machine()}",
        f"- {versions}",
        f"- {time.strftime('%Y-%m-%d', time.gmtime())}, {rounds} rounds, machine {busy:.0f} % busy before the first",
        "",
        "| what | figure | min | median | max |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for (name, figure), values in found.items():
        lines.append(f"| {name} | {figure} | {spread(values)} |")
    lines += ["", "| ours / theirs, round by round | figure | must / goal | min | median | max |"]
    lines.append("| --- | --- | --- | ---: | ---: | ---: |")
    for us, them, figure, values in ratios(found):
        bound = bound_of("peers", name_of(us, them, figure))
        asked = bound.asked if bound is not None else "reported"
        lines.append(f"| {us} / {them} | {figure} | {asked} | {spread(values)} |")
    lines += [f"\nNot measured: {name}: {why}" for name, why in missing.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
