"""`Executor` and `AsyncExecutor`: functions with their arguments run as jobs, and futures have what comes of them.

`Executor` is one of `concurrent.futures`, for code that takes such an executor. Calls, values and exceptions travel by
cloudpickle; a call runs in a process of its own, on the GPUs that the executor asks for.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import concurrent.futures.thread
import contextlib
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Unpack

from moorage.client.by_value import pickled
from moorage.client.call_jobs import NOT_OF_CALLS, Call, CallJobs, chunks_of, label_of
from moorage.client.client import AsyncClient
from moorage.client.durations import Duration, seconds
from moorage.client.errors import rejected
from moorage.client.fields import FIELDS, Fields
from moorage.client.keywords import check_keywords
from moorage.client.loop_thread import called
from moorage.client.sync import Client
from moorage.client.warm_calls import WarmCalls

if TYPE_CHECKING:
    from moorage.bus.contexts import Context
    from moorage.schemas.gpu import GpuSpec

T = TypeVar("T")

#: for how long a process of a warm executor waits for a call, in seconds
IDLE_S: Final = 300.0
_OVER: Final = "cannot schedule new futures after shutdown"
#: executors that were not shut down
_open: Final[weakref.WeakSet[Executor]] = weakref.WeakSet()
_OF_EXECUTORS: Final = "of an executor, whose calls are replicas of jobs"


def _shut_down_all() -> None:
    for each in list(_open):
        each.shutdown()


# as `concurrent.futures` does for its own, and before it ends the threads that a client needs: `atexit` is too late
threading._register_atexit(_shut_down_all)  # type: ignore[attr-defined]


def _checked(max_workers: int | None, chunksize: int, fields: Mapping[str, Any]) -> None:
    check_keywords(fields, FIELDS - NOT_OF_CALLS, _OF_EXECUTORS)
    for name, value in (("max_workers", max_workers), ("chunksize", chunksize)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise rejected("invalid-argument", f"{name} is a whole number of at least 1", found=value)


def _jobs_of(
    client: AsyncClient,
    gpu: GpuSpec | str | int | None,
    max_workers: int | None,
    python: str,
    idle: Duration,
    fields: Mapping[str, Any],
    warm: bool,
) -> CallJobs | WarmCalls:
    if warm:
        return WarmCalls(client, gpu, max_workers, python, seconds(idle), fields)
    return CallJobs(client, gpu, max_workers, python, fields)


def _calls_of(
    function: Callable[..., Any], iterables: tuple[Iterable[Any], ...], chunksize: int
) -> tuple[bytes, list[bytes]]:
    """Return the function and each call's arguments, pickled."""
    tuples = list(zip(*iterables, strict=False))
    function_blob = pickled(function, "the function")
    if chunksize > 1:
        return function_blob, [pickled((True, each, {}), "the arguments") for each in chunks_of(tuples, chunksize)]
    return function_blob, [pickled((False, each, {}), "the arguments") for each in tuples]


