"""Several looks ahead tell more than one: each draws how long jobs run, and a long queue takes as long as it does."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.questions.foresight import FORECAST_KEPT_MS, FORECAST_SHARE, Foresight
from moorage.scheduler.whatif import forecast as forecasts
from moorage.scheduler.whatif import future
from moorage.scheduler.whatif.forecast import LATER, Forecast
from moorage.scheduler.whatif.looks import LOOKS, Band, Outcome, band, middle, part_of, somewhere_in
from tests.unit.scheduler.driving import Driving, wire
from tests.unit.scheduler.queries.test_forecast import MINUTE, learned, look_ahead, submit
from tests.unit.scheduler.queries.test_plan_verb import planned

#: of ten runs seven are over in a minute, three take two hours: half are over in one minute, and the mean is 36.7
SHORT_OR_LONG = [1, 1, 120, 1, 1, 120, 1, 1, 120, 1] * 2
MEAN = sum(SHORT_OR_LONG) / len(SHORT_OR_LONG)
WAITING = 40


def test_over_all_looks_each_job_is_drawn_once_from_each_part() -> None:
    for number in range(50):
        parts = [part_of(look, "t", f"j{number}") for look in range(LOOKS)]
        assert sorted(parts) == list(range(LOOKS))
        for look, part in enumerate(parts):
            assert 100 * part <= LOOKS * somewhere_in(part, look, "t", f"j{number}") + LOOKS < 100 * (part + 1) + LOOKS
    orders = {tuple(part_of(look, "t", f"j{number}") for look in range(LOOKS)) for number in range(500)}
    assert len(orders) == LOOKS * (LOOKS - 1), "and not all of them long in the same look"
    assert [middle(part) for part in range(LOOKS)] == [10, 30, 50, 70, 90]


@pytest.mark.parametrize(
    ("outcomes", "told"),
    [
        ([5, 1, 4, 2, 3], Band(1, 3, 5, ("w", 1))),
        ([5, 1, 4, 2], Band(-1, 4, -1, ("w", 1))),
        ([5, 1, 4], Band(-1, 5, -1, ("w", 1))),
        ([1, 5], None),
        ([], None),
    ],
)
def test_a_look_that_did_not_come_so_far_counts_as_late(outcomes: list[int], told: Band | None) -> None:
    assert band([Outcome(ms, ("w", 1)) for ms in outcomes]) == told


def one_after_the_other() -> Driving:
    """One GPU, and a queue of runs that are mostly short and sometimes long."""
    drive = Driving.with_hosts(1)
    learned(drive, SHORT_OR_LONG)
    for number in range(WAITING + 1):
        submit(drive, f"j{number}")
    return drive


def is_near(in_ms: int, runs: int) -> bool:
    """Whether that is about when so many runs are over, whose sum differs by a sixth of itself at even odds."""
    return 0.6 < in_ms / (runs * MEAN * MINUTE) < 1.5


@pytest.mark.slow
def test_a_long_queue_takes_the_mean_of_such_runs_each_and_not_their_median(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(future, "CPU_S_MAX", 60.0)
    starts = look_ahead(one_after_the_other()).starts["t"]
    for number in (20, 30, WAITING):
        start = starts[f"j{number}"]
        assert is_near(start.p50_ms, number), (number, start)
        assert start.p50_ms < start.p90_ms < LATER * 2 * number * MEAN * MINUTE, "not as if each took the longest"


@pytest.mark.slow
def test_a_plan_at_the_end_of_a_long_queue_says_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(future, "CPU_S_MAX", 60.0)  # on a busy machine fewer looks fit into what they may take
    told = planned(one_after_the_other(), {"gpu": {}})
    assert told.in_ms is not None
    assert is_near(told.in_ms.p50_ms, WAITING + 1), told.in_ms
    assert told.in_ms.p50_ms < (told.in_ms.p90_ms or 0)
    assert told.starts == "later"


@pytest.mark.parametrize("minutes", [60, 60_000])
def test_a_look_far_ahead_takes_hardly_more_moments_than_a_near_one(
    minutes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While jobs are overdue, time alone may change what is placed; far ahead that is looked at less often."""
    monkeypatch.setattr(future, "CPU_S_MAX", 60.0)
    monkeypatch.setattr(future, "MOMENTS_MAX", 200)
    drive = Driving.with_hosts(2)
    learned(drive, [minutes] * 4)
    submit(drive, "runs")
    submit(drive, "whole", gpu={"count": 2})
    for number in range(5):
        submit(drive, f"j{number}")
    starts = look_ahead(drive).starts["t"]
    assert abs(starts["j4"].p50_ms - 3 * minutes * MINUTE) < 2_000


def test_a_look_takes_so_many_moments_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(future, "CPU_S_MAX", 60.0)
    monkeypatch.setattr(future, "MOMENTS_MAX", 3)
    look = future.Future(one_after_the_other().engine, 0, 0)
    look.pass_time(lambda: False)
    assert look.cut
    reached_ms = look.time_ms
    look.pass_time(lambda: False)
    assert look.time_ms == reached_ms


def test_when_a_drained_host_is_empty_is_when_the_last_of_what_runs_there_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(future, "CPU_S_MAX", 0.0)  # however long a queue there is, no look has to go through it
    drive = Driving.with_hosts(8)
    learned(drive, SHORT_OR_LONG)
    for number in range(8):
        submit(drive, f"j{number}")
    told = planned(drive, drain=["w0"])
    assert told.empty is not None
    assert (told.empty["w0"] or 0) > 100 * MINUTE, "of eight, one is a long one"


