"""Define a command that runs in an attempt, as its driver gives it to the agent, and the one of a local process."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import pty
import signal as signals
import struct
import termios
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Self

from moorage.schemas.errors import Problem, Refused, problem, refuse
from moorage.schemas.frames import PIECE_BYTES_MAX, WINDOW_BYTES, Exec, Mark, Terminal
from moorage.worker.start_codes import code_of_start
from moorage.worker.supervisor.client import SupervisorGone, SupervisorRefused
from moorage.worker.supervisor.command_client import RunningCommand
from moorage.worker.supervisor.commands import Attach, Execute
from moorage.worker.supervisor.terminal import CTRL_D

#: takes the next bytes of standard output or standard error, and returns once there is room for more
Take = Callable[[Mark, bytes], Awaitable[None]]

#: how long the output of an ended command is read on where something else keeps it open
DRAIN_S: Final = 0.2
_SIZE: Final = struct.Struct("HHHH")


def _pipes(count: int) -> list[tuple[int, int]]:
    """Return so many pipes. Raises OSError, with none left open, if there are not enough descriptors."""
    made: list[tuple[int, int]] = []
    try:
        for _ in range(count):
            made.append(os.pipe())
    except OSError:
        for end in itertools.chain(*made):
            os.close(end)
        raise
    return made


class CannotExecute(Refused):
    """A command was not started. `exit_code` is as of a shell, 126 or 127, if its program is to blame; else None."""

    def __init__(self, told: Problem, exit_code: int | None) -> None:
        super().__init__(told)
        self.exit_code = exit_code


class Execution(ABC):
    """A command that runs in an attempt. `close` ends it with its processes, at the latest."""

    @abstractmethod
    async def run(self, take: Take) -> int:
        """Give all of its output to `take`; return its exit code, or minus the signal that ended it.

        Raises `Refused` if the command was lost, with what ran it.
        """

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Write to its standard input, and return once it is written; b"" closes it. What cannot be written any more
        is dropped."""

    @abstractmethod
    def resize(self, size: Terminal) -> None:
        """Give its terminal another size. Does nothing without a terminal."""

    @abstractmethod
    def signal(self, name: str) -> None:
        """Send it a signal, by its name without SIG. Does nothing for a name that is none."""

    def leave(self) -> None:  # noqa: B027 (a command has no state that outlives its caller)
        """Its caller goes by its own will: the terminal of the job's own program keeps its input open."""

    @abstractmethod
    async def close(self) -> None:
        """End it, if it is not over, and release everything."""


def signal_number(name: str) -> int:
    """Return the number of a signal by its name without SIG; 0 if there is none."""
    found = signals.Signals.__members__.get(f"SIG{name}")
    return 0 if found is None else int(found)


def set_size(terminal: int, size: Terminal) -> None:
    """Give a terminal this size, unless it is not known. What runs in it is told by SIGWINCH."""
    if size.rows and size.columns:
        with contextlib.suppress(OSError):
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, _SIZE.pack(size.rows, size.columns, 0, 0))


