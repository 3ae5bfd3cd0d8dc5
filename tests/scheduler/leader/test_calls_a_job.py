"""What a job costs the scheduler, counted in calls of functions: a rise shows in every test run, on any machine."""

from typing import Any

from tests.calls import Calls
from tests.scheduler.driving import Driving

JOBS = 64
CALLS_A_JOB = 475
"""463 on Python 3.11, from the submit to the end of a job."""


def test_a_job_costs_the_scheduler_a_bounded_number_of_calls() -> None:
    drive, calls = Driving(), Calls()
    drive.checks = False
    for number in range(JOBS // 8):
        drive.worker(f"w{number}", 8)
    engine: Any = drive.engine
    for step in ("offer", "build", "prepare_early", "early", "commit", "complete"):
        setattr(engine, step, calls.inside(getattr(engine, step)))
    for number in range(JOBS):
        drive.offer_submit(f"j{number}", gpu={"count": 1})
    drive.tick()
    drive.settle()
    for name in list(drive.workers):
        drive.run_out(name)
    assert {drive.job(f"j{number}").state for number in range(JOBS)} == {"SUCCEEDED"}
    assert calls.made / JOBS <= CALLS_A_JOB
