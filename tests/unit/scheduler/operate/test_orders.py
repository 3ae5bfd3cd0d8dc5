"""Operators' acts on jobs and tenants: hold, release, requeue, priority, limit."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.answers import views
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.record import Record, decode_record
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.core.outputs.outputs import changes_since
from moorage.scheduler.history.packing import Packing
from moorage.scheduler.history.unpacking import changes_in, read_frame
from moorage.scheduler.ledger.ledger_reader import FoldedRecord, rows
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Unwell
from moorage.schemas.operate import act_of
from tests.unit.scheduler.driving import Driving, wire

GANG = {"scheduling": "gang"}


@pytest.fixture
def drive() -> Driving:
    return Driving()


def _last(drive: Driving, name: str) -> dict[str, Any]:
    shown = wire(views.show(drive.engine, "t", name))
    change: dict[str, Any] = shown["changes"][-1]
    return change


def _replayed(drive: Driving) -> str:
    """What `replay` shows of the newest record."""
    state, shown = State(), ""
    for seq, payload in enumerate(drive.records, 1):
        record = decode_record(payload)
        folded = fold(state, record, seq)
        shown = repr(list(rows(FoldedRecord(seq, record, folded, state))))
        for job in folded.jobs.values():
            job.told = job.rev
    return shown


@pytest.mark.parametrize(
    ("orders", "on_worker"),
    [
        ([("hold", {"job": "j"})], False),
        ([("hold", {})], False),
        ([("hold", {"job": "j"}), ("release", {"job": "j"})], False),
        ([("hold", {}), ("release", {})], False),
        ([("requeue", {"job": "j"})], False),
        ([("priority", {"job": "waits", "priority": 10})], False),
        ([("limit", {"gpus": 3})], False),
        ([("share", {"weight": 2})], False),
        ([("cordon", {})], True),
        ([("drain", {})], True),
        ([("drain", {"within_s": 60.0})], True),
        ([("cordon", {}), ("uncordon", {})], True),
        ([("release", {})], True),
    ],
)
def test_the_record_of_an_order_says_who_gave_it_and_why(
    drive: Driving, orders: list[tuple[str, dict[str, Any]]], on_worker: bool
) -> None:
    drive.worker("w0", gpus=2)
    drive.submit("j", gpu={})
    drive.settle()
    drive.submit("waits", gpu={"count": 2})
    drive.workers["w0"].unwell = [Unwell(1, "xid", "Xid 48", False)]
    drive.renew("w0")
    for verb, arguments in orders:
        why = f"the reason of {verb}"
        answer = (
            drive.operate(verb, "w0", why=why, **arguments) if on_worker else drive.order(verb, why=why, **arguments)
        )
        assert answer["changed"] is True, answer
        assert why in _replayed(drive)
        assert ("operator me" if on_worker else "operator ana") in _replayed(drive).replace("', 'said': '", " ")


# ------------------------------------------------------------------------------------------------------- hold, release


def test_a_held_job_is_not_placed_until_it_is_released(drive: Driving) -> None:
    drive.submit("j", gpu={})
    held = drive.order("hold", job="j", why="bad data")
    assert held == {
        "kind": "done", "verb": "hold", "changed": True, "tenant": "t", "job": "j", "state": "QUEUED", "members": 0,
        "hold": {"since_ms": drive.now, "by": "operator", "said": "ana", "why": "bad data"},
    }  # fmt: skip
    assert views.summary(drive.engine, drive.job("j")).why == "held by operator, unverified (says ana): bad data"
    drive.worker("w0", 1)
    drive.submit("later", gpu={})
    assert drive.states("j") == ["QUEUED"]
    assert drive.states("later") == ["PLACED"]
    assert _last(drive, "j") | {"time_ms": 0} == {
        "rev": 2, "time_ms": 0, "replica": -1, "attempt": 0, "state": "HELD", "why": "bad data", "by": "operator",
        "said": "ana",
    }  # fmt: skip
    drive.settle()
    drive.run_out("w0")
    assert drive.states("j") == ["QUEUED"], "nobody else waits, and the GPU is free"
    assert drive.order("release", job="j")["changed"]
    assert drive.states("j") == ["PLACED"]
    assert [event["changes"][-1]["state"] for event in drive.events if event["job"] == "j"] == [
        "ACCEPTED", "HELD", "PLACED",
    ]  # fmt: skip


def test_the_record_that_answers_a_hold_places_nothing_of_it(drive: Driving) -> None:
    drive.submit("j", gpu={}, replicas=2)
    drive.submit("gang", gpu=GANG, replicas=2)
    drive.worker("w0", 4)  # the record after the one with which it joins places what waits
    drive.offer_order("hold", job="j")
    drive.offer_order("hold", job="gang")
    drive.tick()
    assert drive.states("j") == drive.states("gang") == ["QUEUED", "QUEUED"]
    drive.order("release", job="gang")
    assert drive.states("gang") == ["PLACED", "PLACED"]


def test_what_runs_goes_on_and_its_next_attempt_is_held(drive: Driving) -> None:
    drive.worker("w0", 1)
    drive.submit("j", gpu={}, retries=1)
    drive.settle()
    assert drive.order("hold", job="j")["members"] == 1
    assert drive.states("j") == ["RUNNING"]
    drive.run_out("w0", code=1)
    drive.pass_time(5_000)
    assert drive.states("j") == ["QUEUED"], "its pause is over"
    drive.order("release", job="j")
    assert drive.states("j") == ["PLACED"]


def test_a_release_in_the_middle_of_a_pause_waits_the_pause_out(drive: Driving) -> None:
    drive.worker("w0", 1)
    drive.submit("j", gpu={}, retries=1)
    drive.settle()
    drive.run_out("w0", code=1)
    drive.order("hold", job="j")
    drive.order("release", job="j")
    assert drive.states("j") == ["QUEUED"]
    drive.pass_time(2_000)
    assert drive.states("j") != ["QUEUED"]


def test_a_tenants_queue_is_held_and_others_go_on(drive: Driving) -> None:
    for name in ("a", "b"):
        drive.submit(name, gpu={})
        drive.submit(f"u-{name}", tenant="u", gpu={})
    drive.order("hold", why="month end")
    drive.worker("w0", 8)
    drive.tick()
    answer = drive.submit("c", gpu={}, priority=100)
    assert answer["warnings"] == ["tenant-held"]
    drive.submit("u-c", tenant="u", gpu={})
    assert [drive.states(name) for name in ("a", "b", "c")] == [["QUEUED"]] * 3
    assert [drive.states(name, "u") for name in ("u-a", "u-b", "u-c")] == [["PLACED"]] * 3
    found = drive.explained("c")
    assert (found["reason"], found["because"]) == (
        "held", "the queue of tenant t is held by operator, unverified (says ana): month end",
    )  # fmt: skip
    drive.order("release")
    assert [drive.states(name) for name in ("a", "b", "c")] == [["PLACED"]] * 3


def test_holding_twice_changes_nothing_and_names_who_did_it_first(drive: Driving) -> None:
    drive.submit("j", gpu={})
    drive.order("hold", job="j", why="first")
    rev, records = drive.job("j").rev, drive.state.seq
    again = drive.order("hold", job="j", by="bob", why="second")
    assert not again["changed"]
    assert (again["hold"]["said"], again["hold"]["why"]) == ("ana", "first")
    assert drive.job("j").rev == rev
    assert decode_record(drive.records[records]).acts == []
    drive.order("release", job="j")
    assert not drive.order("release", job="j")["changed"]
    assert not drive.order("release")["changed"]


def test_two_acts_in_one_record_follow_each_other(drive: Driving) -> None:
    drive.worker("w0", 1)
    drive.submit("runs", gpu={})
    drive.submit("j", gpu={})
    replies = [drive.offer_order(verb, job="j") for verb in ("hold", "hold", "release", "hold", "release")]
    replies.append(drive.offer_order("priority", job="j", priority=3))
    replies.append(drive.offer_order("priority", job="j", priority=50))
    drive.tick()
    assert [drive.answers[reply]["changed"] for reply in replies] == [True, False, True, True, True, True, True]
    drive.settle()
    drive.run_out("w0")
    assert drive.states("j") != ["QUEUED"]


def test_a_held_job_can_be_cancelled_and_expires(drive: Driving) -> None:
    drive.submit("j", gpu={})
    drive.submit("late", gpu={}, start_within_s=2)
    drive.order("hold", job="j")
    drive.order("hold", job="late")
    drive.cancel("j")
    drive.pass_time(3_000)
    assert (drive.states("j"), drive.states("late")) == (["CANCELLED"], ["EXPIRED"])


def test_what_is_over_or_unknown_is_refused_with_a_word(drive: Driving) -> None:
    drive.submit("j", gpu={})
    drive.cancel("j")
    for verb, more in (("hold", {}), ("release", {}), ("requeue", {}), ("priority", {"priority": 1})):
        over = drive.order(verb, job="j", **more)
        assert (over["code"], over["found"]) == ("failed-precondition", "CANCELLED"), over
        assert drive.order(verb, job="nobody", **more)["code"] == "not-found"
    assert "moorage again j " in drive.order("requeue", job="j")["next"]
    small = Driving(Config(ended_max=0))
    small.submit("gone", gpu={})
    small.cancel("gone")
    small.tick()
    assert small.state.job("t", "gone") is None
    assert small.order("requeue", job="gone")["code"] == "failed-precondition"


# ------------------------------------------------------------------------------------------------------------ requeue


def test_a_requeued_job_ends_and_gets_a_new_attempt_that_counts_for_nothing(drive: Driving) -> None:
    drive.worker("w0", 1)
    drive.submit("j", gpu={})
    drive.settle()
    fence = drive.replica("j").fence
    answer = drive.order("requeue", job="j", why="wrong host")
    assert (answer["changed"], answer["members"], answer["state"]) == (True, 1, "RUNNING")
    assert drive.states("j") == ["ENDING"]
    assert _last(drive, "j")["why"] == "requeued: wrong host"
    assert _last(drive, "j")["said"] == "ana"
    assert not drive.order("requeue", job="j")["changed"], "it is under way"
    drive.settle()
    assert drive.states("j") == ["RUNNING"]
    replica = drive.replica("j")
    assert replica.fence > fence
    assert (replica.attempt_no, replica.retries, replica.losses, replica.refusals) == (2, 0, 0, 0)


def test_a_requeue_of_replicas_that_a_job_has_not_is_refused(drive: Driving) -> None:
    drive.worker("w0", 2)
    drive.submit("j", gpu={}, replicas=2)
    drive.settle()
    answer = drive.order("requeue", job="j", replicas="1-5")
    assert (answer["message"], answer["allowed"]) == ("job j has no replica 2-5", "0-1")
    assert drive.states("j") == ["RUNNING", "RUNNING"]


def test_a_job_that_ends_well_before_the_word_reaches_it_is_done(drive: Driving) -> None:
    worker = drive.worker("w0", 1, auto=False)
    drive.submit("j", gpu={})
    for frame in drive.wanted:
        worker.obey(frame)
    drive.report_all()
    drive.order("requeue", job="j")
    drive.report("exited", "j")
    drive.report("freed", "j")
    assert drive.states("j") == ["SUCCEEDED"]


def test_a_requeued_gang_starts_again_whole(drive: Driving) -> None:
    drive.worker("w0", 1)
    drive.worker("w1", 1)
    drive.submit("g", gpu=GANG, replicas=2)
    drive.settle()
    assert drive.states("g") == ["RUNNING", "RUNNING"]
    assert drive.order("requeue", job="g")["members"] == 2
    drive.settle()
    assert drive.states("g") == ["RUNNING", "RUNNING"]
    assert {replica.attempt_no for replica in drive.job("g").replicas} == {2}
    assert {replica.retries + replica.losses for replica in drive.job("g").replicas} == {0}


def test_hold_and_requeue_take_a_job_off_its_gpu_for_as_long_as_it_takes(drive: Driving) -> None:
    drive.worker("w0", 1)
    drive.submit("j", gpu={})
    drive.settle()
    drive.order("hold", job="j", why="node test")
    drive.order("requeue", job="j")
    drive.settle()
    drive.pass_time(3_000)
    assert drive.states("j") == ["QUEUED"]
    assert drive.free_gpus() == 1
    drive.order("release", job="j")
    drive.settle()
    assert drive.states("j") == ["RUNNING"]


def test_no_next_attempt_after_the_deadline(drive: Driving) -> None:
    worker = drive.worker("w0", 1, auto=False)
    drive.submit("j", gpu={}, deadline_s=10)
    for frame in drive.wanted:
        worker.obey(frame)
    drive.report_all()
    drive.order("requeue", job="j")
    drive.pass_time(11_000)
    assert drive.states("j") == ["ENDING"]
    drive.report("exited", "j", code=-15, detail="end")
    assert drive.states("j") == ["TIMED_OUT"]


def test_an_operators_word_frees_what_was_kept_through_a_partition(drive: Driving) -> None:
    drive.worker("w0", 1)
    drive.submit("j", gpu={}, on_partition="keep")
    drive.settle()
    drive.pass_time(40_000, renew=False)
    assert drive.states("j") == ["LOST_KEPT"]
    drive.worker("w1", 1)
    drive.order("requeue", job="j", why="I pulled its plug")
    drive.tick()
    assert drive.placed_on("j") == ["w1"]


# ----------------------------------------------------------------------------------------------------------- priority


def test_the_queue_follows_a_changed_priority_at_once(drive: Driving) -> None:
    for name in ("a", "b", "c"):
        drive.submit(name, gpu={})
    assert drive.order("priority", job="c", priority=90)["priority"] == 90
    drive.order("priority", job="a", priority=10)
    assert (drive.explained("c")["position"], drive.explained("c")["priority"]) == (1, 90)
    drive.worker("w0", 1)
    drive.tick()
    assert (drive.states("a"), drive.states("b"), drive.states("c")) == (["QUEUED"], ["QUEUED"], ["PLACED"])
    drive.settle()
    drive.run_out("w0")
    assert (drive.states("a"), drive.states("b")) == (["QUEUED"], ["RUNNING"])
    shown = wire(views.show(drive.engine, "t", "a"))
    assert (shown["priority"], shown["changes"][-1]["state"], shown["changes"][-1]["why"]) == (10, "PRIORITY", "10")


def test_a_priority_outlives_takeover_and_holds_for_the_next_attempt(drive: Driving) -> None:
    drive.submit("a", gpu={}, retries=1)
    drive.submit("b", gpu={})
    drive.order("priority", job="b", priority=51)
    drive.order("priority", job="a", priority=99)
    drive.lead_from_snapshot()
    drive.worker("w0", 1)
    drive.settle()
    assert (drive.states("a"), drive.states("b")) == (["RUNNING"], ["QUEUED"])
    drive.submit("late", gpu={}, priority=98)
    drive.worker("w1", 1)
    drive.settle()
    drive.run_out("w0", code=1)  # `b` takes its place while it pauses
    drive.pass_time(2_000)
    assert drive.states("a") == ["QUEUED"]
    assert drive.explained("a")["position"] == 1
    assert not drive.order("priority", job="a", priority=99)["changed"]


# -------------------------------------------------------------------------------------------------------------- limit


def test_a_tenant_never_has_more_gpus_than_its_limit(drive: Driving) -> None:
    drive.worker("w0", 8)
    for number in range(4):
        drive.submit(f"j{number}", gpu={})
    answer = drive.order("limit", gpus=3, why="share the week")
    assert answer["limit"] == {
        "gpus": 3,
        "since_ms": drive.now,
        "by": "operator",
        "said": "ana",
        "why": "share the week",
    }
    assert drive.state.tenants["t"].gpus == 4, "what is over a new limit goes on"
    drive.settle()
    drive.submit("more", gpu={})
    drive.submit("other", tenant="u", gpu={})
    assert (drive.states("more"), drive.states("other", "u")) == (["QUEUED"], ["PLACED"])
    found = drive.explained("more")
    assert (found["reason"], found["gpus_leased"], found["gpus_needed"], found["limit"]["gpus"]) == ("limit", 4, 1, 3)
    assert found["limit"]["said"] == "ana"
    assert found["held_by"] == [f"job j{number}: 1 GPU" for number in range(4)]
    key = next(key for key in drive.workers["w0"].held if key[1] == "j0")
    drive.workers["w0"].finish(key)
    drive.settle()
    assert drive.states("more") == ["QUEUED"], "three are leased still"
    key = next(key for key in drive.workers["w0"].held if key[1] == "j1")
    drive.workers["w0"].finish(key)
    drive.report_all()
    assert drive.states("more") == ["PLACED"], "in the very record that frees one"
    assert drive.state.tenants["t"].gpus == 3


def test_a_gang_and_a_sharer_count_by_devices(drive: Driving) -> None:
    drive.worker("w0", 8)
    drive.order("limit", gpus=4)
    drive.submit("share", gpu={"sharing": "mps"}, replicas=1)
    drive.submit("gang", gpu={**GANG, "count": 2}, replicas=2)
    drive.submit("cpu")
    assert (drive.states("gang"), drive.states("cpu")) == (["QUEUED", "QUEUED"], ["PLACED"])
    drive.order("limit", gpus=5)
    assert drive.states("gang") == ["PLACED", "PLACED"]


def test_what_waits_for_the_limit_is_not_overtaken_within_its_tenant(drive: Driving) -> None:
    drive.worker("w0", 8)
    drive.order("limit", gpus=3)
    drive.submit("two", gpu={"count": 2}, run={"driver": "noop", "timeout_s": 3_600})
    drive.submit("big", gpu={"count": 3})
    drive.submit("small", gpu={})
    assert (drive.states("big"), drive.states("small")) == (["QUEUED"], ["QUEUED"])
    found = drive.explained("small")
    assert found["reason"] == "limit"
    assert found["because"] == "tenant t has 2 of 3 GPUs leased, and job big, which goes first, needs 3 of them"
    assert drive.explained("big")["because"] == "tenant t has 2 of 3 GPUs leased, and this needs 3"
    assert [fix["command"] for fix in drive.fixes("small")] == [
        "moorage admin limit --tenant t --gpus 6", "moorage cancel big --tenant t",
    ]  # fmt: skip
    drive.settle()
    drive.run_out("w0")
    assert (drive.states("big"), drive.states("small")) == (["RUNNING"], ["QUEUED"])


def test_at_the_limit_what_has_no_known_end_is_not_waited_for() -> None:
    """A job that needs GPUs of a service held up all later jobs of its tenant for as long as the service ran."""
    drive = Driving.with_hosts(8)
    drive.order("limit", gpus=4)
    drive.submit("service", gpu={"count": 2}, labels={"workload": "service"})
    drive.submit("ends", gpu={"count": 1}, run={"driver": "noop", "timeout_s": 3_600})
    drive.settle()
    drive.submit("big", gpu={"count": 3})  # 2 of 4 will be free, as far as is known
    drive.submit("small", gpu={})
    drive.pass_time(2_000)
    drive.settle()
    assert (drive.states("big"), drive.states("small")) == (["QUEUED"], ["RUNNING"])
    found = drive.explained("big")
    assert (found["reason"], found["because"]) == ("limit", "tenant t has 4 of 4 GPUs leased, and this needs 3")
    drive.workers["w0"].finish(next(key for key in drive.workers["w0"].held if key[1] == "small"), 0)
    drive.settle()
    drive.submit("two", gpu={"count": 2})  # the service has the other two, and "ends" one of these for now
    drive.submit("last", gpu={})
    drive.pass_time(2_000)
    assert (drive.states("two"), drive.states("last")) == (["QUEUED"], ["QUEUED"]), "one more will be free"
    drive.workers["w0"].finish(next(key for key in drive.workers["w0"].held if key[1] == "service"), 0)
    drive.settle()
    drive.pass_time(2_000)
    drive.settle()
    assert (drive.states("big"), drive.states("two")) == (["RUNNING"], ["QUEUED"]), "the first is the first again"


@pytest.mark.parametrize("how", ["quarantined", "kept"])
def test_at_the_limit_a_gpu_in_quarantine_or_of_a_kept_job_is_not_waited_for(how: str) -> None:
    drive = Driving()
    worker = drive.worker("w0", 1)
    drive.order("limit", gpus=4)
    drive.submit("j", gpu={}, on_partition="keep", run={"driver": "noop", "timeout_s": 300})
    drive.settle()
    drive.worker("w1", 8)
    if how == "kept":
        worker.session = ""
        drive.pass_time(60_000)
        assert drive.states("j") == ["LOST_KEPT"]
    else:
        [key] = worker.held
        worker.finish(key, 0, freed=False)
        worker.say("quarantined", worker.held[key].place, 0, "0")
        drive.settle()
    drive.submit("big", gpu={"count": 4})
    drive.submit("small", gpu={})
    drive.pass_time(2_000)
    drive.settle()
    assert (drive.states("big"), drive.states("small")) == (["QUEUED"], ["RUNNING"])


def test_a_run_that_ends_tells_how_long_a_job_at_the_limit_is_waited_for() -> None:
    drive = Driving.with_hosts(8)
    drive.order("limit", gpus=4)
    drive.submit("past", gpu={"count": 2})
    drive.settle()
    drive.pass_time(20_000)
    drive.run_out("w0")
    drive.submit("runs", gpu={"count": 2})
    drive.settle()
    drive.submit("big", gpu={"count": 3})
    drive.submit("small", gpu={})
    drive.pass_time(5_000)
    assert (drive.states("big"), drive.states("small")) == (["QUEUED"], ["QUEUED"])


def test_what_could_never_start_under_the_limit_is_refused_and_stops_nobody(drive: Driving) -> None:
    drive.worker("w0", 8)
    drive.submit("blocker", tenant="u", gpu={"count": 8})
    drive.submit("big", gpu={"count": 4})
    drive.order("limit", gpus=2)
    refused = drive.submit("huge", gpu={"count": 4})
    assert (refused["code"], refused["found"]) == ("failed-precondition", "4")
    drive.submit("queued", sequence=1, gpu={"count": 4})
    assert drive.states("queued") == ["REJECTED"]
    drive.submit("small", gpu={})
    drive.settle()
    drive.run_out("w0")
    assert (drive.states("big"), drive.states("small")) == (["QUEUED"], ["RUNNING"])


def test_jobs_over_the_limit_are_refused_at_the_endpoint(drive: Driving) -> None:
    drive.order("limit", jobs=2)
    replies = [drive.offer_submit(f"j{number}", gpu={}) for number in range(3)]
    drive.tick()
    assert [drive.answers[reply]["kind"] for reply in replies] == ["accepted", "accepted", "error"]
    assert drive.answers[replies[2]]["code"] == "failed-precondition"
    assert "queue" in drive.answers[replies[2]]["next"]
    assert drive.submit("j0", gpu={})["duplicate"], "what is there already is no new job"
    drive.submit("read", gpu={}, sequence=4)  # of the durable queue, whose reader stops at the limit: never refused
    assert drive.states("read") == ["QUEUED"]
    drive.cancel("j0")
    drive.cancel("read")
    assert drive.submit("j2", gpu={})["kind"] == "accepted"
    assert "limit" not in drive.order("limit", jobs=0)
    assert drive.submit("j3", gpu={})["kind"] == "accepted"
    assert not drive.state.tenants["t"].ordered


def test_a_limit_leaves_out_what_it_does_not_name(drive: Driving) -> None:
    drive.order("limit", gpus=3)
    assert drive.order("limit", jobs=7)["limit"]["gpus"] == 3
    assert not drive.order("limit", jobs=7)["changed"]
    again = drive.order("limit", gpus=0)
    assert (again["limit"].get("gpus"), again["limit"]["jobs"]) == (None, 7)


# ----------------------------------------------------------------------------------------------------- ledger, bounds


def test_the_history_tells_of_acts_as_the_events_did(drive: Driving) -> None:
    drive.submit("j", gpu={})
    drive.order("hold", job="j", why="bad data")
    drive.order("priority", job="j", priority=7)
    drive.order("release", job="j")
    drive.cancel("j")
    packing = Packing(drive.state, "t")
    assert packing.add(drive.job("j"), [], with_request=False)
    frame = read_frame(packing.frame())
    told = list(changes_in(frame, frame.jobs[0]))
    assert [change.state for change in told] == ["HELD", "PRIORITY", "RELEASED", "CANCELLED"]
    assert told == changes_since(drive.state, drive.job("j"), 1)
    assert (told[0].by, told[0].said, told[0].why) == ("operator", "ana", "bad data")


def test_the_history_names_where_a_job_ran_that_was_held_before(drive: Driving) -> None:
    drive.submit("j", gpu={})
    drive.order("hold", job="j")
    drive.order("release", job="j")
    drive.worker("w0", 1)
    drive.settle()
    drive.run_out("w0")
    packing = Packing(drive.state, "t")
    assert packing.add(drive.job("j"), [], with_request=False)
    frame = read_frame(packing.frame())
    told = list(changes_in(frame, frame.jobs[0]))
    assert told == changes_since(drive.state, drive.job("j"), 1)
    assert [change.worker for change in told] == ["", "", "w0", "w0", "w0", "w0"]


def test_an_order_is_in_the_digest() -> None:
    drive = Driving.with_hosts(1)
    drive.submit("j", gpu={})
    job, tenant = drive.job("j"), drive.state.tenants["t"]
    before = drive.state.digest
    drive.order("hold", job="j")
    drive.order("limit", gpus=1)
    with_orders = (job.digest_row(1), tenant.digest_row(1))
    job.hold = None
    tenant.gpus_max = 2
    assert job.digest_row(1) != with_orders[0]
    assert tenant.digest_row(1) != with_orders[1]
    assert drive.state.digest != before


def test_a_record_that_acts_on_no_job_is_refused() -> None:
    drive = Driving()
    bad = Record(1, 1, 7, 9, drive.now, drive.state.digest, acts=[acts.Priority(99, 1, "operator", "")])
    with pytest.raises(Exception, match="acts on job 99"):
        fold(drive.state, bad, 2)


@pytest.mark.parametrize(
    ("verb", "arguments", "field"),
    [
        ("hold", {}, "tenant"),
        ("hold", {"tenant": "T"}, "tenant"),
        ("hold", {"tenant": "t", "job": "a b"}, "job"),
        ("hold", {"tenant": "t", "worker": "w"}, "worker"),
        ("hold", {"tenant": "t", "why": "x" * 201}, "why"),
        ("hold", {"tenant": "t", "by": "a\nb"}, "by"),
        ("release", {}, "release"),
        ("release", {"worker": "w", "tenant": "t"}, "release"),
        ("release", {"worker": "w", "job": "j"}, "release"),
        ("requeue", {"tenant": "t"}, "job"),
        ("priority", {"tenant": "t", "job": "j", "priority": 101}, "priority"),
        ("priority", {"tenant": "t", "job": "j", "priority": True}, "priority"),
        ("limit", {"tenant": "t"}, "limit"),
        ("limit", {"tenant": "t", "gpus": -1}, "gpus"),
        ("limit", {"tenant": "t", "jobs": 10**7}, "jobs"),
    ],
)
def test_bad_acts_are_refused_by_field(verb: str, arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(Refused) as refused:
        act_of(verb, arguments)
    assert refused.value.code == "invalid-argument"
    assert field in refused.value.problem.field + refused.value.problem.message
    assert refused.value.problem.next == f"moorage admin {verb} --help"  # the fields of a request are none of it


def test_acts_that_find_no_room_in_a_record_come_with_the_next(drive: Driving) -> None:
    for number in range(3):
        drive.submit(f"j{number}", gpu={})
    replies = []
    for number in range(3_000):
        verb = "release" if number % 2 else "hold"
        replies.append(drive.offer_order(verb, job=f"j{number // 2 % 3}", why=f"{number:0200d}"))
    ticks = 0
    while drive.engine.waiting:
        drive.tick()
        ticks += 1
    assert ticks > 1
    assert all(drive.answers[reply]["changed"] for reply in replies)
