"""One replica's life: retries and their bounds, refusals, times, cancels at every stage, losses, keeping."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.answers import views
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.records import Op
from moorage.scheduler.core.lifecycle.readiness import is_address
from moorage.scheduler.core.lifecycle.transitions import backoff_ms
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.frames import Place, Report, ReportFrame, ReportKind
from tests.unit.scheduler.driving import Driving, wire
from tests.unit.scheduler.honest_worker import HeldAttempt


def alone(stage: str = "PLACED", **fields: object) -> Driving:
    """One worker that the test speaks for, one job `j` brought to a stage."""
    drive = Driving.with_hosts(2, auto=False)
    fields.setdefault("gpu", {})
    drive.submit("j", **fields)
    if stage in ("CLAIMED", "RUNNING"):
        drive.report("claimed", "j")
    if stage == "RUNNING":
        drive.report("started", "j")
    assert drive.states("j") == [stage]
    return drive


# ------------------------------------------------------------------------------------------------- reports by stage


@pytest.mark.parametrize(
    ("stage", "kind", "code", "detail", "becomes"),
    [
        ("PLACED", "claimed", 0, "", "CLAIMED"),
        ("PLACED", "started", 0, "", "RUNNING"),  # the claimed report may stand in an older frame
        ("PLACED", "exited", 0, "exit", "SUCCEEDED"),
        ("PLACED", "exited", 3, "exit", "FAILED"),
        ("PLACED", "refused", 0, "device-busy", "QUEUED"),
        ("PLACED", "withdrawn", 0, "", "QUEUED"),
        ("PLACED", "not-held", 0, "", "QUEUED"),
        ("PLACED", "freed", 0, "", "PLACED"),
        ("CLAIMED", "claimed", 0, "", "CLAIMED"),
        ("CLAIMED", "started", 0, "", "RUNNING"),
        ("CLAIMED", "exited", 0, "exit", "SUCCEEDED"),
        ("CLAIMED", "exited", 127, "start-failed", "FAILED"),
        ("CLAIMED", "withdrawn", 0, "", "QUEUED"),
        ("RUNNING", "claimed", 0, "", "RUNNING"),
        ("RUNNING", "started", 0, "", "RUNNING"),
        ("RUNNING", "exited", 0, "", "SUCCEEDED"),
        ("RUNNING", "exited", 0, "exit", "SUCCEEDED"),
        ("RUNNING", "exited", 0, "timeout", "TIMED_OUT"),
        ("RUNNING", "exited", -9, "timeout", "TIMED_OUT"),
        ("RUNNING", "exited", 1, "exit", "FAILED"),
        ("RUNNING", "exited", -9, "fence", "QUEUED"),  # a loss: three are allowed
        ("RUNNING", "exited", -9, "timeout; mps-not-asked: no answer within 1 s", "TIMED_OUT"),
        ("RUNNING", "exited", -9, "timeout; checkpoint-not-stored: files: no room", "TIMED_OUT"),
        ("RUNNING", "exited", 1, "exit; checkpoint-not-stored: files: no room", "FAILED"),
        ("RUNNING", "exited", 1, "exit; neighbour-over-memory: another job on GPU 0 held too much", "FAILED"),
        ("RUNNING", "exited", -9, "lost", "QUEUED"),
        ("RUNNING", "exited", -15, "upgraded", "QUEUED"),
        ("RUNNING", "not-held", 0, "", "QUEUED"),
        ("RUNNING", "freed", 0, "", "RUNNING"),
        ("RUNNING", "quarantined", 0, "0", "RUNNING"),
    ],
)
def test_a_report_moves_a_replica(stage: str, kind: ReportKind, code: int, detail: str, becomes: str) -> None:
    drive = alone(stage)
    drive.report(kind, "j", code=code, detail=detail)
    if becomes == "QUEUED" and drive.states("j") == ["PLACED"]:
        # a loss waits for nothing: the next attempt stands in the same record
        assert drive.replica("j").attempt_no == 2
    else:
        assert drive.states("j") == [becomes]


@pytest.mark.parametrize("behind", ["checkpoint-not-stored: files: no room", "neighbour-over-memory: on GPU 0"])
def test_what_is_told_behind_a_plain_exit_is_in_its_history(behind: str) -> None:
    drive = alone("RUNNING")
    told = f"exit; {behind}"
    drive.report("exited", "j", code=1, detail=told)
    assert views.summary(drive.engine, drive.job("j")).why == told


@pytest.mark.parametrize("detail", ["end", "end; mps-not-asked: no answer within 1 s"])
def test_the_reason_of_who_cancelled_stands_before_the_word_of_the_worker(detail: str) -> None:
    drive = alone("RUNNING")
    drive.cancel("j", why="wrong data")
    drive.report("exited", "j", code=-15, detail=detail)
    assert drive.states("j") == ["CANCELLED"]
    assert views.summary(drive.engine, drive.job("j")).why == "wrong data"


@pytest.mark.parametrize("code", [0, -15])
def test_an_end_by_an_upgrade_counts_for_nothing(code: int) -> None:
    drive = alone("RUNNING")
    for _ in range(5):
        drive.reports([("exited", "j", 0, code, "upgraded"), ("freed", "j", 0, 0, "")])
        drive.report("started", "j")
    replica = drive.replica("j")
    assert (drive.states("j"), replica.attempt_no, replica.retries, replica.losses) == (["RUNNING"], 6, 0, 0)


@pytest.mark.parametrize("code", [2**31, 2**63, 2**70, -(2**70)])
def test_a_monstrous_exit_code_does_not_break_the_ledger(code: int) -> None:
    drive = alone("RUNNING")
    drive.report("exited", "j", code=code, detail="exit")
    assert drive.states("j") == ["FAILED"]
    assert abs(drive.events[-1]["changes"][-1]["code"]) == 2**31 - 1


@pytest.mark.parametrize("detail", ["0,3", "99999999999999999999", "²", "x", "", "-1", "0" * 400, "1"])
def test_a_monstrous_quarantine_does_not_break_the_ledger(detail: str) -> None:
    drive = alone("RUNNING")
    drive.report("exited", "j", detail="exit")
    drive.report("quarantined", "j", detail=detail)
    assert drive.state.workers["w0"].quarantined == 1, "only devices that it held"


def test_reports_about_unknown_attempts_change_nothing() -> None:
    drive = alone("RUNNING")
    frame = ReportFrame(drive.workers["w0"].session, drive.workers["w0"].no + 1, [Report("exited", "t", "no", 0, 1, 9)])
    drive.send("w0", frame)
    drive.tick()
    assert drive.states("j") == ["RUNNING"]


def test_a_whole_life_in_one_frame() -> None:
    drive = alone("PLACED")
    drive.reports([(kind, "j", 0, 0, "") for kind in ("claimed", "started", "exited", "freed")])
    assert drive.states("j") == ["SUCCEEDED"]
    assert drive.free_gpus() == 2
    assert drive.job("j").over
    changes = [change["state"] for event in drive.events for change in event["changes"]]
    assert changes == ["ACCEPTED", "PLACED", "CLAIMED", "RUNNING", "SUCCEEDED"]
    assert [event["rev"] for event in drive.events] == [2, 5]


def test_a_job_has_no_exit_code_before_it_is_over() -> None:
    drive = Driving.with_hosts(2, auto=False)
    drive.submit("j", gpu={}, replicas=2)
    drive.reports([(kind, "j", replica, 0, "") for replica in range(2) for kind in ("claimed", "started")])
    drive.report("exited", "j", 0, code=0, detail="exit")
    assert drive.states("j") == ["SUCCEEDED", "RUNNING"]
    assert _row(drive)["code"] is None
    drive.report("exited", "j", 1, code=3, detail="exit")
    assert (_row(drive)["state"], _row(drive)["code"]) == ("FAILED", 3)


def _row(drive: Driving) -> dict[str, Any]:
    [job] = drive.engine.state.jobs.values()
    return wire(views.summary(drive.engine, job))


def test_reports_twice_in_one_frame_count_once() -> None:
    drive = alone("RUNNING", retries=3)
    drive.reports(
        [
            ("exited", "j", 0, 1, "exit"),
            ("exited", "j", 0, 1, "exit"),
            ("freed", "j", 0, 0, ""),
            ("freed", "j", 0, 0, ""),
        ]
    )
    assert drive.replica("j").retries == 1
    assert drive.free_gpus() == 2


# --------------------------------------------------------------------------------------------------- retries


def test_failures_are_retried_with_backoff_up_to_the_bound() -> None:
    drive = Driving()
    worker = drive.worker("w0")
    drive.submit("j", gpu={}, retries=3)
    waits = []
    for _ in range(4):
        drive.settle()
        assert drive.states("j") == ["RUNNING"]
        drive.run_out("w0", code=1)
        began = drive.now
        while drive.states("j") == ["QUEUED"]:
            drive.pass_time(100, step=100)
        if drive.states("j") != ["FAILED"]:
            waits.append(drive.now - began)
    assert drive.states("j") == ["FAILED"]
    assert drive.replica("j").attempt_no == 4
    assert [round(wait / 1000) for wait in waits] == [1, 2, 4]
    assert worker.told["started"] == 4


def test_a_placement_says_when_the_jobs_deadline_comes() -> None:
    drive = Driving()
    drive.submit("j", gpu={}, deadline_s=100)
    drive.submit("k", gpu={})
    drive.pass_time(30_000)
    drive.worker("w0", 2, auto=False)
    drive.tick()
    left = {place.job: place.ends_in_s for frame in drive.wanted for place in frame.place}
    assert left["k"] is None
    assert left["j"] is not None
    assert 69 < left["j"] < 70.1
    drive.lead()
    drive.now += 10_000
    drive.renew()
    again = [place.ends_in_s for frame in drive.wanted for place in frame.place if place.job == "j"]
    assert again, "a takeover says it again, with what is left by then"
    assert all(seconds is not None and seconds < 61 for seconds in again)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"checkpoint_signal": "SIGNOT", "timeout_s": 100}, "$.run.checkpoint_signal"),
        ({"checkpoint_signal": "SIGKILL", "timeout_s": 100}, "$.run.checkpoint_signal"),
        ({"checkpoint_signal": "SIGUSR1", "timeout_s": 60}, "$.run.checkpoint_before_s"),
    ],
)
def test_a_checkpoint_signal_that_could_not_be_is_refused(fields: dict[str, Any], field: str) -> None:
    drive = Driving()
    refused = drive.submit("j", run={"argv": ["true"], **fields})
    assert (refused["code"], refused["field"]) == ("invalid-argument", field)
    assert drive.submit("k", run={"argv": ["true"], "checkpoint_signal": "SIGUSR1"})["kind"] == "accepted", (
        "without an end of its own it is told by an operator's alone"
    )


def test_a_poison_job_ends_whatever_it_does_to_its_workers() -> None:
    drive = Driving()
    worker = drive.worker("w0")
    drive.submit("j", gpu={}, retries=5, retries_on_lost=2)
    for _ in range(3):
        drive.settle()
        assert drive.states("j") == ["RUNNING"]
        worker.die()
        drive.join(worker)
        drive.tick()
        if drive.wanted:
            drive.settle()
    assert drive.states("j") == ["FAILED"]
    assert drive.replica("j").attempt_no == 3, "two losses, of which the request allows two"


def test_no_retry_after_a_loss_where_the_request_forbids_it() -> None:
    drive = alone("RUNNING", retries=5, retries_on_lost=0)
    drive.pass_time(30_000, renew=False)
    assert drive.states("j") == ["FAILED"]


def test_refusals_are_never_fatal_and_never_a_busy_loop() -> None:
    drive = alone("PLACED", retries=0, retries_on_lost=0)
    attempts = 0
    began = drive.now
    while drive.now - began < 600_000:
        if drive.states("j") == ["PLACED"]:
            attempts += 1
            drive.report("refused", "j", detail="device-busy")
            drive.renew()
        drive.pass_time(1_000)
    assert drive.states("j")[0] in ("QUEUED", "PLACED")
    assert 20 < attempts < 40, "250 ms doubling up to 30 s"


def test_backoff_doubles_and_is_bounded() -> None:
    assert [backoff_ms(1_000, used, 60_000) for used in (0, 1, 2, 6, 1_000)] == [1_000, 2_000, 4_000, 60_000, 60_000]


def test_time_outs_are_not_retried() -> None:
    drive = alone("RUNNING", retries=5)
    drive.report("exited", "j", code=-15, detail="timeout")
    assert drive.states("j") == ["TIMED_OUT"]


# --------------------------------------------------------------------------------------------------- cancels


@pytest.mark.parametrize(
    ("stage", "answer", "code", "detail", "becomes"),
    [
        ("PLACED", "withdrawn", 0, "", "CANCELLED"),
        ("PLACED", "refused", 0, "device-busy", "CANCELLED"),
        ("PLACED", "not-held", 0, "", "CANCELLED"),
        ("PLACED", "exited", 0, "exit", "SUCCEEDED"),
        ("CLAIMED", "withdrawn", 0, "", "CANCELLED"),
        ("CLAIMED", "exited", 1, "exit", "CANCELLED"),
        ("RUNNING", "exited", -15, "end", "CANCELLED"),
        ("RUNNING", "exited", 0, "exit", "SUCCEEDED"),  # it had finished: the truth
        ("RUNNING", "exited", 0, "end", "CANCELLED"),
        ("RUNNING", "exited", -9, "timeout", "CANCELLED"),
    ],
)
def test_cancel_by_stage(stage: str, answer: ReportKind, code: int, detail: str, becomes: str) -> None:
    drive = alone(stage, retries=5)
    assert drive.cancel("j")["data"]["cancelled"] is True
    assert drive.states("j") == ["CANCELLING"]
    assert [end.why for frame in drive.wanted for end in frame.end] == ["cancelling"]
    drive.report(answer, "j", code=code, detail=detail)
    assert drive.states("j") == [becomes]
    assert drive.cancel("j")["data"]["cancelled"] is False


def test_cancel_while_queued_and_in_backoff() -> None:
    drive = Driving()
    drive.submit("q", gpu={})
    drive.cancel("q")
    assert drive.states("q") == ["CANCELLED"]
    drive.worker("w0", auto=False)
    drive.submit("b", gpu={}, retries=9)
    drive.reports([("claimed", "b", 0, 0, ""), ("exited", "b", 0, 1, "exit"), ("freed", "b", 0, 0, "")])
    assert drive.states("b") == ["QUEUED"]
    drive.cancel("b")
    assert drive.states("b") == ["CANCELLED"]
    drive.pass_time(5_000)
    assert drive.states("b") == ["CANCELLED"]


def test_placed_is_left_by_the_workers_word_alone_never_by_time() -> None:
    drive = alone("PLACED")
    drive.cancel("j")
    drive.pass_time(600_000, step=2_000)
    assert drive.states("j") == ["CANCELLING"]
    again = [end for frame in drive.wanted for end in frame.end]
    assert [(end.job, end.fence) for end in again] == [("j", drive.replica("j").fence)], "asked again with each renewal"
    drive.pass_time(30_000, renew=False)
    assert drive.states("j") == ["CANCELLED"], "fenced"


def test_placed_stays_placed_for_ever_while_its_worker_lives() -> None:
    drive = alone("PLACED")
    drive.pass_time(3_600_000, step=2_000)
    assert drive.states("j") == ["PLACED"]
    assert [place.job for frame in drive.wanted for place in frame.place] == ["j"]


def test_cancel_twice_in_one_record_and_after_the_exit_in_one_record() -> None:
    drive = alone("RUNNING")
    drive.offer_cancel("j")
    drive.cancel("j")
    assert drive.states("j") == ["CANCELLING"]
    other = alone("RUNNING")
    worker, attempt = other.workers["w0"], other.attempt("j")
    worker.gathered.append(Report("exited", "t", "j", 0, attempt.no, attempt.fence, 0, "exit"))
    frame = worker.report_frame()
    assert frame is not None
    other.send("w0", frame)
    other.cancel("j")
    assert other.states("j") == ["SUCCEEDED"]


# ------------------------------------------------------------------------------------------------------- times


def test_deadline_ends_what_runs_and_expires_what_waits() -> None:
    drive = Driving.with_hosts(1)
    drive.submit("j", replicas=2, gpu={}, deadline_s=60)
    drive.settle()
    drive.pass_time(61_000)
    drive.settle()
    assert drive.states("j") == ["TIMED_OUT", "EXPIRED"]
    assert drive.free_gpus() == 1


def test_deadline_meets_an_exit_zero_the_truth_wins() -> None:
    drive = alone("RUNNING", deadline_s=10)
    drive.pass_time(11_000)
    assert drive.states("j") == ["ENDING"]
    drive.report("exited", "j", detail="exit")
    assert drive.states("j") == ["SUCCEEDED"]


def test_deadline_stands_over_retries_and_restarts_of_the_leader() -> None:
    drive = alone("RUNNING", deadline_s=30, retries=1000)
    drive.reports([("exited", "j", 0, 1, "exit"), ("freed", "j", 0, 0, "")])
    drive.lead()
    drive.pass_time(31_000)
    assert drive.states("j")[0] in ("EXPIRED", "ENDING")
    assert drive.now - drive.job("j").accepted_ms >= 30_000


@pytest.mark.parametrize("takeover", [False, True])
def test_start_within_expires_what_waits(takeover: bool) -> None:
    drive = Driving()
    drive.submit("j", replicas=2, gpu={}, start_within_s=5)
    if takeover:
        drive.lead()
    drive.pass_time(4_000)
    assert drive.states("j") == ["QUEUED", "QUEUED"]
    drive.pass_time(1_500)
    assert drive.states("j") == ["EXPIRED", "EXPIRED"]


def test_start_within_holds_after_a_refusal_too() -> None:
    drive = alone("PLACED", start_within_s=5)
    drive.pass_time(6_000)
    assert drive.states("j") == ["PLACED"], "its worker may be starting it"
    drive.report("refused", "j")
    drive.pass_time(1_100, step=100)
    assert drive.states("j") == ["EXPIRED"]


def test_start_within_leaves_alone_what_has_started() -> None:
    drive = alone("RUNNING", start_within_s=5, retries=2)
    drive.reports([("exited", "j", 0, 1, "exit"), ("freed", "j", 0, 0, "")])
    drive.pass_time(60_000)
    assert drive.states("j") == ["PLACED"]


def two_for_half_a_minute(**fields: Any) -> Driving:
    """Both replicas of `j` have run for longer than they might have waited."""
    drive = Driving.with_hosts(1, 1)
    drive.submit("j", replicas=2, gpu={}, start_within_s=10, **fields)
    drive.settle()
    drive.pass_time(30_000)
    return drive


@pytest.mark.parametrize("how", ["fails", "requeued", "rebooted"])
def test_of_several_replicas_those_that_ran_long_and_come_back_run_again(how: str) -> None:
    drive = two_for_half_a_minute(retries=1)
    worker = drive.workers["w0"]
    if how == "fails":
        worker.finish(next(iter(worker.held)), 1)
    elif how == "requeued":
        drive.order("requeue", job="j")
    else:
        worker.die()
        drive.join(worker)
    for _ in range(4):
        drive.pass_time(1_000)
        drive.settle()
    assert drive.states("j") == ["RUNNING", "RUNNING"]
    assert drive.replica("j").attempt_no == 2


def test_of_several_replicas_those_that_come_back_wait_for_as_long_as_at_first() -> None:
    drive = two_for_half_a_minute()
    drive.order("requeue", job="j")
    for name in ("first", "second"):
        drive.submit(name, gpu={}, priority=90)
    drive.settle()
    back_ms = drive.replica("j").not_before
    assert (drive.states("j"), drive.states("second")) == (["QUEUED", "QUEUED"], ["RUNNING"])
    drive.pass_time(back_ms + 9_900 - drive.now, step=100)
    assert drive.states("j") == ["QUEUED", "QUEUED"]
    drive.pass_time(200, step=100)
    assert drive.states("j") == ["EXPIRED", "EXPIRED"]


def test_replicas_that_come_back_again_and_again_set_one_timer() -> None:
    drive = Driving.with_hosts(2, auto=False)
    drive.submit("j", replicas=2, gpu={}, start_within_s=3_600)
    for _ in range(5):
        drive.reports([("refused", "j", index, 0, "device-busy") for index in range(2)])
        drive.pass_time(10_000)
    assert drive.states("j") == ["PLACED", "PLACED"]
    assert len(drive.engine.timers.rows) == 1


# --------------------------------------------------------------------------------------- losses and partitions


@pytest.mark.parametrize(
    ("stage", "on_partition", "becomes"),
    [
        ("PLACED", "kill", ["QUEUED"]),
        ("CLAIMED", "kill", ["QUEUED"]),
        ("RUNNING", "kill", ["QUEUED"]),
        ("PLACED", "keep", ["LOST_KEPT"]),  # its claimed report may be what the partition holds back
        ("CLAIMED", "keep", ["LOST_KEPT"]),
        ("RUNNING", "keep", ["LOST_KEPT"]),
    ],
)
def test_a_lost_worker(stage: str, on_partition: str, becomes: list[str]) -> None:
    drive = alone(stage, on_partition=on_partition)
    drive.pass_time(27_000, renew=False)
    assert drive.states("j") == [stage], "lease 20 s, grace 5 s, margin 3 s"
    drive.pass_time(3_000, renew=False)
    assert drive.states("j") == becomes
    assert not drive.engine.fleet.hosts


@pytest.mark.parametrize("fence", ["none", "agent", "supervisor"])
def test_a_lost_worker_whose_driver_fences_nothing_keeps_its_jobs(fence: str) -> None:
    drive = Driving()
    can = Capabilities(fence=fence, outlives_agent=True)
    worker = drive.worker("w0", 2, drivers=["process", "parrot"], capabilities={"parrot": can})
    drive.submit("j", gpu={}, run={"driver": "parrot", "argv": ["x"]})
    drive.submit("plain", gpu={})
    drive.settle()
    drive.pass_time(30_000, renew=False)
    assert drive.states("plain") == ["QUEUED"]
    if fence != "none":
        assert drive.states("j") == ["QUEUED"]
        return
    assert drive.states("j") == ["LOST_KEPT"]
    drive.worker("other", 2, drivers=["process", "parrot"], capabilities={"parrot": can})
    drive.pass_time(100_000)
    assert drive.states("j") == ["LOST_KEPT"], "its pod may run still"
    drive.join(worker)
    assert drive.states("j") == ["RUNNING"]


@pytest.mark.parametrize("stage", ["PLACED", "CLAIMED", "RUNNING"])
def test_kept_then_the_worker_comes_back_with_it(stage: str) -> None:
    drive = alone(stage, on_partition="keep")
    worker = drive.workers["w0"]
    place_frame(drive)
    drive.pass_time(40_000, renew=False)
    assert drive.states("j") == ["LOST_KEPT"]
    drive.lead()
    drive.worker("other", 2)
    drive.pass_time(100_000, renew=False)
    assert drive.states("j") == ["LOST_KEPT"], "never placed again before somebody speaks"
    attempt = drive.replica("j").attempt_no
    drive.join(worker)
    assert drive.states("j") == ["RUNNING"]
    assert drive.replica("j").attempt_no == attempt
    key = next(iter(worker.held))
    worker.finish(key)
    drive.settle()
    assert drive.states("j") == ["SUCCEEDED"]


@pytest.mark.parametrize("back", ["with it", "without it"])
def test_kept_though_it_was_asked_to_end_since_it_may_not_have_heard_that(back: str) -> None:
    """The drain did not get through the partition, and the job lives on: a second attempt would run beside it."""
    drive = alone("RUNNING", on_partition="keep")
    worker = drive.workers["w0"]
    place_frame(drive)
    drive.operate("drain", "w0", within_s=1.0)
    drive.pass_time(2_000, renew=False)
    assert drive.states("j") == ["ENDING"]
    drive.worker("other", 2)
    for _ in range(14):
        drive.pass_time(10_000, renew=False)
        drive.renew("other")
    assert drive.engine.fleet.hosts, "the other worker is there"
    assert drive.states("j") == ["LOST_KEPT"], "never placed again before somebody speaks"
    if back == "without it":
        worker.held.clear()
        drive.join(worker)
        drive.settle()
        assert (drive.states("j"), drive.placed_on("j"), drive.replica("j").attempt_no) == (["RUNNING"], ["other"], 2)
        return
    drive.join(worker)
    drive.pass_time(2_000)
    assert drive.states("j") == ["ENDING"], "the worker is still drained"
    worker.finish(next(iter(worker.held)), 143)
    drive.settle()
    assert (drive.states("j"), drive.placed_on("j"), drive.replica("j").losses) == (["RUNNING"], ["other"], 0)


def test_what_ended_as_asked_while_its_worker_was_lost_counts_for_nothing() -> None:
    """It was asked to end for another job: that it did so behind a partition is no failure of its own."""
    drive = alone("RUNNING", on_partition="keep", retries=1)
    worker, attempt = drive.workers["w0"], drive.attempt("j")
    worker.auto = False
    drive.order("requeue", job="j")
    drive.pass_time(40_000, renew=False)
    assert drive.states("j") == ["LOST_KEPT"]
    worker.gathered = [
        Report(kind, "t", "j", 0, attempt.no, attempt.fence, -15 * (kind == "exited"), "end" * (kind == "exited"))
        for kind in ("exited", "freed")
    ]
    worker.held.clear()
    drive.join(worker)
    replica = drive.replica("j")
    assert (replica.retries, replica.losses, replica.not_before > drive.now) == (0, 0, False)


def test_what_ends_for_good_is_not_kept() -> None:
    drive = alone("RUNNING", on_partition="keep")
    drive.cancel("j")
    drive.pass_time(40_000, renew=False)
    assert drive.states("j") == ["CANCELLED"]


def place_frame(drive: Driving) -> None:
    """Let the worker really hold what the ledger placed there, its reports withheld by the partition."""
    worker = drive.workers["w0"]
    attempt = drive.attempt("j")
    place = Place("t", "j", 0, attempt.no, attempt.fence, [0], "exclusive", False, drive.job("j").body)
    worker.held[attempt.name] = HeldAttempt(place, "running", True)


@pytest.mark.parametrize("how", ["without it", "finished", "cancelled", "deadline"])
def test_a_job_that_is_kept_through_a_partition_ends_by_a_report_an_order_or_its_deadline(how: str) -> None:
    drive = alone("RUNNING", on_partition="keep", deadline_s=120 if how == "deadline" else None)
    worker, attempt = drive.workers["w0"], drive.attempt("j")
    drive.pass_time(40_000, renew=False)
    assert drive.states("j") == ["LOST_KEPT"]
    if how == "without it":
        drive.join(worker)
        assert drive.replica("j").losses == 1
        drive.tick()
        assert drive.states("j") == ["PLACED"]
    elif how == "finished":
        worker.gathered = [
            Report(kind, "t", "j", 0, attempt.no, attempt.fence, 0, "exit" if kind == "exited" else "")
            for kind in ("exited", "freed")
        ]
        drive.join(worker)
        assert drive.states("j") == ["SUCCEEDED"]
        assert drive.free_gpus() == 2
    elif how == "cancelled":
        drive.cancel("j")
        assert drive.states("j") == ["CANCELLED"]
        drive.join(worker)
        assert drive.free_gpus() == 2
    else:
        drive.pass_time(120_000, renew=False)
        assert drive.states("j") == ["TIMED_OUT"]


def test_a_kept_job_keeps_its_machine_not_only_its_name() -> None:
    drive = alone("RUNNING", on_partition="keep")
    drive.pass_time(40_000, renew=False)
    worker = drive.workers["w0"]
    worker.machine = "another machine"
    answer = drive.join(worker)
    assert answer["code"] == "worker-id-in-use"
    assert drive.states("j") == ["LOST_KEPT"]
    drive.cancel("j")
    assert drive.join(worker)["kind"] == "joined"


def test_a_session_answered_in_time_is_not_lost() -> None:
    drive = alone("RUNNING")
    drive.pass_time(26_000, renew=False, step=13_000)
    drive.send("w0", drive.workers["w0"].renew_frame())
    drive.tick(2_100)  # 28.1 s of silence, and the renewal in the same record
    assert drive.state.workers["w0"].session
    assert drive.states("j") == ["RUNNING"]


def test_a_leader_that_slept_declares_no_worker_lost() -> None:
    drive = alone("RUNNING")
    drive.tick(100_000)
    assert drive.states("j") == ["RUNNING"]


def test_quarantine_keeps_exactly_its_devices_out() -> None:
    drive = Driving.with_hosts(4, auto=False)
    drive.submit("j", gpu={"count": 2})
    drive.reports([("claimed", "j", 0, 0, ""), ("exited", "j", 0, 0, "exit"), ("quarantined", "j", 0, 0, "1")])
    assert drive.state.workers["w0"].quarantined == 0b10
    assert drive.states("j") == ["SUCCEEDED"]
    drive.submit("k", replicas=3, gpu={})
    assert drive.states("k") == ["PLACED", "PLACED", "QUEUED"]
    assert [drive.slots("k", index) for index in (0, 1)] == [[2], [3]]
    drive.report("freed", "j")
    assert drive.state.workers["w0"].quarantined == 0
    drive.tick()
    assert drive.states("k") == ["PLACED"] * 3


def test_an_operator_releases_a_quarantine() -> None:
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("j", gpu={})
    drive.reports([("claimed", "j", 0, 0, ""), ("exited", "j", 0, 0, "exit"), ("quarantined", "j", 0, 0, "0")])
    drive.submit("k", gpu={})
    assert drive.states("k") == ["QUEUED"]
    drive.operate("release", "w0")
    drive.tick()
    assert drive.states("k") == ["PLACED"]
    assert drive.job("j").over


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([["claimed", "started", "exited", "freed"]], ["CLAIM", "START", "EXIT", "FREE"]),
        ([["ran", "freed"]], ["RAN", "FREE"]),
        ([["ran"], ["freed"]], ["RAN", "FREE"]),
        ([["claimed"], ["ran", "freed"]], ["CLAIM", "START", "EXIT", "FREE"]),
        ([["claimed", "exited", "freed"]], ["CLAIM", "EXIT", "FREE"]),
        (
            [["claimed", "started", "exited", "quarantined"], ["freed"]],
            ["CLAIM", "START", "EXIT", "QUARANTINE", "FREE"],
        ),
    ],
)
def test_each_report_of_an_attempt_is_one_step(frames: list[list[ReportKind]], expected: list[str]) -> None:
    drive = alone("PLACED")
    for kinds in frames:
        drive.reports([(kind, "j", 0, 0, "exit" if kind in ("exited", "ran") else "") for kind in kinds])
    ops = [Op(op).name for payload in drive.records for op in decode_record(payload).steps[::6]]
    assert ops == ["PLACE", *expected]
    assert drive.states("j") == ["SUCCEEDED"]
    assert drive.job("j").over


def test_a_cancel_behind_reports_of_the_same_record_stands_behind_them() -> None:
    drive = alone("PLACED")
    drive.reports([("claimed", "j", 0, 0, ""), ("started", "j", 0, 0, "")], tick=False)
    drive.cancel("j")
    steps = decode_record(drive.records[-1]).steps
    assert [Op(op).name for op in steps[::6]] == ["CLAIM", "START", "END"]
    assert [row[10] for row in drive.job("j").history[-3:]] == ["worker", "worker", "tenant:t"]


@pytest.mark.parametrize(
    ("detail", "good"),
    [
        ("host:29500", True), ("10.0.0.1:1", True), ("[::1]:65535", True), ("", False), ("host", False),
        ("host:", False),
        (":80", False), ("host:0", False), ("host:65536", False), ("host:²", False), ("host:-1", False),
        ("host:" + "9" * 5000, False), ("a b:80", False), (" host:80", False), ("host :80", False), ("h\nx:80", False),
        ("h" * 256 + ":80", False), ("fe80::1%eth0:80", True),
    ],
)  # fmt: skip
def test_what_is_an_address(detail: str, good: bool) -> None:
    assert is_address(detail) is good
