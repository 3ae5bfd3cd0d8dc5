"""`AsyncClient`: one connection, and everything a service or an operator asks of moorage over it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack

from moorage.client.asking import TRIED, TRY_S, answered, decode_accepted, decode_batch, decode_flag
from moorage.client.batches import frames_of
from moorage.client.connected import Connected, data_of
from moorage.client.durations import Duration, seconds
from moorage.client.errors import BatchRejected, Rejected, of_batch, rejected
from moorage.client.fields import Fields, Paths
from moorage.client.login import who
from moorage.client.request_builder import COMMAND, RequestBuilder, What
from moorage.schemas.codec import encode
from moorage.schemas.errors import Problem
from moorage.schemas.frames import Accepted, Answer, Event, FleetFrame
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import Request
from moorage.schemas.names import JOB, is_files, is_job

if TYPE_CHECKING:
    from moorage.client.admin import Admin
    from moorage.client.follow.result import Result
    from moorage.client.follow.watch import Watch
    from moorage.client.job import Job
    from moorage.client.lease import Lending, OnAskedBack
    from moorage.client.planning import Quota, Share

# What follows jobs is imported by the methods that do: a one-shot command must not pay for it.

#: frames of a `submit_many` that are under way at a time
FRAMES_AT_ONCE: Final = 4

T = TypeVar("T")


@functools.cache
def _job_class() -> type[Job]:
    """Cached, as an import statement costs every submit half a microsecond."""
    from moorage.client.job import Job

    return Job


@functools.cache
def _run() -> Callable[..., Coroutine[Any, Any, Result]]:
    """The same."""
    from moorage.client.follow.run import run

    return run


def _says_events(what: What) -> bool:
    """Return whether a request has an `events` of its own; a command given as words has none."""
    if isinstance(what, COMMAND):
        return False
    return isinstance(what, Request) or (isinstance(what, Mapping) and "events" in what)


class AsyncClient(Connected):
    """`async with AsyncClient() as moorage: …`. Use it from one event loop.

    `target` is a URL or a nats context's name; without one NATS_CONTEXT, the selected context, NATS_URL, or the
    `moorage up` of this folder. `tenant` defaults to $MOORAGE_TENANT, else `default`. `timeout` bounds each answer,
    retries included; `connect_timeout` the first connection; `wait_timeout` is the default of `Job.result`, `run`,
    `wait` and `as_completed`. `on_wait` is called whenever something must be asked again. `transport` takes the place
    of NATS, as `SimFleet` in tests, and of a `target`. A keyword that a verb does not have is a TypeError.
    """

    # ------------------------------------------------------------------------------------------------------- jobs

    async def submit(
        self, what: What, gpu: GpuSpec | str | int | None = None, key: str | None = None, **fields: Unpack[Fields]
    ) -> Job:
        """Submit argv, a `Request`, or a mapping as on the wire; answered once it is in the ledger.

        `gpu` is a token such as `2xH100:80G`, a count or a spec. `key` is the job's id: a second submit of the same
        content with the same key is the same job. Without a key a time-ordered id is made, which the retries of this
        call keep. `files` are files and folders for the job's folder; see `send_files`. Unless `events` says
        otherwise, the job's events are in the tenant's frames only until a client follows it. Raises `Rejected`
        (`Conflict`, `QueueFull`), `NoScheduler`, `Unreachable`, `NotPermitted`.
        """
        if "files" in fields:
            fields["files"] = await self.send_files(fields["files"])
        if not _says_events(what):
            fields.setdefault("events", "tenant")  # an event of its own for each of its states, which nobody may hear
        job, request, body = self._requests.prepared(what, gpu, key, fields)
        story = None if self._following is None else self._following.feed.expect(job)
        # as `_ask`, but for its coroutines: a fifth of what a submit costs who has a thousand under way
        mux, subject, timeout_s, token = self._opened(), self._submit_subject, self.timeout_s, 0
        ends_s, failed = time.monotonic() + timeout_s, None
        try:
            token, answer = mux.ask(subject, body, min(TRY_S, timeout_s))
            accepted = answered(decode_accepted(await answer))
        except TRIED as error:
            failed = error
        except BaseException:  # it is cancelled
            mux.abandon(token)
            raise
        if failed is not None:
            accepted = await self._asking.go_on(failed, mux, subject, body, decode_accepted, timeout_s, ends_s)
        return _job_class()(self, accepted.job, accepted, request, story)

    async def submit_handler(
        self,
        name: str,
        input: Any = None,
        gpu: GpuSpec | str | int | None = None,
        key: str | None = None,
        **fields: Unpack[Fields],
    ) -> Job:
        """Submit a call of the function that services offer under `name` (see `moorage.worker.embed`).

        `input` is anything that JSON can hold; the function finds it as `context.input`. Larger data belongs in a
        store. The job is placed on a worker that offers the handler. What the function returns is the `value` of
        `Job.result`; what it raises is the `why` of `JobFailed`. Raises what `submit` raises.
        """
        from moorage.client.handlers import handler_request

        fields.setdefault("events", "tenant")
        request = handler_request(name, input, gpu, key, fields)
        story = self._expect(request.job)
        accepted = await self._ask("submit", encode(request), decode_accepted)
        return _job_class()(self, accepted.job, accepted, request, story)

    async def run(
        self,
        what: What,
        gpu: GpuSpec | str | int | None = None,
        key: str | None = None,
        timeout: Duration | None = None,
        **fields: Unpack[Fields],
    ) -> Result:
        """Submit, follow to the end, and return the result with its `stdout` and `stderr`.

        Output that is lost on the way is asked for again, as long as its worker keeps it; `lost_bytes` tells how much
        is still missing. Of each stream the last 16 Mi characters are held. `timeout` defaults to `wait_timeout`; when
        it is over, or when this call is cancelled, the job goes on. Unless `events` says otherwise, the client listens
        to the events of all jobs of the tenant meanwhile, and for some seconds after. Raises `JobFailed` (its `result`
        has the output, too) unless the job SUCCEEDED, `TimedOut`, and what `submit` raises.
        """
        if "files" in fields:
            fields["files"] = await self.send_files(fields["files"])
        timeout_s = self.wait_timeout_s if timeout is None else seconds(timeout)
        stories = self._stories
        await stories.feed.linger()
        if (stories.feed.lingers or (stories.is_crowded and not stories.feed.is_refused)) and not _says_events(what):
            fields.setdefault("events", "tenant")
        job, request, body = self._requests.prepared(what, gpu, key, fields)
        submit = functools.partial(self._ask, "submit", body, decode_accepted)
        return await _run()(stories, job, request, submit, timeout_s)

    async def submit_many(
        self, many: Iterable[What], gpu: GpuSpec | str | int | None = None, **fields: Unpack[Fields]
    ) -> list[Job]:
        """Submit all in one frame (in several beyond 10,000 requests or 900 KiB); returns jobs in the requests' order.

        Each is accepted or refused by itself, also a malformed one. Raises `BatchRejected`, which has the accepted jobs
        and names the refused requests; `Rejected` for a `gpu` or a field given here for all; and what `submit` raises:
        some may be accepted then, and requests that name their `job` can all be sent again without doubling.
        """
        if "files" in fields:
            fields["files"] = await self.send_files(fields["files"])
        built: list[tuple[Request, bytes] | Problem] = []
        for at, what in enumerate(many):
            try:
                built.append(self._requests.encoded(what, gpu, None, fields))
            except Rejected as error:
                said_for_all = {*fields, *(["gpu"] if gpu is not None else [])}
                if said_for_all.intersection(error.problem.field.split(".")):
                    raise
                built.append(of_batch(error.problem, at))
        sent = [(request, body) for one in built if not isinstance(one, Problem) for request, body in (one,)]
        stories = [self._expect(request.job) for request, _ in sent]
        answered = zip(sent, await self._answers_to([body for _, body in sent]), stories, strict=True)
        jobs: list[Job | None] = []
        problems: dict[int, Problem] = {}
        for at, one in enumerate(built):
            if isinstance(one, Problem):
                answer: Accepted | Problem = one
            else:
                (request, _), answer, story = next(answered)
            if isinstance(answer, Problem):
                problems[at] = answer
                jobs.append(None)
            else:
                jobs.append(_job_class()(self, answer.job, answer, request, story))
        if problems:
            raise BatchRejected(jobs, problems)
        return [job for job in jobs if job is not None]

    async def send_files(self, files: Paths) -> str:
        """Send files and folders into the tenant's bucket, and return their address, which `files` of a job may be.

        Of a folder its content is brought, but for what its `.moorageignore` lists as a `.gitignore` would. What the
        bucket has already is not sent again. The address of files that were sent before is returned as it is. Raises
        `Rejected` for what cannot be packed, and what `submit` raises.
        """
        if isinstance(files, str) and is_files(files):
            return files
        from moorage.client.sending import send

        return (await send(self, files)).address

    async def _answers_to(self, bodies: list[bytes]) -> list[Accepted | Problem]:
        """Return the answer to each of these requests, sent in as few frames as the bounds allow."""
        answers: list[Accepted | Problem] = []
        frames = frames_of(bodies)
        for at in range(0, len(frames), FRAMES_AT_ONCE):
            asked = (self._ask("submit", frame, decode_batch) for frame in frames[at : at + FRAMES_AT_ONCE])
            for part in await asyncio.gather(*asked):
                answers += part
        return answers

    def request(
        self,
        what: What,
        gpu: GpuSpec | str | int | None = None,
        key: str | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> Request:
        """Return the checked request that `submit` would send, with its job id. Raises `Rejected`."""
        return RequestBuilder().build(what, gpu, key, fields)  # of its own: `Client` calls this in any thread

    def job(self, id: str) -> Job:
        """Return a handle on a job by its id, without asking the scheduler. Raises `Rejected` for what is no job id."""
        if not is_job(id):
            raise rejected(
                "invalid-argument",
                f"{id[:80]!r} is no job id",
                field="$.job",
                found=id,
                allowed=JOB.pattern,
                next="moorage ls",
            )
        return _job_class()(self, id)

    def watch(
        self,
        id: str,
        *,
        output: bool = False,
        past: bool = False,
        tail: int | None = None,
        replica: int | None = None,
        notes: bool = False,
    ) -> Watch:
        """The events of a job, which need not be submitted yet, and with `output` its output from now on; see `Watch`.

        With `past` the output comes from its beginning, or only the last `tail` lines of what was before. `replica`
        chooses the output of one replica. With `notes` there are also what a worker does before the start (`note`), and
        where the ports of a container are reached (`ports`), as pieces without text; they may be lost.
        """
        from moorage.client.follow.stories import Following
        from moorage.client.follow.watch import Watch

        following = Following(self._stories, self.job(id).id)
        return Watch(following, output=output, past=past, tail=tail, replica=replica, notes=notes)

    async def as_completed(self, jobs: Iterable[Job], timeout: Duration | None = None) -> AsyncIterator[Job]:
        """Yield each of these jobs of this tenant once, as it ends; `job.result()` then answers at once.

        One subscription serves all of them. `timeout` bounds the whole iteration and defaults to `wait_timeout`. Raises
        `TimedOut` (the jobs that are left go on), `NotFound`, `NoScheduler`, `NotPermitted`.
        """
        from moorage.client.follow.gather import Gathering, handles

        timeout_s = self.wait_timeout_s if timeout is None else seconds(timeout)
        async with Gathering(self._stories, self._own(handles(jobs, _job_class()))) as gathering:
            async for job in gathering.over(timeout_s):
                yield job

    def _own(self, jobs: Iterable[Job]) -> Iterator[Job]:
        """Check that each job is of this client's tenant: of another one the same id is another job."""
        for job in jobs:
            if job.tenant != self.tenant:
                raise rejected(
                    "invalid-argument",
                    f"job {job.id} is of tenant {job.tenant}, and this client of tenant {self.tenant}",
                    found=job.tenant,
                    allowed=self.tenant,
                    next="wait for the jobs of each tenant with a client of that tenant",
                )
            yield job

    async def gather(self, *jobs: Job, timeout: Duration | None = None) -> list[Result]:
        """Wait until all of these jobs of this tenant have succeeded; returns their results in the order given.

        Raises `JobFailed` as soon as one has failed (the others go on; `wait` returns failures as results), and what
        `as_completed` raises.
        """
        results: dict[str, Result] = {}
        async for job in self.as_completed(jobs, timeout):
            results[job.id] = await job.result()
        return [results[job.id] for job in jobs]

    async def wait(self, jobs: Iterable[Job], timeout: Duration | None = None) -> list[Result]:
        """Wait until all of these jobs of this tenant are over; returns all results, failed or not, in the order given.

        The results have no handler's value: `Job.result` reads it. `timeout` defaults to `wait_timeout`. Raises what
        `as_completed` raises.
        """
        from moorage.client.follow.gather import handles

        wanted = list(handles(jobs, _job_class()))
        results: dict[str, Result] = {}
        async for job in self.as_completed(wanted, timeout):
            assert job.known_result is not None
            results[job.id] = job.known_result
        return [results[job.id] for job in wanted]

    async def events(self) -> AsyncIterator[Event]:
        """Every transition of the tenant's jobs from now on, without end.

        Events may be lost: those that come while the connection is down, and those beyond 10,000 frames that were not
        taken yet. A gap shows in the job's `rev`, and `show` has the whole history. Raises `NotPermitted`.
        """
        from moorage.client.follow.listening import tenant_events

        async with contextlib.aclosing(tenant_events(self._stories)) as events:
            async for event in events:
                yield event

    async def plan(
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
        """What would happen to a request; nothing is submitted.

        `data["starts"]` of the answer is now, later, unknown, never or refused.
        The answer supposes that the workers in `drain` were drained, that the hosts of `add` (such as `2x8xA100`) were
        there, that tenants might have at most `quota` GPUs (a number for this tenant, or a number by tenant), and that
        they had a `share`: a weight, or a weight and guaranteed GPUs. Without `what`, it tells what these changes alone
        would do. Give `data["ledger"]` as `if_seq` to a submit that shall only be accepted while the plan holds. Raises
        what `submit` raises.
        """
        from moorage.client.planning import plan_arguments

        if what is None and (gpu is not None or fields):
            beside = ", ".join([*(["gpu"] if gpu is not None else []), *fields])
            raise TypeError(f"{beside} without a request: the first argument says what would run")
        request = None if what is None else self._requests.encoded(what, gpu, None, fields)[1]
        return await self.answer("plan", plan_arguments(request, drain, add, quota, share))

    async def first_possible(self, requests: Sequence[What]) -> Request:
        """Return the first of these requests that some worker could run, now or later, checked and with its job id.

        So a wish can be preferred: `await moorage.submit(await moorage.first_possible([wish, instead]))`. The fleet is
        asked once, as `plan` does, and nothing is submitted: workers that join later change no choice. Where no worker
        could run any of them, it is the first one whose driver a worker offers. Raises what `submit` raises.
        """
        from moorage.client.planning import first_possible

        if not requests:
            raise rejected("invalid-argument", "no request to choose from", next="name one request or more")
        return await first_possible(self.plan, [self.request(what) for what in requests])

    async def ls(self, states: Sequence[str] = (), limit: int = 100) -> dict[str, Any]:
        """Return the tenant's jobs, newest first: `jobs`, `counts` by state. `limit` 1..1000. Raises `Rejected`."""
        wanted = [states] if isinstance(states, str) else list(states)
        return await self.read("ls", {"states": wanted, "limit": limit})

    def lease(
        self,
        gpu: GpuSpec | str | int = 1,
        *,
        purpose: str = "",
        timeout: Duration | None = None,
        socket: Path | str | None = None,
        on_asked_back: OnAskedBack | None = None,
    ) -> Lending:
        """Borrow GPUs of this host for code that runs here: `async with moorage.lease("1xL40S") as lease: …`, or where
        there is no block, as in a notebook, `lease = await moorage.lease("1xL40S")` and later `lease.give_back()`.

        The host's worker is asked over its UNIX socket, so this client need not be open. The socket is `socket`, else
        $MOORAGE_LEASE_SOCKET, else that of the `moorage up` of this folder, else the system's. The call waits in one
        queue with what the fleet places there, for `timeout` (default `wait_timeout`). The lease ends with the block,
        when it is given back, or with this process. The worker may ask it back: see `lease.asked_back`; `on_asked_back`
        is called in the event loop. Raises, on entering, `NoAgent`, `NotPermitted`, `Rejected` (no-match: this host has
        no such GPU), `TimedOut`.
        """
        from moorage.client.lease import Lending

        if self._transport is not None:
            raise rejected(
                "failed-precondition",
                "a simulated fleet lends nothing to this process: it has no socket",
                next="for a test, start `moorage worker --simulate 1xL40S` and name its socket",
            )
        timeout_s = self.wait_timeout_s if timeout is None else seconds(timeout)
        return Lending(gpu, purpose, timeout_s, socket, on_asked_back)

    # ------------------------------------------------------------------------------------------------- operators

    @property
    def admin(self) -> Admin:
        """Hold, release, requeue, limit and change the priority of jobs."""
        from moorage.client.admin import Admin

        return Admin(self)

    async def fleet(self) -> dict[str, Any]:
        """Return every worker by name, what is free, and the largest request that starts now by model."""
        return data_of(await self.operate("fleet"))

    async def audit(self) -> dict[str, Any]:
        """Compare the ledger with each worker's last renewal, and each worker's devices with its leases, once.

        Only what two audits show that are some renewals apart is drift. `not_looked` names the workers that did not
        look at their devices within 2.5 s.
        """
        return data_of(await self.operate("audit"))

    async def drain(
        self,
        worker: str,
        *,
        within: Duration | None = None,
        begin: Duration | None = None,
        last: Duration | None = None,
        why: str = "",
    ) -> dict[str, Any]:
        """Place nothing new on a worker; what runs there goes on. Raises `NotFound`, `Rejected`.

        With `within`, what runs gets its checkpoint signal, is asked to end within that time, and starts again
        elsewhere. `begin` is a time in the future, such as `22:00` or `2h`, by which the worker has to be empty; `last`
        is how long after that the worker opens again by itself. All of this is in the ledger, and `uncordon` undoes it.
        """
        from moorage.client.moments import drain_fields

        arguments = {"worker": worker, "by": who(), **drain_fields(within, begin, last, why)}
        return await self._request(self.subjects.admin("drain"), encode(arguments), decode_flag)

    async def cordon(self, worker: str) -> dict[str, Any]:
        """Nothing new is placed there. Raises `NotFound`."""
        return await self._flag("cordon", worker)

    async def uncordon(self, worker: str) -> dict[str, Any]:
        """Undo cordon or drain. Raises `NotFound`."""
        return await self._flag("uncordon", worker)

    async def _flag(self, verb: str, worker: str) -> dict[str, Any]:
        arguments = {"worker": worker, "by": who()}
        return await self._request(self.subjects.admin(verb), encode(arguments), decode_flag)

    async def fleet_frames(self) -> AsyncIterator[FleetFrame]:
        """The leader's summary of the fleet, twice a second, without end; a slow reader gets only the newest."""
        from moorage.client.follow.listening import fleet_frames

        async with contextlib.aclosing(fleet_frames(self._stories)) as frames:
            async for frame in frames:
                yield frame
