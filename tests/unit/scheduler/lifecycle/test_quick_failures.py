"""Hosts that eat jobs: worlds in which every job fails at once there, and healthy ones in which tenants' code fails."""

from __future__ import annotations

from random import Random

import pytest

from moorage.scheduler.answers.views import fleet as fleet_answer
from moorage.scheduler.core.lifecycle.quick_failures import MARKED_MS
from moorage.schemas.answers.fleet import WorkerInfo
from moorage.schemas.reasons import JOBS_FAIL, STARTS_FAIL
from tests.levels import know_next, raise_level
from tests.unit.scheduler.driving import Driving

OVER = {"SUCCEEDED", "FAILED", "CANCELLED", "TIMED_OUT", "EXPIRED", "REJECTED"}


def row(drive: Driving, name: str) -> WorkerInfo:
    return next(each for each in fleet_answer(drive.engine, drive.now).workers if each.worker == name)


class World:
    """Hosts of which some eat every job: it fails after `quick_ms`; on others healthy code runs for its time."""

    def __init__(self, drive: Driving, eats: set[str], quick_ms: int = 1_000) -> None:
        self.drive, self.eats, self.quick_ms = drive, eats, quick_ms
        self.runs_ms: dict[str, int] = {}
        self.broken: set[str] = set()
        self.since: dict[tuple[str, object], int] = {}
        self.ran = dict.fromkeys(drive.workers, 0)

    def submit(self, job: str, runs_ms: int, **fields: object) -> None:
        self.runs_ms[job] = runs_ms
        self.drive.submit(job, gpu={}, **fields)

    def step(self, ms: int = 1_000) -> None:
        drive = self.drive
        drive.settle(3)
        for name, worker in drive.workers.items():
            for key, held in list(worker.held.items()):
                if held.phase != "running":
                    continue
                begun = self.since.setdefault((name, key), drive.now)
                fails = name in self.eats or held.place.job in self.broken
                if drive.now - begun >= (self.quick_ms if fails else self.runs_ms[held.place.job]):
                    self.ran[name] += 1
                    worker.finish(key, 1 if fails else 0)
        drive.report_all()
        drive.pass_time(ms, step=ms)

    def until_over(self, jobs: list[tuple[str, str]], steps: int = 4_000) -> dict[str, str]:
        for _ in range(steps):
            self.step()
            found = {f"{tenant}/{job}": self.drive.states(job, tenant) for tenant, job in jobs}
            if all(set(states) <= OVER for states in found.values()):
                break
        return {name: ",".join(sorted(set(states))) for name, states in found.items()}


def test_a_host_that_eats_jobs_fails_none_that_may_be_tried_again() -> None:
    """16 of 40 jobs with three retries failed, all of whose attempts were on the host that was always free."""
    world = World(Driving.with_hosts(8, 8), {"w0"})
    jobs = [("t", f"j{number}") for number in range(40)]
    for _, job in jobs:
        world.submit(job, 20_000, retries=1)
    assert set(world.until_over(jobs).values()) == {"SUCCEEDED"}


def test_of_later_jobs_of_the_same_workload_that_may_not_be_tried_again_none_begins_there() -> None:
    """Of 40 later jobs without retries all failed: the host with free GPUs was the one that ate them."""
    world = World(Driving.with_hosts(4, 4), {"w0"})
    world.submit("first", 5_000, retries=1)
    assert world.until_over([("t", "first")]) == {"t/first": "SUCCEEDED"}
    later = [("t", f"j{number}") for number in range(20)]
    for _, job in later:
        world.submit(job, 20_000, retries=0)
    assert set(world.until_over(later).values()) == {"SUCCEEDED"}
    assert world.ran["w0"] == 1


def test_a_job_says_that_it_waits_for_another_host() -> None:
    world = World(Driving.with_hosts(1, 1), {"w0"})
    world.submit("first", 60_000, retries=1)
    for _ in range(10):
        world.step()
    assert world.drive.placed_on("first") == ["w1"]
    for _ in range(65):
        world.step()
    world.submit("next", 1_000)
    world.submit("last", 1_000)
    world.drive.settle()
    told = world.drive.explained("last")
    assert told["reason"] == JOBS_FAIL.name
    assert told["held_by"] == ["w0: jobs fail there within seconds"]


