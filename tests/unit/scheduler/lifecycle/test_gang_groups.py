"""Gangs of unlike parts: all groups are placed in one record or none is, and each rank knows where the groups are."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.schemas.codec import decode_request
from moorage.schemas.errors import Refused
from tests.levels import know_next, raise_level
from tests.unit.scheduler.driving import H100, Driving
from tests.unit.scheduler.lifecycle.gang_worlds import each_has_its_turn, is_whole

L40S = "NVIDIA L40S"
TRAINER = {"name": "trainer", "replicas": 2, "gpu": {"count": 2, "model": "H100"}, "argv": ["train"]}
ROLLOUT = {"name": "rollout", "replicas": 3, "gpu": {"model": "L40S"}, "env": {"MODE": "fast"}}
HEAD = {"name": "head", "resources": {"cpu_milli": 2_000}}
ALL = [TRAINER, ROLLOUT, HEAD]


@pytest.fixture(autouse=True)
def _next_level(monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)


def site(h100: tuple[int, ...] = (4,), l40s: tuple[int, ...] = (2, 2), *, auto: bool = True) -> Driving:
    drive = Driving()
    for name, model, hosts in (("h", H100, h100), ("l", L40S, l40s)):
        for number, gpus in enumerate(hosts):
            drive.worker(f"{name}{number}", gpus, model, auto=auto, cpu_milli=16_000, memory_mib=65_536)
    raise_level(drive)
    return drive


def submit(
    drive: Driving, name: str = "g", groups: list[dict[str, Any]] | None = None, **fields: Any
) -> dict[str, Any]:
    return drive.submit(name, groups=ALL if groups is None else groups, gpu=None, **fields)


def on(drive: Driving, name: str = "g") -> list[str]:
    return [drive.attempt(name, index).worker.id for index in range(drive.job(name).size)]


def test_all_groups_are_placed_in_one_record_each_where_it_fits() -> None:
    drive = site()
    submit(drive)
    drive.settle()
    assert drive.states("g") == ["RUNNING"] * 6
    assert [name[0] for name in on(drive)][:5] == ["h", "h", "l", "l", "l"]
    assert [len(drive.slots("g", index)) for index in range(6)] == [2, 2, 1, 1, 1, 0]
    assert len({drive.attempt("g", index).fence for index in range(6)}) == 1
    host = drive.engine.fleet.hosts[drive.attempt("g", 5).worker.num]
    assert host.cpu_milli - host.cpu_free == 2_000
    for worker in drive.workers:
        drive.run_out(worker)
    drive.settle()
    assert (drive.job("g").state, host.cpu_free) == ("SUCCEEDED", 16_000)


@pytest.mark.parametrize("preempts", [True, False])
def test_a_gang_of_groups_is_told_that_no_job_ends_for_it_where_one_might_for_others(preempts: bool) -> None:
    drive = Driving(config=Config(preempt_priority=60, preempt_after=0) if preempts else Config())
    drive.worker("h0", 4, H100)
    drive.worker("l0", 3, L40S)
    raise_level(drive)
    drive.submit("low", gpu={"count": 4, "model": "H100"}, priority=10)
    drive.settle()
    submit(drive, groups=[TRAINER, ROLLOUT], priority=90)
    drive.pass_time(5_000)
    assert drive.states("low") == ["RUNNING"]
    told = drive.explained("g")
    assert told["reason"] == "busy"
    assert ("no job ends for a gang of several groups" in told["because"]) == preempts


def test_each_rank_has_what_its_group_asks_for_and_the_addresses_of_all() -> None:
    drive = site(auto=False)
    submit(drive)
    places = {place.replica: place for frame in drive.wanted for place in frame.place}
    asked = [decode_request(bytes(places[index].body)) for index in range(6)]
    assert [request.run and request.run.argv for request in asked] == [["train"]] * 2 + [[]] * 4
    assert [request.effective_gpu and request.effective_gpu.count for request in asked] == [2, 2, 1, 1, 1, None]
    assert asked[2].workload.env == {"MODE": "fast"}
    assert all(place.hold for place in places.values())
    addresses = {5: "l0.local:3", 0: "h0.local:1", 2: "l1.local:2"}
    drive.reports([("claimed", "g", index, 0, addresses.get(index, "x.local:9")) for index in (5, 4, 3, 2, 1, 0)])
    starts = {start.replica: start for frame in drive.wanted for start in frame.start}
    groups = {"trainer": "h0.local:1", "rollout": "l1.local:2", "head": "l0.local:3"}
    assert [starts[index].groups for index in range(6)] == [groups] * 6
    assert [(starts[i].master_addr, starts[i].master_port, starts[i].world_size) for i in (0, 1, 4, 5)] == [
        ("h0.local", 1, 2), ("h0.local", 1, 2), ("l1.local", 2, 3), ("l0.local", 3, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("lead", [False, True])
def test_whole_or_not_at_all(lead: bool) -> None:
    drive = site()
    drive.submit("other", gpu={"model": "L40S"}, replicas=2)
    submit(drive)
    drive.settle()
    assert drive.states("g") == ["QUEUED"] * 6
    told = drive.explained("g")
    assert (told["reason"], told["because"]) == ("gang", "group rollout: room for 2 of its 3 replicas")
    if lead:
        drive.lead()
        drive.renew()
    drive.run_out(drive.attempt("other").worker.id)
    drive.settle()
    assert drive.states("g") == ["RUNNING"] * 6


def test_a_rank_that_fails_ends_all_and_all_start_again_with_one_number() -> None:
    drive = site()
    submit(drive, retries=1)
    drive.settle()
    drive.pass_time(15_000)
    drive.run_out(drive.attempt("g", 3).worker.id, 7)
    drive.settle()
    drive.pass_time(20_000)
    drive.settle()
    assert drive.states("g") == ["RUNNING"] * 6
    assert {drive.attempt("g", index).no for index in range(6)} == {2}
    drive.lead()
    drive.renew()
    drive.settle()
    assert drive.states("g") == ["RUNNING"] * 6


def test_limits_and_counters_count_all_groups_as_one_job() -> None:
    drive = site()
    drive.order("limit", gpus=6)
    assert submit(drive)["code"] == "failed-precondition"
    drive.order("limit", gpus=7, cores=1)
    assert submit(drive)["code"] == "failed-precondition"
    drive.order("limit", gpus=7, cores=2, running=1)
    submit(drive)
    drive.submit("later", gpu=None)
    drive.settle()
    assert drive.states("g") == ["RUNNING"] * 6
    assert drive.state.tenants["t"].held[::2] == (2_000, 1)
    assert drive.explained("later")["reason"] == "limit"


def test_what_no_fleet_could_hold_names_its_group() -> None:
    drive = site()
    answer = submit(drive, groups=[TRAINER, ROLLOUT | {"replicas": 5}], on_no_match="reject")
    assert "group rollout: the whole fleet would hold 4 of its 5 replicas" in answer["message"]


def test_hosts_are_reserved_for_all_groups() -> None:
    drive = Driving(Config(reserve_after=10))
    for name, model in (("h0", H100), ("l0", L40S), ("l1", L40S)):
        drive.worker(name, 2, model)
    raise_level(drive)
    for number in range(3):
        drive.submit(f"s{number}", gpu={"model": "L40S"}, run={"argv": ["x"], "driver": "noop", "timeout_s": 60})
    submit(drive, groups=[TRAINER | {"replicas": 1}, ROLLOUT | {"replicas": 4}])
    drive.settle()
    for number in range(3, 40):
        drive.submit(f"s{number}", gpu={"model": "L40S"}, run={"argv": ["x"], "driver": "noop", "timeout_s": 60})
        drive.run_out(f"l{number % 2}") if number % 3 == 0 else drive.pass_time(4_000)
        drive.settle()
        if drive.states("g")[0] == "RUNNING":
            break
    assert drive.states("g") == ["RUNNING"] * 5


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"replicas": 4}, "replicas must be left out, or be 6"),
        ({"indices": "0-4"}, "replicas must be left out, or be 5"),
        ({"groups": [HEAD]}, "some group of a gang has GPUs"),
        ({"groups": [TRAINER, TRAINER]}, "one name"),
        ({"groups": [TRAINER | {"name": "A"}]}, "name must match"),
        ({"groups": [TRAINER | {"gpu": {"sharing": "mps"}}]}, "whole GPUs"),
        ({"resources": {"cpu_milli": 1}}, "each group says for itself"),
        ({"preemptible": True}, "each group says for itself"),
        ({"max_running": 2}, "max_running"),
        ({"service": {"name": "s"}}, "the ranks of a gang|cannot answer"),
        ({"on_partition": "keep"}, "must be kill for a gang"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], says: str) -> None:
    drive = site()
    if not fields.keys().isdisjoint(("replicas", "indices", "on_partition")) or "match" in says:
        with pytest.raises((ValueError, Refused), match=re.escape(says)):  # it does not decode
            submit(drive, **fields)
        return
    answer = submit(drive, **fields)
    assert (answer["code"], bool(re.search(says, answer["message"]))) == ("invalid-argument", True), answer


def test_below_the_level_it_is_refused() -> None:
    drive = Driving.with_hosts(4)
    answer = submit(drive, groups=[TRAINER])
    assert (answer["code"], answer["field"]) == ("failed-precondition", "$.groups")


@pytest.mark.parametrize("seed", range(2))
def test_random_groups_beside_sizes_limits_counters_and_keys(seed: int) -> None:
    rng = random.Random(seed)
    drive = site((4, 2), (3, 2))
    drive.order("limit", gpus=rng.choice((None, 6, 9)), cores=rng.choice((None, 9)), running_per_key=7)
    names = list[str]()
    for step in range(120):
        if rng.random() < 0.25 and len(names) < 30:
            names.append(f"g{step}")
            fields: dict[str, Any] = {"retries": 3, "fair_key": rng.choice("ab"), "priority": rng.choice((50, 60))}
            kind = rng.random()
            if kind < 0.6:
                groups = [{**TRAINER, "replicas": rng.randint(1, 2)}, {**ROLLOUT, "replicas": rng.randint(1, 3)}]
                submit(drive, names[-1], groups + [HEAD] * (rng.random() < 0.5), **fields)
            elif kind < 0.8:
                most = rng.randint(1, 4)
                drive.submit(names[-1], replicas={"min": 1, "max": most}, gpu={"scheduling": "gang"}, **fields)
            else:
                drive.submit(names[-1], gpu={}, replicas=rng.randint(1, 4), **fields)
        did = rng.random()
        if did < 0.35:
            drive.run_out(rng.choice(list(drive.workers)), rng.choice((0, 0, 7)))
        elif did < 0.39:
            drive.take_snapshot()
            rng.choice((drive.lead, drive.lead_from_snapshot))()
            drive.renew()
        elif did < 0.43 and names:
            drive.cancel(rng.choice(names))
        drive.pass_time(2_000)
        drive.settle()
        tenant = drive.state.tenants["t"]
        assert not tenant.gpus_max or tenant.gpus <= tenant.gpus_max
        assert tenant.limits is None or not tenant.limits.cores_milli or tenant.held[0] <= tenant.limits.cores_milli
        for name in names:
            job = drive.state.job("t", name)
            if job is not None and job.gang and not job.over:
                is_whole(job)
    each_has_its_turn(drive, names)


def test_all_groups_are_in_one_site_and_wait_for_one_that_could_hold_them() -> None:
    drive = Driving()
    for name, model, where in (("hx", H100, "x"), ("lx", L40S, "x"), ("hy", H100, "y"), ("ly", L40S, "y")):
        drive.worker(name, 4, model, cpu_milli=16_000, memory_mib=65_536, labels={"site": where})
    raise_level(drive)
    one: list[dict[str, Any]] = [TRAINER | {"replicas": 1}, ROLLOUT, HEAD]
    drive.submit("holds", gpu={"count": 4, "model": "L40S"}, requires={"site": ["x"]})
    drive.settle()
    submit(drive, groups=one)
    drive.settle()
    assert {name[1] for name in on(drive)} == {"y"}
    submit(drive, "waits", groups=one)
    drive.settle()
    assert drive.states("waits") == ["QUEUED"] * 5
    answer = submit(drive, "never", groups=[TRAINER, ROLLOUT | {"replicas": 5}], on_no_match="reject")
    assert answer["code"] == "failed-precondition"
    drive.run_out("lx")
    assert {name[1] for name in on(drive, "waits")} == {"x"}


def test_groups_that_fit_in_no_one_site_are_refused_and_say_so() -> None:
    drive = Driving()
    drive.worker("hx", 4, H100, cpu_milli=16_000, memory_mib=65_536, labels={"site": "x"})
    drive.worker("ly", 4, L40S, cpu_milli=16_000, memory_mib=65_536, labels={"site": "y"})
    raise_level(drive)
    answer = submit(drive, on_no_match="reject")
    assert "no place that its ranks may share would hold all of its groups" in answer["message"]
    submit(drive, "waits")
    assert drive.explained("waits")["reason"] == "place-size"
    submit(drive, "any", same=[])
    drive.settle()
    assert drive.states("any") == ["RUNNING"] * 6
