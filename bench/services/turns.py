"""Many models on few GPUs: what waking a model takes, and how four of them take turns on one GPU.

Scheduler, worker, members and their processes are real; NVIDIA's libraries are stubs, whose models have 64 MiB. So the
figures are what moorage itself takes, without the time in which a driver moves gigabytes: the page has that of a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from bench.callers import quantile
from moorage.bus.embedded import EmbeddedServer
from moorage.client import AsyncClient
from tests.system.live.stack import Caller
from tests.system.services.test_sleeping_live import MODEL, fleet, service, until_state

#: what each model multiplies with
WEIGHTS: Final = (2, 3, 5, 7)
AWAKE_S: Final = 1
SLEEP_AFTER_S: Final = 3
WAKES: Final = 5
SWAPS: Final = 12
SECONDS: Final = 40.0
CALLERS: Final = 4


async def measure() -> dict[str, float]:
    async with _models() as (one, client):
        alone = []
        for at in range(WAKES):
            await until_state(one, "times-2", "FROZEN")
            alone.append(await _call(client, 2, at))
        swaps = []
        for at in range(SWAPS):
            swaps.append(await _call(client, WEIGHTS[at % len(WEIGHTS)], at))
            await asyncio.sleep(AWAKE_S + 0.2)  # its turn may end from now on
        return {
            "a call to a model that is awake, p50 ms": statistics.median(
                [await _call(client, 7, at) for at in range(50)]
            ),
            "a call to a model that sleeps, p50 ms": statistics.median(alone),
            "a call to a model that sleeps, another one leaves first, p50 ms": statistics.median(swaps[1:]),
            "the same, longest ms": max(swaps[1:]),
            **await _all_at_once(client),
        }


@contextlib.asynccontextmanager
async def _models() -> AsyncIterator[tuple[Caller, AsyncClient]]:
    """Four models that sleep, of one GPU."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moorage-turns-")))
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        server = await EmbeddedServer.start(folder / "nats")
        stack.push_async_callback(server.stop)
        one, client, stub = await stack.enter_async_context(fleet(server, folder, patched))
        # that of the tests takes memory for each call, and there are thousands of them here
        (folder / "model.py").write_text("".join(line for line in MODEL.splitlines(True) if "1 << 20" not in line))
        for weight in WEIGHTS:
            request = service(folder, weight, stub.environment, awake_s=AWAKE_S, sleep_after_s=SLEEP_AFTER_S)
            answer = await one.api("submit", request)
            assert answer["kind"] == "accepted", answer
            await until_state(one, f"times-{weight}", "FROZEN")
        yield one, client


async def _call(client: AsyncClient, weight: int, number: int) -> float:
    """Call a model; return how many milliseconds that took."""
    began_s = time.perf_counter()
    assert await client.call(f"times-{weight}", b"%d" % number) == b"%d" % (number * weight)
    return (time.perf_counter() - began_s) * 1e3


async def _all_at_once(client: AsyncClient) -> dict[str, float]:
    """Call all models all the time, and compare each answer."""
    waits: dict[int, list[float]] = {weight: [] for weight in WEIGHTS}
    turns: list[int] = []
    ends_s = time.perf_counter() + SECONDS

    async def caller(weight: int, number: int) -> None:
        while time.perf_counter() < ends_s:
            waits[weight].append(await _call(client, weight, number))
            if turns[-1:] != [weight]:
                turns.append(weight)
            number += CALLERS

    began_s = time.perf_counter()
    await asyncio.gather(*(caller(weight, number) for weight in WEIGHTS for number in range(CALLERS)))
    took_s = time.perf_counter() - began_s
    had = Counter(turns)
    return {
        "four models called all the time, swaps a minute": (len(turns) - 1) / took_s * 60,
        "calls/s, of all four": sum(map(len, waits.values())) / took_s,
        "turns of the model with the fewest / of that with the most": min(had[each] for each in WEIGHTS)
        / max(had.values()),
        "longest wait of a call to the model that waits longest, ms": max(map(max, waits.values())),
        "p99 of a call to the model that waits longest, ms": max(
            quantile(sorted(each), 0.99) for each in waits.values()
        ),
    }
