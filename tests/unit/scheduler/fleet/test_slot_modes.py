"""A worker may keep a GPU for some sharing modes: placement, reasons and fixes go by it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moorage.scheduler.answers import views
from moorage.scheduler.core.config import Config
from moorage.schemas.frames import Device
from moorage.schemas.gpu import GpuSpec
from moorage.worker.lend.offer import matches
from tests.unit.scheduler.driving import H100, Driving

MPS = {"sharing": "mps", "share": {"compute_percent": 50}}


def pool(worker: str, *kept: str) -> list[Device]:
    return [
        Device(index, "nvidia", H100, f"GPU-{worker}-{index}", 81_559, modes=words.split())
        for index, words in enumerate(kept)
    ]


def fleet(ranker: str = "fragments", **workers: tuple[str, ...]) -> Driving:
    drive = Driving(Config(ranker=ranker))
    for name, kept in workers.items():
        drive.worker(name, gpu_pool=pool(name, *kept), modes=["exclusive", "mps", "time-slice"])
    return drive


@pytest.mark.parametrize("ranker", ["pack", "fragments", "headroom"])
@pytest.mark.parametrize("more", [{}, {"scheduling": "spread"}])
def test_each_job_gets_a_device_that_takes_its_mode(ranker: str, more: dict[str, Any]) -> None:
    drive = fleet(ranker, w0=("mps", "exclusive", "mps time-slice", ""))
    drive.submit("whole", gpu={"count": 2, **more})
    assert drive.slots("whole") == [1, 3]
    drive.submit("none", gpu={**more})
    assert drive.explained("none")["reason"] == "busy"
    for number in range(4):
        drive.submit(f"shares{number}", gpu={**MPS, **more})
        assert drive.slots(f"shares{number}")[0] in (0, 2)
    drive.submit("full", gpu={**MPS, **more})
    assert drive.explained("full")["reason"] == "busy"


@pytest.mark.parametrize("prefer", ["pack", "spread"])
def test_what_a_sharer_prefers_is_among_the_devices_that_take_its_mode(prefer: str) -> None:
    drive = fleet(w0=("exclusive", "mps", "exclusive"))
    drive.submit("a", gpu={**MPS, "prefer": prefer})
    drive.submit("b", gpu={**MPS, "prefer": prefer})
    assert drive.slots("a") == drive.slots("b") == [1]


def test_a_model_that_only_a_device_of_another_mode_has_in_whole_words_is_no_better_answer() -> None:
    drive = Driving()
    names = ("A10", "A100", "A100")
    devices = [
        Device(index, "nvidia", name, f"GPU-w0-{index}", 40_000, modes=["mps"] if name == "A10" else [])
        for index, name in enumerate(names)
    ]
    drive.worker("w0", gpu_pool=devices)
    drive.submit("j", gpu={"model": "~A10"})
    assert drive.slots("j") == [1]


def test_a_mode_that_no_device_takes_is_a_reason_with_a_fix() -> None:
    drive = fleet(w0=("mps",) * 4, w1=("mps", "time-slice"))
    accepted = drive.submit("j", gpu={})
    assert "the workers keep each matching GPU for other sharing modes than exclusive" in str(accepted["warnings"])
    told = drive.explained("j")
    assert (told["reason"], told["workers_left"]["slot-mode"]) == ("slot-mode", 0)
    assert "mode mps" in [fix["say"] for fix in drive.fixes("j")]
    refused = drive.submit("never", on_no_match="reject", gpu={})
    assert refused["code"] == "failed-precondition"
    drive.submit("two", gpu={"count": 2, "sharing": "time-slice"})
    assert drive.explained("two")["reason"] == "count"
    drive.submit("model", gpu={"model": "H200"})
    assert drive.explained("model")["reason"] == "model", "what the devices are is told first"
    drive.worker("w2", gpu_pool=pool("w2", "exclusive"))
    drive.settle()
    assert drive.placed_on("j") == ["w2"]


def test_hosts_that_differ_in_the_modes_of_their_devices_alone_are_told_apart() -> None:
    drive = fleet(w0=("mps",), w1=("",), w2=("mps",))
    drive.submit("j", gpu={})
    assert drive.placed_on("j") == ["w1"]


def test_a_gang_and_a_named_device_go_by_the_modes() -> None:
    drive = fleet(w0=("mps", "exclusive"), w1=("mps", ""))
    drive.submit("gang", replicas=3, gpu={"scheduling": "gang"})
    assert drive.explained("gang")["reason"] == "gang-size"
    asks = {"run": {"driver": "process", "argv": ["x"]}, "driver_config": {"process": {"gpu_device_ids": ["GPU-w0-0"]}}}
    drive.submit("named", gpu={}, **asks)
    assert drive.explained("named")["reason"] == "device"
    drive.submit("shares", gpu=MPS, **asks)
    assert drive.slots("shares") == [0]
    drive.submit("pair", replicas=2, gpu={"scheduling": "gang"})
    assert (drive.placed_on("pair"), drive.slots("pair", 0), drive.slots("pair", 1)) == (["w0", "w1"], [1], [1])


def test_what_fits_now_counts_devices_that_are_lent_whole() -> None:
    drive = fleet(w0=("mps", "mps", "", "exclusive"))
    data = views.fleet(drive.engine, drive.now)
    (row,) = data.fits_now
    assert (row.gpus, row.free, row.largest) == (4, 4, 2)


def test_a_worker_that_joins_with_other_modes_keeps_what_runs() -> None:
    drive = fleet(w0=("", ""))
    drive.submit("a", gpu=MPS)
    drive.settle()
    slot = drive.slots("a")[0]
    worker = drive.workers["w0"]
    worker.hello = msgspec.structs.replace(worker.hello, gpu_pool=pool("w0", "exclusive", "exclusive"))
    assert drive.join(worker)["kind"] == "joined"
    drive.renew("w0")
    drive.submit("b", gpu=MPS)
    assert drive.explained("b")["reason"] == "slot-mode", "a device that is shared still takes no more sharers"
    drive.submit("c", gpu={})
    assert drive.slots("c") == [1 - slot]


def test_a_lease_of_this_host_goes_by_the_modes_too() -> None:
    devices = pool("w", "mps", "exclusive", "")
    whole, shared = GpuSpec(), GpuSpec(sharing="mps")
    assert [[matches(spec, device) for device in devices] for spec in (whole, shared)] == [
        [False, True, True],
        [True, False, True],
    ]
