"""When a schedule is due, by the rules of nats-server (its `server/cron.go` and `server/scheduler.go`, 2.14 and 2.15).

nats-server publishes the runs of a cron time, but says when the next one is due only with a run, and forgets after a
crash. So the leader counts along with it. An interval (`@every`) is the leader's alone: nats-server begins its grid
anew with each start.
"""

from __future__ import annotations

import calendar
import re
from datetime import datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo

from moorage.scheduler.core.ledger.schedules import Schedule
from moorage.schemas.schedules import cron_of

EVERY: Final = "@every "
#: the clocks of servers and schedulers differ by less than this
CLOCK_MS_MAX: Final = 3_600_000
#: nats-server looks no further ahead
YEARS_MAX: Final = 5

_WORDS: Final = {
    "@yearly": "0 0 0 1 1 *",
    "@annually": "0 0 0 1 1 *",
    "@monthly": "0 0 0 1 * *",
    "@weekly": "0 0 0 * * 0",
    "@daily": "0 0 0 * * *",
    "@midnight": "0 0 0 * * *",
    "@hourly": "0 0 * * * *",
}
_MONTHS: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_FIELD_NAMES: Final = ("second", "minute", "hour", "day", "month", "weekday")
#: lowest and highest value of each field, and the names of its values
_FIELDS: Final[tuple[tuple[int, int, dict[str, int]], ...]] = (
    (0, 59, {}),
    (0, 59, {}),
    (0, 23, {}),
    (1, 31, {}),
    (1, 12, {name: number for number, name in enumerate(_MONTHS, 1)}),
    (0, 6, {name: number for number, name in enumerate(_DAYS)}),
)
#: a minute, an hour, a day, a month, and as far as anything is looked for
_NEAR_MS: Final = (60_000, 3_600_000, 86_400_000, 2_678_400_000, 366 * YEARS_MAX * 86_400_000)
_UNIT_MS: Final = {"ns": 1e-6, "us": 1e-3, "µs": 1e-3, "μs": 1e-3, "ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}
_PART: Final = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)")


def is_interval(cron: str) -> bool:
    return cron_of(cron).startswith(EVERY)


def wrong_field(cron: str) -> str:
    """Return which field of a cron expression is wrong, as `hour 25, not in 0 to 23`; "" if each is right by itself."""
    fields = cron_of(cron).split()
    for text, name, (low, high, names) in zip(fields, _FIELD_NAMES, _FIELDS, strict=False):
        try:
            _values(text, low, high, names)
        except ValueError:
            return f"{name} {text}, not in {low} to {high}"
    return ""


