"""The command without a new interpreter for each call: children of one process that has imported it (`fork_server.py`).

A child has streams, an environment and a folder of its own, and ends with a status of its own, as a new process has.
It has the server's hash seed, command line and `/proc/PID/environ`: what is looked for by these is started anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

from tests.system.cli import fork_server
from tests.system.cli.fork_server import NUMBER

#: what an interpreter and its libraries read as they start begins so
READ_AT_START: Final = ("PYTHON", "LC_", "LANG", "TZ", "LD_", "MALLOC_")


class ForkServer:
    """The process that forks, and the socket to it."""

    def __init__(self, env: Mapping[str, str], program: Path, where: str) -> None:
        self._at_start = _read_at_start(env)
        self._calls, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, fork_server.__file__, str(program), where],
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=dict(env),
            )  # fmt: skip

    def can(self, env: Mapping[str, str]) -> bool:
        """Return whether a child can have this environment: an interpreter reads a part of it as it starts."""
        return _read_at_start(env) == self._at_start

    def fork(self, argv: tuple[str, ...], env: Mapping[str, str], cwd: Path | None, streams: tuple[int, ...]) -> Child:
        answer, theirs = socket.socketpair()
        with theirs:
            request = json.dumps({"argv": argv, "env": dict(env), "cwd": str(cwd or Path.cwd())}).encode()
            socket.send_fds(self._calls, [NUMBER.pack(len(request))], [*streams, theirs.fileno()])
            self._calls.sendall(request)
        _, (pidfd,), _, _ = socket.recv_fds(answer, NUMBER.size, 1)
        answer.setblocking(False)
        return Child(pidfd, answer)

    def end(self) -> None:
        self._calls.close()
        self._process.wait()


class Child:
    """A call that runs."""

    def __init__(self, pidfd: int, answer: socket.socket) -> None:
        self._pidfd = pidfd
        self._answer = answer

    async def wait(self) -> int:
        """Return its exit code once it has ended; of one that a signal ended, the negative number of that."""
        (code,) = NUMBER.unpack(await asyncio.get_running_loop().sock_recv(self._answer, NUMBER.size))
        return int(code)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        self._answer.close()
        os.close(self._pidfd)


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
        child.kill()  # which does nothing to one that has ended
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
