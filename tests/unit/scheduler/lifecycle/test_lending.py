"""One GPU is lent by one worker at a time, and a hello that is refused names its field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moorage.schemas.frames import Device, Goodbye, Hello, Join
from tests.unit.scheduler.driving import H100, Driving
from tests.unit.scheduler.honest_worker import Worker


def gpu(number: int, index: int = 0) -> Device:
    """As NVML names one."""
    return Device(index, "nvidia", H100, f"GPU-8f6c1b52-77aa-4c1e-9d2b-{number:012x}", 81_559)


def guest(*pool: Device, name: str = "w1", **hello: Any) -> Worker:
    """A worker that has not joined yet."""
    return Worker(name, Hello(name, "boot-1", drivers=["noop"], gpu_pool=list(pool), **hello), f"machine-{name}", True)


def test_a_gpu_that_another_worker_lends_is_refused_and_its_name_told() -> None:
    drive = Driving()
    drive.worker("w0", gpu_pool=[gpu(0), gpu(1, 1)])
    other = guest(gpu(7), gpu(1, 1))
    answer = drive.join(other)
    assert answer["code"] == "gpu-lent-twice"
    assert answer["field"] == "$.hello.gpu_pool[1].uuid"
    assert answer["found"] == gpu(1).uuid
    assert "w0" in answer["message"]
    assert "w0" in answer["next"]
    assert answer["retry_after_s"] > 0
    assert list(drive.state.workers) == ["w0"], "nothing of it is recorded"
    drive.submit("j", replicas=3, gpu={})
    assert drive.states("j") == ["PLACED", "PLACED", "QUEUED"]


def test_of_two_joins_in_one_record_one_lends_it() -> None:
    drive = Driving()
    replies = [drive.send(name, guest(gpu(0), name=name).join_frame()) for name in ("w0", "w1")]
    drive.tick()
    assert drive.answers[replies[0]]["kind"] == "joined"
    assert drive.answers[replies[1]]["code"] == "gpu-lent-twice"


@pytest.mark.parametrize("how", ["lost", "goodbye"])
def test_it_may_be_lent_under_another_name_once_the_first_is_gone(how: str) -> None:
    drive = Driving()
    worker = drive.worker("w0", auto=False, gpu_pool=[gpu(0)])
    other = guest(gpu(0))
    assert drive.join(other)["code"] == "gpu-lent-twice"
    if how == "goodbye":
        drive.send("w0", Goodbye(worker.session))
    else:
        drive.pass_time(30_000, renew=False)
    drive.workers["w1"] = other
    assert drive.join(other)["kind"] == "joined"
    worker.n += 1
    assert drive.join(worker)["code"] == "gpu-lent-twice", "and now the other way round"


def test_it_may_join_again_itself_and_take_what_it_was_given_since() -> None:
    drive = Driving()
    worker = drive.worker("w0", gpu_pool=[gpu(0)])
    worker.n += 1
    worker.hello = msgspec.structs.replace(worker.hello, gpu_pool=[gpu(0), gpu(1, 1)])
    assert drive.join(worker)["kind"] == "joined"
    assert drive.join(guest(gpu(1)))["code"] == "gpu-lent-twice"
    worker.n += 1
    worker.hello = msgspec.structs.replace(worker.hello, gpu_pool=[gpu(0)])
    assert drive.join(worker)["kind"] == "joined"
    assert drive.join(guest(gpu(1)))["kind"] == "joined", "what was given back may be lent by another"


def test_a_kept_job_may_still_use_it_on_the_machine_that_is_lost() -> None:
    drive = Driving()
    drive.worker("w0", gpu_pool=[gpu(0)])
    drive.submit("j", gpu={}, on_partition="keep")
    drive.settle()
    drive.pass_time(30_000, renew=False)
    assert drive.states("j") == ["LOST_KEPT"]
    assert drive.join(guest(gpu(0)))["code"] == "gpu-lent-twice"


@pytest.mark.parametrize("takeover", [False, True])
def test_what_is_lent_no_more_but_still_runs_a_job_is_nobody_elses(takeover: bool) -> None:
    drive = Driving()
    worker = drive.worker("w0", gpu_pool=[gpu(0), gpu(1, 1)])
    drive.submit("j", replicas=2, gpu={})
    drive.settle()
    worker.n += 1
    worker.hello = msgspec.structs.replace(worker.hello, lent_slots=[0])
    assert drive.join(worker)["kind"] == "joined"
    assert drive.states("j") == ["RUNNING", "RUNNING"], "what runs there goes on"
    if takeover:
        drive.lead()
        drive.renew("w0")
    other = guest(gpu(1))
    assert drive.join(other)["code"] == "gpu-lent-twice"
    drive.run_out("w0")
    drive.workers["w1"] = other
    assert drive.join(other)["kind"] == "joined"


def test_a_new_leader_knows_who_lends_what() -> None:
    drive = Driving()
    drive.worker("w0", gpu_pool=[gpu(0)])
    drive.lead()
    assert drive.join(guest(gpu(0)))["code"] == "gpu-lent-twice"


def test_two_agents_of_one_machine_may_lend_a_part_each() -> None:
    drive = Driving()
    pool = [gpu(0), gpu(1, 1)]
    drive.worker("w0", gpu_pool=pool, lent_slots=[0])
    assert drive.join(guest(*pool, lent_slots=[1]))["kind"] == "joined"
    assert drive.join(guest(*pool, name="w2"))["code"] == "gpu-lent-twice"


def test_a_pci_address_is_its_machines_own() -> None:
    drive = Driving()
    card = Device(0, "intel", "Data Center GPU Max 1550", "0000:4d:00.0")
    drive.worker("w0", gpu_pool=[card])
    assert drive.join(guest(card))["kind"] == "joined"


@pytest.mark.parametrize(
    ("change", "field", "found"),
    [
        ({"gpu_pool": [gpu(0), Device(1, "nvidia", H100, "")]}, "$.hello.gpu_pool[1].uuid", ""),
        ({"gpu_pool": [gpu(0), Device(1, "nvidia", H100, " \t")]}, "$.hello.gpu_pool[1].uuid", ""),
        ({"gpu_pool": [gpu(0), gpu(0, 1)]}, "$.hello.gpu_pool[1].uuid", gpu(0).uuid),
        ({"gpu_pool": [gpu(0), Device(-2, "nvidia", H100, "G")]}, "$.hello.gpu_pool[1].index", "-2"),
        ({"gpu_pool": [Device(0, "nvidia", H100, "G", peers=[1, -1])]}, "$.hello.gpu_pool[0].peers[1]", "-1"),
        ({"sharers_max": {"mps": -4}}, "$.hello.sharers_max.mps", "-4"),
        ({"lent_slots": [0, -1]}, "$.hello.lent_slots[1]", "-1"),
        ({"gpu_pool": [gpu(0), gpu(1, 2), gpu(2, 2)]}, "$.hello.gpu_pool[2].index", "2"),
        ({"gpu_pool": [gpu(0), gpu(1, 1)], "lent_slots": [1, 2]}, "$.hello.lent_slots[1]", "2"),
        ({"gpu_pool": [], "lent_slots": [0]}, "$.hello.lent_slots[0]", "0"),
        ({"cpu_milli": -1}, "$.hello.cpu_milli", "-1"),
        ({"gpu_pool": [gpu(number, number) for number in range(65)]}, "$.hello.gpu_pool", "65"),
    ],
)
def test_a_refused_hello_names_its_field(change: dict[str, Any], field: str, found: str) -> None:
    drive = Driving()
    hello = msgspec.structs.replace(Hello("w0", "boot-1", gpu_pool=[gpu(0)]), **change)
    reply = drive.send("w0", Join("machine", "boot-1", 1, hello))
    drive.tick()
    answer = drive.answers[reply]
    assert answer["kind"] == "error"
    assert (answer["field"], answer.get("found", "")) == (field, found)
    assert answer["allowed"]
    assert drive.state.workers == {}


def test_each_vendor_counts_its_own_and_parts_of_a_device_have_its_index() -> None:
    drive = Driving()
    parts = [
        Device(0, "nvidia", H100, f"MIG-8f6c1b52-77aa-4c1e-9d2b-{number:012x}", 9_984, mig=True) for number in (1, 2)
    ]
    others = [Device(0, "amd", "MI300X", "a" * 16), Device(5, "amd", "MI300X", "b" * 16)]
    drive.worker("w0", gpu_pool=[gpu(0), *parts, *others], lent_slots=[4, 0])
    assert drive.state.workers["w0"].session
