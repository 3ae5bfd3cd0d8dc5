"""One job of a million replicas: how fast it goes, and what the scheduler and the server hold while it does.

    python -m bench.million [--replicas 1000000]

On simulated GPUs whose replicas start no process. Each five seconds the processes' resident memory is read beside the
job's own counts; the page is a drawing in characters and the numbers behind it.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Final, NamedTuple

import uvloop

from bench.book import busy_percent, machine, versions
from bench.stack import Stack, stack
from moorage.client import AsyncClient
from moorage.schemas.job import TERMINAL

PAGE: Final = "MILLION.md"
FLEET: Final = "256x8xH100"
EVERY_S: Final = 5.0
WIDTH: Final = 40  # characters of the drawing


class Sample(NamedTuple):
    """What was read at one moment: seconds since the submit, replicas ended, and memory in MiB."""

    at_s: float
    ended: int
    scheduler: float
    follower: float
    server: float
    disk: float


def follower_mib(it: Stack) -> float:
    """The resident memory of the scheduler's own processes, its follower, in MiB."""
    scheduler = it.pids["scheduler"]
    found = 0.0
    for children in Path(f"/proc/{scheduler}/task").glob("*/children"):
        for pid in children.read_text().split():
            found += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20
    return found


def disk_mib(folder: Path) -> float:
    """What the server's streams take on the disk, in MiB."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


async def measure(replicas: int) -> list[Sample]:
    """Run the job, and return what was read on the way."""
    samples: list[Sample] = []
    async with stack(FLEET) as it, AsyncClient(it.url, tenant="t0", timeout=60.0) as client:

        def read(ended: int) -> None:
            memory = it.rss_mib("scheduler"), follower_mib(it), it.rss_mib("server"), disk_mib(it.folder / "nats")
            samples.append(Sample(time.monotonic() - began, ended, *memory))
            print(*(f"{value:,.0f}" for value in samples[-1]), sep="\t", flush=True)

        began = time.monotonic()
        read(0)
        job = await client.submit(["exit", "0"], driver="noop", job="million", gpu=1, replicas=replicas)
        while (shown := await job.show()).state not in TERMINAL:
            read(shown.data["replicas"]["states"].get("SUCCEEDED", 0))
            await asyncio.sleep(EVERY_S)
        read(replicas)
        assert shown.state == "SUCCEEDED", shown
    return samples


def page(samples: list[Sample], busy: float) -> str:
    """The drawing: a bar for the scheduler and one for the server, at most thirty lines."""
    step = max(1, len(samples) // 28)
    rows = [*samples[:-1:step], samples[-1]]
    most = max(max(row.scheduler, row.server) for row in rows)
    last = samples[-1]
    lines = [
        "# One job of a million replicas",
        "",
        f"Written by `python -m bench.million`. {last.ended:,} replicas on {FLEET}, simulated GPUs, no process a",
        f"replica: {last.ended / last.at_s:,.0f} replicas a second. Resident memory in MiB; `#` is the scheduler's,",
        "`=` the server's.",
        "",
        f"- {machine()}; {versions()}; machine {busy:.0f} % busy before",
        "",
        "```text",
        f"{'s':>5} {'ended':>9} {'scheduler':>9} {'follower':>8} {'server':>6} {'disk':>6}",
    ]
    for row in rows:
        bars = "#" * round(row.scheduler / most * WIDTH), "=" * round(row.server / most * WIDTH)
        lines.append(
            f"{row.at_s:>5.0f} {row.ended:>9,} {row.scheduler:>9.0f} {row.follower:>8.0f} {row.server:>6.0f} "
            f"{row.disk:>6.0f}  {bars[0]}"
        )
        lines.append(f"{'':>49}{bars[1]}")
    return "\n".join([*lines, "```", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1_000_000)
    told = parser.parse_args()
    busy = busy_percent()
    samples = uvloop.run(measure(told.replicas))
    text = page(samples, busy)
    print(text)
    (Path(__file__).resolve().parent / PAGE).write_text(text)


if __name__ == "__main__":
    main()
