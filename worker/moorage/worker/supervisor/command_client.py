"""Run a command in an attempt through the supervisor, from the agent: one connection, see `commands`."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from moorage.schemas.unreadable import UNREADABLE
from moorage.system.unix_socket import open_folder
from moorage.worker.supervisor.client import SupervisorGone, SupervisorRefused
from moorage.worker.supervisor.commands import (
    PACKET_BYTES_MAX,
    SOCKET_NAME,
    Answer,
    Attach,
    Execute,
    Executed,
    Guard,
    Leave,
    Over,
    Refused,
    Signal,
    decode_answer,
    encode,
)


class RunningCommand:
    """A command that runs in an attempt, or a process that the supervisor guards. Its end, or `close`, ends it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid = 0
        #: the outer end of the terminal that it holds, for the caller to close; -1: none
        self.terminal = -1

    @classmethod
    async def begin(cls, state: Path, asked: Execute | Attach | Guard, streams: Sequence[int] = ()) -> Self:
        """Ask the supervisor on this state folder; return once the command runs its program.

        `streams` are its standard input, output and error, or the pipe of `Attach`; the caller closes them. Raises
        `SupervisorRefused`, with the stage that failed as its code, and `SupervisorGone`.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made = cls(connection)
        try:
            with open_folder(state) as folder:
                connection.connect(os.path.join(folder, SOCKET_NAME))
            connection.setblocking(False)
            socket.send_fds(connection, [encode(asked)], list(streams))
        except OSError as error:
            connection.close()
            raise SupervisorGone(f"its socket for commands: {error.strerror or error}") from None
        try:
            answer = await made._answer()
        except BaseException:
            connection.close()
            raise
        if isinstance(answer, Executed):
            made.pid = answer.pid
            return made
        connection.close()
        if isinstance(answer, Refused):
            raise SupervisorRefused(answer.stage, answer.message, answer.errno)
        raise SupervisorGone("it ended the connection for a command")

    async def _answer(self) -> Answer | None:
        try:
            data, descriptors = await self._received()
            if descriptors:
                self.terminal = descriptors[0]
            return decode_answer(data) if data else None
        except (OSError, *UNREADABLE):
            return None

    async def _received(self) -> tuple[bytes, list[int]]:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._connection, PACKET_BYTES_MAX, 1)
            except BlockingIOError:
                loop.add_reader(self._connection.fileno(), ready.set)
                try:
                    await ready.wait()
                finally:
                    loop.remove_reader(self._connection.fileno())
                ready.clear()
            else:
                return data, descriptors

    async def wait(self) -> int:
        """Return the exit code of the command's first process, or minus the signal that ended it.

        Raises `SupervisorGone` if the supervisor died, with which the command died too, and for a guarded process.
        """
        answer = await self._answer()
        if isinstance(answer, Over):
            return answer.code
        raise SupervisorGone("it ended the connection of a command")

    def signal(self, number: int) -> None:
        """Send a signal to the command's process group. Does nothing once it is over."""
        try:
            self._connection.send(encode(Signal(number=number)))
        except OSError:
            return

    def leave(self) -> None:
        """Say that the caller leaves the terminal that this holds by its own will."""
        try:
            self._connection.send(encode(Leave()))
        except OSError:
            return

    def close(self) -> None:
        """End the command with its processes, if it is not over."""
        self._connection.close()
