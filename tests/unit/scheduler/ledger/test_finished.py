"""The packed table of finished jobs against a plain dictionary."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moorage.scheduler.core.ledger.finished import (
    DIGEST_BYTES,
    KEY_BYTES,
    ROW_BYTES,
    FinishedTable,
    job_key,
    request_digest,
)

DIGEST = bytes(DIGEST_BYTES)


def key(number: int) -> bytes:
    return job_key("t", f"j{number}")


def test_found_until_dropped_in_the_order_of_coming() -> None:
    table = FinishedTable()
    for number in range(500):
        table.add(key(number), request_digest(b"%d" % number), number * 1000, number % 14)
    assert len(table) == 500
    assert table.find(key(7)) == (request_digest(b"7"), 7, 7, 0)
    assert table.oldest_ms() == 0
    assert table.older_than(100_000, 1_000) == 100
    assert table.older_than(100_000, 30) == 30
    for _ in range(100):
        table.drop_oldest()
    assert table.find(key(99)) is None
    assert table.find(key(100)) is not None
    assert table.oldest_ms() == 100_000


def test_the_oldest_goes_at_the_bound() -> None:
    table = FinishedTable(rows_max=10)
    for number in range(35):
        table.add(key(number), DIGEST, 0, 8)
    assert len(table) == 10
    assert [number for number in range(35) if table.find(key(number))] == list(range(25, 35))


def test_a_row_is_at_most_40_bytes_index_and_all() -> None:
    table = FinishedTable(rows_max=200_000)
    for number in range(125_000):
        table.add(key(number), DIGEST, 0, 8)
    held = sum(map(len, table._chunks)) + sum(part.itemsize * len(part) for part in table._segments)
    assert held / 125_000 <= 40


def test_row_numbers_may_pass_what_the_index_holds() -> None:
    table = FinishedTable(rows_max=9_000)
    table._base = table._first = table._end = 2**21 - 4096
    for number in range(30_000):
        table.add(key(number), DIGEST, number * 1000, 8)
    assert table._end > 2**21
    assert [number for number in range(30_000) if table.find(key(number))] == list(range(21_000, 30_000))
    assert table.oldest_ms() == 21_000_000
    assert len(table.dump()) == 9_000 * ROW_BYTES


def test_empty_table() -> None:
    table = FinishedTable()
    assert (len(table), table.find(key(1)), table.oldest_ms(), table.older_than(10**15, 10), table.dump()) == (
        0,
        None,
        None,
        0,
        b"",
    )


def test_tenant_and_job_do_not_run_together() -> None:
    assert job_key("a", "b-c") != job_key("a-b", "c")
    assert job_key("a", "b") != job_key("b", "a")


@pytest.mark.parametrize("rows_max", [1, 3, 64, 65, 1000])
def test_dump_and_load_give_the_same_table(rows_max: int) -> None:
    table = FinishedTable(rows_max)
    for number in range(200):
        table.add(key(number), request_digest(b"%d" % number), number * 1000, 8)
    again = FinishedTable.load(table.dump(), rows_max)
    assert again.dump() == table.dump()
    assert again.row == table.row
    assert all(again.find(key(number)) == table.find(key(number)) for number in range(200))


def test_a_name_that_is_used_again_is_found_in_its_newest_row() -> None:
    table = FinishedTable()
    for number, time_ms, state, seq in ((1, 1_000, 8, 5), (2, 2_000, 9, 6), (1, 3_000, 10, 7)):
        table.add(key(number), DIGEST, time_ms, state)
        table.locate(key(number), seq)
    assert table.find(key(1)) == (DIGEST, 3, 10, 7)
    table.drop_oldest()
    assert table.find(key(1)) == (DIGEST, 3, 10, 7)
    table.drop_oldest()
    table.drop_oldest()
    assert (table.find(key(1)), len(table), table.row) == (None, 0, 0)


@pytest.mark.parametrize(("seq", "found"), [(0, 0), (2**32 + 5, 2**32 + 5), (2**40 - 1, 2**40 - 1), (2**40, 0)])
def test_a_history_sequence_beyond_the_row_is_none(seq: int, found: int) -> None:
    table = FinishedTable()
    table.add(key(1), DIGEST, 0, 8)
    table.locate(key(1), seq)
    again = FinishedTable.load(table.dump())
    assert [each.find(key(1)) for each in (table, again)] == [(DIGEST, 0, 8, found)] * 2


def test_bytes_that_are_no_rows_are_refused() -> None:
    table = FinishedTable()
    table.add(key(1), DIGEST, 0, 8)
    with pytest.raises(ValueError, match="do not make up rows"):
        FinishedTable.load(table.dump() + b"x")


class AgainstADictionary(RuleBasedStateMachine):
    """Keys that collide in the index on purpose: they differ only where the slot does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.table = FinishedTable(rows_max=70)
        self.rows: deque[tuple[bytes, int]] = deque()  # every row, found or not
        self.clock = 0

    @rule(number=st.integers(0, 200), home=st.integers(0, 3))
    def add(self, number: int, home: int) -> None:
        name = home.to_bytes(8, "little") + number.to_bytes(4, "little")
        self.clock += 1
        self.table.add(name, DIGEST, self.clock * 1000, 8)
        self.table.locate(name, self.clock << 20)
        self.rows.append((name, self.clock))
        if len(self.rows) > 70:
            self.rows.popleft()

    @rule(count=st.integers(1, 30))
    def drop(self, count: int) -> None:
        for _ in range(min(count, len(self.rows))):
            self.table.drop_oldest()
            self.rows.popleft()

    @rule()
    def reload(self) -> None:
        row = self.table.row
        self.table = FinishedTable.load(self.table.dump(), 70)
        assert self.table.row == row

    @invariant()
    def agrees(self) -> None:
        assert len(self.table) == len(self.rows)
        for name, clock in dict(self.rows).items():  # the newest of each name
            assert self.table.find(name) == (DIGEST, clock, 8, clock << 20)
        assert self.table.find(b"\xff" * KEY_BYTES) is None
        if not self.rows:
            assert self.table.row == 0


TestAgainstADictionary = AgainstADictionary.TestCase
TestAgainstADictionary.settings = settings(max_examples=40, stateful_step_count=40)


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_digests_differ_where_requests_do(one: bytes, other: bytes) -> None:
    assert (request_digest(one) == request_digest(other)) == (one == other)
