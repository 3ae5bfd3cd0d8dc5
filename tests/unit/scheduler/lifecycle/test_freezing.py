"""Frozen jobs: the order in the ledger, what their workers are asked and report, and what else happens to them."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.answers import views
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.outputs.outputs import changes_since
from moorage.scheduler.core.schedule.runtime import groups_of
from moorage.scheduler.ledger import state_bytes as snapshots
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.frames import ReportKind
from moorage.schemas.operate import act_of
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.honest_worker import Worker

CAN = {"noop": Capabilities(freezes=True)}


@pytest.fixture
def drive() -> Driving:
    return Driving()


def running(drive: Driving, name: str = "w0", gpus: int = 2, **job: Any) -> Worker:
    """Have a worker that freezes, and a job `j` that runs there."""
    worker = drive.worker(name, gpus, capabilities=CAN)
    drive.submit("j", **{"gpu": {}, **job})
    drive.settle()
    assert set(drive.states("j")) == {"RUNNING"}
    return worker


def history(drive: Driving) -> list[tuple[str, str, str]]:
    changes = changes_since(drive.state, drive.job("j"), 0)
    return [(change.state, change.by, change.why) for change in changes if change.state not in ("PLACED", "CLAIMED")]


def ordered(drive: Driving, verb: str, **more: Any) -> dict[str, Any]:
    answer = drive.order(verb, job="j", **more)
    drive.settle()
    return answer


def test_a_job_is_frozen_once_its_worker_reports_it_and_runs_on_when_it_is_resumed(drive: Driving) -> None:
    worker = running(drive)
    answer = drive.order("freeze", job="j", why="room")
    assert answer == {
        "kind": "done", "verb": "freeze", "changed": True, "tenant": "t", "job": "j", "state": "RUNNING", "members": 1,
    }  # fmt: skip
    assert drive.states("j") == ["RUNNING"], "its worker has not reported yet"
    drive.settle()
    assert drive.states("j") == ["FROZEN"]
    assert (drive.job("j").held, drive.free_gpus()) == (1, 1), "no other job may have its GPU"
    assert worker.told["frozen"] == 1
    assert ordered(drive, "freeze")["changed"] is False
    assert ordered(drive, "resume")["state"] == "FROZEN"
    assert drive.states("j") == ["RUNNING"]
    assert history(drive) == [
        ("ACCEPTED", "tenant:t", ""), ("RUNNING", "worker", ""), ("FREEZE", "operator", "room"),
        ("FROZEN", "worker", ""), ("RESUME", "operator", ""), ("FROZEN", "", "it has its GPUs again"),
        ("RUNNING", "worker", ""),
    ]  # fmt: skip
    assert ordered(drive, "resume")["changed"] is False


def test_each_replica_that_runs_is_frozen_and_a_new_attempt_is_not(drive: Driving) -> None:
    running(drive, gpus=3, replicas=2, retries=1)
    assert ordered(drive, "freeze")["members"] == 2
    assert drive.states("j") == ["FROZEN", "FROZEN"]
    drive.workers["w0"].finish(drive.attempt("j").name, 1, "exit")
    drive.settle()
    drive.pass_time(2_000)
    drive.settle()
    assert sorted(drive.states("j")) == ["FROZEN", "RUNNING"]
    assert drive.job("j").state == "RUNNING", "some of it runs"


@pytest.mark.parametrize("verb", ["freeze", "resume"])
def test_a_worker_that_missed_the_frame_is_asked_again_with_its_renewal(drive: Driving, verb: str) -> None:
    worker = running(drive)
    if verb == "resume":
        ordered(drive, "freeze")
    worker.auto = False  # the frame is lost
    drive.order(verb, job="j")
    worker.auto = True
    drive.renew()
    drive.settle()
    assert drive.states("j") == ["FROZEN" if verb == "freeze" else "RUNNING"]


def test_a_job_that_cannot_be_frozen_runs_on_and_is_not_asked_again(drive: Driving) -> None:
    worker = running(drive)
    worker.freezes = False
    ordered(drive, "freeze")
    assert history(drive)[-1] == ("NOT_FROZEN", "worker", "CUDA error 801")
    drive.renew()
    drive.settle()
    assert (drive.states("j"), worker.told["not-frozen"]) == (["RUNNING"], 1)


def test_of_two_orders_in_one_record_the_second_holds(drive: Driving) -> None:
    running(drive)
    drive.offer_order("freeze", job="j")
    resumed = drive.offer_order("resume", job="j")
    drive.tick()
    assert drive.answers[resumed]["changed"] is True
    drive.settle()
    assert drive.states("j") == ["RUNNING"]


def test_the_time_in_which_a_job_was_frozen_counts_as_time_in_which_it_runs(drive: Driving) -> None:
    """Its limits go on, so what is left of them is counted from its first start; so do a standby's estimates."""
    running(drive, run={"driver": "noop", "timeout_s": 7200})
    (attempt,) = drive.state.attempts()
    began = attempt.began_ms
    drive.pass_time(100_000)
    ordered(drive, "freeze")
    drive.pass_time(100_000)
    ordered(drive, "resume")
    assert drive.states("j") == ["RUNNING"]
    assert attempt.began_ms == began
    left = [drive.engine.estimates.end_ms(attempt, drive.state.time_ms)]
    drive.lead()
    (attempt,) = drive.state.attempts()
    assert [drive.engine.estimates.end_ms(attempt, drive.state.time_ms)] == left


