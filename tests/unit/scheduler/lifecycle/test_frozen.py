"""Frozen jobs hold no GPUs: who gets these meanwhile, and how the frozen jobs get them back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moorage.scheduler.answers import views
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.folding import FoldError
from moorage.scheduler.core.ledger.record import Record
from moorage.scheduler.core.ledger.records import Op
from moorage.scheduler.core.outputs.outputs import changes_since
from moorage.scheduler.leader.fleet_frames import FleetFrames
from moorage.scheduler.ledger import state_bytes as snapshots
from moorage.scheduler.ledger.invariants import Broken, validate
from moorage.schemas.attempt import AttemptName
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.frames import LedgerCopies, Unwell
from tests.unit.scheduler.driving import Driving, wire
from tests.unit.scheduler.honest_worker import Worker

CAN = {"noop": Capabilities(freezes=True)}


@pytest.fixture
def drive() -> Driving:
    return Driving()


def frozen(drive: Driving, gpus: int = 1, asks: int = 1, **job: Any) -> Worker:
    """Have a worker for whose GPUs the frozen job `owner` waits."""
    worker = drive.worker("w0", gpus, capabilities=CAN)
    drive.submit("owner", **{"gpu": {"count": asks}, **job})
    drive.settle()
    order(drive, "freeze")
    assert drive.states("owner") == ["FROZEN"]
    return worker


def order(drive: Driving, verb: str, job: str = "owner", **more: Any) -> dict[str, Any]:
    answer = drive.order(verb, job=job, **more)
    drive.settle()
    return answer


def spot(drive: Driving, name: str = "spot", **job: Any) -> None:
    drive.submit(name, **{"gpu": {}, "preemptible": True, **job})
    drive.settle()


def lingers(drive: Driving, worker: Worker, name: str = "spot") -> None:
    """Have a job that was asked to end, and whose memory is still there."""
    worker.finish(drive.attempt(name).name, -15, "end", freed=False)
    drive.settle()


def key_of(worker: Worker, job: str) -> AttemptName:
    return next(key for key in worker.held if key[1] == job)


def whys(drive: Driving, name: str) -> list[tuple[str, str]]:
    return [(change.state, change.why) for change in changes_since(drive.state, drive.job(name), 0) if change.why]


# ------------------------------------------------------------------------------------- what a frozen job holds


def test_a_frozen_attempt_holds_its_hosts_memory_and_no_gpu(drive: Driving) -> None:
    drive.worker("w0", 2, capabilities=CAN, cpu_milli=4_000, memory_mib=1_000)
    drive.submit("owner", gpu={}, resources={"cpu_milli": 1_000, "memory_mib": 600})
    drive.settle()
    order(drive, "freeze")
    (host,) = drive.engine.fleet.hosts.values()
    assert (host.free.bit_count(), host.memory_free, drive.state.tenants["t"].gpus) == (2, 400, 0)
    assert (drive.attempt("owner").mask, drive.attempt("owner").home, drive.job("owner").held) == (0, 1, 1)
    order(drive, "resume")
    assert (drive.states("owner"), drive.free_gpus(), drive.state.tenants["t"].gpus) == (["RUNNING"], 1, 1)


def test_a_frozen_attempt_uses_nothing_of_its_tenants_share(drive: Driving) -> None:
    drive.order("share", tenant="t", gpus=1)
    frozen(drive)
    assert drive.state.tenants["t"].rate_milli == 0
    order(drive, "resume")
    assert drive.state.tenants["t"].rate_milli == 1_000


def test_gpu_time_is_counted_while_the_gpu_is_held(drive: Driving) -> None:
    frozen(drive)
    drive.pass_time(3_600_000)
    order(drive, "resume")
    drive.pass_time(60_000)
    (row,) = drive.usage.answer(None, {"by": ["tenant"]})["rows"]  # type: ignore[index]
    assert 59 <= row["gpu_s"] < 70, row


# ------------------------------------------------------------------------------------- who gets the devices


def test_a_preemptible_job_and_no_other_is_placed_where_a_frozen_job_waits(drive: Driving) -> None:
    frozen(drive)
    drive.submit("plain", gpu={})
    spot(drive)
    assert (drive.states("plain"), drive.states("spot")) == (["QUEUED"], ["RUNNING"])
    assert (drive.slots("spot"), drive.attempt("owner").mask) == ([0], 0)
    spot(drive, "second")
    assert drive.states("second") == ["QUEUED"]


def test_a_job_that_waits_for_a_gpu_of_frozen_jobs_is_told_so(drive: Driving) -> None:
    frozen(drive)
    drive.submit("plain", gpu={})
    waits = drive.explained("plain")
    assert (waits["reason"], waits["because"]) == ("frozen-here", "frozen jobs wait for 1 GPU of w0")


def test_a_preemptible_job_has_a_free_gpu_as_any_job(drive: Driving) -> None:
    frozen(drive, gpus=2)
    spot(drive)
    assert drive.slots("spot") == [1]
    spot(drive, "second")
    assert drive.slots("second") == [0]
    order(drive, "resume")
    assert (drive.states("spot"), drive.states("owner"), drive.states("second")) == (
        ["RUNNING"], ["RUNNING"], ["QUEUED"],
    )  # fmt: skip


def test_a_preemptible_job_waits_until_a_job_is_frozen_and_starts_then(drive: Driving) -> None:
    drive.worker("w0", 1, capabilities=CAN)
    drive.submit("owner", gpu={})
    drive.settle()
    spot(drive)
    assert drive.states("spot") == ["QUEUED"]
    order(drive, "freeze")
    assert drive.states("spot") == ["RUNNING"]


def test_it_may_have_free_gpus_and_gpus_of_frozen_jobs_together(drive: Driving) -> None:
    frozen(drive, gpus=3, asks=2)
    spot(drive, gpu={"count": 3})
    assert drive.slots("spot") == [0, 1, 2]
    order(drive, "resume")
    assert (drive.states("owner"), drive.states("spot")) == (["RUNNING"], ["QUEUED"])


def test_a_job_that_ends_while_it_is_frozen_leaves_its_gpus_to_all(drive: Driving) -> None:
    worker = frozen(drive, gpus=2, asks=2)
    drive.submit("plain", gpu={})
    spot(drive)
    assert drive.states("plain") == ["QUEUED"]
    worker.finish(drive.attempt("owner").name, 1, "exit")
    drive.settle()
    assert (drive.states("owner"), drive.states("spot"), drive.states("plain")) == (
        ["FAILED"], ["RUNNING"], ["RUNNING"],
    )  # fmt: skip


# ------------------------------------------------------------------------------------- how it is resumed


def test_a_frozen_job_runs_on_once_the_job_on_its_gpu_has_ended_and_its_memory_is_seen_free(drive: Driving) -> None:
    worker = frozen(drive)
    spot(drive)
    worker.auto = False
    order(drive, "resume")
    assert drive.states("spot") == ["ENDING"]
    lingers(drive, worker)
    drive.renew()
    assert not any(frame.freeze for frame in drive.wanted), "its memory is still there"
    worker.auto = True
    worker.free(key_of(worker, "spot"))
    drive.report_all("w0")
    assert [(freeze.on, freeze.n > 0) for frame in drive.wanted for freeze in frame.freeze] == [(False, True)]
    drive.settle()
    assert (drive.states("owner"), drive.states("spot")) == (["RUNNING"], ["QUEUED"])
    assert (drive.replica("spot").retries, drive.replica("spot").losses) == (0, 0)
    assert "frozen job" in whys(drive, "spot")[0][1]
    assert worker.told["not-resumed"] == 0


def test_one_that_is_just_placed_ends_before_the_job_runs_on(drive: Driving) -> None:
    worker = frozen(drive)
    worker.auto = False  # the placement is on its way
    spot(drive)
    assert drive.states("spot") == ["PLACED"]
    order(drive, "resume")
    assert drive.states("spot") == ["ENDING"]
    worker.auto = True
    for _ in range(2):
        drive.renew()
        drive.settle()
    assert (drive.states("spot"), drive.states("owner")) == (["QUEUED"], ["RUNNING"])


def test_a_worker_that_does_not_give_the_gpu_lets_the_job_wait_on(drive: Driving) -> None:
    worker = frozen(drive)
    worker.local = {0}
    order(drive, "resume")
    assert (drive.states("owner"), drive.attempt("owner").mask, worker.told["not-resumed"]) == (["FROZEN"], 0, 1)
    drive.renew()
    drive.settle()
    assert worker.told["not-resumed"] == 1, "it is not asked before the GPU is free again"
    worker.local = set()
    drive.renew()
    drive.settle()
    assert drive.states("owner") == ["RUNNING"]


def test_a_late_refusal_of_an_earlier_order_is_not_believed(drive: Driving) -> None:
    worker = frozen(drive)
    worker.local = {0}
    order(drive, "resume")
    first = drive.attempt("owner").leased
    worker.local = set()
    worker.auto = False
    drive.renew()
    assert drive.attempt("owner").leased > first
    place = worker.held[key_of(worker, "owner")].place
    worker.say("not-resumed", place, first)
    worker.say("resumed", place, first)
    drive.report_all("w0")
    assert (drive.states("owner"), drive.attempt("owner").mask) == (["FROZEN"], 1)
    worker.auto = True
    drive.renew()
    drive.settle()
    assert drive.states("owner") == ["RUNNING"]


def test_no_job_is_placed_in_the_record_that_resumes(drive: Driving) -> None:
    frozen(drive)
    drive.offer_order("resume", job="owner")
    drive.offer_submit("spot", gpu={}, preemptible=True)
    drive.tick()
    assert drive.states("spot") == ["QUEUED"]


def test_a_resume_goes_before_the_tenants_jobs_of_its_priority_at_a_limit_and_behind_higher_ones(
    drive: Driving,
) -> None:
    frozen(drive, gpus=2)
    drive.order("limit", tenant="t", gpus=1)
    drive.submit("other", gpu={})
    drive.settle()
    assert drive.states("other") == ["RUNNING"], "a frozen job counts for no limit"
    drive.submit("equal", gpu={})
    drive.submit("urgent", gpu={}, priority=90)
    order(drive, "resume")
    assert drive.states("owner") == ["FROZEN"]
    for name, next_ in (("other", "urgent"), ("urgent", "owner"), ("owner", "equal")):
        drive.workers["w0"].finish(drive.attempt(name).name)
        drive.settle()
        drive.pass_time(1_000)
        drive.settle()
        assert drive.states(next_) == ["RUNNING"], f"{next_} is next"


@pytest.mark.parametrize("verb", ["job", "tenant"])
def test_a_hold_keeps_a_frozen_job_frozen(drive: Driving, verb: str) -> None:
    frozen(drive)
    whose = {"job": "owner"} if verb == "job" else {"tenant": "t"}
    drive.order("hold", **whose)
    order(drive, "resume")
    assert drive.states("owner") == ["FROZEN"]
    drive.order("release", **whose)
    drive.settle()
    assert drive.states("owner") == ["RUNNING"]


def test_of_two_that_were_frozen_in_turn_on_one_gpu_the_first_goes_first(drive: Driving) -> None:
    frozen(drive)
    spot(drive)
    order(drive, "freeze", "spot")
    spot(drive, "second")
    assert [drive.states(name) for name in ("owner", "spot", "second")] == [["FROZEN"], ["FROZEN"], ["RUNNING"]]
    order(drive, "resume", "spot")
    assert [drive.states(name) for name in ("owner", "spot", "second")] == [["FROZEN"], ["RUNNING"], ["QUEUED"]]
    order(drive, "freeze", "spot")
    order(drive, "resume")
    order(drive, "resume", "spot")
    assert [drive.states(name) for name in ("owner", "spot")] == [["RUNNING"], ["FROZEN"]], "it waits for its GPU"
    drive.workers["w0"].finish(drive.attempt("owner").name)
    drive.settle()
    assert drive.states("spot") == ["RUNNING"]


def test_of_several_frozen_jobs_one_gets_its_gpu_from_a_job_that_has_those_of_all(drive: Driving) -> None:
    frozen(drive, gpus=2)
    drive.submit("other", gpu={})
    drive.settle()
    order(drive, "freeze", "other")
    spot(drive, gpu={"count": 2})
    assert drive.slots("spot") == [0, 1]
    order(drive, "resume", "other")
    assert [drive.states(name) for name in ("other", "owner", "spot")] == [["RUNNING"], ["FROZEN"], ["QUEUED"]]


def test_a_gpu_that_does_not_come_back_free_holds_up_a_resume_until_an_operator_says_it_is_well(
    drive: Driving,
) -> None:
    worker = frozen(drive)
    spot(drive)
    worker.auto = False
    order(drive, "resume")
    lingers(drive, worker)
    worker.say("quarantined", worker.held[key_of(worker, "spot")].place, 0, "0")
    drive.report_all("w0")
    worker.auto = True
    drive.renew()
    drive.settle()
    assert drive.states("owner") == ["FROZEN"]
    worker.held.pop(key_of(worker, "spot"))  # as it takes the operator's word
    drive.operate("release", "w0", slots=[0])
    drive.renew()
    drive.settle()
    assert drive.states("owner") == ["RUNNING"]


def test_a_job_that_is_frozen_by_another_order_before_it_has_run_on_waits_again(drive: Driving) -> None:
    worker = frozen(drive)
    worker.auto = False  # the order to resume is lost
    drive.order("resume", job="owner")
    drive.order("freeze", job="owner")
    worker.auto = True
    for _ in range(2):
        drive.renew()
        drive.settle()
    spot(drive)
    assert (drive.states("owner"), drive.states("spot")) == (["FROZEN"], ["RUNNING"])


# ------------------------------------------------------------------------------------- how it ends


@pytest.mark.parametrize("verb", ["cancel", "requeue", "deadline"])
def test_a_frozen_job_with_a_grace_has_the_job_on_its_gpu_end_as_it_is_to_end(drive: Driving, verb: str) -> None:
    frozen(drive, **({"deadline_s": 30} if verb == "deadline" else {}))
    spot(drive)
    drive.workers["w0"].auto = False
    if verb == "cancel":
        drive.cancel("owner")
    elif verb == "requeue":
        order(drive, "requeue")
    else:
        drive.pass_time(31_000)
    drive.settle()
    assert drive.states("spot") == ["ENDING"]
    drive.workers["w0"].auto = True
    drive.renew()
    drive.settle()
    drive.renew()
    drive.settle()
    after = {"cancel": "CANCELLED", "requeue": "RUNNING", "deadline": "TIMED_OUT"}[verb]
    assert drive.states("owner") == [after]
    assert drive.replica("spot").losses == drive.replica("spot").retries == 0


def test_without_a_grace_it_ends_as_it_is_and_the_job_on_its_gpu_goes_on(drive: Driving) -> None:
    frozen(drive, run={"driver": "noop", "grace_s": 0})
    spot(drive)
    drive.cancel("owner")
    drive.settle()
    assert (drive.states("owner"), drive.states("spot")) == (["CANCELLED"], ["RUNNING"])
    assert drive.replica("spot").attempt_no == 1
    assert whys(drive, "owner")[-1] == ("CANCELLED", "ended while frozen")


def test_no_job_is_placed_on_its_gpu_until_the_end_of_a_frozen_job_is_seen(drive: Driving) -> None:
    worker = frozen(drive)
    worker.auto = False
    drive.cancel("owner")
    spot(drive)
    assert drive.states("spot") == ["QUEUED"], "its worker may resume it, to save its work"
    worker.auto = True
    lingers(drive, worker, "owner")
    drive.settle()
    assert drive.states("spot") == ["QUEUED"], "its memory is not seen free"
    worker.free(key_of(worker, "owner"))
    drive.settle()
    assert drive.states("spot") == ["RUNNING"]


def test_an_attempt_that_is_over_is_not_resumed_for_a_later_one_that_is_frozen(drive: Driving) -> None:
    """The later attempt's devices were leased to it: no leader could fold that record."""
    worker = frozen(drive, retries=1)
    drive.worker("w1", 1, capabilities=CAN)
    order(drive, "resume")
    order(drive, "freeze")
    key = key_of(worker, "owner")
    worker.held[key].leased = True  # its worker has resumed it to end
    worker.finish(key, 1, freed=False)
    drive.settle()
    drive.pass_time(2_000)
    drive.settle()
    assert drive.placed_on("owner") == ["w1"]
    order(drive, "freeze")
    spot(drive)
    worker.auto = drive.workers["w1"].auto = False
    order(drive, "resume")
    drive.pass_time(2_000)
    assert (drive.states("owner"), drive.attempt("owner").worker.id) == (["FROZEN"], "w1")


