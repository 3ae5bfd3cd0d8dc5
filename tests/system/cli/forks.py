"""The command, and services, without a new interpreter for each: children of a process that has imported them
(`fork_server.py`).

A child has streams, an environment and a folder of its own, and the groups of its caller. It ends with a status of its
own, as a new process has. It has the server's hash seed, command line and `/proc/PID/environ`: what is looked for by
these is started anew.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Literal

import moorage
from tests.system.cli import fork_server
from tests.system.cli.fork_server import NUMBER

#: where moorage's packages are
ROOTS: Final = os.pathsep.join(str(Path(path).parent) for path in moorage.__path__)
#: what an interpreter and its libraries read as they start begins so
READ_AT_START: Final = ("PYTHON", "LC_", "LANG", "TZ", "LD_", "MALLOC_")


class ForkServer:
    """The process that forks, and the socket to it."""

    def __init__(
        self, env: Mapping[str, str], program: Path | str, where: str, loads: Literal["command", "services"] = "command"
    ) -> None:
        self._at_start = _read_at_start(env)
        self._calls, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, fork_server.__file__, str(program), where, loads],
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=dict(env),
            )  # fmt: skip

    def can(self, env: Mapping[str, str]) -> bool:
        """Return whether a child can have this environment: an interpreter reads a part of it as it starts."""
        return _read_at_start(env) == self._at_start

    def fork(self, argv: tuple[str, ...], env: Mapping[str, str], cwd: Path | None, streams: tuple[int, ...]) -> Child:
        answer, theirs = socket.socketpair()
        with theirs:
            call = {"argv": argv, "env": dict(env), "cwd": str(cwd or Path.cwd()), "groups": os.getgroups()}
            request = json.dumps(call).encode()
            socket.send_fds(self._calls, [NUMBER.pack(len(request))], [*streams, theirs.fileno()])
            self._calls.sendall(request)
        told, (pidfd,), _, _ = socket.recv_fds(answer, NUMBER.size, 1)
        (pid,) = NUMBER.unpack(told)
        answer.setblocking(False)
        return Child(pid, pidfd, answer)

    def end(self) -> None:
        self._calls.close()
        self._process.wait()


class Child:
    """A call that runs."""

    def __init__(self, pid: int, pidfd: int, answer: socket.socket) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._answer = answer

    async def wait(self) -> int:
        """Return its exit code once it has ended; of one that a signal ended, the negative number of that."""
        (code,) = NUMBER.unpack(await asyncio.get_running_loop().sock_recv(self._answer, NUMBER.size))
        return int(code)

    def send_signal(self, number: int) -> None:
        """Raises `ProcessLookupError` once it has ended, or is closed."""
        if self._pidfd < 0:
            raise ProcessLookupError
        signal.pidfd_send_signal(self._pidfd, number)

    def close(self) -> None:
        self._answer.close()
        os.close(self._pidfd)
        self._pidfd = -1


class Service:
    """A child that runs on beside its test: the part of `asyncio.subprocess.Process` that tests need."""

    def __init__(self, child: Child) -> None:
        self.pid = child.pid
        self.send_signal = child.send_signal
        self._ended = asyncio.ensure_future(child.wait())
        self._ended.add_done_callback(lambda _: child.close())

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def begin(server: ForkServer, argv: Sequence[str], env: Mapping[str, str], cwd: Path | None, out: IO[bytes]) -> Service:
    """Start a fork that reads nothing, and writes all to `out`."""
    with open(os.devnull) as nothing:
        return Service(server.fork(tuple(argv), env, cwd, (nothing.fileno(), out.fileno(), out.fileno())))


@functools.cache
def _services() -> ForkServer:
    """The process that has imported schedulers and agents; it ends with this process."""
    server = ForkServer({**os.environ, "PYTHONPATH": ROOTS}, "-c", "fork_server:interpret", "services")
    atexit.register(server.end)
    return server


async def python(
    *arguments: str, env: Mapping[str, str], out: IO[bytes], cwd: Path | None = None
) -> asyncio.subprocess.Process | Service:
    """Start Python with `-c` or `-m`, as a fork where its environment allows that. It reads nothing, and writes all to
    `out`; where the environment has this process's PYTHONPATH, or none, it finds moorage where this process does."""
    if env.get("PYTHONPATH") == os.environ.get("PYTHONPATH"):
        env = {**env, "PYTHONPATH": ROOTS}
    if _services().can(env):
        return begin(_services(), arguments, env, cwd, out)
    return await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, env=env, cwd=cwd
    )


async def run(
    server: ForkServer, argv: tuple[str, ...], env: Mapping[str, str], cwd: Path | None, stdin: bytes
) -> tuple[int, bytes, bytes]:
    """Run a command to its end in a fork. Returns its exit code, and what it wrote to stdout and stderr."""
    (into, given), (out, to_out), (err, to_err) = (os.pipe() for _ in range(3))
    try:
        child = server.fork(argv, env, cwd, (into, to_out, to_err))
    finally:
        for descriptor in (into, to_out, to_err):
            os.close(descriptor)
    try:
        async with _written(given, stdin), _read(out) as of_out, _read(err) as of_err:
            told = await asyncio.gather(of_out.read(), of_err.read())
            return (await child.wait(), *told)
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGKILL)
        child.close()


@contextlib.asynccontextmanager
async def _written(descriptor: int, data: bytes) -> AsyncIterator[None]:
    """Write all of it to a pipe, then close that; what nobody has read at the end is dropped."""
    pipe = os.fdopen(descriptor, "wb", 0)
    transport, _ = await asyncio.get_running_loop().connect_write_pipe(asyncio.BaseProtocol, pipe)
    transport.write(data)
    transport.close()
    try:
        yield
    finally:
        if transport.get_write_buffer_size():
            transport.abort()


@contextlib.asynccontextmanager
async def _read(descriptor: int) -> AsyncIterator[asyncio.StreamReader]:
    """What comes from a pipe."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
    )
    try:
        yield reader
    finally:
        transport.close()


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in env.items() if key.startswith(READ_AT_START)}
