"""Which replicas of a job a caller means: one by its number, some as in `0-99,205`, or all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from moorage.client.errors import rejected
from moorage.schemas.job import CANCELLED, SUCCEEDED, TERMINAL
from moorage.schemas.ranges import NUMBERS_MAX, Ranges, format_ranges, parse_ranges

if TYPE_CHECKING:
    from moorage.schemas.answers.jobs import ReplicaCounts

#: replicas whose rows one question of `show` may name
ASKED_MAX: Final = 1_000
#: a number, or numbers and ranges as in `0-99,205`; None for all
Which = int | str | None


def replicas_of(which: Which) -> Ranges | None:
    """Return the replicas that a caller names; None for all. Raises `Rejected`."""
    if which is None:
        return None
    try:
        if isinstance(which, str):
            return parse_ranges(which)
        if not isinstance(which, int) or not 0 <= which < NUMBERS_MAX:
            raise ValueError(f"a number from 0 to {NUMBERS_MAX - 1}, found {which}")
    except ValueError as error:
        allowed = "a number, or numbers and ranges, as in 0-99,205"
        raise rejected("invalid-argument", f"replicas must be {error}", found=which, next=allowed) from None
    return ((which, which),)


def field_of(which: Which) -> dict[str, str]:
    """Return the field of a question or an order that names these replicas; none for all. Raises `Rejected`."""
    only = replicas_of(which)
    return {} if only is None else {"replicas": format_ranges(only)}


def failed_words(counts: ReplicaCounts | None) -> str:
    """Return how many replicas ended without success, `30 of 100 failed, 50 cancelled`; "" for a job of one replica."""
    if counts is None:
        return ""
    bad = {name: count for name, count in counts.states.items() if name in TERMINAL and name != SUCCEEDED and count}
    words = [f"{bad[name]} {name.lower().replace('_', ' ')}" for name in sorted(bad, key=CANCELLED.__eq__)]
    return ", ".join(words).replace(" ", f" of {counts.of} ", 1)
