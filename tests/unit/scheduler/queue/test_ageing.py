"""Ageing between priorities: nobody starves, and what age does not give."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.scheduler.answers.waiting import explain_job
from moorage.scheduler.core.ageing import Ageing
from moorage.scheduler.core.config import Config
from tests.unit.scheduler.driving import PATIENCE_MS, Driving, wire

MINUTE = 60_000
HOUR = 60 * MINUTE


def stream(drive: Driving, ms: int, *, backlog: int = 3) -> int:
    """Jobs of priority 90 without end on one GPU, a minute each; after how many ms one of 20 starts, -1 if not."""
    began, number, low, priority = drive.now, 0, "low", 90
    while drive.now < began + ms:
        waiting = sum(line.priority == priority and len(line.jobs) for line in drive.engine.queue.groups.values())
        for _ in range(backlog - waiting):
            drive.offer_submit(f"s{number}", gpu={}, priority=priority)
            number += 1
        drive.tick()
        if drive.now - began < MINUTE:
            drive.submit(low, gpu={}, priority=20)
        drive.pass_time(MINUTE, step=10_000)
        drive.run_out("w0")
        if drive.states(low) != ["QUEUED"]:
            return drive.now - began
    return -1


def one_gpu(**config: Any) -> Driving:
    drive = Driving(Config(ended_max=0, **config))
    drive.checks = False
    drive.worker("w0", 1)
    return drive


def test_under_an_endless_stream_of_higher_ones_a_low_one_starts_when_it_has_come_up_to_them() -> None:
    drive = one_gpu(ageing=60)
    found = stream(drive, 3 * HOUR)
    assert 70 * MINUTE <= found <= 75 * MINUTE, "70 points at 60 an hour, and those of 90 that came before it"


def test_without_ageing_it_would_wait_for_ever() -> None:
    drive = one_gpu()
    assert stream(drive, 3 * HOUR) == -1


def test_nobody_grows_above_the_bound() -> None:
    drive = one_gpu(ageing=600, ageing_to=80)
    assert stream(drive, 3 * HOUR) == -1
    assert Ageing(600_000, 80).of(20, 3 * HOUR) == 80
    assert Ageing(600_000, 80).of(90, 3 * HOUR) == 90


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=4, unique=True),
    st.integers(1, 90_000),
    st.integers(0, 100),
    st.integers(0, 40 * HOUR),
    st.data(),
)
def test_a_job_rises_at_the_ms_that_is_told_and_at_none_before(
    classes: list[int], rate_milli: int, most: int, waited_ms: int, data: st.DataObject
) -> None:
    classes.sort()
    ageing, priority = Ageing(rate_milli, most), data.draw(st.sampled_from(classes))
    now = ageing.standing(classes, priority, waited_ms)
    rises_ms = ageing.rises_ms(classes, priority, waited_ms)
    if rises_ms == math.inf:
        assert ageing.standing(classes, priority, 1 << 62) == now
    else:
        assert rises_ms > waited_ms
        assert (
            ageing.standing(classes, priority, int(rises_ms) - 1)
            == now
            < ageing.standing(classes, priority, int(rises_ms))
        )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.sampled_from([10, 20, 50, 90])), min_size=2, max_size=12),
    st.sampled_from([0.5, 60.0, 1_000.0]),
    st.sampled_from([40, 100]),
)
def test_the_order_is_that_of_the_classes_they_have_come_up_to(
    came: list[tuple[int, int]], points: float, most: int
) -> None:
    drive = one_gpu(ageing=points, ageing_to=most, reserve_after=86_400)  # nothing is reserved
    drive.submit("runs", gpu={}, priority=100)
    drive.settle()
    waiting: dict[str, int] = {}
    for number, (minutes, priority) in enumerate(came):
        drive.pass_time(minutes * MINUTE, step=5 * MINUTE)
        drive.submit(f"j{number}", gpu={}, priority=priority)
        waiting[f"j{number}"] = priority
    ageing = drive.config.ages
    assert ageing is not None
    while waiting:
        drive.run_out("w0")
        now = drive.state.time_ms
        classes = sorted(set(waiting.values()))

        def standing(name: str, now: int = now, classes: list[int] = classes) -> tuple[int, int]:
            job = drive.job(name)
            aged = min(max(most, waiting[name]), waiting[name] + int((now - job.accepted_ms) / HOUR * points))
            return (-max(waiting[name], *[each for each in classes if each <= aged], 0), job.num)

        expected = min(waiting, key=standing)
        placed = [name for name in waiting if drive.states(name) != ["QUEUED"]]
        assert placed == [expected]
        del waiting[expected]


def test_explain_says_what_it_counts_as_and_its_place() -> None:
    drive = one_gpu(ageing=60)
    drive.submit("runs", gpu={}, priority=100)
    drive.submit("low", gpu={}, priority=20)
    drive.submit("higher", gpu={}, priority=50)
    told = wire(explain_job(drive.engine, "t", "low"))
    assert (told["position"], "counts_as" in told) == (2, False)
    drive.pass_time(40 * MINUTE, step=5 * MINUTE)
    told = wire(explain_job(drive.engine, "t", "low"))
    assert (told["priority"], told["counts_as"], told["position"]) == (20, 50, 1)
    assert told["waited_ms"] > 40 * MINUTE
    queue, planner = drive.engine.queue, drive.engine.planner
    assert queue.before(50, drive.job("higher").num, planner.order.standing_of) == 1


# ------------------------------------------------------------------------------------------------------ interplay


def test_age_gives_no_right_to_end_others() -> None:
    drive = one_gpu(ageing=600, preempt_priority=80, preempt_after=0)
    drive.submit("runs", gpu={}, priority=50)
    drive.settle()
    drive.submit("aged", gpu={}, priority=60)
    drive.submit("class", gpu={"count": 2}, priority=90)  # so that there is a class to come up to
    drive.pass_time(HOUR, step=MINUTE)
    told = wire(explain_job(drive.engine, "t", "aged"))
    assert told["counts_as"] == 90
    assert drive.states("runs") == ["RUNNING"]


@pytest.mark.parametrize(("priority", "ends"), [(85, False), (95, True)])
def test_what_age_has_started_is_not_ended_by_what_it_passed(priority: int, ends: bool) -> None:
    drive = one_gpu(ageing=60, ageing_to=90, preempt_priority=80, preempt_after=0)
    drive.submit("runs", gpu={}, priority=100)
    drive.submit("low", gpu={}, priority=20)
    drive.pass_time(2 * HOUR, step=5 * MINUTE)
    drive.run_out("w0")
    assert drive.states("low") == ["RUNNING"]
    drive.submit("high", gpu={}, priority=priority)
    drive.pass_time(5_000)
    assert (drive.states("low") != ["RUNNING"]) == ends


def test_of_an_aged_gang_hosts_are_reserved_before_those_of_higher_ones() -> None:
    drive = Driving(Config(ended_max=0, ageing=600))
    drive.checks = False
    for name in ("w0", "w1"):
        drive.worker(name, 2)
    for number in range(4):
        drive.submit(f"r{number}", gpu={}, run={"driver": "noop", "timeout_s": 9000})
    drive.settle()
    drive.submit("gang", gpu={"count": 2, "scheduling": "gang"}, replicas=2, priority=30)
    drive.pass_time(PATIENCE_MS, step=5_000)
    drive.submit("wide", gpu={"count": 2}, priority=70)
    drive.engine.planner.verdicts.reservation = None
    drive.pass_time(10 * MINUTE, step=MINUTE)
    drive.cancel("wide")
    drive.submit("wide2", gpu={"count": 2}, priority=70)
    drive.pass_time(10 * MINUTE, step=5_000)  # the gang is first late, and takes the whole fleet: half as long again
    held = drive.reservation
    assert held.num == drive.job("gang").num


@pytest.mark.slow
def test_within_a_class_the_share_decides_and_not_who_has_waited_longer() -> None:
    from tests.unit.scheduler.ledger.test_fairshare import Saturated

    cluster = Saturated(8, Config(ended_max=0, ageing=3_600))
    cluster.drive.order("share", tenant="a", weight=3)
    cluster.run(10 * MINUTE, "ba", step=2_000, ends=2)
    assert cluster.got["a"] / cluster.got["b"] == pytest.approx(3, rel=0.05)
