"""The queue against a plain list, and the ways by which an entry could be lost, doubled or miscounted."""

from __future__ import annotations

import random

import pytest

from moorage.scheduler.core.fleet.shape import Shape, shape_key
from moorage.scheduler.core.ledger.state import PLACED, QUEUED, Job, Replica, new_job
from moorage.scheduler.core.queue.queue import Kind, Queue, Waiting
from moorage.schemas.codec import decode_request
from moorage.schemas.frames import NOT_PERMITTED
from moorage.schemas.ranges import is_in, ranges_of, without
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
    drive.report("refused", "short", detail=WHY)  # every record checks the queue against the state
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
    drive.report("refused", "short", detail="device-busy 6")
    assert drive.states("short") == ["QUEUED"]
    drive.worker("w1", 1, drivers_for={"t": ["noop"]})  # every record checks the queue against the state
    drive.pass_time(60_000)
    waiting = [name for name in ("big", "long", "short") if drive.states(name) == ["QUEUED"]]
    assert len(drive.engine.queue) == len(waiting)


def test_a_backfilled_job_that_its_worker_refused_waits_again_once_that_is_started_anew() -> None:
    drive = backfilled()
    drive.report("refused", "short", detail=WHY)
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
    """What the queue should hold: each replica once, with its job's priority, shape and tenant."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.queue = Queue()
        self.kinds: dict[int, Kind] = {}  # by job number, of those that are not held
        self.numbers: dict[int, set[int]] = {}  # by job number: the replicas that wait
        self.rooms: dict[int, int] = {}  # by job number: how many more it may place
        self.jobs: dict[int, Job] = {}

    def add(self) -> None:
        """A new job, of which some replicas may have ended already."""
        num = len(self.numbers)
        self.kinds[num] = self.chance.choice((10, 50)), self.chance.choice(SHAPES), self.chance.choice("tuv")
        self.numbers[num] = {0} if self.chance.random() < 0.5 else set(self.chance.sample(range(30), 12))
        if self.numbers[num] != {0}:
            self.rooms[num] = self.chance.choice((0, 2, 20))
            job = self.jobs[num] = new_job(num, "t", f"j{num}", b"{}", ranges_of(self.numbers[num]), "", 0, 1)
            self.queue.waiting[num] = Waiting(job, most=self.rooms[num])
        self.look(num)

    def may(self, num: int) -> int:
        return min(len(self.numbers[num]), self.rooms.get(num, 1))

    def look(self, num: int) -> None:
        (self.queue.enter if self.may(num) > 0 else self.queue.leave)(num, self.kinds[num])

    def come_back(self) -> None:
        """A replica comes back, and a job may place another one."""
        num = self.chance.randrange(len(self.numbers) + 1)
        if num in self.rooms:
            number = self.chance.randrange(30)
            job, waiting = self.jobs[num], self.queue.waiting[num]
            if number not in self.numbers[num]:
                self.numbers[num].add(number)
                row = job.rows.setdefault(number, Replica(job, number))
                row.state = QUEUED
                job.back += 1
                waiting.come_back(number)
            self.rooms[num] += 1
            waiting.most = self.rooms[num] + job.on_workers
            self.look(num)

    def move(self) -> None:
        """An operator gives a job another priority."""
        num = self.chance.randrange(len(self.numbers) + 1)
        if num in self.kinds:
            priority, shape, tenant = self.kinds[num]
            self.queue.leave(num, self.kinds[num])
            self.kinds[num] = (60 - priority, shape, tenant)
            self.look(num)

    def place(self) -> None:
        """A replica is placed: of the first job of a group, or of any other."""
        lines = [line for line in self.queue.groups.values() if line.jobs]
        if lines:
            line = self.chance.choice(lines)
            num = line.jobs[0] if self.chance.random() < 0.5 else self.chance.choice(line.jobs)
            number = min(self.numbers[num])
            assert self.queue.first(num) == number
            if (job := self.jobs.get(num)) is not None:
                if is_in(job.fresh, number):
                    job.fresh = without(job.fresh, ((number, number),))
                    job.rows[number] = Replica(job, number)
                else:
                    job.back -= 1
                job.rows[number].state = PLACED
            stays = self.queue.placed(line, num, 0)
            self.numbers[num].discard(number)
            if num in self.rooms:
                self.rooms[num] -= 1
            assert stays == (self.may(num) > 0)

    def check(self) -> None:
        found: dict[int, Kind] = {}
        for name, line in self.queue.groups.items():
            assert name == (-line.priority, line.shape.index, line.tenant)
            assert list(line.jobs) == sorted(set(line.jobs))
            assert not found.keys() & set(line.jobs), "a job stands in two groups"
            found |= dict.fromkeys(line.jobs, (line.priority, line.shape, line.tenant))
            assert self.queue.size(line) == sum(len(self.numbers[num]) for num in line.jobs)
        assert found == {num: kind for num, kind in self.kinds.items() if self.may(num) > 0}
        assert len(self.queue) == sum(len(self.numbers[num]) for num in found)
        assert all(self.queue.may(num) == self.may(num) for num in found)
        assert (self.queue.jobs, self.queue.is_empty) == (len(found), not found)
        assert self.queue.with_jobs() == list(self.queue.groups.values())
        assert all(line.jobs for line in self.queue.groups.values())


@pytest.mark.parametrize("seed", range(40))
def test_the_queue_holds_what_a_plain_list_would(seed: int) -> None:
    model = Model(random.Random(seed))
    for _ in range(120):
        model.chance.choice((*[model.add] * 4, model.come_back, model.move, *[model.place] * 8))()
        model.check()
