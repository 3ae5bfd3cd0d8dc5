"""No decision is made by a job's history, which is cut: here it has nothing but what the last record has added."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.contained_engine import ContainedEngine
from moorage.scheduler.core.events import Wake
from moorage.scheduler.core.ledger.state import AT_MS, REPLICA, STATE, State
from moorage.schemas.frames import NOT_PERMITTED, Report
from moorage.schemas.job import STATES
from tests.ceilings import NO_HISTORY, worlds_with
from tests.unit.scheduler.driving import SUBJECTS, Driving
from tests.unit.scheduler.lifecycle.test_services_stay_up import Site

HOUR_MS = 3_600_000
RUN: dict[str, Any] = {"driver": "process", "argv": ["x"], "ready": {"file": "ok"}}
MEMBER: dict[str, Any] = {"driver": "process", "argv": ["serve"], "ready": {"call": True}, "restart": "always"}
CALLS = {"process": {"answers_calls": True, "reaches": True}}


@pytest.fixture(autouse=True, params=["no history", "history"])
def ceilings(request: pytest.FixtureRequest) -> Iterator[None]:
    with worlds_with(NO_HISTORY if request.param == "no history" else Driving.ceilings):
        yield


def two_that_run(config: Config, **fields: Any) -> Driving:
    """Two replicas of `low` have run for an hour, in which the check of the second one told 20 changes."""
    drive = Driving.with_hosts(2, config=config, auto=False, capabilities=CALLS)
    drive.submit("low", replicas=2, gpu={}, run={**RUN, **fields}, priority=10)
    for index in (0, 1):
        drive.reports([(kind, "low", index, 0, "") for kind in ("claimed", "started", "ready")])
    for change in range(20):
        drive.now += HOUR_MS // 20
        drive.reports([("ready" if change % 2 else "not-ready", "low", 1, 0, "")])
    return drive


def test_those_that_have_run_for_long_are_preempted() -> None:
    drive = two_that_run(Config(preempt_priority=80), timeout_s=40_000)
    drive.submit("high", priority=90, gpu={"count": 2})
    drive.pass_time(3_000)
    assert drive.states("low") == ["ENDING", "ENDING"]


def test_hosts_are_reserved_for_when_what_runs_there_will_have_ended() -> None:
    drive = two_that_run(Config(), timeout_s=4_000)
    drive.submit("next", gpu={"count": 2})
    drive.pass_time(35_000)
    left_ms = drive.reservation.start_ms - drive.now
    assert 355_000 < left_ms < 366_000
    drive.lead()
    drive.pass_time(5_000)
    assert abs(drive.reservation.start_ms - drive.now - left_ms) < 6_000


def test_one_that_ran_for_an_hour_begins_its_restarts_anew() -> None:
    drive = Driving.with_hosts(4, auto=False, capabilities=CALLS)
    drive.submit("a", replicas=2, gpu={}, service={"name": "s"}, run=MEMBER)
    for index in (0, 1):
        drive.reports([(kind, "a", index, 0, "") for kind in ("claimed", "started", "ready")])
    for _ in range(4):
        drive.reports([("exited", "a", 0, 1, "exit"), ("freed", "a", 0, 0, "")])
        while STATES[drive.job("a").rows[0].state] != "PLACED":
            drive.now = max(drive.now, drive.job("a").rows[0].not_before)
            drive.tick()
        drive.reports([(kind, "a", 0, 0, "") for kind in ("claimed", "started", "ready")])
    assert drive.job("a").rows[0].streak == 4
    drive.now += HOUR_MS
    drive.reports([("not-ready", "a", 1, 0, "")])
    drive.reports([("exited", "a", 0, 1, "exit"), ("freed", "a", 0, 0, "")])
    assert drive.job("a").rows[0].not_before - drive.now == 1_000


def test_a_member_that_moved_is_taken_away_and_its_replacement_stays() -> None:
    site = Site(2)
    site.join_host("w1", 2)
    site.workers["w0"].hears = None  # type: ignore[attr-defined]
    site.operate("drain", "w0")
    for _ in range(200):
        site.workers["w0"].auto = False
        site.watch(1)
        if STATES[site.job("a").state_of(0) or 0] == "CANCELLING":
            break
    moved = site.job("a").relocating
    assert moved is not None
    worker = site.workers["w0"]
    other = next(held for held in worker.held.values() if held.place.replica == 1)
    for kind in ("not-ready", "ready"):
        worker.gathered.append(Report(kind, *other.name, 0, ""))
        site.report_all("w0")
    worker.auto = True
    worker.finish(next(key for key, held in worker.held.items() if held.place.replica == 0), 0, "end")
    site.settle()
    site.watch(40)
    assert {STATES[replica.state] for replica in site.job("a").replicas} == {"RUNNING"}
    assert (site.job("a").state_of(0), site.job("a").state_of(moved[1])) == (None, STATES.index("RUNNING"))
    assert site.serving("a") == 2


@pytest.mark.parametrize("mends", ["restart", "uncordon"])
def test_a_worker_that_refused_a_job_is_asked_again_once_it_is_mended(mends: str) -> None:
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("j", replicas=3, gpu={}, max_running=1)
    drive.report("refused", "j", 0, detail=NOT_PERMITTED + "the rules of this worker")
    drive.worker("w1", 1, auto=False)
    drive.pass_time(2_000)
    index = next(iter(drive.job("j").rows))
    drive.reports([(kind, "j", index, 0, "") for kind in ("claimed", "started")])
    assert dict(drive.job("j").avoid)
    if mends == "restart":
        drive.workers["w0"].boot = "boot-2"
        drive.join(drive.workers["w0"])
    else:
        drive.operate("cordon", "w0")
        drive.operate("uncordon", "w0")
    drive.tick(1_000)
    assert not drive.job("j").avoid


def test_each_of_many_that_one_record_tells_ran_for_as_long_as_its_worker_says() -> None:
    drive = Driving.with_hosts(8, auto=False)
    drive.submit("sweep", replicas=8, gpu={})
    drive.now += 5_000
    worker = drive.workers["w0"]
    for index in range(8):
        name = drive.attempt("sweep", index).name
        worker.gathered += [Report("ran", *name, 0, "exit", 5_000), Report("freed", *name, 0, "")]
    drive.send("w0", worker.report_frame())  # type: ignore[arg-type]
    drive.tick()
    job, times = drive.job("sweep"), dict[int, dict[str, int]]()
    for row in job.history:
        times.setdefault(row[REPLICA], {})[STATES[row[STATE]]] = row[AT_MS]
    assert {each["SUCCEEDED"] - each["RUNNING"] for each in times.values()} == {5_000}
    assert job.ran == (5_000,) * 8


class Contained(Driving):
    def make_engine(self, state: State) -> ContainedEngine:
        return ContainedEngine(state, self.config, SUBJECTS, 7 + state.epoch, self.now, self._explain)


def left_ms(drive: Driving) -> tuple[int, int] | None:
    """How long the running replicas are expected to take, by how many runs."""
    engine, job = drive.engine, drive.job("sweep")
    shape, workload = engine.reader.shape_of(job), engine.reader.workload_of(job)
    return engine.durations.left_ms((("t", workload, shape.index),), accepted_ms=job.accepted_ms)


def learned() -> Contained:
    drive = Contained.with_hosts(1, auto=False)
    drive.submit("sweep", replicas=20, gpu={})
    for index in range(5):
        drive.reports([("claimed", "sweep", index, 0, ""), ("started", "sweep", index, 0, "")])
        drive.now += 30_000
        drive.reports([("exited", "sweep", index, 0, "exit"), ("freed", "sweep", index, 0, "")])
    assert left_ms(drive) == (30_001, 5)
    return drive


def test_a_request_on_which_the_scheduler_fails_forgets_no_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = learned()

    def fails(*given: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(drive.engine.scaling, "wake", fails)
    drive.engine.offer(Wake("t", "nobody", "reply", True))
    drive.tick()
    assert drive.answers["reply"]["code"] == "internal"
    assert left_ms(drive) == (30_001, 5)


def test_a_new_leader_knows_the_runs_of_a_sweep_that_goes_on() -> None:
    drive = learned()
    drive.lead()
    assert left_ms(drive) == (30_001, 5)
