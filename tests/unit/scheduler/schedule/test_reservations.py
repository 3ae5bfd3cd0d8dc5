"""Reservations: given up in the record in which their job may not start any more, and planned alike by every leader."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.state import new_job
from moorage.scheduler.core.queue.queue import Waiting
from moorage.scheduler.core.schedule import verdicts
from moorage.scheduler.core.schedule.plan import SEARCHES_MAX, SHORT_MS, Answer, Known, Reservation, plan
from moorage.scheduler.core.schedule.runtime import Estimates
from moorage.scheduler.core.schedule.soonest import soonest
from tests.turns import turns
from tests.unit.scheduler.driving import PATIENCE_MS, Driving

#: hosts are reserved only where the ends of what runs are known
ENDS_SOME_TIME = {"driver": "noop", "timeout_s": 86_400}


def reserved(**big: object) -> Driving:
    """One host of eight, four of them leased by tenant v, and a job of tenant t for eight that has a reservation."""
    drive = Driving.with_hosts(8, config=Config(fair_share_half_life=600))
    drive.submit("runs", tenant="v", gpu={"count": 4}, run=ENDS_SOME_TIME)
    drive.settle()
    drive.submit("big", gpu={"count": 8}, **big)
    drive.pass_time(PATIENCE_MS + 2_000)
    held = drive.reservation
    assert held.num == drive.job("big").num
    return drive


ENDS: dict[str, Callable[[Driving], object]] = {
    "hold of the tenant": lambda drive: drive.order("hold"),
    "hold of the job": lambda drive: drive.order("hold", job="big"),
    "limit": lambda drive: drive.order("limit", gpus=7),
    "cancel": lambda drive: drive.cancel("big"),
    "deadline": lambda drive: drive.pass_time(300_000),
}


def led_anew(drive: Driving) -> None:
    drive.lead()
    drive.renew()


#: what an operator may have done with the tenant before in this term, or with others
BEFORE: dict[str, Callable[[Driving], object]] = {
    "first act of the term": lambda drive: None,
    "held before": lambda drive: (drive.order("hold"), drive.order("release")),
    "limited before": lambda drive: (drive.order("limit", gpus=64), drive.order("limit", gpus=None)),
    "another has a share": lambda drive: drive.order("share", tenant="x", weight=1),
    "led anew": led_anew,
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("act", ENDS)
@pytest.mark.parametrize("late", [False, True])
def test_a_job_that_may_not_start_keeps_no_host_from_others(act: str, before: str, late: bool) -> None:
    """`late`: what came before was done once the reservation stood."""
    if late:
        drive = reserved(deadline_s=300)
        BEFORE[before](drive)
    else:
        drive = Driving(Config(fair_share_half_life=600))
        drive.submit("none", gpu={})
        drive.cancel("none")
        BEFORE[before](drive)
        drive.worker("w0", 8)
        drive.submit("runs", tenant="v", gpu={"count": 4}, run=ENDS_SOME_TIME)
        drive.settle()
        drive.submit("big", gpu={"count": 8}, deadline_s=300)
    drive.pass_time(PATIENCE_MS + 2_000)
    assert drive.engine.planner.verdicts.reservation is not None
    drive.offer_submit("asks", tenant="u", gpu={"count": 2})
    ENDS[act](drive)  # in the same record
    assert drive.engine.planner.verdicts.reservation is None
    assert drive.states("asks", "u") != ["QUEUED"]


@pytest.mark.parametrize("act", ["hold", "priority", "cancel"])
def test_a_queue_that_is_empty_keeps_no_reservation(act: str) -> None:
    drive = Driving.with_hosts(8)
    drive.submit("runs", gpu={"count": 4}, run=ENDS_SOME_TIME)
    drive.settle()
    drive.submit("big", gpu={"count": 8})
    drive.pass_time(PATIENCE_MS + 2_000)
    assert drive.engine.planner.verdicts.reservation is not None
    if act == "hold":
        drive.order("hold", job="big")
    elif act == "priority":
        drive.order("priority", job="big", priority=80)
    else:
        drive.cancel("big")
        drive.pass_time(2_000)
    held = drive.engine.planner.verdicts.reservation
    assert held is None or held.priority == 80


@pytest.mark.parametrize("first", [True, False])
def test_a_tenant_to_which_more_is_owed_passes_also_with_the_first_share_of_the_term(first: bool) -> None:
    drive = Driving(Config(fair_share_half_life=600))
    if not first:
        drive.order("share", tenant="u", weight=1)
    drive.worker("w0", 8)
    drive.submit("runs", gpu={"count": 4}, run=ENDS_SOME_TIME)
    drive.settle()
    drive.submit("big", gpu={"count": 8})
    drive.pass_time(PATIENCE_MS + 2_000)
    assert drive.engine.planner.verdicts.reservation is not None
    if first:
        drive.order("share", tenant="u", weight=1)
    drive.pass_time(2_000)
    drive.submit("owed", tenant="u", gpu={"count": 2})
    drive.pass_time(2_000)
    assert drive.states("owed", "u") != ["QUEUED"], "t has leased four GPUs, and u none"


def test_what_is_reserved_for_a_preemptible_job_is_open_to_those_that_would_end_it() -> None:
    drive = Driving.with_hosts(8)
    drive.submit("runs", gpu={"count": 4}, run={"driver": "noop", "timeout_s": 3600})
    drive.settle()
    drive.submit("spot", gpu={"count": 8}, preemptible=True)
    drive.pass_time(40_000)
    drive.settle()
    drive.submit("too", gpu={"count": 4}, preemptible=True)
    drive.submit("shares", gpu={"sharing": "time-slice"})
    drive.settle()
    assert drive.states("shares") == ["QUEUED"], "for a sharer no job ends"
    drive.submit("plain", gpu={"count": 4})
    drive.settle()
    assert [drive.states(name) for name in ("spot", "too", "plain")] == [["QUEUED"], ["QUEUED"], ["RUNNING"]]


@pytest.mark.parametrize("verb", ["drain", "cordon"])
def test_hosts_that_are_closed_for_long_are_reserved_no_more(verb: str) -> None:
    drive = reserved()
    drive.worker("w1", 4)  # none that could hold the job
    drive.operate(verb, "w0")
    drive.pass_time(SHORT_MS + 4_000)
    assert drive.engine.planner.verdicts.reservation is None
    drive.submit("asks", tenant="u", gpu={"count": 2})
    assert drive.states("asks", "u") != ["QUEUED"]


@pytest.mark.parametrize("seed", [*range(1, 6), *range(7, 14)])
def test_whatever_operators_do_a_reservation_is_for_a_job_that_may_start(seed: int) -> None:
    """`Driving` checks the reservation after each record."""
    chance = random.Random(seed)
    drive = Driving.with_hosts(8, 8, config=Config(fair_share_half_life=600, reserve_after=2))
    reservations = 0
    for number in range(150):
        tenant = chance.choice("tuv")
        known = [job for job in drive.state.jobs.values() if not job.over]
        job = chance.choice(known) if known else None
        step = chance.randrange(14)
        if step < 5:
            drive.offer_submit(
                f"j{number}",
                tenant=tenant,
                gpu={"count": chance.choice([1, 2, 4, 8])},
                run={"driver": "noop", "timeout_s": chance.choice([None, 5, 60]), "grace_s": 1},
            )
        elif step == 5:
            drive.offer_order(chance.choice(["hold", "release", "release"]), tenant=tenant)
        elif step == 6:
            drive.offer_order("limit", tenant=tenant, gpus=chance.choice([2, 4, 8, None]))
        elif step == 7 and chance.random() < 0.2:
            drive.offer_order("share", tenant=tenant, weight=chance.choice([1, 3, None]))
        elif step == 8 and job is not None:
            drive.offer_order(chance.choice(["hold", "release"]), tenant=job.tenant, job=job.name)
        elif step == 9 and job is not None:
            drive.offer_order("priority", tenant=job.tenant, job=job.name, priority=chance.choice([10, 50, 80]))
        elif step == 10 and job is not None:
            if chance.random() < 0.5:
                drive.offer_cancel(job.name, tenant=job.tenant)
            else:
                drive.offer_order("requeue", tenant=job.tenant, job=job.name)
        elif step == 11:
            drive.offer_operate(chance.choice(["drain", "cordon", "release", "release"]), chance.choice(["w0", "w1"]))
        else:
            worker = drive.workers[chance.choice(["w0", "w1"])]
            running = [key for key, held in worker.held.items() if held.phase == "running"]
            if running:
                worker.finish(chance.choice(running), 0)
                drive.settle()
        drive.pass_time(chance.choice([1, 500, 1_500]), step=1_000)
        reservations += drive.engine.planner.verdicts.reservation is not None
    assert reservations, "this seed tries nothing"


def test_a_job_that_is_refused_with_its_reservation_gives_it_up_in_that_record() -> None:
    """It waits out a pause then: the pause that this very record begins was not seen, and the hosts stayed closed."""
    drive = reserved()
    drive.submit("other", tenant="u", gpu={"count": 8})
    worker = drive.workers["w0"]
    worker.local.add(7)  # of which the scheduler hears with the next renewal
    for key in list(worker.held):
        worker.finish(key)
    drive.report_all()
    assert drive.states("big") == ["PLACED"]
    assert drive.engine.planner.verdicts.reservation is not None
    drive.report_all()
    assert drive.states("big") == ["QUEUED"], "it was refused"
    assert drive.engine.planner.verdicts.reservation is None


def plans(drive: Driving, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ledger ms of each plan from now on."""
    found = list[int]()

    def counted(known: Known, draft: Draft, *last: Any) -> Answer:
        found.append(draft.time_ms)
        return plan(known, draft, *last)

    monkeypatch.setattr(verdicts, "plan", counted)
    return found


