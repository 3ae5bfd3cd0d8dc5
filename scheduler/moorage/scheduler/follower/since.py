"""How far back a question to the follower reaches, and by what it sums: its `since_s` and `by`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from moorage.schemas.errors import Problem, problem

SINCE_S_MAX: Final = 366 * 86_400


def trouble_of_since(since_s: Any, next_: str) -> Problem | None:
    """Return what is wrong with a `since_s` that is given; None if it is a number of seconds up to `SINCE_S_MAX`."""
    if not isinstance(since_s, bool) and isinstance(since_s, int | float) and 0 <= since_s <= SINCE_S_MAX:
        return None
    said = f"since_s must be a number of seconds, 0..{SINCE_S_MAX}"
    return problem("invalid-argument", said, field="$.since_s", found=since_s, next=next_)


def trouble_of_by(by: Any, words: Sequence[str], next_: str) -> Problem | None:
    """Return what is wrong with a `by` that is given; None for a list of some of these words, each once."""
    if isinstance(by, list) and by and all(word in words for word in by) and len({*by}) == len(by):
        return None
    allowed = ", ".join(words)
    said = f"by must be a list of some of {allowed}, each once"
    return problem("invalid-argument", said, field="$.by", found=str(by)[:80], allowed=allowed, next=next_)
