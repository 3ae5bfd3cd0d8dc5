"""The constants that bound what a scheduler keeps and does at a time, as one value that all who fold a ledger have.

Each is of one of three classes, which says what a smaller number may change:

- *memory*: what is kept for answers and estimates. Decisions are the same;
- *rate*: how much one record does. All ends the same, later, and deadlines are kept;
- *form*: what clients and the ledger's readers see. The promises hold, and no more.

They are no settings: `CEILINGS` are those of the product. The worlds of the tests run with small ones, too, where each
bound is met within seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The bounds of one ledger's state, and of who folds and leads it."""

    #: memory. Of a longer history (plus the second number for each replica) the oldest transitions leave memory
    history: int = 128
    history_each: int = 8
    #: memory. So many transitions that are not written yet (plus the second number for each replica) make a part of the
    #: history in its stream
    part: int = 64
    part_each: int = 4


CEILINGS: Final = Ceilings()
