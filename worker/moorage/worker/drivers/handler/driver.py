"""Run handlers: functions in the service's own process, called for a job as another driver starts a process.

`run.argv[0]` names the function; `driver_config.handler.input`, the other arguments and `run.env` are its input. The
request must also say `requires: {"handler.<name>": ["1"]}`: by that label a worker declares which functions it has.

The code is the service's own and trusted. A coroutine is cancelled; a plain function runs in a thread of its own and
must read `context.cancelled`. A function that still runs after its grace cannot be ended: its slots are quarantined
until it returns, and the service is informed. A value that a function returns after it was asked to stop counts as
ended, never as a result.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.bus.results import CHUNK_BYTES, ResultStore
from moorage.schemas import frames
from moorage.schemas.attempt import AttemptName
from moorage.schemas.capabilities import KNOWN
from moorage.schemas.codec import encode
from moorage.schemas.driver_config import HandlerBlock
from moorage.schemas.errors import MoorageError, refuse
from moorage.schemas.frames import RESULT, ResultLine, Values
from moorage.schemas.handler import DRIVER, encode_result, goes_together, line_of, result_object, together
from moorage.schemas.job import Request, Run
from moorage.schemas.printable import carried, shortened
from moorage.schemas.subjects import ALL_JOBS
from moorage.system.device_environment import HostAtFault
from moorage.worker.attempt.environment import lay_over
from moorage.worker.attempt.reports import Reporting
from moorage.worker.attempt.secret_files import resolve_secrets
from moorage.worker.driver import Assignment, Driver, never_ran
from moorage.worker.drivers.handler.call import Exited, Handler, at_once, contained, in_thread, words_of
from moorage.worker.drivers.handler.context import HandlerCancelled, HandlerContext
from moorage.worker.drivers.policy import Policy
from moorage.worker.session.attempt_messages import Ended, Started, Stuck
from moorage.worker.session.lease_session import NEVER_S
from moorage.worker.settings import WorkerSettings

Overdue = Callable[[HandlerContext], None]

#: most functions running at once, each with a task or a thread
RUNNING_MAX: Final = 256
PROGRESS_PER_S_MAX: Final = 5
#: characters of a traceback on the log subject: its end, which names the error
TRACEBACK_CHARS_MAX: Final = 8 * 1024
#: characters of it that are sent to clients that wait for the result
TAIL_CHARS_MAX: Final = 2 * 1024
#: bytes of a result that are sent to all waiting clients of its tenant: about the size of its job's events
SENT_BYTES_MAX: Final = 2 * 1024
DETAIL_CHARS_MAX: Final = 200
#: how long closing waits for functions that were asked to stop
CLOSE_S_MAX: Final = 1.0
#: how long storing a result may delay the end of its job
STORE_S_MAX: Final = 30.0
CODE_FAILED: Final = 1
#: minus SIGTERM, the code of a process that was asked to end
CODE_ENDED: Final = -15
LABEL_PREFIX: Final = f"{DRIVER}."

log = logging.getLogger("moorage.worker")


class _Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of standard output: the progress of a handler."""

    progress: float
    text: str = ""


def _result_of(running: _Running) -> str:
    context = running.context
    return result_object(context.job, context.replica, context.fence)


class _Running:
    """The state of one run of a function: its context, its work, and why it was asked to stop."""

    context: HandlerContext
    work: asyncio.Future[object]

    def __init__(self) -> None:
        self.reason = ""  # why it was asked to stop: end, fence or timeout
        self.overdue = False
        self.called_s = 0.0  # when its function was called, by the loop's clock
        self.storing = False  # it returned, and its result is being stored
        self.store_by_s = 0.0  # by the loop's clock
        self.grace: asyncio.TimerHandle | None = None
        self.timeout: asyncio.TimerHandle | None = None
        self.checkpoint: asyncio.TimerHandle | None = None
        self.notice: asyncio.TimerHandle | None = (
            None  # when it ends, a function told to save its work is asked to stop
        )
        self.newest_progress: tuple[float, str] | None = None
        self.progress_due = False  # the newest progress will be published soon
        self.offsets = {"out": 0, "err": 0}
        self.reporting = Reporting()


