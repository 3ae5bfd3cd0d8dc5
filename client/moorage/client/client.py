"""`AsyncClient`: one connection to NATS, with a method for each request of a service or an operator."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, TypeVar, Unpack, cast, overload

from moorage.client.asking import decode_accepted, decode_batch
from moorage.client.batches import frames_of, in_order
from moorage.client.connected import CONNECT_TIMEOUT_S_DEFAULT, WAIT_S_DEFAULT, Connected
from moorage.client.durations import Duration, seconds
from moorage.client.errors import BatchRejected, Rejected, of_batch, read_answer, rejected
from moorage.client.fields import Fields, Paths
from moorage.client.own_python import as_in_a_shell
from moorage.client.request_builder import COMMAND, RequestBuilder, What, ids_after
from moorage.schemas.actors import NO_OPERATOR
from moorage.schemas.codec import encode
from moorage.schemas.errors import Problem
from moorage.schemas.frames import Accepted, Event
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import Request
from moorage.schemas.names import JOB, is_files, is_job
from moorage.schemas.subjects import PREFIX_DEFAULT

if TYPE_CHECKING:
    from moorage.bus.contexts import Context
    from moorage.client.admin import AsyncAdmin
    from moorage.client.answers import JobList
    from moorage.client.call_options import CallOptions
    from moorage.client.fleet import AsyncFleet
    from moorage.client.follow.job_history import Result
    from moorage.client.follow.watch import AsyncWatch
    from moorage.client.job import AsyncJob
    from moorage.client.lease import Lending, OnAskedBack
    from moorage.client.mapping import Travel
    from moorage.client.planning import Quota, Share
    from moorage.client.replicas import Which
    from moorage.client.schedules import AsyncSchedules
    from moorage.client.services import AsyncService, Calls
    from moorage.client.sweeps import Sweep
    from moorage.client.transport import ClientTransport
    from moorage.schemas.answers.jobs import ServiceRow
    from moorage.schemas.plan import Plan

# Modules that follow jobs are imported by the methods that need them: a command that only submits starts faster.

#: most unanswered frames of one `submit_many`
FRAMES_AT_ONCE: Final = 4

log = logging.getLogger("moorage.client")

T = TypeVar("T")


@functools.cache
def _job_class() -> type[AsyncJob]:
    """Return the class `Job`. Cached, because an import statement would slow down every submit."""
    from moorage.client.job import AsyncJob

    return AsyncJob


def _with_files(fields: Mapping[str, Any], paths: Sequence[str]) -> list[str | os.PathLike[str]]:
    """Return the paths of a job's files, and those that must travel with them. Raises `Rejected` for sent files."""
    files = fields.get("files", [])
    if isinstance(files, str) and is_files(files):
        raise rejected(
            "invalid-argument", "the items need a file of their own, and the files are sent already",
            field="$.run.files", found=files, next="give the paths of the files, not their address",
        )  # fmt: skip
    return [*([files] if isinstance(files, str | os.PathLike) else files), *paths]


def _sets_events(what: What) -> bool:
    """Return whether the request sets `events` itself; a command given as words does not."""
    if isinstance(what, COMMAND):
        return False
    return isinstance(what, Request) or (isinstance(what, Mapping) and "events" in what)


def _sets_no_match(what: What) -> bool:
    """Return whether the request says itself what is done if no known worker could ever run it."""
    if isinstance(what, COMMAND):
        return False
    return isinstance(what, Request) or (isinstance(what, Mapping) and "on_no_match" in what)


