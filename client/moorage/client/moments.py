"""Moments to come, as people say them, and what a drain is asked with them. Loaded when a drain is asked."""

from __future__ import annotations

import re
from datetime import datetime, time, timedelta
from typing import Final

from moorage.client.durations import Duration, seconds
from moorage.client.errors import Rejected, rejected

#: what looks like a moment rather than a duration
_MOMENT: Final = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?|\d{4}-\d{2}-\d{2}.*", re.ASCII)


def seconds_until(moment: Duration, now: datetime) -> float:
    """How long from `now` (with its zone) until a moment: `22:00` (the next one), `2026-11-21T22:00`, the same with an
    offset, or a duration from now, `2h`. A moment without an offset is in the zone of `now`.

    Raises `Rejected` for anything else, and for a moment that is past.
    """
    if not isinstance(moment, str) or not _MOMENT.fullmatch(moment.strip()):
        return seconds(moment)
    text = moment.strip()
    try:
        if ":" in text and "-" not in text and "T" not in text:
            clock = time.fromisoformat(text.zfill(5))
            at = datetime.combine(now.date(), clock, now.tzinfo)
            at = at if at > now else datetime.combine(now.date() + timedelta(days=1), clock, now.tzinfo)
        else:
            at = datetime.fromisoformat(text.replace(" ", "T", 1))
            at = at if at.tzinfo is not None else at.replace(tzinfo=now.tzinfo)
    except ValueError:
        raise _no_moment(moment, "no such moment") from None
    left_s = (at - now).total_seconds()
    if left_s < 0:
        raise _no_moment(moment, f"it is past since {-left_s:.0f} s")
    return seconds(left_s)


def drain_fields(
    within: Duration | None, begin: Duration | None, last: Duration | None, why: str
) -> dict[str, float | str]:
    """What `drain` is asked beside the worker. Raises `Rejected` for what is no duration or no moment to come."""
    given = {
        "within_s": None if within is None else seconds(within),
        "from_s": None if begin is None else seconds_until(begin, datetime.now().astimezone()),
        "for_s": None if last is None else seconds(last),
        "why": why or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _no_moment(moment: str, why: str) -> Rejected:
    return rejected(
        "invalid-argument",
        f"not a moment to come: {why}",
        found=moment,
        allowed="22:00, 2026-11-21T22:00, 2026-11-21T22:00+01:00, or from now on: 2h",
        next="write it as 22:00, which is the next one, or as 2h, which is counted from now",
    )
