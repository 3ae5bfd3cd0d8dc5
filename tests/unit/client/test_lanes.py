"""Who had which GPU when, and a job's attempts as bars: from changes as events and `show` have them."""

from __future__ import annotations

from typing import Any

from moorage.client.view.bars import bars
from moorage.client.view.lanes import LEASES_MAX, Lanes, Lease
from moorage.schemas.frames import Change


def change(at_ms: int, state: str, *, replica: int = 0, attempt: int = 1, **more: Any) -> Change:
    return Change(1, at_ms, replica, attempt, state, **more)


ONE_TRY = [
    change(1_000, "ACCEPTED", replica=-1, attempt=0),
    change(3_000, "PLACED", worker="n1", gpus=["a", "b"]),
    change(3_100, "CLAIMED", worker="n1"),
    change(3_200, "RUNNING", worker="n1"),
    change(9_000, "QUEUED", worker="n1", code=3, why="exit"),
]


def test_a_lease_goes_from_the_placement_to_the_end_of_the_attempt() -> None:
    lanes = Lanes()
    lanes.add("vision", "train", ONE_TRY[:4])
    assert lanes.leases("a") == [Lease("vision", "train", 0, 1, 3_000, None)]
    assert lanes.jobs == {("vision", "train")}
    lanes.add("vision", "train", ONE_TRY)  # as `show` tells it all once more
    lanes.add("vision", "train", [change(9_500, "PLACED", attempt=2, worker="n2", gpus=["c"])])
    assert lanes.leases("b") == [Lease("vision", "train", 0, 1, 3_000, 9_000)]
    assert lanes.leases("c") == [Lease("vision", "train", 0, 2, 9_500, None)]
    lanes.add("vision", "train", [change(9_900, "SUCCEEDED", attempt=2, worker="n2", code=0)])
    assert lanes.leases("c") == [Lease("vision", "train", 0, 2, 9_500, 9_900)]
    assert not lanes.jobs


def test_sharers_of_a_gpu_have_leases_beside_one_another_and_each_ends_its_own() -> None:
    lanes = Lanes()
    lanes.add("vision", "one", [change(10, "PLACED", gpus=["a"])])
    lanes.add("vision", "two", [change(20, "PLACED", gpus=["a"]), change(20, "PLACED", replica=1, gpus=["a"])])
    lanes.add("vision", "two", [change(30, "SUCCEEDED")])
    ends = [(lease.job, lease.until_ms) for lease in lanes.leases("a")]
    assert ends == [("one", None), ("two", 30), ("two", None)]


def test_what_ended_unheard_is_closed_and_what_is_old_is_forgotten() -> None:
    lanes = Lanes()
    lanes.add("vision", "train", ONE_TRY[:4])
    lanes.add("vision", "other", [change(5_000, "PLACED", gpus=["c"])])
    lanes.keep("vision", ["other"], 20_000)
    assert lanes.leases("a") == [Lease("vision", "train", 0, 1, 3_000, 20_000)]
    assert lanes.jobs == {("vision", "other")}
    lanes.forget(20_001)
    assert (lanes.leases("a"), lanes.leases("c")) == ([], [Lease("vision", "other", 0, 1, 5_000, None)])
    for number in range(LEASES_MAX + 5):
        lanes.add("vision", f"j{number}", [change(30_000, "PLACED", gpus=["d"]), change(30_001, "FAILED")])
    lanes.forget(0)
    assert len(lanes.leases("d")) == LEASES_MAX


def test_idle_times_are_joined_while_somebody_looks() -> None:
    lanes = Lanes()
    for at_ms in (1_000, 3_000, 5_000, 60_000):
        lanes.idle("n1", 2, at_ms)
    assert lanes.unused("n1", 2) == [(1_000, 5_000), (60_000, 60_000)]
    lanes.forget(5_001)
    assert lanes.unused("n1", 2) == [(60_000, 60_000)]


def test_each_attempt_is_a_bar_and_the_wait_for_the_next_one_goes_on() -> None:
    first, second = bars(ONE_TRY, 12_000)
    assert [tuple(span) for span in first.spans] == [
        ("QUEUED", 1_000, 3_000),
        ("PLACED", 3_000, 3_100),
        ("CLAIMED", 3_100, 3_200),
        ("RUNNING", 3_200, 9_000),
    ]
    assert (first.attempt, first.worker, first.end, first.code, first.why) == (1, "n1", "QUEUED", 3, "exit")
    assert (second.attempt, second.worker, second.end) == (2, "", "")
    assert [tuple(span) for span in second.spans] == [("QUEUED", 9_000, 12_000)]


def test_orders_are_no_states_and_a_replica_without_a_change_has_no_bar() -> None:
    found = bars(
        [
            change(1_000, "ACCEPTED", replica=-1, attempt=0),
            change(1_000, "PLACED", replica=1, worker="n1", gpus=["a"]),
            change(1_500, "HELD", replica=1, attempt=0),
            change(2_000, "SUCCEEDED", replica=1, worker="n1", code=0),
        ],
        9_000,
    )
    (bar,) = found
    assert (bar.replica, bar.end, [span.state for span in bar.spans]) == (1, "SUCCEEDED", ["PLACED"])
    assert bars([], 1) == []
