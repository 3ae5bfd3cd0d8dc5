"""When schedules are due: the rules in which nats-server's cron differs from others, and intervals."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from moorage.scheduler.core.ledger.schedules import Schedule
from moorage.scheduler.durable.due_times import _Cron, newest_due_ms, next_due_ms, upcoming_ms


def schedule(cron: str, zone: str = "") -> Schedule:
    made = Schedule("t", "s", cron, zone, "skip", b"", "")
    made.since_ms = 1_500
    return made


@pytest.mark.parametrize(
    ("cron", "zone", "after", "due"),
    [
        ("0 3 */2 * MON", "", "2026-11-27T12:00", "2026-11-29T03:00"),  # a Sunday: the weekday or the step is enough
        ("0 3 * * MON", "", "2026-11-27T12:00", "2026-11-30T03:00"),
        ("0 3 13 * FRI", "", "2026-11-28T12:00", "2026-12-04T03:00"),
        ("30 2 * * *", "Europe/Berlin", "2027-03-27T12:00", "2027-03-29T02:30"),  # the clock skips it on the 28th
        ("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00", "2026-10-25T02:30"),
        ("30 2 * * *", "Europe/Berlin", "2026-10-25T02:30+02:00", "2026-10-25T02:30+01:00"),  # it shows it twice
        # the clock skips midnight: the day before it ends at 23:00 for the server, which is before the time asked about
        ("4 * */2 * *", "America/Asuncion", "2010-10-02T23:56", "2010-10-03T23:04"),
        ("@monthly", "", "2026-12-31T23:59", "2027-01-01T00:00"),
        ("0 0 29 2 *", "", "2026-11-27T12:00", "2028-02-29T00:00"),
    ],
)
def test_a_cron_time_is_due_as_nats_server_counts_it(cron: str, zone: str, after: str, due: str) -> None:
    times = [datetime.fromisoformat(each) for each in (after, due)]
    after_ms, due_ms = (
        int((each if each.tzinfo else each.replace(tzinfo=ZoneInfo(zone or "UTC"))).timestamp()) * 1000
        for each in times
    )
    assert next_due_ms(schedule(cron, zone), after_ms) == due_ms


def test_an_interval_keeps_its_grid_from_when_it_was_added() -> None:
    every = schedule("@every 1m30s")
    assert [next_due_ms(every, after) for after in (0, 1_000, 91_000, 90_999, 5_000_000)] == [
        91_000, 91_000, 181_000, 91_000, 5_041_000,
    ]  # fmt: skip


def test_the_newest_of_the_missed_times_is_found() -> None:
    every_second, week_ms = schedule("* * * * * *"), 7 * 86_400_000
    assert newest_due_ms(every_second, 1_000, week_ms + 300) == week_ms
    assert newest_due_ms(schedule("0 3 * * *"), 10_800_000, week_ms) == 6 * 86_400_000 + 10_800_000
    assert newest_due_ms(schedule("0 3 * * *"), 10_800_000, 10_800_100) == 10_800_000


def test_a_tenant_with_a_thousand_schedules_costs_few_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ls` of them took the leader 13 s once a run of each was made up."""
    counts: list[int] = []
    next_s = _Cron.next_s

    def counted(cron: _Cron, after_s: int) -> int:
        counts.append(after_s)
        return next_s(cron, after_s)

    monkeypatch.setattr(_Cron, "next_s", counted)
    day_ms = 86_400_000
    for cron in ("0 3 * * *", "0 * * * *"):
        each = schedule(cron, "Europe/Paris")
        due_ms = next_due_ms(each, 20_000 * day_ms)
        newest_due_ms(each, due_ms, due_ms + 2 * day_ms + 5_000)
    assert len(counts) <= 24
    counts.clear()
    each = schedule("0 4 * * *", "Europe/Paris")
    each.since_ms = 20_000 * day_ms
    for after_ms in range(each.since_ms, each.since_ms + 3_600_000, 1_000):  # asked each second for its first run
        upcoming_ms(each, after_ms)
    assert len(counts) == 1


def test_a_day_that_a_zone_leaves_out_is_not_looked_for_for_ever() -> None:
    before = datetime.fromisoformat("2011-12-22T00:00+00:00")
    assert next_due_ms(schedule("0 0 1 * *", "Pacific/Apia"), int(before.timestamp()) * 1000) == 0


def test_a_time_zone_that_this_host_lacks_is_not_guessed() -> None:
    assert next_due_ms(schedule("0 3 * * *", "Europe/Nowhere"), 0) == 0
