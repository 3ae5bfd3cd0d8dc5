"""Hosts on which starts fail: they are closed for a while, and one tenant's jobs that start nowhere close no host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moorage.scheduler.answers.views import fleet as fleet_answer
from moorage.scheduler.core.config import Config
from moorage.schemas.answers.fleet import WorkerInfo
from moorage.schemas.frames import NOT_HERE, START_FAILED, Hello, Place
from moorage.schemas.reasons import STARTS_FAIL
from tests.unit.scheduler.driving import H100, Driving
from tests.unit.scheduler.honest_worker import Worker, devices

WHY = NOT_HERE + "secret 'token': there is no such file"


class Failing(Worker):
    """An honest worker that fails to start some of what it is sent."""

    cannot: Callable[[str, str], bool] = staticmethod(lambda worker, job: False)
    why = WHY
    tried = 0

    def blocked(self, place: Place) -> bool:
        if self.cannot(self.id, place.job):
            self.tried += 1
            return True
        return super().blocked(place)

    def say(self, kind: Any, place: Place, code: int = 0, detail: str = "") -> None:
        if kind == "refused" and self.cannot(self.id, place.job):
            code, detail = (126 if self.why == WHY else 0), self.why
        super().say(kind, place, code, detail)


def failing(drive: Driving, name: str, cannot: Callable[[str, str], bool], gpus: int = 1) -> Failing:
    """A worker that cannot start the jobs of which `cannot(worker, job)` says so."""
    hello = Hello(name, "boot-1", drivers=["noop"], gpu_pool=devices(name, [H100] * gpus), modes=["exclusive"])
    worker = Failing(name, hello, f"machine-{name}")
    worker.cannot = cannot
    drive.workers[name] = worker
    assert drive.join(worker)["kind"] == "joined"
    return worker


def row(drive: Driving, name: str) -> WorkerInfo:
    found = fleet_answer(drive.engine, drive.now)
    return next(each for each in found.workers if each.worker == name)


def until_over(drive: Driving, jobs: dict[str, list[str]], seconds: int = 60) -> dict[str, dict[str, str]]:
    """Jobs run for a second each, until all have ended; returns the states by tenant and job."""
    for _ in range(seconds):
        drive.report_all()
        for name in drive.workers:
            for key in [key for key, held in drive.workers[name].held.items() if held.phase == "running"]:
                drive.workers[name].finish(key)
        drive.settle(3)
        drive.pass_time(1_000)
        found = {tenant: {name: drive.states(name, tenant)[0] for name in names} for tenant, names in jobs.items()}
        if not {state for of in found.values() for state in of.values()} & {"QUEUED", "PLACED", "RUNNING"}:
            return found
    return found


def is_bad(worker: str, job: str) -> bool:
    return worker == "bad"


def is_job(worker: str, job: str) -> bool:
    return job.startswith("nowhere")


def test_a_host_that_cannot_start_jobs_fails_none_of_a_queue() -> None:
    """19 of 20 jobs failed on it in milliseconds."""
    drive = Driving()
    bad = failing(drive, "bad", is_bad)
    drive.worker("keeper", 1)
    for wave in range(2):
        jobs = [f"j{wave}-{number}" for number in range(20)]
        for job in jobs:
            drive.submit(job, gpu={}, retries=0)
        assert set(until_over(drive, {"t": jobs})["t"].values()) == {"SUCCEEDED"}
        assert row(drive, "bad").state == STARTS_FAIL.name
        assert bad.tried <= 20, "each once until three have started elsewhere, and the second wave not at all"


@pytest.mark.parametrize("gpu", [{}, {"scheduling": "gang"}], ids=["one by one", "gang"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_job_that_failed_to_start_on_a_host_is_tried_on_another_one_next(replicas: int, gpu: dict[str, str]) -> None:
    """The host was free again at once, and was chosen anew, attempt after attempt, beside hosts that were idle."""
    drive = Driving()
    bad = failing(drive, "bad", is_bad, gpus=4)
    bad.why = START_FAILED + ": cgroup: there is no such folder"
    drive.worker("keeper", 4)
    drive.submit("j", gpu=gpu, replicas=replicas)
    assert until_over(drive, {"t": ["j"]}) == {"t": {"j": "SUCCEEDED"}}
    assert bad.tried == replicas


def test_a_job_that_failed_to_start_on_every_host_is_tried_again_there() -> None:
    drive = Driving()
    bad = failing(drive, "bad", is_bad)
    bad.why = START_FAILED + ": cgroup: there is no such folder"
    drive.submit("j", gpu={})
    for _ in range(20):
        drive.settle()
        drive.report_all()
        drive.pass_time(1_000)
    assert bad.tried > 2
    bad.cannot = lambda worker, job: False
    assert until_over(drive, {"t": ["j"]}) == {"t": {"j": "SUCCEEDED"}}


def test_three_jobs_that_have_started_elsewhere_close_a_host_for_a_minute_and_then_twice_as_long() -> None:
    drive = Driving()
    bad = failing(drive, "bad", is_bad)
    drive.worker("keeper", 8)
    number, closed = 0, []
    for _ in range(7):
        while row(drive, "bad").state == "up":
            number += 1
            drive.submit(f"j{number}", gpu={})
            drive.settle()
            drive.pass_time(2_000)
            drive.settle()
            drive.run_out("keeper")
        tried, began = bad.tried, drive.now
        told = row(drive, "bad").starts_fail
        assert told is not None
        assert told.why.startswith(WHY)
        assert told.opens_in_ms > 0
        assert drive.engine.fleet.hosts[0].closed
        drive.submit(f"meanwhile-{number}", gpu={})
        drive.settle()
        while row(drive, "bad").state == STARTS_FAIL.name:
            drive.pass_time(5_000, step=5_000)
        closed.append(round((drive.now - began) / 60_000))
        drive.run_out("keeper")
        assert bad.tried == tried
    assert closed == [1, 2, 4, 8, 16, 30, 30]


def test_a_start_there_ends_the_row_and_the_doubling() -> None:
    drive = Driving()
    bad = failing(drive, "bad", is_bad)
    drive.worker("keeper", 8)
    number = 0

    def three_fail(count: int = 3) -> None:
        nonlocal number
        for _ in range(count):
            number += 1
            drive.submit(f"j{number}", gpu={})
            drive.settle()
            drive.pass_time(2_000)
            drive.settle()
            drive.run_out("keeper")

    def one_starts() -> None:
        bad.cannot = lambda worker, job: False
        drive.operate("cordon", "keeper")
        drive.submit(f"fine-{number}", gpu={})
        drive.settle()
        assert drive.placed_on(f"fine-{number}") == ["bad"]
        drive.run_out("bad")
        drive.operate("uncordon", "keeper")
        bad.cannot = is_bad

    three_fail(2)
    one_starts()
    three_fail(2)
    assert row(drive, "bad").state == "up"
    three_fail(1)
    assert row(drive, "bad").state == STARTS_FAIL.name
    drive.pass_time(61_000)
    one_starts()
    three_fail()
    fails = row(drive, "bad").starts_fail
    assert fails is not None
    assert fails.opens_in_ms <= 60_000


def test_an_operator_opens_it_and_a_restart_does() -> None:
    drive = Driving()
    bad = failing(drive, "bad", is_bad)
    for tenant in ("t", "u", "v"):
        drive.submit("j", tenant=tenant, gpu={})
        drive.settle()
        drive.pass_time(1_000)
    assert row(drive, "bad").state == STARTS_FAIL.name
    drive.submit("next", gpu={})
    drive.pass_time(1_000)
    found = drive.explained("next")
    assert found["reason"] == STARTS_FAIL.name
    assert found["held_by"] == [f"bad: starts fail: {WHY}"]
    drive.lead_from_snapshot()
    drive.renew()
    assert row(drive, "bad").state == STARTS_FAIL.name, "the ledger knows it"
    assert drive.states("next") == ["QUEUED"]
    bad.cannot = lambda worker, job: False
    assert drive.operate("uncordon", "bad")["changed"]
    drive.settle()
    assert drive.states("next") == ["RUNNING"]
    drive.run_out("bad")
    bad.cannot = is_bad
    for tenant in ("t", "u", "v"):
        drive.submit("k", tenant=tenant, gpu={})
        drive.settle()
        drive.pass_time(1_000)
    assert row(drive, "bad").state == STARTS_FAIL.name
    bad.boot = "boot-9"
    drive.join(bad)
    assert row(drive, "bad").state == "up"


def test_what_runs_there_runs_on() -> None:
    drive = Driving()
    bad = failing(drive, "bad", lambda worker, job: worker == "bad" and job != "first", gpus=2)
    drive.submit("first", gpu={})
    drive.settle()
    for tenant in ("t", "u", "v"):
        drive.submit("j", tenant=tenant, gpu={})
        drive.settle()
        drive.pass_time(1_000)
    assert row(drive, "bad").state == STARTS_FAIL.name
    assert drive.states("first") == ["RUNNING"]
    assert bad.held


@pytest.mark.parametrize("kind", ["late", "room"])
def test_what_is_no_evidence_against_a_host(kind: str) -> None:
    """A start that fails late may be the job's; a refusal for want of room says nothing."""
    drive = Driving.with_hosts(1, auto=False)
    for tenant in ("t", "u", "v", "w"):
        drive.submit("j", tenant=tenant, gpu={})
    for _ in range(4):
        holder = next(tenant for tenant in ("t", "u", "v", "w") if drive.states("j", tenant) == ["PLACED"])
        drive.pass_time(11_000 if kind == "late" else 100)
        why = (126, WHY) if kind == "late" else (0, "device-busy 0")
        drive.report("refused", "j", code=why[0], detail=why[1], tenant=holder)
        drive.order("hold", job="j", tenant=holder)
        drive.pass_time(1_000)
        if not any(drive.states("j", tenant) == ["PLACED"] for tenant in ("t", "u", "v", "w")):
            break
    assert row(drive, "w0").state == "up"


