"""Another time limit for attempts that run: who may give which, what workers get, and what a reservation allows."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.answers import views
from moorage.scheduler.core.events import ChangeOrder, SignalOrder
from moorage.scheduler.core.outputs.outputs import changes_since
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.codec import decode_request
from moorage.schemas.frames import Signal
from moorage.schemas.operate import ChangeAsked, SignalAsked
from tests.levels import know_next, raise_level
from tests.unit.scheduler.driving import PATIENCE_MS, Driving, wire

CAN = {"noop": Capabilities(relimits=True, signals=True)}


@pytest.fixture(autouse=True)
def _next_level(monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)


def site(*gpus: int, level: int = 2) -> Driving:
    drive = Driving()
    for number, count in enumerate(gpus):
        drive.worker(f"w{number}", count, capabilities=CAN)
    if level == 2:
        raise_level(drive)
    return drive


def limited(timeout_s: float | None) -> dict[str, Any]:
    return {"driver": "noop", "argv": ["hang"], "timeout_s": timeout_s, "grace_s": 1}


def change(drive: Driving, timeout_s: float, job: str = "j", **more: Any) -> dict[str, Any]:
    asked = ChangeAsked(job=job, timeout_s=timeout_s, running=True, by="ana", **more)
    drive.engine.offer(ChangeOrder("t", asked, "change", True))
    drive.tick()
    answer: dict[str, Any] = drive.answers.pop("change")
    return answer["data"] if answer["kind"] == "answer" else answer


def bodies(drive: Driving, worker: str = "w0") -> list[float | None]:
    """The limits that a worker's attempts have."""
    return [decode_request(held.place.body).workload.timeout_s for held in drive.workers[worker].held.values()]


def test_what_runs_and_what_comes_later_have_the_new_limit_across_takeovers() -> None:
    drive = site(2)
    drive.submit("j", run=limited(600), replicas=3, gpu={})
    drive.settle()
    assert change(drive, 7200, reason="the demo")["relimited"]
    assert bodies(drive) == [7200.0, 7200.0]
    told = changes_since(drive.state, drive.job("j"), 0)[-1]
    assert (told.state, told.by, told.why) == ("CHANGED", "tenant:t", "running timeout_s 7200: the demo")
    assert not change(drive, 7200)["changed"], "the same request, sent again"
    drive.lead_from_snapshot()
    drive.renew()
    attempt = drive.attempt("j")
    assert drive.engine.estimates.end_ms(attempt, drive.now) == attempt.began_ms + 7_200_000
    assert wire(views.show(drive.engine, "t", "j"))["bounds"] == {"timeout_s": 7200.0}
    drive.run_out("w0")
    drive.settle()
    assert bodies(drive) == [7200.0]


def test_a_plain_limit_after_it_is_for_later_attempts() -> None:
    drive = site(1)
    drive.submit("j", run=limited(600), replicas=2, gpu={})
    drive.settle()
    change(drive, 900)
    drive.engine.offer(ChangeOrder("t", ChangeAsked(job="j", timeout_s=60), "change", True))
    drive.tick()
    shown = wire(views.show(drive.engine, "t", "j"))
    assert (shown["bounds"], bodies(drive)) == ({"timeout_s": 60.0, "running_timeout_s": 900.0}, [900.0])
    drive.run_out("w0")
    drive.settle()
    assert bodies(drive) == [60.0]


def test_a_worker_that_missed_it_is_sent_it_until_it_has_it() -> None:
    drive = site(1)
    drive.submit("j", run=limited(600), gpu={})
    drive.settle()
    asked = ChangeAsked(job="j", timeout_s=900, running=True)
    drive.engine.offer(ChangeOrder("t", asked, "change", True))
    drive.tick(obey=False)
    assert bodies(drive) == [600.0]
    drive.renew()
    assert bodies(drive) == [900.0], "its renewal showed that it has not got it"
    drive.renew()
    assert not any(frame.resize for frame in drive.wanted)


