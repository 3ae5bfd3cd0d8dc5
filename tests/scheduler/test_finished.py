"""The packed table of finished jobs against a plain dictionary."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moorage.scheduler.core.finished import DIGEST_BYTES, KEY_BYTES, FinishedTable, job_key, request_digest

DIGEST = bytes(DIGEST_BYTES)


def key(number: int) -> bytes:
    return job_key("t", f"j{number}")


def test_found_until_dropped_in_the_order_of_coming() -> None:
    table = FinishedTable()
    for number in range(500):
        table.add(key(number), request_digest(b"%d" % number), number * 1000, number % 14)
    assert len(table) == 500
    assert table.find(key(7)) == (request_digest(b"7"), 7, 7)
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
    assert len(table.dump()) == 9_000 * 29


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


class AgainstADictionary(RuleBasedStateMachine):
    """Keys that collide in the index on purpose: they differ only where the slot does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.table = FinishedTable(rows_max=70)
        self.model: OrderedDict[bytes, int] = OrderedDict()
        self.clock = 0

    @rule(number=st.integers(0, 200), home=st.integers(0, 3))
    def add(self, number: int, home: int) -> None:
        name = home.to_bytes(8, "little") + number.to_bytes(4, "little")
        if name in self.model:
            return
        self.clock += 1
        self.table.add(name, DIGEST, self.clock * 1000, 8)
        self.model[name] = self.clock
        if len(self.model) > 70:
            self.model.popitem(last=False)

    @rule(count=st.integers(1, 30))
    def drop(self, count: int) -> None:
        for _ in range(min(count, len(self.model))):
            self.table.drop_oldest()
            self.model.popitem(last=False)

    @rule()
    def reload(self) -> None:
        row = self.table.row
        self.table = FinishedTable.load(self.table.dump(), 70)
        assert self.table.row == row

    @invariant()
    def agrees(self) -> None:
        assert len(self.table) == len(self.model)
        for name, seconds in self.model.items():
            assert self.table.find(name) == (DIGEST, seconds, 8)
        assert self.table.find(b"\xff" * KEY_BYTES) is None
        if not self.model:
            assert self.table.row == 0


TestAgainstADictionary = AgainstADictionary.TestCase
TestAgainstADictionary.settings = settings(max_examples=40, stateful_step_count=40)


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_digests_differ_where_requests_do(one: bytes, other: bytes) -> None:
    assert (request_digest(one) == request_digest(other)) == (one == other)