def test_a_gpu_that_keeps_the_memory_of_a_job_that_was_resumed_to_end_opens_by_an_operators_word(
    drive: Driving,
) -> None:
    worker = frozen(drive)
    worker.auto = False
    drive.cancel("owner")
    lingers(drive, worker, "owner")
    worker.say("quarantined", worker.held[key_of(worker, "owner")].place, 0, "0")
    drive.report_all("w0")
    assert drive.state.tenants["t"].gpus == 1
    drive.lead()
    drive.renew()
    worker.auto = True
    worker.held.pop(key_of(worker, "owner"))  # as it takes the operator's word
    drive.operate("release", "w0", slots=[0])
    drive.submit("plain", gpu={})
    drive.settle()
    drive.renew()
    drive.settle()
    assert drive.states("plain") == ["RUNNING"]


def test_a_gpu_that_is_not_lent_any_more_ends_the_frozen_job_that_waits_for_it(drive: Driving) -> None:
    worker = frozen(drive, gpus=2)
    worker.hello = msgspec.structs.replace(worker.hello, lent_slots=[1])
    drive.join(worker)
    drive.settle()
    assert drive.slots("owner") == [1], "it starts anew on another one"
    assert "not lent" in whys(drive, "owner")[0][1]
    assert (drive.replica("owner").losses, drive.replica("owner").retries) == (0, 0)


