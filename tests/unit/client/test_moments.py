"""Moments to come as people write them."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone

import pytest

from moorage.client.errors import Rejected
from moorage.client.moments import drain_fields, seconds_until

ZONE = timezone(timedelta(hours=1))
NOW = datetime(2026, 11, 20, 14, 30, tzinfo=ZONE)


@pytest.mark.parametrize(
    ("moment", "hours"),
    [
        ("22:00", 7.5),
        ("9:15", 18.75),
        ("14:30", 24.0),
        ("9:30:15", 19 + 15 / 3600),
        ("09:30:15", 19 + 15 / 3600),
        ("2026-11-21T00:30", 10.0),
        ("2026-11-21 00:30", 10.0),
        ("2026-11-21", 9.5),
        ("tomorrow 03:00", 12.5),
        ("Tomorrow  3:00", 12.5),
        ("tomorrow 9:30:15", 19 + 15 / 3600),
        ("today 22:00", 7.5),
        ("2026-11-20T22:00+00:00", 8.5),
        ("2h", 2.0),
        (3600, 1.0),
    ],
)
def test_a_moment_is_so_far_away(moment: str | float, hours: float) -> None:
    assert seconds_until(moment, NOW) == hours * 3600


@pytest.mark.parametrize(
    ("now", "moment", "hours"),
    [
        ("2026-03-28T12:00", "2026-03-29T12:00", 23.0),  # summer time begins in the night between
        ("2026-10-24T12:00", "2026-10-25T12:00", 25.0),  # and ends
        ("2026-10-24T22:00", "9:00", 12.0),
        ("2026-10-24T12:00", "2026-10-25T12:00+01:00", 25.0),
        ("2026-11-20T12:00", "22:00", 10.0),
    ],
)
def test_a_change_of_summer_time_counts(monkeypatch: pytest.MonkeyPatch, now: str, moment: str, hours: float) -> None:
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    try:
        assert seconds_until(moment, datetime.fromisoformat(now)) == hours * 3600
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    "moment",
    [
        "25:00",
        "9:3",
        "9:30:75",
        "2026-11-31",
        "2026-11-20T10:00",
        "noon",
        "-2h",
        "2029-01-01",
        "today 14:00",
        "tomorrow",
        "tomorrow 2h",
    ],
)
def test_what_is_no_moment_to_come_is_refused_with_what_would_be(moment: str) -> None:
    with pytest.raises(Rejected) as refused:
        seconds_until(moment, NOW)
    assert str(refused.value.problem.allowed).startswith("22:00, tomorrow 03:00")
    assert "write it as" in refused.value.problem.next, "in words of a moment, not of a request"


def test_a_drain_asks_only_what_was_given() -> None:
    assert drain_fields(None, None, None, "") == {}
    assert drain_fields("30m", "2h", 7200, "disk") == {"within_s": 1800, "from_s": 7200, "for_s": 7200, "why": "disk"}
