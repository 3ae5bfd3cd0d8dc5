"""Serve commands that an agent runs in running attempts: one connection for each, on a socket of its own.

A message is one packet of SOCK_SEQPACKET, in msgpack. The agent connects and sends `Execute` with three descriptors
(standard input, output and error), `Attach` with a pipe for what the attempt's terminal shows, or `Guard` with none.
The supervisor answers `Executed` or `Refused`; the agent may send `Signal`; the last message is `Over`. The bytes of a
command never pass the supervisor. If the connection ends first, the command and its processes are killed: no command
outlives the agent that asked for it. A terminal that was held goes on without a holder.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from moorage.schemas.unreadable import UNREADABLE
from moorage.worker.supervisor.attempt import Command
from moorage.worker.supervisor.child import StartRefused, reported_failure
from moorage.worker.supervisor.containers import containers_of
from moorage.worker.supervisor.jobs import Jobs
from moorage.worker.supervisor.log import log
from moorage.worker.supervisor.server import refusal
from moorage.worker.supervisor.terminal import HeldTerminal

SOCKET_NAME: Final = "commands.sock"
PACKET_BYTES_MAX: Final = 512 * 1024
CONNECTIONS_MAX: Final = 512
#: standard input, output and error
STREAMS: Final = 3


class Execute(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="execute"):
    """Run `argv` in the running attempt `key`, with its environment and `term` as TERM. Three descriptors come with
    it."""

    key: str
    argv: tuple[str, ...]
    term: str = ""


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag="attach"):
    """Hold the terminal of the running attempt `key`. The writing end of a pipe comes with it, which gets what the
    terminal shows; `Executed` brings the terminal's outer end."""

    key: str


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """The caller leaves the terminal by its own will: its input stays open when this connection ends."""


class Guard(msgspec.Struct, frozen=True, kw_only=True, tag="guard"):
    """Kill the process `pid` of the container `container` when this connection ends; an engine started it."""

    container: str
    pid: int


class Signal(msgspec.Struct, frozen=True, kw_only=True, tag="signal"):
    """Send a signal to the process group of the command."""

    number: int


class Executed(msgspec.Struct, frozen=True, kw_only=True, tag="executed"):
    """The command runs its program, is guarded, or its terminal is held."""

    pid: int


