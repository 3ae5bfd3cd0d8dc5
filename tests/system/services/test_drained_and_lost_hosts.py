"""A service as a job on several hosts: its hosts are drained in turn, its schedulers and workers are killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from moorage.bus.connection import Connection, connect
from moorage.bus.embedded import EmbeddedServer
from moorage.bus.errors import BusError
from tests.system.live.stack import ANSWER_S, QUICK, Caller, RealProcess, Stack, caller, stack, unique_prefix
from tests.system.services.members import error_of
from tests.system.services.test_kills import caller as calling
from tests.system.services.test_scaling_live import service
from tests.waiting import until

HOSTS: Final = 4
CALLERS: Final = 6
#: numbers of calls that only ask whether somebody answers
_FIRST: Final = itertools.count(10**9)
CALLS: Final = int(os.environ.get("MOORAGE_CALLS", "1500"))


class Hosts:
    """Schedulers, four hosts, and on each a member of one service."""

    def __init__(self, made: Stack, one: Caller, folder: Path) -> None:
        self.made = made
        self.folder = folder
        self.one = one
        self.schedulers: list[RealProcess] = []
        self.agents: dict[str, RealProcess] = {}

    async def scheduler(self) -> None:
        self.schedulers.append(await self.made.scheduler(config=QUICK))

    async def agent(self, name: str, gpus: str = "2xH100", leave: float = 0.0) -> None:
        self.agents[name] = await self.made.agent(f"s-{name}", gpus, worker=name, drivers=["process"], leave=leave)

    async def members(self) -> dict[str, int]:
        """By worker, how many replicas run there."""
        rows = (await self.one.show("s-noted"))["replica_states"]
        return dict(Counter(row["worker"] for row in rows if row["state"] == "RUNNING"))


@contextlib.asynccontextmanager
async def hosts(
    server: EmbeddedServer, folder: Path, of: int = HOSTS, gpus: int = 2, leave: float = 0.0, **fields: object
) -> AsyncIterator[Hosts]:
    async with stack(server, unique_prefix()) as made, caller(made) as one:
        found = Hosts(made, one, folder)
        await found.scheduler()
        for number in range(of):
            await found.agent(f"w{number}", f"{HOSTS * gpus // of}xH100", leave)
        await one.workers_up(*found.agents)
        body = service("noted", replicas=HOSTS, gpu={"count": gpus}, on_partition="keep", **fields)
        body["run"]["env"]["RUNS"] = str(folder / "runs")
        body["run"]["restart"] = "always"
        body["service"]["concurrency"] = 2
        answer = await one.api("submit", body)
        assert answer["kind"] == "accepted", answer
        yield found


@pytest.mark.slow
async def test_no_call_is_lost_while_each_host_is_drained_in_turn(nats_server: EmbeddedServer, tmp_path: Path) -> None:
    async with hosts(nats_server, tmp_path) as found, await connect(found.made.url, "caller") as connection:
        one, subject = found.one, found.made.subjects.call("acme", "noted")
        await until(lambda: _all(found, HOSTS), ANSWER_S, "a member on each host")
        told, stop, number = Counter[str](), False, 0

        async def load() -> None:
            nonlocal number
            while not stop:
                number += 1
                told[error_of(await connection.request(subject, str(number).encode(), ANSWER_S))] += 1

        await _answers(connection, subject)
        callers = [asyncio.create_task(load()) for _ in range(CALLERS)]
        for name in found.agents:
            answer = await one.admin("drain", {"worker": name, "within_s": 5, "by": "ana"})
            assert answer["kind"] == "done", answer
            await until(lambda name=name: _left(found, name), ANSWER_S, f"no member on {name}")
            assert (await one.admin("uncordon", {"worker": name, "by": "ana"}))["kind"] == "done"
            await until(lambda: _all(found, HOSTS), ANSWER_S, "a member on each host again")
        stop = True
        await asyncio.gather(*callers)
        assert set(told) == {""}, told
        runs = Counter((tmp_path / "runs").read_text().split())
        assert max(runs.values()) == 1
        assert told.total() == number


@pytest.mark.slow
@pytest.mark.parametrize("how", ["drain", "SIGTERM"])
async def test_a_host_that_all_members_have_to_leave_leaves_no_call_without_an_answer(
    nats_server: EmbeddedServer, tmp_path: Path, how: str
) -> None:
    async with (
        hosts(nats_server, tmp_path, 1, 1, leave=2 * ANSWER_S) as found,
        await connect(found.made.url, "caller") as connection,
    ):
        one, subject = found.one, found.made.subjects.call("acme", "noted")
        await until(lambda: _all(found, HOSTS), ANSWER_S, "all members on the host")
        await found.agent("w1", f"{HOSTS}xH100")
        await one.workers_up("w1")
        told, stop = Counter[str](), False
        numbers = itertools.count(1)

        async def load() -> None:
            while not stop:
                told[error_of(await connection.request(subject, str(next(numbers)).encode(), ANSWER_S))] += 1

        await _answers(connection, subject)
        callers = [asyncio.create_task(load()) for _ in range(CALLERS)]
        if how == "drain":
            assert (await one.admin("drain", {"worker": "w0", "by": "ana"}))["kind"] == "done"
        else:
            assert await asyncio.wait_for(found.agents["w0"].terminate(), 2 * ANSWER_S) == 0
        await until(lambda: _moved(found, "w1"), ANSWER_S, "all members on the other host")
        stop = True
        await asyncio.gather(*callers)
        assert set(told) == {""}, told


@pytest.mark.slow
async def test_calls_have_one_outcome_while_schedulers_and_workers_are_killed(
    nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    async with hosts(nats_server, tmp_path) as found, await connect(found.made.url, "caller") as connection:
        subject = found.made.subjects.call("acme", "noted")
        await found.scheduler()  # a standby
        await until(lambda: _all(found, HOSTS), ANSWER_S, "a member on each host")
        await _answers(connection, subject)
        told, dice, kills = Counter[str](), random.Random(11), Counter[str]()
        numbers = iter(range(1_000_000))

        def take() -> int | None:
            number = next(numbers)
            return number if number < CALLS or kills.total() < 9 else None

        callers = asyncio.gather(*(calling(connection, subject, take, told) for _ in range(CALLERS)))
        while not callers.done():
            how = ("scheduler", "worker", "member")[kills.total() % 3]
            if how == "scheduler":
                await found.schedulers.pop(0).kill()
                await found.scheduler()
            elif how == "worker":  # its supervisor keeps the member
                name = dice.choice(sorted(found.agents))
                await found.agents[name].kill()
                await found.agent(name)
            else:
                os.kill(await _a_member(found, dice), signal.SIGKILL)
            kills[how] += 1
            await found.one.leader()
            await until(lambda: _all(found, HOSTS), ANSWER_S, "a member on each host again")
        await callers
        print(told, kills)
        runs = Counter((tmp_path / "runs").read_text().split())
        assert max(runs.values()) == 1, "none runs twice"
        assert told["WRONG"] == 0
        assert told["disconnected"] == told["nobody serves"] == 0
        # a killed member takes with it at most what ran and what waited there; schedulers and workers take none
        assert told["timed out"] + told["member-died"] <= 8 * kills["member"], told
        assert told["right"] >= 0.9 * told.total()


@pytest.mark.long
@pytest.mark.slow
async def test_calls_go_on_without_a_scheduler_and_with_keep_beyond_the_lease(
    nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    async with hosts(nats_server, tmp_path) as found, await connect(found.made.url, "caller") as connection:
        subject = found.made.subjects.call("acme", "noted")
        await until(lambda: _all(found, HOSTS), ANSWER_S, "a member on each host")
        await _answers(connection, subject)
        before = await found.members()
        await found.schedulers.pop().kill()
        loop, number = asyncio.get_running_loop(), 0
        ends = loop.time() + QUICK["lease_s"] + QUICK["grace_s"] + 2
        while loop.time() < ends:
            number += 1
            assert error_of(await connection.request(subject, str(number).encode(), ANSWER_S)) == ""
        await found.scheduler()
        await found.one.leader(2)
        await until(lambda: _all(found, HOSTS), ANSWER_S, "its members are the scheduler's again")
        assert await found.members() == before
        runs = Counter((tmp_path / "runs").read_text().split())
        assert max(runs.values()) == 1


async def _answers(connection: Connection, subject: str) -> None:
    async def answers() -> bool:
        with contextlib.suppress(BusError):
            await connection.request(subject, str(next(_FIRST)).encode(), 5.0)
            return True
        return False

    await until(answers, ANSWER_S, "an answer")


async def _all(found: Hosts, members: int) -> bool:
    return sum((await found.members()).values()) == members


async def _left(found: Hosts, name: str) -> bool:
    return name not in await found.members()


async def _moved(found: Hosts, name: str) -> bool:
    """Whether all members are on this worker, and nothing is left of those that they replace."""
    rows = (await found.one.show("s-noted"))["replica_states"]
    return [row.get("worker") for row in rows] == [name] * HOSTS


async def _a_member(found: Hosts, dice: random.Random) -> int:
    """The pid of a process `moorage serve` of the service."""
    mark = str(found.folder).encode()
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if b"functions:noted" in (entry / "cmdline").read_bytes() and mark in (entry / "environ").read_bytes():
                    pids.append(int(entry.name))
    return dice.choice(sorted(pids))
