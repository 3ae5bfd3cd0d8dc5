"""Guests: jobs on the devices of frozen jobs, and how these get their devices back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger.invariants import Broken, validate
from moorage.scheduler.core.outputs.outputs import changes_since
from moorage.scheduler.core.queries import views
from moorage.scheduler.leader.fleet_frames import FleetFrames
from moorage.schemas.capabilities import Capabilities
from tests.scheduler.driving import Driving
from tests.scheduler.honest_worker import Worker

CAN = {"noop": Capabilities(freezes=True, guests=True)}


@pytest.fixture
def drive() -> Driving:
    return Driving()


def frozen(drive: Driving, gpus: int = 1, asks: int = 1, **job: Any) -> Worker:
    """Have a worker whose only GPUs the frozen job `owner` has."""
    worker = drive.worker("w0", gpus, capabilities=CAN)
    drive.submit("owner", **{"gpu": {"count": asks}, **job})
    drive.settle()
    order(drive, "freeze")
    assert drive.states("owner") == ["FROZEN"]
    return worker


def order(drive: Driving, verb: str, job: str = "owner") -> dict[str, Any]:
    answer = drive.order(verb, job=job)
    drive.settle()
    return answer


def guest(drive: Driving, name: str = "guest", **job: Any) -> None:
    drive.submit(name, **{"gpu": {}, "guest": True, **job})
    drive.settle()


def lingers(drive: Driving, worker: Worker, name: str = "guest") -> None:
    """Have a guest that was asked to end, and whose memory is still there."""
    key = drive.member(name).key
    worker.finish(key, -15, "end", freed=False)
    drive.settle()


def whys(drive: Driving, name: str) -> list[tuple[str, str]]:
    return [(change.state, change.why) for change in changes_since(drive.state, drive.job(name), 0) if change.why]


def test_a_guest_and_no_other_job_is_placed_on_the_gpu_of_a_frozen_job(drive: Driving) -> None:
    worker = frozen(drive)
    drive.submit("plain", gpu={})
    guest(drive)
    assert (drive.states("plain"), drive.states("guest")) == (["QUEUED"], ["RUNNING"])
    assert drive.slots("guest") == drive.slots("owner") == [0]
    assert [held.place.guest for held in worker.held.values()] == [False, True]
    assert drive.free_gpus() == 0
    guest(drive, "second")
    assert drive.states("second") == ["QUEUED"], "one guest a GPU"
    waits = drive.explained("second")
    assert (waits["reason"], waits["because"]) == (
        "busy", "as a guest it starts where a GPU of one worker is free, or a frozen job's without a guest",
    )  # fmt: skip


def test_a_guest_has_a_free_gpu_as_any_job(drive: Driving) -> None:
    frozen(drive, gpus=2)
    guest(drive)
    assert (drive.slots("guest"), drive.member("guest").guest) == ([1], False)
    guest(drive, "second")
    assert (drive.slots("second"), drive.member("second").guest) == ([0], True)
    order(drive, "resume")
    assert (drive.states("guest"), drive.states("owner")) == (["RUNNING"], ["RUNNING"])
    assert drive.states("second") == ["QUEUED"]


def test_a_guest_waits_until_a_job_is_frozen_and_starts_then(drive: Driving) -> None:
    drive.worker("w0", 1, capabilities=CAN)
    drive.submit("owner", gpu={})
    drive.settle()
    guest(drive)
    assert drive.states("guest") == ["QUEUED"]
    order(drive, "freeze")
    assert drive.states("guest") == ["RUNNING"]


def test_a_frozen_job_runs_on_once_its_guest_has_ended_and_its_gpu_is_seen_free(drive: Driving) -> None:
    worker = frozen(drive)
    guest(drive)
    worker.auto = False
    order(drive, "resume")
    assert drive.states("guest") == ["ENDING"]
    assert [end.job for frame in drive.wanted for end in frame.end] in ([], ["guest"])
    lingers(drive, worker)
    drive.renew()
    assert not any(frame.freeze for frame in drive.wanted), "its memory is still there"
    worker.auto = True
    worker.free(("t", "guest", 0, worker_fence(worker, "guest")))
    drive.report("w0")
    assert [freeze.on for frame in drive.wanted for freeze in frame.freeze] == [False], "at once, by no renewal"
    drive.settle()
    assert drive.states("owner") == ["RUNNING"]
    assert drive.states("guest") == ["QUEUED"]
    assert (drive.replica("guest").retries, drive.replica("guest").losses) == (0, 0)
    assert whys(drive, "guest")[0][1].startswith("guest: ")
    assert worker.told["not-resumed"] == 0


def worker_fence(worker: Worker, job: str) -> int:
    return next(key[3] for key in worker.held if key[1] == job)


def test_a_guest_that_is_just_placed_ends_before_the_job_runs_on(drive: Driving) -> None:
    worker = frozen(drive)
    worker.auto = False  # the placement is on its way
    guest(drive)
    assert drive.states("guest") == ["PLACED"]
    order(drive, "resume")
    assert drive.states("guest") == ["ENDING"]
    worker.auto = True
    drive.renew()
    drive.settle()
    drive.renew()
    drive.settle()
    assert (drive.states("guest"), drive.states("owner")) == (["QUEUED"], ["RUNNING"])


def test_what_a_worker_reports_of_a_resumed_job_beside_its_guest_is_not_believed(drive: Driving) -> None:
    worker = frozen(drive)
    guest(drive)
    worker.auto = False
    order(drive, "resume")
    worker.say("resumed", next(held.place for held in worker.held.values() if held.place.job == "owner"))
    drive.report("w0")
    assert drive.states("owner") == ["FROZEN"]


@pytest.mark.parametrize("verb", ["cancel", "requeue", "deadline"])
def test_a_frozen_job_with_a_grace_that_is_to_end_gets_its_gpu_first(drive: Driving, verb: str) -> None:
    worker = frozen(drive, **({"deadline_s": 30} if verb == "deadline" else {}))
    guest(drive)
    worker.auto = False
    if verb == "cancel":
        drive.cancel("owner")
    elif verb == "requeue":
        order(drive, "requeue")
    else:
        drive.pass_time(31_000)
    drive.settle()
    assert drive.states("guest") == ["ENDING"]
    drive.renew()
    assert {end.job for frame in drive.wanted for end in frame.end} == {"guest"}
    lingers(drive, worker)
    worker.auto = True
    worker.free(("t", "guest", 0, worker_fence(worker, "guest")))
    drive.report("w0")
    drive.settle()
    assert worker.told["exited"] == 2
    after = {"cancel": "CANCELLED", "requeue": "RUNNING", "deadline": "TIMED_OUT"}[verb]
    assert drive.states("owner") == [after]


def test_without_a_grace_it_ends_as_it_is_and_its_guest_goes_on(drive: Driving) -> None:
    frozen(drive, run={"driver": "noop", "grace_s": 0})
    guest(drive)
    drive.cancel("owner")
    drive.settle()
    assert (drive.states("owner"), drive.states("guest")) == (["CANCELLED"], ["RUNNING"])
    assert drive.replica("guest").attempt == 1
    drive.submit("plain", gpu={})
    drive.settle()
    assert drive.states("plain") == ["QUEUED"], "the guest has the GPU alone now"
    drive.workers["w0"].finish(drive.member("guest").key)
    drive.settle()
    assert (drive.states("plain"), drive.slots("plain")) == (["RUNNING"], [0])


def test_a_job_that_ends_while_it_is_frozen_leaves_its_gpu_to_the_guest(drive: Driving) -> None:
    worker = frozen(drive, gpus=2, asks=2)
    guest(drive)
    worker.finish(drive.member("owner").key, 1, "exit")
    drive.settle()
    assert (drive.states("owner"), drive.states("guest")) == (["FAILED"], ["RUNNING"])
    assert drive.free_gpus() == 1
    drive.workers["w0"].finish(drive.member("guest").key)
    drive.settle()
    assert drive.free_gpus() == 2


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_guest_and_its_host_outlive_a_takeover(drive: Driving, snapshot: bool) -> None:
    frozen(drive)
    guest(drive)
    if snapshot:
        drive.take_snapshot()
    drive.lead()
    drive.renew()
    drive.settle()
    assert drive.member("guest").guest
    guest(drive, "second")
    assert drive.states("second") == ["QUEUED"]
    order(drive, "resume")
    assert (drive.states("owner"), drive.states("guest")) == (["RUNNING"], ["QUEUED"])
    order(drive, "freeze")
    assert sorted([*drive.states("guest"), *drive.states("second")]) == ["QUEUED", "RUNNING"]


def test_both_come_back_with_a_worker_that_joins_anew(drive: Driving) -> None:
    worker = frozen(drive)
    guest(drive)
    drive.join(worker)
    drive.settle()
    drive.renew()
    drive.settle()
    assert (drive.states("owner"), drive.states("guest")) == (["FROZEN"], ["RUNNING"])
    order(drive, "resume")
    assert (drive.states("owner"), drive.states("guest")) == (["RUNNING"], ["QUEUED"])


def test_a_guest_of_a_lost_worker_is_tried_elsewhere_and_a_kept_job_waits(drive: Driving) -> None:
    worker = frozen(drive, on_partition="keep")
    guest(drive)
    worker.fence()
    drive.pass_time(40_000, renew=False)
    assert (drive.states("owner"), drive.states("guest")) == (["LOST_KEPT"], ["QUEUED"])
    drive.join(worker)
    drive.settle()
    drive.renew()
    drive.settle()
    assert (drive.states("owner"), drive.states("guest")) == (["FROZEN"], ["RUNNING"])


def test_a_guest_whose_gpu_does_not_come_back_free_does_not_hold_up_a_cancel(drive: Driving) -> None:
    worker = frozen(drive)
    guest(drive)
    worker.auto = False
    drive.cancel("owner")
    lingers(drive, worker)
    place = next(held.place for held in worker.held.values() if held.place.job == "guest")
    worker.say("quarantined", place, 0, "0")
    drive.report("w0")
    worker.auto = True
    drive.renew()
    drive.settle()
    assert drive.states("owner") == ["CANCELLED"]


def test_a_gpu_that_does_not_come_back_free_holds_up_a_resume_until_an_operator_says_it_is_well(
    drive: Driving,
) -> None:
    worker = frozen(drive)
    guest(drive)
    worker.auto = False
    order(drive, "resume")
    lingers(drive, worker)
    place = next(held.place for held in worker.held.values() if held.place.job == "guest")
    worker.say("quarantined", place, 0, "0")
    drive.report("w0")
    worker.auto = True
    drive.renew()
    drive.settle()
    assert drive.states("owner") == ["FROZEN"]
    worker.held.pop(drive_key(worker, "guest"))  # as it takes the operator's word
    drive.operate("release", "w0", slots=[0])
    drive.renew()
    drive.settle()
    assert drive.states("owner") == ["RUNNING"]


def drive_key(worker: Worker, job: str) -> tuple[str, str, int, int]:
    return next(key for key in worker.held if key[1] == job)


@pytest.mark.parametrize(
    ("hello", "job"),
    [
        ({"capabilities": {"noop": Capabilities(freezes=True, guests=True, fence="none")}}, {}),
        ({"capabilities": {"noop": Capabilities(freezes=True)}}, {}),
        ({"models": ["NVIDIA H100 80GB HBM3 MIG 1g.10gb"]}, {"gpu": {"min_memory_mib": 1}}),
    ],
)
def test_no_guest_goes_where_none_is_taken(drive: Driving, hello: dict[str, Any], job: dict[str, Any]) -> None:
    drive.worker("w0", 1, **{"capabilities": CAN, **hello})
    drive.submit("owner", gpu=job.get("gpu", {}))
    drive.settle()
    order(drive, "freeze")
    guest(drive, **job)
    assert (drive.states("owner"), drive.states("guest")) == (["FROZEN"], ["QUEUED"])


def test_all_gpus_of_a_guest_are_of_frozen_jobs_or_none_is(drive: Driving) -> None:
    frozen(drive, gpus=3, asks=2)
    guest(drive, gpu={"count": 3})
    assert drive.states("guest") == ["QUEUED"]
    guest(drive, "second", gpu={"count": 2})
    assert drive.slots("second") == [0, 1]


def test_a_guest_of_several_frozen_jobs_ends_for_one_of_them(drive: Driving) -> None:
    frozen(drive, gpus=2)
    drive.submit("other", gpu={})
    drive.settle()
    order(drive, "freeze", "other")
    guest(drive, gpu={"count": 2})
    assert drive.slots("guest") == [0, 1]
    order(drive, "resume", "other")
    assert (drive.states("other"), drive.states("owner"), drive.states("guest")) == (
        ["RUNNING"], ["FROZEN"], ["QUEUED"],
    )  # fmt: skip


def test_a_guest_can_be_frozen_itself_and_ends_for_the_job_that_has_the_gpu(drive: Driving) -> None:
    frozen(drive)
    guest(drive)
    order(drive, "freeze", "guest")
    assert drive.states("guest") == ["FROZEN"]
    guest(drive, "second")
    assert drive.states("second") == ["QUEUED"], "a guest has no guests"
    order(drive, "resume")
    assert (drive.states("owner"), drive.states("guest")) == (["RUNNING"], ["QUEUED"])


def test_a_guest_counts_as_any_job_of_its_tenant(drive: Driving) -> None:
    frozen(drive)
    drive.order("limit", tenant="u", gpus=1)
    drive.submit("guest", gpu={}, guest=True, tenant="u")
    drive.settle()
    assert drive.states("guest", "u") == ["RUNNING"]
    assert drive.state.tenants["u"].gpus == 1


def shown(drive: Driving, job: str) -> dict[str, Any]:
    found = views.show(drive.engine, "t", job)
    assert isinstance(found, dict)
    (row,) = found["replica_states"]
    return {name: row[name] for name in ("guest", "lends") if name in row}


def test_a_guest_and_the_job_that_lends_are_shown_so(drive: Driving) -> None:
    worker = frozen(drive, gpus=2)
    frames = FleetFrames(drive.engine)
    assert (cells(drive, frames), shown(drive, "owner")) == ("f·", {})
    drive.submit("plain", gpu={})
    guest(drive)
    assert (shown(drive, "guest"), shown(drive, "owner")) == ({"guest": True}, {"lends": True})
    assert cells(drive, frames) == "g#"
    worker.finish(drive.member("owner").key, 1, "exit")
    drive.settle()
    assert cells(drive, frames) == "##", "the guest has it alone"


def cells(drive: Driving, frames: FleetFrames) -> str:
    """The only worker's, as observers see them; the same as a question is answered."""
    for _ in frames.catch_up():
        pass
    (row,) = msgspec.json.decode(frames.frame())["workers"]
    (asked,) = views.fleet(drive.engine, drive.now)["workers"]
    assert row["cells"] == asked["cells"]
    return str(row["cells"])


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ({"gpu": None}, "needs GPUs"),
        ({"gpu": {"sharing": "mps"}}, "share a GPU"),
        ({"gpu": {"scheduling": "gang"}, "replicas": 2}, "gang"),
        ({"gpu": {"profile": "1g.10gb"}}, "whole GPUs"),
        ({"on_partition": "keep"}, "lease"),
    ],
)
def test_what_can_be_no_guest_is_refused(drive: Driving, job: dict[str, Any], says: str) -> None:
    answer = drive.submit("guest", **{"gpu": {}, "guest": True, **job})
    assert (answer["code"], says in answer["message"]) == ("invalid-argument", True), answer


