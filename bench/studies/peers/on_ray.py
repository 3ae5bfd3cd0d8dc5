"""Ray, run by the Python of its own environment: `on_ray.py FIGURE`; prints one JSON object.

Fair settings: warm workers (`max_calls=0`: a GPU task else gets a fresh process each time, 5 a second), no CPU asked
for beside the GPU, no dashboard, as many slots as it is told. Nothing of it is durable.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

TASKS = 6_000
IN_FLIGHT = 1_000
WAITS = 500
GROUPS = 300
GANG = 8
#: how many calls of actors wait at the same time, and how long each of these takes, in seconds
AT_ONCE = (1, 8, 64, 256)
CALL_S = 3.0


def now() -> int:
    return time.time_ns()


noop = ray.remote(num_cpus=0, num_gpus=1, max_calls=0)(now)


def _numbered(number: int) -> dict[str, Any]:
    return {"number": number, "at_ns": now(), "words": ["a", "small", "result"]}


numbered = ray.remote(num_cpus=0, num_gpus=1, max_calls=0)(_numbered)


def tasks(slots: int) -> dict[str, float]:
    """No-op tasks of one GPU each: how many a second with 1,000 in flight, and submit to start with one."""
    _start(slots)
    ray.get([noop.remote() for _ in range(IN_FLIGHT)])
    waiting: list[Any] = []
    began, left = time.monotonic(), TASKS
    while left or waiting:
        while left and len(waiting) < IN_FLIGHT:
            waiting.append(noop.remote())
            left -= 1
        done, waiting = ray.wait(waiting, num_returns=min(len(waiting), 100))
        ray.get(done)
    rate = TASKS / (time.monotonic() - began)
    waits = []
    for _ in range(WAITS):
        submitted = time.time_ns()
        waits.append((ray.get(noop.remote()) - submitted) / 1e6)
    waits.sort()
    return {"jobs/s": rate, "p50 ms": statistics.median(waits), "p99 ms": waits[len(waits) * 99 // 100]}


def results(slots: int) -> dict[str, float]:
    """Tasks of one GPU each that return a small JSON value, which the caller checks: how many a second with 1,000 in
    flight, and from call to result with one."""
    _start(slots)
    waiting: dict[Any, int] = {}
    made = 0

    def checked(count: int) -> None:
        nonlocal made
        end = made + count
        while made < end or waiting:
            while made < end and len(waiting) < IN_FLIGHT:
                made += 1
                waiting[numbered.remote(made)] = made
            done, _ = ray.wait(list(waiting), num_returns=min(len(waiting), 100))
            for ref, value in zip(done, ray.get(done), strict=True):
                assert value["number"] == waiting.pop(ref)

    checked(IN_FLIGHT)
    began = time.monotonic()
    checked(TASKS)
    rate = TASKS / (time.monotonic() - began)
    waits = []
    for number in range(WAITS):
        called = time.monotonic()
        assert ray.get(numbered.remote(number))["number"] == number
        waits.append((time.monotonic() - called) * 1e3)
    waits.sort()
    return {"calls/s": rate, "p50 ms": statistics.median(waits), "p99 ms": waits[len(waits) * 99 // 100]}


def groups(slots: int) -> dict[str, float]:
    """Placement groups of 8 bundles of one GPU each, made and removed one after the other, with room to spare.

    Without it, or several at once, they wait for each other's removal and come to 8 a second.
    """
    _start(slots)

    def one_after_the_other(count: int) -> None:
        for _ in range(count):
            group = placement_group([{"GPU": 1}] * GANG)
            assert group.wait(30)  # `ready` would be a task, with a worker process of its own
            remove_placement_group(group)

    one_after_the_other(20)
    began = time.monotonic()
    one_after_the_other(GROUPS)
    return {"groups/s": GROUPS / (time.monotonic() - began)}


class _Echo:
    def echo(self, data: bytes) -> bytes:
        return data


def actors(slots: int) -> dict[str, float]:
    """Calls of `slots` actors that give back what they get, in turn: how many a second and how long each takes, with
    1, 8, 64 and 256 at once from one caller, which checks each answer."""
    _start(slots)
    kind = ray.remote(num_cpus=0)(_Echo)
    members = [kind.remote() for _ in range(slots)]
    ray.get([each.echo.remote(b"") for each in members])
    found: dict[str, float] = {}
    for at_once in AT_ONCE:
        waiting: dict[Any, tuple[bytes, float]] = {}
        waits: list[float] = []
        made, began = 0, time.monotonic()
        while waiting or time.monotonic() - began < CALL_S:
            while len(waiting) < at_once and time.monotonic() - began < CALL_S:
                data = b"%d" % made
                waiting[members[made % slots].echo.remote(data)] = data, time.monotonic()
                made += 1
            done, _ = ray.wait(list(waiting), num_returns=1)
            for ref in done:
                data, called = waiting.pop(ref)
                assert ray.get(ref) == data
                waits.append((time.monotonic() - called) * 1e3)
        rate = len(waits) / (time.monotonic() - began)
        waits.sort()
        found |= {
            f"{at_once} calls/s": rate,
            f"{at_once} p50 ms": statistics.median(waits),
            f"{at_once} p99 ms": waits[len(waits) * 99 // 100],
        }
    return found


def serve(slots: int) -> dict[str, float]:
    """Ray Serve: `slots` replicas that take one request each, 80 % of them busy; see `bench/load.py`."""
    from ray import serve as ray_serve  # here, since Ray without Serve has the other figures

    sys.path.append(str(Path(__file__).resolve().parents[3]))
    from bench.load import waits_of

    class Sleeps:
        def __call__(self, data: bytes) -> bytes:
            time.sleep(float(data))
            return data

    _start(slots)
    options = {"num_replicas": slots, "max_ongoing_requests": 1, "ray_actor_options": {"num_cpus": 0}}
    handle = ray_serve.run(ray_serve.deployment(Sleeps, **options).bind())

    async def all_of_it() -> float:
        async def call(data: bytes) -> bytes:
            answer: bytes = await handle.remote(data)
            return answer

        await asyncio.gather(*(call(b"0.01") for _ in range(200)))
        return await waits_of(call, 0.8 * slots)

    found = {"80 % p99 ms": asyncio.run(all_of_it())}
    ray_serve.shutdown()
    return found


def batches(slots: int) -> dict[str, float]:
    """Ray Serve's `@serve.batch`: the made model of `bench/load.py`, in a thread beside the replica's event loop."""
    from ray import serve as ray_serve

    root = str(Path(__file__).resolve().parents[3])
    os.environ["PYTHONPATH"] = root  # of the replica
    sys.path.append(root)
    from bench import load

    batch = ray_serve.batch(max_batch_size=load.MOST, batch_wait_timeout_s=load.BATCH_WAIT_S)

    class Batched:
        @batch  # type: ignore[untyped-decorator]
        async def step(self, inputs: list[bytes]) -> list[bytes]:
            return await asyncio.to_thread(load.step, inputs)

        async def __call__(self, data: bytes) -> Any:
            return await self.step(data)

    _start(slots)
    options = {"max_ongoing_requests": 2 * max(load.CALLERS), "ray_actor_options": {"num_cpus": 0}}
    handle = ray_serve.run(ray_serve.deployment(Batched, **options).bind())

    async def all_of_it() -> dict[str, float]:
        async def call(data: bytes) -> bytes:
            answer: bytes = await handle.remote(data)
            return answer

        await asyncio.gather(*(call(b"0") for _ in range(200)))
        return await load.closed_loop(call)

    found = asyncio.run(all_of_it())
    ray_serve.shutdown()
    return found


def _start(slots: int) -> None:
    ray.init(num_cpus=2, num_gpus=slots, include_dashboard=False, log_to_driver=False, logging_level="error")


FIGURES: dict[str, Callable[[int], dict[str, float]]] = {
    "tasks": tasks,
    "results": results,
    "groups": groups,
    "actors": actors,
    "serve": serve,
    "batches": batches,
}

if __name__ == "__main__":
    found = FIGURES[sys.argv[1]](int(sys.argv[2]))
    ray.shutdown()
    print(json.dumps({**found, "version": ray.__version__}))