def test_a_gpu_that_fails_ends_the_frozen_job_that_waits_for_it_and_costs_no_retry(drive: Driving) -> None:
    worker = frozen(drive, gpus=2)
    worker.unwell = [Unwell(0, "fallen-off", "Xid 79", True)]
    drive.renew()
    drive.settle()
    assert (drive.states("owner"), drive.slots("owner")) == (["RUNNING"], [1])
    assert (drive.replica("owner").losses, drive.replica("owner").retries) == (0, 0)


def test_a_drain_ends_a_frozen_job_as_any_other(drive: Driving) -> None:
    frozen(drive)
    drive.operate("drain", "w0", within_s=1)
    drive.settle()
    drive.pass_time(2_000)
    drive.settle()
    assert drive.states("owner") == ["QUEUED"]
    assert (drive.replica("owner").losses, drive.replica("owner").retries) == (0, 0)


# ------------------------------------------------------------------------------------- takeovers and sessions


@pytest.mark.parametrize("snapshot", [False, True])
def test_all_of_it_outlives_a_takeover(drive: Driving, snapshot: bool) -> None:
    frozen(drive)
    spot(drive)
    if snapshot:
        drive.take_snapshot()
    drive.lead()
    drive.renew()
    drive.settle()
    drive.submit("plain", gpu={})
    drive.settle()
    assert (drive.states("plain"), drive.attempt("owner").mask, drive.attempt("spot").preemptible) == (
        ["QUEUED"],
        0,
        True,
    )
    order(drive, "resume")
    assert (drive.states("owner"), drive.states("spot")) == (["RUNNING"], ["QUEUED"])
    order(drive, "freeze")
    assert drive.states("spot") == ["RUNNING"]


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_leader_goes_on_with_a_resume_of_the_one_before(drive: Driving, snapshot: bool) -> None:
    worker = frozen(drive)
    worker.auto = False
    order(drive, "resume")
    assert drive.attempt("owner").mask == 1
    if snapshot:
        drive.take_snapshot()
    drive.lead()
    worker.auto = True
    drive.renew()
    drive.settle()
    assert drive.states("owner") == ["RUNNING"]


