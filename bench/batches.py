"""Calls in batches: a made model whose step costs 20 ms and 0.1 ms an input, one step at a time, with 1 to 256 callers.

    python -m bench.batches                     # ours with batches and without, printed
    python -m bench.batches --ray --rounds 3    # beside Ray Serve's `@serve.batch`: writes the book

Callers are a closed loop: each pauses between two calls for an exponential time of 5 ms on average. One member, or one
replica, has the model; batches have at most 32 calls, and wait for 5 ms. The ceiling is what the model answers in full
batches: 1,379 calls/s.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any, Final

from bench.book import busy_percent, keep
from bench.calls import service
from bench.kept import ROOT
from bench.load import BATCH_WAIT_S, CALLERS, CEILING, MOST, closed_loop
from bench.studies.peers.environments import NoPeer, measured, python_of
from moorage.system.loops import loop_factory

BATCH: Final = f"{MOST},{BATCH_WAIT_S * 1000:g}ms"
#: the service `echo` of `bench.calls` is the model
BATCHED: Final = f"import sys; sys.path.append({str(ROOT)!r}); from bench.load import step as echo"
ALONE: Final = BATCHED.replace("step", "single")


async def ours(function: str, *words: str) -> dict[str, float]:
    """Return rates and waits of our service."""
    async with service(function, 1, 1, "--queue", str(max(CALLERS)), *words) as (moorage, _):

        async def call(data: bytes) -> bytes:
            answer = await moorage.call("echo", data)
            assert isinstance(answer, bytes)
            return answer

        return await closed_loop(call)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ray", action="store_true", help="measure Ray Serve as well")
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    busy = busy_percent()
    found: dict[str, list[float]] = {}

    def add(who: str, figures: dict[str, Any]) -> dict[str, Any]:
        print(f"{who:22}", *(f"{name} {value:,.4g}" for name, value in figures.items()), sep="  ", flush=True)
        for name, value in figures.items():
            found.setdefault(f"{who}, {name}", []).append(value)
        return figures

    print(f"ceiling {CEILING:,.0f} calls/s; machine {busy:.0f} % busy before")
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        for _ in range(asked.rounds):
            batched = add("batches", runner.run(ours(BATCHED, "--batch", BATCH)))
            alone = add("without", runner.run(ours(ALONE)))
            add("batches / without", {"64 calls/s": batched["64 calls/s"] / alone["64 calls/s"]})
            add("batches / ceiling", {"64 calls/s": batched["64 calls/s"] / CEILING})
            add("batches - without", {"1 p50 ms": batched["1 p50 ms"] - alone["1 p50 ms"]})
            if not asked.ray:
                continue
            try:
                serve = add("Ray Serve", measured(python_of("ray[serve]"), "on_ray.py", "batches", 1))
            except NoPeer as error:
                print(f"no Ray here: {error}", file=sys.stderr)
                return 1
            add("Ray Serve / ceiling", {"64 calls/s": serve["64 calls/s"] / CEILING})
            add("batches / Ray Serve", {name: batched[name] / serve[name] for name in serve})
    if asked.ray:
        keep("batches", "python -m bench.batches --ray", {"calls in batches": found}, busy)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
