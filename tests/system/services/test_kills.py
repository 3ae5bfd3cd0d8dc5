"""Calls under kills: each is answered once, right or with an error, or times out at its caller and is counted.

`MOORAGE_CALLS=100000` makes as many calls as the longest run does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from moorage.bus.connection import Connection, connect
from moorage.bus.errors import BusError, Disconnected, NoResponders, RequestTimeout
from moorage.system.proctree import boottime_s
from tests.cluster import Cluster
from tests.servers import MortalServer
from tests.system.services.members import MemberProcess, error_of, member
from tests.waiting import until

#: at least; they go on until enough members have ended
CALLS: Final = int(os.environ.get("MOORAGE_CALLS", "1500"))
KILLS: Final = 6
MEMBERS: Final = 4
#: how long a caller waits for its answer
PATIENCE_S: Final = 5.0
AT_ONCE: Final = 12


class Service:
    """As many members as there should be: one that has ended is followed by another."""

    def __init__(self, urls: list[str], prefix: str, folder: Path) -> None:
        self.urls = urls
        self.prefix = prefix
        self.folder = folder
        self.members: list[MemberProcess] = []
        self.killed_pids: list[int] = []
        self.kills: Counter[str] = Counter()
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Service:
        await asyncio.gather(*(self.add(at) for at in range(MEMBERS)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def add(self, at: int) -> None:
        made = member(
            self.urls[at % len(self.urls)], self.folder, "functions:noted", "--name", "noted", "--concurrency", "2",
            prefix=self.prefix, env={"RUNS": str(self.folder / "runs")},
        )  # fmt: skip
        one = await self._stack.enter_async_context(made)
        await one.ready()
        self.members.append(one)

    async def harm(self, dice: random.Random) -> None:
        """End one member in one of three ways, and start another once it is gone."""
        one = dice.choice(self.members)
        how = ("program killed", "member killed", "asked to end")[self.kills.total() % 3]
        self.kills[how] += 1
        program = one.program()
        self.killed_pids.append(program)
        if how == "program killed":
            os.kill(program, signal.SIGKILL)
        elif how == "member killed":
            one.process.kill()
        else:
            one.process.terminate()
        await one.ended()
        self.members.remove(one)
        await self.add(dice.randrange(9))


async def caller(connection: Connection, subject: str, take: Callable[[], int | None], told: Counter[str]) -> None:
    """Call until there is nothing left to call, each number once, and count what came back."""
    while (number := take()) is not None:
        data = str(number).encode()
        try:
            answer = await connection.request(subject, data, PATIENCE_S)
        except RequestTimeout:
            told["timed out"] += 1
        except NoResponders:
            told["nobody serves"] += 1
        except Disconnected:
            told["disconnected"] += 1
        except BusError as error:
            told[repr(error)] += 1
        else:
            kind = error_of(answer)
            told[kind or ("right" if answer.data == data[::-1] else "WRONG")] += 1


async def calls_through(service: Service, url: str, also: Callable[[], object] | None = None) -> Counter[str]:
    """Make all calls, while members end one after the other."""
    numbers = itertools.count()
    told: Counter[str] = Counter()
    dice = random.Random(7)

    def take() -> int | None:
        number = next(numbers)
        return number if number < CALLS or service.kills.total() < KILLS else None

    subject = f"{service.prefix}.call.default.noted"
    async with await connect(url, "caller") as connection:
        calling = asyncio.gather(*(caller(connection, subject, take, told) for _ in range(AT_ONCE)))
        while not calling.done():
            await service.harm(dice)
        await calling
    return told


def judged(service: Service, told: Counter[str]) -> None:
    runs = Counter((service.folder / "runs").read_text().split())
    print(f"{told.total()} calls, {sum(runs.values())} runs: {dict(told)}; {dict(service.kills)}")
    assert told.total() >= CALLS
    assert max(runs.values()) == 1, "none runs twice"
    assert told["WRONG"] == 0
    assert told["right"] + told["failed"] <= len(runs)
    # a killed member takes with it at most what ran and what waited there: 2 and 4, and what was on its way
    assert told["timed out"] <= 12 * service.kills["member killed"], told
    assert told["member-died"] <= 2 * service.kills["program killed"]
    assert told["right"] >= 0.9 * told.total()


async def gone(pids: list[int]) -> None:
    """No program outlives its member."""
    until_s = boottime_s() + 30
    while any(Path(f"/proc/{pid}/cmdline").exists() and b"noted" in Path(f"/proc/{pid}/cmdline").read_bytes()
              for pid in pids):  # fmt: skip
        assert boottime_s() < until_s, "a program lives on"
        await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_each_call_has_one_outcome_whatever_is_killed(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with Service([nats_url], unique, tmp_path) as service:
        told = await calls_through(service, nats_url)
        assert told["nobody serves"] == 0
        judged(service, told)
        await gone(service.killed_pids)


@pytest.mark.long
@pytest.mark.slow
async def test_and_on_three_servers_whose_members_and_callers_are_apart(unique: str, tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    cluster = await Cluster.start(tmp_path / "cluster")
    try:
        urls = [Cluster.url_at([port]) for port in cluster.ports]
        async with Service(urls, unique, tmp_path) as service:
            told = await calls_through(service, urls[2])
            judged(service, told)
            await gone(service.killed_pids)
    finally:
        await cluster.stop()


@pytest.mark.slow
async def test_and_through_a_restart_of_the_server(mortal_server: MortalServer, unique: str, tmp_path: Path) -> None:
    told: Counter[str] = Counter()

    async def restart() -> None:
        await until(lambda: told.total() > CALLS // 4, what="a quarter of the calls are over")
        await mortal_server.kill()
        await mortal_server.start()

    async with Service([mortal_server.url], unique, tmp_path):
        restarting = asyncio.create_task(restart())
        left = iter(range(CALLS))
        subject = f"{unique}.call.default.noted"
        async with await connect(mortal_server.url, "caller") as connection:
            callers = [caller(connection, subject, lambda: next(left, None), told) for _ in range(AT_ONCE)]
            await asyncio.gather(*callers)
        await restarting
        runs = Counter((tmp_path / "runs").read_text().split())
        print(dict(told), len(runs))
        assert told.total() == CALLS
        assert max(runs.values()) == 1
        assert told["WRONG"] == 0
        assert told["disconnected"] + told["timed out"] <= 2 * AT_ONCE
