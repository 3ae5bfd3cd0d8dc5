"""`python -m bench.fairness`: two tenants of weights 3 and 1 want all the GPUs for ten minutes; what each really had.

The real server, scheduler, worker and processes. Leases are counted four times a second as the leader tells them, from
the moment when both tenants have jobs waiting. Prints the ratio and its part by minute; must be 3 within 5 %.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import uvloop

from bench import book
from bench.stack import stack
from moorage.client import AsyncClient

GPUS = 8
RUNS_S = 4
LOOK_S = 0.25
WEIGHTS = {"heavy": 3, "light": 1}
OFF_BY = 0.05
MINUTES = 10


async def measure(minutes: float) -> int:
    busy = book.busy_percent()
    jobs = int(minutes * 60 / RUNS_S * GPUS * 1.5)  # more than all the GPUs could run
    used = dict.fromkeys(WEIGHTS, 0)
    async with stack(f"1x{GPUS}xH100", driver="process") as it, AsyncClient(it.url) as operator:
        for tenant, weight in WEIGHTS.items():
            await operator.admin.share(weight=weight, tenant=tenant)
            async with AsyncClient(it.url, tenant=tenant) as client:
                await client.submit_many([["sleep", str(RUNS_S)]] * jobs, gpu=1)
        began = time.monotonic()
        for minute in range(1, int(minutes) + 1):
            while time.monotonic() - began < minute * 60:
                await asyncio.sleep(LOOK_S)
                for row in await operator.admin.tenants():
                    if row.tenant in used:
                        used[row.tenant] += row.gpus
            print(f"{minute} min: {used['heavy'] / used['light']:.3f} ({used})", flush=True)
    ratio = used["heavy"] / used["light"]
    kept = abs(ratio / 3 - 1) <= OFF_BY
    if minutes >= MINUTES:
        figures = {"weights 3:1, ratio": [ratio], "weights 3:1, off by %": [100 * abs(ratio / 3 - 1)]}
        book.keep("fairness", "python -m bench.fairness", {f"{minutes:g} minutes": figures}, busy)
    print(f"weights 3:1 over {minutes:g} min: {ratio:.3f}, {'within' if kept else 'NOT within'} 5 %")
    return 0 if kept else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="with fewer nothing is written")
    return uvloop.run(measure(parser.parse_args().minutes))


if __name__ == "__main__":
    sys.exit(main())
