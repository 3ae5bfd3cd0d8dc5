"""Attempts that one record placed have one fence. What each says of itself counts for it alone, in every table.

Two tenants have a job of one name, and all replicas run on one worker: two attempts differ in one part of their names.
What is right follows from what each attempt said, which a test keeps by tenant and replica.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.cli.jobs.job_rows import stopped_words
from moorage.scheduler.answers import views
from moorage.scheduler.answers.use import find_use, use_of_job, use_rows
from moorage.schemas.frames import AttemptUse, DeviceUse, Stopped, UseAsked
from moorage.schemas.service import MemberLoad
from tests.unit.scheduler.driving import Driving

TENANTS: Final = ("t", "u")
REPLICAS: Final = 3
#: an attempt, by its tenant and replica
One = tuple[str, int]
EACH: Final = [(tenant, replica) for tenant in TENANTS for replica in range(REPLICAS)]
#: for how long an attempt is still, and what its device does
SAYS = st.tuples(st.sampled_from([0, 59, 60, 200]), st.sampled_from([0, 35, 90]))
CALLS: Final = {"process": {"answers_calls": True}}


def placed_by_one_record(**fields: Any) -> Driving:
    """Job `j` of each tenant: all replicas run, and one record placed them."""
    drive = Driving.with_hosts(len(EACH), capabilities=CALLS)
    fields = {"run": {"driver": "noop"}, "gpu": {}, "replicas": REPLICAS, **fields}
    for tenant in TENANTS:
        drive.offer_submit("j", tenant=tenant, **fields)
    drive.tick()
    drive.settle()
    for tenant in TENANTS:
        assert drive.states("j", tenant)[:REPLICAS] == ["RUNNING"] * REPLICAS
    assert len({drive.attempt("j", replica, tenant).fence for tenant, replica in EACH}) == 1
    drive.events.clear()
    return drive


def say(drive: Driving, said: dict[One, tuple[int, int]]) -> None:
    """The worker's renewal, a second later: for how long each attempt is still, and what its device does."""
    uses = []
    for (tenant, replica), (still_s, percent) in said.items():
        attempt = drive.attempt("j", replica, tenant)
        [slot] = drive.workers["w0"].held[attempt.name].place.slots
        uses.append(AttemptUse(attempt.fence, [DeviceUse(slot, percent, 10 + slot, None)], still_s, *attempt.name[:4]))
    drive.workers["w0"].use = uses
    drive.renew()
    drive.tick(1000)


@given(st.fixed_dictionaries(dict.fromkeys(EACH, SAYS)))
def test_each_has_the_use_that_it_said(said: dict[One, tuple[int, int]]) -> None:
    drive = placed_by_one_record()
    say(drive, said)
    for (tenant, replica), (_, percent) in said.items():
        [row] = use_rows(drive.engine, drive.attempt("j", replica, tenant))
        assert row.percent == percent
        kept = find_use(drive.engine, tenant, UseAsked("j", replica))
        assert (kept.ask.tenant, kept.ask.replica) == (tenant, replica)  # type: ignore[union-attr]
    for tenant in TENANTS:
        of_job = use_of_job(drive.engine, drive.job("j", tenant))
        mine = [percent for (who, _), (_, percent) in said.items() if who == tenant]
        assert of_job is not None
        found = (of_job.devices, of_job.percent_min, of_job.percent_max, of_job.idle)
        assert found == (REPLICAS, min(mine), max(mine), mine.count(0))
    [now] = views.fleet(drive.engine, drive.now).used_now
    idle = sum(percent == 0 for _, percent in said.values())
    assert (now.read, now.idle) == (len(EACH), idle)


@given(st.fixed_dictionaries(dict.fromkeys(EACH, SAYS)))
def test_a_stall_is_reported_of_the_attempt_that_is_still(said: dict[One, tuple[int, int]]) -> None:
    drive = placed_by_one_record(run={"driver": "noop", "stall_s": 60})
    say(drive, said)
    stalled = {one for one, (still_s, _) in said.items() if still_s >= 60}
    assert {
        (event["tenant"], event["stalled"].get("replica", 0)) for event in drive.events if "stalled" in event
    } == stalled
    drive.events.clear()
    say(drive, dict.fromkeys(EACH, (0, 90)))
    moves = {(event["tenant"], event["stalled"].get("replica", 0)) for event in drive.events if "stalled" in event}
    assert moves == stalled, "each is taken back"