class Over(msgspec.Struct, frozen=True, kw_only=True, tag="over"):
    """The command's first process is over; `code` is its exit code, or minus the signal that ended it."""

    code: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The command does not run: the stage of its start that failed, the error number, and why."""

    stage: str
    errno: int
    message: str


Asked: TypeAlias = Execute | Attach | Guard | Signal | Leave
Answer: TypeAlias = Executed | Over | Refused

encode: Final = msgspec.msgpack.Encoder().encode
decode_answer: Final = msgspec.msgpack.Decoder(Answer).decode
_decode_asked: Final = msgspec.msgpack.Decoder(Asked).decode


class Commands:
    """The connections of commands. `begin` to take them, `close` at the end."""

    def __init__(self, jobs: Jobs, listener: socket.socket) -> None:
        self._jobs = jobs
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._connections: set[_Connection] = set()

    def begin(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for connection in list(self._connections):
            connection.close()

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError as error:  # gone meanwhile, or out of descriptors
            log(f"a connection for a command: {error}")
            return
        peer.setblocking(False)
        connection = _Connection(self._jobs, peer, self._connections.discard)
        self._connections.add(connection)
        why = refusal(peer)
        if why is None and len(self._connections) > CONNECTIONS_MAX:
            why = f"{CONNECTIONS_MAX} commands run on this host"
        if why is not None:
            connection.refuse(StartRefused(errno.EPERM, "connection", why))
        else:
            connection.begin()


class _Connection:
    """One command, or one guarded process."""

    def __init__(self, jobs: Jobs, peer: socket.socket, over: Callable[[_Connection], None]) -> None:
        self._jobs = jobs
        self._peer = peer
        self._over = over
        self._loop = asyncio.get_running_loop()
        self._command: Command | None = None
        self._confirm = -1
        self._guarded = -1  # a pidfd
        self._container = ""
        self._terminal: HeldTerminal | None = None
        self._has_left = False
        self._pid = 0
        self._status: int | None = None
        self._closed = False

    def begin(self) -> None:
        self._loop.add_reader(self._peer.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._peer, PACKET_BYTES_MAX, STREAMS)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        try:
            if not data:
                self.close()
                return
            self._asked(_decode_asked(data), descriptors)
        except StartRefused as refused:
            self.refuse(refused)
        except UNREADABLE as error:
            self.refuse(StartRefused(errno.EINVAL, "request", str(error)))
        except OSError as error:  # no descriptor left: without an answer its caller would wait for good
            self.refuse(StartRefused(error.errno or errno.EIO, "request", error.strerror or str(error)))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _asked(self, asked: Asked, descriptors: list[int]) -> None:
        if isinstance(asked, Signal):
            self._signal(asked.number)
        elif isinstance(asked, Leave):
            self._has_left = True
        elif self._pid:
            raise StartRefused(errno.EINVAL, "request", "one command a connection")
        elif isinstance(asked, Guard):
            self._guard(asked)
        elif isinstance(asked, Attach):
            self._attach(asked, descriptors)
        elif len(descriptors) != STREAMS:
            raise StartRefused(errno.EINVAL, "request", f"{len(descriptors)} descriptors came in place of {STREAMS}")
        else:
            self._command, self._confirm = self._jobs.run_command(
                asked.key, asked.argv, asked.term, descriptors, self._ended
            )
            self._pid = self._command.pid
            self._loop.add_reader(self._confirm, self._confirmed)

    def _confirmed(self) -> None:
        """Read the report of the command's start: nothing once it runs its program, else what failed."""
        try:
            said = os.read(self._confirm, 64)
        except BlockingIOError:
            return
        self._loop.remove_reader(self._confirm)
        os.close(self._confirm)
        self._confirm = -1
        assert self._command is not None
        if said:
            self.refuse(reported_failure(self._command.child, said))
            return
        self._send(Executed(pid=self._pid))
        if self._status is not None:
            self._send_end()

    def _ended(self, status: int) -> None:
        self._status = status
        if self._confirm >= 0:  # its pipe has ended, too: the report comes first
            self._confirmed()
        elif not self._closed:
            self._send_end()

    def _send_end(self) -> None:
        assert self._status is not None
        self._command = None
        self._send(Over(code=os.waitstatus_to_exitcode(self._status)))
        self.close()

    def _guard(self, asked: Guard) -> None:
        pidfd = -1
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(asked.pid)
        if pidfd < 0 or asked.container not in containers_of(asked.pid):  # after the pidfd: it is that process's then
            if pidfd >= 0:
                os.close(pidfd)
            raise StartRefused(errno.ESRCH, "member", f"process {asked.pid} is not of that container, or is over")
        self._guarded, self._pid, self._container = pidfd, asked.pid, asked.container
        self._loop.add_reader(pidfd, self.close)
        self._send(Executed(pid=asked.pid))

    def _attach(self, asked: Attach, descriptors: list[int]) -> None:
        if len(descriptors) != 1:
            raise StartRefused(errno.EINVAL, "request", f"{len(descriptors)} descriptors came in place of a pipe")
        self._pid, self._terminal = self._jobs.hold(asked.key, descriptors[0], self._held)
        with contextlib.suppress(OSError):  # the agent has gone, as in `_send`
            socket.send_fds(self._peer, [encode(Executed(pid=self._pid))], [self._terminal.descriptor])

    def _held(self, status: int) -> None:
        self._terminal, self._status = None, status
        self._send_end()

    def _signal(self, number: int) -> None:
        if not 0 < number < signal.NSIG:
            raise StartRefused(errno.EINVAL, "request", f"no signal {number}")
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._guarded >= 0:
                signal.pidfd_send_signal(self._guarded, number)
            elif self._command is not None:
                os.killpg(self._pid, number)  # not reaped, so no other group has its number

    def refuse(self, refused: StartRefused) -> None:
        """Answer that the command does not run, and end the connection."""
        self._send(Refused(stage=refused.stage, errno=refused.errno, message=refused.message))
        self.close()

    def _send(self, answer: Answer) -> None:
        with contextlib.suppress(OSError):  # the agent has gone: its end of the connection ends the command
            self._peer.send(encode(answer))

    def close(self) -> None:
        """End the connection, and kill what it stands for."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._peer.fileno())
        self._peer.close()
        if self._confirm >= 0:
            self._loop.remove_reader(self._confirm)
            os.close(self._confirm)
            self._confirm = -1
        if self._command is not None:
            self._jobs.end_command(self._command)
        if self._terminal is not None:
            self._terminal.leave(lost=not self._has_left)
        if self._guarded >= 0:
            self._loop.remove_reader(self._guarded)
            self._jobs.end_guarded(self._container, self._pid, self._guarded)
            self._guarded = -1
        self._over(self)
