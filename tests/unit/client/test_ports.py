"""Where a job's containers are reached, as its workers say, and as `moorage show` tells it: a scripted scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.cli.jobs.show import PORTS_ROWS_MAX, _ports_of, _show
from moorage.client import AsyncClient
from moorage.client.answers import JobInfo
from moorage.client.reading import as_struct
from moorage.schemas.errors import problem
from moorage.schemas.frames import Answer, LogPage
from tests.unit.client.scripted_scheduler import ScriptedScheduler, change, shown


def running(replicas: int, **request: Any) -> dict[str, Any]:
    rows = [{"replica": at, "attempt": 1, "state": "RUNNING"} for at in range(replicas)]
    run = {"argv": ["x"], "driver": "docker"}
    return shown("j", "RUNNING", change(1), replica_states=rows, request={"run": run, **request})


async def test_a_running_job_tells_where_it_is_reached(
    nats_url: str, unique: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = [LogPage(1, "out", ports={"80": f"10.0.0.7:3000{at}"}, replica=at) for at in range(2)]
    away = problem("worker-lost", "its worker is away")
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        scheduler.will("logs", Answer("logs", 9, pages[0]))
        assert await client.job("j").ports() == {80: "10.0.0.7:30000"}
        config = {"driver_config": {"docker": {"ports": [80]}}}
        for asked_for in (config, {"template": config}):
            data = running(3, **asked_for)
            scheduler.will("logs", *(Answer("logs", 9, page) for page in pages), away)
            data["ports"] = await _ports_of(client, as_struct(JobInfo, data))
            assert data["ports"] == {"0": {"80": "10.0.0.7:30000"}, "1": {"80": "10.0.0.7:30001"}}
        _show(data)
        assert "replica 0: 80 at 10.0.0.7:30000; replica 1: 80 at 10.0.0.7:30001" in capsys.readouterr().out
        asked = len(scheduler.asked)
        for other in (running(1), running(1, driver_config={"podman": {"ports": [80]}}), shown("j", "QUEUED")):
            assert await _ports_of(client, as_struct(JobInfo, other)) == {}
        assert len(scheduler.asked) == asked, "no worker is asked about a job that wants no ports"
        scheduler.will("logs", Answer("logs", 9, pages[0]))
        found = await _ports_of(client, as_struct(JobInfo, running(2 * PORTS_ROWS_MAX, **config)))
        assert len(found) == PORTS_ROWS_MAX