def test_other_jobs_begin_on_a_host_that_one_workload_marks_where_no_other_has_room() -> None:
    """Where a program fails at once by its own fault, as it is written, others do not wait for that."""
    drive = Driving.with_hosts(1, 1)
    world = World(drive, {"w0"})
    world.submit("first", 5_000, retries=1)
    assert world.until_over([("t", "first")]) == {"t/first": "SUCCEEDED"}
    assert not row(drive, "w0").warning
    for number in range(2):
        world.submit(f"other{number}", 60_000, run={"argv": ["other", str(number)]})
    drive.settle()
    assert [drive.placed_on(f"other{number}") for number in range(2)] == [["w1"], ["w0"]], "the other one first"


def test_two_workloads_keep_all_jobs_from_it_and_people_are_told() -> None:
    drive = Driving.with_hosts(4, 4)
    world = World(drive, {"w0"})
    names = ("first", "second")
    for name in names:
        world.submit(name, 5_000, retries=1, run={"argv": [name]})
    assert set(world.until_over([("t", name) for name in names]).values()) == {"SUCCEEDED"}
    assert "fail here within seconds" in row(drive, "w0").warning
    for number in range(5):
        world.submit(f"other{number}", 60_000, run={"argv": ["other", str(number)]})
    drive.settle()
    assert [drive.placed_on(f"other{number}") for number in range(4)] == [["w1"]] * 4
    assert drive.explained("other4")["reason"] == JOBS_FAIL.name


def test_failures_of_three_workloads_close_it_and_an_operator_opens_it() -> None:
    world = World(Driving.with_hosts(4, 4), {"w0"})
    drive = world.drive
    jobs = [("t", f"j{number}") for number in range(4)]
    for _, job in jobs:
        world.submit(job, 5_000, retries=1, run={"argv": ["train", job]})
    assert set(world.until_over(jobs).values()) == {"SUCCEEDED"}
    assert row(drive, "w0").state == STARTS_FAIL.name
    fails = row(drive, "w0").starts_fail
    assert fails is not None
    assert fails.why.startswith("jobs of 3 workloads failed within seconds")
    world.eats.clear()
    assert drive.operate("uncordon", "w0")["changed"]
    assert row(drive, "w0").state == "up"
    assert not row(drive, "w0").warning
    drive.operate("cordon", "w1")
    world.submit("well", 1_000)
    assert world.until_over([("t", "well")]) == {"t/well": "SUCCEEDED"}


def test_a_marked_host_gets_what_no_other_host_could_hold_and_later_everything() -> None:
    world = World(Driving.with_hosts(8, 4), {"w0"})
    world.submit("first", 5_000, retries=1)
    world.until_over([("t", "first")])
    world.eats.clear()
    drive = world.drive
    drive.submit("large", gpu={"count": 8})
    drive.settle()
    assert drive.placed_on("large") == ["w0"]
    drive.cancel("large")
    drive.settle()
    drive.report_all()
    drive.pass_time(MARKED_MS, step=10_000)
    drive.operate("cordon", "w1")
    world.submit("small", 1_000)
    drive.settle()
    assert drive.placed_on("small") == ["w0"]


def test_what_does_well_there_clears_it() -> None:
    world = World(Driving.with_hosts(4, 4), {"w0"})
    world.submit("first", 5_000, retries=1)
    world.until_over([("t", "first")])
    world.eats.clear()
    world.drive.operate("cordon", "w1")
    world.submit("well", 1_000)
    world.until_over([("t", "well")])
    assert not row(world.drive, "w0").warning


def test_no_healthy_host_is_closed_or_marked_by_tenants_whose_code_fails() -> None:
    world = World(Driving.with_hosts(4, 4, 4), set())
    jobs = [(tenant, f"exit-{number}") for tenant in ("t", "u") for number in range(12)]
    world.broken = {job for _, job in jobs}
    for tenant, job in jobs:
        world.submit(job, 1_000, retries=2, tenant=tenant, run={"argv": ["sh", "-c", f"exit 1 # {job}"]})
    assert set(world.until_over(jobs).values()) == {"FAILED"}
    assert [row(world.drive, name).state for name in world.drive.workers] == ["up"] * 3
    assert [row(world.drive, name).warning for name in world.drive.workers] == [""] * 3


