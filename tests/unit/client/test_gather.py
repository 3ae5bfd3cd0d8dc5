"""Many jobs waited for at once: over one subscription, from whatever of their history was seen or missed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from moorage.client import AsyncClient, JobFailed, NoScheduler, NotFound, Rejected, TimedOut
from moorage.client.follow.follower import CROWD
from moorage.client.follow.gathering import Gathering
from moorage.client.follow.job_history import AHEAD_MAX
from moorage.schemas.errors import problem
from moorage.schemas.frames import Accepted, Answer, Event
from moorage.testing import Ran, SimFleet, Task
from moorage.testing.bus.bus import Faults
from tests.scenes import in_virtual_time
from tests.unit.client.scripted_scheduler import ScriptedScheduler, change, shown
from tests.waiting import until


def by_words(task: Task) -> Ran:
    return Ran(int(task.argv[0]), seconds=float(task.argv[1]))


@in_virtual_time
async def test_jobs_come_as_they_end() -> None:
    async with AsyncClient(transport=SimFleet("8xH100", script=by_words)) as moorage:
        jobs = await moorage.submit_many([["0", str(seconds)] for seconds in (5, 1, 3)], gpu=1)
        assert [job.job async for job in moorage.as_completed(jobs)] == [jobs[at].job for at in (1, 2, 0)]
        assert (await jobs[0].result()).code == 0


@in_virtual_time
async def test_a_batch_is_one_frame_and_one_commit() -> None:
    async with AsyncClient(transport=SimFleet("8xH100", script=by_words)) as moorage:
        before = (await moorage._wire.operate("fleet")).ledger
        jobs = await moorage.submit_many([["0", "100"]] * 1000, gpu=1)
        accepted = [job.accepted for job in jobs if job.accepted is not None]
        assert len({each.ledger for each in accepted}) == 1
        assert len(accepted) == 1000
        assert accepted[0].ledger - before <= 2  # a heartbeat may have come between


@in_virtual_time
async def test_results_come_in_the_order_of_the_jobs_failed_ones_among_them() -> None:
    async with AsyncClient(transport=SimFleet("8xH100", script=by_words)) as moorage:
        jobs = await moorage.submit_many([["0", "1"], ["7", "0"], ["-9", "0"]], gpu=1)
        results = await moorage.wait([*jobs, jobs[0]])
        assert [(each.state, each.code) for each in results] == [
            ("SUCCEEDED", 0),
            ("FAILED", 7),
            ("FAILED", -9),
            ("SUCCEEDED", 0),
        ]
        with pytest.raises(JobFailed):
            await jobs[1].result()
        assert await moorage.wait([]) == []


@in_virtual_time
async def test_jobs_that_are_over_already_are_found_one_by_one_and_by_the_list() -> None:
    async with AsyncClient(transport=SimFleet("8xH100", script=by_words)) as moorage:
        jobs = await moorage.submit_many([[str(at % 2), "0"] for at in range(40)], gpu=1)
        await moorage.wait(jobs)
        for crowd in (3, 40):
            handles = [moorage.job(job.job) for job in jobs[:crowd]]
            assert [each.code for each in await moorage.wait(handles)] == [at % 2 for at in range(crowd)]
        with pytest.raises(NotFound):
            await moorage.wait([moorage.job("nobody")])


@in_virtual_time
async def test_a_wait_is_bounded_and_says_how_many_are_left() -> None:
    async with AsyncClient(transport=SimFleet("8xH100", script=by_words)) as moorage:
        jobs = await moorage.submit_many([["0", "1"], ["0", "1000"]], gpu=1)
        with pytest.raises(TimedOut) as late:
            await moorage.wait(jobs, "10s")
        assert (late.value.job, "1 of 2 jobs" in late.value.why) == (jobs[1].job, True)
        assert jobs[0].known_result is not None


@in_virtual_time
async def test_a_wait_for_a_job_that_is_called_like_a_code_says_how_to_explain_the_job() -> None:
    async with AsyncClient(transport=SimFleet("8xH100", script=by_words)) as moorage:
        for name in ("disconnected", "timed-out", "busy"):
            jobs = [await moorage.submit(["0", "1000"], job=each) for each in (name, f"beside-{name}")]
            for late in (jobs[0].result("10s"), moorage.wait(jobs, "10s")):
                with pytest.raises(TimedOut) as told:
                    await late
                assert told.value.problem.next.startswith(f"moorage explain '={name}'")


@in_virtual_time
async def test_jobs_that_end_while_a_leader_leaves_a_question_open_are_all_there() -> None:
    async with AsyncClient(transport=SimFleet("8xH100", script=by_words)) as moorage:

        async def silent(verb: str, arguments: Mapping[str, Any]) -> Answer:
            await asyncio.Event().wait()
            raise AssertionError

        async def none_leads(verb: str, arguments: Mapping[str, Any]) -> Answer:
            await asyncio.sleep(10)
            raise NoScheduler(problem("not-leading", "no scheduler answers"))

        for answer in (silent, none_leads):
            jobs = await moorage.submit_many([["0", "5"]] * 2, gpu=1)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(moorage._wire, "answer", answer)
                results = await moorage.wait([moorage.job(job.job) for job in jobs], "20s")
            assert [each.state for each in results] == ["SUCCEEDED"] * 2


@in_virtual_time
async def test_it_goes_on_over_a_takeover() -> None:
    fleet = SimFleet("8xH100", script=by_words)
    async with AsyncClient(transport=fleet, timeout="1s") as moorage:
        jobs = await moorage.submit_many([["0", "3"]] * 8, gpu=1)
        waiting = asyncio.create_task(moorage.wait(jobs))
        await asyncio.sleep(1)  # of virtual time: it has asked where they stand
        await fleet.kill_scheduler()
        assert {each.state for each in await waiting} == {"SUCCEEDED"}


@in_virtual_time
async def test_a_crowd_that_one_list_does_not_hold() -> None:
    async with AsyncClient(transport=SimFleet("64xH100", script=by_words)) as moorage:
        jobs = await moorage.submit_many([["0", "0"]] * 1500, gpu=1)
        assert len(await moorage.wait([moorage.job(job.job) for job in jobs])) == 1500


@in_virtual_time
async def test_the_tenants_events_come_whole() -> None:
    async with AsyncClient(transport=SimFleet("8xH100", script=by_words)) as moorage:
        events = moorage.events()
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        jobs = await moorage.submit_many([["0", "0"]] * 10, gpu=1)
        seen = {(await first).job: 1}
        async for event in events:
            seen[event.job] = event.rev
            if list(seen.values()).count(5) == len(jobs):
                break
        await events.aclose()  # type: ignore[attr-defined]
        assert sorted(seen) == sorted(job.job for job in jobs)


@in_virtual_time
async def test_the_code_of_many_replicas_is_one_wherever_it_is_asked_for() -> None:
    """That of the first which failed, though others end behind it, and well."""

    def by_replica(task: Task) -> Ran:
        codes = [int(word) for word in task.argv]
        return Ran(codes[int(task.env["MOORAGE_REPLICA"])], seconds=1 + int(task.env["MOORAGE_REPLICA"]))

    async with AsyncClient(transport=SimFleet("8xH100", script=by_replica)) as moorage:
        crowd = await moorage.submit_many([["0"]] * 16, gpu=1)
        job = await moorage.submit(["0", "3", "4", "0"], gpu="4x1xH100")
        with pytest.raises(JobFailed) as failed:
            await job.result()
        assert failed.value.exit_code == 3
        afresh = [moorage.job(each.job) for each in (job, *crowd)]
        assert (await moorage.wait(afresh))[0].code == 3  # asked for in a list
        assert (await moorage.wait([moorage.job(job.job)]))[0].code == 3
        assert (await job.show()).code == 3
        assert {row.job: row.code for row in (await moorage.ls(states=["FAILED"])).jobs} == {job.job: 3}


@in_virtual_time
async def test_a_job_of_another_tenant_is_not_taken_for_one_of_its_name() -> None:
    fleet = SimFleet("1xH100", script=by_words)
    async with AsyncClient(transport=fleet, tenant="a") as a, AsyncClient(transport=fleet, tenant="b") as b:
        theirs = await a.submit(["1", "5"], job="same")
        await b.submit(["0", "5"], job="same")
        with pytest.raises(Rejected, match="belongs to tenant a"):
            await b.wait([theirs])
        assert [result.code for result in await a.wait([theirs])] == [1]


@in_virtual_time
async def test_a_handle_says_what_is_known_of_it() -> None:
    async with AsyncClient(transport=SimFleet("8xH100", script=by_words), tenant="vision") as moorage:
        assert repr(moorage.job("a")) == "<AsyncJob a of vision not asked yet>"
        job = await moorage.submit(["0", "100"], gpu="2xH100:80G", job="a")
        assert repr(job) == "<AsyncJob a of vision QUEUED 2xH100:80G accepted 0ms ago>"
        await asyncio.sleep(92)
        await asyncio.sleep(3)  # an age is that of the newest record: the first question after idle time has an old one
        other = moorage.job("a")
        await other.show()
        assert repr(other).startswith("<AsyncJob a of vision RUNNING 2xH100:80G on sim-0000 accepted 1m3")
        await job.result()
        assert repr(job).startswith("<AsyncJob a of vision SUCCEEDED 2xH100:80G on sim-0000 accepted 1m4")


async def test_an_end_whose_decision_was_not_heard_is_asked_for(nats_url: str, unique: str) -> None:
    """Replica 0 failed in a frame that was lost, replica 1 succeeded in the one that came."""
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        failed = change(3, "FAILED", code=7)
        scheduler.will_show(
            shown("j", "RUNNING", change(1), change(2)),
            shown("j", "FAILED", change(1), change(2), failed, change(4, "SUCCEEDED", code=0)),
        )
        waiting = asyncio.create_task(client.wait([client.job("j")], "20s"))
        await until(lambda: len(scheduler.asked) == 1, what="asked where it stands")
        await scheduler.say_to_tenant(scheduler.event("j", "FAILED", change(4, "SUCCEEDED", code=0)))
        (result,) = await waiting
        assert (result.state, result.code, len(scheduler.asked)) == ("FAILED", 7, 2)


async def test_a_request_that_the_durable_queue_refuses_ends_the_wait_for_its_job(nats_url: str, unique: str) -> None:
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        scheduler.will("ls", Answer("ls", 9, {"jobs": []}))
        scheduler.will_show(problem("not-found", "there is no such job"))
        jobs, why = [client.job(f"j{at}") for at in range(CROWD)], "unknown field $.gpus"
        async with Gathering(client._wire._histories, jobs) as gathering:
            await scheduler.say_to_tenant(*(Event(unique, job.job, 0, "REJECTED", 9, why=why) for job in jobs))
            ended = [job.known_result async for job in gathering.over(20)]
        assert [(each.state, each.why) for each in ended if each is not None] == [("REJECTED", why)] * CROWD


@in_virtual_time
async def test_a_last_frame_that_was_lost_is_asked_for_after_a_silence() -> None:
    fleet = SimFleet("8xH100", script=by_words)
    async with AsyncClient(transport=fleet, name="deaf") as moorage:
        jobs = await moorage.submit_many([["0", "20"]] * 3, gpu=1)
        waiting = asyncio.create_task(moorage.wait(jobs))
        await asyncio.sleep(15)
        fleet.network.between("scheduler-1", "deaf", Faults(drop=1))
        await asyncio.sleep(8)
        assert not waiting.done()
        fleet.network.heal()
        assert {each.state for each in await waiting} == {"SUCCEEDED"}


async def test_a_flood_after_a_gap_is_bounded_and_the_end_is_asked_for(nats_url: str, unique: str) -> None:
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        end = change(3 + 4 * AHEAD_MAX, "SUCCEEDED", code=0)
        scheduler.will("submit", Accepted("j", 1, "QUEUED"))
        scheduler.will_show(shown("j", "RUNNING", change(1)), shown("j", "SUCCEEDED", end))
        job = await client.submit(["x"], job="j")
        async with Gathering(client._wire._histories, [job]) as gathering:
            over = gathering.over(20)
            first = asyncio.ensure_future(anext(over))
            await until(lambda: len(scheduler.asked) == 2, what="asked where it stands")
            lost_each_second = (scheduler.event("j", "RUNNING", change(rev)) for rev in range(3, end.rev, 2))
            await scheduler.say_to_tenant(*lost_each_second)
            histories = gathering.left
            await until(lambda: "j" in histories and histories["j"].is_stale, what="more than is kept")
            assert len(histories["j"].ahead) == AHEAD_MAX
            await scheduler.say_to_tenant(scheduler.event("j", "SUCCEEDED", end))
            assert (await first).job == "j"
            assert len(scheduler.asked) == 3
