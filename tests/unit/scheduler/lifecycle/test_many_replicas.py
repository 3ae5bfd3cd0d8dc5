"""A job of a million replicas is one row: what it costs, how its replicas come and go, and its own bounds."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.events import Cancel
from moorage.scheduler.core.ledger.ceilings import CEILINGS
from moorage.scheduler.core.ledger.state import CANCELLED, FAILED, LISTED_MAX, QUEUED
from moorage.scheduler.core.queue import queue
from moorage.scheduler.ledger import state_bytes as snapshots
from moorage.schemas.job import STATES
from moorage.schemas.ranges import count_of, numbers_in, parse_ranges
from tests.unit.scheduler.driving import Driving

MILLION = 1_000_000


def running(drive: Driving, name: str) -> list[int]:
    return sorted(index for index, row in drive.job(name).rows.items() if row.attempt is not None)


def exit_with(drive: Driving, name: str, codes: dict[int, int]) -> None:
    """These replicas exit with these codes, and their devices are free; their workers are not `auto`."""
    drive.reports([("exited", name, index, code, "") for index, code in codes.items()])
    drive.reports([("freed", name, index, 0, "") for index in codes])


def started(drive: Driving, name: str) -> list[int]:
    found = running(drive, name)
    drive.reports(
        [("claimed", name, index, 0, "") for index in found if drive.replica(name, index).attempt is not None]
    )
    drive.reports([("started", name, index, 0, "") for index in found])
    return found


# ----------------------------------------------------------------------------------------------------- what it costs


def test_a_million_that_wait_are_a_row_in_memory_and_in_the_snapshot() -> None:
    drive = Driving()
    drive.checks = False
    drive.submit("warm", replicas=2)
    before = len(snapshots.dump(drive.state))
    tracemalloc.start()
    drive.submit("many", replicas=MILLION, gpu={})
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert drive.job("many").waits == MILLION
    assert held < 1 << 20
    assert len(snapshots.dump(drive.state)) - before < 2_000
    assert drive.state.load == 2 + LISTED_MAX // 16


def test_a_million_that_are_cancelled_end_in_one_step() -> None:
    drive = Driving()
    drive.submit("many", replicas=MILLION, gpu={})
    drive.cancel("many")
    job = drive.job("many")
    assert job.state == "CANCELLED"
    assert job.ended == [(CANCELLED, ((0, MILLION - 1),))]
    drive.worker("w0")
    drive.tick()
    assert drive.engine.queue.is_empty
    assert len(job.history) == 1
    again = snapshots.load(snapshots.dump(drive.state))
    assert again.jobs[job.num].ended == job.ended


def test_a_rank_of_a_gang_that_waits_is_not_cancelled_by_itself() -> None:
    drive = Driving()
    drive.submit("train", replicas=2, gpu={"scheduling": "gang"})
    drive.engine.offer(Cancel("t", "train", "cancelled", reply="alone", replicas=parse_ranges("1")))
    drive.tick()
    answer = drive.answers["alone"]
    assert answer["code"] == "invalid-argument"
    assert (answer["allowed"], answer["next"]) == ("the whole job", "moorage cancel train")
    assert drive.job("train").fresh == ((0, 1),)


def test_replicas_that_a_job_has_not_are_named_and_nothing_of_it_is_cancelled() -> None:
    drive = Driving()
    drive.submit("sweep", indices="0-9", gpu={})
    drive.engine.offer(Cancel("t", "sweep", "cancelled", reply="some", replicas=parse_ranges("8-12,20")))
    drive.tick()
    answer = drive.answers["some"]
    assert (answer["message"], answer["allowed"]) == ("job sweep has no replica 10-12, 20", "0-9")
    assert drive.job("sweep").fresh == ((0, 9),)


def test_one_replica_with_a_bound_of_one_starts_again_after_a_refusal() -> None:
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("one", replicas=1, indices="7", max_running=1, gpu={})
    drive.reports([("refused", "one", 7, 0, "")])
    drive.pass_time(60_000)
    assert running(drive, "one") == [7]


# ------------------------------------------------------------------------------------------------ how they come and go


def test_ends_are_counted_and_each_replica_keeps_its_end() -> None:
    """Some of them fail, some are lost, a leader goes, and what is left is cancelled: as a list that the test keeps."""
    drive, chance = Driving(), random.Random(45)
    for number in range(4):
        drive.worker(f"w{number}", 8, auto=False)
    drive.submit("many", replicas=3_000, gpu={}, max_failed=None, retries_on_lost=1)
    expected = ["QUEUED"] * 3_000
    for turn in range(30):
        codes = {index: chance.choice((0, 0, 0, 3)) for index in started(drive, "many")}
        exit_with(drive, "many", codes)
        for index, code in codes.items():
            expected[index] = "FAILED" if code else "SUCCEEDED"
        if turn == 10:
            drive.take_snapshot()
        if turn == 20:
            drive.lead()
            drive.renew()
            drive.renew()
    job = drive.job("many")
    assert job.rows
    assert job.size - job.live == 30 * 32
    for index in started(drive, "many"):
        expected[index] = "RUNNING"
    assert [STATES[job.state_of(index) or 0] for index in range(3_000)] == expected
    assert job.well == expected.count("SUCCEEDED")
    assert job.failed == expected.count("FAILED")
    drive.cancel("many")
    expected = ["CANCELLED" if state == "QUEUED" else state for state in expected]
    exit_with(drive, "many", dict.fromkeys(running(drive, "many"), -15))
    expected = ["CANCELLED" if state == "RUNNING" else state for state in expected]
    assert job.over
    assert job.state == "FAILED"
    found = {index: STATES[state] for state, ended in job.ended for index in numbers_in(ended)}
    assert [found[index] for index in range(3_000)] == expected


def test_a_replica_that_comes_back_goes_before_those_that_were_never_placed() -> None:
    drive = Driving.with_hosts(2, auto=False)
    drive.submit("many", replicas=5_000, gpu={}, retries=1)
    assert started(drive, "many") == [0, 1]
    drive.reports([("exited", "many", 0, 7, "")])
    drive.reports([("freed", "many", 0, 0, "")])
    assert running(drive, "many") == [1, 2]
    assert drive.job("many").back == 1
    drive.pass_time(2_000)
    drive.reports([("claimed", "many", 2, 0, ""), ("started", "many", 2, 0, "")])
    exit_with(drive, "many", {2: 0})
    assert running(drive, "many") == [0, 1], "its pause is over, and 3 waits behind it"
    assert drive.replica("many", 0).attempt_no == 2


def test_indices_are_the_numbers_of_the_replicas() -> None:
    drive = Driving.with_hosts(2, auto=False)
    assert drive.submit("some", indices="7, 100-101, 999999", gpu={})["kind"] == "accepted"
    assert drive.job("some").size == 4
    seen = []
    for _ in range(2):
        seen += started(drive, "some")
        exit_with(drive, "some", dict.fromkeys(running(drive, "some"), 0))
    assert seen == [7, 100, 101, 999_999]
    assert drive.job("some").state == "SUCCEEDED"
    assert drive.job("some").ended[0][1] == parse_ranges("7,100-101,999999")


def test_how_long_replicas_take_is_known_before_the_last_has_ended() -> None:
    drive = Driving.with_hosts(4, auto=False)
    drive.submit("many", replicas=2_000, gpu={})
    for _ in range(3):
        found = started(drive, "many")
        drive.pass_time(30_000)
        exit_with(drive, "many", dict.fromkeys(found, 0))
    started(drive, "many")
    job = drive.job("many")
    end_ms = drive.engine.estimates.end_ms(drive.attempt("many", min(job.rows)), drive.now)
    assert end_ms is not None
    assert 25_000 <= end_ms - drive.now <= 35_000


# ------------------------------------------------------------------------------------------------------ its own bounds


def test_max_running_bounds_what_runs_and_holds_up_nobody() -> None:
    drive = Driving.with_hosts(4, config=Config(reserve_after=1), auto=False)
    drive.submit("many", replicas=2_000, gpu={}, max_running=3, run={"driver": "noop", "timeout_s": 600})
    drive.submit("other", gpu={"count": 2})
    assert running(drive, "many") == [0, 1, 2]
    drive.pass_time(5_000)
    assert drive.engine.planner.verdicts.reservation is not None
    assert drive.job("other").num == drive.engine.planner.verdicts.reservation.num, "many waits for nothing"
    told = drive.explained("many")
    assert (told["reason"], told["waiting_replicas"]) == ("max-running", 1_997)
    started(drive, "many")
    exit_with(drive, "many", {0: 0})
    assert running(drive, "many") == [1, 2]
    assert drive.states("other") == ["PLACED"]
    drive.cancel("other")
    drive.report("withdrawn", "other")
    assert running(drive, "many") == [1, 2, 3]
    drive.lead()
    drive.pass_time(30_000)
    assert running(drive, "many") == [1, 2, 3], "the next leader keeps to it"


@pytest.mark.parametrize(("most", "first"), [(2, [0, 1]), (3, [0, 1]), (1, [0])])
def test_gpus_that_its_ends_leave_go_to_the_job_itself_before_a_lower_priority(most: int, first: list[int]) -> None:
    """The record that freed them gave them to others: its job had as many running as it may until that was folded."""
    drive = Driving.with_hosts(2, auto=False)
    drive.submit("many", replicas=100, gpu={}, max_running=most, priority=90)
    drive.submit("low", replicas=100, gpu={}, priority=10)
    beside = running(drive, "low")
    for index in range(3):
        found = started(drive, "many")
        assert found == [index * len(first) + number for number in first]
        drive.reports([(kind, "many", each, 0, "") for each in found for kind in ("exited", "freed")])
        assert running(drive, "low") == beside


@pytest.mark.parametrize(
    ("replicas", "fields", "failed"),
    [(40, {}, 20), (1_000, {}, 50), (40, {"max_failed": 2}, 2), (40, {"max_failed": None}, 40), (10, {}, 10)],
)
def test_a_job_whose_replicas_fail_alike_ends(replicas: int, fields: dict[str, int | None], failed: int) -> None:
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("many", replicas=replicas, gpu={}, **fields)
    while not drive.job("many").over:
        exit_with(drive, "many", dict.fromkeys(started(drive, "many"), 1))
    job = drive.job("many")
    assert job.failed == failed
    assert job.state == "FAILED"
    assert sum(count_of(ended) for state, ended in job.ended if state == CANCELLED) == replicas - failed
    assert [state for state, _ in job.ended if state not in (FAILED, CANCELLED)] == []


def test_no_new_replica_is_placed_while_too_many_came_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "BACK_MAX", 3)
    drive = Driving.with_hosts(4, auto=False)
    drive.submit("many", replicas=2_000, gpu={}, retries=3)
    codes = dict.fromkeys(started(drive, "many"), 1)
    exit_with(drive, "many", codes)
    assert running(drive, "many") == [], "four wait out their pause, and nothing new begins"
    drive.pass_time(1_500)
    assert running(drive, "many") == [0, 1, 2, 3]
    assert drive.job("many").back == 0
    exit_with(drive, "many", dict.fromkeys(started(drive, "many"), 0))
    assert running(drive, "many") == [4, 5, 6, 7]


def test_a_replica_that_is_cancelled_while_it_waits_to_be_tried_again_never_waits_again() -> None:
    """It stood among those that wait once its pause was over, of a job on hold for as long as that is."""
    drive = Driving.with_hosts(3, auto=False)
    drive.submit("many", replicas=3, gpu={}, retries=1)
    started(drive, "many")
    exit_with(drive, "many", {1: 1})
    drive.engine.offer(Cancel("t", "many", "cancelled", replicas=((1, 1),)))
    drive.order("hold", job="many")
    drive.pass_time(2_000)
    assert running(drive, "many") == [0, 2]
    assert drive.engine.queue.waiting[drive.job("many").num].back == []


def test_start_within_counts_from_the_last_placement_of_a_job_of_many() -> None:
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("many", replicas=2_000, gpu={}, start_within_s=60)
    for index in range(3):
        drive.pass_time(50_000)
        assert started(drive, "many") == [index]
        exit_with(drive, "many", {index: 0})
    drive.pass_time(61_000)
    job = drive.job("many")
    assert not count_of(job.fresh)
    assert [row.state for row in job.rows.values()] != [QUEUED], "what runs goes on"
    assert sum(count_of(ended) for state, ended in job.ended if STATES[state] == "EXPIRED") == 2_000 - 4


def test_a_new_leader_knows_since_when_a_job_runs_fewer_replicas_than_it_may() -> None:
    drive = Driving.with_hosts(2)
    drive.submit("many", replicas=4, gpu={}, max_running=2, start_within_s=60)
    drive.settle()
    drive.pass_time(300_000)
    drive.submit("urgent", replicas=2, gpu={}, priority=90)
    first_ms = drive.now
    for attempt in list(drive.workers["w0"].held):
        drive.workers["w0"].finish(attempt)
        drive.settle()
        drive.pass_time(10_000)
    assert drive.states("many") == ["SUCCEEDED", "SUCCEEDED", "QUEUED", "QUEUED"]
    since_ms = drive.job("many").waits_from_ms
    assert first_ms <= since_ms < first_ms + 1_000, "since the first of them has ended"
    drive.lead_from_snapshot()
    assert drive.job("many").waits_from_ms == since_ms
    drive.renew()
    drive.pass_time(since_ms + 59_000 - drive.now)
    assert drive.states("many")[2:] == ["QUEUED", "QUEUED"]
    drive.pass_time(2_000)
    assert drive.states("many")[2:] == ["EXPIRED", "EXPIRED"]


# ---------------------------------------------------------------------------------------------- the size of a record


def test_no_record_of_a_job_of_many_is_large() -> None:
    drive = Driving()
    drive.checks = False
    for number in range(40):
        drive.worker(f"w{number}", 64, auto=False)
    drive.offer_submit("many", replicas=100_000, gpu={"sharing": "exclusive"}, max_failed=None)
    before = 0
    for _ in range(5):
        drive.tick()
        assert len(running(drive, "many")) - before <= CEILINGS.steps + 1
        before = len(running(drive, "many"))
    assert before == 40 * 64
