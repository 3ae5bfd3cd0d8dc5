"""No record keeps the leader's loop for long: what has no room in one goes on in the next, at once and in order."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from moorage.bus.transport import Delivery
from moorage.scheduler.core.events import QueueRead
from moorage.scheduler.core.fleet.shape import Shape, Shapes
from moorage.scheduler.core.ledger.ceilings import CEILINGS
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.records import STEP_WIDTH, Op
from moorage.scheduler.core.ledger.state import EXPIRED, QUEUED, REJECTED
from moorage.scheduler.core.lifecycle import pending_events
from moorage.scheduler.core.queue import queue as queue_module
from moorage.scheduler.core.queue.queue import Queue
from moorage.scheduler.core.schedule import cycle, placing
from moorage.scheduler.leader import gc_schedule, intake
from moorage.scheduler.leader.gc_schedule import GcSchedule
from moorage.scheduler.leader.intake import Intake
from moorage.scheduler.questions import foresight as foresight_module
from moorage.scheduler.questions import question_queue
from moorage.scheduler.questions.foresight import Foresight
from moorage.scheduler.questions.question_queue import contained
from moorage.scheduler.whatif.plan import TOO_LATE
from moorage.schemas.errors import refuse
from moorage.schemas.job import Request, Resources, Run
from tests.unit.scheduler.driving import SUBJECTS, Driving


def _steps(payload: bytes, op: Op) -> int:
    return decode_record(payload).steps[::STEP_WIDTH].count(op)


def _accepts(payload: bytes) -> int:
    return sum(len(flat) // 4 for _, flat in decode_record(payload).accepts)


def _until_calm(drive: Driving) -> list[bytes]:
    """The records until nothing presses: as the term's loop makes them, one after the other."""
    first = len(drive.records)
    while drive.engine.urgent:
        drive.tick(obey=False)
    return drive.records[first:]


def test_many_small_requests_are_accepted_and_placed_in_several_records() -> None:
    drive = Driving()
    drive.checks = False
    for index in range(50):
        drive.worker(f"w{index}", 64)
    for index in range(3_000):
        drive.offer_submit(f"j{index}", gpu={})
    records = _until_calm(drive)
    drive.check()
    assert sum(map(_accepts, records)) == sum(_steps(payload, Op.PLACE) for payload in records) == 3_000
    assert max(map(_accepts, records)) <= CEILINGS.accepts + 1
    assert len(records) >= 3


@pytest.mark.slow
def test_the_ends_of_thousands_are_told_in_several_records() -> None:
    drive = Driving()
    drive.checks = False
    for index in range(60):
        drive.worker(f"w{index}", 64)
    for index in range(3_600):
        drive.offer_submit(f"j{index}", gpu={})
    while drive.engine.urgent:
        drive.tick()
    for worker in drive.workers.values():
        for key in list(worker.held):
            worker.finish(key)
        if (frame := worker.report_frame()) is not None:
            drive.send(worker.id, frame)
    records = _until_calm(drive)
    drive.check()
    ends = [_steps(payload, Op.RAN) for payload in records]
    assert sum(ends) == 3_600
    assert max(ends) <= CEILINGS.steps + 64, "one frame more than the bound, at most"
    assert drive.free_gpus() == 60 * 64


