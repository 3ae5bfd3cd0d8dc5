"""A reservation is for a time, and holds until then: no one is let in by a plan that the last event made wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.schedule.plan import SHORT_MS
from tests.unit.scheduler.driving import PATIENCE_MS, Driving


def limited(timeout_s: float | None) -> dict[str, Any]:
    return {"driver": "noop", "timeout_s": timeout_s, "grace_s": 0}


def end(drive: Driving, job: str) -> None:
    """The one replica of a job on the one host exits, and the scheduler learns it in the next record."""
    worker = drive.workers["w0"]
    worker.finish(next(key for key in worker.held if key[1] == job), 0)
    drive.settle()


@pytest.mark.parametrize("reserve_after", [0, 30])
@pytest.mark.parametrize("lasts_ms", [300, 1_100, 2_200, 5_000, 9_100, 15_050, 25_300, 38_200])
def test_a_tiny_job_of_unknown_end_lets_no_later_long_job_pass_a_large_one(lasts_ms: int, reserve_after: int) -> None:
    """The large one waited for 300 s more: what it waited for after the tiny job's end was a plan of before."""
    drive = Driving.with_hosts(8, config=Config(reserve_after=reserve_after))
    drive.submit("runs", gpu={"count": 6}, run=limited(101))
    drive.settle()
    drive.pass_time(1_000)
    drive.submit("large", gpu={"count": 8}, run=limited(20))
    drive.pass_time(2_000)
    drive.submit("short", gpu={"count": 2}, run=limited(45))
    drive.submit("long", gpu={"count": 2}, run=limited(400))
    drive.submit("longer", gpu={"count": 1}, run=limited(800))
    drive.submit("tiny", tenant="new", gpu={"count": 1})
    drive.settle()
    drive.pass_time(37_000, step=250)
    end(drive, "short")
    drive.pass_time(lasts_ms, step=250)
    drive.settle()
    assert drive.states("tiny", "new") == ["RUNNING"], "its tenant is owed more"
    end(drive, "tiny")
    drive.pass_time(3_000, step=250)
    assert (drive.states("long"), drive.states("longer")) == (["QUEUED"], ["QUEUED"])
    assert drive.state.jobs[drive.reservation.num].name == "large"
    end(drive, "runs")
    assert drive.states("large") == ["RUNNING"]


def test_a_job_that_fits_nowhere_is_passed_over_for_a_later_one_after_a_minute() -> None:
    drive = Driving.with_hosts(8, 8)
    drive.submit("services", tenant="v", gpu={"count": 5}, replicas=2)
    drive.submit("runs", gpu={"count": 3}, replicas=2, run=limited(3_600))
    drive.settle()
    drive.submit("large", gpu={"count": 8})
    drive.submit("later", gpu={"count": 3})
    drive.pass_time(PATIENCE_MS + SHORT_MS - 2_000)
    assert drive.engine.planner.verdicts.reservation is None
    drive.pass_time(4_000)
    assert drive.state.jobs[drive.reservation.num].name == "later"


def test_an_end_on_reserved_hosts_lets_no_later_job_in_before_the_next_plan() -> None:
    """The last to hold the hosts has started on a part of them; the others were open until the next plan."""
    drive = Driving.with_hosts(8, config=Config(reserve_after=0))
    drive.submit("runs", gpu={"count": 4}, run=limited(600))
    drive.submit("ends", gpu={"count": 4}, run=limited(300))
    drive.settle()
    drive.submit("small", gpu={"count": 2}, run=limited(900), priority=60)
    drive.pass_time(3_000)
    assert drive.state.jobs[drive.reservation.num].name == "small"
    drive.submit("large", gpu={"count": 8})
    drive.submit("long", gpu={"count": 2}, run=limited(3_600))
    drive.pass_time(1_001)
    end(drive, "ends")
    assert (drive.states("small"), drive.states("long")) == (["RUNNING"], ["QUEUED"])
    drive.pass_time(3_000, step=250)
    assert drive.states("long") == ["QUEUED"]
    assert drive.state.jobs[drive.reservation.num].name == "large"


def owed(guaranteed: dict[str, int], *, priority: int = 50, alike: bool = False, **settings: Any) -> Driving:
    """Tenant `a` has used a host of eight GPUs for an hour, and has it reserved; `b` has used nothing, and submits."""
    drive = Driving.with_hosts(8, config=Config(**settings))
    drive.submit("past", tenant="a", gpu={"count": 8})
    drive.settle()
    drive.pass_time(3_600_000, step=20_000)
    end(drive, "past")
    for tenant, gpus in guaranteed.items():
        drive.order("share", tenant=tenant, gpus=gpus)
    drive.submit("runs", tenant="z", gpu={"count": 1 if not alike else 7}, run=limited(110))
    drive.settle()
    gpu = {"count": 1} if alike else {"count": 8}
    if alike:
        drive.submit("fills", tenant="z", gpu={}, run=limited(900))
        drive.settle()
    drive.submit("large", tenant="a", gpu=gpu, run=limited(60))
    drive.pass_time(PATIENCE_MS + 10_000)
    assert drive.state.jobs[drive.reservation.num].name == "large"
    drive.submit("borrows", tenant="b", gpu={}, run=limited(3_600), priority=priority)
    drive.pass_time(3_000)
    drive.settle()
    return drive


