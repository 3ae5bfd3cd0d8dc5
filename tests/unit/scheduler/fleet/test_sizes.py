"""What no host could ever hold is known by the sizes of hosts, not by a look at each of them."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from moorage.scheduler.core.fleet.host import Host, When
from moorage.scheduler.core.fleet.shape import Shape
from tests.unit.scheduler.driving import Driving

SIZES = [(8_000, 64_000), (16_000, 64_000), (0, 128_000)]


def shape_of(drive: Driving, **asked: Any) -> Shape:
    body = msgspec.json.encode({"gpu": {}, "run": {"driver": "noop"}, **asked})
    return drive.engine.reader.read(body)[2]


def test_a_request_that_is_too_large_is_no_look_at_every_host(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Driving()
    drive.checks = False
    for number in range(90):
        cpu, memory = SIZES[number % 2]
        drive.worker(f"w{number}", 2, cpu_milli=cpu, memory_mib=memory)
    looks = 0
    look = Host.replicas_of

    def counted(host: Host, shape: Shape, when: When) -> int:
        nonlocal looks
        looks += when == "ever"
        return look(host, shape, when)

    monkeypatch.setattr(Host, "replicas_of", counted)
    for number in range(5):
        (why,) = drive.submit(f"j{number}", gpu={}, resources={"cpu_milli": 20_000 + number})["warnings"]
        assert why == "no-match: the most that one worker with such GPUs has is 16 cores and 62 GiB of memory"
    assert 0 < looks <= 5 * 2 * 2, "each size once for the answer, and once for the reason"


@pytest.mark.parametrize("seed", range(5))
def test_it_is_what_a_look_at_every_host_says(seed: int) -> None:
    drive, chance = Driving(), random.Random(seed)
    drive.checks = False
    for number in range(30):
        cpu, memory = chance.choice(SIZES)
        lent = chance.choice([None, [0], [0, 1]])
        drive.worker(f"w{number}", chance.choice([2, 4]), cpu_milli=cpu, memory_mib=memory, lent_slots=lent)
    for number in chance.sample(range(30), 20):
        drive.engine.fleet.leave(drive.state.workers[f"w{number}"].num)
    drive.engine.fleet.validate()
    hosts = list(drive.engine.fleet.hosts.values())
    found = set()
    for _ in range(60):
        shape = shape_of(
            drive,
            replicas=chance.randint(1, 24),
            gpu={"count": chance.randint(1, 4), "scheduling": "gang"},
            resources={"cpu_milli": chance.choice([1_000, 6_000, 12_000, 40_000]), "memory_mib": 60_000},
        )
        expected = sum(host.replicas_of(shape, "ever") for host in hosts) >= shape.together
        assert drive.engine.admission.could_ever(shape) == expected
        found.add(expected)
    assert found == {True, False}