def test_choices_that_differ_are_made_over_several_records_in_their_order() -> None:
    drive = Driving()
    drive.checks = False
    for index in range(600):
        drive.worker(f"w{index}", 8)
    for index in range(600):
        drive.offer_submit(f"j{index}", gpu={"count": 8}, priority=90 if index >= 300 else 50)
    records = _until_calm(drive)
    drive.check()
    assert len(records) == -(-600 // (CEILINGS.choices + 1))
    assert {attempt.replica.job.num for attempt in drive.state.attempts()} == set(range(1, 601))
    placed = [decode_record(payload).steps[1::STEP_WIDTH] for payload in records]
    assert min(placed[0]) > 300, "who goes first is not asked twice"


def _requests_that_differ(count: int, monkeypatch: pytest.MonkeyPatch) -> Driving:
    """So many, which find no room beside what runs; behind them `last`, which does."""
    monkeypatch.setattr(cycle, "IN_VAIN_MAX", 80)
    drive = Driving()
    drive.checks = False
    drive.worker("w0", 2, cpu_milli=2_000)
    drive.submit("first", gpu={}, resources={"cpu_milli": 900})
    for index in range(count):
        drive.offer_submit(f"j{index}", gpu={}, resources={"cpu_milli": 1_200 + index})
    drive.offer_submit("last", gpu={}, resources={"cpu_milli": 1_100}, priority=1)
    return drive


def test_requests_that_all_differ_are_scanned_without_a_placement_over_several_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drive = _requests_that_differ(100, monkeypatch)
    most, records = 0, 0
    while drive.engine.urgent:
        drive.tick()
        most, records = max(most, drive.engine.planner.placing.in_vain), records + 1
    assert most <= 80 + placing.A_LOOK
    assert records >= 9
    assert drive.states("last") != ["QUEUED"], "nobody is forgotten"


def test_a_fleet_that_opens_all_the_time_keeps_nobody_from_being_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = _requests_that_differ(200, monkeypatch)
    for _ in range(12):
        drive.engine.fleet.opens()  # anywhere: who found no room is looked for again
        drive.tick()
    assert drive.states("last") != ["QUEUED"]


def test_a_long_group_is_cleared_of_ended_jobs_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is, a record looks at no more of it, and what ended becomes no large share of it."""
    monkeypatch.setattr(queue_module, "SPARE", 3)
    monkeypatch.setattr(queue_module, "PART", 8)
    queue, kind = Queue(), (50, Shapes().of(Request(resources=Resources(1, 0), run=Run(argv=["true"]))), "t")
    for num in range(40):
        queue.enter(num, kind)
    [group] = queue.groups.values()
    live, looked = set(range(40)), []

    def is_live(num: int) -> bool:
        looked.append(num)
        return num in live

    for num in range(1, 40, 2):
        live.discard(num)
        before = len(looked)
        queue.ended(kind, is_live)
        assert len(looked) - before <= 8
    assert live <= set(group.jobs), "what lives stays"
    assert list(group.jobs) == sorted(group.jobs)
    assert len(group.jobs) < 30, "of twenty that ended, more than ten are gone"


def test_a_record_that_was_full_of_requests_lets_them_start_with_the_next() -> None:
    drive = Driving()
    drive.checks = False
    drive.worker("w0", 8)
    for index in range(CEILINGS.accepts + 1):
        drive.offer_submit(f"j{index}", gpu={"count": 8})
    drive.tick(obey=False)
    assert not drive.engine.waiting
    assert not list(drive.state.attempts()), "the record was full before anybody was placed"
    assert drive.engine.urgent, "nothing else would make the next record"
    _until_calm(drive)
    assert drive.states("j0") == ["PLACED"]


@pytest.mark.slow
def test_a_frame_of_thousands_is_one_act_and_every_end_keeps_its_why() -> None:
    drive = Driving()
    drive.checks = False
    drive.worker("w0", 0)
    count = CEILINGS.steps + 500
    for index in range(-(-count // 1_000)):
        drive.offer_submit(f"j{index}", replicas=min(1_000, count - index * 1_000))
    while drive.engine.urgent:
        drive.tick()
    drive.settle()
    worker = drive.workers["w0"]
    assert len(worker.held) == count
    for number, key in enumerate(list(worker.held)):
        worker.finish(key, 3, f"reason {number}")
    drive.report_all()
    drive.check()
    told = {row[8] for job in drive.state.jobs.values() for row in job.history if row[8]}
    assert len(told) == count


def test_renewals_of_a_large_fleet_are_answered_over_several_records() -> None:
    drive = Driving()
    drive.state.ceilings = replace(CEILINGS, events=100)
    drive.checks = False
    replies = []
    for index in range(350):
        drive.worker(f"w{index}", 1)
    for name, worker in drive.workers.items():
        replies.append(drive.send(name, worker.renew_frame()))
    assert not drive.engine.urgent, "a renewal may wait"
    drive.tick()
    assert sum(reply in drive.answers for reply in replies) == 100
    assert drive.engine.urgent, "what came before the record waits no longer for it"
    assert len(_until_calm(drive)) == 3
    assert [drive.answers[reply]["kind"] for reply in replies] == ["renewed"] * 350


def _crowd(drive: Driving, jobs: int, **fields: Any) -> None:
    """So many jobs with as many replicas as a job may have, none of which has a place."""
    for index in range(jobs):
        drive.offer_submit(f"j{index}", gpu={"model": "H200"}, replicas=1024, tenant="crowd", **fields)
    _until_calm(drive)


def _keeps_nobody_waiting(drive: Driving) -> int:
    """While a crowd ends, with each record a neighbour's request starts and a renewal is answered; how many records."""
    worker, records = drive.workers["w0"], 0
    while any(not job.over for job in drive.state.tenants["crowd"].jobs.values()):
        renewal = drive.send("w0", worker.renew_frame())
        answer = drive.offer_submit(f"n{records}")
        before = sum(replica.state != QUEUED for job in drive.state.jobs.values() for replica in job.replicas)
        drive.tick()
        assert drive.answers[renewal]["kind"] == "renewed"
        assert drive.answers[answer]["kind"] == "accepted"
        assert drive.states(f"n{records}") == ["PLACED"]
        after = sum(replica.state != QUEUED for job in drive.state.jobs.values() for replica in job.replicas)
        assert after - before <= CEILINGS.steps + 64
        records += 1
        assert records < 50
    return records


def test_cancels_of_thousands_keep_nobody_waiting_and_tenants_have_turns() -> None:
    drive = Driving()
    drive.checks = False
    drive.worker("w0", 64)
    _crowd(drive, 12)
    drive.submit("own", gpu={"model": "H200"})
    for index in range(12):
        drive.offer_cancel(f"j{index}", tenant="crowd")
    own = drive.offer_cancel("own")
    drive.tick()
    drive.tick()
    assert drive.answers[own]["data"]["cancelled"], "it waits for one cancel of each other tenant"
    assert _keeps_nobody_waiting(drive) >= 5
    drive.check()


@pytest.mark.parametrize("field", ["start_within_s", "deadline_s"])
def test_jobs_whose_time_is_over_at_once_keep_nobody_waiting_and_start_no_more(field: str) -> None:
    drive = Driving()
    drive.checks = False
    worker = drive.worker("w0", 64)
    _crowd(drive, 6, **{field: 60})
    drive.pass_time(60_000, step=1_000)
    late = drive.worker("w1", 64, "NVIDIA H200")  # where they had a place, were it not too late
    assert drive.engine.next_timer_ms <= drive.now, "the next record is due at once"
    assert _keeps_nobody_waiting(drive) >= 3
    assert worker.held
    assert not late.held
    assert {replica.state for job in drive.state.tenants["crowd"].jobs.values() for replica in job.replicas} == {
        EXPIRED
    }
    drive.check()


def test_of_several_replicas_those_that_are_overdue_expire_in_their_turn_and_the_others_go_on() -> None:
    drive = Driving()
    drive.state.ceilings = replace(CEILINGS, bulk_steps=1)
    worker = drive.worker("w0", 1, auto=False)
    drive.submit("first", gpu={"model": "H200"}, start_within_s=60)
    drive.submit("second", gpu={"count": 1}, replicas=2, start_within_s=60)
    drive.pass_time(59_000)
    drive.now += 2_000
    drive.tick()
    assert drive.states("first") == ["EXPIRED"]
    drive.reports([("claimed", "second", 0, 0, ""), ("started", "second", 0, 0, "")])
    assert drive.states("second") == ["RUNNING", "EXPIRED"]
    assert worker.id in drive.placed_on("second")


def test_what_nobody_could_run_is_rejected_in_several_records_once_all_are_heard() -> None:
    drive = Driving()
    drive.checks = False
    drive.worker("w0", 64)
    drive.lead()
    _crowd(drive, 12, on_no_match="reject")
    first = len(drive.records)
    drive.renew()
    drive.pass_time(1_000)
    assert drive.engine.urgent, "the rest is not put off"
    assert _keeps_nobody_waiting(drive) >= 5
    assert max(drive.sizes[first:]) < CEILINGS.full_bytes
    assert {replica.state for job in drive.state.tenants["crowd"].jobs.values() for replica in job.replicas} == {
        REJECTED
    }


def test_the_mark_of_read_cancels_stands_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_events, "CANCELS_MAX", 2)
    drive = Driving.with_hosts(1)
    for index in range(3):
        drive.offer_submit(f"j{index}", gpu={"model": "H200"})
    drive.tick()
    for index in range(3):
        drive.offer_cancel(f"j{index}", sequence=10 + index)
    drive.engine.offer(QueueRead("t", "cancel", 12))
    drive.tick()
    assert drive.states("j2") == ["QUEUED"]
    assert drive.state.tenants["t"].cancel_cursor == 0, "a leader that dies now has not read the third"
    _until_calm(drive)
    assert drive.states("j2") == ["CANCELLED"]
    assert drive.state.tenants["t"].cancel_cursor == 12


