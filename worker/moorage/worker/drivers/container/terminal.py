"""The terminal of a container whose standard input a caller holds: its newest output, who holds it, and its end of
input.

The engine makes the terminal and keeps it. The agent attaches to it before the container's start, so that a holder sees
its first byte, and stays attached as long as the container runs; after a restart the next agent attaches again. What it
shows is also in the engine's log, from which the output is stored as for any container. A holder that reads too slowly
stops the output, as a terminal does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from moorage.schemas.errors import Refused, refuse
from moorage.schemas.frames import PIECE_BYTES_MAX, Mark, Terminal
from moorage.system.proctree import read_process
from moorage.worker.drivers.container.engine import Engine, EngineDown, EngineError
from moorage.worker.drivers.execution import Execution, Take
from moorage.worker.supervisor.containers import containers_of
from moorage.worker.supervisor.terminal import CTRL_D, ENDS_MAX, LOST_S, PENDING_BYTES_MAX, RECENT_BYTES

#: how often an engine is asked that ended the connection
RETRY_S: Final = 0.5


class ContainerTerminal:
    """The terminal of one container. `connect` or `resume` it, and `end` or `close` it.

    `left` is a file that is there while its last holder has left it by its own will, so that the next agent knows it.
    """

    def __init__(self, engine: Engine, container: str, left: Path, over: Callable[[ContainerTerminal], None]) -> None:
        self._engine = engine
        self._container = container
        self._left = left
        self._over = over
        self._recent = bytearray()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._holder: TerminalHolder | None = None
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._keeping: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Attach to a container that is not started yet. Raises EngineDown, EngineError."""
        self._streams = await self._engine.attach(self._container)
        self._begin()

    async def resume(self) -> None:
        """Attach to the running container of an earlier agent, now or once its engine answers."""
        with contextlib.suppress(EngineDown, EngineError):
            self._streams = await self._engine.attach(self._container)
        self._begin()

    def _begin(self) -> None:
        """Keep the terminal until its end; it has no holder yet."""
        self._keeping = asyncio.get_running_loop().create_task(self._keep())
        self._keeping.add_done_callback(lambda _: self._over(self))
        if not self._left.exists():
            self._is_lost()

    def hold(self, job: str, size: Terminal) -> TerminalHolder:
        """Give the terminal to a holder. Raises `Refused` if another one holds it, or the engine does not answer."""
        if self._holder is not None:
            raise refuse("failed-precondition", "another caller holds the terminal of this job", job=job)
        if self._streams is None and not self._code.done():
            raise refuse("failed-precondition", "the terminal is not held: its engine does not answer yet", job=job)
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        with contextlib.suppress(OSError):
            self._left.unlink(missing_ok=True)
        self._holder = TerminalHolder(self, bytes(self._recent))
        self._holder.resize(size)
        return self._holder

    def leave(self, holder: TerminalHolder, *, lost: bool) -> None:
        """The holder is gone; if it was lost, the end of input follows after `LOST_S`."""
        if self._holder is not holder:
            return
        self._holder = None
        if self._code.done():
            self.close()
        elif lost:
            self._is_lost()
        else:
            with contextlib.suppress(OSError):  # on a full disk the next agent takes it for lost
                self._left.touch(mode=0o600)

    def end(self, code: int) -> None:
        """The container is over, with this code: tell its holder once that one has all of the output."""
        if not self._code.done():
            self._code.set_result(code)
        if self._ending is not None:
            self._ending.cancel()
        if self._holder is None:
            self.close()

    def close(self) -> None:
        """Let go of the engine, now: the container goes on, if it is not over."""
        for task in (self._keeping, self._ending):
            if task is not None:
                task.cancel()

    async def write(self, data: bytes) -> None:
        """Write to the terminal, and return once the engine has it. What cannot be written is dropped."""
        if self._streams is not None:
            with contextlib.suppress(OSError):
                self._streams[1].write(data)
                await self._streams[1].drain()

    async def resize(self, size: Terminal) -> None:
        with contextlib.suppress(EngineDown, EngineError):
            await self._engine.resize(self._container, size.rows, size.columns)

    def _is_lost(self) -> None:
        self._ending = asyncio.get_running_loop().create_task(self._end_input())

    async def _end_input(self) -> None:
        """Write the end of input; a program may read several, as nested shells do: it gets one a second."""
        await asyncio.sleep(LOST_S)
        for _ in range(ENDS_MAX):
            await self.write(CTRL_D)
            await asyncio.sleep(1.0)

    async def _keep(self) -> None:
        """Read what the terminal shows until the container is over; attach again to an engine that came back."""
        try:
            while self._streams is not None or await self._attach_again():
                assert self._streams is not None
                await self._read(self._streams[0])
                self._streams[1].close()
                self._streams = None
            if self._holder is not None:
                self._holder.over(await self._code)
        finally:
            if self._streams is not None:
                self._streams[1].close()
                self._streams = None
            if self._holder is not None:
                self._holder.over(refuse("internal", "the worker let go of the terminal"))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE_BYTES_MAX):
                self._recent += data
                del self._recent[:-RECENT_BYTES]
                if self._holder is not None:
                    await self._holder.show(data)

    async def _attach_again(self) -> bool:
        """Attach to a container that still runs, once its engine answers; return False if it is over.

        A container that is over must not be attached to: podman would set it up once more.
        """
        while True:
            # mostly the container is over, which the engine says a moment later
            await asyncio.wait((self._code,), timeout=RETRY_S)
            if self._code.done():
                return False
            try:
                state = await self._engine.state(self._container)
                if state is None or state.is_over:
                    return False
                if _runs(self._container, state.pid):
                    self._streams = await self._engine.attach(self._container)
                    self._lose_holder("its engine ended the connection, and what it showed meanwhile is missing")
                    return True
            except EngineDown as error:
                self._lose_holder(str(error))
            except EngineError:  # it is being removed, say
                continue

    def _lose_holder(self, why: str) -> None:
        if self._holder is not None:
            self._holder.over(refuse("internal", f"lost the terminal: {why}"))


