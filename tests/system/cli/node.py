"""A `moorage up` of one's own, and the command as a user runs it: real processes, nothing in this one."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage import cli
from moorage.bus.target import Up, read_up
from moorage.client import AsyncClient
from tests.leftover import ends_with_the_test
from tests.system.cli import forks
from tests.waiting import NeverHappened, until

COMMAND: Final = (sys.executable, "-m", "moorage.cli")
COMMAND_S_MAX: Final = 120.0
UP_S_MAX: Final = 120.0
FREE_S_MAX: Final = 10.0


@dataclass(frozen=True)
class Ran:
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def frames(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(line) for line in self.out.splitlines()]

    @property
    def frame(self) -> dict[str, Any]:
        (frame,) = self.frames
        return frame

    @property
    def rows(self) -> list[list[str]]:
        """The cells of a piped table, header first."""
        return [line.split("\t") for line in self.out.splitlines()]


def environment(**extra: str) -> dict[str, str]:
    """Without what a developer's own shell may say of NATS and moorage."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("NATS_", "MOORAGE_"))}
    return {**env, "XDG_CONFIG_HOME": "/nonexistent", **extra}


async def start(
    *argv: str, env: dict[str, str] | None = None, cwd: Path | None = None, stdout: int = asyncio.subprocess.PIPE
) -> asyncio.subprocess.Process:
    """The command, running; its pipes are read by who started it. What a test leaves of it ends with the test."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=stdout,
        stderr=asyncio.subprocess.PIPE,
        env=environment(**(env or {})),
        cwd=cwd,
    )
    return ends_with_the_test(process)


@functools.cache
def command_server() -> forks.ForkServer:
    """The command's server, which ends with this process."""
    (folder,) = cli.__path__
    server = forks.ForkServer(environment(), Path(folder) / "__main__.py", "moorage.cli.start:main")
    atexit.register(server.end)
    return server


async def moorage(*argv: str, env: dict[str, str] | None = None, stdin: str = "", cwd: Path | None = None) -> Ran:
    """Run the command to its end, in a fork of a process that has imported it, where its environment allows that."""
    whole = environment(**(env or {}))
    server = command_server()
    if server.can(whole):
        async with asyncio.timeout(COMMAND_S_MAX):
            code, out, err = await forks.run(server, argv, whole, cwd, stdin.encode())
        return Ran(code, out.decode(), err.decode())
    process = await start(*argv, env=env, cwd=cwd)
    async with asyncio.timeout(COMMAND_S_MAX):
        out, err = await process.communicate(stdin.encode())
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode())


async def unread(*argv: str, env: dict[str, str] | None = None) -> Ran:
    """As `moorage`, into a pipe that nobody reads any more: what `| head` does to what is longer."""
    read, write = os.pipe()
    os.close(read)
    try:
        process = await start(*argv, env=env, stdout=write)
    finally:
        os.close(write)
    async with asyncio.timeout(COMMAND_S_MAX):
        _, err = await process.communicate()
    assert process.returncode is not None
    return Ran(process.returncode, "", err.decode())


class Lines:
    """What a running command writes to one pipe, as it comes."""

    def __init__(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        self._stream = stream
        self.text = ""

    async def until(self, wanted: str) -> str:
        """Read on until `wanted` was written."""
        async with asyncio.timeout(COMMAND_S_MAX):
            while wanted not in self.text:
                piece = await self._stream.read(4096)
                assert piece, f"ended without {wanted!r}: {self.text}"
                self.text += piece.decode()
        return self.text


class Node:
    """A running `moorage up`."""

    def __init__(self, folder: Path, process: asyncio.subprocess.Process) -> None:
        self.folder = folder
        self.process = process

    @property
    def up(self) -> Up:
        up = read_up(self.folder)
        assert up is not None
        return up

    @property
    def url(self) -> str:
        return self.up.url

    def env(self, tenant: str = "") -> dict[str, str]:
        return {"MOORAGE_HOME": str(self.folder), **({"MOORAGE_TENANT": tenant} if tenant else {})}

    async def run(self, *argv: str, tenant: str = "", stdin: str = "") -> Ran:
        return await moorage(*argv, env=self.env(tenant), stdin=stdin)

    async def until_free(self) -> None:
        """Wait until no GPU is in use, or for a while: jobs that other tests cancelled may still end; some run on."""
        async with AsyncClient(self.url) as client:

            async def is_free() -> bool:
                return all(row.free == row.gpus for row in (await client.fleet.show()).workers)

            with contextlib.suppress(NeverHappened):
                await until(is_free, FREE_S_MAX, "every GPU free")

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)
        async with asyncio.timeout(COMMAND_S_MAX):
            return await self.process.wait()


async def start_node(
    folder: Path, *argv: str, simulate: str = "2x4xH100", is_open: bool = True, env: dict[str, str] | None = None
) -> Node:
    """`moorage up`, ready; what it says is in `talk(folder)`. It is open to clients of a test that know its URL alone:
    tests find no fleet of their user."""
    err = os.open(_talk_file(folder), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            "up",
            "--simulate",
            simulate,
            "--data",
            str(folder),
            "--port",
            "0",
            *(["--open"] if is_open else []),
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=err,
            env=environment(**(env or {})),
        )
    finally:
        os.close(err)
    node = Node(folder, process)
    try:
        # its last line: it prints each by itself
        await until(lambda: "Ctrl-C ends" in talk(folder) or process.returncode is not None, UP_S_MAX, "moorage is up")
        assert process.returncode is None, talk(folder)
    except BaseException:
        await node.stop(signal.SIGKILL)
        raise
    return node


def talk(folder: Path) -> str:
    """What the node said so far."""
    return _talk_file(folder).read_text()


def _talk_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.talk")


@contextlib.asynccontextmanager
async def node_on(
    folder: Path, *argv: str, simulate: str = "2x4xH100", is_open: bool = True, env: dict[str, str] | None = None
) -> AsyncIterator[Node]:
    node = await start_node(folder, *argv, simulate=simulate, is_open=is_open, env=env)
    try:
        yield node
    finally:
        await node.stop()


def processes_of(text: str) -> list[int]:
    """Pids of processes whose command line or environment holds `text`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if text.encode() in words:
            found.append(int(entry.name))
    return found


@contextlib.asynccontextmanager
async def on_a_terminal(*words: str, env: dict[str, str]) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """The command with a terminal of its own for its output: the process, and the terminal's other end."""
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *words, stdin=asyncio.subprocess.DEVNULL, stdout=theirs, stderr=theirs,
        env=environment(**env, TERM="xterm", NO_COLOR="1"),
    )  # fmt: skip
    os.close(theirs)
    try:
        yield process, ours
    finally:
        os.close(ours)
        if process.returncode is None:
            process.kill()
            await process.wait()


async def until_shown(terminal: int, wanted: str) -> str:
    """Read a terminal's other end until `wanted` came: all that was read. Fails if the command ends before that."""
    loop = asyncio.get_running_loop()
    text = ""
    async with asyncio.timeout(COMMAND_S_MAX):
        while wanted not in text:
            ready = asyncio.Event()
            loop.add_reader(terminal, ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_reader(terminal)
            try:
                text += os.read(terminal, 65536).decode()
            except OSError as error:  # nobody has the terminal open any more
                raise AssertionError(f"the command ended without {wanted!r}, after {text!r}") from error
    return text


def read_all(terminal: int) -> str:
    """What is left in a terminal whose other end is closed; a read gives a part of it (EIO is its end)."""
    parts = []
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts).decode()