class AsyncClient:
    """A client of moorage: `async with AsyncClient() as moorage: …`. Use it from one event loop.

    `target` is a URL or the name of a nats context. Without it the client takes NATS_CONTEXT, the selected context,
    NATS_URL, the `moorage up` of this folder, or the only one that this user runs. `tenant` defaults to
    $MOORAGE_TENANT, else that of the key, else `default`. `timeout` bounds each wait for an answer: 30 s by default,
    but 45 s for a submit or a cancel where the server is one of a cluster, as a takeover takes longer there, and a few
    seconds while the server refuses the key. `connect_timeout` bounds the first connection. `wait` is the default of
    the argument `wait` of `Job.result`, `run`, `wait`, `gather`, `as_completed` and `lease`: how long the caller waits.
    `on_wait` is called where an answer takes over 2 s, and before each retry of a request. `transport` replaces NATS,
    as `SimFleet` does in tests; it excludes `target`. `inbox_prefix` names the inbox that the user's permissions have,
    in place of that of the context; by default it is that of $MOORAGE_INBOX_PREFIX. Without any, where the server
    refuses `_INBOX`, the client takes `_INBOX.submitter.<tenant>`; for answers of services it does so wherever there is
    a login. A method that gets an unknown keyword raises TypeError.
    """

    def __init__(
        self,
        target: Context | str | None = None,
        *,
        tenant: str | None = None,
        prefix: str = PREFIX_DEFAULT,
        timeout: Duration | None = None,
        connect_timeout: Duration = CONNECT_TIMEOUT_S_DEFAULT,
        wait: Duration = WAIT_S_DEFAULT,
        name: str = "moorage client",
        on_wait: Callable[[], None] | None = None,
        transport: ClientTransport | None = None,
        inbox_prefix: str | None = None,
    ) -> None:
        self._wire = Connected(
            target,
            tenant=tenant,
            prefix=prefix,
            timeout=timeout,
            connect_timeout=connect_timeout,
            wait=wait,
            name=name,
            on_wait=on_wait,
            transport=transport,
            inbox_prefix=inbox_prefix,
        )
        self.tenant = self._wire.tenant
        self._requests = RequestBuilder()
        self._calls: Calls | None = None
        self._logs_warnings = True  # of submits; the command prints them itself

    if not TYPE_CHECKING:  # for a type checker it is an error

        def __getattr__(self, name: str) -> Any:
            from moorage.client.keywords import no_attribute

            raise no_attribute(self, name)

    def __repr__(self) -> str:
        return repr(self._wire).replace("Connected", type(self).__name__, 1)

    def _repr_html_(self) -> str:
        from moorage.client.notebook import table

        return table("moorage client", {"server": self._wire.where or "not connected", "tenant": self.tenant})

    def __reduce__(self) -> NoReturn:
        self._wire.__reduce__()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> Self:
        """Connect, and return this client.

        Raises `Unreachable`, `NotPermitted`, `BadContext`, and RuntimeError if it is open, or is closed meanwhile.
        """
        await self._wire.open()
        if self._wire.found is not None and self._logs_warnings:
            log.warning("using the moorage up of %s", self._wire.found.folder)
        return self

    async def close(self) -> None:
        """Close the connection; jobs go on. Calls that still wait for a job or for events raise RuntimeError or
        `ConnectionClosed`, and an `open` that still connects raises RuntimeError."""
        await self._wire.close()

    # ------------------------------------------------------------------------------------------------------- jobs

    async def submit(
        self, what: What, gpu: GpuSpec | str | int | None = None, job: str | None = None, **fields: Unpack[Fields]
    ) -> AsyncJob:
        """Submit a job: argv, a `Request`, or a mapping as on the wire. Return its handle once it is in the ledger.

        `gpu` is a token such as `2xH100:80G`, a count or a spec. `job` is the job's id: a second submit with the same
        id and the same content returns the same job. Without one the client makes an id that sorts by time, and
        retries of this call keep that id. `files` are files and folders for the job's folder; see `send_files`. For
        argv, and for a mapping without `events`, `events` defaults to `tenant`: the job's events go to the tenant's
        subject only, until a client follows the job. What no known worker could ever run is refused, unless
        `on_no_match` is `wait`. A `Request` keeps its own `events` and `on_no_match`. Raises `Rejected` (`Conflict`,
        `QueueFull`), `Overloaded`, `NoScheduler`, `Unreachable`, `NotPermitted`.
        """
        what = as_in_a_shell(what, fields)
        await self._bring(fields)
        if not _sets_no_match(what):
            fields.setdefault("on_no_match", "reject")  # as the command does: it is most likely a slip
        if not _sets_events(what):
            fields.setdefault("events", "tenant")  # else each state costs a message that perhaps no client receives
        return await self._submitted(*self._requests.prepared(what, gpu, job, fields))

    async def _submitted(self, id: str, request: Request, body: bytes) -> AsyncJob:
        history = self._wire._expect(id)
        accepted = await self._wire._ask("submit", body, decode_accepted)
        self._log_warnings(accepted)
        return _job_class()(self._wire, id, accepted, request, history)

    async def map(
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
    ) -> AsyncJob:
        """Submit one job that has a replica for each item: a text, a number, or a mapping of columns.

        Replica 7 has item 7, the first is 0: in its variables `MOORAGE_ITEM` and `MOORAGE_ITEM_<COLUMN>`, and in the
        command in place of `{item}` and `{column}`; `{{` stands for a brace. `indices="0-9"` runs some of the items,
        and `max_running=4` so many at a time. Items of more than 16 KiB in all are sent as a file of the job. Raises
        `Rejected` for an item that no replica can have and for a column that one has not, and what `submit` raises.

        In place of a command, `what` may be a function of one item, whose values `Job.answers` yields. `how` says how
        it travels: as a `module` that the host's `python` imports (a single file is sent along, packages by `files`),
        or pickled by `cloudpickle`; without `how`, lambdas and functions of a notebook are pickled. `python` is by
        default the path of this interpreter for what is pickled, and inside of a virtual environment; else `python3`.
        With `check`, the job `<job>-check` loads it once before the first item starts, and the job is cancelled if
        that fails. An item that fails stops no other one, unless `max_failed` says so.
        """
        from moorage.client.sweeps import argv_of, inline_bytes, sweep_of_values

        sweep = sweep_of_values(items, () if callable(what) else argv_of(what), inline_bytes(fields.get("driver")))
        named: dict[str, Any] = {**fields, **sweep.fields(fields.get("replicas"), fields.get("indices"))}
        if sweep.file is not None:
            named["items"] = sweep.file
        if callable(what):
            return await self._map_function(what, sweep, gpu, job, named, how=how, python=python, check=check)
        with sweep.to_send() as paths:
            if paths:
                named["files"] = _with_files(fields, paths)
            return await self.submit(what, gpu, job, **named)

    async def _map_function(
        self,
        function: Callable[[Any], Any],
        sweep: Sweep,
        gpu: GpuSpec | str | int | None,
        job: str | None,
        fields: dict[str, Any],
        *,
        how: Travel | None,
        python: str | None,
        check: bool,
    ) -> AsyncJob:
        from moorage.client.map_runner import VALUE
        from moorage.client.mapping import check_fields, check_of, listed, named, python_for, travel_of, travelling

        job, how = named(job, check=check), how or travel_of(function)
        python = python or python_for(how)
        keep, after = [VALUE, *listed(fields, "keep")], listed(fields, "after")
        with travelling(function, how, sweep) as (words, paths):
            fields["files"] = _with_files(fields, paths)
            await self._bring(cast("Fields", fields))
        if check:
            checks = await self.submit([python, *words, "check"], gpu, check_of(job), **check_fields(fields))
            fields["after"] = [checks.job, *after]
        fields["keep"] = keep
        fields.setdefault("max_failed", None)
        return await self.submit([python, *words], gpu, job, **fields)

    async def submit_handler(
        self,
        name: str,
        input: Any = None,
        gpu: GpuSpec | str | int | None = None,
        job: str | None = None,
        **fields: Unpack[Fields],
    ) -> AsyncJob:
        """Submit a call of the handler `name`, a function that a service offers (see `EmbeddedWorker`).

        `input` is any value that JSON can hold, so no NaN and no infinity; the function reads it as `context.input`.
        Put larger data into a store of your own. The job is placed on a worker that offers the handler. The function's
        return value is the `value` of `Job.result`; its exception is the `why` of `JobFailed`. Raises what `submit`
        raises.
        """
        from moorage.client.handlers import handler_request

        fields.setdefault("events", "tenant")
        request = handler_request(name, input, gpu, job, fields)
        assert request.job is not None
        return await self._submitted(request.job, request, encode(request))

    async def run(
        self,
        what: What,
        gpu: GpuSpec | str | int | None = None,
        job: str | None = None,
        wait: Duration | None = None,
        **fields: Unpack[Fields],
    ) -> Result:
        """Submit a job, wait until it ends, and return its result with `stdout` and `stderr`.

        Output that was lost on the way is read again from the worker, as long as the worker keeps it. `lost_bytes`
        is the number of bytes that are still missing. Only the last 16 MiB of each stream of each replica are kept, and
        of all runs of this client 192 MiB: beyond that, the beginning of the longest stream goes. `wait` is how long
        this call waits, by default the client's `wait`; the job goes on if that passes or this call is cancelled.
        `limit` is how long an attempt may run. For the first 5 seconds, and until the job ends if the request does not
        set `events`, the client may receive the events of all jobs of the tenant. Raises `JobFailed` unless the job
        SUCCEEDED (its `result` has the output, too), `TimedOut`, and what `submit` raises.
        """
        from moorage.client.follow.watch import run

        what = as_in_a_shell(what, fields)
        await self._bring(fields)
        if not _sets_no_match(what):
            fields.setdefault("on_no_match", "reject")  # as the command does: it is most likely a slip
        timeout_s = self._wire.wait_s if wait is None else seconds(wait)
        histories = self._wire._histories
        await histories.linger()
        if (histories.lingers or (histories.is_crowded and not histories.is_refused)) and not _sets_events(what):
            fields.setdefault("events", "tenant")
        id, request, body = self._requests.prepared(what, gpu, job, fields)

        async def submit() -> None:
            self._log_warnings(await self._wire._ask("submit", body, decode_accepted))

        return await run(histories, id, request, submit, timeout_s)

    async def submit_many(
        self, many: Iterable[What], gpu: GpuSpec | str | int | None = None, **fields: Unpack[Fields]
    ) -> list[AsyncJob]:
        """Submit many requests in one frame (several beyond 10,000 requests or 900 KiB). Return jobs in request order.

        Each request is accepted or refused on its own, malformed ones included. One that names another one in `after`
        may stand before it. Raises `BatchRejected` if any request is refused: it has the accepted jobs and names the
        refused requests. Raises `Rejected`, and sends none, if jobs wait for each other in a circle. Raises `Rejected`
        if `gpu` or a field given here for all is invalid, and what `submit` raises. In that last case some requests may
        have been accepted; if each names its `job`, all can be sent again and no job is submitted twice.
        """
        await self._bring(fields)
        rejecting: Fields = {"on_no_match": "reject", **fields}
        built: list[tuple[Request, bytes] | Problem] = []
        for at, what in enumerate(many):
            try:
                built.append(self._requests.encoded(what, gpu, None, fields if _sets_no_match(what) else rejecting))
            except Rejected as error:
                said_for_all = {*fields, *(["gpu"] if gpu is not None else [])}
                if said_for_all.intersection(error.problem.field.split(".")):
                    raise
                built.append(of_batch(error.problem, at))
        sent = [(request, body) for one in built if not isinstance(one, Problem) for request, body in (one,)]
        order, circle = in_order([request for request, _ in sent])
        if circle:
            raise rejected(
                "invalid-argument", f"jobs wait for each other: {' after '.join(circle)}", field="$.after",
                found=circle[0], next="leave one of them out of after (--after)",
            )  # fmt: skip
        histories = [self._wire._expect(request.job) for request, _ in sent]
        is_chain = any(request.after for request, _ in sent)
        answers = await self._answers_to([sent[at][1] for at in order], one_by_one=is_chain)
        told = dict(zip(order, answers, strict=True))
        answered = zip(sent, (told[at] for at in range(len(sent))), histories, strict=True)
        jobs: list[AsyncJob | None] = []
        problems: dict[int, Problem] = {}
        for at, one in enumerate(built):
            if isinstance(one, Problem):
                answer: Accepted | Problem = one
            else:
                (request, _), answer, history = next(answered)
            if isinstance(answer, Problem):
                problems[at] = answer
                jobs.append(None)
            else:
                self._log_warnings(answer)
                jobs.append(_job_class()(self._wire, answer.job, answer, request, history))
        if problems:
            raise BatchRejected(jobs, problems)
        return [job for job in jobs if job is not None]

    async def _bring(self, fields: Fields) -> None:
        """Send the files and folders among these fields, in place of which their addresses stand then."""
        if data := fields.get("data"):
            after = ids_after(fields)
            fields["data"] = {name: await self._sent_data(source, after) for name, source in data.items()}
        if "files" not in fields or (isinstance(fields["files"], str) and is_files(fields["files"])):
            return
        from moorage.client.files_of import divided, files_of

        paths, jobs = divided(fields.pop("files"))
        if jobs:
            fields["files_of"] = await files_of(self._wire, jobs)
        if paths:
            fields["files"] = await self.send_files(paths)

    async def _sent_data(self, source: str | os.PathLike[str], after: Sequence[str]) -> str:
        """Return a source as a request has it: of a path here, as `./data` or a `Path`, the address once it is sent."""
        from moorage.client.sources import is_here, is_kept

        if is_kept(source):
            from moorage.client.files_of import source_of

            return await source_of(self._wire, str(source), after)
        if isinstance(source, str) and not is_here(source):
            return source
        return f"object:{await self.send_files([os.path.expanduser(source)])}"

    async def send_files(self, files: Paths) -> str:
        """Send files and folders into the tenant's bucket. Return their address, which a request can have as `files`.

        A folder stands for its content, without `.git`, `__pycache__`, `.venv`, `.moorage` and the paths that its
        `.moorageignore` lists (the syntax is that of `.gitignore`). All are packed into one archive; nothing is sent if
        the bucket has it already and it does not expire soon. If `files` is an address, it is returned unchanged.

        Raises `Rejected` for files that cannot be packed, and what `submit` raises.
        """
        if isinstance(files, str) and is_files(files):
            return files
        from moorage.client.sending import send

        sent = await send(self._wire, files)
        for warning in sent.warnings:
            log.warning("%s", warning)
        return sent.address

    def _log_warnings(self, accepted: Accepted) -> None:
        for warning in accepted.warnings if self._logs_warnings else ():
            log.warning("job %s: %s", accepted.job, warning)

    async def _answers_to(self, bodies: list[bytes], *, one_by_one: bool) -> list[Accepted | Problem]:
        """Send these requests in as few frames as the bounds allow, and return the answers in the order of requests.

        The frames go `one_by_one` if a request may name a job of an earlier frame.
        """
        answers: list[Accepted | Problem] = []
        frames, at_once = frames_of(bodies), 1 if one_by_one else FRAMES_AT_ONCE
        for at in range(0, len(frames), at_once):
            asked = (self._wire._ask("submit", frame, decode_batch) for frame in frames[at : at + at_once])
            for part in await asyncio.gather(*asked):
                answers += part
        return answers

    def request(
        self,
        what: What,
        gpu: GpuSpec | str | int | None = None,
        job: str | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> Request:
        """Return a checked request with its job id; nothing is sent. Raises `Rejected`.

        Unlike `submit`, it sends no files: `files` must be an address. `events` keeps the request's default, `job`.
        """
        return RequestBuilder().build(what, gpu, job, fields)  # a new builder: `Client` calls this in any thread

    def job(self, job: str) -> AsyncJob:
        """Return a handle on the job with this id; the scheduler is not asked. Raises `Rejected` for an invalid id."""
        if not is_job(job):
            raise rejected(
                "invalid-argument",
                f"{job[:80]!r} is not a valid job id",
                field="$.job",
                found=job,
                allowed=JOB.pattern,
                next="moorage ls",
            )
        return _job_class()(self._wire, job)

    def watch(
        self,
        job: str,
        *,
        output: bool = False,
        past: bool = False,
        tail: int | None = None,
        replica: Which = None,
        notes: bool = False,
    ) -> AsyncWatch:
        """Return a `Watch` of a job's events, and with `output` of its new output. The job may be submitted later.

        With `past` the output starts at its beginning, or at the last `tail` lines of the stored output; `tail` without
        `past` raises TypeError. `replica` selects the output of one replica. If the watch has output, `notes` adds
        pieces without text: what the worker does before the start (`note`), and the addresses of a container's ports
        (`ports`). Notes may be lost. Raises `Rejected` for an invalid id.
        """
        from moorage.client.follow.watch import AsyncWatch

        histories = self._wire._histories
        return AsyncWatch(
            histories, self.job(job).job, output=output, past=past, tail=tail, replica=replica, notes=notes
        )

    async def as_completed(self, jobs: Iterable[AsyncJob], wait: Duration | None = None) -> AsyncIterator[AsyncJob]:
        """Yield each of these jobs of this tenant once, when it ends; `job.result()` then does not wait for the job.

        One subscription serves all jobs. `wait` bounds the whole iteration and defaults to the client's. Raises
        `TimedOut` (the remaining jobs go on), `NotFound`, `NoScheduler`, `NotPermitted`, and `Rejected` for a job of
        another tenant.
        """
        from moorage.client.follow.gathering import Gathering
        from moorage.client.job import handles

        timeout_s = self._wire.wait_s if wait is None else seconds(wait)
        async with Gathering(self._wire._histories, self._own(handles(jobs, _job_class()))) as gathering:
            async for job in gathering.over(timeout_s):
                yield job

    def _own(self, jobs: Iterable[AsyncJob]) -> Iterator[AsyncJob]:
        """Yield these jobs. Raises `Rejected` for a job of another tenant: there the same id names another job."""
        for job in jobs:
            if job.tenant != self.tenant:
                raise rejected(
                    "invalid-argument",
                    f"job {job.job} belongs to tenant {job.tenant}, and this client to tenant {self.tenant}",
                    found=job.tenant,
                    allowed=self.tenant,
                    next="wait for the jobs of each tenant with a client of that tenant",
                )
            yield job

    async def gather(self, *jobs: AsyncJob, wait: Duration | None = None) -> list[Result]:
        """Wait until all of these jobs of this tenant have succeeded. Return their results in the order given.

        Raises `JobFailed` without the job's output as soon as one job did not succeed (the others go on; `wait` returns
        failures as results), and what `as_completed` and `Job.result` raise.
        """
        results: dict[str, Result] = {}
        async for job in self.as_completed(jobs, wait):
            results[job.job] = await job.result()
        return [results[job.job] for job in jobs]

    async def wait(self, jobs: Iterable[AsyncJob], wait: Duration | None = None) -> list[Result]:
        """Wait until all of these jobs of this tenant have ended. Return all results in the order given.

        A failed job has a result too. The results lack the return values of handlers; `Job.result` reads these.
        `wait` defaults to the client's. Raises what `as_completed` raises.
        """
        from moorage.client.job import handles

        wanted = list(handles(jobs, _job_class()))
        results: dict[str, Result] = {}
        async for job in self.as_completed(wanted, wait):
            assert job.known_result is not None
            results[job.job] = job.known_result
        return [results[job.job] for job in wanted]

    async def events(self) -> AsyncIterator[Event]:
        """Yield every transition of the tenant's jobs from now on, without end.

        Events may be lost while the connection is down, or if more than 256 MiB wait for the readers of this
        client. A gap shows in the job's `rev`; `show` has the whole history. Raises `NotPermitted`.
        """
        from moorage.client.follow.follower import decode_events

        subject = self._wire.subjects.events(self.tenant)
        async with contextlib.aclosing(self._wire._histories.frames(subject, decode_events, None)) as frames:
            async for frame in frames:
                for event in frame.jobs:
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
    ) -> Plan:
        """Return what would happen to a request; nothing is submitted.

        `starts` of the plan is `now`, `later`, `unknown`, `never` or `refused`; the word `none` without
        `what`, or if that is a job already, as one of its warnings then says. It is also `now` if only some replicas
        would start now: `replicas_now` of `replicas`. The plan can assume changes: the workers in `drain` are drained,
        the hosts of `add` (such as `2x8xA100`) exist, tenants are limited to `quota` GPUs (a number for this tenant, or
        numbers by tenant), and tenants have a `share` (a weight, or a weight and guaranteed GPUs). Without `what`, the
        answer says what these changes alone would do. To have a submit accepted only while the plan holds, give it
        its `ledger` as `if_seq`. Raises what `submit` raises.
        """
        from moorage.client.answers import PlanInfo
        from moorage.client.keywords import Misused
        from moorage.client.planning import plan_arguments

        if what is None and (gpu is not None or fields):
            beside = ", ".join([*(["gpu"] if gpu is not None else []), *fields])
            raise Misused(f"{beside} without a request: pass the command or request as the first argument")
        request = None if what is None else self._requests.encoded(what, gpu, None, fields)[1]
        arguments = plan_arguments(request, drain, add, quota, share)
        if self._wire.operator != NO_OPERATOR:  # its key has the verb of operators alone
            answer = await self._wire.operate("plan", {"tenant": self.tenant, **arguments})
            return read_answer(answer.data, PlanInfo)
        return read_answer(await self._wire.read("plan", arguments), PlanInfo)

    async def first_possible(self, requests: Sequence[What]) -> Request:
        """Return the first of these requests that some worker could run, now or later, checked and with its job id.

        So a wish can be preferred: `await moorage.submit(await moorage.first_possible([wish, instead]))`. Each request
        is planned once, as `plan` does, until a plan is not `never`; nothing is submitted, and workers that join later
        change no choice. If every plan is `never`, it returns the first request whose driver a worker offers to the
        tenant, else the first one. Raises what `submit` raises, and `Rejected` for an empty list.
        """
        from moorage.client.planning import first_possible

        if not requests:
            raise rejected("invalid-argument", "no request to choose from", next="name one request or more")
        return await first_possible(self.plan, [self.request(what) for what in requests])

    async def ls(
        self,
        *jobs: str,
        states: Sequence[str] = (),
        limit: int = 100,
        labels: Mapping[str, str] | None = None,
        ids: str = "",
        reason: str = "",
        worker: str = "",
    ) -> JobList:
        """Return the tenant's jobs, newest first (`jobs`), and `counts` by state. `limit` is 1..1000.

        Only jobs in the scheduler's memory are listed and counted. `states` selects `jobs`; empty means all states.
        `counts` has all states. What else is given leaves out all other jobs: `jobs`, each an id or a pattern such as
        `train-*-r1`, as is `ids`; `labels` that a job must have (the value `*` is any); the `reason` for which it
        waits; the `worker` that has it. Raises `Rejected`.
        """
        from moorage.client.answers import JobList
        from moorage.client.reading import as_struct

        if wrong := next((each for each in jobs if not isinstance(each, str)), None):
            raise rejected(
                "invalid-argument",
                "ls takes ids of jobs, and states by name",
                found=wrong,
                next='write ls("train-*", states=["RUNNING"])',
            )
        ids = ",".join(filter(None, (*jobs, ids)))
        asked = {"states": [states] if isinstance(states, str) else list(states), "limit": limit, "history": False}
        more = {"labels": dict(labels or {}), "ids": ids, "reason": reason, "worker": worker}
        return as_struct(
            JobList, await self._wire.read("ls", asked | {name: each for name, each in more.items() if each})
        )

    async def table(self, job: str, path: str = "") -> list[dict[str, Any]]:
        """Return a row for each replica of a job, for `pandas.DataFrame` or a file: its item, state, exit code, number
        of attempts, end, and what it reported last or kept as JSON.

        The values are those of the file `path` of its kept files, as `out/loss.json`, or without it of all that end in
        `.json`: an object's keys are columns. Of a replica that did not succeed and was run again, the row is that of
        the rerun. What could not be read is logged. Raises `NotFound`, and `Rejected` for a path that leaves the job's
        folder.
        """
        from moorage.client.tabled import said, table

        rows, notes = await table(self._wire, self.job(job).job, path)
        for note in said(notes):
            log.warning("job %s: %s", job, note)
        return rows

    async def reports(self, job: str) -> list[dict[str, Any]]:
        """Return what a job has reported of itself by `moorage.job.report`, for `pandas.DataFrame`: a row for each
        report, with the number of its replica.

        Of each replica these are the newest attempt's last rows, at most 500 of the last 64 KiB that it wrote, while it
        runs and for as long as kept files stay. Raises `NotFound`.
        """
        from moorage.client.tabled import reports

        return await reports(self._wire, self.job(job).job)

    def lease(
        self,
        gpu: GpuSpec | str | int = 1,
        *,
        purpose: str = "",
        wait: Duration | None = None,
        socket: Path | str | None = None,
        on_asked_back: OnAskedBack | None = None,
    ) -> Lending:
        """Borrow GPUs of this host for code that runs here.

        For a block: `async with moorage.lease("1xL40S") as lease: …`. Without a block, as in a notebook:
        `lease = await moorage.lease("1xL40S")`, and later `await lease.give_back()`.
        The request goes to the host's worker over its UNIX socket, so this client need not be open. The path is
        `socket`, else $MOORAGE_LEASE_SOCKET, else that of the `moorage up` of this folder, else the system's. The call
        waits for the GPUs in one queue with the jobs that the scheduler places on this host, for at most `wait`
        (default: the client's). The lease ends with the block, when it is given back, or with this process. The worker
        may ask for the GPUs: see `lease.asked_back`; `on_asked_back` is called in the event loop. On entering, this
        raises `NoAgent`, `NotPermitted`, `Rejected` (no-match: this host has no such GPU), `TimedOut`.
        """
        from moorage.client.lease import Lending

        if self._wire._transport is not None:
            raise rejected(
                "failed-precondition",
                "a simulated fleet lends no GPUs to this process: it has no lease socket",
                next="for a test, start `moorage worker --simulate 1xL40S` and name its socket",
            )
        timeout_s = self._wire.wait_s if wait is None else seconds(wait)
        return Lending(gpu, purpose, timeout_s, socket, on_asked_back)

    # ------------------------------------------------------------------------------------------------- services

    @overload
    async def call(
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
    async def call(
        self,
        service: str,
        data: Any = None,
        *,
        returns: Any = None,
        priority: int | None = None,
        headers: Mapping[str, str] | None = None,
        **how: Unpack[CallOptions],
    ) -> Any: ...

    async def call(
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
        called = self.service(service, priority=priority, headers=headers)
        return await called.call(data, returns=returns, **how)

    def service(
        self,
        name: str,
        *,
        priority: int | None = None,
        headers: Mapping[str, str] | None = None,
        affinity: str | None = None,
    ) -> AsyncService:
        """Return a handle on a service of the tenant, to call it; asks nothing. Raises `Rejected`.

        `priority`, 0..100, is that of its calls while they wait for a place; 50 without it. `headers` go with each
        call. Calls with one `affinity`, 1 to 512 characters, go to one member while it has a free place.
        """
        from moorage.client.services import AsyncService, Calls

        if self._calls is None:
            self._calls = Calls(self._wire)
        return AsyncService(self._wire, self._calls, name, priority, headers, self.submit, affinity)

    async def services(self) -> list[ServiceRow]:
        """Return the tenant's live services by name, as `moorage services` shows them: the job, versions, members, and
        the calls of about the last minute. Raises what `ls` raises."""
        from moorage.schemas.answers.jobs import ServicesAnswer

        return read_answer(await self._wire.read("services", {}), ServicesAnswer).services

    # ------------------------------------------------------------------------------------------------- schedules

    @property
    def schedules(self) -> AsyncSchedules:
        """The tenant's schedules: requests that are submitted again and again; see `Schedules`."""
        from moorage.client.schedules import AsyncSchedules

        return AsyncSchedules(self._wire)

    # ------------------------------------------------------------------------------------------------- operators

    @property
    def fleet(self) -> AsyncFleet:
        """The workers: what they have, whether the ledger is right about them, drain and cordon; see `Fleet`."""
        from moorage.client.fleet import AsyncFleet

        return AsyncFleet(self._wire)

    @property
    def admin(self) -> AsyncAdmin:
        """The orders of an operator: hold, release, requeue, freeze, priority, limit, share and so on; see `Admin`."""
        from moorage.client.admin import AsyncAdmin

        return AsyncAdmin(self._wire)
