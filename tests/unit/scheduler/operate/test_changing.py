"""A tenant's change of its own job in place: what holds from when on, what is refused, and what stays the submit's."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.answers import views
from moorage.scheduler.core.events import ChangeOrder
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.state import BOUNDS_MAX
from moorage.schemas.codec import decode_request
from moorage.schemas.decode_errors import asked_as
from moorage.schemas.errors import Refused
from moorage.schemas.operate import ChangeAsked
from tests.unit.scheduler.driving import Driving, wire

SWEEP = {"gpu": {}, "replicas": 6, "max_running": 1, "run": {"driver": "noop", "argv": ["hang"], "timeout_s": 3600.0}}


@pytest.fixture
def drive() -> Driving:
    return Driving.with_hosts(4)


def change(drive: Driving, job: str = "j", **asked: Any) -> dict[str, Any]:
    """The answer to `change`; of an accepted one its data."""
    drive.engine.offer(ChangeOrder("t", ChangeAsked(job=job, by="ana", **asked), "change", True))
    drive.tick()
    answer: dict[str, Any] = drive.answers.pop("change")
    return answer["data"] if answer["kind"] == "answer" else answer


def running(drive: Driving, job: str = "j") -> int:
    return drive.job(job).on_workers


def told(drive: Driving, job: str = "j") -> dict[str, Any]:
    return wire(views.show(drive.engine, "t", job))


def test_more_replicas_run_with_the_record_that_changes_it_and_fewer_after_their_ends(drive: Driving) -> None:
    drive.submit("j", **SWEEP)
    drive.settle()
    assert running(drive) == 1
    answer = change(drive, max_running=3, reason="the night is free")
    assert answer == {
        "job": "j", "changed": True, "state": "RUNNING", "priority": 50, "max_running": 3, "timeout_s": 3600.0,
        "members": 1, "replicas": 6,
    }  # fmt: skip
    assert running(drive) == 3, "the record that changes it places them"
    last = told(drive)["changes"]
    [said] = [row for row in last if row["state"] == "CHANGED"]
    assert (said["replica"], said["by"], said["said"]) == (-1, "tenant:t", "ana")
    assert said["why"] == "max_running 3: the night is free"
    drive.settle()
    assert change(drive, max_running=1)["members"] == 3
    drive.settle()
    assert running(drive) == 3, "what runs goes on"
    drive.lead()
    drive.renew("w0")
    drive.settle()
    drive.run_out("w0")
    drive.settle()
    assert running(drive) == 1


def test_show_has_the_request_as_it_was_last_changed(drive: Driving) -> None:
    drive.submit("j", **SWEEP, priority=30)
    change(drive, max_running=3, priority=20, timeout_s=60.0)
    change(drive, timeout_s=7200.0)
    request = told(drive)["request"]
    assert (request["max_running"], request["priority"], request["run"]["timeout_s"]) == (3, 20, 7200.0)


def test_the_same_change_again_is_in_no_record_and_the_same_submit_a_duplicate(drive: Driving) -> None:
    drive.submit("j", **SWEEP)
    assert change(drive, max_running=2, priority=60)["changed"]
    assert not change(drive, max_running=2, priority=60)["changed"]
    assert changes(drive) == 1
    assert drive.submit("j", **SWEEP)["duplicate"]
    assert told(drive)["bounds"] == {"max_running": 2}


def changes(drive: Driving) -> int:
    acts_of = (decode_record(payload).acts for payload in drive.records)
    return sum(isinstance(act, acts.Change) for each in acts_of for act in each)


def test_a_limit_of_time_holds_from_the_next_attempt_on_across_takeovers(drive: Driving) -> None:
    drive.submit("j", **SWEEP)
    drive.settle()
    first = drive.attempt("j").fence
    change(drive, timeout_s=60.5, max_running=2)
    drive.settle()
    change(drive, timeout_s=120)
    drive.lead()
    drive.renew("w0")
    limits = {
        attempt.fence: drive.engine.reader.limit_ms_of(drive.job("j"), attempt.fence) for attempt in attempts(drive)
    }
    assert sorted(limits) == [first, max(limits)]
    # the second was placed by the record of the first change, which chose by the bounds before it
    assert limits == {first: 3_600_000, max(limits): 3_600_000}
    assert {drive.engine.estimates.runs_as(attempt).limit_ms for attempt in attempts(drive)} == {3_600_000}
    drive.run_out("w0")
    drive.settle()
    bodies = [decode_request(held.place.body) for held in drive.workers["w0"].held.values()]
    assert {body.workload.timeout_s for body in bodies} == {120}
    assert {drive.engine.estimates.runs_as(attempt).limit_ms for attempt in attempts(drive)} == {120_000}


def attempts(drive: Driving) -> list[Any]:
    return [row.attempt for row in drive.job("j").rows.values() if row.attempt is not None]


def test_a_priority_is_bounded_by_that_of_an_operator_and_moves_what_waits(drive: Driving) -> None:
    drive.submit("hog", gpu={"count": 4})
    drive.settle()
    for job in ("j", "k"):
        drive.submit(job, gpu={"count": 4})
    assert change(drive, "k", priority=60)["priority"] == 60
    drive.run_out("w0")
    drive.tick()
    assert (running(drive, "k"), running(drive, "j")) == (1, 0), "k passes j"
    drive.order("priority", job="j", priority=30)
    refused = change(drive, priority=31)
    assert (refused["code"], refused["allowed"]) == ("failed-precondition", "0..30")
    assert change(drive, priority=20)["priority"] == 20
    assert change(drive, priority=30)["priority"] == 30, "its own lower one is no bound"
    assert change(drive, priority=31)["code"] == "failed-precondition"
    assert drive.order("priority", job="j", priority=30)["changed"], "it is the operator's again"
    drive.lead()
    assert change(drive, priority=31)["code"] == "failed-precondition"


def test_an_operators_priority_that_equals_the_requests_is_a_bound_too(drive: Driving) -> None:
    drive.submit("j", gpu={})
    assert drive.order("priority", job="j", priority=50)["changed"]
    assert not drive.order("priority", job="j", priority=50)["changed"]
    assert change(drive, priority=51)["allowed"] == "0..50"


def test_what_cannot_be_changed(drive: Driving) -> None:
    assert change(drive, "never", priority=1)["code"] == "not-found"
    drive.submit("j", gpu={})
    drive.cancel("j")
    drive.settle()
    assert change(drive, priority=1)["code"] == "failed-precondition"
    drive.submit("gang", gpu={"scheduling": "gang"}, replicas=2)
    refused = change(drive, "gang", max_running=1)
    assert (refused["code"], refused["field"]) == ("invalid-argument", "$.max_running")
    asks: list[dict[str, Any]] = [{}, {"priority": 101}, {"max_running": 0}, {"timeout_s": -1}, {"reason": "x"}]
    for asked in asks:
        with pytest.raises(Refused):
            asked_as(ChangeAsked, {"job": "j", **asked}, "")


def test_many_changes_of_a_held_job_are_bounded(drive: Driving) -> None:
    drive.submit("j", **SWEEP)
    drive.order("hold", job="j")
    for most in range(1, BOUNDS_MAX + 3):
        change(drive, max_running=most, priority=most)
    assert len(drive.job("j").bounds) == 1
    drive.order("release", job="j")
    drive.settle()
    assert running(drive) == 4


def test_changes_of_other_bounds_leave_an_attempt_its_time_limit_and_many_leave_it_the_oldest(drive: Driving) -> None:
    drive.submit("j", **SWEEP)
    drive.settle()
    drive.order("hold", job="j")
    fence = drive.attempt("j").fence

    def limit_ms() -> int | None:
        return drive.engine.reader.limit_ms_of(drive.job("j"), fence)

    for most in range(2, BOUNDS_MAX + 4):
        change(drive, max_running=most)
    assert limit_ms() == 3_600_000
    for number in range(1, BOUNDS_MAX):
        change(drive, timeout_s=number)
    assert (len(drive.job("j").bounds), limit_ms()) == (BOUNDS_MAX, 3_600_000)
    for number in range(BOUNDS_MAX, BOUNDS_MAX + 3):
        change(drive, timeout_s=number)
    assert (len(drive.job("j").bounds), limit_ms()) == (BOUNDS_MAX, 3_000)


def test_a_job_that_is_over_is_run_again_and_a_service_may_have_another_one(drive: Driving) -> None:
    drive.submit("j", gpu={})
    drive.submit("web", gpu={}, service={"name": "web"}, run={"driver": "process", "argv": ["serve"]})
    for name in ("j", "web"):
        drive.cancel(name)
    drive.settle()
    assert "moorage again j " in change(drive, replicas=2)["next"]
    assert change(drive, "web", replicas=2)["next"] == "moorage services web names the job that has its service now"