def test_a_ledger_in_which_a_job_runs_beside_its_guest_is_broken(drive: Driving) -> None:
    frozen(drive)
    guest(drive)
    validate(drive.state)
    drive.replica("owner").state = 3
    with pytest.raises(Broken, match="beside its guest"):
        validate(drive.state)
    drive.replica("owner").state = 14
    drive.member("guest").guest = False
    with pytest.raises(Broken, match="two exclusive leases"):
        validate(drive.state)


def test_no_guest_is_placed_in_the_record_that_resumes(drive: Driving) -> None:
    frozen(drive)
    drive.offer_order("resume", job="owner")
    drive.offer_submit("guest", gpu={}, guest=True)
    drive.tick()
    assert drive.states("guest") == ["QUEUED"]


def test_no_guest_ends_for_another_job_as_that_frees_no_gpu() -> None:
    drive = Driving(Config(preempt_priority=60, preempt_after=0.0))
    frozen(drive)
    guest(drive)
    drive.pass_time(3_000)
    drive.submit("urgent", gpu={}, priority=90)
    drive.pass_time(5_000)
    drive.settle()
    assert (drive.states("urgent"), drive.states("guest")) == (["QUEUED"], ["RUNNING"])
    drive.workers["w0"].finish(drive.member("owner").key, 1, "exit")
    drive.settle()
    drive.pass_time(5_000)
    drive.settle()
    assert (drive.states("urgent"), drive.states("guest")) == (["RUNNING"], ["QUEUED"])


