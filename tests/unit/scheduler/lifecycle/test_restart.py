"""A job that stays: its replicas start again, with back-off, outside of retries, until somebody ends it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moorage.scheduler.answers import views
from moorage.scheduler.core.ledger.ceilings import CEILINGS
from moorage.schemas.frames import ReportKind
from tests.unit.scheduler.driving import Driving, wire

MINUTE_MS = 60_000


def staying(restart: str = "on-failure", **fields: Any) -> Driving:
    """One worker that the test speaks for, one running job `j` that stays."""
    drive = Driving.with_hosts(2, auto=False)
    run = {"argv": ["server"], "restart": restart, **fields.pop("run", {})}
    answer = drive.submit("j", gpu={}, run=run, **fields)
    assert answer["kind"] == "accepted", answer
    begin(drive)
    return drive


def begin(drive: Driving) -> None:
    drive.reports([("claimed", "j", 0, 0, ""), ("started", "j", 0, 0, "")])
    assert drive.states("j")[0] == "RUNNING"


def exits(drive: Driving, code: int = 1, detail: str = "exit", kind: ReportKind = "exited") -> None:
    drive.reports([(kind, "j", 0, code, detail), ("freed", "j", 0, 0, "")])


def waited_s(drive: Driving) -> int:
    """Let the back-off pass, and return how many seconds it took."""
    began = drive.now
    while drive.states("j")[0] == "QUEUED":
        drive.pass_time(500, step=500)
    return round((drive.now - began) / 1000)


def row(drive: Driving) -> dict[str, Any]:
    data = wire(views.show(drive.engine, "t", "j"))
    [replica] = data["replica_states"]
    return dict(replica)


def test_it_starts_again_with_back_off_and_without_a_bound() -> None:
    drive = staying()
    waits = []
    for _ in range(11):
        exits(drive)
        assert drive.states("j") == ["QUEUED"]
        waits.append(waited_s(drive))
        begin(drive)
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    replica = drive.replica("j")
    assert (replica.attempt_no, replica.restarts, replica.retries, replica.losses) == (12, 11, 0, 0)
    assert row(drive)["restarts"] == 11


def test_an_attempt_that_ran_for_ten_minutes_begins_the_back_off_anew() -> None:
    drive = staying()
    for _ in range(4):
        exits(drive)
        waited_s(drive)
        begin(drive)
    drive.pass_time(10 * MINUTE_MS - 1_000, step=1_000)
    exits(drive)
    assert waited_s(drive) == 16, "just below ten minutes"
    begin(drive)
    drive.pass_time(10 * MINUTE_MS, step=1_000)
    exits(drive)
    assert waited_s(drive) == 1
    begin(drive)
    exits(drive)
    assert waited_s(drive) == 2
    assert drive.replica("j").restarts == 7, "all are counted"


@pytest.mark.parametrize(
    ("restart", "code", "detail", "becomes"),
    [
        ("never", 1, "exit", "FAILED"),
        ("on-failure", 0, "exit", "SUCCEEDED"),
        ("on-failure", 0, "result:7", "SUCCEEDED"),
        ("on-failure", -15, "timeout", "QUEUED"),
        ("on-failure", 127, "start-failed: no such program", "QUEUED"),
        ("on-failure", -15, "not-ready: nothing listens", "QUEUED"),
        ("always", 0, "exit", "QUEUED"),
        ("always", 0, "result:7", "QUEUED"),
        ("always", 0, "", "QUEUED"),
        ("always", 1, "exit", "QUEUED"),
    ],
)
def test_which_ends_are_followed_by_another_attempt(restart: str, code: int, detail: str, becomes: str) -> None:
    drive = staying(restart)
    exits(drive, code, detail)
    assert drive.states("j") == [becomes]


def test_a_short_run_in_one_report_is_followed_by_another_one_too() -> None:
    drive = Driving.with_hosts(2, auto=False)
    drive.submit("j", gpu={}, run={"argv": ["server"], "restart": "always"})
    exits(drive, 0, "exit", "ran")
    assert drive.states("j") == ["QUEUED"]
    assert drive.replica("j").restarts == 1


@pytest.mark.parametrize(("restart", "code", "becomes"), [("on-failure", 1, "FAILED"), ("always", 0, "SUCCEEDED")])
def test_max_restarts_bounds_it(restart: str, code: int, becomes: str) -> None:
    drive = staying(restart, run={"max_restarts": 2})
    for _ in range(2):
        exits(drive, code)
        assert drive.states("j") == ["QUEUED"]
        waited_s(drive)
        begin(drive)
    exits(drive, code)
    assert drive.states("j") == [becomes]
    assert drive.job("j").over


def test_losses_are_restarts_without_a_bound_of_their_own() -> None:
    drive = staying(retries_on_lost=0)
    exits(drive, -9, "fence")
    assert drive.states("j") == ["QUEUED"]
    replica = drive.replica("j")
    assert (replica.restarts, replica.losses) == (1, 0)
    assert waited_s(drive) == 1
    begin(drive)
    drive.pass_time(30_000, renew=False)
    assert drive.states("j") == ["QUEUED"], "its worker was lost"
    assert drive.replica("j").restarts == 2


def test_a_cancel_ends_it_while_it_runs_and_while_it_waits() -> None:
    drive = staying("always")
    drive.cancel("j")
    exits(drive, -15, "end")
    assert drive.states("j") == ["CANCELLED"]
    waiting = staying("always")
    exits(waiting)
    waiting.cancel("j")
    assert waiting.states("j") == ["CANCELLED"]
    waiting.pass_time(10_000)
    assert waiting.states("j") == ["CANCELLED"]


def test_the_deadline_ends_it_while_it_runs_and_while_it_waits() -> None:
    drive = staying("always", deadline_s=60)
    drive.pass_time(61_000)
    assert drive.states("j") == ["ENDING"]
    exits(drive, 0, "exit")
    assert drive.states("j") == ["TIMED_OUT"]
    waiting = staying("always", deadline_s=60)
    waiting.pass_time(59_500)
    exits(waiting)
    waiting.pass_time(2_000)
    assert waiting.states("j") == ["EXPIRED"]


@pytest.mark.parametrize("restart", ["on-failure", "always"])
def test_what_is_asked_to_leave_its_host_runs_elsewhere_and_counts_no_restart(restart: str) -> None:
    drive = staying(restart)
    drive.order("requeue", job="j")
    assert drive.states("j") == ["ENDING"]
    exits(drive, 0, "end")
    drive.tick()
    assert drive.states("j") == ["PLACED"]
    assert (drive.replica("j").attempt_no, drive.replica("j").restarts) == (2, 0)


def test_its_latest_start_is_that_of_its_first_attempt() -> None:
    drive = staying(start_within_s=5, replicas=2)
    drive.reports([("claimed", "j", 1, 0, ""), ("started", "j", 1, 0, "")])
    for _ in range(5):
        exits(drive)
        waited_s(drive)
        begin(drive)
    assert drive.states("j") == ["RUNNING", "RUNNING"], "it waited for 16 s"


def test_its_other_replicas_wait_on_in_the_queue_when_their_latest_start_passes_in_a_full_record() -> None:
    drive = staying(start_within_s=60, replicas=4)
    drive.state.ceilings = replace(CEILINGS, bulk_steps=1)
    drive.reports([("claimed", "j", 1, 0, ""), ("started", "j", 1, 0, "")])
    drive.submit("other", gpu={"model": "H200"})
    drive.pass_time(drive.job("j").waits_from_ms + 59_990 - drive.now)
    drive.offer_cancel("other")
    drive.tick(20)
    drive.tick()
    assert drive.states("j") == ["RUNNING", "RUNNING", "QUEUED", "QUEUED"]
    drive.worker("w1", 2, auto=False)
    drive.tick()
    assert drive.states("j")[2:] == ["PLACED", "PLACED"]
