"""Kills nats-server at random moments while schedules of all ages run, and judges by the ledger that no run is made
twice and none is lost: `python -m tests.release.chaos.schedules --minutes 10`.

`old` and `young` run each five seconds, `slow` each twenty; `young` is added anew after each start of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from tests.servers import MortalServer, WheelServer
from tests.system.live.scheduled_runs import Recorded, recorded_runs
from tests.system.live.stack import Caller, Stack, caller, stack, unique_prefix

PERIODS_MS: Final = {"old": 5_000, "young": 5_000, "slow": 20_000}
UP_S: Final = (1.0, 45.0)
AWAY_S: Final = (0.1, 12.0)
#: the table of due times is saved every two minutes; then also an old schedule's run comes again
LONG_UP_S: Final = 140.0
#: after a start of the server: until scheduler and leader are back, and a forgotten run is made
MADE_AFTER_MS: Final = 14_000
#: around a kill it is open whether a run came before it
EDGE_MS: Final = 700


class Outage(NamedTuple):
    began_ms: int
    ended_ms: int


async def add(one: Caller, name: str) -> None:
    cron = f"*/{PERIODS_MS[name] // 1000} * * * * *"
    asked = {"act": "add", "name": name, "cron": cron, "overlap": "queue", "request": {"run": {"driver": "noop"}}}
    assert (await one.api("schedule", asked))["kind"] == "answer"


async def killed(server: MortalServer, made: Stack, one: Caller, seconds: float, chance: random.Random) -> list[str]:
    """Return what was wrong."""
    outages: list[Outage] = []
    added_ms = time.time() * 1000
    for name in PERIODS_MS:
        await add(one, name)
    end_s = time.monotonic() + seconds
    longs = iter((60.0, 300.0))
    next_long = next(longs)
    while (left_s := end_s - time.monotonic()) > 0:
        up_s = chance.uniform(*UP_S)
        if seconds - left_s > next_long:
            up_s, next_long = LONG_UP_S, next(longs, seconds)
        if chance.random() < 0.4:  # right behind a run, which comes again if the table was saved before it
            up_s += -(time.time() + up_s) % 5 + chance.uniform(0.2, 1.5)
        await asyncio.sleep(min(up_s, max(left_s, 1.0)))
        began_ms = int(time.time() * 1000)
        await server.kill()
        await asyncio.sleep(chance.uniform(*AWAY_S))
        await server.start()
        outages.append(Outage(began_ms, int(time.time() * 1000)))
        await one.leader(0)
        await one.api("schedule", {"act": "remove", "name": "young"})
        await add(one, "young")
    await asyncio.sleep(MADE_AFTER_MS / 1000)
    runs = await recorded_runs(made)
    told = [f"{len(outages)} kills; runs: { {name: len(each) for name, each in runs.items()} }"]
    print(*told, flush=True)
    return [wrong for name in runs for wrong in judged(name, runs[name], outages, added_ms)]


def judged(name: str, runs: list[Recorded], outages: list[Outage], added_ms: float) -> list[str]:
    """Return what is wrong with a schedule's runs: one that came twice, or one that is missing."""
    period_ms, wrong = PERIODS_MS[name], []
    nexts = [run.next_ms for run in runs]
    wrong += [f"{name}: {ms} twice" for before, ms in pairwise(nexts) if ms <= before]
    if name == "young":  # another schedule each time
        return wrong
    made = {ms - period_ms for ms in nexts}
    first, last = int(added_ms) // period_ms + 1, min(max(made), int(time.time() * 1000)) // period_ms
    for due_ms in range(first * period_ms, last * period_ms + 1, period_ms):
        if due_ms in made:
            continue
        for outage in outages:
            missed = outage.began_ms - EDGE_MS <= due_ms <= outage.ended_ms + EDGE_MS
            was_back_ms = outage.ended_ms + MADE_AFTER_MS
            passed = due_ms + period_ms <= was_back_ms  # the next one came, or was missed too: one run is for both
            if missed and passed:
                break
        else:
            wrong.append(f"{name}: the run of {due_ms} is missing; outages {outages}")
    return wrong


async def run(seconds: float, seed: int) -> list[str]:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="moorage-schedules-") as folder:
        server = await WheelServer.on(Path(folder))
        try:
            async with stack(server, unique_prefix()) as made, caller(made) as one:
                await made.scheduler()
                await made.agent("a", "1xH100")
                await one.leader()
                return await killed(server, made, one, seconds, chance)
        finally:
            await server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    wrong = asyncio.run(run(asked.minutes * 60, asked.seed))
    print(*(wrong or ["each run once"]), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
