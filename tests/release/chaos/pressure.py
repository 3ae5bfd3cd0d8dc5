"""Long pressure on real processes: memory and descriptors, and who else suffers.

`python -m tests.release.chaos.pressure soak --minutes 30`, `python -m tests.release.chaos.pressure hostile`.

Both run a whole moorage by the real command on a server of their own, measure from outside (/proc), print the figures
as one JSON line, and end with 1 where a bound is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from nats.aio.client import Client

from moorage.bus.embedded import EmbeddedServer
from moorage.testing.conformance import plain_nats
from moorage.worker.session.tombstones import TOMBSTONES_MAX
from tests.release.chaos.trend import trend
from tests.system.live.stack import Caller, RealProcess, Stack, caller, stack, unique_prefix
from tests.waiting import until

RSS_MIB_A_HOUR_MAX: Final = 5.0
DESCRIPTORS_MORE_MAX: Final = 4
SHARE_MIN: Final = 0.9
SAMPLE_S: Final = 5.0
#: samples between two lines of progress
SAID_EVERY: Final = 12
#: finished jobs remembered in these runs: the default of 2,000,000 takes longer to fill than a soak takes
FINISHED_ROWS: Final = 100_000
NUMBERS: Final[dict[str, float]] = {"snapshot_records": 5000, "finished_rows": FINISHED_ROWS}
HOSTS: Final = 16
#: from so many jobs on finished jobs, those kept whole and what workers remember are at their bounds
WARM_JOBS: Final = 2 * FINISHED_ROWS + HOSTS * TOMBSTONES_MAX
#: jobs a request, in an array: what the peak is measured with, too
ARRAY: Final = 50
#: jobs that wait at which nothing more is handed in for a moment
QUEUED_MAX: Final = 1000
PEAK_S: Final = 20.0
HOSTILE: Final = 50
HOSTILE_S: Final = 20.0
ROUNDS: Final = 3
_JOB: Final = {"gpu": {}, "run": {"driver": "noop"}, "events": "tenant"}
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class Load:
    """Arrays of jobs that end at once, handed in as fast as they are worked off, or at a rate.

    Handing in is cheaper than a whole job: so it waits while some are queued, and `accepted` is what was done.
    """

    def __init__(self, one: Caller, never_start: Callable[[], int] = lambda: 0) -> None:
        """`never_start` returns how many jobs of another tenant are in the queue for good: they do not count."""
        self._one = one
        self._never_start = never_start
        self._queued = 0
        self._subject = one.subjects.api(one.tenant, "submit")
        self._name = f"{time.time_ns():x}"
        self._sent = 0
        self.accepted = 0

    async def run(self, ends_s: float, rate: float = 0.0, at_once: int = 4) -> None:
        """Until that time of the monotonic clock; `rate` in jobs a second, 0 for all that goes."""
        began_s, before = time.monotonic(), self.accepted

        async def lane() -> None:
            while (now_s := time.monotonic()) < ends_s:
                if rate and self.accepted - before > (now_s - began_s) * rate:
                    await asyncio.sleep(0.01)
                    continue
                if self._queued > QUEUED_MAX:
                    await asyncio.sleep(0.05)
                    continue
                await self._array()

        over = asyncio.Event()
        looking = asyncio.create_task(self._look(over))
        try:
            await asyncio.gather(*(lane() for _ in range(at_once)))
        finally:
            over.set()  # a cancel is lost where the answer comes at that moment, and it would ask on for ever
            await looking

    async def _look(self, over: asyncio.Event) -> None:
        while not over.is_set():
            self._queued = (await self._one.fleet())["queued"] - self._never_start()
            await asyncio.sleep(0.1)

    async def _array(self) -> None:
        first = self._sent
        self._sent += ARRAY
        jobs = [{"job": f"{self._name}-{first + n}", **_JOB} for n in range(ARRAY)]
        answers = await self._one.ask(self._subject, jobs)
        if isinstance(answers, list):
            self.accepted += sum(each["kind"] == "accepted" for each in answers)
        else:  # the queue is full: told so, and asked again later
            await asyncio.sleep(float(answers.get("retry_after_s") or 0.2))


async def until_over(operator: Caller) -> None:
    """Wait until nothing is queued: what was handed in is worked off."""

    async def empty() -> bool:
        return not (await operator.fleet())["queued"]

    await until(empty, 120, "an empty queue")


@contextlib.asynccontextmanager
async def moorage() -> AsyncIterator[tuple[Stack, RealProcess, RealProcess, EmbeddedServer]]:
    """A server, a scheduler and a worker of simulated GPUs whose jobs end at once."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        server = await EmbeddedServer.start(Path(folder) / "nats")
        try:
            async with stack(server, unique_prefix()) as made:
                scheduler = await made.set_scheduler("s", NUMBERS, made.url, made.ledger_url)
                worker = await made.agent("w", f"{HOSTS}x8xH100", drivers=["noop"], leases=False)
                async with caller(made, "operator") as operator:
                    await operator.leader()
                    await operator.workers_up(*(f"sim-{n:04d}" for n in range(HOSTS)))
                yield made, scheduler, worker, server
        finally:
            await server.stop()


