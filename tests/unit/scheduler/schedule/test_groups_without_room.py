"""Lines that found no room are looked at again only where a host that opened since has some: the same placements."""

from __future__ import annotations

import random
from typing import Any, Final

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.queue.queue import Group
from moorage.scheduler.core.rank.ranker import Choice
from moorage.scheduler.core.schedule.cycle import Ready, Served
from tests.turns import turns
from tests.unit.scheduler.driving import H100, Driving

A100: Final = "NVIDIA A100-SXM4-80GB"
#: what runs so is waited for at a limit
ENDS: Final = {"driver": "noop", "timeout_s": 3_600}
ASKS: Final[list[dict[str, Any]]] = [
    {"gpu": {"count": 1}},
    {"gpu": {"count": 1}, "run": {"driver": "noop", "timeout_s": 20}},
    {"gpu": {"count": 2}, "run": {"driver": "noop", "timeout_s": 5}},
    {"gpu": {"count": 2}},
    {"gpu": {"count": 4}},
    {"gpu": {"count": 1, "model": "A100"}},
    {"gpu": {"count": 1}, "resources": {"cpu_milli": 9_000}},
    {"resources": {"cpu_milli": 12_000}},
    {"gpu": {"sharing": "mps", "share": {"memory_mib": 30_000}}},
    {"gpu": {"sharing": "time-slice"}},
    {"gpu": {"count": 2, "scheduling": "gang"}, "replicas": 3},
    {"gpu": {"count": 1, "scheduling": "spread"}, "replicas": 3},
    {"gpu": {"count": 2}, "priority": 80},
    {"gpu": {"count": 1}, "requires": {"zone": ["b"]}},
]


class Looking:
    """One run of a seed, with the shortcut or without."""

    def __init__(self, seed: int, config: Config, *, shortcut: bool, tenants: int = 1) -> None:
        self.rng = random.Random(seed)
        self.tenants = ["t", *(f"t{number}" for number in range(1, tenants))]
        self.drive = drive = Driving(config)
        self.jobs: list[tuple[str, str]] = []
        for number in range(5):
            models = [A100 if number % 2 else H100] * 4
            labels = {"zone": "ab"[number % 2]}
            drive.worker(f"w{number}", models=models, cpu_milli=20_000, memory_mib=64_000, labels=labels)
        if not shortcut:
            vars(drive.engine.planner.verdicts).update(finds_none=_never, is_like_full=_never, holds=_never)

    def step(self) -> None:
        rng, drive = self.rng, self.drive
        act = rng.choice(["submit", "submit", "submit", "end", "end", "cancel", "load", "flag", "limit", "time"])
        worker = f"w{rng.randrange(5)}"
        if act == "submit":
            name, tenant = f"j{len(self.jobs)}", self.tenants[len(self.jobs) * 7 % len(self.tenants)]
            self.jobs.append((name, tenant))
            drive.submit(name, tenant=tenant, **rng.choice(ASKS))
        elif act == "end":
            running = [key for key, held in drive.workers[worker].held.items() if held.phase == "running"]
            for key in rng.sample(running, min(len(running), rng.randrange(1, 4))):
                drive.workers[worker].finish(key, 0)
            drive.settle()
        elif act == "cancel" and self.jobs:
            name, tenant = rng.choice(self.jobs)
            drive.cancel(name, tenant=tenant)
        elif act == "load":
            drive.load(worker, **({"gpu0": "xid"} if rng.random() < 0.5 else {}))
        elif act == "flag":
            drive.operate(rng.choice(["cordon", "uncordon", "uncordon"]), worker)
        elif act == "limit":
            drive.order("limit", gpus=rng.choice([0, 0, 6, 12]))
        elif act == "time":
            drive.pass_time(rng.choice([1_000, 5_000, 90_000]), step=5_000)
        drive.settle()


def _never(*given: object) -> bool:
    return False


