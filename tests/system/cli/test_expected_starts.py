"""A job that waits is told when it starts: in the answer to its submit, by `explain`, by progress and event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from moorage.client import AsyncClient, AsyncJob
from tests.system.cli.node import Lines, Node, start
from tests.waiting import until_state

#: longer than what is asked meanwhile takes on a busy machine
RUNS_S = 12
GPUS = 8  # of the node, which nobody else uses while these run


async def learn(client: AsyncClient) -> None:
    """Three runs of a workload, so that the leader knows how long such runs take."""
    jobs = [await client.submit(["sleep", str(RUNS_S)], gpu="1xH100") for _ in range(3)]
    results = await client.wait(jobs, "120s")
    assert [result.state for result in results] == ["SUCCEEDED"] * 3


async def fill(client: AsyncClient) -> list[AsyncJob]:
    """The whole fleet taken."""
    jobs = [await client.submit(["sleep", str(RUNS_S)], gpu="1xH100") for _ in range(GPUS)]
    await asyncio.gather(*(until_state(job, "RUNNING") for job in jobs))
    return jobs


@pytest.mark.slow
async def test_when_it_starts_is_told_everywhere(node_of_its_own: Node, unique: str) -> None:
    node = node_of_its_own  # a job that waits elsewhere would have a place in the queue before these
    async with AsyncClient(node.url, tenant=unique) as client:
        await learn(client)
        running = await fill(client)
        waits = await client.submit(["sleep", "0"], gpu="1xH100")
        assert waits.accepted is not None
        told = waits.accepted.waiting
        assert told is not None
        assert (told["reason"], told["position"]) == ("busy", 1)
        explained = await waits.explain()
        assert explained.starts is not None
        assert explained.starts.p90_ms is None, "three runs are too few for an interval"
        assert 0 <= explained.starts.p50_ms <= (RUNS_S + 30) * 1000
        shown = await node.run("explain", waits.job, tenant=unique)
        assert explained.starts.runs == 3
        assert "(the median, from 3 earlier runs of the same command)" in shown.out
        assert "8 of 10" not in shown.out, "three runs do not tell that"
        one_more = await start("run", "--gpu", "1xH100", "--", "sleep", "0", env=node.env(unique))
        await Lines(one_more.stderr).until("2nd of 2")
        for job in running:
            await job.cancel()
        await one_more.communicate()
        assert one_more.returncode == 0
        await client.wait([waits, *running], "90s")


@pytest.mark.slow
async def test_explain_and_event_name_the_same_fix(node_of_its_own: Node, unique: str) -> None:
    node = node_of_its_own  # a job that waits elsewhere would have a place in the queue before these
    async with AsyncClient(node.url, tenant=unique) as client:
        await client.admin.limit(gpus=2, tenant=unique)
        runs = [await client.submit(["sleep", "600"], gpu="1xH100") for _ in range(2)]
        waits = await client.submit(["sleep", "0"], gpu="1xH100")
        assert waits.accepted is not None
        assert waits.accepted.waiting is not None
        command = f"moorage admin limit --tenant {unique} --gpus"
        assert (waits.accepted.waiting["reason"], "fixes" in waits.accepted.waiting) == ("limit", False)
        assert (await waits.explain()).fixes[0].command == f"{command} 3"
        shown = await node.run("explain", waits.job, tenant=unique)
        assert f"fix: ask your operator for 3 GPUs: {command} 3" in shown.err
        news = _news(waits)
        heard = asyncio.ensure_future(anext(news))
        assert (await waits.explain()).position == 1  # what differs from this is news
        before = None
        async with asyncio.timeout(90):
            while True:  # a leader that was slow to find fixes a moment ago tells the next news without any
                if before is None:
                    before = await client.submit(["sleep", "0"], gpu="1xH100", priority=90)
                else:
                    await before.cancel()
                    before = None
                told = await heard
                if "fixes" in told:
                    break
                heard = asyncio.ensure_future(anext(news))
        [fix] = [fix for fix in told["fixes"] if fix["command"].startswith(command)]
        others = ", 1 of them for your jobs before it" if told["position"] == 2 else ""
        needed = 2 + told["position"]
        assert fix["command"] == f"{command} {needed}"
        assert fix["say"] == f"ask your operator for {needed} GPUs{others}"
        if before is not None:
            await before.cancel()
        for job in (waits, *runs):
            await job.cancel()
        await client.admin.limit(gpus=0, tenant=unique)


async def _news(job: Any) -> AsyncIterator[dict[str, Any]]:
    """Why it waits, each time that its followers are told."""
    async for event in job.events():
        if event.waiting is not None:
            yield event.waiting
