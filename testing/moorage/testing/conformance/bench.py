"""Run a worker with the driver under test, and a leader that places jobs on it, over a real nats-server."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import itertools
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.schemas.attempt import AttemptName
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.codec import Decoder, encode
from moorage.schemas.errors import Problem
from moorage.schemas.frames import End, LogPage, Place, ReadLog, Report, Start
from moorage.schemas.frames.output import StreamName
from moorage.testing.conformance.command import Ran, run_command
from moorage.testing.conformance.leader import NeverHappened, ScriptedLeader, Seat, until
from moorage.worker.agent.run import SUPERVISOR_FOLDER
from moorage.worker.driver import Driver, Living, Publish, ReportEvent
from moorage.worker.drivers.supervisor_link import key_of, owner_of
from moorage.worker.settings import WorkerSettings, settings_from
from moorage.worker.supervisor.client import Supervised, SupervisorError
from moorage.worker.supervisor.protocol import EndAttempt

WORKER: Final = "w1"
TENANT: Final = "acme"
SECRET_NAME: Final = "token"
SECRET: Final = "s3cret-of-the-checks"
#: a variable of the agent's own process; no job may see it
OF_THE_AGENT: Final = "CONFORMANCE_AGENT_ONLY"
#: a variable of an agent's process: the folder in which it says at which step of a driver's `open` it waits
STEPS: Final = "CONFORMANCE_OPEN_STEPS"
#: a variable of an agent's process: the files with the pids that a driver is asked about, and with its answer
ASKED: Final = "CONFORMANCE_ASKED"
ANSWER_S: Final = 10.0
#: an agent's process may take this many times the slack of other starts
START_TIMES: Final = 3
PAGE_BYTES: Final = 64 * 1024
#: how often an agent that opens in steps looks whether it may go on
STEP_S: Final = 0.02

Serve = Callable[[WorkerSettings, str], AbstractAsyncContextManager[object]]

_decode_page: Final = Decoder[LogPage | Problem](LogPage | Problem)


class Bench:
    """One worker id with a state folder of its own, and its leader. Use `open_bench`."""

    def __init__(self, leader: ScriptedLeader, settings: WorkerSettings, url: str, slack_s: float) -> None:
        self.leader = leader
        self.slack_s = slack_s
        self.settings = settings
        self.url = url
        self.folder = settings.state_dir.parent
        self.driver = ""  # this and `can` are set by `joined`, from the worker's hello
        self.can = Capabilities()
        self._fences = iter(range(10, 1000))

    @property
    def seat(self) -> Seat:
        return self.leader.seat(WORKER)

    async def joined(self, joins: int = 1) -> None:
        """Wait until the worker has joined `joins` times; take the driver's name and capabilities from its hello."""
        await self.leader.joined(WORKER, joins, START_TIMES * self.slack_s)
        [(self.driver, self.can)] = self.seat.joins[-1].hello.capabilities.items()

    async def restartable(self) -> None:
        """Wait until an agent without a journal would count its next join higher: it counts joins in seconds."""
        last = self.seat.joins[-1].n
        await until(lambda: int(time.time()) > last, self.slack_s, "the next second of the wall clock")

    def name(self, job: str = "a", replica: int = 0) -> AttemptName:
        """Return the name of a first attempt, with a fence that no other attempt of this bench has."""
        return (TENANT, job, replica, 1, next(self._fences))

    async def place(
        self, name: AttemptName, request: dict[str, Any], slots: tuple[int, ...] = (0,), *, hold: bool = False
    ) -> None:
        """Send the worker a placement.

        Without slots the job asks for no GPU; with `hold` it waits for its gang's START.
        """
        body = request | ({"gpu": request.get("gpu", {}) | {"count": len(slots)}} if slots else {})
        mode = "exclusive" if slots else "none"
        await self.leader.want(WORKER, Place(*name, list(slots), mode, hold, encode(body)))

    async def start_gang(self, name: AttemptName, address: str, port: int, world_size: int) -> None:
        await self.leader.want(WORKER, Start(*name, address, port, world_size))

    async def end(self, name: AttemptName, grace_s: float, notice_s: float = 0.0) -> None:
        await self.leader.want(WORKER, End(*name, "cancelled", grace_s, notice_s))

    async def end_by_supervisor(self, name: AttemptName) -> None:
        """Have the supervisor end an attempt that it runs, past the agent; return once nothing of it is left."""
        key = key_of(owner_of(WORKER, self.driver), name)
        supervised = await Supervised.connect(self.settings.state_dir / SUPERVISOR_FOLDER, spawn_if_absent=False)
        try:
            await supervised.end([EndAttempt(key=key, grace_s=0.0, why="end")])
            async with asyncio.timeout(self.slack_s):
                while key in (await supervised.list()).living:
                    await supervised.next_events()
        finally:
            supervised.close()

    async def await_report(self, kind: str, name: AttemptName) -> Report:
        """Return the worker's report of this kind about an attempt, once it has arrived.

        Raises AssertionError after `slack_s` seconds, and at once if the attempt was refused, or ended before it
        started.
        """
        last = {"started": ("refused", "exited")}.get(kind, ("refused",))

        def found() -> Report | None:
            reports = (self.seat.report(each, name) for each in (kind, *last))
            return next((report for report in reports if report is not None), None)

        with contextlib.suppress(NeverHappened):
            report: Report = await until(found, self.slack_s)
            assert report.kind == kind, f"{kind} of {name} cannot come: {report.kind} {report.code}, {report.detail!r}"
            return report
        return await self.leader.await_report(WORKER, kind, name, 0.0)  # its error lists the reports that came instead

    async def ended(self, name: AttemptName) -> Report:
        """Return the report `exited` of an attempt, once its devices are freed, too. Raises as `await_report` does."""
        exited = await self.await_report("exited", name)
        await self.await_report("freed", name)
        return exited

    async def run_command(self, name: AttemptName, argv: list[str], given: bytes) -> Ran:
        """Run a command in a running attempt, with `given` as its standard input; return how it ended and what it
        wrote.

        Raises AssertionError after `slack_s` seconds.
        """
        return await run_command(self.leader, WORKER, name, argv, given, self.slack_s)

    def was_last(self, name: AttemptName, stream: StreamName) -> bool:
        """Return whether the last frame of this output stream has arrived."""
        subject = self.leader.subjects.log(*name[:3])
        frames = [frame for at, frame in self.leader.output if at == subject and frame["stream"] == stream]
        return any(frame.get("end") for frame in frames)

    async def kept(self, name: AttemptName, stream: StreamName) -> str:
        """Return the first `PAGE_BYTES` of the output that the driver keeps of an ended attempt.

        Raises AssertionError if the driver refuses.
        """
        tenant, job, replica, attempt, fence = name
        ask = ReadLog(
            self.seat.session, tenant, job, replica, attempt, fence, self.driver, stream, 0, PAGE_BYTES, ended_ms=1
        )
        subject = self.leader.subjects.worker(WORKER, "logs")
        answer = _decode_page((await self.leader.nc.request(subject, encode(ask, json=False), ANSWER_S)).data)
        assert isinstance(answer, LogPage), f"read_log refused: {answer.message}"
        return answer.text if isinstance(answer.text, str) else ""


