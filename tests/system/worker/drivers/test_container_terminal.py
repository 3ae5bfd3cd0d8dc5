"""The terminals of containers, on a real Docker engine and a real podman: who holds them, what they show and store, and
the end of input once they are lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Exec, Mark, Terminal
from moorage.schemas.job import Request, Run
from moorage.worker.drivers.container.engine import Piece, _unframed
from moorage.worker.drivers.container.output import FOLDER
from moorage.worker.drivers.execution import Execution
from moorage.worker.session.attempt_messages import Ended, Started
from moorage.worker.supervisor.terminal import RECENT_BYTES
from tests.podmans import PodmanHome
from tests.system.worker.drivers import test_docker_driver, test_podman_driver
from tests.system.worker.drivers.container_rig import state_of
from tests.system.worker.drivers.test_docker_driver import docker, settings, shared
from tests.system.worker.drivers.test_podman_driver import home
from tests.waiting import until

__all__ = ["docker", "home", "shared"]

REQUEST = Request(run=Run(driver="docker", image="x", argv=["sh"], stdin="stream"))
#: makes a rig on a state folder
Make = Callable[[Path], Any]


@pytest.fixture(params=["docker", "podman"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    engine: Any = request.getfixturevalue("docker" if request.param == "docker" else "home")
    if request.param == "docker":
        yield lambda state: test_docker_driver.Rig(state, settings(engine))
    else:
        yield lambda state: test_podman_driver.Rig(engine, state)


class Held:
    """A terminal that is held: what it shows, and its code."""

    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        self.text = ""
        self.running = asyncio.create_task(execution.run(self._take))

    async def _take(self, mark: Mark, data: bytes) -> None:
        assert mark is Mark.OUT
        self.text += data.decode()

    async def shows(self, wanted: str) -> None:
        def there() -> bool:
            if self.running.done() and wanted not in self.text:
                raise AssertionError(f"it ended ({self.running}) with {self.text[-500:]!r}")
            return wanted in self.text

        await until(there, 90.0, f"{wanted!r} is shown")


@contextlib.asynccontextmanager
async def held(rig: Any, name: AttemptName, *, leaves: bool = False) -> AsyncIterator[Held]:
    execution = await rig.driver.execute(REQUEST, Exec(*name, "5e55", []), Terminal(31, 97))
    it = Held(execution)
    try:
        yield it
    finally:
        if leaves:
            execution.leave()
        await execution.close()
        it.running.cancel()
        await asyncio.wait((it.running,))


@pytest.mark.slow
async def test_the_holder_types_and_sees_and_the_stored_output_has_it_too(make: Make, tmp_path: Path) -> None:
    async with state_of(tmp_path) as state, make(state) as rig:
        script = (
            "stty -echo; echo begun; read x < /dev/tty; echo got $x; "
            "until [ \"$(stty size)\" = '31 97' ]; do sleep 0.05; done; seq -s , 3000; seq 9; read y; exit $y"
        )
        name = rig.start("j1", "sh", "-c", script, stdin="stream")
        await rig.reported(Started, name)
        async with held(rig, name, leaves=True) as it:
            await it.shows("begun\r\n")
            with pytest.raises(Refused, match="another caller holds"):
                async with held(rig, name):
                    pass
            await it.execution.write(b"this\n")
            await it.shows("got this\r\n1,2,")
            await it.shows("8\r\n9\r\n")
        async with held(rig, name) as it:
            await it.shows("begun\r\n")
            await it.shows("8\r\n9\r\n")
            await it.execution.write(b"7\n")
            assert await it.running == 7
        assert await rig.reported(Ended, name) == (name, 7, "exit")
        numbers = ",".join(map(str, range(1, 3001))) + "\r\n" + "".join(f"{at}\r\n" for at in range(1, 10))
        assert rig.live_output(name) == f"begun\r\ngot this\r\n{numbers}"
        assert list((state / FOLDER).iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["nobody came", "lost", "left"])
async def test_the_end_of_input_follows_a_lost_holder_and_not_one_that_left(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with state_of(tmp_path) as state:
        async with make(state) as first:
            name = first.start("j1", "sh", "-c", "stty -echo; echo begun; read x; cat; exit 5", stdin="stream")
            await first.reported(Started, name)
            if how != "nobody came":
                async with held(first, name, leaves=how == "left") as it:
                    await it.shows("begun")
                    await it.execution.write(b"on\n")
        monkeypatch.setattr("moorage.worker.drivers.container.terminal.LOST_S", 0.1)
        async with make(state) as second:  # an agent's restart: the container goes on, and it is known who left it
            if how == "left":
                async with held_again(second, name) as it:
                    await it.execution.write(b"more\n")
                    await it.shows("more")
                    assert second.told(Ended, name) is None
                    await it.execution.write(b"")
                    assert await it.running == 5
            assert await second.reported(Ended, name) == (name, 5, "exit")


@contextlib.asynccontextmanager
async def held_again(rig: Any, name: AttemptName) -> AsyncIterator[Held]:
    """Hold a terminal once the agent, or its engine, has it again."""
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(90.0):
        while True:
            try:
                it = await stack.enter_async_context(held(rig, name))
                break
            except Refused:
                await asyncio.sleep(0.05)
        yield it


@pytest.mark.slow
async def test_a_restart_of_the_engine_ends_the_stream_and_not_the_job(home: PodmanHome, tmp_path: Path) -> None:
    async with state_of(tmp_path) as state, test_podman_driver.Rig(home, state) as rig:
        name = rig.start("j1", "sh", "-c", "stty -echo; echo begun; read x; echo got $x; exit 5", stdin="stream")
        await rig.reported(Started, name)
        async with held(rig, name) as it:
            await it.shows("begun")
            home.kill_service()
            with pytest.raises(Refused, match="lost the terminal"):
                await it.running
        home.serve()
        async with held_again(rig, name) as it:
            await it.shows("begun")
            await it.execution.write(b"this\n")
            await it.shows("got this")
            assert await it.running == 5
        assert await rig.reported(Ended, name) == (name, 5, "exit")
        assert await rig.output(name) == "begun\r\ngot this\r\n"


@pytest.mark.slow
async def test_a_slow_holder_stops_the_output_and_loses_nothing(make: Make, tmp_path: Path) -> None:
    async with state_of(tmp_path) as state, make(state) as rig:
        script = "stty -echo -opost; echo ready; read x; seq 600000; echo end; read y"
        name: AttemptName = rig.start("j1", "sh", "-c", script, stdin="stream")
        await rig.reported(Started, name)
        execution = await rig.driver.execute(REQUEST, Exec(*name, "5e55", []), Terminal())
        taken, goes = bytearray(), asyncio.Event()

        async def take(mark: Mark, data: bytes) -> None:
            taken.extend(data)
            await goes.wait()

        running = asyncio.create_task(execution.run(take))
        await until(lambda: taken == b"ready\n", 90.0, "it reads")
        await execution.write(b"\n")
        await until(lambda: execution._room.is_set() is False, 90.0, "it is full")
        goes.set()
        await until(lambda: taken.endswith(b"end\n"), 90.0, "all of it")
        assert bytes(taken) == b"ready\n" + b"".join(b"%d\n" % at for at in range(1, 600001)) + b"end\n"
        execution.leave()
        await execution.close()
        running.cancel()
        async with held(rig, name) as it:
            await it.shows("end\n")
            assert len(it.text) == RECENT_BYTES, "what it has shown begins with the newest"
            await it.execution.write(b"\n")
            assert await it.running == 0
        assert await rig.reported(Ended, name) == (name, 0, "exit")


@pytest.mark.slow
async def test_a_cancelled_job_ends_its_terminal_and_one_without_is_refused(make: Make, tmp_path: Path) -> None:
    async with state_of(tmp_path) as state, make(state) as rig:
        name = rig.start("j1", "sh", "-c", "trap '' HUP; echo begun; cat", stdin="stream")
        plain = rig.start("j2", "sleep", "600")
        for each in (name, plain):
            await rig.reported(Started, each)
        with pytest.raises(Refused, match="starting or over"):
            async with held(rig, plain):
                pass
        async with held(rig, name) as it:
            await it.shows("begun")
            for each in (name, plain):
                rig.driver.end(each, 0.0, "test")
            assert await it.running == -9
        for each in (name, plain):
            assert await rig.reported(Ended, each) == (each, -9, "end")


@pytest.mark.parametrize("cut", [1, 7, 4096, 1 << 20])
async def test_a_log_without_frames_is_cut_where_its_chunks_end(cut: int) -> None:
    stamps = [f"2026-11-26T16:30:20.15262021{at}+02:00" for at in range(6)]
    datas = [
        b"a line\n",
        b"x" * 16384,
        b"y" * 16384,
        b"the rest",
        b"\n",
        b"2026-11-26T16:30:20.152620215Z of its own\n",
    ]

    async def chunks() -> AsyncIterator[tuple[bytes, bool]]:
        for stamp, data in zip(stamps, datas, strict=True):
            whole = stamp.encode() + b" " + data
            for at in range(0, len(whole), cut):
                yield whole[at : at + cut], False
            yield b"", True

    found = [piece async for piece in _unframed(chunks())]
    assert found == [Piece(False, stamp, data) for stamp, data in zip(stamps, datas, strict=True)]
