"""What a record has no room for follows with later ones, and nothing that is to end is left out for good."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.contained_engine import ContainedEngine
from moorage.scheduler.core.events import Cancel, ChangeOrder, Wake
from moorage.scheduler.core.ledger.ceilings import CEILINGS, Ceilings
from moorage.scheduler.core.ledger.state import State
from moorage.schemas.frames import Unwell
from moorage.schemas.job import STATES
from moorage.schemas.operate import ChangeAsked
from tests.ceilings import worlds_with
from tests.unit.scheduler.driving import SUBJECTS, Driving
from tests.unit.scheduler.queries.test_forecast import look_ahead

#: a record of four KiB is full
SHORT = replace(CEILINGS, full_bytes=4_096, bulk_bytes=2_048)


def running(replicas: int, hosts: int = 1, ceilings: Ceilings = SHORT, **fields: Any) -> Driving:
    """A sweep, all of which runs, one GPU each; its hosts do not end what they are asked to end."""
    with worlds_with(ceilings):
        drive = Driving.with_hosts(*[-(-replicas // hosts)] * hosts, config=Config(ranker="pack"))
    drive.submit("sweep", replicas=replicas, gpu={}, **fields)
    for _ in range(400):
        drive.report_all()
        if drive.job("sweep").counts == {"RUNNING": replicas}:
            break
    assert drive.job("sweep").counts == {"RUNNING": replicas}
    for worker in drive.workers.values():
        worker.auto = False
    return drive


def busy(drive: Driving, seconds: int, worker: str) -> None:
    """Time goes by, and each record has the end of a replica on another worker besides."""
    for _ in range(seconds):
        for name in drive.workers:
            drive.send(name, drive.workers[name].renew_frame())
        other = drive.workers[worker]
        other.finish(next(iter(other.held)))
        frame = other.report_frame()
        assert frame is not None
        drive.send(worker, frame)
        other.report_answered(frame.no)
        drive.tick(1_000, obey=False)


def on(drive: Driving, worker: str) -> Counter[str]:
    return Counter(STATES[each.replica.state] for each in drive.state.workers[worker].attempts.values())


def test_a_drain_ends_the_replicas_of_a_large_sweep_at_its_deadline_though_others_report() -> None:
    """Each is two steps, however many replicas its job has."""
    drive = running(320, hosts=40, ceilings=replace(SHORT, bulk_bytes=32))  # one report is half of a record
    drive.operate("drain", "w0", within_s=5)
    busy(drive, 7, "w1")
    assert on(drive, "w0") == {"ENDING": 8}


def test_what_a_worker_holds_that_was_told_to_end_is_asked_to_end_though_submits_fill_each_record() -> None:
    drive = running(8)
    drive.workers["w0"].leaving_s = 60
    for second in range(3):
        drive.send("w0", drive.workers["w0"].renew_frame())
        for number in range(100):
            drive.offer_submit(f"waits{second}-{number}", labels={"about": "x" * 60})
        drive.tick(1_000, obey=False)
        assert drive.engine.waiting, "the record was full"
    assert on(drive, "w0") == {"ENDING": 8}


def test_a_gang_that_is_wider_than_half_a_record_leaves_a_drained_worker_though_others_report() -> None:
    with worlds_with(SHORT):
        drive = Driving.with_hosts(*[4] * 18)
    drive.submit("gang", replicas=56, gpu={"scheduling": "gang"}, priority=90)
    drive.submit("sweep", replicas=16, gpu={})
    drive.settle()
    (first, *_), last = drive.placed_on("gang"), drive.placed_on("sweep")[0]
    for worker in drive.workers.values():
        worker.auto = False
    drive.operate("drain", first, within_s=2)
    busy(drive, 4, last)
    assert set(drive.states("gang")) == {"ENDING"}


def test_a_gpu_that_fails_under_many_attempts_is_recorded_and_its_jobs_leave_though_others_report() -> None:
    with worlds_with(SHORT):
        drive = Driving.with_hosts(2, 8, config=Config(ranker="pack"))
    drive.submit("bad", gpu={}, priority=90)
    drive.settle()
    assert drive.placed_on("bad") == ["w0"]
    drive.submit("many", replicas=60, max_running=60)
    drive.submit("other", replicas=9, gpu={})
    for _ in range(40):
        drive.report_all()
    for worker in drive.workers.values():
        worker.auto = False
    slot = drive.slots("bad")[0]
    drive.workers["w0"].unwell = [Unwell(slot, "xid", "79: it fell off the bus", True)]
    busy(drive, 4, "w1")
    assert slot in drive.state.workers["w0"].unwell
    assert drive.states("bad") == ["ENDING"]


@pytest.mark.parametrize("by", ["cancel", "deadline", "max_failed"])
def test_a_job_with_more_on_workers_than_one_record_has_room_for_ends_with_several(by: str) -> None:
    drive = running(300, hosts=5, max_failed=1, deadline_s=3600 if by == "deadline" else 40_000)
    first = len(drive.records)
    if by == "cancel":
        reply = drive.offer_cancel("sweep")
        drive.tick(obey=False)
        assert reply not in drive.answers, "it is answered once all are asked to end"
        drive.lead()  # who cancels was not answered, and asks again
        reply = drive.offer_cancel("sweep")
    elif by == "deadline":
        drive.now += 3_600_000
    else:
        worker = drive.workers["w0"]
        worker.finish(next(iter(worker.held)), 1)
        drive.report_all()
    for _ in range(12):
        drive.tick(obey=False)
    assert max(drive.sizes[first:]) < 8_192
    assert drive.job("sweep").counts.get("RUNNING", 0) == 0
    if by == "cancel":
        assert drive.answers[reply]["data"]["cancelled"]


def test_an_id_that_is_free_again_holds_up_its_own_tenant_alone_and_in_order() -> None:
    drive = Driving.with_hosts(0, config=Config(finished_keep=60.0))
    for at in range(0, 1_200, 300):
        for number in range(at, at + 300):
            drive.offer_submit(f"j{number}")
        drive.settle(6)
        worker = drive.workers["w0"]
        for key in list(worker.held):
            worker.finish(key)
        drive.settle(6)
    drive.pass_time(62_000, step=2_000)
    last = drive.state.jobs[drive.state.ended[-1]].name
    again, after = drive.offer_submit(last), drive.offer_submit("behind-it")
    other = drive.offer_submit("mine", tenant="other")
    drive.tick()
    assert (drive.answers[other]["kind"], again in drive.answers, after in drive.answers) == ("accepted", False, False)
    for _ in range(6):
        drive.tick()
    assert [drive.answers[each]["kind"] for each in (again, after)] == ["accepted", "accepted"]
    assert drive.job(last).num < drive.job("behind-it").num


class Contained(Driving):
    def make_engine(self, state: State) -> ContainedEngine:
        return ContainedEngine(state, self.config, SUBJECTS, 7 + state.epoch, self.now, self._explain)


@pytest.mark.parametrize(
    "ask",
    [
        lambda reply: Cancel("bad", "a", "why", reply=reply),
        lambda reply: ChangeOrder("bad", ChangeAsked(job="a", priority=1), reply, True),
        lambda reply: Wake("bad", "service", reply, True),
    ],
    ids=["cancel", "change", "wake"],
)
def test_of_requests_of_one_verb_that_fail_the_tables_are_made_anew_for_two(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[str], Any]
) -> None:
    from moorage.scheduler.core.lifecycle.admission import Admission
    from moorage.scheduler.core.lifecycle.scaling import Scaling
    from moorage.scheduler.core.operate.changing import Changing

    def fails(*given: Any, **named: Any) -> Any:
        raise RuntimeError("a defect")

    rebuilt, rebuild = list[int](), ContainedEngine._rebuild

    def counted(*given: Any) -> None:
        rebuilt.append(1)
        rebuild(*given)

    for owner, name in ((Admission, "cancel"), (Changing, "change"), (Scaling, "wake")):
        monkeypatch.setattr(owner, name, fails)
    monkeypatch.setattr(ContainedEngine, "_rebuild", counted)
    drive = Contained.with_hosts(1)
    for number in range(12):
        drive.engine.offer(ask(f"x{number}"))
    drive.tick()
    codes = Counter(answer["code"] for reply, answer in drive.answers.items() if reply.startswith("x"))
    assert (codes, len(rebuilt)) == ({"internal": 2, "overloaded": 10}, 2)


def test_of_a_service_that_has_ended_nothing_stays() -> None:
    drive = Driving(Config(ended_max=0))
    for number in range(20):
        drive.offer_submit(f"s{number}", service={"name": f"svc-{number}"}, run={"driver": "process", "argv": ["x"]})
        drive.tick()
        drive.offer_cancel(f"s{number}")
    drive.pass_time(3_000)
    assert drive.engine.services._jobs == {}


def test_an_address_is_recorded_whole_however_long_its_host_is_named() -> None:
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("a", gpu={}, run={"driver": "noop", "ports": 16})
    address = f"{'gpu-node-0017.' * 17}org:{','.join(str(40_000 + port) for port in range(16))}"
    drive.reports([("claimed", "a", 0, 0, ""), ("started", "a", 0, 0, address)])
    assert drive.attempt("a").address == address


def test_a_drain_that_ends_by_itself_is_foreseen() -> None:
    drive = Driving.with_hosts(1)
    drive.operate("drain", "w0", for_s=600)
    drive.submit("a", gpu={})
    drive.pass_time(2_000)
    start = look_ahead(drive).starts["t"]["a"]
    assert 590_000 < start.p10_ms <= start.p90_ms < 600_000


@pytest.mark.parametrize("name", ["sweep", "train", "eval", "grid"])
def test_the_end_of_a_sweep_is_foreseen_by_runs_that_differ(name: str) -> None:
    """All of its replicas were short in one look, and long in the next: its end was told five times too early."""
    drive = Driving.with_hosts(4, auto=False)
    drive.checks = False
    drive.submit(name, replicas=104, gpu={})
    began: dict[int, int] = {}

    def runs_ms(index: int) -> int:
        return 100_000 if index * 7919 % 2 else 10_000

    def begin() -> None:
        new = [row.index for row in drive.job(name).rows.values() if STATES[row.state] == "PLACED"]
        if new:
            drive.reports([(kind, name, index, 0, "") for index in new for kind in ("claimed", "started")])
            began.update(dict.fromkeys(new, drive.now))

    def end_one() -> None:
        index = min(began, key=lambda each: began[each] + runs_ms(each))
        drive.now = max(drive.now, began.pop(index) + runs_ms(index))
        drive.reports([("exited", name, index, 0, "exit"), ("freed", name, index, 0, "")])
        begin()

    begin()
    while drive.job(name).live > 60:
        end_one()
    told, now = look_ahead(drive).ends["t"][name], drive.now
    while drive.job(name).live:
        end_one()
    assert 0.6 < told.p50_ms / (drive.now - now) < 1.6
    assert told.p10_ms < drive.now - now < told.p90_ms


def test_jobs_that_wait_for_long_notices_do_not_keep_others_from_preempting() -> None:
    ceilings = replace(CEILINGS, standing=2)
    with worlds_with(ceilings):
        drive = Driving(Config(preempt_priority=80, preempt_after=0.05))
    for number in range(3):
        drive.worker(f"w{number}", 1, auto=False)
    slow = {"driver": "process", "argv": ["x"], "checkpoint_signal": "SIGUSR1", "checkpoint_before_s": 3_600}
    for number in range(3):
        drive.submit(f"low{number}", priority=10, gpu={}, run=slow)
        drive.reports([(kind, f"low{number}", 0, 0, "") for kind in ("claimed", "started")])
    drive.pass_time(2_000)
    for number in range(3):
        drive.submit(f"high{number}", priority=90 - number, gpu={})
    drive.pass_time(5_000)
    assert Counter(drive.states(f"low{number}")[0] for number in range(3)) == {"ENDING": 2, "RUNNING": 1}
    drive.pass_time(60_000)
    assert Counter(drive.states(f"low{number}")[0] for number in range(3)) == {"ENDING": 3}
