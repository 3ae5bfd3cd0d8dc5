"""Calls that come at random and take their time, for `bench.calls` and its peers: of the standard library alone."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Final

SECONDS_OF_LOAD: Final = 20.0
MEAN_S: Final = 0.02


async def waits_of(call: Callable[[bytes], Awaitable[bytes]], places: float, seed: int = 0) -> float:
    """Return the p99, in milliseconds, of a call's time over the one it asks for.

    Calls come by a Poisson process, as many as keep `places` places busy; each asks for an exponential time of 20 ms on
    average. The same seed gives the same calls.
    """
    chance = random.Random(seed)
    waits: list[float] = []

    async def one(service_s: float) -> None:
        data = b"%.6f" % service_s
        began = time.perf_counter()
        assert await call(data) == data
        waits.append(time.perf_counter() - began - service_s)

    began, at = time.perf_counter(), 0.0
    async with asyncio.TaskGroup() as group:
        while at < SECONDS_OF_LOAD:
            at += chance.expovariate(places / MEAN_S)
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            group.create_task(one(chance.expovariate(1 / MEAN_S)))
    waits.sort()
    return waits[len(waits) * 99 // 100] * 1e3