def test_both_come_back_with_a_worker_that_joins_anew(drive: Driving) -> None:
    worker = frozen(drive)
    spot(drive)
    drive.join(worker)
    drive.settle()
    drive.renew()
    drive.settle()
    assert (drive.states("owner"), drive.states("spot")) == (["FROZEN"], ["RUNNING"])
    order(drive, "resume")
    assert (drive.states("owner"), drive.states("spot")) == (["RUNNING"], ["QUEUED"])


def test_a_kept_frozen_job_waits_for_its_worker_and_is_frozen_then(drive: Driving) -> None:
    worker = frozen(drive, on_partition="keep")
    spot(drive)
    worker.fence()
    drive.pass_time(40_000, renew=False)
    assert (drive.states("owner"), drive.states("spot")) == (["LOST_KEPT"], ["QUEUED"])
    drive.join(worker)
    drive.settle()
    drive.renew()
    drive.settle()
    assert (drive.states("owner"), drive.states("spot")) == (["FROZEN"], ["RUNNING"])


# ------------------------------------------------------------------------------------- preemptible jobs


def test_a_job_that_is_not_preemptible_ends_one_that_is_whatever_their_priorities(drive: Driving) -> None:
    drive.worker("w0", 1)
    spot(drive, priority=90)
    drive.submit("plain", gpu={}, priority=1)
    drive.pass_time(2_000)
    drive.settle()
    assert (drive.states("plain"), drive.states("spot")) == (["RUNNING"], ["QUEUED"])
    assert (drive.replica("spot").losses, drive.replica("spot").retries) == (0, 0)
    assert whys(drive, "spot")[0] == ("ENDING", "preempted by job plain: it is preemptible")