def test_while_nobody_waits_too_long_and_nothing_happens_no_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Driving.with_hosts(8)
    drive.submit("runs", gpu={"count": 4}, run=ENDS_SOME_TIME)
    drive.settle()
    drive.submit("big", gpu={"count": 8})
    accepted = drive.job("big").accepted_ms
    drive.pass_time(3_000)
    found = plans(drive, monkeypatch)
    drive.pass_time(PATIENCE_MS - 5_000, step=1_000)
    assert found == []
    drive.pass_time(PATIENCE_MS, step=100)
    assert drive.engine.planner.verdicts.reservation is not None
    assert found[0] > accepted + PATIENCE_MS
    steps = [later - before for before, later in itertools.pairwise(found)]
    assert all(1_000 <= step < 1_200 for step in steps), "a reservation that stands is planned anew each second"


def test_only_simulated_time_goes_on_in_longer_steps_while_nothing_happens() -> None:
    """The expected start is asked for as often as what it is off by could matter."""
    drive = reserved()
    drive.pass_time(3_000)
    next_ms = drive.engine.planner.next_ms()
    assert 86_000_000 / 8 - 60_000 < next_ms - drive.now < 86_400_000 / 8


def test_no_hosts_are_reserved_for_a_job_behind_one_that_waits_for_its_tenants_limit() -> None:
    """It may not start before that one does, which may be never: the hosts would be idle for as long."""
    drive = Driving.with_hosts(4, 4)
    drive.order("limit", gpus=6)
    drive.submit("runs", gpu={"count": 4}, run=ENDS_SOME_TIME)
    for number in range(4):
        drive.submit(f"other{number}", tenant="u", gpu={})
    drive.settle()
    drive.submit("big", gpu={"count": 4})  # waits for the limit
    drive.submit("small", gpu={"count": 2})  # is within it, and waits behind big
    drive.pass_time(PATIENCE_MS + 5_000)
    drive.run_out("w1")
    for number in range(4):
        drive.submit(f"more{number}", tenant="u", gpu={})
    drive.pass_time(3_000)
    drive.settle()
    assert [drive.states(f"more{number}", "u") for number in range(4)] == [["RUNNING"]] * 4


