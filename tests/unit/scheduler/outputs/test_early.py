"""What leaves right with the acknowledgement: foreseen for plain placements alone, and what follows from the record.

That the two are the same is asserted by `Driving.tick`, for every record of every test that drives a leader.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.scheduler.driving import Driving


@pytest.fixture
def drive() -> Driving:
    drive = Driving()
    for name in ("w0", "w1"):
        drive.worker(name, 4)
    drive.settle()
    drive.foreseen = 0
    return drive


def test_new_jobs_are_foreseen_one_frame_a_worker(drive: Driving) -> None:
    for name in ("a", "b", "c"):
        drive.offer_submit(name, gpu={"count": 2})
    drive.tick()
    assert drive.foreseen == len(drive.wanted) == 2
    assert sorted(place.job for frame in drive.wanted for place in frame.place) == ["a", "b", "c"]
    assert {place.accepted_ms for frame in drive.wanted for place in frame.place} == {drive.engine.state.time_ms}


def test_an_end_that_comes_with_the_next_request_hinders_nothing(drive: Driving) -> None:
    for name in "abcdefgh":
        drive.submit(name, gpu={})
    drive.settle()
    drive.foreseen = 0
    worker = drive.workers["w0"]
    worker.finish(next(iter(worker.held)))
    frame = worker.fact_frame()
    assert frame is not None
    drive.send("w0", frame)
    drive.offer_submit("z", gpu={})
    drive.tick()
    assert drive.foreseen == 1
    assert [place.job for frame in drive.wanted for place in frame.place] == ["z"]


@pytest.mark.parametrize(
    "fields",
    [
        {"deadline_s": 60.0},
        {"replicas": 2, "gpu": {"scheduling": "gang"}},
    ],
)
def test_what_is_less_plain_is_left_to_what_follows_from_the_record(drive: Driving, fields: dict[str, Any]) -> None:
    drive.offer_submit("a", **{"gpu": {}, **fields})
    drive.tick()
    assert drive.wanted
    assert drive.foreseen == 0


def test_large_requests_are_left_to_it_too(drive: Driving) -> None:
    for name in ("a", "b", "c"):
        drive.offer_submit(name, gpu={}, run={"argv": ["true"], "env": {"LARGE": "x" * 30_000}})
    drive.tick()
    assert drive.wanted
    assert drive.foreseen == 0


def test_who_waited_is_not_foreseen() -> None:
    drive = Driving()
    drive.submit("a", gpu={})
    drive.worker("w0", 1)
    drive.settle()
    assert drive.job("a").rev > 1
    assert drive.foreseen == 0


def test_a_record_that_stands_elsewhere_lets_out_nothing_early(drive: Driving) -> None:
    drive.offer_submit("a", gpu={})
    drive.now += 1
    payload = drive.engine.build(drive.now, drive.now)
    drive.engine.prepare_early()
    seq = len(drive.records) + 1
    assert drive.engine.early(seq)
    assert drive.engine.early(seq + 1) == []  # junk came before it: its fence is another
    drive.engine.sessions.ahead[0] = "epoch 99"  # a worker knows a newer one: nobody is told anything by this leader
    assert drive.engine.early(seq) == []
    drive.engine.sessions.ahead.clear()
    drive.engine.commit(drive.store(payload), drive.now)


def test_without_time_to_foresee_everything_follows_from_the_record(drive: Driving) -> None:
    drive.offer_submit("a", gpu={})
    drive.now += 1
    payload = drive.engine.build(drive.now, drive.now)
    assert drive.engine.early(len(drive.records) + 1) == []
    assert drive.engine.commit(drive.store(payload), drive.now).messages
    drive.engine.prepare_early()  # late: no record is in flight
