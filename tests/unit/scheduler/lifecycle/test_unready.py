"""An attempt that was ready and is so no more for `run.restart_unready_s` starts again."""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.lifecycle.test_services import READY, serve, served

RUN: Final[dict[str, Any]] = {**READY, "restart": "always", "restart_unready_s": 60.0}


def hanging(**run: Any) -> Driving:
    """A service of one member, which was ready and is so no more."""
    drive = served(2, run={**RUN, **run})
    drive.pass_time(30_000)
    drive.report("not-ready", "a")
    return drive


def test_it_is_ended_and_starts_again() -> None:
    drive = hanging()
    drive.pass_time(58_000)
    assert drive.states("a") == ["RUNNING"]
    drive.pass_time(4_000)
    assert drive.states("a") == ["ENDING"]
    drive.reports([("exited", "a", 0, 0, "end"), ("freed", "a", 0, 0, "")])
    drive.pass_time(3_000)
    assert drive.states("a") == ["PLACED"]
    row = drive.job("a").rows[0]
    assert (row.attempt_no, row.restarts) == (2, 1), "it counts as a failure"
    assert "it was not ready for 60 s" in [told[8] for told in drive.job("a").history]


def test_one_that_is_ready_again_in_time_lives_on() -> None:
    drive = hanging()
    drive.pass_time(50_000)
    drive.report("ready", "a")
    drive.pass_time(30_000)
    drive.report("not-ready", "a")
    drive.pass_time(50_000)
    assert drive.states("a") == ["RUNNING"]


def test_without_the_option_it_lives_on() -> None:
    drive = hanging(restart_unready_s=None)
    drive.pass_time(600_000)
    assert drive.states("a") == ["RUNNING"]


def test_it_fails_once_it_may_not_restart_any_more() -> None:
    drive = hanging(max_restarts=1)
    for _ in range(2):
        drive.pass_time(62_000)
        assert drive.states("a") == ["ENDING"]
        drive.reports([("exited", "a", 0, 0, "end"), ("freed", "a", 0, 0, "")])
        drive.pass_time(3_000)
        if drive.states("a") == ["PLACED"]:
            drive.reports([(kind, "a", 0, 0, "") for kind in ("claimed", "started", "ready", "not-ready")])
    assert drive.states("a") == ["FAILED"]


def test_it_is_left_to_the_drain_of_its_worker() -> None:
    drive = hanging()
    drive.operate("drain", "w0")
    drive.pass_time(120_000)
    assert drive.states("a")[0] == "RUNNING"


def test_what_cannot_move_is_left_to_the_drain_too() -> None:
    drive = served(2, service=None, run={**RUN, "ready": {"file": "ok"}})
    drive.report("not-ready", "a")
    drive.operate("drain", "w0")
    drive.pass_time(120_000)
    assert drive.states("a") == ["RUNNING"]
    drive.operate("uncordon", "w0")
    drive.pass_time(62_000)
    assert drive.states("a") == ["ENDING"]


@pytest.mark.parametrize("how", ["from a snapshot", "from the ledger"])
def test_a_new_leader_goes_on_counting_but_hears_the_worker_first(how: str) -> None:
    drive = hanging()
    drive.pass_time(55_000)
    drive.lead_from_snapshot() if how == "from a snapshot" else drive.lead()
    drive.renew()
    drive.pass_time(12_000)
    assert drive.states("a") == ["RUNNING"]
    drive.pass_time(6_000)
    assert drive.states("a") == ["ENDING"]


@pytest.mark.parametrize("missing", ["restart", "ready"])
def test_a_request_that_could_not_mean_it_is_refused(missing: str) -> None:
    refused = serve(Driving(), "b", run={name: each for name, each in RUN.items() if name != missing})
    assert (refused["code"], refused["field"]) == ("invalid-argument", "$.run.restart_unready_s")