def test_of_all_replicas_at_once_the_first_start_counts_too(drive: Driving) -> None:
    running(drive, gpus=2, replicas=2)
    began = {(attempt.replica.index, attempt.fence): attempt.began_ms for attempt in drive.state.attempts()}
    drive.pass_time(100_000)
    ordered(drive, "freeze")
    ordered(drive, "resume")
    again = snapshots.load(snapshots.dump(drive.state))  # the history tells it so, too
    for state in (drive.state, again):
        assert {(each.replica.index, each.fence): each.began_ms for each in state.attempts()} == began


def test_a_run_that_was_ever_frozen_is_not_learned(drive: Driving) -> None:
    running(drive)
    ordered(drive, "freeze")
    drive.pass_time(3_600_000)
    ordered(drive, "resume")
    drive.pass_time(5_000)
    drive.run_out("w0")
    job, engine = drive.job("j"), drive.engine
    assert drive.states("j") == ["SUCCEEDED"]
    groups = groups_of("t", engine.reader.workload_of(job), engine.reader.shape_of(job))
    assert engine.durations.left_ms(groups) is None


def test_a_frozen_job_whose_worker_is_lost_is_tried_again_elsewhere(drive: Driving) -> None:
    worker = running(drive, gpus=1)
    ordered(drive, "freeze")
    worker.fence()
    drive.pass_time(40_000, renew=False)
    drive.worker("w1", 1, capabilities=CAN)
    drive.settle()
    assert (drive.states("j"), drive.placed_on("j")) == (["RUNNING"], ["w1"])
    assert not drive.attempt("j").freeze


@pytest.mark.parametrize("resumed", [False, True])
def test_a_frozen_job_that_is_kept_is_as_was_ordered_once_its_worker_is_back(drive: Driving, resumed: bool) -> None:
    worker = running(drive, gpus=1, on_partition="keep")
    ordered(drive, "freeze")
    if resumed:
        worker.auto = False  # it does not hear of it
        drive.order("resume", job="j")
        worker.auto = True
    drive.pass_time(40_000, renew=False)
    assert drive.states("j") == ["LOST_KEPT"]
    drive.join(worker)
    drive.settle()
    drive.renew()
    drive.settle()
    assert drive.states("j") == ["RUNNING" if resumed else "FROZEN"]
    assert worker.holding()[0].phase == ("running" if resumed else "frozen")


@pytest.mark.parametrize(
    ("job", "hello", "says"),
    [
        ({"gpu": {"scheduling": "gang"}, "replicas": 2}, {}, "gang"),
        ({"gpu": None}, {}, "no GPUs"),
        ({"gpu": {"sharing": "mps"}}, {"modes": ["exclusive", "mps"]}, "shares its GPUs"),
        ({}, {"capabilities": {"noop": Capabilities()}}, "freezes no jobs"),
    ],
)
def test_what_cannot_be_frozen_is_refused_with_the_reason(
    drive: Driving, job: dict[str, Any], hello: dict[str, Any], says: str
) -> None:
    drive.worker("w0", 2, **{"capabilities": CAN, **hello})
    drive.submit("j", **{"gpu": {}, **job})
    drive.settle()
    assert set(drive.states("j")) == {"RUNNING"}
    answer = ordered(drive, "freeze")
    assert (answer["code"], says in answer["message"]) == ("failed-precondition", True), answer
    assert ordered(drive, "resume")["changed"] is False


def report(drive: Driving, worker: Worker, kind: ReportKind, code: int = 0) -> None:
    """Have a worker say this of the job, and all that follows come to rest."""
    (held,) = worker.held.values()
    worker.say(kind, held.place, code)
    drive.settle()


