"""What a job ran on is told and billed by the devices that its worker had then, not by those that it has now."""

from __future__ import annotations

from typing import Any

import msgspec

from moorage.scheduler.answers.views import show
from moorage.scheduler.core.ledger.state import POOLS_MAX
from moorage.scheduler.core.outputs.outputs import changes_since
from moorage.scheduler.history.packing import Packing
from moorage.scheduler.history.unpacking import changes_in, is_simulated, read_frame
from moorage.schemas.frames import Device
from tests.unit.scheduler.driving import Driving, wire
from tests.unit.scheduler.honest_worker import Worker, devices

A100 = "NVIDIA A100-SXM4-40GB"


def comes_back(drive: Driving, worker: Worker, pool: list[Device], *, simulated: bool = False) -> None:
    """The host's agent is started again and finds these devices."""
    worker.boot += "+"
    worker.hello = msgspec.structs.replace(worker.hello, gpu_pool=pool, simulated=simulated)
    answer = drive.join(worker)
    assert answer["kind"] == "joined", answer
    drive.renew()


def runs(drive: Driving, name: str, seconds: int = 100) -> None:
    drive.submit(name, gpu={})
    drive.settle()
    drive.now += seconds * 1000
    drive.run_out("w0")
    assert drive.states(name) == ["SUCCEEDED"]


def gpus(drive: Driving, name: str) -> list[str]:
    (placed,) = [change for change in changes_since(drive.state, drive.job(name), 0) if change.state == "PLACED"]
    return placed.gpus


def hours(drive: Driving) -> dict[str, int]:
    answer: Any = drive.usage.answer("t", {"by": ["model"]})
    return {row["model"]: round(row["gpu_s"]) for row in answer["rows"]}


def in_history(drive: Driving, *names: str) -> dict[str, tuple[list[str], bool]]:
    """What the history frame with these jobs tells of each: its devices, and whether they are simulated."""
    packing = Packing(drive.state, "t")
    for name in names:
        assert packing.add(drive.job(name), [], with_request=True)
    frame = read_frame(packing.frame())
    told = {}
    for found in frame.jobs:
        (placed,) = [change for change in changes_in(frame, found) if change.state == "PLACED"]
        told[found.job] = placed.gpus, is_simulated(frame, placed)
    return told


def test_a_job_that_ran_on_other_devices_than_its_host_has_now_is_told_and_billed_by_its_own() -> None:
    drive = Driving()
    worker = drive.worker("w0", 1, A100)
    runs(drive, "first")
    old = gpus(drive, "first")
    comes_back(drive, worker, devices("other", ["NVIDIA H100"]), simulated=True)
    runs(drive, "second", 50)
    new = gpus(drive, "second")
    assert old != new
    for _ in range(2):
        assert (gpus(drive, "first"), gpus(drive, "second")) == (old, new)
        assert hours(drive) == {A100: 100, "NVIDIA H100": 50}
        assert in_history(drive, "first", "second") == {"first": (old, False), "second": (new, True)}
        shown = {name: wire(show(drive.engine, "t", name, follow=False)) for name in ("first", "second")}
        assert {name: data["simulated"] for name, data in shown.items()} == {"first": False, "second": True}
        drive.lead_from_snapshot()


def test_a_job_that_goes_on_in_a_new_session_keeps_the_names_of_its_devices() -> None:
    drive = Driving()
    worker = drive.worker("w0", 2, A100)
    drive.submit("j", gpu={})
    drive.settle()
    old, (slot,) = gpus(drive, "j"), drive.slots("j")
    pool = list(worker.hello.gpu_pool)
    other = devices("other", ["NVIDIA H100", "NVIDIA H100"])
    comes_back(drive, worker, [pool[at] if at == slot else other[at] for at in range(2)])
    assert drive.states("j") == ["RUNNING"]
    shown: Any = wire(show(drive.engine, "t", "j", follow=False))
    assert (gpus(drive, "j"), shown["replica_states"][0]["gpus"]) == (old, old)


def test_the_devices_of_only_so_many_sessions_are_known_and_no_others_are_told_in_their_place() -> None:
    drive = Driving()
    worker = drive.worker("w0", 1, "M0")
    for number in range(1, POOLS_MAX + 5):
        runs(drive, f"j{number}", 10 * number)
        comes_back(drive, worker, devices(f"n{number}", [f"M{number}"]))
    assert len(drive.state.workers["w0"].former) == POOLS_MAX
    counted = {f"M{number}": 10 * (number + 1) for number in range(POOLS_MAX + 4)}
    assert hours(drive) == counted, "each run was counted when it ended, with the devices that it had"
    assert (gpus(drive, "j1"), len(gpus(drive, "j9"))) == ([], 1)


def test_a_host_that_comes_back_as_it_was_has_one_list_of_devices() -> None:
    drive = Driving()
    worker = drive.worker("w0", 2, A100)
    for _ in range(5):
        comes_back(drive, worker, list(worker.hello.gpu_pool))
    assert drive.state.workers["w0"].former == ()
