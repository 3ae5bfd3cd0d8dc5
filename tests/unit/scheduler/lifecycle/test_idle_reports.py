"""A worker reports that a job's GPUs show no use: the job gets an event, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.scheduler.driving import Driving


def fleet() -> Driving:
    drive = Driving.with_hosts(2)
    drive.submit("j", gpu={"count": 1}, replicas=2, run={"argv": ["x"]})
    drive.settle()
    for replica in range(2):
        drive.reports([("claimed", "j", replica, 0, ""), ("started", "j", replica, 0, "")])
    drive.events.clear()
    return drive


def told(drive: Driving) -> list[Any]:
    return [event["idle"] for event in drive.events if "idle" in event]


def test_the_job_is_told_for_how_long_and_when_it_ends() -> None:
    drive = fleet()
    rev = drive.job("j").rev
    drive.reports([("idle", "j", 1, 1800, "3600")])
    drive.reports([("idle", "j", 0, 60, "")])
    assert told(drive) == [{"seconds": 1800, "ends_s": 3600, "replica": 1}, {"seconds": 60}]
    assert [(event["rev"], event.get("changes", [])) for event in drive.events] == [(rev, [])] * 2
    assert drive.states("j") == ["RUNNING", "RUNNING"]


@pytest.mark.parametrize("detail", ["soon", "-1", "²", "9" * 40])
def test_a_word_that_is_no_number_says_nothing_of_the_end(detail: str) -> None:
    drive = fleet()
    drive.reports([("idle", "j", 0, -5, detail)])
    assert told(drive) == [{"seconds": 0}]


def test_a_report_that_comes_with_or_after_the_end_is_not_told() -> None:
    drive = fleet()
    drive.reports([("idle", "j", 0, 60, ""), ("exited", "j", 0, 0, "exit"), ("idle", "j", 0, 120, "")])
    drive.reports([("idle", "j", 0, 120, "")])
    drive.cancel("j")
    drive.reports([("idle", "j", 1, 120, "")])
    assert told(drive) == [{"seconds": 60}]
