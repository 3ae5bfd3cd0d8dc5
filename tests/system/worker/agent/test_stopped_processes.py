"""Processes of a job that a signal has stopped, on a real agent: its renewals count them."""

from __future__ import annotations

import pytest

from moorage.schemas.frames import End, Stopped
from moorage.testing.conformance.leader import ScriptedLeader
from moorage.worker.agent import stopped_processes
from moorage.worker.agent.stopped_processes import look
from tests.system.worker.agent.test_agent_process import body, name_of, place, worker
from tests.waiting import until


async def test_stopped_processes_of_a_job_are_told_with_the_renewals(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = name_of()
    async with (
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader) as (running, _),
    ):
        seat = leader.seat("w1")

        async def told() -> list[Stopped]:
            await look(running.agents)
            return seat.renewals[-1].stopped

        monkeypatch.setattr(stopped_processes, "stopped_pids", lambda: pytest.fail("it is looked for without a job"))
        await look(running.agents)
        monkeypatch.undo()
        await leader.want("w1", place(name, body("sleep 100 & kill -STOP $! $$")))
        await leader.await_report("w1", "started", name)
        assert await until(told, what="they are told") == [Stopped(*name, 2)]
        await leader.want("w1", End(*name, "cancelled", 0.1))
        await leader.await_report("w1", "exited", name)
        await look(running.agents)
        count = len(seat.renewals)
        await until(lambda: len(seat.renewals) > count + 1, what="a renewal after that")
        assert seat.renewals[-1].stopped == []