def test_failed_starts_by_a_fault_that_may_pass_close_a_host_too() -> None:
    """An engine that does not answer: every job was refused there every half minute."""
    drive = Driving()
    failing(drive, "bad", is_bad).why = "start-failed: the container engine does not answer"
    drive.worker("keeper", 1)
    jobs = [f"j{number}" for number in range(20)]
    for job in jobs:
        drive.submit(job, gpu={})
    assert set(until_over(drive, {"t": jobs}, 120)["t"].values()) == {"SUCCEEDED"}
    assert row(drive, "bad").starts_fail is not None


@pytest.mark.slow
def test_a_thousand_jobs_of_one_tenant_that_start_nowhere_close_no_host() -> None:
    drive = Driving(Config(finished_keep=86_400))
    drive.checks = False  # of 1,000 jobs after each record
    for number in range(4):
        failing(drive, f"w{number}", is_job)
    names = [f"nowhere-{number}" for number in range(1_000)]
    for name in names:
        drive.offer_submit(name, tenant="bad", gpu={})
    good = [f"good-{number}" for number in range(20)]
    for name in good:
        drive.offer_submit(name, gpu={})
    drive.tick()
    found = until_over(drive, {"bad": names, "t": good}, 1_500)
    assert set(found["t"].values()) == {"SUCCEEDED"}
    assert set(found["bad"].values()) == {"FAILED"}, "each after three hosts"
    assert all(row(drive, name).state == "up" for name in drive.workers)
    assert not drive.state.shut


