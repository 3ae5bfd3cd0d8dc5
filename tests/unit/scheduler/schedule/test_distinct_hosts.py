"""Gangs on distinct hosts: placed, planned, preempted for and explained with one rank a host, never with more."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.schemas.gpu import GpuSpec, Scheduling
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.queries.test_plan_verb import planned
from tests.unit.scheduler.schedule.test_preemption import ON, urgent

APART = {"scheduling": "gang", "distinct_hosts": True}
PAIR: dict[str, Any] = {"gpu": APART | {"count": 2}, "replicas": 2}


def fleet(hosts: int, gpus: int = 8, config: Config | None = None) -> Driving:
    return Driving.with_hosts(*[gpus] * hosts, config=config)


@pytest.mark.parametrize("ranker", ["pack", "fragments"])
@pytest.mark.parametrize("gpu", [{}, {"sharing": "time-slice"}, {"sharing": "time-slice", "count": 1}])
def test_each_rank_has_a_host_of_its_own_where_all_would_fit_on_one(ranker: str, gpu: dict[str, Any]) -> None:
    asks: dict[str, Any] = {"gpu": {"count": 2, "scheduling": "gang"} | gpu, "replicas": 3}
    drive = fleet(4, config=Config(ranker=ranker))
    drive.submit("near", **asks)
    assert len(set(drive.placed_on("near"))) == 1
    drive.submit("apart", gpu=asks["gpu"] | APART, replicas=3)
    assert len(set(drive.placed_on("apart"))) == 3


def test_it_waits_for_a_second_host_beside_one_with_room_for_all_and_starts_when_that_opens() -> None:
    drive = fleet(2)
    drive.submit("runs", gpu={"count": 8})
    drive.settle()
    drive.submit("apart", **PAIR)
    assert drive.states("apart") == ["QUEUED", "QUEUED"]
    told = drive.explained("apart")
    assert (told["reason"], told["because"]) == ("gang", "room for 1 of its 2 replicas, each on a host of its own")
    near = drive.fixes("apart")[0]
    assert (near["say"], near["gpu"], near["gang"]) == ("several replicas on one host", "2x2xany", True)
    assert near["request"] == {"gpu": {"count": 2, "scheduling": "gang"}}
    drive.run_out(drive.placed_on("runs")[0])
    assert sorted(drive.placed_on("apart")) == ["w0", "w1"]


@pytest.mark.parametrize("gpu", [{"count": 2}, {"sharing": "mps"}, {"sharing": "mps", "count": 2}])
def test_more_ranks_than_hosts_are_refused_or_wait_and_say_why(gpu: dict[str, Any]) -> None:
    drive = fleet(2)
    three: dict[str, Any] = {"gpu": APART | gpu, "replicas": 3}
    refused = drive.submit("never", on_no_match="reject", **three)
    assert refused["code"] == "failed-precondition"
    assert "would hold 2 of its 3 replicas at once, each on a host of its own" in refused["message"]
    drive.submit("waits", **three)
    told = drive.explained("waits")
    assert (told["reason"], told["because"]) == (
        "gang-size",
        "empty, they would hold 2 of its 3, each on a host of its own",
    )
    drive.worker("w2", 2)
    drive.settle()
    assert sorted(drive.placed_on("waits")) == ["w0", "w1", "w2"]


@pytest.mark.slow
def test_plan_says_what_then_happens() -> None:
    drive = fleet(2)
    assert sorted(place.worker for place in planned(drive, PAIR).places) == ["w0", "w1"]
    drive.submit("runs", gpu={"count": 7})
    drive.settle()
    assert planned(drive, PAIR).starts != "now"


def test_jobs_end_for_it_on_as_many_hosts_as_it_needs_and_no_more() -> None:
    drive = fleet(3, 2, ON)
    for number in range(6):
        drive.submit(f"j{number}", gpu={})
        drive.settle()
        drive.pass_time(1_000)
    drive.pass_time(70_000)
    urgent(drive, gpu=APART, replicas=2)
    drive.settle()
    ended = [f"j{number}" for number in range(6) if drive.states(f"j{number}") != ["RUNNING"]]
    drive.pass_time(2_000)
    drive.settle()
    assert (drive.states("urgent"), len(ended)) == (["RUNNING", "RUNNING"], 2)
    assert len(set(drive.placed_on("urgent"))) == 2


def test_hosts_are_reserved_for_it_as_they_come_free_one_by_one() -> None:
    drive = fleet(2, 4, Config(reserve_after=30.0))
    for host in range(2):
        drive.submit(f"runs{host}", gpu={"count": 4}, run={"driver": "noop", "timeout_s": 100 + 100 * host})
    drive.settle()
    drive.submit("apart", **PAIR)
    drive.pass_time(40_000)
    held = drive.reservation
    assert len(held.hosts) == 2
    drive.run_out(drive.placed_on("runs0")[0])
    drive.submit("small", gpu={}, run={"driver": "noop", "timeout_s": 3_600})
    drive.settle()
    assert drive.states("small") == ["QUEUED"]


@pytest.mark.parametrize("scheduling", [None, "spread", "best-effort"])
def test_only_a_gang_has_distinct_hosts(scheduling: Scheduling | None) -> None:
    trouble = GpuSpec(scheduling=scheduling, distinct_hosts=True).trouble
    assert trouble is not None
    assert (trouble.field, trouble.allowed) == ("gpu.distinct_hosts", "scheduling gang, or false")
