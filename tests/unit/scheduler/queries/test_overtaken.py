"""Why a job waits for GPUs that are leased: the fleet was full, others passed it, or what is free lies apart."""

from __future__ import annotations

from typing import Any

from moorage.scheduler.answers.waiting import explain_job, waiting_by_reason
from moorage.scheduler.core.config import Config
from tests.unit.scheduler.driving import Driving, wire


def why(drive: Driving, job: str, tenant: str = "t") -> tuple[str, str]:
    told: dict[str, Any] = wire(explain_job(drive.engine, tenant, job))
    return told["reason"], told.get("because", "")


def passed(**later: Any) -> Driving:
    """A fleet of one GPU, on which `later` runs, for which `old` waits; `first` had it before."""
    drive = Driving(Config(ended_max=0))
    drive.worker("w0", 1)
    drive.submit("first", gpu={})
    drive.settle()
    drive.pass_time(1_000)
    drive.submit("old", gpu={}, priority=20)
    drive.pass_time(1_000)
    drive.submit("later", **({"gpu": {}, "priority": 80} | later))
    assert why(drive, "old") == ("busy", ""), "who has the GPU came before it"
    drive.run_out("w0")
    drive.settle()
    assert drive.states("later", later.get("tenant", "t")) == ["RUNNING"]
    return drive


def test_one_of_a_higher_priority_that_came_later_has_passed_it() -> None:
    drive = passed()
    assert why(drive, "old") == (
        "overtaken", "1 GPU went to jobs that came later: later has priority 80, and it has 20",
    )  # fmt: skip
    assert waiting_by_reason(drive.engine) == {"overtaken": 1}


def test_of_another_tenant_no_name_is_told() -> None:
    drive = passed(tenant="u")
    reason, because = why(drive, "old")
    assert reason == "overtaken"
    assert because == "1 GPU went to jobs that came later: a job of another tenant has priority 80, and it has 20"


def test_a_tenant_that_is_owed_more_or_within_its_guarantee_is_told_apart() -> None:
    for share, right in ({"weight": 9}, "owed more"), ({"gpus": 1}, "within its tenant's guarantee"):
        drive = Driving(Config(ended_max=0, reclaim=False))
        drive.worker("w0", 1)
        drive.order("share", tenant="u", **share)
        drive.submit("first", gpu={})
        drive.settle()
        drive.pass_time(1_000)
        drive.submit("old", gpu={})
        drive.pass_time(1_000)
        drive.submit("later", tenant="u", gpu={})
        drive.run_out("w0")
        drive.settle()
        assert drive.states("later", "u") == ["RUNNING"], right
        reason, because = why(drive, "old")
        assert reason == "overtaken"
        assert right in because, because


def test_what_is_free_on_hosts_apart_is_no_host_with_as_many() -> None:
    drive = Driving(Config(ended_max=0))
    for name in ("w0", "w1", "w2"):
        drive.worker(name, 4)
    for number in range(3):
        drive.submit(f"s{number}", gpu={"count": 3})
    drive.settle()
    drive.submit("big", gpu={"count": 4})
    assert why(drive, "big")[0] == "busy", "3 are free, 4 are needed"
    drive.submit("two", gpu={"count": 2})
    assert why(drive, "two") == ("fragmented", "3 GPUs are free on 3 hosts, and none of these has 2")


def test_who_has_the_gpus_since_before_it_came_has_not_passed_it() -> None:
    drive = Driving(Config(ended_max=0))
    drive.worker("w0", 2)
    drive.submit("a", gpu={})
    drive.settle()
    drive.pass_time(1_000)
    drive.submit("old", gpu={"count": 2})
    drive.pass_time(1_000)
    drive.submit("later", gpu={}, run={"driver": "noop", "timeout_s": 1})
    drive.settle()
    assert drive.states("later") == ["RUNNING"]
    assert why(drive, "old")[0] == "busy", "without the later one there would be room for half of it"
