"""A worker that keeps cores for its GPUs: jobs without a GPU never have more than the rest."""

from __future__ import annotations

import random
from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from tests.turns import turns
from tests.unit.scheduler.driving import Driving

#: of 16 cores, 3 for each of 4 GPUs
KEEPING: dict[str, Any] = {"cpu_milli": 16_000, "memory_mib": 64_000, "gpu_cpu_milli": 3_000}
LEFT_MILLI = 4_000


def asks(cores: int) -> dict[str, int]:
    return {"cpu_milli": cores * 1_000}


def started(drive: Driving, *names: str) -> list[str]:
    return [name for name in names if drive.states(name) == ["RUNNING"]]


def held_without_gpu(drive: Driving, worker: str = "w0") -> int:
    """The cores, in thousandths, that jobs without a GPU asked for and have on a worker."""
    attempts = next(one for one in drive.state.workers.values() if one.id == worker).attempts.values()
    of = [drive.engine.reader.request_of(each.replica.job) for each in attempts]
    return sum(each.resources.cpu_milli for each in of if each.gpu is None and each.resources is not None)


@pytest.mark.parametrize("ranker", ["pack", "headroom", "fragments"])
def test_jobs_without_a_gpu_have_the_rest_and_gpus_their_cores(ranker: str) -> None:
    drive = Driving.with_hosts(4, 4, config=Config(ranker=ranker), **KEEPING)
    small = [f"s{number}" for number in range(6)]
    for name in small:
        drive.submit(name, resources=asks(2))
    drive.settle()
    assert len(started(drive, *small)) == 4, "two on each host"
    large = [f"g{number}" for number in range(8)]
    for name in large:
        drive.submit(name, gpu={}, resources=asks(3))
    drive.settle()
    assert started(drive, *large) == large, "each GPU has its three cores"
    drive.cancel(started(drive, *small)[0])
    drive.settle()
    assert len(started(drive, *small)) == 4, "the next one has the place of the one that ended"
    assert (held_without_gpu(drive), held_without_gpu(drive, "w1")) == (LEFT_MILLI, LEFT_MILLI)


def test_a_sharer_and_a_job_that_asks_for_no_cores_are_not_kept_from_it() -> None:
    drive = Driving.with_hosts(4, **KEEPING)
    drive.submit("full", resources=asks(4))
    drive.submit("none")
    drive.submit("sharer", gpu={"sharing": "time-slice"}, resources=asks(12))
    drive.settle()
    assert started(drive, "full", "none", "sharer") == ["full", "none", "sharer"]


def test_what_asks_for_more_than_the_rest_is_told_so() -> None:
    drive = Driving.with_hosts(4, **KEEPING)
    answer = drive.submit("five", resources=asks(5))
    drive.settle()
    assert not started(drive, "five")
    assert "4 cores for jobs without a GPU" in str(answer) + str(drive.explained("five"))


def test_slots_that_are_not_lent_keep_nothing() -> None:
    drive = Driving.with_hosts(4, **KEEPING, lent_slots=[0])
    drive.submit("thirteen", resources=asks(13))
    drive.settle()
    assert started(drive, "thirteen")


def test_a_reservation_waits_for_the_ends_of_jobs_without_a_gpu_alone() -> None:
    drive = Driving.with_hosts(4, **KEEPING)
    drive.submit("long", resources=asks(3), run={"argv": ["true"], "timeout_s": 1_000})
    drive.submit("gpu", gpu={"count": 4}, resources=asks(12), run={"argv": ["true"], "timeout_s": 100})
    drive.settle()
    began = drive.state.time_ms
    drive.submit("next", resources=asks(4), run={"argv": ["true"], "timeout_s": 50})
    drive.pass_time(60_000)
    reservation = drive.engine.planner.verdicts.reservation
    assert reservation is not None
    assert reservation.start_ms - began > 900_000, "the end of the job with GPUs frees no core that it may have"


@pytest.mark.parametrize("seed", turns(range(12), often=3, more=4))
def test_never_more_than_the_rest(seed: int) -> None:
    chance, number, live = random.Random(seed), 0, list[str]()
    config = Config(ranker=chance.choice(["pack", "headroom", "fragments"]), preempt_priority=80, preempt_after=1.0)
    drive = Driving.with_hosts(4, 4, config=config, **KEEPING)
    for _ in range(60):
        for _ in range(chance.randrange(3)):
            number += 1
            gpu = {} if chance.random() < 0.5 else {"gpu": {"count": chance.randint(1, 4)}}
            drive.submit(
                f"j{number}", priority=chance.choice((10, 50, 90)), resources=asks(chance.randint(1, 5)), **gpu
            )
            live.append(f"j{number}")
        drive.settle()
        for worker in ("w0", "w1"):
            assert held_without_gpu(drive, worker) <= LEFT_MILLI
        running = started(drive, *live)
        for name in chance.sample(running, min(len(running), 2)):
            drive.cancel(name)
            live.remove(name)
        if chance.random() < 0.1:
            drive.lead()
        drive.pass_time(2_000)
