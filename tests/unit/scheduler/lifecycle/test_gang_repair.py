"""A gang that has lost a rank: the hosts of the others are kept for it for a while, and all start again."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.lifecycle.gang_worlds import each_has_its_turn, is_whole


def running(repair_s: float = 120.0, ranks: int = 3, **fields: Any) -> Driving:
    """A gang with a rank on each of so many hosts, and others that wait for any GPU."""
    drive = Driving.with_hosts(*[1] * ranks)
    drive.submit("g", replicas=ranks, gpu={"scheduling": "gang"}, repair_s=repair_s, **fields)
    drive.settle()
    assert drive.states("g") == ["RUNNING"] * ranks
    for number in range(9):
        drive.submit(f"s{number}", gpu={})
    return drive


def lose(drive: Driving, name: str) -> None:
    """A worker is silent until it counts as lost, and the others renew meanwhile."""
    for _ in range(60):
        drive.renew(*(each for each in drive.workers if each != name))
        drive.pass_time(1_000, renew=False)
        if drive.state.workers[name].session == "":
            break
    del drive.workers[name]
    drive.settle()


def others(drive: Driving) -> int:
    return sum(drive.states(f"s{number}") != ["QUEUED"] for number in range(9))


@pytest.mark.parametrize("lead", [False, True])
def test_its_hosts_take_no_other_job_until_it_starts_again_as_one_attempt(lead: bool) -> None:
    drive = running()
    lose(drive, "w1")
    assert drive.states("g") == ["QUEUED"] * 3
    drive.pass_time(30_000)
    assert others(drive) == 0
    told = drive.explained("g")
    assert told["reason"] == "gang-size"
    assert told["because"].endswith("; w0, w2 are kept for it, as it has lost a rank")
    assert drive.explained("s0")["reason"] == "reserved"
    if lead:
        drive.lead()
        drive.renew()
        drive.pass_time(5_000)
        assert others(drive) == 0
    drive.worker("w3", 1)
    drive.settle()
    assert (drive.states("g"), others(drive)) == (["RUNNING"] * 3, 0)
    assert {drive.attempt("g", index).no for index in range(3)} == {2}
    assert set(drive.placed_on("g")) == {"w0", "w2", "w3"}
    for worker in drive.workers:
        drive.run_out(worker)
    drive.settle()
    assert others(drive) == 3, "its hosts are open again"


@pytest.mark.parametrize("repair_s", [0.0, 60.0])
def test_after_that_time_others_start_there(repair_s: float) -> None:
    drive = running(repair_s)
    lose(drive, "w1")
    drive.pass_time(int(repair_s * 1000) + 5_000)
    drive.settle()
    assert others(drive) == 2


def test_a_cancel_opens_them_and_so_does_the_last_try() -> None:
    drive = running()
    lose(drive, "w1")
    drive.cancel("g")
    drive.pass_time(2_000)
    assert others(drive) == 2
    drive = running(retries_on_lost=0)
    lose(drive, "w1")
    drive.pass_time(2_000)
    assert (drive.job("g").state, others(drive)) == ("FAILED", 2)


def test_a_failure_keeps_none() -> None:
    drive = running(retries=1)
    drive.run_out("w1", 7)
    drive.pass_time(500, step=100)
    drive.settle()
    assert others(drive) == 3


def test_it_is_of_gangs() -> None:
    drive = Driving.with_hosts(1)
    answer = drive.submit("a", gpu={}, repair_s=5.0)
    assert (answer["code"], answer["field"]) == ("invalid-argument", "$.repair_s")


@pytest.mark.parametrize("seed", range(2))
def test_random_losses(seed: int) -> None:
    """Gangs are whole or wait whole, hosts come back to all in the end, and each attempt has one number."""
    rng = random.Random(seed)
    drive = Driving.with_hosts(*[2] * 4)
    names, hosts = list[str](), 4
    for step in range(80):
        if rng.random() < 0.3 and len(names) < 20:
            names.append(f"g{step}")
            gang = {"gpu": {"scheduling": "gang"}, "repair_s": rng.choice((0.0, 15.0, 60.0)), "retries_on_lost": 5}
            drive.submit(names[-1], replicas=rng.randint(1, 4), **gang if rng.random() < 0.6 else {"gpu": {}})
        did = rng.random()
        if did < 0.06 and len(drive.workers) > 2:
            lose(drive, rng.choice(list(drive.workers)))
        elif did < 0.12 and len(drive.workers) < 4:
            drive.worker(f"w{hosts}", 2)
            hosts += 1
        elif did < 0.4:
            drive.run_out(rng.choice(list(drive.workers)))
        elif did < 0.44:
            drive.take_snapshot()
            rng.choice((drive.lead, drive.lead_from_snapshot))()
            drive.renew()
        elif did < 0.47 and names:
            drive.cancel(rng.choice(names))
        drive.pass_time(2_000)
        drive.settle()
        for name in names:
            job = drive.state.job("t", name)
            if job is not None and job.gang and not job.over:
                is_whole(job)
                assert len({row.attempt_no for row in job.rows.values()}) == 1
    while len(drive.workers) < 4:
        drive.worker(f"w{hosts}", 2)
        hosts += 1
    each_has_its_turn(drive, names)
    assert not drive.state.preempting
