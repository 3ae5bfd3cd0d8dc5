"""Where a worker runs the MPS daemons, a GPU is shared by the jobs of one user: the scheduler places by it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.fleet import fleet as fleets
from tests.unit.scheduler.driving import Driving

RANKERS = ["pack", "fragments", "headroom"]
MPS = {"sharing": "mps", "share": {"compute_percent": 25}}
EACH = {"acme": 0, "beta": 1}


def fleet(users: dict[str, int] | None, gpus: int = 1, ranker: str = "fragments", **more: Any) -> Driving:
    drive = Driving(Config(ranker=ranker))
    drive.worker("w0", gpus, mps_users=users, modes=["exclusive", "mps", "time-slice"], **more)
    return drive


def shares(drive: Driving, tenant: str, job: str, user: str | None = None, **gpu: Any) -> list[str]:
    run = {"driver": "noop"} | ({"user": user} if user else {})
    drive.submit(job, tenant=tenant, gpu=MPS | gpu, run=run)
    drive.settle()
    return drive.states(job, tenant)


@pytest.mark.parametrize("ranker", RANKERS)
def test_jobs_of_two_users_never_meet_on_a_gpu(ranker: str) -> None:
    drive = fleet(EACH, 2, ranker)
    for number in range(4):
        for tenant in EACH:
            assert shares(drive, tenant, f"j{number}") == ["RUNNING"]
    slots = {tenant: {drive.slots(f"j{number}", tenant=tenant)[0] for number in range(4)} for tenant in EACH}
    assert sorted(map(len, slots.values())) == [1, 1]
    assert slots["acme"] != slots["beta"]


@pytest.mark.parametrize("ranker", RANKERS)
def test_a_job_waits_for_the_gpu_as_long_as_jobs_of_another_user_have_it(ranker: str) -> None:
    drive = fleet(EACH, 1, ranker)
    shares(drive, "acme", "a")
    assert shares(drive, "beta", "b") == ["QUEUED"]
    drive.pass_time(60_000)
    assert (drive.states("b", "beta"), drive.replica("b", tenant="beta").attempt_no) == (["QUEUED"], 0), "never placed"
    told = drive.explained("b", "beta")
    assert (told["reason"], "jobs of another user" in told["because"]) == ("busy", True)
    assert shares(drive, "acme", "a2") == ["RUNNING"]
    for job in ("a", "a2"):
        drive.cancel(job, tenant="acme")
    drive.settle()
    assert drive.states("b", "beta") == ["RUNNING"]
    assert shares(drive, "acme", "a3") == ["QUEUED"]


@pytest.mark.parametrize("more", [{"prefer": "pack"}, {"prefer": "spread"}, {"scheduling": "spread"}, {"count": 2}])
def test_no_way_of_asking_leads_round_it(more: dict[str, Any]) -> None:
    drive = fleet(EACH, 2)
    drive.submit("a", tenant="acme", gpu={"sharing": "mps", "count": 2})
    drive.settle()
    assert shares(drive, "beta", "b", **more) == ["QUEUED"]
    assert shares(drive, "acme", "c", **more) == ["RUNNING"]
    assert shares(drive, "beta", "slices", sharing="time-slice") == ["QUEUED"]


def test_a_tenant_that_no_rule_names_is_one_user_with_all_others_or_as_its_request_says() -> None:
    drive = fleet({"acme": 0, "*": 1}, 2)
    assert shares(drive, "acme", "a") == shares(drive, "beta", "b") == shares(drive, "gamma", "c") == ["RUNNING"]
    assert drive.slots("b", tenant="beta") == drive.slots("c", tenant="gamma") != drive.slots("a", tenant="acme")
    drive = fleet({}, 2)
    for job, user in (("a", "alice"), ("b", "bob"), ("c", None)):
        shares(drive, "t", job, user)
    assert drive.slots("a") != drive.slots("b")
    assert drive.states("c") == ["QUEUED"], "the agent's own user is a third one"
    assert shares(drive, "u", "d", "alice") == ["RUNNING"]
    assert drive.slots("d", tenant="u") == drive.slots("a")
    drive = fleet({"*": 0})
    assert [shares(drive, "t", job, user) for job, user in (("a", "alice"), ("b", "bob"))] == [["RUNNING"]] * 2


def test_where_the_daemons_are_an_operators_users_may_meet() -> None:
    drive = fleet(None)
    assert [shares(drive, tenant, "j", tenant) for tenant in EACH] == [["RUNNING"]] * 2


def test_time_slices_are_shared_by_all_users() -> None:
    drive = fleet(EACH)
    found = [shares(drive, tenant, "j", sharing="time-slice", share=None) for tenant in EACH]
    assert found == [["RUNNING"]] * 2


def test_a_worker_that_joins_with_rules_knows_of_what_runs_whose_it_is() -> None:
    """The tenants are named with this very join: the devices of what runs are counted by them at once."""
    drive = fleet(None)
    shares(drive, "acme", "a")
    worker = drive.workers["w0"]
    worker.hello = msgspec.structs.replace(worker.hello, mps_users=EACH)
    assert drive.join(worker)["kind"] == "joined"
    drive.renew("w0")
    assert shares(drive, "beta", "b") == ["QUEUED"]
    assert shares(drive, "acme", "c") == ["RUNNING"]


def test_hosts_that_differ_in_their_users_alone_are_told_apart() -> None:
    drive = fleet(EACH)
    drive.worker("w1", 1, mps_users={"acme": 0, "beta": 0}, modes=["exclusive", "mps", "time-slice"])
    shares(drive, "acme", "a", prefer="pack")
    shares(drive, "acme", "b", prefer="spread")
    assert shares(drive, "beta", "c") == ["RUNNING"]
    assert drive.placed_on("c", "beta") == ["w1"]


def test_of_more_tenants_than_the_fleet_may_name_a_worker_decides_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "NAMED_MAX", 1)
    drive = fleet(EACH)
    assert drive.engine.fleet.named == set()
    assert [shares(drive, tenant, "j") for tenant in EACH] == [["RUNNING"]] * 2
