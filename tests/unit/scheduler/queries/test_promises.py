"""A job that waits is promised by when it starts; each promise is scored, and moves the next ones."""

from __future__ import annotations

import math
from typing import Any

import pytest

from moorage.cli.fleet.waited_usage import promised_words
from moorage.client.answers import JobInfo
from moorage.scheduler.answers.promises import AFTER_MS, ALIKE_MS, LATE_MS, SCORES_MAX, SCORES_MIN, Promises
from moorage.scheduler.core.events import ChangeOrder, Promising
from moorage.scheduler.core.ledger.state import Promise
from moorage.scheduler.whatif.forecast import Forecast
from moorage.schemas.answers.operators import PromiseRow
from moorage.schemas.operate import ChangeAsked
from tests.levels import NEXT, know_next, raise_level
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.fleet.test_capabilities import shown
from tests.unit.scheduler.queries.test_forecast import MINUTE, look_ahead

LIMIT_S = 600.0


def busy() -> Driving:
    """One GPU, held by a job that ends within ten minutes."""
    drive = Driving.with_hosts(1)
    comes(drive, "runs")
    return drive


def comes(drive: Driving, name: str, tenant: str = "t", **fields: Any) -> None:
    run = {"driver": "noop", "timeout_s": LIMIT_S}
    asked = {"gpu": {}, "run": run, "labels": {"workload": name}, **fields}  # no run of it is known, but the limit
    assert drive.submit(name, tenant=tenant, **asked)["kind"] == "accepted"
    drive.settle()


def promises(drive: Driving) -> Promises:
    return drive.term_counts.promises


def promise(drive: Driving, name: str = "waits") -> Promise:
    """The job is promised a start, in the next record."""
    promises(drive).look(drive.now)
    found = promises(drive).choose(look_ahead(drive), drive.now)
    assert found is not None
    drive.engine.offer(found)
    drive.tick()
    promised = drive.job(name).promised
    assert promised is not None
    return promised


def info(drive: Driving, name: str) -> JobInfo:
    return shown(drive, name)


