"""Run a command in a running job from here: ask the leader, then exchange bytes with the worker.

The messages are described in `schemas.frames.running`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Self

import msgspec

from moorage.bus.byte_window import ByteReceiver, ByteSender, BytesLost
from moorage.bus.errors import BusError, Disconnected
from moorage.bus.transport import Delivery, Subscribed
from moorage.client.errors import Unreachable, error_of, rejected, timed_out
from moorage.schemas.codec import Decoder, encode
from moorage.schemas.errors import MoorageError, Problem, problem
from moorage.schemas.frames import (
    BEAT_S,
    DEAD_S,
    CommandEnd,
    ExecAsked,
    ExecGiven,
    Mark,
    StreamName,
    Terminal,
    piece,
    read_piece,
)
from moorage.schemas.subjects import EXEC

if TYPE_CHECKING:
    from moorage.client.connected import Connected

_decode_end: Final = Decoder[CommandEnd](CommandEnd)
#: of each stream that `executed` collects
OUTPUT_BYTES_MAX: Final = 64 << 20
_INPUT_BYTES: Final = 64 * 1024
#: exit codes, as of a shell, of a program that could not be started, and of one that is not there
_CANNOT_START: Final = 126
_NOT_FOUND: Final = 127


class Executed(msgspec.Struct, frozen=True):
    """How a command in a running job ended, and all that it wrote: what `Job.exec` returns."""

    code: int  # exit code of its first process, or minus the signal that ended it
    stdout_bytes: bytes
    stderr_bytes: bytes

    @property
    def stdout(self) -> str:
        """`stdout_bytes` as UTF-8; bytes that are none are replaced."""
        return self.stdout_bytes.decode(errors="replace")

    @property
    def stderr(self) -> str:
        """`stderr_bytes` as UTF-8; bytes that are none are replaced."""
        return self.stderr_bytes.decode(errors="replace")


class Command:
    """A command that runs in a job. Leaving the block ends it, if it is not over.

    Read with `read` until it returns None, and then ask `wait` for the exit code. Only one task may read, and one
    write.
    """

    def __init__(self, client: Connected, asked: ExecAsked, size: Terminal) -> None:
        self._client = client
        self._asked = asked
        self._size = size
        self._loop = asyncio.get_running_loop()
        self._sender = ByteSender(self._send)
        self._receiver = ByteReceiver()
        self._output: asyncio.Queue[tuple[StreamName, bytes] | None] = asyncio.Queue()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        #: exit code, as of a shell, of a command that could not be started: 126 or 127; None for any other end
        self.start_code: int | None = None
        self._started = asyncio.Event()
        self._ready = asyncio.Event()
        self._heard_s = self._loop.time()
        self._heard: Subscribed | None = None
        self._beating: asyncio.Task[None] | None = None
        self._in = ""
        self.given: ExecGiven | None = None

    @classmethod
    def of(
        cls,
        client: Connected,
        job: str,
        argv: Sequence[str],
        *,
        replica: int = 0,
        tty: bool = False,
        term: str = "",
        size: Terminal | None = None,
        by: str = "",
        attach: bool = False,
    ) -> Self:
        """Return a command to be run in a replica of a job; the block `async with` runs it.

        With `tty` it has a terminal of this size, and what it writes is all on `out`; `term` is its TERM. With `attach`
        and no command it is the job's own program and terminal, of which this size is the new one. Raises `Rejected`
        for no command, or one that is too long.
        """
        try:
            asked = ExecAsked(job, list(argv), replica, tty, term, by, attach)
        except ValueError as error:
            raise rejected(
                "invalid-argument", str(error), field="$.argv", next="moorage exec JOB -- CMD; moorage shell JOB"
            ) from None
        return cls(client, asked, size or Terminal())

    async def __aenter__(self) -> Self:
        """Start the command, and return once it runs. Raises `ClientError` with the reason, `NoScheduler` and the
        like."""
        try:
            await self._open()
            async with asyncio.timeout(DEAD_S + BEAT_S):
                await self._started.wait()
            if self._ended.done() and self._ended.exception() is not None:
                self._ended.result()
        except TimeoutError:
            await self.__aexit__()
            raise self._lost("worker-lost", "its worker did not start the command in time") from None
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _open(self) -> None:
        answer = await self._client.answer(EXEC, msgspec.to_builtins(self._asked))
        self.given = given = msgspec.convert(answer.data, ExecGiven)
        subjects, tenant = self._client.subjects, self._client.tenant
        self._in = subjects.tty(tenant, given.worker, given.stream, "in")
        out = subjects.tty(tenant, given.worker, given.stream, "out")
        self._heard = await self._client.subscribe(out, self._on_message)
        self._heard_s = self._loop.time()
        self._beating = self._loop.create_task(self._beat())

    async def __aexit__(self, *_: object) -> None:
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait((self._beating,))
        try:
            if self._in and not self._ended.done():
                await self._send_piece(Mark.LEAVE)
            if self._heard is not None:
                await self._heard.unsubscribe()
        except BusError:  # the connection is lost: the worker misses the beats
            pass
        if not self._ended.done():
            self._ended.cancel()
        elif not self._ended.cancelled():
            self._ended.exception()  # so that it counts as seen

    async def executed(self, input: bytes) -> Executed:
        """Give the running command this input, and return all that it wrote once it is over.

        Raises what `wait` raises, and `Rejected` for more than 64 MiB of one stream.
        """
        feeding = self._loop.create_task(self._feed(input))
        got = {"out": bytearray(), "err": bytearray()}
        try:
            while (found := await self.read()) is not None:
                stream, data = found
                got[stream] += data
                if len(got[stream]) > OUTPUT_BYTES_MAX:
                    raise rejected(
                        "too-large", f"the command in job {self._asked.job} wrote too much, and is ended",
                        found=f"std{stream}", allowed=f"{OUTPUT_BYTES_MAX >> 20} MiB", job=self._asked.job,
                        next="write it to a file of the job, or pipe it: moorage exec JOB -- CMD > FILE",
                    )  # fmt: skip
            return Executed(await self.wait(), bytes(got["out"]), bytes(got["err"]))
        finally:
            feeding.cancel()
            await asyncio.wait((feeding,))

    async def _feed(self, input: bytes) -> None:
        for at in range(0, len(input), _INPUT_BYTES):
            await self.write(input[at : at + _INPUT_BYTES])
        await self.write_eof()

    async def read(self) -> tuple[StreamName, bytes] | None:
        """Return the next bytes of its output, with their stream; None once there are no more."""
        found = await self._output.get()
        if found is None:
            self._output.put_nowait(None)
            return None
        if (ack := self._receiver.consumed(len(found[1]))) is not None:
            await self._send(ack)
        return found

    async def write(self, data: bytes) -> None:
        """Write to its standard input; waits while the worker has no room for more."""
        await self._sender.put(Mark.INPUT, data)

    async def write_eof(self) -> None:
        """End its standard input."""
        await self._sender.put(Mark.EOF, b"\0")

    async def detach(self) -> None:
        """Leave the terminal of the job's own program with its input open. Leaving the block otherwise ends the input
        60 s later, unless another caller has come."""
        await self._send_piece(Mark.DETACH)

    async def resize(self, size: Terminal) -> None:
        """Give its terminal this size."""
        await self._send_piece(Mark.SIZE, 0, encode(size))

    async def signal(self, name: str) -> None:
        """Send it a signal, by its name without SIG."""
        await self._send_piece(Mark.SIGNAL, 0, name.encode())

    async def wait(self) -> int:
        """Return its exit code, or minus the signal that ended it.

        Raises `ClientError`: it was not started, its worker was lost, or the stream has lost bytes.
        """
        return await asyncio.shield(self._ended)

    # ---------------------------------------------------------------------------------------------------- inside

    async def _send_piece(self, mark: Mark, offset: int = 0, rest: bytes = b"") -> None:
        await self._send(piece(mark, offset, rest))

    async def _send(self, message: bytes) -> None:
        await self._client.link.send([(self._in, message, "")])

    def _on_message(self, delivery: Delivery) -> None:
        self._heard_s = self._loop.time()
        try:
            self._on(*read_piece(delivery.data))
        except BytesLost as lost:
            self._fail(self._lost("gap", str(lost)))
        except (ValueError, MoorageError):
            return  # of a release that says more

    def _on(self, mark: Mark, offset: int, rest: bytes) -> None:
        if mark is Mark.READY:
            self._ready.set()
        elif mark is Mark.STARTED:
            self._started.set()
        elif mark in (Mark.OUT, Mark.ERR) and rest:
            self._receiver.take(offset, len(rest))
            self._output.put_nowait(("out" if mark is Mark.OUT else "err", rest))
        elif mark is Mark.BEAT:
            self._receiver.reaches(offset)
        elif mark is Mark.ACK:
            self._sender.acked(offset)
        elif mark is Mark.END:
            self._receiver.take(offset, 0)
            how = _decode_end(rest)
            if how.code is None or how.error:
                self.start_code = how.code
                self._fail(error_of(self._problem(how.error or "internal", how.why, how.code)))
            elif not self._ended.done():
                self._ended.set_result(how.code)
                self._over()

    def _fail(self, error: Exception) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)
            self._over()

    def _over(self) -> None:
        self._started.set()
        self._ready.set()
        self._output.put_nowait(None)

    def _problem(self, code: str, why: str, start_code: int | None = None) -> Problem:
        """Return the error with what to do; `start_code` is 126 or 127 if the program is to blame, not the job."""
        job = self._asked.job
        step = "moorage show says how the job does"
        if why.startswith("no program "):
            step = "give its full path, as it is on the worker"
        elif start_code == _NOT_FOUND:
            step = "name a program that is where the job runs, on its worker or in its image"
        elif start_code == _CANNOT_START:
            step = "name a program that the job's user may run, or the interpreter before a script: sh FILE"
        return problem(code, f"the command in job {job}: {why}", job=job, next=step)

    def _lost(self, code: str, why: str) -> Exception:
        return error_of(self._problem(code, why))

    def _stood_still(self, still_s: float) -> Exception:
        """Return the error where this process did not run. A cell of a notebook blocks the loop while it computes."""
        job, why = self._asked.job, "it was stopped, the machine slept, or its event loop was blocked"
        said = (
            f"the command in job {job}: this process did not run for {still_s:.0f} s ({why}), and a worker ends a"
            f" command whose caller is silent for {DEAD_S:g} s"
        )
        lost = Disconnected(self._in).problem
        return Unreachable(msgspec.structs.replace(lost, message=said, job=job, next="run it again: the job goes on"))

    async def _beat(self) -> None:
        """Say GO until the command runs, and then that this end is there; lose a worker that was silent for
        `DEAD_S`, and leave what is lost."""
        beaten_s = self._loop.time()
        while True:
            now_s = self._loop.time()
            silent_s, still_s = now_s - self._heard_s, now_s - beaten_s
            beaten_s = now_s
            if silent_s >= DEAD_S:
                self._fail(
                    self._stood_still(still_s)
                    if still_s > DEAD_S / 2
                    else self._lost("worker-lost", f"its worker was silent for {silent_s:.0f} s")
                )
            self._ready.clear()
            try:
                if self._ended.done():
                    await self._send_piece(Mark.LEAVE)
                    return
                if self._started.is_set():
                    await self._send_piece(Mark.BEAT, self._sender.sent)
                    await self._send(self._receiver.acknowledgement())
                else:
                    await self._send_piece(Mark.GO, 0, encode(self._size))
            except BusError:
                pass  # the connection may come back before the worker misses the beats
            waits = self._loop.create_task(self._ready.wait())
            try:
                await asyncio.wait((waits,), timeout=BEAT_S)
            finally:
                waits.cancel()


async def executed(
    client: Connected,
    job: str,
    argv: Sequence[str],
    input: bytes,
    timeout_s: float | None,
    *,
    replica: int,
    by: str,
) -> Executed:
    """Run a command in a replica of a job to its end; see `Job.exec`."""
    if isinstance(argv, str):
        raise rejected(
            "invalid-argument", "a command is a list of words", found=argv, field="$.argv", job=job,
            next='["sh", "-c", "…"] runs a line in a shell',
        )  # fmt: skip
    try:
        async with asyncio.timeout(timeout_s), Command.of(client, job, argv, replica=replica, by=by) as command:
            return await command.executed(input)
    except TimeoutError:
        raise timed_out(f"the command in job {job} ran longer than {timeout_s:g} s, and is ended", job=job) from None
