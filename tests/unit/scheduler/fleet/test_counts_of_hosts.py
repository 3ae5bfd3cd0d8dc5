"""Counters of hosts, as cameras: a job that takes some starts where enough are left, and others start anywhere."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.schemas.errors import Refused
from moorage.schemas.operate import act_of
from tests.levels import know_next, raise_level
from tests.unit.scheduler.driving import Driving

CAMERA = {"host.camera": 1}


def site(*counts: int, gpus: int = 4, ranker: str = "pack") -> Driving:
    drive = Driving(Config(ranker=ranker))
    for number, count in enumerate(counts):
        drive.worker(f"w{number}", gpus, cpu_milli=32_000, memory_mib=65_536, counts={"camera": count} if count else {})
    return drive


def taken(drive: Driving) -> Counter[str]:
    """How many cameras of each host the attempts there have been promised."""
    found = Counter[str]()
    for attempt in drive.state.attempts():
        found[attempt.worker.id] += int(b"camera" in attempt.replica.job.body)
    return +found


@pytest.mark.parametrize("fields", [{}, {"gpu": {}}, {"gpu": {"sharing": "time-slice"}}])
def test_no_more_start_on_a_host_than_it_has_counters_and_others_do(fields: dict[str, Any]) -> None:
    drive = site(0, 2, 1)
    for number in range(5):
        drive.submit(f"c{number}", uses=CAMERA, **fields)
    drive.submit("other", **fields)
    drive.settle()
    assert taken(drive) == {"w1": 2, "w2": 1}
    assert drive.states("other") == ["RUNNING"]
    told = drive.explained("c4")
    assert (told["reason"], told["because"]) == ("host-busy", "it asks for 1 host.camera on one host")
    assert any("w1: 0 of 2 host.camera" in row for row in told["held_by"]), told["held_by"]
    drive.run_out("w1")
    drive.settle()
    assert taken(drive) == {"w1": 2, "w2": 1}


@pytest.mark.parametrize("fields", [{"replicas": 9}, {"replicas": 9, "gpu": {}}])
def test_replicas_of_a_sweep_count_one_by_one(fields: dict[str, Any]) -> None:
    drive = site(3, 1)
    drive.submit("sweep", uses=CAMERA, **fields)
    drive.settle()
    assert taken(drive) == {"w0": 3, "w1": 1}


@pytest.mark.parametrize("ranker", ["pack", "headroom", "fragments"])
def test_ranks_of_a_gang_take_theirs_at_once_or_none(ranker: str) -> None:
    drive = site(2, 1, ranker=ranker)
    drive.submit("g", uses=CAMERA, gpu={"scheduling": "gang"}, replicas=3)
    drive.submit("h", uses=CAMERA, gpu={})
    drive.settle()
    assert taken(drive) == {"w0": 2, "w1": 1}
    assert drive.states("g") == ["RUNNING"] * 3
    assert drive.states("h") == ["QUEUED"]


@pytest.mark.parametrize("ranker", ["pack", "headroom", "fragments"])
def test_groups_of_a_gang_without_gpus_take_theirs_too(ranker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)
    drive = site(1, ranker=ranker)
    raise_level(drive)
    drive.submit("g", groups=[{"name": "a", "gpu": {}}, {"name": "b"}], gpu=None, uses=CAMERA, on_no_match="wait")
    drive.settle()
    assert drive.states("g") == ["QUEUED"] * 2
    drive.worker("w9", 1, counts={"camera": 1})
    drive.settle()
    assert taken(drive) == {"w0": 1, "w9": 1}


def test_what_no_host_has_is_refused_and_no_host_is_reserved_for_it() -> None:
    drive = site(2, 0)
    refused = drive.submit("j", uses={"host.camera": 3}, on_no_match="reject")
    assert "the most that one worker has is 2 host.camera" in refused["message"], refused
    assert drive.submit("k", uses={"host.laser": 1}, on_no_match="reject")["code"] == "failed-precondition"
    drive.submit("first", uses={"host.camera": 2}, gpu={})
    drive.submit("waits", uses=CAMERA, gpu={}, priority=90)
    drive.settle()
    drive.pass_time(120_000, step=1_000)
    drive.submit("free", gpu={"count": 3})
    drive.settle()
    assert drive.states("waits") == ["QUEUED"]
    assert drive.states("free") == ["RUNNING"], "no host is kept for what a counter keeps waiting"


def test_no_job_ends_for_a_counter() -> None:
    drive = site(1)
    drive.submit("low", uses=CAMERA, gpu={}, preemptible=True)
    drive.settle()
    drive.submit("high", uses=CAMERA, gpu={}, priority=90)
    drive.pass_time(60_000, step=1_000)
    assert (drive.states("low"), drive.states("high")) == (["RUNNING"], ["QUEUED"])


def test_a_new_leader_and_a_worker_with_fewer_count_what_runs() -> None:
    drive = site(2)
    drive.submit("a", uses=CAMERA)
    drive.settle()
    drive.lead_from_snapshot()
    drive.renew()
    drive.submit("b", uses=CAMERA)
    drive.settle()
    assert taken(drive) == {"w0": 2}
    worker = drive.workers["w0"]
    worker.hello.counts["camera"] = 1
    drive.join(worker)
    drive.run_out("w0")
    for name in ("c", "d"):
        drive.submit(name, uses=CAMERA)
    drive.settle()
    assert taken(drive) == {"w0": 1}


def test_an_operators_counter_has_no_name_of_a_hosts() -> None:
    with pytest.raises(Refused, match="workers have those"):
        act_of("counter", {"by": "ana", "name": "host.camera", "most": 1})


@pytest.mark.parametrize("seed", range(3))
def test_random_worlds_never_take_more_than_a_host_has(seed: int) -> None:
    dice = random.Random(seed)
    drive = site(*(dice.choice([0, 1, 2, 3]) for _ in range(4)), 3)
    has = {name: worker.hello.counts.get("camera", 0) for name, worker in drive.workers.items()}
    asked = dict[str, int]()
    for number in range(40):
        name = f"j{number}"
        gpu = dice.choice([None, {}, {"count": 2}, {"sharing": "time-slice"}])
        fields: dict[str, Any] = {"gpu": gpu} if gpu is not None else {}
        asked[name] = dice.choice([0, 1, 1, 2])
        if asked[name]:
            fields["uses"] = {"host.camera": asked[name]}
        drive.submit(name, replicas=dice.choice([1, 1, 3]), **fields)
        drive.settle()
        if dice.random() < 0.5:
            drive.run_out(dice.choice(sorted(drive.workers)))
        if dice.random() < 0.1:
            drive.lead()
            drive.renew()
        used = Counter[str]()
        for attempt in drive.state.attempts():
            used[attempt.worker.id] += asked[attempt.name[1]]
        assert all(count <= has[host] for host, count in used.items()), used
    for _ in range(60):
        for host in drive.workers:
            drive.run_out(host)
        drive.settle()
    assert not any(job.live for job in drive.state.jobs.values()), "each has its turn"