class LocalExecution(Execution):
    """A command in a process that the supervisor starts; this holds the outer ends of its pipes or of its terminal."""

    def __init__(self, stdin: int, outputs: Sequence[tuple[Mark, int]], *, is_terminal: bool) -> None:
        self._stdin = stdin
        self._outputs = outputs
        self._is_terminal = is_terminal
        self._loop = asyncio.get_running_loop()
        self._command: RunningCommand | None = None
        self._released = asyncio.Event()  # the output of an ended command need not be awaited any longer

    @classmethod
    async def begin(cls, state: Path, key: str, asked: Exec, size: Terminal) -> Self:
        """Start the command in the supervisor's attempt `key`; return once it runs. Raises `Refused`."""
        if asked.tty:
            outer, inner = pty.openpty()
            set_size(outer, size)
            made = cls(outer, [(Mark.OUT, outer)], is_terminal=True)
            streams = (inner, inner, inner)
        else:
            stdin, stdout, stderr = _pipes(3)
            for each in (stdin, stdout):
                with contextlib.suppress(OSError):  # a user may have no more room in pipes
                    fcntl.fcntl(each[0], fcntl.F_SETPIPE_SZ, PIECE_BYTES_MAX)
            made = cls(stdin[1], [(Mark.OUT, stdout[0]), (Mark.ERR, stderr[0])], is_terminal=False)
            streams = (stdin[0], stdout[1], stderr[1])
        execute = Execute(key=key, argv=tuple(asked.argv), term=asked.term)
        await made._ask(state, execute, streams, asked, "the command was not started")
        return made

    @classmethod
    async def attach(cls, state: Path, key: str, asked: Exec, size: Terminal) -> Self:
        """Hold the terminal of the supervisor's attempt `key`; return once it is held. Raises `Refused`."""
        shown, out = os.pipe()
        made = cls(-1, [(Mark.OUT, shown)], is_terminal=True)
        command = await made._ask(state, Attach(key=key), (out,), asked, "the terminal is not held")
        made._stdin = command.terminal
        set_size(made._stdin, size)
        return made

    async def _ask(
        self, state: Path, request: Execute | Attach, streams: Sequence[int], asked: Exec, failed: str
    ) -> RunningCommand:
        """Have the supervisor begin, with the inner ends of the streams, which are closed here. Raises `Refused`."""
        try:
            for descriptor in self._own():
                os.set_blocking(descriptor, False)
            self._command = await RunningCommand.begin(state, request, streams)
        except SupervisorRefused as refused:
            await self.close()
            found = next(iter(asked.argv), refused.message)
            why = problem("failed-precondition", refused.message, found=found, job=asked.job)
            code = code_of_start(refused.errno) if refused.code == "exec" else None
            raise CannotExecute(why, code) from None
        except SupervisorGone as gone:
            await self.close()
            raise refuse("failed-precondition", f"{failed}: {gone}", job=asked.job) from None
        except BaseException:
            await self.close()
            raise
        finally:
            for descriptor in set(streams):
                os.close(descriptor)
        return self._command

    def _own(self) -> set[int]:
        return {each for each in (self._stdin, *(descriptor for _, descriptor in self._outputs)) if each >= 0}

    async def run(self, take: Take) -> int:
        assert self._command is not None
        pumps = [self._loop.create_task(self._pump(*output, take)) for output in self._outputs]
        try:
            try:
                code = await self._command.wait()
            except SupervisorGone:
                raise refuse("internal", "the supervisor died, and the command with it") from None
            self._loop.call_later(DRAIN_S, self._released.set)
            await asyncio.gather(*pumps)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)
        return code

    async def _pump(self, mark: Mark, descriptor: int, take: Take) -> None:
        late_bytes = 0
        while late_bytes < WINDOW_BYTES:  # more than a pipe holds
            try:
                data = os.read(descriptor, PIECE_BYTES_MAX)
            except BlockingIOError:
                if self._released.is_set():
                    return
                await self._ready(descriptor, self._loop.add_reader, self._loop.remove_reader)
                continue
            except OSError:  # EIO: nothing has the terminal any more
                return
            if not data:
                return
            if self._released.is_set():
                late_bytes += len(data)
            await take(mark, data)

    async def _ready(self, descriptor: int, add: Callable[..., object], remove: Callable[[int], object]) -> None:
        """Wait until a descriptor is ready, or the output is released."""
        ready = asyncio.Event()
        add(descriptor, ready.set)
        released = self._loop.create_task(self._released.wait())
        released.add_done_callback(lambda _: ready.set())
        try:
            await ready.wait()
        finally:
            remove(descriptor)
            released.cancel()

    async def write(self, data: bytes) -> None:
        if self._stdin < 0:
            return
        if not data and not self._is_terminal:
            os.close(self._stdin)
            self._stdin = -1
            return
        left = memoryview(data or CTRL_D)
        while left and self._stdin >= 0:
            try:
                left = left[os.write(self._stdin, left) :]
            except BlockingIOError:
                await self._ready(self._stdin, self._loop.add_writer, self._loop.remove_writer)
                if self._released.is_set():
                    return
            except OSError:  # it reads no more
                return

    def resize(self, size: Terminal) -> None:
        if self._is_terminal and self._stdin >= 0:
            set_size(self._stdin, size)

    def signal(self, name: str) -> None:
        if self._command is not None and (number := signal_number(name)):
            self._command.signal(number)

    def leave(self) -> None:
        if self._command is not None:
            self._command.leave()

    async def close(self) -> None:
        self._released.set()
        if self._command is not None:
            self._command.close()
        own, self._stdin, self._outputs = self._own(), -1, []
        for descriptor in own:
            os.close(descriptor)
