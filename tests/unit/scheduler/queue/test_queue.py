"""The queue against a plain list, and the ways by which an entry could be lost, doubled or miscounted."""

from __future__ import annotations

import random

import pytest

from moorage.scheduler.core.fleet.shape import Shape, shape_key
from moorage.scheduler.core.queue.queue import REPLICA_BITS, Entries, Queue, entry
from moorage.schemas.codec import decode_request
from moorage.schemas.frames import NOT_PERMITTED
from moorage.schemas.ranges import Ranges, numbers_in, ranges_of
from tests.unit.scheduler.driving import PATIENCE_MS, Driving

WHY = NOT_PERMITTED + "tenant t may not have the driver noop on this worker"


def backfilled() -> Driving:
    """A host of eight with a reservation for a job that needs all; `short` was taken out of the middle of its group."""
    drive = Driving()
    worker = drive.worker("w0", 8)
    drive.submit("runs", gpu={"count": 4}, run={"driver": "noop", "timeout_s": 600, "grace_s": 1})
    drive.settle()
    drive.submit("big", gpu={"count": 8})
    drive.pass_time(PATIENCE_MS + 2_000)
    assert drive.engine.planner.verdicts.reservation is not None
    worker.auto = False
    drive.submit("long", gpu={"count": 2})
    drive.submit("short", gpu={"count": 2}, run={"driver": "noop", "timeout_s": 60, "grace_s": 1})
    assert (drive.states("long"), drive.states("short")) == (["QUEUED"], ["PLACED"])
    return drive


def test_a_backfilled_job_that_its_worker_refuses_is_counted_once() -> None:
    drive = backfilled()
    drive.fact("refused", "short", detail=WHY)  # every record checks the queue against the state
    drive.pass_time(60_000)
    for name in ("big", "long", "short"):
        drive.cancel(name)
    drive.run_out("w0")
    drive.pass_time(2_000)
    drive.submit("alone", gpu={"count": 2})
    drive.pass_time(2_000)
    assert drive.states("alone") == ["PLACED"], "eight GPUs are free"


def test_a_worker_whose_rules_name_the_tenant_joins_while_a_backfilled_job_is_in_backoff() -> None:
    drive = backfilled()
    drive.fact("refused", "short", detail="device-busy 6")
    assert drive.states("short") == ["QUEUED"]
    drive.worker("w1", 1, drivers_for={"t": ["noop"]})  # every record checks the queue against the state
    drive.pass_time(60_000)
    waiting = [name for name in ("big", "long", "short") if drive.states(name) == ["QUEUED"]]
    assert len(drive.engine.queue) == len(waiting)


def test_a_backfilled_job_that_its_worker_refused_waits_again_once_that_is_started_anew() -> None:
    drive = backfilled()
    drive.fact("refused", "short", detail=WHY)
    drive.pass_time(60_000)
    worker = drive.workers["w0"]
    worker.boot += "-2"
    drive.join(worker)
    drive.pass_time(2_000)
    assert drive.replica("short").job.avoid == ()
    drive.cancel("big")
    drive.pass_time(2_000)
    assert drive.states("short") == ["PLACED"]


SHAPES = [
    Shape(shape_key(request), number, request)
    for number, request in enumerate(
        decode_request(b'{"gpu":{"count":%d},"run":{"driver":"noop"}}' % count) for count in (1, 2, 4)
    )
]


