"""One request, worker or timer that makes the core raise is set aside: the others go on, and a recording replays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.contained_engine import BUILDS_MAX, ContainedEngine
from moorage.scheduler.core.containment import PAUSE_MS, STEP_PAUSE_MS, TRACE_CHARS_MAX
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.engine import HalfFolded
from moorage.scheduler.core.events import Batch, Cancel, QueueRead, Submit
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.folding import Folding
from moorage.scheduler.core.ledger.inventory import Inventory
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.records import STEP_WIDTH, Op
from moorage.scheduler.core.ledger.state import Job, State
from moorage.scheduler.core.ledger.undo import Undo
from moorage.scheduler.core.lifecycle.admission import Admission
from moorage.scheduler.core.lifecycle.retention import Retention
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.scheduler.core.operate.orders import Orders
from moorage.scheduler.core.queue.queue import Group
from moorage.scheduler.core.rank.ranker import Pack, Ranker
from moorage.scheduler.core.schedule.cycle import Planner
from moorage.scheduler.core.schedule.indexing import Indexing
from moorage.scheduler.ledger.recording import RecordedEngine, Recorder, replay
from moorage.schemas.frames import Hello, Report
from moorage.schemas.reasons import STARTS_FAIL
from tests.unit.scheduler.driving import SUBJECTS, Driving
from tests.unit.scheduler.honest_worker import Worker
from tests.unit.scheduler.lifecycle.test_stalls import IDLE, SPINS, renew, told
from tests.unit.scheduler.lifecycle.test_starts_fail import failing, is_bad
from tests.unit.scheduler.scheduled import offer_ask, offer_run

#: what the faults below look for in a request
POISON: Final = "poison"


class Poisoned(Exception):
    """What a defect raises."""


class Contained(Driving):
    """Driven as a leader is: contained, and recorded."""

    def __init__(self, path: Path, config: Config | None = None) -> None:
        self._recorder = Recorder(path)
        self.path = path
        super().__init__(config)

    def make_engine(self, state: State) -> RecordedEngine:
        return RecordedEngine(self._recorder, state, self.config, SUBJECTS, 7 + state.epoch, self.now, None)

    @property
    def contained(self) -> ContainedEngine:
        return cast(ContainedEngine, self.engine)

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.contained.containment.counts)

    def close(self) -> None:
        self._recorder.close()

    def replays(self) -> None:
        """All of it comes out byte for byte again."""
        self.close()
        found = list(replay(self.path))
        assert found
        assert all(one.same for one in found)
        assert found[-1].state.digest == self.state.digest


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Contained]:
    made = Contained(tmp_path / "leader.rec")
    made.worker("w0", 4)
    made.worker("w1", 4)
    yield made
    made.close()


def main_of(drive: Contained) -> Ranker | None:
    """The configured ranker; None once it has failed."""
    ranker = drive.engine.planner.placing.ranker
    return None if type(ranker) is Pack else ranker


def state_of(drive: Contained, name: str, tenant: str = "t") -> str:
    return drive.job(name, tenant).state


def raises_for(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, is_poison: Callable[..., bool], *, after: bool = False
) -> Callable[[], None]:
    """Have a method raise where its arguments are poison, before or after it has done its work; returns the cure."""
    does = getattr(owner, name)

    def broken(*given: Any, **named: Any) -> Any:
        if is_poison(*given, **named):
            if after:
                does(*given, **named)
            raise Poisoned(name)
        return does(*given, **named)

    monkeypatch.setattr(owner, name, broken)
    return lambda: monkeypatch.setattr(owner, name, does)


def is_poisoned(*given: Any, **named: Any) -> bool:
    return any(isinstance(each, Submit) and each.name.startswith(POISON) for each in given)


def is_poison_shape(*given: Any, **named: Any) -> bool:
    flat = [one for each in given for one in (each if isinstance(each, tuple) else (each,))]
    return any(isinstance(each, Shape) and each.models == (POISON,) for each in flat)


# ------------------------------------------------------------------------------------------------------- ranking


@pytest.mark.parametrize("method", ["choose", "prepare", "arrived"])
def test_where_ranking_fails_the_plain_ranker_decides(
    method: str, drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive.submit("first", gpu={})
    cure = raises_for(monkeypatch, type(main_of(drive)), method, lambda *given: True)
    assert drive.submit("second", gpu={})["state"] == "QUEUED"
    drive.settle()
    assert state_of(drive, "second") == "RUNNING"
    figures = drive.contained.containment.figures(drive.now)
    assert figures["counts"] == {"ranking": 1}
    assert figures["plain_ranker"]
    (told,) = drive.contained.containment.take_unlogged()
    assert "Poisoned" in told.trace
    assert "fragments" in told.where
    drive.pass_time(2 * PAUSE_MS)
    drive.submit("third", gpu={})
    assert main_of(drive) is None, "until the next term"
    assert drive.counts == {"ranking": 1}
    drive.replays()
    cure()
    drive.lead()
    assert main_of(drive) is not None
    assert not drive.contained.containment.figures(drive.now)["plain_ranker"]


@pytest.mark.parametrize(
    ("ranker", "before", "asks", "wrong"),
    [
        ("Leased", {"gpu": {"count": 2}}, {"gpu": {"count": 1}}, "GPUs 0b1 of w0"),
        ("Leased", {"gpu": {"count": 4}}, {"gpu": {"count": 1}}, "w0, which is excluded, not open or has no room"),
        (
            "Leased",
            {"resources": {"cpu_milli": 3000}},
            {"resources": {"cpu_milli": 2000}},
            "w0, which is excluded, not open or has no room",
        ),
        ("TooMany", {}, {"gpu": {"count": 1}}, "GPUs 0b11 of w0; wanted are 1 of 0b1111"),
        ("TwiceTheSame", {}, {"gpu": {"count": 1}}, "GPUs 0b10 of w0; wanted are 1 of 0b1100"),
        ("Beyond", {}, {"resources": {"cpu_milli": 1000}}, "5 replicas on w0 at once"),
    ],
)
def test_what_a_ranker_of_ones_own_may_not_choose_is_not_recorded(
    ranker: str, before: dict[str, Any], asks: dict[str, Any], wrong: str, tmp_path: Path
) -> None:
    drive = Contained(tmp_path / "leader.rec", Config(ranker=f"tests.system.scheduler.wrong_rankers:{ranker}"))
    for worker in ("w0", "w1"):
        drive.worker(worker, 4, cpu_milli=4000)
    if before:
        drive.submit("before", **before)
        assert drive.counts == {}
    for number in range(6):
        drive.offer_submit(f"j{number}", **asks)
    drive.settle()
    assert drive.counts == {"ranking": 1}
    (told,) = drive.contained.containment.take_unlogged()
    assert wrong in told.trace
    for number in range(6):
        assert state_of(drive, f"j{number}") in ("RUNNING", "QUEUED"), "the plain ranker placed what fits"
    drive.replays()


@pytest.mark.parametrize("method", ["choose", "arrived"])
def test_what_the_plain_ranker_fails_on_too_is_set_aside(
    method: str, drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record was built again and again, for ever, each time with a new plain ranker."""
    main = main_of(drive)
    for ranker in (type(main), Pack):
        raises_for(monkeypatch, ranker, method, is_poison_shape)
    bad = drive.offer_submit(POISON, gpu={"model": POISON})
    good = drive.offer_submit("good", tenant="u", gpu={})
    drive.worker("w2", 1, model=POISON)
    drive.settle()
    assert drive.answers[bad]["code"] == "internal"
    assert drive.answers[good]["kind"] == "accepted"
    assert state_of(drive, "good", "u") == "RUNNING"
    assert drive.counts == {"ranking": 1, "request": 1}
    drive.replays()