# ------------------------------------------------------------------------------------------------------------ intake


def _intake(drive: Driving, answers: dict[str, bytes]) -> Intake:
    def refused(*_: object) -> None:
        raise AssertionError(_)

    return Intake(drive.engine, SUBJECTS, answers.__setitem__, answers.__setitem__, refused, refused)


def _array(names: list[str]) -> bytes:
    return msgspec.json.encode([{"job": name, "gpu": {"count": 1}, "run": {"driver": "noop"}} for name in names])


def test_a_request_of_an_array_that_cannot_be_read_at_all_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    drive, answers = Driving(), dict[str, bytes]()
    reader, read = _intake(drive, answers), drive.engine.reader.read

    def read_or_break(body: bytes) -> tuple[str | None, Request, Shape]:
        found = read(body)
        if found[1].priority == 13:
            raise RuntimeError("a defect")
        return found

    monkeypatch.setattr(drive.engine.reader, "read", read_or_break)
    requests = [
        {"job": job, "priority": at, "run": {"driver": "noop"}} for job, at in (("a", 1), ("b", 13), ("c", 999))
    ]
    reader.put(Delivery(SUBJECTS.api("t", "submit"), "_INBOX.1", msgspec.json.encode(requests)))
    reader.put(Delivery(SUBJECTS.api("t", "submit"), "_INBOX.2", b'{"job":"d","run":{"driver":"noop"}}'))
    assert reader.drain(drive.now)
    drive.tick()
    assert not answers, "one message gets one answer"
    first, second, third = drive.answers["_INBOX.1"]
    assert (first["job"], first["state"]) == ("a", "QUEUED")
    assert (second["code"], third["code"]) == ("internal", "invalid-argument")
    assert "nothing of it was recorded" in second["message"]
    assert reader.counters["defects"] == 1
    assert drive.answers["_INBOX.2"]["state"] == "QUEUED", "a message behind the array is read as always"


