"""The driver `process` of a `SimFleet`: leases of GPUs are real, but a function of the test replaces each command.

Nothing is executed: the function (a script) says how each attempt ends, and what it would have written.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

import msgspec

from moorage.schemas import frames
from moorage.schemas.attempt import AttemptName
from moorage.schemas.capabilities import DRIVER_DEFAULT, Capabilities
from moorage.schemas.codec import encode
from moorage.schemas.errors import MoorageError
from moorage.schemas.job import Request
from moorage.worker.attempt.output_pages import page_of
from moorage.worker.driver import Assignment, Driver
from moorage.worker.session.attempt_messages import Ended, Started, StartFailed
from moorage.worker.start_codes import CODE_CANNOT_START

#: characters in one frame of output
OUTPUT_FRAME_CHARS_MAX: Final = 64 * 1024
#: most ended attempts whose output is kept for later reads
KEPT_MAX: Final = 10_000
#: minus SIGTERM: the exit code of an attempt that was asked to end
CODE_ENDED: Final = -15


class Task(msgspec.Struct, frozen=True):
    """An attempt of a replica that was started: its name, its request and its environment."""

    tenant: str
    job: str
    replica: int
    attempt: int
    fence: int
    worker: str
    request: Request
    env: dict[str, str]

    @property
    def argv(self) -> list[str]:
        return self.request.workload.argv


class Ran(msgspec.Struct, frozen=True):
    """How an attempt ends: after `seconds`, with `code` (negative: minus a signal), having written `out` and `err`.

    Raises ValueError for a code outside -64..255, and for seconds that are negative or infinite; TypeError for output
    that is not text.
    """

    code: int = 0
    out: str = ""
    err: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if type(self.code) is not int or not -64 <= self.code <= 255:
            raise ValueError(f"code must be a whole number, -64..255, found {self.code!r}")
        if not 0 <= self.seconds < float("inf"):
            raise ValueError(f"seconds must be 0 or more, found {self.seconds!r}")
        for name in ("out", "err"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be text, found {getattr(self, name)!r}")


Script = Callable[[Task], Ran | Awaitable[Ran]]


def succeed(task: Task) -> Ran:
    """Return the end of an attempt by default: at once, with code 0."""
    return Ran()


class ScriptedDriver(Driver):
    """Calls `script` for each attempt. If it is a coroutine, it is cancelled when the attempt is ended.

    If the script raises, its attempt ends with code 1 and the traceback on stderr, as a Python program would.
    """

    name = DRIVER_DEFAULT
    capabilities = Capabilities(
        needs_argv=True, keeps_output=True, ends_streams=True, uses_devices=False, answers_calls=True, relimits=True
    )

    def __init__(self, worker: str, script: Script) -> None:
        super().__init__()
        self._worker = worker
        self._script = script
        self._running: dict[AttemptName, asyncio.Task[None]] = {}
        self._limits: dict[AttemptName, tuple[float, asyncio.Timeout]] = {}  # since when, by the loop's clock
        self._kept: OrderedDict[AttemptName, Ran] = OrderedDict()

    async def close(self) -> None:
        running, self._running = list(self._running.values()), {}
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def start(self, assignments: list[Assignment]) -> None:
        started: list[AttemptName] = []
        failed: list[tuple[AttemptName, int, str]] = []
        for assignment in assignments:
            try:
                task = self._task(assignment)
            except MoorageError as error:
                failed.append((assignment.name, CODE_CANNOT_START, error.problem.message))
                continue
            started.append(assignment.name)
            running = self._run(assignment.name, task, assignment.run.timeout_s)
            self._running[assignment.name] = asyncio.get_running_loop().create_task(running)
        if failed:
            self.report(StartFailed(failed))
        if started:
            self.report(Started(started))

    def end(self, name: AttemptName, grace_s: float, why: str) -> None:
        running = self._running.pop(name, None)
        if running is not None:
            running.cancel()
            self.report(Ended([(name, CODE_ENDED, "fence" if why == "fence" else "end")]))

    def relimit(self, name: AttemptName, timeout_s: float) -> None:
        if name in self._limits:
            began_s, timeout = self._limits[name]
            timeout.reschedule(began_s + timeout_s)

    async def read_log(self, ask: frames.ReadLog) -> frames.LogPage:
        """Return the output of one of the last KEPT_MAX attempts that ended; an empty page for any other attempt."""
        name = (ask.tenant, ask.job, ask.replica, ask.attempt, ask.fence)
        ran = self._kept.get(name, Ran())
        texts = {"out": ran.out, "err": ran.err}
        return page_of(texts.get(ask.stream, "").encode(), ask, name not in self._running)

    def _task(self, assignment: Assignment) -> Task:
        requested, ours = assignment.run.env, assignment.environment(simulated=True)
        plain = {key: value for key, value in requested.items() if isinstance(value, str)}
        return Task(*assignment.name, self._worker, assignment.request, {**plain, **ours})

    async def _run(self, name: AttemptName, task: Task, timeout_s: float | None) -> None:
        reason = "exit"
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                self._limits[name] = asyncio.get_running_loop().time(), timeout
                ran = await self._ran(task)
        except TimeoutError:
            ran, reason = Ran(CODE_ENDED), "timeout"
        finally:
            self._limits.pop(name, None)
        if self._running.pop(name, None) is None:
            return
        for piece in (*_pieces(name, "out", ran.out), *_pieces(name, "err", ran.err)):
            self.publish(name, encode(piece))
        self._kept[name] = ran
        while len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)
        self.report(Ended([(name, ran.code, reason)]))

    async def _ran(self, task: Task) -> Ran:
        try:
            said = self._script(task)
            ran = await said if inspect.isawaitable(said) else said
            if not isinstance(ran, Ran):
                raise TypeError(f"a script must return a Ran, and this one returned {ran!r}")
        except Exception:
            return Ran(1, err=traceback.format_exc())
        await asyncio.sleep(ran.seconds)
        return ran


def _pieces(name: AttemptName, stream: frames.StreamName, text: str) -> Iterator[frames.Output]:
    """Yield the text in frames, and then the end of the stream."""
    offset = 0
    for at in range(0, len(text), OUTPUT_FRAME_CHARS_MAX):
        part = text[at : at + OUTPUT_FRAME_CHARS_MAX]
        behind = offset + len(part.encode())
        yield frames.Output(name[3], stream, offset, part, next=behind)
        offset = behind
    yield frames.Output(name[3], stream, offset, "", end=True, next=offset)
