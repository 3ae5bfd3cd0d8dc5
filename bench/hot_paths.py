"""The dozen figures of the hot paths, of the moorage that this Python has: `bench/hot_paths.py QUESTION [--quick]`.

It prints one line of JSON, by figure. `bench.against` runs it with the Python of another commit too, over this bench or
that commit's own: so each question imports what it needs. With `--fits` it only imports all that this bench has for it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Final

Figures = dict[str, float]

#: what the questions import, and what they run as processes
NEEDED: Final = ("run", "calls", "core", "fleet", "service", "peers.ours")
SLOTS: Final = 8
#: virtual seconds of a fleet in which nothing happens, and GPUs that it has none of
IDLE_S: Final = 1_800
MISSING: Final = "B300"


async def endpoint(*, quick: bool) -> Figures:
    """Jobs a second with 1,000 callers to the terminal state, and the scheduler's CPU for each."""
    from bench import run

    _fewer(run, quick, SATURATE=8_000)
    found = await run.endpoint()
    return {
        "endpoint, 1,000 callers, jobs/s": _one(found, "endpoint, 1,000 callers"),
        "endpoint, the scheduler's CPU a job, µs": _one(found, "endpoint, 2,048 slots, CPU µs a job, scheduler"),
    }


async def one(*, quick: bool) -> Figures:
    """Submit to start of jobs that are alone on a quiet fleet."""
    from bench.callers import Callers, quantile
    from bench.stack import stack

    async with stack("64x8xH100") as it:
        callers = await Callers.open(it)
        for jobs in (300, 300 if quick else 2_000):
            await callers.waits_ms()
            await callers.closed_loop(jobs, 1)
            await callers.until_ended(callers.made)
        waits = await callers.waits_ms()
        await callers.close()
    return {"one in flight, submit to start, p50 ms": quantile(waits, 0.5)}


async def functions(*, quick: bool) -> Figures:
    """Functions with results on 8 slots: with 1,000 in flight, and with one."""
    from bench.studies.peers import ours

    _fewer(ours, quick, CALLS=2_000, WAITS=200)
    found = await ours.functions(SLOTS)
    return {"functions, calls/s": found["calls/s"], "functions, p50 ms": found["p50 ms"]}


async def gangs(*, quick: bool) -> Figures:
    """Gangs of 8 replicas a second."""
    from bench.studies.peers import ours

    _fewer(ours, quick, GANGS=800)
    return {"gangs of 8, gangs/s": (await ours.gangs())["groups/s"]}


async def processes(*, quick: bool) -> Figures:
    """A process a job: how many a second, and submit to start of one."""
    from bench.studies.peers import ours

    _fewer(ours, quick, PROCESSES=500, PROCESS_WAITS=100)
    found = await ours.processes(SLOTS)
    return {"a process a job, jobs/s": found["jobs/s"], "a process a job, p50 ms": found["p50 ms"]}


async def calls(*, quick: bool) -> Figures:
    """Calls of a warm service: 64 at once, and one."""
    from bench import calls as warm

    _fewer(warm, quick, SECONDS=1.0)
    async with warm.service(warm.ECHO, warm.MEMBERS) as (moorage, _):
        rate, _, _ = await warm.one_round(moorage, 64)
        _, p50, _ = await warm.one_round(moorage, 1)
    return {"calls, 64 at once, calls/s": rate, "calls, one, p50 ms": p50}


async def fold(*, quick: bool) -> Figures:
    """Fold of a million transitions."""
    from bench.core import fold_million

    found = fold_million(200_000 if quick else 1_000_000)
    return {"fold of a million, s": found["s"] * 1_000_000 / found["transitions"]}


async def memory(*, quick: bool) -> Figures:
    """The scheduler's memory with 100,000 jobs that wait (with `quick` 20,000)."""
    from bench.callers import BODY, Callers
    from bench.stack import stack

    async with stack("64x8xH100") as it:
        waiting = await Callers.open(it, BODY.replace(b'"H100"', b'"%s"' % MISSING.encode()))
        await waiting.closed_loop(20_000 if quick else 100_000, 1_000)
        full = it.rss_mib("scheduler")
        await waiting.close()
    return {"scheduler's memory, jobs that wait, MiB": full}


def idle(*, quick: bool) -> Figures:
    """CPU of a simulated fleet in virtual time, where three jobs wait and nothing happens; no heartbeat is skipped."""
    from moorage.client import AsyncClient

    try:
        fleets = clocks = importlib.import_module("moorage.testing")
    except ImportError:  # where they stood before they had a room of their own
        fleets = importlib.import_module("moorage.client.sim_fleet")
        clocks = importlib.import_module("moorage.bus.simulated.clock")

    async def nothing_happens() -> float:
        async with AsyncClient(transport=fleets.SimFleet("2x8xH100"), tenant="t") as client:
            for _ in range(3):
                await client.submit(["true"], gpu=f"1x{MISSING}")
            gc.collect()
            before = time.process_time()
            await asyncio.sleep(IDLE_S / 6 if quick else IDLE_S)
            return time.process_time() - before

    cpu_s: float = clocks.SimulatedClock(skips=False).run(nothing_happens())
    return {"SimFleet, idle, CPU s": cpu_s}


QUESTIONS: Final[dict[str, Callable[..., Awaitable[Figures] | Figures]]] = {
    "endpoint": endpoint,
    "one": one,
    "functions": functions,
    "gangs": gangs,
    "processes": processes,
    "calls": calls,
    "fold": fold,
    "memory": memory,
    "idle": idle,
}


def _fewer(module: ModuleType, quick: bool, **counts: float) -> None:
    """Let a module measure less than it does by itself."""
    if quick:
        for name, count in counts.items():
            setattr(module, name, count)


def _one(found: Figures, begins: str) -> float:
    [value] = [value for name, value in found.items() if name.startswith(begins)]
    return value


def _answer(question: str, *, quick: bool) -> Figures:
    import uvloop

    found = QUESTIONS[question](quick=quick)
    if isinstance(found, dict):
        return found
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_awaited(found))


async def _awaited(found: Awaitable[Figures]) -> Figures:
    return await found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("question", choices=QUESTIONS, nargs="?")
    what.add_argument("--fits", action="store_true", help="measure nothing, fail if this bench is not for this moorage")
    parser.add_argument("--quick", action="store_true", help="measure less: for a look, not for a decision")
    asked = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in what a shell starts beside itself
    if asked.fits:
        for name in NEEDED:
            importlib.import_module(f"bench.{name}")
        return 0
    print(json.dumps(_answer(asked.question, quick=asked.quick)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