def test_a_flood_is_read_in_several_turns_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "AT_ONCE", 100)
    drive = Driving()
    reader = _intake(drive, {})
    for index in range(250):
        body = b'{"job":"j%d","run":{"driver":"noop"}}' % index
        reader.put(Delivery(SUBJECTS.api("t", "submit"), f"_INBOX.{index}", body))
    turns = 1
    while not reader.drain(drive.now):
        assert drive.engine.waiting == 100 * turns
        turns += 1
    assert turns == 3
    drive.tick()
    assert [job.name for job in drive.state.jobs.values()] == [f"j{index}" for index in range(250)]


def test_a_flood_of_one_tenant_holds_up_neither_another_nor_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "AT_ONCE", 100)
    monkeypatch.setattr(intake, "WAITING_MAX", 1_000)
    monkeypatch.setattr(intake, "WAITING_MAX_TENANT", 900)
    drive = Driving()
    reader = _intake(drive, {})
    reader.put(Delivery(SUBJECTS.api("crowd", "submit"), "_INBOX.array", _array([f"a{index}" for index in range(250)])))
    for index in range(1_500):
        body = b'{"job":"j%d","run":{"driver":"noop"}}' % index
        reader.put(Delivery(SUBJECTS.api("crowd", "submit"), f"_INBOX.{index}", body))
    assert (reader.waiting, reader.counters["dropped"]) == (900, 601), "the last tenth is for the others"
    reader.put(Delivery(SUBJECTS.api("t", "submit"), "_INBOX.own", b'{"job":"own","run":{"driver":"noop"}}'))
    for tenant in range(99):
        reader.put(Delivery(SUBJECTS.api(f"t{tenant}", "submit"), "", b"{}"))
    reader.put(Delivery(SUBJECTS.api("late", "submit"), "", b"{}"))
    assert reader.counters["dropped"] == 602, "all tenants together have filled their line"
    reader.put(Delivery(SUBJECTS.worker("w", "renew"), "_INBOX.renew", b'{"kind":"renew","session":"s","n":1}'))
    assert (reader.waiting, reader.counters["dropped"]) == (1_001, 602), "which is not that of the workers"
    assert not reader.drain(drive.now)
    assert reader.waiting == 999, "the renewal first, then what one turn reads of the array"
    while reader.waiting > 890:
        assert not reader.drain(drive.now)
    drive.tick()
    assert drive.states("own", tenant="t") == ["QUEUED"], "read right behind the array that came before"
    assert len(drive.state.jobs) < 400


