"""The twins of what `AsyncClient` hands out: a job, one that is watched, a lease. Made by `Client`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from moorage.client import job as asynchronous
from moorage.client.durations import Duration
from moorage.client.job import Result
from moorage.client.loop_thread import LoopThread, called
from moorage.client.steps import Step
from moorage.client.stored_output import Piece
from moorage.client.watch import Watch as AsyncWatch
from moorage.schemas.frames import Accepted, Event

if TYPE_CHECKING:
    from moorage.client.handlers import OnProgress
    from moorage.client.lease import Lease as AsyncLease
    from moorage.worker.leases.client import AskedBack


class SyncJob:
    """The twin of `Job`: a handle on one job, from its id alone."""

    def __init__(self, thread: LoopThread, job: asynchronous.Job) -> None:
        self._thread = thread
        self.twin = job

    def __repr__(self) -> str:
        return repr(self.twin).replace("<Job", "<SyncJob", 1)

    @property
    def id(self) -> str:
        """As `Job.id`."""
        return self.twin.id

    @property
    def tenant(self) -> str:
        """As `Job.tenant`."""
        return self.twin.tenant

    @property
    def accepted(self) -> Accepted | None:
        """As `Job.accepted`."""
        return self.twin.accepted

    @property
    def state(self) -> str:
        """As `Job.state`."""
        return self.twin.state

    @property
    def gpu(self) -> str:
        """As `Job.gpu`."""
        return self.twin.gpu

    @property
    def worker(self) -> str:
        """As `Job.worker`."""
        return self.twin.worker

    @property
    def known_result(self) -> Result | None:
        """As `Job.known_result`."""
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
        """As `Watch.job`."""
        return self._watch.job

    @property
    def state(self) -> str:
        """As `Watch.state`."""
        return self._watch.state

    @property
    def lost(self) -> int:
        """As `Watch.lost`."""
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
        self._thread.call(called(self._watch.refresh))

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
        """As `Lease.device`."""
        return self._lease.device

    @property
    def asked_back(self) -> AskedBack | None:
        """As `Lease.asked_back`."""
        return self._lease.asked_back

    @property
    def lost(self) -> bool:
        """As `Lease.lost`."""
        return self._lease.lost

    def wait_asked_back(self, timeout: Duration | None = None) -> AskedBack:
        """As `Lease.wait_asked_back`."""
        return self._thread.call(self._lease.wait_asked_back(timeout))

    def give_back(self) -> None:
        """As `Lease.give_back`."""
        self._thread.call(self._lease.give_back())
