"""The SDK against a real server, scheduler and simulated workers that run real processes."""

from __future__ import annotations

import asyncio

import pytest

from moorage.client import (
    AsyncClient,
    GpuSpec,
    JobFailed,
    NotFound,
    Rejected,
    Request,
    Run,
)
from moorage.testing import Ran, SimFleet
from tests.scenes import in_virtual_time
from tests.system.cli.node import Node
from tests.waiting import until_state


async def test_a_handle_needs_nothing_but_the_id(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as moorage:
        await moorage.submit(Request(run=Run(driver="noop", argv=["hang"]), gpu=GpuSpec(count=3)), job="by-id")
    async with AsyncClient(node.url, tenant=unique) as other:
        job = other.job("by-id")
        await until_state(other.job("by-id"), "RUNNING")
        shown = await job.show()
        assert shown.request is not None
        assert shown.request.gpu is not None
        assert (shown.gpu, shown.request.gpu.count) == ("3xany", 3)
        assert (await job.explain()).state == "RUNNING"
        assert [row.job for row in (await other.ls(states=["RUNNING"])).jobs] == ["by-id"]
        await job.cancel()
        with pytest.raises(NotFound):
            await other.job("nobody").show()
        with pytest.raises(NotFound):
            [event async for event in other.job("nobody").events()]


async def test_jobs_that_speak_to_the_tenant_alone_are_followed_too(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as moorage:
        job = await moorage.submit(["sleep", "0.5"], driver="noop", events="tenant")
        states = [change.state async for event in job.events("60s") for change in event.changes]
        assert states[-2:] == ["RUNNING", "SUCCEEDED"]


async def test_an_operator_closes_and_opens_a_worker(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as moorage:
        drained = [await moorage.fleet.drain("sim-0001") for _ in range(2)]
        assert [(done.verb, done.worker, done.changed) for done in drained] == [
            ("drain", "sim-0001", True),
            ("drain", "sim-0001", False),
        ]
        assert await _state_of(moorage, "sim-0001") == "draining"
        assert (await moorage.fleet.cordon("sim-0001")).verb == "cordon"
        assert await _state_of(moorage, "sim-0001") == "cordoned"
        await moorage.fleet.uncordon("sim-0001")
        assert await _state_of(moorage, "sim-0001") == "up"
        with pytest.raises(NotFound):
            await moorage.fleet.drain("nobody")


@in_virtual_time
async def test_a_cancel_says_what_the_job_was_and_an_audit_what_was_compared() -> None:
    async with AsyncClient(transport=SimFleet("2x4xH100", script=lambda _: Ran(0, seconds=100))) as moorage:
        job = await moorage.submit(["x"], gpu=3, job="runs")
        await asyncio.sleep(5)
        audit = await moorage.fleet.audit()
        assert (audit.drift, audit.workers, audit.members, audit.leases) == ([], 2, 1, 3)
        with pytest.raises(NotFound):
            await moorage.job("unheard-of").cancel("enough")
        told = [await moorage.job(name).cancel("enough", before=True) for name in ("runs", "unheard-of")]
        assert [(each.job, each.cancelled, each.was) for each in told] == [
            ("runs", True, "RUNNING"),
            ("unheard-of", True, "UNKNOWN"),
        ]
        assert [each.remembered_s > 0 for each in told] == [False, True]
        with pytest.raises(Rejected, match="was cancelled before it came"):
            await moorage.submit(["x"], job="unheard-of")
        assert await moorage.job("unheard-of").uncancel()
        await moorage.submit(["x"], job="unheard-of")
        assert not await moorage.job("unheard-of").uncancel()
        with pytest.raises(JobFailed, match="was cancelled: enough"):
            await job.result()


async def test_the_fleet_frame_comes_by_itself(node: Node) -> None:
    async with AsyncClient(node.url) as moorage, asyncio.timeout(60):
        async for frame in moorage.fleet.frames():
            assert [worker.worker for worker in frame.workers if worker.simulated] == ["sim-0000", "sim-0001"]
            break


async def _state_of(client: AsyncClient, worker: str) -> str:
    return next(str(row.state) for row in (await client.fleet.show()).workers if row.worker == worker)
