"""How many replicas wait, and for which reason: counted from the jobs' rows, for monitors and screens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
import pytest

from moorage.scheduler.answers import waiting
from moorage.scheduler.leader.fleet_detail import FleetDetails
from moorage.scheduler.leader.fleet_frames import FleetFrames
from moorage.schemas.frames import LedgerCopies
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.fleet.test_slot_modes import fleet

SERVES: Final = {"run": {"driver": "process", "argv": ["serve"]}, "service": {"name": "embed"}}


def told(drive: Driving) -> tuple[int, int, int]:
    """How many replicas wait, as everybody, an operator and a monitor are told."""
    seen = msgspec.json.decode(FleetFrames(drive.engine).frame(LedgerCopies()))
    detail = msgspec.json.decode(FleetDetails(drive.engine, drive.term_counts).frame())
    tenants = sum(row["waiting"] for row in detail.get("tenants", []))
    return seen.get("queued", 0), tenants, sum(waiting.waiting_by_reason(drive.engine).values())


def waits(drive: Driving) -> int:
    """How many replicas of all jobs are QUEUED, one by one."""
    return sum(drive.states(job.name, job.tenant).count("QUEUED") for job in drive.state.jobs.values())


def test_waiting_replicas_are_counted_by_the_reason_of_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = fleet(w0=("", ""))
    assert waiting.waiting_by_reason(drive.engine) == {}
    drive.submit("runs", gpu={"count": 2})
    drive.submit("many", gpu={"count": 1}, replicas=3, max_running=1)
    drive.submit("large", gpu={"count": 64})
    drive.settle()
    found = waiting.waiting_by_reason(drive.engine)
    assert found == {drive.explained("many")["reason"]: 3, drive.explained("large")["reason"]: 1}
    monkeypatch.setattr(waiting, "LOOKED_MAX", 0)
    assert waiting.waiting_by_reason(drive.engine) == {drive.explained("many")["reason"]: 3, waiting.OTHERS: 1}


def many(drive: Driving) -> None:
    drive.submit("j", gpu={}, replicas=100, max_running=2)


def held(drive: Driving) -> None:
    drive.submit("full", gpu={"count": 4})
    drive.submit("j", gpu={}, replicas=98)
    drive.order("hold", job="j")


def later(drive: Driving) -> None:
    drive.submit("j", gpu={}, replicas=98, start_after_s=3600)


def service(drive: Driving) -> None:
    drive.submit("j", gpu={}, replicas={"min": 2, "max": 100}, **SERVES)


def array(drive: Driving) -> None:
    drive.submit("full", gpu={"count": 4})
    drive.submit("j", gpu={}, replicas=98)


def gangs(drive: Driving) -> None:
    drive.submit("full", gpu={"count": 4})
    for number in range(49):
        drive.submit(f"j{number or ''}", gpu={"scheduling": "gang"}, replicas=2)


@pytest.mark.parametrize(
    ("submits", "reason"),
    [
        (many, "max-running"),
        (held, "held"),
        (later, "not-before"),
        (service, "scaled"),
        (array, "busy"),
        (gangs, "busy"),
    ],
)
def test_what_waits_is_counted_whatever_it_waits_for(submits: Callable[[Driving], None], reason: str) -> None:
    drive = Driving.with_hosts(4, capabilities={"process": {"answers_calls": True}})
    submits(drive)
    drive.settle()
    assert waits(drive) == 98
    assert told(drive) == (98, 98, 98)
    assert waiting.waiting_by_reason(drive.engine) == {reason: 98}
    assert drive.explained("j")["reason"] == reason
    drive.lead_from_snapshot()
    drive.renew()
    assert told(drive) == (98, 98, 98), "as the next leader counts"
    for job in list(drive.state.jobs.values()):
        drive.cancel(job.name)
    drive.settle()
    assert told(drive) == (0, 0, 0)


def test_what_came_back_waits_too_and_in_a_pause() -> None:
    drive = Driving()
    worker = drive.worker("w0", 4)
    drive.submit("j", gpu={}, replicas=6, retries=5)
    drive.settle()
    assert told(drive) == (2, 2, 2)
    drive.operate("cordon", "w0")
    for key in list(worker.held):
        worker.finish(key, 1)
    drive.settle()
    assert (waits(drive), told(drive)) == (6, (6, 6, 6))
    assert waiting.OTHERS in waiting.waiting_by_reason(drive.engine), "they wait out a pause"


def test_a_job_that_the_scheduler_failed_on_is_explained_so_and_counted_before_it_is_held() -> None:
    drive = Driving.with_hosts(1)
    drive.submit("full", gpu={})
    drive.submit("set-aside", gpu={})
    drive.engine.containment.jobs[drive.job("set-aside").num] = None
    drive.engine.indexing.look(drive.job("set-aside"))
    told = drive.explained("set-aside")
    assert (told["reason"], told.get("because")) == ("scheduler-failed", None)
    assert waiting.waiting_by_reason(drive.engine) == {"scheduler-failed": 1}