def test_jobs_that_no_host_could_ever_hold_cost_no_walk_over_the_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Driving()
    drive.checks = False
    for number in range(4):
        drive.worker(f"w{number}", 4)
    for number in range(40):
        drive.submit(
            f"j{number}", replicas=5, resources={"cpu_milli": number + 1}, gpu={"count": 4, "scheduling": "gang"}
        )
    walks = list[int]()

    def counted(*arguments: object) -> tuple[frozenset[int], None]:
        walks.append(drive.now)
        return frozenset(), None

    monkeypatch.setattr("moorage.scheduler.core.schedule.plan.soonest", counted)
    drive.pass_time(PATIENCE_MS + 5_000)
    assert walks == []


def gangs_beyond_the_usable_half(count: int) -> Driving:
    """Six hosts, half of them cordoned, and so many gangs of different shapes that fit the whole fleet alone."""
    drive = Driving()
    drive.checks = False
    for number in range(6):
        drive.worker(f"w{number}", 4)
    drive.submit("runs", replicas=3, gpu={"count": 4}, run=ENDS_SOME_TIME)
    drive.settle()
    free = [name for name in drive.workers if name not in drive.placed_on("runs")]
    for name in free:
        drive.operate("cordon", name)
    for number in range(count):
        drive.offer_submit(
            f"j{number}", replicas=5, resources={"cpu_milli": number + 1}, gpu={"count": 4, "scheduling": "gang"}
        )
    drive.tick()
    return drive


