"""Names the tuple hash with which records' digests are made: the ledger names it, and each Python must compute it.

A digest is a sum of `hash((int, ...))`, which is CPython's own (decision 0003): the same from CPython 3.8 on, on 64-bit
builds. A Python with another hash could neither follow such a ledger nor read its backup, and its digests would look
like a damaged ledger. So each epoch record names the hash, a scheduler with another hash says so, and `moorage admin
restore --rehash` makes a ledger with new digests (decision 0003).
"""

from __future__ import annotations

import zlib
from typing import Final

#: the hash of CPython 3.8 and later; also meant by epoch records and backups that name none
TUPLE_HASH: Final = "cpython-3.8"
#: sample rows, with their hashes
GOLDEN: Final[tuple[tuple[tuple[object, ...], int], ...]] = (
    ((), 5740354900026072187),
    ((0,), -8753497827991233192),
    ((1, -1, -2), -1188510296819470066),
    ((7, 0, 3, 1, 1 << 32, 0, 0, 0, 0, -1), 3415005305504857125),
    (((1 << 61) - 2, (1 << 61) - 1, 1 << 61, 1 << 64), -8260838152486862790),
    ((-(1 << 63), 1 << 200, -(1 << 200)), 2361732670421881964),
    ((True, False), -5164621852614943976),
    (((1, 2), ((3, 4), (5, 6)), 0), 570510804412609644),
)


def name_of(hashes: list[int]) -> str:
    """Return the name of the hash that gives these numbers for the rows of `GOLDEN`, in order.

    An unknown hash gets a name made from the numbers.
    """
    if hashes == [found for _, found in GOLDEN]:
        return TUPLE_HASH
    return f"unnamed-{zlib.crc32(' '.join(map(str, hashes)).encode()):08x}"


#: the hash that this Python computes
COMPUTED: Final = name_of([hash(row) for row, _ in GOLDEN])


def trouble(written: str, computed: str) -> str:
    """Return why one hash's digests cannot be checked with another, and what to do; empty if they are the same."""
    if written == computed:
        return ""
    return (
        f"its digests were made with the hash {written}, and this Python computes {computed}: stop every scheduler,"
        " make a backup with a Python that computes the first (moorage admin backup), then"
        " moorage admin restore FILE --rehash --replace with this one"
    )
