"""Reservations know when they start, and who surely ends before that may use their hosts."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.schedule import plan, runtime, soonest
from moorage.scheduler.core.schedule.runtime import FREED_MS
from tests.unit.scheduler.driving import PATIENCE_MS, Driving


def limited(timeout_s: float | None) -> dict[str, object]:
    return {"driver": "noop", "timeout_s": timeout_s, "grace_s": 1}


def reserved(timeout_s: float | None = 600) -> Driving:
    """One host of eight, four of them leased for `timeout_s`, and a job for eight that is out of patience."""
    drive = Driving.with_hosts(8)
    drive.submit("runs", gpu={"count": 4}, run=limited(timeout_s))
    drive.settle()
    drive.submit("big", gpu={"count": 8})
    drive.pass_time(PATIENCE_MS + 2_000)
    assert drive.engine.planner.verdicts.reservation is not None
    return drive


def test_a_job_that_surely_ends_before_the_reservation_is_backfilled_there() -> None:
    drive = reserved()
    drive.submit("short", gpu={"count": 4}, run=limited(300))
    assert drive.states("short") == ["PLACED"]


def test_a_job_that_might_not_end_in_time_is_not_backfilled() -> None:
    drive = reserved()
    left_s = 600 - (PATIENCE_MS + 2_000) / 1000
    drive.submit("long", gpu={}, run=limited(left_s - FREED_MS / 1000))
    drive.submit("unbound", gpu={})
    assert (drive.states("long"), drive.states("unbound")) == (["QUEUED"], ["QUEUED"])


@pytest.mark.parametrize(("runs", "state"), [(runtime.SAMPLES_SURE - 1, "QUEUED"), (runtime.SAMPLES_SURE, "PLACED")])
def test_a_generous_time_limit_keeps_no_job_out_whose_earlier_runs_were_short(runs: int, state: str) -> None:
    """Without a time limit it was let in, and waited with one."""
    drive = Driving.with_hosts(8)
    for number in range(runs):
        drive.submit(f"before{number}", gpu={"count": 2}, run=limited(50_000))
        drive.settle()
        drive.pass_time(5_000)
        drive.run_out("w0")
    drive.pass_time(2 * runtime.SIBLINGS_MS, step=60_000)
    drive.submit("runs", gpu={"count": 4}, run=limited(600))
    drive.settle()
    drive.submit("big", gpu={"count": 8})
    drive.pass_time(PATIENCE_MS + 2_000)
    drive.submit("long", gpu={"count": 2}, run=limited(50_000))
    assert drive.states("long") == [state]


def test_a_short_job_is_backfilled_behind_a_long_first_job_of_its_queue_group() -> None:
    drive = reserved()
    for name, timeout_s in (("a", None), ("b", 5_000), ("c", 60), ("d", None), ("e", 120)):
        drive.submit(name, gpu={"count": 2}, run=limited(timeout_s))
    assert [drive.states(name)[0] for name in "abcde"] == ["QUEUED", "QUEUED", "PLACED", "QUEUED", "PLACED"]
    drive.settle()
    drive.run_out("w0")
    drive.settle()
    assert drive.states("big") == ["RUNNING"]


def test_a_host_with_a_service_is_reserved_for_no_job_and_idles_for_none() -> None:
    """Nothing tells when a service ends: its host was closed to all other jobs for as long as it ran."""
    drive = Driving.with_hosts(8, 8)
    drive.submit("services", gpu={"count": 5}, replicas=2)
    drive.settle()
    drive.submit("gang", gpu={"count": 8, "scheduling": "gang"}, replicas=2)
    drive.pass_time(PATIENCE_MS + 2_000)
    assert drive.engine.planner.verdicts.reservation is None
    drive.submit("small", gpu={"count": 3}, replicas=2)
    assert drive.states("small") == ["PLACED", "PLACED"]


@pytest.mark.parametrize("stays", [{"service": {"name": "embed"}}, {"run": {"driver": "process", "restart": "always"}}])
def test_what_stays_passes_no_reservation_however_short_other_runs_were(stays: dict[str, Any]) -> None:
    """It took a reserved host for ever, as jobs of its tenant with as many GPUs, and services that were replaced, had
    ended soon; and a host with one was reserved, as if it ended."""
    drive = Driving.with_hosts(8, capabilities={"process": {"answers_calls": True, "reaches": True}})
    run = {"driver": "process", "argv": ["serve"], **stays.get("run", {})}
    for number in range(5):
        drive.submit(f"before-{number}", gpu={}, **{**stays, "run": run} if number < 2 else {})
        drive.settle()
        drive.pass_time(5_000)
        drive.run_out("w0")
        drive.settle()
        drive.pass_time(2_000)
        drive.cancel(f"before-{number}")
        drive.settle()
    drive.submit("runs", gpu={"count": 4}, run=limited(36_000))
    drive.settle()
    drive.submit("big", gpu={"count": 8})
    drive.pass_time(PATIENCE_MS + 2_000)
    assert drive.engine.planner.verdicts.reservation is not None
    drive.submit("stays", gpu={}, **{**stays, "run": run})
    drive.submit("ends", gpu={})
    drive.pass_time(3_000)
    assert (drive.states("stays"), drive.states("ends")) == (["QUEUED"], ["PLACED"])
    drive.submit("bound", gpu={}, **{**stays, "run": {**run, "timeout_s": 5, "grace_s": 1}})
    if "service" not in stays:  # two jobs have one service only while one replaces the other
        drive.pass_time(3_000)
        assert drive.states("bound") == ["PLACED"], "its time limit ends it"


@pytest.mark.parametrize("gpu", [None, {"count": 2}])
@pytest.mark.parametrize("resource", ["cpu_milli", "memory_mib"])
@pytest.mark.parametrize("asked", [6_000, 8_000])
def test_processors_and_memory_are_reserved_from_when_known_ends_free_enough_of_them(
    asked: int, resource: str, gpu: dict[str, Any] | None
) -> None:
    """GPUs are free sooner, or one is, and a service holds 2,000 of the 8,000 for ever."""
    drive = Driving.with_hosts(3, cpu_milli=8_000, memory_mib=8_000)
    drive.submit("service", tenant="v", resources={resource: 2_000})
    drive.submit("soon", run=limited(600), gpu={"count": 2}, resources={resource: 1_000})
    drive.submit("later", run=limited(3_600), resources={resource: 4_000})
    drive.settle()
    drive.submit("big", gpu=gpu, resources={resource: asked})
    drive.pass_time(PATIENCE_MS + 2_000)
    held = drive.engine.planner.verdicts.reservation
    assert (held is not None) == (asked == 6_000)
    assert held is None or (held.start_ms or 0) > drive.now + 3_000_000


def test_processors_that_a_job_leaves_in_this_very_record_count_once() -> None:
    drive = Driving.with_hosts(0, cpu_milli=8_000)
    drive.submit("service", tenant="v", resources={"cpu_milli": 2_000})
    drive.submit("ends", run=limited(3_600), resources={"cpu_milli": 2_000})
    drive.submit("runs", run=limited(3_600), resources={"cpu_milli": 4_000})
    drive.settle()
    drive.submit("big", resources={"cpu_milli": 8_000})
    drive.pass_time(PATIENCE_MS + 2_000)
    worker = drive.workers["w0"]
    worker.finish(next(key for key in worker.held if key[1] == "ends"))
    drive.now += 2_000
    drive.report_all()
    assert drive.engine.planner.verdicts.reservation is None


@pytest.mark.parametrize("known", [True, False])
def test_a_shared_device_is_expected_to_be_free_once_the_last_of_its_sharers_has_ended(known: bool) -> None:
    drive = Driving.with_hosts(1)
    sharer = {"sharing": "mps", "share": {"compute_percent": 40}}
    drive.submit("runs", run=limited(3_600), gpu=sharer)
    drive.submit("service", tenant="v", run=limited(7_200 if known else None), gpu=sharer)
    drive.settle()
    drive.submit("whole", gpu={})
    drive.pass_time(PATIENCE_MS + 2_000)
    held = drive.engine.planner.verdicts.reservation
    assert (held is not None) == known
    assert held is None or (held.start_ms or 0) > drive.now + 7_000_000


def test_shared_devices_are_reserved_where_the_ends_of_all_jobs_are_known() -> None:
    drive = Driving.with_hosts(1)
    sharer = {"sharing": "mps", "share": {"compute_percent": 40}}
    drive.submit("runs", run=limited(3_600), gpu=sharer)
    drive.submit("service", tenant="v", gpu=sharer)
    drive.settle()
    drive.submit("big", gpu={"sharing": "mps", "share": {"compute_percent": 90}})
    drive.pass_time(PATIENCE_MS + 2_000)
    assert drive.engine.planner.verdicts.reservation is None


def test_hosts_with_services_do_not_hide_those_that_will_be_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soonest, "LOOKED_MAX", 2)
    monkeypatch.setattr(soonest, "LOOKED_TIMES", 1)
    drive = Driving.with_hosts(8, 8, 8, 8)
    drive.submit("services", replicas=3, gpu={"count": 5})
    drive.submit("runs", gpu={"count": 8}, run=limited(3_600))
    drive.settle()
    drive.submit("big", gpu={"count": 8})
    drive.pass_time(PATIENCE_MS + 2_000)
    held = drive.reservation
    assert [drive.engine.fleet.hosts[num].worker.id for num in held.hosts] == drive.placed_on("runs")


def test_a_host_whose_end_is_known_is_reserved_before_one_with_a_service() -> None:
    """Though the service began a moment ago, and the other host is free in an hour."""
    drive = Driving.with_hosts(8, 8)
    drive.submit("runs", gpu={"count": 8}, run=limited(3_600))
    drive.settle()
    drive.submit("service", gpu={"count": 2})
    drive.settle()
    drive.submit("big", gpu={"count": 8})
    drive.pass_time(PATIENCE_MS + 2_000)
    held = drive.reservation
    assert [drive.engine.fleet.hosts[num].worker.id for num in held.hosts] == drive.placed_on("runs")


def test_several_jobs_that_come_in_one_tick_are_backfilled_with_the_next() -> None:
    drive = reserved()
    for number in range(4):
        drive.offer_submit(f"s{number}", gpu={}, run=limited(60))
    drive.tick()
    drive.offer_submit("wake", gpu={}, run=limited(60))
    drive.tick()
    assert [drive.states(f"s{number}")[0] for number in range(4)] == ["PLACED"] * 4


def test_a_short_job_that_comes_with_the_record_that_makes_the_reservation_is_backfilled_at_once() -> None:
    """It was in neither the state nor the list of new jobs, and waited beside idle GPUs until something changed."""
    drive = Driving.with_hosts(8)
    drive.submit("runs", gpu={"count": 4}, run=limited(36_000))
    drive.settle()
    drive.submit("big", gpu={"count": 8})
    drive.pass_time(PATIENCE_MS - 500)
    assert drive.engine.planner.verdicts.reservation is None
    drive.offer_submit("short", gpu={"count": 4}, run=limited(60))
    drive.tick(2_000)
    assert drive.engine.planner.verdicts.reservation is not None
    assert drive.states("short") == ["PLACED"]


def test_a_short_job_is_backfilled_behind_many_jobs_of_another_tenant_that_ask_alike() -> None:
    """Only the first entries of a group are tried: it was shared, and another tenant's jobs were all of them."""
    drive = Driving.with_hosts(16)
    drive.submit("runs", gpu={"count": 2}, run=limited(36_000))
    drive.settle()
    drive.submit("big", gpu={"count": 16}, priority=60)
    drive.pass_time(PATIENCE_MS + 2_000)
    for number in range(runtime.DEPTH_MAX + 6):
        drive.offer_submit(f"unbound{number}", tenant="y", gpu={})
    for number in range(5):
        drive.offer_submit(f"short{number}", tenant="z", gpu={}, run=limited(30))
    drive.tick()
    drive.pass_time(2_000)
    assert drive.engine.planner.verdicts.reservation is not None
    assert [drive.states(f"short{number}", "z") for number in range(5)] == [["PLACED"]] * 5
    assert drive.states("unbound0", "y") == ["QUEUED"]


