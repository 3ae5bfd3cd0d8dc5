"""Results of a client's own jobs are heard from the tenant's frames, and asked for where in doubt."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.bus.contexts import Context
from moorage.bus.embedded import EmbeddedServer
from moorage.client import AsyncClient, AsyncJob, JobFailed, Result, TimedOut
from moorage.client.follow.follower import CROWD
from moorage.schemas.frames import Accepted, Answer, Change, LogPage
from tests.unit.client.scripted_scheduler import ScriptedScheduler, change, shown
from tests.waiting import until

NO_OUTPUT = [LogPage(1, "out", over=True), LogPage(1, "err", over=True)]
HISTORY = [change(1, "ACCEPTED"), change(2, "PLACED"), change(3, "SUCCEEDED", code=0)]


class Loop:
    """Submits a job, has its events said to the tenant, and awaits its result, again and again."""

    def __init__(self, scheduler: ScriptedScheduler, client: AsyncClient) -> None:
        self.scheduler = scheduler
        self.client = client

    async def submit(self, name: str, *, duplicate: bool = False) -> AsyncJob:
        self.scheduler.will("submit", Accepted(name, 9, "QUEUED", duplicate=duplicate))
        self.scheduler.will_show(shown(name, "SUCCEEDED", *HISTORY))
        return await self.client.submit(["x"], job=name, driver="noop")

    async def say(self, name: str, *changes: Change) -> None:
        await self.scheduler.say_to_tenant(self.scheduler.event(name, changes[-1].state, *changes))

    async def result(self, name: str) -> Result:
        job = await self.submit(name)
        await self.say(name, *HISTORY)
        return await job.result("60s")

    def verbs(self) -> list[str]:
        """What was asked since the last call."""
        verbs = [verb for verb, _ in self.scheduler.asked]
        self.scheduler.asked.clear()
        return verbs


@pytest.fixture(autouse=True)
def time_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moorage.client.follow.follower.REPAIR_S_FIRST", 600.0)
    monkeypatch.setattr("moorage.client.follow.follower.LINGER_S", 3600.0)


@contextlib.asynccontextmanager
async def standing(nats_url: str, unique: str) -> AsyncIterator[Loop]:
    """One that has awaited a first result, and so hears the tenant's frames."""
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        loop = Loop(scheduler, client)
        await loop.result("first")
        assert loop.verbs() == ["submit", "show"]
        yield loop


async def test_the_next_jobs_results_need_no_question_and_no_subscription(nats_url: str, unique: str) -> None:
    async with standing(nats_url, unique) as loop:
        link: Any = loop.client._wire.link
        before = list(link._subscriptions)
        for number in range(3):
            result = await loop.result(f"j{number}")
            assert (result.state, result.code, [each.rev for each in result.changes]) == ("SUCCEEDED", 0, [1, 2, 3])
            assert loop.verbs() == ["submit"]
            assert list(link._subscriptions) == before


async def test_what_was_published_before_the_result_is_awaited_and_what_comes_later_is_one_history(
    nats_url: str, unique: str
) -> None:
    async with standing(nats_url, unique) as loop:
        job = await loop.submit("j")
        await loop.say("j", HISTORY[0])
        await loop.say("other", *HISTORY)
        await loop.client._wire.link.request(loop.scheduler.subjects.api(loop.scheduler.tenant, "show"), b"{}", 10)
        waiting = asyncio.create_task(job.result("60s"))
        await until(lambda: loop.client._wire._histories.followers, what="it is awaited")
        await loop.say("j", *HISTORY[1:])
        assert [each.rev for each in (await waiting).changes] == [1, 2, 3]
        assert loop.verbs() == ["submit", "show"]  # the test's own


async def test_what_is_run_is_heard_by_the_frames_and_its_only_replica_by_name(nats_url: str, unique: str) -> None:
    """A wildcard for each job would cost the server more than all the rest of it."""
    async with standing(nats_url, unique) as loop:
        link: Any = loop.client._wire.link
        before = list(link._subscriptions)
        loop.scheduler.will("submit", Accepted("j", 9, "QUEUED"))
        running = asyncio.create_task(loop.client.run(["x"], job="j", driver="noop", wait="60s"))
        await until(lambda: loop.scheduler.asked, what="it is submitted")
        new = [each.subject for each in link._subscriptions if each not in before]
        assert new == [loop.scheduler.subjects.log(unique, "j", 0)]
        await loop.say("j", *HISTORY)
        assert [each.rev for each in (await running).changes] == [1, 2, 3]
        assert loop.verbs() == ["submit"]
        assert list(link._subscriptions) == before