@pytest.mark.parametrize("nowhere", [0, pytest.param(1_000, marks=pytest.mark.slow)])
def test_with_one_bad_host_all_good_jobs_of_the_others_run(nowhere: int) -> None:
    """With a thousand jobs that start nowhere as well, which tell nothing about the bad host."""
    drive = Driving()
    drive.checks = False
    bad = failing(drive, "bad", lambda worker, job: is_bad(worker, job) or is_job(worker, job))
    for number in range(3):
        failing(drive, f"w{number}", is_job)
    names = [f"nowhere-{number}" for number in range(nowhere)]
    good = {tenant: [f"good-{number}" for number in range(20)] for tenant in ("t", "u")}
    for name in names:
        drive.offer_submit(name, tenant="bad", gpu={})
    for tenant, jobs in good.items():
        for name in jobs:
            drive.offer_submit(name, tenant=tenant, gpu={})
    drive.tick()
    found = until_over(drive, {"bad": names, **good}, 3_000)
    for tenant in good:
        assert set(found[tenant].values()) == {"SUCCEEDED"}, tenant
    assert set(found["bad"].values()) <= {"FAILED"}
    assert bad.told["started"] == 0
    drive.check()


def test_a_job_that_failed_on_a_host_does_not_follow_one_there_that_has_not() -> None:
    """Jobs that ask alike were placed in a row on the host of the first one: those that had failed there, too."""
    drive = Driving()
    bad = failing(drive, "bad", lambda worker, job: job == "j", gpus=4)
    bad.why = START_FAILED + ": cgroup: there is no such folder"
    drive.order("hold", tenant="t")
    drive.submit("before", gpu={})
    drive.submit("j", gpu={})
    drive.order("hold", job="before")
    drive.order("release", tenant="t")
    drive.settle()
    drive.report_all()
    drive.order("hold", tenant="t")
    drive.pass_time(5_000)
    drive.worker("other", 8)
    drive.order("release", job="before")
    drive.order("release", tenant="t")
    assert until_over(drive, {"t": ["before", "j"]}) == {"t": {"before": "SUCCEEDED", "j": "SUCCEEDED"}}
    assert bad.tried == 1
