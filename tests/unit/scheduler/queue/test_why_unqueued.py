"""One function says why a job is in no queue group: of a new job, too, and under the next leader."""

from __future__ import annotations

from typing import Final

import pytest

from moorage.scheduler.core.ledger.state import Job
from moorage.scheduler.core.schedule.indexing import Indexing
from moorage.schemas import reasons
from moorage.schemas.reasons import Reason
from tests.unit.scheduler.driving import Driving

ASKED: Final = Indexing.why_unqueued


def why(indexing: Indexing, job: Job) -> Reason | None:
    """As the product's, and one reason more."""
    return reasons.HELD if job.name.startswith("odd") else ASKED(indexing, job)


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_reason_of_the_queue_holds_for_a_new_job_as_for_any(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Indexing, "why_unqueued", why)
    drive = Driving.with_hosts(8)
    drive.checks = False  # they know the product's reasons
    drive.submit("odd", gpu={}, replicas=replicas)
    drive.submit("plain", gpu={}, replicas=replicas)
    drive.settle()
    assert set(drive.states("plain")) == {"RUNNING"}
    assert set(drive.states("odd")) == {"QUEUED"}
    drive.lead()
    drive.pass_time(2_000)
    assert set(drive.states("odd")) == {"QUEUED"}
