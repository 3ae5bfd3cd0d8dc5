"""Groups of a gang: ranks that are alike in what they ask for and run, beside others that are not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

GROUPS_MAX: Final = 8
GROUP_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,15}", re.ASCII)
#: the variables of each rank of a gang with groups: its own group's name, and of each group the first rank and the size
GROUP: Final = "MOORAGE_GROUP"


def address_variable(group: str) -> str:
    """Return the variable with `address:port` of the first rank of a group."""
    return f"MOORAGE_GROUP_{group.upper()}_ADDRESS"


def size_variable(group: str) -> str:
    """Return the variable with the number of a group's ranks."""
    return f"MOORAGE_GROUP_{group.upper()}_SIZE"


def group_at(sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the place of the group that a rank of the whole gang is in, and that group's first rank.

    Raises ValueError if no group has it.
    """
    first = 0
    for at, size in enumerate(sizes):
        if rank < first + size:
            return at, first
        first += size
    raise ValueError(f"the groups have {first} ranks, and none is {rank}")
