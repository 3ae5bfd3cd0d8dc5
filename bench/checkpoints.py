"""What a checkpoint costs of whose many files few have changed: bytes and seconds of each set, on a real nats-server.

python -m bench.checkpoints [--size-mb 8192] [--files 200] [--changed 2] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

from moorage.bus.checkpoint_manifest import Manifest
from moorage.bus.connection import connect
from moorage.bus.embedded import EmbeddedServer
from moorage.bus.jetstream import JetStream
from moorage.worker.attempt.checkpoint_sets import Pace
from moorage.worker.attempt.job_files import JobFiles

_PIECE = 1 << 20


def write(path: Path, size: int) -> None:
    with path.open("wb") as file:
        for at in range(0, size, _PIECE):
            file.write(os.urandom(min(_PIECE, size - at)))


async def measure(files: int, size: int, changed: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as root:
        server = await EmbeddedServer.start(Path(root) / "server")
        connection = await connect(server.url, "bench")
        try:
            jetstream, each = JetStream(connection), size // files
            job_files = JobFiles(jetstream, "bench", Path(root) / "state", 1 << 40, 0, 1 << 40)
            (Path(root) / "state").mkdir()
            job_files.open()
            (folder := Path(root) / "job" / "ck").mkdir(parents=True)
            for number in range(files):
                await asyncio.to_thread(write, folder / f"part-{number:03}", each)
            last: Manifest | None = None
            used, first = 0, 0
            for number in range(rounds + 1):
                for part in range(changed if number else 0):
                    await asyncio.to_thread(write, folder / f"part-{(number * changed + part) % files:03}", each)
                began = time.perf_counter()
                place = f"checkpoint.bench.1.0.1.{'ab'[number % 2]}"
                kept = await job_files.sets("acme").put(place, str(folder.parent), "ck", last, Pace(0), None)
                took = time.perf_counter() - began
                assert kept is not None
                last, before = kept.manifest, used
                used = (await jetstream.stream_info("OBJ_BENCH_CHECKPOINTS_acme")).size_bytes
                first = first or used
                part_sent = (used - before) / first
                print(f"set {number}: {(used - before) / 1e6:,.1f} MB sent, {part_sent:.2%} of the first, {took:.2f} s")
        finally:
            await connection.close()
            await server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size-mb", type=int, default=8192)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--changed", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    told = parser.parse_args()
    asyncio.run(measure(told.files, told.size_mb * 10**6, told.changed, told.rounds))


if __name__ == "__main__":
    main()
