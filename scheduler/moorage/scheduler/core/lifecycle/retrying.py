"""Which row of a request's `retry` allows another attempt, by how the last one ended.

What an end counts as (`records.Count`) and the number of that row go through the steps of an end as one number.
"""

from __future__ import annotations

from typing import Final

from moorage.scheduler.core.ledger.records import COUNT_BITS, Count
from moorage.scheduler.core.ledger.state import Replica
from moorage.schemas.frames import SETUP_FAILED, START_FAILED
from moorage.schemas.job import Request
from moorage.schemas.retrying import LOST, RULES_MAX, Retry, row_of

#: stands for a row where none fits
OTHER: Final = RULES_MAX + 1
_NAMED: Final = (("out of memory", "oom"), (START_FAILED, "start"), (SETUP_FAILED, "setup"))


def with_row(request: Request, count: int, code: int = 0, why: str = "") -> int:
    """Return what an end with this code and reason counts as, with the row of `retry` that it fits, if one does."""
    if not request.retry or count not in (Count.RETRY, Count.LOSS):
        return count
    if count == Count.LOSS:
        return count | (row_of(request.retry, (LOST,), None) or OTHER) << COUNT_BITS
    named = {cause for beginning, cause in _NAMED if why.startswith(beginning)}
    row = row_of(request.retry, named | ({"signal"} if code < 0 else set()), code)
    return count | (row or OTHER) << COUNT_BITS


def row_in(request: Request, count: int) -> Retry | None:
    """Return the row in what `with_row` has returned; None for none."""
    number = count >> COUNT_BITS
    return request.retry[number - 1] if 0 < number <= len(request.retry) else None


def row_after(request: Request, code: int, why: str, *, lost: bool = False) -> Retry | None:
    """Return the row that an end with this code and reason fits; None for none."""
    return row_in(request, with_row(request, Count.LOSS if lost else Count.RETRY, code, why))


def words_of(request: Request, replica: Replica) -> dict[str, list[int]]:
    """Return how many further attempts each row of `retry` has allowed a replica, and how many it allows at most."""
    rows = enumerate(request.retry, 1)
    return {", ".join(row.causes): [replica.tries_of(number), row.times] for number, row in rows}
