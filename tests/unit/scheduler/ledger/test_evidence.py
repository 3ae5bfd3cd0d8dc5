"""Why a job was placed where it is: what the follower remembers of the evidence in records."""

from __future__ import annotations

from typing import cast

import pytest

from moorage.scheduler.core.ledger.record import Record, decode_record
from moorage.scheduler.core.ledger.records import Op
from moorage.scheduler.core.ledger.state import Job
from moorage.scheduler.ledger import evidence
from moorage.scheduler.ledger.evidence import Placements
from tests.levels import NEXT, know_next, raise_level
from tests.unit.scheduler.driving import Driving


class Recorded(Driving):
    """A ledger whose records are followed."""

    placed: Placements | None = None

    def store(self, payload: bytes) -> int:
        self.placed = self.placed or Placements()
        self.placed.fold(decode_record(payload))
        return super().store(payload)


def test_the_newest_placement_of_a_job_is_remembered_through_a_save() -> None:
    drive = Recorded.with_hosts(4, 4)
    drive.submit("a", gpu={"count": 3}, run={"driver": "noop"})
    drive.submit("b", gpu={"count": 1}, replicas=3, run={"driver": "noop"})
    drive.settle()
    assert drive.placed is not None
    again = Placements.load(drive.placed.dump())
    why = again.of(drive.job("a"))
    assert why is not None
    assert (why.workers, why.free_left, why.together) == (2, 1, 1)
    last = again.of(drive.job("b"))
    assert last is not None
    assert last.workers == 2
    assert again.of(None) is None
    assert Placements.load(b"").of(drive.job("a")) is None


@pytest.mark.parametrize("level", [1, NEXT])
def test_from_the_next_level_on_it_says_by_what_right_a_job_came_first(
    level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if level == NEXT:
        know_next(monkeypatch)
    drive = Recorded.with_hosts(4)
    if level == NEXT:
        raise_level(drive)
    drive.order("share", tenant="t", gpus=2, weight=1)
    for name in ("within", "beyond"):
        drive.submit(name, gpu={"count": 2}, run={"driver": "noop"})
    drive.settle()
    assert drive.placed is not None
    again = Placements.load(drive.placed.dump())
    told = [again.guaranteed(drive.job(name).num) for name in ("within", "beyond")]
    assert told == ([True, False] if level == NEXT else [None, None])
    why = again.of(drive.job("within"))
    assert why is not None
    assert why.together == 1


def test_of_very_many_jobs_the_ones_placed_last_are_remembered() -> None:
    placed = Placements()
    for num in range(1, evidence.JOBS_MAX + 3):
        step = [int(Op.PLACE), num, 0, 0, 0, 0]
        placed.fold(Record(1, 1, 1, num, 0, 0, steps=step, evidence=[num, 1, 2, 3]))
    jobs = [cast(Job, type("Row", (), {"num": num})()) for num in (1, 2, 3, evidence.JOBS_MAX + 2)]
    assert [placed.of(job) is not None for job in jobs] == [False, False, True, True]