@pytest.mark.parametrize("level", [1, NEXT])
def test_a_job_that_still_waits_after_ten_seconds_is_promised_a_start_once(
    level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if level == NEXT:
        know_next(monkeypatch)
    drive = busy()
    if level == NEXT:
        raise_level(drive)
    comes(drive, "waits")
    drive.pass_time(AFTER_MS - 2_000, step=1_000)
    promises(drive).look(drive.now)
    assert promises(drive).choose(look_ahead(drive), drive.now) is None
    assert not promises(drive).wants(None, drive.now)
    drive.pass_time(2_000, step=1_000)
    assert promises(drive).wants(None, drive.now)
    told = promise(drive)
    assert 0 <= told.by_ms - told.told_ms - told.p90_ms < 10_000
    assert told.by_ms % 10_000 == 0
    assert 0 < told.p90_ms <= LIMIT_S * 1000
    assert promises(drive).choose(look_ahead(drive), drive.now + 1_000) is None
    standby = drive.shadow.jobs[drive.job("waits").num].promised
    assert standby == (told if level == NEXT else None)
    drive.engine.offer(Promising(drive.job("waits").num, 1, 1, 1, 1))
    drive.tick()
    assert drive.job("waits").promised == told
    said = info(drive, "waits").promised
    assert said is not None
    assert (said.by_ms, said.kept) == (told.by_ms, None)


def test_one_a_second_is_promised_and_who_waits_too_long_for_it_is_not_told() -> None:
    drive = busy()
    for number in range(3):
        comes(drive, f"j{number}")
    drive.pass_time(AFTER_MS, step=1_000)
    promises(drive).look(drive.now)
    forecast = look_ahead(drive)
    first = promises(drive).choose(forecast, drive.now)
    assert first is not None
    assert first.job == drive.job("j0").num
    assert promises(drive).choose(forecast, drive.now + 999) is None
    second = promises(drive).choose(forecast, drive.now + 1_000)
    assert second is not None
    assert second.job == drive.job("j1").num
    assert second.p90_ms == forecast.starts["t"]["j1"].p90_ms - 1_000, "a forecast grows old"
    drive.pass_time(LATE_MS, step=5_000)
    assert promises(drive).choose(look_ahead(drive), drive.now) is None
    for _ in range(3):
        drive.run_out("w0")
    drive.tick()
    rows = [PromiseRow(tenant="t", kept=0, missed=0, void=0, not_told=3)]
    assert promises(drive).rows == rows
    assert [promises(drive).answer(who).rows for who in (None, "t", "u")] == [rows, rows, []]
    assert promises(drive).sums == (0, 0, 3), "those two were never written"


def test_a_forecast_without_a_bound_promises_nothing() -> None:
    drive = busy()
    comes(drive, "waits")
    drive.pass_time(AFTER_MS, step=1_000)
    promises(drive).look(drive.now)
    assert promises(drive).choose(Forecast(drive.now, {}), drive.now) is None
    assert promises(drive).choose(None, drive.now) is None
    old = look_ahead(drive)
    assert promises(drive).choose(old, drive.now + 30_001) is None
    assert promises(drive).choose(old, drive.now) is not None


def test_a_start_in_time_keeps_it_and_a_passed_time_misses_it_before_the_start() -> None:
    drive = busy()
    comes(drive, "waits")
    drive.pass_time(AFTER_MS, step=1_000)
    promise(drive)
    drive.pass_time(2 * MINUTE, step=10_000)
    drive.run_out("w0")
    assert drive.states("waits") == ["RUNNING"]
    assert promises(drive).rows == [PromiseRow(tenant="t", kept=1, missed=0, void=0, not_told=0)]
    assert info(drive, "waits").promised.kept is True  # type: ignore[union-attr]
    comes(drive, "late", priority=10)
    drive.pass_time(AFTER_MS, step=1_000)
    told = promise(drive, "late")
    drive.order("hold")
    drive.run_out("w0")
    drive.pass_time(told.by_ms - drive.now, step=20_000)
    promises(drive).look(drive.now)
    assert promises(drive).sums == (1, 0, 0)
    drive.pass_time(1, step=1)
    promises(drive).look(drive.now)
    assert promises(drive).sums == (1, 1, 0), "it is promised against operators, too"
    assert info(drive, "late").promised.kept is False  # type: ignore[union-attr]
    drive.order("release")
    drive.settle()
    assert drive.states("late") == ["RUNNING"]
    promises(drive).look(drive.now)
    assert promises(drive).sums == (1, 1, 0), "once"


def test_what_its_tenant_does_to_a_job_makes_its_promise_void() -> None:
    drive = busy()
    comes(drive, "changed")
    comes(drive, "cancelled")
    drive.pass_time(AFTER_MS, step=1_000)
    promise(drive, "changed")
    drive.pass_time(1_000, step=1_000)
    promise(drive, "cancelled")
    drive.cancel("cancelled")
    drive.engine.offer(ChangeOrder("t", ChangeAsked(job="changed", priority=60)))
    drive.tick()
    promises(drive).look(drive.now)
    assert promises(drive).rows == [PromiseRow(tenant="t", kept=0, missed=0, void=1, not_told=0)]
    drive.pass_time(11 * MINUTE, step=20_000)
    promises(drive).look(drive.now)
    assert promises(drive).sums == (0, 0, 0)


def test_the_time_is_moved_by_the_score_within_which_nine_of_ten_promises_were() -> None:
    drive = busy()
    comes(drive, "waits")
    drive.tick()
    found = promises(drive)
    for number in range(SCORES_MIN - 1):
        found._scores[-number - 1] = "u", False, 1.0
    assert found.within_ms("t", 60_000) == 60_000, "not yet scored"
    for number in range(SCORES_MAX):  # the last hundred: 0.00 to 0.99
        found._scores[number + 1_000] = "u", False, number / 100
    # the 91st of them is 0.90: ceil(0.9 * 101) = 91
    assert found.within_ms("t", 60_000) == round(2 * ALIKE_MS * math.exp(0.90)) - ALIKE_MS
    for number in range(SCORES_MAX):
        found._scores[number + 2_000] = "t", False, -0.5
    assert found.within_ms("t", 60_000) == round(2 * ALIKE_MS * math.exp(-0.5)) - ALIKE_MS, "of its own tenant"
    assert found.within_ms("t", 0) == 0
    assert found.within_ms("t", 60_000, is_sweep=True) == 60_000, "sweeps are scored apart"


def test_a_term_begins_with_the_scores_and_open_promises_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)
    drive = busy()
    raise_level(drive)
    comes(drive, "waits")
    drive.pass_time(AFTER_MS, step=1_000)
    promise(drive)
    drive.pass_time(2 * MINUTE, step=10_000)
    drive.run_out("w0")
    comes(drive, "open")
    drive.pass_time(AFTER_MS, step=1_000)
    promise(drive, "open")
    after = Promises(drive.engine)
    after.begin()
    assert after._scores == promises(drive)._scores
    assert list(after._open) == [drive.job("open").num]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], ""),
        ([PromiseRow(tenant="t")], ""),
        ([PromiseRow(tenant="t", kept=9, missed=1, void=2, not_told=8)], "9 of 10 kept (9 of 10 asked); 12 of 20 long"),
        ([PromiseRow(tenant="t", kept=1), PromiseRow(tenant="u", not_told=1)], "1 of 1 kept"),
    ],
)
def test_the_share_that_was_kept_stands_beside_the_share_that_was_told(rows: list[PromiseRow], said: str) -> None:
    words = promised_words(rows)
    assert said in words
    assert bool(said) == bool(words)
