"""What files of workers cost through a scheduler: reading a large object, and many workers that fetch at once.

    python -m bench.worker_files [--rounds 3] [--size-mib 1024] [--workers 200] [--each-mib 4]

A server, its leader and the process beside it are those of a site with keys. Direct means that nats-server is asked
without anybody between, which no worker's key may do. Each round begins with the other way. Meanwhile an operator asks
the leader again and again: the longest answer and the leader's CPU say whether its loop notices.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import uvloop

from bench.book import busy_percent, keep
from moorage.bus.connection import Connection, connect
from moorage.bus.errors import BusError, Disconnected, RequestTimeout
from moorage.bus.jetstream import JetStream
from moorage.bus.object_store import files_store
from moorage.bus.passed_on import through_schedulers
from moorage.schemas.subjects import PREFIX_DEFAULT, Subjects
from tests.servers import stream_is_there
from tests.sites import running
from tests.waiting import until

TITLE: Final = "files of workers"
TENANT: Final = "acme"
SUBJECTS: Final = Subjects()
WAYS: Final = ("direct", "through a scheduler")
MIB: Final = 1 << 20
#: between two questions to the leader
PAUSE_S: Final = 0.01
#: before one that was cut off begins anew
AGAIN_S: Final = 0.5
ASKED_S: Final = 60.0


def names(count: int) -> tuple[str, ...]:
    return tuple(f"w{number:03}" for number in range(count))


async def fetch(connections: list[Connection], name: str) -> tuple[float, int]:
    """Read an object over each connection at once; return the seconds until all have it, and how many began anew
    because the server had cut them off."""
    anew = 0

    async def one(connection: Connection) -> None:
        nonlocal anew
        store = files_store(JetStream(through_schedulers(connection, PREFIX_DEFAULT)), SUBJECTS, TENANT)
        while True:
            try:
                info = await store.find(name)
                assert info is not None
                async with contextlib.aclosing(store.get(info)) as pieces:
                    async for _ in pieces:
                        pass
                return
            except (Disconnected, RequestTimeout):
                anew += 1
                await asyncio.sleep(AGAIN_S)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for connection in connections:
            group.create_task(one(connection))
    return time.perf_counter() - began, anew


async def fetcher(way: str, workers: int, name: str) -> None:
    """A process of its own with all connections, which tells what `fetch` returns."""
    async with contextlib.AsyncExitStack() as ends:
        keys = ["scheduler.main"] * workers if way == WAYS[0] else [f"worker.{each}" for each in names(workers)]
        connections = [await ends.enter_async_context(await connect(key, "bench")) for key in keys]
        print(json.dumps(await fetch(connections, name)))


class Leader:
    """Asked all the time as an operator, from its start on."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self._pid = pid
        self._connection = connection

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self._pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def answers(self) -> bool:
        try:
            await self._connection.request(SUBJECTS.admin("fleet", "ana"), b"{}", ASKED_S)
        except BusError:
            return False
        return True

    async def beside(self, work: asyncio.Task[str]) -> tuple[float, float]:
        """Return the longest answer while the work runs, in seconds, and the leader's CPU seconds a second."""
        longest, began, cpu = 0.0, time.perf_counter(), self._cpu_s()
        while not work.done():
            asked = time.perf_counter()
            assert await self.answers()
            longest = max(longest, time.perf_counter() - asked)
            await asyncio.sleep(PAUSE_S)
        return longest, (self._cpu_s() - cpu) / (time.perf_counter() - began)


@contextlib.asynccontextmanager
async def site(workers: int, size: int, each: int) -> AsyncIterator[Leader]:
    """A leader, and two objects: `large`, and `small` that many workers fetch."""
    with tempfile.TemporaryDirectory(prefix="moorage-bench-") as name:
        folder = Path(name)
        async with running(workers=names(workers), tenants=(TENANT,)) as made:
            os.environ.update(made.environment)
            with (folder / "scheduler.log").open("wb") as out:
                scheduler = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "moorage.scheduler", "--nats", "scheduler.main",
                    env={**os.environ, "MOORAGE_LEDGER_URL": "ledger.main"}, stdout=out, stderr=out,
                )  # fmt: skip
            try:
                async with await made.connect("scheduler.main") as own, await made.connect("operator.ana") as ana:
                    await stream_is_there(own, f"OBJ_{SUBJECTS.files_bucket(TENANT)}")
                    await until(
                        lambda: "passing on files" in (folder / "scheduler.log").read_text(), what="it passes on"
                    )
                    leader = Leader(scheduler.pid, ana)
                    await until(leader.answers, what="it leads")
                    store = files_store(JetStream(own), SUBJECTS, TENANT)
                    for object_name, length in (("large", size), ("small", each)):
                        await store.put(object_name, (os.urandom(MIB) for _ in range(length)), {}, lambda _: None)
                    yield leader
            finally:
                scheduler.terminate()
                await scheduler.wait()


async def fetched(way: str, workers: int, name: str) -> str:
    words = ("-m", "bench.worker_files", "--fetch", json.dumps([way, workers, name]))
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
    told, _ = await process.communicate()
    assert process.returncode == 0
    return told.decode()


async def measure(rounds: int, size: int, workers: int, each: int) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {}

    def note(figure: str, value: float) -> None:
        print(f"{figure}: {value:.3g}", flush=True)
        figures.setdefault(figure, []).append(value)

    one, many = f"an object of {size} MiB", f"{workers} workers at once, {each} MiB each"
    async with site(workers, size, each) as leader:
        for at in range(rounds):
            quiet = asyncio.create_task(asyncio.sleep(3.0, ""))
            note("nobody fetches, longest answer of the leader, ms", 1000 * (await leader.beside(quiet))[0])
            for what, count, name, total in ((one, 1, "large", size), (many, workers, "small", workers * each)):
                rates = dict[str, float]()
                for way in WAYS[:: -1 if at % 2 else 1]:
                    work = asyncio.create_task(fetched(way, count, name))
                    longest, cpu = await leader.beside(work)
                    took, anew = json.loads(await work)
                    rates[way] = total / took
                    note(f"{what}, {way}, s", took)
                    note(f"{what}, {way}, cut off and begun anew", anew)
                    note(f"{what}, {way}, longest answer of the leader, ms", 1000 * longest)
                    note(f"{what}, {way}, leader's share of a core, %", 100 * cpu)
                note(f"{what}, rate through a scheduler / direct", rates[WAYS[1]] / rates[WAYS[0]])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--each-mib", type=int, default=4)
    parser.add_argument("--fetch", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if asked.fetch:
            runner.run(fetcher(*json.loads(asked.fetch)))
            return
        busy = busy_percent()
        figures = runner.run(measure(asked.rounds, asked.size_mib, asked.workers, asked.each_mib))
    keep("worker-files", "python -m bench.worker_files", {TITLE: figures}, busy)


if __name__ == "__main__":
    main()
