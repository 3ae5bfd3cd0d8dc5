"""A set of numbers as bits: what is marked is what is found, as ranges."""

from __future__ import annotations

import random

import pytest

from moorage.scheduler.core.ledger import bits
from moorage.schemas.ranges import ranges_of


@pytest.mark.parametrize("seed", range(20))
def test_what_was_marked_is_what_is_found(seed: int) -> None:
    chance, found, kept = random.Random(seed), bytearray(), set[int]()
    for _ in range(chance.randrange(60)):
        first = chance.randrange(chance.choice((8, 300, 5_000)))
        last = first + chance.choice((0, 0, 1, 6, 7, 8, 40))
        bits.mark(found, first, last)
        kept.update(range(first, last + 1))
    assert bits.ranges(found) == ranges_of(kept)
    assert bits.count(found) == len(kept)
    assert all(bits.has(found, number) == (number in kept) for number in range(5_100))
