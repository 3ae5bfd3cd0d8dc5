"""A GPU may have labels of its own: a job gets only GPUs that have what it requires, or whose host has it."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.schemas.frames import Device
from tests.unit.scheduler.driving import H100, Driving
from tests.unit.scheduler.fleet.test_exact_devices import named
from tests.unit.scheduler.queries.test_plan_verb import planned
from tests.unit.scheduler.schedule.test_places import limited

RANKERS = ["pack", "fragments", "headroom"]
FAST: dict[str, Any] = {"requires": {"tier": ["fast"]}}
SLOW: dict[str, Any] = {"requires": {"tier": ["slow"]}}
MIXED = ("", "tier=fast rev=1.9", "tier=fast wall=b rev=2.0.1", "tier=slow zone=b rev=2")
GANG = {"scheduling": "gang"}


def pool(worker: str, *labels: str) -> list[Device]:
    """GPUs with these labels each, written as in the setting `slot_labels`."""
    return [
        Device(at, "nvidia", H100, f"GPU-{worker}-{at}", 81_559, labels=dict(word.split("=") for word in words.split()))
        for at, words in enumerate(labels)
    ]


def host(drive: Driving, name: str, *gpus: str, **hello: Any) -> None:
    drive.worker(name, gpu_pool=pool(name, *gpus), **hello)


def fleet(*hosts: tuple[str, ...], ranker: str = "fragments", **config: Any) -> Driving:
    drive = Driving(Config(ranker=ranker, **config))
    for number, gpus in enumerate(hosts):
        host(drive, f"w{number}", *gpus)
    return drive


def taken(drive: Driving, job: str) -> list[tuple[str, list[int]]]:
    """Where the placed replicas of a job are: worker and slots."""
    found = [replica.index for replica in drive.job(job).replicas if replica.attempt is not None]
    return [(drive.placed_on(job)[at], drive.slots(job, index)) for at, index in enumerate(found)]


@pytest.mark.parametrize("ranker", RANKERS)
@pytest.mark.parametrize(
    ("asks", "slots"),
    [
        (FAST, {1, 2}),
        ({"requires": {"tier": ["slow", "fast"]}}, {1, 2, 3}),
        ({"requires": {"tier": ["fast"], "wall": ["b"]}}, {2}),
        ({"where": ["tier!=fast"]}, {0, 3}),
        ({"where": ["rev>=2.0"]}, {2, 3}),
        ({"where": ["rev<2.0"]}, {1}),
        ({"requires": {"zone": ["a"]}}, {0, 1, 2}),
        ({"requires": {"zone": ["b"]}}, {3}),
        ({"where": ["zone!=a"]}, {3}),
        ({"requires": {"zone": ["a"]}, "where": ["tier!=fast", "rev!=1.9"]}, {0}),
    ],
)
def test_each_gpu_of_a_job_has_the_labels_or_its_host_has(ranker: str, asks: dict[str, Any], slots: set[int]) -> None:
    """A GPU's own label goes before its host's of that name."""
    drive = Driving(Config(ranker=ranker))
    host(drive, "w0", *MIXED, labels={"zone": "a"})
    drive.submit("job", gpu={}, replicas=5, **asks)
    drive.settle()
    assert sorted(taken(drive, "job")) == [("w0", [slot]) for slot in sorted(slots)]


def test_two_gpus_of_one_replica_both_have_the_label() -> None:
    drive = fleet(("tier=fast", "", "tier=fast", "tier=slow"), ("", "tier=fast"))
    drive.submit("pair", gpu={"count": 2}, replicas=2, **FAST)
    assert taken(drive, "pair") == [("w0", [0, 2])]
    assert drive.explained("pair")["reason"] == "busy"


def test_a_job_without_gpus_and_a_place_go_by_the_labels_of_hosts() -> None:
    drive = Driving()
    host(drive, "w0", "rack=a tier=fast", "rack=a", labels={"rack": "b"})
    host(drive, "w1", "rack=b", "rack=b")
    refused = drive.submit("no-gpu", gpu=None, on_no_match="reject", **FAST)
    assert "tier=fast: the label tier is on single GPUs, not on workers" in refused["message"]
    pair: dict[str, Any] = {"gpu": GANG, "replicas": 2}
    drive.submit("gang", **pair, same=["rack"])
    assert drive.placed_on("gang") == ["w0", "w0"], "w1 has no rack, whatever its GPUs have"
    assert "single GPUs, not on workers" in drive.submit("no", **pair, same=["tier"], on_no_match="reject")["message"]
    warned = drive.submit("wish", gpu={}, prefers=["tier=fast"])["warnings"]
    assert warned == ["label: no worker has the label tier, only GPUs, so --prefers changes nothing"]


@pytest.mark.parametrize(
    ("asks", "words"),
    [
        ({"gpu": {}, "requires": {"tier": ["best"]}}, "is labelled tier=best: the fleet has tier=fast, slow"),
        ({"gpu": {}, "where": ["rev>=3"]}, "has rev>=3: the fleet has rev=1.9, 2, 2.0.1"),
        ({"gpu": {}, "requires": {"shelf": ["1"]}}, "is labelled shelf=1: no worker has the label shelf"),
        ({"gpu": {"count": 3}, **FAST}, "the most matching GPUs with its labels on one worker is 2"),
        ({"gpu": {}, "requires": {"tier": ["slow"], "wall": ["b"]}}, "though each label is on one"),
        ({**named("0"), **FAST}, "no worker with such GPUs has 0"),
        ({"gpu": {"count": 2, "topology": "nvlink"}, **FAST}, "that NVLink joins on one worker is 0"),
    ],
)
def test_a_refusal_says_which_labels_gpus_have(asks: dict[str, Any], words: str) -> None:
    drive = fleet(MIXED, ("", ""))
    assert words in drive.submit("job", **asks, on_no_match="reject")["message"]


def test_a_job_for_which_no_gpu_has_the_label_waits_for_one_and_says_so() -> None:
    drive = fleet(("tier=slow", ""))
    drive.submit("job", gpu={}, **FAST, on_no_match="wait")
    assert drive.explained("job")["reason"] == "label"
    [first, *_] = drive.fixes("job")
    assert (first["say"], first["request"]) == ("without the label tier", {"requires": None})
    assert planned(drive, {"gpu": {}, **FAST}).starts == "never"
    assert planned(drive, {"gpu": {}, **SLOW}).starts == "now"
    host(drive, "w1", "", "tier=fast")
    drive.settle()
    assert taken(drive, "job") == [("w1", [1])]


@pytest.mark.parametrize("ranker", RANKERS)
def test_sharers_join_only_gpus_with_the_label(ranker: str) -> None:
    drive = fleet(("tier=fast", "tier=slow", ""), ranker=ranker)
    part = {"sharing": "mps", "share": {"compute_percent": 50}}
    drive.submit("any", gpu=part, replicas=2, **SLOW)
    drive.submit("fast", gpu=part, replicas=3, **FAST)
    drive.settle()
    assert [slots for _, slots in taken(drive, "any")] == [[1], [1]]
    assert [slots for _, slots in taken(drive, "fast")] == [[0], [0]]


def test_named_gpus_are_taken_where_they_have_the_label() -> None:
    drive = fleet(("tier=slow", "tier=fast"), ("tier=fast", "tier=slow"))
    drive.submit("job", **named("1"), **FAST, replicas=2)
    drive.submit("uuid", **named("GPU-w1-0"), **FAST)
    assert taken(drive, "job") == [("w0", [1])]
    assert taken(drive, "uuid") == [("w1", [0])]
    refused = drive.submit("never", **named("GPU-w1-1"), **FAST, on_no_match="reject")
    assert "no worker with such GPUs has GPU-w1-1" in refused["message"]


def test_victims_are_those_on_gpus_with_the_label() -> None:
    drive = fleet(("tier=fast", "tier=slow"), preempt_priority=80, preempt_after=0.0)
    drive.submit("slow", gpu={}, priority=10, **SLOW)
    drive.submit("fast", gpu={}, priority=50, **FAST)
    drive.settle()
    drive.submit("urgent", gpu={}, priority=90, **FAST)
    drive.pass_time(3_000)
    drive.settle()
    assert taken(drive, "urgent") == [("w0", [0])]
    assert [drive.states(name) for name in ("slow", "fast")] == [["RUNNING"], ["QUEUED"]]


def test_the_host_whose_labelled_gpu_is_free_first_is_reserved() -> None:
    drive = fleet(("tier=fast", ""), ("", "tier=fast"), reserve_after=30.0)
    for name, limit_s in (("late", 400), ("early", 300)):
        drive.submit(name, gpu={}, run=limited(limit_s), **FAST)
    drive.submit("soon", gpu={}, run=limited(100), where=["tier!=fast"], replicas=2)
    drive.settle()
    drive.submit("job", gpu={}, **FAST)
    drive.pass_time(40_000)
    assert {drive.state.worker_by_num[num].id for num in drive.reservation.hosts} == set(drive.placed_on("early"))


def test_a_gang_and_groups_have_labelled_gpus_for_each_rank() -> None:
    drive = fleet(("tier=fast", "", "tier=fast"), ("", "tier=fast"))
    drive.submit("gang", gpu=GANG, replicas=3, **FAST)
    assert sorted(taken(drive, "gang")) == [("w0", [0]), ("w0", [2]), ("w1", [1])]
    drive.submit("more", gpu=GANG, replicas=4, **FAST, on_no_match="wait")
    assert drive.explained("more")["reason"] == "gang-size"


def test_a_cordoned_gpu_with_the_label_is_waited_for() -> None:
    drive = fleet(("tier=fast", ""))
    assert drive.operate("cordon", "w0", slots=(0,))["kind"] == "done"
    drive.submit("job", gpu={}, **FAST)
    assert drive.states("job") == ["QUEUED"]
    drive.submit("other", gpu={})
    assert taken(drive, "other") == [("w0", [1])]


def test_hosts_without_labels_of_gpus_are_one_class_and_those_with_alike_ones_too() -> None:
    drive = fleet(("", ""), ("", ""), ("tier=fast", ""), ("tier=fast", ""))
    drive.submit("job", gpu={}, **FAST)
    assert sorted(len(cls.hosts) for cls in drive.engine.fleet.classes.values()) == [2, 2]
