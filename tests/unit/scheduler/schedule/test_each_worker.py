"""A job for each worker: one replica on each that fits, also on those that join later, and never on another one."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from moorage.scheduler.answers.views import replicas_of
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.rank.ranker import Pack
from tests.unit.scheduler.driving import Driving


def on(drive: Driving, name: str) -> dict[str, int]:
    """Return how many attempts of a job began on each worker."""
    placed = (row for row in drive.job(name).history if row[4] == 1)
    return dict(Counter(drive.state.worker_by_num[row[5]].id for row in placed))


def fleet(*gpus: int, config: Config | None = None, **more: Any) -> Driving:
    drive = Driving(config)
    for number, count in enumerate(gpus):
        drive.worker(f"w{number}", count, **more)
    return drive


def test_each_worker_that_fits_runs_it_once_and_so_does_one_that_joins_later() -> None:
    drive = Driving()
    drive.worker("old", 1, labels={"zone": "a"})
    drive.worker("big", 4, labels={"zone": "a"})
    drive.worker("apart", 4, labels={"zone": "b"})
    drive.submit("warm", gpu={}, requires={"zone": ["a"]}, each_worker=True)
    drive.settle()
    assert on(drive, "warm") == {"old": 1, "big": 1}
    for name in ("old", "big"):
        drive.run_out(name)
    assert (drive.job("warm").state, drive.job("warm").counts) == ("QUEUED", {"SUCCEEDED": 2})
    told = drive.explained("warm")
    assert (told["reason"], told["because"]) == ("each-worker", "it has begun on 2 workers")
    drive.worker("new", 1, labels={"zone": "a"})
    drive.worker("other", 1, labels={"zone": "b"})
    drive.settle()
    assert on(drive, "warm") == {"old": 1, "big": 1, "new": 1}
    assert drive.job("warm").counts == {"RUNNING": 1, "SUCCEEDED": 2}
    drive.cancel("warm")
    drive.settle()
    assert (drive.job("warm").state, drive.job("warm").counts) == ("CANCELLED", {"SUCCEEDED": 2, "CANCELLED": 1})
    number = drive.state.workers["new"].num
    assert replicas_of(drive.job("warm")).ended == {"CANCELLED": str(number)}


def test_a_new_leader_counts_it_as_one_arrival_as_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as one for each worker that may ever join: rankers weigh what comes by how much of it has come."""
    arrivals = list[int]()
    monkeypatch.setattr(Pack, "arrived", lambda _, shape, replicas: arrivals.append(replicas))
    drive = fleet(1, config=Config(ranker="pack"))
    drive.submit("monitor", gpu={}, each_worker=True)
    drive.submit("sweep", gpu={}, replicas=3)
    drive.settle()
    drive.lead()
    assert arrivals == [1, 3, 1, 3]


def test_once_is_for_the_workers_of_now_and_ends_with_the_last_of_them() -> None:
    drive = fleet(1, 1)
    drive.submit("check", each_worker="once", resources={"cpu_milli": 1000})
    drive.settle()
    drive.worker("late")
    drive.settle()
    for name in ("w0", "w1"):
        drive.run_out(name)
    assert (drive.job("check").state, on(drive, "check")) == ("SUCCEEDED", {"w0": 1, "w1": 1})


@pytest.mark.parametrize("did", ["ran", "waits", "was never there"])
def test_what_waits_for_a_worker_that_an_operator_has_forgotten_ends_and_a_job_for_once_with_it(did: str) -> None:
    drive = fleet(1, 1)
    if did != "ran":
        drive.operate("cordon", "w1")
    drive.submit("check", each_worker="once", gpu={}, retries_on_lost=9)
    drive.submit("stands", each_worker=True, gpu={}, retries_on_lost=9)
    drive.submit("other", gpu={}, replicas=9, run={"driver": "process", "argv": ["each_worker"]})
    drive.settle()
    if did == "was never there":
        drive.run_out("w0")
    drive.workers["w1"].die()
    drive.pass_time(60_000)
    assert drive.job("check").live
    assert drive.operate("forget", "w1", why="sold")["changed"]
    drive.pass_time(5_000)
    for _ in range(3):
        drive.run_out("w0")
    assert drive.job("check").counts == {"SUCCEEDED": 1, "CANCELLED": 1}
    assert drive.job("check").over
    assert "its worker is gone for good" in [row[8] for row in drive.job("check").history]
    assert "its worker is gone for good" in [row[8] for row in drive.job("stands").history]
    assert drive.job("other").counts.get("CANCELLED", 0) == 0
    drive.worker("w2")
    drive.settle()
    drive.run_out("w2")
    assert on(drive, "stands")["w2"] == 1, "it goes on for those that join"


@pytest.mark.parametrize("began", [True, False])
def test_what_waits_for_workers_that_are_away_is_told_by_their_names(began: bool) -> None:
    drive = fleet(1, 1, 1)
    if not began:
        drive.operate("cordon", "w1")
    drive.submit("check", each_worker="once", gpu={}, retries_on_lost=9)
    drive.submit("stands", each_worker=True, gpu={}, retries_on_lost=9)
    drive.settle()
    drive.workers["w1"].die()
    drive.pass_time(60_000)
    for _ in range(3):
        drive.run_out("w0")
        drive.run_out("w2")
    drive.settle()
    told, waits = drive.explained("check"), "it waits for w1 to come back, or until an operator forgets such a worker"
    assert (told["reason"], told["because"]) == ("each-worker", f"it has begun on 2 workers; {waits}")
    assert drive.explained("stands")["because"] == "it has begun on 2 workers"


