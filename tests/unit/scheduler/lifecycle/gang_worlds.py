"""What random worlds of gangs hold alike: a gang is whole or not at all, and each job has its turn in the end."""

from __future__ import annotations

from collections.abc import Iterable

from moorage.scheduler.core.ledger.state import QUEUED, Job
from tests.unit.scheduler.driving import Driving


def is_whole(job: Job) -> None:
    """Check that all ranks of a gang wait, or none."""
    waiting = [row.state == QUEUED for row in job.rows.values()]
    assert all(waiting) or not any(waiting), "whole or not at all"


def each_has_its_turn(drive: Driving, names: Iterable[str]) -> None:
    """End all that runs, time after time, and check that no job is left then."""
    for _ in range(60):
        for worker in drive.workers:
            drive.run_out(worker)
        drive.pass_time(5_000)
        drive.settle()
    left = [name for name in names if (job := drive.state.job("t", name)) is not None and job.live]
    assert not left, {name: drive.explained(name) for name in left}
