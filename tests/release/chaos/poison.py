"""`python -m tests.release.chaos.poison`: what a tenant whose requests make the scheduler fail costs another tenant.

For each place where the scheduler fails and each door (request or durable queue): the rate of an honest tenant alone,
then beside a tenant that sends a hundred such requests a second, then alone. Prints one JSON line, and ends with 1
where the share is below the bound. Rates need a machine that does nothing else: on a busy one the scheduler's processor
time a job tells more (`share_by_cpu`). Every wait in it has an end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec
from nats.aio.msg import Msg

from moorage.bus.embedded import EmbeddedServer
from tests.release.chaos.pressure import HOSTS, Load
from tests.system.live.stack import Caller, RealProcess, Stack, caller, request, stack, unique_prefix

SHARE_MIN: Final = 0.8
#: poisonous requests a second
RATE: Final = 100.0
PHASE_S: Final = 20.0
WARM_S: Final = 3.0
#: starting, warming and ending one stack takes less than this, beside its two phases
OVERHEAD_S: Final = 60.0
PLACES: Final = ("admission", "placing", "ranking")
DOORS: Final = ("request", "queue")
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class Attacker:
    """Sends poisonous requests at a rate, whatever is answered, and counts the answers."""

    def __init__(self, one: Caller, place: str, door: str) -> None:
        self._one = one
        self._by_queue = door == "queue"
        self._starves = place == "ranking"  # there its jobs are accepted
        subjects = one.subjects
        self._subject = (subjects.request if self._by_queue else subjects.api)(one.tenant, "submit")
        self.sent = 0
        self.answers: Counter[str] = Counter()

    def _on_answer(self, msg: Msg) -> None:
        answer = msgspec.json.decode(msg.data)
        self.answers[answer.get("code") or answer.get("kind") or "stored"] += 1

    async def run(self, ends_s: float) -> None:
        async def on_answer(msg: Msg) -> None:
            self._on_answer(msg)

        inbox = self._one.nc.new_inbox()
        heard = await self._one.nc.subscribe(inbox, cb=on_answer)
        began_s = time.monotonic()
        while (now_s := time.monotonic()) < ends_s:
            while self.sent < (now_s - began_s) * RATE:
                body = msgspec.json.encode(request(f"poison-{self.sent}", gpu={"model": "poison"}))
                await self._one.nc.publish(self._subject, body, inbox)
                self.sent += 1
            await asyncio.sleep(0.02)
        await heard.unsubscribe()

    @property
    def waiting(self) -> int:
        """How many of its jobs wait for a GPU that no host has: they are in the queue for good."""
        return self.sent if self._by_queue and self._starves else self.answers["accepted"]


def cpu_s(process: RealProcess) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@contextlib.asynccontextmanager
async def poisoned(place: str) -> AsyncIterator[tuple[Stack, RealProcess]]:
    """A server, a worker of simulated GPUs and a scheduler that fails on poison at `place`."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        server = await EmbeddedServer.start(Path(folder) / "nats")
        try:
            async with stack(server, unique_prefix()) as made:
                scheduler = await made.poisoned_scheduler(place, {})
                await made.agent("w", f"{HOSTS}x8xH100", drivers=["noop"], leases=False)
                async with caller(made, "operator") as operator:
                    await operator.leader()
                    await operator.workers_up(*(f"sim-{n:04d}" for n in range(HOSTS)))
                yield made, scheduler
        finally:
            await server.stop()


async def measured(place: str, door: str, seconds: float) -> dict[str, Any]:
    """The honest tenant's rate alone, beside and alone, and the scheduler's processor time for each of its jobs."""
    async with (
        poisoned(place) as (made, scheduler),
        caller(made, "beta", follows=False) as beta,
        caller(made, "acme", follows=False) as acme,
    ):
        attacker = Attacker(acme, place, door)
        load = Load(beta, never_start=lambda: attacker.waiting)
        await load.run(time.monotonic() + WARM_S)
        rates: list[float] = []
        cpu_us: list[int] = []
        for attacked in (False, True, False):  # the second time alone shows what else has changed meanwhile
            phase_s = seconds if attacked else seconds / 2
            ends_s = time.monotonic() + phase_s
            before, cpu_before = load.accepted, cpu_s(scheduler)
            async with asyncio.TaskGroup() as group:
                if attacked:
                    group.create_task(attacker.run(ends_s))
                await load.run(ends_s)
            jobs = load.accepted - before
            rates.append(jobs / phase_s)
            cpu_us.append(round((cpu_s(scheduler) - cpu_before) / max(1, jobs) * 1_000_000))
        fleet = await beta.fleet()
        return {
            "jobs_per_s": [round(rate) for rate in rates],
            "scheduler_cpu_us_a_job": cpu_us,
            "share": round(2 * rates[1] / (rates[0] + rates[2]), 3),
            "share_by_cpu": round((cpu_us[0] + cpu_us[2]) / 2 / cpu_us[1], 3),
            "sent": attacker.sent,
            "answers": dict(attacker.answers),
            "failures": fleet["contained"]["counts"],
            "epoch": fleet["epoch"],
        }


async def bounded(place: str, door: str, seconds: float) -> dict[str, Any]:
    async with asyncio.timeout(2 * seconds + OVERHEAD_S):
        return await measured(place, door, seconds)


async def poison(places: list[str], doors: list[str], seconds: float) -> dict[str, Any]:
    rows = {}
    for place in places:
        for door in doors:
            row = rows[f"{place} by {door}"] = await bounded(place, door, seconds)
            print(f"{place} by {door}: {row}", file=sys.stderr, flush=True)
    share = min(row["share"] for row in rows.values())
    kept = share >= SHARE_MIN and all(row["epoch"] == 1 for row in rows.values())
    return {"seconds": seconds, "rows": rows, "share": share, "kept": kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--place", choices=PLACES, action="append", help="all, unless given")
    parser.add_argument("--door", choices=DOORS, action="append", help="both, unless given")
    parser.add_argument("--seconds", type=float, default=PHASE_S, help="beside the attacker, and alone")
    given = parser.parse_args()
    figures = asyncio.run(poison(given.place or list(PLACES), given.door or list(DOORS), given.seconds))
    print(msgspec.json.encode(figures).decode())
    sys.exit(0 if figures["kept"] else 1)


if __name__ == "__main__":
    main()
