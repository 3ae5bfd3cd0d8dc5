"""A tenant holds and releases its own jobs, from their submit on or later."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.operate.test_changing import change


@pytest.fixture
def drive() -> Driving:
    return Driving.with_hosts(4)


@pytest.mark.parametrize(
    "fields", [{}, {"replicas": 3}, {"gpu": {"scheduling": "gang"}, "replicas": 2}, {"replicas": 3, "max_running": 1}]
)
def test_a_job_that_is_submitted_on_hold_waits_until_it_is_released(drive: Driving, fields: dict[str, Any]) -> None:
    drive.submit("j", hold=True, **{"gpu": {}, **fields})
    drive.submit("later", gpu={})
    drive.settle()
    assert (drive.job("j").on_workers, drive.states("later")) == (0, ["RUNNING"])
    told = drive.explained("j")
    assert (told["reason"], told["because"]) == ("held", "job j is held by tenant:t: as submitted")
    assert drive.fixes("j")[0]["command"] == "moorage change j --release --tenant t"
    drive.lead()
    drive.renew()
    assert drive.job("j").on_workers == 0
    assert "held" not in change(drive, hold=False)
    drive.settle()
    assert drive.job("j").on_workers > 0


def test_what_waits_of_a_job_is_held_and_keeps_its_turn(drive: Driving) -> None:
    drive.submit("fills", gpu={"count": 4})
    drive.submit("j", gpu={"count": 4})
    drive.submit("later", gpu={"count": 4})
    assert change(drive, hold=True, reason="wrong data")["held"]
    assert not change(drive, hold=True)["changed"]
    assert change(drive, hold=False)["changed"]
    drive.settle()
    drive.run_out("w0")
    assert [drive.states(job) for job in ("j", "later")] == [["RUNNING"], ["QUEUED"]]


def test_what_runs_goes_on(drive: Driving) -> None:
    drive.submit("j", gpu={}, replicas=6)
    drive.settle()
    assert change(drive, hold=True)["members"] == 4
    drive.run_out("w0")
    assert (drive.job("j").on_workers, drive.job("j").waits) == (0, 2)


def test_behind_another_job_it_is_held_too(drive: Driving) -> None:
    drive.submit("first")
    drive.submit("j", hold=True, after=["first"])
    drive.settle()
    drive.run_out("w0")
    drive.settle()
    assert drive.states("j") == ["QUEUED"]
    assert drive.explained("j")["reason"] == "held"
    change(drive, hold=False)
    drive.settle()
    assert drive.states("j") == ["RUNNING"]


def test_a_hold_of_an_operator_is_not_its_tenants_to_release(drive: Driving) -> None:
    drive.submit("j", hold=True, gpu={})
    drive.order("release", job="j")
    drive.settle()
    assert drive.states("j") == ["RUNNING"]
    drive.submit("k", gpu={"count": 4})
    drive.order("hold", job="k")
    refused = change(drive, "k", hold=False)
    assert (refused["code"], refused["field"]) == ("failed-precondition", "$.hold")
