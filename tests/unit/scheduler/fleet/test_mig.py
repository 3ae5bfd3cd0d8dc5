"""MIG slices are placed by profile or memory, one a job; whole GPUs are never mistaken for them, nor they for these."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.schemas.frames import Device
from moorage.schemas.gpu import mig_profile
from tests.unit.scheduler.driving import H100, Driving

SMALL, LARGE = f"{H100} MIG 1g.10gb", f"{H100} MIG 3g.40gb"


def fleet(*, whole: bool = True) -> Driving:
    drive = Driving()
    pool = [Device(1, "nvidia", H100, "GPU-whole", 81559)] if whole else []
    pool += [
        Device(0, "nvidia", SMALL, "MIG-small", 9856, mig=True, profile="1g.10gb"),
        Device(0, "nvidia", LARGE, "MIG-large", 40192, mig=True, profile="3g.40gb"),
    ]
    drive.worker("w0", len(pool), gpu_pool=pool)
    return drive


@pytest.mark.parametrize(
    ("gpu", "slots"),
    [
        ({"profile": "1g.10gb"}, [1]),
        ({"profile": "3g.40gb"}, [2]),
        ({"profile": "3g.40gb", "model": "H100"}, [2]),
        ({"profile": "1g.10gb", "min_memory_mib": 9000}, [1]),
        ({}, [0]),
        ({"model": "H100"}, [0]),
        ({"model": "H100", "min_memory_mib": 9000}, [0]),  # who names a model means the whole of it
        ({"sharing": "time-slice"}, [0]),
        ({"min_memory_mib": 50000}, [0]),
    ],
)
def test_what_a_request_takes(gpu: dict[str, Any], slots: list[int]) -> None:
    drive = fleet()
    drive.submit("j", gpu=gpu)
    assert drive.slots("j") == slots


def test_memory_alone_is_answered_by_a_slice_too_but_never_by_two() -> None:
    drive = fleet(whole=False)
    drive.submit("one", gpu={"min_memory_mib": 20000})
    assert drive.slots("one") == [1]
    drive.submit("two", gpu={"min_memory_mib": 5000, "count": 2})
    drive.submit("shared", gpu={"min_memory_mib": 5000, "sharing": "time-slice"})
    drive.submit("any", gpu={})
    assert [drive.explained(job)["reason"] for job in ("two", "shared", "any")] == ["model"] * 3


def test_a_profile_that_no_worker_has_is_told() -> None:
    drive = fleet()
    accepted = drive.submit("j", gpu={"profile": "2g.20gb"})
    assert drive.explained("j")["reason"] == "profile"
    assert "no worker with the driver noop has a MIG slice 2g.20gb" in str(accepted["warnings"])
    drive.submit("busy", gpu={"profile": "1g.10gb"})
    drive.submit("waits", gpu={"profile": "1g.10gb"})
    assert drive.explained("waits")["reason"] == "busy"


@pytest.mark.parametrize(
    ("gpu", "field"),
    [
        ({"profile": "1g.10gb", "count": 2}, "$.gpu.count"),
        ({"profile": "1g.10gb", "sharing": "time-slice"}, "$.gpu.sharing"),
        ({"profile": "H100"}, "$.gpu.profile"),
    ],
)
def test_what_no_slice_can_do_is_refused(gpu: dict[str, Any], field: str) -> None:
    refused = fleet().submit("j", gpu=gpu)
    assert (refused["code"], refused["field"]) == ("invalid-argument", field)


def test_the_profile_is_in_the_name() -> None:
    assert [mig_profile(name) for name in (H100, SMALL, "NVIDIA A30 MIG 1g.6gb+me")] == ["", "1g.10gb", "1g.6gb+me"]


def test_a_whole_gpu_of_which_only_slices_are_there_is_answered_with_how_to_ask_for_one() -> None:
    """It was answered "did you mean H100"."""
    [warning] = fleet(whole=False).submit("j", gpu={"model": "H100"})["warnings"]
    assert "there are MIG slices, which gpu.profile asks for" in warning
