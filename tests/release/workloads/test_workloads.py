"""Random ordinary workloads by seed: see `plan`, `world` and `reference`.

More of them: `python -m tests.release.workloads.many`. One of them, step by step: `python -m tests.release.workloads
--seed 17`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.ceilings import BOUNDS, without_history, worlds_with
from tests.levels import NEXT, know_next, raise_level
from tests.release.workloads import new_leader
from tests.release.workloads.__main__ import failure, made, shrink, world_of
from tests.release.workloads.asks import ASKS_FROM, Asks
from tests.release.workloads.crowds import CROWDS_FROM, Crowds
from tests.release.workloads.many import Passed
from tests.release.workloads.plan import Step
from tests.release.workloads.reserving import RESERVING_FROM
from tests.release.workloads.schedules import SCHEDULES_FROM, Schedules
from tests.release.workloads.services import SERVICES_FROM, Services
from tests.release.workloads.sleepers import SLEEPERS_FROM
from tests.release.workloads.sleepers import failure as failure_of_sleepers
from tests.release.workloads.stalls import STALLS_FROM, Stalls
from tests.release.workloads.stream import STREAM_FROM
from tests.release.workloads.themes import (
    ADDED,
    ADDED_FROM,
    BEHIND,
    BEHIND_FROM,
    LABELLED,
    LABELLED_FROM,
    LENT,
    LENT_FROM,
    RANGES,
    RANGES_FROM,
    THEMES,
)
from tests.release.workloads.world import World
from tests.turns import seeds
from tests.unit.scheduler.driving import Driving

#: cases of CI, and further ones of `make release-check`: of the first themes, and of those that were added
OFTEN, MORE = 10, 80
ADDED_OFTEN, ADDED_MORE = 5, 40
STREAM_OFTEN, STREAM_MORE = 4, 40
RESERVING_OFTEN, RESERVING_MORE = 10, 80
SLEEPERS_OFTEN, SLEEPERS_MORE = 2, 20
#: cases that showed what was wrong: a short job in the record that makes the reservation, run times learned later, a
#: refused job that held up others, a crowd before a short job, the hosts of a lower priority, and
#: a refused job that leaves its queue group, GPUs without a known end under a limit, (two) a new leader that took the
#: runs of one shape for those of another, and two replicas of a job that end on one host for two jobs
FOUND = [400_755, 400_428, 400_604, 400_094, 400_326, 400_332, 400_724, 400_544, 403_200, 450_078, 450_180, 7_400_268]


@pytest.fixture(autouse=True, params=BOUNDS)
def bounds(request: pytest.FixtureRequest) -> Iterator[None]:
    with worlds_with(BOUNDS[request.param]):
        yield


@pytest.mark.parametrize(
    "seed",
    [*seeds(OFTEN, MORE), *seeds(ADDED_OFTEN, ADDED_MORE, ADDED_FROM), *seeds(ADDED_OFTEN, ADDED_MORE, LENT_FROM)],
)
def test_nothing_waits_that_could_start_and_no_table_grows(seed: int) -> None:
    found = failure(made(seed))
    assert not found, f"{found}\npython -m tests.release.workloads --seed {seed}"


@pytest.mark.parametrize("first", [0, ADDED_FROM, RANGES_FROM, RESERVING_FROM])
@pytest.mark.parametrize("at", seeds(2, 10))
def test_without_histories_all_is_decided_alike(first: int, at: int) -> None:
    plan = made(first + at)
    usual = world_of(plan)
    with worlds_with(without_history(Driving.ceilings)):
        without = world_of(plan)
    assert [failure(plan, world=usual), failure(plan, world=without)] == ["", ""]
    assert without.drive.records == usual.drive.records


@pytest.mark.parametrize("seed", seeds(2, 10, SERVICES_FROM))
def test_without_histories_members_move_alike(seed: int) -> None:
    usual = Services(seed)
    with worlds_with(without_history(Driving.ceilings)):
        without = Services(seed)
    usual.run()
    without.run()
    assert without.records == usual.records


@pytest.mark.parametrize("seed", seeds(ADDED_OFTEN, ADDED_MORE, BEHIND_FROM))
def test_jobs_start_after_those_that_they_name_and_hold_up_nobody_until_then(seed: int) -> None:
    found = failure(made(seed))
    assert not found, f"{found}\npython -m tests.release.workloads --seed {seed}"


@pytest.mark.parametrize("seed", seeds(ADDED_OFTEN, ADDED_MORE, RANGES_FROM))
def test_of_a_sweep_no_more_run_or_fail_than_may_and_what_failed_is_run_again(seed: int) -> None:
    found = failure(made(seed))
    assert not found, f"{found}\npython -m tests.release.workloads --seed {seed}"


@pytest.mark.parametrize("seed", seeds(ADDED_OFTEN, ADDED_MORE, LABELLED_FROM))
def test_each_gpu_of_a_job_has_the_labels_that_it_requires_or_its_host_has(seed: int) -> None:
    found = failure(made(seed))
    assert not found, f"{found}\npython -m tests.release.workloads --seed {seed}"


@pytest.mark.parametrize("seed", seeds(ADDED_OFTEN, ADDED_MORE, CROWDS_FROM))
def test_beside_sweeps_of_many_deadlines_are_kept_and_new_jobs_answered(seed: int) -> None:
    Crowds(seed).run()


@pytest.mark.parametrize("seed", seeds(STREAM_OFTEN, STREAM_MORE, STREAM_FROM))
def test_large_jobs_start_beside_an_endless_stream_and_services(seed: int) -> None:
    found = failure(made(seed))
    assert not found, f"{found}\npython -m tests.release.workloads --seed {seed}"


@pytest.mark.parametrize("seed", [*FOUND, *seeds(RESERVING_OFTEN, RESERVING_MORE, RESERVING_FROM)])
def test_jobs_start_beside_a_reservation_and_a_new_leader_starts_no_more(seed: int) -> None:
    found = failure(made(seed))
    assert not found, f"{found}\npython -m tests.release.workloads --seed {seed}"


@pytest.mark.parametrize("seed", seeds(ADDED_OFTEN, ADDED_MORE, SERVICES_FROM))
@pytest.mark.parametrize("level", [1, NEXT])
def test_members_of_services_move_one_by_one_and_no_fewer_serve(
    seed: int, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if level == NEXT:
        know_next(monkeypatch)
    Services(seed).run()


@pytest.mark.parametrize("seed", seeds(ADDED_OFTEN, ADDED_MORE, ASKS_FROM))
def test_what_teams_ask_of_a_queue_holds_all_at_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)
    asks = Asks(seed)
    raise_level(asks)
    asks.run()
    assert len(asks.ends) > 1, "a world in which nothing ends shows nothing"


@pytest.mark.parametrize("seed", seeds(ADDED_OFTEN, ADDED_MORE, SCHEDULES_FROM))
def test_each_run_of_a_schedule_is_decided_once_and_one_goes_on_at_a_time(seed: int) -> None:
    Schedules(seed).run()


@pytest.mark.parametrize("seed", seeds(ADDED_OFTEN, ADDED_MORE, STALLS_FROM))
def test_attempts_that_hang_and_no_others_are_reported_and_ended(seed: int) -> None:
    Stalls(seed).run()


@pytest.mark.parametrize("seed", seeds(SLEEPERS_OFTEN, SLEEPERS_MORE, SLEEPERS_FROM))
def test_services_that_sleep_share_no_gpu_lose_no_call_and_each_has_its_turn(seed: int) -> None:
    found = failure_of_sleepers(seed)
    assert not found, f"{found}\npython -m tests.release.workloads.sleepers --seeds 1 --from {seed}"


class Forgetting(World):
    """A world whose scheduler loses the whole queue before each rest."""

    def rest(self) -> None:
        self.drive.engine.queue.groups.clear()
        self.drive.checks = False
        super().rest()


def test_a_job_that_the_queue_has_lost_is_seen_by_the_reference() -> None:
    """Here `validate` and the comparison of the queue are switched off: the reference alone has to see it."""
    plan = made(0)._replace(
        steps=[
            Step("join", {"name": "w0", "spec": {"models": ["Tesla T4"]}}),
            Step("submit", {"tenant": "t", "job": "a", "fields": {"gpu": {}, "run": {"driver": "noop"}}}),
            Step("tick", {"ms": 1}),
            Step("submit", {"tenant": "t", "job": "b", "fields": {"gpu": {}, "run": {"driver": "noop"}}}),
            Step("tick", {"ms": 1}),
            Step("tick", {"ms": 1}),
            Step("work", {"salt": 0, "percent": 100, "code": 0}),
            Step("rest", {}),
        ]
    )
    assert failure(plan) == ""
    found = failure(plan, world=Forgetting(plan))
    assert found.startswith("t/b/0 waits, and could start (1xany)"), found
    assert "t/b/0 waits (and could start), and a new leader starts it" in found


def test_a_new_leader_knows_of_the_same_runs_whatever_numbers_the_shapes_have() -> None:
    """The old one met other shapes first, of which nothing is left in the state."""
    world = World(made(0)._replace(settings={"ended_max": 0}))
    drive, run = world.drive, {"driver": "noop", "argv": ["a"]}
    worker = drive.worker("w0", 4)
    for count in (4, 2, 1):
        drive.submit(f"j{count}", gpu={"count": count}, run=run)
        drive.settle()
        drive.pass_time(10_000 * count)
        worker.finish(next(iter(worker.held)), 0)
        drive.settle()
    drive.submit("now", gpu={"count": 1}, run=run)
    drive.settle()
    new, now_ms = new_leader._lead(world), drive.state.time_ms
    old_ends, new_ends = (
        [one.engine.estimates.end_ms(attempt, now_ms) for attempt in one.state.attempts()] for one in (drive, new)
    )
    assert new_ends == old_ends
    assert now_ms < (old_ends[0] or 0) <= now_ms + 10_100, "of its own shape, not of all"


def test_a_failing_case_is_shrunk_to_the_steps_that_matter() -> None:
    plan = made(1)
    plan = plan._replace(steps=[*plan.steps[:20], Step("no such step", {}), *plan.steps[20:40]])
    assert shrink(plan).steps == [Step("no such step", {})]
    log: list[str] = []
    assert "no_such_step" in failure(shrink(plan), log)
    assert "no such step" in log[0]


def test_a_plan_is_the_same_for_a_seed_and_every_theme_has_its_turn() -> None:
    assert made(17) == made(17)
    assert {made(seed).theme for seed in range(len(THEMES))} == set(THEMES)
    assert {made(ADDED_FROM + seed).theme for seed in range(len(ADDED))} == set(ADDED)
    assert {made(LENT_FROM + seed).theme for seed in range(len(LENT))} == set(LENT)
    assert {made(BEHIND_FROM + seed).theme for seed in range(len(BEHIND))} == set(BEHIND)
    assert {made(LABELLED_FROM + seed).theme for seed in range(len(LABELLED))} == set(LABELLED)
    assert {made(RANGES_FROM + seed).theme for seed in range(len(RANGES))} == set(RANGES)


def test_a_run_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    with closing(Passed(tmp_path / "kept", anew=False)) as passed:
        passed.add(3)
        passed.add(14)
    with (tmp_path / "kept").open("a") as kept:
        kept.write("15")  # 159, cut off
    with closing(Passed(tmp_path / "kept", anew=False)) as passed:
        passed.add(4)
    with closing(Passed(tmp_path / "kept", anew=False)) as passed:
        assert passed.seeds == {3, 4, 14}
    with closing(Passed(tmp_path / "kept", anew=True)) as passed:
        assert passed.seeds == set()


def test_the_reference_knows_no_earlier_than_the_scheduler_that_a_device_is_well_again() -> None:
    """A worker says so with its next renewal: until then a job may end another one, though the device would do."""
    asked = {"gpu": {}, "run": {"driver": "noop"}}
    plan = made(0)._replace(
        settings={"preempt_priority": 60, "preempt_after": 0.5, "reserve_after": 1},
        steps=[
            Step("join", {"name": "w0", "spec": {"models": ["Tesla T4"]}}),
            Step("join", {"name": "w1", "spec": {"models": ["Tesla T4"]}}),
            Step("sick", {"worker": 1, "slot": 0}),
            Step("tick", {"ms": 2_000}),
            Step("submit", {"tenant": "t", "job": "low", "fields": asked | {"priority": 10}}),
            Step("tick", {"ms": 1}),
            Step("tick", {"ms": 1}),
            Step("sick", {"worker": 1, "slot": 0}),
            Step("submit", {"tenant": "t", "job": "high", "fields": asked | {"priority": 90}}),
            Step("tick", {"ms": 1}),
            Step("tick", {"ms": 1_500}),
        ],
    )
    log: list[str] = []
    assert failure(plan, log) == ""
    assert any("t/low/0 ENDING on w0: preempted by job high" in line for line in log), log


def test_a_gang_that_only_a_reservation_keeps_from_whole_room_is_told_so() -> None:
    """Outside of the reserved hosts a part of it would fit."""
    assert failure(made(101_526)) == ""
