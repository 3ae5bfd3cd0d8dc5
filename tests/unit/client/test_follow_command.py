"""What becomes of jobs is told at least once, from where it was, whatever the teller, its server or its receiver do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from moorage.client import AsyncClient
from moorage.client.follow.telling import Reached, Telling, Told, states_wanted
from moorage.scheduler.core.config import Config
from moorage.testing import Ran, SimFleet, Task
from tests.scenes import in_virtual_time
from tests.waiting import until


def by_name(task: Task) -> Ran:
    return Ran(seconds=1, code=3 if task.job.startswith("bad") and task.replica % 2 == 0 else 0)


class Run:
    """One run of a teller; what it was told to note is a text, as in a file."""

    def __init__(self, client: AsyncClient, noted: str = "", **chosen: Any) -> None:
        self.told: list[Told] = []
        self.noted = noted
        self.saves = 0
        self.is_stuck = False  # its receiver takes nothing
        chosen["states"] = states_wanted(chosen.get("states", ()))
        reached = msgspec.json.decode(noted, type=Reached) if noted else Reached(client.tenant, **chosen)
        self.teller = Telling(client, reached, self._tell, self._save)
        self.begun = asyncio.Event()

    async def _tell(self, told: Told) -> None:
        await until(lambda: not self.is_stuck, 1e6, "it is taken")
        self.told.append(told)

    def _save(self, reached: Reached) -> None:
        self.saves += 1
        self.noted = msgspec.json.encode(reached).decode()

    @property
    def said(self) -> list[tuple[str, str]]:
        return [(each.job, each.state) for each in self.told]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.teller.run(self.begun.set, lambda _: None))
        try:
            if not self.is_stuck:
                await self.begun.wait()
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def run_jobs(client: AsyncClient, *names: str, **fields: Any) -> None:
    jobs = [await client.submit(["x"], gpu=1, job=name, **fields) for name in names]
    await client.wait(jobs)


@in_virtual_time
async def test_ends_are_told_from_the_first_run_on_and_none_from_before() -> None:
    async with AsyncClient(transport=SimFleet("8xH100", script=by_name)) as client:
        await run_jobs(client, "bad-before")
        run = Run(client)
        async with run.running():
            for count, name in enumerate(("good", "bad"), 1):
                await run_jobs(client, name)
                await until(lambda count=count: len(run.told) == count, 60, name)
            await run_jobs(client, "bad-many", replicas=4, labels={"a": "b"})
            await until(lambda: len(run.told) == 3, 60, "three ends")
        assert run.said == [("good", "SUCCEEDED"), ("bad", "FAILED"), ("bad-many", "FAILED")]
        bad, many = run.told[1], run.told[2]
        assert (bad.code, bad.replica, bad.attempt) == (3, -1, 1)
        assert bad.text.startswith("bad FAILED with code 3 on ")
        assert (many.code, many.replica, many.labels) == (3, -1, {"a": "b"})
        assert many.text.startswith("bad-many FAILED with code 3: 2 of 4 failed")


@in_virtual_time
async def test_the_end_of_a_job_that_had_left_memory_before_the_first_run_is_never_told() -> None:
    async with AsyncClient(transport=SimFleet("8xH100", script=by_name, config=Config(ended_max=0))) as client:
        await run_jobs(client, "bad-before")
        await asyncio.sleep(5)
        assert (await client.ls()).jobs == [], "it has left memory"
        run = Run(client)
        async with run.running():
            await run_jobs(client, "bad")
            await asyncio.sleep(120)
        assert run.said == [("bad", "FAILED")]


@in_virtual_time
async def test_labels_patterns_and_states_choose_what_is_told() -> None:
    async with AsyncClient(transport=SimFleet("8xH100", script=by_name)) as client:
        runs = [
            Run(client, labels={"sweep": "lr"}),
            Run(client, labels={"sweep": "*"}, states=["FAILED"]),
            Run(client, ids="b*-1", states=["RUNNING", "FAILED"]),
        ]
        async with contextlib.AsyncExitStack() as stack:
            for run in runs:
                await stack.enter_async_context(run.running())
            await run_jobs(client, "bad-1", labels={"sweep": "lr"}, replicas=2)
            await run_jobs(client, "bad-2", labels={"sweep": "wd"})
            await run_jobs(client, "good-1", labels={"sweep": "lr"})
            await run_jobs(client, "bad-3")
            await until(lambda: all(len(run.told) >= 2 for run in runs) and len(runs[2].told) == 3, 60, "all told")
            await asyncio.sleep(60)
        assert runs[0].said == [("bad-1", "FAILED"), ("good-1", "SUCCEEDED")]
        assert runs[1].said == [("bad-1", "FAILED"), ("bad-2", "FAILED")]
        assert runs[2].said == [("bad-1", "RUNNING"), ("bad-1", "RUNNING"), ("bad-1", "FAILED")]
        assert {told.replica for told in runs[2].told} == {0, 1, -1}


@in_virtual_time
async def test_the_next_run_tells_what_happened_between_though_it_left_memory() -> None:
    async with AsyncClient(transport=SimFleet("8xH100", script=by_name, config=Config(ended_max=0))) as client:
        run = Run(client)
        async with run.running():
            await run_jobs(client, "bad-0")
            await until(lambda: run.told, 60, "the first end")
        for number in range(1, 6):
            await run_jobs(client, f"bad-{number}")
        await asyncio.sleep(5)
        assert (await client.ls()).jobs == [], "they have left memory"
        second = Run(client, run.noted)
        async with second.running():
            await run_jobs(client, "bad-6")
            await until(lambda: len(second.told) == 6, 60, "the others")
            await asyncio.sleep(120)
        assert second.said == [(f"bad-{number}", "FAILED") for number in range(1, 7)]
        assert [told.code for told in second.told] == [3] * 6
        third = Run(client, second.noted)
        async with third.running():
            await asyncio.sleep(120)
        assert third.said == []


@in_virtual_time
async def test_what_is_not_taken_is_told_again_and_a_run_that_is_killed_in_between_leaves_nothing_out() -> None:
    async with AsyncClient(transport=SimFleet("8xH100", script=by_name)) as client:
        noted, told = "", list[tuple[str, str]]()
        first = Run(client)
        async with first.running():
            noted = first.noted
        for number in range(20):
            await run_jobs(client, f"j{number}")
            run = Run(client, noted)
            run.is_stuck = number % 3 == 0
            async with run.running():
                await asyncio.sleep(2)
            told += run.said
            noted = run.noted if number % 4 != 2 else noted  # at times it was killed before it noted anything
        last = Run(client, noted)
        async with last.running():
            told += last.said
        assert {job for job, _ in told} == {f"j{number}" for number in range(20)}


@pytest.mark.slow
@in_virtual_time
async def test_what_is_noted_stays_small_and_is_not_written_for_each() -> None:
    async with AsyncClient(transport=SimFleet("8xH100", script=by_name, config=Config(ended_max=5))) as client:
        run = Run(client)
        async with run.running():
            for number in range(200):
                await client.submit(["x"], gpu=1, job=f"j{number}")
            await until(lambda: len(run.told) == 200, 300, "all ends")
            await asyncio.sleep(20 * 60)
        assert len(set(run.said)) == 200
        assert len(msgspec.json.decode(run.noted)["jobs"]) <= 20
        assert run.saves < 150
