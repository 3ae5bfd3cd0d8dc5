"""Send commands to NVIDIA's MPS control daemon, as `nvidia-cuda-mps-control` does.

A command is a line on the program's standard input, and the answer is what it prints. Its exit status says only whether
the daemon answered: for a command that is refused it prints a sentence, or nothing, and exits with 0. So every value
that is set is read back. Observed with version 550.163.01, in `tests/system/worker/sharing/test_mps_control.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from moorage.schemas.reserved_variables import MPS_DIRECTORIES
from moorage.worker.supervisor.protocol import MpsDaemon

PROGRAM: Final = "nvidia-cuda-mps-control"
#: a daemon that takes longer for an answer hangs
ASK_S: Final = 5.0
#: how long to wait for killed processes of the program; one that is stuck in the kernel may take for ever
_KILLED_S: Final = 1.0
#: the daemon sees only its own GPU, which is number 0 to it and to its clients
_DEVICE: Final = 0
_ANSWER_CHARS_MAX: Final = 200
#: most bytes of an answer: a job may play the daemon at the folder that its request names
_ANSWER_BYTES_MAX: Final = 1 << 16
#: most of the end of the server's log that is read
_LOG_TAIL_BYTES: Final = 1 << 16
#: how a server's log names the client whose error ended the work of all (the text is in libcuda 550)
_FATAL: Final = re.compile(rb"Client process (\d+) encountered a fatal GPU error")
SERVER_LOG: Final = "server.log"
_NUMBER: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(?:([KMGT])i?B?|%)?", re.IGNORECASE)
_UNITS_MIB: Final = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1 << 20}


class MpsFault(Exception):
    """The daemon does not run, does not answer, or did not do what it was asked; `reason` is one line."""

    def __init__(self, reason: str) -> None:
        self.reason: Final = reason
        super().__init__(reason)


class Limits(NamedTuple):
    """The most that a client may use of the GPU."""

    memory_mib: int
    percent: int  # of the threads that can be active at once

    @property
    def environment(self) -> dict[str, str]:
        """The variables that set these limits for one client; they can only lower the daemon's limits."""
        return {
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"{_DEVICE}={self.memory_mib}M",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(self.percent),
        }


def daemon_of(environment: Mapping[str, str]) -> MpsDaemon:
    """Return the daemon to which a client's variables lead, for the process that ends the client."""
    pipe, log = (environment[name] for name in MPS_DIRECTORIES)
    return MpsDaemon(program=shutil.which(PROGRAM) or "", pipe=pipe, log=log)


