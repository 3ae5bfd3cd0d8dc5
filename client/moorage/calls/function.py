"""The program of `moorage serve package.module:name`: answers calls with a Python function, in a process of its own.

It is run as `python -m moorage.calls.function package.module:name`, with its socket in `MOORAGE_CALL_FD`. Calls run as
batches, mostly of one. With `--batch` behind the name, the function gets a list of data, and returns a list with an
answer for each, in the same order, or an array with a row for each; an exception in it is the error of its call alone.
A generator yields such lists: their items are the next parts of the answers, and `StopIteration` ends one of these.
What the function raises is the error of all calls whose answers have not ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import msgspec

from moorage.calls.ahead import Given
from moorage.calls.served import CannotServe, Context, Served, found, settled
from moorage.calls.wire import (
    AHEAD_MAX,
    ANSWER_BYTES_MAX,
    BODY_BYTES_MAX,
    FromProgram,
    ToProgram,
    decode_to_program,
    frame,
)
from moorage.schemas.arrays import ARRAY, decoded_array, encoded_array, is_array
from moorage.schemas.errors import MoorageError
from moorage.schemas.handler import Result, decode_result, encode_result
from moorage.schemas.served import Answer, CallError, checked_headers
from moorage.schemas.service import AHEAD_VARIABLE, CONCURRENCY_VARIABLE, CONTENT_TYPE, FD_VARIABLE
from moorage.system.loops import loop_factory

#: the word behind the name of a function that takes batches
BATCH: Final = "--batch"
_MESSAGE_CHARS_MAX: Final = 2000


def data_of(call: ToProgram, body: bytes) -> Any:
    """Return a call's data: JSON and text as values if the caller says that they are, else bytes. Raises ValueError,
    and OSError or MemoryError for data that came in parts and cannot be read."""
    data = Path(call.file).read_bytes() if call.file else body
    if (array := call.headers.get(ARRAY)) is not None:
        return decoded_array(data, array)
    return decode_result(Result(call.headers.get(CONTENT_TYPE, ""), data))


def answer_frame(value: Any, *, answer: int = 0, part: int = 0) -> bytes:
    """Return the frame of a value: the answer of the call with this number, or a part of it."""
    own: dict[str, str] = {}
    if isinstance(value, Answer):
        value, own = value.value, checked_headers(value.headers)
    if (array := encoded_array(value)) is not None:
        result = encode_result(array[0])
        own = {ARRAY: array[1], **own}
    else:
        result = encode_result(value)
    if len(result.data) > ANSWER_BYTES_MAX:
        raise ValueError(f"the answer has {len(result.data)} bytes, allowed are {ANSWER_BYTES_MAX}")
    headers = {CONTENT_TYPE: result.content_type, **own}
    return frame(FromProgram(answer=answer, part=part, bytes=len(result.data), headers=headers), result.data)


def error_frame(call: ToProgram, error: BaseException) -> bytes:
    """Return the frame of a call that failed, whatever the exception: without one its caller waits for nothing."""
    own = error if isinstance(error, CallError) else None
    try:
        if own is not None:
            message = str(own.message)
        else:
            message = error.problem.message if isinstance(error, MoorageError) else str(error)
    except Exception as wrong:
        message = f"its message cannot be told: {type(wrong).__name__}"
    readable = message[:_MESSAGE_CHARS_MAX].encode(errors="backslashreplace").decode()  # names of files may be no text
    head = FromProgram(error=call.call, kind=type(error).__name__, message=readable)
    return frame(head if own is None else msgspec.structs.replace(head, code=own.code, headers=own.headers))


class BadBatch(Exception):
    """The function returned, or yielded, no list with an item for each call."""


class Taken:
    """A call as it came. `is_open` until its answer has ended."""

    __slots__ = ("body", "call", "context", "is_open")

    def __init__(self, call: ToProgram, body: bytes, context: Context) -> None:
        self.call = call
        self.body = body
        self.context = context
        self.is_open = True


class Batch:
    """Calls that run together, and the frames of their answers.

    A call leaves it when its answer has ended, and when its caller waits no longer.
    """

    __slots__ = ("_frames", "_is_list", "_taken")

    def __init__(self, taken: Sequence[Taken], *, is_list: bool) -> None:
        """`is_list`: the function answers with a list of answers, and not with that of the only call."""
        self._is_list = is_list
        self._taken = taken  # those that the function has, once it is called
        self._frames: list[bytes] = []

    @property
    def contexts(self) -> list[Context]:
        return [each.context for each in self._taken]

    @property
    def has_files(self) -> bool:
        return any(each.call.file for each in self._taken)

    @property
    def is_over(self) -> bool:
        """Whether all answers have ended, or nobody waits for those that have not."""
        return all(each.context.cancelled or not each.is_open for each in self._taken)

    def frames(self) -> bytes:
        """Return the frames that were made since the last time."""
        made, self._frames = b"".join(self._frames), []
        return made

    def data(self) -> list[Any]:
        """Return the data of the calls for the function. A call leaves the batch if its data cannot be read."""
        found, taken = [], []
        for each in self._taken:
            if not self._leaves(each):
                try:
                    found.append(data_of(each.call, each.body))
                    taken.append(each)
                except Exception as error:
                    self._end(each, error_frame(each.call, error))
        self._taken = taken
        return found

    def answer(self, value: Any) -> None:
        """Answer each call with its item of what the function returned. Raises BadBatch."""
        for each, item in self._items(value, "return"):
            self._end(each, self._frame(each, item))

    def part(self, value: Any) -> None:
        """Send each call its item of what the function yielded. Raises BadBatch."""
        for each, item in self._items(value, "yield"):
            if not each.is_open or self._leaves(each):
                continue
            if self._is_list and (item is StopIteration or isinstance(item, StopIteration)):
                self._end(each, _end_of_parts(each))
            elif self._is_list and isinstance(item, BaseException):
                self._end(each, self._frame(each, item))
            else:
                self._frames.append(answer_frame(item, part=each.call.call))

    def end_parts(self) -> None:
        """The function yields nothing more."""
        for each in self._taken:
            self._end(each, _end_of_parts(each))

    def fail(self, error: BaseException) -> None:
        """Answer all calls that are open with this error; one that the function did not mean to raise is in the log."""
        if not isinstance(error, CallError | asyncio.CancelledError):
            traceback.print_exception(error)
        for each in self._taken:
            if isinstance(error, BadBatch):
                self._end(each, frame(FromProgram(error=each.call.call, bad_batch=True, message=str(error))))
            else:
                self._end(each, error_frame(each.call, error))

    def _items(self, value: Any, verb: str) -> Sequence[tuple[Taken, Any]] | Iterator[tuple[Taken, Any]]:
        if not self._is_list:
            return ((self._taken[0], value),)
        expected = len(self._taken)
        if is_array(value):  # a row for each call
            value = list(value) if value.ndim else value
        if not isinstance(value, list | tuple) or len(value) != expected:
            found = f"list of {len(value)}" if isinstance(value, list | tuple) else type(value).__name__
            calls = "1 call" if expected == 1 else f"{expected} calls"
            raise BadBatch(f"the function got {calls}, and must {verb} a list of {expected}: found a {found}")
        return zip(self._taken, value, strict=True)

    def _frame(self, each: Taken, item: Any) -> bytes:
        if self._is_list and isinstance(item, BaseException):
            return error_frame(each.call, item)
        try:
            return answer_frame(item, answer=each.call.call)
        except Exception as error:  # it is neither bytes nor text nor JSON: the other answers are none the worse
            traceback.print_exception(error)
            return error_frame(each.call, error)

    def _leaves(self, each: Taken) -> bool:
        if each.context.cancelled:
            self._end(each, error_frame(each.call, asyncio.CancelledError()))
        return each.context.cancelled

    def _end(self, each: Taken, made: bytes) -> None:
        if each.is_open:
            each.is_open = False
            self._frames.append(made)


def _end_of_parts(each: Taken) -> bytes:
    return frame(FromProgram(answer=each.call.call, in_parts=True))


class Writer(Protocol):
    """What a coroutine function writes its frames to: an `asyncio.StreamWriter`, or what stands in for one."""

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...


class FrameWriter:
    """Writes frames whole, from any thread."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._lock = threading.Lock()

    def __call__(self, data: bytes) -> None:
        with self._lock:
            self._link.sendall(data)


