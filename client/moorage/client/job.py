"""A handle on one job, which needs only the job's id: follow the job, wait for it, ask about it, cancel it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack

import msgspec

from moorage.client.durations import Duration, age, seconds
from moorage.client.errors import FailedReplica, ItemFailed, JobFailed, NotFound
from moorage.client.fields import Fields
from moorage.client.follow.job_history import LISTED_MAX, Result
from moorage.client.follow.watch import AsyncWatch
from moorage.client.output import Joiner, Piece, Tail, read_page
from moorage.client.replicas import Which, field_of, replicas_of
from moorage.client.steps import Step, step_of
from moorage.schemas.errors import MoorageError
from moorage.schemas.frames import LOG_OFFSET_MAX, USE_KEPT_S, Accepted, Event
from moorage.schemas.job import ACCEPTED, CANCELLED, EXPIRED, FAILED, REJECTED, SUCCEEDED, TIMED_OUT
from moorage.schemas.names import is_job
from moorage.schemas.ranges import NOTHING, count_of

if TYPE_CHECKING:
    from moorage.client.answers import Cancelled, Explanation, JobInfo, JobRow
    from moorage.client.command import Executed
    from moorage.client.connected import Connected
    from moorage.client.follow.job_history import JobHistory
    from moorage.client.forward import AsyncForward
    from moorage.client.handlers import Heard, OnProgress
    from moorage.client.mapping import Errors
    from moorage.schemas.frames import UsePage
    from moorage.schemas.gpu import GpuSpec
    from moorage.schemas.job import Request
    from moorage.schemas.operate import Changed, SignalSent

log = logging.getLogger("moorage.client")

#: failed replicas that a `JobFailed` has
FAILED_MAX: Final = 20
#: how long it waits for what is known of them, and the most bytes of the job's files among which it looks for the items
FAILED_S_MAX: Final = 10.0
ITEMS_STORED_MAX: Final = 16 << 20
#: how long an interrupted wait for answers waits for its cancel, in seconds
CANCEL_S_MAX: Final = 5.0

H = TypeVar("H")


class AsyncJob:
    """A handle on one job, from `AsyncClient.submit` or, by the id alone, from `AsyncClient.job`.

    `accepted` is the scheduler's answer if this handle came from a submit, else None. `state`, `gpu` (the token of the
    request) and `worker` are as this handle last saw them, "" if it has not seen them.
    """

    __slots__ = (
        "_began_s",
        "_client",
        "_gpu",
        "_history",
        "_request",
        "_result",
        "_valued",
        "accepted",
        "job",
        "state",
        "worker",
    )  # fmt: skip

    if not TYPE_CHECKING:  # for a type checker it is an error

        def __getattr__(self, name: str) -> Any:
            from moorage.client.keywords import no_attribute

            raise no_attribute(self, name)

    def __init__(
        self,
        client: Connected,
        job: str,
        accepted: Accepted | None = None,
        request: Request | None = None,
        history: JobHistory | None = None,
    ) -> None:
        is_new = accepted is not None and not accepted.duplicate
        self.job = job
        self.accepted = accepted
        self.state = accepted.state if accepted is not None else ""
        self.worker = ""
        self._gpu = ""
        self._began_s = time.monotonic() if is_new else None
        self._result: Result | None = None
        self._request = request
        self._history = history if is_new else None
        self._valued = False
        self._client = client

    def __repr__(self) -> str:
        words = [self.job, "of", self._client.tenant, self.state or "not asked yet", self.gpu]
        if self.worker:
            words.append(f"on {self.worker}")
        if self._began_s is not None:
            words.append(f"accepted {age((time.monotonic() - self._began_s) * 1000)} ago")
        return f"<{type(self).__name__} {' '.join(filter(None, words))}>"

    def _repr_html_(self) -> str:
        from moorage.client.notebook import table

        ago = "" if self._began_s is None else f"{age((time.monotonic() - self._began_s) * 1000)} ago"
        return table(f"Job {self.job}", {**self._known(), "state": self.state or "not asked yet", "accepted": ago})

    def _known(self) -> dict[str, str]:
        return {"tenant": self.tenant, "GPUs": self.gpu, "worker": self.worker}

    def _ipython_display_(self) -> None:
        self._display(repr(self), self._client.begin)

    def _display(self, plain: str, begin: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        from moorage.client.notebook import show

        show(self._repr_html_(), plain, self.events, self._picture, begin)

    async def _picture(self) -> str:
        from moorage.client.notebook import picture

        return picture(self.job, self._known(), await self.explain())

    @property
    def known_result(self) -> Result | None:
        """How the job ended, if `result` or a wait for several jobs found that by this handle; else None."""
        return self._result

    @property
    def tenant(self) -> str:
        """The job's tenant, which is the tenant of the client that made this handle."""
        return self._client.tenant

    @property
    def gpu(self) -> str:
        """The token of the GPUs that the job asks for, as `2xH100`; `-` for none, "" if this handle has not seen it."""
        if not self._gpu and self._request is not None:
            self._gpu = self._request.token
        return self._gpu

    async def events(self, wait: Duration | None = None) -> AsyncIterator[Event]:
        """Yield the job's transitions from acceptance on, each once and in order. The iteration ends with the job.

        The first event has all transitions so far. This also works for a job that has ended, while its history is kept
        (a week by default). Of a job with more than 1,024 replicas there are only failures, cancels and acts, and the
        first event has the newest of them; `show` names all replicas that failed. Events without a transition say why
        the job waits, if this client follows fewer than 16 jobs. `wait` bounds the whole iteration. Raises `NotFound`,
        `NoScheduler`, `NotPermitted`, `TimedOut`.
        """
        async with AsyncWatch(self._client._histories, self.job, ahead=True, saw=self._saw) as watch:
            async for item in watch.follow(None if wait is None else seconds(wait)):
                if isinstance(item, Event):
                    yield item

    async def steps(self, wait: Duration | None = None) -> AsyncIterator[Step]:
        """Yield the transitions of `events` one by one, as objects for `match step: case Placed(worker=w): …`.

        `wait` and errors are those of `events`.
        """
        async for event in self.events(wait):
            for change in event.changes:
                yield step_of(change)

    async def logs(
        self,
        wait: Duration | None = None,
        *,
        follow: bool = True,
        tail: int | None = None,
        replica: Which = None,
        attempt: int | None = None,
    ) -> AsyncIterator[Piece]:
        """Yield the job's output until the job ends: first the stored output, then the new output.

        The stored output is that of each replica's newest attempt, from its beginning or, with `tail`, only the last
        `tail` lines of each stream. New output joins it without gaps or duplicates. With `follow=False` or with an
        `attempt`, only stored output is yielded, and `wait` has no effect. `replica` selects one replica, or several
        as in `0-9,205`. Of a job of more than 1,024 replicas without it, the stored output is that of those on workers,
        and of 100 that have ended: those that failed, then the first ones. Raises `NoOutput` or `Overloaded` if no
        output can be read at all; if only a part is missing, it raises nothing. Raises what `events` raises.
        """
        given = 0
        if follow and attempt is None:
            histories = self._client._histories
            async with AsyncWatch(
                histories, self.job, past=True, tail=tail, replica=replica, ahead=True, saw=self._saw
            ) as watch:
                async for item in watch.follow(None if wait is None else seconds(wait)):
                    if isinstance(item, Piece):
                        given += 1
                        yield item
            joiner = watch.joiner
        else:
            joiner = Joiner(self._client.read, self.job, tail)
            only = replicas_of(replica)
            newest = await joiner.newest(await self.show(), only)
            async for piece in joiner.kept_of(newest, only, attempt):
                given += 1
                yield piece
        if joiner is not None and joiner.trouble is not None and not given:
            raise joiner.trouble

    async def ports(self, replica: int = 0) -> dict[int, str]:
        """Return the addresses of a running container of the job: `address:port` on the host, by the container's port.

        Return {} if the container publishes no port or does not run. The ports come with the attempt's output. Raises
        `NoOutput` if its worker does not answer or no longer keeps that output; `NotFound`, `NoScheduler`,
        `Overloaded`.
        """
        page = await read_page(self._client.read, self.job, replica, None, "out", LOG_OFFSET_MAX, 1)
        return {int(own): where for own, where in page.ports.items()}

    async def again(
        self,
        failed: bool = False,
        *,
        replica: Which = None,
        gpu: GpuSpec | str | int | None = None,
        job: str | None = None,
        **fields: Unpack[Fields],
    ) -> AsyncJob:
        """Submit the job's request once more, as a new job, and return its handle; with `failed` only the replicas that
        have not succeeded.

        They keep their numbers (`indices`); `replica` selects some of them. The job has the same request and files, but
        for what `gpu` and `fields` change: they are those of `submit`, and of `env`, `labels`, `requires` and
        `resources` the entries that are not named stay. Its id is `job`, else `<this job>-again-<n>`; it is not run
        after other jobs, as this one may have been. Two equal calls at the same time make one job. Raises `Rejected`:
        `request-gone` if the request or its files are kept no longer, `failed-precondition` if nothing has failed; and
        what `submit` raises.
        """
        from moorage.client.again import run_again

        name = self.job
        accepted, request = await run_again(self._client, name, gpu, job, fields, failed=failed, replica=replica)
        for warning in accepted.warnings:
            log.warning("job %s: %s", accepted.job, warning)
        return AsyncJob(self._client, accepted.job, accepted, request)

    async def result(self, wait: Duration | None = None, on_progress: OnProgress | None = None) -> Result:
        """Wait until the job ends, and return its result. `wait` defaults to the client's.

        If the job called a handler, the result has the `value` that the function returned, of several replicas a list.
        A large value, or one that this client did not receive, is read from the tenant's bucket. Of more than 1,024
        replicas it has none: `values` reads them. `on_progress` is called with each `Progress` that
        is received meanwhile. Raises `JobFailed` unless the job SUCCEEDED, `TimedOut` (the job goes on), `NotFound`,
        `NoScheduler`, `NoOutput` (the value is no longer kept), `NotPermitted`.
        """
        timeout_s = self._client.wait_s if wait is None else seconds(wait)
        if self._result is None:
            return await self._followed_to_its_end(timeout_s, on_progress)
        if self._result.state != SUCCEEDED:
            raise JobFailed(self._result, request=self._request)
        if not self._valued:
            await self._add_value(None if self._request is not None else await self.show(), None)
        return self._result

    async def _followed_to_its_end(self, timeout_s: float, on_progress: OnProgress | None) -> Result:
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + timeout_s
        histories, request, tail = self._client._histories, self._request, Tail()
        heard, self._history = self._history, None
        driver = "" if request is None else request.workload.driver
        can = histories.drivers.can(driver)  # output that its worker keeps is asked for only of jobs that failed
        output = not can.keeps_output
        if can.returns_value:  # its result is sent to all that wait for some, with the end of what a failed one wrote
            output = on_progress is not None or heard is None or not histories.has_results
        if request is not None:  # the caller is likely to await the result of the next job of its own as well
            await histories.linger(results=can.returns_value)
        progress: Heard | None = None
        async with AsyncWatch(
            histories, self.job, output=output, heard=heard, driver=driver, ahead=True, at_end=not output, saw=self._saw
        ) as watch:
            if not output:
                await watch._until_over(timeout_s)
            else:
                async for item in watch.follow(timeout_s):
                    if isinstance(item, Piece):
                        tail.take(item)
                        if histories.drivers.can(watch.driver).returns_value:
                            progress = progress or _heard_by(on_progress)
                            progress.take(item)
                    elif item.state == SUCCEEDED:
                        break  # only a failure carries the end of the output
        self._result = watch.result()
        if self._result.state != SUCCEEDED:
            if can.returns_value and not output:
                tail.take_of(histories.results, self._result)
            asked = request or (watch.info.asked if watch.info is not None else None)
            last_lines = await tail.or_kept(self._client.read, self._result)
            raise JobFailed(self._result, last_lines, asked, await self._failed(ends_s - loop.time()))
        await self._add_value(watch.info, progress)
        return self._result

    async def _failed(self, left_s: float) -> list[FailedReplica]:
        """Return the first of several replicas that failed; [] if that cannot be asked now, or not in this time."""
        from moorage.client.failures import failed_replicas

        assert self._result is not None
        if not any(change.replica > 0 for change in self._result.changes) and self._result.changes:
            return []
        with contextlib.suppress(MoorageError, OSError, TimeoutError):
            async with asyncio.timeout(min(left_s, FAILED_S_MAX)):
                return await failed_replicas(self._client, await self.show(), FAILED_MAX, ITEMS_STORED_MAX)
        return []

    async def _add_value(self, shown: JobInfo | None, heard: Heard | None) -> None:
        """Set the result's value, if the driver returns one. `shown` is the answer of `show`, read if the request is
        not known."""
        assert self._result is not None
        request = self._request
        driver = request.workload.driver if request is not None else shown.driver if shown is not None else ""
        if driver and driver not in self._client._histories.drivers:
            with contextlib.suppress(NotFound):
                await self.show()
        if self._client._histories.drivers.can(driver).returns_value:
            from moorage.client.handlers import value_of

            numbers = request.numbers if request is not None else shown.numbers if shown is not None else NOTHING
            if count_of(numbers) > LISTED_MAX:  # each end is a question, and each value a message: see `values`
                self._valued = True
                return
            value = await value_of(self._client, self.job, self._result.changes, heard or _heard_by(None), numbers)
            self._result = msgspec.structs.replace(self._result, value=value)
        self._valued = True

    async def values(self, *, replica: Which = None) -> AsyncIterator[tuple[int, Any]]:
        """Yield the number of each replica of a handler's job that SUCCEEDED, and the value that its function returned.

        This reads them piece by piece, also while the job runs and however many there are; `replica` selects some, as
        in `0-9,205`. Raises `NoOutput` for a value that is no longer kept, `NotFound`, `Overloaded` and `NotPermitted`.
        """
        from moorage.client.handlers import values_of

        only = replicas_of(replica)
        numbers = (await self.show()).numbers if only is None else only
        async for number, value in values_of(self._client, self.job, numbers):
            yield number, value

    async def answers(
        self, wait: Duration | None = None, *, errors: Errors = "raise", on_progress: OnProgress | None = None
    ) -> AsyncIterator[Any]:
        """Yield what the function of a job of `AsyncClient.map`, or the service of one of `AsyncService.submit_many`,
        returned, in the order of the items, until all ended.

        A failed item raises `ItemFailed` in its turn, or with `errors="return"` that stands in its place. Answers that
        came early are held. `on_progress` is called for each item that has ended. `wait` bounds the whole iteration.
        Any process may do this, by the job's id, while kept files are stored. If the process that submitted the job is
        interrupted while it waits here, it cancels the job. Raises `JobFailed` if the function could not be loaded,
        `Rejected` for a job without a function, and what `events` raises.
        """
        from moorage.client.mapping import in_order, items_of

        numbers = items_of(await self.show())
        pairs = self._outcomes(wait, on_progress)
        async with contextlib.aclosing(pairs), contextlib.aclosing(in_order(pairs, numbers)) as answers:
            async for answer in answers:
                if errors == "raise" and isinstance(answer, ItemFailed):
                    raise answer
                yield answer

    async def answers_as_completed(
        self, wait: Duration | None = None, *, errors: Errors = "raise", on_progress: OnProgress | None = None
    ) -> AsyncIterator[tuple[int, Any]]:
        """Yield the number of each item and its answer, as `answers` does, but as they come."""
        async with contextlib.aclosing(self._outcomes(wait, on_progress)) as pairs:
            async for number, answer in pairs:
                if errors == "raise" and isinstance(answer, ItemFailed):
                    raise answer
                yield number, answer

    async def _outcomes(
        self, wait: Duration | None, on_progress: OnProgress | None
    ) -> AsyncGenerator[tuple[int, Any], None]:
        from moorage.client.mapping import outcomes

        was_looked_at = False
        try:
            found = outcomes(self._client, self.job, lambda: self.events(wait), on_progress)
            async with contextlib.aclosing(found) as pairs:
                async for number, answer in pairs:
                    if not was_looked_at and isinstance(answer, ItemFailed) and answer.state == CANCELLED:
                        was_looked_at = True
                        await self._raise_of_check()
                    yield number, answer
        except asyncio.CancelledError:
            if self.accepted is not None and not self.accepted.duplicate:
                await self._cancel_with_check()
            raise

    async def _raise_of_check(self) -> None:
        """Raise `JobFailed` if the job's function could not be loaded."""
        from moorage.client.mapping import check_of, waits_for

        check = check_of(self.job)
        if not waits_for((await self.show()).asked, check):
            return
        with contextlib.suppress(NotFound):
            job = AsyncJob(self._client, check)
            if (await job.show()).state in (FAILED, TIMED_OUT, EXPIRED, REJECTED):
                await job.result()

    async def _cancel_with_check(self) -> None:
        from moorage.client.mapping import check_of

        jobs = [job for job in (self.job, check_of(self.job)) if is_job(job)]
        if all(await asyncio.gather(*map(self._was_cancelled, jobs))):
            log.warning(
                "job %s is cancelled, as the wait for its answers was interrupted; what it has: job(%r).answers(errors="
                "'return'), what is left: job(%r).again(failed=True)", self.job, self.job, self.job,
            )  # fmt: skip
        else:
            log.warning(
                "the wait for the answers of job %s was interrupted, and no scheduler confirmed that it is cancelled; "
                "it may go on: moorage cancel %s", self.job, ",".join(jobs),
            )  # fmt: skip

    async def _was_cancelled(self, job: str) -> bool:
        """Cancel a job whose answers nobody waits for any more; return whether that is confirmed soon."""
        try:
            async with asyncio.timeout(CANCEL_S_MAX):
                await AsyncJob(self._client, job).cancel("the wait for its answers was interrupted")
        except NotFound:  # it has no check, or ended long ago
            return True
        except (MoorageError, RuntimeError, TimeoutError):  # whatever it is, the interruption goes on
            return False
        return True

    async def cancel(self, reason: str = "", by: str = "", *, replica: Which = None, before: bool = False) -> Cancelled:
        """Cancel the job, at any stage. Return whether it is cancelled, once this is in the ledger.

        `replica` selects one replica, or several as in `0-9,205`. Raises `Rejected` for some replicas of a gang, and
        `NotFound` for an id that is not known, unless `before` says that its submit may be on its way: that is then
        refused. The job's transitions record `reason`, and `by` as the name that the caller gave (`Change.said`).
        """
        from moorage.client.answers import Cancelled

        asked: dict[str, Any] = {"job": self.job, "reason": reason, "by": by, **field_of(replica)}
        if before:
            asked["before"] = True
        return msgspec.convert(await self._client.read("cancel", asked), Cancelled)

    async def uncancel(self) -> bool:
        """Forget a cancel with `before` of this id, whose submit has not come: it is accepted again. Return whether one
        was remembered."""
        from moorage.schemas.answers.jobs import Uncancelled

        return msgspec.convert(await self._client.read("uncancel", {"job": self.job}), Uncancelled).lifted

    async def change(
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
        """Change the job in place, while it waits or runs; None leaves a value as it is. Return its bounds as they are.

        More `replicas` begin as others do; of too many, those that wait are cancelled first. Those of a service may be
        `{"min": 2, "max": 6}`. With `hold`, what waits of it is on hold until a change says False. A new `limit` of
        time holds for attempts that start from now on; with `running` for those that run, too, from their starts on.
        `"+2h"` and `"-30m"` are so much more or less than these have, for all of them. The request, and with it the
        job's identity, stays what was submitted. Raises `Rejected` (failed-precondition) for a job that is over, for a
        priority above the one that an operator has set, for a hold that an operator has set, for a limit that its
        tenant, its worker or a reservation does not allow, and for the replicas of a gang, or with an item each;
        `NotFound`.
        """
        from moorage.schemas.operate import Changed

        given = {"replicas": replicas, "max_running": max_running, "priority": priority, "reason": reason, "by": by}
        given["hold"] = hold
        asked: dict[str, Any] = {name: value for name, value in given.items() if value not in (None, "")}
        if limit is not None:
            from moorage.client.new_limit import is_difference, new_limit_s

            asked["timeout_s"] = await new_limit_s(limit, self.show)
            running |= is_difference(limit)
        if running:
            asked["running"] = True
        return msgspec.convert(await self._client.read("change", {"job": self.job, **asked}), Changed)

    async def files(
        self,
        into: str | os.PathLike[str],
        path: str = "",
        *,
        replica: Which = None,
        merge: bool = False,
        rescue: bool = False,
    ) -> list[Path]:
        """Fetch the files that the job kept (`keep` of its request) into a new folder, and return their paths.

        Links that stay below the job's folder and empty folders are kept as such. What matched and was left out, such
        as other links, is logged as a warning.

        `path` selects a file or folder of the job's folder. If the job has several replicas, each gets a subfolder
        named by its number; `replica` selects one replica instead, or several as in `0-9,205`. With `merge`, `into` may
        have such subfolders of an earlier run: those of this job's replicas are replaced. The files are available for
        some days after the job has SUCCEEDED, and usually also after it failed or was cancelled.

        With `rescue`, what the last attempts left in their folders is fetched, kept or not: their workers have these
        for `folder_keep` seconds after the end, ten minutes by default, and store up to `files_bytes` of each. A folder
        that is gone is logged as a warning, or raises `NoOutput` if it is the only one. Raises `NotFound` if
        no file is kept, `NoOutput` if it is no longer known which attempts ran, and `Rejected` if `into` exists and is
        not an empty folder, or if `path` leaves the job's folder.
        """
        from moorage.client.kept_files import fetch

        fetched = await fetch(self._client, self.job, into, replicas_of(replica), path, merge=merge, rescue=rescue)
        for line in fetched.left_out:
            log.warning("job %s: %s", self.job, line)
        return fetched.paths

    async def show(self) -> JobInfo:
        """Return the whole job: its request, its replicas, the last transitions. Raises `NotFound`.

        For a job that ended long ago, the answer comes from its history, while that is kept (until `kept_until_ms`, at
        the latest).
        """
        info = await self._client.show(self.job)
        self._client._histories.drivers.learn(info)
        self._learn(info)
        return info

    async def use(self, replica: int = 0, *, last: Duration = USE_KEPT_S, points: int = 60) -> UsePage:
        """Return what a running replica has used of each of its GPUs in the last ten minutes, or in the `last` time.

        That time is cut into at most `points` equal spans, each with the mean of its readings, None where there are
        none. `devices` is empty if the worker cannot measure the job. Raises `Rejected` (failed-precondition) if the
        replica does not run, and `NotFound`.
        """
        from moorage.schemas.frames import UsePage

        asked = {"job": self.job, "replica": replica, "last_s": round(seconds(last)), "points": points}
        return msgspec.convert(await self._client.read("use", asked), UsePage)

    async def signal(self, signal: str, *, replica: int | None = None, by: str = "") -> SignalSent:
        """Send a signal, such as `"USR1"`, to those processes of the running job that handle it; to no other.

        It goes to all replicas that run, or to one. Return which workers are asked to send it. The job's transitions
        record it. Raises `Rejected` (failed-precondition) if the job does not run, or its driver sends no signals, and
        for a signal that `checkpoint_signal` may not be; `NotFound`.
        """
        from moorage.schemas.operate import SignalSent

        given = {"replica": replica, "by": by}
        asked = {name: value for name, value in given.items() if value not in (None, "")}
        sent = await self._client.read("signal", {"job": self.job, "signal": signal, **asked})
        return msgspec.convert(sent, SignalSent)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        input: bytes | str = b"",
        replica: int = 0,
        wait: Duration | None = None,
        by: str = "",
    ) -> Executed:
        """Run a command in the running job, beside its program, and return its code and all that it wrote.

        It has the user, folder, environment and GPUs of the replica's attempt, and ends with it; it keeps no job
        running. `input` is its standard input. Any exit code is returned; of each stream at most 64 MiB. If this is
        cancelled, or the time `wait` is over, the command is ended. The job's transitions record the command, and `by`
        as the name that the caller gave. Raises `Rejected` (failed-precondition) if the replica does not run, or its
        driver runs no commands; `TimedOut`, `NotFound`, `NotPermitted`, and `NoOutput` if its worker is lost.
        """
        from moorage.client.command import executed

        given = input.encode() if isinstance(input, str) else input
        timeout_s = None if wait is None else seconds(wait)
        return await executed(self._client, self.job, argv, given, timeout_s, replica=replica, by=by)

    def forward(self, port: int | str, *, local: int = 0, replica: int = 0, by: str = "") -> AsyncForward:
        """Return a port of this machine that leads to a port of the running job, while its block runs.

        `async with job.forward(8888) as forward:` listens on `forward.port` of 127.0.0.1: `local`, or a free one. The
        job's `port` is a number, or a variable of the job that has one, as `"PORT"` of its `ports`. The connections go
        through NATS to a relay in the job, by the job's own python3. The block raises what `exec` raises.
        """
        from moorage.client.forward import AsyncForward

        return AsyncForward(self._client, self.job, port, local, replica, by)

    async def explain(self) -> Explanation:
        """Return why the job waits: the main reason, counts of workers, its place in the queue. Raises `NotFound`."""
        return await self._client.explain(self.job)

    def _saw(self, event: Event) -> None:
        """Keep the state and worker of an event."""
        self.state = event.state
        for change in event.changes:
            if change.state == ACCEPTED and self._began_s is None:
                self._began_s = time.monotonic() - max(time.time() - change.time_ms / 1000, 0)
            self.worker = change.worker or self.worker

    def _learn(self, row: JobRow) -> None:
        """Keep the job's present state, from an answer of `show` or `ls`."""
        self.state = row.state
        self._gpu = row.gpu or self._gpu
        self.worker = row.worker or self.worker
        if row.age_ms:
            self._began_s = time.monotonic() - row.age_ms / 1000

    def _has_ended(self, result: Result) -> None:
        """Keep how the job ended. From now on `result` returns at once, unless it has to read a handler's value."""
        self.state, self._result = result.state, result


def _heard_by(on_progress: OnProgress | None) -> Heard:
    from moorage.client.handlers import Heard  # slow to import, and most jobs call no handler

    return Heard(on_progress)


def handles(jobs: Iterable[H], kind: type[H]) -> Iterator[H]:
    """Yield these handles. Raises TypeError for anything but a handle of this kind of client."""
    if isinstance(jobs, kind):
        raise TypeError(f"give a list of jobs; to wait for {jobs!r} alone, use job.result()")
    for job in jobs:
        if isinstance(job, kind):
            yield job
        elif isinstance(job, list | tuple):
            raise TypeError(
                f"a {type(job).__name__} is no {kind.__name__}: gather takes jobs as arguments, gather(*jobs)"
            )
        else:
            made = f"job({job!r})" if isinstance(job, str) else "job(id)"
            raise TypeError(f"{job!r} is no {kind.__name__}: give handles of jobs, as submit or {made} returns them")