class MpsControl:
    """The daemon whose sockets are in the folder `pipe`."""

    def __init__(self, program: str, pipe: Path, log: Path) -> None:
        self.program: Final = program
        self.pipe: Final = pipe
        self.log: Final = log

    @property
    def environment(self) -> dict[str, str]:
        """The variables that lead a client to this daemon."""
        return {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe), "CUDA_MPS_LOG_DIRECTORY": str(self.log)}

    async def ask(self, command: str, timeout_s: float | None = None) -> list[str]:
        """Send one command and return the lines of the answer, within `timeout_s` seconds (None: `ASK_S`).

        Raises MpsFault if the program cannot be started or fails, if no daemon answers in time, or answers too much.
        """
        word = command.partition(" ")[0]
        timeout_s = timeout_s or ASK_S
        try:
            process = await asyncio.create_subprocess_exec(
                self.program,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self.environment,
                cwd="/",
            )
        except OSError as error:
            raise MpsFault(f"{self.program} cannot be started: {error.strerror or error}") from None
        try:
            async with asyncio.timeout(timeout_s):
                said = await _answer(process, f"{command}\n".encode())
        except TimeoutError:
            raise MpsFault(f"no answer to {word} within {timeout_s:g} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_KILLED_S):
                        await process.communicate()  # to its end: an unread pipe would stay open
        lines = said.decode(errors="replace").splitlines()
        if process.returncode != 0:
            raise MpsFault(f"{word} failed: {_cut(lines) or f'exit status {process.returncode}'}")
        return lines

    async def servers(self) -> list[int]:
        """Return the pids of the daemon's servers; [] before its first client. Raises MpsFault."""
        return await self._pids("get_server_list")

    async def clients(self, server: int) -> list[int]:
        """Return the pids of a server's clients; [] also if the server is gone. Raises MpsFault."""
        return await self._pids(f"get_client_list {server}", _no_server(server))

    async def terminate(self, own: Collection[int]) -> None:
        """Stop the work of those of the daemon's clients that are among `own`, before they end. Raises MpsFault."""
        for server in await self.servers():
            for pid in await self.clients(server):
                if pid in own:
                    await self.ask(f"terminate_client {server} {pid}")

    async def is_faulty(self, server: int) -> bool:
        """Return whether a server has a fault, and so accepts no clients. Raises MpsFault."""
        return "FAULT" in " ".join(await self.ask(f"get_server_status {server}")).upper()

    def blamed(self) -> list[int]:
        """Return the pids of the clients that had a fatal GPU error by the server's log, the last first; [] if none.

        One such error ends the work of all clients of the server. The log may be of an earlier server too.
        """
        try:
            # the log may be a job's: opening a pipe must not block
            descriptor = os.open(self.log / SERVER_LOG, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return []
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
                found = _FATAL.findall(file.read())
        except OSError:
            return []
        return [int(pid) for pid in reversed(found)]

    async def quit(self, timeout_s: float) -> None:
        """End the daemon and its servers, by force after `timeout_s` if they have clients. Raises MpsFault.

        `timeout_s` is in whole seconds, at least 1: a fraction is cut off.
        """
        await self.ask(f"quit -t {max(1, int(timeout_s))}", timeout_s + ASK_S)

    async def limit(self, limits: Limits) -> None:
        """Set the limits of all clients from now on, and read them back.

        Raises MpsFault if they were not set, and for a memory limit below 1 MiB.
        """
        mib, percent = limits
        if mib < 1:
            raise MpsFault("a limit of 0 MiB would be no limit")
        size = f"{_DEVICE} {mib}M"
        await self.ask(f"set_default_device_pinned_mem_limit {size}")
        await self.ask(f"set_default_active_thread_percentage {percent}")
        await self._check("get_default_device_pinned_mem_limit", f"{_DEVICE}", f"{mib}M")
        await self._check("get_default_active_thread_percentage", "", str(float(percent)))
        for server in await self.servers():  # the default applies to later servers only
            await self.ask(f"set_device_pinned_mem_limit {server} {size}")
            await self.ask(f"set_active_thread_percentage {server} {percent}")
            gone = _no_server(server)
            await self._check("get_device_pinned_mem_limit", f"{server} {_DEVICE}", f"{mib}M", gone)
            await self._check("get_active_thread_percentage", f"{server}", str(float(percent)), gone)

    async def _check(self, command: str, words: str, wanted: str, gone: str = "") -> None:
        lines = await self.ask(f"{command} {words}".rstrip())
        is_set = len(lines) == 1 and shows(lines[0], wanted)
        if not is_set and (not gone or lines != [gone]):
            raise MpsFault(f"{command} is {_cut(lines) or 'nothing'} where {wanted} was set")

    async def _pids(self, command: str, gone: str = "") -> list[int]:
        lines = await self.ask(command)
        if gone and lines == [gone]:
            return []
        if not all(line.strip().isdecimal() for line in lines):
            raise MpsFault(f"{command} said: {_cut(lines)}")
        return [int(line) for line in lines]


async def _answer(process: asyncio.subprocess.Process, command: bytes) -> bytes:
    """Return what a program answers to a command until its end. Raises MpsFault for more than `_ANSWER_BYTES_MAX`."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(command)
    process.stdin.close()
    said = b""
    while piece := await process.stdout.read(_ANSWER_BYTES_MAX):
        said += piece
        if len(said) > _ANSWER_BYTES_MAX:
            raise MpsFault(f"the daemon answers with more than {_ANSWER_BYTES_MAX} bytes")
    await process.wait()
    return said


def shows(line: str, wanted: str) -> bool:
    """Return whether a daemon's answer is the number that was set: a percentage, or MiB as `2048M`.

    Daemons write a number in their own ways, and round a size down to the unit that they show it in.
    """
    said, set_to = _NUMBER.fullmatch(line.strip()), _NUMBER.fullmatch(wanted)
    if said is None or set_to is None or bool(said[2]) != bool(set_to[2]):
        return False
    if not set_to[2]:
        return float(said[1]) == float(set_to[1])
    unit = _UNITS_MIB[said[2].upper()]
    return float(said[1]) in (float(set_to[1]) / unit, float(set_to[1]) // unit)


def _no_server(server: int) -> str:
    return f"Server {server} not found"


def _cut(lines: list[str]) -> str:
    return " ".join(lines).strip()[:_ANSWER_CHARS_MAX]
