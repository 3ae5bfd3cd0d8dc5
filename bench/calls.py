"""Calls of a warm service: rates and waits with 1, 8, 64 and 256 calls at once, beside actors of Ray; then under load.

    python -m bench.calls                     # ours, printed
    python -m bench.calls --ray --rounds 3    # beside Ray, in an environment of its own: writes the book

At once: two members with a plain function answer one caller of the SDK, all in processes of their own, over a real
nats-server. Each answer is compared with what was sent.

Under load: four members with one place each; calls come at random (Poisson) and take 20 ms on average (exponential),
so that 80 % of the places are taken. The wait is a call's time over its own. Beside it stands that of the same calls in
one queue before the four places that costs no time. Ray Serve has four replicas that take one request each. Then 60 %,
and one of the four members is told to end at half: the others are at 80 %.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from bench.book import busy_percent, keep
from bench.load import SECONDS_OF_LOAD, ideal_wait, waits_of
from bench.studies.peers.environments import NoPeer, measured, python_of
from moorage.bus.embedded import EmbeddedServer
from moorage.client import AsyncClient
from moorage.system.loops import loop_factory

AT_ONCE: Final = (1, 8, 64, 256)
MEMBERS: Final = 2
SECONDS: Final = 3.0
WARM_CALLS: Final = 200
ECHO: Final = "def echo(data):\n    return data\n"
SLEEP: Final = "import time\ndef echo(data):\n    time.sleep(float(data))\n    return data\n"
PLACES: Final = 4
DRAIN_AFTER_S: Final = SECONDS_OF_LOAD / 2


async def one_round(moorage: AsyncClient, at_once: int) -> tuple[float, float, float]:
    """Return calls a second, and p50 and p99 of a call in milliseconds, with so many callers."""
    service = moorage.service("echo")
    waits: list[float] = []
    ends = time.perf_counter() + SECONDS

    async def caller(first: int) -> None:
        number = first
        while (began := time.perf_counter()) < ends:
            data = b"%d" % number
            assert await service.call(data) == data
            waits.append(time.perf_counter() - began)
            number += at_once

    began = time.perf_counter()
    await asyncio.gather(*(caller(first) for first in range(at_once)))
    rate = len(waits) / (time.perf_counter() - began)
    waits.sort()
    return rate, statistics.median(waits) * 1e3, waits[len(waits) * 99 // 100] * 1e3


@contextlib.asynccontextmanager
async def service(
    function: str, members: int, concurrency: int = 1, *more: str
) -> AsyncIterator[tuple[AsyncClient, list[asyncio.subprocess.Process]]]:
    """A server, so many members of the service `echo` in processes of their own, and a caller of it."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moorage-calls-")))
        (folder / "served.py").write_text(function)
        server = await EmbeddedServer.start(folder / "nats")
        stack.push_async_callback(server.stop)
        words = ["serve", "served:echo", "--name", "echo", "--tenant", "bench", "--nats", server.url]
        started = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "moorage.cli", *words, "--concurrency", str(concurrency), *more,
                cwd=folder,
                stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            )
            for _ in range(members)
        ]  # fmt: skip

        async def end() -> None:
            for each in started:
                if each.returncode is None:
                    each.terminate()
            await asyncio.gather(*(each.wait() for each in started))

        stack.push_async_callback(end)
        moorage = await stack.enter_async_context(AsyncClient(server.url, tenant="bench", timeout="60s"))
        for _ in range(WARM_CALLS):
            await moorage.call("echo", b"0")
        yield moorage, started


async def at_once(concurrency: int) -> dict[str, float]:
    """Return rates and waits with so many callers at once."""
    found: dict[str, float] = {}
    async with service(ECHO, MEMBERS, concurrency) as (moorage, _):
        for number in AT_ONCE:
            rate, p50, p99 = await one_round(moorage, number)
            found |= {f"{number} calls/s": rate, f"{number} p50 ms": p50, f"{number} p99 ms": p99}
    return found


async def under_load() -> dict[str, float]:
    """Return the p99 of the wait at 80 %, at 60 %, and at 60 % while one of four members ends, in milliseconds."""
    found: dict[str, float] = {}
    async with service(SLEEP, PLACES) as (moorage, members):

        async def call(data: bytes) -> bytes:
            answer = await moorage.call("echo", data)
            assert isinstance(answer, bytes)
            return answer

        found["80 % p99 ms"] = await waits_of(call, 0.8 * PLACES)
        found["60 % p99 ms"] = await waits_of(call, 0.6 * PLACES)

        async def end_one() -> None:
            await asyncio.sleep(DRAIN_AFTER_S)
            members[0].terminate()

        found["drained p99 ms"], _ = await asyncio.gather(waits_of(call, 0.6 * PLACES), end_one())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ray", action="store_true", help="measure Ray's actors and Ray Serve as well")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=1, help="calls that a member runs at the same time")
    asked = parser.parse_args()
    busy = busy_percent()
    found: dict[str, list[float]] = {}

    def add(who: str, figures: dict[str, Any]) -> dict[str, Any]:
        print(who, {name: f"{value:,.2f}" for name, value in figures.items()}, flush=True)
        for name, value in figures.items():
            found.setdefault(f"{who}, {name}", []).append(value)
        return figures

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        for _ in range(asked.rounds):
            mine = add("calls", runner.run(at_once(asked.concurrency)))
            loaded = add("calls", runner.run(under_load()))
            add("calls / one ideal queue", {"80 % p99 ms": loaded["80 % p99 ms"] / ideal_wait(0.8 * PLACES, PLACES)})
            add("calls", {"p99 while one of four ends / without": loaded["drained p99 ms"] / loaded["60 % p99 ms"]})
            if not asked.ray:
                continue
            try:
                theirs = add("Ray's actors", measured(python_of("ray[serve]"), "on_ray.py", "actors", MEMBERS))
                serve = add("Ray Serve", measured(python_of("ray[serve]"), "on_ray.py", "serve", PLACES))
            except NoPeer as error:
                print(f"no Ray here: {error}", file=sys.stderr)
                return 1
            for number in AT_ONCE:
                for figure in ("calls/s", "p50 ms"):
                    name = f"{number} {figure}"
                    add("calls / Ray's actors", {name: mine[name] / theirs[name]})
            add("calls / Ray Serve", {"80 % p99 ms": loaded["80 % p99 ms"] / serve["80 % p99 ms"]})
    if asked.ray:
        keep("calls", "python -m bench.calls --ray", {"calls of a warm service": found}, busy)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