def test_a_guest_is_no_victim_on_a_host_where_another_job_is_one() -> None:
    """The cheapest is chosen of all on the host: a guest of low priority would end again and again, for nothing."""
    drive = Driving(Config(preempt_priority=60, preempt_after=0.0))
    drive.worker("w0", 2, capabilities=CAN)
    drive.submit("owner", gpu={})
    drive.submit("other", gpu={}, priority=50)
    drive.settle()
    order(drive, "freeze")
    guest(drive, priority=10)
    drive.pass_time(3_000)
    drive.submit("urgent", gpu={}, priority=90)
    drive.pass_time(3_000)
    drive.settle()
    assert (drive.states("urgent"), drive.states("other")) == (["RUNNING"], ["QUEUED"])
    assert drive.states("guest") == ["RUNNING"]


def test_a_job_that_is_frozen_by_another_order_before_it_has_run_on_lends_again(drive: Driving) -> None:
    """Its worker reports nothing then, as nothing has changed."""
    worker = frozen(drive)
    worker.auto = False  # the order to resume is lost
    drive.order("resume", job="owner")
    drive.order("freeze", job="owner")
    worker.auto = True
    guest(drive)
    assert (drive.states("owner"), drive.states("guest")) == (["FROZEN"], ["RUNNING"])