# the last seeds: tenants to which more was owed by and by than to the one with the reservation
@pytest.mark.parametrize("seed", turns([*range(22), 99, 1_072], often=2, more=6))
@pytest.mark.parametrize("order", ["fair", "shared", "tenants", "reclaimed"])
def test_the_same_placements_as_where_every_line_is_looked_at(seed: int, order: str) -> None:
    config = Config(
        ranker="pack", reserve_after=30, reclaim=order == "reclaimed",
        preempt_priority=80 if order == "reclaimed" else 101, preempt_after=1,
    )  # fmt: skip
    tenants = 6 if order in ("tenants", "reclaimed") else 1
    short, full = (Looking(seed, config, shortcut=shortcut, tenants=tenants) for shortcut in (True, False))
    if order != "fair":
        for each in (short, full):
            each.drive.order("share", tenant="t", weight=2)
            if tenants > 1:
                each.drive.order("share", tenant="t3", gpus=4)
    for _ in range(60):
        short.step()
        full.step()
        assert short.drive.state.digest == full.drive.state.digest
    assert short.jobs == full.jobs


def test_a_jobs_end_is_no_look_at_the_fleet_for_whoever_it_does_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Driving(Config(ranker="pack"))
    for number in range(4):
        drive.worker(f"w{number}", 4, cpu_milli=64_000)
        drive.submit(f"two{number}", gpu={"count": 2}, replicas=2)
    drive.settle()
    for number in range(200):
        drive.submit(f"all{number}", gpu={"count": 4}, resources={"cpu_milli": 1_000 + number})
    drive.submit("one", gpu={"count": 1}, resources={"cpu_milli": 500})
    looked: list[Shape] = []
    choose = drive.engine.planner.placing.ranker.choose

    def counted(fleet: Fleet, shape: Shape, avoid: dict[int, int], excluded: frozenset[int]) -> Choice | None:
        looked.append(shape)
        return choose(fleet, shape, avoid, excluded)

    monkeypatch.setattr(drive.engine.planner.placing.ranker, "choose", counted)
    first = next(key for key in drive.workers["w0"].held if key[2] == 0)
    drive.workers["w0"].finish(first, 0)
    drive.settle()
    assert drive.states("one") == ["RUNNING"]
    assert {shape.count for shape in looked} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("reserved", [False, True])