def test_a_borrower_does_not_pass_the_reservation_of_a_job_within_its_tenants_guarantee() -> None:
    """It was let in, as its tenant was owed more, and had the GPU for an hour."""
    drive = owed({"a": 8})
    assert drive.states("borrows", "b") == ["QUEUED"]
    end(drive, "runs")
    assert drive.states("large", "a") == ["RUNNING"]


def test_a_tenant_that_is_owed_more_passes_the_reservation_of_one_without_a_guarantee() -> None:
    assert owed({}).states("borrows", "b") == ["RUNNING"]


def test_a_tenant_within_its_own_guarantee_passes_the_reservation_of_another() -> None:
    assert owed({"a": 8, "b": 1}).states("borrows", "b") == ["RUNNING"]


def test_a_guarantee_of_gpus_lets_no_job_without_gpus_pass_a_reservation() -> None:
    drive = Driving.with_hosts(8, cpu_milli=8_000)
    for tenant in "ab":
        drive.order("share", tenant=tenant, gpus=8 * (tenant == "b"))
    drive.submit("past", tenant="b", gpu={"count": 8})
    drive.settle()
    drive.pass_time(600_000, step=20_000)
    end(drive, "past")
    drive.submit("runs", tenant="z", gpu={"count": 1}, resources={"cpu_milli": 4_000}, run=limited(110))
    drive.settle()
    drive.submit("large", tenant="a", gpu={"count": 8}, resources={"cpu_milli": 8_000})
    drive.pass_time(PATIENCE_MS + 3_000)
    assert drive.state.jobs[drive.reservation.num].name == "large"
    drive.submit("cores", tenant="b", resources={"cpu_milli": 4_000}, run=limited(3_600))
    drive.pass_time(3_000)
    assert drive.states("cores", "b") == ["QUEUED"]


@pytest.mark.parametrize(("reclaim", "state"), [(False, "RUNNING"), (True, "QUEUED")])
def test_what_may_end_the_reserved_job_passes_it_and_with_reclaim_nobody_may_end_a_guaranteed_one(
    reclaim: bool, state: str
) -> None:
    drive = owed({"a": 8}, priority=90, preempt_priority=80, reclaim=reclaim)
    assert drive.states("borrows", "b") == [state]


def gang(drive: Driving, name: str, tenant: str, **fields: Any) -> None:
    drive.submit(name, tenant=tenant, replicas=2, gpu={"count": 8, "scheduling": "gang"}, **fields)


def wide(**settings: Any) -> Driving:
    """Two hosts, each with a job of tenant `z`, are reserved for a gang of tenant `a`, which has used them before."""
    drive = Driving.with_hosts(8, 8, config=Config(**settings))
    drive.submit("past", tenant="a", gpu={"count": 8}, replicas=2)
    drive.settle()
    drive.pass_time(600_000, step=20_000)
    for name in ("w0", "w1"):
        drive.run_out(name)
    for number in range(2):
        drive.submit(f"runs{number}", tenant="z", gpu={"count": 7}, run=limited(3_600 + 600 * number))
    drive.settle()
    gang(drive, "gang", "a")
    drive.pass_time(PATIENCE_MS + 3_000)
    assert drive.reservation.hosts == {0, 1}
    return drive


def test_a_gang_over_several_hosts_keeps_its_reservation_from_tenants_that_are_owed_more() -> None:
    """It lost the hosts to one after the other, and waited for longer than under any other order."""
    drive = wide()
    drive.submit("small", tenant="b", gpu={}, run=limited(86_400))
    gang(drive, "another", "c", run=limited(3_600))
    drive.pass_time(PATIENCE_MS + 60_000)
    assert drive.states("small", "b") == ["QUEUED"]
    assert drive.state.jobs[drive.reservation.num].name == "gang"
    drive.submit("within", tenant="b", gpu={}, run=limited(60))
    assert drive.states("within", "b") != ["QUEUED"], "it surely ends before"
    for name in ("w0", "w1"):
        drive.run_out(name)
    drive.settle()
    assert drive.states("gang", "a") == ["RUNNING", "RUNNING"]


@pytest.mark.parametrize("how", ["a higher class", "its guarantee"])
def test_a_gang_over_several_hosts_gives_its_reservation_to(how: str) -> None:
    drive = wide()
    if how == "its guarantee":
        drive.order("share", tenant="b", gpus=8)
    drive.submit("first", tenant="b", gpu={}, run=limited(86_400), priority=50 + (how == "a higher class"))
    drive.pass_time(3_000)
    assert drive.states("first", "b") != ["QUEUED"]


