"""A private thread with an event loop, for callers that have none. A call runs a coroutine there and waits for it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, NoReturn, TypeVar, cast

from moorage.client.keywords import Misused
from moorage.client.notebook import in_notebook
from moorage.schemas.errors import MoorageError

#: how long an interrupted call waits for the cancellation of its coroutine
CANCEL_S_MAX: Final = 5.0
#: how often a waiting call wakes: a Ctrl-C right before a wait for a lock does not interrupt the wait
LOOK_S: Final = 1.0

T = TypeVar("T")
_END: Final = object()
#: has `is_private` in the threads that run the loop of a client
_here: Final = threading.local()
_CLOSED: Final = "the client was closed, or the call interrupted, before this was done"


class LoopThread:
    """A thread with an event loop, which runs coroutines for other threads until `stop`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = 0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._beside: set[asyncio.Task[None]] = set()
        self._handed: dict[concurrent.futures.Future[Any], Coroutine[Any, Any, Any]] = {}

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client cannot be sent to another process: open one there, and get the job by client.job(id)")

    @property
    def runs(self) -> bool:
        return self._loop is not None

    @property
    def is_of_parent(self) -> bool:
        """Whether this process did not start the thread: it is the child of a fork, or `start` was not called yet."""
        return self._pid != os.getpid()

    def start(self) -> None:
        refuse_inside_loop()
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name=self._name, daemon=True)
        self._pid = os.getpid()
        self._thread.start()
        started.result()

    def stop(self) -> None:
        """End the loop, the tasks that still run in it, and the thread. In the child of a fork, only forget them."""
        thread, loop, stop = self._thread, self._loop, self._stop
        if thread is None or loop is None or stop is None:
            return
        self._thread = self._loop = self._stop = None
        if self._pid == os.getpid():
            loop.call_soon_threadsafe(stop.set)
            thread.join()

    def _run(self, started: concurrent.futures.Future[None]) -> None:
        _here.is_private = True

        async def serve() -> None:
            stop = asyncio.Event()
            self._loop, self._stop = asyncio.get_running_loop(), stop
            started.set_result(None)
            await stop.wait()

        try:
            with asyncio.Runner() as runner:
                runner.run(serve())
        except OSError as error:  # no descriptor is left for a loop
            if started.done():
                raise
            started.set_exception(error)
        for done, work in list(self._handed.items()):  # handed over after the loop's last turn
            if not done.done():
                work.close()
                done.set_exception(RuntimeError(_CLOSED))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the private thread, and return its result.

        If the wait is interrupted, by Ctrl-C or by any other exception that a signal handler raises, the coroutine is
        cancelled before this raises. An error of moorage is raised without the frames of that thread.
        """
        __tracebackhide__ = True  # of IPython and pytest
        try:
            refuse_inside_loop()
            loop = self._checked()
        except BaseException:
            work.close()
            raise
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        ended: list[concurrent.futures.Future[T]] = []
        # A signal handler may raise inside a method of a future, which then keeps the future's lock for ever. So this
        # thread waits for a lock of its own, and touches the future only once it is done.
        waits = threading.Lock()
        waits.acquire()
        done.add_done_callback(ended.append)
        done.add_done_callback(lambda _: waits.release())
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            if self._loop is not loop:  # the loop is ending: nothing would cancel a new task
                work.close()
                done.set_exception(RuntimeError(_CLOSED))
                return
            task = loop.create_task(work)
            task.add_done_callback(lambda over: _hand_over(over, done))
            tasks.append(task)

        def give_up() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # interrupted before it was handed over
                work.close()
                done.cancel()

        self._handed[done] = work
        try:
            try:
                loop.call_soon_threadsafe(begin)
            except RuntimeError:  # closed a moment ago
                work.close()
                raise RuntimeError(_CLOSED) from None
            while not waits.acquire(timeout=LOOK_S):
                pass
            return done.result()
        except BaseException as error:
            if not ended:  # it is not the coroutine's own error, but one of a signal handler
                with contextlib.suppress(RuntimeError):  # the loop is closed, and its tasks have ended
                    loop.call_soon_threadsafe(give_up)
                    waits.acquire(timeout=CANCEL_S_MAX)
            elif isinstance(error, MoorageError | Misused):  # its text says all, and the frames of the loop say nothing
                if error.__cause__ is not None:
                    error.__cause__.__traceback__ = None
                raise error.with_traceback(None) from error.__cause__
            raise
        finally:
            self._handed.pop(done, None)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine beside the calls, until it ends or the loop does. Does nothing if the loop does not run."""
        loop = self._loop

        def create() -> None:
            if self._loop is not loop:
                work.close()
                return
            task = cast("asyncio.AbstractEventLoop", loop).create_task(work)
            self._beside.add(task)
            task.add_done_callback(self._beside.discard)

        try:
            self._checked().call_soon_threadsafe(create)
        except RuntimeError:  # closed, or of the parent of a fork
            work.close()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call a function in the loop, without waiting. Raises RuntimeError if the loop does not run."""
        self._checked().call_soon_threadsafe(function)

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Yield the items of an asynchronous iterator, one call each. If the caller stops early, close the iterator."""
        refuse_inside_loop()
        loop = self._checked()
        try:
            while (item := self.call(_next(items))) is not _END:
                yield cast("T", item)
                self._check_same(loop)
        finally:
            self._finish(cast("AsyncGenerator[T, None]", items), loop)

    def in_order(self, works: Iterator[Callable[[], Coroutine[Any, Any, T]]], at_once: int) -> Iterator[T]:
        """Run coroutines, at most `at_once` at the same time, and yield their results in order. The iterator is read in
        the caller's thread, as it may call the client. If the caller stops early, cancel those that run."""
        refuse_inside_loop()
        loop = self._checked()
        running: deque[asyncio.Task[T]] = deque()
        try:
            for work in works:
                self.call(_begin(work, running))
                if len(running) >= at_once:
                    yield self.call(_result(running.popleft()))
                    self._check_same(loop)
            while running:
                yield self.call(_result(running.popleft()))
                self._check_same(loop)
        finally:
            if running and self._loop is loop and not self.is_of_parent:
                if _is_in_loop():  # the garbage collector called this
                    loop.call_soon_threadsafe(_cancel, running)
                else:
                    self.call(_cancelled(running))

    def _check_same(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not loop:
            raise RuntimeError("the client was closed while this was iterated over")

    def _finish(self, items: AsyncGenerator[Any, None], loop: asyncio.AbstractEventLoop) -> None:
        """Close the iterator. In the loop's own thread, where the garbage collector may call this, do not wait."""
        if self._loop is not loop or self._pid != os.getpid():
            return  # the loop closed it when it ended
        if _is_in_loop():
            loop.call_soon_threadsafe(lambda: asyncio.ensure_future(items.aclose()))
        else:
            self.call(_close(items))

    def _checked(self) -> asyncio.AbstractEventLoop:
        loop = self._loop
        if loop is None:
            raise RuntimeError("the client is not open: use it in `with Client() as moorage:`")
        if self._pid != os.getpid():
            raise RuntimeError("this client was opened before a fork: open another one in the child")
        return loop


async def _next(items: AsyncIterator[T]) -> T | object:
    return await anext(items, _END)


async def _begin(work: Callable[[], Coroutine[Any, Any, T]], running: deque[asyncio.Task[T]]) -> None:
    task = asyncio.get_running_loop().create_task(work())
    task.add_done_callback(_read)
    running.append(task)  # here: an interrupt of who waits for this must find it


def _read(task: asyncio.Task[Any]) -> None:
    """Read a task's error: who stopped early, or closed the client, asks for it no more, and asyncio would log it."""
    if not task.cancelled():
        task.exception()


async def _result(task: asyncio.Task[T]) -> T:
    return await task


def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()


async def _cancelled(tasks: Collection[asyncio.Task[Any]]) -> None:
    _cancel(tasks)
    await asyncio.wait(tasks)


async def _close(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()


def _hand_over(over: asyncio.Task[T], done: concurrent.futures.Future[T]) -> None:
    if over.cancelled():
        done.set_exception(RuntimeError(_CLOSED))
    elif (error := over.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(over.result())


def read_here(items: Iterable[T]) -> Iterable[T]:
    """Return the items, read in this thread: what makes them may call the client, which its own thread cannot."""
    return list(items) if isinstance(items, Iterable) and not isinstance(items, Collection) else items


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def refuse_inside_loop() -> None:
    """Raise RuntimeError if this thread runs an event loop: waiting here would block all of its tasks.

    The loop of a notebook waits for the code of its cells in any case.
    """
    if _is_in_loop() and (hasattr(_here, "is_private") or not in_notebook()):
        raise RuntimeError(
            "this thread runs an event loop, and moorage.client.Client would block it: "
            "use moorage.client.AsyncClient here, with await"
        )


async def entered(context: AbstractAsyncContextManager[T]) -> T:
    return await context.__aenter__()


async def called(function: Callable[[], T]) -> T:
    return function()
