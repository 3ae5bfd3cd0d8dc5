"""What a command in a running job costs: the time to its first byte, and how fast 50 MB come through it.

    python -m bench.exec [--rounds 3] [--commands 50] [--mb 50]

On a `moorage up` of its own, whose GPUs are simulated and whose processes are real. The bytes that come are compared
with those that were sent, both ways.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import statistics
import tempfile
import time
from pathlib import Path

from bench.book import busy_percent, keep
from moorage.client import AsyncClient
from moorage.client.command import Command
from tests.system.cli.node import start_node
from tests.waiting import until

TITLE = "commands in running jobs"
FIRST_BYTE, OUT, IN = "exec, first byte, ms", "exec, 50 MB out, MB/s", "exec, 50 MB in, MB/s"


async def first_byte_ms(client: AsyncClient) -> float:
    began = time.perf_counter()
    async with Command.of(client._wire, "j", ["echo", "x"]) as command:
        found = await command.read()
        took = time.perf_counter() - began
        assert found == ("out", b"x\n")
        assert await command.wait() == 0
    return took * 1000


async def out_mb_s(client: AsyncClient, path: Path, data: bytes) -> float:
    """Read a file through a command; the bytes have to be those of the file."""
    seen = hashlib.sha256()
    async with Command.of(client._wire, "j", ["cat", str(path)]) as command:
        began = time.perf_counter()
        while (found := await command.read()) is not None:
            seen.update(found[1])
        took = time.perf_counter() - began
        assert await command.wait() == 0
    assert seen.digest() == hashlib.sha256(data).digest(), "bytes were lost"
    return len(data) / 1e6 / took


async def in_mb_s(client: AsyncClient, data: bytes) -> float:
    """Write to a command, which tells what it has read."""
    async with Command.of(client._wire, "j", ["sha256sum"]) as command:
        began = time.perf_counter()
        await command.write(data)
        await command.write_eof()
        found = await command.read()
        took = time.perf_counter() - began
        assert found is not None
        assert found[1].split()[0].decode() == hashlib.sha256(data).hexdigest(), "bytes were lost"
    return len(data) / 1e6 / took


async def measure(rounds: int, commands: int, size: int) -> dict[str, list[float]]:
    """Return every figure's value of each round; the first byte's is the median of its commands."""
    figures: dict[str, list[float]] = {FIRST_BYTE: [], OUT: [], IN: []}
    with tempfile.TemporaryDirectory() as folder:
        node = await start_node(Path(folder, "up"))
        try:
            async with AsyncClient(node.url, tenant="default") as client:
                await client.submit(["sleep", "3600"], job="j", gpu="1")

                async def runs() -> bool:
                    return (await client.job("j").show()).state == "RUNNING"

                await until(runs)
                for _ in range(rounds):
                    data = os.urandom(size)
                    path = Path(folder, "data")
                    path.write_bytes(data)
                    figures[FIRST_BYTE].append(
                        statistics.median([await first_byte_ms(client) for _ in range(commands)])
                    )
                    figures[OUT].append(await out_mb_s(client, path, data))
                    figures[IN].append(await in_mb_s(client, data))
        finally:
            await node.stop()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commands", type=int, default=50)
    parser.add_argument("--mb", type=int, default=50)
    told = parser.parse_args()
    busy = busy_percent()
    figures = asyncio.run(measure(told.rounds, told.commands, told.mb * 10**6))
    for name, values in figures.items():
        print(f"{name}: {', '.join(f'{value:.4g}' for value in values)}")
    keep("exec", "python -m bench.exec", {TITLE: figures}, busy)


if __name__ == "__main__":
    main()
