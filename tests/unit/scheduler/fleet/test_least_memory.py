"""Of devices and hosts that match a request equally well, those with the least memory are taken."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.schemas.frames import Device
from tests.unit.scheduler.driving import Driving

SMALL, LARGE = 40_960, 81_920
A100 = "NVIDIA A100-SXM4"
ASKS: list[dict[str, Any]] = [{}, {"model": "A100"}, {"min_memory_mib": SMALL}, {"sharing": "mps"}]
RANKERS = ["pack", "fragments", "headroom"]


def joined(drive: Driving, name: str, memory: tuple[int, ...], numa: tuple[int, ...] = ()) -> None:
    """A worker whose devices have this much memory each, in this order, on these NUMA nodes."""
    pool = [
        Device(index, "nvidia", A100, f"GPU-{name}-{index}", mib, numa=numa[index] if numa else -1)
        for index, mib in enumerate(memory)
    ]
    drive.worker(name, gpu_pool=pool)


def memory_of(drive: Driving, job: str, replica: int = 0) -> list[int]:
    pool = drive.attempt(job, replica).worker.inventory.gpu_pool
    return [pool[slot].memory_mib for slot in drive.slots(job, replica)]


@pytest.mark.parametrize("ranker", RANKERS)
@pytest.mark.parametrize("asks", ASKS)
@pytest.mark.parametrize("memory", [(SMALL, LARGE), (LARGE, SMALL)])
@pytest.mark.parametrize("together", [True, False])
def test_a_small_job_leaves_the_large_device_to_a_large_one(
    together: bool, memory: tuple[int, ...], asks: dict[str, Any], ranker: str
) -> None:
    drive = Driving(Config(ranker=ranker))
    if together:
        joined(drive, "w0", memory)
    else:
        for number, mib in enumerate(memory):
            joined(drive, f"w{number}", (mib,))
    drive.submit("small", gpu=asks)
    drive.submit("large", gpu={"model": "A100", "min_memory_mib": LARGE})
    assert (memory_of(drive, "small"), memory_of(drive, "large")) == ([SMALL], [LARGE])


@pytest.mark.parametrize("memory", sorted(set(permutations((SMALL, SMALL, LARGE, LARGE)))))
@pytest.mark.parametrize("numa", [(), (0, 0, 1, 1)])
def test_several_devices_are_the_smallest_that_are_linked(numa: tuple[int, ...], memory: tuple[int, ...]) -> None:
    drive = Driving()
    joined(drive, "w0", memory, numa)
    drive.submit("two", gpu={"count": 2})
    least = min(sum(memory[slot] for slot in pair) for pair in ((0, 1), (2, 3))) if numa else 2 * SMALL
    assert sum(memory_of(drive, "two")) == least


@pytest.mark.parametrize("numa", [(), (0, 0, 1, 1)])
@pytest.mark.parametrize(
    ("names", "gpu", "taken"),
    [
        ("L4 L40S L40S", {"count": 2}, [1, 2]),
        ("L40S L4 L4 L40S", {"count": 2}, [1, 2]),
        ("L40S L4 L40S L40S", {"count": 3}, [0, 2, 3]),
        ("L4 L40S A100", {"count": 2}, [0, 1]),  # no two are alike
        ("L4 L40S L40S", {"count": 2, "model": ["L4", "L40S"]}, [1, 2]),
        ("A10 L4 A10", {"count": 2}, [0, 2]),  # of the same memory
        ("A100 A10 A100 A10", {"count": 2, "model": "A10"}, [1, 3]),  # the better match goes first
    ],
)
def test_several_devices_are_of_one_model_if_as_many_are_free(
    numa: tuple[int, ...], names: str, gpu: dict[str, Any], taken: list[int]
) -> None:
    """An L4 and an L40S were taken, although two L40S were free."""
    memory = {"L4": 24_576, "A10": 24_576, "L40S": 49_152, "A100": LARGE}
    drive = Driving()
    pool = [
        Device(index, "nvidia", f"NVIDIA {name}", f"GPU-{index}", memory[name], numa=numa[index] if numa else -1)
        for index, name in enumerate(names.split())
    ]
    drive.worker("w0", gpu_pool=pool)
    drive.submit("several", gpu=gpu)
    assert list(drive.slots("several")) == taken


@pytest.mark.parametrize("ranker", RANKERS)
def test_of_like_hosts_the_one_whose_free_device_is_small_is_taken(ranker: str) -> None:
    drive = Driving(Config(ranker=ranker))
    for name in ("w0", "w1"):
        joined(drive, name, (SMALL, LARGE))
        drive.submit(f"both-{name}", gpu={"count": 1}, replicas=2)
        drive.settle()
    for name, memory in (("w0", LARGE), ("w1", SMALL)):
        worker = drive.workers[name]
        [ends] = [key for key in worker.held if memory_of(drive, key[1], key[2]) == [memory]]
        worker.finish(ends, 0)
    drive.settle()
    drive.submit("small", gpu={})
    assert (drive.placed_on("small"), memory_of(drive, "small")) == (["w1"], [SMALL])


def test_fewer_free_devices_still_go_before_less_memory() -> None:
    drive = Driving()
    joined(drive, "w0", (SMALL, SMALL))
    joined(drive, "w1", (LARGE,))
    drive.submit("one", gpu={})
    assert drive.placed_on("one") == ["w1"], "the other host stays whole"
