"""Counters: licences and the like, of which a job takes some while it is on a worker."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.core.events import Order
from moorage.schemas.operate import act_of
from tests.levels import know_next, raise_level
from tests.unit.scheduler.driving import Driving


@pytest.fixture(autouse=True)
def next_level(monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)


def site(**counters: int) -> Driving:
    drive = Driving.with_hosts(4, 4)
    raise_level(drive)
    for name, most in counters.items():
        assert put(drive, name, most)["changed"]
    return drive


def put(drive: Driving, name: str, most: int, per: str = "fleet") -> dict[str, Any]:
    act = act_of("counter", {"name": name, "most": most, "per": per, "by": "ana"})
    drive.engine.offer(Order("counter", act, "counter", True))
    drive.tick()
    return dict(drive.answers.pop("counter"))


def on_workers(drive: Driving, *jobs: str, tenant: str = "t") -> list[bool]:
    return [drive.job(job, tenant).on_workers > 0 for job in jobs]


def test_no_more_are_taken_than_there_are_and_explain_says_who_has_them() -> None:
    drive = site(matlab=3)
    drive.submit("a", uses={"matlab": 2})
    drive.submit("b", tenant="u", uses={"matlab": 1})
    drive.submit("c", uses={"matlab": 1})
    drive.submit("free")
    drive.settle()
    assert on_workers(drive, "a", "c", "free") == [True, False, True]
    told = drive.explained("c")
    assert (told["reason"], told["because"]) == (
        "counter", "matlab: 3 of 3 in use, and this needs 1; by job a, other tenants, 1",
    )  # fmt: skip
    assert drive.fixes("c")[0]["command"] == "moorage admin counter matlab 4"
    worker = next(each for each in drive.workers.values() for name in each.held if name[1] == "b")
    worker.finish(next(name for name in worker.held if name[1] == "b"))
    drive.settle()
    assert on_workers(drive, "c") == [True]


def test_each_replica_takes_its_own_and_a_gang_all_at_once() -> None:
    drive = site(api=5)
    drive.submit("sweep", replicas=9, uses={"api": 2})
    drive.settle()
    assert drive.job("sweep").on_workers == 2
    drive.cancel("sweep")
    drive.settle()
    drive.submit("gang", gpu={"scheduling": "gang"}, replicas=3, uses={"api": 2})
    drive.submit("small", uses={"api": 1})
    drive.settle()
    assert on_workers(drive, "gang", "small") == [False, True]
    put(drive, "api", 7)
    drive.settle()
    assert on_workers(drive, "gang") == [True]


def test_of_each_tenant() -> None:
    drive = site()
    put(drive, "heavy", 1, "tenant")
    for job in ("a", "b"):
        for tenant in ("t", "u"):
            drive.submit(job, tenant=tenant, uses={"heavy": 1})
    drive.settle()
    assert [on_workers(drive, "a", "b", tenant=tenant) for tenant in ("t", "u")] == [[True, False]] * 2
    assert "of tenant t in use" in drive.explained("b")["because"]


@pytest.mark.parametrize("how", ["from the ledger", "from a snapshot"])
def test_a_new_leader_counts_the_same(how: str) -> None:
    drive = site(matlab=2)
    drive.submit("a", uses={"matlab": 2})
    drive.settle()
    drive.lead_from_snapshot() if how == "from a snapshot" else drive.lead()
    drive.renew()
    drive.submit("b", uses={"matlab": 1})
    drive.settle()
    assert on_workers(drive, "a", "b") == [True, False]
    drive.run_out("w0")
    drive.run_out("w1")
    drive.settle()
    assert on_workers(drive, "b") == [True]


def test_what_could_never_be_is_refused_or_waits_as_asked() -> None:
    drive = site(matlab=2)
    for name, count in (("matlab", 3), ("mathlab", 1)):
        refused = drive.submit("j", uses={name: count}, on_no_match="reject")
        assert (refused["code"], refused["field"]) == ("failed-precondition", f"$.uses.{name}")
    drive.submit("j", uses={"mathlab": 1}, on_no_match="wait")
    drive.settle()
    assert drive.explained("j")["because"] == "there is no counter mathlab"
    put(drive, "mathlab", 1)
    drive.settle()
    assert on_workers(drive, "j") == [True]


def test_a_counter_that_is_lowered_or_removed_ends_nothing() -> None:
    drive = site(matlab=2)
    drive.submit("a", uses={"matlab": 2})
    drive.settle()
    assert put(drive, "matlab", 0)["changed"]
    assert not put(drive, "matlab", 0)["changed"]
    drive.submit("b", uses={"matlab": 1})
    drive.settle()
    assert on_workers(drive, "a", "b") == [True, False]
    assert drive.state.used == {"matlab": 2}
