"""GPUs that NVLink joins: a replica that asks for them gets such ones alone, of one set, or waits."""

from __future__ import annotations

import random
from itertools import combinations, pairwise
from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.schemas.frames import Device
from tests.unit.scheduler.driving import H100, Driving
from tests.unit.scheduler.queries.test_plan_verb import planned


def host(drive: Driving, name: str, *sets: tuple[int, ...], gpus: int = 4) -> None:
    """A worker of which NVLink joins these sets of GPUs, each told in a row: 0 to 1, 1 to 2."""
    peers: dict[int, list[int]] = {}
    for each in sets:
        for one, other in pairwise(each):
            peers.setdefault(one, []).append(other)
    pool = [Device(at, "nvidia", H100, f"GPU-{name}-{at}", 81_559, peers=peers.get(at, [])) for at in range(gpus)]
    drive.worker(name, gpu_pool=pool)


def asks(count: int, **more: Any) -> dict[str, Any]:
    return {"gpu": {"count": count, "topology": "nvlink", **more}}


@pytest.mark.parametrize("ranker", ["pack", "fragments", "headroom"])
def test_it_gets_joined_gpus_and_waits_beside_as_many_that_are_not(ranker: str) -> None:
    drive = Driving(Config(ranker=ranker))
    host(drive, "w0", (0, 2), (1, 3))
    drive.submit("small", gpu={"count": 1})
    drive.submit("pair", **asks(2))
    drive.submit("waits", **asks(2))
    drive.settle()
    assert {tuple(drive.slots("pair")), (drive.slots("small")[0],)} == {(1, 3), (0,)}
    assert drive.states("waits") == ["QUEUED"]
    told = drive.explained("waits")
    assert told["reason"] == "busy"
    drive.submit("plain", gpu={"count": 1})
    drive.settle()
    drive.run_out("w0")
    assert tuple(drive.slots("waits")) in {(0, 2), (1, 3)}


def test_free_gpus_that_are_not_joined_are_the_reason_and_the_fix_is_to_take_them() -> None:
    drive = Driving()
    host(drive, "w0", (0, 1), (2, 3))
    for name in "abcd":
        drive.submit(name, gpu={})
    drive.settle()
    for name in "abcd":
        if drive.slots(name)[0] in (1, 2):
            drive.workers["w0"].finish(next(key for key in drive.workers["w0"].held if key[1] == name))
    drive.settle()
    drive.submit("waits", **asks(2))
    told = drive.explained("waits")
    assert told["reason"] == "fragmented"
    assert told["because"].endswith("none of these has 2 that NVLink joins")
    assert drive.fixes("waits")[0]["say"] == "GPUs that NVLink does not join"


def test_what_no_worker_has_joined_is_refused_and_named() -> None:
    drive = Driving()
    host(drive, "w0", (0, 1, 2))
    host(drive, "w1")
    assert (
        "the most matching GPUs that NVLink joins on one worker is 3"
        in (drive.submit("never", **asks(4), on_no_match="reject")["message"])
    )
    drive.submit("waits", **asks(4))
    assert drive.explained("waits")["reason"] == "nvlink"
    assert planned(drive, asks(3)).starts == "now"
    assert planned(drive, asks(4)).starts == "never"
    host(drive, "w2", (0, 1, 2, 3))
    drive.settle()
    assert drive.placed_on("waits") == ["w2"]


def test_a_gang_and_victims_go_by_what_is_joined() -> None:
    drive = Driving(Config(preempt_priority=80, preempt_after=0.0))
    host(drive, "w0", (0, 1), (2, 3))
    for number in range(4):
        drive.submit(f"j{number}", gpu={})
        drive.settle()
        drive.pass_time(10_000)
    drive.submit("urgent", priority=90, **asks(2))
    drive.pass_time(3_000)
    drive.settle()
    assert drive.slots("urgent") in ([0, 1], [2, 3])
    assert sorted(drive.states(f"j{number}")[0] for number in range(4)) == ["QUEUED", "QUEUED", "RUNNING", "RUNNING"]
    drive.submit("gang", replicas=2, **asks(2, scheduling="gang"), priority=90)
    assert drive.states("gang") == ["QUEUED", "QUEUED"]


@pytest.mark.parametrize("seed", range(12))
def test_in_random_worlds_each_has_joined_gpus_and_none_waits_beside_free_ones(seed: int) -> None:
    dice = random.Random(seed)
    drive = Driving(Config(ranker=dice.choice(("pack", "fragments", "headroom"))))
    sets: dict[str, list[set[int]]] = {}
    for number in range(3):
        gpus = list(range(8))
        dice.shuffle(gpus)
        cut = sorted(dice.sample(range(1, 8), dice.randint(0, 3)))
        parts = [tuple(gpus[a:b]) for a, b in zip([0, *cut], [*cut, 8], strict=True)]
        sets[f"w{number}"] = [set(part) for part in parts]
        host(drive, f"w{number}", *parts, gpus=8)
    free = {name: set(range(8)) for name in sets}
    held: dict[str, tuple[str, set[int]]] = {}
    for at in range(60):
        if held and dice.random() < 0.45:
            name = dice.choice(sorted(held))
            worker, slots = held.pop(name)
            drive.workers[worker].finish(next(key for key in drive.workers[worker].held if key[1] == name))
            drive.settle()
            free[worker] |= slots
            continue
        count, joined = dice.choice((1, 2, 3)), dice.random() < 0.6
        joined = joined and count > 1
        name = f"j{at}"
        drive.submit(name, **(asks(count) if joined else {"gpu": {"count": count}}))
        drive.settle()
        fits = any(
            any(set(some) <= part for part in sets[worker]) or not joined
            for worker, slots in free.items()
            for some in combinations(sorted(slots), count)
        )
        [worker] = drive.placed_on(name)
        assert (worker != "-") is fits, f"{name} of {count} is on {worker}, and {fits}"
        if worker == "-":
            drive.cancel(name)
            drive.settle()
            continue
        slots = set(drive.slots(name))
        assert not joined or any(slots <= part for part in sets[worker]), f"{slots} of {sets[worker]} are not joined"
        free[worker] -= slots
        held[name] = worker, slots
