"""The SDK without `await`: `Client` and its objects, for scripts and services that have no event loop.

Made by tools/sync_twin.py from the asynchronous classes: edit those, then `make docs`. A private thread runs a loop
with an `AsyncClient` in it; every call here passes a coroutine to that loop and waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from moorage.client.durations import Duration
from moorage.client.errors import BatchRejected
from moorage.client.fields import Fields, Paths
from moorage.client.follow.gather import handles
from moorage.client.follow.output import Piece
from moorage.client.follow.result import Result
from moorage.client.follow.watch import Watch
from moorage.client.job import Job
from moorage.client.loop_thread import called
from moorage.client.request_builder import What
from moorage.client.steps import Step
from moorage.client.sync_base import ClientBase, Handle
from moorage.schemas.frames import Accepted, Answer, Event, FleetFrame
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import Request
from moorage.schemas.operate import Act, Done, TenantRow

if TYPE_CHECKING:
    from moorage.client.admin import Admin  # noqa: F401  below in quotes
    from moorage.client.handlers import OnProgress
    from moorage.client.lease import Lease, Lending, OnAskedBack  # noqa: F401  below in quotes
    from moorage.client.planning import Quota, Share
    from moorage.schemas.frames import Device
    from moorage.schemas.gpu import Sharing
    from moorage.worker.leases.client import AskedBack


class SyncJob(Handle[Job]):
    """A handle on one job, as `Job`, without `await`."""

    @property
    def id(self) -> str:
        """Same as `Job.id`."""
        return self._twin.id

    @property
    def state(self) -> str:
        """Same as `Job.state`."""
        return self._twin.state

    @property
    def worker(self) -> str:
        """Same as `Job.worker`."""
        return self._twin.worker

    @property
    def accepted(self) -> Accepted | None:
        """Same as `Job.accepted`."""
        return self._twin.accepted

    @property
    def known_result(self) -> Result | None:
        """Same as `Job.known_result`."""
        return self._twin.known_result

    @property
    def tenant(self) -> str:
        """Same as `Job.tenant`."""
        return self._twin.tenant

    @property
    def gpu(self) -> str:
        """Same as `Job.gpu`."""
        return self._twin.gpu

    def events(self, timeout: Duration | None = None) -> Iterator[Event]:
        """Same as `Job.events`."""
        return self._thread.iterate(self._twin.events(timeout))

    def steps(self, timeout: Duration | None = None) -> Iterator[Step]:
        """Same as `Job.steps`."""
        return self._thread.iterate(self._twin.steps(timeout))

    def logs(
        self,
        timeout: Duration | None = None,
        *,
        follow: bool = True,
        tail: int | None = None,
        replica: int | None = None,
        attempt: int | None = None,
    ) -> Iterator[Piece]:
        """Same as `Job.logs`."""
        return self._thread.iterate(
            self._twin.logs(timeout, follow=follow, tail=tail, replica=replica, attempt=attempt)
        )

    def ports(self, replica: int = 0) -> dict[int, str]:
        """Same as `Job.ports`."""
        return self._thread.call(self._twin.ports(replica))

    def result(self, timeout: Duration | None = None, on_progress: OnProgress | None = None) -> Result:
        """Same as `Job.result`; `on_progress` is called in the private thread."""
        return self._thread.call(self._twin.result(timeout, on_progress))

    def cancel(self, reason: str = "", by: str = "") -> dict[str, Any]:
        """Same as `Job.cancel`."""
        return self._thread.call(self._twin.cancel(reason, by))

    def files(self, into: str | os.PathLike[str], path: str = "", *, replica: int | None = None) -> list[Path]:
        """Same as `Job.files`."""
        return self._thread.call(self._twin.files(into, path, replica=replica))

    def show(self) -> dict[str, Any]:
        """Same as `Job.show`."""
        return self._thread.call(self._twin.show())

    def explain(self) -> dict[str, Any]:
        """Same as `Job.explain`."""
        return self._thread.call(self._twin.explain())


class SyncWatch(Handle[Watch]):
    """Events and output of one job, as `Watch`, without `await`. Open it before the submit to miss no output."""

    def __enter__(self) -> SyncWatch:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Event | Piece]:
        return self.follow()

    @property
    def lost(self) -> int:
        """Same as `Watch.lost`."""
        return self._twin.lost

    @property
    def job(self) -> str:
        """Same as `Watch.job`."""
        return self._twin.job

    @property
    def state(self) -> str:
        """Same as `Watch.state`."""
        return self._twin.state

    @property
    def driver(self) -> str:
        """Same as `Watch.driver`."""
        return self._twin.driver

    def result(self) -> Result:
        """Same as `Watch.result`."""
        return self._twin.result()

    def open(self) -> None:
        """Same as `Watch.open`."""
        self._thread.call(self._twin.open())

    def close(self) -> None:
        """Same as `Watch.close`."""
        self._thread.call(self._twin.close())

    def follow(self, timeout_s: float | None = None) -> Iterator[Event | Piece]:
        """Same as `Watch.follow`."""
        return self._thread.iterate(self._twin.follow(timeout_s))


class SyncLease(Handle["Lease"]):
    """Leased devices of this host, as `Lease`, without `await`."""

    @property
    def worker(self) -> str:
        """Same as `Lease.worker`."""
        return self._twin.worker

    @property
    def devices(self) -> tuple[Device, ...]:
        """Same as `Lease.devices`."""
        return self._twin.devices

    @property
    def uuids(self) -> tuple[str, ...]:
        """Same as `Lease.uuids`."""
        return self._twin.uuids

    @property
    def mode(self) -> Sharing:
        """Same as `Lease.mode`."""
        return self._twin.mode

    @property
    def simulated(self) -> bool:
        """Same as `Lease.simulated`."""
        return self._twin.simulated

    @property
    def environment(self) -> Mapping[str, str]:
        """Same as `Lease.environment`."""
        return self._twin.environment

    def child_environment(self) -> dict[str, str]:
        """Same as `Lease.child_environment`."""
        return self._twin.child_environment()

    @property
    def device(self) -> str:
        """Same as `Lease.device`."""
        return self._twin.device

    @property
    def asked_back(self) -> AskedBack | None:
        """Same as `Lease.asked_back`."""
        return self._twin.asked_back

    @property
    def lost(self) -> bool:
        """Same as `Lease.lost`."""
        return self._twin.lost

    def wait_asked_back(self, timeout: Duration | None = None) -> AskedBack:
        """Same as `Lease.wait_asked_back`."""
        return self._thread.call(self._twin.wait_asked_back(timeout))

    def give_back(self) -> None:
        """Same as `Lease.give_back`."""
        self._thread.call(self._twin.give_back())


class SyncAdmin(Handle["Admin"]):
    """The orders of an operator, as `Admin`, without `await`."""

    def hold(self, job: str | None = None, *, why: str = "", tenant: str | None = None) -> Done:
        """Same as `Admin.hold`."""
        return self._thread.call(self._twin.hold(job, why=why, tenant=tenant))

    def release(self, job: str | None = None, *, why: str = "", tenant: str | None = None) -> Done:
        """Same as `Admin.release`."""
        return self._thread.call(self._twin.release(job, why=why, tenant=tenant))

    def release_worker(self, worker: str, *, slots: Sequence[int] | None = None, why: str = "") -> Done:
        """Same as `Admin.release_worker`."""
        return self._thread.call(self._twin.release_worker(worker, slots=slots, why=why))

    def requeue(self, job: str, *, why: str = "", tenant: str | None = None) -> Done:
        """Same as `Admin.requeue`."""
        return self._thread.call(self._twin.requeue(job, why=why, tenant=tenant))

    def freeze(self, job: str, *, why: str = "", tenant: str | None = None) -> Done:
        """Same as `Admin.freeze`."""
        return self._thread.call(self._twin.freeze(job, why=why, tenant=tenant))

    def resume(self, job: str, *, why: str = "", tenant: str | None = None) -> Done:
        """Same as `Admin.resume`."""
        return self._thread.call(self._twin.resume(job, why=why, tenant=tenant))

    def priority(self, job: str, priority: int, *, why: str = "", tenant: str | None = None) -> Done:
        """Same as `Admin.priority`."""
        return self._thread.call(self._twin.priority(job, priority, why=why, tenant=tenant))

    def resize(
        self,
        job: str,
        *,
        memory_mib: int | None = None,
        compute_percent: int | None = None,
        why: str = "",
        tenant: str | None = None,
    ) -> Done:
        """Same as `Admin.resize`."""
        return self._thread.call(
            self._twin.resize(job, memory_mib=memory_mib, compute_percent=compute_percent, why=why, tenant=tenant)
        )

    def limit(
        self, *, gpus: int | None = None, jobs: int | None = None, why: str = "", tenant: str | None = None
    ) -> Done:
        """Same as `Admin.limit`."""
        return self._thread.call(self._twin.limit(gpus=gpus, jobs=jobs, why=why, tenant=tenant))

    def feature_level(self, level: int, *, schedulers: int = 1, why: str = "") -> Done:
        """Same as `Admin.feature_level`."""
        return self._thread.call(self._twin.feature_level(level, schedulers=schedulers, why=why))

    def share(
        self, *, weight: int | None = None, gpus: int | None = None, why: str = "", tenant: str | None = None
    ) -> Done:
        """Same as `Admin.share`."""
        return self._thread.call(self._twin.share(weight=weight, gpus=gpus, why=why, tenant=tenant))

    def tenants(self) -> list[TenantRow]:
        """Same as `Admin.tenants`."""
        return self._thread.call(self._twin.tenants())

    def dead_letters(self, *, tenant: str | None = None) -> Iterator[dict[str, Any]]:
        """Same as `Admin.dead_letters`."""
        return self._thread.iterate(self._twin.dead_letters(tenant=tenant))

    def dead_letter(self, sequence: int) -> dict[str, Any]:
        """Same as `Admin.dead_letter`."""
        return self._thread.call(self._twin.dead_letter(sequence))

    def resend(self, sequence: int, *, body: dict[str, Any] | None = None, why: str = "") -> dict[str, Any]:
        """Same as `Admin.resend`."""
        return self._thread.call(self._twin.resend(sequence, body=body, why=why))

    def drop(self, sequence: int, *, why: str = "") -> dict[str, Any]:
        """Same as `Admin.drop`."""
        return self._thread.call(self._twin.drop(sequence, why=why))


class Client(ClientBase):
    """A client without `await`: `with Client() as moorage: …`. Several threads may share it; none may run a loop.

    Arguments, names and errors are those of `AsyncClient`, but for `subscribe`, whose handlers belong into a loop.
    `on_wait` is called in the private thread. Raises RuntimeError inside a running event loop.
    """

    @contextmanager
    def _lent(self, lending: Lending) -> Iterator[SyncLease]:
        with self._held(lending) as lease:
            yield SyncLease(self._thread, lease)

    @property
    def tenant(self) -> str:
        """Same as `AsyncClient.tenant`."""
        return self._twin.tenant

    def read(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Same as `AsyncClient.read`."""
        return self._thread.call(self._twin.read(verb, arguments))

    def answer(self, verb: str, arguments: Mapping[str, Any]) -> Answer:
        """Same as `AsyncClient.answer`."""
        return self._thread.call(self._twin.answer(verb, arguments))

    def operate(self, verb: str, asked: Any = None) -> Answer:
        """Same as `AsyncClient.operate`."""
        return self._thread.call(self._twin.operate(verb, asked))

    def act(self, verb: str, act: Act) -> Done:
        """Same as `AsyncClient.act`."""
        return self._thread.call(self._twin.act(verb, act))

    def submit(
        self, what: What, gpu: GpuSpec | str | int | None = None, key: str | None = None, **fields: Unpack[Fields]
    ) -> SyncJob:
        """Same as `AsyncClient.submit`."""
        return SyncJob(self._thread, self._thread.call(self._twin.submit(what, gpu, key, **fields)))

    def submit_handler(
        self,
        name: str,
        input: Any = None,
        gpu: GpuSpec | str | int | None = None,
        key: str | None = None,
        **fields: Unpack[Fields],
    ) -> SyncJob:
        """Same as `AsyncClient.submit_handler`."""
        return SyncJob(self._thread, self._thread.call(self._twin.submit_handler(name, input, gpu, key, **fields)))

    def run(
        self,
        what: What,
        gpu: GpuSpec | str | int | None = None,
        key: str | None = None,
        timeout: Duration | None = None,
        **fields: Unpack[Fields],
    ) -> Result:
        """Same as `AsyncClient.run`."""
        return self._thread.call(self._twin.run(what, gpu, key, timeout, **fields))

    def submit_many(
        self, many: Iterable[What], gpu: GpuSpec | str | int | None = None, **fields: Unpack[Fields]
    ) -> list[SyncJob]:
        """Same as `AsyncClient.submit_many`; the `jobs` of a `BatchRejected` are `SyncJob`s too."""
        try:
            accepted = self._thread.call(self._twin.submit_many(many, gpu, **fields))
        except BatchRejected as refused:
            jobs = [job and SyncJob(self._thread, job) for job in refused.jobs]
            raise BatchRejected(jobs, refused.problems) from None
        return [SyncJob(self._thread, job) for job in accepted]

    def send_files(self, files: Paths) -> str:
        """Same as `AsyncClient.send_files`."""
        return self._thread.call(self._twin.send_files(files))

    def request(
        self,
        what: What,
        gpu: GpuSpec | str | int | None = None,
        key: str | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> Request:
        """Same as `AsyncClient.request`."""
        return self._twin.request(what, gpu, key, fields)

    def job(self, id: str) -> SyncJob:
        """Same as `AsyncClient.job`."""
        return SyncJob(self._thread, self._twin.job(id))

    def watch(
        self,
        id: str,
        *,
        output: bool = False,
        past: bool = False,
        tail: int | None = None,
        replica: int | None = None,
        notes: bool = False,
    ) -> SyncWatch:
        """Same as `AsyncClient.watch`."""
        watch = called(lambda: self._twin.watch(id, output=output, past=past, tail=tail, replica=replica, notes=notes))
        return SyncWatch(self._thread, self._thread.call(watch))

    def as_completed(self, jobs: Iterable[SyncJob], timeout: Duration | None = None) -> Iterator[SyncJob]:
        """Same as `AsyncClient.as_completed`, but it yields the handles that were given."""
        given = {job.id: job for job in handles(jobs, SyncJob)}
        for over in self._thread.iterate(self._twin.as_completed([job._twin for job in given.values()], timeout)):
            yield given[over.id]

    def gather(self, *jobs: SyncJob, timeout: Duration | None = None) -> list[Result]:
        """Same as `AsyncClient.gather`."""
        twins = [job._twin for job in handles(jobs, SyncJob)]
        return self._thread.call(self._twin.gather(*twins, timeout=timeout))

    def wait(self, jobs: Iterable[SyncJob], timeout: Duration | None = None) -> list[Result]:
        """Same as `AsyncClient.wait`."""
        return self._thread.call(self._twin.wait([job._twin for job in handles(jobs, SyncJob)], timeout))

    def events(self) -> Iterator[Event]:
        """Same as `AsyncClient.events`."""
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
        """Same as `AsyncClient.plan`."""
        return self._thread.call(self._twin.plan(what, gpu, drain=drain, add=add, quota=quota, share=share, **fields))

    def first_possible(self, requests: Sequence[What]) -> Request:
        """Same as `AsyncClient.first_possible`."""
        return self._thread.call(self._twin.first_possible(requests))

    def ls(self, states: Sequence[str] = (), limit: int = 100) -> dict[str, Any]:
        """Same as `AsyncClient.ls`."""
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
        """Same as `AsyncClient.lease`, but the client must be open; `on_asked_back` is called in the private thread."""
        lending = self._twin.lease(gpu, purpose=purpose, timeout=timeout, socket=socket, on_asked_back=on_asked_back)
        return self._lent(lending)

    @property
    def admin(self) -> SyncAdmin:
        """Same as `AsyncClient.admin`."""
        return SyncAdmin(self._thread, self._twin.admin)

    def fleet(self) -> dict[str, Any]:
        """Same as `AsyncClient.fleet`."""
        return self._thread.call(self._twin.fleet())

    def audit(self) -> dict[str, Any]:
        """Same as `AsyncClient.audit`."""
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
        """Same as `AsyncClient.drain`."""
        return self._thread.call(self._twin.drain(worker, within=within, begin=begin, last=last, why=why))

    def cordon(self, worker: str) -> dict[str, Any]:
        """Same as `AsyncClient.cordon`."""
        return self._thread.call(self._twin.cordon(worker))

    def uncordon(self, worker: str) -> dict[str, Any]:
        """Same as `AsyncClient.uncordon`."""
        return self._thread.call(self._twin.uncordon(worker))

    def fleet_frames(self) -> Iterator[FleetFrame]:
        """Same as `AsyncClient.fleet_frames`."""
        return self._thread.iterate(self._twin.fleet_frames())