@pytest.mark.slow
@given(st.fixed_dictionaries(dict.fromkeys(EACH, SAYS)))
def test_on_stall_end_ends_the_attempt_that_is_still(said: dict[One, tuple[int, int]]) -> None:
    drive = placed_by_one_record(run={"driver": "noop", "stall_s": 60, "on_stall": "end"})
    say(drive, said)
    for (tenant, replica), (still_s, _) in said.items():
        assert drive.states("j", tenant)[replica] == ("ENDING" if still_s >= 60 else "RUNNING")


def test_what_a_worker_says_without_names_counts_for_nothing() -> None:
    drive = placed_by_one_record(run={"driver": "noop", "stall_s": 60, "on_stall": "end"})
    fence = drive.attempt("j").fence
    drive.workers["w0"].use = [AttemptUse(fence, [DeviceUse(0, 0, 10, None)], 200)]
    drive.renew()
    drive.tick(1000)
    for tenant, replica in EACH:
        assert use_rows(drive.engine, drive.attempt("j", replica, tenant)) == []
        assert drive.states("j", tenant)[replica] == "RUNNING"


def test_each_shows_how_many_of_its_own_processes_are_stopped_until_none_is() -> None:
    drive = placed_by_one_record()
    drive.workers["w0"].stopped = [Stopped(*drive.attempt("j", 1, TENANTS[0]).name, 2)]
    drive.renew()
    drive.tick(1000)
    shown: list[Any] = [views.show(drive.engine, tenant, "j") for tenant in TENANTS]
    counts = [row.stopped for each in shown for row in each.replica_states[:REPLICAS]]
    assert counts == [0, 2, *[0] * (len(counts) - 2)]
    assert stopped_words(shown[0]) == "2 processes of replica 1, by a signal such as SIGSTOP"
    drive.workers["w0"].stopped = []
    drive.renew()
    drive.tick(1000)
    shown = [views.show(drive.engine, TENANTS[0], "j")]
    assert stopped_words(shown[0]) == ""


def load_of(drive: Driving, one: One, running: int, waiting: int) -> None:
    """What the member of a service says of itself: it has one place."""
    tenant, replica = one
    attempt = drive.attempt("j", replica, tenant)
    name = attempt.replica.job.name, replica, attempt.fence, attempt.no
    load = MemberLoad(f"{tenant}{replica}", 1, running, waiting, 0, False, 0, 0, 0, 0, 0, 0, *name)
    drive.engine.offer_member_load(tenant, "s", load, drive.now)


def serve(drive: Driving, seconds: int, calls: dict[One, int]) -> None:
    """Each member has so many calls all the time, of which it runs one."""
    for _ in range(seconds):
        for (tenant, replica), count in calls.items():
            if drive.states("j", tenant)[replica] == "RUNNING":
                load_of(drive, (tenant, replica), min(count, 1), max(0, count - 1))
        drive.pass_time(1000)
        drive.settle()


@pytest.mark.parametrize("least", [1, 2, 3])
def test_a_service_grows_while_all_that_one_record_placed_are_busy(least: int) -> None:
    drive = Driving.with_hosts(8, capabilities=CALLS)
    run = {"driver": "process", "argv": ["serve"]}
    drive.submit("j", run=run, gpu={}, replicas={"min": least, "max": 6}, service={"name": "j"})
    drive.settle()
    serve(drive, 10, {("t", replica): 3 for replica in range(least)})
    assert drive.states("j").count("RUNNING") > least


@pytest.mark.parametrize("busy", range(REPLICAS))
def test_the_member_that_ends_is_one_without_calls(busy: int) -> None:
    drive = Driving.with_hosts(REPLICAS, capabilities=CALLS)
    run = {"driver": "process", "argv": ["serve"], "restart": "always"}
    drive.submit("j", run=run, gpu={}, replicas={"min": 1, "max": REPLICAS}, service={"name": "j"})
    drive.settle()
    serve(drive, 30, {("t", replica): 9 for replica in range(REPLICAS)})
    drive.workers["w0"].die()
    drive.join(drive.workers["w0"])
    drive.pass_time(5_000)
    drive.settle()
    assert drive.states("j") == ["RUNNING"] * REPLICAS
    assert len({drive.attempt("j", replica).fence for replica in range(REPLICAS)}) == 1
    seen = []
    for _ in range(700):
        serve(drive, 1, {("t", replica): int(replica == busy) for replica in range(REPLICAS)})
        seen.append(drive.states("j"))
    assert all(states[busy] == "RUNNING" for states in seen)
    assert seen[-1].count("RUNNING") < REPLICAS
