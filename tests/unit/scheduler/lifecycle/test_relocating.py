"""What happens to a member of a service while it moves: records that say more than one thing, cancels, lost hosts."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import pytest

from moorage.scheduler.answers.logs import Kept, find_log
from moorage.scheduler.answers.use import find_use
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import Cancel, Execute
from moorage.scheduler.core.ledger.acts import RelocateAgain
from moorage.schemas.frames import ExecAsked, LogsAsked, UseAsked
from moorage.schemas.job import STATES
from moorage.schemas.ranges import is_in
from tests.levels import know_next, raise_level
from tests.unit.scheduler.honest_worker import HeldAttempt
from tests.unit.scheduler.lifecycle.test_services_stay_up import DOES, READY, WATCHED_S, Site
from tests.unit.scheduler.picture import picture

#: a service that says nothing of being ready serves once it runs
RUNS: Final[dict[str, Any]] = {"run": {name: value for name, value in READY.items() if name != "ready"}}


def state(site: Site, index: int) -> str | None:
    """The state of a replica of `a`; None if it has no such replica."""
    now = site.job("a").state_of(index)
    return None if now is None else STATES[now]


def tick_until(site: Site, index: int, wanted: str) -> None:
    for _ in range(100):
        if state(site, index) == wanted:
            return
        site.tick(100)
    raise AssertionError(f"replica {index} is {state(site, index)}, never {wanted}")


def cancel_replica(site: Site, index: int) -> None:
    site.engine.offer(Cancel("t", "a", "cancelled", replicas=((index, index),)))
    site.tick()


def has_moved(site: Site, to: str) -> bool:
    return site.held_on(to) == 1 and site.job("a").relocating is None


def moving(members: int = 1, **fields: Any) -> Site:
    """A service whose first member moves from `w0` to `w1`, where its replacement runs."""
    site = Site(members, **fields)
    site.join_host("w1", members)
    site.operate("drain", "w0")
    assert site.watch(WATCHED_S, lambda: site.held_on("w1") == 1)
    return site


def leave_in_quarantine(site: Site) -> HeldAttempt:
    """The member that moves ends, and its GPU on `w0`, which says nothing by itself any more, cannot be used."""
    w0 = site.workers["w0"]
    w0.auto = False
    site.watch(WATCHED_S, lambda: state(site, 0) == "CANCELLING")
    [held] = [held for held in w0.held.values() if held.place.replica == 0]
    w0.finish(held.name, -15, "end", freed=False)
    w0.say("quarantined", held.place, 0, str(held.place.slots[0]))
    return held


def test_the_end_of_a_moved_member_may_come_in_a_record_that_looks() -> None:
    site = moving(**RUNS)
    tick_until(site, 0, "CANCELLING")
    site.offer_reports()
    site.tick(1_000)
    assert (state(site, 0), state(site, 1)) == ("CANCELLED", "RUNNING")
    site.watch(3)
    assert site.job("a").numbers == ((1, 1),)


@pytest.mark.parametrize("how", ["cancel", "deadline_s", "max_failed"])
def test_what_ends_a_service_in_the_record_that_would_move_it_ends_all_of_it(how: str) -> None:
    fields: dict[str, Any] = {"deadline_s": {"deadline_s": 60}, "max_failed": {"max_failed": 1}}.get(how, {})
    members = 2 if how == "max_failed" else 1
    run = {**RUNS["run"], "restart": "never"} if how == "max_failed" else RUNS["run"]
    site = Site(members, run=run, **fields)
    site.join_host("w1", members)
    if (deadline_ms := site.job("a").deadline_ms) is not None:
        site.watch(60, lambda: site.now + 2_000 >= deadline_ms)
    site.tick(1)
    site.offer_operate("drain", "w0")
    if how == "cancel":
        site.offer_cancel("a")
    elif how == "max_failed":
        site.workers["w0"].finish(next(iter(site.workers["w0"].held)), 1)
        site.offer_reports()
    site.tick(1_000 if deadline_ms is None else deadline_ms - site.now)
    site.watch(20)
    assert site.job("a").over, site.job("a").counts


def test_a_gpu_in_quarantine_holds_up_no_other_move_and_no_next_version() -> None:
    site = moving(2)
    leave_in_quarantine(site)
    w0 = site.workers["w0"]
    site.watch(3)
    assert (site.state.workers["w0"].quarantined.bit_count(), is_in(site.job("a").numbers, 0)) == (1, False)
    site.lead_from_snapshot()
    site.renew()
    w0.auto = True
    site.watch(WATCHED_S)
    assert (site.serving("a"), len(site.workers["w1"].held), site.job("a").relocating) == (2, 2, None)
    site.operate("release", "w0")
    site.watch(3)
    assert site.job("a").held == 2
    site.take_snapshot()


def test_a_member_that_is_kept_on_a_lost_host_moves_no_more() -> None:
    site = Site(1, on_partition="keep")
    site.operate("drain", "w0")
    site.watch(3)
    assert site.job("a").relocating == (0, 1)
    site.workers["w0"].session = ""
    assert site.watch(300, lambda: state(site, 0) == "LOST_KEPT")
    site.watch(3)
    assert (site.job("a").relocating, site.job("a").numbers) == (None, ((0, 0),))


@pytest.mark.parametrize("gpus", [0, 1], ids=["its replacement waits", "its replacement loads"])
def test_a_cancel_of_one_replica_that_moves_is_for_good(gpus: int) -> None:
    site = Site(2)
    site.join_host("w1", 1)
    if not gpus:
        site.operate("cordon", "w1")
    site.operate("drain", "w0")
    assert site.watch(10, lambda: site.job("a").relocating == (0, 2) and site.held_on("w1") == gpus)
    cancel_replica(site, 0)
    site.watch(10)
    site.operate("uncordon", "w1")
    site.watch(WATCHED_S)
    assert site.job("a").size == 2
    assert site.job("a").counts == {"RUNNING": 1, "CANCELLED": 1}


def test_a_cancel_of_another_replica_changes_nothing_of_the_move() -> None:
    site = moving(2)
    cancel_replica(site, 1)
    site.watch(WATCHED_S)
    assert (site.job("a").numbers, site.job("a").counts) == (((1, 2),), {"RUNNING": 1, "CANCELLED": 1})


@pytest.mark.parametrize("how", ["start_after_s", "held", "fails again and again"])
def test_a_drain_moves_members_while_the_next_version_does_not_take_their_place(how: str) -> None:
    site = Site(1)
    fields: dict[str, Any] = {"start_after_s": {"start_after_s": 36_000}}.get(how, {})
    if how == "fails again and again":
        site.does["b"] = DOES["fails at its start"]
    site.serve("b", instead_of="a", **fields)
    if how == "held":
        site.order("hold", job="b")
    site.watch(WATCHED_S)
    assert site.serving("a") == 1
    site.fewest = 1
    site.join_host("w1", 2)
    site.operate("drain", "w0")
    site.watch(WATCHED_S)
    assert (site.fewest, site.serving("a"), site.held_on("w0")) == (1, 1, 0)


@pytest.mark.parametrize("fields", [{"replicas": 4, "max_running": 2}, {"replicas": {"min": 2, "max": 4}}])
@pytest.mark.parametrize("crashed", [False, True], ids=["", "another one gets the place"])
def test_a_member_moves_where_fewer_run_than_there_are_replicas(crashed: bool, fields: dict[str, Any]) -> None:
    site = Site(2, **fields)
    if crashed:
        site.workers["w0"].finish(next(iter(site.workers["w0"].held)), 1)
        site.settle()
        site.watch(3)
    site.fewest, site.most = site.serving("a"), 0
    site.operate("drain", "w0")
    site.watch(2)
    site.join_host("w1", 3)
    site.watch(WATCHED_S)
    assert (site.held_on("w0"), site.held_on("w1"), site.serving("a")) == (0, 2, 2)
    assert (site.fewest, site.most, site.job("a").size) == (2, 3, 4)


def test_replica_0_of_a_service_of_one_is_the_one_that_moved() -> None:
    site = moving()
    site.watch(WATCHED_S)
    assert site.job("a").numbers == ((1, 1),)
    asks = [find_log(site.engine, "t", LogsAsked("a")), find_use(site.engine, "t", UseAsked("a"))]
    assert [each.ask.replica if isinstance(each, Kept) else each for each in asks] == [1, 1]
    site.engine.offer(Execute("t", ExecAsked("a", ["true"]), "5e55" * 8, "exec", True))
    site.tick()
    assert site.answers["exec"]["data"]["replica"] == 1


@pytest.mark.parametrize("level", [1, 2])
def test_a_number_is_used_again_once_its_row_has_ended_and_its_attempts_go_on(
    level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the next feature level on; below, each replacement has a number that no replica had."""
    if level == 2:
        know_next(monkeypatch)
    site = Site(1)
    if level == 2:
        raise_level(site)
    site.join_host("w1", 1)
    names, last = [site.attempt("a", 0).name], 0
    for leaves, takes in [("w0", "w1"), ("w1", "w0"), ("w0", "w1")]:
        site.operate("uncordon", takes)
        site.operate("drain", leaves)
        assert site.watch(WATCHED_S, partial(has_moved, site, takes))
        ((last, _),) = site.job("a").numbers
        names.append(site.attempt("a", last).name)
    assert [(index, no) for _, _, index, no, _ in names] == (
        [(0, 1), (1, 1), (2, 1), (3, 1)] if level == 1 else [(0, 1), (1, 1), (0, 2), (1, 3)]
    )
    site.lead_from_snapshot()
    assert site.attempt("a", last).name == names[-1]


