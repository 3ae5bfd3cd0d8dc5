"""A tenant's limits beside those of GPUs and jobs: cores, memory, replicas at once, sizes, times, and a budget."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moorage.scheduler.core.events import ChangeOrder
from moorage.scheduler.core.ledger.holding import begins_ms, ends_ms
from moorage.schemas.operate import ChangeAsked
from tests.levels import know_next, raise_level
from tests.unit.scheduler.driving import Driving

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@pytest.fixture(autouse=True)
def next_level(monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)


def site(hosts: int = 2, **limits: Any) -> Driving:
    """Hosts of 4 GPUs, 32 cores and 64 GiB, and tenant `t` with these limits."""
    drive = Driving.with_hosts(*[4] * hosts, cpu_milli=32_000, memory_mib=65_536)
    raise_level(drive)
    done = drive.order("limit", **limits)
    assert done["changed"], done
    return drive


def running(drive: Driving, tenant: str = "t") -> int:
    return sum(
        row.attempt is not None for job in drive.state.tenants[tenant].jobs.values() for row in job.rows.values()
    )


@pytest.mark.parametrize(
    ("limits", "needs", "most", "says"),
    [
        ({"cores": 10}, {"resources": {"cpu_milli": 4_000}}, 2, "tenant t has 8 cores of 10 cores, and this needs 4"),
        (
            {"memory_mib": 9_000},
            {"resources": {"memory_mib": 3_000}},
            3,
            "tenant t has 9,000 MiB of memory of 9,000 MiB of memory, and this needs 3,000 MiB",
        ),
        ({"running": 4}, {}, 4, "tenant t has 4 replicas at once of 4 replicas at once, and this needs 1"),
        ({"running": 3, "gpus": 2}, {"gpu": {}}, 2, "tenant t has 2 of 2 GPUs leased"),
    ],
)
def test_no_more_starts_than_a_limit_allows_and_explain_says_which(
    limits: dict[str, Any], needs: dict[str, Any], most: int, says: str
) -> None:
    drive = site(**limits)
    for number in range(7):
        drive.submit(f"j{number}", **needs)
    drive.submit("other", tenant="u", **needs)
    drive.settle()
    assert (running(drive), running(drive, "u")) == (most, 1)
    told = drive.explained("j6")
    assert (told["reason"], told["because"].startswith(says)) == ("limit", True), told["because"]
    drive.run_out("w0")
    drive.run_out("w1")
    drive.settle()
    assert running(drive) == min(most, 7 - most)


def test_replicas_of_one_job_and_gangs_count_alike() -> None:
    drive = site(running=3)
    drive.submit("sweep", replicas=10)
    drive.settle()
    assert running(drive) == 3
    drive.cancel("sweep")
    drive.settle()
    for number in range(4):
        drive.submit(f"g{number}", gpu={"scheduling": "gang"}, replicas=2)
    drive.settle()
    assert running(drive) == 6, "three gangs of two"


def test_a_job_that_needs_more_cores_than_are_left_is_not_passed_for_ever() -> None:
    drive = site(cores=10)
    drive.submit("small0", resources={"cpu_milli": 4_000}, run={"driver": "noop", "timeout_s": 600})
    drive.submit("big", resources={"cpu_milli": 8_000})
    drive.submit("small1", resources={"cpu_milli": 4_000})
    drive.submit("gpu", gpu={})
    drive.settle()
    assert [drive.states(job)[0] for job in ("small0", "big", "small1", "gpu")] == [
        "RUNNING", "QUEUED", "QUEUED", "RUNNING",
    ]  # fmt: skip
    for worker in drive.workers.values():
        for key in [key for key in worker.held if key[1] == "small0"]:
            worker.finish(key)
    drive.settle()
    assert drive.states("big") == ["RUNNING"]


def test_a_fix_raises_the_limit_and_it_starts() -> None:
    drive = site(cores=4)
    for number in range(2):
        drive.submit(f"j{number}", resources={"cpu_milli": 4_000})
    drive.settle()
    fix = drive.fixes("j1")[0]
    assert fix["command"] == "moorage admin limit --tenant t --cores 8"
    drive.order("limit", cores=8)
    drive.settle()
    assert drive.states("j1") == ["RUNNING"]


@pytest.mark.parametrize(
    ("limits", "asks", "field"),
    [
        ({"cores": 4}, {"resources": {"cpu_milli": 5_000}}, "$.resources.cpu_milli"),
        ({"memory_mib": 100}, {"resources": {"memory_mib": 101}}, "$.resources.memory_mib"),
        ({"job_gpus": 2}, {"gpu": {"count": 3}}, "$.gpu.count"),
        ({"job_gpus": 2}, {"gpu": {"scheduling": "gang"}, "replicas": 3}, "$.gpu.count"),
        ({"time_limit_s": 60}, {}, "$.run.timeout_s"),
        ({"time_limit_s": 60}, {"run": {"driver": "noop", "timeout_s": 61}}, "$.run.timeout_s"),
    ],
)
def test_what_could_never_start_is_refused_with_its_field(
    limits: dict[str, Any], asks: dict[str, Any], field: str
) -> None:
    drive = site(**limits)
    refused = drive.submit("j", **asks)
    assert (refused["code"], refused["field"]) == ("failed-precondition", field), refused
    assert drive.submit("j", tenant="u", **asks)["kind"] == "accepted"
    drive.order("limit", **dict.fromkeys(limits, 0))
    assert drive.submit("j", **asks)["kind"] == "accepted"
    assert drive.state.tenants["t"].limit is None


def test_a_spent_budget_lets_what_runs_go_on_and_jobs_with_gpus_wait_for_the_next_day() -> None:
    drive = site(gpu_hours=4, period="day")
    drive.submit("a", gpu={"count": 2})
    drive.settle()
    drive.pass_time(2 * HOUR_MS + 60_000, step=60_000)
    drive.submit("b", gpu={})
    drive.submit("cpu")
    drive.submit("other", tenant="u", gpu={})
    drive.settle()
    assert [drive.states(job)[0] for job in ("a", "b", "cpu")] == ["RUNNING", "QUEUED", "RUNNING"]
    assert drive.states("other", "u") == ["RUNNING"]
    told = drive.explained("b")
    assert (told["reason"], told["because"]) == ("budget", "tenant t has spent 4.0 of 4 GPU-hours of this day")
    assert drive.fixes("b")[0]["command"].startswith("moorage admin limit --tenant t --gpu-hours ")
    drive.pass_time(DAY_MS - drive.now % DAY_MS - 5_000, step=60_000)
    assert drive.states("b") == ["QUEUED"]
    drive.pass_time(10_000)
    assert drive.states("b") == ["PLACED"]


def test_from_four_fifths_on_a_submit_is_warned() -> None:
    drive = site(gpu_hours=10, period="day")
    drive.submit("a", gpu={"count": 4})
    drive.settle()
    drive.pass_time(2 * HOUR_MS - 300_000, step=60_000)
    assert "warnings" not in drive.submit("b")
    drive.pass_time(600_000, step=60_000)
    assert "warnings" not in drive.submit("cpu")
    assert drive.submit("c", gpu={})["warnings"] == ["budget: tenant t has spent 83 % of its GPU-hours of this day"]


def test_a_change_gives_no_longer_time_limit_than_its_tenant_may() -> None:
    drive = site(time_limit_s=60)
    drive.submit("j", run={"driver": "noop", "timeout_s": 30})
    drive.engine.offer(ChangeOrder("t", msgspec.convert({"job": "j", "timeout_s": 61}, ChangeAsked), "late", True))
    drive.engine.offer(ChangeOrder("t", msgspec.convert({"job": "j", "timeout_s": 60}, ChangeAsked), "in time", True))
    drive.tick()
    assert drive.answers["late"]["field"] == "$.run.timeout_s"
    assert drive.answers["in time"]["kind"] == "answer"


def test_what_starts_beyond_a_budget_gives_way_if_it_says_so() -> None:
    drive = site(1, gpu_hours=4, period="day", on_spent="preemptible")
    drive.submit("a", gpu={"count": 4})
    drive.settle()
    drive.pass_time(3_700_000, step=100_000)
    drive.submit("more", gpu={"count": 4})
    drive.submit("gang", gpu={"scheduling": "gang"}, replicas=2)
    drive.run_out("w0")
    drive.settle()
    assert (drive.states("more"), drive.attempt("more").preemptible) == (["RUNNING"], True)
    assert drive.explained("gang")["reason"] == "budget"
    drive.submit("other", tenant="u", gpu={"count": 4})
    drive.pass_time(1_000)
    drive.settle()
    assert drive.states("other", "u") == ["RUNNING"]
    assert drive.states("more") == ["QUEUED"]
    drive.order("limit", gpu_hours=100, period="day")
    drive.run_out("w0")
    drive.settle()
    assert not drive.attempt("more").preemptible


def test_a_spent_budget_refuses_if_it_says_so() -> None:
    drive = site(gpu_hours=1, period="week", on_spent="refuse")
    drive.submit("a", gpu={"count": 4})
    drive.settle()
    drive.pass_time(HOUR_MS // 4 + 60_000, step=60_000)
    refused = drive.submit("b", gpu={})
    assert refused["code"] == "failed-precondition", refused
    assert refused["retry_after_s"] > 0
    assert drive.submit("cpu")["kind"] == "accepted"


def test_what_is_spent_outlasts_a_leader_and_a_snapshot() -> None:
    drive = site(gpu_hours=100, period="month")
    drive.submit("a", gpu={"count": 4})
    drive.settle()
    drive.pass_time(HOUR_MS, step=60_000)
    drive.lead_from_snapshot()
    drive.renew()
    drive.pass_time(HOUR_MS, step=60_000)
    drive.run_out("w0")
    drive.run_out("w1")
    drive.settle()
    limit = drive.order("limit", jobs=7)["limit"]
    assert 8 <= limit["spent_hours"] < 8.1
    assert limit["gpu_hours"] == 100


@pytest.mark.parametrize(
    ("period", "at", "began", "ends"),
    [
        (0, "2026-11-30T16:31:00+00:00", "2026-11-30", "2026-12-01"),
        (1, "2026-12-06T23:59:59+00:00", "2026-11-30", "2026-12-07"),
        (2, "2026-12-31T23:59:59+00:00", "2026-12-01", "2027-01-01"),
        (2, "2028-02-29T00:00:00+00:00", "2028-02-01", "2028-03-01"),
    ],
)
def test_periods_are_those_of_the_calendar(period: int, at: str, began: str, ends: str) -> None:
    from datetime import UTC, datetime

    def ms(text: str) -> int:
        return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)

    assert (begins_ms(ms(at), period), ends_ms(ms(at), period)) == (ms(began), ms(ends))


def test_a_new_tenant_begins_with_the_limits_that_are_set_for_new_ones() -> None:
    drive = site(tenant="new-tenants", gpus=2, jobs=3, cores=8)
    drive.submit("old", tenant="known")
    answer = drive.submit("large", tenant="u", gpu={"count": 3})
    assert (answer["code"], "at most 2 GPUs" in answer["allowed"]) == ("failed-precondition", True)
    assert "u" not in drive.state.tenants, "what is refused makes no tenant"
    for number in range(3):
        drive.submit(f"j{number}", tenant="u", gpu={})
    drive.settle()
    assert running(drive, "u") == 2
    assert drive.submit("fourth", tenant="u")["code"] == "failed-precondition"
    row = drive.state.tenants["u"]
    assert row.limit is not None
    assert (row.limit.why, row.limits and row.limits.cores_milli) == ("as new-tenants", 8_000)
    drive.order("limit", tenant="u", gpus=None)
    drive.order("limit", tenant="new-tenants", gpus=1)
    drive.settle()
    assert running(drive, "u") == 3, "its own limits are its own from then on"
    drive.submit("first", tenant="v", gpu={})
    drive.lead()
    drive.renew()
    drive.submit("second", tenant="v", gpu={})
    drive.settle()
    assert running(drive, "v") == 1


def test_below_the_level_they_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Driving.with_hosts(4)
    refused = drive.order("limit", cores=4)
    assert refused["code"] == "failed-precondition"
    assert "feature-level" in refused["next"]
    assert drive.order("limit", gpus=4)["changed"]
