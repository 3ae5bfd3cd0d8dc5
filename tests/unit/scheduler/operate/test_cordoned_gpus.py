"""An operator cordons one GPU of a host: no job gets it, and all else goes on."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.answers import views
from moorage.schemas.frames import Unwell
from tests.unit.scheduler.driving import Driving, wire


@pytest.fixture
def drive() -> Driving:
    return Driving.with_hosts(4)


def order(drive: Driving, verb: str, *gpus: int, **more: Any) -> dict[str, Any]:
    return drive.operate(verb, "w0", slots=gpus, **more)


def test_no_job_gets_it_until_it_is_opened_across_restarts_and_takeovers(drive: Driving) -> None:
    drive.submit("before", gpu={"count": 2})
    drive.settle()
    assert drive.slots("before") == [0, 1]
    done = order(drive, "cordon", 1, 3, why="a fan is loud")
    assert (done["changed"], done["slots"], done["members"]) == (True, [1, 3], 1)
    assert not order(drive, "cordon", 3)["changed"]
    drive.submit("two", gpu={"count": 2})
    drive.submit("one", gpu={})
    drive.settle()
    assert (drive.states("two"), drive.slots("one"), drive.states("before")) == (["QUEUED"], [2], ["RUNNING"])
    [row] = [row for row in wire(views.fleet(drive.engine, drive.now))["workers"] if row["worker"] == "w0"]
    told = [(each["slot"], each["kind"], each["detail"]) for each in row["troubles"]]
    assert told == [(1, "cordoned", "by me: a fan is loud"), (3, "cordoned", "by me: a fan is loud")]
    drive.lead_from_snapshot()
    drive.renew()
    drive.run_out("w0")
    drive.settle()
    assert drive.states("two") == ["RUNNING"]
    assert drive.slots("two") == [0, 2]
    drive.submit("last", gpu={})
    drive.settle()
    assert drive.states("last") == ["QUEUED"]
    assert order(drive, "uncordon", 3)["slots"] == [3]
    drive.settle()
    assert drive.slots("last") == [3]


def test_what_its_worker_reports_neither_opens_it_nor_is_lost(drive: Driving) -> None:
    order(drive, "cordon", 0)
    drive.workers["w0"].unwell = [Unwell(0, "xid", "79", ends=True)]
    drive.renew()
    assert drive.state.workers["w0"].unwell[0][0] == "cordoned"
    order(drive, "uncordon", 0)
    drive.renew()
    assert drive.state.workers["w0"].unwell[0][0] == "xid"
    drive.workers["w0"].unwell = []
    drive.renew()
    drive.submit("all", gpu={"count": 4})
    drive.settle()
    assert drive.states("all") == ["RUNNING"]


def test_a_gpu_that_is_not_there_is_named(drive: Driving) -> None:
    refused = order(drive, "cordon", 4)
    assert (refused["code"], refused["allowed"]) == ("not-found", "0..3")
