"""Tenants' schedules in the core: what is recorded of them, and that each run is decided once."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.answers.schedules import schedule_row, schedules_of
from moorage.scheduler.core.events import ScheduleRun
from moorage.schemas.errors import Refused
from moorage.schemas.job import AFTER_MAX
from moorage.schemas.schedules import LABEL, SCHEDULES_MAX, ScheduleAsked
from tests.unit.scheduler.driving import Driving, wire
from tests.unit.scheduler.scheduled import offer_ask, offer_run


class Scheduling(Driving):
    """A driver of the core that is asked for schedules, and hears their runs."""

    def ask(self, act: str, name: str = "nightly", tenant: str = "t", **arguments: Any) -> dict[str, Any]:
        offer_ask(self, act, name, tenant, **arguments)
        self.tick()
        answer: dict[str, Any] = self.answers["schedule"]
        return answer

    def hear(self, sequence: int, name: str = "nightly", tenant: str = "t", *, wish: int = 0, next_ms: int = 0) -> None:
        """nats-server publishes a run, for the wish that the ledger has if no other is given."""
        offer_run(self, sequence, name, tenant, wish=wish, next_ms=next_ms)
        self.tick()

    def row(self, name: str = "nightly", tenant: str = "t") -> dict[str, Any]:
        row = self.state.schedule(tenant, name)
        assert row is not None
        return wire(schedule_row(self.state, row))


@pytest.fixture
def drive() -> Scheduling:
    return Scheduling()


def test_a_run_is_a_job_of_its_own_with_the_label_of_its_schedule(drive: Scheduling) -> None:
    added = drive.ask("add", tz="Europe/Berlin")
    assert (added["data"]["changed"], added["ledger"]) == (True, len(drive.records))
    assert added["data"]["schedule"]["cron"] == "0 3 * * *"
    drive.worker("w0")
    drive.hear(7, next_ms=drive.now + 60_000)
    assert drive.states("nightly-7") == ["PLACED"]
    assert drive.engine.reader.request_of(drive.job("nightly-7")).labels == {LABEL: "nightly"}
    assert drive.answers["run"]["data"] == {"name": "nightly", "job": "nightly-7", "changed": True}
    assert [drive.row()[name] for name in ("runs", "job", "state", "next_ms")] == [
        1, "nightly-7", "PLACED", drive.now + 60_000 - 1,
    ]  # fmt: skip


def test_a_run_while_the_last_one_goes_is_left_out_and_that_is_told(drive: Scheduling) -> None:
    drive.worker("w0")
    drive.ask("add", request={"run": {"argv": ["true"]}, "gpu": {}})
    drive.hear(1)
    drive.hear(2)
    assert drive.state.job("t", "nightly-2") is None
    assert drive.answers["run"]["code"] == "failed-precondition"
    assert [drive.row()[name] for name in ("runs", "skipped", "why", "job")] == [
        1, 1, "job nightly-1, the last run, was PLACED", "nightly-1",
    ]  # fmt: skip
    drive.settle()
    drive.run_out("w0")
    drive.hear(3)
    assert drive.states("nightly-3") == ["PLACED"]
    assert drive.row().get("why", "") == ""


def test_a_run_that_a_wrong_clock_noted_far_ahead_keeps_no_other_away(drive: Scheduling) -> None:
    drive.ask("add")
    drive.hear(1, next_ms=drive.now + 1_000 * 3_600_000)
    drive.cancel("nightly-1")
    drive.tick()
    drive.hear(2, next_ms=drive.now + 3_600_000)
    assert drive.row()["job"] == "nightly-2"
    drive.hear(3, next_ms=drive.state.schedules["t"]["nightly"].next_ms)
    assert drive.row()["runs"] == 2, "a repeat is none"


def test_a_run_goes_where_the_last_one_is_cancelled_in_the_same_record(drive: Scheduling) -> None:
    drive.ask("add")
    drive.hear(1)
    drive.offer_cancel("nightly-1")
    drive.hear(2)
    assert [drive.states(f"nightly-{number}") for number in (1, 2)] == [["CANCELLED"], ["QUEUED"]]
    assert "skipped" not in drive.row()


def test_a_run_may_start_behind_the_last_one_instead_whatever_its_end(drive: Scheduling) -> None:
    drive.worker("w0", 4)
    drive.ask("add", overlap="queue", request={"run": {"argv": ["true"]}, "gpu": {}})
    wish = drive.state.schedules["t"]["nightly"].wish
    for sequence in (1, 2):
        drive.engine.offer(ScheduleRun("t", "nightly", wish, sequence, 0))
    drive.tick()
    drive.hear(3)
    assert [drive.states(f"nightly-{number}") for number in (1, 2, 3)] == [["PLACED"], ["QUEUED"], ["QUEUED"]]
    assert [drive.row().get(name) for name in ("runs", "skipped", "job")] == [3, None, "nightly-3"]
    drive.cancel("nightly-1")
    drive.settle()
    drive.tick()
    assert [drive.states(f"nightly-{number}") for number in (2, 3)] == [["PLACED"], ["QUEUED"]]
    drive.run_out("w0", code=1)
    drive.tick()
    assert drive.states("nightly-3") == ["PLACED"]


@pytest.mark.parametrize("at_once", [False, True])
def test_a_run_starts_behind_all_before_it_also_where_one_that_waited_is_cancelled(
    drive: Scheduling, at_once: bool
) -> None:
    """It waited for the last one alone: with that cancelled, it ran beside the one before."""
    drive.worker("w0", 4)
    drive.ask("add", overlap="queue", request={"run": {"argv": ["true"]}, "gpu": {}})
    wish = drive.state.schedules["t"]["nightly"].wish
    for sequence in (1, 2, 3):
        drive.engine.offer(ScheduleRun("t", "nightly", wish, sequence, 0))
        if not at_once:
            drive.tick()
    drive.tick()
    drive.cancel("nightly-2")
    drive.settle()
    assert [drive.states(f"nightly-{number}") for number in (1, 3)] == [["RUNNING"], ["QUEUED"]]
    drive.cancel("nightly-3")
    drive.hear(4)
    drive.settle()
    assert [drive.states(f"nightly-{number}") for number in (1, 4)] == [["RUNNING"], ["QUEUED"]]
    drive.lead_from_snapshot()
    drive.renew()
    drive.cancel("nightly-4")
    drive.hear(5)
    drive.run_out("w0")
    drive.settle()
    assert drive.states("nightly-5") == ["RUNNING"]


def test_a_run_that_cannot_wait_for_all_before_it_is_left_out(drive: Scheduling) -> None:
    """The oldest of more than a hundred was forgotten: with those between cancelled, a run started beside it."""
    drive.worker("w0", 4)
    drive.ask("add", overlap="queue", request={"run": {"argv": ["true"]}, "gpu": {}})
    for sequence in range(1, AFTER_MAX + 2):
        drive.hear(sequence)
    assert [drive.row()[name] for name in ("runs", "skipped", "job")] == [AFTER_MAX, 1, f"nightly-{AFTER_MAX}"]
    assert drive.row()["why"].startswith(f"{AFTER_MAX} runs before it are not over")
    assert "cancel those" in drive.answers["run"]["next"]
    for sequence in range(2, AFTER_MAX + 1):
        drive.cancel(f"nightly-{sequence}")
    drive.hear(AFTER_MAX + 2)
    drive.settle()
    assert [drive.states(f"nightly-{number}") for number in (1, AFTER_MAX + 2)] == [["RUNNING"], ["QUEUED"]]


def test_two_runs_in_one_record_are_one_job_where_they_must_not_overlap(drive: Scheduling) -> None:
    drive.ask("add")
    wish = drive.state.schedules["t"]["nightly"].wish
    for sequence in (1, 2, 2):
        drive.engine.offer(ScheduleRun("t", "nightly", wish, sequence, 0))
    drive.tick()
    assert list(drive.state.tenants["t"].jobs) == ["nightly-1"]
    assert drive.row()["skipped"] == 1


def test_a_run_is_decided_once_over_a_takeover_and_a_snapshot(drive: Scheduling) -> None:
    drive.ask("add", overlap="queue")
    drive.hear(5)
    drive.lead_from_snapshot()
    drive.hear(5)
    drive.hear(4)
    assert list(drive.state.tenants["t"].jobs) == ["nightly-5"]
    assert drive.answers["run"]["code"] == "failed-precondition", "4 was never decided, as 5 came first"
    drive.hear(6)
    assert list(drive.state.tenants["t"].jobs) == ["nightly-5", "nightly-6"]
    assert drive.state.ran_through == 6


def test_a_run_that_comes_again_under_another_number_makes_no_job(drive: Scheduling) -> None:
    """nats-server publishes it again after a crash; the next one is due when it was."""
    drive.ask("add", overlap="queue")
    drive.hear(5, next_ms=drive.now + 60_000)
    drive.hear(6, next_ms=drive.state.schedules["t"]["nightly"].next_ms)
    assert list(drive.state.tenants["t"].jobs) == ["nightly-5"]
    drive.hear(7)
    drive.hear(8, next_ms=drive.now + 120_000)
    assert list(drive.state.tenants["t"].jobs) == ["nightly-5", "nightly-7", "nightly-8"], "one was asked for, one due"


def test_a_run_for_an_older_wish_makes_no_job(drive: Scheduling) -> None:
    drive.ask("add")
    wish = drive.state.schedules["t"]["nightly"].wish
    assert drive.ask("pause")["data"]["schedule"]["paused"]
    drive.hear(1, wish=wish)
    assert "t" not in drive.state.tenants
    assert drive.ask("pause")["data"]["changed"] is False
    assert "paused" not in drive.ask("resume")["data"]["schedule"]
    drive.hear(2, wish=wish)
    assert "t" not in drive.state.tenants
    drive.hear(3)
    assert list(drive.state.tenants["t"].jobs) == ["nightly-3"]
    drive.ask("remove")
    drive.hear(4, wish=wish)
    assert (drive.state.schedules, drive.answers["run"]["code"]) == ({}, "not-found")
    assert drive.ask("remove")["code"] == "not-found"
    assert drive.state.job("t", "nightly-3") is not None


def test_a_schedule_is_added_once(drive: Scheduling) -> None:
    drive.ask("add")
    assert drive.ask("add")["data"]["changed"] is False
    assert drive.ask("add", cron="0 4 * * *")["code"] == "conflict"
    assert drive.ask("add", request={"run": {"argv": ["false"]}})["code"] == "conflict"
    for name in ("b", "a", "a"):
        offer_ask(drive, "add", name)
    drive.tick()
    assert [row.name for row in schedules_of(drive.state, "t")] == ["a", "b", "nightly"]
    assert schedules_of(drive.state, "other") == []


def test_a_tenant_has_at_most_so_many(drive: Scheduling) -> None:
    drive.checks = False
    for number in range(SCHEDULES_MAX + 1):
        offer_ask(drive, "add", f"s{number}")
    for _ in range(20):
        drive.tick()
    assert len(drive.state.schedules["t"]) == SCHEDULES_MAX
    assert drive.answers["schedule"]["code"] == "failed-precondition"
    assert drive.ask("add", tenant="other")["data"]["changed"]


def test_a_run_that_is_refused_is_told_and_the_next_one_is_tried(drive: Scheduling) -> None:
    drive.order("limit", jobs=1)
    drive.ask("add", overlap="queue")
    drive.submit("j")
    drive.hear(1)
    assert drive.row()["why"].startswith("failed-precondition: tenant t has 1 jobs")
    assert "overlap" not in drive.answers["run"]["next"], "no last run goes on"
    drive.order("limit", jobs=0)
    drive.hear(2)
    assert drive.states("nightly-2") == ["QUEUED"]


def test_a_run_that_came_late_says_when_it_was_due(drive: Scheduling) -> None:
    drive.ask("add", cron="0 0 * * *", overlap="queue")
    day = 86_400_000
    first = (drive.now // day + 1) * day
    drive.now = first + 7_200_000
    drive.hear(1, next_ms=first + day)
    assert drive.row()["due_ms"] == first, "no earlier run has told when it is due"
    drive.hear(2)
    assert "due_ms" not in drive.row(), "somebody asked for this one"
    due = first + day
    drive.now = due + 7_200_000
    drive.hear(3, next_ms=due + day)
    assert [drive.row()[name] for name in ("due_ms", "last_ms", "next_ms")] == [due, drive.now, due + day]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"cron": "0 3 * *"}, "4 fields"),
        ({"cron": "@at 2030-01-01T00:00:00Z"}, "must repeat"),
        ({"cron": "@every 1s", "tz": "UTC"}, "tz must be left out"),
        ({"tz": "Local"}, "tz must be a time zone"),  # nats-server takes it for the zone of its own machine
        ({"cron": ""}, "five fields"),
        ({"name": "a.b"}, "name must match"),
        ({"name": "a" * 41}, "name must match"),
        ({"request": {"job": "j", "run": {"argv": ["true"]}}}, "no job"),
        ({"request": {"if_seq": 3, "run": {"argv": ["true"]}}}, "no if_seq"),
        ({"request": {"after": ["prep"], "run": {"argv": ["true"]}}}, "no after"),
        ({"request": {"start_after_s": 3, "run": {"argv": ["true"]}}}, "no start_after_s"),
        ({"request": None}, "request must be there with add"),
        ({"overlap": "both"}, "Invalid enum"),
        ({"sometimes": 1}, "sometimes"),
    ],
)
def test_what_is_wrong_is_named(arguments: dict[str, Any], says: str) -> None:
    good = {"act": "add", "name": "nightly", "cron": "0 3 * * *", "request": {"run": {"argv": ["true"]}}}
    ScheduleAsked.of(good)
    with pytest.raises(Refused, match=says):
        ScheduleAsked.of({**good, **arguments})
