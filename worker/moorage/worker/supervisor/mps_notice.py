"""Announce the end of processes to their MPS server, so that its other clients go on.

If a client ends while its kernel runs, the server takes that for a fault, and the calls of all its clients fail.
`terminate_client` stops the client's work first. Seen on an H200, 2026-11-27, driver 580: not announced, the other
client failed in 3 of 3 tries; announced, it went on in 2 of 2.

The control program is a child of this process, which takes the status of every child itself: see `reaped`.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Collection
from typing import Final

from moorage.worker.supervisor.protocol import MpsDaemon

#: how long an end waits for the daemon in all
NOTICE_S: Final = 1.0
_ANSWER_BYTES_MAX: Final = 1 << 16
_SHOWN_CHARS_MAX: Final = 100

#: returns those of a server's clients that are to end
Own = Callable[[Collection[int]], Collection[int]]


class NotAnnounced(Exception):
    """The daemon was not asked, did not answer, or refused; the text is why, in one line."""


class MpsNotices:
    """The announcements of one supervisor, each of at most so many seconds. Use it in its loop."""

    def __init__(self, seconds: float = NOTICE_S) -> None:
        self.seconds: Final = seconds
        #: the control programs that run, by pid: none of them belongs to an attempt
        self.pids: dict[int, asyncio.Future[int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def reaped(self, pid: int, status: int) -> bool:
        """Take the wait status of a child; return False if it is none of the control programs."""
        over = self.pids.pop(pid, None)
        if over is not None and not over.done():
            over.set_result(status)
        return over is not None

    def announce(self, daemon: MpsDaemon, own: Own, then: Callable[[str], None]) -> asyncio.Task[None]:
        """Stop the work of the daemon's clients that `own` selects.

        Call `then` once that is done or has failed, within the time of a notice, with "" or why it failed.
        """

        async def work() -> None:
            why = ""
            try:
                async with asyncio.timeout(self.seconds):
                    await self._terminate(daemon, own)
            except TimeoutError:
                why = f"no answer within {self.seconds:g} s"
            except (NotAnnounced, OSError) as error:
                why = str(error)
            except Exception as error:  # a defect of moorage: the end goes on all the same
                why = repr(error)
            then(why)

        task = asyncio.get_running_loop().create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _terminate(self, daemon: MpsDaemon, own: Own) -> None:
        if not daemon.program:
            raise NotAnnounced("nvidia-cuda-mps-control is not on the worker's PATH")
        for server in _pids(await self._ask(daemon, "get_server_list")):
            clients = own(_pids(await self._ask(daemon, f"get_client_list {server}")))
            if not clients:
                continue
            lines = await self._ask(daemon, *(f"terminate_client {server} {client}" for client in clients))
            # the program ends with 0 all the same; each answer ends with a number, or is about rights
            if any("privileges" in line or (line.isdecimal() and int(line)) for line in lines):
                raise NotAnnounced(f"terminate_client: {' '.join(lines)[:_SHOWN_CHARS_MAX]}")

    async def _ask(self, daemon: MpsDaemon, *commands: str) -> list[str]:
        """Run the control program with these commands; return the lines of its answer.

        Raises NotAnnounced if it fails, and OSError if it cannot run.
        """
        loop = asyncio.get_running_loop()
        theirs, ours = os.pipe2(os.O_CLOEXEC)
        try:
            os.write(ours, "".join(f"{command}\n" for command in commands).encode())
        finally:
            os.close(ours)
        answer, writes = -1, -1
        try:
            answer, writes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            os.set_blocking(writes, True)
            pid = os.posix_spawn(  # noqa: ASYNC221  # it returns at once
                daemon.program,
                [daemon.program],
                daemon.environment,
                file_actions=[(os.POSIX_SPAWN_DUP2, end, to) for end, to in ((theirs, 0), (writes, 1), (writes, 2))],
                setsigmask=(),
                setsigdef=(signal.SIGPIPE,),
            )
        except BaseException:
            if answer >= 0:
                os.close(answer)
            raise
        finally:
            for end in (theirs, writes):
                if end >= 0:
                    os.close(end)
        over = self.pids[pid] = loop.create_future()
        try:
            said = await _read(answer)
            status = await over
        finally:
            os.close(answer)
            if pid in self.pids:  # not reaped, so the pid is still its own
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        lines = said.decode(errors="replace").splitlines()
        if status:
            raise NotAnnounced(" ".join(lines)[:_SHOWN_CHARS_MAX] or f"the control program ended with status {status}")
        return lines


async def _read(descriptor: int) -> bytes:
    loop = asyncio.get_running_loop()
    said = b""
    while len(said) < _ANSWER_BYTES_MAX:
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(descriptor, _set, ready)
        try:
            await ready
        finally:
            loop.remove_reader(descriptor)
        piece = os.read(descriptor, _ANSWER_BYTES_MAX)
        if not piece:
            break
        said += piece
    return said


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _pids(lines: list[str]) -> list[int]:
    """Return the pids in an answer: [] also if the server has ended meanwhile. Raises NotAnnounced."""
    if len(lines) == 1 and lines[0].startswith("Server ") and lines[0].endswith(" not found"):
        return []
    if not all(line.strip().isdecimal() for line in lines):
        raise NotAnnounced(" ".join(lines)[:_SHOWN_CHARS_MAX])
    return [int(line) for line in lines]
