"""Calls that come at random and take their time, for `bench.calls`, `bench.batches` and their peers: of the standard
library alone."""

from __future__ import annotations

import asyncio
import heapq
import random
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

SECONDS_OF_LOAD: Final = 20.0
MEAN_S: Final = 0.02
#: callers of a model that takes several inputs in one step, and their mean pause between two calls
CALLERS: Final = (1, 8, 64, 256)
PAUSE_S: Final = 0.005
LOOP_S: Final = 5.0
WARM_S: Final = 1.0
#: its step, and each input of it
STEP_S: Final = 0.02
INPUT_S: Final = 0.0001
MOST: Final = 32
BATCH_WAIT_S: Final = 0.005
#: calls a second that it answers at most
CEILING: Final = MOST / (STEP_S + MOST * INPUT_S)

_one_step: Final = threading.Lock()


def step(inputs: list[bytes]) -> list[bytes]:
    """The model: one step at a time, which costs 20 ms and 0.1 ms an input."""
    with _one_step:
        time.sleep(STEP_S + len(inputs) * INPUT_S)
    return [each[::-1] for each in inputs]


def single(data: bytes) -> bytes:
    """The same for one input."""
    return step([data])[0]


async def closed_loop(call: Callable[[bytes], Awaitable[bytes]]) -> dict[str, float]:
    """Return calls a second and p50 with so many callers, each of which pauses for an exponential time between two
    calls, and compares each answer. The first second does not count, nor what ends after the last."""
    found: dict[str, float] = {}
    for callers in CALLERS:
        waits: list[float] = []
        began = time.perf_counter() + WARM_S
        ends = began + LOOP_S

        async def caller(number: int, waits: list[float] = waits, began: float = began, ends: float = ends) -> None:
            chance = random.Random(number)
            while True:
                await asyncio.sleep(chance.expovariate(1 / PAUSE_S))
                if (called := time.perf_counter()) >= ends:
                    return
                data = b"%d of %d" % (len(waits), number)
                assert await call(data) == data[::-1]
                if began <= (answered := time.perf_counter()) < ends:
                    waits.append((answered - called) * 1e3)

        await asyncio.gather(*(caller(number) for number in range(callers)))
        found |= {f"{callers} calls/s": len(waits) / LOOP_S, f"{callers} p50 ms": statistics.median(waits)}
    return found


def calls_at_random(places: float, seed: int = 0) -> Iterator[tuple[float, float]]:
    """Yield when each call comes, and how long it takes, in seconds: a Poisson process of as many calls as keep
    `places` places busy, of an exponential time of 20 ms on average."""
    chance, at = random.Random(seed), 0.0
    while at < SECONDS_OF_LOAD:
        at += chance.expovariate(places / MEAN_S)
        yield at, chance.expovariate(1 / MEAN_S)


def ideal_wait(places: float, of: int) -> float:
    """Return the p99, in milliseconds, of what these calls wait in one queue before `of` places that costs no time."""
    free, waits = [0.0] * of, list[float]()
    for at, service_s in calls_at_random(places):
        begins = max(at, heapq.heappop(free))
        heapq.heappush(free, begins + service_s)
        waits.append(begins - at)
    return p99(waits)


def p99(waits: list[float]) -> float:
    """The 99th percentile of seconds, in milliseconds."""
    return sorted(waits)[len(waits) * 99 // 100] * 1e3


async def waits_of(call: Callable[[bytes], Awaitable[bytes]], places: float) -> float:
    """Return the p99, in milliseconds, of a call's time over the one it asks for; the calls are the same each time."""
    waits: list[float] = []

    async def one(service_s: float) -> None:
        data = b"%.6f" % service_s
        began = time.perf_counter()
        assert await call(data) == data
        waits.append(time.perf_counter() - began - service_s)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for at, service_s in calls_at_random(places):
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            group.create_task(one(service_s))
    return p99(waits)
