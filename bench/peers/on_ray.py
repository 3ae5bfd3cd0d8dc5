"""Ray, run by the Python of its own environment: `on_ray.py FIGURE`; prints one JSON object.

Fair settings: warm workers (`max_calls=0`: a GPU task else gets a fresh process each time, 5 a second), no CPU asked
for beside the GPU, no dashboard, as many slots as it is told. Nothing of it is durable.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

TASKS = 6_000
IN_FLIGHT = 1_000
WAITS = 500
GROUPS = 300
GANG = 8


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


def _start(slots: int) -> None:
    ray.init(num_cpus=2, num_gpus=slots, include_dashboard=False, log_to_driver=False, logging_level="error")


FIGURES: dict[str, Callable[[int], dict[str, float]]] = {"tasks": tasks, "results": results, "groups": groups}

if __name__ == "__main__":
    found = FIGURES[sys.argv[1]](int(sys.argv[2]))
    ray.shutdown()
    print(json.dumps({**found, "version": ray.__version__}))