async def test_a_job_that_is_followed_in_a_crowd_has_its_result_without_a_question(nats_url: str, unique: str) -> None:
    """The events of such a job go to the handle that submitted it, too, which would else wait for a silence."""
    async with standing(nats_url, unique) as loop, contextlib.AsyncExitStack() as opened:
        for number in range(CROWD):
            await opened.enter_async_context(loop.client.watch(f"other{number}"))
        job = await loop.submit("j")
        watch = await opened.enter_async_context(loop.client.watch("j"))
        assert watch._by_frames, "it hears the tenant's frames"
        await loop.say("j", *HISTORY)
        await until(lambda: watch._pending, what="they are here before the result is awaited")
        assert [each.rev for each in (await job.result("60s")).changes] == [1, 2, 3]
        assert loop.verbs() == ["submit"]


async def test_the_handle_knows_the_state_while_the_result_is_awaited(nats_url: str, unique: str) -> None:
    async with standing(nats_url, unique) as loop:
        job = await loop.submit("j")
        waiting = asyncio.create_task(job.result("60s"))
        await loop.say("j", HISTORY[0])
        await loop.say("j", change(2, "PLACED", worker="w7"))
        await until(lambda: (job.state, job.worker) == ("PLACED", "w7"), what="it was placed")
        await loop.say("j", HISTORY[2])
        assert [each.rev for each in (await waiting).changes] == [1, 2, 3]
        assert loop.verbs() == ["submit"]


