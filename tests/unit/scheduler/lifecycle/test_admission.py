"""Submits and cancels: accepted once, refused with reasons, remembered when they came too early, bounded."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from moorage.scheduler.answers import views
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import Batch, Cancel, QueueRead
from moorage.scheduler.core.ledger.acts import AnyAct, Tombstone
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.records import RECORD_BYTES_MAX
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.core.lifecycle.admission import FORGET_MAX
from moorage.scheduler.core.lifecycle.pending_events import Cancels
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.errors import Refused
from tests.unit.scheduler.driving import Driving, wire
from tests.unit.scheduler.honest_worker import Worker, devices
from tests.unit.schemas.impossible import IMPOSSIBLE


def acts(drive: Driving, kind: type[AnyAct]) -> list[AnyAct]:
    return [act for payload in drive.records for act in decode_record(payload).acts if isinstance(act, kind)]


# ---------------------------------------------------------------------------------------------- once and only once


def test_the_same_request_again_is_a_duplicate_whatever_its_encoding() -> None:
    drive = Driving()
    first = drive.submit("j", gpu={"count": 2}, labels={"a": "1", "b": "2"})
    assert first == {
        "kind": "accepted",
        "job": "j",
        "ledger": 2,
        "state": "QUEUED",
        "warnings": ["no-match: the fleet is empty"],
    }
    request = {
        "labels": {"b": "2", "a": "1"},
        "gpu": {"count": 2},
        "run": {"driver": "noop"},
        "job": "j",
        "replicas": 1,
    }
    for body in (json.dumps(request).encode(), msgspec.msgpack.encode(request)):
        again = drive.submit("j", body=body)
        assert (again["duplicate"], again["ledger"]) == (True, 2)
    assert drive.state.next_num == 2


@pytest.mark.parametrize(("fields", "field"), IMPOSSIBLE)
def test_what_no_worker_could_do_is_refused_by_its_field(fields: dict[str, Any], field: str) -> None:
    answer = Driving().submit("j", **fields)
    assert (answer["code"], answer["field"]) == ("invalid-argument", f"$.{field}")
    assert answer["found"]
    assert answer["allowed"]


def test_other_content_under_the_same_id_is_a_conflict() -> None:
    drive = Driving()
    drive.submit("j", gpu={"count": 2})
    assert drive.submit("j", gpu={"count": 3})["code"] == "conflict"
    assert drive.submit("j", gpu={"count": 3}, tenant="other")["kind"] == "accepted"


@pytest.mark.parametrize(
    ("passed_s", "start_after_s", "known"), [(600, 3000, True), (600, 3600, True), (600, 2400, False)]
)
def test_the_same_time_of_the_clock_told_later_is_the_same_job(passed_s: int, start_after_s: int, known: bool) -> None:
    drive = Driving()
    first = drive.submit("j", start_after_s=3600)
    drive.tick(passed_s * 1000)
    again = drive.submit("j", start_after_s=start_after_s)
    assert again.get("duplicate", False) is known
    assert not known or again["ledger"] == first["ledger"]
    assert drive.submit("j", start_after_s=start_after_s, priority=7)["code"] == "conflict"


def test_submits_of_several_tenants_in_one_record_keep_their_own_jobs() -> None:
    drive = Driving()
    worker = drive.worker("w", 8)
    order = [("a", "j1", 1), ("b", "j2", 2), ("a", "j3", 3), ("c", "j4", 1), ("b", "j5", 1)]
    for tenant, name, replicas in order:
        drive.offer_submit(name, tenant=tenant, replicas=replicas, gpu={})
    drive.tick()
    assert [(job.tenant, job.name, len(job.replicas)) for job in drive.state.jobs.values()] == order
    placed = {(held.place.tenant, held.place.job, held.place.replica): held.place.body for held in worker.held.values()}
    assert sorted(placed) == sorted((tenant, name, at) for tenant, name, count in order for at in range(count))
    assert all(json.loads(bytes(body))["job"] == name for (_, name, _), body in placed.items())


def test_twice_in_one_record() -> None:
    drive = Driving()
    replies = [drive.offer_submit("j", gpu={"count": count}) for count in (1, 1, 2)]
    drive.tick()
    kinds = [(drive.answers[reply]["kind"], drive.answers[reply].get("duplicate", False)) for reply in replies]
    assert kinds == [("accepted", False), ("accepted", True), ("error", False)]


def test_a_finished_job_is_not_run_again_before_and_after_compaction() -> None:
    drive = Driving.with_hosts(1, config=Config(ended_max=2))
    for index in range(6):
        drive.submit(f"j{index}", gpu={})
        drive.settle()
        drive.run_out("w0")
        drive.settle()
    drive.tick()
    assert len(drive.state.ended) == 2
    assert len(drive.state.finished) == 4
    for index in range(6):
        again = drive.submit(f"j{index}", gpu={})
        assert (again["kind"], again["duplicate"], again["state"]) == ("accepted", True, "SUCCEEDED"), index
        assert drive.submit(f"j{index}", gpu={"count": 2})["code"] == "conflict", index
        assert drive.cancel(f"j{index}")["data"] == {"job": f"j{index}", "cancelled": False, "was": "SUCCEEDED"}
    drive.lead()
    assert drive.submit("j0", gpu={})["duplicate"] is True
    assert drive.state.next_num == 7


def test_a_name_is_free_after_its_window_though_the_job_is_in_memory_still() -> None:
    """As one that is handed in each night, on a fleet with few others."""
    drive = Driving(Config(finished_keep=60))
    older = 1_200  # more than one record compacts
    for number in range(older):
        drive.offer_submit(f"older{number}")
    drive.tick()
    for number in range(older):
        drive.offer_cancel(f"older{number}")
    drive.pass_time(1_000)
    for name in ("nightly", "later"):
        drive.submit(name)
        drive.cancel(name)
    drive.tick(59_000)
    assert drive.submit("nightly")["duplicate"] is True
    assert drive.submit("nightly", replicas=2)["code"] == "conflict"
    drive.tick(2_000)
    replies = [drive.offer_submit(name, replicas=2) for name in ("nightly", "other")]
    drive.tick()
    assert not any(reply in drive.answers for reply in replies), "nobody passes whoever waits for its name"
    for _ in range(1 + older // 512):
        drive.tick()
    assert [(drive.answers[reply]["kind"], drive.answers[reply].get("duplicate")) for reply in replies] == [
        ("accepted", None),
        ("accepted", None),
    ]
    assert len(drive.state.finished) == older + 1, "what ended behind it stays whole"
    assert drive.states("nightly") == ["QUEUED", "QUEUED"]
    drive.lead()
    assert drive.submit("nightly", replicas=2)["duplicate"] is True


def test_rows_of_finished_jobs_expire_by_the_settings() -> None:
    drive = Driving(Config(ended_max=0, finished_keep=60, history_keep=120))  # a row says where the history stands
    drive.submit("j")
    drive.cancel("j")
    drive.tick()
    drive.tick(59_000)
    assert drive.submit("j")["duplicate"] is True
    drive.tick(59_000)
    assert len(drive.state.finished) == 1
    drive.tick(5_000)
    assert len(drive.state.finished) == 0
    drive = Driving(Config(ended_max=0, finished_rows=3))
    for index in range(8):
        drive.submit(f"j{index}")
        drive.cancel(f"j{index}")
    for _ in range(3):
        drive.tick(1_000)
    assert len(drive.state.finished) == 3
    assert drive.submit("j7")["duplicate"] is True
    drive.lead()  # the rows that are left are the same for whoever folds


@pytest.mark.slow
def test_rows_of_finished_jobs_go_as_fast_as_they_come() -> None:
    """Whatever comes in a second: the bound is of rows, not of rows a second."""
    drive = Driving(Config(ended_max=0, finished_rows=100, jobs_max=5_000))
    for turn in range(3):
        for number in range(2_000):
            drive.offer_submit(f"j{turn}-{number}")
        drive.tick()
        for number in range(2_000):
            drive.offer_cancel(f"j{turn}-{number}")
        drive.tick()
    while drive.state.ended:
        drive.tick()
        assert len(drive.state.finished) <= 100
    drive.lead()


def test_a_lost_answer_and_a_new_leader_do_not_make_a_second_job() -> None:
    drive = Driving()
    drive.submit("j")
    drive.lead()
    assert drive.submit("j")["duplicate"] is True


# --------------------------------------------------------------------------------------------------------- batches


def test_a_batch_is_answered_once_in_its_own_order() -> None:
    drive = Driving(Config(jobs_max=3))
    drive.submit("old")
    batch = Batch("b", True, 5)
    for position, (job, count) in enumerate((("old", 1), ("a", 1), ("a", 2), ("b", 1), ("c", 1))):
        extra: dict[str, Any] = {"gpu": {"count": count}} if job != "old" else {}
        drive.offer_submit(job, batch=batch, position=position, **extra)
    drive.tick()
    assert isinstance(drive.answers["b"], list)
    assert [row.get("code", row["kind"]) for row in drive.answers["b"]] == [
        "accepted",
        "accepted",
        "conflict",
        "accepted",
        "queue-full",
    ]
    assert drive.answers["b"][0]["duplicate"] is True


def test_a_batch_over_several_records_is_answered_after_the_last() -> None:
    drive = Driving()
    drive.checks = False
    batch = Batch("b", True, 40)
    for position in range(40):
        drive.offer_submit(f"j{position}", batch=batch, position=position, labels={"pad": "x" * 30_000})
    records = 0
    while "b" not in drive.answers:
        drive.tick()
        records += 1
    assert records > 2
    assert len(drive.answers["b"]) == 40
    assert {row["kind"] for row in drive.answers["b"]} == {"accepted"}


def test_nobody_is_answered_who_named_no_reply() -> None:
    drive = Driving()
    drive.offer_submit("j", batch=Batch("", True, 1))
    drive.offer_submit("k", reply="")
    out = drive.tick()
    assert out.answers == []
    assert drive.job("j").state == drive.job("k").state == "QUEUED"


# ---------------------------------------------------------------------------------------------------------- bounds


def test_queue_full_at_the_bound_and_room_again_after() -> None:
    drive = Driving(Config(jobs_max=3))
    for index in range(3):
        assert drive.submit(f"j{index}")["kind"] == "accepted"
    full = drive.submit("j3")
    assert (full["code"], full["fault"], full["retry_after_s"]) == ("queue-full", "fleet", 1.0)
    assert drive.submit("j0")["duplicate"] is True, "what is held already is still recognised"
    drive.offer_submit("queued", sequence=9)
    drive.tick()
    assert drive.job("queued").state == "QUEUED", "what was read from the durable queue is never refused"
    drive.cancel("j0")
    drive.cancel("j1")
    assert drive.submit("j3")["kind"] == "accepted"


@pytest.mark.parametrize(
    ("fields", "counts", "most"),
    [({"replicas": 1024}, 65, 146), ({"replicas": 15}, 1, 3), ({"labels": {"pad": "x" * 60_000}}, 8, 18), ({}, 1, 3)],
)
def test_what_is_large_counts_as_several_towards_the_bounds_of_memory(
    fields: dict[str, Any], counts: int, most: int
) -> None:
    drive = Driving(Config(jobs_max=most, ended_max=2 * counts))
    replies = [drive.offer_submit(f"j{index}", **fields) for index in range(4)]
    drive.tick()
    assert [drive.answers[reply].get("code", "") for reply in replies] == ["", "", "", "queue-full"]
    assert drive.submit("small")["code"] == "queue-full"
    assert drive.state.load == 3 * counts
    drive.lead_from_snapshot()
    assert drive.state.load == 3 * counts
    for index in range(3):
        drive.cancel(f"j{index}")
        drive.tick()
    assert drive.state.load == 0
    assert [job.name for job in drive.state.jobs.values()] == ["j1", "j2"], "of those that are over, too"
    assert drive.submit("small")["kind"] == "accepted"


def test_the_last_tenth_of_the_bound_is_for_tenants_that_hold_less_than_that() -> None:
    drive = Driving(Config(jobs_max=100))
    replies = [drive.offer_submit(f"j{index}", tenant="crowd") for index in range(95)]
    drive.tick()
    assert [drive.answers[reply].get("code", "") for reply in replies] == [""] * 90 + ["queue-full"] * 5
    assert drive.submit("large", replicas=160)["kind"] == "accepted", "it counts 11, and its tenant held none"
    assert drive.submit("more")["code"] == "queue-full"
    drive.cancel("j0", tenant="crowd")
    drive.cancel("j1", tenant="crowd")
    assert drive.submit("more")["code"] == "queue-full", "now it holds more than a tenth"
    assert drive.submit("other", tenant="other")["kind"] == "accepted"
    drive.lead_from_snapshot()
    assert drive.submit("j95", tenant="crowd")["code"] == drive.submit("more")["code"] == "queue-full"


@pytest.mark.parametrize("size", [100, 5_000, 40_000, 64_000])
def test_records_stay_within_their_bound_under_a_flood(size: int) -> None:
    drive = Driving()
    drive.checks = False
    for index in range(8):
        drive.worker(f"w{index}", 8)
    total = min(6_000, 6_000_000 // size)
    for index in range(total):
        run = {"driver": "noop", "env": dict.fromkeys("ABC", "x" * (size // 3))}
        body = json.dumps({"job": f"j{index}", "run": run, "gpu": {"count": 1}})
        drive.offer_submit(f"j{index}", body=body.encode(), trace="00-" + "a" * 52)
    while drive.engine.waiting:
        drive.tick(obey=False)
    drive.check()
    assert max(drive.sizes) <= RECORD_BYTES_MAX
    assert drive.state.live == total
    assert sum(attempt.mask.bit_count() for attempt in drive.state.attempts()) == 64


@pytest.mark.slow
def test_a_gang_of_1024_behind_thousands_of_accepts() -> None:
    drive = Driving()
    drive.checks = False
    for index in range(16):
        drive.worker(f"w{index}", 64)
    for index in range(4_000):
        drive.offer_submit(f"j{index}")
    drive.offer_submit("g", replicas=1024, gpu={"scheduling": "gang"})
    while drive.engine.urgent:
        drive.tick(obey=False)
    drive.check()
    assert set(drive.states("g")) == {"PLACED"}
    assert len({replica.fence for replica in drive.job("g").replicas}) == 1, "a gang never spans two records"


def test_a_monstrous_trace_is_left_out() -> None:
    drive = Driving()
    drive.submit("j", trace="x" * 900_000)
    drive.submit("k", trace="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
    assert drive.job("j").traceparent == ""
    assert drive.job("k").traceparent.startswith("00-4bf9")


@pytest.mark.slow
def test_timers_of_jobs_that_are_over_do_not_pile_up() -> None:
    drive = Driving(Config(ended_max=0))
    drive.checks = False
    for _ in range(12):
        for index in range(1_500):
            drive.offer_submit(f"j{drive.now}-{index}", deadline_s=86_400)
        drive.tick()
        for job in [job.name for job in drive.state.jobs.values() if not job.over]:
            drive.offer_cancel(job)
        for _ in range(8):
            drive.tick(1_000)
    assert len(drive.engine.timers.rows) < 14_000


def test_cancelled_entries_do_not_fill_the_queue() -> None:
    drive = Driving()
    drive.checks = False
    drive.submit("head", gpu={})
    for _ in range(10):
        for index in range(500):
            drive.offer_submit(f"j{drive.now}-{index}", gpu={})
        drive.tick()
        for job in [job.name for job in drive.state.jobs.values() if not job.over and job.name != "head"]:
            drive.offer_cancel(job)
        drive.tick()
    drive.check()
    assert len(drive.engine.queue) < 2_500


def test_a_cancel_is_answered_with_the_record_that_holds_it() -> None:
    drive = Driving()
    drive.submit("j", gpu={})
    before = drive.state.seq
    assert drive.cancel("j")["ledger"] == drive.state.seq > before
    before = drive.state.seq
    assert drive.cancel("never-seen", before=True)["ledger"] == drive.state.seq > before


# ---------------------------------------------------------------------------------------------- cancel before submit


def test_a_cancel_before_its_submit_is_remembered() -> None:
    drive = Driving.with_hosts(1)
    remembered_s = drive.engine.config.finished_keep
    assert drive.cancel("j", before=True)["data"] == {
        "job": "j", "cancelled": True, "was": "UNKNOWN", "remembered_s": remembered_s,
    }  # fmt: skip
    for _ in range(2):
        answer = drive.submit("j", gpu={}, replicas=3)
        assert (answer["code"], answer["job"]) == ("cancelled-before", "j")
        assert answer["next"].endswith("moorage uncancel j")
    assert "j" not in drive.state.tenants["t"].jobs, "nothing came of it"
    assert drive.submit("j", gpu={}, tenant="u")["kind"] == "accepted", "another tenant's"
    drive.lead()
    assert drive.submit("j", gpu={})["code"] == "cancelled-before", "the next leader knows it"
    assert drive.uncancel("j")["data"] == {"job": "j", "lifted": True}
    assert drive.state.tenants["t"].tombstones == {}
    assert drive.submit("j", gpu={}, replicas=3)["kind"] == "accepted"
    assert drive.uncancel("j")["data"] == {"job": "j", "lifted": False}, "so it may be asked again"


def test_a_cancel_of_an_unknown_id_changes_nothing() -> None:
    """A typing error left a cancel of a day, which could not be undone, and ended the next job of that name."""
    drive = Driving()
    before = drive.state.digest
    answer = drive.cancel("tarin")
    assert (answer["code"], answer["job"]) == ("not-found", "tarin")
    assert answer["next"].endswith("moorage cancel --before tarin")
    assert drive.state.digest == before
    assert drive.submit("tarin", gpu={})["kind"] == "accepted"


def test_what_is_cancelled_and_lifted_in_one_record_is_accepted() -> None:
    drive = Driving()
    drive.offer_cancel("j", before=True)
    drive.offer_cancel("j", lifts=True)
    reply = drive.offer_submit("j", gpu={})
    drive.tick()
    assert drive.answers[reply]["kind"] == "accepted"
    assert drive.state.tenants["t"].tombstones == {}


def test_a_submit_of_the_queue_whose_id_was_cancelled_is_a_cancelled_job() -> None:
    """Nobody waits there for a refusal."""
    drive = Driving()
    drive.cancel("j", before=True)
    drive.offer_submit("j", gpu={}, sequence=8)
    drive.tick()
    assert drive.states("j") == ["CANCELLED"]
    assert drive.state.tenants["t"].tombstones == {}


@pytest.mark.parametrize("order", ["cancel first", "submit first"])
@pytest.mark.parametrize("by", ["endpoint", "before", "queue"])
def test_cancel_and_submit_in_one_record(order: str, by: str) -> None:
    drive = Driving.with_hosts(1)
    sequence = 7 if by == "queue" else 0
    cancel = ""
    if order == "cancel first":
        cancel = drive.offer_cancel("j", sequence=sequence, before=by == "before")
    reply = drive.offer_submit("j", gpu={}, sequence=sequence and 8)
    if order == "submit first":
        cancel = drive.offer_cancel("j", sequence=sequence, before=by == "before")
    drive.tick()
    drive.settle()
    if by == "before":
        assert drive.answers[reply]["code"] == "cancelled-before"
    else:
        assert drive.states("j") == ["CANCELLED"]
        assert drive.state.tenants["t"].tombstones == {}
    if by == "endpoint":  # it may be placed by the record that accepts it, and is ended by the next one
        assert (drive.answers[reply]["kind"], drive.answers[cancel]["kind"]) == ("accepted", "answer")
    else:
        assert drive.workers["w0"].told["started"] == 0


def test_a_cancel_behind_its_submit_is_taken_by_the_next_record() -> None:
    drive = Driving()
    submits = [drive.offer_submit(f"j{number}") for number in range(3)]
    cancels = [drive.offer_cancel(name, tenant=tenant) for tenant in "tu" for name in ("j0", "never", "j2")]
    drive.tick()
    drive.settle()
    assert [drive.answers[reply]["kind"] for reply in submits] == ["accepted"] * 3
    assert [drive.answers[reply].get("code", "") for reply in cancels] == [
        "", "not-found", "", "not-found", "not-found", "not-found",
    ]  # fmt: skip
    assert [drive.states(f"j{number}") for number in range(3)] == [["CANCELLED"], ["QUEUED"], ["CANCELLED"]]
    assert len(drive.engine.pending) == 0


def test_what_is_put_off_keeps_its_place_where_the_record_is_not_written() -> None:
    draft, cancels = Draft(State(), 0), Cancels()
    events = [Cancel(tenant, job, "") for tenant in "tu" for job in ("a", "b")]
    for event in events:
        cancels.add(event)
    turns = list(cancels.take(draft))
    assert [(each.tenant, each.job) for each in turns if isinstance(each, Cancel)] == [
        ("t", "a"), ("u", "a"), ("t", "b"), ("u", "b"),
    ]  # fmt: skip
    cancels.take_back()
    for taken in cancels.take(draft):
        if isinstance(taken, Cancel) and taken.job == "a":
            cancels.put_off(taken)
    assert cancels.size == 2, "they wait"
    cancels.take_back()
    assert cancels.size == 4
    assert list(cancels.take(draft)) == turns, "all of it again, in the same order"
    cancels.put_off(events[0])
    cancels.begin_record()
    assert (list(cancels.take(draft)), cancels.size) == ([events[0]], 0)


def test_what_stands_against_a_tenant_is_asked_for_each_record() -> None:
    """It is asked once for all requests of a record, and not once for all."""
    drive = Driving.with_hosts(1)
    assert "warnings" not in drive.submit("first", gpu={})
    drive.order("limit", tenant="t", jobs=1)
    assert drive.submit("over", gpu={})["code"] == "failed-precondition"
    drive.order("limit", tenant="t", jobs=0)
    drive.order("hold", tenant="t")
    assert drive.submit("held", gpu={})["warnings"] == ["tenant-held"]
    drive.order("release", tenant="t")
    drive.cancel("late", before=True)
    assert drive.submit("late", gpu={})["code"] == "cancelled-before"
    assert "warnings" not in drive.submit("last", gpu={})


def test_jobs_that_end_in_the_same_record_count_towards_no_limit() -> None:
    drive = Driving.with_hosts(1)
    drive.order("limit", tenant="t", jobs=2)
    drive.submit("runs", gpu={})
    drive.submit("waits", gpu={})
    drive.settle()
    drive.offer_cancel("waits")
    drive.offer_submit("first", gpu={}, reply="first")
    drive.offer_submit("second", gpu={}, reply="second")
    drive.tick()
    assert drive.answers["first"]["kind"] == "accepted"
    assert drive.answers["second"]["found"] == "2", "that makes two again"
    drive.offer_cancel("runs")
    drive.offer_submit("third", gpu={}, reply="third")
    drive.tick()
    assert drive.states("runs") == ["CANCELLING"]
    assert drive.answers["third"]["found"] == "2", "what is asked to end has not ended"
    drive.settle()
    assert drive.submit("fourth", gpu={})["kind"] == "accepted"


def test_a_request_s_own_value_of_a_variable_that_moorage_sets_is_warned_of() -> None:
    drive = Driving.with_hosts(1)
    assert "warnings" not in drive.submit("first", gpu={}, run={"argv": ["x"], "env": {"SEED": "7", "RANK": "1"}})
    (dropped,) = drive.submit("env", gpu={}, run={"argv": ["x"], "env": {"CUDA_VISIBLE_DEVICES": "0,1"}})["warnings"]
    assert dropped == "reserved-variable: CUDA_VISIBLE_DEVICES is set by moorage; the request's value is dropped"


def test_a_malformed_request_is_refused_each_time_and_beside_others() -> None:
    drive = Driving.with_hosts(1)
    well, malformed = {"driver": "noop"}, {"driver": "noop", "cwd": "/a\0b"}
    answers = [drive.submit(f"j{at}", run=run) for at, run in enumerate((well, malformed, malformed, malformed, well))]
    assert [answer["kind"] for answer in answers] == ["accepted", "error", "error", "error", "accepted"]


def test_a_cancel_of_an_id_that_is_free_again_is_remembered() -> None:
    """Rows of jobs that ended long ago are kept for the history; their ids are free, for a cancel as for a submit."""
    drive = Driving.with_hosts(1, config=Config(ended_max=0, finished_keep=10, history_keep=100_000))
    drive.submit("j", gpu={})
    drive.settle()
    drive.run_out("w0")
    drive.tick(5_000)
    assert drive.cancel("j")["data"]["cancelled"] is False
    drive.tick(60_000)
    assert drive.cancel("j", before=True)["data"]["was"] == "UNKNOWN"
    assert drive.submit("j", gpu={})["code"] == "cancelled-before"


def test_a_cancel_that_is_repeated_keeps_no_other_from_being_forgotten() -> None:
    drive = Driving()
    drive.cancel("again", before=True)
    drive.cancel("once", before=True)
    for _ in range(25):
        drive.tick(3600 * 1000)
        drive.cancel("again", before=True)
    drive.tick(5_000)
    assert set(drive.state.tenants["t"].tombstones) == {"again"}


def test_cancels_of_the_queue_keep_no_other_from_being_forgotten() -> None:
    drive = Driving()
    for number in range(FORGET_MAX + 1):
        drive.cancel(f"queued{number}", sequence=number + 1)
    drive.cancel("never-came", before=True)
    assert "never-came" in drive.state.tenants["t"].tombstones
    drive.tick(25 * 3600 * 1000)
    drive.tick(5_000)
    assert "never-came" not in drive.state.tenants["t"].tombstones


def test_tombstones_are_bounded_a_tenant_and_say_so() -> None:
    drive = Driving(Config(tombstones_max=3))
    replies = [drive.offer_cancel(f"j{index}", before=True) for index in range(5)]
    drive.tick()
    assert [drive.answers[reply].get("code", "") for reply in replies] == [
        "",
        "",
        "",
        "tombstones-full",
        "tombstones-full",
    ]
    assert "retry_after_s" in drive.answers[replies[4]]
    assert drive.cancel("j0", before=True)["data"]["cancelled"] is True, "known already"
    assert drive.cancel("other", tenant="u", before=True)["data"]["cancelled"] is True
    drive.uncancel("j0")
    assert drive.cancel("j9", before=True)["data"]["cancelled"] is True


def test_a_tombstone_of_the_endpoint_goes_after_the_window_of_finished_jobs() -> None:
    drive = Driving()
    drive.cancel("never-came", before=True)
    drive.cancel("queued", sequence=7)
    drive.tick(24 * 3600 * 1000 - 5_000)
    assert set(drive.state.tenants["t"].tombstones) == {"never-came", "queued"}
    drive.cancel("young", before=True)
    drive.tick(10_000)
    assert set(drive.state.tenants["t"].tombstones) == {"queued", "young"}
    assert drive.submit("never-came")["kind"] == "accepted"
    assert drive.states("never-came") == ["QUEUED"]


def test_a_tombstone_of_the_queue_goes_when_the_submits_are_read_past_it() -> None:
    drive = Driving()
    drive.cancel("gone", sequence=10)
    drive.cancel("stays", sequence=20)
    drive.cancel("endpoint", before=True)
    assert set(drive.state.tenants["t"].tombstones) == {"gone", "stays", "endpoint"}
    drive.engine.offer(QueueRead("t", "submit", 15))
    drive.engine.offer(QueueRead("t", "cancel", 21))
    drive.tick()
    assert set(drive.state.tenants["t"].tombstones) == {"stays", "endpoint"}
    assert (drive.state.tenants["t"].submit_cursor, drive.state.tenants["t"].cancel_cursor) == (15, 21)
    drive.lead()
    assert set(drive.state.tenants["t"].tombstones) == {"stays", "endpoint"}


def test_a_tombstone_of_a_queue_that_was_deleted_goes_by_age() -> None:
    """The queue that was made in its place is read from its beginning, and may never get as far."""
    drive = Driving()
    drive.cancel("queued", sequence=1_000)
    drive.engine.offer(QueueRead("t", "submit", 15))
    drive.tick()
    drive.tick(10_000)
    drive.cancel("endpoint", before=True)
    drive.engine.offer(QueueRead("t", "submit", 0))
    drive.tick()
    assert set(drive.state.tenants["t"].tombstones) == {"queued", "endpoint"}
    drive.tick(24 * 3600 * 1000 + 1_000)
    drive.tick(1_000)
    assert drive.state.tenants["t"].tombstones == {}


def test_the_cursor_never_overtakes_what_was_read() -> None:
    drive = Driving()
    drive.checks = False
    for index in range(60):
        drive.offer_submit(f"q{index}", sequence=index + 1, labels={"pad": "x" * 30_000})
        drive.engine.offer(QueueRead("t", "submit", index + 1))
    while drive.engine.waiting:
        drive.tick()
        cursor = drive.state.tenants["t"].submit_cursor if "t" in drive.state.tenants else 0
        assert all(f"q{index}" in drive.state.tenants["t"].jobs for index in range(cursor))
    assert drive.state.tenants["t"].submit_cursor == 60


# -------------------------------------------------------------------------------------------------------- no match


def test_no_match_waits_with_the_nearest_names() -> None:
    drive = Driving()
    drive.worker("w0", models=["NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB", "Tesla T4"])
    answer = drive.submit("j", gpu={"model": "NVIDIA H200"})
    assert answer["warnings"] == [
        "no-match: no worker with the driver noop has a GPU of this model; the fleet has NVIDIA H100 PCIe, "
        "NVIDIA A100-SXM4-80GB, others"
    ]
    assert drive.states("j") == ["QUEUED"]
    drive.worker("w1", models=["NVIDIA H200"])
    drive.tick()
    assert drive.states("j") == ["PLACED"]


@pytest.mark.parametrize(
    ("asks", "why"),
    [
        (
            {"gpu": {"model": "H200"}},
            "no worker with the driver noop has a GPU of this model; the fleet has NVIDIA H100",
        ),
        ({"gpu": {"count": 3}}, "the most matching GPUs on one worker is 2"),
        ({"gpu": {"min_memory_mib": 90_000}}, "the largest GPU that matches otherwise has 81559 MiB"),
        (
            {"gpu": {"vendor": "amd"}},
            "no worker with the driver noop has a GPU by amd; the GPUs of these workers are by nvidia",
        ),
        ({"gpu": {"sharing": "time-slice", "time_slice_index": 2}}, "no worker has a matching GPU with the index 2"),
        (
            {"gpu": {"sharing": "mps"}},
            "no worker with GPUs and the driver noop offers its sharing mode; these workers offer exclusive,",
        ),
        (
            {"gpu": {"model": "H200"}, "run": {"driver": "docker", "argv": ["x"], "image": "a:1"}},
            "no worker offers the driver docker; the workers offer noop, process",
        ),
        (
            {"gpu": {"model": "H200"}, "requires": {"zone": ["x", "y"]}},
            "no worker with the driver noop is labelled zone=x or zone=y: the fleet has zone=a, b",
        ),
        (
            {"gpu": {}, "requires": {"rack": ["1"]}},
            "no worker with the driver noop is labelled rack=1: no worker has the label rack",
        ),
        (
            {"gpu": {}, "requires": {"zone": ["a"], "disk": ["ssd"]}},
            "no worker with the driver noop has all the labels that it requires, though each label is on one",
        ),
        (
            {"gpu": {}, "resources": {"cpu_milli": 9_000}},
            "the most that one worker with such GPUs has is 8 cores and 8 GiB of memory",
        ),
        (
            {"gpu": None, "resources": {"cpu_milli": 9_000}},
            "the most that one worker has is 8 cores and 8 GiB of memory",
        ),
        ({"gpu": {"scheduling": "gang"}, "replicas": 5}, "the whole fleet would hold 4 of its 5 replicas at once"),
    ],
)
def test_no_match_names_what_is_missing_not_only_models(asks: dict[str, Any], why: str) -> None:
    drive = Driving()
    modes = ["exclusive", "time-slice"]
    drive.worker("w0", 2, cpu_milli=8_000, memory_mib=8_192, labels={"zone": "a"}, modes=modes)
    drive.worker("w1", 2, cpu_milli=8_000, memory_mib=8_192, labels={"zone": "b", "disk": "ssd"}, modes=modes)
    assert drive.submit("waits", **asks)["warnings"][0].startswith(f"no-match: {why}")
    refused = drive.submit("refused", on_no_match="reject", **asks)
    assert (refused["code"], refused["fault"]) == ("failed-precondition", "caller")
    assert f"({why}" in refused["message"]
    assert drive.state.job("t", "refused") is None


def test_no_match_names_what_keeps_it_from_the_worker_that_comes_nearest() -> None:
    drive = Driving.with_hosts(1, drivers=["noop"], labels={"zone": "b"})
    drive.worker("w1", labels={"zone": "a"}, models=["NVIDIA A100-SXM4-80GB"])
    (why,) = drive.submit("j", gpu={"model": "H200"}, run={"argv": ["x"]}, requires={"zone": ["a"]})["warnings"]
    assert why == (
        "no-match: no worker with the driver process and its labels has a GPU of this model; the fleet has "
        "NVIDIA A100-SXM4-80GB, NVIDIA H100 80GB HBM3"
    )
    (why,) = drive.submit("k", gpu={"count": 2}, run={"argv": ["x"]}, requires={"zone": ["a"]})["warnings"]
    assert why == "no-match: the most matching GPUs on one worker is 1"
    (why,) = drive.submit("m", gpu={}, run={"argv": ["x"]}, requires={"zone": ["b"]})["warnings"]
    labelled = "no worker with the driver process is labelled zone=b: the fleet has zone=a, b"
    assert why == f"no-match: {labelled}", "w0 has the label, but not the driver"


def test_no_match_where_some_gpus_are_kept_for_local_claims() -> None:
    drive = Driving.with_hosts(4, lent_slots=[0, 1])
    (why,) = drive.submit("j", gpu={"count": 3})["warnings"]
    assert why == "no-match: the most matching GPUs that one worker lends is 2"


@pytest.mark.parametrize(
    "asks",
    [
        {"gpu": {}, "resources": {"memory_mib": 9_000}},
        {"gpu": {"scheduling": "gang"}, "replicas": 4, "resources": {"cpu_milli": 5_000}},
        {"gpu": {"sharing": "mps", "scheduling": "gang"}, "replicas": 33},
        {"gpu": {"sharing": "mps", "share": {"memory_mib": 50_000}, "scheduling": "gang"}, "replicas": 5},
        {"gpu": {"sharing": "mps", "share": {"compute_percent": 60}, "scheduling": "gang"}, "replicas": 5},
    ],
)
def test_reject_at_once_when_everybody_was_heard(asks: dict[str, Any]) -> None:
    drive = Driving.with_hosts(2, 2, cpu_milli=8_000, memory_mib=8_000)
    answer = drive.submit("j", on_no_match="reject", **asks)
    assert (answer["code"], answer["fault"]) == ("failed-precondition", "caller")
    assert drive.state.job("t", "j") is None


@pytest.mark.parametrize(
    "asks",
    [
        {"gpu": {"model": "L40S"}},
        {"gpu": {}, "requires": {"rack": ["1"]}},
        {"gpu": {"scheduling": "gang"}, "replicas": 3},
    ],
)
def test_a_job_waits_for_a_worker_that_is_away(asks: dict[str, Any]) -> None:
    drive = Driving.with_hosts(2)
    worker = drive.worker("w1", 1, models=["NVIDIA L40S"], labels={"rack": "1"})
    worker.die()
    worker.session = ""
    drive.pass_time(40_000)
    waits = drive.submit("waits", on_no_match="reject", **asks)
    assert waits["warnings"][0].endswith("; a worker that is away could run it")
    assert drive.submit("never", on_no_match="reject", gpu={"count": 9})["code"] == "failed-precondition"
    drive.join(worker)
    drive.settle()
    assert "QUEUED" not in drive.states("waits")


@pytest.mark.parametrize("before", ["none", "is there", "is away", "is away with less"])
@pytest.mark.parametrize("sequence", [0, 5])
def test_a_job_waits_for_a_worker_that_joins_in_the_record_of_its_submit(before: str, sequence: int) -> None:
    drive = Driving.with_hosts(1)
    l40s = devices("w1", ["NVIDIA L40S"] * 2)
    if before == "none":
        worker = drive.workers["w1"] = Worker("w1", drive.workers["w0"].hello, "machine-w1")
    else:
        worker = drive.worker("w1", models=["NVIDIA L40S"] * (1 if before == "is away with less" else 2))
    if before.startswith("is away"):
        worker.die()
        worker.session = ""
        drive.pass_time(40_000)
        assert drive.submit("asks", on_no_match="reject", gpu={"model": "L40S"})["kind"] == "accepted"
        drive.cancel("asks")
    worker.hello = msgspec.structs.replace(worker.hello, worker="w1", boot="boot-2", gpu_pool=l40s)
    joined = drive.send("w1", worker.join_frame())
    reply = drive.offer_submit("j", on_no_match="reject", sequence=sequence, gpu={"model": "L40S", "count": 2})
    never = drive.offer_submit("never", on_no_match="reject", gpu={"model": "L40S", "count": 3})
    drive.tick()
    assert drive.answers[joined]["kind"] == "joined"
    if not sequence:
        assert drive.answers[reply]["kind"] == "accepted", drive.answers[reply]
    assert drive.answers[never]["code"] == "failed-precondition"
    worker.joined(drive.answers[joined]["session"], 0)
    drive.settle()
    assert drive.placed_on("j") == ["w1"]


def test_a_job_names_a_device_that_a_worker_had_before_it_was_away() -> None:
    drive = Driving.with_hosts(1)
    worker = drive.worker("w1", 2)

    def submit(job: str, device: str) -> str:
        ids = {"process": {"gpu_device_ids": [device]}}
        run = {"driver": "process", "argv": ["x"]}
        answer = drive.submit(job, on_no_match="reject", gpu={}, run=run, driver_config=ids)
        return str(answer.get("code", answer["kind"]))

    worker.die()
    drive.pass_time(40_000)
    assert submit("waits", "GPU-w1-0") == "accepted"
    worker.hello = msgspec.structs.replace(worker.hello, gpu_pool=devices("new", ["NVIDIA L40S"]))
    drive.join(worker)
    assert submit("first", "GPU-w1-0") == "failed-precondition"
    assert submit("second", "GPU-w1-1") == "failed-precondition"


def test_an_empty_fleet_rejects_nothing_at_submit_nor_later() -> None:
    drive = Driving()
    answer = drive.submit("j", gpu={"model": "H200"}, on_no_match="reject")
    assert answer["warnings"] == ["no-match: the fleet is empty"]
    drive.worker("w0")
    drive.pass_time(2_000)
    assert drive.states("j") == ["QUEUED"]


def test_a_request_is_rejected_by_event_where_not_all_workers_have_reported() -> None:
    drive = Driving.with_hosts(1, 1)
    drive.lead()
    drive.renew("w0")
    answer = drive.submit("j", gpu={"count": 9}, on_no_match="reject")
    assert answer["kind"] == "accepted"
    assert answer["warnings"][0] == "fleet-not-yet-heard"
    drive.pass_time(3_000, renew=False)
    assert drive.states("j") == ["QUEUED"], "nobody is told never before all were heard"
    drive.renew("w1")
    drive.tick(1_000)
    assert drive.states("j") == ["REJECTED"]
    assert drive.events[-1]["state"] == "REJECTED"
    assert drive.events[-1]["why"].startswith("no-match")


def test_what_matched_once_is_not_rejected_after_a_takeover() -> None:
    drive = Driving()
    worker = drive.worker("w0", auto=False)
    drive.submit("j", gpu={}, on_no_match="reject", retries_on_lost=3)
    drive.report("claimed", "j")
    worker.session = ""
    drive.pass_time(40_000, renew=False)
    assert drive.states("j") == ["QUEUED"]
    drive.lead()
    drive.pass_time(5_000)
    assert drive.states("j") == ["QUEUED"], "it runs again when its worker comes back"


def test_what_waits_is_not_rejected_because_its_worker_is_away_at_a_takeover() -> None:
    """One that was never placed has the revision of one that matched no worker."""
    drive = Driving.with_hosts(1, capabilities={"noop": Capabilities(users=False)})
    worker = drive.worker("w1", models=["NVIDIA L40S"], capabilities={"noop": Capabilities(users=True)})
    model = {"gpu": {"model": "L40S"}}
    drive.submit("first", **model)
    drive.settle()
    drive.submit("waits", on_no_match="reject", **model)
    drive.submit("later", on_no_match="reject", start_after_s=600, **model)
    drive.submit("user", gpu={}, run={"driver": "noop", "user": "ana"})
    worker.die()
    worker.session = ""
    drive.pass_time(40_000)
    for _ in range(2):
        drive.lead()
        drive.pass_time(5_000)
    assert [drive.states(job) for job in ("waits", "later", "user")] == [["QUEUED"]] * 3
    drive.cancel("first")
    drive.join(worker)
    drive.settle()
    assert drive.placed_on("waits") == ["w1"]


def test_a_queued_request_that_matches_nothing_is_rejected_by_event() -> None:
    drive = Driving.with_hosts(1)
    drive.submit("q7", sequence=7, gpu={"count": 9}, on_no_match="reject")
    assert drive.states("q7") == ["REJECTED"]
    assert drive.events[-1]["why"].startswith("no-match")


# ------------------------------------------------------------------------------------------------- monstrous content


def test_deep_nesting_and_what_msgpack_can_say_beyond_json_is_refused_not_fatal() -> None:
    drive = Driving(Config(ended_max=0))
    nested: Any = 1
    for _ in range(200):
        nested = [nested]
    for index, config in enumerate(
        ({"a": nested}, {"a": {1: 2}}, {"a": msgspec.msgpack.Ext(5, b"x")}, {"a": float("nan")}, {"a": b"bytes"})
    ):
        body = msgspec.msgpack.encode({"run": {"driver": "noop"}, "driver_config": config})
        answer = drive.submit(f"j{index}", body=body)
        assert (answer["code"], answer["field"]) == ("invalid-argument", "$.driver_config")
    body = b'{"run":{"driver":"noop"},"driver_config":{"a":%d}}' % 2**70
    with pytest.raises(Refused, match="does not fit into 64 bits"):  # where the body is read, before the core
        drive.submit("big", body=body)
    drive.submit("good", driver_config={"docker": {"cdi_devices": ["nvidia.com/gpu=0"]}})
    drive.cancel("good")
    drive.tick()
    assert len(drive.state.finished) == 1


@pytest.mark.parametrize(
    ("events", "msgpack", "own"), [("job", False, True), ("tenant", False, False), ("tenant", True, False)]
)
def test_events_go_to_the_jobs_own_subject_unless_it_says_tenant(events: str, msgpack: bool, own: bool) -> None:
    drive = Driving()
    request = {"job": "j", "run": {"driver": "noop"}, "events": events}
    drive.offer_submit("j", body=msgspec.msgpack.encode(request) if msgpack else json.dumps(request).encode())
    out = drive.tick()
    assert [event[3] for event in out.events] == [own]
    assert acts(drive, Tombstone) == []


def test_a_job_that_is_told_by_the_tenants_frames_has_its_own_subject_once_it_is_followed() -> None:
    drive = Driving()
    drive.offer_submit("j", body=b'{"job":"j","run":{"driver":"noop"},"events":"tenant"}')
    assert [event[3] for event in drive.tick().events] == [False]
    shown = wire(views.show(drive.engine, "t", "j"))
    assert shown["own_subject"]
    drive.offer_cancel("j")
    assert [event[3] for event in drive.tick().events] == [True]


def test_who_hears_the_tenants_frames_asks_without_a_subject_of_its_own() -> None:
    drive = Driving()
    drive.offer_submit("j", body=b'{"job":"j","run":{"driver":"noop"},"events":"tenant"}')
    drive.tick()
    shown = wire(views.show(drive.engine, "t", "j", follow=False))
    assert not shown["own_subject"]
    drive.offer_cancel("j")
    assert [event[3] for event in drive.tick().events] == [False]


def test_a_tenant_that_gets_events_gets_them_from_the_next_leader_too() -> None:
    drive = Driving()
    drive.offer_submit("j", body=b'{"job":"j","run":{"driver":"noop"},"events":"tenant"}')
    drive.tick()
    drive.lead()
    drive.offer_cancel("j")
    assert [event[3] for event in drive.tick().events] == [True]


def test_jobs_that_came_together_are_told_by_the_tenants_frames_until_one_is_followed() -> None:
    drive = Driving.with_hosts(2)
    batch = Batch("b", True, 2)
    for position, job in enumerate(("a", "b")):
        drive.offer_submit(job, batch=batch, position=position, gpu={})
    assert [event[3] for event in drive.tick(obey=False).events] == [False, False]
    shown = wire(views.show(drive.engine, "t", "a"))
    assert shown["request"]["job"] == "a"
    drive.report("claimed", "a")
    drive.report("claimed", "b")
    own = {event["job"]: event for event in drive.events if event["changes"][-1]["state"] == "CLAIMED"}
    assert own.keys() == {"a", "b"}
    assert (drive.job("a").own_subject, drive.job("b").own_subject) == (True, False)


# ------------------------------------------------------------------------------------------ a model in another spelling


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("L4", "L4 is only a part of a word in NVIDIA L40S; ~L4 takes that, too"),
        ("A100-80GB", "did you mean A100:80G"),
        ("a100_80gb", "did you mean A100:80G"),
        ("A100 80G", "did you mean A100:80G"),
        ("nvidia-a100", "did you mean NVIDIA A100"),
        ("A100-SXM4-80G", "did you mean A100-SXM4:80G"),
        ("A100-40GB", "did you mean A100:40G"),
        ("A100-96GB", "the fleet has "),  # none has so much memory
        ("A1000", "the fleet has "),  # another model, however near
        ("H200", "the fleet has "),
    ],
)
def test_a_model_that_the_fleet_spells_otherwise_is_answered_with_that_spelling(model: str, said: str) -> None:
    drive = Driving()
    drive.worker("w0", models=["NVIDIA L40S", "NVIDIA A100-SXM4-80GB", "NVIDIA GH200 480GB"], gpu_memory_mib=81_251)
    answer = drive.submit("j", gpu={"model": model})
    [warning] = answer["warnings"]
    assert warning.startswith(f"no-match: no worker with the driver noop has a GPU of this model; {said}")


def test_no_hint_names_the_model_that_was_asked_for() -> None:
    """A request of an H100 with a label that its hosts lack was answered "did you mean H100"."""
    drive = Driving()
    drive.worker("w0", models=["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"])
    drive.worker("west", models=["NVIDIA L4"], labels={"zone": "west"})
    for model, said in (
        ("H100", "NVIDIA H100 80GB HBM3 are on workers that the rest of the request rules out"),
        ("A100-80G", "the fleet has "),  # A100:80G would not start there either
        ("l-4", "did you mean L4"),
    ):
        [warning] = drive.submit(f"j-{model}", gpu={"model": model}, requires={"zone": ["west"]})["warnings"]
        assert warning.endswith(said) or f"; {said}" in warning, warning


def test_a_model_that_is_there_is_not_warned_of() -> None:
    drive = Driving()
    drive.worker("w0", models=["NVIDIA L40S", "NVIDIA A100-SXM4-80GB"])
    for name, model in (("whole", "A100"), ("lower", "l40s"), ("either", ["A100", "L4"]), ("inside", "~L4")):
        assert "warnings" not in drive.submit(name, gpu={"model": model}), model


def test_a_key_twice_is_refused_at_the_door() -> None:
    """The last one was taken in silence."""
    drive = Driving.with_hosts(1)
    body = b'{"job":"j","gpu":{"count":1},"run":{"argv":["x"]},"gpu":{"count":2}}'
    with pytest.raises(Refused, match="the request has gpu twice in one object") as refused:
        drive.engine.submitted("t", body, lambda: "j")
    assert refused.value.problem.field == "$.gpu"


def test_what_a_command_would_warn_of_is_in_the_answer_for_each_client() -> None:
    drive = Driving.with_hosts(1)
    run = {"argv": ["x"], "timeout_s": 7200.0, "env": {"HF_TOKEN": "very secret", "MAX_TOKENS": "5"}}
    times, secret = drive.submit("j", gpu={}, run=run, deadline_s=3600.0, start_within_s=3600.0)["warnings"][::-1]
    assert times == ("deadline: deadline_s 3600 (--deadline) ends the job before timeout_s (--time-limit) 7200 is over")
    assert secret.startswith("secret: the value of HF_TOKEN is in the request")
    assert "very secret" not in secret
    [unfilled] = drive.submit("i", run={"argv": ["train", "--lr={lr}"]})["warnings"]
    assert unfilled.startswith("placeholder: {lr} in the command stays as it is, as the job has no items")
    engine = {"argv": ["moorage", "serve", "--http", "/health", "--", "engine", "--port", "{port}"]}
    told = drive.submit("s", run=engine, service={"name": "s"})["warnings"]
    assert not any("placeholder" in each for each in told), "`moorage serve` fills it"
    assert "warnings" not in drive.submit("l", run={"argv": ["train", "{lr}"], "items": [{"lr": 1}]})
    fits = {"argv": ["x"], "timeout_s": 3600.0, "env": {"HF_TOKEN": {"secret": "hf-token"}}}
    assert "warnings" not in drive.submit("k", gpu={}, run=fits, deadline_s=3600.0)
