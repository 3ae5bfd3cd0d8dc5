"""A request may say the least compute capability of its GPUs: a filter of each device, with its reason and its fix."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.schemas.frames import Device
from moorage.schemas.gpu import GpuSpec, capability_of
from moorage.worker.lend.offer import matches
from tests.unit.scheduler.driving import H100, Driving

KINDS = {
    "old": ("Tesla V100", "7.0"),
    "new": (H100, "9.0"),
    "amd": ("AMD Instinct MI300X", "gfx942"),
    "none": ("X", ""),
}


def pool(worker: str, *kinds: str) -> list[Device]:
    found = []
    for index, kind in enumerate(kinds):
        model, compute = KINDS[kind]
        vendor = "amd" if kind == "amd" else "nvidia"
        found.append(Device(index, vendor, model, f"GPU-{worker}-{index}", 81_559, compute=compute))
    return found


def fleet(ranker: str = "fragments", **workers: tuple[str, ...]) -> Driving:
    drive = Driving(Config(ranker=ranker))
    for name, kinds in workers.items():
        drive.worker(name, gpu_pool=pool(name, *kinds))
    return drive


def asks(least: str, **more: Any) -> dict[str, Any]:
    return {"gpu": {"vendor": "", "min_compute_capability": least, **more}}


@pytest.mark.parametrize(
    ("text", "number"),
    [("8.0", 80), ("8.6", 86), ("10.0", 100), ("12.1", 121), ("gfx942", 0), ("", 0), ("8", 0), ("08.0", 0), ("8.00", 0),
     ("8.x", 0), ("-8.0", 0), ("８.0", 0)],
)  # fmt: skip
def test_capabilities_order_as_numbers_and_other_texts_are_none(text: str, number: int) -> None:
    assert capability_of(text) == number


@pytest.mark.parametrize("ranker", ["pack", "fragments", "headroom"])
def test_each_device_has_at_least_that_capability(ranker: str) -> None:
    drive = fleet(ranker, mixed=("old", "new", "none", "new"), old=("old",) * 4, amd=("amd",) * 2)
    drive.submit("two", **asks("8.0", count=2))
    assert (drive.placed_on("two"), drive.slots("two")) == (["mixed"], [1, 3])
    drive.submit("waits", **asks("8.0"))
    assert drive.explained("waits")["reason"] == "busy"
    drive.submit("any", **asks("7.0"))
    assert drive.states("any") == ["PLACED"]
    drive.submit("shared", **asks("7.0", sharing="mps", share={"memory_mib": 1000}))
    assert drive.states("shared") == ["PLACED"]


def test_what_no_gpu_has_is_a_reason_of_its_own_with_a_fix() -> None:
    drive = fleet(old=("old",) * 4)
    drive.submit("j", **asks("9.0"))
    told = drive.explained("j")
    assert told["reason"] == "compute"
    assert {
        "say": "compute capability 7.0 instead of 9.0",
        "request": {"gpu": {"vendor": "", "min_compute_capability": "7.0"}},
    }.items() <= drive.fixes("j")[0].items()
    refused = drive.submit("never", on_no_match="reject", **asks("9.0"))
    assert (
        refused["code"],
        "the highest compute capability of the GPUs that match otherwise is 7.0" in refused["message"],
    ) == ("failed-precondition", True)
    drive.submit("fixed", **drive.fixes("j")[0]["request"])
    assert drive.states("fixed") == ["PLACED"]


def test_memory_is_judged_among_the_gpus_that_have_the_capability() -> None:
    drive = Driving()
    large = Device(0, "nvidia", "Tesla V100", "GPU-large", 200_000, compute="7.0")
    small = Device(1, "nvidia", H100, "GPU-small", 80_000, compute="9.0")
    drive.worker("w0", gpu_pool=[large, small])
    drive.submit("j", **asks("9.0", min_memory_mib=100_000))
    assert drive.explained("j")["reason"] == "memory"
    refused = drive.submit("k", on_no_match="reject", **asks("9.0", min_memory_mib=100_000))
    assert "the largest GPU that matches otherwise has 80000 MiB" in refused["message"]
    drive.submit("amd", gpu={"vendor": "amd", "min_compute_capability": "9.0"})
    assert drive.explained("amd")["reason"] == "vendor"


def test_gpus_without_a_capability_have_none() -> None:
    drive = fleet(amd=("amd",) * 2)
    refused = drive.submit("j", on_no_match="reject", **asks("5.0"))
    assert "the GPUs that match otherwise have no compute capability" in refused["message"]


def test_a_lease_of_this_host_has_the_capability_too() -> None:
    old, new = pool("w", "old", "new")
    spec = GpuSpec(min_compute_capability="8.0")
    assert [matches(spec, device) for device in (old, new)] == [False, True]
