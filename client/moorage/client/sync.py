"""`Client`: the names of `AsyncClient` without `await`, for scripts and services that have no event loop.

One private thread runs a loop and an `AsyncClient` in it; every call here hands its coroutine over and waits. The
signatures are compared with the async ones, one by one, in `tests/client/test_sync_twin.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from moorage.bus.contexts import Context
from moorage.client import job as asynchronous
from moorage.client.client import AsyncClient
from moorage.client.connected import CONNECT_TIMEOUT_S_DEFAULT, TIMEOUT_S_DEFAULT, WAIT_TIMEOUT_S_DEFAULT
from moorage.client.durations import Duration
from moorage.client.errors import BatchRejected
from moorage.client.fields import Fields
from moorage.client.gather import handles
from moorage.client.job import Result
from moorage.client.loop_thread import LoopThread, entered, left, refuse_inside_loop
from moorage.client.request_builder import What
from moorage.client.sync_admin import SyncAdmin
from moorage.client.sync_handles import SyncJob, SyncLease, SyncWatch
from moorage.client.transport import ClientTransport
from moorage.schemas.frames import Answer, Event, FleetFrame
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import Request
from moorage.schemas.operate import Act, Done
from moorage.schemas.subjects import PREFIX_DEFAULT

if TYPE_CHECKING:
    from moorage.client.lease import Lease as AsyncLease
    from moorage.client.lease import OnAskedBack
    from moorage.client.planning import Quota, Share


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
        """Whose jobs these are."""
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
        try:
            self._thread.start()
            self._thread.call(self._twin.open())
        except BaseException:
            self._thread.stop()
            raise

    def close(self) -> None:
        """As `AsyncClient.close`, and end the thread. Once closed, or in a fork's child, nothing is done."""
        if not self._thread.runs:
            return
        try:
            if not self._thread.is_of_parent:
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
        self,
        what: What,
        gpu: GpuSpec | str | int | None = None,
        key: str | None = None,
        fields: Mapping[str, Any] | None = None,
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
        given = {job.id: job for job in handles(jobs, SyncJob)}
        for over in self._thread.iterate(self._twin.as_completed([job.twin for job in given.values()], timeout)):
            yield given[over.id]

    def gather(self, *jobs: SyncJob, timeout: Duration | None = None) -> list[Result]:
        """As `AsyncClient.gather`."""
        return self._thread.call(self._twin.gather(*(job.twin for job in handles(jobs, SyncJob)), timeout=timeout))

    def wait(self, jobs: Iterable[SyncJob], timeout: Duration | None = None) -> list[Result]:
        """As `AsyncClient.wait`."""
        return self._thread.call(self._twin.wait([job.twin for job in handles(jobs, SyncJob)], timeout))

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
        lease = self._thread.call(entered(lending))
        try:
            yield SyncLease(self._thread, lease)
        finally:
            self._thread.call(left(lending))

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
