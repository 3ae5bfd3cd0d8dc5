"""A worker's own rules forbid a job: it goes elsewhere, is not tried there again, and says why it waits."""

from __future__ import annotations

import pytest

from moorage.scheduler.core.waiting import explain_job
from moorage.schemas.frames import NOT_PERMITTED
from tests.scheduler.driving import Driving

WHY = NOT_PERMITTED + "tenant t may not have the driver process on this worker"


@pytest.mark.parametrize("workers", [2, 3])
def test_it_is_placed_on_each_worker_once_and_then_waits(workers: int) -> None:
    drive = Driving()
    names = [f"w{number}" for number in range(workers)]
    for name in names:
        drive.worker(name, 2, auto=False)
    drive.submit("j", gpu={})
    tried = []
    for _ in names:
        [place] = drive.placed_on("j")
        tried.append(place)
        drive.fact("refused", "j", detail=WHY)
        assert drive.states("j") == ["QUEUED"]
        drive.pass_time(60_000)
    assert sorted(tried) == names
    assert drive.states("j") == ["QUEUED"]
    explained = explain_job(drive.engine, "t", "j")
    assert isinstance(explained, dict)
    assert explained["because"] == WHY
    # it is this job that may not, and nobody else
    drive.submit("other", gpu={"count": 2})
    assert drive.states("other") == ["PLACED"]


def test_another_refusal_keeps_no_job_away() -> None:
    drive = Driving()
    drive.worker("w0", 1, auto=False)
    drive.submit("j", gpu={})
    drive.fact("refused", "j", detail="device-busy 0")
    drive.pass_time(60_000)
    assert drive.states("j") == ["PLACED"]
