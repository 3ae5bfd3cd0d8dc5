"""A job that names devices is placed on these and no others, or waits with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.fleet import fleet as fleets
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.frames import Device
from moorage.schemas.frames.fleet import slots_named
from tests.unit.scheduler.driving import H100, Driving

RANKERS = ["pack", "fragments", "headroom"]


def named(*ids: str, **gpu: Any) -> dict[str, Any]:
    """Fields of a request for exactly these devices."""
    return {
        "gpu": {"count": len(ids), **gpu},
        "run": {"driver": "process", "argv": ["x"]},
        "driver_config": {"process": {"gpu_device_ids": list(ids)}},
    }


def fleet(ranker: str = "fragments", workers: int = 3, gpus: int = 4) -> Driving:
    return Driving.with_hosts(*[gpus] * workers, config=Config(ranker=ranker))


def why(drive: Driving, job: str) -> Any:
    return drive.explained(job)


@pytest.mark.parametrize("ranker", RANKERS)
def test_a_job_gets_the_devices_that_it_names(ranker: str) -> None:
    drive = fleet(ranker)
    drive.submit("one", **named("GPU-w1-2"))
    assert (drive.placed_on("one"), drive.slots("one")) == (["w1"], [2])
    drive.submit("two", **named("GPU-w2-3", "GPU-w2-0"))
    assert (drive.placed_on("two"), drive.slots("two")) == (["w2"], [0, 3])
    drive.submit("index", replicas=3, **named("1"))
    assert sorted(drive.placed_on("index")) == ["w0", "w1", "w2"]
    assert [drive.slots("index", replica) for replica in range(3)] == [[1]] * 3
    drive.submit("shared", replicas=2, **named("GPU-w0-3", sharing="mps"))
    assert (drive.placed_on("shared"), drive.slots("shared", 1)) == (["w0", "w0"], [3])
    drive.submit("spread", replicas=2, **named("2", scheduling="spread"))
    assert sorted(drive.placed_on("spread")) == ["w0", "w2"]


def test_letter_case_of_a_uuid_does_not_count() -> None:
    drive = Driving()
    pool = [Device(index, "nvidia", "H100", f"GPU-6F0c-{index}", 81_559) for index in range(2)]
    drive.worker("w0", gpu_pool=pool)
    for job, one in (("lower", "gpu-6f0c-1"), ("upper", "GPU-6F0C-0")):
        drive.submit(job, **named(one))
        assert (drive.placed_on(job), drive.slots(job)) == (["w0"], [int(one[-1])])
    twice = drive.submit("twice", **named("GPU-6f0c-1", "GPU-6F0C-1"))
    assert twice["message"] == "the device GPU-6f0c-1 is named twice"


@pytest.mark.parametrize("ranker", RANKERS)
def test_fact_16_a_device_that_is_leased_is_waited_for(ranker: str) -> None:
    drive = fleet(ranker)
    for job in ("first", "second"):
        drive.submit(job, **named("GPU-w1-2"))
    drive.settle()
    assert (drive.states("first"), drive.states("second")) == (["RUNNING"], ["QUEUED"])
    assert why(drive, "second")["reason"] == "busy"
    drive.submit("other", **named("GPU-w1-3"))
    assert drive.slots("other") == [3], "it holds up no job beside it"
    drive.run_out("w1")
    drive.settle()
    assert (drive.placed_on("second"), drive.slots("second")) == (["w1"], [2])


def test_hosts_stay_one_class_until_one_of_their_devices_is_named() -> None:
    drive = fleet()
    assert len(drive.engine.fleet.classes) == 1
    drive.submit("index", **named("0"))
    drive.submit("none", **named("GPU-nowhere"))
    assert len(drive.engine.fleet.classes) == 1
    drive.submit("one", **named("GPU-w1-2"))
    assert len(drive.engine.fleet.classes) == 2


def test_a_device_that_no_worker_has_is_waited_for_until_one_joins_with_it() -> None:
    drive = fleet()
    drive.submit("late", **named("GPU-w7-1"))
    told = why(drive, "late")
    assert (told["reason"], drive.states("late")) == ("device", ["QUEUED"])
    refused = drive.submit("never", on_no_match="reject", **named("GPU-w8-1"))
    assert refused["code"] == "failed-precondition"
    assert "no worker with such GPUs has GPU-w8-1" in refused["message"]
    drive.worker("w7", 2)
    drive.settle()
    assert (drive.placed_on("late"), drive.slots("late")) == (["w7"], [1])


def test_devices_of_two_hosts_are_never_together() -> None:
    drive = fleet()
    drive.submit("apart", **named("GPU-w0-1", "GPU-w1-1"))
    drive.submit("twice", **named("1", "GPU-w0-1"))
    drive.settle()
    assert (why(drive, "apart")["reason"], why(drive, "twice")["reason"]) == ("device", "device")


def test_an_index_of_two_vendors_is_one_device() -> None:
    drive = Driving()
    pool = [Device(0, "nvidia", H100, "GPU-n", 1000), Device(0, "amd", "MI300X", "GPU-a", 1000)]
    drive.worker("w0", 2, gpu_pool=pool)
    drive.submit("amd", **named("0", vendor="amd"))
    assert drive.slots("amd") == [1]
    drive.submit("both", **named("0", "5", vendor=""))
    assert why(drive, "both")["reason"] == "device"


@pytest.mark.parametrize(
    ("driver", "one"),
    [("docker", "nvidia.com/gpu=gpu1"), ("vm", "0000:af:00.1"), ("vm", "0000:AF:00.1"), ("vm", 1), ("podman", "GPU-b")],
)
def test_every_name_that_a_hello_tells_finds_the_device(driver: str, one: Any) -> None:
    drive = Driving()
    pool = [
        Device(0, "nvidia", H100, "GPU-a", 1000, pci="00000000:17:00.0", cdi=["nvidia.com/gpu=gpu0"]),
        Device(1, "nvidia", H100, "GPU-b", 1000, pci="00000000:AF:00.1", cdi=["nvidia.com/gpu=gpu1"]),
    ]
    drive.worker("w0", 2, gpu_pool=pool, drivers=["docker", "podman", "vm"])
    run = {"driver": driver, "argv": ["x"]} | ({} if driver == "vm" else {"image": "a:1"})
    drive.submit("j", gpu={}, run=run, driver_config={driver: {"gpu_device_ids": [one]}})
    assert drive.slots("j") == [1]
    again = {"resource_requirements": {"gpu": {"device_ids": [str(one)]}}, "run": run}
    drive.submit("k", **again)
    assert why(drive, "k")["reason"] == "busy"


@pytest.mark.parametrize("one", ["0", "GPU-w0-1"])
def test_fact_17_no_worker_gives_exact_devices_of_a_cluster(one: str) -> None:
    """Also one whose devices have that index or that uuid: the kubelet chooses, so another device might come."""
    drive = Driving.with_hosts(4, drivers=["kubernetes"])
    run = {"driver": "kubernetes", "image": "busybox"}
    drive.submit("count", gpu={"count": 2}, run=run)
    assert drive.placed_on("count") == ["w0"]
    ids: dict[str, Any] = {"gpu": {}, "run": run, "driver_config": {"kubernetes": {"gpu_device_ids": [one]}}}
    words = "the driver kubernetes gives no exact devices: its cluster chooses them"
    assert f"no-match: {words}" in str(drive.submit("waits", **ids))
    assert why(drive, "waits")["reason"] == "device"
    refused = drive.submit("never", on_no_match="reject", **ids)
    assert refused["code"] == "failed-precondition"
    assert words in refused["message"]
    ids["driver_config"]["kubernetes"]["gpu_device_ids"] = [one, one]
    assert drive.submit("twice", **ids)["code"] == "invalid-argument"


def test_a_worker_that_leaves_takes_its_devices_with_it() -> None:
    drive = fleet()
    drive.submit("one", **named("GPU-w1-2"))
    drive.engine.fleet.leave(drive.state.workers["w1"].num)
    by_name = drive.engine.fleet._by_name
    assert by_name is not None
    assert {name for name in by_name if name.startswith("GPU-w1")} == set()
    assert len(by_name) == 8


def test_fact_14_a_driver_without_gpus_is_waited_for_or_refused() -> None:
    drive = Driving()
    no_gpus = {"process": Capabilities(gpu_enabled=False)}
    drive.worker("w0", 2, drivers=["process", "noop"], capabilities=no_gpus)
    asks: dict[str, Any] = {"gpu": {}, "run": {"driver": "process", "argv": ["x"]}}
    drive.submit("waits", **asks)
    assert why(drive, "waits")["reason"] == "gpu-driver"
    drive.submit("cpu", run=asks["run"])
    drive.submit("noop", gpu={})
    assert (drive.placed_on("cpu"), drive.placed_on("noop")) == (["w0"], ["w0"])
    assert drive.submit("never", on_no_match="reject", **asks)["code"] == "failed-precondition"
    assert drive.submit("none-such", on_no_match="reject", gpu={"count": 9})["code"] == "failed-precondition"
    drive.worker("w1", 1, drivers=["process"])
    drive.settle()
    assert drive.placed_on("waits") == ["w1"]


@pytest.mark.parametrize("asks", [{}, {"on_no_match": "reject"}])
def test_fact_15_a_driver_without_gpus_is_told_before_the_shape_of_ids(asks: dict[str, Any]) -> None:
    drive = Driving.with_hosts(2, drivers=["vm"], capabilities={"vm": Capabilities(gpu_enabled=False)})
    wrong = {
        "gpu": {"count": 2},
        "run": {"driver": "vm", "argv": ["x"]},
        "driver_config": {"vm": {"gpu_device_ids": ["0", "0"]}},
    }
    answer = drive.submit("j", **wrong, **asks)
    assert (answer["code"], answer["field"]) == ("failed-precondition", "$.gpu")
    drive.worker("w1", 2, drivers=["vm"])
    assert drive.submit("j", **wrong, **asks)["code"] == "invalid-argument"
    assert drive.submit("k", **(wrong | {"gpu": None}), **asks)["field"].startswith("$.driver_config.vm")


def test_explain_offers_any_device_in_place_of_the_named_ones() -> None:
    drive = fleet()
    drive.submit("j", **named("GPU-nowhere"))
    fixes = drive.fixes("j")
    assert fixes[0]["say"] == "any GPU that fits instead of GPU-nowhere"
    assert fixes[0]["request"] == {"driver_config": {"process": {}}}
    drive.submit("k", run={"driver": "process", "argv": ["x"]}, resource_requirements={"gpu": {"device_id": "GPU-x"}})
    assert drive.fixes("k")[0]["request"] == {"resource_requirements": {"gpu": {"count": None}}}


def test_a_gpu_that_is_there_and_not_lent_is_none_to_ask_for() -> None:
    drive = Driving.with_hosts(4, lent_slots=[0, 1])
    drive.submit("named", **named("3"))
    drive.submit("many", gpu={"count": 3})
    assert why(drive, "named")["reason"] == "device"
    assert why(drive, "many")["reason"] == "count"
    assert why(drive, "named")["because"] == "the most matching GPUs that one worker lends is 0"


def test_the_body_reaches_the_worker_as_it_was_sent() -> None:
    drive = fleet(workers=1)
    body = b'{"job":"j","gpu":{},"run":{"argv":["x"]},"driver_config":{"process":{"device_ids":["3"]},"x":7}}'
    drive.submit("j", body=body)
    (place,) = [place for frame in drive.wanted for place in frame.place]
    assert bytes(place.body) == body
    assert place.slots == [3]


@pytest.mark.parametrize("mode", ["native", "vm"])
def test_a_mode_concerns_apples_gpus_alone(mode: str) -> None:
    drive = Driving()
    drive.worker("mac", 1, "Apple M3", vendor="apple")
    drive.worker("linux", 1)
    drive.submit("any", gpu={"mode": mode})
    assert drive.placed_on("any") == ["linux"]
    drive.submit("apple", gpu={"mode": mode, "vendor": "apple"})
    assert why(drive, "apple")["reason"] == "mode"
    refused = drive.submit("never", gpu={"mode": mode, "vendor": "apple"}, on_no_match="reject")
    assert refused["code"] == "failed-precondition"
    drive.submit("plain", gpu={"vendor": "apple"})
    assert drive.placed_on("plain") == ["mac"]


def test_devices_are_found_also_beyond_as_many_names_as_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "ASKED_MAX", 2)
    drive = fleet(workers=8)
    for number in range(8):
        drive.submit(f"j{number}", **named(f"GPU-w{number}-1"))
        drive.submit(f"nowhere{number}", **named(f"GPU-x{number}-1"))
    assert [drive.placed_on(f"j{number}") for number in range(8)] == [[f"w{number}"] for number in range(8)]
    assert drive.engine.fleet._asked_names == {f"GPU-w{number}-1" for number in range(8)}, "only those of some host"


@pytest.mark.parametrize("ids", [("GPU-n", "0"), ("0", "GPU-n")])
def test_an_index_of_two_vendors_leaves_the_device_that_is_named_besides(ids: tuple[str, str]) -> None:
    slots = {"0": 0b11, "GPU-n": 0b01, "GPU-a": 0b10}
    assert slots_named(ids, slots.__getitem__, 0b11) == 0b11