def run(served: Served, batch: Batch, write: Callable[[bytes], None]) -> None:
    """Answer a batch with a plain function or generator."""
    try:
        if data := batch.data():
            with served.span(batch.contexts):
                value = settled(served(data, batch.contexts))
                if isinstance(value, Iterator):
                    for each in value:
                        batch.part(each)
                        write(batch.frames())
                        if batch.is_over:
                            value = None  # closes the generator
                            break
                    batch.end_parts()
                else:
                    batch.answer(value)
    except BaseException as error:  # also sys.exit: in a thread it would end nothing but this batch, and unheard
        batch.fail(error)
    write(batch.frames())


async def run_async(served: Served, batch: Batch, writer: Writer) -> None:
    """Answer a batch with a coroutine function, or an asynchronous generator."""
    try:
        if data := await asyncio.to_thread(batch.data) if batch.has_files else batch.data():
            with served.span(batch.contexts):
                value = served(data, batch.contexts)
                if isinstance(value, AsyncIterator):
                    async for each in value:
                        batch.part(each)
                        writer.write(batch.frames())
                        await writer.drain()
                        if batch.is_over:
                            if isinstance(value, AsyncGenerator):
                                await value.aclose()
                            break
                    batch.end_parts()
                else:
                    batch.answer(await value)
    except asyncio.CancelledError:
        raise  # the task's end says so, also if it never began
    except BaseException as error:
        batch.fail(error)
    writer.write(batch.frames())


