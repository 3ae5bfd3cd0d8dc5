"""A plan is computed from nothing: made twice, or by a leader that has just begun, it is the same."""

from __future__ import annotations

import random

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.queue.queue import Waiting
from moorage.scheduler.core.schedule.plan import Known, Reservation, plan
from tests.turns import turns
from tests.unit.scheduler.driving import Driving


def told(found: Reservation | None) -> tuple[object, ...]:
    """What a reservation is, beyond one process: its shape is that of its job."""
    if found is None:
        return ()
    return (found.num, found.tenant, found.priority, tuple(sorted(found.hosts)), found.start_ms)


def planned(drive: Driving, last: Reservation | None = None, *, after_ms: int = 0) -> Reservation | None:
    """A plan of this leader, made so long after its last record."""
    planner, draft = drive.engine.planner, Draft(drive.state, drive.state.time_ms + after_ms)
    config, policy = drive.config, planner.preempting.policy
    known = Known(
        planner.fleet, planner.order, planner.estimates, planner.could_ever, policy.priority_of,
        int(config.reserve_after * 1000),
    )  # fmt: skip
    planner.order.begin(draft)
    return plan(known, draft, last).reservation


def anew(drive: Driving) -> Driving:
    """A new leader over the same state that has heard every worker; it learns from the ended jobs in memory."""
    new = drive.another()
    for name, worker in new.workers.items():
        if worker.session:
            new.send(name, worker.renew_frame())
    new.tick(obey=False)
    return new


def step(drive: Driving, chance: random.Random, number: int) -> None:
    act = chance.randrange(12)
    tenant = chance.choice("tuv")
    if act < 5:
        gang = chance.random() < 0.3
        gpu = {"count": 4, "scheduling": "gang"} if gang else {"count": chance.choice([1, 2, 4, 8])}
        run = {"driver": "noop", "argv": [chance.choice("abc")], "timeout_s": chance.choice([None, None, 60, 3_600])}
        priority = chance.choice([50, 50, 50, 10, 80])
        drive.offer_submit(
            f"j{number}",
            tenant=tenant,
            gpu=gpu,
            run=run,
            replicas=chance.choice([2, 4]) if gang else 1,
            priority=priority,
        )
    elif act == 5:
        drive.offer_order("share", tenant=tenant, weight=chance.choice([1, 3, None]))
    elif act == 6:
        drive.offer_operate(chance.choice(["cordon", "release", "release"]), chance.choice(["w0", "w1", "w2"]))
    elif act == 7:
        known = [job for job in drive.state.jobs.values() if not job.over]
        if known:
            job = chance.choice(known)
            drive.offer_order(chance.choice(["hold", "release"]), tenant=job.tenant, job=job.name)
    else:
        worker = drive.workers[chance.choice(["w0", "w1", "w2"])]
        running = [key for key, held in worker.held.items() if held.phase == "running"]
        if running:
            worker.finish(chance.choice(running), 0)
            drive.settle()
    drive.pass_time(chance.choice([500, 2_700, 40_000]), step=2_000)


@pytest.mark.parametrize("seed", turns(range(30), often=6, more=6))
def test_a_plan_is_the_same_twice_with_the_last_answer_or_without_and_by_a_new_leader(seed: int) -> None:
    chance = random.Random(seed)
    drive = Driving(Config(reserve_after=chance.choice([0.3, 2.2]), fair_share_half_life=600))
    for number in range(3):
        drive.worker(f"w{number}", 8)
    for number in range(60):
        step(drive, chance, number)
        held = drive.engine.planner.verdicts.reservation
        first = planned(drive)
        assert told(planned(drive)) == told(first)
        if held is None or not held.short_ms:  # else hosts that cannot hold their job are kept for a minute
            again = planned(drive, held)
            assert told(again) == told(first) or (again is not None and again.short_ms)
        if number % 4 == 0:
            # its first record is a millisecond later
            assert told(anew(drive).engine.planner.verdicts.reservation) == told(planned(drive, after_ms=1))


def test_a_takeover_changes_neither_the_job_nor_the_hosts_nor_the_start() -> None:
    drive = Driving()
    for number in range(3):
        drive.worker(f"w{number}", 8)
    for number in range(3):
        drive.submit(f"runs{number}", gpu={"count": 4}, run={"driver": "noop", "timeout_s": 3_600 + 60 * number})
    drive.settle()
    drive.submit("big", gpu={"count": 8, "scheduling": "gang"}, replicas=2)
    drive.pass_time(40_000)
    held = drive.engine.planner.verdicts.reservation
    assert held is not None
    drive.lead()
    drive.renew()
    drive.pass_time(2_000)
    assert told(drive.engine.planner.verdicts.reservation) == told(held)


def test_a_cancelled_job_with_a_reservation_leaves_its_group_with_the_record() -> None:
    """The plan sees first that nothing of it waits any more; `Driving.check_queue` looks at the group."""
    drive = Driving(Config(reserve_after=0, ageing=0))
    drive.worker("w0", 2)
    run = {"argv": ["a"], "timeout_s": 36_000}
    drive.offer_submit("j1", tenant="t", gpu={"count": 1}, run=run, priority=60)
    drive.offer_submit("j2", tenant="w", gpu={"count": 1}, run=run, replicas=2)
    drive.tick(400)
    drive.offer_submit("j3", tenant="v", gpu={"count": 2}, replicas=2)
    drive.tick(1_001)
    held = drive.engine.planner.verdicts.reservation
    assert held is not None
    assert (held.num, held.replica) == (drive.job("j2", "w").num, 1)
    drive.offer_cancel("j2", tenant="w")
    drive.tick(50)
    assert drive.states("j2", "w") == ["CANCELLING", "CANCELLED"]


def test_a_reservation_stays_when_a_lower_replica_of_its_job_comes_back() -> None:
    waiting = Waiting(((7, 9),))
    assert waiting.first == 7
    waiting.come_back(3)
    waiting.come_back(3)
    assert (waiting.first, waiting.back, waiting.has(7), waiting.has(3), waiting.has(4)) == (3, [3], True, True, False)
