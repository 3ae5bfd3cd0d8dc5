"""`moorage run -it` and `moorage attach` as a user types them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from moorage.cli.jobs.exec import LeaveKeys
from moorage.worker.agent.run import SUPERVISOR_FOLDER
from moorage.worker.supervisor.client import Supervised
from tests.podmans import PodmanHome, podman_home, why_no_podman
from tests.system.cli.node import COMMAND, Node, environment, start
from tests.waiting import until

IMAGE = "moorage-test:terminal"


class Typed:
    """A verb on a terminal of its own."""

    def __init__(self, process: asyncio.subprocess.Process, ours: int) -> None:
        self.process = process
        self._ours = ours
        self._text = ""

    def keys(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    async def shows(self, wanted: str) -> None:
        assert await self.shows_or_ends(wanted), self._text

    async def shows_or_ends(self, wanted: str) -> bool:
        """Whether it shows this, before it ends."""

        def there() -> bool:
            is_over = self.process.returncode is not None
            with contextlib.suppress(BlockingIOError):
                self._text += os.read(self._ours, 65536).decode(errors="replace")
            return wanted in self._text or is_over

        await until(there, 60.0, wanted)
        before, found, self._text = self._text.partition(wanted)
        self._text = self._text if found else before
        return bool(found)

    async def code(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 60.0)


@contextlib.asynccontextmanager
async def typed(node: Node, *words: str) -> AsyncIterator[Typed]:
    import fcntl
    import termios

    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 31, 97, 0, 0))
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *words, stdin=theirs, stdout=theirs, stderr=theirs,
        env=environment(**node.env(), TERM="vt100"), start_new_session=True,
    )  # fmt: skip
    try:
        yield Typed(process, ours)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(ours)
        os.close(theirs)


def test_a_job_has_this_terminal_which_is_left_and_taken_again(
    node: Node, node_loop: asyncio.AbstractEventLoop
) -> None:
    async def work() -> None:
        async with typed(node, "run", "-it", "--gpu", "--job", "mine", "--", "sh") as it:
            it.keys(b"echo be''gun $TERM; until stty size | grep -q '31 97'; do sleep 0.05; done; echo si''zed\n")
            await it.shows("begun vt100")
            await it.shows("sized")
            it.keys(b"sleep 600\n")
            await it.shows("sleep 600")
            it.keys(b"\x03echo in''terrupted\n")
            await it.shows("interrupted")
            it.keys(b"\x10")
            it.keys(b"\x11")
            await it.shows("moorage attach mine")
            assert await it.code() == 0
        assert (await node.run("show", "mine", "--json")).frame["data"]["state"] == "RUNNING"
        async with typed(node, "attach", "mine") as it:
            await it.shows("interrupted")
            it.keys(b"exit 5\n")
            assert await it.code() == 5
        shown = await node.run("wait", "mine")
        assert shown.code == 5

    node_loop.run_until_complete(work())


@contextlib.asynccontextmanager
async def boxes(node: Node, home: PodmanHome, state: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker of this node that runs containers of podman, up."""
    words = ("worker", "--id", "boxes", "--simulate", "1xT4", "--drivers", "podman", "--state", str(state))
    process = await start(*words, env={**node.env(), "CONTAINER_HOST": f"unix://{home.socket}"})
    reading = [asyncio.create_task(each.read()) for each in (process.stdout, process.stderr) if each is not None]
    try:

        async def is_up() -> bool:
            rows = (await node.run("fleet", "--json")).frame["data"]["workers"]
            return any(row["worker"] == "boxes" and row["state"] == "up" for row in rows)

        await until(is_up, 60.0, "the worker is up")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await asyncio.wait(reading)


