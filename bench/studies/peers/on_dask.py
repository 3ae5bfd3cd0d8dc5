"""Dask distributed, run by the Python of its own environment: `on_dask.py FIGURE SLOTS`; prints one JSON object.

Fair settings: one worker process with a thread a slot and that many of the abstract resource GPU, no dashboard, no
pure tasks (they would be computed once), no work stealing. Nothing of it is durable.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import dask
import distributed
from distributed import Client, LocalCluster, as_completed

TASKS = 10_000
IN_FLIGHT = 1_000
WAITS = 500


def noop(_: int) -> int:
    return time.time_ns()


def tasks(slots: int) -> dict[str, float]:
    """No-op tasks of one GPU each: how many a second with 1,000 in flight, and submit to start with one."""
    dask.config.set({"distributed.scheduler.work-stealing": False, "distributed.admin.tick.interval": "1s"})
    with (
        LocalCluster(1, threads_per_worker=slots, resources={"GPU": slots}, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):

        def submit(count: int, first: int) -> list[distributed.Future]:
            return list(client.map(noop, range(first, first + count), pure=False, resources={"GPU": 1}))

        client.gather(submit(IN_FLIGHT, 0))
        began, left = time.monotonic(), TASKS - IN_FLIGHT
        going = as_completed(submit(IN_FLIGHT, 0))
        for batch in going.batches():
            count = min(left, len(batch))
            if count:
                going.update(submit(count, left))
                left -= count
        rate = TASKS / (time.monotonic() - began)
        waits = []
        for number in range(WAITS):
            submitted = time.time_ns()
            waits.append((client.submit(noop, number, pure=False, resources={"GPU": 1}).result() - submitted) / 1e6)
    waits.sort()
    return {"jobs/s": rate, "p50 ms": statistics.median(waits), "p99 ms": waits[len(waits) * 99 // 100]}


if __name__ == "__main__":
    print(json.dumps({**tasks(int(sys.argv[2])), "version": distributed.__version__}))
