"""What a follower makes of events that are lost, doubled, late or broken: a real server, a scripted scheduler."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from moorage.cli.jobs.progress import Progress
from moorage.client import AsyncClient, JobFailed, NotFound, Rejected, TimedOut
from moorage.client.events import Event
from moorage.client.follow import follower
from moorage.client.follow.follower import CROWD
from moorage.client.follow.watch import AsyncWatch
from moorage.client.output import Piece
from moorage.client.request_builder import build_request
from moorage.schemas.codec import encode
from moorage.schemas.errors import problem
from moorage.schemas.frames import Accepted, Answer, LogPage, Output
from tests.unit.client.scripted_scheduler import ScriptedScheduler, change, shown
from tests.waiting import skip_time, until


class Following:
    """A watch whose items a test takes one by one."""

    def __init__(self, watch: AsyncWatch, client: AsyncClient) -> None:
        self.watch = watch
        self.client = client
        self._items = watch.follow(90)

    async def revisions(self) -> tuple[str, list[int]]:
        """State and new revisions of the next event."""
        async with asyncio.timeout(90):
            item = await anext(self._items)
        assert isinstance(item, Event)
        return item.state, [each.rev for each in item.changes]

    def rest(self) -> AsyncIterator[Any]:
        return self._items

    async def ends(self) -> None:
        async with asyncio.timeout(90):
            with pytest.raises(StopAsyncIteration):
                await anext(self._items)


async def test_the_time_of_a_watch_is_a_duration_as_everywhere(nats_url: str, unique: str) -> None:
    async with follow(nats_url, unique, shown("j", "QUEUED", change(1, "ACCEPTED"))) as (_, following):
        with pytest.raises(Rejected, match="not a duration: 'soon'"):
            await anext(following.watch.follow("soon"))
        with pytest.raises(TimedOut):
            [each async for each in following.watch.follow("200ms")]


def page(rev: int, revs: range, *, more: bool = False) -> Answer:
    """What `history` answers."""
    changes = msgspec.to_builtins([change(each) for each in revs])
    data = {"job": "j", "tenant": "t", "state": "SUCCEEDED", "rev": rev, "changes": changes, "complete": True}
    return Answer("history", 9, {**data, "more": more})


@contextlib.asynccontextmanager
async def follow(
    url: str, tenant: str, *answers: Any, output: bool = False
) -> AsyncIterator[tuple[ScriptedScheduler, Following]]:
    async with ScriptedScheduler(url, tenant) as scheduler, AsyncClient(url, tenant=tenant) as client:
        scheduler.will_show(*answers)
        async with client.watch("j", output=output) as watch:
            yield scheduler, Following(watch, client)


@pytest.mark.parametrize("others", [0, CROWD])
async def test_a_wait_that_is_cancelled_as_it_begins_leaves_nothing_behind(
    nats_url: str, unique: str, others: int
) -> None:
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        scheduler.will_show(*[shown("j", "QUEUED", change(1, "ACCEPTED"))] * 40)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(others):
                await stack.enter_async_context(client.watch("other"))
            for turns in range(20):
                waiting = asyncio.create_task(client.job("j").result())
                for _ in range(turns):
                    await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.wait([waiting])
                assert waiting.cancelled()
                assert len(client._wire._histories.followers) == others, turns
        assert not client._wire._histories.followers


async def test_doubles_and_stragglers_are_dropped(nats_url: str, unique: str) -> None:
    first = shown("j", "QUEUED", change(1, "ACCEPTED"))
    async with follow(nats_url, unique, first) as (scheduler, following):
        assert await following.revisions() == ("QUEUED", [1])
        await scheduler.say("j", "QUEUED", change(1, "ACCEPTED"))
        await scheduler.say("j", "PLACED", change(1, "ACCEPTED"), change(2, "PLACED"))
        assert await following.revisions() == ("PLACED", [2])
        await scheduler.say("j", "PLACED", change(2, "PLACED"))
        await scheduler.say("j", "SUCCEEDED", change(3), change(4, "SUCCEEDED"))
        assert await following.revisions() == ("SUCCEEDED", [3, 4])
        await following.ends()
        assert len(scheduler.asked) == 1


async def test_a_gap_is_filled_by_asking(nats_url: str, unique: str) -> None:
    before = shown("j", "QUEUED", change(1, "ACCEPTED"))
    after = shown("j", "RUNNING", *(change(rev) for rev in range(1, 6)))
    async with follow(nats_url, unique, before, after) as (scheduler, following):
        await following.revisions()
        await scheduler.say("j", "RUNNING", change(4), change(5))
        assert await following.revisions() == ("RUNNING", [2, 3, 4, 5])
        await scheduler.say("j", "FAILED", change(6, "FAILED"))
        assert await following.revisions() == ("FAILED", [6])
        await following.ends()
        assert len(scheduler.asked) == 2


async def test_an_answer_older_than_what_was_told_takes_nothing_back(nats_url: str, unique: str) -> None:
    """Of a leader that was taken over from and does not know it yet. What was told after it was told once more."""
    before = shown("j", "PLACED", change(1, "ACCEPTED"), change(2, "PLACED"))
    older, after = Answer("show", 7, before), shown("j", "RUNNING", *(change(rev) for rev in range(1, 6)))
    async with follow(nats_url, unique, Answer("show", 6, before), older, after) as (scheduler, following):
        await following.revisions()
        await scheduler.say("j", "RUNNING", change(3))
        assert await following.revisions() == ("RUNNING", [3])
        await scheduler.say("j", "RUNNING", change(5))
        assert await following.revisions() == ("RUNNING", [4, 5])
        assert following.watch.state == "RUNNING"
        assert len(scheduler.asked) == 3


async def test_a_restored_ledger_knows_less_and_is_followed_to_its_end(nats_url: str, unique: str) -> None:
    """Its records are above all that were before."""
    before = shown("j", "RUNNING", *(change(rev) for rev in range(1, 6)))
    restored = Answer("show", 1 << 32, shown("j", "QUEUED", change(1, "ACCEPTED")))
    async with follow(nats_url, unique, Answer("show", 7, before), restored) as (scheduler, following):
        scheduler.will("history", problem("history-gone", "no"))
        await following.revisions()
        following.watch._refresh()
        assert await following.revisions() == ("QUEUED", [])
        await scheduler.say("j", "FAILED", change(2, "FAILED"))
        assert await following.revisions() == ("FAILED", [2])
        await following.ends()


async def test_a_frame_that_cannot_be_read_makes_it_ask(nats_url: str, unique: str) -> None:
    before, after = shown("j", "QUEUED", change(1)), shown("j", "SUCCEEDED", change(1), change(2, "SUCCEEDED"))
    async with follow(nats_url, unique, before, after) as (scheduler, following):
        await following.revisions()
        await scheduler.say_raw(scheduler.subjects.event(unique, "j"), b"{not json")
        assert await following.revisions() == ("SUCCEEDED", [2])
        await following.ends()


@pytest.mark.slow
async def test_a_last_event_that_was_lost_is_asked_for(nats_url: str, unique: str) -> None:
    before, after = shown("j", "RUNNING", change(1)), shown("j", "SUCCEEDED", change(1), change(2, "SUCCEEDED"))
    async with follow(nats_url, unique, before, after) as (_, following):
        await following.revisions()
        assert await following.revisions() == ("SUCCEEDED", [2])
        await following.ends()


@pytest.mark.parametrize("answer", ["history-gone", "unknown-verb"])
async def test_transitions_that_are_kept_no_longer_do_not_make_it_ask_for_ever(
    nats_url: str, unique: str, answer: str
) -> None:
    before, after = shown("j", "RUNNING", change(1)), shown("j", "RUNNING", change(90), change(91))
    async with follow(nats_url, unique, before, after) as (scheduler, following):
        scheduler.will("history", problem(answer, "no"))
        await following.revisions()
        await scheduler.say("j", "RUNNING", change(91))
        assert await following.revisions() == ("RUNNING", [90, 91])
        await scheduler.say("j", "SUCCEEDED", change(92, "SUCCEEDED"))
        assert await following.revisions() == ("SUCCEEDED", [92])
        assert [verb for verb, _ in scheduler.asked] == ["show", "show", "history"]


async def test_what_show_leaves_out_is_read_page_by_page(nats_url: str, unique: str) -> None:
    last = shown("j", "SUCCEEDED", *(change(rev) for rev in range(8, 11)))
    async with follow(nats_url, unique, last) as (scheduler, following):
        scheduler.will(
            "history",
            problem("overloaded", "too many"),
            page(10, range(1, 5), more=True),
            page(10, range(4, 9), more=True),  # a page that overlaps
            page(10, range(9, 11)),
        )
        assert await following.revisions() == ("SUCCEEDED", list(range(1, 11)))
        await following.ends()
        asked = [arguments["after_rev"] for verb, arguments in scheduler.asked if verb == "history"]
        assert asked == [0, 0, 4, 8]


async def test_a_page_with_nothing_new_does_not_make_it_ask_for_ever(nats_url: str, unique: str) -> None:
    async with follow(nats_url, unique, shown("j", "SUCCEEDED", change(9))) as (scheduler, following):
        scheduler.will("history", page(9, range(1, 3), more=True))
        assert await following.revisions() == ("SUCCEEDED", [1, 2, 9])
        await following.ends()


async def test_a_row_without_a_history_ends_it(nats_url: str, unique: str) -> None:
    row = {"job": "j", "tenant": unique, "state": "FAILED", "ended_ms": 5, "compacted": True}
    async with follow(nats_url, unique, row) as (scheduler, following):
        scheduler.will("history", problem("history-gone", "gone"))
        assert await following.revisions() == ("FAILED", [])
        await following.ends()


async def test_a_job_nobody_knows_is_told(nats_url: str, unique: str) -> None:
    async with follow(nats_url, unique, problem("not-found", "no job j", job="j")) as (_, following):
        with pytest.raises(NotFound):
            await following.revisions()


async def test_what_the_tenants_frames_told_alone_is_told_to_who_follows_it(nats_url: str, unique: str) -> None:
    request = {"events": "tenant", "run": {"driver": "noop"}}
    first = shown("j", "QUEUED", change(1, "ACCEPTED"), request=request, own_subject=True)
    async with follow(nats_url, unique, first) as (scheduler, following):
        await following.revisions()
        await scheduler.say("j", "SUCCEEDED", change(2, "SUCCEEDED"))
        assert await following.revisions() == ("SUCCEEDED", [2])
        await following.ends()
        assert len(scheduler.asked) == 1


async def test_a_wait_ends_by_its_timeout_though_the_scheduler_is_gone(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "FIRST_ANSWER_S", 60.0)
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        scheduler.will_show(shown("j", "RUNNING", change(1)))
        with pytest.raises(TimedOut) as late:
            await client.job("j").result("200ms")
        assert late.value.job == "j"
        assert "RUNNING" in late.value.why


async def test_a_wait_ends_by_its_timeout_though_a_question_gets_no_answer(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "FIRST_ANSWER_S", 0.1)
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        scheduler.will_show(None)
        with pytest.raises(TimedOut) as late:
            await client.job("j").result("10ms")
        assert "in an unknown state" in late.value.why
        scheduler.will_show(shown("j", "RUNNING", change(1)), None)
        waiting = asyncio.create_task(client.job("j").result("1h"))
        await until(lambda: len(scheduler.asked) == 2)
        await scheduler.say("j", "RUNNING", change(5))
        await until(lambda: len(scheduler.asked) == 3, what="it asks for what it missed")
        skip_time(monkeypatch, 3600)
        with pytest.raises(TimedOut) as late:
            await waiting
        assert "RUNNING" in late.value.why
        assert len(scheduler.asked) == 3


async def test_a_job_that_is_over_says_so_without_time_to_wait(nats_url: str, unique: str) -> None:
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        scheduler.will_show(shown("j", "SUCCEEDED", change(1, "SUCCEEDED", code=0)))
        assert (await client.job("j").result(0)).state == "SUCCEEDED"


async def test_output_without_an_end_does_not_hold_the_follower(nats_url: str, unique: str) -> None:
    """The worker died: its streams never end, the job did."""
    request = {"run": {"argv": ["x"]}}
    before = shown("j", "RUNNING", change(1), request=request)
    async with follow(nats_url, unique, before, output=True) as (scheduler, following):
        await following.revisions()
        await scheduler.say("j", "FAILED", change(2, "FAILED"))
        assert await following.revisions() == ("FAILED", [2])
        await following.ends()


async def test_late_output_is_waited_for_whatever_the_clock_of_this_host_says(nats_url: str, unique: str) -> None:
    """The transitions have times of the ledger, here those of 1970."""
    request = {"run": {"argv": ["x"]}}
    over = shown("j", "SUCCEEDED", change(1), change(2, "SUCCEEDED"), request=request)
    async with follow(nats_url, unique, over, output=True) as (scheduler, following):
        assert await following.revisions() == ("SUCCEEDED", [1, 2])
        for stream in ("out", "err"):
            frame = Output(1, stream, 0, "late", end=True, next=4)
            await scheduler.say_raw(following.client._wire.subjects.log(unique, "j", 0), encode(frame))
        assert [item.text async for item in following.rest() if isinstance(item, Piece)] == ["late", "late"]


async def test_two_tasks_cannot_read_one_watch(nats_url: str, unique: str) -> None:
    first = shown("j", "QUEUED", change(1, "ACCEPTED"))
    async with follow(nats_url, unique, first) as (scheduler, following):
        assert await following.revisions() == ("QUEUED", [1])
        reading = asyncio.create_task(following.revisions())
        with pytest.raises(RuntimeError, match="another task reads this watch"):
            await anext(following.watch.follow(90))
        await scheduler.say("j", "SUCCEEDED", change(2, "SUCCEEDED"))
        assert await reading == ("SUCCEEDED", [2])


async def test_output_comes_once_though_the_first_answer_is_older_than_what_was_heard(
    nats_url: str, unique: str
) -> None:
    """The job was submitted and ended between the subscription and the answer to the first question."""
    older = shown("j", "QUEUED", change(1, "ACCEPTED"), request={"run": {"argv": ["x"]}})
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        scheduler.will_show(
            Answer("show", 7, {**older, "replica_states": [{"replica": 0, "state": "QUEUED", "attempt": 0}]})
        )
        pages = LogPage(1, "out", 0, 5, 5, "hello", over=True), LogPage(1, "err", over=True)
        scheduler.will("logs", *(Answer("logs", 9, msgspec.to_builtins(page)) for page in [*pages, *pages]))
        async with client.watch("j", past=True) as watch:
            await scheduler.say("j", "SUCCEEDED", change(1, "ACCEPTED"), change(2), change(3, "SUCCEEDED"))
            subject = scheduler.subjects.log(unique, "j", 0)
            await scheduler.say_raw(subject, encode(Output(1, "out", 0, "hello", end=True, next=5)))
            await scheduler.say_raw(subject, encode(Output(1, "err", 0, "", end=True)))
            await until(lambda: len(watch._pending) == 3, what="all is heard")
            items = [item async for item in watch.follow(90)]
        assert [each.rev for item in items if isinstance(item, Event) for each in item.changes] == [1, 2, 3]
        assert [item.text for item in items if not isinstance(item, Event) and item.text] == ["hello"]
        assert [verb for verb, _ in scheduler.asked] == ["show"]


async def test_what_is_heard_from_the_beginning_needs_no_asking(nats_url: str, unique: str) -> None:
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        for events in ("job", "tenant"):
            request = client.request(["x"], job="j", fields={"driver": "noop", "events": events})
            async with AsyncWatch(client._wire._histories, "j", to_submit=request) as watch:
                following = Following(watch, client)
                history = [change(1, "ACCEPTED"), change(2, "PLACED")], [change(3), change(4, "SUCCEEDED")]
                for changes in history:
                    state = changes[-1].state
                    if events == "job":
                        await scheduler.say("j", state, *changes)
                    else:
                        await scheduler.say_to_tenant(scheduler.event("j", state, *changes))
                    assert await following.revisions() == (state, [each.rev for each in changes])
                await following.ends()
        assert scheduler.asked == []
        scheduler.will_show(shown("j", "SUCCEEDED", change(1, "ACCEPTED"), change(2), change(3, "SUCCEEDED")))
        again = client.request(["x"], job="j")
        async with AsyncWatch(client._wire._histories, "j", to_submit=again) as watch:
            following = Following(watch, client)
            await scheduler.say("j", "SUCCEEDED", change(3, "SUCCEEDED"))  # the first two were lost
            assert await following.revisions() == ("SUCCEEDED", [1, 2, 3])
            await following.ends()
        assert [verb for verb, _ in scheduler.asked] == ["show"]


async def test_a_crowd_hears_the_tenants_frames_together(nats_url: str, unique: str) -> None:
    """Those on their own subject and those in the crowd have one history; the first alone get an event of their own."""
    first = shown("j", "QUEUED", change(1, "ACCEPTED"))
    async with follow(nats_url, unique, first) as (scheduler, alone), contextlib.AsyncExitStack() as opened:
        client = alone.client
        for _ in range(CROWD - 1):
            await opened.enter_async_context(client.watch("other"))
        crowd = [Following(await opened.enter_async_context(client.watch("j")), client) for _ in range(2)]
        everybody = [alone, *crowd]
        for following in everybody:
            assert await following.revisions() == ("QUEUED", [1])
        assert [asked.get("events") for _, asked in scheduler.asked] == [None, "tenant", "tenant"]
        for changes in ([change(2, "PLACED")], [change(3), change(4, "SUCCEEDED")]):
            state = changes[-1].state
            event = scheduler.event("j", state, *changes)
            await scheduler.say("j", state, *changes)
            await scheduler.say_to_tenant(scheduler.event("other", "QUEUED", change(2)), event)
            for following in everybody:
                assert await following.revisions() == (state, [each.rev for each in changes])
        for following in everybody:
            await following.ends()
        assert len(scheduler.asked) == 3


async def test_a_frame_of_the_tenant_that_cannot_be_read_makes_the_crowd_ask(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moorage.client.follow.follower.REPAIR_S_FIRST", 600.0)  # silence would make it ask, too
    before, after = shown("j", "QUEUED", change(1)), shown("j", "SUCCEEDED", change(1), change(2, "SUCCEEDED"))
    async with (
        follow(nats_url, unique, before, before, after) as (scheduler, alone),
        contextlib.AsyncExitStack() as all_,
    ):
        client = alone.client
        for _ in range(CROWD - 1):
            await all_.enter_async_context(client.watch("other"))
        crowd = Following(await all_.enter_async_context(client.watch("j")), client)
        for following in (alone, crowd):
            await following.revisions()
        await scheduler.say_raw(scheduler.subjects.events(unique), b"{not json")
        assert await crowd.revisions() == ("SUCCEEDED", [2])
        await crowd.ends()


async def test_the_last_of_a_crowd_hears_the_tenant_no_more(nats_url: str, unique: str) -> None:
    async with AsyncClient(nats_url, tenant=unique) as client, contextlib.AsyncExitStack() as opened:
        for _ in range(CROWD):
            await opened.enter_async_context(client.watch("other"))
        feed = client._wire._histories
        for _ in range(2):  # again after the last has left
            async with client.watch("j"), client.watch("k"):
                assert feed._subscription is not None
            assert feed._subscription is None


async def test_what_is_run_has_no_subject_of_its_own_unless_it_says_so(nats_url: str, unique: str) -> None:
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        scheduler.will("submit", Accepted("j", 9, "QUEUED"))
        running = [
            asyncio.create_task(client.run(["x"], job=f"j{number}", driver="noop", wait="20s"))
            for number in range(CROWD)
        ]
        chosen = asyncio.create_task(client.run(["x"], job="chosen", driver="noop", wait="20s", events="job"))
        await until(lambda: len(scheduler.asked) == CROWD + 1, what="all are submitted")
        said = {request["job"]: request.get("events", "job") for _, request in scheduler.asked}
        assert said == {**dict.fromkeys((f"j{number}" for number in range(CROWD)), "tenant"), "chosen": "job"}
        link: Any = client._wire.link
        heard = [each.subject for each in link._subscriptions if ".log." not in each.subject]
        subjects = scheduler.subjects
        assert heard[-2:] == [subjects.events(unique), subjects.event(unique, "chosen")]
        history = [change(1, "ACCEPTED"), change(2, "SUCCEEDED", code=0)]
        await scheduler.say("chosen", "SUCCEEDED", *history)
        await scheduler.say_to_tenant(
            *(scheduler.event(f"j{number}", "SUCCEEDED", *history) for number in range(CROWD))
        )
        for result in await asyncio.gather(*running, chosen):
            assert (result.state, len(result.changes)) == ("SUCCEEDED", 2)


async def test_what_is_run_as_a_service_is_heard_of_all_its_members_and_names_the_job_that_replaced_it(
    nats_url: str, unique: str
) -> None:
    """A member that moves to another host is one more replica, also of a service of one."""
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        scheduler.will("submit", Accepted("s", 9, "QUEUED"))
        running = asyncio.create_task(client.run(["x"], job="s", service={"name": "s"}, events="job", wait="90s"))
        await until(lambda: scheduler.asked, what="it is submitted")
        for replica in (0, 1):
            output = Output(1, "out", 0, f"of {replica}\n")
            await scheduler.say_raw(scheduler.subjects.log(unique, "s", replica), encode(output))
        end = change(2, "CANCELLED", why="replaced by job v-2")
        await scheduler.say("s", "CANCELLED", change(1, "ACCEPTED"), end)
        with pytest.raises(JobFailed, match="job s was cancelled: replaced by job v-2") as failed:
            await running
        assert failed.value.result.stdout == "of 0\nof 1\n"
        assert (failed.value.problem.next, failed.value.result.replaced_by) == ("moorage logs v-2", "v-2")


#: of a driver that no client knows before it is told
OWN = {"request": {"run": {"argv": ["x"], "driver": "parrot"}}}


@pytest.mark.parametrize("told", [{"ends_streams": True}, None])
async def test_the_end_of_the_output_is_waited_for_where_the_driver_tells_that_it_comes(
    nats_url: str, unique: str, told: dict[str, Any] | None
) -> None:
    """Of a job that is submitted here nothing is asked, but what a driver can do that this client meets."""
    can = {} if told is None else {"capabilities": told}
    submitted = build_request({"run": OWN["request"]["run"], "events": "job"}, None, "j", {})
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        scheduler.will_show(shown("j", "RUNNING", change(1), **OWN, **can))
        for _ in range(2):  # the second time the driver is known
            async with AsyncWatch(client._wire._histories, "j", to_submit=submitted, output=True) as watch:
                following = Following(watch, client)
                await scheduler.say("j", "RUNNING", change(1))
                assert await following.revisions() == ("RUNNING", [1])
                assert client._wire._histories.drivers.can(watch.driver).ends_streams == (told is not None)
                await scheduler.say("j", "SUCCEEDED", change(2, "SUCCEEDED"))
                assert await following.revisions() == ("SUCCEEDED", [2])
                for stream in ("out", "err"):
                    frame = Output(1, stream, 0, "late", end=True, next=4)
                    await scheduler.say_raw(client._wire.subjects.log(unique, "j", 0), encode(frame))
                heard = [item.text async for item in following.rest() if isinstance(item, Piece)]
                assert told is None or heard == ["late", "late"]
        assert [verb for verb, _ in scheduler.asked] == ["show"] * (1 if told is not None else 2)


async def test_what_a_worker_tells_beside_the_output_comes_where_it_is_wanted(
    nats_url: str, unique: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        scheduler.will_show(*[shown("j", "PLACED", change(1, "ACCEPTED"), change(2, "PLACED"))] * 2)
        async with (
            client.watch("j", output=True, notes=True) as noted,
            client.watch("j", output=True) as plain,
        ):
            for frame in (
                Output(1, "err", 0, "", note="pulling the image a: 34 % of 10 MiB"),
                Output(1, "err", 0, "", ports={"80": "h:1"}),
                Output(1, "out", 0, "x\n", next=2),
            ):
                await scheduler.say_raw(scheduler.subjects.log(unique, "j", 0), encode(frame))
            found: dict[str, list[Piece]] = {"noted": [], "plain": []}
            for name, watch in (("noted", noted), ("plain", plain)):
                async with asyncio.timeout(30):
                    async for item in watch:
                        if isinstance(item, Piece):
                            found[name].append(item)
                            if item.text:
                                break
    assert [(piece.note[:7], piece.ports, piece.text) for piece in found["noted"]] == [
        ("pulling", {}, ""), ("", {"80": "h:1"}, ""), ("", {}, "x\n"),
    ]  # fmt: skip
    assert [piece.text for piece in found["plain"]] == ["x\n"]
    progress = Progress("j", whole=True)
    for piece in [found["noted"][0], *found["noted"]]:
        progress.output(piece)
    out, err = capsys.readouterr()
    assert out == "x\n"
    assert [line.split("  ")[-1] for line in err.splitlines()] == ["pulling the image a", "ports: 80 at h:1"]


async def test_what_waits_for_readers_is_bounded_in_bytes_for_a_whole_client(nats_url: str, unique: str) -> None:
    request = {"run": {"argv": ["x"]}}
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        scheduler.will_show(shown("j", "RUNNING", change(1), request=request))
        async with client.watch("j", output=True) as one, client.watch("j", output=True) as other:
            readers = [Following(one, client), Following(other, client)]
            for reader in readers:
                await reader.revisions()
            budget = client._wire._histories.budget
            whole = budget.left
            budget.left = 30_000
            for at in range(20):
                frame = Output(1, "out", at * 2000, "x" * 2000, next=at * 2000 + 2000)
                await scheduler.say_raw(client._wire.subjects.log(unique, "j", 0), encode(frame))
            await until(
                lambda: one.lost + other.lost == 2 * 20 - 30_000 // 2512, what="the rest is refused, and counted"
            )
            assert budget.left < 2512
            await scheduler.say("j", "RUNNING", change(1), change(2))
            await scheduler.say("j", "SUCCEEDED", change(3, "SUCCEEDED"))
            for frame in (Output(1, stream, 0, "", end=True) for stream in ("out", "err")):
                await scheduler.say_raw(client._wire.subjects.log(unique, "j", 0), encode(frame))
            scheduler.will_show(shown("j", "SUCCEEDED", change(1), change(2), change(3, "SUCCEEDED"), request=request))
            for reader in readers:
                events = [item async for item in reader.rest() if isinstance(item, Event)]
                assert [each.rev for event in events for each in event.changes] == [2, 3], "no event is lost"
            assert budget.left == 30_000
        budget.left = whole
