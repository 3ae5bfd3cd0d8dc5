"""What the SDK costs: its callers beside bare inboxes, its followers, one that stops reading, and large batches."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from bench.callers import TENANTS, Callers
from bench.stack import SUBJECTS, Stack, stack
from moorage.client import AsyncClient
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import Resources

Figures = dict[str, float]

HERE = Path(__file__).resolve().parent
FLEET = "256x8xH100"
CALLERS = 1000
JOBS = 15_000
BATCH = 10_000
FOLLOWED = 1000
FOLLOWED_ROUNDS = 4
#: said on the stopped follower's subjects: more than the kernel and the server keep for it
FLOOD_BYTES = 320 * 1024 * 1024
FLOOD_FRAME_BYTES = 512 * 1024

#: the request of `bench.callers.BODY`, in the SDK's words
ASKS = {
    "gpu": GpuSpec(model=["H100"], min_memory_mib=70_000),
    "driver": "noop",
    "env": {"SEED": "7", "BATCH": "8"},
    "timeout_s": 3600.0,
    "resources": Resources(1000, 1024),
    "retries": 2,
    "labels": {"team": "a"},
}


class SdkCallers:
    """As `bench.callers.Callers`, with `AsyncClient.submit`; one client for each tenant."""

    def __init__(self, clients: list[AsyncClient]) -> None:
        self.clients = clients
        self.made = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, it: Stack) -> AsyncIterator[SdkCallers]:
        async with contextlib.AsyncExitStack() as opened:
            clients = [
                await opened.enter_async_context(AsyncClient(it.url, tenant=f"t{number}", timeout=60.0))
                for number in range(TENANTS)
            ]
            yield cls(clients)

    async def closed_loop(self, jobs: int, in_flight: int) -> None:
        end = self.made + jobs

        async def caller() -> None:
            while self.made < end:
                self.made += 1
                await self.clients[self.made % TENANTS].submit((), events="tenant", **ASKS)  # type: ignore[arg-type]

        await asyncio.gather(*(caller() for _ in range(in_flight)))


async def sdk_callers() -> Figures:
    """1,000 callers in flight by the SDK, and by bare inboxes, on one stack: to the terminal state."""
    async with stack(FLEET) as it:
        bare = await Callers.open(it)
        async with SdkCallers.open(it) as sdk:
            await bare.closed_loop(2000, CALLERS)
            await sdk.closed_loop(2000, CALLERS)
            await bare.until_ended(4000)
            figures: Figures = {}
            for name, callers in (("bare inboxes", bare), ("SDK", sdk)):
                already, cpu_s, began = bare.ended, it.cpu_s("callers"), time.monotonic()
                await callers.closed_loop(JOBS, CALLERS)
                await bare.until_ended(already + JOBS)
                figures[f"1,000 callers, {name}, jobs/s"] = JOBS / (time.monotonic() - began)
                figures[f"1,000 callers, {name}, callers' CPU µs a job"] = (it.cpu_s("callers") - cpu_s) / JOBS * 1e6
        await bare.close()
    sdk_rate, bare_rate = figures["1,000 callers, SDK, jobs/s"], figures["1,000 callers, bare inboxes, jobs/s"]
    return figures | {"1,000 callers, SDK / bare inboxes": sdk_rate / bare_rate}


async def batches() -> Figures:
    """`submit_many` of 10,000 and `wait` for all of them."""
    async with stack(FLEET) as it, AsyncClient(it.url, tenant="batches", timeout=60.0) as moorage:
        await moorage.wait(await moorage.submit_many([()] * 2000, events="tenant", **ASKS))  # type: ignore[arg-type]
        before = {role: it.cpu_s(role) for role in it.pids}
        began = time.monotonic()
        jobs = await moorage.submit_many([()] * BATCH, events="tenant", **ASKS)  # type: ignore[arg-type]
        answered = time.monotonic()
        results = await moorage.wait(jobs, timeout=120)
        took = time.monotonic() - began
        assert all(result.state == "SUCCEEDED" for result in results)
        cpu = {role: (it.cpu_s(role) - was) / BATCH * 1e6 for role, was in before.items()}
    figures = {
        "submit_many of 10,000, to the terminal state, jobs/s": BATCH / took,
        "submit_many of 10,000, answered after s": answered - began,
    }
    return figures | {f"submit_many of 10,000, CPU µs a job, {role}": value for role, value in cpu.items()}
