"""Wishes about places: a host that a job prefers is taken where it has room, and no job waits for one."""

from __future__ import annotations

import random

import pytest

from tests.unit.scheduler.driving import Driving


def site(*zones: str, gpus: int = 2) -> Driving:
    drive = Driving()
    for number, zone in enumerate(zones):
        drive.worker(f"w{number}", gpus, labels={"zone": zone} if zone else {})
    return drive


def test_the_first_wish_counts_more_and_a_job_starts_elsewhere_where_none_is_met() -> None:
    drive = Driving()
    drive.worker("old", 1, labels={"zone": "a", "gpu.driver": "550"})
    drive.worker("far", 1, labels={"zone": "b", "gpu.driver": "580.1"})
    drive.worker("both", 1, labels={"zone": "a", "gpu.driver": "580.1"})
    drive.worker("none", 1)
    for name in ("1", "2", "3", "4"):
        drive.submit(name, gpu={}, prefers=["zone=a", "gpu.driver>=570"])
    drive.settle()
    assert [drive.placed_on(name)[0] for name in "12"] == ["both", "old"]
    assert {drive.placed_on(name)[0] for name in "34"} == {"far", "none"}


def test_a_gang_is_whole_where_it_wishes_or_elsewhere() -> None:
    drive = site("a", "b", "b")
    drive.submit("fills", gpu={"count": 1}, requires={"zone": ["b"]})
    drive.submit("gang", gpu={"scheduling": "gang"}, replicas=3, prefers=["zone=b"])
    drive.submit("wide", gpu={"scheduling": "gang"}, replicas=2, prefers=["zone=b"])
    drive.settle()
    assert set(drive.placed_on("gang")) == {"w1", "w2"}
    assert set(drive.placed_on("wide")) == {"w0"}


def test_a_new_host_is_known_to_those_that_wait() -> None:
    drive = site("a")
    drive.submit("first", gpu={"count": 2}, prefers=["zone=z"])
    drive.submit("second", gpu={"count": 2}, prefers=["zone=z"])
    drive.settle()
    assert drive.placed_on("first") == ["w0"]
    drive.worker("new", 2, labels={"zone": "z"})
    drive.settle()
    assert drive.placed_on("second") == ["new"]


@pytest.mark.parametrize("seed", range(20))
def test_in_random_worlds_none_is_elsewhere_while_a_host_that_it_prefers_has_room(seed: int) -> None:
    dice = random.Random(seed)
    drive = site(*(dice.choice("ab") for _ in range(5)), gpus=4)
    zone = {name: worker.hello.labels["zone"] for name, worker in drive.workers.items()}
    free = dict.fromkeys(zone, 4)
    names: dict[str, int] = {}
    for at in range(80):
        if names and dice.random() < 0.4:
            name = dice.choice(sorted(names))
            worker = drive.placed_on(name)[0]
            free[worker] += names.pop(name)
            key = next(key for key in drive.workers[worker].held if key[1] == name)
            drive.workers[worker].finish(key)
            drive.settle()
            continue
        name, count, wished = f"j{at}", dice.choice((1, 2)), dice.choice("abc")
        if max(free.values()) < count:
            continue
        drive.submit(name, gpu={"count": count}, prefers=[f"zone={wished}"])
        drive.settle()
        [worker] = drive.placed_on(name)
        could = [each for each, left in free.items() if left >= count and zone[each] == wished]
        assert zone[worker] == wished or not could, f"{name} is on {worker}, and {could} had room"
        free[worker] -= count
        names[name] = count


def test_a_wish_about_a_label_that_no_worker_has_is_told_as_the_job_is_submitted() -> None:
    drive = site("a", "")
    drive.renew()
    told = drive.submit("typo", gpu={}, prefers=["zoen=a", "zone=z", "zoen!=b"], spread_over="rack")["warnings"]
    assert told == [
        "label: no worker has the label zoen, so --prefers changes nothing",
        "label: no worker has the label rack, so --spread-over changes nothing",
    ]
    assert "warnings" not in drive.submit("right", gpu={}, prefers=["zone=b"], spread_over="zone")
