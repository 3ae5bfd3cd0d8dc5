"""Fair share between tenants: the ratio of weights, what idleness banks, guaranteed GPUs, and the same after a fold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shapes
from moorage.scheduler.core.ledger import fairshare
from moorage.scheduler.core.ledger.fairshare import HALF_LIVES_MAX, ONE, inflation
from moorage.scheduler.core.queue.order import Rates
from moorage.schemas.gpu import GpuSpec
from tests.unit.ranking.test_fragments import add, request, worker
from tests.unit.scheduler.driving import Driving

MINUTE = 60_000
HOUR = 60 * MINUTE


class Saturated:
    """Tenants that never run out of jobs on one cluster, and how many GPU milliseconds each got."""

    def __init__(self, gpus: int, config: Config | None = None) -> None:
        self.drive = Driving(config or Config(ended_max=0))
        self.drive.checks = False
        self.drive.worker("w0", gpus, cpu_milli=10**6, memory_mib=10**6)
        self.names = count()
        self.got: Counter[str] = Counter()

    def backlog(self, tenants: Iterable[str], jobs: int) -> None:
        for tenant in tenants:
            row = self.drive.state.tenants.get(tenant)
            for _ in range(jobs - (row.live if row is not None else 0)):
                self.drive.offer_submit(f"j{next(self.names)}", tenant=tenant, gpu={})

    def run(self, ms: int, tenants: Iterable[str], *, step: int, ends: int, backlog: int = 30) -> None:
        """`ends` of the attempts, the oldest, end each `step`; each of the tenants always has jobs that wait."""
        drive, worker = self.drive, self.drive.workers["w0"]
        until = drive.now + ms
        while drive.now < until:
            self.backlog(tenants, backlog)
            drive.settle()
            at = drive.now
            drive.send("w0", worker.renew_frame())
            drive.tick(step)
            for name, row in drive.state.tenants.items():
                self.got[name] += row.gpus * (drive.now - at)
            for key in [key for key, held in worker.held.items() if held.phase == "running"][:ends]:
                worker.finish(key)
        drive.check()


@pytest.mark.parametrize("gpus", [7, *(pytest.param(gpus, marks=pytest.mark.slow) for gpus in (4, 16))])
def test_three_to_one_over_ten_minutes(gpus: int) -> None:
    cluster = Saturated(gpus)
    cluster.drive.order("share", tenant="a", weight=3)
    cluster.run(10 * MINUTE, "ba", step=2_000, ends=2)
    assert cluster.got["a"] / cluster.got["b"] == pytest.approx(3, rel=0.05)


def test_explain_tells_whose_turn_is_next_without_an_operator() -> None:
    cluster = Saturated(1)
    drive, worker = cluster.drive, cluster.drive.workers["w0"]
    drive.submit("alone", tenant="a", gpu={})
    drive.submit("mine", tenant="a", gpu={})
    assert "turn" not in drive.explained("mine", "a"), "no other tenant waits"
    drive.settle()
    drive.pass_time(10_000)
    drive.submit("theirs", tenant="b", gpu={})
    mine, theirs = drive.explained("mine", "a"), drive.explained("theirs", "b")
    assert (mine["position"], theirs["position"]) == (1, 2), "by arrival"
    assert (mine["turn"], theirs["turn"], mine["tenants"]) == (2, 1, 2)
    (key,) = worker.held
    worker.finish(key)
    drive.settle()
    assert (drive.states("mine", "a"), drive.states("theirs", "b")) == (["QUEUED"], ["RUNNING"])


@pytest.mark.slow
def test_three_tenants_of_which_one_has_no_weight_and_another_job_size() -> None:
    cluster = Saturated(12)
    cluster.drive.order("share", tenant="a", weight=4)
    cluster.drive.order("share", tenant="b", weight=1)
    for number in range(400):
        cluster.drive.offer_submit(f"wide-{number}", tenant="c", gpu={"count": 2})
    cluster.run(10 * MINUTE, "ab", step=2_000, ends=3)
    assert cluster.got["a"] / cluster.got["b"] == pytest.approx(4, rel=0.05)
    assert cluster.got["c"] / cluster.got["b"] == pytest.approx(1, rel=0.1)


def test_tenants_share_alike_without_an_operator_however_early_one_came() -> None:
    cluster = Saturated(4)
    cluster.backlog("a", 40)
    cluster.drive.tick()
    cluster.run(5 * MINUTE, "ab", step=2_000, ends=1)
    assert cluster.got["a"] / cluster.got["b"] == pytest.approx(1, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("half_life_s", [600.0, 3600.0])
def test_a_tenant_idle_for_an_hour_banks_less_than_its_half_life(half_life_s: float) -> None:
    cluster = Saturated(8, Config(ended_max=0, fair_share_half_life=half_life_s))
    cluster.drive.order("share", tenant="a", weight=1)
    cluster.run(HOUR, "b", step=10_000, ends=4)
    before = Counter(cluster.got)
    cluster.run(int(3 * half_life_s * 1000), "ab", step=10_000, ends=4)
    more = (cluster.got["a"] - before["a"]) - (cluster.got["b"] - before["b"])
    half_life_of_the_cluster = 8 * half_life_s * 1000
    assert 0 < more / 2 < half_life_of_the_cluster
    assert cluster.got["a"] - before["a"] < 0.8 * 3 * half_life_of_the_cluster, "and it never has all of it for long"


def test_guaranteed_gpus_go_before_any_priority_and_idle_ones_are_borrowed() -> None:
    drive = Driving.with_hosts(4)
    drive.order("share", tenant="own", gpus=2)
    for number in range(6):
        drive.offer_submit(f"b{number}", tenant="borrower", gpu={}, priority=100)
    drive.tick()
    drive.settle()
    assert sum(drive.states(f"b{n}", "borrower") == ["RUNNING"] for n in range(6)) == 4  # idle: borrowed
    for number in range(3):
        drive.offer_submit(f"o{number}", tenant="own", gpu={}, priority=1)
    drive.tick()
    for _ in range(2):
        worker = drive.workers["w0"]
        worker.finish(next(key for key, held in worker.held.items() if held.phase == "running"))
        drive.settle()
    assert [drive.states(f"o{n}", "own") for n in range(3)] == [["RUNNING"], ["RUNNING"], ["QUEUED"]]


def test_a_job_of_processors_alone_counts_by_its_dominant_resource() -> None:
    drive = Driving.with_hosts(4, cpu_milli=40_000, memory_mib=1000)
    drive.order("share", tenant="t", weight=1)
    drive.submit("wide", resources={"cpu_milli": 20_000})
    drive.submit("gpu", gpu={}, resources={"cpu_milli": 1_000}, tenant="u")
    drive.settle()
    assert drive.state.tenants["t"].rate_milli == 2_000  # half of the processors: as two of four GPUs
    assert drive.state.tenants["u"].rate_milli == 1_000
    drive.lead_from_snapshot()
    drive.tick()
    assert drive.state.tenants["t"].rate_milli == 2_000


def test_usage_is_the_same_after_a_fold_and_from_a_snapshot() -> None:
    cluster = Saturated(4)
    drive = cluster.drive
    drive.order("share", tenant="a", weight=2)
    cluster.run(5 * MINUTE, "ab", step=5_000, ends=2)
    used = {name: (row.usage_base, row.rate_milli) for name, row in drive.state.tenants.items()}
    drive.lead()
    assert {name: (row.usage_base, row.rate_milli) for name, row in drive.state.tenants.items()} == used
    drive.lead_from_snapshot()
    assert {name: (row.usage_base, row.rate_milli) for name, row in drive.state.tenants.items()} == used
    cluster.run(MINUTE, "ab", step=5_000, ends=2)


def test_another_half_life_keeps_what_was_used() -> None:
    cluster = Saturated(4)
    cluster.drive.order("share", tenant="a", weight=2)
    cluster.run(5 * MINUTE, "ab", step=5_000, ends=2)
    state = cluster.drive.state
    used = {name: fairshare.usage_milli(state, row) for name, row in state.tenants.items()}
    cluster.drive.config = Config(ended_max=0, fair_share_half_life=7200.0)
    cluster.drive.lead()
    cluster.drive.tick()
    state = cluster.drive.state
    assert state.half_life_ms == 7_200_000
    for name, row in state.tenants.items():
        assert fairshare.usage_milli(state, row) == pytest.approx(used[name], abs=2)


@pytest.mark.slow
def test_the_count_begins_anew_before_numbers_grow_long() -> None:
    cluster = Saturated(4, Config(ended_max=0, fair_share_half_life=10.0))
    cluster.drive.order("share", tenant="a", weight=2)
    cluster.run(HOUR // 4, "ab", step=2_000, ends=2)
    state = cluster.drive.state
    assert (state.time_ms - state.counts_from_ms) // 10_000 <= HALF_LIVES_MAX
    assert cluster.got["a"] / cluster.got["b"] == pytest.approx(2, rel=0.05)
    assert max(row.usage_base.bit_length() for row in state.tenants.values()) < 128


@settings(max_examples=200)
@given(st.integers(0, 10**9), st.integers(0, 10**6), st.integers(10_000, 10**9))
def test_inflation_grows_with_time_and_doubles_in_a_half_life(at: int, more: int, half_life: int) -> None:
    assert inflation(at, half_life) <= inflation(at + more, half_life)
    assert inflation(at + half_life, half_life) == 2 * inflation(at, half_life)
    exact = ONE * 2 ** (at % half_life / half_life)
    assert inflation(at % half_life, half_life) == pytest.approx(exact, rel=1e-6)


def test_rates_are_remembered_up_to_a_bound() -> None:
    """Beyond it they are found again, and are the same."""
    fleet, shapes = Fleet(), Shapes()
    add(fleet, worker(0, ["NVIDIA T4"], 64_000))
    asked = [shapes.of(request(GpuSpec(), 1_000 * cpu)) for cpu in range(40)]
    rates, unbounded = Rates(fleet, known_max=8), Rates(fleet)
    for shape in asked * 2:
        assert rates.of(shape) == unbounded.of(shape)
        assert len(rates._known) <= 8
    assert len(unbounded._known) == 40
