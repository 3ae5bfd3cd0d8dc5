"""Run a command in a container by its engine: its streams over a connection that the engine hands over.

The engine ends no command when that connection ends, so the supervisor guards the command's process: it kills it when
this agent lets go of it, or dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Final, Self

from moorage.schemas.errors import problem, refuse
from moorage.schemas.frames import PIECE_BYTES_MAX, Exec, Mark, Terminal
from moorage.worker.drivers.container.engine import Engine, EngineDown, EngineError
from moorage.worker.drivers.container.faults import code_of
from moorage.worker.drivers.container.host import ContainerHost
from moorage.worker.drivers.execution import CannotExecute, Execution, Take, signal_number
from moorage.worker.start_codes import CODE_CANNOT_START, CODE_NOT_FOUND
from moorage.worker.supervisor.client import SupervisorGone, SupervisorRefused
from moorage.worker.supervisor.command_client import RunningCommand
from moorage.worker.supervisor.commands import Guard
from moorage.worker.supervisor.terminal import CTRL_D

#: how long a command may take until the engine says which process it is
SEEN_S: Final = 10.0
LOOK_S: Final = 0.02
#: how long, and how often, the process is then still looked for: nobody else would end it
UNSEEN_S: Final = 600.0
UNSEEN_LOOK_S: Final = 1.0
#: how long output is awaited in all of a command that was over at once: a process that it left may keep its streams
#: open. Docker 20.10 itself ends them after 2 s
LATE_S: Final = 3.0
#: and how much output of such a command is taken, a few times what pipe, engine and socket hold: what it left may write
LATE_BYTES_MAX: Final = 4 * 1024 * 1024
_HEADER_BYTES: Final = 8
#: how an engine begins the sentence that it writes as the output of a command which it could not start
_NOT_STARTED: Final = re.compile(r"(OCI runtime exec failed|Error: (runc|crun)): ")


class ContainerExecution(Execution):
    """A command in a container."""

    def __init__(self, engine: Engine, command: str, *, is_terminal: bool) -> None:
        self._engine = engine
        self._command = command
        self._is_terminal = is_terminal
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._guard: RunningCommand | None = None
        self._resizing: set[asyncio.Task[None]] = set()
        self._read: list[tuple[Mark, bytes]] = []  # output that was looked at before `run`
        self._frame: tuple[Mark, int] = (Mark.OUT, 0)  # the stream of the frame that is being read, and its bytes left
        self._code: int | None = None  # of a command that was over before it could be guarded
        self._late_s = LATE_S  # how much longer its output is awaited
        self._late_bytes = LATE_BYTES_MAX  # how much more of it is taken

    @classmethod
    async def begin(cls, host: ContainerHost, container: str, asked: Exec, size: Terminal) -> Self:
        """Start the command in a running container; return once the engine runs it.

        Raises `Refused`, and `CannotExecute` if its program is to blame.
        """
        engine = host.engine
        made: Self | None = None
        try:
            made = cls(engine, await engine.make_command(container, asked), is_terminal=asked.tty)
            made._reader, made._writer = await engine.start_command(made._command, is_terminal=asked.tty)
            async with asyncio.timeout(SEEN_S):
                made._code = await made._be_guarded(host, container)
            if made._code in (CODE_CANNOT_START, CODE_NOT_FOUND):
                await made._check_started(asked)
            made.resize(size)
        except (EngineDown, EngineError, SupervisorGone, TimeoutError) as error:
            if made is not None:
                if made._reader is not None and made._guard is None and made._code is None:
                    host.begin(made._end_unseen(host, container))
                await made.close()
            why = str(error) or f"the engine did not say within {SEEN_S:g} s which process it is"
            raise refuse("failed-precondition", f"the command was not started: {why}", job=asked.job) from None
        except BaseException:
            if made is not None:
                await made.close()
            raise
        return made

    async def _be_guarded(self, host: ContainerHost, container: str) -> int | None:
        """Have the supervisor guard the command's process. Return the command's exit code if it is over already."""
        while True:
            pid, code = await self._engine.command_state(self._command)
            if code is not None:
                return code
            if pid:
                with contextlib.suppress(SupervisorRefused):  # it is over by now, which the next look shows
                    self._guard = await RunningCommand.begin(host.link.state, Guard(container=container, pid=pid))
                    return None
            await asyncio.sleep(LOOK_S)

    async def _end_unseen(self, host: ContainerHost, container: str) -> None:
        """End a command that was started, and of which the engine has not said yet which process it is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNSEEN_S):
                while True:
                    await asyncio.sleep(UNSEEN_LOOK_S)
                    with contextlib.suppress(EngineDown, SupervisorGone):
                        try:
                            pid, code = await self._engine.command_state(self._command)
                        except EngineError as error:
                            if error.status == 404:  # it has forgotten the command, which is over
                                return
                            continue
                        if code is not None:
                            return
                        if pid:
                            with contextlib.suppress(SupervisorRefused):  # it is over by now
                                guard = await RunningCommand.begin(host.link.state, Guard(container=container, pid=pid))
                                guard.close()
                                return

    async def _check_started(self, asked: Exec) -> None:
        """Raise `CannotExecute` if the output of a command that is over is the engine's, which could not start it.

        Engines answer such a start with 200. What a command itself has written is kept for `run`: its first line here.
        """
        first = b""
        while b"\n" not in first and len(first) < PIECE_BYTES_MAX and (piece := await self._late_piece()):
            self._read.append(piece)
            first += piece[1]
        said = first.decode(errors="replace")
        if _NOT_STARTED.match(said):
            sentence = said.splitlines()[0].strip()
            found = next(iter(asked.argv), "")
            told = problem("failed-precondition", sentence, found=found, job=asked.job)
            raise CannotExecute(told, code_of(sentence))

    async def run(self, take: Take) -> int:
        assert self._reader is not None
        try:
            for mark, data in self._read:
                await take(mark, data)
            if self._code is not None:
                while late := await self._late_piece():
                    await take(*late)
                return self._code
            while piece := await self._piece(self._reader):
                await take(*piece)
            while True:
                _, code = await self._engine.command_state(self._command)
                if code is not None:
                    return code
                await asyncio.sleep(LOOK_S)
        except (EngineDown, EngineError, OSError, asyncio.IncompleteReadError) as error:
            raise refuse("internal", f"lost the engine, which ran the command: {error}") from None

    async def _late_piece(self) -> tuple[Mark, bytes] | None:
        """Return the next piece of output of a command that is over; None at its end, or at one of the two bounds.

        The time alone that is spent here counts: a slow caller loses no output.
        """
        assert self._reader is not None
        if self._late_s <= 0 or self._late_bytes <= 0:
            return None
        loop = asyncio.get_running_loop()
        began_s, piece = loop.time(), None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._late_s):
                piece = await self._piece(self._reader)
        self._late_s -= loop.time() - began_s
        self._late_bytes -= len(piece[1]) if piece else 0
        return piece

    async def _piece(self, reader: asyncio.StreamReader) -> tuple[Mark, bytes] | None:
        """Return the next piece of output; None at its end. It may be cancelled and called again."""
        if self._is_terminal:
            data = await reader.read(PIECE_BYTES_MAX)
            return (Mark.OUT, data) if data else None
        mark, left = self._frame
        while not left:
            try:
                header = await reader.readexactly(_HEADER_BYTES)
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    raise
                return None
            mark, left = Mark.ERR if header[0] == 2 else Mark.OUT, int.from_bytes(header[4:], "big")
            self._frame = (mark, left)
        data = await reader.read(min(left, PIECE_BYTES_MAX))
        self._frame = (mark, left - len(data))
        return (mark, data) if data else None

    async def write(self, data: bytes) -> None:
        if self._writer is None:
            return
        with contextlib.suppress(OSError):  # it reads no more
            if not data and not self._is_terminal:
                self._writer.write_eof()
                return
            self._writer.write(data or CTRL_D)
            await self._writer.drain()

    def resize(self, size: Terminal) -> None:
        if self._is_terminal and size.rows and size.columns:
            task = asyncio.get_running_loop().create_task(self._resize(size))
            self._resizing.add(task)
            task.add_done_callback(self._resizing.discard)

    async def _resize(self, size: Terminal) -> None:
        with contextlib.suppress(EngineDown, EngineError):
            await self._engine.resize_command(self._command, size.rows, size.columns)

    def signal(self, name: str) -> None:
        if self._guard is not None and (number := signal_number(name)):
            self._guard.signal(number)

    async def close(self) -> None:
        if self._guard is not None:
            self._guard.close()
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
            self._writer = None
        for task in list(self._resizing):
            task.cancel()