@pytest.mark.slow
def test_it_says_why_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Driving.with_hosts(1)
    learned(drive, [10] * 4)
    submit(drive, "runs")
    submit(drive, "new", "nobody-knows", tenant="u")
    submit(drive, "behind")
    foresight = Foresight(drive.engine, lambda: drive.now, nothing, nothing, nothing, forks=False)

    def told(found: Forecast) -> Any:
        foresight._forecast = found
        return wire(foresight.explained("t", "behind")).get("starts_unknown")

    assert (
        told(look_ahead(drive))
        == "1 job that starts before it has no time limit and no earlier run of the same command"
    )
    plan = planned(drive, {"gpu": {}})
    assert plan.waiting is not None
    assert (plan.starts, plan.waiting.starts_unknown) == (
        "unknown",
        "1 job that starts before it has no time limit and no earlier run of the same command",
    )
    monkeypatch.setattr(forecasts, "JOBS_MAX", 0)
    assert (
        told(look_ahead(drive))
        == "a look ahead ended before it: that covers so many jobs, and takes so much processor time"
    )
    drive.run_out("w0")
    assert drive.states("new", "u") == ["RUNNING"]
    found = look_ahead(drive)
    assert (found.unknown_runs, found.unknown_starts) == (1, 0)
    assert told(found) == "1 running job has no time limit and no earlier run of the same command"


def test_no_start_is_looked_for_where_a_call_decides_it() -> None:
    """A service that was asleep was told with the jobs that run without a time limit."""
    drive = Driving()
    drive.worker("w0", 2, capabilities={"process": {"answers_calls": True, "reaches": True}})
    submit(drive, "runs")
    run = {"driver": "process", "argv": ["serve"], "ready": {"call": True}, "restart": "always"}
    asleep = {"service": {"name": "embed"}, "replicas": {"min": 0, "max": 1}, "run": run}
    assert drive.submit("asleep", **asleep)["kind"] == "accepted"
    foresight = Foresight(drive.engine, lambda: drive.now, nothing, nothing, nothing, forks=False)
    foresight._forecast = look_ahead(drive)
    told = wire(foresight.explained("t", "asleep"))
    assert told["reason"] == "scaled"
    assert "starts_unknown" not in told


def test_why_a_start_is_unknown_is_not_said_of_a_job_that_is_newer_than_the_forecast() -> None:
    drive = Driving.with_hosts(1)
    submit(drive, "runs")
    submit(drive, "waits")
    foresight = Foresight(drive.engine, lambda: drive.now, nothing, nothing, nothing, forks=False)
    foresight._forecast = look_ahead(drive)
    drive.now += 1
    submit(drive, "newer")
    assert "1 running job has no time limit" in wire(foresight.explained("t", "waits"))["starts_unknown"]
    assert "starts_unknown" not in wire(foresight.explained("t", "newer"))
    foresight._forecast = look_ahead(drive)
    assert "starts_unknown" in wire(foresight.explained("t", "newer"))


@pytest.mark.parametrize("field", ["start_within_s", "deadline_s"])
def test_who_is_not_expected_to_start_in_time_is_told_so_before(field: str) -> None:
    """It is accepted, as an estimate is no bound, and ends once its time is over."""
    drive = Driving.with_hosts(1)
    learned(drive, [10] * 8)
    submit(drive, "runs")
    drive.now += 4 * MINUTE
    drive.renew()
    assert drive.submit("late", gpu={}, **{field: 300.0})["kind"] == "accepted"
    assert (
        drive.submit("fine", gpu={}, run={"driver": "noop", "argv": ["train"]}, **{field: 420.0})["kind"] == "accepted"
    )
    found = look_ahead(drive)
    assert found.late == {"t": {"late": f"{field} is over before it would start"}}
    assert list(found.starts["t"]) == ["fine"]
    foresight = Foresight(drive.engine, lambda: drive.now, nothing, nothing, nothing, forks=False)
    foresight._forecast = found
    assert wire(foresight.explained("t", "late"))["starts_unknown"] == f"{field} is over before it would start"
    plan = planned(drive, {"gpu": {}, field: 100.0})
    assert plan.waiting is not None
    assert (plan.starts, plan.waiting.starts_unknown) == ("unknown", f"{field} is over before it would start")
    drive.pass_time(301_000, step=10_000)
    assert drive.states("late") == ["EXPIRED"]


def nothing(*_: object) -> None:
    """Nobody hears it."""


@pytest.mark.parametrize("cpu_ms", [100, 2_000])
async def test_forecasts_that_nobody_asked_for_take_a_part_of_one_processor(cpu_ms: int) -> None:
    drive = Driving.with_hosts(1)
    submit(drive, "runs")
    submit(drive, "waits")
    foresight = Foresight(drive.engine, lambda: drive.now, nothing, nothing, nothing, forks=True)
    waits = drive.job("waits")
    drive.now += MINUTE
    kept_ms = max(FORECAST_KEPT_MS, FORECAST_SHARE * cpu_ms)
    for asked in (False, True):
        foresight._forecast = Forecast(drive.now - kept_ms, {}, cpu_ms=cpu_ms)
        assert not foresight._wants_forecast(waits, asked=asked)
        foresight._forecast = Forecast(drive.now - kept_ms - 1, {}, cpu_ms=cpu_ms)
        assert foresight._wants_forecast(waits, asked=asked)
    drive.now = waits.accepted_ms + max(FORECAST_KEPT_MS // 4, cpu_ms)
    foresight._forecast = Forecast(waits.accepted_ms - 1, {}, cpu_ms=cpu_ms)
    assert foresight._wants_forecast(waits), "who came since, and asks, is told"
    assert not foresight._wants_forecast(waits, asked=False)
    foresight.close()