def test_one_of_many_tenants_that_wait_for_the_same_is_a_turn_of_one(
    reserved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not of them all: each turn took some 7 µs."""
    drive = Driving.with_hosts(4, config=Config(ranker="pack"))
    drive.order("share", tenant="t0", weight=2)
    for number in range(4):
        drive.submit(f"runs{number}", gpu={"count": 1}, run={"driver": "noop", "timeout_s": 3_600})
    drive.settle()
    for number in range(300):
        drive.submit(f"waits{number}", tenant=f"t{number}", gpu={"count": 1})
    if reserved:
        drive.pass_time(40_000, step=5_000)
    assert (drive.engine.planner.verdicts.reservation is not None) == reserved
    turns: list[Group] = []
    serve = drive.engine.planner._serve

    def counted(draft: Draft, group: Group, ready: list[Ready]) -> Served:
        turns.append(group)
        return serve(draft, group, ready)

    monkeypatch.setattr(drive.engine.planner, "_serve", counted)
    drive.workers["w0"].finish(next(iter(drive.workers["w0"].held)), 0)
    drive.settle()
    assert drive.states("waits0", tenant="t0") == ["RUNNING"]
    assert len(turns) == 2, "who gets it, and whoever finds none then for all the others"
    turns.clear()
    drive.submit("late", tenant="t7", gpu={"count": 1})
    drive.submit("larger", tenant="t8", gpu={"count": 2})
    assert [group.shape.count for group in turns] == [2], "nothing has opened for the others"


def test_who_ends_in_time_is_filled_in_behind_another_tenant_that_asks_alike_and_may_not_be() -> None:
    drive = Driving.with_hosts(4, config=Config(ranker="pack"))
    drive.order("share", tenant="t", weight=2)
    drive.submit("runs", gpu={"count": 3}, run={"driver": "noop", "timeout_s": 600})
    drive.settle()
    drive.submit("whole", tenant="big", gpu={"count": 4})
    drive.pass_time(40_000, step=5_000)
    assert drive.engine.planner.verdicts.reservation is not None
    drive.offer_submit("long", tenant="t1", gpu={"count": 1})
    drive.offer_submit("short", tenant="t2", gpu={"count": 1}, run={"driver": "noop", "timeout_s": 20})
    drive.tick()
    drive.settle()
    assert drive.states("long", tenant="t1") == ["QUEUED"]
    assert drive.states("short", tenant="t2") == ["RUNNING"]


def test_who_waits_for_its_tenants_limit_keeps_its_place_behind_another_that_asks_alike() -> None:
    drive = Driving.with_hosts(4, config=Config(ranker="pack"))
    drive.order("share", tenant="t", weight=2)
    drive.order("limit", tenant="t", gpus=4)
    drive.submit("runs", gpu={"count": 3}, run=ENDS)
    drive.settle()
    drive.offer_submit("other", tenant="t2", gpu={"count": 2})
    drive.offer_submit("over", gpu={"count": 2})
    drive.offer_submit("behind", gpu={"count": 1})
    drive.tick()
    drive.settle()
    assert drive.states("behind") == ["QUEUED"], "it would keep the one before it from ever having two"


def test_a_job_that_found_no_room_and_is_over_its_tenants_limit_by_now_keeps_its_place() -> None:
    """The tenant's smaller jobs must not take its last GPUs one by one, and keep the first from ever having two."""
    drive = Driving.with_hosts(4, config=Config(ranker="pack"))
    drive.order("limit", tenant="t", gpus=3)
    drive.submit("runs", gpu={"count": 1}, run=ENDS)
    for number in range(3):
        drive.submit(f"other{number}", tenant="u", gpu={"count": 1})
    drive.settle()
    drive.submit("two", gpu={"count": 2})
    drive.submit("small", gpu={"count": 1}, run=ENDS)
    _finish(drive, "other0")
    assert drive.states("small") == ["RUNNING"], "the limit has room for both, the fleet for one"
    drive.submit("behind", gpu={"count": 1})
    _finish(drive, "other1")
    assert drive.states("two") == drive.states("behind") == ["QUEUED"]
    _finish(drive, "small")
    assert drive.states("two") == ["RUNNING"]


def test_a_tenant_to_which_more_is_owed_by_an_end_of_its_own_goes_before_the_job_that_hosts_are_held_for() -> None:
    """Within a second of the last scan, and though the hosts that have opened since are no help to it."""
    drive = Driving(Config(ranker="pack", reserve_after=30))
    for name, model in (("w0", H100), ("w1", A100), ("w2", "NVIDIA L40S"), ("w3", "NVIDIA A10")):
        drive.worker(name, models=[model] * 4)
    drive.order("share", tenant="t", weight=1)
    for tenant, name, count, model, timeout_s in (
        ("v", "other", 2, "H100", 36_000), ("v", "ends", 2, "A100", 3_600), ("v", "stays", 2, "A100", 36_000),
        ("big", "small", 1, "A10", 36_000),
    ):  # fmt: skip
        run = {"driver": "noop", "timeout_s": timeout_s}
        drive.submit(name, tenant=tenant, gpu={"count": count, "model": model}, run=run)
    drive.submit("whole", tenant="big", gpu={"count": 4, "model": "H100"})
    drive.settle()
    drive.pass_time(40_000, step=5_000)
    drive.submit("mine", gpu={"count": 4, "model": "L40S"})
    drive.settle()
    drive.submit("first", gpu={"count": 2, "model": "H100"})
    assert drive.reservation.hosts == {0}
    assert drive.states("first") == ["QUEUED"]
    _end(drive, "w2", "mine")
    drive.settle()
    assert drive.states("first") == ["RUNNING"]
    assert drive.states("whole", tenant="big") == ["QUEUED"]


def _end(drive: Driving, name: str, job: str) -> None:
    """The one replica of a job on a host ends; the scheduler has yet to hear of it."""
    worker = drive.workers[name]
    worker.finish(next(key for key in worker.held if key[1] == job), 0)


def _finish(drive: Driving, name: str) -> None:
    """The one replica of a job on the one host ends."""
    _end(drive, "w0", name)
    drive.settle()
