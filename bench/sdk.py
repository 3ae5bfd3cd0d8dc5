"""What the SDK costs: callers beside bare inboxes, results, followers, one that stops reading, and large batches."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final, Literal, TypedDict

from bench.callers import Callers
from bench.stack import SUBJECTS, Stack, stack
from moorage.client import AsyncClient
from moorage.client.follow.follower import CROWD
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import Resources, Secret

Figures = dict[str, float]

HERE = Path(__file__).resolve().parent
FLEET = "256x8xH100"
CALLERS = 1000
JOBS = 20_000
TURNS = 10
STOPPED_JOBS = 5000
BATCH = 10_000
RESULTS = 10_000
FOLLOWED = 1000
FOLLOWED_JOBS = 3000
FOLLOWED_TURNS = 10
#: as many ended jobs as the leader keeps whole
FOLLOWED_WARM = 4
#: said on the stopped follower's subjects: more than the kernel and the server keep for it
FLOOD_BYTES = 320 * 1024 * 1024
FLOOD_FRAME_BYTES = 512 * 1024


class Asks(TypedDict):
    """What a request asks for, in the SDK's words."""

    gpu: GpuSpec
    driver: str
    env: dict[str, str | Secret]
    limit: float
    resources: Resources
    retries: int
    labels: dict[str, str]


#: the request of `bench.callers.BODY`
ASKS: Final = Asks(
    gpu=GpuSpec(model=["H100"], min_memory_mib=70_000),
    driver="noop",
    env={"SEED": "7", "BATCH": "8"},
    limit=3600.0,
    resources=Resources(1000, 1024),
    retries=2,
    labels={"team": "a"},
)


async def closed_loop(moorage: AsyncClient, jobs: int, in_flight: int) -> None:
    """As `Callers.closed_loop`, by `AsyncClient.submit`."""
    left = jobs

    async def caller() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await moorage.submit((), events="tenant", **ASKS)

    await asyncio.gather(*(caller() for _ in range(in_flight)))


