"""`Client`: the names of `AsyncClient` without `await`, for scripts and services that have no event loop.

One private thread runs a loop and an `AsyncClient` in it; every call here hands its coroutine over and waits. The
signatures are compared with the async ones, one by one, in `tests/client/test_sync_twin.py`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack, cast

from moorage.bus.contexts import Context
from moorage.client import job as asynchronous
from moorage.client.client import AsyncClient, What
from moorage.client.connected import CONNECT_TIMEOUT_S_DEFAULT, TIMEOUT_S_DEFAULT, WAIT_TIMEOUT_S_DEFAULT
from moorage.client.errors import BatchRejected
from moorage.client.job import Result
from moorage.client.steps import Step
from moorage.client.sync_admin import SyncAdmin
from moorage.client.transport import ClientTransport
from moorage.client.values import Duration, Fields
from moorage.client.watch import Piece
from moorage.client.watch import Watch as AsyncWatch
from moorage.schemas.frames import Accepted, Answer, Event, FleetFrame
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import Request
from moorage.schemas.operate import Act, Done
from moorage.schemas.subjects import PREFIX_DEFAULT

if TYPE_CHECKING:
    from moorage.client.handlers import OnProgress
    from moorage.client.lease import Lease as AsyncLease
    from moorage.client.lease import OnAskedBack
    from moorage.client.planning import Quota, Share
    from moorage.worker.leases.client import AskedBack

#: how long an interrupted call may take to let go of what it has begun
CANCEL_S_MAX: Final = 5.0

T = TypeVar("T")
_END: Final = object()


class LoopThread:
    """A thread with an event loop that runs other threads' coroutines until `stop`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = 0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    @property
    def runs(self) -> bool:
        return self._loop is not None

    def start(self) -> None:
        refuse_inside_loop()
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name=self._name, daemon=True)
        self._pid = os.getpid()
        self._thread.start()
        started.result()

    def stop(self) -> None:
        """End the loop, with what still runs in it, and the thread."""
        thread, loop, stop = self._thread, self._loop, self._stop
        if thread is None or loop is None or stop is None:
            return
        self._thread = self._loop = self._stop = None
        if self._pid == os.getpid():
            loop.call_soon_threadsafe(stop.set)
            thread.join()

    def _run(self, started: concurrent.futures.Future[None]) -> None:
        async def serve() -> None:
            stop = asyncio.Event()
            self._loop, self._stop = asyncio.get_running_loop(), stop
            started.set_result(None)
            await stop.wait()

        asyncio.run(serve())

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it there, wait for it here. Interrupted (Ctrl-C), it is cancelled there before this raises."""
        try:
            refuse_inside_loop()
            loop = self._checked()
        except BaseException:
            work.close()
            raise
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = loop.create_task(work)
            task.add_done_callback(lambda over: _hand_over(over, done))
            tasks.append(task)

        def give_up() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # interrupted before it was handed over
                work.close()
                done.cancel()

        try:
            loop.call_soon_threadsafe(begin)
            return done.result()
        except (KeyboardInterrupt, SystemExit):
            loop.call_soon_threadsafe(give_up)
            concurrent.futures.wait([done], CANCEL_S_MAX)
            raise

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """The items, one call each; what is left early is closed there."""
        refuse_inside_loop()
        loop = self._checked()
        try:
            while (item := self.call(_next(items))) is not _END:
                yield cast("T", item)
                if self._loop is not loop:
                    raise RuntimeError("the client was closed while this was iterated over")
        finally:
            self._finish(cast("AsyncGenerator[T, None]", items), loop)

    def _finish(self, items: AsyncGenerator[Any, None], loop: asyncio.AbstractEventLoop) -> None:
        """Close it; from the loop's own thread, where a garbage collector may call this, without waiting."""
        if self._loop is not loop or self._pid != os.getpid():
            return  # its loop has closed it at its end
        if _is_in_loop():
            loop.call_soon_threadsafe(lambda: asyncio.ensure_future(items.aclose()))
        else:
            self.call(_close(items))

    def _checked(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise RuntimeError("the client is not open: use it in `with Client() as moorage:`")
        if self._pid != os.getpid():
            raise RuntimeError("this client was opened before a fork: open another one in the child")
        return self._loop


async def _next(items: AsyncIterator[T]) -> T | object:
    return await anext(items, _END)


async def _close(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()


def _hand_over(over: asyncio.Task[T], done: concurrent.futures.Future[T]) -> None:
    if over.cancelled():
        done.set_exception(RuntimeError("the client was closed, or the call interrupted, before this was done"))
    elif (error := over.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(over.result())


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def refuse_inside_loop() -> None:
    """Raise RuntimeError where an event loop runs in this thread: waiting here would stop all of it."""
    if _is_in_loop():
        raise RuntimeError(
            "this thread runs an event loop, and moorage.client.Client would block it: "
            "use moorage.client.AsyncClient here, with await"
        )


class SyncJob:
    """The twin of `Job`: a handle on one job, from its id alone."""

    def __init__(self, thread: LoopThread, job: asynchronous.Job) -> None:
        self._thread = thread
        self.twin = job

    def __repr__(self) -> str:
        return repr(self.twin).replace("<Job", "<SyncJob", 1)

    @property
    def id(self) -> str:
        return self.twin.id

    @property
    def accepted(self) -> Accepted | None:
        return self.twin.accepted

    @property
    def state(self) -> str:
        return self.twin.state

    @property
    def gpu(self) -> str:
        return self.twin.gpu

    @property
    def worker(self) -> str:
        return self.twin.worker

    @property
    def known_result(self) -> Result | None:
        return self.twin.known_result

    def events(self, timeout: Duration | None = None) -> Iterator[Event]:
        """As `Job.events`."""
        return self._thread.iterate(self.twin.events(timeout))

    def steps(self, timeout: Duration | None = None) -> Iterator[Step]:
        """As `Job.steps`."""
        return self._thread.iterate(self.twin.steps(timeout))

    def logs(
        self,
        timeout: Duration | None = None,
        *,
        follow: bool = True,
        tail: int | None = None,
        replica: int | None = None,
        attempt: int | None = None,
    ) -> Iterator[Piece]:
        """As `Job.logs`."""
        return self._thread.iterate(self.twin.logs(timeout, follow=follow, tail=tail, replica=replica, attempt=attempt))

    def result(self, timeout: Duration | None = None, on_progress: OnProgress | None = None) -> Result:
        """As `Job.result`; `on_progress` is called in the private thread."""
        return self._thread.call(self.twin.result(timeout, on_progress))

    def cancel(self, reason: str = "", by: str = "") -> dict[str, Any]:
        """As `Job.cancel`."""
        return self._thread.call(self.twin.cancel(reason, by))

    def show(self) -> dict[str, Any]:
        """As `Job.show`."""
        return self._thread.call(self.twin.show())

    def explain(self) -> dict[str, Any]:
        """As `Job.explain`."""
        return self._thread.call(self.twin.explain())


class SyncWatch:
    """The twin of `Watch`: open it before the job is submitted to miss nothing of its output."""

    def __init__(self, thread: LoopThread, watch: AsyncWatch) -> None:
        self._thread = thread
        self._watch = watch

    @property
    def job(self) -> str:
        return self._watch.job

    @property
    def state(self) -> str:
        return self._watch.state

    @property
    def lost(self) -> int:
        return self._watch.lost

    def __enter__(self) -> SyncWatch:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """As `Watch.open`."""
        self._thread.call(self._watch.open())

    def close(self) -> None:
        """As `Watch.close`."""
        self._thread.call(self._watch.close())

    def refresh(self) -> None:
        """As `Watch.refresh`."""
        self._thread.call(_called(self._watch.refresh))

    def __iter__(self) -> Iterator[Event | Piece]:
        return self.follow()

    def follow(self, timeout_s: float | None = None) -> Iterator[Event | Piece]:
        """As `Watch.follow`."""
        return self._thread.iterate(self._watch.follow(timeout_s))


class SyncLease:
    """The twin of `Lease`."""

    def __init__(self, thread: LoopThread, lease: AsyncLease) -> None:
        self._thread = thread
        self._lease = lease
        self.worker: Final = lease.worker
        self.devices: Final = lease.devices
        self.uuids: Final = lease.uuids
        self.mode: Final = lease.mode
        self.simulated: Final = lease.simulated
        self.environment: Final = lease.environment

    def __repr__(self) -> str:
        return repr(self._lease).replace("<Lease", "<SyncLease", 1)

    @property
    def device(self) -> str:
        return self._lease.device

    @property
    def asked_back(self) -> AskedBack | None:
        return self._lease.asked_back

    @property
    def lost(self) -> bool:
        return self._lease.lost

    def wait_asked_back(self, timeout: Duration | None = None) -> AskedBack:
        """As `Lease.wait_asked_back`."""
        return self._thread.call(self._lease.wait_asked_back(timeout))

    def give_back(self) -> None:
        """As `Lease.give_back`."""
        self._thread.call(self._lease.give_back())


async def _entered(context: AbstractAsyncContextManager[T]) -> T:
    return await context.__aenter__()


async def _left(context: AbstractAsyncContextManager[Any]) -> None:
    await context.__aexit__(None, None, None)


async def _called(function: Callable[[], T]) -> T:
    return function()


class Client:
    """`with Client() as moorage: …`, from any thread that runs no event loop; several threads may share one.

    Arguments, names and errors are those of `AsyncClient`, but for `subscribe`, whose handlers belong into a loop.
    `on_wait` is called in the private thread. Raises RuntimeError inside a running event loop.
    """

    def __init__(
        self,
        target: Context | str | None = None,
        *,
        tenant: str | None = None,
        prefix: str = PREFIX_DEFAULT,
        timeout: Duration = TIMEOUT_S_DEFAULT,
        connect_timeout: Duration = CONNECT_TIMEOUT_S_DEFAULT,
        wait_timeout: Duration = WAIT_TIMEOUT_S_DEFAULT,
        name: str = "moorage client",
        on_wait: Callable[[], None] | None = None,
        transport: ClientTransport | None = None,
    ) -> None:
        refuse_inside_loop()
        self._twin = AsyncClient(
            target,
            tenant=tenant,
            prefix=prefix,
            timeout=timeout,
            connect_timeout=connect_timeout,
            wait_timeout=wait_timeout,
            name=name,
            on_wait=on_wait,
            transport=transport,
        )
        self._thread = LoopThread(name)

    def __repr__(self) -> str:
        return repr(self._twin).replace("<AsyncClient", "<Client", 1)

    @property
    def tenant(self) -> str:
        return self._twin.tenant

    def __enter__(self) -> Client:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """As `AsyncClient.open`, and start the thread."""
        if self._thread.runs:
            raise RuntimeError("the client is open already")
        self._thread.start()
        try:
            self._thread.call(self._twin.open())
        except BaseException:
            self._thread.stop()
            raise

    def close(self) -> None:
        """As `AsyncClient.close`, and end the thread. Once closed it may be closed again."""
        if not self._thread.runs:
            return
        try:
            self._thread.call(self._twin.close())
        finally:
            self._thread.stop()

    # ------------------------------------------------------------------------------------------------------- jobs

    def submit(
        self, what: What, gpu: GpuSpec | str | int | None = None, key: str | None = None, **fields: Unpack[Fields]
    ) -> SyncJob:
        """As `AsyncClient.submit`."""
        return self._job(self._thread.call(self._twin.submit(what, gpu, key, **fields)))

    def submit_handler(
        self,
        name: str,
        input: Any = None,
        gpu: GpuSpec | str | int | None = None,
        key: str | None = None,
        **fields: Unpack[Fields],
    ) -> SyncJob:
        """As `AsyncClient.submit_handler`."""
        return self._job(self._thread.call(self._twin.submit_handler(name, input, gpu, key, **fields)))

    def run(
        self,
        what: What,
        gpu: GpuSpec | str | int | None = None,
        key: str | None = None,
        timeout: Duration | None = None,
        **fields: Unpack[Fields],
    ) -> Result:
        """As `AsyncClient.run`."""
        return self._thread.call(self._twin.run(what, gpu, key, timeout, **fields))

    def submit_many(
        self, many: Iterable[What], gpu: GpuSpec | str | int | None = None, **fields: Unpack[Fields]
    ) -> list[SyncJob]:
        """As `AsyncClient.submit_many`; the `jobs` of a `BatchRejected` are `SyncJob`s, too."""
        try:
            return [self._job(job) for job in self._thread.call(self._twin.submit_many(list(many), gpu, **fields))]
        except BatchRejected as refused:
            raise BatchRejected([job and self._job(job) for job in refused.jobs], refused.problems) from None

    def request(
        self, what: What, gpu: GpuSpec | str | int | None = None, key: str | None = None, fields: Any = None
    ) -> Request:
        """As `AsyncClient.request`."""
        return self._twin.request(what, gpu, key, fields)

    def job(self, id: str) -> SyncJob:
        """As `AsyncClient.job`."""
        return self._job(self._twin.job(id))

    def watch(self, id: str, *, output: bool = False, past: bool = False, tail: int | None = None) -> SyncWatch:
        """As `AsyncClient.watch`."""
        return SyncWatch(self._thread, self._twin.watch(id, output=output, past=past, tail=tail))

    def as_completed(self, jobs: Iterable[SyncJob], timeout: Duration | None = None) -> Iterator[SyncJob]:
        """As `AsyncClient.as_completed`; yields the handles that were given."""
        handles = {job.id: job for job in jobs}
        for over in self._thread.iterate(self._twin.as_completed([job.twin for job in handles.values()], timeout)):
            yield handles[over.id]

    def gather(self, *jobs: SyncJob, timeout: Duration | None = None) -> list[Result]:
        """As `AsyncClient.gather`."""
        return self._thread.call(self._twin.gather(*(job.twin for job in jobs), timeout=timeout))

    def wait(self, jobs: Iterable[SyncJob], timeout: Duration | None = None) -> list[Result]:
        """As `AsyncClient.wait`."""
        return self._thread.call(self._twin.wait([job.twin for job in jobs], timeout))

    def events(self) -> Iterator[Event]:
        """As `AsyncClient.events`."""
        return self._thread.iterate(self._twin.events())

    def plan(
        self,
        what: What | None = None,
        gpu: GpuSpec | str | int | None = None,
        *,
        drain: Sequence[str] = (),
        add: str | None = None,
        quota: Quota | None = None,
        share: Share | None = None,
        **fields: Unpack[Fields],
    ) -> Answer:
        """As `AsyncClient.plan`."""
        return self._thread.call(self._twin.plan(what, gpu, drain=drain, add=add, quota=quota, share=share, **fields))

    def ls(self, states: Sequence[str] = (), limit: int = 100) -> dict[str, Any]:
        """As `AsyncClient.ls`."""
        return self._thread.call(self._twin.ls(states, limit))

    def lease(
        self,
        gpu: GpuSpec | str | int = 1,
        *,
        purpose: str = "",
        timeout: Duration | None = None,
        socket: Path | str | None = None,
        on_asked_back: OnAskedBack | None = None,
    ) -> AbstractContextManager[SyncLease]:
        """As `AsyncClient.lease`, of an open client; `on_asked_back` is called in the private thread."""
        lending = self._twin.lease(gpu, purpose=purpose, timeout=timeout, socket=socket, on_asked_back=on_asked_back)
        return self._lend(lending)

    @contextmanager
    def _lend(self, lending: AbstractAsyncContextManager[AsyncLease]) -> Iterator[SyncLease]:
        lease = self._thread.call(_entered(lending))
        try:
            yield SyncLease(self._thread, lease)
        finally:
            self._thread.call(_left(lending))

    # ------------------------------------------------------------------------------------------------- operators

    @property
    def admin(self) -> SyncAdmin:
        """As `AsyncClient.admin`."""
        return SyncAdmin(self._thread, self._twin.admin)

    def act(self, verb: str, act: Act) -> Done:
        """As `AsyncClient.act`."""
        return self._thread.call(self._twin.act(verb, act))

    def fleet(self) -> dict[str, Any]:
        """As `AsyncClient.fleet`."""
        return self._thread.call(self._twin.fleet())

    def audit(self) -> dict[str, Any]:
        """As `AsyncClient.audit`."""
        return self._thread.call(self._twin.audit())

    def drain(
        self,
        worker: str,
        *,
        within: Duration | None = None,
        begin: Duration | None = None,
        last: Duration | None = None,
        why: str = "",
    ) -> dict[str, Any]:
        """As `AsyncClient.drain`."""
        return self._thread.call(self._twin.drain(worker, within=within, begin=begin, last=last, why=why))

    def cordon(self, worker: str) -> dict[str, Any]:
        """As `AsyncClient.cordon`."""
        return self._thread.call(self._twin.cordon(worker))

    def uncordon(self, worker: str) -> dict[str, Any]:
        """As `AsyncClient.uncordon`."""
        return self._thread.call(self._twin.uncordon(worker))

    def fleet_frames(self) -> Iterator[FleetFrame]:
        """As `AsyncClient.fleet_frames`."""
        return self._thread.iterate(self._twin.fleet_frames())

    # ---------------------------------------------------------------------------------------------------- asking

    def read(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """As `AsyncClient.read`."""
        return self._thread.call(self._twin.read(verb, arguments))

    def answer(self, verb: str, arguments: Mapping[str, Any]) -> Answer:
        """As `AsyncClient.answer`."""
        return self._thread.call(self._twin.answer(verb, arguments))

    def operate(self, verb: str, asked: Any = None) -> Answer:
        """As `AsyncClient.operate`."""
        return self._thread.call(self._twin.operate(verb, asked))

    def _job(self, job: asynchronous.Job) -> SyncJob:
        return SyncJob(self._thread, job)
