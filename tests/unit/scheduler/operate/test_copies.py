"""`change` with another number of replicas: more begin, and of too many those that wait go first, in place."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.core.events import ChangeOrder
from moorage.scheduler.core.ledger.acts import Replicas
from moorage.schemas.operate import ChangeAsked
from moorage.schemas.service import Scale
from tests.levels import know_next, raise_level
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.lifecycle.test_services_stay_up import WATCHED_S, Site


@pytest.fixture(autouse=True)
def _next_level(monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)


def change(drive: Driving, replicas: int | Scale, job: str = "a", **fields: Any) -> dict[str, Any]:
    drive.engine.offer(ChangeOrder("t", ChangeAsked(job=job, replicas=replicas, **fields), "changed", True))
    drive.tick()
    answer: dict[str, Any] = drive.answers["changed"]
    return answer


def plain(gpus: int, replicas: int, **fields: Any) -> Driving:
    drive = Driving()
    drive.worker("w0", gpus)
    raise_level(drive)
    drive.submit("a", **{"gpu": {}, "replicas": replicas, **fields})
    drive.settle()
    return drive


def members(drive: Driving, job: str = "a") -> dict[int, str]:
    return {replica.index: state for replica, state in zip(drive.job(job).replicas, drive.states(job), strict=True)}


def site(count: int, **fields: Any) -> Site:
    found = Site(count, **fields)
    raise_level(found)
    return found


def test_more_replicas_begin_and_have_the_next_numbers() -> None:
    drive = plain(4, 2)
    assert change(drive, 5, reason="it is late")["data"]["replicas"] == 5
    drive.settle()
    assert members(drive) == {0: "RUNNING", 1: "RUNNING", 2: "RUNNING", 3: "RUNNING", 4: "QUEUED"}
    assert change(drive, 5)["data"]["changed"] is False
    told = drive.job("a").history
    assert [row[8] for row in told if row[8].startswith("replicas")] == ["replicas 5: it is late"]


def test_of_too_many_the_last_ones_that_wait_go_first() -> None:
    drive = plain(2, 6)
    change(drive, 4)
    assert members(drive) == {0: "RUNNING", 1: "RUNNING", 2: "QUEUED", 3: "QUEUED"}
    change(drive, 1)
    assert drive.job("a").live == 2, "of those that run one is asked to end"
    drive.settle()
    assert members(drive) == {0: "RUNNING"}
    for worker in drive.workers.values():
        for name in list(worker.held):
            worker.finish(name, 0)
    drive.settle()
    assert drive.job("a").state == "SUCCEEDED", "what was taken away is no failure"


def test_one_that_came_back_and_waits_goes_before_one_that_runs() -> None:
    drive = plain(2, 2, retries=1)
    [first, _] = sorted(drive.workers["w0"].held)
    drive.workers["w0"].finish(first, 1)
    drive.settle()
    assert members(drive) == {0: "QUEUED", 1: "RUNNING"}
    change(drive, 1)
    drive.settle()
    assert members(drive) == {1: "RUNNING"}


def test_one_of_one_becomes_several_and_is_one_again() -> None:
    drive = plain(3, 1)
    change(drive, 3)
    drive.settle()
    assert members(drive) == {0: "RUNNING", 1: "RUNNING", 2: "RUNNING"}
    change(drive, 1)
    drive.settle()
    change(drive, 2)
    drive.settle()
    assert members(drive) == {0: "RUNNING", 3: "RUNNING"}, "a number is not given twice"


def test_what_has_ended_stays() -> None:
    drive = plain(2, 4)
    for name in list(drive.workers["w0"].held):
        drive.workers["w0"].finish(name, 0)
    drive.settle()
    refused = change(drive, 1)
    assert (refused["code"], refused["allowed"]) == ("failed-precondition", "2..1000000")
    change(drive, 2)
    drive.settle()
    assert drive.job("a").state == "SUCCEEDED"


@pytest.mark.parametrize("how", ["from a snapshot", "from the ledger"])
def test_a_new_leader_goes_on_with_it(how: str) -> None:
    drive = plain(2, 2)
    drive.workers["w0"].auto = False
    change(drive, 1)
    change(drive, 3)
    for worker in drive.workers.values():
        worker.auto = True
    drive.lead_from_snapshot() if how == "from a snapshot" else drive.lead()
    drive.renew()
    drive.settle()
    drive.pass_time(3_000)
    drive.settle()
    assert members(drive) == {0: "RUNNING", 2: "RUNNING", 3: "QUEUED"}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"gpu": {"scheduling": "gang"}, "replicas": 2}, "ranks of a gang"),
        ({"run": {"argv": ["{item}"], "items": ["a", "b"]}, "replicas": 2}, "has an item"),
    ],
)
def test_what_keeps_its_number_is_refused(fields: dict[str, Any], why: str) -> None:
    drive = plain(4, **fields)
    refused = change(drive, 3)
    assert (refused["code"], refused["field"]) == ("failed-precondition", "$.replicas")
    assert why in refused["message"]


def test_only_a_service_follows_calls() -> None:
    assert change(plain(1, 1), Scale(max=2))["code"] == "invalid-argument"


def test_below_its_level_it_is_refused_with_what_to_do() -> None:
    drive = Driving()
    drive.submit("a")
    refused = change(drive, 2)
    assert (refused["code"], refused["next"].split(":")[1].strip()) == (
        "failed-precondition",
        "moorage admin feature-level",
    )
    assert not any(isinstance(act, Replicas) for act in drive.engine.state.jobs[1].history)


def test_a_service_grows_and_shrinks_in_place() -> None:
    found = site(2)
    found.join_host("w1", 4)
    change(found, 5)
    assert found.watch(WATCHED_S, lambda: found.serving("a") == 5)
    change(found, 3)
    found.fewest = 5
    found.watch(WATCHED_S)
    assert (found.serving("a"), found.fewest, found.job("a").size) == (3, 3, 3)
    found.operate("drain", "w0")
    found.watch(WATCHED_S)
    assert (found.held_on("w0"), found.fewest, found.job("a").size) == (0, 3, 3)


def test_a_service_gets_bounds_that_follow_its_calls_and_a_number_again() -> None:
    found = site(3)
    found.join_host("w1", 4)
    assert change(found, Scale(min=2, max=6))["data"]["replicas"] == {"min": 2, "max": 6}
    found.watch(3)
    assert found.serving("a") == 3, "as many as before, until its calls need fewer"
    change(found, Scale(min=4, max=6))
    assert found.watch(WATCHED_S, lambda: found.serving("a") == 4)
    change(found, 5)
    assert found.watch(WATCHED_S, lambda: found.serving("a") == 5)
    found.watch(2 * WATCHED_S)
    assert (found.serving("a"), found.job("a").size) == (5, 5)


def test_a_service_that_its_next_version_replaces_is_replaced_with_as_many_as_are_asked_for() -> None:
    found = site(2)
    found.join_host("w1", 6)
    found.serve("b", replicas=2, max_running=1, instead_of="a")
    found.watch(20)
    assert (found.serving("a"), found.serving("b")) == (1, 1)
    change(found, 4)
    found.watch(20)
    assert (found.serving("a"), found.serving("b"), found.fewest) == (3, 1, 2)
    found.cancel("b")
    assert found.watch(WATCHED_S, lambda: found.serving("a") == 4)


def test_a_service_that_has_lent_more_places_than_it_is_to_have_has_as_many_in_the_end() -> None:
    found = site(4)
    found.join_host("w1", 6)
    found.serve("b", replicas=4, max_running=3, instead_of="a")
    found.watch(20)
    assert (found.serving("a"), found.serving("b")) == (1, 3)
    assert change(found, 1)["kind"] == "answer"
    found.watch(20)
    assert (found.serving("a") + found.serving("b")) >= 3
    found.cancel("b")
    assert found.watch(WATCHED_S, lambda: found.serving("b") == 0)
    assert found.watch(WATCHED_S, lambda: found.serving("a") == 1)
    assert found.job("a").live == 1


@pytest.mark.parametrize("when", ["its replacement begins", "it has moved"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_change_while_a_member_moves_counts_the_one_that_goes_no_more(count: int, when: str) -> None:
    found = site(1)
    found.join_host("w1", 2)
    found.join_host("w2", 2)
    found.operate("drain", "w0")
    moved = when == "it has moved"
    assert found.watch(WATCHED_S, lambda: found.job("a").has_moved if moved else bool(found.job("a").relocating))
    assert change(found, count)["kind"] == "answer"
    found.watch(WATCHED_S)
    assert (found.serving("a"), found.held_on("w0"), len(members(found))) == (count, 0, count)
