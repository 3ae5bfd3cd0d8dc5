"""Of a batch of which nobody has run yet, one goes ahead of a reservation at even odds: it tells about the others."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.core.decide import filling
from moorage.scheduler.core.decide.filling import PROBES_A_HOST
from moorage.scheduler.core.queueing.durations import SIBLINGS_MS
from moorage.scheduler.core.queueing.reserve import PATIENCE_MS
from tests.scheduler.driving import Driving

#: of five earlier runs three took a minute, and two hours
RAN_MS = (60_000, 60_000, 60_000, 7_200_000, 7_200_000)


def reserved(seconds: float = 600) -> Driving:
    """A host of eight, half of it leased for `seconds`, a job for eight that is out of patience, and a past."""
    drive = Driving()
    drive.worker("w0", 8)
    drive.submit("runs", gpu={"count": 4}, run={"driver": "noop", "timeout_s": seconds, "grace_s": 0})
    drive.settle()
    engine = drive.engine
    for gpus in (1, 2):  # of some other workload: who has no runs of its own is judged by them
        drive.submit(f"past-{gpus}", gpu={"count": gpus})
        for ms in RAN_MS:
            engine.durations.observe("t", "of-old", engine.shape_of(drive.job(f"past-{gpus}")), ms, -2 * SIBLINGS_MS)
        drive.cancel(f"past-{gpus}")
    drive.settle()
    drive.submit("big", gpu={"count": 8}, priority=50)
    drive.pass_time(PATIENCE_MS + 2_000)
    assert engine.planner.holding.reservation is not None
    return drive


def ask(drive: Driving, name: str, workload: str = "sweep", **fields: Any) -> str:
    """Ask for two GPUs, for as long as it takes; its state."""
    run = {"driver": "noop", "grace_s": 0}
    drive.submit(name, **{"gpu": {"count": 2}, "run": run, "labels": {"workload": workload}, "priority": 50, **fields})
    return drive.states(name)[0]


def test_one_of_a_batch_goes_ahead_and_the_others_by_what_it_tells() -> None:
    drive = reserved()
    assert [ask(drive, name) for name in "abc"] == ["PLACED", "QUEUED", "QUEUED"]
    drive.settle()
    drive.pass_time(60_000)
    assert [drive.states(name)[0] for name in "bc"] == ["QUEUED", "QUEUED"]
    (mine,) = [key for key in drive.workers["w0"].held if key[1] == "a"]
    drive.workers["w0"].finish(mine)
    drive.settle()
    drive.pass_time(2_000)
    assert [drive.states(name)[0] for name in "bc"] == ["PLACED", "PLACED"]


def test_a_batch_that_turns_out_long_lets_nobody_else_in() -> None:
    drive = reserved(7_200)
    assert [ask(drive, name) for name in "abc"] == ["PLACED", "QUEUED", "QUEUED"]
    drive.settle()
    drive.pass_time(7_000_000, step=10_000)
    assert [drive.states(name)[0] for name in "abc"] == ["RUNNING", "QUEUED", "QUEUED"]


def test_the_replicas_of_one_job_are_a_batch() -> None:
    drive = reserved()
    ask(drive, "many", replicas=3)
    assert sorted(drive.states("many")) == ["PLACED", "QUEUED", "QUEUED"]


def test_what_would_end_too_late_at_even_odds_is_no_probe() -> None:
    drive = reserved(90)
    assert ask(drive, "a") == "QUEUED"


def test_a_reservation_lets_in_so_many_for_each_of_its_hosts() -> None:
    drive = reserved()
    states = [ask(drive, f"j{number}", f"sweep-{number}", gpu={}) for number in range(PROBES_A_HOST + 2)]
    assert states == ["PLACED"] * PROBES_A_HOST + ["QUEUED"] * 2


@pytest.mark.parametrize(("priority", "state"), [(49, "QUEUED"), (50, "PLACED"), (51, "PLACED")])
def test_nobody_of_a_lower_class_goes_ahead_at_even_odds(priority: int, state: str) -> None:
    drive = reserved()
    assert ask(drive, "a", priority=priority) == state


def test_under_fair_share_nobody_does() -> None:
    drive = reserved()
    drive.order("share", tenant="t", weight=1)
    assert ask(drive, "a") == "QUEUED"


@pytest.mark.interpreted
def test_a_pass_asks_so_many_whether_they_might(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "ASKED_MAX", 2)
    drive = reserved()
    asked: list[str] = []

    def in_vain(tenant: str, *rest: Any) -> None:
        asked.append(tenant)

    monkeypatch.setattr(drive.engine.estimates, "even_ms", in_vain)
    for number in range(4):
        drive.offer_submit(f"j{number}", gpu={}, run={"driver": "noop"}, labels={"workload": f"s{number}"}, priority=50)
    drive.tick()
    assert len(asked) == 2


def test_whose_sibling_has_run_is_no_probe() -> None:
    """It took an hour: what half of all others took is no hope."""
    drive = reserved()
    assert ask(drive, "b", gpu={"count": 1}, labels={"workload": "other"}) == "PLACED"
    engine = drive.engine
    drive.submit("c", gpu={"count": 2}, labels={"workload": "sweep"}, priority=40)
    engine.durations.observe("t", "sweep", engine.shape_of(drive.job("c")), 3_600_000, drive.now)
    assert ask(drive, "a") == "QUEUED"