def test_a_ranker_that_cannot_be_made_leaves_the_plain_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moorage.ranking.fragments import Fragments

    raises_for(monkeypatch, Fragments, "__init__", lambda *given: True)
    drive = Contained(tmp_path / "leader.rec")
    drive.worker("w0", 1)
    drive.submit("a", gpu={})
    drive.settle()
    assert state_of(drive, "a") == "RUNNING"
    drive.close()


# ------------------------------------------------------------------------------------------------------ requests


def break_submits(drive: Contained, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A fault in one of the places that a request goes through; `poison` jobs ask for a model of that name."""
    from moorage.scheduler.core.queue.queue import Queue
    from moorage.scheduler.core.schedule.placing import Placing

    if where == "admission":
        raises_for(monkeypatch, Admission, "submit", is_poisoned)
    elif where == "draft":
        raises_for(monkeypatch, Draft, "accept", lambda *given: given[2].startswith(POISON), after=True)
    elif where == "queue":
        raises_for(monkeypatch, Queue, "enter", is_poison_shape, after=True)
    elif where == "placing":
        raises_for(monkeypatch, Placing, "place", is_poison_shape)
    elif where == "take":
        raises_for(monkeypatch, Placing, "_place_one", is_poison_shape, after=True)
    else:
        does = Draft.record

        def record(self: Draft, leader: int, rid: int) -> Any:
            if any(POISON in str(flat) for _, flat in self.accepts):
                self.step(Op.BACKOFF, 10**6, 0)  # behind all others: the fold raises once it has done the rest
            return does(self, leader, rid)

        monkeypatch.setattr(Draft, "record", record)


PLACES: Final = ["admission", "draft", "queue", "placing", "take"]


@pytest.mark.parametrize("place", PLACES)
def test_a_request_that_fails_is_set_aside_and_the_others_go_on(
    place: str, drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_submits(drive, monkeypatch, place)
    before = drive.submit("before", gpu={})
    replies = [
        drive.offer_submit("good-0", gpu={}),
        drive.offer_submit(POISON, gpu={"model": POISON}),
        drive.offer_submit("good-1", tenant="u", gpu={}),
    ]
    for _ in range(4):
        drive.tick()
    drive.settle()
    assert before["kind"] == "accepted"
    assert [drive.answers[reply]["kind"] for reply in replies] == ["accepted", "error", "accepted"]
    assert drive.answers[replies[1]]["code"] == "internal"
    assert "Poisoned" not in json.dumps(drive.answers[replies[1]])
    assert [state_of(drive, name, tenant) for name, tenant in (("good-0", "t"), ("good-1", "u"))] == ["RUNNING"] * 2
    assert drive.state.job("t", POISON) is None
    assert drive.counts["request"] == 1
    drive.run_out("w0")
    drive.run_out("w1")
    drive.check()
    drive.replays()


def test_a_run_of_a_schedule_whose_job_cannot_be_placed_is_set_aside(
    drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the term, and the next one, as nats-server delivers the run again."""
    offer_ask(drive, "add", "poison")
    drive.tick()

    def place(self: Draft, num: int, index: int, worker_num: int, mask: int, mode: int) -> None:
        if self.state.jobs[num].name.startswith(POISON):
            raise Poisoned
        placed(self, num, index, worker_num, mask, mode)

    placed = Draft.placed
    monkeypatch.setattr(Draft, "placed", place)
    offer_run(drive, 1, "poison")
    drive.offer_submit("good")
    drive.tick()
    assert (drive.answers["run"]["code"], drive.counts) == ("internal", {"request": 1})
    assert drive.state.job("t", "poison-1") is None
    assert state_of(drive, "good") == "PLACED"
    drive.replays()


def test_where_it_cannot_be_said_which_request_it_was_those_of_the_record_are_refused(
    drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_submits(drive, monkeypatch, "record")
    replies = [drive.offer_submit(name, tenant=tenant, gpu={}) for name, tenant in (("good", "u"), (POISON, "t"))]
    drive.tick()
    assert [drive.answers[reply]["code"] for reply in replies] == ["internal"] * 2
    assert drive.submit("good", tenant="u", gpu={})["kind"] == "accepted", "nobody pays for what cannot be said"
    drive.settle()
    assert state_of(drive, "good", "u") == "RUNNING"
    drive.replays()


def test_a_record_that_cannot_begin_has_changed_nothing(drive: Contained, monkeypatch: pytest.MonkeyPatch) -> None:
    """There was nothing yet by which to take it back, so that this failed in turn and hid why."""
    before = drive.submit("before", gpu={})
    raises_for(monkeypatch, Undo, "__init__", lambda *given: True)
    drive.offer_submit("next", gpu={})
    digest = drive.state.full_digest()
    with pytest.raises(Poisoned):
        drive.engine.build(drive.now + 1, drive.now + 1)
    assert before["kind"] == "accepted"
    assert drive.state.full_digest() == digest
    assert drive.contained.waiting == 1, "what the record before took is not taken again, nor refused"


def test_a_record_of_which_a_row_has_no_number_is_taken_back_and_the_term_goes_on(
    drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a number that is too large for the digest: such a request ended the term, and each one after it."""
    drive.submit("before", gpu={})
    raises_for(monkeypatch, Job, "digest_row", lambda job, _: job.name == POISON)
    reply = drive.offer_submit(POISON, gpu={})
    drive.tick()
    assert drive.answers[reply]["code"] == "internal"
    assert drive.state.job("t", POISON) is None
    drive.submit("good", tenant="u", gpu={})
    drive.settle()
    assert [state_of(drive, "before"), state_of(drive, "good", "u")] == ["RUNNING"] * 2
    drive.replays()


@pytest.mark.parametrize(
    ("owner", "method", "folds", "fits"),
    [(Folding, "end", True, True), (Undo, "back", True, False)],
)
def test_a_state_that_is_half_changed_ends_the_term(
    owner: type, method: str, folds: bool, fits: bool, drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request is at fault there, and nothing may be decided on such a state."""
    drive.submit("before", gpu={})
    drive.offer_submit(POISON, gpu={})
    if not fits:
        break_submits(drive, monkeypatch, "record")
    raises_for(monkeypatch, owner, method, lambda *given: True)
    with pytest.raises(HalfFolded, match="Poisoned"):
        drive.engine.build(drive.now + 1, drive.now + 1, folds=folds)
    assert drive.counts == {}
    monkeypatch.undo()
    drive.lead()
    drive.settle()
    assert state_of(drive, "before") == "RUNNING"


def test_the_jobs_of_a_group_that_fails_are_held_until_an_operator_releases_them(
    drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moorage.scheduler.core.schedule.placing import Placing

    for name in ("first", "second"):
        drive.submit(name, gpu={"count": 4})  # both hosts are full
    drive.submit("waits-0", gpu={"count": 3})
    drive.submit("waits-1", gpu={"count": 3})
    drive.settle()
    began_ms = drive.now
    cure = raises_for(
        monkeypatch, Placing, "_place_one", lambda *given: given[1].time_ms > began_ms and given[2].count == 3
    )
    drive.submit("other", tenant="u", gpu={"count": 2}, priority=40)
    drive.run_out("w0")
    drive.settle()
    assert state_of(drive, "other", "u") == "RUNNING"
    assert drive.counts == {"job": 1}, "one of them: the other asks alike"
    for name in ("waits-0", "waits-1"):
        told = drive.explained(name)
        assert told["reason"] == "scheduler-failed"
        assert told["hold"]["by"] == "scheduler"
    drive.run_out("w0")
    drive.run_out("w1")
    drive.pass_time(2 * PAUSE_MS)
    assert drive.counts == {"job": 1}, "and are not tried again by themselves"
    assert drive.order("release", job="waits-0")["code"] == "internal"
    assert drive.counts == {"job": 1, "request": 1}
    assert drive.explained("waits-0")["reason"] == "scheduler-failed"
    drive.replays()
    cure()
    drive.lead()
    drive.renew()
    drive.settle()
    assert state_of(drive, "waits-0") == "QUEUED", "nor in the next term"
    for name in ("waits-0", "waits-1"):
        drive.order("release", job=name)
    drive.settle()
    assert [state_of(drive, name) for name in ("waits-0", "waits-1")] == ["RUNNING"] * 2


def test_a_pass_in_which_many_groups_fail_is_left_out_and_goes_on_later(
    drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each failure has the tables made anew: a leader that does so for long writes no heartbeat."""
    from moorage.scheduler.core.schedule.placing import Placing

    for name in ("first", "second"):
        drive.submit(name, gpu={"count": 4})
    groups = 2 * BUILDS_MAX
    for number in range(groups):
        drive.submit(f"bad-{number}", gpu={}, priority=number)
    drive.settle()
    began_ms = drive.now
    raises_for(monkeypatch, Placing, "_place_one", lambda *given: given[1].time_ms > began_ms)
    drive.run_out("w0")
    drive.tick()
    assert drive.counts["job"] < groups
    assert drive.counts["step"] == 1
    drive.pass_time(4 * STEP_PAUSE_MS)
    assert drive.counts["job"] == groups
    drive.replays()


def test_a_host_at_which_a_second_group_fails_that_has_room_elsewhere_is_cordoned(
    drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests were refused: the host was chosen first each time, as it was the emptiest."""
    drive.worker("w2", 4)
    w0 = drive.state.workers["w0"]
    raises_for(monkeypatch, Draft, "placed", lambda *given: given[3] == w0.num)
    codes = [drive.submit(f"j-{each}", tenant=f"t-{each}", gpu={"count": 4}).get("code") for each in range(3)]
    drive.settle()
    assert codes == ["internal", None, None]
    assert [state_of(drive, f"j-{each}", f"t-{each}") for each in (1, 2)] == ["RUNNING"] * 2
    assert ((w0.flag, w0.by), drive.counts) == (("cordoned", "scheduler"), {"request": 1, "worker": 1})
    drive.replays()


def test_groups_that_fail_on_every_host_are_set_aside_and_no_host_is_cordoned(
    drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    raises_for(monkeypatch, Draft, "placed", lambda *given: given[4].bit_count() == 3)
    for each in range(4):
        assert drive.submit(f"bad-{each}", tenant=f"t-{each}", gpu={"count": 3})["code"] == "internal"
    drive.submit("good", tenant="u", gpu={"count": 4})
    drive.settle()
    assert state_of(drive, "good", "u") == "RUNNING"
    assert {worker.flag for worker in drive.state.workers.values()} == {"open"}
    drive.replays()


def test_a_job_that_cannot_be_indexed_ends_at_its_deadline(drive: Contained, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was held without its timers, and so until an operator released it, or the next term."""
    for name in ("first", "second"):
        drive.submit(name, gpu={"count": 4})
    drive.submit("bad", gpu={}, deadline_s=60)
    raises_for(monkeypatch, Indexing, "_index", lambda *given: given[1].name == "bad")
    drive.lead()
    drive.renew()
    drive.settle()
    assert drive.explained("bad")["reason"] == "scheduler-failed"
    drive.pass_time(60_000)
    assert state_of(drive, "bad") == "EXPIRED"
    drive.replays()


def test_in_the_next_term_it_is_contained_as_well(drive: Contained, monkeypatch: pytest.MonkeyPatch) -> None:
    from moorage.scheduler.core.schedule.indexing import Indexing

    drive.submit("first", gpu={"count": 4})
    drive.submit("bad", gpu={"model": "none such"})
    raises_for(monkeypatch, Indexing, "_index", lambda *given: given[1].name == "bad")
    drive.lead()
    drive.renew()
    drive.submit("good", gpu={})
    drive.settle()
    assert state_of(drive, "good") == "RUNNING"
    assert drive.counts == {"job": 1}
    assert drive.explained("bad")["reason"] == "scheduler-failed"


@pytest.mark.parametrize("place", ["admission", "placing"])
def test_requests_of_a_batch_and_of_the_durable_queue(
    place: str, drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_submits(drive, monkeypatch, place)
    drive.submit("taken", gpu={})
    batch = Batch("r-batch", True, 4)
    for position, name in enumerate(["taken", "good", f"{POISON}-1", "last"]):
        model = {"model": POISON} if name.startswith(POISON) else {"count": 2} if name == "taken" else {}
        drive.offer_submit(name, batch=batch, position=position, gpu=model)
    queued = [
        drive.engine.submitted("v", body, lambda: "none", f"queue {at}", sequence=at)
        for at, body in ((7, POISON_BODY), (8, GOOD_BODY))
    ]
    for event in queued:
        drive.engine.offer(event)
    drive.engine.offer(QueueRead("v", "submit", 8))
    for _ in range(3):
        drive.tick()
    answers = drive.answers["r-batch"]
    assert [each.get("code", each["kind"]) for each in answers] == ["conflict", "accepted", "internal", "accepted"]
    assert drive.answers["queue 7"]["code"] == "internal"
    assert drive.answers["queue 8"]["kind"] == "accepted"
    assert drive.state.tenants["v"].submit_cursor == 8, "it is a dead letter, and not read again"
    trace = drive.contained.containment.traces.pop("queue 7")
    assert "Poisoned" in trace
    assert len(trace) <= TRACE_CHARS_MAX
    assert not drive.contained.containment.traces
    drive.replays()


def test_a_mark_of_a_durable_queue_that_fails_is_left_to_the_next_one(
    drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record was built again and again, for ever."""
    cure = raises_for(monkeypatch, Draft, "add", lambda *given: isinstance(given[1], acts.Cursor))
    drive.engine.offer(drive.engine.submitted("v", GOOD_BODY, lambda: "none", "queue 3", sequence=3))
    drive.engine.offer(QueueRead("v", "submit", 3))
    drive.engine.offer(QueueRead("v", "cancel", 4))
    drive.tick()
    assert drive.answers["queue 3"]["kind"] == "accepted"
    assert (drive.state.tenants["v"].submit_cursor, drive.counts) == (0, {"request": 2})
    drive.replays()
    cure()
    drive.engine.offer(QueueRead("v", "submit", 5))
    drive.tick()
    assert drive.state.tenants["v"].submit_cursor == 5


POISON_BODY: Final = b'{"job": "poison-2", "run": {"driver": "noop"}, "gpu": {"model": "poison"}}'
GOOD_BODY: Final = b'{"job": "queued", "run": {"driver": "noop"}, "gpu": {}}'


def test_a_second_failure_of_a_tenant_has_its_requests_of_that_verb_refused_unread(
    drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_submits(drive, monkeypatch, "placing")
    answers = []
    for number in range(20):
        bad = drive.offer_submit(f"{POISON}-{number}", gpu={"model": POISON})
        good = drive.offer_submit(f"good-{number}", tenant="u", gpu={"model": "none such"})
        drive.tick(10)
        assert drive.answers[good]["kind"] == "accepted"
        answers.append(drive.answers[bad]["code"])
    assert answers == ["internal"] * 2 + ["overloaded"] * 18
    assert drive.answers[bad]["retry_after_s"] == PAUSE_MS / 1000
    assert drive.contained.containment.figures(drive.now)["refused"] == ["submit of t"]
    drive.submit("mine", tenant="u", gpu={"model": "none such"})
    cancel = drive.offer_cancel("unknown", before=True)
    drive.tick()
    assert drive.answers[cancel]["kind"] != "error", "another verb is read"
    body = GOOD_BODY
    drive.engine.offer(drive.engine.submitted("t", body, lambda: "none", "queue 3", sequence=3))
    drive.engine.offer(QueueRead("t", "submit", 3))
    drive.tick()
    assert "queue 3" not in drive.answers, "what comes by the durable queue waits"
    assert drive.contained.refuses("t", "submit") is not None
    assert "t" not in drive.state.tenants or drive.state.tenants["t"].submit_cursor == 0
    drive.now += PAUSE_MS
    newer = b'{"job": "newer", "run": {"driver": "noop"}, "gpu": {}}'
    drive.engine.offer(drive.engine.submitted("t", newer, lambda: "none", "queue 4", sequence=4))
    drive.engine.offer(QueueRead("t", "submit", 4))
    drive.tick()
    assert [drive.answers[f"queue {at}"]["kind"] for at in (3, 4)] == ["accepted", "accepted"]
    assert drive.job("queued").num < drive.job("newer").num, "the cursor passes none that is in no record"
    assert drive.state.tenants["t"].submit_cursor == 4
    assert drive.contained.refuses("t", "submit") is None
    assert drive.submit("again", gpu={})["kind"] == "accepted"
    drive.replays()


def test_cancels_and_orders_are_refused_unread_as_well(drive: Contained, monkeypatch: pytest.MonkeyPatch) -> None:
    raises_for(monkeypatch, Lifecycle, "cancel", lambda *given: given[2].name.startswith("bad"))
    raises_for(monkeypatch, Orders, "_limit", lambda *given: True)
    for name in ("bad-0", "bad-1", "bad-2", "good"):
        drive.submit(name, gpu={"model": "none such"})
    codes = []
    for number in range(3):
        cancel, order = drive.offer_cancel(f"bad-{number}"), drive.offer_order("limit", gpus=3)
        drive.tick()
        drive.tick()
        codes.append((drive.answers[cancel]["code"], drive.answers[order]["code"]))
    assert codes == [("internal", "internal")] * 2 + [("overloaded", "overloaded")]
    drive.engine.offer(Cancel("t", "good", "", reply="queue 7", sequence=7))
    drive.engine.offer(QueueRead("t", "cancel", 7))
    drive.tick()
    assert state_of(drive, "good") == "QUEUED"
    drive.now += PAUSE_MS
    drive.tick()
    assert state_of(drive, "good") == "CANCELLED"
    assert drive.state.tenants["t"].cancel_cursor == 7
    drive.replays()


# ------------------------------------------------------------------------------------- workers, timers, what follows


def test_a_worker_on_whose_frames_it_fails_is_lost_and_the_second_time_stays_out(
    drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moorage.scheduler.core.lifecycle.sessions import Sessions

    drive.submit("a", gpu={"count": 4})
    drive.submit("b", gpu={"count": 4})
    drive.settle()
    bad, good = drive.placed_on("a")[0], drive.placed_on("b")[0]
    cure = raises_for(
        monkeypatch,
        Sessions,
        "renew",
        lambda *given: given[2].worker == bad and given[3].session == given[0].state.workers[bad].session,
    )
    assert [drive.renew(bad)[0]["code"] for _ in range(3)] == ["internal"] * 3
    assert drive.counts == {"worker": 1}, "its lease runs out, so that it ends what it runs; nothing more is read of it"
    assert drive.contained.containment.figures(drive.now)["workers"] == [bad]
    assert drive.placed_on("a") == [bad], "nothing of it runs twice: its lease is still good"
    drive.pass_time(drive.config.lost_ms + 2_000)
    assert not drive.state.workers[bad].session, "then it counts as lost"
    assert drive.placed_on("a") == ["-"]
    assert drive.placed_on("b") == [good]
    assert drive.join(drive.workers[bad])["code"] == "internal"
    drive.pass_time(PAUSE_MS)
    assert drive.join(drive.workers[bad])["kind"] == "joined", "after a pause it joins again"
    assert drive.renew(bad)[0]["code"] == "internal"
    assert drive.counts == {"worker": 2}
    drive.pass_time(drive.config.lost_ms + 2 * PAUSE_MS)
    assert drive.state.workers[bad].flag == "cordoned"
    assert drive.state.workers[bad].by == "scheduler"
    assert drive.join(drive.workers[bad])["code"] == "internal", "the second time it stays out"
    drive.replays()
    cure()
    drive.operate("uncordon", bad)
    drive.tick()
    assert drive.join(drive.workers[bad])["kind"] == "joined", "an operator says when"
    drive.pass_time(PAUSE_MS)
    assert drive.state.workers[bad].flag == "open"


def test_a_join_that_fails_is_taken_after_a_pause(drive: Contained, monkeypatch: pytest.MonkeyPatch) -> None:
    from moorage.scheduler.core.lifecycle.sessions import Sessions

    new = Worker("w9", Hello("w9", "b", drivers=["noop"]), "machine-w9", auto=True)
    cure = raises_for(monkeypatch, Sessions, "join", lambda *given: given[2].worker == "w9")
    assert drive.join(new)["code"] == "internal"
    cure()
    assert drive.join(new)["code"] == "internal", "it is not read"
    assert drive.counts == {"worker": 1}
    drive.pass_time(PAUSE_MS)
    assert drive.join(new)["kind"] == "joined"


def test_reports_that_fail_are_sent_again_with_the_next_join(drive: Contained, monkeypatch: pytest.MonkeyPatch) -> None:
    drive.worker("w2", 1, model="slow", auto=False)
    drive.submit("a", gpu={"model": "slow"})
    cure = raises_for(monkeypatch, Lifecycle, "on_reports", lambda *given: True, after=True)
    worker = drive.workers["w2"]
    attempt = drive.attempt("a")
    worker.gathered.append(Report("claimed", "t", "a", 0, attempt.no, attempt.fence, 0, ""))
    frame = worker.report_frame()
    assert frame is not None
    reply = drive.send("w2", frame)
    drive.tick()
    assert drive.answers[reply]["code"] == "internal"
    assert state_of(drive, "a") == "PLACED"
    assert drive.counts == {"worker": 1}
    drive.replays()
    cure()
    reply = drive.send("w2", frame)
    drive.tick()
    assert drive.answers[reply]["code"] == "internal", "it is kept in the worker's journal"
    drive.pass_time(drive.config.lost_ms + PAUSE_MS)
    assert state_of(drive, "a") == "QUEUED", "its session is over"
    assert drive.join(worker)["kind"] == "joined"


def test_a_timer_that_fails_is_tried_again_after_a_pause_and_the_others_ring(
    drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bad", "good"):
        drive.submit(name, gpu={"model": "none such"}, start_within_s=5)
    cure = raises_for(monkeypatch, Lifecycle, "expire", lambda *given: given[2].name == "bad")
    drive.pass_time(20_000)
    assert (state_of(drive, "bad"), state_of(drive, "good")) == ("QUEUED", "EXPIRED")
    assert drive.counts["timer"] == 1
    drive.pass_time(PAUSE_MS)
    assert drive.counts["timer"] == 2
    drive.replays()
    cure()
    drive.pass_time(PAUSE_MS)
    assert state_of(drive, "bad") == "EXPIRED"


@pytest.mark.parametrize("step", ["_each_second", "_take_orders"])
def test_a_step_that_fails_is_left_out(step: str, drive: Contained, monkeypatch: pytest.MonkeyPatch) -> None:
    from moorage.scheduler.core.engine import Engine

    raises_for(monkeypatch, Engine, step, lambda *given: True)
    if step == "_take_orders":
        reply = drive.offer_order("limit", gpus=3)
        drive.tick()
        drive.tick()
        assert drive.answers[reply]["code"] == "internal"
    else:
        drive.pass_time(4 * STEP_PAUSE_MS)
        assert 3 <= drive.counts["step"] <= 5
    drive.submit("good", gpu={})
    drive.settle()
    assert state_of(drive, "good") == "RUNNING"
    drive.replays()


@pytest.mark.parametrize(("part", "method"), [(Retention, "compact"), (Indexing, "reject_unmatched")])
def test_a_step_that_is_about_no_request_refuses_none_and_ends_no_term(
    part: type, method: str, drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a failure was that of the request before it; without one it ended this term, and each one after it."""
    raises_for(monkeypatch, part, method, lambda *given: True)
    drive.pass_time(2 * STEP_PAUSE_MS)
    for number in range(8):
        reply = drive.offer_submit(f"good-{number}", gpu={})
        drive.tick(STEP_PAUSE_MS // 2)
        assert drive.answers[reply]["kind"] == "accepted"
    drive.settle()
    assert {state_of(drive, f"good-{number}") for number in range(8)} == {"RUNNING"}
    assert drive.counts["step"] > 3
    assert drive.counts.keys() == {"step"}


def test_what_fails_after_the_acknowledgement_costs_answers_alone(
    drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moorage.scheduler.core.outputs.output_writer import OutputWriter

    cure = raises_for(monkeypatch, OutputWriter, "answer_submits", lambda *given: bool(given[2]), after=True)
    drive.offer_submit("a", gpu={}, deadline_s=600)
    drive.tick()
    drive.check()
    assert drive.counts == {"output": 1}
    drive.replays()
    cure()
    again = drive.submit("a", gpu={}, deadline_s=600)
    assert (again["kind"], again["state"], again["duplicate"]) == ("accepted", "PLACED", True)
    drive.renew()
    drive.renew()
    drive.settle()
    assert state_of(drive, "a") == "RUNNING", "a renewal brings what was not sent"


@pytest.mark.parametrize("what", ["placement", "frame", "differences"])
def test_a_worker_of_which_a_frame_cannot_be_made_costs_no_other_worker_its_frames(
    what: str, drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All frames of the record were lost, and so were those of each later one with something for that worker."""
    from moorage.scheduler.core.lifecycle.sessions import Sessions
    from moorage.scheduler.core.outputs import outputs

    if what == "placement":
        raises_for(monkeypatch, outputs.WantedFrames, "_place", lambda *given: given[1].worker.id == "w0")
    elif what == "frame":
        raises_for(monkeypatch, outputs, "wanted_message", lambda *given: given[1].id == "w0")
    else:
        raises_for(monkeypatch, Sessions, "differences", lambda *given: given[1].id == "w0")
    for number in range(8):
        drive.offer_submit(f"a{number}", gpu={})
    drive.renew()
    drive.settle()
    names = [f"a{number}" for number in range(8)]
    assert {state_of(drive, name) for name in names if drive.placed_on(name) == ["w1"]} == {"RUNNING"}
    assert drive.counts.keys() == {"output"}
    drive.replays()


def test_what_cannot_be_counted_for_monitors_ends_no_term(drive: Contained, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the term, and so did each further start: what monitors count is no part of the core any more."""
    from moorage.scheduler.answers.waited import Waited

    raises_for(monkeypatch, Waited, "add", lambda *given: True)
    drive.submit("good", gpu={})
    drive.settle()
    assert state_of(drive, "good") == "RUNNING"
    assert drive.counts == {"output": 1}


def test_an_event_of_the_fleet_that_cannot_be_told_ends_no_term(
    drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moorage.scheduler.core import engine

    cure = raises_for(monkeypatch, engine, "fleet_events", lambda *given: bool(given[1]))
    assert drive.operate("cordon", "w0")["kind"] != "error"
    assert drive.state.workers["w0"].flag == "cordoned"
    assert drive.counts == {"output": 1}
    drive.replays()
    cure()


def test_a_record_that_is_built_again_does_what_is_due_each_second(
    drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a failure in each such record, no worker ever counted as lost."""
    break_submits(drive, monkeypatch, "admission")
    seconds = drive.config.lost_ms // 1000 + 2
    for number in range(seconds):
        drive.offer_submit(POISON, tenant=f"t{number}")
        drive.tick(1_000)
    assert drive.counts == {"request": seconds}
    assert not drive.state.workers["w0"].session
    drive.replays()


def test_a_cancel_that_fails_is_answered(drive: Contained, monkeypatch: pytest.MonkeyPatch) -> None:
    raises_for(monkeypatch, Lifecycle, "cancel", lambda *given: given[2].name == "bad", after=True)
    for name in ("bad", "good"):
        drive.submit(name, gpu={"model": "none such"})
    bad, good = drive.offer_cancel("bad"), drive.offer_cancel("good")
    drive.tick()
    assert drive.answers[bad]["code"] == "internal"
    assert drive.answers[good]["data"]["cancelled"]
    assert (state_of(drive, "bad"), state_of(drive, "good")) == ("QUEUED", "CANCELLED")
    drive.replays()


# ------------------------------------------------------------------------------ what fails as the tables are made anew


def test_a_run_of_which_nothing_can_be_learned_ends_no_term(drive: Contained, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended this one, as the tables were made anew, and each one after it as it began: nobody could lead."""
    from moorage.scheduler.core.schedule.runtime import Durations

    for name in ("bad", "good"):
        drive.submit(name, gpu={})
    drive.settle()
    raises_for(monkeypatch, Durations, "learn", lambda *given: given[1].name == "bad")
    drive.run_out("w0")
    drive.run_out("w1")
    assert drive.counts["output"] >= 1
    drive.submit("more", gpu={})
    drive.settle()
    assert [state_of(drive, name) for name in ("bad", "good", "more")] == ["SUCCEEDED", "SUCCEEDED", "RUNNING"]
    drive.replays()
    drive.lead()
    assert drive.counts == {"job": 1}
    drive.renew()
    drive.submit("next", gpu={})
    drive.settle()
    assert state_of(drive, "next") == "RUNNING"


@pytest.mark.parametrize("method", ["_class_of", "refresh"])
def test_a_worker_whose_host_cannot_be_made_ends_no_term(
    method: str, drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its join was stored, so that neither this leader nor the next one could go on."""
    from moorage.scheduler.core.fleet.fleet import Fleet
    from moorage.scheduler.core.fleet.host import Host

    def is_bad(*given: Any) -> bool:
        found = [each.worker.inventory if isinstance(each, Host) else each for each in given[1:]]
        return any(isinstance(each, Inventory) and "odd" in each.labels for each in found)

    cure = raises_for(monkeypatch, Fleet, method, is_bad)
    bad = Worker("w9", Hello("w9", "b", drivers=["noop"], labels={"odd": "1"}), "machine-w9", auto=True)
    reply = drive.send("w9", bad.join_frame())
    drive.tick()
    assert reply not in drive.answers
    assert drive.counts == {"output": 1, "worker": 1}
    drive.submit("a", gpu={})
    drive.settle()
    assert state_of(drive, "a") == "RUNNING"
    assert drive.join(bad)["code"] == "internal", "it is not read"
    drive.replays()
    drive.lead()
    assert drive.counts == {"worker": 1}
    drive.renew()
    drive.submit("b", gpu={})
    drive.settle()
    assert state_of(drive, "b") == "RUNNING"
    assert drive.state.workers["w9"].session
    drive.pass_time(drive.config.lost_ms + 2_000)
    assert not drive.state.workers["w9"].session, "it counts as silent"
    assert drive.counts == {"worker": 1}
    cure()
    drive.pass_time(PAUSE_MS)
    assert drive.join(bad)["kind"] == "joined"


def test_jobs_with_too_many_failures_are_given_up_in_the_order_in_which_they_failed(drive: Contained) -> None:
    """They stood in a set of objects, whose order was that of their addresses: the recording did not replay."""
    drive.worker("w2", 16)
    names = [f"sweep-{number}" for number in range(16)]
    for name in names:
        drive.submit(name, gpu={"model": "H100"}, replicas=3, max_running=1, max_failed=1)
    drive.settle()
    for worker in drive.workers.values():
        for key in list(worker.held):
            worker.finish(key, 1)
    drive.report_all()
    steps = decode_record(drive.records[-1]).steps
    ops, jobs = steps[::STEP_WIDTH], steps[1::STEP_WIDTH]
    given_up = [num for op, num in zip(ops, jobs, strict=True) if op == Op.MOVE_FRESH]
    assert len(given_up) == len(names)
    assert given_up == [num for op, num in zip(ops, jobs, strict=True) if op == Op.EXIT]
    drive.replays()


@pytest.mark.parametrize("method", ["prune", "room", "key"])
def test_a_pass_that_fails_on_a_group_that_it_only_looks_at_holds_its_jobs_and_goes_on(
    method: str, drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left out the whole step, every time: nothing of anybody was placed as long as that job waited."""
    from moorage.scheduler.core.queue.order import QueueOrder, Turns
    from moorage.scheduler.core.queue.queue import Group

    def is_poison(*given: Any, **named: Any) -> bool:
        return any(isinstance(each, Group) and each.shape.models == (POISON,) for each in given)

    drive.submit(POISON, gpu={"model": POISON})
    raises_for(monkeypatch, Turns if method == "key" else QueueOrder, method, is_poison)
    drive.submit("good", tenant="u", gpu={})
    drive.pass_time(40_000)
    drive.submit("more", tenant="u", gpu={})
    assert state_of(drive, "more", "u") == "PLACED"
    assert drive.explained(POISON)["reason"] == "scheduler-failed"
    assert drive.counts == {"job": 1}


def test_a_group_that_fails_of_which_the_first_job_has_left_memory_is_held_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry of the queue may outlive its job: such a group ended the term."""
    from moorage.scheduler.core.queue.order import QueueOrder
    from moorage.scheduler.core.queue.queue import Group

    drive = Contained(tmp_path / "kept-none.rec", Config(ended_max=0))
    drive.worker("w0", 4)
    drive.submit("runs", gpu={"count": 4})
    drive.settle()
    for name in ("gone", "stays"):
        drive.submit(name, gpu={"count": 4})
    gone = drive.job("gone").num
    drive.cancel("gone")
    drive.tick()
    assert gone not in drive.state.jobs
    assert any(gone in group.jobs for group in drive.engine.queue.groups.values())
    raises_for(monkeypatch, QueueOrder, "prune", lambda *given: any(isinstance(each, Group) for each in given))
    drive.run_out("w0")
    drive.settle()
    assert drive.explained("stays")["reason"] == "scheduler-failed"
    assert drive.counts == {"job": 1}
    drive.close()


def test_a_pass_that_fails_as_it_looks_at_no_group_holds_no_jobs(
    drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the group served last were held until an operator released them, and then those of the next one."""
    from moorage.scheduler.core.schedule.preempt import Preempting

    for name in ("runs-0", "runs-1"):
        drive.submit(name, gpu={"count": 4}, preemptible=True)
    drive.pass_time(60_000)
    raises_for(monkeypatch, Preempting, "_under_way", lambda *given: True)
    for name in ("a", "b"):
        drive.pass_time(STEP_PAUSE_MS)
        assert drive.submit(name, tenant=name, gpu={"count": 4})["kind"] == "accepted"
    assert drive.counts.keys() == {"step"}
    for name in ("a", "b"):
        assert drive.explained(name, name)["reason"] != "scheduler-failed"


@pytest.mark.parametrize("part", ["reserving", "preempting"])
def test_a_defect_about_what_runs_leaves_out_the_part_of_a_pass_that_reads_it_and_jobs_are_placed(
    part: str, drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All placing was left out, five seconds at a time, for as long as that attempt ran."""
    from moorage.scheduler.core.schedule.runtime import Estimates
    from moorage.scheduler.core.schedule.victims import Preemption

    for name in ("runs-0", "runs-1"):
        drive.submit(name, gpu={"count": 3}, preemptible=part == "preempting")
    drive.settle()
    drive.pass_time(60_000)
    if part == "reserving":
        raises_for(monkeypatch, Estimates, "runs_as", lambda *given: given[1].replica.job.name == "runs-0")
    else:
        raises_for(monkeypatch, Preemption, "defended", lambda *given: given[1].worker.id == "w0")
    drive.submit("waits", tenant="u", gpu={"count": 4})
    drive.pass_time(120_000)
    for number in range(12):
        drive.submit(f"good-{number}", tenant="v")
        drive.tick(STEP_PAUSE_MS // 2)
        assert state_of(drive, f"good-{number}", "v") in ("PLACED", "RUNNING"), number
    assert drive.counts["step"] > 3
    assert drive.counts.keys() == {"step"}
    assert drive.explained("waits", "u")["reason"] != "scheduler-failed"
    drive.replays()


def test_a_plan_that_fails_on_the_first_job_of_a_group_holds_the_jobs_of_that_group(
    drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the group that the plan had read last were held."""
    from moorage.scheduler.core.schedule import plan

    for name in ("runs-0", "runs-1"):
        drive.submit(name, gpu={"count": 4})
    drive.settle()
    does = plan._has_been_passed

    def has_been_passed(known: plan.Known, claim: plan.Claim, *since: Any) -> bool:
        if claim.group.tenant == "bad":
            raise Poisoned
        return does(known, claim, *since)

    monkeypatch.setattr(plan, "_has_been_passed", has_been_passed)
    for name in ("bad", "good"):
        drive.submit(name, tenant=name, gpu={"count": 1})
    drive.pass_time(120_000)
    assert drive.counts == {"job": 1}
    assert drive.explained("bad", "bad")["reason"] == "scheduler-failed"
    assert drive.explained("good", "good")["reason"] != "scheduler-failed"


def test_a_new_leader_that_fails_as_it_sorts_the_jobs_at_their_limits_holds_those_it_fails_on(
    drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the group that it had read last were held, and then those of the next one, up to fifteen groups."""
    from moorage.scheduler.core.queue.order import Turns

    for name in ("runs-0", "runs-1"):
        drive.submit(name, gpu={"count": 4})
    tenants = ("bad", "good", "last")
    for name in tenants:
        drive.order("limit", tenant=name, gpus=4)
        drive.submit(name, tenant=name, gpu={"count": 1})
    drive.settle()
    raises_for(monkeypatch, Turns, "key", lambda *given: given[1].tenant == "bad")
    drive.lead()
    drive.tick()
    assert [name for name in tenants if drive.explained(name, name)["reason"] == "scheduler-failed"] == ["bad"]
    assert drive.counts == {"job": 1}


def test_a_pass_that_serves_one_group_and_fails_on_the_next_one_holds_the_jobs_of_that_one(
    drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether both are alike is asked as the first one is served, whose jobs were held."""
    from moorage.scheduler.core.schedule.verdicts import Verdicts

    for name in ("runs-0", "runs-1"):
        drive.submit(name, gpu={"count": 4})
    for name in ("good", "bad"):
        drive.submit(name, tenant=name, gpu={"count": 1})
    drive.settle()
    does = Verdicts.kind_of

    def kind_of(group: Group) -> Any:
        if group.tenant == "bad":
            raise Poisoned
        return does(group)

    monkeypatch.setattr(Verdicts, "kind_of", staticmethod(kind_of))
    drive.run_out("w0")
    drive.settle()
    assert state_of(drive, "good", "good") == "RUNNING"
    assert drive.explained("bad", "bad")["reason"] == "scheduler-failed"
    assert drive.counts == {"job": 1}


@pytest.mark.parametrize("method", ["_note", "_enter", "arm"])
def test_a_sweep_that_fails_as_a_term_begins_is_whole_again_once_it_is_released(
    method: str, drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first replica alone was placed, and its deadline was not kept, until the next leader."""
    from moorage.scheduler.core.schedule.indexing import Indexing

    drive.submit("first", gpu={"count": 4})
    drive.submit("second", gpu={"count": 4})
    drive.submit("bad", gpu={}, replicas=6, deadline_s=60)
    cure = raises_for(monkeypatch, Indexing, method, lambda *given: given[1].name == "bad")
    drive.lead()
    cure()
    drive.renew()
    drive.settle()
    assert drive.explained("bad")["reason"] == "scheduler-failed"
    drive.order("release", job="bad")
    drive.run_out("w0")
    drive.run_out("w1")
    drive.settle()
    assert drive.states("bad") == 6 * ["RUNNING"]
    drive.pass_time(60_000)
    assert drive.states("bad") == 6 * ["ENDING"]


def test_an_answer_that_fails_as_its_request_is_refused_ends_no_term(
    drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in ((Admission, "submit"), (Submit, "answer")):
        raises_for(monkeypatch, owner, name, is_poisoned)
    drive.offer_submit(POISON, gpu={})
    drive.offer_submit("good", gpu={})
    drive.tick()
    drive.settle()
    assert state_of(drive, "good") == "RUNNING"
    assert drive.counts["output"] == 1
    drive.replays()


def test_a_group_that_fails_as_it_is_made_ends_no_term(drive: Contained, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was to be set aside was read of it, which it did not have yet."""

    def makes(*_: Any) -> None:
        half = Group.__new__(Group)
        raise Poisoned(type(half).__name__)

    with monkeypatch.context() as broken:
        broken.setattr(Planner, "plan", makes)
        assert drive.submit("good", gpu={})["kind"] == "accepted"
    drive.pass_time(2 * STEP_PAUSE_MS)
    drive.settle()
    assert state_of(drive, "good") == "RUNNING"
    assert drive.counts == {"step": 1}


def test_a_job_behind_another_one_that_fails_as_a_term_begins_hears_of_that_ones_end(
    drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told nothing until the next leader, also once its hold was released."""
    from moorage.scheduler.core.schedule.indexing import Indexing

    drive.submit("first", gpu={})
    drive.submit("bad", gpu={}, after=["first"])
    cure = raises_for(monkeypatch, Indexing, "_index", lambda *given: given[1].name == "bad")
    drive.lead()
    cure()
    drive.renew()
    drive.settle()
    assert drive.job("bad").hold is not None
    drive.run_out("w0")
    drive.run_out("w1")
    drive.settle()
    assert drive.job("bad").awaits == ()
    drive.order("release", job="bad")
    drive.settle()
    assert state_of(drive, "bad") == "RUNNING"


def test_a_job_that_fails_behind_its_entry_in_the_queue_is_held_and_not_placed(
    drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed in its queue group, so that it was placed although it was on hold."""
    from moorage.scheduler.core.schedule.indexing import Indexing

    drive.submit("first", gpu={"count": 4})
    drive.submit("second", gpu={"count": 4})
    drive.submit("bad", gpu={})
    cure = raises_for(monkeypatch, Indexing, "arm", lambda *given: given[1].name == "bad")
    drive.lead()
    assert drive.counts == {"job": 1}
    drive.renew()
    drive.settle()
    drive.run_out("w0")
    drive.pass_time(3_000)
    assert drive.explained("bad")["reason"] == "scheduler-failed"
    assert state_of(drive, "bad") == "QUEUED"
    drive.replays()
    cure()
    drive.order("release", job="bad")
    drive.settle()
    assert state_of(drive, "bad") == "RUNNING"


def test_all_replicas_of_a_job_that_could_not_be_indexed_start_once_it_is_released(
    drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them did: what waits of the job was not noted before the next takeover."""
    from moorage.scheduler.core.schedule.indexing import Indexing

    for name in ("first", "second"):
        drive.submit(name, gpu={"count": 4})
    drive.submit("bad", gpu={}, replicas=3)
    cure = raises_for(monkeypatch, Indexing, "_note", lambda *given: given[1].name == "bad")
    drive.lead()
    assert drive.counts == {"job": 1}
    drive.renew()
    drive.settle()
    assert drive.order("release", job="bad")["code"] == "internal"
    drive.replays()
    cure()
    drive.order("release", job="bad")
    drive.run_out("w0")
    drive.settle()
    assert len(drive.job("bad").attempts) == 3


# ----------------------------------------------------------------------------- what the term knows beside the ledger


@pytest.mark.parametrize("when", ["as it stalls", "later"])
def test_a_stall_that_was_reported_before_a_failure_is_taken_back_once_the_job_moves(
    when: str, drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients kept "stalled" for good: the tables that were made anew knew of no stall."""
    break_submits(drive, monkeypatch, "admission")
    drive.submit("j", gpu={"count": 2}, run={"driver": "noop", "stall_s": 60})
    drive.settle()
    assert told(drive) == []
    if when == "as it stalls":
        drive.offer_submit(POISON)
    renew(drive, (60, [IDLE, IDLE]))
    assert [each["seconds"] for each in told(drive)] == [60]
    if when == "later":
        drive.offer_submit(POISON)
        drive.tick(1000)
    assert drive.counts == {"request": 1}
    assert told(drive) == [], "it still stalls"
    renew(drive, (0, [IDLE, SPINS]))
    assert told(drive) == [{"seconds": 0, "why": "it moves again"}]
    drive.replays()


def test_jobs_that_failed_to_start_on_a_host_count_once_whatever_fails_between(
    drive: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each failure the count began at 0, so a host that starts nothing was not closed, or for a minute only."""
    break_submits(drive, monkeypatch, "admission")
    for name in ("w0", "w1"):
        drive.operate("cordon", name)
    bad = failing(drive, "bad", is_bad)
    drive.worker("keeper", 8)
    closed = []
    for number in range(12):
        drive.submit(f"j{number}", gpu={})
        drive.offer_submit(POISON, tenant=f"t{number}")
        drive.settle()
        drive.pass_time(2_000)
        drive.settle()
        drive.run_out("keeper")
        if drive.state.workers["bad"].flag == STARTS_FAIL.name:
            closed.append(round((drive.state.workers["bad"].until_ms - drive.state.time_ms) / 60_000))
            drive.pass_time(closed[-1] * 60_000, step=5_000)
    assert closed == [1, 2, 4, 8]
    assert bad.tried == 12
    assert drive.counts == {"request": 12}
    drive.replays()
