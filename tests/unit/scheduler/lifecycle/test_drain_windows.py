"""Drains with a deadline and maintenance windows: who is placed before, who leaves when, and what outlives what."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moorage.scheduler.answers import views
from moorage.schemas.answers.fleet import WorkerInfo
from moorage.schemas.errors import Refused
from moorage.schemas.frames import End
from moorage.schemas.operate import act_of
from tests.unit.scheduler.driving import Driving

MINUTE = 60_000
HOUR = 60 * MINUTE
SAVES = {"driver": "noop", "checkpoint_signal": "SIGUSR1", "checkpoint_before_s": 30}


def limited(seconds: float) -> dict[str, Any]:
    return {"driver": "noop", "timeout_s": seconds}


def pass_time(drive: Driving, ms: int) -> list[End]:
    """Let time pass, the worker renewing as workers do; the ends it was asked for, one an attempt."""
    found: dict[tuple[str, int], End] = {}
    until = drive.now + ms
    while drive.now < until:
        drive.now = min(until, drive.now + 1_500)
        drive.renew(*[name for name, worker in drive.workers.items() if worker.session])
        for frame in drive.wanted:
            for end in frame.end:
                found.setdefault((end.job, end.replica), end)
    return list(found.values())


def where(drive: Driving, job: str) -> str:
    return drive.attempt(job).worker.id


def row(drive: Driving, worker: str) -> WorkerInfo:
    return next(each for each in views.fleet(drive.engine, drive.now).workers if each.worker == worker)


def test_of_two_words_in_one_record_the_later_counts() -> None:
    drive = Driving.with_hosts(1)
    drive.offer_operate("drain", "w0", from_s=10.0)
    reply = drive.offer_operate("uncordon", "w0")
    drive.tick()
    assert drive.answers[reply]["changed"], "what the first word asked for is taken back"
    pass_time(drive, 20_000)
    assert (row(drive, "w0").state, drive.state.windows) == ("up", {})


def test_an_uncordon_counts_in_the_very_record_in_which_a_window_begins() -> None:
    drive = Driving.with_hosts(1)
    drive.operate("drain", "w0", from_s=10.0)
    drive.offer_operate("uncordon", "w0")
    drive.tick(12_000)
    drive.renew()
    assert (row(drive, "w0").state, drive.state.windows) == ("up", {})


def test_a_host_is_empty_by_the_deadline_of_a_drain_whatever_grace_its_jobs_have() -> None:
    """SIGTERM came at the deadline, so that the host was empty only after the longest grace."""
    drive = Driving.with_hosts(2)
    for name, grace_s in (("quick", 1), ("slow", 60)):
        drive.submit(name, gpu={}, run={"driver": "noop", "grace_s": grace_s})
    drive.settle()
    drive.workers["w0"].auto = False
    drive.operate("drain", "w0", within_s=120)
    assert pass_time(drive, 55_000) == []
    assert [end.job for end in pass_time(drive, 10_000)] == ["slow"]
    assert {end.job for end in pass_time(drive, 50_000)} == {"slow"}
    assert "quick" in {end.job for end in pass_time(drive, 6_000)}


@pytest.mark.parametrize(("within_s", "notice_s"), [(10, 5), (4, 2), (25, 15), (120, 30)])
def test_a_drain_with_less_time_than_a_grace_does_not_lose_a_jobs_checkpoint(within_s: int, notice_s: int) -> None:
    """SIGTERM came at once, so that a job that saves itself at its checkpoint signal lost its work."""
    drive = Driving.with_hosts(1)
    drive.submit("saves", gpu={}, run=SAVES | {"grace_s": 10})
    drive.settle()
    drive.workers["w0"].auto = False
    drive.operate("drain", "w0", within_s=within_s)
    [told] = pass_time(drive, within_s * 1_000)
    assert told.notice_s == pytest.approx(notice_s, abs=2)
    assert told.notice_s > 0


def test_a_job_is_placed_before_a_window_only_if_its_grace_is_over_by_then_too() -> None:
    drive = Driving.with_hosts(4)
    drive.operate("drain", "w0", from_s=3_600, for_s=3_600)
    graces = {"short": (3_500, 50), "long": (3_500, 200), "endless": (None, 10), "saves": (None, 3_100)}
    for name, (timeout_s, grace_s) in graces.items():
        drive.submit(name, gpu={}, run={"driver": "noop", "timeout_s": timeout_s, "grace_s": grace_s})
    drive.settle()
    assert [drive.job(name).state for name in graces] == ["RUNNING", "QUEUED", "RUNNING", "QUEUED"]


def test_a_drain_with_a_deadline_closes_now_tells_ahead_and_moves_what_is_left() -> None:
    drive = Driving.with_hosts(2)
    drive.submit("saves", gpu={}, run=SAVES)
    drive.submit("plain", gpu={}, run={"driver": "noop"})
    drive.settle()
    drive.worker("w1", gpus=2)
    answer = drive.operate("drain", "w0", within_s=120, why="new disk")
    assert (answer["changed"], answer["members"]) == (True, 2)
    assert answer["drain"]["leave_ms"] - answer["drain"]["from_ms"] == 120_000
    [renewed] = drive.renew("w0")
    assert 100 < renewed["drain_s"] <= 120, "what it lends has to be back by then, too"
    assert row(drive, "w0").state == "draining"
    drive.submit("late", gpu={})
    drive.settle()
    assert where(drive, "late") == "w1"
    assert drive.explained("plain")["leaves"][0]["worker"] == "w0"

    drive.workers["w0"].auto = False
    assert pass_time(drive, 75_000) == [], "until it is time: 30 s, and 10 s of grace, before"
    [told] = pass_time(drive, 10_000)
    assert told.job == "saves"
    assert told.notice_s == pytest.approx(30, abs=2)
    asked = {end.job: end.notice_s for end in pass_time(drive, 30_000)}
    assert asked == {"saves": told.notice_s, "plain": 0.0}, "the first is said until a renewal shows it"
    drive.reports([("exited", "saves", 0, 0, "end"), ("exited", "plain", 0, -15, "end")])
    assert drive.job("saves").state != "SUCCEEDED", "what was told to save itself has not done its work"
    drive.settle()
    drive.tick()
    assert {drive.replica(job).losses + drive.replica(job).retries for job in ("saves", "plain")} == {0}
    assert "w0 is drained: new disk" in {change[8] for change in drive.job("plain").history}
    assert where(drive, "plain") == "w1" or drive.job("plain").state == "QUEUED"
    assert row(drive, "w0").state == "draining", "until somebody uncordons"
    assert drive.operate("uncordon", "w0")["changed"] is True
    assert row(drive, "w0").drain is None


@pytest.mark.slow
def test_a_maintenance_window_is_kept_clear_by_time_limits_and_its_host_empties_and_opens_by_itself() -> None:
    drive = Driving.with_hosts(4)
    answer = drive.operate("drain", "w0", from_s=7200, for_s=3600, why="firmware")
    assert answer["changed"]
    assert row(drive, "w0").state == "up"
    assert msgspec.to_builtins(row(drive, "w0").drain) == {
        "begins_in_ms": 2 * HOUR,
        "leave_in_ms": 2 * HOUR,
        "ends_in_ms": 3 * HOUR,
        "by": "operator",
        "said": "me",
        "why": "firmware",
    }
    drive.submit("short", gpu={}, run=limited(3600))
    drive.submit("long", gpu={}, run=limited(3 * 3600))
    drive.submit("endless", gpu={})
    drive.submit("due", gpu={}, deadline_s=600)
    drive.settle()
    assert [drive.job(name).state for name in ("short", "long", "endless", "due")] == [
        "RUNNING",
        "QUEUED",
        "RUNNING",
        "RUNNING",
    ]
    assert drive.explained("long")["reason"] == "leaving"
    drive.run_out("w0")
    drive.submit("endless-2", gpu={})
    drive.settle()
    drive.now += 110 * MINUTE
    drive.renew("w0")
    drive.load("w0")
    drive.submit("too-late", gpu={})
    drive.settle()
    assert drive.job("too-late").state == "QUEUED", "one without a limit is not placed ten minutes before"
    pass_time(drive, 11 * MINUTE)
    drive.settle()
    assert row(drive, "w0").state == "draining"
    assert drive.job("endless-2").state == "QUEUED"
    assert drive.replica("endless-2").losses == 0
    pass_time(drive, HOUR)
    drive.load("w0")
    drive.settle()
    assert row(drive, "w0").state == "up"
    assert row(drive, "w0").drain is None
    assert [drive.job(name).state for name in ("long", "too-late", "endless-2")] == ["RUNNING"] * 3


def test_a_job_that_ends_before_a_window_by_the_earlier_of_its_two_limits_starts() -> None:
    drive = Driving.with_hosts(1)
    drive.operate("drain", "w0", from_s=600)
    drive.submit("due", gpu={}, run=limited(3_600), deadline_s=300)
    drive.settle()
    assert where(drive, "due") == "w0"


@pytest.mark.parametrize("replicas", [60, 100, 2_000])
def test_the_replicas_of_one_job_that_a_window_keeps_waiting_hold_up_no_short_job(replicas: int) -> None:
    """Each took one of the places of jobs that are skipped."""
    drive = Driving.with_hosts(1, 1)
    drive.operate("drain", "w1", from_s=3600, within_s=60)
    drive.submit("sweep", gpu={}, replicas=replicas, run=limited(2 * 3600))
    drive.settle()
    drive.submit("short", gpu={}, run=limited(60))
    assert drive.placed_on("short") == ["w1"]
    drive.run_out("w0")
    drive.cancel("short")
    drive.operate("uncordon", "w1")
    drive.settle()
    assert [len(worker.held) for worker in drive.workers.values()] == [1, 1], "the sweep goes on"


def test_a_maintenance_window_outlives_a_takeover_and_a_reboot_and_makes_up_for_what_it_missed() -> None:
    drive = Driving()
    worker = drive.worker("w0", gpus=1)
    drive.submit("j", gpu={})
    drive.settle()
    drive.operate("drain", "w0", from_s=60, for_s=600)
    drive.lead_from_snapshot()
    drain = row(drive, "w0").drain
    assert drain is not None
    assert drain.begins_in_ms <= 60_000
    drive.now += 5 * MINUTE  # nobody led while it began
    drive.lead()
    drive.renew("w0")
    drive.tick(1_500)
    drive.settle()
    assert row(drive, "w0").state == "draining"
    worker.die()
    drive.join(worker)
    drive.tick(1_500)
    drive.submit("k", gpu={})
    drive.settle()
    assert drive.job("k").state == "QUEUED", "closed to it after its reboot, too"
    pass_time(drive, 6 * MINUTE)
    drive.settle()
    assert row(drive, "w0").state == "up"


@pytest.mark.parametrize("also", ["uncordon", "drain"])
def test_a_maintenance_window_is_taken_back_and_replaced(also: str) -> None:
    drive = Driving.with_hosts(1)
    drive.operate("drain", "w0", from_s=60, for_s=600)
    assert drive.operate(also, "w0")["changed"] is True
    assert drive.state.windows == {}
    assert row(drive, "w0").state == {"uncordon": "up", "drain": "draining"}[also]
    pass_time(drive, 2 * MINUTE)
    assert row(drive, "w0").state == {"uncordon": "up", "drain": "draining"}[also]


def test_a_cordoned_worker_stays_cordoned_when_its_maintenance_window_is_over() -> None:
    drive = Driving.with_hosts(1)
    drive.operate("drain", "w0", from_s=10, for_s=60)
    drive.operate("cordon", "w0")
    pass_time(drive, 90_000)
    assert (drive.state.workers["w0"].flag, drive.state.windows) == ("cordoned", {})


@pytest.mark.parametrize(("verb", "flag"), [("drain", "draining"), ("cordon", "cordoned")])
def test_a_closed_worker_shows_the_operator_the_reason_and_for_how_long(verb: str, flag: str) -> None:
    drive = Driving.with_hosts(1)
    assert drive.operate(verb, "w0", why="new disk")["changed"] is True
    pass_time(drive, 3 * MINUTE)
    assert drive.operate(verb, "w0")["changed"] is False, "the reason that was given stands"
    drive.lead_from_snapshot()
    drive.renew("w0")
    drive.submit("j", gpu={})
    drive.settle()
    assert drive.explained("j")["held_by"] == [f"w0: {flag} by operator, unverified (says me): new disk"]
    told = row(drive, "w0")
    assert [told.flag, told.by, told.said, told.why] == [flag, "operator", "me", "new disk"]
    assert 3 * MINUTE <= (told.since_ms or 0) < 4 * MINUTE
    assert drive.operate(verb, "w0", why="new fans")["changed"] is True, "another reason replaces it"
    told = row(drive, "w0")
    assert (told.why, (told.since_ms or 0) >= 3 * MINUTE) == ("new fans", True), "it is closed for as long as before"
    drive.operate("uncordon", "w0")
    assert (row(drive, "w0").why, row(drive, "w0").since_ms) == (None, None)


def test_a_worker_that_a_maintenance_window_closed_shows_its_reason_and_since_when() -> None:
    drive = Driving.with_hosts(1)
    drive.operate("drain", "w0", from_s=60, why="firmware")
    assert (row(drive, "w0").why, row(drive, "w0").since_ms) == (None, None), "it is open until then"
    drive.submit("long", gpu={}, run=limited(600))
    drive.settle()
    assert drive.explained("long")["held_by"] == ["w0: will be drained: firmware"]
    pass_time(drive, 3 * MINUTE)
    told = row(drive, "w0")
    assert (told.flag, told.said, told.why) == ("draining", "me", "firmware")
    assert MINUTE < (told.since_ms or 0) <= 2 * MINUTE


def test_an_order_says_how_many_attempts_are_ending() -> None:
    """`uncordon` in the grace of a drain said that the attempt goes on."""
    drive = Driving()
    drive.worker("w0", gpus=2).auto = False
    drive.submit("ends", gpu={}, run={"driver": "noop", "grace_s": 60})
    drive.settle()
    drive.operate("drain", "w0", within_s=1)
    pass_time(drive, 2_000)
    assert drive.job("ends").state == "ENDING"
    for verb in ("uncordon", "cordon"):
        answer = drive.operate(verb, "w0")
        assert (answer["members"], answer["ending"]) == (1, 1)


def test_a_gang_with_a_rank_there_leaves_as_a_whole() -> None:
    drive = Driving.with_hosts(1, 1)
    drive.submit("g", replicas=2, gpu={"scheduling": "gang"}, run={"driver": "noop"})
    drive.settle()
    drive.operate("drain", "w1", within_s=10)
    pass_time(drive, 12_000)
    drive.settle()
    assert drive.job("g").state == "QUEUED"
    assert drive.replica("g", 0).losses == 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"worker": "w 0"}, "worker must match"),
        ({"worker": "w0", "from_s": -1}, "from_s must be 0.."),
        ({"worker": "w0", "for_s": 10, "within_s": 10}, "for_s must be above within_s"),
        ({"worker": "w0", "untill": 3}, "untill"),
        ({"worker": "w0", "why": "x" * 300}, "why must be at most"),
    ],
)
def test_what_cannot_be_is_refused_with_the_field(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(Refused) as refused:
        act_of("drain", fields)
    told = refused.value.problem
    assert named in f"{told.message} {told.field} {told.found}"


def test_a_drain_of_an_idle_worker_is_refused_where_something_has_begun_even_in_the_same_record() -> None:
    drive = Driving()
    drive.worker("w0", 2)
    drive.submit("j", gpu={})
    assert drive.operate("drain", "w0", if_idle=True)["code"] == "failed-precondition"
    drive.settle()
    drive.run_out("w0")
    reply = drive.offer_operate("drain", "w0", if_idle=True)
    drive.offer_submit("later", gpu={})
    drive.tick()
    assert (drive.answers[reply]["changed"], drive.states("later")) == (True, ["QUEUED"]), "nothing begins there"
    assert drive.operate("drain", "w0", if_idle=True)["kind"] == "done"


@pytest.mark.parametrize("of_its_host", [{"local": {0}}, {"waiting": True}])
def test_a_worker_whose_host_has_or_wants_a_gpu_is_not_idle(of_its_host: dict[str, Any]) -> None:
    drive = Driving()
    worker = drive.worker("w0", 2)
    for name, value in of_its_host.items():
        setattr(worker, name, value)
    drive.renew("w0")
    assert drive.operate("drain", "w0", if_idle=True)["code"] == "failed-precondition"
