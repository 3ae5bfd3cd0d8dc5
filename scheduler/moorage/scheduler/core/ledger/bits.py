"""A set of numbers as one bit each: which replicas of a job did not succeed. It grows with the highest number."""

from __future__ import annotations

import re
from typing import Final

from moorage.schemas.ranges import Ranges, joined, ranges_of

#: bytes in which some bit is set; the search skips the others
_SET: Final = re.compile(rb"[^\x00]+")

#: of each byte the numbers that it stands for
_OF_BYTE: Final = tuple(ranges_of(bit for bit in range(8) if byte >> bit & 1) for byte in range(256))


def mark(bits: bytearray, first: int, last: int) -> None:
    """Add the numbers from `first` to `last`."""
    if last // 8 >= len(bits):
        bits.extend(bytes(last // 8 + 1 - len(bits)))
    low, high = first // 8, last // 8
    if low == high:
        bits[low] |= (1 << last - first + 1) - 1 << first % 8
        return
    bits[low] |= 0xFF << first % 8 & 0xFF
    bits[low + 1 : high] = b"\xff" * (high - low - 1)
    bits[high] |= (2 << last % 8) - 1


def drop(bits: bytearray, number: int) -> None:
    """Remove a number that is there; the rest takes no more bytes than the highest one needs."""
    bits[number // 8] &= ~(1 << number % 8)
    del bits[len(bits.rstrip(b"\0")) :]


def has(bits: bytearray, number: int) -> bool:
    return number // 8 < len(bits) and bool(bits[number // 8] >> number % 8 & 1)


def count(bits: bytearray) -> int:
    return int.from_bytes(bits, "little").bit_count()


def ranges(bits: bytearray) -> Ranges:
    """Return the numbers as ranges, in the time of those that are set."""
    found: list[tuple[int, int]] = []
    for run in _SET.finditer(bits):
        at = run.start() * 8
        for byte in run.group():
            for first, last in _OF_BYTE[byte]:
                found.append((at + first, at + last))
            at += 8
    return joined(found)
