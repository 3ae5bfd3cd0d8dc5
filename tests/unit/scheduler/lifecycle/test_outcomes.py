"""Whose jobs failed within the last hour."""

from __future__ import annotations

import pytest

from moorage.scheduler.answers.outcomes import LATELY_MS
from moorage.schemas.frames import FailedLately
from tests.unit.scheduler.driving import Driving


@pytest.mark.parametrize("tenants", [1, 2])
def test_what_failed_within_the_last_hour_is_told_by_tenant_the_last_one_first(tenants: int) -> None:
    drive = Driving()
    for number, job in enumerate(("a", "b", "c")):
        drive.submit(job, tenant=f"t{number % tenants}", start_within_s=10 * (number + 1))
    drive.submit("cancelled", tenant="t0", start_within_s=100)
    drive.cancel("cancelled", tenant="t0")
    for _ in range(3):
        drive.tick(10_000)
    told = drive.term_counts.outcomes.failed_lately(drive.state.time_ms)
    by_tenant = [FailedLately("t0", 2, "c", "EXPIRED", 0), FailedLately("t1", 1, "b", "EXPIRED", 10_000)]
    assert told == (by_tenant if tenants == 2 else [FailedLately("t0", 3, "c", "EXPIRED", 0)])
    drive.tick(LATELY_MS)
    assert [row.job for row in drive.term_counts.outcomes.failed_lately(drive.state.time_ms)] == ["c"]
    drive.tick(1)
    assert drive.term_counts.outcomes.failed_lately(drive.state.time_ms) == []
