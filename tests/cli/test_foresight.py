"""A job that waits is told when it starts: in the answer to its submit, by `explain`, by progress and event."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moorage.client import AsyncClient
from tests.cli.node import Node

RUNS_S = 8
GPUS = 8  # of the node, which nobody else uses while these run


async def learn(client: AsyncClient) -> None:
    """Three runs of a workload, so that the leader knows how long such runs take."""
    jobs = [await client.submit(["sleep", str(RUNS_S)], gpu="1xH100") for _ in range(3)]
    results = await client.wait(jobs, "60s")
    assert [result.state for result in results] == ["SUCCEEDED"] * 3


async def fill(client: AsyncClient, runs_s: int) -> list[Any]:
    """The whole fleet taken."""
    jobs = [await client.submit(["sleep", str(runs_s)], gpu="1xH100") for _ in range(GPUS)]
    for job in jobs:
        async for event in job.events():
            if event.state == "RUNNING":
                break
    return jobs


@pytest.mark.slow
async def test_when_it_starts_is_told_everywhere(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as client:
        await learn(client)
        running = await fill(client, RUNS_S)
        waits = await client.submit(["sleep", "0"], gpu="1xH100")
        assert waits.accepted is not None
        told = waits.accepted.waiting
        assert told is not None
        assert (told["reason"], told["position"]) == ("busy", 1)
        explained = await waits.explain()
        assert 0 <= explained["starts"]["p50_ms"] <= explained["starts"]["p90_ms"] <= (RUNS_S + 2) * 1000
        shown = await node.run("explain", waits.id, tenant=unique)
        assert explained["starts"]["runs"] == 3
        assert "(the median, by 3 runs seen)" in shown.out
        assert "nine times in ten" not in shown.out, "three runs do not tell that"
        ran = await node.run("run", "--gpu", "1xH100", "--", "sleep", "0", tenant=unique)
        assert ran.code == 0
        assert "2nd of 2" in ran.err or "1st of 1" in ran.err, ran.err
        await client.wait([waits, *running], "30s")


@pytest.mark.slow
async def test_a_follower_hears_why_it_waits_when_that_changes(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as client:
        running = await fill(client, 60)
        first = await client.submit(["sleep", "0"], gpu="1xH100")
        second = await client.submit(["sleep", "0"], gpu="1xH100")
        heard = asyncio.create_task(_first_waiting(second))
        assert (await second.explain())["position"] == 2  # what differs from this is news
        await first.cancel()
        told = await asyncio.wait_for(heard, 30)
        assert told["position"] == 1
        for job in (second, *running):
            await job.cancel()
        await client.wait([second, *running], "30s")  # whoever comes next has the fleet for itself


@pytest.mark.slow
async def test_explain_and_event_name_the_same_fix(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as client:
        await client.admin.limit(gpus=2, tenant=unique)
        runs = [await client.submit(["sleep", "60"], gpu="1xH100") for _ in range(2)]
        waits = await client.submit(["sleep", "0"], gpu="1xH100")
        assert waits.accepted is not None
        assert waits.accepted.waiting is not None
        command = f"moorage admin limit --tenant {unique} --gpus"
        assert (waits.accepted.waiting["reason"], "fixes" in waits.accepted.waiting) == ("limit", False)
        assert (await waits.explain())["fixes"][0]["command"] == f"{command} 3"
        shown = await node.run("explain", waits.id, tenant=unique)
        assert f"fix: ask your operator for 3 GPUs: {command} 3" in shown.err
        heard = asyncio.create_task(_first_waiting(waits))
        assert (await waits.explain())["position"] == 1  # what differs from this is news
        before = await client.submit(["sleep", "0"], gpu="1xH100", priority=90)
        told = await asyncio.wait_for(heard, 30)
        fix = told["fixes"][0]
        assert fix["command"] == f"{command} 4"
        assert fix["say"] == "ask your operator for 4 GPUs, 1 of them for jobs of yours before it"
        await before.cancel()
        for job in (waits, *runs):
            await job.cancel()
        await client.admin.limit(gpus=0, tenant=unique)


async def _first_waiting(job: Any) -> dict[str, Any]:
    async for event in job.events():
        if event.waiting is not None:
            found: dict[str, Any] = event.waiting
            return found
    raise AssertionError("it never heard why it waits")
