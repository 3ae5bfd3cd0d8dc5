"""The digest of a state is the same in every process and on every Python, and finds a row that differs."""

from __future__ import annotations

import itertools

import pytest

from moorage.scheduler.core.ledger.digests import PRIME, number_of
from moorage.scheduler.ledger import state_bytes as snapshots
from tests.unit.scheduler.driving import Driving


@pytest.mark.parametrize(
    ("row", "number"),
    [
        ((), 20736),
        ((7, 0, 3, 1, 1 << 32, 0, 0, 0, 0, -1), 10693287334800492500),
        (("train-ü", -(1 << 63), (1 << 64) - 1, None, True, ((1, 2), (3,))), 4459343859922404772),
    ],
)
def test_a_row_has_the_same_number_on_every_python(row: tuple[object, ...], number: int) -> None:
    assert number_of(row) == number < PRIME


def test_the_digest_of_a_state_is_the_same_on_every_python() -> None:
    drive = Driving.with_hosts(2)
    drive.submit("a", gpu={})
    drive.settle()
    drive.submit("b", gpu={"count": 2}, tenant="u")
    assert drive.state.digest == snapshots.load(snapshots.dump(drive.state)).digest == 13894829099321039811


def test_rows_that_differ_in_any_field_have_different_numbers() -> None:
    rows = list(itertools.product((-1, 0, 1, 1 << 40), repeat=5))
    assert len({number_of(row) for row in rows}) == len(rows)


def test_a_value_that_two_rows_swapped_is_noticed() -> None:
    """The digest is a sum, so a number that were linear in the values would not show it."""
    before = number_of((1, 0, 3)) + number_of((2, 0, 5))
    assert before != number_of((1, 0, 5)) + number_of((2, 0, 3))