def _runs(container: str, pid: int) -> bool:
    process = read_process(pid) if pid else None
    return process is not None and not process.dead and container in containers_of(pid)


class TerminalHolder(Execution):
    """The terminal of a container's own program, as one caller holds it."""

    def __init__(self, terminal: ContainerTerminal, first: bytes) -> None:
        self._terminal = terminal
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()  # bounded by `_room`
        self._pending_bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._how: int | Refused | None = None
        self._has_left = False
        self._resizing: set[asyncio.Task[None]] = set()
        if first:
            self._put(first)

    async def show(self, data: bytes) -> None:
        """Take what the terminal shows, and return once there is room for more."""
        self._put(data)
        await self._room.wait()

    def over(self, how: int | Refused) -> None:
        """Nothing more comes: the program is over, with this code, or the terminal is lost."""
        if self._how is None:
            self._how = how
            self._pieces.put_nowait(b"")

    def _put(self, data: bytes) -> None:
        self._pieces.put_nowait(data)
        self._pending_bytes += len(data)
        if self._pending_bytes >= PENDING_BYTES_MAX:
            self._room.clear()

    async def run(self, take: Take) -> int:
        while data := await self._pieces.get():
            await take(Mark.OUT, data)
            self._pending_bytes -= len(data)
            if self._pending_bytes < PENDING_BYTES_MAX:
                self._room.set()
        assert self._how is not None
        if isinstance(self._how, Refused):
            raise self._how
        return self._how

    async def write(self, data: bytes) -> None:
        await self._terminal.write(data or CTRL_D)

    def resize(self, size: Terminal) -> None:
        if size.rows and size.columns:
            task = asyncio.get_running_loop().create_task(self._terminal.resize(size))
            self._resizing.add(task)
            task.add_done_callback(self._resizing.discard)

    def signal(self, name: str) -> None:
        """Do nothing: a terminal passes keys on, which its line discipline makes signals of."""

    def leave(self) -> None:
        self._has_left = True

    async def close(self) -> None:
        self._terminal.leave(self, lost=not self._has_left)
        self._room.set()
        for task in list(self._resizing):
            task.cancel()
