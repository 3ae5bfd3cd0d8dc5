"""Gangs of no fixed size: they start with as many ranks as have room, from the least number on, and keep that many."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.events import Order
from moorage.schemas.codec import decode_request
from moorage.schemas.operate import act_of
from tests.levels import know_next, raise_level
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.lifecycle.gang_worlds import each_has_its_turn, is_whole


@pytest.fixture(autouse=True)
def _next_level(monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)


def fleet(*gpus: int, auto: bool = True) -> Driving:
    drive = Driving.with_hosts(*gpus, auto=auto)
    raise_level(drive)
    return drive


def put(drive: Driving, name: str, most: int) -> None:
    act = act_of("counter", {"name": name, "most": most, "by": "ana"})
    drive.engine.offer(Order("counter", act, "counter", True))
    drive.tick()


def fail(drive: Driving, code: int = 7) -> None:
    """Rank 0 of the gang fails, and the others end as they are asked."""
    drive.run_out(drive.attempt("g").worker.id, code)
    drive.settle()


def submit(drive: Driving, name: str = "g", least: int = 2, most: int = 4, **fields: Any) -> None:
    drive.submit(name, replicas={"min": least, "max": most}, gpu={"scheduling": "gang"}, **fields)


def test_it_starts_with_as_many_ranks_as_have_room() -> None:
    drive = fleet(1, 1, 1)
    submit(drive)
    drive.settle()
    assert drive.states("g") == ["RUNNING"] * 3
    assert drive.job("g").size == 3


def test_it_waits_until_its_fewest_have_room_and_explain_says_so() -> None:
    drive = fleet(1, 1)
    drive.submit("other", gpu={}, replicas=1)
    submit(drive)
    drive.settle()
    assert drive.states("g") == ["QUEUED"] * 4
    assert drive.explained("g")["because"] == "room for 1 of at least 2 replicas"
    said = [fix["say"] for fix in drive.fixes("g")]
    assert said == ["best effort: what fits starts now, the rest later", "at least 1 replica instead of 2"]
    drive.run_out(drive.attempt("other").worker.id)
    drive.settle()
    assert drive.states("g") == ["RUNNING"] * 2


def test_every_rank_is_told_how_many_there_are() -> None:
    drive = fleet(1, 1, 1, auto=False)
    submit(drive)
    places = [place for frame in drive.wanted for place in frame.place]
    asked = [decode_request(bytes(place.body)) for place in places]
    assert [request.ranks and str(request.ranks) for request in asked] == ["2-3"] * 3
    drive.reports([("claimed", "g", index, 0, "w0.local:29511" if index == 0 else "") for index in range(3)])
    starts = [start for frame in drive.wanted for start in frame.start]
    assert [start.world_size for start in starts] == [3, 3, 3]


def test_it_keeps_its_number_when_it_is_tried_again_also_by_the_next_leader_and_from_a_snapshot() -> None:
    drive = fleet(1, 1, 1)
    submit(drive, retries=5)
    drive.settle()
    drive.worker("w3", 1)
    for lead in (None, drive.lead, drive.lead_from_snapshot):
        fail(drive)
        drive.take_snapshot()
        if lead is not None:
            lead()
        drive.renew()
        drive.pass_time(20_000)
        drive.settle()
        assert drive.states("g") == ["RUNNING"] * 3
    drive.operate("cordon", "w3")
    drive.operate("cordon", "w2")
    fail(drive)
    drive.pass_time(40_000)
    drive.settle()
    assert drive.states("g") == ["QUEUED"] * 3, "it does not start with two"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_one_rank_alone_is_a_gang_too(size: int) -> None:
    drive = fleet(*[1] * size)
    submit(drive, least=1, retries=2)
    drive.settle()
    assert drive.states("g") == ["RUNNING"] * size
    fail(drive)
    drive.pass_time(20_000)
    drive.settle()
    assert drive.states("g") == ["RUNNING"] * size
    for worker in drive.workers:
        drive.run_out(worker)
    drive.settle()
    assert drive.job("g").state == "SUCCEEDED"


@pytest.mark.parametrize(
    ("limits", "fields", "ranks"),
    [
        ({"gpus": 3}, {}, 3),
        ({"cores": 7}, {"resources": {"cpu_milli": 3_000}}, 2),
        ({"memory_mib": 4_000}, {"resources": {"memory_mib": 1_000}}, 4),
        ({"job_gpus": 5}, {}, 5),
        ({"running": 1}, {}, 6),
        ({"running_per_key": 3}, {"fair_key": "ana"}, 3),
    ],
)
def test_no_more_ranks_start_than_its_tenant_may_have(
    limits: dict[str, int], fields: dict[str, Any], ranks: int
) -> None:
    drive = Driving.with_hosts(6, cpu_milli=32_000, memory_mib=65_536)
    raise_level(drive)
    drive.order("limit", **limits)
    submit(drive, most=8, **fields)
    drive.settle()
    assert drive.states("g") == ["RUNNING"] * ranks


def test_counters_bound_it_too() -> None:
    drive = fleet(6)
    put(drive, "matlab", 7)
    submit(drive, most=8, uses={"matlab": 2})
    drive.settle()
    assert drive.states("g") == ["RUNNING"] * 3


def test_it_preempts_for_its_fewest_alone() -> None:
    drive = Driving.with_hosts(1, 1, 1, 1, config=Config(preempt_priority=60, preempt_after=0))
    raise_level(drive)
    for number in range(4):
        drive.submit(f"j{number}", gpu={})
    drive.settle()
    submit(drive, priority=90)
    drive.settle()
    drive.pass_time(60_000)
    drive.settle()
    assert drive.states("g") == ["RUNNING"] * 2
    assert sum(drive.states(f"j{number}") == ["RUNNING"] for number in range(4)) == 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"replicas": {"min": 0, "max": 4}}, "at least one rank"),
        ({"replicas": {"min": 2, "max": 4, "wait_target_ms": 50}}, "takes no calls|a gang takes none"),
        ({"replicas": {"min": 2, "max": 4}, "gpu": {}}, "is for a gang, or follows"),
        ({"replicas": {"min": 2, "max": 4}, "max_running": 2}, "max_running"),
        ({"replicas": {"min": 2, "max": 4}, "run": {"argv": ["a"], "restart": "always"}}, "starts again alone"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], says: str) -> None:
    drive = fleet(1)
    answer = drive.submit("g", **({"gpu": {"scheduling": "gang"}} | fields))
    assert answer["code"] == "invalid-argument"
    assert re.search(says, answer["message"])


def test_below_the_level_it_is_refused_with_what_to_do() -> None:
    drive = Driving.with_hosts(2)
    answer = drive.submit("g", replicas={"min": 1, "max": 2}, gpu={"scheduling": "gang"})
    assert (answer["code"], answer["field"]) == ("failed-precondition", "$.replicas")
    assert "feature-level" in answer["next"]


@pytest.mark.parametrize("seed", range(2))
def test_random_sizes_limits_counters_and_keys(seed: int) -> None:
    """No limit is passed, sizes stay, and all gangs come to an end, whatever fails."""
    rng = random.Random(seed)
    drive = Driving.with_hosts(*[rng.randint(1, 4) for _ in range(4)], cpu_milli=16_000, memory_mib=32_768)
    raise_level(drive)
    drive.order("limit", gpus=rng.choice((0, 5, 8)) or None, cores=rng.choice((0, 9)) or None, running_per_key=4)
    put(drive, "c", 6)
    sizes: dict[str, int] = {}
    for step in range(150):
        if rng.random() < 0.2 and len(sizes) < 30:
            name, least = f"g{step}", rng.randint(1, 2)
            sizes[name] = 0
            fields: dict[str, Any] = {"retries": 3, "fair_key": rng.choice("ab"), "priority": rng.choice((50, 60))}
            if rng.random() < 0.4:
                fields["uses"] = {"c": rng.randint(1, 2)}
            if rng.random() < 0.4:
                fields["resources"] = {"cpu_milli": rng.randint(1, 3) * 1000}
            most = least + rng.randint(0, 3)
            drive.submit(name, replicas={"min": least, "max": most}, gpu={"scheduling": "gang"}, **fields)
        did = rng.random()
        if did < 0.3:
            drive.run_out(f"w{rng.randrange(4)}", rng.choice((0, 0, 7)))
        elif did < 0.34:
            drive.take_snapshot()
            rng.choice((drive.lead, drive.lead_from_snapshot))()
            drive.renew()
        elif did < 0.38 and sizes:
            drive.cancel(rng.choice(list(sizes)))
        drive.pass_time(2_000)
        drive.settle()
        tenant = drive.state.tenants["t"]
        assert not tenant.gpus_max or tenant.gpus <= tenant.gpus_max
        assert tenant.limits is None or not tenant.limits.cores_milli or tenant.held[0] <= tenant.limits.cores_milli
        assert drive.state.used.get("c", 0) <= 6
        for name in sizes:
            job = drive.state.job("t", name)
            if job is not None and job.gang and not job.over:
                assert sizes[name] in (0, job.size), "it keeps its number"
                sizes[name] = job.size
                is_whole(job)
    each_has_its_turn(drive, sizes)