def walks_of(drive: Driving, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ledger ms of each walk over the fleet from now on."""
    found = list[int]()

    def counted(
        fleet: Fleet, shape: Shape, excluded: frozenset[int], estimates: Estimates, now_ms: int, num: int
    ) -> tuple[frozenset[int], int] | None:
        found.append(now_ms)
        return soonest(fleet, shape, excluded, estimates, now_ms, num)

    monkeypatch.setattr("moorage.scheduler.core.schedule.plan.soonest", counted)
    return found


def test_gangs_that_fit_no_usable_host_cost_some_walks_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = gangs_beyond_the_usable_half(40)
    walks = walks_of(drive, monkeypatch)
    drive.pass_time(PATIENCE_MS + 10_000)
    assert 0 < max(Counter(walks).values()) <= SEARCHES_MAX
    assert len(set(walks)) <= 11


def test_each_gang_has_its_walk_though_the_fleet_changes_at_every_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of them would fit: those before it must not use up the scans."""
    drive = gangs_beyond_the_usable_half(40)
    drive.submit("fits", replicas=3, gpu={"count": 4, "scheduling": "gang"})
    walks = walks_of(drive, monkeypatch)
    drive.pass_time(PATIENCE_MS)
    while drive.engine.planner.verdicts.reservation is None:
        drive.engine.fleet.opens()
        drive.pass_time(1_000)
        assert drive.now < 1_100_000, "it is never sought"
    assert drive.engine.planner.verdicts.reservation.num == drive.job("fits").num
    assert max(Counter(walks).values()) <= 8


def told(found: Reservation | None) -> tuple[object, ...]:
    """What a reservation is, beyond one process: its shape is that of its job."""
    if found is None:
        return ()
    return (found.num, found.tenant, found.priority, tuple(sorted(found.hosts)), found.start_ms)


def planned(drive: Driving, last: Reservation | None = None, *, after_ms: int = 0) -> Reservation | None:
    """A plan of this leader, made so long after its last record."""
    planner, began_ms = drive.engine.planner, drive.state.time_ms
    drive.state.time_ms += after_ms
    draft = Draft(drive.state, drive.state.time_ms)
    config, policy = drive.config, planner.preempting.policy
    known = Known(
        planner.fleet, planner.order, planner.estimates, planner.could_ever, policy.priority_of,
        int(config.reserve_after * 1000),
    )  # fmt: skip
    planner.order.begin()
    found = plan(known, draft, last, {}).reservation
    drive.state.time_ms = began_ms
    return found


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
        # hosts that cannot hold their job are kept for a minute, and a gang over several hosts keeps them
        if held is None or not (held.short_ms or held.is_wide):
            again = planned(drive, held)
            assert told(again) == told(first) or (again is not None and again.short_ms)
        if number % 4 == 0:
            # its first record is a millisecond later
            assert told(anew(drive).engine.planner.verdicts.reservation) == told(planned(drive, after_ms=1))


def test_a_takeover_changes_neither_the_job_nor_the_hosts_nor_the_start() -> None:
    drive = Driving.with_hosts(8, 8, 8)
    for number in range(3):
        drive.submit(f"runs{number}", gpu={"count": 4}, run={"driver": "noop", "timeout_s": 3_600 + 60 * number})
    drive.settle()
    drive.submit("big", gpu={"count": 8, "scheduling": "gang"}, replicas=2)
    drive.pass_time(40_000)
    held = drive.reservation
    drive.lead()
    drive.renew()
    drive.pass_time(2_000)
    assert told(drive.engine.planner.verdicts.reservation) == told(held)


def test_a_cancelled_job_with_a_reservation_leaves_its_group_with_the_record() -> None:
    """The plan sees first that nothing of it waits any more; `Driving.check_queue` looks at the group."""
    drive = Driving.with_hosts(2, config=Config(reserve_after=0, ageing=0))
    run = {"argv": ["a"], "timeout_s": 36_000}
    drive.offer_submit("j1", tenant="t", gpu={"count": 1}, run=run, priority=60)
    drive.offer_submit("j2", tenant="w", gpu={"count": 1}, run=run, replicas=2)
    drive.tick(400)
    drive.offer_submit("j3", tenant="v", gpu={"count": 2}, replicas=2)
    drive.tick(1_001)
    held = drive.reservation
    assert (held.num, held.replica) == (drive.job("j2", "w").num, 1)
    drive.offer_cancel("j2", tenant="w")
    drive.tick(50)
    assert drive.states("j2", "w") == ["CANCELLING", "CANCELLED"]


def test_a_reservation_stays_when_a_lower_replica_of_its_job_comes_back() -> None:
    job = new_job(1, "t", "j", b"{}", ((7, 9),), "", 0, 1)
    waiting = Waiting(job)
    assert waiting.first == 7
    waiting.come_back(3)
    waiting.come_back(3)
    assert (waiting.first, waiting.back, waiting.has(7), waiting.has(3), waiting.has(4)) == (3, [3], True, True, False)
