"""How long a takeover takes, with the default numbers and under load: `python -m tests.release.chaos.takeover`.

The scheduler that leads is killed (SIGKILL), on three servers together with the server that leads the ledger's stream;
what counts is the time from the kill until a new submit is answered as accepted. A job runs through all of it and must
go on. Prints each time and, as JSON, least, median and most; ends with 1 where one is above the promise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import nats.errors

from moorage.bus.embedded import EmbeddedServer
from tests.cluster import Cluster
from tests.release.chaos.pressure import Load
from tests.servers import Server
from tests.system.live.stack import Caller, RealProcess, Stack, caller, is_alive, stack, unique_prefix
from tests.waiting import until

ONE_SERVER_S_MAX: Final = 6.0
CLUSTER_S_MAX: Final = 25.0
#: of the load that goes on meanwhile
JOBS_PER_S: Final = 200.0
#: how long one try waits; nobody answers while nobody leads
TRY_S: Final = 0.25
LATE_S: Final = 120.0


class Schedulers:
    """The schedulers of one stack by name; a new one takes the place of each that was killed."""

    def __init__(self, made: Stack, settings: dict[str, float], names: tuple[str, ...]) -> None:
        self._made = made
        self._settings = settings
        self._names = names
        self.living: dict[str, RealProcess] = {}

    async def fill(self, one: Caller) -> str:
        """Start whoever is missing, and wait until one leads and all others stand by; the leader's name."""
        for name in self._names:
            if name not in self.living:
                urls = (self._made.url, self._made.ledger_url)
                self.living[name] = await self._made.set_scheduler(name, self._settings, *urls)
        leader = str((await one.leader())["leader"])
        others = [process for name, process in self.living.items() if name != leader]
        await until(lambda: all("folded" in each.words() for each in others), LATE_S, "the others standing by")
        return leader


async def first_accepted(one: Caller, job: str) -> None:
    """Ask until a submit is answered as accepted."""
    subject = one.subjects.api(one.tenant, "submit")
    body = msgspec.json.encode({"job": job, "gpu": {}, "run": {"driver": "noop"}})

    async def accepted() -> bool:
        try:
            answer = msgspec.json.decode((await one.nc.request(subject, body, timeout=TRY_S)).data)
        except (nats.errors.Error, TimeoutError):
            return False
        return answer.get("kind") in ("accepted", "duplicate")

    await until(accepted, LATE_S, "an accepted submit")


@contextlib.asynccontextmanager
async def under_load(made: Stack, one: Caller) -> AsyncIterator[None]:
    """Other callers go on handing in jobs that end at once."""
    async with caller(made, "load", follows=False) as other:
        load = asyncio.create_task(Load(other).run(float("inf"), JOBS_PER_S))
        try:
            yield
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)


async def kills(
    made: Stack, names: tuple[str, ...], settings: dict[str, float], count: int, cluster: Cluster | None
) -> list[float]:
    """So many takeovers, one after the other; the seconds that each took."""
    took: list[float] = []
    schedulers = Schedulers(made, settings, names)
    async with caller(made) as one:
        leader = await schedulers.fill(one)
        await made.agent("w", "4x8xH100", drivers=["noop"], leases=False)
        await made.agent("p", "1xH100", worker="runs-here")
        await one.workers_up("sim-0000", "runs-here")
        pid_file = made.folder / "pid"
        await one.submit("runs", "/bin/sh", "-c", f"echo $$ > {pid_file}; exec sleep 6000")
        await one.reaches("runs", "RUNNING")
        pid = int(pid_file.read_text())
        async with under_load(made, one):
            for number in range(count):
                leader = await schedulers.fill(one)
                node = await cluster.leader_of(made.subjects.ledger_stream) if cluster is not None else None
                await first_accepted(one, f"before-{number}")
                began_s = time.monotonic()
                dying = schedulers.living.pop(leader).kill()
                await asyncio.gather(dying, *([asyncio.to_thread(node.kill)] if node is not None else []))
                await first_accepted(one, f"after-{number}")
                took.append(time.monotonic() - began_s)
                print(f"takeover {number + 1} of {count} in {took[-1]:.2f} s", flush=True)
                if not is_alive(pid):
                    raise AssertionError("a running job ended of it")
                if node is not None and cluster is not None:
                    node.start()
                    await until(cluster.has_leader, LATE_S, "all three servers")
        shown = await one.show("runs")
        if (shown["state"], shown["attempt"]) != ("RUNNING", 1):
            raise AssertionError(f"the job that ran is {shown['state']} in attempt {shown['attempt']}")
    return took


def figures(took: list[float], bound_s: float) -> dict[str, Any]:
    """Seconds, and whether all of them keep the promise."""
    return {
        "takeovers": len(took),
        "min_s": round(min(took), 2),
        "median_s": round(statistics.median(took), 2),
        "max_s": round(max(took), 2),
        "kept": max(took) <= bound_s,
    }


async def main(count: int, in_cluster: int) -> int:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mt-") as folder:
        server = await EmbeddedServer.start(Path(folder) / "nats")
        try:
            async with stack(cast("Server", server), unique_prefix()) as made:
                found["one server"] = figures(await kills(made, ("s1", "s2"), {}, count, None), ONE_SERVER_S_MAX)
        finally:
            await server.stop()
    if in_cluster:
        with tempfile.TemporaryDirectory(prefix="mt-") as folder:
            cluster = await Cluster.start(Path(folder))
            try:
                async with stack(cast("Server", cluster), unique_prefix()) as made:
                    took = await kills(made, ("s1", "s2", "s3"), {"replicas": 3}, in_cluster, cluster)
                    found["three servers"] = figures(took, CLUSTER_S_MAX)
            finally:
                await cluster.stop()
    print(msgspec.json.encode(found).decode())
    return 0 if all(each["kept"] for each in found.values()) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.release.chaos.takeover", description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="of the leader, on one server")
    parser.add_argument("--cluster", type=int, default=5, help="of both leaders together, on three servers")
    asked = parser.parse_args()
    logging.basicConfig(level="WARNING")
    logging.getLogger("nats").setLevel(logging.CRITICAL)  # it tells of every reconnect
    sys.exit(asyncio.run(main(asked.kills, asked.cluster)))
