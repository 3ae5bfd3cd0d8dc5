"""How far back a question to the follower reaches: its `since_s`."""

from __future__ import annotations

from typing import Any, Final

from moorage.schemas.errors import Problem, problem

SINCE_S_MAX: Final = 366 * 86_400


def trouble_of_since(since_s: Any, next_: str) -> Problem | None:
    """Return what is wrong with a `since_s` that is given; None if it is a number of seconds up to `SINCE_S_MAX`."""
    if not isinstance(since_s, bool) and isinstance(since_s, int | float) and 0 <= since_s <= SINCE_S_MAX:
        return None
    said = f"since_s must be a number of seconds, 0..{SINCE_S_MAX}"
    return problem("invalid-argument", said, field="$.since_s", found=since_s, next=next_)