# --------------------------------------------------------------------------------------------------------------- soak


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES / (1 << 20)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


class Sample(NamedTuple):
    at_s: float
    rss_mib: float
    descriptors: int
    accepted: int


async def soak(minutes: float) -> dict[str, Any]:
    """Half of the peak rate for so long. Warm-up is a third of the time, or longer: until every table that has a bound
    is full (`WARM_JOBS`), since before that memory grows by design."""
    async with (
        moorage() as (made, scheduler, worker, server),
        caller(made, follows=False) as acme,
        caller(made, "operator") as op,
    ):
        load = Load(acme)
        await load.run(time.monotonic() + PEAK_S)
        peak = load.accepted / PEAK_S
        await until_over(op)
        pids = {"scheduler": scheduler.pid, "worker": worker.pid, "nats-server": server.pid}
        rows: dict[str, list[Sample]] = {name: [] for name in pids}
        began_s = time.monotonic()
        ends_s, before = began_s + minutes * 60, load.accepted

        async def watch() -> None:
            while True:
                for name, pid in pids.items():
                    at_s = time.monotonic() - began_s
                    rows[name].append(Sample(at_s, rss_mib(pid), descriptors(pid), load.accepted))
                last = rows["scheduler"][-1], rows["worker"][-1]
                if int(last[0].at_s / SAMPLE_S) % SAID_EVERY == 0:
                    print(
                        f"{last[0].at_s / 60:5.1f} min  {load.accepted} jobs  scheduler {last[0].rss_mib:.1f} MiB"
                        f"  worker {last[1].rss_mib:.1f} MiB",
                        file=sys.stderr,
                        flush=True,
                    )
                await asyncio.sleep(SAMPLE_S)

        watching = asyncio.create_task(watch())
        await load.run(ends_s, rate=peak / 2)
        watching.cancel()
        figures: dict[str, Any] = {
            "peak_jobs_per_s": round(peak, 1),
            "rate_jobs_per_s": round((load.accepted - before) / (minutes * 60), 1),
            "minutes": minutes,
        }
        for name, samples in rows.items():
            warm = [each for each in samples if each.at_s > minutes * 20 and each.accepted > WARM_JOBS]
            try:
                found = trend([(each.at_s, each.rss_mib) for each in warm])
            except ValueError as short:
                raise SystemExit(f"{name}: {short}; warm is who has done {WARM_JOBS} jobs") from None
            least, most = min(each.descriptors for each in warm), max(each.descriptors for each in warm)
            figures[name] = {
                "counted_minutes": round((warm[-1].at_s - warm[0].at_s) / 60, 1),
                "rss_mib": round(warm[-1].rss_mib, 1),
                "rss_mib_an_hour": round(found.an_hour, 2),
                "between": [round(found.low, 2), round(found.high, 2)],
                "descriptors": [least, most],
                "verdict": "descriptors" if most - least > DESCRIPTORS_MORE_MAX else found.verdict(RSS_MIB_A_HOUR_MAX),
            }
        # the server's are told and not judged: it keeps what is published as it likes
        figures["kept"] = all(figures[name]["verdict"] == "kept" for name in ("scheduler", "worker"))
        return figures


