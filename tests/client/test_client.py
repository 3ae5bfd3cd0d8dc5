"""The SDK against a real server, scheduler and simulated workers that run real processes."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from moorage.client import (
    AsyncClient,
    BatchRejected,
    Conflict,
    GpuSpec,
    JobFailed,
    NotFound,
    Rejected,
    Request,
    Run,
    TimedOut,
)
from moorage.schemas.job import TERMINAL
from moorage.testing import Ran, SimFleet, SimulatedClock
from tests.cli.node import Node
from tests.waiting import until, until_state


@pytest.mark.slow
async def test_a_job_is_followed_from_acceptance_to_its_end(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as moorage:
        job = await moorage.submit(["sh", "-c", "exit 0"], gpu="2xH100:80G")
        events = [event async for event in job.events(wait="90s")]
        changes = [change for event in events for change in event.changes]
        assert [change.rev for change in changes] == list(range(1, len(changes) + 1))
        assert [change.state for change in changes] == ["ACCEPTED", "PLACED", "CLAIMED", "RUNNING", "SUCCEEDED"]
        assert len(changes[1].gpus) == 2
        assert job.state == "SUCCEEDED"
        assert events[-1].simulated


async def test_a_finished_job_has_the_same_events_for_a_late_follower(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as moorage:
        await (await moorage.submit(["true"], gpu=1, job="late")).result("30s")
        events = [event async for event in moorage.job("late").events(wait="10s")]
        assert [change.state for event in events for change in event.changes][-1] == "SUCCEEDED"


@pytest.mark.slow
async def test_many_followers_of_many_jobs_see_each_transition_once(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as moorage:
        jobs = await moorage.submit_many([["sh", "-c", "true"]] * 24, gpu="1xH100")

        async def revisions(job_id: str) -> list[int]:
            return [change.rev async for event in moorage.job(job_id).events("150s") for change in event.changes]

        for seen in await asyncio.gather(*(revisions(job.job) for job in jobs)):
            assert seen == list(range(1, len(seen) + 1))
        assert [job.job for job in jobs] == sorted(job.job for job in jobs)


@pytest.mark.slow
async def test_a_result_carries_the_exit_code_and_the_end_of_the_output(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as moorage:
        job = await moorage.submit(["sh", "-c", "sleep 0.3; echo first; echo it broke >&2; exit 7"])
        with pytest.raises(JobFailed) as failed:
            await job.result("90s")
        assert (failed.value.exit_code, failed.value.code, failed.value.job) == (7, "job-failed", job.job)
        assert "it broke" in failed.value.log_tail
        assert "with code 7" in failed.value.why
        assert failed.value.fixes


async def test_a_result_waits_no_longer_than_its_timeout(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as moorage:
        job = await moorage.submit(["hang"], gpu=1, driver="noop")
        with pytest.raises(TimedOut) as late:
            await job.result("300ms")
        assert late.value.code == "timed-out"
        assert (await job.cancel("enough")).cancelled
        with pytest.raises(JobFailed) as cancelled:
            await job.result("90s")
        assert cancelled.value.state == "CANCELLED"


async def test_the_same_id_and_content_is_the_same_job(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as moorage:
        first = await moorage.submit(["hang"], driver="noop", job="one")
        again = await moorage.submit(["hang"], driver="noop", job="one")
        assert first.accepted is not None
        assert again.accepted is not None
        assert (first.accepted.duplicate, again.accepted.duplicate) == (False, True)
        with pytest.raises(Conflict) as conflict:
            await moorage.submit(["exit", "1"], driver="noop", job="one")
        assert (conflict.value.code, conflict.value.job) == ("conflict", "one")
        await first.cancel()


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
        assert [row.job for row in (await other.ls(["RUNNING"])).jobs] == ["by-id"]
        await job.cancel()
        with pytest.raises(NotFound):
            await other.job("nobody").show()
        with pytest.raises(NotFound):
            [event async for event in other.job("nobody").events()]


async def test_a_batch_is_one_frame_and_each_request_has_its_own_fate(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as moorage:
        await moorage.submit(["exit", "0"], driver="noop", job="taken")
        bodies = [{"job": f"b{at}", "run": {"driver": "noop"}} for at in range(3)]
        bodies[1] = {"job": "taken", "run": {"driver": "noop"}}
        with pytest.raises(BatchRejected) as refused:
            await moorage.submit_many(bodies)
        assert list(refused.value.problems) == [1]
        assert refused.value.problems[1].code == "conflict"
        assert [job.job if job else None for job in refused.value.jobs] == ["b0", None, "b2"]


async def test_a_request_is_checked_before_it_is_sent(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as moorage:
        with pytest.raises(Rejected) as refused:
            await moorage.submit(["true"], priority=101)
        assert refused.value.problem.field == "$.priority"
        with pytest.raises(Rejected):
            await moorage.submit("true")
        with pytest.raises(Rejected):
            moorage.job("no/id")


async def test_output_is_heard_whole_where_it_is_watched_before_the_submit(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as moorage, moorage.watch("loud", output=True) as watch:
        await moorage.submit(["sh", "-c", "seq 1 20000; echo done >&2"], job="loud")
        pieces = [item async for item in watch if not hasattr(item, "changes")]
        out = "".join(piece.text for piece in pieces if piece.stream == "out")
        assert out == "".join(f"{number}\n" for number in range(1, 20001))
        assert [piece.text for piece in pieces if piece.stream == "err" and piece.text] == ["done\n"]
        assert watch.state in TERMINAL


async def test_jobs_that_speak_to_the_tenant_alone_are_followed_too(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as moorage:
        job = await moorage.submit(["sleep", "0.5"], driver="noop", events="tenant")
        states = [change.state async for event in job.events("30s") for change in event.changes]
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


@pytest.mark.slow
async def test_a_running_job_says_what_it_uses_of_its_gpus(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as moorage:
        job = await moorage.submit(["sleep", "600"], gpu="2xH100")

        async def is_read() -> bool:
            return (await job.show()).use is not None

        await until(is_read, 60, "a renewal brings what the job uses")
        (row,) = (await moorage.ls()).jobs
        assert row.use is not None
        assert (row.use.devices, row.use.percent_max) == (2, 0)
        page = await job.use(last="1m", points=6)
        assert (page.worker, page.simulated, page.span_s) == (row.worker, True, 10.0)
        assert [len(line.percent) for line in page.devices] == [6, 6]
        await job.cancel()
        assert [result.state for result in await moorage.wait([job])] == ["CANCELLED"]
        with pytest.raises(Rejected, match="does not run now"):
            await job.use()


def test_a_cancel_says_what_the_job_was_and_an_audit_what_was_compared() -> None:
    async def scene() -> None:
        async with AsyncClient(transport=SimFleet("2x4xH100", script=lambda _: Ran(0, seconds=100))) as moorage:
            job = await moorage.submit(["x"], gpu=3, job="runs")
            await asyncio.sleep(5)
            audit = await moorage.fleet.audit()
            assert (audit.drift, audit.workers, audit.members, audit.leases) == ([], 2, 1, 3)
            told = [await moorage.job(name).cancel("enough") for name in ("runs", "unheard-of")]
            assert [(each.job, each.cancelled, each.was) for each in told] == [
                ("runs", True, "RUNNING"),
                ("unheard-of", True, "UNKNOWN"),
            ]
            assert [each.remembered_s > 0 for each in told] == [False, True]
            with pytest.raises(JobFailed, match="was cancelled: enough"):
                await job.result()

    SimulatedClock().run(scene())


async def test_the_fleet_frame_comes_by_itself(node: Node) -> None:
    async with AsyncClient(node.url) as moorage, asyncio.timeout(30):
        async for frame in moorage.fleet.frames():
            assert [worker["worker"] for worker in frame.workers if worker["simulated"]] == ["sim-0000", "sim-0001"]
            break


async def test_what_goes_out_is_the_wire(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as moorage:
        request = moorage.request(["x"], "3x2xH100@mps=50%", None, {"env": {"A": "1"}, "retries": 2})
        assert msgspec.to_builtins(request) == {
            "job": request.job,
            "replicas": 3,
            "gpu": {"count": 2, "model": "H100", "sharing": "mps", "share": {"compute_percent": 50}},
            "run": {"argv": ["x"], "env": {"A": "1"}},
            "retries": 2,
        }


async def _state_of(client: AsyncClient, worker: str) -> str:
    return next(str(row.state) for row in (await client.fleet.show()).workers if row.worker == worker)
