"""Call a handler: as a task, in a thread of its own, or directly. An exception of the handler becomes the future's."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable

import msgspec

from moorage.worker.drivers.handler.context import HandlerContext

#: a coroutine function, or a plain one for a thread; its result is bytes, text, a JSON value, None, or an awaitable of
#: one of these, which is awaited in the event loop
Handler = Callable[[HandlerContext], Awaitable[object]] | Callable[[HandlerContext], object]


class Exited(msgspec.Struct, frozen=True):
    """The result of a coroutine that asked the whole process to end."""

    error: SystemExit | KeyboardInterrupt


async def contained(handler: Callable[[HandlerContext], Awaitable[object]], context: HandlerContext) -> object:
    """Call a handler, await its work and return its result; on SystemExit and KeyboardInterrupt, return `Exited`.

    asyncio lets these two alone out of a task: they would end the event loop, and so the whole service. argparse raises
    the first, for example, for a job's bad arguments. A real Ctrl-C is no exception in a task. The handler is called
    here, and not before, because a task that is cancelled before its first step would leave a coroutine that nothing
    awaits.
    """
    try:
        return await handler(context)
    except (SystemExit, KeyboardInterrupt) as error:
        return Exited(error)


def words_of(error: BaseException) -> str:
    """Return an error's type and text. Never raises, although some errors raise when they are turned into text."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as broken:
        return f"{type(error).__name__}, whose text raises {type(broken).__name__}"


def in_thread(handler: Handler, context: HandlerContext) -> asyncio.Future[object]:
    """Call a plain function in a thread of its own; return the future of its result.

    If no thread can be started, the future has a RuntimeError. There is no pool of threads: functions that hang could
    block all of them, and asyncio waits for its pool's threads at the end of the process.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[object] = loop.create_future()

    def call() -> None:
        came = _outcome(handler, context)
        with contextlib.suppress(RuntimeError):  # the loop is gone
            loop.call_soon_threadsafe(_settle, future, *came)

    try:
        threading.Thread(target=call, name=f"handler {context.job}", daemon=True).start()
    except RuntimeError as error:  # the thread cannot start: only this job fails
        future.set_exception(error)
    return future


def at_once(handler: Handler, context: HandlerContext) -> asyncio.Future[object]:
    future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    _settle(future, *_outcome(handler, context))
    return future


def _outcome(handler: Handler, context: HandlerContext) -> tuple[object, BaseException | None]:
    try:
        return handler(context), None
    except StopIteration as stop:  # a future cannot store it
        return None, RuntimeError(f"the handler raised {stop!r}")
    except BaseException as caught:
        return None, caught


def _settle(future: asyncio.Future[object], value: object, error: BaseException | None) -> None:
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