class BatchTasks:
    """Batches of a coroutine function, each a task. One whose callers all wait no longer is cancelled."""

    def __init__(self, served: Served, writer: Writer) -> None:
        self._served = served
        self._writer = writer
        self._run = run_async if served.is_async else _run_at_once
        self._of: dict[int, tuple[asyncio.Task[None], Batch, Context]] = {}

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        return {task for task, _, _ in self._of.values()}

    def begin(self, taken: Sequence[Taken]) -> None:
        batch = Batch(taken, is_list=self._served.in_batches)
        task = asyncio.get_running_loop().create_task(self._run(self._served, batch, self._writer))
        for each in taken:
            self._of[each.call.call] = task, batch, each.context
        task.add_done_callback(partial(self._end, taken, batch))

    def cancel(self, number: int) -> None:
        """The caller of this call waits no longer."""
        if number in self._of:
            task, batch, context = self._of[number]
            context.cancel()
            if batch.is_over:
                task.cancel()

    def _end(self, taken: Sequence[Taken], batch: Batch, task: asyncio.Task[None]) -> None:
        for each in taken:
            del self._of[each.call.call]
        if task.cancelled():  # also before its first step
            batch.fail(asyncio.CancelledError())
            self._writer.write(batch.frames())


async def _run_at_once(served: Served, batch: Batch, writer: Writer) -> None:
    run(served, batch, writer.write)


def serve_plain(served: Served, link: socket.socket, places: int, given: Given | None = None) -> None:
    """Answer calls with a plain function: in this thread if there is one place and nothing to hear meanwhile, else in
    as many threads as places."""
    write = FrameWriter(link)
    known: dict[int, Context] = {}
    pool = ThreadPoolExecutor(places, "call") if places > 1 or served.hears_cancel else None
    # one after another, in the order in which they were sent
    ahead = AHEAD_MAX if pool is None and not served.in_batches else 0
    write(frame(FromProgram(ready=places, ahead=ahead, endpoints=served.endpoints)))

    def run_known(taken: Sequence[Taken]) -> None:
        run(served, Batch(taken, is_list=served.in_batches), write)
        for each in taken:
            known.pop(each.call.call, None)

    taken: list[Taken] = []
    for call, body in read_calls(link.makefile("rb")):
        if call.cancel in known:
            known[call.cancel].cancel()
        elif call.call:
            if call.ahead and given is not None and not given.take(call.call):
                continue
            taken.append(Taken(call, body, Context(call)))
            if call.more:
                continue
            if pool is None:
                run(served, Batch(taken, is_list=served.in_batches), write)
            else:
                known |= {each.call.call: each.context for each in taken}
                pool.submit(run_known, taken)
            taken = []
    if pool is not None:
        pool.shutdown(wait=True)


def read_calls(reader: BinaryIO) -> Iterator[tuple[ToProgram, bytes]]:
    """Yield the calls that a program is given until it ends; `reader` is closed then, as its socket would stay open."""
    with reader:
        while line := reader.readline():
            head: ToProgram = decode_to_program(line)
            if head.end:
                return
            yield head, reader.read(head.bytes) if head.bytes else b""


async def serve_async(served: Served, link: socket.socket, places: int) -> None:
    """Answer calls with a coroutine function, or an asynchronous generator, as tasks of one loop."""
    reader, writer = await asyncio.open_connection(sock=link, limit=BODY_BYTES_MAX)  # a line has the caller's headers
    running = BatchTasks(served, writer)
    writer.write(frame(FromProgram(ready=places, endpoints=served.endpoints)))
    taken: list[Taken] = []
    while line := await reader.readline():
        call = decode_to_program(line)
        if call.end:
            break
        if call.cancel:
            running.cancel(call.cancel)
        elif call.call:
            body = await reader.readexactly(call.bytes) if call.bytes else b""
            taken.append(Taken(call, body, Context(call)))
            if not call.more:
                running.begin(taken)
                taken = []
    if tasks := running.tasks:
        await asyncio.wait(tasks)
    await writer.drain()
    writer.close()
    await writer.wait_closed()  # the last answers may still lie in its buffer


def main(words: Sequence[str]) -> int:
    """Answer calls with the function of this name until the member says that this ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the member says when to end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = socket.socket(fileno=int(os.environ.pop(FD_VARIABLE)))
    link.set_inheritable(False)
    given = Given(int(os.environ.pop(AHEAD_VARIABLE)))
    places = int(os.environ.pop(CONCURRENCY_VARIABLE))
    sys.path.insert(0, os.getcwd())
    target = words[0]
    try:
        served = Served(found(target), target, in_batches=BATCH in words)
    except CannotServe as error:
        print(f"error: {target} cannot be served: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        print(f"error: {target} cannot be served: {type(error).__name__}: {error}", file=sys.stderr)
        traceback.print_exc()
        return 1
    try:
        if served.is_async:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(serve_async(served, link, places))
        else:
            serve_plain(served, link, places, given)
    except (BrokenPipeError, ConnectionResetError, msgspec.DecodeError):
        return 1  # the member is gone
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
