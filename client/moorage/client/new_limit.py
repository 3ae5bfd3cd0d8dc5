"""A changed time limit: `2h`, or `+2h` and `-1h` for so much more or less than a job's attempts have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from moorage.client.durations import Duration, seconds
from moorage.client.errors import rejected
from moorage.schemas.names import word_of

if TYPE_CHECKING:
    from moorage.client.answers import JobInfo

_SIGNS: Final = ("+", "-")


def is_difference(limit: Duration) -> bool:
    """Return whether a time limit is said as so much more or less."""
    return isinstance(limit, str) and limit.startswith(_SIGNS)


async def new_limit_s(limit: Duration, show: Callable[[], Awaitable[JobInfo]]) -> float:
    """Return the seconds of a new time limit; a difference counts from that of the attempts that run, as `show` tells,
    or else of the next one.

    The leader is told the sum alone, so a request that is sent twice changes nothing more. Raises `Rejected`.
    """
    if not isinstance(limit, str) or not is_difference(limit):
        return seconds(limit)
    by_s = seconds(limit[1:]) * (-1 if limit[0] == "-" else 1)
    info = await show()
    now = info.bounds
    has_s = (
        now.running_timeout_s if now is not None and now.running_timeout_s is not None else info.run.get("timeout_s")
    )
    if has_s is None:
        raise rejected(
            "failed-precondition", f"job {info.job} has no time limit to change by {limit}", found=limit,
            next=f"moorage change {word_of(info.job)} --running --time-limit 2h gives it one",
        )  # fmt: skip
    if has_s + by_s <= 0:
        raise rejected(
            "invalid-argument", f"job {info.job} has a time limit of {has_s:g} s, and that is no more than {limit}",
            found=limit, next=f"moorage cancel {word_of(info.job)} ends it now",
        )  # fmt: skip
    return float(has_s) + by_s