def test_it_is_ended_only_if_that_makes_room(drive: Driving) -> None:
    drive.worker("w0", 2)
    drive.submit("other", gpu={})
    drive.settle()
    spot(drive)
    drive.submit("plain", gpu={"count": 2})
    drive.pass_time(10_000)
    drive.settle()
    assert (drive.states("plain"), drive.states("spot")) == (["QUEUED"], ["RUNNING"])
    drive.submit("small", gpu={})
    drive.pass_time(2_000)
    drive.settle()
    assert (drive.states("small"), drive.states("spot")) == (["RUNNING"], ["QUEUED"])


def test_it_is_not_ended_for_a_gpu_that_a_frozen_job_waits_for(drive: Driving) -> None:
    frozen(drive)
    spot(drive)
    drive.submit("plain", gpu={}, priority=90)
    drive.pass_time(10_000)
    drive.settle()
    assert (drive.states("plain"), drive.states("spot")) == (["QUEUED"], ["RUNNING"])


def test_a_gang_ends_preemptible_jobs_and_a_preemptible_job_ends_none(drive: Driving) -> None:
    drive.worker("w0", 2)
    for name in ("spot", "second"):
        spot(drive, name)
    spot(drive, "third", priority=100)
    drive.pass_time(10_000)
    drive.settle()
    assert drive.states("third") == ["QUEUED"]
    drive.submit("gang", gpu={"scheduling": "gang"}, replicas=2)
    drive.pass_time(3_000)
    drive.settle()
    assert drive.states("gang") == ["RUNNING", "RUNNING"]


