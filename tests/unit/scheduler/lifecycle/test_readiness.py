"""READY and NOT_READY: told by the worker, in the ledger beside RUNNING, with where its ports are reached."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.answers import views
from moorage.scheduler.answers.waiting import explain_job
from moorage.schemas.frames import ReportKind
from tests.unit.scheduler.driving import Driving, wire

AT = "10.0.0.5:20000,20001"


def started(detail: str = "", **fields: Any) -> Driving:
    """One worker that the test speaks for, one running job `j` that is ready when something listens."""
    drive = Driving.with_hosts(2, auto=False)
    run = {"driver": "noop", "ports": 2, "ready": {"tcp": "PORT"}, **fields.pop("run", {})}
    answer = drive.submit("j", gpu={}, run=run, **fields)
    assert answer["kind"] == "accepted", answer
    drive.reports([("claimed", "j", 0, 0, ""), ("started", "j", 0, 0, detail)])
    assert drive.states("j") == ["RUNNING"]
    return drive


def words(drive: Driving) -> list[str]:
    return [change["state"] for event in drive.events for change in event["changes"]]


def row(drive: Driving) -> dict[str, Any]:
    data = wire(views.show(drive.engine, "t", "j"))
    return dict(data["replica_states"][0])


def summary(drive: Driving) -> dict[str, Any]:
    return wire(views.summary(drive.engine, drive.job("j")))


def test_it_is_ready_beside_running_and_may_cease_to_be() -> None:
    drive = started()
    assert (row(drive)["ready"], summary(drive)["ready"]) == (False, 0)
    drive.report("ready", "j")
    assert (drive.states("j"), row(drive)["ready"], summary(drive)["ready"]) == (["RUNNING"], True, 1)
    drive.report("not-ready", "j", detail="nothing listens on port 20000")
    assert (drive.states("j"), row(drive)["ready"], summary(drive)["ready"]) == (["RUNNING"], False, 0)
    drive.report("ready", "j")
    assert words(drive) == ["ACCEPTED", "PLACED", "CLAIMED", "RUNNING", "READY", "NOT_READY", "READY"]
    [told] = [change for event in drive.events for change in event["changes"] if change["state"] == "NOT_READY"]
    assert told["why"] == "nothing listens on port 20000"
    assert (told["replica"], told["attempt"], told["by"]) == (0, 1, "worker")
    assert summary(drive)["why"] == "", "what was so once is no reason for what is now"


def test_what_is_known_is_not_told_again() -> None:
    drive = started()
    drive.report("not-ready", "j", detail="not yet")
    drive.reports([("ready", "j", 0, 0, ""), ("ready", "j", 0, 0, "")])
    drive.report("ready", "j")
    assert words(drive)[-2:] == ["RUNNING", "READY"]


@pytest.mark.parametrize("kind", ["ready", "not-ready"])
def test_what_does_not_run_is_not_ready(kind: ReportKind) -> None:
    drive = Driving.with_hosts(2, auto=False)
    drive.submit("j", gpu={})
    drive.report(kind, "j")
    drive.report("claimed", "j")
    drive.report(kind, "j")
    drive.reports([("started", "j", 0, 0, ""), ("exited", "j", 0, 1, "exit"), (kind, "j", 0, 0, "")])
    assert not {"READY", "NOT_READY"} & set(words(drive))


def test_start_and_readiness_in_one_frame_are_told_in_their_order() -> None:
    drive = Driving.with_hosts(2, auto=False)
    drive.submit("j", gpu={})
    drive.reports([(kind, "j", 0, 0, "") for kind in ("claimed", "started", "ready")])
    assert words(drive) == ["ACCEPTED", "PLACED", "CLAIMED", "RUNNING", "READY"]
    drive.reports([("not-ready", "j", 0, 0, "gone"), ("exited", "j", 0, 3, "exit"), ("freed", "j", 0, 0, "")])
    assert words(drive)[-2:] == ["NOT_READY", "FAILED"]


def test_the_address_is_told_with_the_start_and_shown_while_it_lives() -> None:
    drive = started(AT, run={"restart": "always"})
    [running] = [change for event in drive.events for change in event["changes"] if change["state"] == "RUNNING"]
    assert (running["address"], running.get("why", "")) == (AT, "")
    assert row(drive)["address"] == AT
    assert summary(drive)["why"] == "", "an address is no reason"
    drive.reports([("exited", "j", 0, 1, "exit"), ("freed", "j", 0, 0, "")])
    assert "address" not in row(drive)
    drive.pass_time(2_000)
    assert "address" not in row(drive), "the next attempt has ports of its own"


@pytest.mark.parametrize("said", ["nonsense", "a b:80", "h:0", "h:70000", "h:1,2,", ":80", "h:" + ",".join("1" * 17)])
def test_a_monstrous_address_is_not_told(said: str) -> None:
    drive = started(said)
    assert "address" not in row(drive)


def test_an_attempt_that_was_not_ready_in_time_has_failed() -> None:
    drive = started()
    drive.report("exited", "j", code=-15, detail="not-ready: nothing listens on port 20000 after 120 s")
    assert drive.states("j") == ["FAILED"]
    assert drive.events[-1]["changes"][-1]["why"].startswith("not-ready: nothing listens")


def test_what_it_holds_counts_through_all_of_it() -> None:
    drive = started()
    placed = drive.job("j").history[0][1]
    drive.now += 60_000
    drive.reports([("ready", "j", 0, 0, "")])
    drive.now += 60_000
    drive.reports([("not-ready", "j", 0, 0, "gone")])
    drive.now += 60_000
    drive.reports([("exited", "j", 0, 0, "exit"), ("freed", "j", 0, 0, "")])
    data = wire(views.show(drive.engine, "t", "j"))
    assert data["usage"]["gpu_s"] == pytest.approx((drive.state.time_ms - placed) / 1000, abs=0.1)


def test_a_new_attempt_is_not_ready_before_it_says_so() -> None:
    drive = started(run={"restart": "always"})
    drive.report("ready", "j")
    drive.reports([("exited", "j", 0, 1, "exit"), ("freed", "j", 0, 0, "")])
    assert summary(drive)["ready"] == 0
    drive.pass_time(2_000)
    drive.reports([("claimed", "j", 0, 0, ""), ("started", "j", 0, 0, "")])
    assert (drive.states("j"), summary(drive)["ready"]) == (["RUNNING"], 0)


def test_workers_that_give_no_ports_are_passed_over_and_it_says_so() -> None:
    drive = Driving()
    drive.worker("mute", 2, auto=False, capabilities={})
    drive.worker("few", 2, auto=False, ports=1)
    drive.submit("j", gpu={}, run={"driver": "noop", "ports": 2})
    drive.pass_time(2_000)
    told = wire(explain_job(drive.engine, "t", "j"))
    assert drive.states("j") == ["QUEUED"]
    assert "no-ports" in str(told)
    drive.submit("k", gpu={}, run={"driver": "noop", "ready": {"tcp": 80}})
    drive.tick()
    assert drive.attempt("k").worker.id == "few", "it needs no port of its own, and somebody who looks"
    drive.worker("w1", 2, auto=False)
    drive.tick()
    assert drive.attempt("j").worker.id == "w1"
