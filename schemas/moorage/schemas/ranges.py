"""Sets of replica numbers as ranges: `0-99,205` is the numbers from 0 to 99, and 205.

Ranges are sorted, do not touch each other, and are read often and changed rarely, so they are plain tuples.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final

#: pairs of a first and a last number, both included
Ranges = tuple[tuple[int, int], ...]

#: the most replicas of a job, and one more than the highest number of a replica
NUMBERS_MAX: Final = 1_000_000
#: the most ranges in one text: more would not fit into a request
RANGES_MAX: Final = 10_000
#: and that an error names
RANGES_SAID: Final = 100
NOTHING: Final[Ranges] = ()
#: stands behind ranges of which some are left out
CUT: Final = ", …"
#: the number of the only replica of most jobs
ONE: Final[Ranges] = ((0, 0),)
_PART: Final = re.compile(r"[0-9]{1,7}(-[0-9]{1,7})?")


def first_numbers(count: int) -> Ranges:
    """Return the numbers from 0 on, `count` of them."""
    return ((0, count - 1),) if count > 1 else ONE if count else NOTHING


def parse_ranges(text: str) -> Ranges:
    """Return the ranges of a text such as `0-99,205`, in any order. Raises ValueError, which says what is wrong.

    Blanks are ignored; a number may not be named twice, and is below 1,000,000.
    """
    parts = text.replace(" ", "").split(",")
    if len(parts) > RANGES_MAX:
        raise ValueError(f"at most {RANGES_MAX} ranges, found {len(parts)}")
    wrong = next((part for part in parts if _PART.fullmatch(part) is None), None)
    if wrong is not None:
        raise ValueError(f"numbers and ranges, as in 0-99,205, found {wrong[:40]!r}")
    ends = [part.split("-") for part in parts]
    found = [(int(pair[0]), int(pair[-1])) for pair in ends]
    for first, last in found:
        if not first <= last < NUMBERS_MAX:
            raise ValueError(f"ranges that go up, and end below {NUMBERS_MAX}, found {f'{first}-{last}'!r}")
    found.sort()
    for (_, last), (first, _) in pairwise(found):
        if first <= last:
            raise ValueError(f"each number once, found {first} twice")
    return joined(found)


def joined(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Return sorted pairs that do not overlap as ranges: those that touch become one."""
    found: list[tuple[int, int]] = []
    for first, last in pairs:
        if found and found[-1][1] + 1 == first:
            found[-1] = found[-1][0], last
        else:
            found.append((first, last))
    return tuple(found)


def ranges_of(numbers: Iterable[int]) -> Ranges:
    """Return the ranges of numbers, in any order."""
    return joined((number, number) for number in sorted(set(numbers)))


def format_ranges(ranges: Ranges, most: int = RANGES_MAX) -> str:
    """Return ranges as a text, with `…` in place of what is beyond `most` of them."""
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:most]]
    return ", ".join(parts) + (CUT if len(ranges) > most else "")


def parse_told(text: str) -> tuple[Ranges, bool]:
    """Return the ranges of a text of `format_ranges`, and whether some are left out of it."""
    told = text.removesuffix(CUT)
    return parse_ranges(told), told != text


def count_of(ranges: Ranges) -> int:
    """Return how many numbers are in ranges."""
    count = 0
    for first, last in ranges:
        count += last - first + 1
    return count


def is_in(ranges: Ranges, number: int) -> bool:
    """Return whether a number is in ranges."""
    at = bisect_right(ranges, (number, NUMBERS_MAX)) - 1
    return at >= 0 and number <= ranges[at][1]


def numbers_in(ranges: Ranges) -> Iterator[int]:
    """Yield each number in order."""
    for first, last in ranges:
        yield from range(first, last + 1)


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """Return what is in `ranges` and not in `others`."""
    found: list[tuple[int, int]] = []
    at = 0
    for low, high in ranges:
        while at < len(others) and others[at][1] < low:
            at += 1
        begin, behind = low, at
        while behind < len(others) and others[behind][0] <= high:
            if begin < others[behind][0]:
                found.append((begin, others[behind][0] - 1))
            begin = others[behind][1] + 1
            behind += 1
        if begin <= high:
            found.append((begin, high))
    return tuple(found)


def both(ranges: Ranges, others: Ranges) -> Ranges:
    """Return what is in both."""
    found: list[tuple[int, int]] = []
    one = other = 0
    while one < len(ranges) and other < len(others):
        low, high = max(ranges[one][0], others[other][0]), min(ranges[one][1], others[other][1])
        if low <= high:
            found.append((low, high))
        if ranges[one][1] < others[other][1]:
            one += 1
        else:
            other += 1
    return tuple(found)
