"""Read times in the future and in the past, and make the arguments of a drain from them. Imported where needed."""

from __future__ import annotations

import re
from datetime import datetime, time, timedelta
from typing import Final

from moorage.client.durations import Duration, seconds
from moorage.client.errors import Rejected, rejected

#: a time of day or a date, as opposed to a duration
_MOMENT: Final = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?|\d{4}-\d{2}-\d{2}.*", re.ASCII)
#: a day beside a time of day
_DAY: Final = re.compile(r"(today|tomorrow)\s+(\d{1,2})(:\d{2}(?::\d{2})?)", re.ASCII | re.IGNORECASE)


def seconds_until(moment: Duration, now: datetime) -> float:
    """Return the seconds from `now` until a moment.

    A moment is `22:00` (the next one), `tomorrow 03:00`, `2026-11-21T22:00`, the same with an offset, or a duration
    from now, `2h`.
    Without an offset it is in the time zone of `now`, or in this machine's if `now` has none. Changes to and from
    summer time are taken into account. Raises `Rejected` for anything else, and for a moment in the past.
    """
    if not isinstance(moment, str):
        return seconds(moment)
    if not _MOMENT.fullmatch(text := _dated(moment.strip(), now)):
        try:
            return seconds(moment)
        except Rejected:
            raise _no_moment(moment, "it is neither a time nor a duration of at most 366 days") from None
    try:
        at = _next_time(text, now) if "-" not in text and "T" not in text else _date_and_time(text, now)
        # in UTC: the difference of two local times would ignore a change to or from summer time
        left_s = at.timestamp() - now.timestamp()
    except (ValueError, OverflowError, OSError):
        raise _no_moment(moment, "no such moment") from None
    if left_s < 0:
        raise _no_moment(moment, f"it was {-left_s:.0f} s ago")
    try:
        return seconds(left_s)
    except Rejected:
        raise _no_moment(moment, "it is more than 366 days away") from None


def _dated(text: str, now: datetime) -> str:
    """Return `today 22:00` and `tomorrow 03:00` with the date in place of the word, and any other text as it is."""
    found = _DAY.fullmatch(text)
    if found is None:
        return text
    day = now.date() + timedelta(days=found[1].lower() == "tomorrow")
    return f"{day.isoformat()}T{found[2]:0>2}{found[3]}"


def past_moment(moment: str, now: datetime) -> float:
    """Return a moment of the past in seconds since 1970: `14:03` (the last one), a date and time, or `2h` ago.

    Raises `Rejected` for anything else, and for a moment in the future.
    """
    text = moment.strip()
    if not _MOMENT.fullmatch(text):
        try:
            return now.timestamp() - seconds(text)
        except Rejected:
            raise _no_past(moment, "no time and no duration") from None
    try:
        if "-" in text or "T" in text:
            at_s = _date_and_time(text, now).timestamp()
        else:
            at = _next_time(text, now)
            at_s = datetime.combine(at.date() - timedelta(days=1), at.time(), at.tzinfo).timestamp()
    except (ValueError, OverflowError, OSError):
        raise _no_past(moment, "no such moment") from None
    if at_s > now.timestamp():
        raise _no_past(moment, f"it is in {at_s - now.timestamp():.0f} s")
    return at_s


def past_ms(moment: str) -> int:
    """Return a moment of the past in ms since 1970, by this machine's clock: see `past_moment`."""
    return int(past_moment(moment, datetime.now()) * 1000)


def _next_time(text: str, now: datetime) -> datetime:
    """Return when the clock shows `9:30` or `09:30:15` next. Raises ValueError."""
    hour, _, rest = text.partition(":")
    clock = time.fromisoformat(f"{hour:0>2}:{rest}")
    at = datetime.combine(now.date(), clock, now.tzinfo)
    if at.timestamp() > now.timestamp():
        return at
    return datetime.combine(now.date() + timedelta(days=1), clock, now.tzinfo)


def _date_and_time(text: str, now: datetime) -> datetime:
    """Return the moment of a date and time in ISO format. Raises ValueError."""
    at = datetime.fromisoformat(text.replace(" ", "T", 1))
    return at if at.tzinfo is not None else at.replace(tzinfo=now.tzinfo)


def drain_fields(
    within: Duration | None, begin: Duration | None, last: Duration | None, why: str
) -> dict[str, float | str]:
    """Return the arguments of `drain` besides the worker; what is None is left out.

    `begin` is a moment (`22:00`) or a duration from now; `within` and `last` are durations, `last` that of the drain.
    Raises `Rejected` for anything else.
    """
    given = {
        "within_s": None if within is None else seconds(within),
        "from_s": None if begin is None else seconds_until(begin, datetime.now()),
        "for_s": None if last is None else seconds(last),
        "why": why or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _no_moment(moment: str, why: str) -> Rejected:
    return rejected(
        "invalid-argument",
        f"not a time in the future: {why}",
        found=moment,
        allowed="22:00, tomorrow 03:00, 2026-11-21T22:00, 2026-11-21T22:00+01:00, or from now: 2h",
        next="write it as 22:00, which is the next time the clock shows it, or as 2h, from now",
    )


def _no_past(moment: str, why: str) -> Rejected:
    return rejected(
        "invalid-argument",
        f"not a time in the past: {why}",
        found=moment,
        allowed="14:03, 2026-11-21T14:03, 2026-11-21T14:03+01:00, or how long ago: 2h",
        next="write it as 14:03, which is the last time the clock showed it, or as 2h, before now",
    )
