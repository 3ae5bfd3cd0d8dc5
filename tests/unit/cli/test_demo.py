"""What the demo counts as refused: what a scheduler refused, and nothing that it only could not take now."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.cli.demo.stack import Stack
from moorage.cli.demo.verb import Demo
from moorage.client import AsyncClient
from moorage.schemas.errors import Problem, problem
from moorage.schemas.frames import Accepted
from moorage.testing.demo.drawn_jobs import Planned
from tests.unit.client.scripted_scheduler import ScriptedScheduler


@pytest.mark.parametrize(
    ("answers", "refused"),
    [
        pytest.param(
            [problem("not-leading", "a takeover"), problem("overloaded", "too much"), Accepted("x", 5, "QUEUED")],
            {},
            id="a leader that changes or has too much to do refuses nothing",
        ),
        pytest.param([problem("no-match", "no such GPU")], {"x": "no-match"}, id="a refusal is counted by its code"),
    ],
)
async def test_the_demo_counts_as_refused_only_what_was_refused(
    nats_url: str, unique: str, tmp_path: Path, answers: list[Problem | Accepted], refused: dict[str, str]
) -> None:
    plan = Planned("x", {"job": "x", "run": {"argv": ["true"]}}, "SUCCEEDED")
    demo = Demo(Stack(tmp_path), [plan], quiet=True)
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        scheduler.will("submit", *answers)
        await demo.submit(client, plan)
        assert len(scheduler.asked) == len(answers)
        assert {body["job"] for _, body in scheduler.asked} == {"x"}
    assert demo.refused == refused
    assert demo.following.states == ({} if refused else {"x": "QUEUED"})