@contextlib.asynccontextmanager
async def open_bench(url: str, driver: str, slack_s: float) -> AsyncIterator[Bench]:
    """Give a bench without a running worker.

    At the end, stop every attempt that a supervisor on its state folder runs.
    """
    with tempfile.TemporaryDirectory(prefix="moorage-checks-") as named:
        folder = Path(named)
        kept = folder / "secrets"
        kept.mkdir(mode=0o700)
        (kept / SECRET_NAME).touch(mode=0o600)
        (kept / SECRET_NAME).write_text(SECRET)
        settings = WorkerSettings(
            folder / "state",
            WORKER,
            "c" + secrets.token_hex(6),
            simulate="4xH100",
            drivers=(driver,) if driver else (),
            leases=False,
            secrets_dir=kept,
            free_wait_s=5.0,
        )
        async with ScriptedLeader(url, settings.prefix) as leader:
            try:
                yield Bench(leader, settings, url, slack_s)
            finally:
                with contextlib.suppress(SupervisorError, OSError):
                    supervised = await Supervised.connect(settings.state_dir / SUPERVISOR_FOLDER, spawn_if_absent=False)
                    await supervised.shutdown(0.0)


# -------------------------------------------------------------------------------------- an agent that can be killed

#: the program of `AgentProcess`; its arguments are the file and the name of the class of checks, the worker's settings
#: and the server's URL
_AGENT: Final = "import sys; from moorage.testing.conformance.bench import main; main(*sys.argv[1:])"