class CallFuture(concurrent.futures.Future[T]):
    """The future of one call. `job` and `replica` name its replica once that is submitted: "" and 0 before.

    `cancel` ends a call that runs, too. `running` says whether its process was seen to run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.job = ""
        self.replica = 0
        self._runs = False

    def running(self) -> bool:
        """Return whether the call runs."""
        return self._runs and not self.done()

    def _placed(self, job: str, replica: int) -> None:
        self.job, self.replica = job, replica

    def _began(self) -> None:
        self._runs = True


class Executor(concurrent.futures.Executor):
    """Runs calls of functions as jobs: `with Executor(gpu="1xH100") as ex: ex.submit(f, 3).result()`.

    `gpu` and further keywords are those of `Client.submit`, for each call: `limit`, `retries`, `files`, `env`, ….
    `max_workers` bounds the calls that are placed at once; without it the fleet does. `python` is the interpreter on
    the host, by default the path of this one: it has to be of the same version (3.11, as it may be), and needs the
    packages that the calls use. Functions and classes of modules that are not installed travel with the call.

    With `warm` there are `max_workers` processes, one without it, that answer one call after another: a call takes
    milliseconds, and what a function keeps in its module stays. Their `python` needs moorage. They end with the
    executor, and after `idle` without a call, 5 minutes by default; the next call starts others. A call of a process
    that dies raises `CallFailed` and is not run again, and to cancel one that runs does not end it.

    `client` is an open client to use; without it the executor opens one, with `target` and `tenant` as `Client` has
    them, and raises what `Client.open` raises. A block that is left by an exception cancels what has not ended.
    """

    def __init__(
        self,
        gpu: GpuSpec | str | int | None = None,
        *,
        max_workers: int | None = None,
        warm: bool = False,
        idle: Duration = IDLE_S,
        python: str = sys.executable,
        client: Client | None = None,
        target: Context | str | None = None,
        tenant: str | None = None,
        **fields: Unpack[Fields],
    ) -> None:
        _checked(max_workers, 1, fields)
        self._closing = contextlib.ExitStack()
        self._client = Client(target, tenant=tenant) if client is None else client
        if client is None:
            self._closing.enter_context(self._client)
        self._thread = self._client._thread
        with self._closing as until_made:
            twin = self._client._twin
            self._jobs = self._thread.call(called(lambda: _jobs_of(twin, gpu, max_workers, python, idle, fields, warm)))
            self._closing = until_made.pop_all()
        self._turn = threading.Lock()
        self._is_over = False
        self._is_closed = False
        _open.add(self)

    def __repr__(self) -> str:
        return f"<Executor {len(self.jobs)} jobs{', shut down' if self._is_over else ''}>"

    @property
    def jobs(self) -> list[str]:
        """The ids of the jobs that it has submitted, oldest first: for `moorage logs`, or `client.job(id)`."""
        return list(self._jobs.jobs)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> CallFuture[T]:
        """Have `fn(*args, **kwargs)` run, and return its future at once. A coroutine function is awaited there.

        The future has the value, or raises what the function raised, with the traceback of the job as its cause. It
        raises `ItemFailed` if the process ended without a value, and what `AsyncClient.submit` raises. Raises
        `Rejected` for what cannot be pickled, and RuntimeError after `shutdown`.
        """
        blobs = pickled(fn, "the function"), pickled((False, args, kwargs), "the arguments")
        return self._added(label_of(fn), [blobs], is_map=False)[0]

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[T]:
        """Run `fn` on the items of the iterables as one job, and return an iterator of the values, in their order.

        `chunksize` items are one call, in one process. `timeout` is in seconds from now: TimeoutError. The iterator
        raises what a call raised in its turn, and cancels what is left if it is closed early.
        """
        _checked(None, chunksize, {})
        function, arguments = _calls_of(fn, iterables, chunksize)
        futures = self._added(label_of(fn), [(function, each) for each in arguments], is_map=True)
        ends_s = None if timeout is None else time.monotonic() + timeout
        return _values(futures, ends_s, is_chunked=chunksize > 1)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, and with `wait` return once all have ended; `cancel_futures` cancels them, also those
        that run.

        Interrupted by Ctrl-C while it waits, it cancels them. Its client is closed once all have ended, if the executor
        opened it.
        """
        with self._turn:
            self._is_over = True
        _open.discard(self)
        if not wait:
            if cancel_futures:
                self._cancel_all()
            threading.Thread(target=self._finish, name="moorage executor").start()
            return
        if cancel_futures:
            self._cancel_all()
        try:
            self._finish()
        except KeyboardInterrupt:
            self._cancel_all()
            self._finish()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(cancel_futures=kind is not None)

    def _added(self, name: str, blobs: list[tuple[bytes, bytes]], *, is_map: bool) -> list[CallFuture[Any]]:
        made: list[tuple[CallFuture[Any], Call]] = []
        for function, arguments in blobs:
            future: CallFuture[Any] = CallFuture()
            made.append((future, Call(function, arguments, future, future._began, future._placed)))
        jobs = self._jobs
        with self._turn:
            if self._is_over:
                raise RuntimeError(_OVER)
            self._thread.call_soon(lambda: jobs.add(name, [call for _, call in made], is_map=is_map))
        for future, call in made:
            future.add_done_callback(self._on_done(call))
        return [future for future, _ in made]

    def _on_done(self, call: Call) -> Callable[[concurrent.futures.Future[Any]], None]:
        thread, jobs = self._thread, self._jobs

        def ended(future: concurrent.futures.Future[Any]) -> None:
            if future.cancelled():
                future.set_running_or_notify_cancel()  # who waits for several futures hears of it by this alone
                with contextlib.suppress(RuntimeError):  # the client is closed: nothing is followed any longer
                    thread.call_soon(lambda: jobs.cancelled(call))

        return ended

    def _cancel_all(self) -> None:
        jobs = self._jobs
        with contextlib.suppress(RuntimeError):
            for call in self._thread.call(called(jobs.calls)):
                call.future.cancel()

    def _finish(self) -> None:
        with self._turn:
            if self._is_closed:
                return
        if self._thread.runs and not self._thread.is_of_parent:
            self._thread.call(self._jobs.until_idle())
            self._thread.call(self._jobs.end())
        with self._turn:
            is_closed, self._is_closed = self._is_closed, True
        if not is_closed:
            self._closing.close()


