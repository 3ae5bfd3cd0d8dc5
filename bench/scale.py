"""What grows: a fleet that reports, arrays of requests, and a million requests that wait."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec

from bench.callers import BODY, Callers
from bench.stack import SUBJECTS, Stack, stack
from moorage.bus.connection import Connection, connect
from moorage.bus.embedded import EmbeddedServer
from moorage.bus.jetstream import JetStream
from moorage.scheduler.durable.queue_streams import stream_config

Figures = dict[str, float]

REPORTING_S = 20.0
ARRAY = 64
ARRAYS_IN_FLIGHT = 100
ARRAY_JOBS = 64_000
BACKLOG = 1_000_000
BACKLOG_FEW = 50_000
FILLING = 2_000
WARM = 10_000  # with what ends before anybody listens, and DRAINED, less than BACKLOG_FEW
DRAINED = 20_000
TENANT = "t0"


async def reports(workers: int) -> Figures:
    """A fleet of eight GPUs each that does nothing but report: load frames and renewals, every two seconds each."""
    async with stack(str(workers), driver="8", script="light_fleet.py") as it:
        await asyncio.sleep(5)
        cpu_s, began = it.cpu_s("scheduler"), time.monotonic()
        await asyncio.sleep(REPORTING_S)
        share = (it.cpu_s("scheduler") - cpu_s) / (time.monotonic() - began)
        return {f"{workers:,} workers report, scheduler's share of a core %": share * 100}


async def arrays() -> Figures:
    """Arrays of 64 requests, 100 of them in flight: answered, and to the terminal state."""
    async with stack("512x8xH100") as it:
        callers = await Callers.open(it)
        await _arrays(callers, ARRAY_JOBS // 8)
        await callers.until_ended(callers.made)
        cpu_s, began = it.cpu_s("scheduler"), time.monotonic()
        await _arrays(callers, ARRAY_JOBS)
        answered = time.monotonic() - began
        await callers.until_ended(callers.made)
        took = time.monotonic() - began
        cpu_s = it.cpu_s("scheduler") - cpu_s
        await callers.close()
    return {
        "submit_many of 64, accepted/s": ARRAY_JOBS / answered,
        "submit_many of 64, to terminal, jobs/s": ARRAY_JOBS / took,
        "submit_many of 64, CPU µs a job, scheduler": cpu_s / ARRAY_JOBS * 1e6,
    }


async def _arrays(callers: Callers, jobs: int) -> None:
    end = callers.made + jobs

    async def caller() -> None:
        while callers.made < end:
            bodies = []
            for _ in range(ARRAY):
                tenant, body = callers.next()
                bodies.append(body)
            array = b"[" + b",".join(bodies) + b"]"
            answer = await callers.mux.request(SUBJECTS.api(tenant, "submit"), array, 60.0)
            if answer.count(b'"accepted"') != ARRAY:
                raise RuntimeError(answer[:500])

    await asyncio.gather(*(caller() for _ in range(ARRAYS_IN_FLIGHT)))


async def backlog() -> Figures:
    """A million requests in the durable queue beside fifty thousand: memory, what a job costs, and a restart."""
    few, _ = await _drained(BACKLOG_FEW)
    many, more = await _drained(BACKLOG)
    return {
        "backlog of 1,000,000, scheduler RSS MiB": more["rss_mib"],
        "backlog of 1,000,000, killed and started, until a job ends, s": more["restart_s"],
        "backlog of 50,000, jobs/s": few["jobs/s"],
        "backlog of 1,000,000, jobs/s": many["jobs/s"],
        "backlog of 50,000, CPU µs a job, scheduler": few["cpu_us"],
        "backlog of 1,000,000, CPU µs a job, scheduler": many["cpu_us"],
        "backlog of 1,000,000 / of 50,000, scheduler's CPU": many["cpu_us"] / few["cpu_us"],
    }


async def _drained(requests: int) -> tuple[Figures, Figures]:
    """What a job costs while so many wait; then the scheduler's memory, and how long a killed one is away."""

    async def fill(folder: Path) -> None:
        await _fill(folder, requests)

    async with stack("256x8xH100", before=fill) as it:
        callers = await Callers.open(it, tenants=1)
        await callers.until_ended(WARM)
        cpu_s, began, ended = it.cpu_s("scheduler"), time.monotonic(), callers.ended
        await callers.until_ended(ended + DRAINED)
        took, count = time.monotonic() - began, callers.ended - ended
        costs = {"jobs/s": count / took, "cpu_us": (it.cpu_s("scheduler") - cpu_s) / count * 1e6}
        rss_mib = it.rss_mib("scheduler")
        restart_s = await _restarted(it, callers) if requests == BACKLOG else 0.0
        await callers.close()
    return costs, {"rss_mib": rss_mib, "restart_s": restart_s}


async def _restarted(it: Stack, callers: Callers) -> float:
    await it.kill("scheduler")
    await asyncio.sleep(0.5)  # what was under way has come
    ended, began = callers.ended, time.monotonic()
    await it.start_scheduler()
    await callers.until_ended(ended + 1)
    return time.monotonic() - began


async def _fill(folder: Path, requests: int) -> None:
    """The durable queue as a server that fsyncs seldom writes it: the same bytes, a tenth of the time."""
    server = await EmbeddedServer.start(folder, sync_always=False)
    try:
        async with await connect(server.url, "bench fill") as connection:
            jetstream = JetStream(connection)
            await jetstream.ensure_stream(stream_config(SUBJECTS, 1))
            subject, made = SUBJECTS.request(TENANT, "submit"), 0
            while made < requests:
                count = min(FILLING, requests - made)
                bodies = [BODY % (b"q%07d-0" % (made + number)) for number in range(count)]
                await connection.send([(subject, body, "") for body in bodies[:-1]])
                await connection.request(subject, bodies[-1], 30.0)  # behind all the others
                made += count
            held = await _held(connection, SUBJECTS.request_stream)
            if held != requests:
                raise RuntimeError(f"the durable queue holds {held} of {requests} requests")
    finally:
        await server.stop()


async def _held(connection: Connection, stream: str) -> int:
    answer = await connection.request(f"$JS.API.STREAM.INFO.{stream}", b"", 30.0)
    messages: int = msgspec.json.decode(answer.data)["state"]["messages"]
    return messages