def test_a_flood_of_a_worker_leaves_a_part_of_each_turn_to_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "AT_ONCE", 100)
    drive = Driving()
    reader = _intake(drive, {})
    for _ in range(1_000):
        reader.put(Delivery(SUBJECTS.worker("w", "renew"), "", b'{"kind":"renew","session":"s","n":1}'))
    reader.put(Delivery(SUBJECTS.api("t", "submit"), "_INBOX.own", b'{"job":"own","run":{"driver":"noop"}}'))
    assert not reader.drain(drive.now)
    drive.tick()
    assert drive.states("own", tenant="t") == ["QUEUED"]


def test_an_array_is_read_in_several_turns_and_answered_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "AT_ONCE", 100)
    drive = Driving()
    answers: dict[str, bytes] = {}
    reader = _intake(drive, answers)
    names = [f"j{index}" for index in range(299)]
    bodies = _array(names)[:-1] + b',{"job":"bad","run":{"driver":7}}]'
    reader.put(Delivery(SUBJECTS.api("t", "submit"), "_INBOX.array", bodies))
    reader.put(Delivery(SUBJECTS.api("t", "submit"), "_INBOX.after", b'{"job":"z","run":{"driver":"noop"}}'))
    turns = 1
    while not reader.drain(drive.now):
        drive.tick()  # a record may go in between: what was read of the array is accepted with it
        assert "_INBOX.array" not in drive.answers
        turns += 1
    drive.tick()
    answered = json.loads(answers["_INBOX.array"]) if "_INBOX.array" in answers else drive.answers["_INBOX.array"]
    assert turns > 3
    assert [each.get("job") for each in answered[:-1]] == names
    assert answered[-1]["kind"] == "error"
    assert [job.name for job in drive.state.jobs.values()] == [*names, "z"]


def test_questions_are_answered_behind_all_else_tenants_in_turn_and_never_without_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(question_queue, "QUESTIONS_S", 0.0)
    monkeypatch.setattr(question_queue, "ASKED_MAX", 50)
    drive = Driving()
    answers: dict[str, bytes] = {}
    read: list[tuple[str, str, str]] = []

    def on_read(tenant: str, verb: str, arguments: dict[str, Any], reply: str, json: bool, came: str) -> None:
        read.append((tenant, verb, reply))

    reader = Intake(drive.engine, SUBJECTS, answers.__setitem__, answers.__setitem__, on_read, lambda *_: None)
    for index in range(60):
        reader.put(Delivery(SUBJECTS.api("crowd", "ls"), f"_INBOX.{index}", b"{}"))
    reader.put(Delivery(SUBJECTS.api("t", "show"), "_INBOX.own", b'{"job":"j"}'))
    reader.put(Delivery(SUBJECTS.api("t", "submit"), "_INBOX.submit", b'{"job":"j","run":{"driver":"noop"}}'))
    reader.put(Delivery(SUBJECTS.worker("w", "renew"), "_INBOX.renew", b'{"kind":"renew","session":"s","n":1}'))
    assert not reader.drain(drive.now)
    assert read == [("crowd", "ls", "_INBOX.0")]
    assert drive.engine.waiting == 2, "the request and the renewal, though sixty questions came before them"
    assert not reader.drain(drive.now)
    assert read[1:] == [("t", "show", "_INBOX.own")], "its turn is the next"
    while not reader.drain(drive.now):
        pass
    assert [reply for tenant, _, reply in read if tenant == "crowd"] == [f"_INBOX.{index}" for index in range(50)]
    refused = {reply: json.loads(answer) for reply, answer in answers.items()}
    assert sorted(refused) == sorted(f"_INBOX.{index}" for index in range(50, 60))
    assert {(each["code"], each["retry_after_s"]) for each in refused.values()} == {("overloaded", 1.0)}


async def test_who_waited_for_a_forecast_is_told_in_several_turns_and_tenants_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(question_queue, "QUESTIONS_S", 0.0)
    monkeypatch.setattr(foresight_module, "ANSWERED_S", 60.0)
    drive = Driving.with_hosts(1)
    drive.submit("hog", gpu={})
    drive.submit("own", gpu={})
    for index in range(30):
        drive.submit(f"j{index}", gpu={}, tenant="crowd")
    turn, told, over = 0, dict[str, int](), asyncio.Event()

    def answered(answer: Callable[[], Any], reply: str, json: bool) -> None:
        assert answer().state == "QUEUED"
        told[reply] = turn
        if len(told) == 31:
            over.set()

    foresight = Foresight(drive.engine, lambda: drive.now, answered, nothing, nothing, forks=True)
    for index in range(30):
        assert foresight.explain("crowd", f"j{index}", f"_INBOX.{index}", True) is None
    assert foresight.explain("t", "own", "_INBOX.own", True) is None
    assert not told, "they wait for a copy of the leader"
    while not over.is_set():
        turn += 1
        await asyncio.sleep(0)
    foresight.close()
    assert list(told)[:3] == ["_INBOX.0", "_INBOX.own", "_INBOX.1"]
    assert len(set(told.values())) == 31, "one a turn"