def test_the_hosts_reserved_are_those_that_are_free_first() -> None:
    drive = Driving()
    for index, timeout_s in enumerate((9_000, 200, 5_000, 100)):
        drive.worker(f"w{index}", 8)
        drive.submit(f"r{index}", gpu={"count": 8}, run=limited(timeout_s))
        drive.settle()
    drive.submit("big", gpu={"count": 8, "scheduling": "gang"}, replicas=2)
    drive.pass_time(PATIENCE_MS + 2_000)
    held = drive.reservation
    assert {drive.engine.fleet.hosts[num].worker.id for num in held.hosts} == {"w1", "w3"}


@pytest.mark.parametrize("limits", [True, False])
def test_the_biggest_gang_starts_when_what_ran_has_ended(limits: bool) -> None:
    """Jobs of 40 to 160 s keep four hosts full; a gang of all of them comes."""
    drive = Driving()
    drive.checks = False
    for index in range(4):
        drive.worker(f"w{index}", 4)
    ends: dict[str, int] = {}
    submitted = 0

    def step() -> None:
        nonlocal submitted
        row = drive.state.tenants.get("t")
        for _ in range(24 - (row.live if row is not None else 0)):
            submitted += 1
            seconds = 40 + 37 * submitted % 121
            run = limited(seconds if limits else None)
            drive.offer_submit(f"s{submitted}", gpu={}, run=run, labels={"s": str(seconds)})
        for worker in drive.workers.values():
            drive.send(worker.id, worker.renew_frame())
        drive.tick(1_000)
        drive.settle()
        for worker in drive.workers.values():
            for key, held in list(worker.held.items()):
                if held.phase != "running" or key[1] == "big":
                    continue
                seconds = 40 + 37 * int(key[1][1:]) % 121
                if drive.now >= ends.setdefault(f"{key[1]}.{key[3]}", drive.now + seconds * 1000):
                    worker.finish(key)

    for _ in range(200):
        step()
    remaining = max(at - drive.now for at in ends.values())
    drive.submit("big", gpu={"count": 4, "scheduling": "gang"}, replicas=4)
    began = drive.now
    while drive.states("big")[0] == "QUEUED":
        step()
        assert drive.now - began < 400_000, "the gang starves"
    longest = max(remaining, 160_000)  # of those that start before the reservation stands
    assert drive.now - began <= 1.2 * longest + PATIENCE_MS


