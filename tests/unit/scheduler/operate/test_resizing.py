"""An operator's `resize`: the room check, the record, what the fleet counts, and what workers are sent."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.answers import views
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.acts.job import RESIZES_MAX
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.folding import FoldError
from moorage.scheduler.core.ledger.record import Record
from moorage.scheduler.core.ledger.state import Job
from moorage.scheduler.follower.granted import granted_to
from moorage.schemas.capabilities import Capabilities, Enforced
from moorage.schemas.codec import decode_request
from moorage.schemas.errors import Refused
from moorage.schemas.gpu import Share
from moorage.schemas.operate import act_of
from tests.unit.scheduler.driving import Driving, wire

MIB = 80_000
HARD = Capabilities(resizes={"mps": "next-attempt"}, enforced={"mps": Enforced("hard", "hard")})


def _can(**resizes: str) -> dict[str, Capabilities]:
    return {"noop": Capabilities(resizes=resizes or {"time-slice": "live", "mps": "counted"})}


def _gpu(percent: int = 100, memory_mib: int = 0, sharing: str = "time-slice", **more: Any) -> dict[str, Any]:
    return {"sharing": sharing, "share": {"compute_percent": percent, "memory_mib": memory_mib}, **more}


@pytest.fixture
def drive() -> Driving:
    return Driving.with_hosts(1, gpu_memory_mib=MIB, capabilities=_can())


def _job(drive: Driving, name: str) -> Job:
    job = drive.state.job("t", name)
    assert job is not None
    return job


def _used(drive: Driving) -> tuple[int, int]:
    device = drive.engine.fleet.hosts[0].shared[0]
    return device.percent, device.memory_mib


def test_a_running_job_gets_another_part_and_its_worker_is_sent_it(drive: Driving) -> None:
    drive.submit("j", gpu=_gpu(20, 1_000))
    drive.settle()
    answer = drive.order("resize", job="j", compute_percent=40, memory_mib=8_192, why="eval is late")
    assert answer | {"resized": 0} == {
        "kind": "done", "verb": "resize", "changed": True, "tenant": "t", "job": "j", "state": "RUNNING", "members": 1,
        "resized": 0,
    }  # fmt: skip
    resized = answer["resized"]
    assert resized["attempts"] == {"live": 1}
    assert (resized["compute_percent"], resized["memory_mib"]) == (40, 8_192)
    assert _used(drive) == (40, 8_192)
    (frame,) = [frame for frame in drive.wanted if frame.resize]
    assert not frame.place, "an attempt that runs is not placed again"
    sent = frame.resize[0]
    assert sent.resized == _job(drive, "j").resizes[-1].seq == len(drive.records)
    gpu = decode_request(sent.body).gpu
    assert gpu is not None
    assert gpu.share == Share(8_192, 40)
    shown = wire(views.show(drive.engine, "t", "j"))
    assert shown["resized"] == {"memory_mib": 8_192, "compute_percent": 40, "since_ms": drive.now}
    assert "40%" in shown["gpu"], "ls and show tell the part that it has"
    change = shown["changes"][-1]
    assert (change["state"], change["by"], change["said"]) == ("RESIZED", "operator", "ana")
    assert change["why"] == "40 % of compute, 8192 MiB: eval is late"
    assert not drive.order("resize", job="j", compute_percent=40)["changed"]


def test_a_worker_that_missed_a_resize_is_sent_it_until_it_has_it(drive: Driving) -> None:
    drive.submit("j", gpu=_gpu(20))
    drive.settle()
    worker = drive.workers["w0"]
    worker.auto = False
    drive.order("resize", job="j", compute_percent=40)
    drive.renew()
    assert [len(frame.resize) for frame in drive.wanted] == [1], "its renewal shows that it has not got it"
    worker.auto = True
    drive.renew()
    assert [held.place.resized for held in worker.held.values()] == [_job(drive, "j").resizes[-1].seq]
    drive.renew()
    assert not drive.wanted


def test_a_resize_takes_no_room_that_other_sharers_have(drive: Driving) -> None:
    for name, percent, mib in (("j", 20, 10_000), ("k", 50, 60_000)):
        drive.submit(name, gpu=_gpu(percent, mib))
    drive.settle()
    refused = drive.order("resize", job="j", compute_percent=51)
    assert (refused["code"], refused["found"], refused["allowed"]) == ("failed-precondition", "51 %", "at most 50 %")
    refused = drive.order("resize", job="j", memory_mib=20_001)
    assert (refused["found"], refused["allowed"]) == ("20001 MiB", "at most 20000 MiB")
    assert _used(drive) == (70, 70_000)
    assert not _job(drive, "j").resizes
    assert drive.order("resize", job="j", compute_percent=50, memory_mib=20_000)["changed"]
    assert _used(drive) == (100, MIB)


def test_replicas_on_one_gpu_share_what_is_free(drive: Driving) -> None:
    drive.submit("j", gpu=_gpu(10), replicas=2)
    drive.submit("k", gpu=_gpu(39))
    drive.settle()
    assert drive.order("resize", job="j", compute_percent=31)["allowed"] == "at most 30 %"
    assert drive.order("resize", job="j", compute_percent=30)["resized"]["attempts"] == {"live": 2}
    assert _used(drive) == (99, 0)


def test_the_record_that_grants_a_resize_places_no_sharer_into_its_room(drive: Driving) -> None:
    drive.submit("j", gpu=_gpu(20))
    drive.settle()
    reply = drive.offer_order("resize", job="j", compute_percent=60)
    drive.offer_submit("k", gpu=_gpu(50))
    drive.tick()
    assert drive.answers[reply]["changed"]
    assert drive.states("k") == ["QUEUED"]
    drive.order("resize", job="j", compute_percent=50)
    assert drive.states("k") != ["QUEUED"], "what a smaller part leaves is room for others at once"


def test_a_waiting_job_is_resized_and_starts_with_its_new_part(drive: Driving) -> None:
    drive.submit("j", gpu=_gpu(60))
    drive.settle()
    drive.submit("k", gpu=_gpu(60))
    assert drive.states("k") == ["QUEUED"]
    answer = drive.order("resize", job="k", compute_percent=40)
    assert answer["resized"].get("members", {}) == {}
    drive.settle()
    assert drive.states("k") == ["RUNNING"]
    place = next(held.place for held in drive.workers["w0"].held.values() if held.place.job == "k")
    gpu = decode_request(place.body).gpu
    assert gpu is not None
    assert gpu.share == Share(0, 40)
    assert place.resized == _job(drive, "k").resizes[-1].seq


@pytest.mark.parametrize(
    ("gpu", "capabilities", "asked", "said", "fix"),
    [
        ({}, _can(), {"compute_percent": 40}, "shares no GPU", "submit another job"),
        (None, _can(), {"compute_percent": 40}, "shares no GPU", "submit another job"),
        (_gpu(20), {}, {"compute_percent": 10}, "cannot change the part of a running attempt", "hold the job"),
        (_gpu(20, 1_000, "mps"), {"noop": HARD}, {"memory_mib": 500}, "MPS sets the memory", "hold the job"),
    ],
)
def test_what_cannot_be_resized_is_refused(
    gpu: Any, capabilities: Any, asked: dict[str, int], said: str, fix: str
) -> None:
    drive = Driving.with_hosts(1, gpu_memory_mib=MIB, capabilities=capabilities)
    drive.submit("j", gpu=gpu)
    drive.settle()
    refused = drive.order("resize", job="j", **asked)
    assert refused["code"] == "failed-precondition"
    assert said in refused["message"]
    assert refused["next"].startswith(fix)


def test_what_is_refused_while_a_job_runs_can_be_done_while_it_waits() -> None:
    drive = Driving.with_hosts(1, gpu_memory_mib=MIB, capabilities={"noop": HARD})
    drive.submit("j", gpu=_gpu(20, 1_000, "mps"))
    drive.settle()
    refused = drive.order("resize", job="j", memory_mib=500)
    assert refused["next"] == "hold the job, requeue it, resize it while it waits, and release it"
    drive.order("hold", job="j")
    drive.order("requeue", job="j")
    drive.settle()
    assert drive.order("resize", job="j", memory_mib=500)["resized"]["memory_mib"] == 500
    drive.order("release", job="j")
    drive.settle()
    assert drive.states("j") == ["RUNNING"]


def test_what_mps_has_fixed_takes_compute_with_the_next_attempt() -> None:
    drive = Driving.with_hosts(1, gpu_memory_mib=MIB, capabilities={"noop": HARD})
    drive.submit("j", gpu=_gpu(20, 1_000, "mps"))
    drive.settle()
    assert drive.order("resize", job="j", compute_percent=40)["resized"]["attempts"] == {"next-attempt": 1}


def test_memory_is_taken_at_once_and_compute_with_the_next_attempt_where_a_limiter_stands_beside_mps() -> None:
    drive = Driving.with_hosts(1, gpu_memory_mib=MIB, capabilities=_can(mps="live next-attempt"))
    drive.submit("j", gpu=_gpu(20, 1_000, "mps"))
    drive.settle()
    for asked, how in (
        ({"memory_mib": 900}, "live"),
        ({"compute_percent": 30}, "next-attempt"),
        ({"memory_mib": 800, "compute_percent": 40}, "live next-attempt"),
    ):
        assert drive.order("resize", job="j", **asked)["resized"]["attempts"] == {how: 1}


def test_an_attempt_that_began_with_no_part_is_only_counted(drive: Driving) -> None:
    drive.submit("j", gpu={"sharing": "time-slice"})
    drive.settle()
    assert drive.order("resize", job="j", compute_percent=40)["resized"]["attempts"] == {"counted": 1}
    assert drive.order("resize", job="j", compute_percent=30)["resized"]["attempts"] == {"counted": 1}
    drive.order("requeue", job="j")
    drive.settle()
    assert drive.order("resize", job="j", compute_percent=35)["resized"]["attempts"] == {"live": 1}


def test_a_new_leader_and_a_snapshot_know_the_new_part(drive: Driving) -> None:
    drive.submit("j", gpu=_gpu(20))
    drive.settle()
    drive.order("resize", job="j", compute_percent=40)
    drive.lead_from_snapshot()
    drive.renew()
    drive.check()
    assert _used(drive) == (40, 0)
    assert drive.order("resize", job="j", compute_percent=100)["resized"]["compute_percent"] == 100
    assert _used(drive) == (0, 0), "all of the compute is no part, and is not counted"


def test_a_resize_changes_what_its_tenant_uses_from_then_on(drive: Driving) -> None:
    drive.order("share", weight=1)
    drive.submit("j", gpu=_gpu(30))
    drive.settle()
    assert drive.state.tenants["t"].rate_milli == 300
    drive.order("resize", job="j", compute_percent=60)
    assert drive.state.tenants["t"].rate_milli == 600
    drive.run_out("w0")
    assert drive.state.tenants["t"].rate_milli == 0


def test_gpu_time_counts_each_part_for_as_long_as_the_job_had_it(drive: Driving) -> None:
    drive.submit("j", gpu=_gpu(30))
    drive.settle()
    placed_ms = _job(drive, "j").history[0][1]
    drive.tick(10_000)
    drive.order("resize", job="j", compute_percent=40)
    resized_ms = _job(drive, "j").resizes[0].since_ms
    drive.tick(10_000)
    sums = granted_to(drive.state, _job(drive, "j"), drive.engine.reader.request_of)
    assert sums is not None
    assert sums[0] == (resized_ms - placed_ms) * 300 + (drive.now - resized_ms) * 400


def test_a_job_remembers_so_many_of_its_parts(drive: Driving) -> None:
    drive.submit("j", gpu=_gpu(20))
    drive.settle()
    for number in range(RESIZES_MAX + 2):
        drive.order("resize", job="j", compute_percent=21 + number % 2)
    assert len(_job(drive, "j").resizes) == RESIZES_MAX


def test_a_resize_that_cannot_be_is_no_record(drive: Driving) -> None:
    drive.submit("j", gpu=_gpu(20))
    for act in (acts.Resize(99, 0, 50, 0, "o", ""), acts.Resize(_job(drive, "j").num, 0, 101, 0, "o", "")):
        bad = Record(2, 1, 7, 9, drive.now, drive.state.digest, acts=[act])
        with pytest.raises(FoldError):
            fold(drive.state, bad, 99)


@pytest.mark.parametrize("asked", [{}, {"compute_percent": 0}, {"compute_percent": 101}, {"memory_mib": 0}])
def test_a_resize_names_a_part_that_there_is(asked: dict[str, int]) -> None:
    with pytest.raises(Refused) as refused:
        act_of("resize", {"tenant": "t", "job": "j", **asked})
    assert refused.value.problem.next == "moorage admin resize --help"