# ------------------------------------------------------------------------------------------------------------ hostile


class Hostile:
    """Clients that nobody wants: each does one bad thing until it is stopped."""

    def __init__(self, made: Stack) -> None:
        self._made = made
        self._random = random.Random(7)
        self._tasks: list[asyncio.Task[None]] = []
        self._clients: list[Client] = []
        self._sockets: list[asyncio.StreamWriter] = []

    async def start(self, count: int) -> None:
        acts: list[Callable[[], Any]] = [self._garbage, self._refused, self._asks, self._big, self._deaf]
        for number in range(count):
            await acts[number % len(acts)]()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients:
            await client.close()
        for writer in self._sockets:
            writer.transport.abort()

    async def _client(self) -> Client:
        client = await plain_nats.connect(self._made.url)
        self._clients.append(client)
        return client

    def _again(self, act: Callable[[], Any], pause_s: float) -> None:
        async def run() -> None:
            while True:
                with contextlib.suppress(Exception):
                    await act()
                await asyncio.sleep(pause_s)

        self._tasks.append(asyncio.create_task(run()))

    def _subject(self, verb: str) -> str:
        return self._made.subjects.api("hostile", verb)

    async def _garbage(self) -> None:
        client = await self._client()
        self._again(lambda: client.publish(self._subject("submit"), self._random.randbytes(200)), 0.05)

    async def _refused(self) -> None:
        client = await self._client()
        self._again(lambda: client.publish(self._subject("submit"), b'{"job":"a b","run":{}}', "_INBOX.x"), 0.05)

    async def _asks(self) -> None:
        client = await self._client()
        self._again(lambda: client.publish(self._subject("ls"), b"{}", "_INBOX.nobody.reads"), 0.1)

    async def _big(self) -> None:
        client, body = await self._client(), b'{"job":"' + b"x" * 200_000 + b'"}'
        self._again(lambda: client.publish(self._subject("submit"), body), 0.5)

    async def _deaf(self) -> None:
        """Follows everything and reads nothing: the server's business alone."""
        host, port = self._made.url.removeprefix("nats://").rpartition("@")[2].split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f'CONNECT {{"verbose":false}}\r\nSUB {self._made.subjects.prefix}.> 1\r\nPING\r\n'.encode())
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        self._sockets.append(writer)


async def hostile(seconds: float) -> dict[str, Any]:
    """Throughput of an honest tenant alone and beside fifty that are not, in turns."""
    async with moorage() as (made, *_), caller(made, follows=False) as acme, caller(made, "operator") as op:
        await Load(acme).run(time.monotonic() + 5)  # warm
        alone: list[float] = []
        beside: list[float] = []
        for _ in range(ROUNDS):
            for rates, count in ((alone, 0), (beside, HOSTILE)):
                await until_over(op)
                others = Hostile(made)
                await others.start(count)
                load = Load(acme)
                await load.run(time.monotonic() + seconds)
                await others.stop()
                rates.append(load.accepted / seconds)
        share = statistics.median(beside) / statistics.median(alone)
        return {
            "alone_jobs_per_s": [round(rate) for rate in alone],
            "beside_jobs_per_s": [round(rate) for rate in beside],
            "hostile": HOSTILE,
            "share": round(share, 3),
            "kept": share >= SHARE_MIN,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("soak", "hostile"))
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=HOSTILE_S, help="of each turn of hostile")
    given = parser.parse_args()
    figures = asyncio.run(soak(given.minutes) if given.what == "soak" else hostile(given.seconds))
    print(msgspec.json.encode(figures).decode())
    sys.exit(0 if figures["kept"] else 1)


if __name__ == "__main__":
    main()
