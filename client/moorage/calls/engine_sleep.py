"""A member whose program sleeps by a request: its worker asks it on a socket in the attempt's folder.

While the program sleeps, or is about to, no call begins: an engine may die of one. The worker asks for its wake once
the member has its GPUs again. What an agent that was killed meanwhile has asked for is done all the same: the next one
sees by a file whether the program sleeps.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from pathlib import Path
from typing import Final

from moorage.calls.http_program import HttpProgram
from moorage.calls.member import Member
from moorage.schemas.http_service import ASLEEP_FILE, SLEEP_SOCKET

_LINE_BYTES_MAX: Final = 64

log = logging.getLogger("moorage.calls")


class EngineSleep:
    """Listens while it is entered."""

    def __init__(self, folder: Path, program: HttpProgram, member: Member) -> None:
        self._folder = folder
        self._program = program
        self._member = member
        self._lock = asyncio.Lock()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> None:
        (self._folder / ASLEEP_FILE).unlink(missing_ok=True)
        (self._folder / SLEEP_SOCKET).unlink(missing_ok=True)
        listens = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        folder = os.open(self._folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:  # by the folder's descriptor, as an address has 107 bytes at most
            listens.bind(f"/proc/self/fd/{folder}/{SLEEP_SOCKET}")
            os.chmod(SLEEP_SOCKET, 0o666, dir_fd=folder)  # the worker may run as another user; the folder is private
        finally:
            os.close(folder)
        self._server = await asyncio.start_unix_server(self._answer, sock=listens, limit=_LINE_BYTES_MAX)

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = (await reader.readline()).strip()
            # the worker may go meanwhile: the next one asks for the same, or for what undoes it
            said = await asyncio.shield(asyncio.ensure_future(self._do(asked)))
            writer.write(f"{' '.join(said.split())[:400]}\n".encode())
            await writer.drain()
        except (OSError, ValueError) as error:
            log.warning("a worker's question about sleep is not answered: %s", error)
        finally:
            writer.close()

    async def _do(self, asked: bytes) -> str:
        async with self._lock:
            if asked == b"sleep":
                return await self._sleep()
            return await self._wake() if asked == b"wake" else "running it is asked for nothing that it knows"

    async def _sleep(self) -> str:
        if self._member.shut:
            return "frozen"
        self._member.set_shut(True, time.monotonic())
        why = await self._program.sleep()
        if not why:
            try:
                (self._folder / ASLEEP_FILE).touch()
                return "frozen"
            except OSError as error:
                why = f"the next agent would not know of it: {error.strerror or error}"
        if self._program.sleeps and (broken := await self._program.wake()):
            return f"broken {broken}"
        self._member.set_shut(False, time.monotonic())
        return f"running {why}"

    async def _wake(self) -> str:
        if self._member.shut:
            if why := await self._program.wake():
                return f"broken {why}"
            (self._folder / ASLEEP_FILE).unlink(missing_ok=True)
            self._member.set_shut(False, time.monotonic())
        return "running"