@pytest.mark.parametrize("others", [0, 6])
@pytest.mark.parametrize("apart", [False, True])
def test_whole_hosts_go_first_but_not_for_ever(others: int, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of jobs for whole hosts, one always waiting; with others, more shapes wait than are looked at."""
    monkeypatch.setattr(plan, "GROUPS_MAX", 3)
    if apart:
        monkeypatch.setattr(plan, "PASSED_MS", 30_000)
    drive = Driving.with_hosts(8, 8, 8, 8)
    drive.submit("services", gpu={"count": 8}, replicas=2)
    drive.submit("first", gpu={"count": 8}, run=limited(86_400))
    drive.submit("second", gpu={"count": 8}, run=limited(86_400))
    drive.settle()
    drive.submit("half", gpu={"count": 5})
    for number in range(others):
        drive.submit(f"other-{number}", gpu={"count": 7}, resources={"memory_mib": 1 + number})
    order: list[str] = []
    while "RUNNING" not in drive.states("half"):
        drive.submit(f"whole-{len(order)}", gpu={"count": 8}, run=limited(86_400))
        drive.pass_time(PATIENCE_MS + 40_000)
        held = drive.reservation
        order.append(drive.state.jobs[held.num].name)
        (host,) = held.hosts
        drive.run_out(drive.engine.fleet.hosts[host].worker.id)
        drive.settle()
    # after the second it has waited 180 s, and the third 40 s: more than four times as long, and there are four hosts
    assert order == (["whole-0", "half"] if apart else ["whole-0", "whole-1", "half"])


def test_hosts_are_closed_for_a_gang_the_later_the_more_of_the_fleet_it_takes_and_the_longer_it_has_waited() -> None:
    """Two gangs of two of four hosts: the second becomes the first of the queue after 1,000 s."""
    drive = Driving.with_hosts(8, 8, 8, 8)
    for number in range(4):
        drive.submit(f"runs-{number}", gpu={"count": 8}, run=limited(86_400))
    drive.settle()
    for name in ("gang", "next"):
        drive.submit(name, replicas=2, gpu={"count": 8, "scheduling": "gang"})
    drive.pass_time(PATIENCE_MS + 2_000)
    held = drive.engine.planner.verdicts.reservation
    assert held is not None  # it is first at once
    assert drive.state.jobs[held.num].name == "gang"
    drive.pass_time(1_000_000)
    for worker in [drive.engine.fleet.hosts[host].worker.id for host in held.hosts]:
        drive.run_out(worker)
    drive.settle()
    assert "RUNNING" in drive.states("gang")
    drive.pass_time(350_000)
    assert drive.engine.planner.verdicts.reservation is None  # 3/2 of a quarter of 1,000 s
    drive.pass_time(40_000)
    held = drive.reservation
    assert drive.state.jobs[held.num].name == "next"
    assert len(held.hosts) == 2
    drive.lead()
    drive.pass_time(1_500)
    assert drive.engine.planner.verdicts.reservation is not None, "whoever leads now does not let it wait once more"


def test_a_reservation_moves_to_hosts_that_will_be_free_sooner() -> None:
    drive = Driving()
    for name in ("w0", "w1"):
        drive.worker(name, 8)
        drive.submit(f"on-{name}", gpu={"count": 8}, run=limited(4_000 if name == "w0" else 6_000))
        drive.settle()
    drive.submit("big", gpu={"count": 8})
    drive.pass_time(PATIENCE_MS + 2_000)
    held = drive.reservation
    assert [drive.engine.fleet.hosts[num].worker.id for num in held.hosts] == ["w0"]
    drive.submit("short", gpu={"count": 8}, priority=90, run=limited(60))
    drive.cancel("on-w1")
    drive.run_out("w1")
    drive.settle()  # w1 is free, and whoever has the higher priority takes it for a minute
    drive.pass_time(3_000)  # at every look, in a fleet of two
    moved = drive.engine.planner.verdicts.reservation
    where = [drive.engine.fleet.hosts[num].worker.id for num in moved.hosts] if moved is not None else ["started"]
    assert where in (["w1"], ["started"])


@pytest.mark.parametrize(("left_s", "where"), [(120, "w0"), (20, "w1")])
def test_a_host_that_is_idle_in_part_is_left_only_for_one_that_is_free_much_sooner(left_s: int, where: str) -> None:
    """Jobs that outlive their estimates make each host, once it is left, look sooner than the other: to and fro."""
    drive = Driving()
    for name, count, seconds in (("w0", 2, 400), ("w1", 8, left_s + 32)):
        drive.worker(name, 8, labels={"host": name})
        drive.submit(f"on-{name}", gpu={"count": count}, run=limited(seconds), requires={"host": [name]})
        drive.settle()
    drive.submit("big", gpu={"count": 8})
    drive.pass_time(PATIENCE_MS + 2_000)
    held = drive.reservation
    assert [drive.engine.fleet.hosts[num].worker.id for num in held.hosts] == [where]


def test_the_hosts_that_a_reservation_leaves_are_open_to_the_jobs_that_waited_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drive = Driving.with_hosts(8, 8)
    for name in ("one", "two"):
        drive.submit(name, gpu={"count": 5}, run=limited(600))
    drive.settle()
    drive.submit("big", gpu={"count": 8})
    drive.pass_time(PATIENCE_MS + 2_000)
    drive.submit("services", gpu={"count": 3}, replicas=2)
    drive.settle()
    assert sorted(drive.states("services")) == ["QUEUED", "RUNNING"], "one host is reserved"
    held = drive.reservation
    others = frozenset(drive.engine.fleet.hosts) - held.hosts
    monkeypatch.setattr(plan, "soonest", lambda *asked: (others, drive.state.time_ms))  # sooner than its own
    drive.submit("more", gpu={"count": 8})
    drive.pass_time(2_000)
    now = drive.reservation
    assert (now.num, now.hosts) == (held.num, others)
    drive.settle()
    assert drive.states("services") == ["RUNNING", "RUNNING"]


def test_a_job_that_a_reservation_kept_out_is_not_tried_again_while_no_plan_lets_more_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plans are made each second all the same."""
    drive = reserved()
    for number in range(3):
        drive.submit(f"long{number}", gpu={"count": 1 + number}, run=limited(7_200))
    drive.pass_time(2_000)
    backfilling, tried = drive.engine.planner.backfilling, list[int]()
    surely_ends = backfilling._surely_ends

    def asked(shape: Shape, num: int, within_ms: int) -> bool:
        tried.append(num)
        return surely_ends(shape, num, within_ms)

    monkeypatch.setattr(backfilling, "_surely_ends", asked)
    drive.pass_time(60_000)
    assert tried == []
    drive.submit("another", gpu={"count": 1}, run=limited(7_200))
    assert tried == [drive.job("long0").num, drive.job("another").num], "of a group that has one more, and no other"


def test_the_short_ones_in_a_crowd_that_asks_alike_have_their_turn_though_nothing_changes() -> None:
    drive = reserved()
    for number in range(5 * runtime.DEPTH_MAX // 2):
        drive.offer_submit(f"j{number}", gpu={}, run=limited(7_200 if number < 130 or number > 133 else 60))
    drive.tick()
    drive.tick()
    changes, short = drive.engine.fleet.changes, [f"j{number}" for number in range(130, 134)]
    assert [drive.states(name) for name in short] == [["QUEUED"]] * 4, "others have had their turn"
    drive.tick()
    assert drive.engine.fleet.changes == changes
    drive.pass_time(5_000)
    assert "QUEUED" not in [drive.states(name)[0] for name in short]
    assert drive.states("j0") == ["QUEUED"]


def test_a_job_that_a_reservation_kept_out_starts_within_a_second_after_its_short_duration_is_learned() -> None:
    """A run of its kind ends on another host, which has no room for it: its own hosts have not changed."""
    drive = reserved()
    drive.worker("w1", 2)
    kind = {"driver": "noop", "argv": ["kind"], "grace_s": 1}
    drive.submit("first", gpu={"count": 2}, run=kind)
    drive.settle()
    drive.submit("after", gpu={"count": 2}, run=limited(7_200))
    drive.submit("alike", gpu={"count": 4}, run=kind)
    drive.pass_time(10_000)
    assert drive.states("alike") == ["QUEUED"]
    drive.run_out("w1")
    drive.pass_time(1_000)
    assert drive.states("alike") != ["QUEUED"]


def test_a_short_job_is_backfilled_once_the_reservation_turns_out_to_start_later_though_nothing_changes() -> None:
    drive = Driving.with_hosts(8)
    alike = {"gpu": {"count": 4}, "labels": {"workload": "train"}}
    for number in range(3):  # each runs for 40 s: so long is the next one expected to
        drive.submit(f"past{number}", **alike)
        drive.settle()
        drive.pass_time(40_000)
        drive.run_out("w0")
    drive.submit("runs", **alike)
    drive.settle()
    drive.submit("big", gpu={"count": 8})
    drive.pass_time(PATIENCE_MS + 2_000)
    held = drive.reservation
    assert held.start_ms is not None
    assert held.start_ms - drive.now < 20_000
    drive.submit("short", gpu={"count": 2}, run=limited(30))
    drive.pass_time(5_000)
    assert drive.states("short") == ["QUEUED"], "it would not be over by then"
    changes = drive.engine.fleet.changes
    drive.pass_time(40_000)  # "runs" has outlived all that is known of its kind, and may go on as long again
    assert drive.states("short") != ["QUEUED"]
    now = drive.reservation
    assert (now.num, now.hosts) == (held.num, held.hosts), "and nothing else has happened"
    assert drive.engine.fleet.changes == changes


def test_a_job_is_backfilled_once_an_earlier_run_shows_how_long_it_takes_though_no_host_opens() -> None:
    drive = Driving.with_hosts(8)
    drive.worker("w1", 1, model="NVIDIA L4")
    alike = {"labels": {"workload": "train"}, "gpu": {"model": "L4"}}
    drive.submit("runs", tenant="v", gpu={"count": 4, "model": "H100"}, run=limited(36_000))
    drive.submit("first", **alike)
    drive.settle()
    drive.submit("big", tenant="v", gpu={"count": 8, "model": "H100"}, priority=60)
    drive.pass_time(PATIENCE_MS + 2_000)
    assert drive.engine.planner.verdicts.reservation is not None
    drive.submit("next", labels={"workload": "train"}, gpu={"model": "H100"})
    drive.pass_time(20_000)
    assert drive.states("next") == ["QUEUED"], "nobody knows how long it takes"
    drive.run_out("w1")
    drive.pass_time(3_000)
    assert drive.states("next") != ["QUEUED"], "a run of its workload took 52 s, and the reservation starts in hours"


@pytest.mark.parametrize("ageing", [0, 100])
def test_an_overdue_job_of_higher_priority_takes_a_reservation_over_though_nothing_changes(ageing: int) -> None:
    """It waited for an hour beside idle GPUs that were reserved for a job of priority 0."""
    drive = Driving.with_hosts(8, config=Config(ageing=ageing))
    drive.submit("runs", gpu={"count": 4}, run=limited(3_600), priority=0)
    drive.settle()
    drive.submit("low", gpu={"count": 8}, priority=0)
    drive.pass_time(PATIENCE_MS + 2_000)
    held = drive.reservation
    drive.submit("high", gpu={"count": 4}, run=limited(7_200), priority=100)
    drive.submit("same", gpu={"count": 3}, priority=0)
    drive.pass_time(PATIENCE_MS - 2_000)
    assert (drive.states("high"), drive.engine.planner.verdicts.reservation) == (["QUEUED"], held)
    drive.pass_time(4_000)
    assert drive.states("high") != ["QUEUED"]
    assert drive.states("same") == ["QUEUED"]
    drive.pass_time(2_000)
    held = drive.reservation
    assert held.num == drive.job("low").num, "it is the first again"


def test_a_reservation_stays_where_no_hosts_would_be_free_for_the_job_of_higher_priority() -> None:
    drive = Driving.with_hosts(8, 8)
    drive.submit("service", tenant="v", gpu={"count": 4})
    drive.submit("runs", gpu={"count": 8}, run=limited(3_600))
    drive.settle()
    drive.submit("low", gpu={"count": 8}, priority=0)
    drive.pass_time(PATIENCE_MS + 2_000)
    held = drive.reservation
    drive.submit("high", gpu={"count": 8, "scheduling": "gang"}, replicas=2, priority=100)
    drive.pass_time(PATIENCE_MS + 5_000)
    assert drive.engine.planner.verdicts.reservation == held


@pytest.mark.parametrize("after_s", [0, 550])
def test_a_tenant_to_which_more_is_owed_by_and_by_passes_a_reservation_though_nothing_changes(after_s: int) -> None:
    """After 563 s more is owed to b; one that came shortly before is not overdue then, so no plan is for itself."""
    drive = Driving.with_hosts(8, config=Config(fair_share_half_life=600))
    for tenant in "ab":
        drive.order("share", tenant=tenant, weight=1)
    drive.submit("past", tenant="b", gpu={"count": 8})
    drive.settle()
    drive.pass_time(600_000)
    drive.run_out("w0")
    drive.submit("runs", tenant="a", gpu={"count": 4}, run=limited(7_200))
    drive.settle()
    drive.submit("big", tenant="a", gpu={"count": 8})
    drive.pass_time(PATIENCE_MS + 2_000)
    assert drive.engine.planner.verdicts.reservation is not None
    drive.pass_time(1_000 * after_s)
    drive.submit("owed", tenant="b", gpu={"count": 2}, run=limited(20_000))
    drive.pass_time(5_000)
    assert drive.states("owed", "b") == ["QUEUED"], "b has used much more of late"
    waited_s = 0
    while drive.states("owed", "b") == ["QUEUED"]:
        drive.pass_time(1_000)
        waited_s += 1
        # the next look that is due for the start of `big` alone is after 837 s
        assert waited_s < 565 - after_s, "what b has used is long forgotten, and a uses on"


def test_a_job_that_a_drain_keeps_out_stops_no_backfill_of_those_behind_it() -> None:
    drive = Driving.with_hosts(8)
    unbound = {"driver": "noop", "argv": ["learned"], "grace_s": 1}
    for number in range(runtime.SAMPLES_SURE + 1):
        drive.submit(f"l{number}", gpu={"count": 2}, run=unbound)
        drive.settle()
        drive.pass_time(5_000)
        drive.run_out("w0")
    drive.submit("runs", gpu={"count": 4}, run=limited(300))
    drive.settle()
    drive.submit("big", gpu={"count": 8}, run=limited(60))
    drive.pass_time(PATIENCE_MS + 2_000)
    held = drive.reservation
    assert held.start_ms is not None
    assert drive.operate("drain", "w0", from_s=500, for_s=3_600)["changed"]
    drive.submit("probe", gpu={"count": 2}, run=limited(400))
    drive.settle()
    drive.submit("too-long", gpu={"count": 1}, run=limited(400))  # over before the drain, after the reservation
    drive.submit("excluded", gpu={"count": 2}, run=unbound)  # surely over in time, but it has no limit of its own
    assert drive.engine.planner.order.left_too_soon_of(drive.job("excluded").num, drive.state.time_ms)
    drive.submit("short", gpu={"count": 2}, run=limited(60))
    drive.tick()
    assert [drive.states(name)[0] for name in ("too-long", "excluded", "short")] == ["QUEUED", "QUEUED", "PLACED"]


def test_a_new_leader_lets_no_small_job_on_reserved_hosts_as_a_limit_keeps_an_earlier_job_waiting() -> None:
    """Its first plan was for a job that the limit keeps waiting, so that another one took the hosts of the big job."""
    drive = Driving()
    for host, gpus in (("w0", 2), ("w1", 8)):
        drive.worker(host, gpus)
    drive.order("limit", tenant="v", gpus=2)
    drive.submit("limited", tenant="v", run=limited(3_600), gpu={})
    drive.submit("runs", run=limited(600), gpu={"count": 4})
    drive.settle()
    assert [drive.placed_on("limited", tenant="v"), drive.placed_on("runs")] == [["w0"], ["w1"]]
    drive.submit("wide", tenant="v", gpu={"count": 2})
    drive.submit("narrow", tenant="v", gpu={})
    drive.submit("big", gpu={"count": 8})
    drive.pass_time(PATIENCE_MS + 2_000)
    drive.submit("small", gpu={"count": 2})
    drive.lead()
    drive.renew()
    drive.pass_time(2_000)
    held = drive.engine.planner.verdicts.reservation
    assert held is not None
    assert held.num == drive.job("big").num
    assert drive.states("small") == ["QUEUED"]
