"""Places: the ranks of a gang that names labels run where these have one value, and in one site by default."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.schemas.frames import Goodbye
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.queries.test_plan_verb import planned

GANG: dict[str, Any] = {"scheduling": "gang"}


def fleet(*labels: dict[str, str], gpus: int = 2, config: Config | None = None) -> Driving:
    drive = Driving(config)
    for number, each in enumerate(labels):
        drive.worker(f"w{number}", gpus, labels=each)
    return drive


def racks(*names: str, gpus: int = 2, config: Config | None = None) -> Driving:
    return fleet(*({"rack": name} if name else {} for name in names), gpus=gpus, config=config)


def pair(**more: Any) -> dict[str, Any]:
    return {"gpu": {"count": 2, **GANG}, "replicas": 2, **more}


def limited(timeout_s: float) -> dict[str, Any]:
    return {"driver": "noop", "timeout_s": timeout_s, "grace_s": 0}


def values(drive: Driving, name: str, label: str) -> set[str | None]:
    return {drive.workers[each].hello.labels.get(label) for each in drive.placed_on(name)}


@pytest.mark.parametrize("ranker", ["pack", "fragments", "headroom"])
def test_all_ranks_are_in_one_rack_where_no_two_hosts_of_another_are_free(ranker: str) -> None:
    drive = racks("a", "b", "c", "b", config=Config(ranker=ranker))
    drive.submit("gang", **pair(same=["rack"]))
    assert sorted(drive.placed_on("gang")) == ["w1", "w3"]


def test_it_waits_beside_room_in_two_racks_says_why_and_starts_when_one_has_it() -> None:
    drive = racks("a", "a", "b", "b")
    drive.submit("one", gpu={"count": 2}, requires={"rack": ["a"]})
    drive.submit("two", gpu={"count": 2}, requires={"rack": ["b"]})
    drive.settle()
    drive.submit("gang", **pair(same=["rack"]))
    drive.settle()
    told = drive.explained("gang")
    assert told["reason"] == "place"
    assert told["because"] == "room for 1 of its 2 replicas, the most in one place (rack=a)"
    [first, *_] = drive.fixes("gang")
    assert (first["say"], first["request"]) == ("its ranks in any places", {"same": []})
    drive.run_out(drive.placed_on("two")[0])
    assert values(drive, "gang", "rack") == {"b"}


def test_what_no_rack_could_ever_hold_is_refused_or_waits_for_a_host_of_one() -> None:
    drive = racks("a", "b", "")
    refused = drive.submit("never", **pair(same=["rack"]), on_no_match="reject")
    assert "hosts would hold 1 of its 2 replicas at once, the most in one place (rack=a)" in refused["message"]
    drive.submit("waits", **pair(same=["rack"]))
    told = drive.explained("waits")
    assert told["reason"] == "place-size"
    assert told["because"].startswith("empty, hosts would hold 1 of its 2,")
    assert planned(drive, pair(same=["rack"])).starts == "never"
    drive.worker("w3", 2, labels={"rack": "b"})
    drive.settle()
    assert sorted(drive.placed_on("waits")) == ["w1", "w3"]


def test_a_label_that_no_worker_has_is_named() -> None:
    drive = racks("a", "a")
    refused = drive.submit("never", **pair(same=["shelf"]), on_no_match="reject")
    assert "no worker has the label shelf" in refused["message"]
    drive.submit("waits", **pair(same=["shelf"]))
    assert drive.explained("waits")["reason"] == "label"


def test_a_gang_stays_in_one_site_unless_it_says_otherwise() -> None:
    drive = fleet({"site": "lyon"}, {"site": "hall"}, {}, {"site": "lyon"})
    drive.submit("stays", **pair())
    drive.submit("waits", **pair())
    drive.settle()
    assert values(drive, "stays", "site") == {"lyon"}
    assert drive.explained("waits")["because"] == "room for 1 of its 2 replicas, the most in one place (no site)"
    drive.submit("any", **pair(same=[]))
    drive.settle()
    assert values(drive, "any", "site") == {"hall", None}


def test_what_no_site_could_hold_is_refused_unless_a_host_of_it_is_away() -> None:
    drive = fleet({"site": "lyon"}, {"site": "hall"}, {"site": "lyon"})
    three: dict[str, Any] = {"gpu": {"count": 2, **GANG}, "replicas": 3, "on_no_match": "reject"}
    assert "the most in one place (site=lyon)" in drive.submit("never", **three)["message"]
    for labels in ({}, {"site": "lyon"}):
        name = f"away-{len(labels)}"
        worker = drive.worker(name, 2, labels=labels)
        drive.send(name, Goodbye(worker.session))
        drive.tick()
        del drive.workers[name]
        answer = drive.submit(f"after-{name}", **three)
        assert ("message" in answer) is not bool(labels), answer


def test_racks_of_one_name_in_two_sites_are_two_places() -> None:
    drive = fleet({"site": "x", "rack": "1"}, {"site": "y", "rack": "1"}, {"site": "y", "rack": "1"})
    drive.submit("gang", **pair(same=["rack"]))
    assert sorted(drive.placed_on("gang")) == ["w1", "w2"]


def test_victims_are_all_in_one_rack_the_one_where_they_cost_least() -> None:
    drive = racks("a", "a", "b", "b", config=Config(preempt_priority=80, preempt_after=0.0))
    for number, rack in enumerate("aabb"):
        drive.submit(f"j{number}", gpu={"count": 2}, requires={"rack": [rack]})
        drive.settle()
        drive.pass_time(10_000)
    drive.submit("urgent", priority=90, **pair(same=["rack"]))
    drive.pass_time(3_000)
    drive.settle()
    assert values(drive, "urgent", "rack") == {"b"}
    assert [name for name in ("j0", "j1", "j2", "j3") if drive.states(name) == ["QUEUED"]] == ["j2", "j3"]


def test_hosts_of_one_rack_are_reserved_the_one_that_is_free_first() -> None:
    drive = racks("a", "a", "b", "b", config=Config(reserve_after=30.0))
    for number, (rack, limit_s) in enumerate(zip("aabb", (400, 200, 300, 250), strict=True)):
        drive.submit(f"j{number}", gpu={"count": 2}, requires={"rack": [rack]}, run=limited(limit_s))
    drive.settle()
    drive.submit("gang", **pair(same=["rack"]))
    drive.pass_time(40_000)
    assert {drive.state.worker_by_num[num].hello["labels"]["rack"] for num in drive.reservation.hosts} == {"b"}
    drive.run_out(drive.placed_on("j2")[0])
    drive.submit("long", gpu={}, run=limited(3_600))
    drive.settle()
    assert drive.states("long") == ["QUEUED"]
    drive.run_out(drive.placed_on("j3")[0])
    assert values(drive, "gang", "rack") == {"b"}


def test_replicas_are_spread_over_the_values_of_a_label() -> None:
    drive = racks("a", "a", "a", "b", "", gpus=4)
    drive.submit("plain", gpu={}, replicas=6, spread_over="rack")
    drive.settle()
    assert Counter(drive.workers[each].hello.labels.get("rack") for each in drive.placed_on("plain")) == {
        "a": 2, "b": 2, None: 2,
    }  # fmt: skip
    drive.submit("gang", gpu=GANG, replicas=4, spread_over="rack")
    assert Counter(values(drive, "gang", "rack")) == {"a": 1, "b": 1, None: 1}


class World:
    """A stream of short jobs beside gangs that share labels, on hosts of which some are drained for a while."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.drive = Driving(Config(reserve_after=20.0, preempt_priority=80, preempt_after=0.0))
        self.has: dict[str, dict[str, str]] = {}
        self.size: dict[str, int] = {}
        for number in range(dice.randint(3, 7)):
            name, gpus = f"w{number}", dice.choice((2, 4))
            drawn = {"rack": dice.choice(("a", "b", "c", "")), "site": dice.choice(("x", "y", ""))}
            labels = self.has[name] = {label: value for label, value in drawn.items() if value}
            self.size[name] = gpus
            self.drive.worker(name, gpus, labels=labels)
        self.gangs: dict[str, tuple[int, int, list[str] | None]] = {}
        self.ends: dict[object, int] = {}
        self.seen: set[str] = set()
        self.jobs = 0

    def shared(self, same: list[str] | None) -> list[str]:
        """The labels of which the promise says that all ranks have one value."""
        sites = any("site" in labels for labels in self.has.values())
        return [] if same == [] else list(dict.fromkeys([*(same or ()), *["site"] * sites]))

    def could(self, name: str) -> bool:
        """Whether the hosts of one place could hold a gang, if they were empty."""
        count, ranks, same = self.gangs[name]
        rooms = Counter[tuple[str | None, ...]]()
        for host, labels in self.has.items():
            if all(label in labels for label in same or ()):
                rooms[tuple(map(labels.get, self.shared(same)))] += self.size[host] // count
        return max(rooms.values(), default=0) >= ranks

    def submit_gang(self) -> None:
        name, dice = f"g{len(self.gangs)}", self.dice
        asked = dice.choice((1, 2)), dice.randint(2, 4), dice.choice((None, ["rack"], ["site"], ["rack", "site"], []))
        count, ranks, same = self.gangs[name] = asked
        fields: dict[str, Any] = {} if same is None else {"same": same}
        priority = dice.choice((50, 50, 90))
        self.drive.submit(
            name, gpu={"count": count, **GANG}, replicas=ranks, run=limited(15), priority=priority, **fields
        )

    def step(self) -> None:
        drive = self.drive
        self.jobs += 1
        drive.submit(f"s{self.jobs}", gpu={"count": self.dice.choice((1, 1, 2))}, run=limited(15))
        drive.pass_time(1_000)
        drive.settle(4)
        for worker in drive.workers.values():
            for key in [key for key, held in worker.held.items() if held.phase == "running"]:
                if self.ends.setdefault(key, drive.now + 1_000 * self.dice.randint(3, 14)) <= drive.now:
                    worker.finish(key)
        self.judge()
        drive.settle(4)

    def judge(self) -> None:
        drive = self.drive
        for name, (_, _, same) in self.gangs.items():
            hosts = [self.has[each] for each in drive.placed_on(name) if each != "-"]
            for label in self.shared(same) if hosts else ():
                assert len({each.get(label) for each in hosts}) == 1, f"{name} is on several values of {label}"
            assert all(label in each for each in hosts for label in same or ()), f"{name} is beside its labels"
            if hosts:
                self.seen.add(name)
        held = drive.engine.planner.verdicts.reservation
        name = "" if held is None else drive.state.jobs[held.num].name
        if held is not None and name in self.gangs:
            hosts = [self.has[drive.state.worker_by_num[num].id] for num in held.hosts]
            for label in self.shared(self.gangs[name][2]):
                assert len({each.get(label) for each in hosts}) == 1, f"hosts of several {label} are kept for {name}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_in_random_worlds_no_gang_is_in_two_places_and_each_that_some_place_could_hold_has_its_turn(seed: int) -> None:
    world = World(seed)
    drive, dice = world.drive, world.dice
    for _ in range(15):
        world.step()
    for _ in range(6):
        world.submit_gang()
        host = dice.choice(sorted(world.size))
        if dice.random() < 0.3:
            drive.operate("drain", host)
        for _ in range(dice.randint(1, 8)):
            world.step()
        drive.operate("uncordon", host)
    able = {name for name in world.gangs if world.could(name)}
    for _ in range(250):
        if able <= world.seen:
            break
        world.step()
    late = sorted(able - world.seen)
    assert not late, [(name, world.gangs[name], drive.explained(name)) for name in late]
    assert world.seen == able, "a gang is where the promise does not let it be"
    for name in world.gangs.keys() - able:
        assert drive.explained(name)["reason"] in ("place-size", "gang-size", "label", "count"), world.gangs[name]
