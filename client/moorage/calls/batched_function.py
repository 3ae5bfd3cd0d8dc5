"""The program of `moorage serve package.module:name` where calls run in batches: the function gets a list of data.

It returns a list with an answer for each, in the same order, or an array with a row for each; an exception in it is the
error of its call alone. A generator yields such lists: their items are the next parts of the answers, and
`StopIteration` ends one of these. What the function raises is the error of all calls whose answers have not ended.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from moorage.calls.ahead import Given
from moorage.calls.function import (
    Context,
    FrameWriter,
    Served,
    Writer,
    answer_frame,
    data_of,
    error_frame,
    main,
    read_calls,
    settled,
)
from moorage.calls.wire import BODY_BYTES_MAX, FromProgram, ToProgram, decode_to_program, frame
from moorage.schemas.arrays import is_array
from moorage.schemas.served import CallError


class BadBatch(Exception):
    """The function returned, or yielded, no list with an item for each call."""


class Taken(NamedTuple):
    """A call as it came."""

    call: ToProgram
    body: bytes
    context: Context


class Batch:
    """Calls that run together, and the frames of their answers.

    A call leaves it when its answer has ended, and when its caller waits no longer.
    """

    def __init__(self, taken: Sequence[Taken]) -> None:
        self._taken = list(taken)  # those that the function has, once it is called
        self._open = {each.call.call for each in taken}
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
        return all(each.context.cancelled or each.call.call not in self._open for each in self._taken)

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
            if each.call.call not in self._open or self._leaves(each):
                continue
            if item is StopIteration or isinstance(item, StopIteration):
                self._end(each, _end_of_parts(each))
            elif isinstance(item, BaseException):
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

    def _items(self, value: Any, verb: str) -> Iterator[tuple[Taken, Any]]:
        expected = len(self._taken)
        if is_array(value):  # a row for each call
            value = list(value) if value.ndim else value
        if not isinstance(value, list | tuple) or len(value) != expected:
            found = f"list of {len(value)}" if isinstance(value, list | tuple) else type(value).__name__
            calls = "1 call" if expected == 1 else f"{expected} calls"
            raise BadBatch(f"the function got {calls}, and must {verb} a list of {expected}: found a {found}")
        return zip(self._taken, value, strict=True)

    def _frame(self, each: Taken, item: Any) -> bytes:
        try:
            return (
                error_frame(each.call, item)
                if isinstance(item, BaseException)
                else answer_frame(item, answer=each.call.call)
            )
        except Exception as error:  # it is neither bytes nor text nor JSON: the other answers are none the worse
            return error_frame(each.call, error)

    def _leaves(self, each: Taken) -> bool:
        if each.context.cancelled:
            self._end(each, error_frame(each.call, asyncio.CancelledError()))
        return each.context.cancelled

    def _end(self, each: Taken, made: bytes) -> None:
        if each.call.call in self._open:
            self._open.remove(each.call.call)
            self._frames.append(made)


def _end_of_parts(each: Taken) -> bytes:
    return frame(FromProgram(answer=each.call.call, in_parts=True))


def run(served: Served, batch: Batch, write: Callable[[bytes], None]) -> None:
    """Answer a batch with a plain function or generator."""
    try:
        if data := batch.data():
            with served.span(*batch.contexts):
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
    except BaseException as error:  # also sys.exit, as of a call by itself
        batch.fail(error)
    write(batch.frames())


async def run_async(served: Served, batch: Batch, writer: Writer) -> None:
    """Answer a batch with a coroutine function, or an asynchronous generator."""
    try:
        if data := await asyncio.to_thread(batch.data) if batch.has_files else batch.data():
            with served.span(*batch.contexts):
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
        self._of: dict[int, tuple[asyncio.Task[None], Batch, Context]] = {}

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        return {task for task, _, _ in self._of.values()}

    def begin(self, taken: Sequence[Taken]) -> None:
        batch = Batch(taken)
        task = asyncio.get_running_loop().create_task(self._run(batch))
        for each in taken:
            self._of[each.call.call] = task, batch, each.context

        def end(task: asyncio.Task[None]) -> None:
            for each in taken:
                del self._of[each.call.call]
            if task.cancelled():
                batch.fail(asyncio.CancelledError())
                self._writer.write(batch.frames())

        task.add_done_callback(end)

    def cancel(self, number: int) -> None:
        """The caller of this call waits no longer."""
        if number in self._of:
            task, batch, context = self._of[number]
            context.cancel()
            if batch.is_over:
                task.cancel()

    async def _run(self, batch: Batch) -> None:
        if self._served.is_async:
            await run_async(self._served, batch, self._writer)
        else:
            run(self._served, batch, self._writer.write)


def serve_plain(served: Served, link: socket.socket, places: int, _: Given | None = None) -> None:
    """Answer batches with a plain function: in this thread if there is one place and nothing to hear meanwhile, else in
    as many threads as places."""
    write = FrameWriter(link)
    known: dict[int, Context] = {}
    pool = ThreadPoolExecutor(places, "batch") if places > 1 or served.hears_cancel else None
    write(frame(FromProgram(ready=places)))

    def run_known(taken: Sequence[Taken]) -> None:
        run(served, Batch(taken), write)
        for each in taken:
            known.pop(each.call.call, None)

    taken: list[Taken] = []
    for call, body in read_calls(link.makefile("rb")):
        if call.cancel in known:
            known[call.cancel].cancel()
        elif call.call:
            taken.append(Taken(call, body, Context(call)))
            known[call.call] = taken[-1].context
            if call.more:
                continue
            if pool is None:
                run_known(taken)
            else:
                pool.submit(run_known, taken)
            taken = []
    if pool is not None:
        pool.shutdown(wait=True)


async def serve_async(served: Served, link: socket.socket, places: int) -> None:
    """Answer batches with a coroutine function, or an asynchronous generator, as tasks of one loop."""
    reader, writer = await asyncio.open_connection(sock=link, limit=BODY_BYTES_MAX)
    running = BatchTasks(served, writer)
    writer.write(frame(FromProgram(ready=places)))
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


if __name__ == "__main__":
    sys.exit(main(serve_plain, serve_async))
