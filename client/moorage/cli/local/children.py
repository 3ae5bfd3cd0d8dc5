"""Keeps the processes of `moorage up` alive: starts them, starts them again if they die, and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from moorage.client.errors import ClientError, client_problem
from moorage.system.parentage import die_with_parent

#: starts of one child within the window, the first one included; beyond it something is wrong that no start mends
STARTS_MAX: Final = 6
STARTS_WINDOW_S: Final = 60.0
AGAIN_S_MIN: Final = 0.2
AGAIN_S_MAX: Final = 5.0
STOP_S: Final = 10.0
LOG_BYTES_MAX: Final = 10 * 1024 * 1024
LOG_TAIL_BYTES: Final = 4 * 1024
LOG_TAIL_LINES: Final = 8

Say = Callable[[str], None]


class ChildFailed(ClientError):
    """A process ended too often in a short time. The message has the end of its log."""

    def __init__(self, name: str, log: Path, code: int | None) -> None:
        tail = log_tail(log)
        super().__init__(
            client_problem(
                "child-failed",
                f"the {name} ended {STARTS_MAX} times within {STARTS_WINDOW_S:g} s, last with {ended_text(code)}"
                + (f"\n{tail}" if tail else ""),
                next_step=f"see {log}",
            )
        )


class Child:
    """One process and its log file. `pid` is 0 while it does not run."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        env: Mapping[str, str],
        say: Say,
        *,
        again_s: float = AGAIN_S_MIN,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.pid = 0
        self.starts = 0
        self._argv = argv
        self._log = log
        self._env = {**os.environ, **env}
        self._say = say
        self._again_s = again_s
        self._pass_fds = pass_fds
        self._process: asyncio.subprocess.Process | None = None
        self._recent: deque[float] = deque()
        self._stopping = False

    async def keep(self, changed: Callable[[], None]) -> None:
        """Run the process until `stop`, and start it again whenever it ends. `changed` is called after each start.

        Raises `ChildFailed` if it ends `STARTS_MAX` times within `STARTS_WINDOW_S`.
        """
        while not self._stopping:
            process = await self.start()
            changed()
            code = await process.wait()
            self.pid = 0
            if self._stopping:
                return
            wait_s = self._wait_s(code)
            self._say(f"the {self.name} (pid {process.pid}) ended with {ended_text(code)}; starting it again")
            await asyncio.sleep(wait_s)

    async def start(self) -> asyncio.subprocess.Process:
        """Start the process and return it; its output goes to the log. It has a session of its own, so Ctrl-C at the
        terminal does not reach it."""
        self.starts += 1
        self._recent.append(time.monotonic())
        with open_log(self._log) as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,
                pass_fds=self._pass_fds,
                preexec_fn=die_with_parent(),
            )
        self.pid = self._process.pid
        return self._process

    def _wait_s(self, code: int | None) -> float:
        """Return how many seconds to wait before the next start; more after each start of the last minute. Raises
        `ChildFailed`."""
        now = time.monotonic()
        while self._recent and self._recent[0] < now - STARTS_WINDOW_S:
            self._recent.popleft()
        if len(self._recent) >= STARTS_MAX:
            raise ChildFailed(self.name, self._log, code)
        return float(min(self._again_s * 2 ** (len(self._recent) - 1), AGAIN_S_MAX))

    async def stop(self, within_s: float = STOP_S) -> None:
        """Send SIGTERM and wait; send SIGKILL if the process still runs after `within_s`."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(within_s):
                await process.wait()
        except TimeoutError:
            self._say(f"the {self.name} (pid {process.pid}) did not end within {within_s:g} s and was killed")
            self.kill()
            await process.wait()
        self.pid = 0

    def kill(self) -> None:
        """Send SIGKILL at once."""
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


def ended_text(code: int | None) -> str:
    """Return an exit code in words: `code 1`, or the name of the signal."""
    if code is None:
        return "no exit code"
    if code >= 0:
        return f"code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


@contextlib.contextmanager
def open_log(path: Path) -> Iterator[int]:
    """Open a log to append to it. If it is longer than its bound, it is first renamed to `.old`."""
    with contextlib.suppress(OSError):
        if path.stat().st_size > LOG_BYTES_MAX:
            path.replace(path.with_name(path.name + ".old"))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def log_tail(path: Path) -> str:
    """Return the last LOG_TAIL_LINES lines of a log; "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-LOG_TAIL_LINES:])
    except OSError:
        return ""
