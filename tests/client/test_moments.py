"""Moments to come as people write them."""

from __future__ import annotations

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
        ("2026-11-21T00:30", 10.0),
        ("2026-11-21 00:30", 10.0),
        ("2026-11-21", 9.5),
        ("2026-11-20T22:00+00:00", 8.5),
        ("2h", 2.0),
        (3600, 1.0),
    ],
)
def test_a_moment_is_so_far_away(moment: str | float, hours: float) -> None:
    assert seconds_until(moment, NOW) == hours * 3600


@pytest.mark.parametrize("moment", ["25:00", "2026-11-31", "2026-11-20T10:00", "noon", "-2h", "2029-01-01"])
def test_what_is_no_moment_to_come_is_refused_with_what_would_be(moment: str) -> None:
    with pytest.raises(Rejected) as refused:
        seconds_until(moment, NOW)
    assert refused.value.problem.allowed
    assert "write it as" in refused.value.problem.next, "in words of a moment, not of a request"


def test_a_drain_asks_only_what_was_given() -> None:
    assert drain_fields(None, None, None, "") == {}
    assert drain_fields("30m", "2h", 7200, "disk") == {"within_s": 1800, "from_s": 7200, "for_s": 7200, "why": "disk"}
