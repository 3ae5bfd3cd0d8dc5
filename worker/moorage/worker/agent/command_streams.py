"""Run commands in running attempts for callers, and carry their bytes; see `schemas.frames.running` for the messages.

Each command is a task beside the agent's turns. It ends with its caller, whose beats stay out, with its attempt, whose
driver ends it, and with this agent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

from moorage.bus.byte_window import ByteReceiver, ByteSender, BytesLost
from moorage.bus.errors import BusError
from moorage.bus.transport import Delivery, Handler, Subscribed
from moorage.schemas.attempt import AttemptName, name_in
from moorage.schemas.codec import Decoder, encode
from moorage.schemas.errors import MoorageError, refuse
from moorage.schemas.frames import BEAT_S, DEAD_S, CommandEnd, Exec, Mark, Terminal, piece, read_piece
from moorage.schemas.subjects import Subjects
from moorage.worker.driver import Driver, Executes
from moorage.worker.drivers.execution import CannotExecute, Execution
from moorage.worker.session.attempt_messages import Attempt
from moorage.worker.session.shell import Shell

#: commands in progress at once, in all and of one tenant; further callers are refused
STREAMS_MAX: Final = 64
STREAMS_MAX_TENANT: Final = 48
#: streams of one tenant, with those whose callers have not come or are being refused; further orders are dropped
KNOWN_MAX_TENANT: Final = 128

log = logging.getLogger("moorage.worker")

_decode_terminal: Final = Decoder[Terminal](Terminal)


class Subscribing(Protocol):
    """What subscribes for the agent."""

    async def subscribe(self, subject: str, handler: Handler) -> Subscribed: ...


class CommandStreams:
    """The commands that one worker runs for callers."""

    def __init__(
        self,
        shell: Shell,
        host: Subscribing,
        worker: str,
        subjects: Subjects,
        drivers: Mapping[str, Driver],
        held: Mapping[AttemptName, Attempt],
    ) -> None:
        self._shell = shell
        self._host = host
        self._worker = worker
        self._subjects = subjects
        self._drivers = drivers
        self._held = held
        self._streams: dict[str, _Stream] = {}

    def open(self, asked: Exec) -> None:
        """Begin to run a command for the caller on its stream; an order that came before is ignored."""
        if asked.stream in self._streams:
            return
        mine = [stream for stream in self._streams.values() if stream.tenant == asked.tenant]
        if len(mine) >= KNOWN_MAX_TENANT:
            self._shell.dropped["too-many-streams"] += 1
            return
        is_full = _served(mine) >= STREAMS_MAX_TENANT or _served(self._streams.values()) >= STREAMS_MAX
        stream = self._streams[asked.stream] = _Stream(
            self._shell,
            asked.tenant,
            self._subjects.tty(asked.tenant, self._worker, asked.stream, "out"),
            is_refused=is_full,
        )
        self._shell.spawn(self._run(asked, stream))

    async def _run(self, asked: Exec, stream: _Stream) -> None:
        subject = self._subjects.tty(asked.tenant, self._worker, asked.stream, "in")
        try:
            heard = await self._host.subscribe(subject, stream.on_message)
            try:
                await self._serve(asked, stream)
            finally:
                await heard.unsubscribe()
        except (BusError, TimeoutError) as error:  # the caller did not come, or the connection is lost
            log.info("%s: a command in %s of %s: %s", self._worker, asked.job, asked.tenant, error or "no caller")
        finally:
            del self._streams[asked.stream]

    async def _serve(self, asked: Exec, stream: _Stream) -> None:
        size = await stream.caller()
        try:
            if stream.is_refused:
                most = f"{STREAMS_MAX} in all, {STREAMS_MAX_TENANT} of a tenant"
                raise refuse("overloaded", f"too many commands run on {self._worker}", allowed=most, retry_after_s=1.0)
            execution = await self._begin(asked, size)
        except MoorageError as error:
            stream.end(_refusal(error))
            return
        except Exception as error:  # a foreign driver may fail in any way, and the caller must hear of it
            stream.end(CommandEnd(None, f"{type(error).__name__}: {error}", "internal"))
            return
        try:
            stream.end(await stream.carry(execution))
        finally:
            await execution.close()

    async def _begin(self, asked: Exec, size: Terminal) -> Execution:
        name = name_in(asked)
        attempt = self._held.get(name)
        if attempt is None or attempt.phase != "running":
            found = "not here" if attempt is None else attempt.phase
            raise refuse("failed-precondition", f"the attempt does not run: it is {found}", found=found, job=asked.job)
        if attempt.frozen or attempt.freezing:
            raise refuse("failed-precondition", "the attempt is frozen", found="frozen", job=asked.job)
        driver = self._drivers[attempt.driver]
        if not (driver.capabilities.execs and isinstance(driver, Executes)):
            raise refuse("failed-precondition", f"the driver {driver.name} runs no command in a running job")
        return await driver.execute(attempt.request, asked, size)


def _served(streams: Iterable[_Stream]) -> int:
    return sum(not stream.is_refused for stream in streams)


def _refusal(error: MoorageError) -> CommandEnd:
    code = error.exit_code if isinstance(error, CannotExecute) else None
    return CommandEnd(code, error.problem.message, error.problem.code)


class _Stream:
    """The worker's end of one stream."""

    def __init__(self, shell: Shell, tenant: str, subject: str, *, is_refused: bool) -> None:
        self.tenant = tenant
        self.is_refused = is_refused
        self._shell = shell
        self._subject = subject
        self._loop = asyncio.get_running_loop()
        self._sender = ByteSender(self._send)
        self._receiver = ByteReceiver()
        self._input: asyncio.Queue[bytes] = asyncio.Queue()  # its bytes are bounded by the window; b"" is the end
        self._is_at_end = False
        self._go: asyncio.Future[Terminal] = self._loop.create_future()
        self._broken: asyncio.Future[str] = self._loop.create_future()  # why the caller is lost
        self._heard_s = self._loop.time()
        self._execution: Execution | None = None

    async def _send(self, message: bytes) -> None:
        self._shell.post(self._subject, message)

    def end(self, how: CommandEnd) -> None:
        """Send how the command ended."""
        self._shell.post(self._subject, piece(Mark.END, self._sender.sent, encode(how)))

    async def caller(self) -> Terminal:
        """Wait for the caller, and return the size of its terminal. Raises TimeoutError after `DEAD_S`."""
        async with asyncio.timeout(DEAD_S):
            while not self._go.done():
                self._shell.post(self._subject, piece(Mark.READY))
                await asyncio.wait((self._go,), timeout=BEAT_S)
        return self._go.result()

    def on_message(self, delivery: Delivery) -> None:
        """Handle a message of the caller, in the read path."""
        self._heard_s = self._loop.time()
        try:
            mark, offset, rest = read_piece(delivery.data)
            self._on(mark, offset, rest)
        except (ValueError, MoorageError):
            self._shell.dropped["bad-message-of-a-stream"] += 1
        except BytesLost as lost:
            self._lose(str(lost))

    def _on(self, mark: Mark, offset: int, rest: bytes) -> None:
        if mark is Mark.GO and not self._go.done():
            self._go.set_result(_decode_terminal(rest))
        elif mark is Mark.INPUT and rest:
            self._receiver.take(offset, len(rest))
            self._input.put_nowait(rest)
        elif mark is Mark.EOF and not self._is_at_end:  # once: it takes none of the window
            self._receiver.take(offset, len(rest))
            self._input.put_nowait(b"")
            self._is_at_end = True
        elif mark is Mark.BEAT:
            self._receiver.reaches(offset)
        elif mark is Mark.ACK:
            self._sender.acked(offset)
        elif mark is Mark.SIZE and self._execution is not None:
            self._execution.resize(_decode_terminal(rest))
        elif mark is Mark.SIGNAL and self._execution is not None:
            self._execution.signal(rest.decode("ascii", "replace"))
        elif mark is Mark.DETACH and self._execution is not None:
            self._execution.leave()
        elif mark is Mark.LEAVE:
            self._lose("the caller has left")

    def _lose(self, why: str) -> None:
        if not self._broken.done():
            self._broken.set_result(why)

    async def carry(self, execution: Execution) -> CommandEnd:
        """Carry bytes both ways until the command is over, or its caller is lost; return how it ended."""
        self._execution = execution
        self._shell.post(self._subject, piece(Mark.STARTED))
        running = self._loop.create_task(execution.run(self._sender.put))
        beside = [self._loop.create_task(self._feed(execution)), self._loop.create_task(self._beat())]
        try:
            either: set[asyncio.Future[Any]] = {running, self._broken}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                return CommandEnd(None, self._broken.result(), "gap")
            return CommandEnd(running.result())
        except MoorageError as error:
            return _refusal(error)
        finally:
            self._execution = None
            for task in (running, *beside):
                task.cancel()
            await asyncio.wait({running, *beside})

    async def _feed(self, execution: Execution) -> None:
        while True:
            data = await self._input.get()
            await execution.write(data)
            if (ack := self._receiver.consumed(len(data) or 1)) is not None:
                self._shell.post(self._subject, ack)

    async def _beat(self) -> None:
        """Say that this end is there, and lose a caller that has not for `DEAD_S`."""
        while True:
            silent_s = self._loop.time() - self._heard_s
            if silent_s >= DEAD_S:
                self._lose(f"the caller was silent for {silent_s:.0f} s")
            self._shell.post(self._subject, piece(Mark.BEAT, self._sender.sent))
            self._shell.post(self._subject, self._receiver.acknowledgement())
            await asyncio.sleep(BEAT_S)
