"""Ours, for the same questions as the peers': every job durable, fsynced before its submit is answered."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import msgspec

from bench.callers import Callers, quantile
from bench.studies.peers.stick import stick
from bench.stack import stack
from moorage.client import AsyncClient

NOOP = b'{"job":"%s","events":"tenant","gpu":{"count":1},"run":{"driver":"noop"}}'
GANG = b'{"job":"%s","replicas":8,"events":"tenant","gpu":{"count":1,"scheduling":"gang"},"run":{"driver":"noop"}}'
PROGRAM = b'{"job":"%%s","events":"tenant","gpu":{"count":1},"run":{"argv":%s}}'
JOBS = 20_000
JOBS_FEW_SLOTS = 5_000
CALLERS = 1_000
WAITS = 500
CALLS = 6_000
GANGS = 3_000
GANGS_AT_ONCE = 200
PROCESSES = 1_500
PROCESS_WAITS = 200
REPLICAS = 10_000


async def noop(fleet: str, jobs: int) -> dict[str, float]:
    """No-op jobs of one GPU each, 1,000 callers: jobs a second to the terminal state; submit to start with one."""
    async with stack(fleet) as it:
        callers = await Callers.open(it, NOOP)
        rate = await _rate(callers, jobs, CALLERS)
        await callers.waits_ms()
        await callers.closed_loop(WAITS, 1)
        await callers.until_ended(callers.made)
        waits = await callers.waits_ms()
        await callers.close()
    return {"jobs/s": rate, "p50 ms": quantile(waits, 0.5), "p99 ms": quantile(waits, 0.99)}


async def functions(slots: int) -> dict[str, float]:
    """Functions of a service that return a small JSON value, which the caller checks: how many a second with 1,000 in
    flight, and from call to result with one."""
    async with (
        stack(f"{slots}xH100", driver="handler", script="service.py") as it,
        AsyncClient(it.url, tenant="t0", timeout=60.0, wait=60.0) as moorage,
    ):
        made = 0

        async def caller(end: int) -> None:
            nonlocal made
            while made < end:
                made += 1
                number = made
                result = await (await moorage.submit_handler("numbered", number, gpu=1)).result()
                assert result.value["number"] == number

        async def checked(calls: int, in_flight: int) -> None:
            await asyncio.gather(*(caller(made + calls) for _ in range(in_flight)))

        await checked(CALLERS, CALLERS)
        began = time.monotonic()
        await checked(CALLS, CALLERS)
        rate = CALLS / (time.monotonic() - began)
        waits = []
        for _ in range(WAITS):
            called = time.monotonic()
            await checked(1, 1)
            waits.append((time.monotonic() - called) * 1e3)
    waits.sort()
    return {"calls/s": rate, "p50 ms": quantile(waits, 0.5), "p99 ms": quantile(waits, 0.99)}


async def gangs() -> dict[str, float]:
    """Gangs of 8 replicas, placed together, started together, over."""
    async with stack("256x8xH100") as it:
        callers = await Callers.open(it, GANG)
        rate = await _rate(callers, GANGS, GANGS_AT_ONCE)
        await callers.close()
    return {"groups/s": rate}


async def processes(slots: int) -> dict[str, float]:
    """The stick (see `stick.py`) as a process a job, and /bin/true; and submit to start of the stick."""
    rates = {"jobs/s": [*stick(), "/dev/null"], "/bin/true a second": ["/bin/true"]}
    async with stack(f"1x{slots}xH100", driver="process") as it:
        figures = {}
        for figure, argv in rates.items():
            callers = await Callers.open(it, PROGRAM % msgspec.json.encode(argv))
            figures[figure] = await _rate(callers, PROCESSES, CALLERS)
            await callers.close()
        with tempfile.TemporaryDirectory() as folder:
            async with AsyncClient(it.url, tenant="t0") as moorage:
                waits = []
                for number in range(PROCESS_WAITS):
                    stamp = Path(folder) / f"began-{number}"
                    submitted = time.time_ns()
                    job = await moorage.submit([*stick(), str(stamp)], gpu=1)
                    await job.result(30)
                    waits.append((int(stamp.read_text()) - submitted) / 1e6)
    waits.sort()
    return {**figures, "p50 ms": statistics.median(waits), "p99 ms": quantile(waits, 0.99)}


async def array(slots: int) -> dict[str, float]:
    """One job of 10,000 replicas that are the stick, a process each: how many a second, submitted to ended."""
    async with (
        stack(f"1x{slots}xH100", driver="process") as it,
        AsyncClient(it.url, tenant="t0", timeout=60.0, wait=300.0) as moorage,
    ):
        for replicas in (slots * 2, REPLICAS):
            began = time.monotonic()
            job = await moorage.submit([*stick(), "/dev/null"], gpu=1, replicas=replicas)
            await job.result(300)
            rate = replicas / (time.monotonic() - began)
    return {"replicas/s": rate}


async def _rate(callers: Callers, jobs: int, in_flight: int) -> float:
    """Jobs a second to the terminal state, after some to warm up."""
    await callers.closed_loop(in_flight, in_flight)
    await callers.until_ended(callers.made)
    began, before = time.monotonic(), callers.made
    await callers.closed_loop(jobs, in_flight)
    await callers.until_ended(before + jobs)
    return jobs / (time.monotonic() - began)