async def sdk_callers() -> Figures:
    """1,000 callers in flight by the SDK, and by bare inboxes, on one stack: to the terminal state."""
    async with stack(FLEET) as it:
        bare = await Callers.open(it, tenants=1)
        async with AsyncClient(it.url, tenant="t0", timeout=60.0) as moorage:
            by_sdk = functools.partial(closed_loop, moorage)
            await bare.closed_loop(2000, CALLERS)
            await by_sdk(2000, CALLERS)
            await bare.until_ended(4000)
            took = {"SDK": 0.0, "bare inboxes": 0.0}
            cpu_s = dict(took)
            for name in [*took] * TURNS:  # in turns, so that all meet the same machine
                callers = by_sdk if name == "SDK" else bare.closed_loop
                already, cpu, began = bare.ended, it.cpu_s("callers"), time.monotonic()
                await callers(JOBS // TURNS, CALLERS)
                await bare.until_ended(already + JOBS // TURNS)
                took[name] += time.monotonic() - began
                cpu_s[name] += it.cpu_s("callers") - cpu
        await bare.close()
    figures = {f"1,000 callers, {name}, jobs/s": JOBS / seconds for name, seconds in took.items()}
    figures |= {f"1,000 callers, {name}, callers' CPU µs a job": used / JOBS * 1e6 for name, used in cpu_s.items()}
    return figures | {"1,000 callers, SDK / bare inboxes": took["bare inboxes"] / took["SDK"]}


async def results() -> Figures:
    """`submit` and `Job.result`, and `run`, by so many callers at once in one process."""
    figures: Figures = {}
    async with stack(FLEET) as it, AsyncClient(it.url, tenant="t0", timeout=60.0) as moorage:

        async def submit_and_result() -> None:
            await (await moorage.submit((), **ASKS)).result()

        async def run() -> None:
            await moorage.run((), **ASKS)

        for name, once in (("submit and result", submit_and_result), ("run", run)):
            for at_once in (1, 100, CALLERS):
                left = min(RESULTS, 400 * at_once)
                figures[f"{name}, {at_once:,} at once, jobs/s"] = await _rate(once, left, at_once)
    return figures


async def _rate(once: Callable[[], Awaitable[None]], count: int, at_once: int) -> float:
    """How often a second, after some to warm up."""

    async def caller(times: int) -> None:
        for _ in range(times):
            await once()

    await asyncio.gather(*(caller(1) for _ in range(at_once)))
    began = time.monotonic()
    await asyncio.gather(*(caller(count // at_once) for _ in range(at_once)))
    return count // at_once * at_once / (time.monotonic() - began)


async def batches() -> Figures:
    """`submit_many` of 10,000 and `wait` for all of them."""
    async with stack(FLEET) as it, AsyncClient(it.url, tenant="batches", timeout=60.0) as moorage:
        await moorage.wait(await moorage.submit_many([()] * 2000, events="tenant", **ASKS))
        began = time.monotonic()
        jobs = await moorage.submit_many([()] * BATCH, events="tenant", **ASKS)
        answered = time.monotonic()
        results = await moorage.wait(jobs, wait=120)
        took = time.monotonic() - began
        assert all(result.state == "SUCCEEDED" for result in results)
    return {
        "submit_many of 10,000, to the terminal state, jobs/s": BATCH / took,
        "submit_many of 10,000, answered after s": answered - began,
    }


async def followers() -> Figures:
    """The leader's CPU a job: as `submit` asks for it, with the tenant's events alone; to each job's own subject too,
    where nobody is; and as `submit` asks for it, but with 1,000 followers of different jobs, who are there before these
    are submitted: in one client, as `run` hears them, and each on its job's own subject, as if in clients of their own.

    A follower works for itself too, and on few processors whatever works beside the leader costs it something. What it
    asks of the leader is the difference to a process that is as busy and hears nothing.
    """
    async with stack(FLEET) as it, AsyncClient(it.url, tenant="t0", timeout=60.0) as moorage:
        bare = await Callers.open(it, tenants=1)
        left: list[str] = []

        async def load(name: str, own: int = 0) -> float:
            """So many jobs, of which the first `own` have events of their own; how much CPU the leader took."""
            left[:] = [f"{name}-{number}" for number in reversed(range(FOLLOWED_JOBS))]
            already, cpu_s = bare.ended, it.cpu_s("scheduler")

            async def caller() -> None:
                while left:
                    key = left.pop()
                    events: Literal["job", "tenant"] = "job" if FOLLOWED_JOBS - len(left) <= own else "tenant"
                    await moorage.submit((), job=key, events=events, **ASKS)

            await asyncio.gather(*(caller() for _ in range(CALLERS)))
            await bare.until_ended(already + FOLLOWED_JOBS)
            return it.cpu_s("scheduler") - cpu_s

        async def followed(name: str, own: int, *how: str) -> tuple[float, float]:
            """The leader's CPU, and the share of a processor that the follower took."""
            async with _following(it, name, FOLLOWED, *how) as following:
                it.pids["follower"] = following.process.pid
                began_s, before_s = time.monotonic(), it.cpu_s("follower")
                took_s = await load(name, own)
                share = (it.cpu_s("follower") - before_s) / (time.monotonic() - began_s)
                assert await following.line() == f"over {5 * FOLLOWED}"
                return took_s, share

        async def beside(name: str, share: float) -> float:
            async with _process("busy.py", str(share)):
                return await load(name, CROWD)

        for turn in range(FOLLOWED_WARM):
            await load(f"w{turn}")
        alone = unheard = together = busy = each = 0.0
        for turn in range(FOLLOWED_TURNS):  # in turns, so that all meet the same machine
            alone += await load(f"a{turn}")
            unheard += await load(f"u{turn}", FOLLOWED_JOBS)
            took_s, share = await followed(f"t{turn}", CROWD)
            together += took_s
            busy += await beside(f"b{turn}", share)
            each += (await followed(f"f{turn}", FOLLOWED, "own"))[0]
        await bare.close()
    jobs = FOLLOWED_JOBS * FOLLOWED_TURNS
    return {
        "events to the tenant alone, scheduler's CPU µs a job": alone / jobs * 1e6,
        "events to the tenant, beside as busy a process, scheduler's CPU µs a job": busy / jobs * 1e6,
        "events to 1,000 followers of different jobs, scheduler's CPU µs a job": together / jobs * 1e6,
        "events to 1,000 followers on own subjects, scheduler's CPU µs a job": each / jobs * 1e6,
        "events to own subjects where nobody is, scheduler's CPU µs a job": unheard / jobs * 1e6,
        "1,000 followers / as busy a process that hears nothing, scheduler's CPU": together / busy,
        "1,000 followers / tenant alone, scheduler's CPU": together / alone,
        "1,000 followers on own subjects / tenant alone, scheduler's CPU": each / alone,
        "own subjects where nobody is / tenant alone, scheduler's CPU": unheard / alone,
    }


class Beside:
    """A process beside the stack, which says a line now and then."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(120):
            return (await self.process.stdout.readline()).decode().strip()


@contextlib.asynccontextmanager
async def _process(script: str, *arguments: str) -> AsyncIterator[Beside]:
    """A script of ours as a process, ready."""
    command = [sys.executable, str(HERE / script), *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    beside = Beside(process)
    try:
        assert await beside.line() == "ready"
        yield beside
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _following(
    it: Stack, prefix: str, count: int = FOLLOWED, *more: str
) -> contextlib.AbstractAsyncContextManager[Beside]:
    """`follower.py`, ready."""
    return _process("follower.py", it.url, "t0", prefix, str(count), *more)


async def stopped_follower() -> Figures:
    """A follower that reads no more, with 320 MiB under way to it: what it costs the leader and all the others."""
    async with stack(FLEET) as it, AsyncClient(it.url, tenant="t0", timeout=60.0) as moorage:
        bare = await Callers.open(it, tenants=1)

        async def load() -> float:
            already, cpu_s = bare.ended, it.cpu_s("scheduler")
            await bare.closed_loop(STOPPED_JOBS, CALLERS)
            await bare.until_ended(already + STOPPED_JOBS)
            return (it.cpu_s("scheduler") - cpu_s) / STOPPED_JOBS * 1e6

        for _ in range(2):  # as many ended jobs as the leader keeps whole
            await load()
        before_mib = it.rss_mib("scheduler")
        without, without_mib = await load(), it.rss_mib("scheduler")
        async with _following(it, "loud", 1, "output") as following:
            job = await moorage.submit(["hang"], job="loud-0", driver="noop")
            following.process.send_signal(signal.SIGSTOP)
            piece = b"x" * FLOOD_FRAME_BYTES
            for _ in range(FLOOD_BYTES // FLOOD_FRAME_BYTES):
                await bare.connection.send([(SUBJECTS.log("t0", "loud-0", 0), piece, "")])
            await bare.connection.flush()
            server_mib = it.rss_mib("server")
            beside, beside_mib = await load(), it.rss_mib("scheduler")
            log = it.folder / "nats" / "server.log"
            async with asyncio.timeout(60):
                while "Slow Consumer" not in log.read_text():  # noqa: ASYNC110  another process writes it
                    await asyncio.sleep(0.1)
            await job.cancel("enough")
            following.process.send_signal(signal.SIGCONT)
            assert await following.line() == "over 6"  # nothing missed, nothing twice, and it ended by itself
        await bare.close()
    return {
        "scheduler's CPU µs a job, no follower": without,
        "scheduler's CPU µs a job, beside a stopped follower": beside,
        "scheduler RSS grown by MiB, no follower": without_mib - before_mib,
        "scheduler RSS grown by MiB, beside a stopped follower": beside_mib - without_mib,
        "server RSS MiB, holding 320 MiB for a stopped follower": server_mib,
    }
