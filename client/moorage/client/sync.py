"""The SDK without `await`: `Client` and its objects, for scripts and services that have no event loop.

Made by tools/sync_twin.py from the asynchronous classes: edit those, then `make docs`. A private thread runs a loop
with an `AsyncClient` in it; every call here passes a coroutine to that loop and waits for it. The docstrings here are
the first paragraphs of those of the asynchronous methods, which say the rest, such as the errors.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload

from moorage.client.call_options import CallOptions
from moorage.client.durations import Duration
from moorage.client.errors import BatchRejected
from moorage.client.fields import Fields, Paths
from moorage.client.follow.job_history import Result
from moorage.client.follow.watch import AsyncWatch
from moorage.client.job import AsyncJob, handles
from moorage.client.loop_thread import called, entered, read_here
from moorage.client.output import Piece
from moorage.client.replicas import Which
from moorage.client.request_builder import What
from moorage.client.steps import Step
from moorage.client.sync_base import ClientBase, Handle
from moorage.schemas.answers.letters import Letter, LetterDone, LetterRow
from moorage.schemas.answers.operators import ActsAnswer, Demand
from moorage.schemas.frames import USE_KEPT_S, Accepted, Event, FleetEvent, FleetFrame, UsePage
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import Request
from moorage.schemas.operate import Changed, Counter, Done, SignalSent, TenantRow
from moorage.schemas.schedules import Overlap, ScheduleRow

if TYPE_CHECKING:
    from moorage.bus.lend.client import AskedBack
    from moorage.client.admin import AsyncAdmin  # noqa: F401  below in quotes
    from moorage.client.answers import Audit, Cancelled, Explanation, FleetInfo, JobInfo, JobList, JobRow
    from moorage.client.command import Executed
    from moorage.client.fleet import AsyncFleet  # noqa: F401  below in quotes
    from moorage.client.forward import AsyncForward  # noqa: F401  below in quotes
    from moorage.client.handlers import OnProgress
    from moorage.client.lease import AsyncLease, OnAskedBack  # noqa: F401  below in quotes
    from moorage.client.mapping import Errors, Travel
    from moorage.client.planning import Quota, Share
    from moorage.client.schedules import AsyncSchedules  # noqa: F401  below in quotes
    from moorage.client.services import AsyncService  # noqa: F401  below in quotes
    from moorage.schemas.answers.jobs import ServiceRow
    from moorage.schemas.frames import Device
    from moorage.schemas.gpu import Sharing
    from moorage.schemas.plan import Plan
    from moorage.schemas.served import Answer

T = TypeVar("T")


class Job(Handle[AsyncJob]):
    """A handle on one job, as `AsyncJob`, without `await`."""

    def _ipython_display_(self) -> None:
        self._twin._display(repr(self), self._thread.begin)

    @property
    def job(self) -> str:
        """Same as `AsyncJob.job`."""
        return self._twin.job

    @property
    def state(self) -> str:
        """Same as `AsyncJob.state`."""
        return self._twin.state

    @property
    def worker(self) -> str:
        """Same as `AsyncJob.worker`."""
        return self._twin.worker

    @property
    def accepted(self) -> Accepted | None:
        """Same as `AsyncJob.accepted`."""
        return self._twin.accepted

    @property
    def known_result(self) -> Result | None:
        """How the job ended, if `result` or a wait for several jobs found that by this handle; else None."""
        return self._twin.known_result

    @property
    def tenant(self) -> str:
        """The job's tenant, which is the tenant of the client that made this handle."""
        return self._twin.tenant

    @property
    def gpu(self) -> str:
        """The token of the GPUs that the job asks for, as `2xH100`; `-` for none, "" if this handle has not seen it."""
        return self._twin.gpu

    def events(self, wait: Duration | None = None) -> Iterator[Event]:
        """Yield the job's transitions from acceptance on, each once and in order. The iteration ends with the job."""
        return self._thread.iterate(self._twin.events(wait))

    def steps(self, wait: Duration | None = None) -> Iterator[Step]:
        """Yield the transitions of `events` one by one, as objects for `match step: case Placed(worker=w): …`."""
        return self._thread.iterate(self._twin.steps(wait))

    def logs(
        self,
        wait: Duration | None = None,
        *,
        follow: bool = True,
        tail: int | None = None,
        replica: Which = None,
        attempt: int | None = None,
    ) -> Iterator[Piece]:
        """Yield the job's output until the job ends: first the stored output, then the new output."""
        return self._thread.iterate(self._twin.logs(wait, follow=follow, tail=tail, replica=replica, attempt=attempt))

    def ports(self, replica: int = 0) -> dict[int, str]:
        """Return the addresses of a running container of the job: `address:port` on the host, by the container's
        port.
        """
        return self._thread.call(self._twin.ports(replica))

    def again(
        self,
        failed: bool = False,
        *,
        replica: Which = None,
        gpu: GpuSpec | str | int | None = None,
        job: str | None = None,
        **fields: Unpack[Fields],
    ) -> Job:
        """Submit the job's request once more, as a new job, and return its handle; with `failed` only the replicas
        that have not succeeded.
        """
        again = self._thread.call(self._twin.again(failed, replica=replica, gpu=gpu, job=job, **fields))
        return Job(self._thread, again)

    def result(self, wait: Duration | None = None, on_progress: OnProgress | None = None) -> Result:
        """Wait until the job ends, and return its result. `wait` defaults to the client's. `on_progress` is called
        in the private thread.
        """
        return self._thread.call(self._twin.result(wait, on_progress))

    def values(self, *, replica: Which = None) -> Iterator[tuple[int, Any]]:
        """Yield the number of each replica of a handler's job that SUCCEEDED, and the value that its function
        returned.
        """
        return self._thread.iterate(self._twin.values(replica=replica))

    def answers(
        self, wait: Duration | None = None, *, errors: Errors = "raise", on_progress: OnProgress | None = None
    ) -> Iterator[Any]:
        """Yield what the function of a job of `AsyncClient.map`, or the service of one of
        `AsyncService.submit_many`, returned, in the order of the items, until all ended.
        """
        return self._thread.iterate(self._twin.answers(wait, errors=errors, on_progress=on_progress))

    def answers_as_completed(
        self, wait: Duration | None = None, *, errors: Errors = "raise", on_progress: OnProgress | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Yield the number of each item and its answer, as `answers` does, but as they come."""
        return self._thread.iterate(self._twin.answers_as_completed(wait, errors=errors, on_progress=on_progress))

    def cancel(self, reason: str = "", by: str = "", *, replica: Which = None, before: bool = False) -> Cancelled:
        """Cancel the job, at any stage. Return whether it is cancelled, once this is in the ledger."""
        return self._thread.call(self._twin.cancel(reason, by, replica=replica, before=before))

    def uncancel(self) -> bool:
        """Forget a cancel with `before` of this id, whose submit has not come: it is accepted again. Return whether
        one was remembered.
        """
        return self._thread.call(self._twin.uncancel())

    def change(
        self,
        *,
        replicas: int | Mapping[str, int] | None = None,
        max_running: int | None = None,
        priority: int | None = None,
        limit: Duration | None = None,
        running: bool = False,
        hold: bool | None = None,
        reason: str = "",
        by: str = "",
    ) -> Changed:
        """Change the job in place, while it waits or runs; None leaves a value as it is. Return its bounds as they
        are.
        """
        return self._thread.call(
            self._twin.change(
                replicas=replicas,
                max_running=max_running,
                priority=priority,
                limit=limit,
                running=running,
                hold=hold,
                reason=reason,
                by=by,
            )
        )

    def files(
        self,
        into: str | os.PathLike[str],
        path: str = "",
        *,
        replica: Which = None,
        merge: bool = False,
        rescue: bool = False,
    ) -> list[Path]:
        """Fetch the files that the job kept (`keep` of its request) into a new folder, and return their paths."""
        return self._thread.call(self._twin.files(into, path, replica=replica, merge=merge, rescue=rescue))

    def show(self) -> JobInfo:
        """Return the whole job: its request, its replicas, the last transitions. Raises `NotFound`."""
        return self._thread.call(self._twin.show())

    def use(self, replica: int = 0, *, last: Duration = USE_KEPT_S, points: int = 60) -> UsePage:
        """Return what a running replica has used of each of its GPUs in the last ten minutes, or in the `last` time."""
        return self._thread.call(self._twin.use(replica, last=last, points=points))

    def signal(self, signal: str, *, replica: int | None = None, by: str = "") -> SignalSent:
        """Send a signal, such as `"USR1"`, to those processes of the running job that handle it; to no other."""
        return self._thread.call(self._twin.signal(signal, replica=replica, by=by))

    def exec(
        self,
        argv: Sequence[str],
        *,
        input: bytes | str = b"",
        replica: int = 0,
        wait: Duration | None = None,
        by: str = "",
    ) -> Executed:
        """Run a command in the running job, beside its program, and return its code and all that it wrote."""
        return self._thread.call(self._twin.exec(argv, input=input, replica=replica, wait=wait, by=by))

    def forward(self, port: int | str, *, local: int = 0, replica: int = 0, by: str = "") -> Forward:
        """Return a port of this machine that leads to a port of the running job, while its block runs."""
        return Forward(self._thread, self._twin.forward(port, local=local, replica=replica, by=by))

    def explain(self) -> Explanation:
        """Return why the job waits: the main reason, counts of workers, its place in the queue. Raises `NotFound`."""
        return self._thread.call(self._twin.explain())


class Watch(Handle[AsyncWatch]):
    """Events and output of one job, as `AsyncWatch`, without `await`. Open it before the submit to miss no output."""

    def __enter__(self) -> Watch:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Event | Piece]:
        return self.follow()

    @property
    def lost(self) -> int:
        """Same as `AsyncWatch.lost`."""
        return self._twin.lost

    @property
    def job(self) -> str:
        """The id of the job."""
        return self._twin.job

    @property
    def state(self) -> str:
        """The last state that was received; "" before the first."""
        return self._twin.state

    @property
    def driver(self) -> str:
        """The driver that runs the job; "" if it is not known yet, or if the job's request is no longer kept."""
        return self._twin.driver

    def result(self) -> Result:
        """Return how the job ended. Call it only once the job has ended."""
        return self._twin.result()

    def open(self) -> None:
        """Subscribe to the job's events and, if asked for, to its output. Raises `NotPermitted`."""
        self._thread.call(self._twin.open())

    def close(self) -> None:
        """Stop listening; the job goes on."""
        self._thread.call(self._twin.close())

    def follow(self, timeout_s: Duration | None = None) -> Iterator[Event | Piece]:
        """Yield events and, if asked for, output until the job ends, for at most `timeout_s`: seconds, or "10m"."""
        return self._thread.iterate(self._twin.follow(timeout_s))


class Forward(Handle["AsyncForward"]):
    """A port here that leads to a port of a job, as `AsyncForward`, without `await`."""

    def __enter__(self) -> Forward:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def port(self) -> int:
        """Same as `AsyncForward.port`."""
        return self._twin.port

    @property
    def address(self) -> str:
        """`127.0.0.1:PORT`, of the port here."""
        return self._twin.address

    @property
    def said(self) -> str:
        """What the relay in the job has written to its standard error, up to 64 KiB: why it ended early, for one."""
        return self._twin.said

    def open(self) -> Self:
        """Start the relay and listen, and return this forward."""
        self._thread.call(self._twin.open())
        return self

    def close(self) -> None:
        """Listen no more, and end all connections and the relay. Does nothing if it is closed."""
        self._thread.call(self._twin.close())

    def wait(self) -> int:
        """Wait until the relay is over, as it is with the job, and return its exit code: minus the signal, if that
        is below 0.
        """
        return self._thread.call(self._twin.wait())


class Lease(Handle["AsyncLease"]):
    """Leased devices of this host, as `AsyncLease`, without `await`: for a block, or until `give_back`."""

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    @property
    def worker(self) -> str:
        """Same as `AsyncLease.worker`."""
        return self._twin.worker

    @property
    def devices(self) -> tuple[Device, ...]:
        """Same as `AsyncLease.devices`."""
        return self._twin.devices

    @property
    def uuids(self) -> tuple[str, ...]:
        """Same as `AsyncLease.uuids`."""
        return self._twin.uuids

    @property
    def mode(self) -> Sharing:
        """Same as `AsyncLease.mode`."""
        return self._twin.mode

    @property
    def simulated(self) -> bool:
        """Same as `AsyncLease.simulated`."""
        return self._twin.simulated

    @property
    def environment(self) -> Mapping[str, str]:
        """Same as `AsyncLease.environment`."""
        return self._twin.environment

    def child_environment(self) -> dict[str, str]:
        """Return the whole environment (`env`) for a child process that uses the devices."""
        return self._twin.child_environment()

    @property
    def device(self) -> str:
        """The first device as PyTorch names it in this process: `cuda:3`, or `xpu:0`."""
        return self._twin.device

    @property
    def asked_back(self) -> AskedBack | None:
        """Why and until when the worker asks for the devices; None if it does not. After a loss the reason is
        `agent-gone`.
        """
        return self._twin.asked_back

    @property
    def lost(self) -> bool:
        """Whether the agent has stopped and the lease has ended with it. Other jobs may then get the devices."""
        return self._twin.lost

    def wait_asked_back(self, timeout: Duration | None = None) -> AskedBack:
        """Wait until the worker asks for the devices or the lease is lost, and return `asked_back`."""
        return self._thread.call(self._twin.wait_asked_back(timeout))

    def give_back(self) -> None:
        """Give the devices back; in a block, before it ends. Does nothing if they were given back or lost before."""
        if self._thread.runs and not self._thread.is_of_parent:
            self._thread.call(self._twin.give_back())


class Service(Handle["AsyncService"]):
    """A service of the tenant, as `AsyncService`, without `await`."""

    @property
    def name(self) -> str:
        """Same as `AsyncService.name`."""
        return self._twin.name

    @overload
    def call(self, data: Any = None, *, returns: type[T], **how: Unpack[CallOptions]) -> T: ...

    @overload
    def call(self, data: Any = None, *, returns: Any = None, **how: Unpack[CallOptions]) -> Any: ...

    def call(self, data: Any = None, *, returns: Any = None, **how: Unpack[CallOptions]) -> Any:
        """Call the service once, and return its answer; one in parts as a list of them. `how` are `CallOptions`."""
        return self._thread.call(self._twin.call(data, returns=returns, **how))

    def answer(self, data: Any = None, *, returns: Any = None, **how: Unpack[CallOptions]) -> Answer:
        """Call the service once as `call`, and return its answer with the headers; those of its end, if it has
        parts.
        """
        return self._thread.call(self._twin.answer(data, returns=returns, **how))

    @overload
    def map(
        self,
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        at_once: int = 64,
        returns: type[T],
        return_exceptions: Literal[False] = False,
        **how: Unpack[CallOptions],
    ) -> Iterator[T]: ...

    @overload
    def map(
        self,
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        at_once: int = 64,
        returns: Any = None,
        return_exceptions: bool = False,
        **how: Unpack[CallOptions],
    ) -> Iterator[Any]: ...

    def map(
        self,
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        at_once: int = 64,
        returns: Any = None,
        return_exceptions: bool = False,
        **how: Unpack[CallOptions],
    ) -> Iterator[Any]:
        """Call the service with each item, and yield the answers in the order of the items. Items that are read one
        by one are read in this thread, which meanwhile yields no answers.
        """
        if isinstance(items, AsyncIterable | Collection):
            more: dict[str, Any] = {"returns": returns, "return_exceptions": return_exceptions, **how}
            return self._thread.iterate(self._twin.map(items, at_once=at_once, **more))
        return self._thread.in_order(self._twin._each(items, at_once, returns, return_exceptions, how), at_once)

    def submit_many(
        self,
        items: Iterable[Any],
        /,
        *,
        job: str | None = None,
        at_once: int = 64,
        timeout: Duration | None = None,
        per_replica: int | None = None,
        **fields: Unpack[Fields],
    ) -> Job:
        """Submit a job that calls the service with each item, so that the calls wait on disk, and return its handle."""
        how: dict[str, Any] = {"job": job, "at_once": at_once, "timeout": timeout, "per_replica": per_replica, **fields}
        return Job(self._thread, self._thread.call(self._twin.submit_many(read_here(items), **how)))

    def info(self) -> ServiceRow:
        """Return what the scheduler knows of the service: its job, versions, members, and its calls of about the
        last minute, as `moorage services` shows it. Raises `NotFound` if no live job has it, and what `ls`
        raises.
        """
        return self._thread.call(self._twin.info())

    @overload
    def stream(
        self,
        data: Any = None,
        *,
        timeout: Duration | None = None,
        start_within: Duration | None = None,
        returns: type[T],
    ) -> Iterator[T]: ...

    @overload
    def stream(
        self,
        data: Any = None,
        *,
        timeout: Duration | None = None,
        start_within: Duration | None = None,
        returns: Any = None,
    ) -> Iterator[Any]: ...

    def stream(
        self,
        data: Any = None,
        *,
        timeout: Duration | None = None,
        start_within: Duration | None = None,
        returns: Any = None,
    ) -> Iterator[Any]:
        """Call the service once, and yield the parts of its answer as they come; an answer in one piece is one part."""
        return self._thread.iterate(
            self._twin.stream(data, timeout=timeout, start_within=start_within, returns=returns)
        )

    def answers(
        self,
        data: Any = None,
        *,
        timeout: Duration | None = None,
        start_within: Duration | None = None,
        returns: Any = None,
        raw: bool = False,
        ahead_bytes: int | None = None,
        on_overrun: Callable[[], None] | None = None,
    ) -> Iterator[Answer]:
        """Call the service once as `stream`, and yield each part of its answer with the part's headers."""
        return self._thread.iterate(
            self._twin.answers(
                data,
                timeout=timeout,
                start_within=start_within,
                returns=returns,
                raw=raw,
                ahead_bytes=ahead_bytes,
                on_overrun=on_overrun,
            )
        )


class Schedules(Handle["AsyncSchedules"]):
    """AsyncSchedules of the tenant, without `await`."""

    def add(
        self,
        name: str,
        cron: str,
        what: What,
        gpu: GpuSpec | str | int | None = None,
        *,
        tz: str = "",
        overlap: Overlap = "skip",
        **fields: Unpack[Fields],
    ) -> ScheduleRow:
        """Submit a request again and again: `0 3 * * *` is each day at three, `@every 90s` each ninety seconds."""
        return self._thread.call(self._twin.add(name, cron, what, gpu, tz=tz, overlap=overlap, **fields))

    def add_request(
        self, name: str, cron: str, request: Request, *, tz: str = "", overlap: Overlap = "skip"
    ) -> ScheduleRow:
        """Do the same as `add` with a whole request; its `job` is left out, as each run has an id of its own."""
        return self._thread.call(self._twin.add_request(name, cron, request, tz=tz, overlap=overlap))

    def send_files(self, files: Paths) -> str:
        """Send files and folders of a schedule that is to be added, and return their address."""
        return self._thread.call(self._twin.send_files(files))

    def ls(self) -> list[ScheduleRow]:
        """Return the tenant's schedules in the order of their names, without their requests."""
        return self._thread.call(self._twin.ls())

    def show(self, name: str) -> ScheduleRow:
        """Return a schedule with its request, and what became of its newest run."""
        return self._thread.call(self._twin.show(name))

    def pause(self, name: str) -> ScheduleRow:
        """Make no more runs until `resume`; jobs go on. Nothing happens to a schedule that is paused already."""
        return self._thread.call(self._twin.pause(name))

    def resume(self, name: str) -> ScheduleRow:
        """Undo `pause`. Runs that were left out are not made up."""
        return self._thread.call(self._twin.resume(name))

    def run_now(self, name: str) -> Job:
        """Make a run at once, also of a paused schedule, and return its job."""
        return Job(self._thread, self._thread.call(self._twin.run_now(name)))

    def remove(self, name: str) -> ScheduleRow:
        """Forget a schedule, and return it as it was; the jobs that it made are not touched."""
        return self._thread.call(self._twin.remove(name))


class Fleet(Handle["AsyncFleet"]):
    """The workers of a fleet, as `AsyncFleet`, without `await`."""

    def show(self) -> FleetInfo:
        """Return the fleet: `workers` in the order of their names, `fits_now`, and counts of jobs."""
        return self._thread.call(self._twin.show())

    def audit(self) -> Audit:
        """Compare the ledger with each worker's last renewal, and each worker's devices with its leases, once."""
        return self._thread.call(self._twin.audit())

    def drain(
        self,
        worker: str,
        *,
        within: Duration | None = None,
        begin: Duration | None = None,
        last: Duration | None = None,
        why: str = "",
    ) -> Done:
        """Place no new jobs on a worker; the running ones go on. Raises `NotFound`, `Rejected`."""
        return self._thread.call(self._twin.drain(worker, within=within, begin=begin, last=last, why=why))

    def drain_idle(self, idle: Duration, *, pool: str | None = None, keep: int = 0, why: str = "idle") -> list[str]:
        """Drain the hosts that have had nothing to do for so long, and return the ids of those that may be ended."""
        return self._thread.call(self._twin.drain_idle(idle, pool=pool, keep=keep, why=why))

    def cordon(self, worker: str, *, gpus: Sequence[int] | None = None, why: str = "") -> Done:
        """Place no new jobs on a worker; the running ones go on, and its host may still borrow. Raises `NotFound`."""
        return self._thread.call(self._twin.cordon(worker, gpus=gpus, why=why))

    def uncordon(self, worker: str, *, gpus: Sequence[int] | None = None, why: str = "") -> Done:
        """Undo cordon or drain; with `gpus`, the cordon of these GPUs. Raises `NotFound`."""
        return self._thread.call(self._twin.uncordon(worker, gpus=gpus, why=why))

    def forget(self, worker: str, *, why: str = "") -> Done:
        """List a worker that has left or was lost no more. Raises `NotFound`, and `Rejected` while it is there, or
        while jobs wait for it. It is known again once it joins.
        """
        return self._thread.call(self._twin.forget(worker, why=why))

    def events(self) -> Iterator[FleetEvent]:
        """Yield what happens to the fleet from now on, without end: joins, losses, drains, GPUs out, takeovers."""
        return self._thread.iterate(self._twin.events())

    def past(self, since: Duration) -> list[FleetEvent]:
        """Return what happened to the fleet since then, at most the newest 1,000 events of the newest 10,000."""
        return self._thread.call(self._twin.past(since))

    def frames(self) -> Iterator[FleetFrame]:
        """Yield the leader's frames of the fleet, two a second, without end. A slow reader gets only the newest 16."""
        return self._thread.iterate(self._twin.frames())


class Admin(Handle["AsyncAdmin"]):
    """The orders of an operator, as `AsyncAdmin`, without `await`."""

    def hold(self, job: str | None = None, *, why: str = "", tenant: str | None = None) -> Done:
        """Keep a job's waiting replicas from being placed; without `job`, the tenant's queue. Running ones go on."""
        return self._thread.call(self._twin.hold(job, why=why, tenant=tenant))

    def release(self, job: str | None = None, *, why: str = "", tenant: str | None = None) -> Done:
        """Undo `hold` of a job; without `job`, of the tenant's queue. Jobs that were held one by one stay on hold."""
        return self._thread.call(self._twin.release(job, why=why, tenant=tenant))

    def release_worker(self, worker: str, *, slots: Sequence[int] | None = None, why: str = "") -> Done:
        """Return a worker's quarantined or unhealthy devices to use. The operator vouches that they are free and
        well.
        """
        return self._thread.call(self._twin.release_worker(worker, slots=slots, why=why))

    def requeue(self, job: str, *, why: str = "", tenant: str | None = None, replica: Which = None) -> Done:
        """End the job's running and placed replicas, and queue them for a new attempt. This costs no retry."""
        return self._thread.call(self._twin.requeue(job, why=why, tenant=tenant, replica=replica))

    def place(self, job: str, on: str, *, tenant: str | None = None) -> Done:
        """Start what waits of a job on this worker now, also on a cordoned one, before jobs that come earlier."""
        return self._thread.call(self._twin.place(job, on, tenant=tenant))

    def freeze(self, job: str, *, why: str = "", tenant: str | None = None) -> Done:
        """Ask the workers to freeze a job's running replicas."""
        return self._thread.call(self._twin.freeze(job, why=why, tenant=tenant))

    def resume(self, job: str, *, why: str = "", tenant: str | None = None) -> Done:
        """Undo `freeze`. The job is RUNNING again once its workers have reported it."""
        return self._thread.call(self._twin.resume(job, why=why, tenant=tenant))

    def priority(self, job: str, priority: int, *, why: str = "", tenant: str | None = None) -> Done:
        """Set a job's priority, 0..100. It replaces the priority of the request."""
        return self._thread.call(self._twin.priority(job, priority, why=why, tenant=tenant))

    def time_limit(self, job: str, limit: Duration, *, why: str = "", tenant: str | None = None) -> Done:
        """Give a job's running attempts, and later ones, another time limit, from their starts on: `"3h"`, or
        `"+2h"` and `"-30m"` for so much more or less than they have.
        """
        return self._thread.call(self._twin.time_limit(job, limit, why=why, tenant=tenant))

    def resize(
        self,
        job: str,
        *,
        memory_mib: int | None = None,
        compute_percent: int | None = None,
        why: str = "",
        tenant: str | None = None,
    ) -> Done:
        """Change a job's part of each shared GPU, for the GPUs that it has and for those that it gets later."""
        return self._thread.call(
            self._twin.resize(job, memory_mib=memory_mib, compute_percent=compute_percent, why=why, tenant=tenant)
        )

    def limit(
        self,
        *,
        gpus: int | None = None,
        jobs: int | None = None,
        cores: float | None = None,
        memory_mib: int | None = None,
        running: int | None = None,
        running_per_key: int | None = None,
        job_gpus: int | None = None,
        gpus_of: dict[str, int] | None = None,
        time_limit: Duration | None = None,
        gpu_hours: float | None = None,
        period: str = "month",
        on_spent: str = "wait",
        gpu_weights: dict[str, float] | None = None,
        why: str = "",
        tenant: str | None = None,
    ) -> Done:
        """Limit what a tenant may have at once (GPUs, jobs that have not ended, cores, memory in MiB, replicas on
        workers, those of each fair key, GPUs of models by the pattern of each), how large and long its jobs may
        be, and its budget of GPU-hours in a day, week or month, in which GPUs of models count by their
        `gpu_weights`.
        """
        return self._thread.call(
            self._twin.limit(
                gpus=gpus,
                jobs=jobs,
                cores=cores,
                memory_mib=memory_mib,
                running=running,
                running_per_key=running_per_key,
                job_gpus=job_gpus,
                gpus_of=gpus_of,
                time_limit=time_limit,
                gpu_hours=gpu_hours,
                period=period,
                on_spent=on_spent,
                gpu_weights=gpu_weights,
                why=why,
                tenant=tenant,
            )
        )

    def counter(self, name: str, most: int | None, *, per: str = "fleet", why: str = "") -> Done:
        """Set how many there are of a counter that jobs name in `uses`, in all or, with `per` tenant, for each
        tenant.
        """
        return self._thread.call(self._twin.counter(name, most, per=per, why=why))

    def counters(self) -> list[Counter]:
        """Return the counters, with how many of each are in use."""
        return self._thread.call(self._twin.counters())

    def feature_level(self, level: int, *, schedulers: int = 1, why: str = "") -> Done:
        """Raise the ledger's feature level. Raises `Rejected` unless at least `schedulers` answer and all know it."""
        return self._thread.call(self._twin.feature_level(level, schedulers=schedulers, why=why))

    def share(
        self, *, weight: int | None = None, gpus: int | None = None, why: str = "", tenant: str | None = None
    ) -> Done:
        """Set a tenant's weight in the fair share, and how many GPUs it is guaranteed."""
        return self._thread.call(self._twin.share(weight=weight, gpus=gpus, why=why, tenant=tenant))

    def tenants(self) -> list[TenantRow]:
        """Return the tenants with jobs that have not ended, leases, holds, limits or shares."""
        return self._thread.call(self._twin.tenants())

    def demand(self) -> Demand:
        """Return what waits, by tenant, shape and reason, whether more hosts would help, and the hosts that are
        idle.
        """
        return self._thread.call(self._twin.demand())

    def acts(self, *, since: Duration | None = None, by: str = "", verb: str = "") -> ActsAnswer:
        """Return the newest orders of operators that changed something, at most 500, the oldest of them first."""
        return self._thread.call(self._twin.acts(since=since, by=by, verb=verb))

    def jobs(
        self,
        states: Sequence[str] = (),
        *,
        tenant: str = "",
        labels: Mapping[str, str] | None = None,
        ids: str = "",
        reason: str = "",
        worker: str = "",
        past: bool = False,
    ) -> Iterator[JobRow]:
        """Yield the jobs of all tenants, or of one, newest first; the rest as in `AsyncClient.ls`."""
        return self._thread.iterate(
            self._twin.jobs(states, tenant=tenant, labels=labels, ids=ids, reason=reason, worker=worker, past=past)
        )

    def dead_letters(self, *, tenant: str | None = None) -> Iterator[LetterRow]:
        """Yield the refused requests of the durable queue (dead letters), oldest first, of one tenant or of all."""
        return self._thread.iterate(self._twin.dead_letters(tenant=tenant))

    def dead_letter(self, sequence: int) -> Letter:
        """Return a dead letter: its `problem`, and its `body` or, if that is not text, its bytes as `data`."""
        return self._thread.call(self._twin.dead_letter(sequence))

    def resend(self, sequence: int, *, body: Mapping[str, Any] | None = None, why: str = "") -> LetterDone:
        """Submit a dead letter again for its tenant, under its job id. `body` replaces the request."""
        return self._thread.call(self._twin.resend(sequence, body=body, why=why))

    def drop(self, sequence: int, *, why: str = "") -> LetterDone:
        """Delete a dead letter for good. Raises `NotFound`."""
        return self._thread.call(self._twin.drop(sequence, why=why))


class Client(ClientBase):
    """A client without `await`: `with Client() as moorage: …`. Several threads may share it; none may run a loop.

    Arguments, names and errors are those of `AsyncClient`. `on_wait` is called in the private thread.
    Raises RuntimeError inside a running event loop, but for that of a notebook, which waits for its cells in any case.
    """

    @property
    def tenant(self) -> str:
        """Same as `AsyncClient.tenant`."""
        return self._twin.tenant

    def submit(
        self, what: What, gpu: GpuSpec | str | int | None = None, job: str | None = None, **fields: Unpack[Fields]
    ) -> Job:
        """Submit a job: argv, a `Request`, or a mapping as on the wire. Return its handle once it is in the ledger."""
        return Job(self._thread, self._thread.call(self._twin.submit(what, gpu, job, **fields)))

    def map(
        self,
        what: What | Callable[[Any], Any],
        items: Iterable[Any],
        /,
        gpu: GpuSpec | str | int | None = None,
        job: str | None = None,
        *,
        how: Travel | None = None,
        python: str | None = None,
        check: bool = True,
        **fields: Unpack[Fields],
    ) -> Job:
        """Submit one job that has a replica for each item: a text, a number, or a mapping of columns."""
        items = read_here(items)
        mapped = self._twin.map(what, items, gpu, job, how=how, python=python, check=check, **fields)
        return Job(self._thread, self._thread.call(mapped))

    def submit_handler(
        self,
        name: str,
        input: Any = None,
        gpu: GpuSpec | str | int | None = None,
        job: str | None = None,
        **fields: Unpack[Fields],
    ) -> Job:
        """Submit a call of the handler `name`, a function that a service offers (see `EmbeddedWorker`)."""
        return Job(self._thread, self._thread.call(self._twin.submit_handler(name, input, gpu, job, **fields)))

    def run(
        self,
        what: What,
        gpu: GpuSpec | str | int | None = None,
        job: str | None = None,
        wait: Duration | None = None,
        **fields: Unpack[Fields],
    ) -> Result:
        """Submit a job, wait until it ends, and return its result with `stdout` and `stderr`."""
        return self._thread.call(self._twin.run(what, gpu, job, wait, **fields))

    def submit_many(
        self, many: Iterable[What], gpu: GpuSpec | str | int | None = None, **fields: Unpack[Fields]
    ) -> list[Job]:
        """Submit many requests in one frame (several beyond 10,000 requests or 900 KiB). Return jobs in request
        order. The `jobs` of a `BatchRejected` are `Job`s too.
        """
        many = read_here(many)
        try:
            accepted = self._thread.call(self._twin.submit_many(many, gpu, **fields))
        except BatchRejected as refused:
            jobs = [job and Job(self._thread, job) for job in refused.jobs]
            raise BatchRejected(jobs, refused.problems) from None
        return [Job(self._thread, job) for job in accepted]

    def send_files(self, files: Paths) -> str:
        """Send files and folders into the tenant's bucket. Return their address, which a request can have as
        `files`.
        """
        return self._thread.call(self._twin.send_files(files))

    def request(
        self,
        what: What,
        gpu: GpuSpec | str | int | None = None,
        job: str | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> Request:
        """Return a checked request with its job id; nothing is sent. Raises `Rejected`."""
        return self._twin.request(what, gpu, job, fields)

    def job(self, job: str) -> Job:
        """Return a handle on the job with this id; the scheduler is not asked. Raises `Rejected` for an invalid id."""
        return Job(self._thread, self._twin.job(job))

    def watch(
        self,
        job: str,
        *,
        output: bool = False,
        past: bool = False,
        tail: int | None = None,
        replica: Which = None,
        notes: bool = False,
    ) -> Watch:
        """Return a `Watch` of a job's events, and with `output` of its new output. The job may be submitted later."""
        watch = called(lambda: self._twin.watch(job, output=output, past=past, tail=tail, replica=replica, notes=notes))
        return Watch(self._thread, self._thread.call(watch))

    def as_completed(self, jobs: Iterable[Job], wait: Duration | None = None) -> Iterator[Job]:
        """Yield each of these jobs of this tenant once, when it ends; `job.result()` then does not wait for the job.
        The handles are those that were given.
        """
        given = {job.job: job for job in handles(jobs, Job)}
        for over in self._thread.iterate(self._twin.as_completed([job._twin for job in given.values()], wait)):
            yield given[over.job]

    def gather(self, *jobs: Job, wait: Duration | None = None) -> list[Result]:
        """Wait until all of these jobs of this tenant have succeeded. Return their results in the order given."""
        twins = [job._twin for job in handles(jobs, Job)]
        return self._thread.call(self._twin.gather(*twins, wait=wait))

    def wait(self, jobs: Iterable[Job], wait: Duration | None = None) -> list[Result]:
        """Wait until all of these jobs of this tenant have ended. Return all results in the order given."""
        return self._thread.call(self._twin.wait([job._twin for job in handles(jobs, Job)], wait))

    def events(self) -> Iterator[Event]:
        """Yield every transition of the tenant's jobs from now on, without end."""
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
    ) -> Plan:
        """Return what would happen to a request; nothing is submitted."""
        return self._thread.call(self._twin.plan(what, gpu, drain=drain, add=add, quota=quota, share=share, **fields))

    def first_possible(self, requests: Sequence[What]) -> Request:
        """Return the first of these requests that some worker could run, now or later, checked and with its job id."""
        return self._thread.call(self._twin.first_possible(requests))

    def ls(
        self,
        *jobs: str,
        states: Sequence[str] = (),
        limit: int = 100,
        labels: Mapping[str, str] | None = None,
        ids: str = "",
        reason: str = "",
        worker: str = "",
    ) -> JobList:
        """Return the tenant's jobs, newest first (`jobs`), and `counts` by state. `limit` is 1..1000."""
        return self._thread.call(
            self._twin.ls(*jobs, states=states, limit=limit, labels=labels, ids=ids, reason=reason, worker=worker)
        )

    def table(self, job: str, path: str = "") -> list[dict[str, Any]]:
        """Return a row for each replica of a job, for `pandas.DataFrame` or a file: its item, state, exit code,
        number of attempts, end, and what it reported last or kept as JSON.
        """
        return self._thread.call(self._twin.table(job, path))

    def reports(self, job: str) -> list[dict[str, Any]]:
        """Return what a job has reported of itself by `moorage.job.report`, for `pandas.DataFrame`: a row for each
        report, with the number of its replica.
        """
        return self._thread.call(self._twin.reports(job))

    def lease(
        self,
        gpu: GpuSpec | str | int = 1,
        *,
        purpose: str = "",
        wait: Duration | None = None,
        socket: Path | str | None = None,
        on_asked_back: OnAskedBack | None = None,
    ) -> Lease:
        """Borrow GPUs of this host for code that runs here. The lease is taken at once, for a block or until
        `give_back`, and ends with the client. `on_asked_back` is called in the private thread.
        """
        lending = self._twin.lease(gpu, purpose=purpose, wait=wait, socket=socket, on_asked_back=on_asked_back)
        return Lease(self._thread, self._thread.call(entered(lending)))

    @overload
    def call(
        self,
        service: str,
        data: Any = None,
        *,
        returns: type[T],
        priority: int | None = None,
        headers: Mapping[str, str] | None = None,
        **how: Unpack[CallOptions],
    ) -> T: ...

    @overload
    def call(
        self,
        service: str,
        data: Any = None,
        *,
        returns: Any = None,
        priority: int | None = None,
        headers: Mapping[str, str] | None = None,
        **how: Unpack[CallOptions],
    ) -> Any: ...

    def call(
        self,
        service: str,
        data: Any = None,
        *,
        returns: Any = None,
        priority: int | None = None,
        headers: Mapping[str, str] | None = None,
        **how: Unpack[CallOptions],
    ) -> Any:
        """Call a service once, and return its answer, as `Service.call`, which raises the same."""
        return self._thread.call(
            self._twin.call(service, data, returns=returns, priority=priority, headers=headers, **how)
        )

    def service(
        self,
        name: str,
        *,
        priority: int | None = None,
        headers: Mapping[str, str] | None = None,
        affinity: str | None = None,
    ) -> Service:
        """Return a handle on a service of the tenant, to call it; asks nothing. Raises `Rejected`."""
        return Service(self._thread, self._twin.service(name, priority=priority, headers=headers, affinity=affinity))

    def services(self) -> list[ServiceRow]:
        """Return the tenant's live services by name, as `moorage services` shows them: the job, versions, members,
        and the calls of about the last minute. Raises what `ls` raises.
        """
        return self._thread.call(self._twin.services())

    @property
    def schedules(self) -> Schedules:
        """The tenant's schedules: requests that are submitted again and again; see `Schedules`."""
        return Schedules(self._thread, self._twin.schedules)

    @property
    def fleet(self) -> Fleet:
        """The workers: what they have, whether the ledger is right about them, drain and cordon; see `Fleet`."""
        return Fleet(self._thread, self._twin.fleet)

    @property
    def admin(self) -> Admin:
        """The orders of an operator: hold, release, requeue, freeze, priority, limit, share and so on; see `Admin`."""
        return Admin(self._thread, self._twin.admin)
