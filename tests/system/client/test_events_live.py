"""What `Job.events` promises, on real servers, schedulers and workers: no gap, no double, and it ends by itself.

While jobs run and fail and are tried again, the server is killed, the leader is killed, the follower is stopped until
the server cuts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

import moorage
from moorage.bus.embedded import EmbeddedServer
from moorage.client import AsyncClient, AsyncJob
from moorage.schemas.job import TERMINAL
from tests.system.live.stack import QUICK, RealProcess, Stack, stack
from tests.waiting import until

#: more than `feed.CROWD`: some are followed on their own subject, some by the tenant's frames
JOBS = 24
_ROOTS = os.pathsep.join(str(Path(root).parent) for root in moorage.__path__)

#: follows each job named, events and output, and says each transition as it comes, then that it ended
FOLLOWER = """
import asyncio, sys
from moorage.client import AsyncClient

async def follow(m, name):
    async for event in m.job(name).events("200s"):
        for change in event.changes:
            print(name, change.rev, change.state, flush=True)
    print(name, "over", flush=True)

async def listen(m, name):
    async for piece in m.job(name).logs("200s"):
        pass

async def main(url, prefix, *names):
    async with AsyncClient(url, prefix=prefix) as m:
        await asyncio.gather(*(work(m, name) for name in names for work in (follow, listen)))

