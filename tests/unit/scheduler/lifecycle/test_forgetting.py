"""Workers that stay away are forgotten, and no others: what the ledger knows of workers stays bounded for years."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.answers import views
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.events import QueueRead
from moorage.scheduler.core.ledger import acts, records
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.folding import FoldError
from moorage.scheduler.core.ledger.record import Record, decode_record
from moorage.scheduler.core.lifecycle import forgetting, sessions
from moorage.scheduler.core.outputs.outputs import changes_since
from moorage.scheduler.leader.fleet_frames import FleetFrames
from moorage.scheduler.ledger import state_bytes as snapshots
from moorage.schemas.frames import Goodbye, LedgerCopies
from tests.unit.scheduler.driving import H100, Driving

KEEP_S = 3_600
AWAY_MS = (KEEP_S + forgetting.FORGET_EVERY_S + 2) * 1000


@pytest.fixture
def drive() -> Driving:
    return Driving(Config(history_keep=KEEP_S, finished_keep=KEEP_S, ended_max=0))


def goes(drive: Driving, name: str) -> None:
    worker = drive.workers.pop(name)
    drive.send(name, Goodbye(worker.session))
    drive.tick()


def later(drive: Driving, ms: int = AWAY_MS) -> None:
    """Time goes by, in which the workers that are there renew."""
    drive.now += ms
    drive.engine.fleet.slept(drive.now)
    drive.renew()
    drive.pass_time(3_000)


def known(drive: Driving) -> list[str]:
    return list(drive.state.workers)


def test_a_worker_that_stays_away_is_forgotten_with_all_that_is_known_of_it(drive: Driving) -> None:
    frames = FleetFrames(drive.engine)
    for name, model in (("w0", H100), ("w1", "NVIDIA L40S"), ("w2", H100)):
        drive.worker(name, 1, model)
    list(frames.catch_up())
    goes(drive, "w1")
    later(drive, (KEEP_S - 10) * 1000)
    assert known(drive) == ["w0", "w1", "w2"], "it may come back"
    asks = {"gpu": {"model": "L40S"}, "on_no_match": "reject"}
    assert drive.submit("waits", **asks)["kind"] == "accepted"
    later(drive)
    assert drive.submit("refused", **asks)["code"] == "failed-precondition"
    assert known(drive) == ["w0", "w2"]
    told = drive.explained("waits")
    assert (drive.states("waits"), told["reason"]) == (["QUEUED"], "model"), "what was accepted waits on"
    list(frames.catch_up())
    assert b"w1" not in frames.frame(LedgerCopies())
    assert 1 not in drive.engine.sessions.renewals
    drive.lead_from_snapshot()
    drive.renew()
    assert known(drive) == ["w0", "w2"]
    drive.worker("w1", 1)
    assert [worker.num for worker in drive.state.workers.values()] == [0, 2, 3], "its number is not given again"
    list(frames.catch_up())
    drive.submit("j", gpu={}, replicas=3)
    assert sorted(drive.placed_on("j")) == ["w0", "w1", "w2"]


@pytest.mark.parametrize("verb", ["cordon", "drain"])
def test_a_worker_with_an_order_on_it_is_not_forgotten(drive: Driving, verb: str) -> None:
    drive.worker("w0", 1)
    when: dict[str, Any] = {"from_s": 100_000} if verb == "drain" else {}
    drive.operate(verb, "w0", **when)
    goes(drive, "w0")
    later(drive)
    assert known(drive) == ["w0"]
    drive.operate("uncordon", "w0")
    later(drive)
    assert known(drive) == []


def test_a_worker_for_whose_return_a_kept_job_waits_is_not_forgotten(drive: Driving) -> None:
    drive.worker("w0", 1)
    drive.submit("j", gpu={}, on_partition="keep")
    drive.settle()
    del drive.workers["w0"]
    drive.pass_time(drive.engine.config.lost_ms + 2_000)
    assert drive.states("j") == ["LOST_KEPT"]
    later(drive)
    assert known(drive) == ["w0"]


def test_a_worker_that_a_job_in_memory_names_is_forgotten_after_the_job(drive: Driving) -> None:
    """What the job ran on is told as long as the job is."""
    drive.worker("w0", 1)
    drive.worker("w1", 1)
    drive.submit("j", gpu={})
    drive.settle()
    (first,) = drive.placed_on("j")
    goes(drive, first)
    drive.pass_time(2_000)
    drive.settle()
    drive.pass_time(2_000)
    drive.settle()
    assert drive.states("j") == ["RUNNING"], "on the other worker"
    for _ in range(2):
        later(drive)
        drive.lead()
        drive.renew()
    assert set(known(drive)) == {"w0", "w1"}
    assert next(change.worker for change in changes_since(drive.state, drive.job("j"), 0) if change.gpus) == first
    drive.cancel("j")
    drive.settle()
    later(drive)
    later(drive)
    assert not drive.state.jobs
    assert first not in known(drive)


def test_a_worker_that_an_operator_has_forgotten_is_listed_no_more_and_its_job_keeps_its_name(drive: Driving) -> None:
    drive.worker("w0", 1)
    drive.worker("w1", 1)
    frames = FleetFrames(drive.engine)
    drive.submit("j", gpu={})
    drive.settle()
    (first,) = drive.placed_on("j")
    refused = drive.operate("forget", first)
    assert (refused["code"], "session" in refused["message"]) == ("failed-precondition", True)
    drive.operate("drain", first, within_s=600)
    goes(drive, first)
    drive.settle()
    assert drive.operate("forget", first, why="sold")["changed"]
    assert drive.operate("forget", first)["code"] == "not-found", "it is known no more"
    assert drive.operate("uncordon", first)["code"] == "not-found"
    listed = [row.worker for row in views.fleet(drive.engine, drive.now).workers]
    list(frames.catch_up())
    told = frames.frame(LedgerCopies())
    assert (first in listed, first.encode() in told, len(listed)) == (False, False, 1)
    drive.pass_time(3_000)
    assert first in known(drive), "its job names it"
    assert next(change.worker for change in changes_since(drive.state, drive.job("j"), 0) if change.gpus) == first
    drive.lead_from_snapshot()
    drive.renew()
    assert first not in [row.worker for row in views.fleet(drive.engine, drive.now).workers]
    drive.cancel("j")
    drive.settle()
    later(drive)
    later(drive)
    assert first not in known(drive)


def test_a_worker_that_nothing_names_is_forgotten_by_the_order_within_seconds_and_is_new_when_it_comes_back(
    drive: Driving,
) -> None:
    worker = drive.worker("w0", 1)
    goes(drive, "w0")
    assert drive.operate("forget", "w0")["changed"]
    drive.pass_time(3_000)
    assert known(drive) == []
    assert drive.submit("j", gpu={}, on_no_match="reject")["kind"] == "accepted", "no fleet is known"
    worker.boot += "+"
    drive.workers["w0"] = worker
    assert drive.join(worker)["kind"] == "joined"
    drive.renew()
    assert [(row.worker, row.flag) for row in views.fleet(drive.engine, drive.now).workers] == [("w0", "open")]
    assert drive.placed_on("j") == ["w0"]


def test_a_forgotten_worker_that_a_job_names_is_open_when_it_comes_back(drive: Driving) -> None:
    worker = drive.worker("w0", 1)
    drive.submit("j", gpu={})
    drive.settle()
    drive.operate("drain", "w0")
    goes(drive, "w0")
    drive.operate("forget", "w0")
    drive.pass_time(2_000)
    assert known(drive) == ["w0"]
    worker.boot += "+"
    drive.workers["w0"] = worker
    assert drive.join(worker)["kind"] == "joined"
    drive.renew()
    drive.settle()
    assert [(row.worker, row.state) for row in views.fleet(drive.engine, drive.now).workers] == [("w0", "up")]
    drive.pass_time(5_000)
    drive.settle()
    assert drive.states("j") == ["RUNNING"]


def test_a_worker_for_whose_return_a_kept_job_waits_may_not_be_forgotten(drive: Driving) -> None:
    drive.worker("w0", 1)
    drive.submit("j", gpu={}, on_partition="keep")
    drive.settle()
    del drive.workers["w0"]
    drive.pass_time(drive.engine.config.lost_ms + 2_000)
    refused = drive.operate("forget", "w0")
    assert (refused["code"], "on_partition keep" in refused["message"]) == ("failed-precondition", True)
    drive.cancel("j")
    drive.tick()
    assert drive.operate("forget", "w0")["changed"] is True


def test_a_worker_that_a_waiting_job_avoids_is_forgotten_after_the_job(drive: Driving) -> None:
    worker = drive.worker("w0", 1, auto=False)
    drive.submit("j", gpu={})
    drive.report("refused", "j", detail="not-permitted: tenant t may not have the driver noop on this worker")
    assert drive.job("j").avoid
    assert worker.session
    goes(drive, "w0")
    later(drive)
    assert known(drive) == ["w0"]
    drive.cancel("j")
    later(drive)
    later(drive)
    assert known(drive) == []


def test_a_worker_that_comes_back_while_jobs_are_read_is_not_forgotten(
    drive: Driving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetting, "JOBS_AT_ONCE", 1)
    away = [drive.worker(name, 1) for name in ("w0", "w1")]
    for number in range(10):
        drive.submit(f"j{number}", gpu={"count": 64})
    for worker in away:
        goes(drive, worker.id)
    drive.now += AWAY_MS
    drive.pass_time(3_000)
    assert known(drive) == ["w0", "w1"], "not all jobs are read yet"
    away[1].boot += "+"
    drive.workers["w1"] = away[1]
    drive.join(away[1])
    drive.pass_time(20_000)
    assert known(drive) == ["w1"]


def test_a_worker_that_joins_with_the_record_that_would_forget_it_stays(drive: Driving) -> None:
    worker = drive.worker("w0", 1)
    goes(drive, "w0")
    worker.boot += "+"
    drive.workers["w0"] = worker
    drive.now += AWAY_MS
    assert drive.join(worker)["kind"] == "joined"
    assert known(drive) == ["w0"]


def test_pods_of_a_year_fill_no_table_and_the_last_id_is_given_when_one_is_free(
    drive: Driving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "WORKERS_MAX", 8)
    assert records.WORKERS_MAX > 8
    drive.checks = False
    for day in range(365):
        drive.worker(f"pod-{day}", 1)
        goes(drive, f"pod-{day}")
        drive.now += 86_400_000 // 4
        drive.pass_time(2_000)
        assert len(drive.state.workers) <= 6
    drive.check()
    for number in range(8 - len(drive.state.workers)):
        drive.worker(f"new-{number}", 1)
    joins: Any = Driving.worker
    with pytest.raises(AssertionError, match="8 worker ids, which is the most"):
        joins(drive, "one-too-many", 1)
    for number in range(8):
        if f"new-{number}" in drive.workers:
            goes(drive, f"new-{number}")
    drive.workers.clear()
    later(drive)
    drive.worker("one-too-many", 1)


@pytest.mark.parametrize("act", [acts.Forget(0), acts.Forget(7), acts.Flag(1, "open", "me")])
def test_a_record_that_forgets_a_worker_in_use_or_names_a_forgotten_one_cannot_be_written(
    drive: Driving, act: acts.AnyAct
) -> None:
    drive.worker("w0", 1)
    drive.worker("w1", 1)
    goes(drive, "w1")
    state = drive.state
    drive.submit("j", gpu={"count": 2})
    state, kept = drive.state, snapshots.dump(drive.state)
    record = Record(state.level, state.epoch, 0, 0, state.time_ms, state.digest, acts=[acts.Forget(1), act])
    with pytest.raises(FoldError):
        fold(state, record, state.seq + 1)
    record.acts = [acts.Forget(1)]
    fold(snapshots.load(kept), record, state.seq + 1)
    record.steps = [1, 1, 0, 1, 1, 1]
    with pytest.raises(FoldError):
        fold(snapshots.load(kept), record, state.seq + 1)


def test_a_tenant_of_which_nothing_is_known_is_forgotten_and_comes_back_as_any_other(
    drive: Driving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetting, "FORGET_MAX", 2)
    drive.worker("w0", 1)
    for number in range(5):
        drive.submit("j", tenant=f"brief-{number}", gpu={})
        drive.settle()
        drive.run_out("w0")
    drive.submit("j", tenant="waits", gpu={"count": 64})
    drive.cancel("unknown", tenant="cancels", before=True)
    drive.order("hold", tenant="held")
    drive.order("limit", tenant="limited", gpus=1)
    drive.cancel("unknown", tenant="queues", sequence=3)
    drive.engine.offer(QueueRead("queues", "submit", 5))
    later(drive)
    drive.pass_time(3_000)
    assert set(drive.state.tenants) == {"waits", "cancels", "held", "limited", "queues"}, "queues has a cursor"
    drive.order("release", tenant="held")
    drive.order("limit", tenant="limited", gpus=None)
    later(drive)
    later(drive)
    assert set(drive.state.tenants) == {"waits", "queues"}
    for name in ("held", "limited", "brief-0"):
        drive.submit("again", tenant=name, gpu={})
        drive.settle()
        drive.run_out("w0")
        assert drive.states("again", tenant=name) == ["SUCCEEDED"]


def test_a_tenant_that_has_used_much_is_forgotten_once_that_counts_for_nothing(drive: Driving) -> None:
    drive.worker("w0", 1)
    drive.order("share", tenant="other", weight=2)
    drive.submit("j", tenant="used", gpu={})
    drive.settle()
    drive.now += 3_600_000
    drive.run_out("w0")
    for _ in range(3):
        later(drive)
    assert "used" in drive.state.tenants, "half of its use counts after each half-life"
    for _ in range(20):
        later(drive)
    assert "used" not in drive.state.tenants


def test_a_tenant_of_which_something_is_known_cannot_be_forgotten(drive: Driving) -> None:
    drive.submit("j", gpu={})
    state = drive.state
    record = Record(state.level, state.epoch, 0, 0, state.time_ms, state.digest, acts=[acts.ForgetTenants(["t"])])
    with pytest.raises(FoldError):
        fold(state, record, state.seq + 1)


def test_for_a_scheduler_of_before_one_that_is_forgotten_or_admitted_is_cordoned(drive: Driving) -> None:
    """It knows three flags, and its follower would end at a fourth one."""
    drive.worker("w0", 1)
    goes(drive, "w0")
    drive.operate("forget", "w0", why="sold")
    drive.operate("admit", "spot-1", pool="spot", token="UAT6")
    flags = [act.flag for payload in drive.records for act in decode_record(payload).acts if isinstance(act, acts.Flag)]
    assert {*flags} <= {"open", "cordoned", "draining"}
    assert flags
