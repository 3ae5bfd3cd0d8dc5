"""What cannot start in time is refused at once: only when even the shortest runs of their kind would end too late."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.schedule import soonest
from moorage.scheduler.core.schedule.soonest import SAMPLES_SURE
from moorage.schemas.capabilities import Capabilities
from tests.scheduler.driving import Driving
from tests.scheduler.queries.test_forecast import MINUTE, learned, submit


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


@pytest.mark.parametrize("ends", [{"run": {"timeout_s": 250}}, {"deadline_s": 250}, {"cancelled": True}, {}])
def test_no_job_is_expected_to_outlive_its_time_limit_its_deadline_or_its_cancel(ends: dict[str, Any]) -> None:
    """The shortest run seen is one of ten minutes; this one has lasted for four, and ends ten seconds later."""
    drive = Driving()
    worker = drive.worker("w0", 1)
    learned(drive, [10] * SAMPLES_SURE)
    ends = dict(ends)
    run, cancelled = {"driver": "noop", "argv": ["train"], **ends.pop("run", {})}, ends.pop("cancelled", False)
    drive.submit("runs", gpu={}, run=run, **ends)
    drive.settle()
    drive.now += 4 * MINUTE
    drive.renew()
    worker.auto = False
    if cancelled:
        drive.cancel("runs")
    assert drive.states("runs") == ["CANCELLING" if cancelled else "RUNNING"]
    ends_soon = cancelled or bool(ends) or "timeout_s" in run
    assert asked(drive, "next", 60).get("code") == (None if ends_soon else "cannot-start-in-time")


@pytest.mark.parametrize("taken", [True, False])
def test_a_device_in_other_use_bounds_nothing_since_it_may_be_free_at_any_moment(taken: bool) -> None:
    drive = Driving()
    drive.worker("w0", 1)
    learned(drive, [10] * SAMPLES_SURE)
    submit(drive, "runs")
    other = drive.worker("w1", 1, drivers=["noop" if taken else "process"])
    other.local.add(0)
    drive.renew()
    assert asked(drive, "next", 1).get("code") == (None if taken else "cannot-start-in-time")


def test_a_job_that_may_be_frozen_for_a_guest_bounds_nothing() -> None:
    drive = Driving()
    able = Capabilities(freezes=True, guests=True)
    drive.worker("w0", 1, capabilities={"noop": able})
    learned(drive, [10] * SAMPLES_SURE)
    submit(drive, "runs")
    assert asked(drive, "late", 1)["code"] == "cannot-start-in-time"
    assert asked(drive, "guest", 1, guest=True)["kind"] == "accepted"


def test_where_guaranteed_gpus_may_be_taken_back_nothing_is_sure() -> None:
    drive = Driving(Config(reclaim=True))
    drive.worker("w0", 1)
    learned(drive, [10] * SAMPLES_SURE)
    submit(drive, "borrows")
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