asyncio.run(main(*sys.argv[1:]))
"""


class World:
    def __init__(self, made: Stack, moorage: AsyncClient, leader: RealProcess) -> None:
        self.made = made
        self.moorage = moorage
        self.leader = leader


@contextlib.asynccontextmanager
async def world(server: EmbeddedServer, prefix: str) -> AsyncIterator[World]:
    """Two schedulers, of which the first leads, and a worker whose jobs run nothing."""
    async with stack(server, prefix) as made, AsyncClient(made.url, prefix=prefix, timeout="60s") as client:
        leader = await made.scheduler(config=QUICK)
        await client.fleet.show()
        standby = await made.scheduler(config=QUICK)
        await until(lambda: "folded" in standby.words(), 90, "a standby")
        await made.agent("w", "12xH100", worker="w1", drivers=("noop",))
        await until(lambda: _is_up(client), 90, "the worker is up")
        yield World(made, client, leader)


async def _is_up(client: AsyncClient) -> bool:
    return [row.state for row in (await client.fleet.show()).workers] == ["up"]


async def followed(job: AsyncJob, seen: list[int]) -> list[str]:
    """The states of a job from its first to its last, each revision exactly once; returns because the job is over."""
    states: list[str] = []
    async for event in job.events("200s"):
        seen.append(event.rev)
        for change in event.changes:
            assert change.rev == len(states) + 1, f"{job.job}: revision {change.rev} after {len(states)}"
            states.append(change.state)
    return states


async def through(w: World, disturb: Callable[[], Awaitable[None]]) -> None:
    """Follow jobs that fail twice and then succeed, or not, and `disturb` once each of them runs."""
    words = [["sleep", "1", str(number % 2)] for number in range(JOBS)]
    jobs = await w.moorage.submit_many(words, gpu=1, driver="noop", retries=2)
    seen: list[list[int]] = [[] for _ in jobs]
    following = [asyncio.create_task(followed(job, revs)) for job, revs in zip(jobs, seen, strict=True)]
    late = asyncio.create_task(_later(w.moorage, jobs[0].job, following[0]))
    await until(lambda: all(seen) and max(map(max, seen)) >= 4, 90, "some of them run")
    await disturb()
    for number, states in enumerate(await asyncio.gather(*following)):
        assert states[-1] == ("FAILED" if number % 2 else "SUCCEEDED"), states
        assert states.count("RUNNING") == (3 if number % 2 else 1), states
        assert [state for state in states if state in TERMINAL] == states[-1:]
    assert await late == await following[0]
    shown = [await job.show() for job in jobs]
    assert [revs[-1] for revs in seen] == [each.rev for each in shown]


async def _later(moorage: AsyncClient, job: str, first: asyncio.Task[list[str]]) -> list[str]:
    """A follower that comes when all is over has the same history."""
    await asyncio.wait({first})
    return await followed(moorage.job(job), [])


@pytest.mark.slow
async def test_events_go_on_without_a_gap_when_the_server_is_killed(
    fresh_server: EmbeddedServer, fresh_data_dir: Path, unique: str
) -> None:
    async with contextlib.AsyncExitStack() as servers, world(fresh_server, unique) as w:

        async def kill_the_server() -> None:
            await fresh_server.kill()
            again = await EmbeddedServer.start(fresh_data_dir, port=fresh_server.port)
            servers.push_async_callback(again.stop)

        await through(w, kill_the_server)


@pytest.mark.slow
async def test_events_go_on_without_a_gap_when_another_leader_takes_over(
    nats_server: EmbeddedServer, unique: str
) -> None:
    async with world(nats_server, unique) as w:

        async def kill_the_leader() -> None:
            await w.leader.kill()
            await until(lambda: _epoch(w.moorage), 90, "a takeover")

        await through(w, kill_the_leader)


async def _epoch(moorage: AsyncClient) -> bool:
    return bool((await moorage.fleet.show()).epoch >= 2)


@pytest.mark.slow
async def test_a_follower_that_was_stopped_until_the_server_cut_it_goes_on_without_a_gap(
    fresh_server: EmbeddedServer, fresh_data_dir: Path, unique: str
) -> None:
    log, config = fresh_data_dir / "server.log", fresh_data_dir / "nats.conf"
    config.write_text(f'{config.read_text()}write_deadline: "1s"\n')  # else a reader has 10 s
    os.kill(fresh_server.pid, signal.SIGHUP)
    await until(lambda: "Reloaded server configuration" in log.read_text(), what="the server has read it")
    async with world(fresh_server, unique) as w:
        for name in ("loud", "quiet"):
            await w.moorage.submit(["hang"], gpu=1, driver="noop", job=name)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", FOLLOWER, w.made.url, unique, "loud", "quiet",
            stdout=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONPATH": _ROOTS},
        )  # fmt: skip
        assert process.stdout is not None
        history: dict[str, list[str]] = {"loud": [], "quiet": []}
        try:
            async with asyncio.timeout(200):
                while not all("RUNNING" in states for states in history.values()):
                    await _read(process.stdout, history)
                process.send_signal(signal.SIGSTOP)
                subject = w.moorage._wire.subjects.log("default", "loud", 0)
                flood = b"x" * (512 * 1024)
                for _ in range(40):  # more than the kernel's buffers hold
                    await w.moorage._wire.link.send([(subject, flood, "")])
                for name in ("loud", "quiet"):  # nobody else waits for the one that reads no more
                    await w.moorage.job(name).cancel("enough")
                    assert (await _ended(w.moorage, name)) == "CANCELLED"
                await until(lambda: "Slow Consumer" in log.read_text(), 90, "the server cuts it")
                process.send_signal(signal.SIGCONT)
                while not all(states[-1] == "over" for states in history.values()):
                    await _read(process.stdout, history)
                assert await process.wait() == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()
        for states in history.values():
            assert states == ["ACCEPTED", "PLACED", "CLAIMED", "RUNNING", "CANCELLING", "CANCELLED", "over"]


async def _read(stream: asyncio.StreamReader, history: dict[str, list[str]]) -> None:
    name, *rest = (await stream.readline()).decode().split()
    if rest != ["over"]:
        assert int(rest.pop(0)) == len(history[name]) + 1
    history[name] += rest


async def _ended(moorage: AsyncClient, name: str) -> str:
    [result] = await moorage.wait([moorage.job(name)], wait="90s")
    return result.state
