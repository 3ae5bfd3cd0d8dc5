"""A job that starts at a time: it waits beside the queue until then, over takeovers and snapshots."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.answers.views import show, summary
from moorage.scheduler.answers.waiting import explain_job, waiting_by_reason
from moorage.scheduler.core.queue.waiting_room import TOLD_MAX
from moorage.scheduler.whatif.fixes import fixes
from moorage.schemas.errors import Refused
from tests.unit.scheduler.driving import Driving, wire

HOUR_MS = 3_600_000


@pytest.fixture
def drive() -> Driving:
    return Driving.with_hosts(2)


def later(drive: Driving, ms: int) -> None:
    """Time passes, in which nobody is silent."""
    drive.now += ms
    drive.engine.fleet.slept(drive.now)
    drive.renew()
    drive.tick()


def test_a_job_starts_once_its_time_has_come_and_not_before(drive: Driving) -> None:
    drive.submit("night", gpu={}, start_after_s=3600)
    at_ms = drive.state.jobs[drive.job("night").num].accepted_ms + HOUR_MS
    later(drive, HOUR_MS - 5_000)
    assert drive.states("night") == ["QUEUED"]
    assert drive.engine.next_timer_ms == at_ms
    later(drive, 6_000)
    assert drive.states("night") == ["PLACED"]
    assert drive.job("night").ready_ms >= at_ms


def test_it_says_that_it_waits_for_its_time(drive: Driving) -> None:
    drive.submit("night", gpu={}, start_after_s=3600)
    drive.submit("waits", gpu={"count": 8})
    at_ms = drive.job("night").accepted_ms + HOUR_MS
    told = drive.explained("night")
    assert (told["reason"], told["not_before_ms"]) == ("not-before", at_ms)
    assert told["because"].startswith("it may start from 1970-01-01T01:16:")
    assert "after" not in told
    assert "position" not in told
    assert summary(drive.engine, drive.job("night")).not_before_ms == at_ms
    assert waiting_by_reason(drive.engine) == {"not-before": 1, "count": 1}
    later(drive, HOUR_MS + 1)
    assert "not_before_ms" not in wire(show(drive.engine, "t", "night"))


def test_what_would_start_it_now_is_to_leave_the_time_out_and_what_else_it_waits_for(drive: Driving) -> None:
    drive.submit("goes", gpu={}, priority=90)
    drive.submit("night", gpu={}, start_after_s=3600)
    drive.submit("both", gpu={}, after=["night"], start_after_s=3600)
    reason, found = fixes(drive.engine, drive.now, "t", "night")
    assert (reason, [fix.request for fix in found]) == ("not-before", [{"start_after_s": None}])
    reason, found = fixes(drive.engine, drive.now, "t", "both")
    assert (reason, [fix.request for fix in found]) == ("after", [{"after": None, "start_after_s": None}])


def test_it_is_known_to_the_next_leader_and_to_a_snapshot(drive: Driving) -> None:
    drive.submit("night", gpu={}, start_after_s=3600)
    drive.lead_from_snapshot()
    drive.renew()
    later(drive, HOUR_MS - 10_000)
    assert drive.states("night") == ["QUEUED"]
    drive.lead()
    drive.renew()
    later(drive, 20_000)
    assert drive.states("night") == ["PLACED"]


def test_it_is_cancelled_held_and_released_like_any_other(drive: Driving) -> None:
    for name in ("gone", "held", "free"):
        drive.submit(name, gpu={}, start_after_s=3600)
    drive.cancel("gone")
    assert drive.states("gone") == ["CANCELLED"]
    drive.order("hold", job="held")
    drive.order("hold", job="free")
    drive.order("release", job="free")
    assert drive.states("free") == ["QUEUED"]
    later(drive, HOUR_MS + 1_000)
    assert [drive.states(name) for name in ("held", "free")] == [["QUEUED"], ["PLACED"]]
    drive.order("release", job="held")
    assert drive.states("held") == ["PLACED"]


def test_it_waits_for_its_time_and_for_other_jobs(drive: Driving) -> None:
    drive.submit("first", gpu={})
    drive.submit("both", gpu={}, after=["first"], start_after_s=3600)
    drive.submit("time-first", gpu={}, after=["both"], start_after_s=60)
    told: Any = wire(explain_job(drive.engine, "t", "both"))
    assert (told["reason"], [each["job"] for each in told["after"]]) == ("after", ["first"])
    assert "and may start from " in told["because"]
    drive.settle()
    drive.run_out("w0")
    assert drive.states("first") == ["SUCCEEDED"]
    drive.tick()
    assert drive.states("both") == ["QUEUED"]
    told = wire(explain_job(drive.engine, "t", "both"))
    assert told["reason"] == "not-before"
    later(drive, HOUR_MS + 1_000)
    assert drive.states("both") == ["PLACED"]
    told = wire(explain_job(drive.engine, "t", "time-first"))
    assert (told["reason"], "not_before_ms" in told) == ("after", False)
    drive.settle()
    drive.run_out("w0")
    drive.tick()
    assert drive.states("time-first") == ["PLACED"]


def test_its_latest_start_counts_from_its_time_and_its_deadline_from_its_acceptance() -> None:
    drive = Driving()
    drive.submit("brief", gpu={}, start_after_s=3600, start_within_s=60)
    drive.submit("short", gpu={}, start_after_s=3600, deadline_s=3700)
    drive.pass_time(HOUR_MS + 1_000)
    assert drive.states("brief") == drive.states("short") == ["QUEUED"]
    drive.pass_time(61_000)
    assert drive.states("brief") == ["EXPIRED"]
    assert drive.states("short") == ["QUEUED"]
    drive.pass_time(40_000)
    assert drive.states("short") == ["EXPIRED"]


def test_many_whose_time_comes_at_once_are_told_in_turns_and_all_of_them() -> None:
    drive = Driving()
    drive.checks = False
    many = 3 * TOLD_MAX + 7
    for number in range(many):
        drive.offer_submit(f"j{number}", start_after_s=60)
    while len(drive.state.jobs) < many:
        drive.tick()
    assert drive.engine.queue.is_empty
    drive.now += 61_000
    drive.tick()
    assert len(drive.engine.queue) == TOLD_MAX
    while drive.engine.room.is_due:
        assert drive.engine.urgent
        drive.tick()
    assert (len(drive.engine.queue), drive.engine.room.jobs) == (many, {})
    drive.check()


def test_nought_is_at_once_and_what_can_never_start_is_refused(drive: Driving) -> None:
    drive.submit("now", gpu={}, start_after_s=0)
    assert drive.states("now") == ["PLACED"]
    with pytest.raises(Refused, match="deadline_s must be above start_after_s = 60"):
        drive.submit("never", start_after_s=60, deadline_s=60)
    with pytest.raises(Refused, match="start_after_s must be 0"):
        drive.submit("long", start_after_s=1e9)
