"""Lines that found no room are looked at again only where a host that opened since has some: the same placements."""

from __future__ import annotations

import random
from typing import Any, Final

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet import OPENED_HOSTS_MAX, Fleet
from moorage.scheduler.core.line.queue import Line
from moorage.scheduler.core.rank.ranker import Choice
from moorage.scheduler.core.shape import Shape
from tests.scheduler.driving import H100, Driving

A100: Final = "NVIDIA A100-SXM4-80GB"
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

    def __init__(self, seed: int, config: Config, *, shortcut: bool) -> None:
        self.rng = random.Random(seed)
        self.drive = drive = Driving(config)
        self.jobs: list[str] = []
        for number in range(5):
            models = [A100 if number % 2 else H100] * 4
            labels = {"zone": "ab"[number % 2]}
            drive.worker(f"w{number}", models=models, cpu_milli=20_000, memory_mib=64_000, labels=labels)
        if not shortcut:
            drive.engine.planner._is_full = _never  # type: ignore[method-assign]

    def step(self) -> None:
        rng, drive = self.rng, self.drive
        act = rng.choice(["submit", "submit", "submit", "end", "end", "cancel", "load", "flag", "limit", "time"])
        worker = f"w{rng.randrange(5)}"
        if act == "submit":
            self.jobs.append(f"j{len(self.jobs)}")
            drive.submit(self.jobs[-1], **rng.choice(ASKS))
        elif act == "end":
            running = [key for key, held in drive.workers[worker].held.items() if held.phase == "running"]
            for key in rng.sample(running, min(len(running), rng.randrange(1, 4))):
                drive.workers[worker].finish(key, 0)
            drive.settle()
        elif act == "cancel" and self.jobs:
            drive.cancel(rng.choice(self.jobs))
        elif act == "load":
            drive.load(worker, **({"gpu0": "xid"} if rng.random() < 0.5 else {}))
        elif act == "flag":
            drive.operate(rng.choice(["cordon", "uncordon", "uncordon"]), worker)
        elif act == "limit":
            drive.order("limit", gpus=rng.choice([0, 0, 6, 12]))
        elif act == "time":
            drive.pass_time(rng.choice([1_000, 5_000, 90_000]), step=5_000)
        drive.settle()


def _never(draft: Draft, line: Line) -> bool:
    return False


@pytest.mark.parametrize("seed", [*range(22), 185, 234])  # the last two: a limit, and who waits behind it
@pytest.mark.parametrize("order", ["fair", "fifo", "shared"])
def test_the_same_placements_as_where_every_line_is_looked_at(seed: int, order: str) -> None:
    config = Config(ranker="pack", order="fifo" if order == "fifo" else "fair", reserve_after=30)
    short, full = (Looking(seed, config, shortcut=shortcut) for shortcut in (True, False))
    if order == "shared":
        for each in (short, full):
            each.drive.order("share", tenant="t", weight=2)
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

    def counted(fleet: Fleet, shape: Shape, avoid: dict[int, int], barred: frozenset[int]) -> Choice | None:
        looked.append(shape)
        return choose(fleet, shape, avoid, barred)

    monkeypatch.setattr(drive.engine.planner.placing.ranker, "choose", counted)
    first = next(key for key in drive.workers["w0"].held if key[2] == 0)
    drive.workers["w0"].finish(first, 0)
    drive.settle()
    assert drive.states("one") == ["RUNNING"]
    assert {shape.count for shape in looked} == {1}


def test_where_much_opened_or_nobody_counted_all_are_looked_at() -> None:
    drive = Driving()
    drive.worker("w0")
    drive.worker("w1")
    fleet = drive.engine.fleet
    before = fleet.changes
    fleet.opens(1)
    assert fleet.opened_since(before) == [fleet.hosts[1]]
    fleet.opens(77)
    assert fleet.opened_since(before) == [fleet.hosts[1]], "one that has left since"
    stood = fleet.changes
    fleet.opens(0)
    fleet.unchanged_since(stood)
    assert fleet.opened_since(before) == [fleet.hosts[1]], "what was taken back opened nothing"
    fleet.opens()
    assert fleet.opened_since(before) is None
    before = fleet.changes
    for number in range(OPENED_HOSTS_MAX + 1):
        fleet.opens(number)
    assert fleet.opened_since(before) is None
    for _ in range(5_000):
        fleet.opens(1)
    assert fleet.opened_since(before) is None, "it remembers so many alone"
    assert fleet.opened_since(fleet.changes) == []