def test_a_number_whose_devices_are_in_quarantine_is_used_again_only_once_they_are_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    know_next(monkeypatch)
    site = moving(2, **RUNS)
    raise_level(site)
    held = leave_in_quarantine(site)
    w0 = site.workers["w0"]
    site.watch(3)
    w0.auto = True
    site.watch(WATCHED_S)
    assert (site.job("a").numbers, site.job("a").relocating) == (((2, 3),), None)
    del w0.held[held.name]
    site.operate("release", "w0")
    site.operate("uncordon", "w0")
    site.operate("drain", "w1")
    site.watch(WATCHED_S)
    assert (site.job("a").numbers, site.job("a").relocating) == (((0, 1),), None)


def test_a_record_that_uses_a_number_again_and_is_taken_back_leaves_the_state_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    know_next(monkeypatch)
    site = moving(1, **RUNS)
    raise_level(site)
    assert site.watch(WATCHED_S, lambda: site.job("a").numbers == ((1, 1),) and site.job("a").relocating is None)
    job, before = site.job("a"), picture(site.state)
    draft = Draft(site.state, site.now)
    draft.begin()
    draft.pass_time()
    draft.add(RelocateAgain(job.num, 1, 0))
    assert (job.numbers, job.rows[0].attempt_no, job.waits) == (((0, 1),), 1, 1)
    draft.take_back()
    assert picture(site.state) == before