class Model:
    """What the queue should hold: each replica once, with its priority, shape and tenant."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.queue = Queue()
        self.standing: dict[int, tuple[int, Shape, str]] = {}  # each replica's entry -> what it was added with
        self.tenants: dict[int, str] = {}  # by job number, for the whole life of the job

    def add(self) -> None:
        """A new job, of which some replicas may have ended already, or a replica that comes back from a pause."""
        num = self.chance.choice([len(self.tenants), self.chance.randrange(len(self.tenants) + 1)])
        is_new = num not in self.tenants
        tenant = self.tenants.setdefault(num, self.chance.choice("tuv"))
        mine = self._of(num)
        if is_new:
            kind = self.chance.choice((10, 50)), self.chance.choice(SHAPES), tenant
            numbers = {self.chance.randrange(8, 30) for _ in range(self.chance.choice((1, 1, 12)))}
            self.queue.add_fresh(kind[0], kind[1], num, ranges_of(numbers), tenant)
            self.standing |= {entry(num, number): kind for number in numbers}
        elif mine:
            item = entry(num, self.chance.randrange(8))
            if item not in self.standing:
                kind = self.standing[mine[0]]
                self.queue.add(kind[0], kind[1], item, tenant)
                self.standing[item] = kind

    def _of(self, num: int) -> list[int]:
        return sorted(item for item in self.standing if item >> REPLICA_BITS == num)

    def remove(self) -> None:
        """Take a job out, as an operator's hold does."""
        num = self.chance.randrange(len(self.tenants) + 1)
        mine = self._of(num)
        if not mine:
            return
        priority, shape, tenant = self.standing[mine[0]]
        assert self.queue.remove(99, shape, num, tenant) == ([], None)
        items, rest = self.queue.remove(priority, shape, num, tenant)
        behind = [] if rest is None else [entry(num, number) for number in numbers_in(rest[1])]
        assert sorted([*items, *behind]) == mine
        for item in mine:
            del self.standing[item]

    def move(self) -> None:
        """An operator gives a job another priority."""
        num = self.chance.randrange(len(self.tenants) + 1)
        mine = self._of(num)
        if mine:
            priority, shape, tenant = self.standing[mine[0]]
            self.queue.move(num, tenant, (priority, shape), (60 - priority, shape))
            self.standing |= dict.fromkeys(mine, (60 - priority, shape, tenant))

    def take(self) -> None:
        """A replica is backfilled: it leaves the middle of its group, and the next of its job takes its place."""
        lines = [line for line in self.queue.groups.values() if line.entries]
        if lines:
            line = self.chance.choice(lines)
            item = self.chance.choice(list(line.entries))
            later = [other for other in self._of(item >> REPLICA_BITS) if other > item and other not in line.entries]
            following = min(later) if line.behind(item) else None
            assert self.queue.take(line, item) == following
            assert self.queue.take(line, item) is None
            del self.standing[item]

    def pop(self) -> None:
        """The first replica of a group is placed, and the jobs then in front are set aside for a while."""
        lines = [line for line in self.queue.groups.values() if line.entries]
        if lines:
            line = self.chance.choice(lines)
            del self.standing[self.queue.pop(line)]
            aside: list[Entries] = []
            while line.entries and len(aside) < 2:
                num = line.entries[0] >> REPLICA_BITS
                aside.append(self.queue.remove(line.priority, line.shape, num, line.tenant))
                assert not any(item >> REPLICA_BITS == num for item in line.entries)
            self.queue.put_back(line, aside)

    def skip(self) -> None:
        """The first replica of a group was cancelled, with some of those behind it."""
        lines = [line for line in self.queue.groups.values() if line.entries]
        if lines:
            line = self.chance.choice(lines)
            item = line.entries[0]
            behind = {other & 0xFFFFF for other in self._of(item >> REPLICA_BITS)} - {
                other & 0xFFFFF for other in line.entries if other >> REPLICA_BITS == item >> REPLICA_BITS
            }
            still = {number for number in behind if self.chance.random() < 0.5}
            stands_for_more = line.behind(item) > 0
            self.queue.skip(line, ranges_of(still))
            for number in behind - still if stands_for_more else ():
                del self.standing[entry(item >> REPLICA_BITS, number)]
            del self.standing[item]

    def sweep(self) -> None:
        gone = {item for item in self.standing if self.chance.random() < 0.1}

        def still(num: int) -> Ranges:
            return ranges_of(item & 0xFFFFF for item in self._of(num) if item not in gone)

        while not self.queue.sweep(
            lambda num: False, lambda item: item not in gone, still, self.chance.choice((2, 1_000))
        ):
            pass
        # one that ended behind the entry that stands for it is found once it is the first of its job
        for line in self.queue.groups.values():
            for item, rest in line.rest.values():
                gone -= {entry(item >> REPLICA_BITS, number) for number in numbers_in(rest)}
        for item in gone:
            del self.standing[item]

    def check(self) -> None:
        found: dict[int, tuple[int, Shape, str]] = {}
        for key, line in self.queue.groups.items():
            assert key == (-line.priority, line.shape.index, line.tenant)
            assert list(line.entries) == sorted(line.entries)
            items = set(line.entries)
            for num, (item, rest) in line.rest.items():
                assert item in items
                assert item >> REPLICA_BITS == num
                assert rest
                items |= {entry(num, number) for number in numbers_in(rest)}
            assert len(items) == line.size
            assert not found.keys() & items, "a replica stands in two groups"
            found |= dict.fromkeys(items, (line.priority, line.shape, line.tenant))
        assert found == self.standing
        assert len(self.queue) == len(self.standing)
        assert self.queue.is_empty == (not self.standing)
        assert self.queue.waiting() == list(self.queue.groups.values())
        assert all(line.entries for line in self.queue.groups.values())


@pytest.mark.parametrize("seed", range(40))
def test_the_queue_holds_what_a_plain_list_would(seed: int) -> None:
    model = Model(random.Random(seed))
    for _ in range(120):
        model.chance.choice(
            (*[model.add] * 6, model.remove, model.move, *[model.take] * 4, *[model.pop] * 3, model.skip, model.sweep)
        )()
        model.check()