async def test_a_silence_makes_it_ask_and_go_on(nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last event may have been lost; what was heard before is not told twice."""
    async with standing(nats_url, unique) as loop:
        monkeypatch.setattr("moorage.client.follow.follower.REPAIR_S_FIRST", 0.05)
        job = await loop.submit("j")
        await loop.say("j", HISTORY[0])
        assert [each.rev for each in (await job.result("60s")).changes] == [1, 2, 3]
        assert loop.verbs() == ["submit", "show"]


async def test_a_wait_that_is_over_says_how_long_it_was(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it went on after a silence."""
    async with standing(nats_url, unique) as loop:
        for silence_s in (60.0, 0.02):
            monkeypatch.setattr("moorage.client.follow.follower.REPAIR_S_FIRST", silence_s)
            job = await loop.submit(f"j-{silence_s:.0f}")
            loop.scheduler.will_show(shown(job.job, "QUEUED", HISTORY[0]))
            with pytest.raises(TimedOut, match=r"after 0\.2 s; it goes on"):
                await job.result(0.2)
            assert loop.verbs() == ["submit", "show"][: 1 if silence_s == 60.0 else 2]
        assert not loop.client._wire._histories.followers


async def test_a_client_that_is_closed_is_not_stood_for(nats_url: str, unique: str) -> None:
    async with standing(nats_url, unique) as loop:
        job = await loop.submit("j")
        await loop.client.close()
        with pytest.raises(RuntimeError, match="not open"):
            await job.result("60s")
        assert loop.client._wire._following is None


async def test_more_than_is_held_of_one_job_is_asked_for(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with standing(nats_url, unique) as loop:
        monkeypatch.setattr("moorage.client.follow.follower.HELD_MAX", 2)
        job = await loop.submit("j")
        for each in HISTORY:
            await loop.say("j", each)
        await until(lambda: job._history and job._history.is_stale, what="the third is here")
        assert [each.rev for each in (await job.result("60s")).changes] == [1, 2, 3]
        assert loop.verbs() == ["submit", "show"]


async def test_a_job_that_was_there_already_is_asked_for(nats_url: str, unique: str) -> None:
    async with standing(nats_url, unique) as loop:
        job = await loop.submit("j", duplicate=True)
        assert (await job.result("60s")).state == "SUCCEEDED"
        assert loop.verbs() == ["submit", "show"]


async def test_a_second_wait_after_one_that_timed_out_asks(nats_url: str, unique: str) -> None:
    async with standing(nats_url, unique) as loop:
        job = await loop.submit("j")
        with pytest.raises(TimedOut):
            await job.result(0.01)
        assert (await job.result("60s")).state == "SUCCEEDED"
        assert loop.verbs() == ["submit", "show"]


async def test_a_connection_that_was_lost_meanwhile_makes_it_ask(tmp_path: Path, unique: str) -> None:
    server = await EmbeddedServer.start(tmp_path / "nats")
    try:
        async with AsyncClient(server.url, tenant=unique) as client:
            async with ScriptedScheduler(server.url, unique) as scheduler:
                await Loop(scheduler, client).result("first")
                job = await Loop(scheduler, client).submit("j")
            await server.kill()
            await until(lambda: not client._wire.link.is_connected)
            server = await EmbeddedServer.start(tmp_path / "nats", port=int(server.url.rpartition(":")[2]))
            await until(lambda: client._wire.link.is_connected)
            async with ScriptedScheduler(server.url, unique) as scheduler:
                scheduler.will_show(shown("j", "SUCCEEDED", *HISTORY))
                assert (await job.result("60s")).state == "SUCCEEDED"
                assert [verb for verb, _ in scheduler.asked] == ["show"]
    finally:
        await server.stop()


async def test_of_a_handle_that_is_dropped_nothing_is_kept(nats_url: str, unique: str) -> None:
    async with standing(nats_url, unique) as loop:
        kept = loop.client._wire._histories._expected
        job: AsyncJob | None = await loop.submit("j")
        assert list(kept) == ["j"]
        assert job is not None
        job = None
        assert not list(kept)


async def test_who_awaits_no_more_results_hears_the_tenant_no_more(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moorage.client.follow.follower.LINGER_S", 1.0)
    async with standing(nats_url, unique) as loop:
        feed = loop.client._wire._histories
        assert feed._subscription is not None
        job = await loop.submit("j")
        await until(lambda: feed._subscription is None, what="it is gone")
        loop.verbs()
        assert (await job.result("60s")).state == "SUCCEEDED"
        assert loop.verbs() == ["show"]


async def test_where_nearly_all_is_of_others_it_is_not_heard(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with standing(nats_url, unique) as loop:
        feed, scheduler = loop.client._wire._histories, loop.scheduler
        monkeypatch.setattr("moorage.client.follow.follower.OTHERS_FREE", 10)
        monkeypatch.setattr("moorage.client.follow.follower.OTHERS_PER_OWN", 2)
        await scheduler.say_to_tenant(*(scheduler.event(f"o{number}", "QUEUED", change(1)) for number in range(40)))
        await until(lambda: feed._subscription is None, what="it is heard no more")
        for number in range(2):
            await loop.result(f"j{number}")
            assert loop.verbs() == ["submit", "show"]
        assert feed._subscription is None


async def test_a_failure_has_the_tail_that_its_worker_keeps(nats_url: str, unique: str) -> None:
    async with standing(nats_url, unique) as loop:
        job = await loop.submit("j")
        pages = [LogPage(1, "out", over=True), LogPage(1, "err", 0, 10, 10, "no weights", over=True)]
        loop.scheduler.will("logs", *(Answer("logs", 9, msgspec.to_builtins(page)) for page in pages))
        await loop.say("j", HISTORY[0], change(2, "EXITED", code=3), change(3, "FAILED", code=3))
        with pytest.raises(JobFailed) as failed:
            await job.result("60s")
        assert failed.value.log_tail == "no weights"
        assert "show" not in loop.verbs()


async def test_a_failure_is_told_where_nobody_hands_out_its_tail(nats_url: str, unique: str) -> None:
    async with standing(nats_url, unique) as loop:
        job = await loop.submit("j")
        loop.scheduler.will("logs", None)
        loop.client._wire.patience = lambda _verb, _is_clustered: 0.2
        await loop.say("j", HISTORY[0], change(2, "EXITED", code=3), change(3, "FAILED", code=3))
        with pytest.raises(JobFailed) as failed:
            await job.result("60s")
        assert (failed.value.exit_code, failed.value.log_tail) == (3, "")


async def test_who_may_not_hear_the_tenants_frames_is_asked_for_and_answered(tmp_path: Path) -> None:
    server = await EmbeddedServer.start(tmp_path / "nats")
    config = tmp_path / "nats" / "nats.conf"
    may = '{ publish: "moorage.api.t.>", subscribe: ["moorage.event.t.>", "moorage.log.t.>", "_INBOX.>"] }'
    user = f'{{ user: "alone", password: "p", permissions: {may} }}'
    config.write_text(config.read_text().replace("users: [ { user: moorage", f"users: [ {user}, {{ user: moorage", 1))
    os.kill(server.pid, signal.SIGHUP)
    try:
        context = Context(url=server.url, user="alone", password="p")
        async with ScriptedScheduler(server.url, "t") as scheduler:
            await _until_in(context)
            async with AsyncClient(context, tenant="t") as client:
                loop = Loop(scheduler, client)
                for number in range(3):
                    assert (await loop.result(f"j{number}")).state == "SUCCEEDED"
                    assert loop.verbs() == ["submit", "show"]
                assert client._wire._histories.is_refused
                running = asyncio.create_task(client.run(["x"], job="j2", driver="noop", wait="60s"))
                await until(lambda: loop.verbs() == ["submit"], what="it is submitted")
                await scheduler.say("j2", "SUCCEEDED", *HISTORY)
                assert (await running).state == "SUCCEEDED"
            async with AsyncClient(context, tenant="t") as client:  # whose first question it is
                scheduler.will("submit", Accepted("r", 9, "QUEUED"))
                scheduler.will_show(shown("r", "SUCCEEDED", *HISTORY))
                scheduler.will("logs", *(Answer("logs", 9, msgspec.to_builtins(page)) for page in NO_OUTPUT))
                assert (await client.run(["x"], job="r", driver="noop", wait="60s")).state == "SUCCEEDED"
                assert loop.verbs()[:2] == ["submit", "show"]
    finally:
        await server.stop()


async def _until_in(context: Context) -> None:
    """The server has read its new settings."""

    async def is_in() -> bool:
        try:
            async with AsyncClient(context, tenant="t"):
                return True
        except Exception:
            return False

    await until(is_in)