def test_what_cannot_be_is_refused_by_name() -> None:
    drive = site(1, level=1)
    drive.worker("old", 8, capabilities={"noop": Capabilities()})
    drive.submit("j", run=limited(600), gpu={})
    drive.submit("elsewhere", run=limited(600), gpu={"count": 8})
    drive.settle()
    assert "from level 2 on" in change(drive, 900)["message"]
    raise_level(drive)
    assert "worker old cannot change" in change(drive, 900, "elsewhere")["message"]
    assert "over at once" in drive.order("time-limit", job="j", timeout_s=0)["message"]
    assert "leaves no time to run" in change(drive, 0)["message"]
    drive.order("limit", time_limit_s=1_000)
    beyond = change(drive, 1_001)
    assert (beyond["code"], beyond["allowed"]) == ("failed-precondition", "at most one of 1000 s")
    assert change(drive, 1_000)["changed"]
    assert change(drive, 30)["changed"], "its owner may shorten it"
    given = drive.order("time-limit", job="j", timeout_s=5_000)
    assert (given["changed"], given["timeout_s"], bodies(drive)) == (True, 5_000, [5_000.0]), "an operator any"
    assert change(drive, 4_000)["changed"], "and its owner less than that"


@pytest.fixture
def reserved() -> Driving:
    """One host of eight; half of it runs, and a job for all of it that is out of patience has it reserved."""
    drive = site(8)
    drive.submit("before", gpu={"count": 4}, run=limited(600))
    drive.settle()
    drive.submit("big", gpu={"count": 8})
    drive.pass_time(PATIENCE_MS + 2_000)
    drive.submit("short", gpu={"count": 4}, run=limited(300))
    drive.settle()
    assert drive.states("short") == ["RUNNING"]
    return drive


def test_one_that_was_let_in_goes_past_a_reservation_by_an_operator_alone(reserved: Driving) -> None:
    refused = change(reserved, 3_000, "short")
    assert (refused["code"], "reserved for another job" in refused["message"]) == ("failed-precondition", True)
    most_s = float(refused["message"].rpartition("at most ")[2].split()[0])
    assert change(reserved, most_s, "short")["changed"]
    before_ms = reserved.reservation.start_ms
    reserved.order("time-limit", job="short", timeout_s=3_000)
    reserved.pass_time(3_000)
    assert reserved.reservation.start_ms > before_ms + 2_000_000
    assert reserved.state.reserved is not None
    assert reserved.state.reserved[2] == reserved.reservation.start_ms, "the ledger tells the later start"


def test_one_that_was_there_before_lets_the_reservation_wait(reserved: Driving) -> None:
    assert change(reserved, 6_000, "before")["changed"]
    reserved.pass_time(3_000)
    assert reserved.state.reserved is not None
    assert reserved.state.reserved[2] == reserved.attempt("before").began_ms + 6_000_000


def signal(drive: Driving, name: str = "USR1", job: str = "j", **more: Any) -> dict[str, Any]:
    drive.engine.offer(SignalOrder("t", SignalAsked(job, name, by="ana", **more), "signal", True))
    drive.tick()
    answer: dict[str, Any] = drive.answers.pop("signal")
    return answer


def test_a_signal_is_recorded_and_sent_once_to_each_running_replica() -> None:
    drive = site(2)
    drive.submit("j", run=limited(600), replicas=3, gpu={})
    drive.settle()
    answer = signal(drive, "usr1")
    assert answer["data"] == {"job": "j", "signal": "SIGUSR1", "replicas": [[0, "w0"], [1, "w0"]]}
    sent = [each for frame in drive.wanted for each in frame.signals]
    assert sent == [Signal(*drive.attempt("j", index).name, "SIGUSR1") for index in (0, 1)]
    assert signal(drive, "SIGHUP", replica=1)["data"]["replicas"] == [[1, "w0"]]
    told = changes_since(drive.state, drive.job("j"), 0)[-1]
    assert (told.state, told.said, told.why) == ("EXEC", "ana", "replica 1: signal SIGHUP")
    drive.renew()
    assert not any(frame.signals for frame in drive.wanted)
    assert signal(drive, replica=2)["found"] == "QUEUED"
    assert signal(drive, replica=7)["code"] == "not-found"
    assert signal(drive, job="nosuch")["code"] == "not-found"


def test_a_driver_that_sends_no_signals_is_named() -> None:
    drive = Driving.with_hosts(1)
    drive.submit("j", run=limited(600), gpu={})
    drive.settle()
    assert "driver noop of worker w0 sends none" in signal(drive)["message"]
    with pytest.raises(ValueError, match="signal must be one of"):
        SignalAsked("j", "KILL")
