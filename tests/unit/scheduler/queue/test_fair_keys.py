"""Fair keys: users or customers inside a tenant share what it gets, by the GPU time that each has had of late."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.answers import views
from moorage.scheduler.core.ledger import fairkeys
from moorage.schemas.errors import Refused
from tests.levels import know_next, raise_level
from tests.unit.scheduler.driving import PATIENCE_MS, Driving, wire


def site(*gpus: int) -> Driving:
    return Driving.with_hosts(*gpus)


def submit(drive: Driving, key: str, count: int, tenant: str = "t", **fields: Any) -> None:
    for number in range(count):
        name = f"{key or 'none'}-{number}"
        drive.submit(name, tenant=tenant, gpu=fields.get("gpu", {}), **({"fair_key": key} if key else {}))


def running(drive: Driving, tenant: str = "t") -> dict[str, int]:
    """By key, how many attempts run or are placed."""
    found: dict[str, int] = {}
    for attempt in drive.state.attempts():
        if attempt.name[0] == tenant:
            key = attempt.name[1].rpartition("-")[0]
            found[key] = found.get(key, 0) + 1
    return found


def fill(drive: Driving) -> None:
    for host in drive.workers:
        drive.submit(f"fill-{host}", tenant="other", gpu={"count": len(drive.workers[host].hello.gpu_pool)})
    drive.settle()


def empty(drive: Driving, host: str = "w0") -> None:
    """All of a host ends at once."""
    drive.run_out(host)
    drive.settle()


@pytest.mark.parametrize("leads", ["", "lead", "lead_from_snapshot"])
def test_keys_share_what_becomes_free_however_many_jobs_each_has(leads: str) -> None:
    drive = site(8)
    fill(drive)
    submit(drive, "ana", 40)
    submit(drive, "bo", 40)
    submit(drive, "", 10)
    submit(drive, "eve", 1)
    if leads:
        getattr(drive, leads)()
        drive.renew()
    empty(drive)
    assert running(drive) == {"ana": 3, "bo": 2, "none": 2, "eve": 1}


def test_what_a_key_has_had_counts_against_it_across_a_takeover() -> None:
    drive = site(4)
    submit(drive, "ana", 4)
    drive.settle()
    drive.pass_time(600_000, step=10_000)
    submit(drive, "bo", 20)
    submit(drive, "ana2", 0)
    for number in range(4, 24):
        drive.submit(f"ana-{number}", fair_key="ana", gpu={})
    empty(drive)
    assert running(drive) == {"bo": 4}, "ana has had ten minutes of all of it"
    drive.lead_from_snapshot()
    drive.renew()
    drive.pass_time(60_000, step=10_000)
    empty(drive)
    assert running(drive) == {"bo": 4}, "a new leader knows what the jobs in memory have had"


def test_they_are_the_tenants_own_matter() -> None:
    drive = site(8)
    fill(drive)
    submit(drive, "ana", 20)
    submit(drive, "bo", 20)
    submit(drive, "c", 20, tenant="u")
    empty(drive)
    assert (running(drive), running(drive, "u")) == ({"ana": 2, "bo": 2}, {"c": 4})
    [row] = [row for row in wire(views.tenants(drive.engine, drive.term_counts))["tenants"] if row["tenant"] == "t"]
    assert row["fair_keys"] == 2
    assert "ana" not in str(row), "operators see how many, and not who"


def test_each_key_runs_no_more_at_once_than_its_tenant_may(monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)
    drive = site(8)
    raise_level(drive)
    drive.order("limit", running_per_key=2)
    submit(drive, "ana", 5)
    submit(drive, "bo", 1)
    drive.submit("gang-0", fair_key="gang", gpu={"scheduling": "gang"}, replicas=2)
    drive.settle()
    assert running(drive) == {"ana": 2, "bo": 1, "gang": 2}
    told = drive.explained("ana-2")
    assert (told["reason"], told["because"]) == ("limit", "fair key ana of tenant t has 2 of 2 replicas at once")
    assert drive.fixes("ana-2")[0]["command"] == "moorage admin limit --tenant t --running-per-key 3"
    drive.lead_from_snapshot()
    drive.renew()
    assert running(drive)["ana"] == 2
    drive.order("limit", running_per_key=3)
    assert running(drive)["ana"] == 3


def test_a_reservation_is_its_keys_own_and_kept_for_it() -> None:
    drive = site(4)
    drive.submit("runs", gpu={"count": 2}, run={"driver": "noop", "timeout_s": 9_000, "grace_s": 1})
    drive.settle()
    drive.submit("big", fair_key="ana", gpu={"count": 4})
    drive.pass_time(PATIENCE_MS + 2_000)
    assert drive.reservation.owner == "t\x1fana"
    drive.submit("small", fair_key="bo", gpu={})
    assert drive.states("small") == ["QUEUED"]
    drive.lead()
    drive.renew()
    empty(drive)
    assert drive.states("big")[0] in ("PLACED", "RUNNING", "CLAIMED")


def test_keys_beyond_the_bound_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairkeys, "KEYS_MAX", 3)
    drive = site(1)
    fill(drive)
    for key in ("a", "b", "c", "d"):
        submit(drive, key, 1)
    keys = drive.state.tenants["t"].keys
    assert keys is not None
    assert set(keys) == {"a", "b", "c"}
    assert {drive.job(f"{key}-0").fair for key in "abcd"} == {"a", "b", "c", ""}
    drive.cancel("a-0")
    submit(drive, "e", 1)
    assert set(drive.state.tenants["t"].keys or ()) == {"b", "c", "e"}, "one of which nothing is left makes room"


def test_a_record_that_is_taken_back_takes_back_what_keys_use() -> None:
    drive = site(4)
    submit(drive, "ana", 2)
    drive.settle()
    before = dict(drive.state.tenants["t"].keys or {})
    drive.offer_submit("late", fair_key="bo", gpu={})
    draft = drive.engine.build(drive.now + 1, drive.now + 1)
    assert draft is not None
    assert (drive.state.tenants["t"].keys or {}) != before


def test_without_keys_no_job_waits_for_the_limit_of_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)
    drive = Driving.with_hosts(1)
    raise_level(drive)
    drive.order("limit", running_per_key=1)
    drive.submit("gang", gpu={"scheduling": "gang"}, replicas=2)
    drive.settle()
    assert drive.explained("gang")["reason"] != "limit"


@pytest.mark.parametrize("leads", ["", "lead", "lead_from_snapshot"])
def test_keys_share_by_their_weights_which_their_newest_jobs_say(leads: str) -> None:
    drive = site(12)
    fill(drive)
    for number in range(40):
        drive.submit(f"ana-{number}", gpu={}, fair_key="ana", **({"fair_weight": 3} if not number else {}))
        drive.submit(f"bo-{number}", gpu={}, fair_key="bo", **({"fair_weight": 9} if not number else {}))
    drive.submit("bo-last", gpu={}, fair_key="bo", fair_weight=1)
    if leads:
        getattr(drive, leads)()
        drive.renew()
    empty(drive)
    assert running(drive) == {"ana": 9, "bo": 3}
    for _ in range(3):  # what they had counts by their weights, too
        drive.pass_time(60_000, step=10_000)
        empty(drive)
    assert running(drive) == {"ana": 9, "bo": 3}


@pytest.mark.parametrize("fields", [{"fair_weight": 2}, {"fair_key": "ana", "fair_weight": 101}])
def test_a_weight_without_a_key_or_beyond_its_bound_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="fair_weight"):
        site(1).submit("j", **fields)
