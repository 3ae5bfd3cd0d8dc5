"""A `SimFleet` that is idle sleeps: an hour of waiting costs next to nothing, and jobs fare as if it had not slept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final

import pytest

from moorage.client import AsyncClient, GpuSpec, TimedOut
from moorage.client.follow.follower import REPAIR_S
from moorage.scheduler.core.config import Config
from moorage.testing import Ran, SimFleet, SimulatedClock, Task
from moorage.testing.bus.bus import Faults, FaultyNetwork, Stalled
from moorage.worker import HandlerContext
from moorage.worker.drivers.handler.call import Handler
from tests.scenes import in_virtual_time
from tests.waiting import until, until_state

Scenario = Callable[[AsyncClient, SimFleet], Awaitable[None]]

#: what a renewal or a heartbeat notices comes so much earlier or later, as a skip sets those later
BEAT_MS: Final = 3_100


def by_words(task: Task) -> Ran:
    """The first word is how long it runs, the second the attempt with which it succeeds."""
    seconds, well = float(task.argv[0]), int(task.argv[1]) if len(task.argv) > 1 else 1
    return Ran(int(task.attempt < well), seconds=seconds)


async def paint(context: HandlerContext) -> int:
    await asyncio.sleep(float(context.input))
    return context.attempt


HANDLERS: Final[dict[str, Handler]] = {"paint": paint}


async def sleep_until(clock_s: float) -> None:
    await asyncio.sleep(clock_s - asyncio.get_running_loop().time())


# ---------------------------------------------------------------------------------------------------- the scenarios


async def waits_in_the_queue(moorage: AsyncClient, fleet: SimFleet) -> None:
    for n, gpus in enumerate((2, 1, 2, 1)):
        await moorage.submit(["400"], gpu=gpus, job=f"j{n}", priority=10 * n)
    await sleep_until(500)
    await moorage.submit(["1"], gpu=1, job="late", priority=99)


async def runs_out_of_time(moorage: AsyncClient, fleet: SimFleet) -> None:
    await moorage.submit(["5000"], gpu=1, job="deadline", deadline_s=333.0)
    await moorage.submit(["5000"], gpu=1, job="limit", limit=777.0)
    await moorage.submit(["1"], gpu=2, job="too-late", start_within_s=555.0)
    await moorage.submit(["1"], gpu=2, job="in-time", start_within_s=900.0)


async def loses_a_worker(moorage: AsyncClient, fleet: SimFleet) -> None:
    await moorage.submit(["900"], gpu=2, job="both")
    await moorage.submit(["900"], gpu=2, job="other")
    await sleep_until(400)
    await fleet.kill_worker("sim-0000")
    await sleep_until(700)
    await fleet.start_worker("sim-0000")


async def tries_again(moorage: AsyncClient, fleet: SimFleet) -> None:
    await moorage.submit(["100", "4"], gpu=1, job="third", retries=5)
    await moorage.submit(["1", "9"], gpu=1, job="never", retries=3)


async def holds_hosts_back(moorage: AsyncClient, fleet: SimFleet) -> None:
    """A gang waits for all hosts; jobs with time limits go past it while they surely end before, others do not."""
    for n, seconds in enumerate((600, 900)):
        await moorage.submit([str(seconds)], gpu=2, job=f"long{n}", limit=float(seconds + 10))
    await moorage.submit(["50"], gpu=GpuSpec(count=2, scheduling="gang"), replicas=2, job="gang")
    for n in range(8):
        await sleep_until(100 + 100 * n)
        await moorage.submit(["30"], gpu=1, job=f"short{n}", limit=40.0)
        await moorage.submit(["30"], gpu=1, job=f"unlimited{n}")


async def takes_turns(moorage: AsyncClient, fleet: SimFleet) -> None:
    await moorage.admin.share(tenant="a", weight=3)
    await moorage.admin.share(tenant="b", weight=1)
    for n in range(8):
        for tenant in "ab":
            async with AsyncClient(transport=fleet, tenant=tenant) as other:
                await other.submit(["100"], gpu=1, job=f"{tenant}{n}")


async def calls_functions(moorage: AsyncClient, fleet: SimFleet) -> None:
    await moorage.submit_handler("paint", 500, job="paint")
    await moorage.submit_handler("paint", 5_000, job="limit", limit=600.0)
    await moorage.submit(["sleep", "700"], driver="noop", job="noop")


async def moves_to_another_leader(moorage: AsyncClient, fleet: SimFleet) -> None:
    await moorage.submit(["500"], gpu=2, job="runs")
    await moorage.submit(["500"], gpu=2, job="runs-too")
    await moorage.submit(["500"], gpu=2, job="waits")
    await sleep_until(300)
    await fleet.kill_scheduler()


async def is_cut_off(moorage: AsyncClient, fleet: SimFleet) -> None:
    await moorage.submit(["500"], gpu=2, job="runs")
    await until_state(moorage.job("runs"), "RUNNING")
    await sleep_until(200)
    fleet.cut_off("sim-0000")
    await sleep_until(300)
    fleet.reconnect()


async def is_drained(moorage: AsyncClient, fleet: SimFleet) -> None:
    await moorage.submit(["500"], gpu=2, job="one")
    await moorage.submit(["500"], gpu=2, job="other")
    await sleep_until(100)
    await moorage.fleet.drain("sim-0000", begin=100.0, within=150.0, last=400.0)


async def ages(moorage: AsyncClient, fleet: SimFleet) -> None:
    await moorage.submit(["500"], gpu=2, job="runs")
    await moorage.submit(["100"], gpu=2, job="old", priority=1)
    await sleep_until(400)
    await moorage.submit(["100"], gpu=2, job="young", priority=5)


async def preempts(moorage: AsyncClient, fleet: SimFleet) -> None:
    await moorage.submit(["500"], gpu=2, job="cheap", priority=1)
    await sleep_until(20)
    await moorage.submit(["100"], gpu=2, job="dear", priority=90)


async def preempts_again(moorage: AsyncClient, fleet: SimFleet) -> None:
    for number in range(8):
        await moorage.submit(["5000"], gpu=1, job=f"cheap{number}", priority=1)
    await sleep_until(200.3)
    await moorage.submit(["5.37", "9"], gpu=1, job="dear", priority=90, retries=6)
    await sleep_until(213.4)  # less than a second before the third attempt of the other one is due
    await moorage.submit(["1"], gpu=1, job="noise", priority=0)
    await sleep_until(900)


#: each with its fleet, and by how many ms the times may differ
SCENARIOS: Final[Mapping[str, tuple[Scenario, str, int, dict[str, Any]]]] = {
    "queue": (waits_in_the_queue, "1x2xH100", 10, {}),
    "time": (runs_out_of_time, "1x2xH100", 10, {}),
    "loss": (loses_a_worker, "2x2xH100", BEAT_MS, {}),
    "retries": (tries_again, "1x2xH100", 10, {}),
    "reservation": (holds_hosts_back, "2x2xH100", 10, {}),
    "shares": (takes_turns, "1x2xH100", 10, {}),
    "functions": (calls_functions, "1x2xH100", 10, {"handlers": HANDLERS}),
    "takeover": (moves_to_another_leader, "2x2xH100", 10, {}),
    "partition": (is_cut_off, "2x2xH100", BEAT_MS, {}),
    "drain": (is_drained, "2x2xH100", BEAT_MS, {}),
    "ageing": (ages, "1x2xH100", 10, {"config": Config(ageing=60.0)}),
    "preemption": (preempts, "1x2xH100", BEAT_MS, {"config": Config(preempt_priority=80)}),
    "preemption of a retry": (preempts_again, "1x8xH100", BEAT_MS, {"config": Config(preempt_priority=80)}),
    "late": (waits_in_the_queue, "1x2xH100", 300, {"delay_ms": (1, 40)}),
}


def told(name: str, *, skips: bool) -> tuple[list[tuple[Any, ...]], list[int]]:
    """Return what became of each replica in a scenario, transition by transition, and when.

    What two workers report at the same time comes in any order.
    """
    scenario, word, _, more = SCENARIOS[name]
    if "delay_ms" in more:
        more = {"network": FaultyNetwork(seed=1, **more)}
    rows: list[tuple[tuple[Any, ...], int]] = []

    async def scene() -> None:
        fleet = SimFleet(word, script=by_words, **more)
        async with AsyncClient(transport=fleet) as moorage:
            await scenario(moorage, fleet)
            for tenant in ("default", "a", "b"):
                async with AsyncClient(transport=fleet, tenant=tenant) as owner:
                    for job in sorted(row.job for row in (await owner.ls()).jobs):
                        for each in [each async for event in owner.job(job).events() for each in event.changes]:
                            what = (job, each.replica, each.state, each.attempt, each.worker, each.code, each.why)
                            rows.append((what, each.time_ms))

    SimulatedClock(skips=skips).run(scene())
    rows.sort(key=lambda row: row[0][:2])
    return [what for what, _ in rows], [when for _, when in rows]


@pytest.mark.parametrize(
    "name", [name if name == "retries" else pytest.param(name, marks=pytest.mark.slow) for name in SCENARIOS]
)
def test_jobs_fare_as_if_no_time_were_skipped(name: str) -> None:
    what, when = told(name, skips=True)
    each_beat, each_when = told(name, skips=False)
    assert what == each_beat
    assert len(what) > 5
    differ_ms = max(abs(one - other) for one, other in zip(when, each_when, strict=True))
    assert differ_ms <= SCENARIOS[name][2]


async def _records(fleet: SimFleet) -> int:
    assert fleet.scheduler is not None
    assert fleet.scheduler.term is not None
    return fleet.scheduler.term.records


def records_in(seconds: float, fleet: SimFleet, during: Callable[[AsyncClient], Awaitable[None]]) -> int:
    """Return how many records the scheduler writes in so much virtual time."""
    written: list[int] = []

    async def scene() -> None:
        async with AsyncClient(transport=fleet) as moorage:
            await during(moorage)
            await asyncio.sleep(10)
            written.append(await _records(fleet))
            await asyncio.sleep(seconds)
            written.append(await _records(fleet))

    SimulatedClock().run(scene())
    return written[1] - written[0]


async def nothing(moorage: AsyncClient) -> None:
    """An idle fleet."""


async def a_job_that_runs(moorage: AsyncClient) -> None:
    await moorage.submit(["9999"], gpu=1)


async def jobs_that_wait(moorage: AsyncClient) -> None:
    for _ in range(3):
        await moorage.submit(["9999"], gpu=2)


async def jobs_that_match_nothing(moorage: AsyncClient) -> None:
    for _ in range(3):
        await moorage.submit(["9999"], gpu="1xA100", on_no_match="wait")


async def jobs_of_several_priorities(moorage: AsyncClient) -> None:
    """The ones that run cannot be ended for those that wait: another one asks for more than any host has, say."""
    for priority in (60, 70):
        await moorage.submit(["9999"], gpu=2, priority=priority)
    for priority, gpu in ((0, "2xH100"), (5, "1xH100"), (90, "1xA100")):
        await moorage.submit(["9999"], gpu=gpu, priority=priority, on_no_match="wait")


async def jobs_that_are_followed(moorage: AsyncClient) -> None:
    """One runs and one waits in the queue, and both are awaited together as well."""
    jobs = [await moorage.submit(["9999"], gpu=2) for _ in range(2)]
    asyncio.gather(*(job.result() for job in jobs), moorage.wait(jobs), return_exceptions=True)


@pytest.mark.parametrize(
    ("during", "config"),
    [
        (nothing, None),
        (a_job_that_runs, None),
        (jobs_that_wait, None),
        (jobs_that_are_followed, None),
        (jobs_that_match_nothing, None),
        (jobs_of_several_priorities, Config(preempt_priority=80)),
        (jobs_of_several_priorities, Config(ageing=4.0)),
    ],
    ids=["idle", "runs", "waits", "followed", "no-match", "preemption", "ageing"],
)
def test_an_hour_of_waiting_takes_few_records(
    during: Callable[[AsyncClient], Awaitable[None]], config: Config | None
) -> None:
    """And not the 4,500 of a fleet that writes its heartbeats and renews its sessions.

    Each kind of job that fits nowhere has one more, as its minute is over. As they are overdue, there is one for all.
    """
    assert records_in(3600, SimFleet("2x2xH100", script=by_words, config=config), during) <= 8 + 3 + 1


def test_no_heartbeat_is_skipped_where_messages_may_be_lost() -> None:
    network = FaultyNetwork()
    network.between("sim-0000", "server", Faults(drop=0.001))
    assert records_in(60, SimFleet("1x1xH100", network=network), nothing) > 50


async def hears_nothing(fleet: SimFleet) -> None:
    fleet.network.between("follower", "scheduler-1", Faults(drop=1.0))
    await sleep_until(301)
    fleet.reconnect()


async def never_sends_it(fleet: SimFleet) -> None:
    """The leader ends once the end of the job is stored, and before it knows so."""
    fleet.network.lose_next_ack("scheduler-1")
    await until(lambda: fleet.network.counters["lost_acks"] > 0)
    await fleet.kill_scheduler()


@pytest.mark.parametrize("lose", [hears_nothing, never_sends_it])
def test_an_event_that_was_lost_is_asked_for_as_soon_as_without_skips(
    lose: Callable[[SimFleet], Coroutine[Any, Any, None]],
) -> None:
    heard_s: list[float] = []

    async def script(task: Task) -> Ran:
        for _ in range(6):
            await asyncio.sleep(0.9)  # not skipped: from now on the follower asks after silences of REPAIR_S
        await sleep_until(300)
        losing.append(asyncio.create_task(lose(fleet)))
        await asyncio.sleep(0.01)
        return Ran()

    async def scene() -> None:
        async with AsyncClient(transport=fleet, name="follower") as moorage:
            await (await moorage.submit(["x"], gpu=1)).result(wait=4000)
            heard_s.append(asyncio.get_running_loop().time())

    for skips in (True, False):
        losing: list[asyncio.Task[None]] = []
        fleet = SimFleet("1x1xH100", script=script)
        SimulatedClock(skips=skips).run(scene())
    assert abs(heard_s[0] - heard_s[1]) <= REPAIR_S + BEAT_MS / 1000
    assert max(heard_s) < 320


@in_virtual_time
async def test_a_wait_for_a_job_is_over_in_time_while_the_fleet_sleeps() -> None:
    async with AsyncClient(transport=SimFleet("1x1xH100", script=by_words)) as moorage:
        job = await moorage.submit(["9999"], gpu=1)
        for wait in (job.result(wait=1000), moorage.wait([job], wait=1000)):
            began_s = asyncio.get_running_loop().time()
            with pytest.raises(TimedOut):
                await wait
            assert asyncio.get_running_loop().time() - began_s == pytest.approx(1000, abs=0.01)


def test_a_wait_without_an_end_is_told_at_once() -> None:
    async def scene() -> None:
        async with SimFleet("1x1xH100"):
            await asyncio.Event().wait()

    with pytest.raises(Stalled):
        SimulatedClock().run(scene())


@in_virtual_time
async def test_neither_side_counts_what_was_skipped_as_silence() -> None:
    """Asked at once after an hour, the leader answers, and knows all workers and schedulers as heard just now."""
    async with AsyncClient(transport=SimFleet("2x1xH100", script=by_words, handlers=HANDLERS)) as moorage:
        await moorage.submit(["4000"], gpu=1, job="runs")
        for _ in range(3):
            await asyncio.sleep(3600)
            fleet = await moorage.fleet.show()
            assert {row.state for row in fleet.workers} == {"up"}
            assert len(fleet.data["schedulers"]) == 1
            assert (await (await moorage.submit_handler("paint", 0, gpu=1)).result()).value == 1
        assert fleet.epoch == 1
        assert (await moorage.job("runs").result()).changes[-1].attempt == 1


def test_a_leader_that_was_stopped_says_so_and_one_that_sleeps_does_not(caplog: pytest.LogCaptureFixture) -> None:
    """It went on leading without a word, while nobody was answered."""
    clock = SimulatedClock()

    def said() -> list[str]:
        return [line for line in caplog.messages if "did not run for" in line]

    async def scene() -> None:
        async with AsyncClient(transport=SimFleet("1x2xH100", script=by_words)) as moorage:
            await (await moorage.submit(["4000"], gpu=1)).result()
            assert said() == []
            clock.advance(10)
            await asyncio.sleep(1)

    clock.run(scene())
    assert said() == ["this leader did not run for 10 s: it was stopped, or its machine was paused or too busy"]
