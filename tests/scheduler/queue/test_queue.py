"""The queue against a plain list, and the ways by which an entry could be lost, doubled or miscounted."""

from __future__ import annotations

import random

import pytest

from moorage.scheduler.core.fleet.shape import Shape, shape_key
from moorage.scheduler.core.queue.queue import REPLICA_BITS, Queue, entry
from moorage.schemas.codec import decode_request
from moorage.schemas.frames import NOT_PERMITTED
from tests.scheduler.driving import PATIENCE_MS, Driving

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
    """What the queue should hold: each entry once, with its priority, shape and tenant."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.queue = Queue()
        self.standing: dict[int, tuple[int, Shape, str]] = {}  # entry -> what it was added with
        self.tenants: dict[int, str] = {}  # by job number, for the whole life of the job

    def add(self) -> None:
        """A new job, or one that comes back from a pause, with some of its replicas."""
        num = self.chance.choice([len(self.tenants), self.chance.randrange(len(self.tenants) + 1)])
        tenant = self.tenants.setdefault(num, self.chance.choice("tuv"))
        mine = [self.standing[item] for item in self.standing if item >> REPLICA_BITS == num]
        priority, shape, _ = mine[0] if mine else (self.chance.choice((10, 50)), self.chance.choice(SHAPES), tenant)
        items = sorted({entry(num, self.chance.randrange(8)) for _ in range(self.chance.choice((1, 1, 4)))})
        items = [item for item in items if item not in self.standing]
        if len(items) == 1:
            self.queue.add(priority, shape, items[0], tenant)
        else:
            self.queue.add_all(priority, shape, items, tenant)
        self.standing |= dict.fromkeys(items, (priority, shape, tenant))

    def remove(self) -> None:
        """Take some entries of a job out; those of them that do not stand there change nothing."""
        num = self.chance.randrange(len(self.tenants) + 1)
        mine = [item for item in self.standing if item >> REPLICA_BITS == num]
        if not mine:
            return
        priority, shape, tenant = self.standing[mine[0]]
        asked = sorted({entry(num, self.chance.randrange(8)) for _ in range(3)})
        found = sorted(item for item in asked if item in self.standing)
        assert self.queue.remove(priority, shape, asked, tenant) == found
        assert self.queue.remove(99, shape, asked, tenant) == []
        for item in found:
            del self.standing[item]

    def take(self) -> None:
        """A job is backfilled: it leaves the middle of its group."""
        lines = [line for line in self.queue.groups.values() if line.entries]
        if lines:
            line = self.chance.choice(lines)
            item = self.chance.choice(list(line.entries))
            assert self.queue.take(line, [item]) == [item]
            del self.standing[item]

    def pop(self) -> None:
        lines = [line for line in self.queue.groups.values() if line.entries]
        if lines:
            line = self.chance.choice(lines)
            some = [self.queue.pop(line) for _ in range(min(len(line.entries), 3))]
            self.queue.put_back(line, some[1:])
            del self.standing[some[0]]

    def sweep(self) -> None:
        gone = {item for item in self.standing if self.chance.random() < 0.1}
        while not self.queue.sweep(lambda num: False, lambda item: item not in gone, self.chance.choice((2, 1_000))):
            if self.standing.keys() - gone and self.chance.random() < 0.5:
                some = self.chance.choice(sorted(self.standing.keys() - gone))
                priority, shape, tenant = self.standing.pop(some)
                assert self.queue.remove(priority, shape, [some], tenant) == [some]
        for item in gone:
            del self.standing[item]

    def check(self) -> None:
        found: dict[int, tuple[int, Shape, str]] = {}
        for key, line in self.queue.groups.items():
            assert key == (-line.priority, line.shape.index, line.tenant)
            assert list(line.entries) == sorted(line.entries)
            assert not found.keys() & set(line.entries), "an entry stands in two groups"
            found |= dict.fromkeys(line.entries, (line.priority, line.shape, line.tenant))
        assert found == self.standing
        assert len(self.queue) == len(self.standing)
        assert self.queue.is_empty == (not self.standing)
        assert self.queue.waiting() == list(self.queue.groups.values())
        assert all(line.entries for line in self.queue.groups.values())


@pytest.mark.parametrize("seed", range(40))
def test_the_queue_holds_what_a_plain_list_would(seed: int) -> None:
    model = Model(random.Random(seed))
    for _ in range(120):
        model.chance.choice((*[model.add] * 6, model.remove, model.take, model.take, model.pop, model.sweep))()
        model.check()