def _reported(runs: Collection[_Running]) -> dict[AttemptName, Values]:
    return {running.context.name: values for running in runs if (values := running.reporting.values)}


class HandlerDriver(Driver):
    """The driver of handlers; `handlers` has each function by its name.

    `on_overdue` is called in the event loop for a function that still runs after its grace.

    Without `threads` a plain function is called in the event loop, where it cannot be asked to stop: for virtual time.
    Small results are stored together, and the end of a job names the message with its result.
    """

    name = DRIVER
    #: the service keeps its context on the device between calls, so the device's memory shows nothing about a job
    capabilities = KNOWN[name]
    config = HandlerBlock
    attempts_max = RUNNING_MAX

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        store: ResultStore,
        *,
        secrets_dir: Path | None = None,
        interface: str | None = None,
        simulated: bool = False,
        on_overdue: Overdue | None = None,
        threads: bool = True,
        policy: Policy | None = None,
    ) -> None:
        super().__init__()
        self._policy = policy or Policy({}, {}, {}, None, {})
        self._threads = threads
        self._handlers = handlers
        self._store = store
        self._secrets_dir = secrets_dir
        self._interface = interface
        self._simulated = simulated
        self._on_overdue = on_overdue
        self._running: dict[AttemptName, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._small: dict[str, list[tuple[_Running, bytes]]] = {}  # by tenant: lines of results still to be stored
        self._fence_s = NEVER_S
        self._closed = False

    def running(self) -> list[HandlerContext]:
        """Return the contexts of the runs whose function has not returned, or whose result is being stored."""
        return [running.context for running in self._running.values()]

    def reporting(self) -> dict[AttemptName, Reporting]:
        return {
            name: run.reporting for name, run in self._running.items() if run.reporting.values or run.reporting.refused
        }

    async def close(self) -> None:
        """Ask all functions to stop, and wait `CLOSE_S_MAX` seconds at most for them and for results being stored.

        A thread that runs on cannot delay the end of the process.
        """
        self._closed = True
        works: list[asyncio.Future[Any]] = [*self._tasks]
        for running in self._running.values():
            self._cancel_timers(running)
            running.context.cancel("the worker closes")
            if isinstance(running.work, asyncio.Task):
                running.work.cancel()
            works.append(running.work)
        if works:
            await asyncio.wait(works, timeout=CLOSE_S_MAX)

    def check(self, request: Request) -> None:
        self._handler_of(request.workload)

    def start(self, assignments: list[Assignment]) -> None:
        started: list[tuple[_Running, Handler, Assignment]] = []
        for assignment in assignments:
            try:
                handler = self._handler_of(assignment.run)
                self._check_startable(assignment.request)
                running = self._prepare(assignment)
            except MoorageError as error:
                self.report(never_ran(assignment.name, error))
                continue
            self._running[assignment.name] = running
            started.append((running, handler, assignment))
        if started:
            self.report(Started([running.context.name for running, _, _ in started]))
        for running, handler, assignment in started:
            self._call(running, handler, assignment.checkpoint_in_s)

    def end(self, name: AttemptName, grace_s: float, why: str) -> None:
        running = self._running.get(name)
        if running is not None and not running.storing:
            if running.notice is not None:
                running.notice.cancel()
            self._ask_to_stop(running, grace_s, "fence" if why == "fence" else "end", why)

    def end_with_notice(self, name: AttemptName, grace_s: float, why: str, notice_s: float) -> None:
        running = self._running.get(name)
        if running is None or running.storing or running.reason or running.notice is not None:
            return None
        if running.context.request.workload.checkpoint_signal is None:
            return self.end(name, grace_s, why)
        running.context.ask_checkpoint()
        loop = asyncio.get_running_loop()
        running.notice = loop.call_later(notice_s, self._ask_to_stop, running, grace_s, "end", why)
        return None

    def relimit(self, name: AttemptName, timeout_s: float) -> None:
        running = self._running.get(name)
        if running is None or running.storing or running.reason:
            return
        if running.timeout is not None:
            running.timeout.cancel()
        self._set_timeout(running, timeout_s)

    async def living(self, names: Collection[AttemptName]) -> Collection[AttemptName] | None:
        return {name for name, run in self._running.items() if run.storing or run.overdue or not run.work.done()}

    def keeps(self, settings: WorkerSettings) -> dict[str, float]:
        return {"result_s": settings.result_keep, "result_bytes": settings.result_bytes}

    def set_fence(self, deadline_s: float, grace_s: float) -> None:
        self._fence_s = deadline_s  # `context.cancelled` reads it, in any thread

    # -- starting

    def _handler_of(self, run: Run) -> Handler:
        handler = self._handlers.get(run.argv[0]) if run.argv else None
        if handler is None:
            raise refuse(
                "failed-precondition",
                "argv[0] names no handler of this worker",
                field="$.run.argv",
                found=run.argv[0] if run.argv else "",
                allowed=", ".join(self._handlers),
                next='add requires: {"handler.<name>": ["1"]}, so that the job is placed where that handler is',
            )
        return handler

    @staticmethod
    def _check_startable(request: Request) -> None:
        run = request.workload
        for field in ("cwd", "user"):
            if getattr(run, field) is not None:
                raise refuse("invalid-argument", f"a function has no {field}", field=f"$.run.{field}")

    def _prepare(self, assignment: Assignment) -> _Running:
        """Return the run of a function. Raises SharingUnavailable, SecretRefused, Refused; HostAtFault at the limit."""
        if len(self._running) >= RUNNING_MAX:
            raise HostAtFault(f"this worker runs {RUNNING_MAX} functions already")
        self._policy.check_secrets(assignment.name[0], assignment.run.env)
        ours = assignment.environment(interface=self._interface, simulated=self._simulated)
        loop = asyncio.get_running_loop()
        running = _Running()

        def note_progress(fraction: float, text: str) -> None:
            running.newest_progress = (fraction, text)
            if not running.progress_due:  # if two threads both see False, it is published twice at worst
                running.progress_due = True
                with contextlib.suppress(RuntimeError):  # the loop is closed, so there is no listener
                    loop.call_soon_threadsafe(self._publish_progress, running)

        running.context = HandlerContext(
            assignment.name,
            assignment.request,
            tuple(assignment.devices),
            assignment.mode,
            lay_over(resolve_secrets(assignment.run.env, self._secrets_dir), ours),
            say_progress=note_progress,
            say_report=running.reporting.take,
            fence_s=lambda: self._fence_s,
            item=assignment.item,
        )
        return running

    def _call(self, running: _Running, handler: Handler, checkpoint_in_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        context = running.context
        if inspect.iscoroutinefunction(handler):
            running.work = loop.create_task(contained(handler, context), name=f"handler {context.job}")
        else:
            running.work = in_thread(handler, context) if self._threads else at_once(handler, context)
        running.work.add_done_callback(lambda work: self._returned(running, work))
        run = context.request.workload
        if checkpoint_in_s is not None:
            running.checkpoint = loop.call_later(checkpoint_in_s, context.ask_checkpoint)
        running.called_s = loop.time()
        if run.timeout_s is not None:
            self._set_timeout(running, run.timeout_s)

    def _set_timeout(self, running: _Running, timeout_s: float) -> None:
        at_s, grace_s = running.called_s + timeout_s, running.context.request.workload.grace_s
        running.timeout = asyncio.get_running_loop().call_at(
            at_s, self._ask_to_stop, running, grace_s, "timeout", "timeout"
        )

    def _await(self, running: _Running, work: Awaitable[object]) -> None:
        """Await in the event loop what a function has returned: it is async, but a decorator or a lambda hides that."""
        if running.reason:  # it was asked to stop before
            if inspect.iscoroutine(work):
                work.close()
            self._over(running, CODE_ENDED, running.reason)
            return
        running.work = asyncio.get_running_loop().create_task(
            contained(lambda _: work, running.context), name=f"handler {running.context.job}"
        )
        running.work.add_done_callback(lambda done: self._returned(running, done))

    # -- stopping

    def _ask_to_stop(self, running: _Running, grace_s: float, reason: str, why: str) -> None:
        """Ask a function to stop; a second call can only shorten its grace.

        A coroutine is canceled once, so that it can clean up. Do nothing if the function has returned or is overdue.
        """
        if running.overdue or running.storing or running.work.done():
            return
        if not running.reason:
            running.reason = reason
            running.context.cancel(why or reason)
            if isinstance(running.work, asyncio.Task):
                running.work.cancel(why or reason)
        loop = asyncio.get_running_loop()
        if running.grace is not None:
            if running.grace.when() <= loop.time() + grace_s:
                return
            running.grace.cancel()
        running.grace = loop.call_later(grace_s, self._is_overdue, running)

    def _is_overdue(self, running: _Running) -> None:
        running.overdue = True
        context = running.context
        log.error(
            "%r was asked to stop (%s) but goes on; the devices of this job stay out of use", context, running.reason
        )
        self._publish_piece(
            running, "err", f"moorage: asked to stop ({running.reason}), and still running after its grace\n"
        )
        self.report(Stuck([context.name]))
        if self._on_overdue is not None:
            self._on_overdue(context)

    # -- the outcome of a run

    def _returned(self, running: _Running, work: asyncio.Future[object]) -> None:
        if self._closed:
            if not work.cancelled() and work.exception() is None and inspect.iscoroutine(left := work.result()):
                left.close()  # or Python warns that it was never awaited
            return
        if not work.cancelled() and work.exception() is None and inspect.isawaitable(value := work.result()):
            self._await(running, value)
            return
        error: BaseException | None = asyncio.CancelledError() if work.cancelled() else work.exception()
        if error is None and isinstance(exited := work.result(), Exited):
            error = exited.error
        if isinstance(error, asyncio.CancelledError | HandlerCancelled):
            self._over(running, CODE_ENDED, running.reason or running.context.cancel_reason or "cancelled by itself")
        elif error is not None:
            text = "".join(traceback.format_exception(error))
            self._publish_piece(running, "err", text[-TRACEBACK_CHARS_MAX:])
            tail = carried(text[-TAIL_CHARS_MAX:])
            self._publish_to_all(running.context.tenant, [encode(ResultLine(_result_of(running), tail=tail))])
            self._over(running, CODE_FAILED, words_of(error))
        elif running.reason or running.notice is not None:
            self._over(running, 0, running.reason or "end")  # what it saved is for the next attempt
        elif (value := work.result()) is None:
            self._over(running, 0, f"{RESULT}0")
        else:
            running.storing, running.store_by_s = True, asyncio.get_running_loop().time() + STORE_S_MAX
            self._keep(running, value)

    def _keep(self, running: _Running, value: object) -> None:
        """Begin to store a result. If it cannot be encoded, report the run as failed.

        The lines of small results are collected while earlier lines are stored, and with results of the same turn.
        """
        context, name = running.context, _result_of(running)
        try:
            result = encode_result(value)
            line = line_of(name, result)
        except Exception as error:  # in every case the job is over and its GPUs are free
            self._not_kept([running], error)
            return
        if not goes_together(result):
            self._spawn(self._store_all([(running, line)], self._store.put(context.tenant, name, result)))
        elif (waiting := self._small.get(context.tenant)) is not None:
            waiting.append((running, line))
        else:
            self._small[context.tenant] = [(running, line)]
            self._spawn(self._store_small(context.tenant))

    async def _store_small(self, tenant: str) -> None:
        """Store a tenant's waiting lines, several in a message, one message after the other, until none waits."""
        while waiting := self._small[tenant]:
            size = count = 0
            while count < len(waiting) and (not count or size + len(waiting[count][1]) < CHUNK_BYTES):
                size += len(waiting[count][1]) + 1
                count += 1
            kept, self._small[tenant] = waiting[:count], waiting[count:]
            await self._store_all(kept, self._store.put_together(tenant, [line for _, line in kept]))
        del self._small[tenant]

    async def _store_all(self, kept: list[tuple[_Running, bytes]], storing: Coroutine[Any, Any, int]) -> None:
        """Await `storing`; then publish the runs' lines on their log subjects, and report the runs' end with code 0.

        The report names the sequence that `storing` has returned. If `storing` fails, or takes longer than
        `STORE_S_MAX`, report the runs as failed.
        """
        try:
            async with asyncio.timeout_at(kept[0][0].store_by_s):  # the first result has waited longest
                seq = await storing
        except Exception as error:
            self._not_kept([running for running, _ in kept], error)
            return
        self._publish_to_all(kept[0][0].context.tenant, [line for _, line in kept if len(line) <= SENT_BYTES_MAX])
        for running, line in kept:
            self._flush_progress(running)  # progress that was reported earlier is published first
            self._close_run(running, line.decode() + "\n")
        reported = _reported([running for running, _ in kept])
        self.report(Ended([(running.context.name, 0, f"{RESULT}{seq}") for running, _ in kept], reported=reported))

    def _not_kept(self, lost: list[_Running], error: Exception) -> None:
        why = f"not within {STORE_S_MAX:g} s" if isinstance(error, TimeoutError) else words_of(error)
        if isinstance(error, MoorageError):
            why = error.problem.message
        for running in lost:
            self._over(running, CODE_FAILED, f"the result could not be kept: {why}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _over(self, running: _Running, code: int, reason: str) -> None:
        self._flush_progress(running)
        self._close_run(running)
        told = [(running.context.name, code, carried(shortened(reason, DETAIL_CHARS_MAX)))]
        self.report(Ended(told, reported=_reported([running])))

    def _close_run(self, running: _Running, last: str = "") -> None:
        """Cancel the run's timers, end its streams, standard output with the line `last`, and forget the run."""
        self._cancel_timers(running)
        self._publish_piece(running, "out", last, end=True)
        self._publish_piece(running, "err", "", end=True)
        del self._running[running.context.name]

    @staticmethod
    def _cancel_timers(running: _Running) -> None:
        for timer in (running.grace, running.timeout, running.checkpoint, running.notice):
            if timer is not None:
                timer.cancel()

    # -- what is published

    def _publish_to_all(self, tenant: str, lines: list[bytes]) -> None:
        """Publish lines of results in one message to all waiting clients of a tenant. Do nothing without lines.

        So a client needs no subscription for each job.
        """
        if lines:
            self.publish((tenant, ALL_JOBS, 0, 0, 0), together(lines))

    def _publish_progress(self, running: _Running) -> None:
        """Publish the newest progress, if there is any, and call this again 1 / `PROGRESS_PER_S_MAX` seconds later."""
        if running.context.name not in self._running or self._closed:
            return
        if running.newest_progress is None:
            running.progress_due = False
            if (
                running.newest_progress is None
            ):  # checked again: a thread may have set it before progress_due was cleared
                return
            running.progress_due = True
        self._flush_progress(running)
        asyncio.get_running_loop().call_later(1 / PROGRESS_PER_S_MAX, self._publish_progress, running)

    def _flush_progress(self, running: _Running) -> None:
        newest, running.newest_progress = running.newest_progress, None
        if newest is not None:
            self._publish_piece(running, "out", encode(_Progress(*newest)).decode() + "\n")

    def _publish_piece(self, running: _Running, stream: frames.StreamName, text: str, *, end: bool = False) -> None:
        context, text = running.context, carried(text)
        offset = running.offsets[stream]
        behind = running.offsets[stream] = offset + len(text.encode())
        frame = frames.Output(context.attempt, stream, offset, text, end=end, next=behind)
        self.publish(context.name, encode(frame))
