"""Commands in running containers, on a real Docker engine and a real podman: their streams, and that none is left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Exec, Mark, Terminal
from moorage.schemas.job import Request, Run, Secret
from moorage.worker.drivers.execution import CannotExecute, Execution
from moorage.worker.drivers.policy import Policy
from moorage.worker.session.attempt_messages import Ended, Started
from tests.engines import DockerEngine
from tests.podmans import PodmanHome
from tests.system.worker.drivers import test_docker_driver, test_podman_driver
from tests.system.worker.drivers.container_rig import state_of
from tests.system.worker.drivers.test_docker_driver import docker, settings, shared
from tests.system.worker.drivers.test_podman_driver import home
from tests.system.worker.supervisor_rig import lives
from tests.waiting import until

__all__ = ["docker", "home", "shared"]

REQUEST = Request(run=Run(driver="docker", image="x", argv=["sleep", "600"]))


class Taken:
    """What a command wrote, by stream."""

    def __init__(self) -> None:
        self.text = {Mark.OUT: "", Mark.ERR: ""}

    async def take(self, mark: Mark, data: bytes) -> None:
        self.text[mark] += data.decode()

    @property
    def out(self) -> str:
        return self.text[Mark.OUT]


@contextlib.asynccontextmanager
async def begun(rig: Any, name: AttemptName, *argv: str, tty: bool = False) -> AsyncIterator[Execution]:
    asked = Exec(*name, "5e55", list(argv), tty, "vt100" if tty else "")
    execution = await rig.driver.execute(REQUEST, asked, Terminal(31, 97))
    try:
        yield execution
    finally:
        await execution.close()


async def check_terminal(rig: Any, name: AttemptName) -> None:
    taken = Taken()
    script = "trap 'echo interrupted; exit 9' INT; echo $TERM; while :; do sleep 1; done"
    async with begun(rig, name, "sh", "-c", script, tty=True) as execution:
        running = asyncio.create_task(execution.run(taken.take))
        await until(lambda: "vt100" in taken.out, 60.0, "its terminal")
        await execution.write(b"\x03")
        assert await running == 9
        assert "interrupted" in taken.out


async def check_start(rig: Any, name: AttemptName) -> None:
    """What cannot be started is told with its code; the same code of a program of its own is that program's."""
    for program, code in (("no-such-program", 127), ("/tmp", 126)):
        for tty in (False, True):
            with pytest.raises(CannotExecute, match=program) as told:
                async with begun(rig, name, program, tty=tty):
                    pass
            assert told.value.exit_code == code
    taken = Taken()
    async with begun(rig, name, "sh", "-c", "echo mine; no-such-program; exit 127") as execution:
        assert await execution.run(taken.take) == 127
    assert taken.out.strip() == "mine"


async def check_end(rig: Any, name: AttemptName, alive: Callable[[], set[int]]) -> None:
    """What is closed ends the command's processes, and not the container's."""
    before = alive()
    taken = Taken()
    async with begun(rig, name, "sh", "-c", "trap '' TERM HUP; echo ready; sleep 600; sleep 600") as execution:
        running = asyncio.create_task(execution.run(taken.take))
        await until(lambda: "ready" in taken.out and len(alive()) >= len(before) + 2, 60.0, "it runs")
        more = alive() - before
        await execution.close()
        await until(lambda: not any(map(lives, more)), 60.0, "its processes are gone")
        running.cancel()
        await asyncio.wait((running,))
    assert alive() == before


@pytest.mark.slow
async def test_a_command_in_a_container_of_docker(docker: DockerEngine, tmp_path: Path) -> None:
    async with state_of(tmp_path) as state, test_docker_driver.Rig(state, settings(docker)) as rig:
        name = rig.start("j1", "sleep", "600")
        await rig.reported(Started, name)
        (container,) = docker.containers()

        def alive() -> set[int]:
            rows = docker.docker("top", container, "-o", "pid").stdout.splitlines()[1:]
            return set(map(int, rows))

        await check_terminal(rig, name)
        await check_start(rig, name)
        await check_end(rig, name, alive)
        taken = Taken()
        async with begun(rig, name, "sh", "-c", "trap '' TERM HUP; echo ready; sleep 600") as execution:
            running = asyncio.create_task(execution.run(taken.take))
            await until(lambda: "ready" in taken.out, 60.0, "it runs")
            rig.driver.end(name, 0.0, "test")
            assert await rig.reported(Ended, name) == (name, -9, "end")
            with contextlib.suppress(Refused):  # the engine may have forgotten it with the container
                assert await running != 0
        with pytest.raises(Refused):
            async with begun(rig, name, "true"):
                pass


@pytest.mark.slow
async def test_a_command_in_a_container_of_podman(home: PodmanHome, tmp_path: Path) -> None:
    async with state_of(tmp_path) as state, test_podman_driver.Rig(home, state) as rig:
        name = rig.start("j1", "sleep", "600")
        await rig.reported(Started, name)
        await check_terminal(rig, name)
        await check_start(rig, name)
        taken = Taken()
        async with begun(rig, name, "sh", "-c", "trap '' TERM HUP; echo ready; sleep 600; sleep 600") as execution:
            running = asyncio.create_task(execution.run(taken.take))
            await until(lambda: "ready" in taken.out, 60.0, "it runs")
            pid, _ = await rig.driver._host.engine.command_state(execution._command)  # type: ignore[attr-defined]
            assert lives(pid)
            await execution.close()
            await until(lambda: not lives(pid), 60.0, "it is gone")
            running.cancel()
            await asyncio.wait((running,))
        secret = rig.start("j2", "sleep", "600", env={"KEY": Secret("token")})
        await rig.reported(Started, secret)
        taken = Taken()
        asked = Exec(*secret, "5e55", ["sh", "-c", "echo $KEY"])
        request = Request(run=Run(driver="podman", image="x", argv=["sleep"], env={"KEY": Secret("token")}))
        execution = await rig.driver.execute(request, asked, Terminal())
        assert await execution.run(taken.take) == 0
        await execution.close()
        assert taken.out == f"{test_podman_driver.TOKEN}\n".replace("\n", " ", 1)
        for each in (name, secret):
            rig.driver.end(each, 0.0, "test")
            await rig.reported(Ended, each)


@pytest.mark.slow
async def test_a_command_in_a_container_is_one_of_the_programs_that_its_tenant_may_start(
    docker: DockerEngine,
    tmp_path: Path,
) -> None:
    policy = Policy({}, {"acme": ("sleep",)}, {}, None, {})
    async with state_of(tmp_path) as state, test_docker_driver.Rig(state, settings(docker), policy) as rig:
        name = rig.start("j1", "sleep", "600")
        await rig.reported(Started, name)
        async with begun(rig, name, "sleep", "0") as execution:
            assert await execution.run(Taken().take) == 0
        with pytest.raises(Refused, match="tenant acme may not start sh on this worker"):
            async with begun(rig, name, "sh", "-c", "true"):
                pass
        rig.driver.end(name, 0.0, "test")
        await rig.reported(Ended, name)
