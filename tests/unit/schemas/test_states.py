"""The state table has exactly the documented transitions."""

from __future__ import annotations

import pytest

from moorage.schemas.job import STATE_NUMBER, STATE_TABLE, STATES, TERMINAL, TRANSITIONS, derive_state


@pytest.mark.parametrize(
    ("now", "to"),
    [
        ("QUEUED", "PLACED"), ("QUEUED", "CANCELLED"), ("QUEUED", "EXPIRED"), ("QUEUED", "REJECTED"),
        ("PLACED", "CLAIMED"), ("PLACED", "QUEUED"), ("PLACED", "CANCELLING"),
        ("CLAIMED", "RUNNING"), ("CLAIMED", "QUEUED"), ("CLAIMED", "CANCELLING"),
        ("RUNNING", "SUCCEEDED"), ("RUNNING", "FAILED"), ("RUNNING", "TIMED_OUT"), ("RUNNING", "QUEUED"),
        ("RUNNING", "CANCELLING"), ("RUNNING", "LOST_KEPT"), ("PLACED", "LOST_KEPT"),
        ("CANCELLING", "CANCELLED"), ("CANCELLING", "SUCCEEDED"),
        ("LOST_KEPT", "RUNNING"), ("LOST_KEPT", "CANCELLED"),
    ],
)  # fmt: skip
def test_legal(now: str, to: str) -> None:
    assert to in TRANSITIONS[now]


@pytest.mark.parametrize(
    ("now", "to"),
    [
        ("PLACED", "CANCELLED"),  # only the worker's answer or the fence leaves PLACED
        ("PLACED", "EXPIRED"), ("PLACED", "RUNNING"), ("PLACED", "SUCCEEDED"),
        ("CANCELLING", "QUEUED"), ("CANCELLING", "FAILED"), ("CANCELLING", "RUNNING"),
        ("QUEUED", "RUNNING"), ("QUEUED", "SUCCEEDED"), ("QUEUED", "CANCELLING"),
        ("RUNNING", "CANCELLED"), ("RUNNING", "PLACED"), ("RUNNING", "CLAIMED"), ("RUNNING", "EXPIRED"),
        ("LOST_KEPT", "PLACED"),
    ],
)  # fmt: skip
def test_illegal(now: str, to: str) -> None:
    assert to not in TRANSITIONS[now]


def test_the_table_is_closed() -> None:
    assert set(TRANSITIONS) == set(STATES)
    assert all(targets <= set(STATES) for targets in TRANSITIONS.values())
    assert {name for name, targets in TRANSITIONS.items() if not targets} == TERMINAL
    assert [STATES[number] for number in STATE_NUMBER.values()] == list(STATES)
    assert all(now not in targets for now, targets in TRANSITIONS.items())


def test_the_columns_of_the_table_agree() -> None:
    for row in STATE_TABLE:
        assert row.on_worker or not (row.has_devices or row.runs or row.may_end or row.leaving), row.name
        assert not (row.may_end and row.leaving), row.name
        assert not (row.terminal and row.on_worker), row.name
    by_rank = sorted(STATE_TABLE, key=lambda row: row.rank)
    assert len({row.rank for row in STATE_TABLE}) == len(STATE_TABLE)
    assert [row.terminal for row in by_rank] == sorted(row.terminal for row in by_rank), "a live replica goes first"
    assert derive_state(set(STATES)) == by_rank[0].name