def test_a_frozen_job_of_low_priority_ends_for_one_that_may_preempt(drive: Driving) -> None:
    drive = Driving(Config(preempt_priority=60, preempt_after=0.0))
    frozen(drive)
    spot(drive)
    drive.pass_time(3_000)
    drive.submit("urgent", gpu={}, priority=90)
    drive.pass_time(5_000)
    drive.settle()
    drive.renew()
    drive.pass_time(5_000)
    drive.settle()
    assert drive.states("urgent") == ["RUNNING"]
    assert drive.replica("owner").losses == 0


def test_a_preemptible_job_counts_as_any_job_of_its_tenant(drive: Driving) -> None:
    frozen(drive)
    drive.order("limit", tenant="u", gpus=1)
    drive.submit("spot", gpu={}, preemptible=True, tenant="u")
    drive.settle()
    assert drive.states("spot", "u") == ["RUNNING"]
    assert drive.state.tenants["u"].gpus == 1


# ------------------------------------------------------------------------------------- what is shown


def test_it_is_shown_which_gpus_a_frozen_job_waits_for(drive: Driving) -> None:
    frozen(drive, gpus=2)
    frames = FleetFrames(drive.engine)
    found = wire(views.show(drive.engine, "t", "owner"))
    (row,) = found["replica_states"]
    assert (row["gpus"], row["waits_for"]) == ([], ["GPU-w0-0"])
    assert cells(drive, frames) == "f·"
    drive.submit("plain", gpu={})
    spot(drive)
    assert cells(drive, frames) == "##"
    assert views.audit(drive.engine).without_lease == 1


