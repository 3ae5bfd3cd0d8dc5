"""What a job costs its worker, counted in calls of functions: a rise shows in every test run, on any machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.calls import Calls
from tests.worker.agent.test_agent import body, name_of, place, world

JOBS = 64
CALLS_A_JOB = 220
"""157 on Python 3.11."""


async def test_a_job_costs_its_worker_a_bounded_number_of_calls(nats_url: str, unique: str, tmp_path: Path) -> None:
    calls = Calls()
    async with world(nats_url, unique, tmp_path) as w:
        agent: Any = await w.add()
        await w.leader.joined("w1")
        agent.run, agent.finish = calls.inside(agent.run), calls.inside(agent.finish)
        names = [name_of(f"j{number}") for number in range(JOBS)]
        await w.leader.want("w1", *(place(name, body(), slots=()) for name in names))
        for name in names:
            await w.leader.heard("w1", "freed", name)
    assert calls.made / JOBS <= CALLS_A_JOB