def test_a_sweep_whose_items_fail_on_every_host_keeps_no_host_from_others() -> None:
    """Each host has items that do well and items that fail at once, one host after the other."""
    world = World(Driving.with_hosts(4, 4, 4, 4), set())
    drive = world.drive
    drive.submit("sweep", replicas=200, gpu={}, max_failed=None)
    most = 0
    for turn in range(12):
        drive.settle(3)
        quick = drive.engine.lifecycle.starts.quick
        most = max(most, len(quick.marked)) if turn > 4 else 0
        for at, worker in enumerate(drive.workers.values()):
            for each, key in enumerate([key for key, held in worker.held.items() if held.phase == "running"]):
                worker.finish(key, 3 if at == turn % 4 and each == 0 else 0)
        drive.report_all()
        drive.pass_time(2_000, step=1_000)
    assert most == 0


@pytest.mark.parametrize("level", [1, 2])
def test_a_new_leader_decides_the_same(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the records at level 1, from a snapshot too from level 2 on."""
    world = World(Driving.with_hosts(4, 4), {"w0"})
    drive = world.drive
    if level == 2:
        know_next(monkeypatch)
        raise_level(drive)
    world.submit("first", 5_000, retries=1)
    world.submit("second", 30_000, retries=1, run={"argv": ["other"]})
    world.until_over([("t", "first")])
    for _ in range(4):
        world.step()
    before = drive.engine.lifecycle.starts.quick.marked
    assert len(before) == 1
    if level == 2:
        drive.lead_from_snapshot()
    else:
        drive.lead()
    drive.renew()
    drive.pass_time(1_000)
    assert drive.engine.lifecycle.starts.quick.marked == before


WORLDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 60))]


@pytest.mark.parametrize("seed", WORLDS)
def test_random_worlds(seed: int) -> None:
    """One host of several eats what it gets, and tenants test code that fails.

    Healthy code that may be tried again fails nowhere, and no host that is well is closed.
    """
    rng = Random(seed)
    drive = Driving.with_hosts(*(rng.choice([1, 2, 4]) for _ in range(rng.randint(2, 6))))
    drive.checks = seed % 4 == 0
    bad = rng.choice(sorted(drive.workers))
    world = World(drive, {bad}, rng.choice([100, 1_000, 8_000]))
    gpus = sum(len(worker.hello.gpu_pool) for name, worker in drive.workers.items() if name != bad)
    healthy, everything = set[str](), list[tuple[str, str]]()
    for number in range(rng.randint(10, 30)):
        tenant, job, argv = rng.choice("tu"), f"j{number}", ["python", f"train{rng.randint(0, 4)}.py"]
        is_broken, retries, replicas = rng.random() < 0.25, rng.randint(0, 3), rng.choice([1, 1, 1, 3])
        if is_broken:
            world.broken.add(job)
            argv.append("broken")
        elif retries:
            healthy.add(f"{tenant}/{job}")
        world.runs_ms[job] = rng.choice([500, 5_000, 30_000, 70_000])
        gpu = {"scheduling": "gang"} if replicas > 1 and gpus >= replicas and rng.random() < 0.3 else {}
        drive.submit(job, tenant=tenant, gpu=gpu, replicas=replicas, retries=retries, run={"argv": argv})
        everything.append((tenant, job))
        for _ in range(rng.randint(0, 6)):
            world.step()
        if rng.random() < 0.05:
            drive.lead()
            drive.renew()
        assert all(row(drive, name).state == "up" for name in drive.workers if name != bad)
    found = world.until_over(everything)
    assert {name: found[name] for name in healthy} == dict.fromkeys(healthy, "SUCCEEDED")
    assert all(row(drive, name).state == "up" for name in drive.workers if name != bad)
