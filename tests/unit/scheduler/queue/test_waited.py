"""How long jobs waited is counted once a job, at its first start, and bounded."""

from __future__ import annotations

from typing import Any

from moorage.scheduler.answers import views, waited
from moorage.scheduler.answers.waited import BUCKETS_MS, OTHERS, TENANTS_MAX, Waited, class_of
from moorage.schemas.answers.operators import WaitRow
from tests.unit.scheduler.driving import Driving


def waits(drive: Driving) -> dict[tuple[str, str], WaitRow]:
    """By tenant and class, as the leader answers."""
    return {(row.tenant, row.gpus): row for row in views.tenants(drive.engine, drive.term_counts).waits.rows}


def test_a_job_counts_once_when_it_first_starts_from_its_acceptance() -> None:
    drive = Driving.with_hosts(2)
    drive.submit("first", gpu={}, run={"driver": "noop"}, retries=1)
    drive.submit("runs", gpu={}, run={"driver": "noop"})
    drive.settle()
    drive.submit("waits", tenant="u", gpu={"count": 2}, run={"driver": "noop"})
    drive.settle()
    assert set(waits(drive)) == {("t", "1")}, "who waits still is not counted"
    assert sum(waits(drive)["t", "1"].jobs) == 2
    drive.pass_time(20_000)
    drive.run_out("w0", 1)
    drive.pass_time(60_000)
    drive.run_out("w0")
    drive.pass_time(60_000)
    assert drive.job("first").replicas[0].attempt_no == 2
    found = waits(drive)
    assert sum(found["t", "1"].jobs) == 2, "a retry is no wait"
    assert sum(found["u", "2-7"].jobs) == 1
    assert found["u", "2-7"].sum_s >= 20
    assert found["u", "2-7"].jobs.index(1) == next(at for at, ms in enumerate(BUCKETS_MS) if ms >= 20_000)


def test_of_many_tenants_the_first_are_counted_each_and_the_others_together() -> None:
    drive = Driving.with_hosts(1)
    drive.submit("a", gpu={})
    shape, counted = drive.engine.reader.shape_of(drive.job("a")), Waited()
    for number in range(TENANTS_MAX + 50):
        counted.add((f"t{number}", shape, ms) for ms in (0, 90_000_000))
    rows = counted.as_data()["rows"]
    assert len(rows) == TENANTS_MAX + 1
    others = next(row for row in rows if row["tenant"] == OTHERS)
    assert (others["jobs"][0], others["jobs"][-1], others["sum_s"]) == (50, 50, 50 * 90_000.0)
    assert len(others["jobs"]) == len(BUCKETS_MS) + 1


def test_classes_are_by_the_gpus_needed_at_once() -> None:
    drive = Driving.with_hosts(8)
    asked: dict[str, dict[str, Any]] = {
        "none": {},
        "1": {"gpu": {}},
        "share": {"gpu": {"sharing": "time-slice"}},
        "2-7": {"gpu": {"count": 7}},
        "8+": {"gpu": {"scheduling": "gang", "count": 2}, "replicas": 4},
    }
    for number, (name, fields) in enumerate(asked.items()):
        drive.submit(f"j{number}", run={"driver": "noop"}, **fields)
        assert class_of(drive.engine.reader.shape_of(drive.job(f"j{number}"))) == name
    assert waited.TENANTS_MAX * len(asked) * (len(BUCKETS_MS) + 2) < 20_000, "numbers that a leader keeps at most"
