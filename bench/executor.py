"""How long many functions take by an executor, beside a pool of processes of this machine and submitit on this machine.

python -m bench.executor [--nats URL] [--workers 8]

Without --nats it is the `moorage up` of this folder. submitit is measured where it is installed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

from moorage.client import Executor


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def measure(what: str, count: int, act: Callable[[], Any]) -> None:
    began = time.perf_counter()
    values = list(act())
    took = time.perf_counter() - began
    assert len(values) == count, f"{len(values)} values of {count}"
    print(f"{what:<44} {took:7.1f} s  {1000 * took / count:8.1f} ms each", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nats")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--counts", default="1000x0.001,100x1", help="how many functions of how many seconds each")
    asked = parser.parse_args()
    for part in asked.counts.split(","):
        count, each = int(part.partition("x")[0]), float(part.partition("x")[2])
        naps = [each] * count
        print(f"{count} functions of {1000 * each:g} ms, {asked.workers} at a time")
        with ProcessPoolExecutor(asked.workers) as pool:
            measure("  a pool of processes", count, lambda: pool.map(nap, naps))  # noqa: B023 - called at once
        with Executor(target=asked.nats, warm=True, max_workers=asked.workers) as ex:
            ex.submit(nap, 0).result()
            measure("  Executor, warm", count, lambda: ex.map(nap, naps))  # noqa: B023
        with Executor(target=asked.nats, max_workers=asked.workers) as ex:
            chunk = max(1, count // (4 * asked.workers)) if each < 0.1 else 1
            measure(f"  Executor, chunksize={chunk}", count, lambda: ex.map(nap, naps, chunksize=chunk))  # noqa: B023
            if chunk > 1:
                some = naps[:200]
                measure("  Executor, a process each (200 of them)", len(some), lambda: ex.map(nap, some))  # noqa: B023
        if find_spec("submitit") is not None:
            by_submitit(naps, asked.workers)


def by_submitit(naps: list[float], workers: int) -> None:
    import submitit

    some = naps[:40]
    with TemporaryDirectory() as folder:
        executor = submitit.LocalExecutor(folder)
        executor.update_parameters(timeout_min=10)

        def run() -> list[float]:
            """submitit's local executor has no bound of its own: `workers` at a time, as the others."""
            values: list[float] = []
            for at in range(0, len(some), workers):
                values += [job.result() for job in [executor.submit(nap, each) for each in some[at : at + workers]]]
            return values

        measure(f"  submitit, local ({len(some)} of them)", len(some), run)


if __name__ == "__main__":
    main()
