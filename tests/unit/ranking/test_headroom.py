"""The ranker `headroom`: its score in integers, what it counts as busy, and its stable ties."""

from __future__ import annotations

import pytest

from moorage.ranking.headroom import Headroom, score, utilisation_percent
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.fleet.host import Host
from moorage.scheduler.core.rank.rankers import ranker_class
from moorage.schemas.frames import Load, SlotLoad
from tests.unit.scheduler.driving import Driving


def headroom() -> Driving:
    return Driving(Config(ranker="headroom"))


def host(drive: Driving, worker: str) -> Host:
    return drive.engine.fleet.hosts[drive.state.workers[worker].num]


def report(drive: Driving, worker: str, util_percent: int) -> None:
    slots = [SlotLoad(device.index, util_percent=util_percent) for device in drive.workers[worker].hello.gpu_pool]
    drive.engine.offer_load(worker, Load(worker, "boot-1", 1, 1, gpu_pool=slots), drive.now)


def test_the_configuration_selects_it_by_name() -> None:
    assert ranker_class("headroom") is Headroom
    assert headroom().engine.planner.placing.ranker.name == "headroom"
    assert Driving().engine.planner.placing.ranker.name == "fragments"


#: devices, of them taken, processors in thousandths, of them reserved, reported utilisation -> score in thousandths
SCORES = {
    "idle and empty": (4, 0, 8000, 0, 0, 100_000),
    "one of four devices taken": (4, 1, 8000, 0, 0, 92_500),
    "one of three: the fraction is cut, not rounded": (3, 1, 8000, 0, 0, 90_000),
    "one of seven: the fraction is cut, not rounded": (7, 1, 8000, 0, 0, 95_714),
    "all devices taken": (2, 2, 8000, 0, 0, 70_000),
    "half of the processors reserved": (4, 0, 8000, 4000, 0, 65_000),
    "busy devices": (4, 0, 8000, 0, 50, 65_000),
    "the larger of the two counts": (4, 0, 8000, 2000, 50, 65_000),
    "all reserved and taken": (2, 2, 8000, 8000, 100, 0),
    "processors unknown": (2, 0, 0, 4000, 0, 100_000),
    "no devices": (0, 0, 8000, 4000, 0, 35_000),
}


@pytest.mark.parametrize(("gpus", "taken", "cpu_milli", "reserved", "util", "expected"), SCORES.values(), ids=SCORES)
def test_the_score(gpus: int, taken: int, cpu_milli: int, reserved: int, util: int, expected: int) -> None:
    drive = headroom()
    drive.worker("w0", gpus, cpu_milli=cpu_milli)
    if reserved:
        drive.submit("cpu", resources={"cpu_milli": reserved})
    if taken:
        drive.submit("gpu", gpu={"count": taken})
    if gpus:
        report(drive, "w0", util)
    found = score(host(drive, "w0"))
    assert isinstance(found, int)
    assert found == expected


def test_slots_that_are_not_lent_are_no_room() -> None:
    drive = headroom()
    drive.worker("w0", 4, lent_slots=[0, 1])
    assert score(host(drive, "w0")) == 100_000
    drive.submit("j", gpu={})
    assert score(host(drive, "w0")) == 85_000


def test_reserved_processors_weigh_more_than_free_devices() -> None:
    drive = headroom()
    drive.worker("loaded", 4, cpu_milli=8000, labels={"which": "loaded"})
    drive.worker("idle", 4, cpu_milli=8000)
    drive.submit("cpu", resources={"cpu_milli": 4000}, requires={"which": ["loaded"]})
    assert utilisation_percent(host(drive, "loaded")) == 50
    for name in ("a", "b", "c", "d"):  # even its last device: 70 points against 65
        drive.submit(name, gpu={})
        assert drive.placed_on(name) == ["idle"], name
    drive.submit("e", gpu={})
    assert drive.placed_on("e") == ["loaded"]


def test_a_job_without_gpu_goes_where_most_processors_are_free() -> None:
    drive = headroom()
    for name in ("w0", "w1"):
        drive.worker(name, 1, cpu_milli=8000)
    placed = []
    for job in ("a", "b", "c", "d"):
        drive.submit(job, resources={"cpu_milli": 1000})
        placed += drive.placed_on(job)
    assert placed == ["w0", "w1", "w0", "w1"]


def test_fact_35_ties_go_to_the_worker_that_joined_first() -> None:
    placed = []
    for _ in range(2):
        drive = headroom()
        for name in ("z", "m", "a"):
            drive.worker(name, 2)
        for number in range(6):
            drive.submit(f"j{number}", gpu={})
        placed.append([drive.placed_on(f"j{number}")[0] for number in range(6)])
    assert placed[0] == placed[1] == ["z", "m", "a", "z", "m", "a"]


def test_fact_21_whole_words_go_before_headroom() -> None:
    drive = headroom()
    drive.worker("a100s", 8, "NVIDIA A100")
    drive.worker("a10", 2, "NVIDIA A10")
    report(drive, "a10", 90)
    drive.submit("j", gpu={"model": "A10"})
    assert drive.placed_on("j") == ["a10"]


def test_a_gang_and_sharers_find_their_places() -> None:
    drive = headroom()
    drive.worker("w0", 2)
    drive.worker("w1", 2)
    drive.submit("gang", replicas=4, gpu={"scheduling": "gang"})
    assert sorted(drive.placed_on("gang")) == ["w0", "w0", "w1", "w1"]
    drive = headroom()
    drive.worker("w0", 1)
    for number in range(9):
        drive.submit(f"s{number}", gpu={"sharing": "mps"})
    assert [drive.states(f"s{number}")[0] for number in range(9)] == ["PLACED"] * 8 + ["QUEUED"]


def test_spread_is_still_spread() -> None:
    drive = headroom()
    drive.worker("big", 8)
    drive.worker("small", 2)
    drive.submit("j", replicas=2, gpu={"scheduling": "spread"})
    assert sorted(drive.placed_on("j")) == ["big", "small"]