def next_due_ms(schedule: Schedule, after_ms: int) -> int:
    """Return when a schedule is first due after a time, both in milliseconds since 1970; 0 if that is not known.

    It is not known where this host lacks the time zone.
    """
    try:
        if is_interval(schedule.cron):
            every_ms, from_ms = _interval_ms(cron_of(schedule.cron)), schedule.since_ms // 1_000 * 1_000
            return from_ms + max((after_ms - from_ms) // every_ms + 1, 1) * every_ms
        return _next_s(cron_of(schedule.cron), schedule.tz, after_ms // 1_000) * 1_000
    except (ValueError, OSError, KeyError):  # ZoneInfoNotFoundError is a KeyError
        return 0


def upcoming_ms(schedule: Schedule, after_ms: int) -> int:
    """Return the same for a schedule that has not run: mostly its first time, which is counted once."""
    first_ms = next_due_ms(schedule, schedule.since_ms)
    return next_due_ms(schedule, after_ms) if 0 < first_ms <= after_ms else first_ms


def latest_due_ms(schedule: Schedule, now_ms: int) -> int:
    """Return the latest time at which the next run can be due, by any right clock; 0 if that is not known."""
    return next_due_ms(schedule, now_ms + CLOCK_MS_MAX)


def is_too_far(schedule: Schedule, now_ms: int) -> bool:
    """Return whether the next run is noted for later than it can be due: by a clock that was wrong."""
    return 0 < latest_due_ms(schedule, now_ms) < schedule.next_ms


def newest_due_ms(schedule: Schedule, from_ms: int, through_ms: int) -> int:
    """Return the last time up to `through_ms` at which a schedule is due; it is due at `from_ms`."""
    for near_ms in _NEAR_MS:  # most often it is the last minute, hour or day that has it
        due_ms = next_due_ms(schedule, max(from_ms, through_ms - near_ms))
        if 0 < due_ms <= through_ms:
            from_ms = due_ms
            break
    else:
        return from_ms
    while 0 < (following_ms := next_due_ms(schedule, from_ms)) <= through_ms:
        middle_ms = (following_ms + through_ms) // 2  # a second's schedule may have missed a week
        due_ms = next_due_ms(schedule, middle_ms)
        from_ms = due_ms if due_ms <= through_ms else following_ms
        through_ms = through_ms if due_ms <= through_ms else middle_ms
    return from_ms


def _interval_ms(text: str) -> int:
    """Return the milliseconds of `@every 1h30m`, at least 1,000."""
    words, whole = text.removeprefix(EVERY).strip(), 0.0
    if not words or _PART.sub("", words):
        raise ValueError(f"no interval: {text!r}")
    for number, unit in _PART.findall(words):
        whole += float(number) * _UNIT_MS[unit]
    return max(round(whole), 1_000)


@lru_cache(maxsize=8_192)
def _next_s(text: str, zone: str, after_s: int) -> int:
    return _cron(text, zone).next_s(after_s)


@lru_cache(maxsize=1_024)
def _cron(text: str, zone: str) -> _Cron:
    return _Cron(_WORDS.get(text, text).split(), ZoneInfo(zone or "UTC"))


class _Cron:
    """Six fields, each the set of its values; raises `ValueError` for others."""

    def __init__(self, fields: list[str], zone: tzinfo) -> None:
        found = [_values(text, *bounds) for text, bounds in zip(fields, _FIELDS, strict=True)]
        self._seconds, self._minutes, self._hours, self._days, self._months, self._weekdays = (
            values for values, _ in found
        )
        #: with a `*` in one of the two fields a day has to match both, else one is enough; `*/2` is no `*`
        self._both_days = found[3][1] or found[5][1]
        self._zone = zone

    def next_s(self, after_s: int) -> int:
        """Return the first due second after one; 0 if there is none in five years.

        As in nats-server, a time that the clock skips is left out, and one that it shows twice is due twice.
        """
        at_s, is_cut = after_s + 1, False
        last_year = self._local(at_s).year + YEARS_MAX
        while self._local(at_s).year <= last_year:
            at_s, is_cut, found = self._look(at_s, is_cut)
            if found:
                return at_s
        return 0

    def _look(self, at_s: int, is_cut: bool) -> tuple[int, bool, bool]:
        """Go on from a second, field by field, to the first that matches, or to where a coarser field changes.

        Return the second, whether finer fields are at their beginning (`is_cut`), and whether it matches.
        """
        while (now := self._local(at_s)).month not in self._months:
            at_s, is_cut = self._utc(_month_after(now if is_cut else datetime(now.year, now.month, 1))), True
            if self._local(at_s).month == 1:
                return at_s, is_cut, False
        while not self._is_day(now := self._local(at_s)):
            midnight = self._local(self._utc(datetime(now.year, now.month, now.day)))
            before_s, was_cut = at_s, is_cut
            at_s, is_cut = self._utc((now if is_cut else midnight) + timedelta(days=1)), True
            if was_cut and at_s <= before_s:
                raise ValueError(f"the zone leaves out the day after {now:%Y-%m-%d}")
            if self._local(at_s).day == 1:
                return at_s, is_cut, False
        while (now := self._local(at_s)).hour not in self._hours:
            at_s = (at_s if is_cut else self._utc(datetime(now.year, now.month, now.day, now.hour))) + 3_600
            is_cut = True
            if self._local(at_s).hour == 0:
                return at_s, is_cut, False
        for values, step_s, unit in ((self._minutes, 60, "minute"), (self._seconds, 1, "second")):
            while getattr(self._local(at_s), unit) not in values:
                at_s = (at_s if is_cut else at_s - at_s % step_s) + step_s
                is_cut = True
                if getattr(self._local(at_s), unit) == 0:
                    return at_s, is_cut, False
        return at_s, is_cut, True

    def _is_day(self, now: datetime) -> bool:
        day, weekday = now.day in self._days, now.isoweekday() % 7 in self._weekdays
        return (day and weekday) if self._both_days else (day or weekday)

    def _local(self, at_s: int) -> datetime:
        """Return what the clock shows."""
        return datetime.fromtimestamp(at_s, self._zone).replace(tzinfo=None)

    def _utc(self, shown: datetime) -> int:
        """Return when the clock shows a time; for one that it skips or shows twice, the answer of Go's `time.Date`."""
        as_utc_s = calendar.timegm(shown.timetuple())
        return as_utc_s - self._offset_s(as_utc_s - self._offset_s(as_utc_s))

    def _offset_s(self, at_s: int) -> int:
        offset = datetime.fromtimestamp(at_s, self._zone).utcoffset()
        return int(offset.total_seconds()) if offset is not None else 0


def _month_after(shown: datetime) -> datetime:
    year, month = divmod(shown.year * 12 + shown.month, 12)
    return datetime(year, month + 1, 1, shown.hour, shown.minute, shown.second) + timedelta(days=shown.day - 1)


def _values(text: str, low: int, high: int, names: dict[str, int]) -> tuple[frozenset[int], bool]:
    """Return the values of one field, and whether it has a `*` without a step."""
    found: set[int] = set()
    is_any = False
    for part in filter(None, text.split(",")):
        span, _, step_text = part.partition("/")
        first_text, _, last_text = span.partition("-")
        step = int(step_text) if step_text else 1
        if first_text in ("*", "?"):
            first, last = low, high
            is_any = is_any or step == 1
        else:
            first = _number(first_text, names)
            last = _number(last_text, names) if last_text else high if step_text else first
        if not (low <= first <= last <= high and step > 0):
            raise ValueError(f"no values from {low} to {high}: {part!r}")
        found.update(range(first, last + 1, step))
    return frozenset(found), is_any


def _number(text: str, names: dict[str, int]) -> int:
    number = names.get(text.lower())
    return int(text) if number is None else number
