"""What files cost a job: 1,000 files of 50 MB beside copying and unpacking by hand, and a job without files.

    python -m bench.job_files [--rounds 5] [--size-mb 50] [--files 1000]

Each round takes all kinds in turn, on a `moorage up` of its own. By hand means: tar with gzip, copy the file, unpack
it, and start the program there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from moorage.bus.jetstream import JetStream
from moorage.client import AsyncClient
from tests.system.cli.node import start_node


def make(folder: Path, files: int, size: int, salt: int) -> Path:
    """Write files of code-like text and of data that does not compress, half of the bytes each."""
    text = b"def step(model, batch):\n    return model(batch)\n"
    for number in range(files):
        path = folder / f"part{number % 20}" / f"file{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        each = size // files
        path.write_bytes(os.urandom(each // 2) + (b"%d %d\n" % (salt, number) + text * each)[: each // 2])
    return folder


def by_hand(code: Path, work: Path) -> float:
    """Pack, copy, unpack and start, as a person would; seconds."""
    began = time.perf_counter()
    subprocess.run(["tar", "czf", work / "code.tgz", "-C", code, "."], check=True)
    shutil.copy(work / "code.tgz", work / "there.tgz")
    (work / "there").mkdir()
    subprocess.run(["tar", "xzf", work / "there.tgz", "-C", work / "there"], check=True)
    subprocess.run(["true"], cwd=work / "there", check=True)
    return time.perf_counter() - began


async def timed(client: AsyncClient, **fields: object) -> float:
    began = time.perf_counter()
    job = await client.submit(["true"], **fields)  # type: ignore[arg-type]
    await job.result()
    return time.perf_counter() - began


async def measure(rounds: int, files: int, size: int) -> None:
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        node = await start_node(Path(folder))
        try:
            async with AsyncClient(node.url, tenant="bench") as client:
                await timed(client)
                for number in range(rounds):
                    work = Path(folder, f"round{number}")
                    code = make(work / "code", files, size, number)
                    seconds.setdefault("by hand", []).append(by_hand(code, work))
                    seconds.setdefault("files, first submit", []).append(await timed(client, files=code))
                    stream = f"OBJ_{client._wire.subjects.files_bucket('bench')}"
                    before = (await JetStream(client._wire.link).stream_info(stream)).last_seq
                    seconds.setdefault("files, second submit", []).append(await timed(client, files=code))
                    after = (await JetStream(client._wire.link).stream_info(stream)).last_seq
                    print(f"round {number}: the second submit sent {after - before} messages")
                    shutil.rmtree(work)
                for _ in range(200):
                    seconds.setdefault("no files", []).append(await timed(client))
        finally:
            await node.stop()
    for kind, found in seconds.items():
        print(f"{kind}: median {statistics.median(found):.4f} s, {min(found):.4f} to {max(found):.4f}, n {len(found)}")
    first, hand = (statistics.median(seconds[kind]) for kind in ("files, first submit", "by hand"))
    print(f"first submit / by hand: {first / hand:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--size-mb", type=int, default=50)
    told = parser.parse_args()
    asyncio.run(measure(told.rounds, told.files, told.size_mb * 10**6))


if __name__ == "__main__":
    main()
