"""The history on a real server: whole from an id alone, over a leader that is killed, and without a stream."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest

from moorage.bus.embedded import EmbeddedServer
from moorage.client import AsyncClient, Event
from moorage.schemas.job import TERMINAL
from tests.system.live.stack import ANSWER_S, Caller, Stack, caller, stack, unique_prefix
from tests.waiting import until

#: nothing that is over stays in memory once its history stands; else the defaults, with which a busy machine loses no
#: leader and no worker: a new term counts its refusals from 0, and the attempts of a lost worker are made again
FORGETFUL: Final[dict[str, float]] = {"ended_max": 0}


async def compacted(one: Caller, *jobs: str) -> None:
    """Wait until these jobs are in no memory any more."""

    async def gone() -> bool:
        return all([(await one.show(job)).get("compacted", False) for job in jobs])

    await until(gone, ANSWER_S, f"{jobs} out of memory")


async def events_of(client: AsyncClient, job: str) -> list[Event]:
    """Every event of a job from its id alone; it ends by itself once the job is over."""
    return [event async for event in client.job(job).events()]


async def pages_of(one: Caller, job: str, **fields: Any) -> dict[str, Any]:
    """A page of a job's history; asked for again where a busy server did not let the scheduler read it."""

    async def read() -> dict[str, Any] | None:
        answer = await one.api("history", {"job": job, **fields})
        return None if answer.get("code") == "overloaded" else answer["data"]

    return dict(await until(read, ANSWER_S, f"the history of {job}"))


def check(events: list[Event]) -> list[str]:
    """No gap, no double; the states."""
    changes = [change for event in events for change in event.changes]
    assert [change.rev for change in changes] == list(range(1, events[-1].rev + 1))
    assert events[-1].state in TERMINAL
    return [change.state for change in changes]


def client_of(made: Stack) -> AsyncClient:
    return AsyncClient(made.url, tenant="acme", prefix=made.subjects.prefix, timeout=ANSWER_S)


@pytest.mark.slow
async def test_a_job_long_over_is_told_whole_from_its_id_alone(nats_server: EmbeddedServer) -> None:
    async with stack(nats_server, unique_prefix()) as made, caller(made) as one, client_of(made) as client:
        await made.scheduler(config=FORGETFUL)
        await made.agent("a", "2xH100")
        await one.leader()
        await one.submit("good")
        await one.submit("bad", "sh", "-c", "exit 7", retries=1)
        await one.submit("ended", "sleep", "600")
        await one.reaches("ended", "RUNNING")
        await one.api("cancel", {"job": "ended", "by": "ann", "reason": "enough"})
        await compacted(one, "good", "bad", "ended")

        assert check(await events_of(client, "good")) == ["ACCEPTED", "PLACED", "CLAIMED", "RUNNING", "SUCCEEDED"]
        bad = await events_of(client, "bad")
        assert check(bad).count("RUNNING") == 2
        assert bad[-1].changes[-1].code == 7
        ended = [change for event in await events_of(client, "ended") for change in event.changes]
        (act,) = [change for change in ended if change.state == "CANCELLING"]
        assert (act.by, act.said, act.why) == ("tenant:acme", "ann", "enough")
        for job in ("good", "ended"):
            await one.check_story(job)  # what was said meanwhile is what the history says
        shown = await one.check_story("bad")
        assert (shown["state"], shown["code"], shown["worker"]) == ("FAILED", 7, "sim-0000")
        assert shown["request"]["retries"] == 1
        assert shown["kept_until_ms"] > shown["ended_ms"]
        result = await client.wait([client.job("bad")])
        assert (result[0].code, len(result[0].changes)) == (7, shown["rev"])

        page = await pages_of(one, "bad", limit=2)
        assert ([change["rev"] for change in page["changes"]], page["complete"], page["more"]) == ([1, 2], True, True)
        for wrong in ({"limit": 0}, {"limit": "x"}, {"after_rev": -1}, {"limit": 10**9}):
            assert (await one.api("history", {"job": "bad", **wrong}))["code"] == "invalid-argument"
        assert (await one.api("history", {"job": "never"}))["code"] == "not-found"
        async with caller(made, "other") as other:
            assert (await other.api("history", {"job": "bad"}))["code"] == "not-found"


@pytest.mark.slow
async def test_a_leader_that_is_killed_before_it_wrote_loses_no_history(nats_server: EmbeddedServer) -> None:
    """It dies the moment the jobs are over; a follower that was there all along sees no gap and no double."""
    async with stack(nats_server, unique_prefix()) as made, caller(made) as one, client_of(made) as client:
        first = await made.scheduler(config=FORGETFUL)
        await one.leader()
        await made.scheduler(config=FORGETFUL)
        await made.agent("a", "8xH100")
        await one.workers_up("sim-0000")
        jobs = [f"j{number}" for number in range(8)]
        await one.submit("long", "sh", "-c", f"while [ ! -e {made.folder}/go ]; do sleep 0.05; done")
        following = asyncio.create_task(events_of(client, "long"))
        await one.reaches("long", "RUNNING")
        for job in jobs:
            await one.submit(job)
        await until(lambda: all(one.states.get(job) == "SUCCEEDED" for job in jobs), ANSWER_S, "all over")
        await first.kill()
        await one.leader(2)
        await compacted(one, *jobs)
        for job in jobs:
            assert check(await events_of(client, job)) == ["ACCEPTED", "PLACED", "CLAIMED", "RUNNING", "SUCCEEDED"]
            await one.check_story(job)
        (made.folder / "go").touch()
        assert check(await following) == ["ACCEPTED", "PLACED", "CLAIMED", "RUNNING", "SUCCEEDED"]
        await compacted(one, "long")
        assert check(await events_of(client, "long")) == check(await following)
