"""The number that a row counts in the state's digest: the same in every process, on every Python (decision 0003).

A row is written as MessagePack, which has one form for each value, and these bytes, read as one number, are taken
modulo a prime. The square keeps two rows that swapped a value from giving the same sum.
"""

from __future__ import annotations

from typing import Final

import msgspec

#: a prime of 64 bits: the least above the first 64 bits of SHA-256 of `moorage`
PRIME: Final = 0xAA3D974C04215DAF

_encode: Final = msgspec.msgpack.Encoder().encode
_from_bytes: Final = int.from_bytes


def number_of(row: tuple[object, ...]) -> int:
    """Return a number from 0 to `PRIME` - 1 for a row of strings, bytes, tuples, None, and integers of 64 bits.

    Raises OverflowError for a larger integer.
    """
    number = _from_bytes(_encode(row), "little") % PRIME
    return number * number % PRIME