@pytest.mark.slow
def test_a_container_has_this_terminal_whose_job_outlives_its_agent(
    node: Node, node_loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    if why := why_no_podman():
        pytest.skip(why)

    async def work(home: PodmanHome) -> None:
        asked = ("--gpu", "1xT4", "--driver", "podman", "--image", IMAGE, "--time-limit", "10m")
        async with boxes(node, home, tmp_path / "s") as agent:
            async with typed(node, "run", "-it", *asked, "--job", "boxed", "--", "sh") as it:
                it.keys(b"echo be''gun $TERM in $PWD; until [ \"$(stty size)\" = '31 97' ]; do sleep 0.05; done\n")
                await it.shows("begun vt100 in /work")
                it.keys(b"echo si''zed; sleep 600\n")
                await it.shows("sized")
                it.keys(b"\x03echo in''terrupted\n")
                await it.shows("interrupted")
                it.keys(b"\x10\x11")
                await it.shows("moorage attach boxed")
                assert await it.code() == 0
            agent.kill()
            await agent.wait()
        async with boxes(node, home, tmp_path / "s"):

            async def ends() -> bool:  # until its new agent holds it
                async with typed(node, "attach", "boxed") as it:
                    it.keys(b"echo ag''ain; exit 5\n")
                    return await it.shows_or_ends("again") and await it.code() == 5

            await until(ends, 60.0, "the terminal is taken again")
            assert (await node.run("wait", "boxed")).code == 5
            shown = (await node.run("logs", "boxed", "--no-follow")).out
            assert shown.index("begun vt100") < shown.index("interrupted") < shown.index("again")

    async def with_its_supervisor(home: PodmanHome) -> None:
        try:
            await work(home)
        finally:
            left = await Supervised.connect(tmp_path / "s" / SUPERVISOR_FOLDER, spawn_if_absent=False)
            await left.shutdown(0.0)

    with podman_home() as home:
        home.make_image(IMAGE)
        node_loop.run_until_complete(with_its_supervisor(home))


def test_a_run_returns_the_jobs_code_and_what_is_piped_in_is_typed(
    node: Node, node_loop: asyncio.AbstractEventLoop
) -> None:
    async def work() -> None:
        ran = await node.run("run", "-it", "--gpu", "--", "sh", "-c", "read x; echo got $x; exit 6", stdin="words\n")
        assert ran.code == 6
        assert "got words" in ran.out
        ran = await node.run("run", "-it", "--gpu", "--replicas", "2", "--", "true")
        assert (ran.code, "-it holds one terminal" in ran.err) == (2, True)
        ran = await node.run("run", "-it", "--gpu", "--", "sh", "-c", "echo so quick")
        assert (ran.code, "so quick" in ran.out) == (0, True)

    node_loop.run_until_complete(work())


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_a_terminal_that_is_lost_leaves_the_job_running_for_another(
    node: Node, node_loop: asyncio.AbstractEventLoop, number: int
) -> None:
    async def work() -> None:
        job = f"lost-{number}"
        async with typed(node, "run", "-it", "--gpu", "--job", job, "--", "sh", "-c", "echo begun; exec cat") as it:
            await it.shows("begun")
            it.process.send_signal(number)
            await it.code()
        async with asyncio.timeout(60.0):
            while True:  # the worker misses a killed one after 10 s
                async with typed(node, "attach", job) as it:
                    if await it.shows_or_ends("begun"):
                        it.keys(b"\x04")
                        assert await it.code() == 0
                        break
        assert (await node.run("wait", job)).code == 0

    node_loop.run_until_complete(work())


@pytest.mark.parametrize(
    ("typed_pieces", "passed", "has_left"),
    [
        ([b"ab", b"\x10", b"\x11c"], b"ab", True),
        ([b"a\x10\x11b"], b"a", True),
        ([b"\x10", b"\x10", b"\x11"], b"\x10", True),
        ([b"\x10", b"x", b"\x11"], b"\x10x\x11", False),
    ],
)
def test_the_keys_that_leave_are_found_in_any_pieces(typed_pieces: list[bytes], passed: bytes, has_left: bool) -> None:
    keys, got = LeaveKeys(), b""
    for each in typed_pieces:
        more, left = keys.of(each)
        got += more
    assert (got, left) == (passed, has_left)
