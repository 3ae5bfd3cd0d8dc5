"""What `bench.instructions` counts: jobs that are submitted, placed, run and end, by calls of the engine alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.instructions import Run


def test_all_that_is_counted_are_calls_of_the_engine_until_each_job_has_succeeded() -> None:
    counted = list[str]()

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        counted.append(getattr(function, "func", function).__name__)
        return function(*arguments)

    run = Run(in_flight=3)
    run.jobs(7, call)
    jobs = run.drive.state.jobs.values()
    assert [job.state for job in jobs] == ["SUCCEEDED"] * 7
    assert counted.count("offer_submit") == 7
    assert set(counted) == {"offer_submit", "record", "send"}