class AgentProcess:
    """The worker of a class of checks, in a process of its own, so that a check can kill it."""

    def __init__(
        self, checks: type, settings: WorkerSettings, url: str, steps: Path | None = None, *, asks: bool = False
    ) -> None:
        """Set the process up. With the folder `steps`, each driver's `open` waits at every step: see `_Stepped`.

        With `asks`, `attempts_of` can be asked.
        """
        table = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in msgspec.structs.asdict(settings).items()
            if key in ("state_dir", "prefix", "simulate", "drivers", "leases", "secrets_dir", "free_wait_s")
        }
        text = msgspec.json.encode(table | {"id": settings.worker}).decode()
        words = (inspect.getfile(checks), checks.__module__, checks.__qualname__, text, url)
        self.command = (sys.executable, "-c", _AGENT, *words)
        self._environment = {OF_THE_AGENT: "1"} | ({} if steps is None else {STEPS: str(steps)})
        self._asked, self._answer = settings.state_dir.parent / "asked", settings.state_dir / "answer"
        if asks:
            self._environment[ASKED] = f"{self._asked}{os.pathsep}{self._answer}"
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> AgentProcess:
        paths = os.pathsep.join(filter(None, sys.path))
        self._process = await asyncio.create_subprocess_exec(
            *self.command, env=os.environ | {"PYTHONPATH": paths} | self._environment
        )
        return self

    async def attempts_of(self, pids: Sequence[int], limit_s: float) -> dict[int, AttemptName | None]:
        """Return what the driver's `attempts_of` says of these processes, once it knows the first of them.

        Wait at most `limit_s` seconds for that.
        """
        self._asked.write_bytes(msgspec.json.encode(list(pids)))
        found: dict[int, AttemptName | None] = {}

        def knows() -> bool:
            nonlocal found
            with contextlib.suppress(FileNotFoundError):
                found = msgspec.json.decode(self._answer.read_bytes(), type=dict[int, AttemptName | None])
            return pids[0] in found

        with contextlib.suppress(NeverHappened):
            await until(knows, limit_s)
        return found

    async def kill(self) -> None:
        """Kill it at once, like a crash."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def __aexit__(self, *_: object) -> None:
        await self.kill()


def main(file: str, module: str, name: str, settings: str, url: str) -> None:
    """Serve the worker of a class of checks until SIGTERM."""
    if steps := os.environ.get(STEPS):
        _step_opens(Path(steps))
    if asked := os.environ.get(ASKED):
        _answer_asked(*map(Path, asked.split(os.pathsep)))
    asyncio.run(_serve(_class_of(file, module, name)().serve, settings_from(msgspec.json.decode(settings)), url))


async def _serve(serve: Serve, settings: WorkerSettings, url: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with serve(settings, url):
        await stop.wait()


class _Stepped:
    """The `open` of a driver, which waits after each of its own waits.

    After its wait number k it makes the file `at-k`, which names the place of that wait in the code, and goes on once
    there is `go-k`. So a check can have things happen between any two steps of an `open`, which happens by itself only
    on a slow or busy machine.
    """

    def __init__(self, driver: Driver, folder: Path) -> None:
        self._open = type(driver).open(driver)
        self._folder = folder

    def __await__(self) -> Generator[Any, Any, list[Living]]:
        inner = self._open.__await__()
        step = partial(next, inner)
        for number in itertools.count():
            try:
                waits_for = step()
            except StopIteration as done:
                found: list[Living] = done.value
                return found
            try:
                yield waits_for
                yield from self._wait(number).__await__()
                step = partial(next, inner)
            except BaseException as error:
                step = partial(inner.throw, error)
        raise AssertionError("count() has no end")

    async def _wait(self, number: int) -> None:
        at = self._folder / f"at-{number}"
        place: list[str] = []
        inner: object = self._open
        while inspect.iscoroutine(inner) and inner.cr_frame is not None:
            place.append(f"{inner.cr_code.co_filename}:{inner.cr_frame.f_lineno}")
            inner = inner.cr_await
        at.with_suffix(".new").write_text(" ".join(place))
        at.with_suffix(".new").rename(at)
        while not (self._folder / f"go-{number}").exists():  # noqa: ASYNC110
            await asyncio.sleep(STEP_S)


def _answer_asked(asked: Path, answer: Path) -> None:
    """Have the driver of this process say again and again whose the processes in a file are."""
    attach, tasks = Driver.attach, set[asyncio.Task[None]]()

    async def run(driver: Driver) -> None:
        while True:
            with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                pids = msgspec.json.decode(asked.read_bytes(), type=list[int])
                new = answer.with_suffix(".new")
                new.write_bytes(msgspec.json.encode(driver.attempts_of(pids)))
                new.rename(answer)
            await asyncio.sleep(STEP_S)

    def attach_and_answer(self: Driver, report: ReportEvent, publish: Publish) -> None:
        attach(self, report, publish)
        tasks.add(asyncio.get_running_loop().create_task(run(self)))

    Driver.attach = attach_and_answer  # type: ignore[method-assign]


def _step_opens(folder: Path) -> None:
    """Have each driver of this process open in steps."""
    attach = Driver.attach

    def attach_and_step(self: Driver, report: ReportEvent, publish: Publish) -> None:
        attach(self, report, publish)
        self.open = lambda: _Stepped(self, folder)  # type: ignore[method-assign,assignment,return-value]

    Driver.attach = attach_and_step  # type: ignore[method-assign]


def _class_of(file: str, module: str, name: str) -> Any:
    """Return a class by the path of its file, because a test file need not be importable by name."""
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None
    assert spec.loader is not None
    loaded = sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    found: Any = loaded
    for part in name.split("."):
        found = getattr(found, part)
    return found