class _Fails:
    """An explanation with a defect."""

    def __call__(self, *_: object, **__: object) -> dict[str, Any]:
        raise ZeroDivisionError


async def test_a_defect_in_what_nobody_asked_for_ends_no_term(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Driving.with_hosts(1)
    drive.submit("hog", gpu={})
    said = list[object]()
    foresight = Foresight(drive.engine, lambda: drive.now, nothing, said.append, nothing, forks=False)
    drive.explain_waiting = foresight.at_submit
    monkeypatch.setattr(foresight_module, "explain_job", _Fails())
    answer = drive.submit("waits", gpu={})
    assert answer["kind"] == "accepted"
    assert "waiting" not in answer
    assert foresight._news() == []
    assert not foresight._followed, "nor is it tried again and again"


async def test_a_question_that_fails_is_answered_so_and_those_behind_it_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused() -> object:
        raise refuse("invalid-argument", "no such state")

    failed = contained(_Fails())
    assert (failed.code, failed.fault) == ("internal", "moorage")
    assert contained(refused).message == "no such state"
    assert contained(lambda: {"state": "QUEUED"}) == {"state": "QUEUED"}
    answers, over = list[Any](), asyncio.Event()

    def told(reply: str, frame: Any, json: bool) -> None:
        answers.append((reply, frame.code))
        over.set()

    drive = Driving()
    foresight = Foresight(drive.engine, lambda: drive.now, nothing, nothing, told, forks=True)
    monkeypatch.setattr(foresight_module, "plan", _Fails())
    foresight.plan("t", "t", {"request": {"run": {"argv": ["true"]}}}, "_INBOX.plan", True)
    await over.wait()
    assert answers == [("_INBOX.plan", "internal")], "and not that it took too long: ask again"
    over.clear()
    monkeypatch.setattr(foresight_module, "plan", lambda *_: TOO_LATE)
    foresight.plan("t", "t", {"request": {"run": {"argv": ["true"]}}}, "_INBOX.plan", True)
    await over.wait()
    foresight.close()
    assert answers[1:] == [("_INBOX.plan", "overloaded")]


def nothing(*_: object) -> None: ...


# ------------------------------------------------------------------------------------------------- the collector


@pytest.fixture
def _collector() -> Iterator[None]:
    numbers = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*numbers)


class _Circle:
    def __init__(self) -> None:
        self.me = self


@pytest.mark.slow
@pytest.mark.usefixtures("_collector")
def test_what_many_records_left_is_out_of_the_collector_s_sight_until_a_calm_hour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collector = GcSchedule()
    collector.begin()
    frozen = gc.get_freeze_count()
    kept = [[number] for number in range(10_000)]
    collector.count_events(gc_schedule.EVENTS_MAX - 1)
    assert gc.get_freeze_count() <= frozen
    circle = _Circle()
    gone = weakref.ref(circle)
    collector.count_events(1)
    del circle
    assert gc.get_freeze_count() > frozen + len(kept)
    gc.collect()
    assert gone() is not None, "it was frozen, and so not looked at"
    clock = collector._full_s
    for passed_s, jobs, is_looked in (
        (gc_schedule.FULL_EVERY_S - 1, 0, False),
        (gc_schedule.FULL_EVERY_S + 60, gc_schedule.JOBS_MAX + 1, False),
        (gc_schedule.FULL_EVERY_S + 60, gc_schedule.JOBS_MAX, True),
    ):
        monkeypatch.setattr(time, "monotonic", lambda passed_s=passed_s: clock + passed_s)
        collector.collect_if_calm(jobs)
        assert (gone() is None) == is_looked


@pytest.mark.slow
@pytest.mark.usefixtures("_collector")
def test_a_term_that_is_over_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = GcSchedule()
    first.begin()
    circle = _Circle()
    gone = weakref.ref(circle)
    first.count_events(gc_schedule.EVENTS_MAX)
    del circle
    GcSchedule().begin()
    assert gone() is None
