"""Hosts that are closed for somebody: not in vain, not for ever, not to whom they were freed for."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.schedule.plan import SHORT_MS
from tests.unit.scheduler.driving import PATIENCE_MS, Driving

GANG = {"scheduling": "gang"}
DAY_S = 86_400


def lasting(seconds: float) -> dict[str, Any]:
    return {"driver": "noop", "timeout_s": seconds, "grace_s": 1}


def held_for(drive: Driving) -> tuple[str, set[str]] | None:
    """The job that hosts are closed for, and which."""
    held = drive.engine.planner.verdicts.reservation
    if held is None:
        return None
    workers = drive.state.worker_by_num
    return drive.state.jobs[held.num].name, {workers[num].id for num in held.hosts}


# ------------------------------------------------------------------------------------------ reservations


def test_gangs_that_came_together_start_at_even_distances() -> None:
    """Each lets others run on for a part of its own wait alone, not of the waits of those before it."""
    drive, started, ends, number = Driving(), dict[int, int](), dict[Any, int](), 0
    drive.checks = False  # each record is, in other tests; hours of them take long
    for index in range(4):
        drive.worker(f"w{index}", 4)
    for _ in range(16):
        drive.offer_submit(f"s{(number := number + 1)}", gpu={}, run=lasting(600))
    drive.tick()
    drive.settle()
    for gang in range(4):
        drive.offer_submit(f"g{gang}", gpu={"count": 4, **GANG}, replicas=4, run=lasting(600))
    began = drive.now
    while len(started) < 4:
        waiting = sum(len(line.jobs) for line in drive.engine.queue.groups.values() if line.shape.together == 1)
        for _ in range(8 - waiting):
            drive.offer_submit(f"s{(number := number + 1)}", gpu={}, run=lasting(600))
        drive.settle()
        drive.pass_time(20_000, step=10_000)
        drive.settle()
        for worker in drive.workers.values():
            for key in [key for key, held in worker.held.items() if held.phase == "running"]:
                if drive.now >= ends.setdefault(key, drive.now + 200_000 + len(ends) * 37 % 17 * 20_000):
                    worker.finish(key)
        for gang in range(4):
            if gang not in started and drive.states(f"g{gang}") != ["QUEUED"] * 4:
                started[gang] = drive.now - began
    gaps = [started[gang] - started[gang - 1] for gang in range(1, 4)]
    assert max(gaps) < 2 * min(gaps)


def test_hosts_that_its_job_must_have_left_by_then_are_not_closed_for_it() -> None:
    drive = Driving.with_hosts(8)
    drive.submit("runs", gpu={"count": 8}, run=lasting(DAY_S))
    drive.settle()
    for index in (1, 2, 3):
        drive.worker(f"w{index}", 8)
        drive.operate("drain", f"w{index}", from_s=12 * 3600.0, within_s=60.0)
    drive.submit("big", gpu={"count": 8}, run=lasting(DAY_S))
    while held_for(drive) is None:
        drive.pass_time(100, step=100)
    assert held_for(drive) == ("big", {"w0"})
    drive.submit("small", gpu={"count": 8}, run=lasting(3_600))
    assert drive.states("small") == ["PLACED"]


def waiting_gang(hosts: int, needed: int) -> Driving:
    """Hosts full of jobs of 20 hours, and a gang that needs so many of them and has had them closed for it at once."""
    drive = Driving()
    for index in range(hosts):
        drive.worker(f"w{index}", 8)
        drive.submit(f"r{index}", gpu={"count": 8}, run=lasting(20 * 3600))
    drive.settle()
    drive.submit("big", gpu={"count": 8, **GANG}, replicas=needed, run=lasting(600))
    drive.pass_time(3 * 3600_000, step=60_000)
    return drive


def test_a_reservation_that_loses_a_host_goes_on_with_another_at_once() -> None:
    drive = waiting_gang(8, 6)
    _, hosts = held_for(drive) or ("", set())
    drive.operate("cordon", min(hosts))
    drive.pass_time(2_000)
    name, others = held_for(drive) or ("", set())
    assert (name, len(others)) == ("big", 6)
    assert others - hosts
    assert min(hosts) not in others


def test_a_moment_without_a_host_undoes_no_reservation_and_a_while_does() -> None:
    drive = waiting_gang(3, 3)
    first = held_for(drive)
    drive.operate("cordon", "w1")
    drive.pass_time(SHORT_MS // 2, step=2_000)
    assert held_for(drive) == first
    drive.operate("uncordon", "w1")
    drive.pass_time(SHORT_MS, step=2_000)
    assert held_for(drive) == first
    drive.operate("cordon", "w1")
    drive.pass_time(SHORT_MS + 4_000, step=2_000)
    assert held_for(drive) is None
    drive.operate("uncordon", "w1")
    drive.pass_time(2_000)
    assert held_for(drive) == first  # it was the first at once, three hours ago, and waits no longer now


@pytest.mark.parametrize("shares", [False, True])
def test_where_tenants_take_turns_nobody_is_let_on(shares: bool) -> None:
    """A gang that became the first after an hour has hosts closed at once only where jobs of several tenants wait."""
    drive = Driving()
    for index in range(4):
        drive.worker(f"w{index}", 8)
        drive.submit(f"r{index}", gpu={"count": 8}, run=lasting(20 * 3600))
    drive.settle()
    for name, asks in (("first", {"gpu": {"count": 8}}), ("gang", {"gpu": {"count": 8, **GANG}, "replicas": 3})):
        drive.submit(name, run=lasting(600), **asks)
    if shares:
        drive.submit("other", tenant="u", priority=1, gpu={"count": 8}, run=lasting(600))
    drive.pass_time(3600_000, step=60_000)
    name, hosts = held_for(drive) or ("", set())
    assert name == "first"
    drive.run_out(min(hosts))
    drive.settle()
    assert drive.placed_on("first") == [min(hosts)]
    drive.pass_time(3_000)
    held = held_for(drive)
    assert (held and held[0]) == ("gang" if shares else None)


# -------------------------------------------------------------------------------------------- preemption

PREEMPTS = Config(preempt_priority=80, preempt_after=60.0)


def full(config: Config = PREEMPTS, *, gpus: int = 4) -> Driving:
    drive = Driving.with_hosts(gpus, config=config)
    for number in range(gpus):
        drive.submit(f"v{number}", gpu={}, run=lasting(3_000))
    drive.settle()
    drive.pass_time(70_000)
    return drive


def test_a_drain_elsewhere_is_no_reason_not_to_preempt() -> None:
    drive = full()
    drive.worker("w1", 1, "NVIDIA T4")
    drive.operate("drain", "w1", from_s=4 * 3600.0, within_s=60.0)
    drive.submit("hi", gpu={"model": "H100"}, priority=90, run=lasting(DAY_S))
    drive.pass_time(3_000)
    drive.settle()
    assert drive.states("hi") == ["RUNNING"]


def test_nobody_ends_on_a_host_that_the_preemptor_may_not_use() -> None:
    drive = full(Config(preempt_priority=80, preempt_after=60.0))
    drive.operate("drain", "w0", from_s=4 * 3600.0, within_s=60.0)
    for name, seconds in (("hi", DAY_S), ("behind", DAY_S)):
        drive.submit(name, gpu={}, priority=90, run=lasting(seconds))
    drive.pass_time(10_000)
    assert [drive.states(f"v{number}") for number in range(4)] == [["RUNNING"]] * 4


def test_who_can_never_be_helped_does_not_use_up_the_searches() -> None:
    drive = full()
    for more in range(3):
        drive.submit(f"never{more}", gpu={"count": 5 + more}, priority=90)
    drive.submit("good", gpu={}, priority=90)
    drive.pass_time(5_000)
    drive.settle()
    assert drive.states("good") == ["RUNNING"]


def test_two_in_one_look_are_not_found_the_same_room() -> None:
    drive = Driving.with_hosts(8, config=PREEMPTS, cpu_milli=64_000)
    for name in ("v1", "v2"):
        drive.submit(name, gpu={"count": 2})
        drive.settle()
    drive.pass_time(70_000)
    drive.offer_submit("a", gpu={"count": 6}, priority=90)
    drive.offer_submit("b", gpu={"count": 6}, priority=90, resources={"cpu_milli": 1_000})
    drive.pass_time(2_000)
    drive.settle()
    running = [name for name in ("v1", "v2", "a", "b") if drive.states(name) == ["RUNNING"]]
    assert (len(running), running[0][0], running[1]) == (2, "v", "a")


def test_what_was_freed_for_its_owner_is_not_reserved_for_the_tenant_it_was_taken_from() -> None:
    """The owner used much before, so no turn lets it pass."""
    drive = Driving(Config(reclaim=True, preempt_after=60.0))
    worker = drive.worker("w0", 8)
    drive.order("share", tenant="own", weight=1, gpus=8)
    drive.order("share", tenant="bor", weight=1, gpus=0)
    drive.submit("earlier", gpu={"count": 8}, tenant="own")
    drive.settle()
    drive.pass_time(3_600_000, step=60_000)
    drive.run_out("w0")
    drive.settle()
    for name in ("one", "two"):
        drive.submit(name, gpu={"count": 4}, tenant="bor", run=lasting(1_000))
    drive.settle()
    drive.pass_time(70_000, step=5_000)
    worker.auto = False
    drive.submit("waits", gpu={"count": 8}, tenant="bor")
    drive.pass_time(PATIENCE_MS - 10_000)
    drive.submit("owner", gpu={"count": 4}, tenant="own")
    drive.pass_time(15_000)
    assert held_for(drive) == ("waits", {"w0"})
    ending = next(key for key in worker.held if drive.states(key[1], "bor") == ["ENDING"])
    worker.auto = True
    worker.finish(ending, -15, "end")
    drive.settle()
    assert drive.states("owner", "own") == ["RUNNING"]


def test_explain_says_that_others_ended_for_whom_a_host_is_kept() -> None:
    drive = Driving(Config(preempt_priority=80, preempt_after=0))
    worker = drive.worker("w0", 4)
    drive.submit("a", gpu={"count": 2})
    drive.settle()
    drive.pass_time(5_000)
    worker.auto = False
    drive.submit("hi", gpu={"count": 4}, priority=90)
    drive.pass_time(2_000)
    drive.submit("late", gpu={"count": 1})
    told = drive.explained("late")
    assert (told["reason"], told["held_by"]) == ("reserved", ["job hi, for which other jobs ended", "reserved: w0"])


# ------------------------------------------------------------------------------------------------ limits


def test_who_can_never_start_keeps_nobody_of_its_tenant_waiting_for_a_limit() -> None:
    drive = Driving()
    worker = drive.worker("w0", 8)
    drive.order("limit", tenant="t", gpus=4)
    drive.submit("never", gpu={"model": "H200", "count": 4})
    for name in ("a", "z"):
        drive.submit(name, gpu={})
    drive.settle()
    worker.finish(next(key for key in worker.held if key[1] == "z"))
    drive.settle()
    for name in ("b", "c"):
        drive.submit(name, gpu={})
    drive.settle()
    assert [drive.states(name) for name in "abc"] == [["RUNNING"]] * 3
    assert drive.explained("never")["reason"] == "model"
    drive.submit("d", gpu={"count": 2})
    told = drive.explained("d")
    assert told["reason"] == "limit"
    assert drive.fixes("d")[0]["say"] == "ask your operator for 5 GPUs"


@pytest.mark.parametrize(("verb", "draining"), [("cordon", False), ("drain", True)])
def test_a_drained_worker_is_told_to_lend_no_more_and_a_cordoned_one_is_not(verb: str, draining: bool) -> None:
    drive = Driving()
    drive.worker("w1", 1)
    drive.operate(verb, "w1")
    assert [answer.get("draining", False) for answer in drive.renew("w1")] == [draining]