def test_once_without_a_worker_is_for_the_first_that_joins() -> None:
    drive = Driving()
    drive.submit("check", gpu={}, each_worker="once")
    for name in ("first", "second"):
        drive.worker(name)
        drive.settle()
    drive.run_out("first")
    assert (drive.job("check").state, on(drive, "check")) == ("SUCCEEDED", {"first": 1})


def test_it_waits_for_a_worker_that_is_full_while_others_have_room() -> None:
    drive = fleet(1, 8)
    drive.submit("full", gpu={}, priority=60)
    drive.submit("next", gpu={"count": 7}, priority=60)
    drive.settle()
    assert (drive.placed_on("full"), drive.placed_on("next")) == (["w0"], ["w1"])
    drive.submit("warm", gpu={}, each_worker=True)
    drive.settle()
    drive.run_out("w1")
    told = drive.explained("warm")
    assert (told["reason"], told["waiting_replicas"], on(drive, "warm")) == ("busy", 1, {"w1": 1})
    drive.run_out("w0")
    assert on(drive, "warm") == {"w0": 1, "w1": 1}


def test_a_replica_that_failed_or_was_drained_runs_again_on_its_own_worker() -> None:
    drive = fleet(2, 2)
    drive.submit("warm", gpu={}, each_worker=True, retries=1)
    drive.settle()
    drive.run_out("w0", code=1)
    drive.pass_time(30_000)
    drive.settle()
    assert on(drive, "warm") == {"w0": 2, "w1": 1}
    drive.operate("drain", "w1", within_s=0.0)
    drive.settle()
    drive.pass_time(5_000)
    drive.settle()
    assert on(drive, "warm") == {"w0": 2, "w1": 1}
    drive.operate("uncordon", "w1")
    drive.pass_time(5_000)
    drive.settle()
    assert on(drive, "warm") == {"w0": 2, "w1": 2}


def test_jobs_of_one_shape_do_not_wait_for_each_other() -> None:
    drive = fleet(1, 1)
    for name in ("a", "b"):
        drive.submit(name, each_worker=True, resources={"cpu_milli": 1000})
    drive.settle()
    assert on(drive, "a") == on(drive, "b") == {"w0": 1, "w1": 1}
    drive.submit("c", each_worker=True, resources={"cpu_milli": 1000})
    drive.settle()
    assert on(drive, "c") == {"w0": 1, "w1": 1}


def test_a_new_leader_and_a_snapshot_start_nothing_twice() -> None:
    drive = fleet(2, 2)
    drive.submit("warm", gpu={}, each_worker=True)
    drive.settle()
    drive.run_out("w0")
    drive.take_snapshot()
    drive.lead_from_snapshot()
    drive.pass_time(20_000)
    drive.worker("new", 2)
    drive.settle()
    assert on(drive, "warm") == {"w0": 1, "w1": 1, "new": 1}


@pytest.mark.parametrize(
    "fields",
    [{"replicas": 2}, {"indices": "1-4"}, {"gpu": {"scheduling": "spread"}}, {"spread_over": "zone"},
     {"start_within_s": 5}, {"run": {"argv": ["a"], "items": [1]}}],
)  # fmt: skip
def test_what_does_not_go_with_it_is_refused(fields: dict[str, Any]) -> None:
    told = fleet(1).submit("warm", each_worker=True, **{"gpu": {}, **fields})
    assert told["code"] == "invalid-argument"
    assert "each_worker" in told["message"]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_in_random_worlds_each_living_worker_that_fits_ran_it_once(seed: int) -> None:
    dice = random.Random(seed)
    drive = fleet(2, 2, 2)
    drive.submit("warm", gpu={}, each_worker=True, retries_on_lost=1000)
    drive.submit("light", resources={"cpu_milli": 1000}, each_worker=True, max_running=2)
    names = ["warm", "light"]
    for at in range(60):
        act = dice.choice(("join", "end", "end", "kill", "drain", "open", "other", "snapshot"))
        here = [name for name, worker in drive.workers.items() if worker.session]
        if act == "join" and len(drive.workers) < 9:
            drive.worker(f"n{at}", dice.choice((1, 2)))
        elif act == "end" and here:
            drive.run_out(dice.choice(here))
        elif act == "kill" and here:
            gone = dice.choice(here)
            drive.workers[gone].die()
            drive.pass_time(60_000) if dice.random() < 0.5 else None
            drive.join(drive.workers[gone])
        elif act == "snapshot":
            drive.take_snapshot()
            drive.lead_from_snapshot()
        elif act == "drain" and here:
            drive.operate("drain", dice.choice(here), within_s=0.0)
        elif act == "open" and here:
            drive.operate("uncordon", dice.choice(here))
        elif act == "other":
            drive.submit(f"o{at}", gpu={})
        drive.settle()
    for name, worker in drive.workers.items():
        if worker.session:
            drive.operate("uncordon", name)
    for _ in range(8):
        drive.pass_time(2_000)
        for name, worker in drive.workers.items():
            if worker.session:
                drive.run_out(name)
    for name in names:
        job = drive.job(name)
        assert job.counts == {"SUCCEEDED": len(drive.workers)}
        ended = Counter(drive.state.worker_by_num[row[5]].id for row in job.history if row[4] == 8)
        assert ended == dict.fromkeys(drive.workers, 1)
