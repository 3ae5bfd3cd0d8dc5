"""Schedules on a real nats-server, which counts their time: each run is one job, over pauses, outages and takeovers."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any, Final

import pytest

from moorage.bus.connection import connect
from moorage.bus.jetstream import JetStream
from moorage.scheduler.durable.schedule_stream import ScheduleStream
from moorage.schemas.errors import Refused
from moorage.schemas.frames import LISTED_MAX
from moorage.schemas.subjects import Subjects
from tests.servers import MortalServer, Server
from tests.system.live.scheduled_runs import recorded_runs
from tests.system.live.stack import ANSWER_S, QUICK, Caller, caller, stack, unique_prefix
from tests.waiting import until

#: a request that ends at once, so that the next run finds nothing to wait for
BRIEF_RUN: Final[dict[str, Any]] = {"run": {"argv": ["true"]}, "events": "tenant"}


async def ask(one: Caller, act: str, name: str = "often", **arguments: Any) -> dict[str, Any]:
    if act == "add":
        arguments = {"cron": "@every 1s", "request": BRIEF_RUN} | arguments
    answer: dict[str, Any] = await one.api("schedule", {"act": act, **({"name": name} if name else {}), **arguments})
    return answer


async def row(one: Caller, name: str = "often") -> dict[str, Any]:
    return dict((await ask(one, "show", name))["data"])


async def has_run(one: Caller, times: int, name: str = "often") -> dict[str, Any]:
    shown: dict[str, Any] = {}

    async def enough() -> bool:
        shown.clear()
        shown.update(await row(one, name))
        return bool(shown.get("runs", 0) >= times)

    try:
        await until(enough, ANSWER_S, f"{times} runs of {name}")
    except AssertionError as error:
        raise AssertionError(f"{error}: {shown}") from None
    return shown


async def jobs_of(one: Caller, name: str = "often") -> list[str]:
    """Its jobs, oldest first."""
    listed = await one.api("ls", {"labels": {"schedule": name}, "limit": LISTED_MAX})
    return [job["job"] for job in reversed(listed["data"]["jobs"])]


async def test_a_schedule_runs_until_it_is_paused_and_again_until_it_is_removed(nats_server: Server) -> None:
    async with stack(nats_server, unique_prefix()) as made, caller(made) as one, caller(made, "beta") as other:
        await made.scheduler()
        await made.agent("a", "1xH100")
        await one.leader()
        assert (await ask(one, "ls", ""))["data"] == {"schedules": []}
        added = await ask(one, "add")
        assert (added["data"]["changed"], added["data"]["schedule"]["by"]) == (True, "tenant:acme")
        shown = await has_run(one, 2)
        assert shown["next_ms"] - shown["last_ms"] < 2_000
        assert shown["request"]["labels"] == {"schedule": "often"}
        await one.reaches(shown["job"], "SUCCEEDED")
        assert (await ask(one, "pause"))["data"]["changed"]
        runs = (await row(one))["runs"]
        now = await ask(one, "run-now", key="k1")
        assert (await ask(one, "run-now", key="k1"))["data"] == now["data"], "the same key is the same run"
        await one.reaches(now["data"]["job"], "SUCCEEDED")
        shown = await row(one)
        assert (shown["runs"], shown["job"]) == (runs + 1, now["data"]["job"]), "paused, it ran only when asked"
        await ask(one, "resume")
        await has_run(one, runs + 2)
        jobs = await jobs_of(one)
        assert len(jobs) == len(set(jobs)) >= runs + 2
        assert (await ask(other, "show"))["code"] == "not-found", "it is of another tenant"
        await ask(one, "remove")
        assert (await ask(one, "ls", ""))["data"] == {"schedules": []}
        async with await connect(made.ledger_url, "test") as connection:
            stream = ScheduleStream(connection, made.subjects, 1)

            async def is_empty() -> bool:
                return not await stream.wishes() and not await stream.runs()

            await until(is_empty, ANSWER_S, "no wish and no run in the stream")


async def test_a_time_that_the_server_refuses_is_named_and_nothing_is_recorded(nats_server: Server) -> None:
    async with stack(nats_server, unique_prefix()) as made, caller(made) as one:
        await made.scheduler()
        await one.leader()
        for field, arguments in (
            ("$.cron", {"cron": "61 3 * * *"}),
            ("$.cron", {"cron": "@every 500ms"}),
            ("$.cron", {"cron": "0 3 30 2 *"}),
            ("$.tz", {"cron": "0 3 * * *", "tz": "Europe/Nowhere"}),
            ("$.request.labels", {"request": {**BRIEF_RUN, "labels": {"schedule": "other"}}}),
        ):
            refused = await ask(one, "add", **arguments)
            assert (refused["code"], refused.get("field")) == ("invalid-argument", field), refused
        assert (await ask(one, "run-now"))["code"] == "not-found"
        assert (await ask(one, "ls", ""))["data"] == {"schedules": []}
        assert (await ask(one, "add", cron="30 3 * * MON-FRI", tz="UTC"))["data"]["changed"]
        assert [each["name"] for each in (await ask(one, "ls", ""))["data"]["schedules"]] == ["often"]


@pytest.mark.slow
async def test_runs_go_on_with_the_next_leader_each_once(nats_server: Server) -> None:
    async with stack(nats_server, unique_prefix()) as made, caller(made) as one:
        first = await made.scheduler(config=QUICK)
        await made.agent("a", "1xH100")
        await one.leader()
        await ask(one, "add", overlap="queue")
        await ask(one, "add", "yearly", cron="@yearly")
        await has_run(one, 2)
        second = await made.scheduler(config=QUICK)
        await first.kill()
        await one.leader(2)
        runs = (await row(one))["runs"]
        await has_run(one, runs + 2)
        await second.kill()  # nobody leads meanwhile: of what the server publishes now, the newest run is made up
        await made.scheduler(config=QUICK)
        await one.leader(3)
        shown = await has_run(one, runs + 4)
        jobs = await jobs_of(one)
        assert len(jobs) == len(set(jobs)) >= shown["runs"], "each run is one job"
        numbers = [int(job.rpartition("-")[2]) for job in jobs]
        assert numbers == sorted(numbers)
        assert shown["last_ms"] - shown["due_ms"] < 60_000


@pytest.mark.slow
async def test_a_server_that_crashes_repeats_no_run_and_one_is_made_of_those_it_forgot(
    mortal_server: MortalServer,
) -> None:
    async with stack(mortal_server, unique_prefix()) as made, caller(made) as one:
        await made.scheduler()
        await made.agent("a", "1xH100")
        await one.leader()
        added = await ask(one, "add", "old", cron="*/4 * * * * *")
        old = added["data"]["schedule"]
        assert 0 < old["next_ms"] - old["since_ms"] <= 4_000, "known from the first moment on"
        interval = await ask(one, "add", "interval", cron="@every 3s")
        await has_run(one, 1, "old")
        await mortal_server.stop()  # it saves what was due until now
        await mortal_server.start()
        await has_run(one, 2, "old")
        due = datetime.fromtimestamp(time.time() + 5, UTC)
        young = await ask(one, "add", "young", cron=f"{due.second} {due.minute} {due.hour} {due.day} {due.month} *")
        due_ms = int(due.timestamp()) * 1000
        assert young["data"]["schedule"]["next_ms"] == due_ms
        await mortal_server.kill()
        await until(lambda: time.time() * 1000 > due_ms, ANSWER_S, "a missed run")
        await mortal_server.start()
        await has_run(one, 1, "young")
        runs = await recorded_runs(made)
        assert len(runs["young"]) == 1
        following = {name: [run.next_ms for run in found] for name, found in runs.items()}
        assert all(sorted(set(each)) == each for each in following.values()), following
        since_ms = interval["data"]["schedule"]["since_ms"] // 1000 * 1000
        assert {(next_ms - since_ms) % 3_000 for next_ms in following["interval"]} == {0}, "its grid goes on"


async def test_a_stream_that_was_deleted_is_made_again_behind_its_runs(nats_server: Server) -> None:
    async with stack(nats_server, unique_prefix()) as made, caller(made) as one:
        hasty = {"moorage.scheduler.durable.schedule_keeper.LOOK_EVERY_S": 0.2}
        await made.set_scheduler("s", {}, made.url, made.ledger_url, hasty)
        await made.agent("a", "1xH100")
        await one.leader()
        await ask(one, "add")
        before = await has_run(one, 1)
        async with await connect(made.ledger_url, "test") as connection:
            await JetStream(connection).delete_stream(made.subjects.schedule_stream)
        after = await has_run(one, before["runs"] + 2)
        assert int(after["job"].rpartition("-")[2]) > int(before["job"].rpartition("-")[2])


async def test_an_older_server_is_refused_with_its_version(nats_url: str) -> None:
    async with await connect(nats_url, "test") as connection:
        stream = ScheduleStream(connection, Subjects(), 1)
        stream.check_server()
        for version in ("2.13.4", "2.9.0", "1.4.1", "", "simulated"):
            connection.server_version = version
            with pytest.raises(Refused, match="cannot repeat messages") as refused:
                stream.check_server()
            assert refused.value.problem.found == version
        for version in ("2.14.0", "2.15.1", "3.0.0"):
            connection.server_version = version
            stream.check_server()
