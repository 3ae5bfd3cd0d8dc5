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


def replaced(drive: Driving, verb: str, **more: Any) -> dict[str, Any]:
    """What an order on the worker says that it has ended or replaced."""
    told: dict[str, Any] = drive.operate(verb, "w0", **more).get("replaced", {})
    return told


def test_an_order_on_a_worker_says_what_it_has_ended_of_earlier_ones(drive: Driving) -> None:
    drive.settle()
    assert replaced(drive, "cordon", why="a look") == {}
    assert replaced(drive, "cordon") == {}, "its reason stays"
    assert replaced(drive, "cordon", why="a longer look") == {"flag": "cordoned", "why": "a look"}
    assert replaced(drive, "drain", from_s=7200, why="disk") == {}, "the cordon stays"
    begins_ms = drive.state.time_ms + 7_200_000
    assert replaced(drive, "cordon") == {}, "and so does the drain to come"
    told = replaced(drive, "uncordon")
    assert (told["flag"], told["why"]) == ("cordoned", "a longer look")
    assert told["drain"]["from_ms"] == begins_ms
    assert told["drain"]["why"] == "disk"
    assert replaced(drive, "uncordon") == {}
    assert replaced(drive, "drain", why="now") == {}
    assert replaced(drive, "drain", from_s=60) == {"flag": "draining", "why": "now"}, "it is open until then"
    assert "drain" in replaced(drive, "drain", from_s=90)
    assert "drain" in replaced(drive, "drain")


def test_an_order_that_opens_a_worker_says_which_of_its_gpus_stay_cordoned(drive: Driving) -> None:
    drive.settle()
    order(drive, "cordon", 1, 3)
    assert replaced(drive, "cordon") == {}
    assert replaced(drive, "uncordon") == {"flag": "cordoned", "gpus": [1, 3]}
    assert replaced(drive, "uncordon") == {"gpus": [1, 3]}
    order(drive, "uncordon", 1, 3)
    assert replaced(drive, "uncordon") == {}
