"""Attempts that are lost with their host's supervisor: who is charged for it."""

from __future__ import annotations

import pytest

from moorage.scheduler.core.ledger.records import WITH_SUPERVISOR
from moorage.scheduler.core.lifecycle.suspects import DEATHS_MAX
from moorage.schemas.frames import SUSPECT_S
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.honest_worker import Worker


def two_on_one_host(gap_ms: int = 0) -> tuple[Driving, Worker]:
    drive = Driving()
    worker = drive.worker("w0", 2)
    worker.boot = "machine.1"
    drive.join(worker)
    drive.submit("guilty", gpu={}, retries_on_lost=1)
    drive.settle()
    drive.pass_time(gap_ms) if gap_ms else None
    drive.submit("neighbour", gpu={}, retries_on_lost=1)
    drive.settle()
    assert drive.states("guilty") == drive.states("neighbour") == ["RUNNING"]
    return drive, worker


def supervisor_dies(drive: Driving, worker: Worker) -> None:
    worker.die()
    worker.boot = f"machine.{worker.n + 2}"
    drive.join(worker)
    drive.tick()
    drive.settle()


def losses(drive: Driving) -> tuple[int, int]:
    return drive.replica("guilty").losses, drive.replica("neighbour").losses


def test_what_is_lost_with_the_supervisor_is_charged_to_nobody_while_several_may_be_guilty() -> None:
    drive, worker = two_on_one_host()
    supervisor_dies(drive, worker)
    assert losses(drive) == (0, 0)
    assert drive.states("guilty") == drive.states("neighbour") == ["RUNNING"]
    assert [row[8] for row in drive.job("guilty").history if row[8]] == [WITH_SUPERVISOR]


def test_what_is_lost_with_the_machine_is_charged() -> None:
    drive, worker = two_on_one_host()
    worker.die()
    worker.boot = "another-boot.7"
    drive.join(worker)
    assert losses(drive) == (1, 1)


def test_the_last_one_to_start_is_charged_alone() -> None:
    """Its neighbour has run long enough without it."""
    drive, worker = two_on_one_host(int(SUSPECT_S * 1000) + 1000)
    for _ in range(2):
        supervisor_dies(drive, worker)
        drive.pass_time(1000)
    assert drive.replica("neighbour").losses == 1, "it was the last one to start"


def test_a_lone_guilty_job_goes_round_only_as_often_as_it_may() -> None:
    drive = Driving()
    worker = drive.worker("w0", 1)
    worker.boot = "machine.1"
    drive.join(worker)
    drive.submit("guilty", gpu={}, retries_on_lost=2)
    for _ in range(3):
        drive.settle()
        assert drive.states("guilty") == ["RUNNING"]
        supervisor_dies(drive, worker)
    assert drive.states("guilty") == ["FAILED"]


def test_a_guilty_job_ends_also_where_it_is_never_alone() -> None:
    drive, worker = two_on_one_host()
    for deaths in range(DEATHS_MAX):
        assert losses(drive) == (0, 0), deaths
        supervisor_dies(drive, worker)
    for _ in range(2):
        supervisor_dies(drive, worker)
    assert drive.states("guilty") == ["FAILED"]


@pytest.mark.parametrize("newcomers", [1, 3])
def test_one_that_was_there_before_is_charged_and_its_new_neighbours_are_not(newcomers: int) -> None:
    drive = Driving()
    worker = drive.worker("w0", 4)
    worker.boot = "machine.1"
    drive.join(worker)
    drive.submit("guilty", gpu={})
    drive.submit("first", gpu={})
    drive.settle()
    supervisor_dies(drive, worker)
    drive.report("exited", "first")
    drive.report("freed", "first")
    drive.settle()
    names = [f"new-{number}" for number in range(newcomers)]
    for name in names:
        drive.submit(name, gpu={}, retries_on_lost=0)
    drive.settle()
    supervisor_dies(drive, worker)
    assert drive.replica("guilty").losses == 1
    assert [drive.replica(name).losses for name in names] == [0] * newcomers
    assert ["FAILED"] not in [drive.states(name) for name in names], "though they allow no loss"