def test_it_is_told_for_what_a_frozen_job_waits(drive: Driving) -> None:
    worker = frozen(drive)
    assert drive.explained("owner")["why"] == "it is frozen until an operator resumes it"
    spot(drive)
    worker.auto = False
    order(drive, "resume")
    assert drive.explained("owner")["why"] == "it is to run on, and waits for the end of the job on its GPUs"
    worker.auto = True
    drive.order("hold", job="owner", why="later")
    drive.renew()
    drive.settle()
    assert drive.explained("owner")["why"].startswith("it is to run on, and is held by")
    worker.local = {0}
    drive.order("release", job="owner")
    drive.settle()
    assert drive.explained("owner")["why"] == "it is to run on, and waits until its worker gives its GPUs"
    drive.order("limit", tenant="t", gpus=1)
    worker.local = set()
    drive.worker("w1", 1)
    drive.submit("other", gpu={}, priority=90)
    drive.settle()
    assert drive.states("other") == ["RUNNING"]
    drive.renew()
    drive.settle()
    assert drive.explained("owner")["why"] == "it is to run on, and tenant t has 1 of 1 GPUs leased"


def cells(drive: Driving, frames: FleetFrames) -> str:
    """The only worker's, as observers see them; the same as a question is answered."""
    for _ in frames.catch_up():
        pass
    (row,) = msgspec.json.decode(frames.frame(LedgerCopies()))["workers"]
    (asked,) = views.fleet(drive.engine, drive.now).workers
    assert row["cells"] == asked.cells
    return str(row["cells"])


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ({"gpu": {"sharing": "mps"}}, "shares a GPU"),
        ({"gpu": {"scheduling": "gang"}, "replicas": 2}, "gang"),
        ({"on_partition": "keep"}, "lease"),
    ],
)
def test_what_cannot_be_preemptible_is_refused(drive: Driving, job: dict[str, Any], says: str) -> None:
    answer = drive.submit("spot", **{"gpu": {}, "preemptible": True, **job})
    assert (answer["code"], says in answer["message"]) == ("invalid-argument", True), answer


@pytest.mark.parametrize("a", [0, 2])
def test_a_record_that_resumes_what_cannot_be_resumed_is_not_sent(drive: Driving, a: int) -> None:
    frozen(drive)
    state, kept = drive.state, snapshots.dump(drive.state)
    resume, freeze = [Op.RESUME, 1, 0, 1, 0, 0], [Op.FREEZE, 1, 0, 3, 0, 0]
    record = Record(state.level, state.epoch, 7, 1, drive.now, state.digest, steps=resume)
    fold(snapshots.load(kept), record, state.seq + 1)
    for steps in ([Op.RESUME, 1, 0, a, 0, 0], resume * 2, freeze):
        record.steps = steps
        with pytest.raises(FoldError):
            fold(snapshots.load(kept), record, state.seq + 1)


def test_a_ledger_in_which_a_job_runs_without_its_gpus_is_broken(drive: Driving) -> None:
    frozen(drive)
    spot(drive)
    validate(drive.state)
    drive.replica("owner").state = 3
    with pytest.raises(Broken, match="without its devices"):
        validate(drive.state)
    drive.replica("owner").state = 14
    drive.attempt("owner").mask = 1
    with pytest.raises(Broken, match="two exclusive leases"):
        validate(drive.state)