def loaded(**limit: Any) -> Driving:
    """A host of eight is full; a large job of tenant `a`, which has used the host before, has waited for 600 s."""
    drive = Driving.with_hosts(8)
    drive.order("limit", tenant="a", **(limit or {"gpus": None}))
    drive.submit("past", tenant="a", gpu={"count": 8})
    drive.settle()
    drive.pass_time(1_200_000, step=20_000)
    drive.run_out("w0")
    drive.submit("runs", tenant="z", gpu={"count": 7}, run=limited(7_200))
    drive.settle()
    drive.submit("large", tenant="a", gpu={"count": 8})
    drive.pass_time(600_000, step=10_000)
    assert drive.state.jobs[drive.reservation.num].name == "large"
    drive.submit("other", tenant="c", gpu={"count": 8}, run=limited(60))
    drive.pass_time(PATIENCE_MS + 60_000, step=5_000)
    return drive


def test_who_is_owed_more_gets_a_reservation_once_it_has_waited_nearly_as_long() -> None:
    """Under load all are overdue at once, and a large job of who had its share was never first."""
    drive = loaded()
    assert drive.state.jobs[drive.reservation.num].name == "large"
    drive.pass_time(2_280_000, step=10_000)  # it comes 600 s later, so it has waited four fifths as long 2,400 s later
    assert drive.state.jobs[drive.reservation.num].name == "large"
    drive.pass_time(60_000, step=10_000)
    assert drive.state.jobs[drive.reservation.num].name == "other"


def test_who_may_have_waited_for_its_tenants_limit_makes_no_other_wait_as_long() -> None:
    drive = loaded(gpus=8)
    assert drive.state.jobs[drive.reservation.num].name == "other"


def test_who_fits_nowhere_makes_no_other_wait_as_long() -> None:
    drive = Driving.with_hosts(8, 8)
    drive.submit("services", tenant="v", gpu={"count": 5}, replicas=2)
    drive.submit("runs", gpu={"count": 3}, replicas=2, run=limited(3_600))
    drive.settle()
    drive.submit("gang", tenant="a", gpu={"count": 8, "scheduling": "gang"}, replicas=2)
    drive.pass_time(PATIENCE_MS + SHORT_MS + 600_000, step=20_000)
    drive.submit("later", tenant="b", gpu={"count": 3})
    drive.pass_time(PATIENCE_MS + 4_000)
    assert drive.state.jobs[drive.reservation.num].name == "later"


def waits_for_its_turn() -> tuple[Driving, int]:
    """A job that hosts are reserved for is less urgent than one that waits; and the ledger ms when that is overdue."""
    drive = Driving.with_hosts(8)
    drive.submit("runs", gpu={"count": 4}, run=limited(3_600))
    drive.settle()
    drive.submit("large", gpu={"count": 8})
    drive.pass_time(PATIENCE_MS + 2_000)
    drive.submit("urgent", gpu={"count": 4}, priority=60)
    since_ms = next(job for job in drive.state.jobs.values() if job.name == "urgent").waits_from_ms
    drive.pass_time(2_000)
    return drive, since_ms + PATIENCE_MS + 1


@pytest.mark.parametrize("early_ms", [1, 400, 999, 1_500])
def test_a_job_takes_a_reservation_over_at_its_moment_whatever_has_happened_just_before(early_ms: int) -> None:
    """A pass less than a second before planned anew; so the next plan came that much later."""
    drive, moment_ms = waits_for_its_turn()
    drive.pass_time(moment_ms - early_ms - drive.now)
    assert drive.engine.planner.next_ms() == drive.engine.planner.moment_ms() == moment_ms
    drive.pass_time(early_ms, step=early_ms)
    assert drive.states("urgent") != ["QUEUED"]


def test_no_moment_that_has_passed_without_a_plan_wakes_the_leader_again() -> None:
    """It would build records without a pause."""
    drive, moment_ms = waits_for_its_turn()
    drive.engine.planner.verdicts.reserve = lambda draft: None  # type: ignore[method-assign]
    drive.pass_time(moment_ms + 1 - drive.now)
    assert drive.engine.planner.moment_ms() == math.inf


def test_a_job_that_is_passed_over_for_its_equals_is_kept_out_for_none_of_a_lower_priority() -> None:
    drive = Driving.with_hosts(2)
    drive.worker("w1", 8, model="NVIDIA L40S")
    drive.operate("cordon", "w1")
    drive.submit("runs", gpu={"count": 1}, run=limited(1_000))
    drive.settle()
    drive.submit("nowhere", gpu={"count": 4, "model": ["L40S"]}, priority=50)
    drive.submit("low", gpu={"count": 2}, priority=10)
    drive.pass_time(PATIENCE_MS + 5_000, step=1_000)
    assert drive.reservation.num == drive.job("low").num
    drive.submit("late", gpu={"count": 1}, priority=50)
    drive.pass_time(PATIENCE_MS - 5_000, step=1_000)
    assert drive.states("late") == ["QUEUED"], "it has not waited for long, and may outlast the time until then"
    drive.pass_time(10_000, step=1_000)
    assert drive.states("late") != ["QUEUED"]
    assert drive.states("nowhere") == ["QUEUED"]
