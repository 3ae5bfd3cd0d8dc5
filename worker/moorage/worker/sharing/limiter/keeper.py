"""Run the controller's process for the agent: start it, watch it, and start it again when it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from moorage.worker.settings import WorkerSettings
from moorage.worker.sharing.limiter.limits import folder_of

#: if it prints no line for this long it hangs, for example in a driver that does not answer
SILENT_S: Final = 30.0
#: pause before a restart. It doubles with each end up to the maximum, and is reset after a run longer than that
PAUSE_S: Final = 0.5
PAUSE_S_MAX: Final = 60.0
_POLL_S: Final = 0.02
_TOKEN: Final = "limiter.controller"

log = logging.getLogger("moorage.worker")


class ControllerProcess:
    """The process of one worker's controller.

    The process outlives the agent while limited attempts live; the next agent's controller replaces it.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._folder = folder_of(settings.state_dir)
        self._command = [
            sys.executable,
            "-P",
            "-m",
            "moorage.worker.sharing.limiter",
            str(self._folder),
            str(settings.state_dir.absolute() / _TOKEN),
            msgspec.json.encode(settings.controller).decode(),
        ]
        self._task: asyncio.Task[None] | None = None
        #: its pid; 0 while it does not run
        self.pid = 0

    def open(self) -> None:
        """Begin to start the process, and to start it again whenever it ends, until `close`."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop watching the process, and kill it if there are no segments; otherwise it runs on without the agent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.pid and not _has_files(self._folder):
            await self._end()

    async def _run(self) -> None:
        pause_s = PAUSE_S
        while True:
            began_s = time.monotonic()
            try:
                why = await self._watch()
            except OSError as error:  # no process or descriptor left
                why = str(error)
            if time.monotonic() > began_s + PAUSE_S_MAX:
                pause_s = PAUSE_S
            log.warning(
                "the limiter's controller ended (%s): until it is started again in %g s, jobs are not throttled",
                why,
                pause_s,
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    async def _watch(self) -> str:
        """Start the process and log its lines until it ends; return how it ended. Raises OSError.

        A process that writes nothing for `SILENT_S` seconds is killed.
        """
        reader = asyncio.StreamReader()
        with contextlib.ExitStack() as opened:
            self.pid, holds, said = _spawned(self._command)
            opened.callback(os.close, holds)  # its end tells the process that the agent is gone
            pipe = os.fdopen(said, "rb", 0)
            try:
                transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                    lambda: asyncio.StreamReaderProtocol(reader), pipe
                )
            except OSError:
                pipe.close()
                await self._end()
                raise
            opened.callback(transport.close)
            try:
                while True:
                    async with asyncio.timeout(SILENT_S):
                        line = await reader.readline()
                    if not line:
                        return await self._end()
                    if text := line.decode(errors="replace").strip():
                        log.warning("the limiter: %s", text)
            except TimeoutError:
                await self._end()
                return f"it gave no sign for {SILENT_S:g} s"

    async def _end(self) -> str:
        """Kill the process if it still runs, wait for it, and return how it ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # an unreaped child: the pid cannot belong to another process
        while True:
            if (how := _reaped(self.pid)) is not None:
                self.pid = 0
                return how
            await asyncio.sleep(_POLL_S)


def _spawned(command: list[str]) -> tuple[int, int, int]:
    """Start a command; return its pid and two descriptors. Raises OSError.

    Closing the first descriptor ends the command's input; from the second its output and its errors are read.
    """
    theirs, holds = os.pipe()
    said, says = os.pipe()
    try:
        # not subprocess.Popen: the process must not be ended or waited for when the agent ends
        actions = [(os.POSIX_SPAWN_DUP2, one, other) for one, other in ((theirs, 0), (says, 1), (says, 2))]
        return os.posix_spawn(command[0], command, os.environ, file_actions=actions), holds, said
    except BaseException:
        os.close(holds)
        os.close(said)
        raise
    finally:
        os.close(theirs)
        os.close(says)


def _reaped(pid: int) -> str | None:
    """Reap a child, if it has ended, and return how it ended; None while it runs."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return "it is gone"
    if not found:
        return None
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def _has_files(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except OSError:
        return False