def _values(futures: list[CallFuture[Any]], ends_s: float | None, *, is_chunked: bool) -> Iterator[Any]:
    """Return an iterator of the futures' values. The futures are made already: the calls run whoever iterates."""

    def values() -> Iterator[Any]:
        left = futures[::-1]
        try:
            while left:
                value = left[-1].result(None if ends_s is None else ends_s - time.monotonic())
                left.pop()
                if is_chunked:
                    yield from value
                else:
                    yield value
        finally:
            for future in left:
                future.cancel()

    return values()


class AsyncExecutor:
    """Runs calls of functions as jobs, for a program with an event loop: `await ex.submit(f, 3)`.

    Use it in `async with`. Its arguments are those of `Executor`, but for `client`, which is an open `AsyncClient`.
    """

    def __init__(
        self,
        gpu: GpuSpec | str | int | None = None,
        *,
        max_workers: int | None = None,
        warm: bool = False,
        idle: Duration = IDLE_S,
        python: str = sys.executable,
        client: AsyncClient | None = None,
        target: Context | str | None = None,
        tenant: str | None = None,
        **fields: Unpack[Fields],
    ) -> None:
        _checked(max_workers, 1, fields)
        self._closing = contextlib.AsyncExitStack()
        self._is_own = client is None
        self._client = AsyncClient(target, tenant=tenant) if client is None else client
        self._jobs = _jobs_of(self._client, gpu, max_workers, python, idle, fields, warm)
        self._is_open = False

    @property
    def jobs(self) -> list[str]:
        """The ids of the jobs that it has submitted, oldest first."""
        return list(self._jobs.jobs)

    async def __aenter__(self) -> Self:
        if self._is_own:
            await self._closing.enter_async_context(self._client)
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the calls; a block that is left by an exception cancels them."""
        self._is_open = False
        try:
            if kind is not None:
                self._cancel_all()
            await self._jobs.until_idle()
        except asyncio.CancelledError:
            self._cancel_all()
            await self._jobs.until_idle()
            raise
        finally:
            await self._jobs.end()
            await self._closing.aclose()

    def _cancel_all(self) -> None:
        for call in self._jobs.calls():
            call.future.cancel()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> asyncio.Future[T]:
        """Have `fn(*args, **kwargs)` run, and return a future to await; to cancel it ends the call.

        It raises what `Executor.submit` raises.
        """
        blobs = pickled(fn, "the function"), pickled((False, args, kwargs), "the arguments")
        return self._added(label_of(fn), [blobs], is_map=False)[0]

    async def map(self, fn: Callable[..., T], /, *iterables: Iterable[Any], chunksize: int = 1) -> AsyncIterator[T]:
        """Run `fn` on the items of the iterables as one job, and yield the values in their order.

        The calls are submitted when the iteration begins, and what is left is cancelled if it ends early.
        """
        _checked(None, chunksize, {})
        function, arguments = _calls_of(fn, iterables, chunksize)
        left = self._added(label_of(fn), [(function, each) for each in arguments], is_map=True)[::-1]
        try:
            while left:
                value: Any = await left[-1]
                left.pop()
                for each in value if chunksize > 1 else [value]:
                    yield each
        finally:
            for future in left:
                future.cancel()

    def _added(self, name: str, blobs: list[tuple[bytes, bytes]], *, is_map: bool) -> list[asyncio.Future[Any]]:
        if not self._is_open:
            raise RuntimeError("the executor is not open: use it in `async with AsyncExecutor(…) as ex:`")
        loop = asyncio.get_running_loop()
        calls: list[Call] = []
        futures: list[asyncio.Future[Any]] = []
        for function, arguments in blobs:
            future: asyncio.Future[Any] = loop.create_future()
            call = Call(function, arguments, future)
            future.add_done_callback(self._on_done(call))
            futures.append(future)
            calls.append(call)
        self._jobs.add(name, calls, is_map=is_map)
        return futures

    def _on_done(self, call: Call) -> Callable[[asyncio.Future[Any]], None]:
        jobs = self._jobs

        def ended(future: asyncio.Future[Any]) -> None:
            if future.cancelled():
                jobs.cancelled(call)

        return ended