def test_fact_60_a_job_that_its_worker_reports_as_unused_is_frozen_and_its_first_use_resumes_it(drive: Driving) -> None:
    worker = running(drive)
    report(drive, worker, "freeze-due", 300)
    assert (drive.states("j"), drive.free_gpus()) == (["FROZEN"], 1), "no other job may have it"
    report(drive, worker, "freeze-due", 300)
    assert worker.told["frozen"] == 1
    report(drive, worker, "resume-due")
    assert drive.states("j") == ["RUNNING"]
    report(drive, worker, "resume-due")
    assert history(drive)[1:] == [
        ("RUNNING", "worker", ""), ("FREEZE", "worker", "idle for 300 s"), ("FROZEN", "worker", ""),
        ("RESUME", "worker", "it is used again"), ("FROZEN", "", "it has its GPUs again"), ("RUNNING", "worker", ""),
    ]  # fmt: skip


def test_the_first_use_does_not_undo_an_operators_order(drive: Driving) -> None:
    worker = running(drive)
    ordered(drive, "freeze")
    report(drive, worker, "resume-due")
    assert drive.states("j") == ["FROZEN"]
    ordered(drive, "resume")
    report(drive, worker, "freeze-due", 300)
    assert ordered(drive, "freeze", why="keep it so")["changed"], "from now on it is an operator's order"
    report(drive, worker, "resume-due")
    assert drive.states("j") == ["FROZEN"]
    assert ordered(drive, "freeze")["changed"] is False
    ordered(drive, "resume")
    assert drive.states("j") == ["RUNNING"]


def test_an_operator_resumes_what_was_frozen_as_unused(drive: Driving) -> None:
    worker = running(drive)
    report(drive, worker, "freeze-due", 300)
    assert ordered(drive, "resume")["changed"]
    assert (drive.states("j"), drive.attempt("j").wakes) == (["RUNNING"], False)


def test_of_the_replicas_of_a_job_only_that_which_is_unused_is_frozen(drive: Driving) -> None:
    worker = running(drive, replicas=2)
    worker.say("freeze-due", next(held.place for held in worker.held.values() if held.place.replica == 1), 300)
    drive.settle()
    assert drive.states("j") == ["RUNNING", "FROZEN"]


@pytest.mark.parametrize("kind", ["freeze-due", "resume-due"])
def test_a_gang_is_not_frozen_as_unused(kind: ReportKind) -> None:
    gang = Driving()
    worker = running(gang, gpu={"scheduling": "gang"}, replicas=2)
    for held in worker.held.values():
        worker.say(kind, held.place, 300)
    gang.settle()
    assert gang.states("j") == ["RUNNING", "RUNNING"]
    assert "FREEZE" not in [row[0] for row in history(gang)]


def test_a_job_that_waits_or_is_over_is_not_frozen(drive: Driving) -> None:
    drive.submit("j", gpu={})
    assert "QUEUED" in ordered(drive, "freeze")["message"]
    drive.cancel("j")
    assert ordered(drive, "freeze")["code"] == ordered(drive, "resume")["code"] == "failed-precondition"


def test_a_frozen_job_is_listed_and_shown_so(drive: Driving) -> None:
    running(drive)
    ordered(drive, "freeze")
    assert views.summary(drive.engine, drive.job("j")).state == "FROZEN"


def test_the_acts_say_of_which_job() -> None:
    assert act_of("freeze", {"tenant": "t", "job": "j"}) != act_of("resume", {"tenant": "t", "job": "j"})


@pytest.mark.parametrize("reclaims", [False, True])
def test_a_frozen_job_ends_for_another_one_as_one_that_runs(reclaims: bool) -> None:
    """An unused job of low priority kept its GPU from all others for as long as it was frozen."""
    drive = Driving(Config(reclaim=True) if reclaims else Config(preempt_priority=60))
    running(drive, gpus=1, priority=10)
    ordered(drive, "freeze")
    if reclaims:
        drive.order("share", tenant="owner", gpus=1)
    drive.submit("urgent", tenant="owner", gpu={}, priority=10 if reclaims else 90)
    drive.pass_time(40_000)
    assert drive.states("j") == ["FROZEN"], "it began less than a minute ago"
    drive.pass_time(30_000)
    drive.settle()
    assert (drive.states("urgent", "owner"), drive.states("j")) == (["RUNNING"], ["QUEUED"])
    assert drive.replica("j").losses == 0


def test_of_jobs_of_one_priority_a_frozen_one_ends_first() -> None:
    drive = Driving(Config(preempt_priority=60, preempt_after=0.0))
    running(drive, gpus=2, priority=10)
    ordered(drive, "freeze")
    drive.pass_time(60_000)
    drive.submit("younger", gpu={}, priority=10)
    drive.settle()
    drive.pass_time(1_000)
    drive.submit("urgent", gpu={}, priority=90)
    drive.pass_time(3_000)
    drive.settle()
    assert (drive.states("urgent"), drive.states("j"), drive.states("younger")) == (
        ["RUNNING"], ["QUEUED"], ["RUNNING"],
    )  # fmt: skip
