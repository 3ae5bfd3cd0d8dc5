"""What the fleet lacks, as `admin demand` tells it: which GPUs, for whom, for how long, and whether more hosts help."""

from __future__ import annotations

import msgspec
import pytest

from moorage.scheduler.answers import waiting
from moorage.scheduler.answers.demand import demand
from moorage.scheduler.answers.idle_hosts import IdleHosts
from moorage.scheduler.core.config import Config
from moorage.schemas.answers.operators import Demand
from moorage.schemas.reasons import MORE_HOSTS, REASONS
from tests.unit.scheduler.driving import Driving


def demand_of(drive: Driving, idle: IdleHosts | None = None) -> Demand:
    return demand(drive.engine, idle or IdleHosts(), drive.now)


def rows(drive: Driving) -> list[tuple[str, str, int, int, str, bool]]:
    return [
        (row.tenant, row.shape, row.replicas, row.gpus, row.reason, row.more_hosts_help)
        for row in demand_of(drive).rows
    ]


def test_what_waits_for_room_is_told_by_tenant_and_shape_with_its_gpus_and_for_how_long() -> None:
    drive = Driving.with_hosts(4)
    drive.submit("holds", gpu={"count": 4})
    drive.settle()
    drive.submit("big", gpu={"count": 4, "model": "H100"})
    drive.submit("many", gpu={"count": 2}, replicas=3)
    drive.submit("other", tenant="u", gpu={"count": 1})
    drive.pass_time(10_000)
    found = demand_of(drive)
    assert sorted((row.tenant, row.shape, row.replicas, row.gpus) for row in found.rows) == [
        ("t", "2xany", 3, 6), ("t", "4xH100", 1, 4), ("u", "1xany", 1, 1),
    ]  # fmt: skip
    assert all(row.more_hosts_help for row in found.rows), found.rows
    assert {row.shape: row.models for row in found.rows}["4xH100"] == ["H100"]
    assert (found.gpus, found.largest, found.others) == (11, "4xH100", 0)
    assert all(10_000 <= row.for_ms < 12_000 for row in found.rows)


def test_what_waits_for_a_limit_or_a_hold_waits_with_more_hosts_too() -> None:
    drive = Driving.with_hosts(4)
    drive.order("limit", tenant="t", gpus=1)
    drive.order("hold", tenant="u")
    drive.submit("one", gpu={"count": 1})
    drive.submit("two", gpu={"count": 1})
    drive.submit("held", tenant="u", gpu={"count": 1})
    drive.settle()
    assert [(tenant, reason, helps) for tenant, _, _, _, reason, helps in rows(drive)] == [
        ("t", "limit", False), ("u", "held", False),
    ]  # fmt: skip
    assert demand_of(drive).gpus == 0


def test_what_no_host_could_run_waits_where_the_fleet_grows_by_such_hosts_and_else_is_refused() -> None:
    drive = Driving.with_hosts(1, config=Config(growing=("8xB200", "4xH100")))
    wanted = {"on_no_match": "reject"}
    drive.settle()
    drive.submit("new", gpu={"count": 8, "model": "B200"}, **wanted)
    drive.submit("more", gpu={"count": 3, "model": "H100"}, **wanted)
    drive.settle()
    assert [drive.states(name) for name in ("new", "more")] == [["QUEUED"], ["QUEUED"]]
    assert {shape: helps for _, shape, _, _, _, helps in rows(drive)} == {"8xB200": True, "3xH100": True}
    assert demand_of(drive).largest == "8xB200"
    drive.worker("w9", 4)
    drive.settle()
    assert drive.states("more") == ["RUNNING"], "a host of the shape has come"


@pytest.mark.parametrize("gpu", [{"count": 9, "model": "B200"}, {"count": 5, "model": "H100"}, {"model": "A10"}])
def test_what_no_host_of_the_growing_shapes_could_run_is_refused_as_ever(gpu: dict[str, object]) -> None:
    drive = Driving.with_hosts(1, config=Config(growing=("8xB200", "4xH100")))
    drive.settle()
    drive.submit("never", gpu=gpu, on_no_match="reject")
    drive.settle()
    assert drive.state.job("t", "never") is None


def test_a_host_is_idle_since_a_leader_sees_it_so_and_no_more_once_something_runs_there() -> None:
    drive, idle = Driving.with_hosts(1, labels={"pool": "spot"}), IdleHosts()
    drive.worker("w1")
    drive.renew()
    idle.look(drive.engine, drive.now)
    drive.pass_time(60_000)
    idle.look(drive.engine, drive.now)
    told = demand_of(drive, idle).idle
    assert [(row.worker, row.pool) for row in told] == [("w0", "spot"), ("w1", "")]
    assert all(row.idle_ms >= 60_000 for row in told)
    drive.submit("a", gpu={"count": 1}, requires={"pool": ["spot"]})
    drive.settle()
    assert [row.worker for row in demand_of(drive, idle).idle] == ["w1"]


def test_each_reason_that_more_hosts_cure_is_one_of_the_table() -> None:
    assert set(REASONS) >= MORE_HOSTS
    assert not any(REASONS[name].more_hosts for name in ("limit", "held", "after", "model", "max-running"))


@pytest.mark.parametrize("shape", ["lots", "2x8xH100", "8", "8xH100|A100"])
def test_a_shape_that_is_no_host_is_refused(shape: str) -> None:
    with pytest.raises(ValueError, match="growing has shapes of hosts"):
        Config(growing=(shape,))


def test_what_was_not_looked_at_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Driving.with_hosts(1)
    for count in range(2, 6):
        drive.submit(f"j{count}", gpu={"count": count, "model": "H100"})
    drive.settle()
    monkeypatch.setattr(waiting, "GROUPS_MAX", 1)
    found = demand_of(drive)
    assert (len(found.rows), found.others) == (1, 3)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Demand) == found
