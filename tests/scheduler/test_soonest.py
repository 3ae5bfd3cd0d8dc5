"""What cannot start in time is refused at once: only when even the shortest runs of their kind would end too late."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.core.schedule import soonest
from moorage.scheduler.core.schedule.soonest import SAMPLES_SURE
from tests.scheduler.driving import Driving
from tests.scheduler.test_forecast import MINUTE, learned, submit


def full(runs: int = SAMPLES_SURE, gpus: int = 1) -> Driving:
    """A fleet that a workload of ten minutes holds for four minutes already."""
    drive = Driving()
    drive.worker("w0", gpus)
    learned(drive, [10] * runs)
    for number in range(gpus):
        submit(drive, f"runs-{number}")
    drive.now += 4 * MINUTE
    drive.renew()
    return drive


def asked(drive: Driving, name: str, within_s: float, **fields: Any) -> dict[str, Any]:
    return drive.submit(name, start_within_s=within_s, **{"gpu": {}, **fields})


def test_below_the_shortest_run_it_is_refused_and_above_it_is_not() -> None:
    drive = full()
    refused = asked(drive, "late", 300)
    assert (refused["code"], refused["field"], refused["fault"]) == (
        "cannot-start-in-time",
        "$.start_within_s",
        "fleet",
    )
    assert drive.state.job("t", "late") is None
    assert asked(drive, "fine", 420)["kind"] == "accepted"
    assert asked(drive, "no-bound", 420)["kind"] == "accepted"


def test_with_too_few_runs_seen_nothing_is_sure() -> None:
    assert asked(full(SAMPLES_SURE - 1), "late", 1)["kind"] == "accepted"


def test_what_may_be_preempted_is_counted_as_gone() -> None:
    assert asked(full(), "urgent", 1, priority=90)["kind"] == "accepted"


def test_a_worker_that_may_open_at_any_moment_bounds_nothing() -> None:
    drive = full()
    drive.worker("w1", 1)
    drive.operate("cordon", "w1")
    assert asked(drive, "late", 1)["kind"] == "accepted"


def test_a_gang_waits_for_the_last_one_it_needs_and_a_single_for_the_first() -> None:
    drive = full(gpus=2)
    drive.run_out("w0")
    submit(drive, "old")
    drive.now += 5 * MINUTE
    drive.renew()
    submit(drive, "new")
    # the shortest run seen is now one of four minutes, and of those that lasted five minutes one of ten
    assert asked(drive, "one", 270)["kind"] == "accepted"
    assert asked(drive, "two", 270, replicas=2, gpu={"scheduling": "gang"})["code"] == "cannot-start-in-time"


def test_from_the_durable_queue_it_is_rejected_by_event() -> None:
    drive = full()
    drive.submit("late", gpu={}, start_within_s=300, sequence=5)
    job = drive.job("late")
    assert job.state == "REJECTED"
    assert "could start in" in job.story[-1][8]


def test_what_fits_now_is_never_refused() -> None:
    drive = full(gpus=2)
    drive.cancel("runs-0")
    drive.settle()
    assert asked(drive, "now", 0)["kind"] == "accepted"
    assert drive.states("now") == ["PLACED"]


def test_whoever_asks_in_ever_other_shapes_takes_little_of_the_leaders_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One look a shape and second is a walk over thousands of members; there are more shapes than any cache holds."""
    drive = full()
    monkeypatch.setattr(soonest, "LOOKED_A_SECOND_MAX", 4)  # a host with a member counts two
    drive.now += 1_000
    drive.renew()
    kinds = [asked(drive, f"late-{n}", 1, resources={"memory_mib": n})["kind"] for n in range(1, 5)]
    assert kinds == ["error", "error", "accepted", "accepted"]
    drive.now += 1_000
    drive.renew()
    assert asked(drive, "later", 1, resources={"memory_mib": 5})["kind"] == "error"
