"""Learned durations: what a workload is, which group is asked, what is known of a run that goes on, and the bounds."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moorage.scheduler.core.fleet.shape import Shape, Shapes
from moorage.scheduler.core.ledger.began import began_ms
from moorage.scheduler.core.request_reader import WORKLOAD_CHARS_MAX, workload_of
from moorage.scheduler.core.schedule import runtime
from moorage.scheduler.core.schedule.runtime import (
    OUTLIVED_P90,
    SAMPLES_MAX,
    SIBLINGS_MS,
    Durations,
    _left_ms,
    groups_of,
    rank,
)
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import Request, Run
from tests.scheduler.driving import Driving

SHAPES = Shapes()


def shape(count: int = 1, **more: Any) -> Shape:
    return SHAPES.of(Request(gpu=GpuSpec(count=count, **more), run=Run(driver="noop")))


def request(argv: list[str], **more: Any) -> Request:
    return Request(run=Run(argv=argv), **more)


def test_a_workload_is_the_program_and_its_first_word_not_its_options() -> None:
    assert workload_of(request(["/usr/bin/python", "train.py", "--lr", "1"])) == "process python train.py"
    assert workload_of(request(["python", "train.py", "--lr", "2"])) == "process python train.py"
    assert workload_of(request(["python", "-m", "train"])) == "process python"
    assert workload_of(request(["a"], labels={"workload": "resnet"})) == "resnet"
    docker = Request(run=Run(driver="docker", argv=["a"]), driver_config={"docker": {"image": "x:1"}})
    assert workload_of(docker) == "docker x:1 a"
    assert len(workload_of(request(["a" * 1000]))) == WORKLOAD_CHARS_MAX


def test_the_narrowest_group_that_has_seen_enough_answers() -> None:
    known = Durations()
    for ms in (10, 20, 30):
        known.observe("t", "a", shape(2), ms)
    known.observe("t", "a", shape(1), 1000)
    of_its_own = known.estimate("t", "a", shape(2))
    assert of_its_own is not None
    assert (of_its_own.p50_ms, of_its_own.p90_ms) == (20, 30)
    other_shape = known.estimate("t", "a", shape(1))
    assert other_shape is not None
    assert other_shape.samples == 4, "one run of its own is too few, the workload has four"
    other_work = known.estimate("t", "b", shape(2))
    assert other_work is not None
    assert other_work.p50_ms == 20, "the tenant's requests for two GPUs"
    assert known.estimate("u", "a", shape(2)) is None, "another tenant's runs say nothing"


def test_nothing_known_is_said_and_a_limit_bounds_everything() -> None:
    known = Durations()
    assert known.estimate("t", "a", shape()) is None
    limited = known.estimate("t", "a", shape(), limit_ms=500)
    assert limited is not None
    assert (limited.p50_ms, limited.p90_ms, limited.samples) == (500, 500, 0)
    known.observe("t", "a", shape(), 900)
    found = known.estimate("t", "a", shape(), limit_ms=500)
    assert found is not None
    assert found.p90_ms == 500


def test_what_has_lasted_so_long_is_compared_with_what_lasted_longer() -> None:
    known = Durations()
    for ms in (10, 10, 10, 100, 200):
        known.observe("t", "a", shape(), ms)
    left = known.remaining("t", "a", shape(), 50)
    assert left is not None
    assert (left.p50_ms, left.p90_ms) == (50, 150)
    outlived = known.remaining("t", "a", shape(), 300)
    assert outlived is not None
    assert (outlived.p50_ms, outlived.p90_ms) == (300, OUTLIVED_P90 * 300)


def test_what_is_remembered_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(runtime, "GROUPS_MAX", 30)
    known = Durations()
    for number in range(SAMPLES_MAX * 3):
        known.observe("t", "a", shape(), number)
    assert len(known._runs[("t", "a", -1)].ring) == SAMPLES_MAX
    for number in range(100):
        known.observe(f"t{number}", "a", shape(), 1)
    assert len(known) <= 30
    assert known.estimate("t99", "a", shape()) is not None, "the newest are kept"


@given(st.lists(st.integers(0, 10**9), min_size=1), st.integers(0, 2 * 10**9), st.none() | st.integers(0, 10**9))
def test_estimates_are_in_order_and_within_what_was_seen(seen: list[int], elapsed: int, limit: int | None) -> None:
    known = Durations()
    for ms in seen:
        known.observe("t", "a", shape(), ms)
    found = known.remaining("t", "a", shape(), elapsed, limit)
    assert found is not None
    assert 0 <= found.p50_ms <= found.p90_ms
    assert limit is None or found.p90_ms <= max(0, limit - elapsed)
    if any(ms > elapsed for ms in seen[-SAMPLES_MAX:]):
        assert found.p90_ms <= max(seen) - elapsed


@given(st.lists(st.integers(), min_size=1), st.integers(0, 100))
def test_a_quantile_is_one_of_the_values_with_so_many_at_most(values: list[int], percent: int) -> None:
    ordered = sorted(values)
    found = rank(ordered, percent)
    at_most = sum(value <= found for value in ordered)
    assert found in ordered
    assert at_most * 100 >= percent * len(ordered)


def test_a_leader_learns_as_jobs_end_and_a_new_one_knows_it_from_the_state() -> None:
    drive = Driving()
    drive.worker("w0", 1)
    run = {"driver": "noop", "argv": ["train"]}
    for number in range(3):
        drive.submit(f"j{number}", gpu={}, run=run)
        drive.settle()
        drive.now += 5_000
        drive.run_out("w0")
    job, engine = drive.job("j0"), drive.engine
    first = engine.durations.estimate("t", engine.workload_of(job), engine.shape_of(job))
    assert first is not None
    assert first.samples == 3
    assert 5_000 <= first.p50_ms < 5_100
    drive.lead()
    job, engine = drive.job("j0"), drive.engine
    assert engine.durations.estimate("t", engine.workload_of(job), engine.shape_of(job)) == first


def test_siblings_tell_before_all_others() -> None:
    known, asked = Durations(), shape()
    for number in range(10):
        known.observe("t", "train", asked, 3_600_000, number)
    known.observe("t", "train", asked, 60_000, 10 * SIBLINGS_MS)
    for accepted_ms, p50_ms, samples in (
        (9 * SIBLINGS_MS, 60_000, 1),
        (11 * SIBLINGS_MS, 60_000, 1),
        (11 * SIBLINGS_MS + 1, 3_600_000, 11),
        (SIBLINGS_MS, 3_600_000, 10),
        (None, 3_600_000, 11),
    ):
        found = known.estimate("t", "train", asked, None, accepted_ms)
        assert found is not None
        assert (found.p50_ms, found.samples) == (p50_ms, samples)


_RUNS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 6 * SIBLINGS_MS)), max_size=3 * SAMPLES_MAX)


@given(_RUNS, st.lists(st.integers(0, 6 * SIBLINGS_MS), min_size=1), st.integers(0, 10**6), st.none() | st.integers(0))
def test_what_is_kept_ready_is_what_is_counted_anew(
    runs: list[tuple[int, int]], accepted: list[int], elapsed: int, limit: int | None
) -> None:
    known, asked = Durations(), shape()
    groups = groups_of("t", "train", asked)
    for number, (ms, accepted_ms) in enumerate(runs, 1):
        known.observe("t", "train", asked, ms, accepted_ms)
        last = runs[max(0, number - SAMPLES_MAX) : number]
        for at in accepted:
            siblings = sorted(ms for ms, came in last if abs(came - at) <= SIBLINGS_MS)
            assert known._runs[groups[0]].siblings(at) == siblings
            for percent in (50, 90):
                lasted = [ms for ms in siblings if ms > elapsed] if elapsed else siblings
                assert not lasted or _left_ms(siblings, elapsed, percent) == rank(lasted, percent) - elapsed
    for at in accepted:
        found = known.remaining("t", "train", asked, elapsed, limit, at)
        assert known.half_left_ms(groups, elapsed, limit, at) == (None if found is None else found.p50_ms)


def test_when_a_member_ends_is_told_by_what_it_is_by_now() -> None:
    """Its start, its shape, and what was learned meanwhile; what stays as it is, is looked up once."""
    drive = Driving()
    drive.worker("w0", 2)
    drive.submit("j", gpu={}, run={"driver": "noop", "argv": ["train"]})
    drive.tick()
    (member,) = drive.state.workers["w0"].members.values()
    engine, job, placed_ms = drive.engine, drive.job("j"), drive.state.time_ms
    end_ms = engine.estimates.end_ms
    assert end_ms(member, placed_ms + 1_000) is None
    drive.now += 5_000
    drive.settle()
    running_ms = began_ms(member, job.accepted_ms)
    assert running_ms > placed_ms
    assert end_ms(member, running_ms + 90_000) is None
    engine.durations.observe("t", engine.workload_of(job), engine.shape_of(job), 100_000, job.accepted_ms)
    assert end_ms(member, running_ms + 90_000) == running_ms + 100_000
    job.shape = engine.shapes.of(Request(gpu=GpuSpec(count=2), run=Run(driver="noop", argv=["train"])))
    engine.durations.observe("t", engine.workload_of(job), job.shape, 95_000, job.accepted_ms)
    assert end_ms(member, running_ms + 90_000) == running_ms + 95_000


def test_an_end_that_somebody_asked_for_says_nothing() -> None:
    drive = Driving()
    drive.worker("w0", 1)
    drive.submit("j", gpu={})
    drive.settle()
    drive.now += 5_000
    drive.cancel("j")
    drive.settle()
    assert drive.job("j").state == "CANCELLED"
    assert len(drive.engine.durations) == 0
