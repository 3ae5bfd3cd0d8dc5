"""A container of an earlier agent whose engine does not answer as the next agent starts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import pytest

from moorage.schemas.attempt import AttemptName
from moorage.worker.drivers.container import driver as container_driver
from moorage.worker.drivers.container.docker import DockerDriver, DockerSettings
from moorage.worker.drivers.container.engine import EngineDown, State
from moorage.worker.drivers.container.host import Attempt
from moorage.worker.drivers.kit import Kit
from moorage.worker.drivers.policy import Policy
from moorage.worker.drivers.supervisor_link import SupervisorLink
from moorage.worker.settings import WorkerSettings
from moorage.worker.supervisor.protocol import Ended, Reason

NAME: Final[AttemptName] = ("acme", "train", 0, 1, 7)
NO_RULES: Final = Policy({}, {}, {}, None, {})
OVER: Final = State(is_new=False, is_over=True, code=0, is_out_of_memory=False, pid=0, has_terminal=False)


def driver(tmp_path: Path) -> DockerDriver:
    settings = WorkerSettings(tmp_path / "w", "w1")
    link = SupervisorLink(tmp_path / "s")
    return DockerDriver.from_kit(Kit("w1", settings, NO_RULES, link, 0, True, DockerSettings(socket=tmp_path / "e")))


@pytest.mark.parametrize(("reason", "found"), [("exit", "c"), ("fence", "")])
async def test_the_exit_code_of_one_that_has_ended_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: Reason, found: str
) -> None:
    """As for one of the same agent: else a job that has succeeded would be lost, and run again."""
    monkeypatch.setattr(container_driver, "RETRY_S", 0.001)
    monkeypatch.setattr(container_driver, "ENGINE_S", 0.0)
    made, attempt, downs = driver(tmp_path), Attempt(NAME), [EngineDown("it restarts")] * 5
    attempt.over.set_result(Ended(key="k", reason=reason, proof="container"))
    followed: list[str] = []

    async def container_of(name: AttemptName) -> str:
        if downs:
            raise downs.pop()
        return "c"

    async def state(container: str) -> State:
        return OVER

    async def follow(attempt: Attempt) -> None:
        followed.append(attempt.container)

    monkeypatch.setattr(made._host, "container_of", container_of)
    monkeypatch.setattr(made._host.engine, "state", state)
    monkeypatch.setattr(made, "_follow", follow)
    async with asyncio.timeout(30):
        await made._adopt(attempt)
    assert followed == [found]
