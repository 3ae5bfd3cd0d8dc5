"""Learned durations: what a workload is, which group is asked, what is known of a run that goes on, and the bounds."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moorage.scheduler.core.fleet.shape import Shape, Shapes
from moorage.scheduler.core.request_reader import WORKLOAD_CHARS_MAX, workload_of
from moorage.scheduler.core.schedule import runtime
from moorage.scheduler.core.schedule.runtime import (
    OUTLIVED_P90,
    SAMPLES_MAX,
    SIBLINGS_MS,
    Durations,
    Groups,
    _left_ms,
    groups_of,
    rank,
)
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import Request, Run
from tests.unit.scheduler.driving import Driving

SHAPES = Shapes()


def shape(count: int = 1, **more: Any) -> Shape:
    return SHAPES.of(Request(gpu=GpuSpec(count=count, **more), run=Run(driver="noop")))


def train(gpus: int = 1) -> Groups:
    """The groups of a run of the tenant t's workload a."""
    return groups_of("t", "a", shape(gpus))


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
    assert known.left_ms(train(2)) == (20, 3)
    assert known.left_ms(train(2), percent=90) == (30, 3)
    of_workload = known.left_ms(train(1))
    assert of_workload is not None
    assert of_workload[1] == 4, "one run of its own is too few, the workload has four"
    assert known.left_ms(groups_of("t", "b", shape(2))) == (20, 3), "the tenant's requests for two GPUs"
    assert known.left_ms(groups_of("u", "a", shape(2))) is None, "another tenant's runs say nothing"


def test_nothing_known_is_said_and_a_limit_bounds_everything() -> None:
    known = Durations()
    assert known.left_ms(train()) is None
    assert known.left_ms(train(), limit_ms=500) == (500, 0)
    known.observe("t", "a", shape(), 900)
    assert known.left_ms(train(), limit_ms=500, percent=90) == (500, 1)
    assert known.left_ms(train(), 600, limit_ms=500) == (0, 1)


def test_what_has_lasted_so_long_is_compared_with_what_lasted_longer() -> None:
    known = Durations()
    for ms in (10, 10, 10, 100, 200):
        known.observe("t", "a", shape(), ms)
    assert [known.left_ms(train(), 50, percent=percent) for percent in (50, 90)] == [(50, 5), (150, 5)]
    outlived = [known.left_ms(train(), 300, percent=percent) for percent in (50, 90)]
    assert outlived == [(300, 5), (OUTLIVED_P90 * 300, 5)]


def test_what_is_remembered_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(runtime, "GROUPS_MAX", 30)
    known = Durations()
    for number in range(SAMPLES_MAX * 3):
        known.observe("t", "a", shape(), number)
    assert len(known._runs[("t", "a", -1)].ring) == SAMPLES_MAX
    for number in range(100):
        known.observe(f"t{number}", "a", shape(), 1)
    assert len(known) <= 30
    assert known.left_ms(groups_of("t99", "a", shape())) is not None, "the newest are kept"


@given(st.lists(st.integers(0, 10**9), min_size=1), st.integers(0, 2 * 10**9), st.none() | st.integers(0, 10**9))
def test_estimates_are_in_order_and_within_what_was_seen(seen: list[int], elapsed: int, limit: int | None) -> None:
    known = Durations()
    for ms in seen:
        known.observe("t", "a", shape(), ms)
    half, most = (known.left_ms(train(), elapsed, limit, percent=percent) for percent in (50, 90))
    assert half is not None
    assert most is not None
    assert 0 <= half[0] <= most[0]
    assert limit is None or most[0] <= max(0, limit - elapsed)
    if any(ms > elapsed for ms in seen[-SAMPLES_MAX:]):
        assert most[0] <= max(seen) - elapsed


@given(st.lists(st.integers(), min_size=1), st.integers(0, 100))
def test_a_quantile_is_one_of_the_values_with_so_many_at_most(values: list[int], percent: int) -> None:
    ordered = sorted(values)
    found = rank(ordered, percent)
    at_most = sum(value <= found for value in ordered)
    assert found in ordered
    assert at_most * 100 >= percent * len(ordered)


def test_a_leader_learns_as_jobs_end_and_a_new_one_knows_it_from_the_state() -> None:
    drive = Driving.with_hosts(1)
    run = {"driver": "noop", "argv": ["train"]}
    for number in range(3):
        drive.submit(f"j{number}", gpu={}, run=run)
        drive.settle()
        drive.now += 5_000
        drive.run_out("w0")

    def expected() -> tuple[int, int] | None:
        reader, job = drive.engine.reader, drive.job("j0")
        return drive.engine.durations.left_ms(groups_of("t", reader.workload_of(job), reader.shape_of(job)))

    first = expected()
    assert first is not None
    assert (5_000 <= first[0] < 5_100, first[1]) == (True, 3)
    drive.lead()
    assert expected() == first


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
        found = known.left_ms(groups_of("t", "train", asked), accepted_ms=accepted_ms)
        assert found == (p50_ms, samples)


_RUNS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 6 * SIBLINGS_MS)), max_size=3 * SAMPLES_MAX)


@given(_RUNS, st.lists(st.integers(0, 6 * SIBLINGS_MS), min_size=1), st.integers(0, 10**6))
def test_what_is_kept_ready_is_what_is_counted_anew(
    runs: list[tuple[int, int]], accepted: list[int], elapsed: int
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


def test_when_an_attempt_ends_is_told_by_what_it_is_by_now() -> None:
    """Its start, its shape, and what was learned meanwhile."""
    drive = Driving.with_hosts(2)
    drive.submit("j", gpu={}, run={"driver": "noop", "argv": ["train"]})
    drive.tick()
    (attempt,) = drive.state.workers["w0"].attempts.values()
    engine, job, placed_ms = drive.engine, drive.job("j"), drive.state.time_ms
    end_ms = engine.estimates.end_ms
    assert end_ms(attempt, placed_ms + 1_000) is None
    drive.now += 5_000
    drive.settle()
    running_ms = attempt.began_ms
    assert running_ms > placed_ms
    assert end_ms(attempt, running_ms + 90_000) is None
    engine.durations.observe("t", engine.reader.workload_of(job), engine.reader.shape_of(job), 100_000, job.accepted_ms)
    assert end_ms(attempt, running_ms + 90_000) == running_ms + 100_000
    job.shape = engine.reader.shapes.of(Request(gpu=GpuSpec(count=2), run=Run(driver="noop", argv=["train"])))
    engine.durations.observe("t", engine.reader.workload_of(job), job.shape, 95_000, job.accepted_ms)
    assert end_ms(attempt, running_ms + 90_000) == running_ms + 95_000


def test_an_end_that_somebody_asked_for_says_nothing() -> None:
    drive = Driving.with_hosts(1)
    drive.submit("j", gpu={})
    drive.settle()
    drive.now += 5_000
    drive.cancel("j")
    drive.settle()
    assert drive.job("j").state == "CANCELLED"
    assert len(drive.engine.durations) == 0


def test_a_sweep_teaches_how_long_its_replicas_take_as_each_of_them_ends() -> None:
    """One of up to 1,024 replicas taught nothing before all of them had ended."""
    drive = Driving()
    drive.worker("w0", 1)
    drive.submit("sweep", gpu={}, replicas=4, max_running=1)
    drive.settle()
    job, learned = drive.job("sweep"), []
    for _ in range(4):
        drive.pass_time(10_000)
        drive.run_out("w0")
        learned.append(drive.engine.durations.learned)
    assert (job.state, learned) == ("SUCCEEDED", [1, 2, 3, 4])
