"""Ranges of replica numbers are sets: they are compared with sets of numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.schemas.ranges import (
    both,
    count_of,
    first_numbers,
    format_ranges,
    is_in,
    numbers_in,
    parse_ranges,
    ranges_of,
    without,
)

_numbers = st.sets(st.integers(0, 60))


@given(_numbers, _numbers)
def test_ranges_are_sets(one: set[int], other: set[int]) -> None:
    mine, theirs = ranges_of(one), ranges_of(other)
    assert set(numbers_in(mine)) == one
    assert count_of(mine) == len(one)
    assert set(numbers_in(both(mine, theirs))) == one & other
    assert set(numbers_in(without(mine, theirs))) == one - other
    assert all(is_in(mine, number) == (number in one) for number in range(62))
    assert one == set() or parse_ranges(format_ranges(mine)) == mine


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "numbers and ranges"),
        ("1,,2", "numbers and ranges"),
        ("a-b", "numbers and ranges"),
        ("-3", "numbers and ranges"),
        ("5-3", "ranges that go up"),
        ("0-1000000", "end below 1000000"),
        ("0-5,5", "found 5 twice"),
        (",".join(map(str, range(0, 40_000, 2))), "at most 10000 ranges"),
    ],
)
def test_a_text_that_is_no_set_of_numbers_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_ranges(text)


def test_the_text_of_many_ranges_is_cut() -> None:
    assert format_ranges(((3, 3), (5, 9), (12, 12)), 2) == "3, 5-9, …"
    assert first_numbers(1_000_000) == parse_ranges("0-999999")
