"""Drivers whose engine does not answer: their worker gets no jobs of that driver, and keeps all that it has."""

from __future__ import annotations

from typing import Any

from moorage.scheduler.answers import views
from moorage.scheduler.core.config import Config
from moorage.schemas.answers.fleet import DriverDownRow
from moorage.schemas.frames import DriverDown
from tests.unit.scheduler.driving import Driving

DOWN = DriverDown("docker", "lost the engine: connection refused", 12)
IN_DOCKER: dict[str, Any] = {"run": {"driver": "docker", "argv": ["true"], "image": "bb:1"}}


def fleet() -> Driving:
    return Driving.with_hosts(4, drivers=["docker", "noop", "process"])


def say(drive: Driving, *down: DriverDown) -> None:
    drive.workers["w0"].down = list(down)
    drive.renew("w0")
    drive.settle()


def is_placed(drive: Driving, job: str) -> bool:
    return drive.replica(job).attempt is not None


def test_a_host_is_left_out_for_that_driver_alone_until_its_engine_answers() -> None:
    drive = fleet()
    drive.submit("before", gpu={}, **IN_DOCKER)
    drive.settle()
    say(drive, DOWN)
    drive.submit("waits", gpu={}, **IN_DOCKER)
    drive.submit("no-gpu", **IN_DOCKER)
    drive.submit("other", gpu={})
    drive.settle()
    placed = {job: is_placed(drive, job) for job in ("before", "waits", "no-gpu", "other")}
    assert placed == {"before": True, "waits": False, "no-gpu": False, "other": True}, "nothing is ended"
    assert drive.explained("waits")["reason"] == "driver-down"
    [row] = views.fleet(drive.engine, drive.now).workers
    assert (row.state, row.drivers_down) == ("up", [DriverDownRow(driver="docker", why=DOWN.why, for_s=12)])
    say(drive)
    assert is_placed(drive, "waits")
    assert is_placed(drive, "no-gpu")
    [row] = views.fleet(drive.engine, drive.now).workers
    assert not row.drivers_down


def test_no_job_ends_for_one_that_could_not_start_there_then() -> None:
    """Neither a preemptible one, nor one below `preempt_priority`, nor a gang."""
    drive = Driving(Config(preempt_priority=80, preempt_after=1.0))
    drive.worker("w0", 4, drivers=["docker", "noop", "process"])
    drive.submit("spare", gpu={"count": 2}, preemptible=True)
    drive.submit("pair", gpu={"scheduling": "gang"}, replicas=2)
    drive.pass_time(5_000)
    say(drive, DOWN)
    drive.submit("urgent", gpu={"count": 2}, priority=90, **IN_DOCKER)
    drive.pass_time(60_000)
    states = [*drive.states("spare"), *drive.states("pair"), *drive.states("urgent")]
    assert states == ["RUNNING"] * 3 + ["QUEUED"]
    say(drive)
    drive.pass_time(5_000)
    drive.settle()
    assert (drive.states("spare"), drive.states("urgent")) == (["QUEUED"], ["RUNNING"])


def test_a_full_disk_is_told_as_that() -> None:
    drive = fleet()
    why = "disk-full: no room on the disk of /state: free some; it takes jobs again by itself"
    say(drive, *(DriverDown(driver, why, 3) for driver in ("docker", "noop", "process")))
    drive.submit("waits", gpu={})
    drive.settle()
    explained = drive.explained("waits")
    assert (explained["reason"], is_placed(drive, "waits")) == ("disk-full", False)
    [row] = views.fleet(drive.engine, drive.now).workers
    assert (row.state, row.free) == ("disk-full", 0)
    say(drive)
    assert is_placed(drive, "waits"), "it opens by itself"


def test_a_worker_whose_agent_stopped_gets_nothing_until_the_next_agent_joins() -> None:
    drive = fleet()
    drive.submit("before", gpu={})
    drive.settle()
    why = "agent-stopped: its jobs run on; it takes jobs again once its agent is started"
    say(drive, *(DriverDown(driver, why) for driver in ("docker", "noop", "process")))
    drive.submit("waits", gpu={})
    drive.submit("no-gpu")
    drive.settle()
    assert [is_placed(drive, job) for job in ("before", "waits", "no-gpu")] == [True, False, False]
    explained = drive.explained("waits")
    assert (explained["reason"], explained["held_by"]) == ("closed", [f"w0: {why}"])
    [row] = views.fleet(drive.engine, drive.now).workers
    assert (row.state, row.free, row.cells) == ("agent-stopped", 0, "#···")
    drive.workers["w0"].down = []
    drive.join(drive.workers["w0"])
    drive.renew("w0")
    drive.settle()
    assert [is_placed(drive, job) for job in ("before", "waits", "no-gpu")] == [True, True, True]
    [row] = views.fleet(drive.engine, drive.now).workers
    assert (row.state, row.drivers_down) == ("up", [])


def test_another_worker_with_that_driver_gets_the_job() -> None:
    drive = fleet()
    say(drive, DOWN)
    drive.worker("w1", 1, drivers=["docker"])
    drive.submit("j", gpu={}, **IN_DOCKER)
    drive.settle()
    assert drive.attempt("j").worker.id == "w1"


def test_a_driver_that_the_worker_does_not_offer_is_not_noted() -> None:
    drive = fleet()
    say(drive, DriverDown("nonsense", "x\x07" * 500, -5))
    [row] = views.fleet(drive.engine, drive.now).workers
    assert not row.drivers_down
