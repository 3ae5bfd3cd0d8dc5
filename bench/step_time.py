"""What storing a checkpoint costs the steps of a training beside it: rounds in turn, with and without storing.

python -m bench.step_time [--rounds 15] [--steps 150] [--size-mb 512] [--rate-mb 100]

The steps are products of matrices on one core. While they run, sets of a folder that is new each time are stored again
and again, which a worker does for seconds of each `checkpoint_every_s`. On a busy machine read the CPU time: the wall
time of both rounds is then that of what else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench.checkpoints import write
from moorage.bus.connection import connect
from moorage.bus.embedded import EmbeddedServer
from moorage.bus.jetstream import JetStream
from moorage.worker.attempt.checkpoint_sets import Pace
from moorage.worker.attempt.job_files import JobFiles

_FILES = 16
#: the training: for each line that it reads, so many steps; it answers with the seconds of the wall and of its CPU
_TRAINING = """
import sys, time
import numpy as np
a = np.random.default_rng(1).normal(size=(256, 256))
for line in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(int(line)):
        a = np.tanh(a @ a.T / 256)
    print(time.perf_counter() - wall, time.process_time() - cpu, flush=True)
"""


class Storing:
    """Stores a folder of a size again and again, as new each time, at a rate in bytes per second."""

    def __init__(self, files: JobFiles, root: Path, size: int, rate: int) -> None:
        self.stored = 0
        self._files = files
        self._root = root
        self._size = size
        self._rate = rate

    def write(self) -> None:
        for number in range(_FILES):
            write(self._root / "ck" / f"part-{number}", self._size // _FILES)

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        storing = asyncio.create_task(self._store())
        try:
            yield
        finally:
            storing.cancel()
            await asyncio.wait((storing,))
            if not storing.cancelled():
                storing.result()

    async def _store(self) -> None:
        while True:
            place = f"checkpoint.bench.1.0.1.{'ab'[self.stored % 2]}"
            await self._files.sets("acme").put(place, str(self._root), "ck", None, Pace(self._rate), None)
            self.stored += 1


async def measure(rounds: int, steps: int, size: int, rate: int) -> None:
    with tempfile.TemporaryDirectory() as told:
        root = Path(told)
        server = await EmbeddedServer.start(root / "server")
        connection = await connect(server.url, "bench")
        one_core = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        training = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _TRAINING, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env=os.environ | one_core,
        )  # fmt: skip
        try:
            (root / "state").mkdir()
            (root / "job" / "ck").mkdir(parents=True)
            job_files = JobFiles(JetStream(connection), "bench", root / "state", 1 << 40, 0, 1 << 40)
            job_files.open()
            storing = Storing(job_files, root / "job", size, rate)
            await asyncio.to_thread(storing.write)
            await _round(training, steps)
            ratios = [await _pair(training, steps, storing) for _ in range(rounds)]
        finally:
            training.kill()
            await training.wait()
            await connection.close()
            await server.stop()
    for what, found in zip(("wall", "CPU"), zip(*ratios, strict=True), strict=True):
        low, mid, high = statistics.quantiles(found, n=4)
        print(f"{what}: a step takes {mid:.3f} of what it takes alone (quartiles {low:.3f} to {high:.3f})")
    print(f"{rounds} pairs of {steps} steps, {storing.stored} sets of {size / 1e6:.0f} MB stored beside them")


async def _pair(training: asyncio.subprocess.Process, steps: int, storing: Storing) -> tuple[float, float]:
    """Return the ratios of the wall and CPU time of a round with storing to one without, in an order by chance."""
    found = dict[bool, tuple[float, float]]()
    for stores in random.sample((False, True), 2):
        if stores:
            async with storing.beside():
                found[stores] = await _round(training, steps)
        else:
            found[stores] = await _round(training, steps)
    (wall, cpu), (with_wall, with_cpu) = found[False], found[True]
    return with_wall / wall, with_cpu / cpu


async def _round(training: asyncio.subprocess.Process, steps: int) -> tuple[float, float]:
    assert training.stdin is not None
    assert training.stdout is not None
    training.stdin.write(f"{steps}\n".encode())
    wall, cpu = (await training.stdout.readline()).split()
    return float(wall), float(cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--size-mb", type=int, default=512)
    parser.add_argument("--rate-mb", type=int, default=100)
    told = parser.parse_args()
    asyncio.run(measure(told.rounds, told.steps, told.size_mb * 10**6, told.rate_mb * 10**6))


if __name__ == "__main__":
    main()
