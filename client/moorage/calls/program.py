"""The program that answers the calls of a member: a child of the member's process, with a socket between the two.

It is a process of its own so that a handler that holds the interpreter, or dies, does not keep the member from handing
waiting calls on and from answering.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from moorage.calls.ahead import Ahead
from moorage.calls.child import END_S, LAST_WORDS_S, BeforeKill, Child
from moorage.calls.wire import BadFrame, Frames, FromProgram, ToProgram, frame
from moorage.schemas.exit_words import exit_words
from moorage.schemas.service import AHEAD_VARIABLE, CONCURRENCY_VARIABLE, FD_VARIABLE


class Link(Protocol):
    """The way to what answers calls: a started program, or what stands before it or in for it."""

    def send(self, head: ToProgram, body: bytes = b"") -> None: ...

    def send_all(self, frames: Sequence[tuple[ToProgram, bytes]]) -> None: ...

    def hold(self, on: bool) -> None: ...

    def take_back(self) -> list[int]: ...


class Program(Child, asyncio.Protocol):
    """A started program. `on_frame` gets its frames."""

    def __init__(
        self,
        on_frame: Callable[[FromProgram, bytes], None],
        on_over: Callable[[str], None],
        before_kill: BeforeKill | None = None,
    ) -> None:
        super().__init__(on_over, before_kill)
        self._on_frame = on_frame
        self._killing: asyncio.Task[None] | None = None
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._at_end = asyncio.Event()
        self._ahead = Ahead()
        self._gathered: list[bytes] | None = None  # what is sent while a read is worked off: it leaves in one piece

    async def start(self, argv: Sequence[str], concurrency: int, environment: Mapping[str, str]) -> None:
        """Start the program, with its end of the socket as an open file. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *argv,
                pass_fds=(theirs.fileno(), self._ahead.theirs),
                # SIGTERM is for the member, which lets the program finish; see the supervisor's rule for sessions
                start_new_session=True,
                env={
                    **environment,
                    FD_VARIABLE: str(theirs.fileno()),
                    AHEAD_VARIABLE: str(self._ahead.theirs),
                    CONCURRENCY_VARIABLE: str(concurrency),
                },
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: self, sock=ours)
        self._transport = transport
        self._watching = loop.create_task(self._watch(self._process))

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        # what it had written before its end is read first. A process that it left may keep the socket open
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._at_end.wait()
        self._over(f"the program ended {exit_words(code)}")

    def send(self, head: ToProgram, body: bytes = b"") -> None:
        """Send a frame. Does nothing once the program has ended, but that a call ahead can be taken back."""
        if head.ahead:
            try:
                self._ahead.put(head.call)
            except BlockingIOError:  # it would run calls that were taken back, too
                # the member is in the middle of its own work
                asyncio.get_running_loop().call_soon(self._breach, f"it takes no numbers out of {AHEAD_VARIABLE}")
        self._write(frame(head, body))

    def _write(self, data: bytes) -> None:
        if self._gathered is not None:
            self._gathered.append(data)
        elif self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def send_all(self, frames: Sequence[tuple[ToProgram, bytes]]) -> None:
        """Send frames in one piece, which the program reads at once."""
        self._write(b"".join(frame(head, body) for head, body in frames))

    def take_back(self) -> list[int]:
        """Return the numbers of the calls that were sent ahead and have not begun: the program begins none of them."""
        return self._ahead.take_back()

    def hold(self, on: bool) -> None:
        """Read nothing of the program for now (`on`), or again: it waits once the socket is full."""
        if self._transport is not None and not self._transport.is_closing():
            (self._transport.pause_reading if on else self._transport.resume_reading)()

    async def finish(self, grace_s: float = END_S) -> int:
        """Tell the program to end, kill it if it does not within `grace_s`, and return its exit code."""
        self.send(ToProgram(end=True))
        if self._transport is not None:
            self._transport.close()
        return await self._ended(grace_s)

    # -- asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        gathered = self._gathered = []
        try:
            for head, body in self._frames.feed(data):
                self._on_frame(head, body)
        except BadFrame as error:
            self._breach(str(error))
        finally:
            self._gathered = None
            if gathered:
                self._write(b"".join(gathered))

    def eof_received(self) -> bool:
        self._at_end.set()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._at_end.set()
        if exc is not None or (self._process is not None and self._process.returncode is None):
            asyncio.get_running_loop().call_later(END_S, self._over, "the program closed its socket")

    def _breach(self, what: str) -> None:
        self._killing = asyncio.get_running_loop().create_task(self.kill())
        self._over(f"the program does not keep to the protocol: {what}")
