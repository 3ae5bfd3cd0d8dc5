"""`moorage up`: a server, a scheduler and a worker on this machine, in one command, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shlex
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from moorage.cli.console import EXIT_INTERRUPTED, emit, paint, say
from moorage.cli.options import DEFAULTS, Options, guarded
from moorage.cli.processes import LEDGER_URL_FILE, WORKERS_FOLDER
from moorage.cli.render import many

if TYPE_CHECKING:
    from moorage.bus.embedded import EmbeddedServer
    from moorage.cli.children import Child
    from moorage.client.client import AsyncClient

PORT_DEFAULT: Final = 4222
READY_S_MAX: Final = 60.0
READY_LOOK_S: Final = 0.1
#: between SIGTERM and SIGKILL for jobs that run when all of it ends
JOBS_GRACE_S: Final = 3.0
LOCK_FILE: Final = "up.lock"


def up(
    *,
    simulate: Annotated[
        str | None, Parameter(help="Simulated hosts instead of this machine: 4x8xH100, 2x4xL40S+8xH100, or a file.")
    ] = None,
    data: Annotated[Path | None, Parameter(help="Folder of its state; else $MOORAGE_HOME, else ./.moorage.")] = None,
    port: Annotated[
        int | None, Parameter(help="Port of the server on 127.0.0.1; 4222 or a free one by default.")
    ] = None,
    options: Options = DEFAULTS,
) -> int:
    """Server, scheduler and worker on this machine, in one command.

    The other commands find it when run in the same folder. Ctrl-C ends all of it, jobs too; the state stays, and the
    next `up` on the same folder goes on from there.
    """
    gc.enable()
    return guarded(options, lambda: asyncio.run(_up(simulate, data, port, options)))


async def _up(simulate: str | None, data: Path | None, port: int | None, options: Options) -> int:
    from moorage.client.target import home

    if port is not None and not 0 <= port <= 65535:
        from moorage.client.errors import rejected

        raise rejected("invalid-argument", f"no port: {port}", allowed="0..65535", next="leave out --port")
    _check_fleet(simulate)
    folder = home(data)
    node = Node(folder, simulate or "", port, options)
    with _only_one(folder):
        return await node.run()


def _check_fleet(simulate: str | None) -> None:
    """A fleet's word that cannot be is told before anything is started."""
    if simulate is None:
        return
    from moorage.client.errors import rejected
    from moorage.schemas.errors import Refused
    from moorage.worker.run import simulated_of
    from moorage.worker.settings import WorkerSettings

    try:
        simulated_of(WorkerSettings(Path("unused"), simulate=simulate))
    except Refused as refused:
        raise rejected(
            "invalid-argument",
            refused.problem.message,
            found=simulate,
            next="for example --simulate 4x8xH100, or 2x4xL40S+8xH100",
        ) from None


@contextlib.contextmanager
def _only_one(folder: Path) -> Any:
    """Hold the folder's lock. Raises `ClientError` with already-running."""
    import fcntl

    from moorage.client.errors import ClientError, client_problem
    from moorage.client.target import UP_FILE, read_up

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        from moorage.client.errors import rejected

        raise rejected(
            "failed-precondition",
            f"the data folder {folder} cannot be used: {error.strerror}",
            found=str(folder),
            next="name another one with --data, or MOORAGE_HOME",
        ) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            running = read_up(folder)
            where = f"pid {running.pid}, {running.url}" if running is not None else "it is still starting"
            raise ClientError(
                client_problem("already-running", f"moorage up runs already on {folder} ({where})"),
                (
                    "use it: moorage fleet",
                    f"end it: kill {running.pid}" if running is not None else "wait for it",
                    "run another: moorage up --data OTHER_FOLDER",
                ),
            ) from None
        yield
    finally:
        with contextlib.suppress(OSError):
            if read_up(folder) is None or read_up(folder).pid == os.getpid():  # type: ignore[union-attr]
                (folder / UP_FILE).unlink(missing_ok=True)
        os.close(lock)


class Node:
    """One machine's moorage: the embedded server and two children, on one folder."""

    def __init__(self, folder: Path, simulate: str, port: int | None, options: Options) -> None:
        self._folder = folder
        self._simulate = simulate
        self._port = port
        self._options = options
        self._server: EmbeddedServer | None = None
        self._scheduler: Child | None = None
        self._worker: Child | None = None
        self._ready = False
        self._ending = False
        self._interrupts = 0
        self._stop = asyncio.Event()
        self._hard = asyncio.Event()

    async def run(self) -> int:
        """Until a signal, or until something cannot be kept alive. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        keeping: set[asyncio.Task[Any]] = set()
        stop = loop.create_task(self._stop.wait())
        try:
            await self._start_server()
            self._make_children()
            assert self._scheduler is not None
            assert self._worker is not None
            for child in (self._scheduler, self._worker):
                keeping.add(loop.create_task(child.keep(self._write_up)))
            keeping |= {loop.create_task(self._keep_server()), loop.create_task(self._say_ready())}
            while not stop.done():
                done, _ = await asyncio.wait({*keeping, stop}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                keeping -= done
        finally:
            stop.cancel()
            await self._end(keeping)
        return EXIT_INTERRUPTED if self._interrupts > 1 else 0

    # -- what runs

    async def _start_server(self) -> None:
        from moorage.bus.embedded import EmbeddedServer

        port = self._port
        if port is None:
            port = PORT_DEFAULT if _is_free(PORT_DEFAULT) else 0
        self._server = await EmbeddedServer.start(self._folder / "nats", port=port, sync_always=True)
        self._port = self._server.port
        _write_private(self._folder / LEDGER_URL_FILE, self._server.ledger_url + "\n")

    def _make_children(self) -> None:
        from moorage.cli.children import Child
        from moorage.scheduler.main import LEDGER_URL_FILE_VARIABLE, LEDGER_URL_VARIABLE

        assert self._server is not None
        url, folder = self._server.url, self._folder
        self._scheduler = Child(
            "scheduler",
            [sys.executable, "-m", "moorage.scheduler", "--nats", url],
            folder / "scheduler.log",
            {LEDGER_URL_FILE_VARIABLE: str(folder / LEDGER_URL_FILE), LEDGER_URL_VARIABLE: ""},
            say,
        )
        argv = [sys.executable, "-m", "moorage.cli", "worker", "--nats", url, "--state", str(self._worker_state)]
        if self._simulate:
            argv += ["--simulate", self._simulate]
        self._worker = Child("worker", argv, folder / "worker.log", {}, say)

    @property
    def _worker_state(self) -> Path:
        return self._folder / WORKERS_FOLDER / ("up-simulated" if self._simulate else "up")

    async def _keep_server(self) -> None:
        """Start the server again when it dies; its data is on disk, and everybody reconnects."""
        from moorage.bus.embedded import EmbeddedServer
        from moorage.cli.children import STARTS_MAX, STARTS_WINDOW_S, ChildFailed

        loop = asyncio.get_running_loop()
        deaths: list[float] = []
        while True:
            assert self._server is not None
            await _until_gone(self._server.pid)
            if self._ending:
                return
            deaths = [*(at for at in deaths if at > loop.time() - STARTS_WINDOW_S), loop.time()]
            if len(deaths) >= STARTS_MAX:
                raise ChildFailed("nats-server", self._folder / "nats" / "server.log", None)
            say(f"the nats-server (pid {self._server.pid}) ended; starting it again")
            await self._server.stop()
            self._server = await EmbeddedServer.start(self._folder / "nats", port=self._port or 0, sync_always=True)
            self._write_up()

    def _write_up(self) -> None:
        """Tell the other commands of this folder; no secret in it."""
        from moorage.client.target import UP_FILE, Up, started_ticks
        from moorage.schemas.codec import encode

        assert self._server is not None
        pids = {child.name: child.pid for child in (self._scheduler, self._worker) if child is not None}
        pids["nats-server"] = self._server.pid
        found = Up(self._server.url, os.getpid(), started_ticks(os.getpid()), self._simulate, pids)
        _write_private(self._folder / UP_FILE, encode(found).decode() + "\n")
        if self._ready and self._options.json:
            emit(found)

    # -- what is said

    async def _say_ready(self) -> None:
        from moorage.client.client import AsyncClient
        from moorage.client.errors import ClientError, client_problem

        assert self._server is not None
        async with AsyncClient(self._server.url, timeout=READY_S_MAX, name="moorage up") as client:
            try:
                async with asyncio.timeout(READY_S_MAX):
                    fleet = await self._until_heard(client)
            except TimeoutError:
                raise ClientError(
                    client_problem(
                        "timed-out",
                        f"no worker has joined within {READY_S_MAX:g} s",
                        next_step=f"see worker.log and scheduler.log in {self._folder}",
                    )
                ) from None
        self._ready = True
        if self._options.json:
            self._write_up()
        else:
            self._say_screen(fleet)

    async def _until_heard(self, client: AsyncClient) -> dict[str, Any]:
        from moorage.worker.run import simulated_of
        from moorage.worker.settings import WorkerSettings

        hosts = simulated_of(WorkerSettings(Path("unused"), simulate=self._simulate or None))
        expected = len(hosts) if hosts is not None else 1
        while True:
            fleet = await client.fleet()
            if sum(worker["state"] not in ("lost", "not-heard") for worker in fleet["workers"]) >= expected:
                return fleet
            await asyncio.sleep(READY_LOOK_S)

    def _say_screen(self, fleet: dict[str, Any]) -> None:
        assert self._server is not None
        assert self._scheduler is not None
        assert self._worker is not None
        live = [worker for worker in fleet["workers"] if worker["state"] != "lost"]
        gpus = sum(worker["gpus"] for worker in live)
        tag = f"{paint('sim', 'yellow', sys.stderr)}  " if self._simulate else ""
        kind = f"simulated by {self._simulate}" if self._simulate else ", ".join({m for w in live for m in w["models"]})
        lines = [
            f"{tag}{paint('moorage is up', 'bold', sys.stderr)}",
            f"  server     {self._server.url}  pid {self._server.pid}",
            f"  scheduler  epoch {fleet['epoch']}  pid {self._scheduler.pid}",
            f"  worker     {many(len(live), 'host')}, {', '.join(filter(None, (many(gpus, 'GPU'), kind)))}"
            f"  pid {self._worker.pid}",
            f"  data       {self._folder}",
            "",
            "try, in another terminal" + (f" (in {Path.cwd()}):" if self._is_default_folder else ":"),
        ]
        if not self._is_default_folder:
            lines.append(f"  export MOORAGE_HOME={shlex.quote(str(self._folder))}")
        gpu = "--gpu 2xH100 " if "H100" in self._simulate else "--gpu " if gpus else ""
        lines += [
            f"  moorage run {gpu}-- sh -c 'echo on $CUDA_VISIBLE_DEVICES'",
            f"  moorage submit {gpu}-- sleep 60",
            "  moorage ls",
            "  moorage fleet --watch",
            "Ctrl-C ends all of it",
        ]
        for line in lines:
            say(line)

    @property
    def _is_default_folder(self) -> bool:
        from moorage.client.target import home

        return self._folder == home()

    # -- the end

    def _on_signal(self) -> None:
        """The first ends in order, the second at once."""
        self._interrupts += 1
        if self._interrupts == 1:
            self._stop.set()
            return
        say("killed: what was not written yet is lost")
        for child in (self._worker, self._scheduler):
            if child is not None:
                child.kill()
        self._hard.set()

    async def _end(self, keeping: set[asyncio.Task[Any]]) -> None:
        """Worker, its jobs, scheduler, server: each when what needs it is gone."""
        self._ending = True
        say("ending …")
        if self._worker is not None:
            await self._worker.stop()
            await _end_jobs(self._worker_state, self._hard)
        if self._scheduler is not None:
            await self._scheduler.stop()
        if self._server is not None:
            await (self._server.kill() if self._hard.is_set() else self._server.stop())
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        say("ended")


async def _until_gone(pid: int) -> None:
    """Until the process is gone; it need not be our child (pidfd_open(2))."""
    loop = asyncio.get_running_loop()
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    gone = asyncio.Event()
    loop.add_reader(pidfd, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


async def _end_jobs(state: Path, hard: asyncio.Event) -> None:
    """End the worker's supervisor, which outlives its agent by design, and its jobs; at once when `hard` is set."""
    from moorage.worker.run import SUPERVISOR_FOLDER
    from moorage.worker.supervised import Supervised, SupervisorError

    folder = state / SUPERVISOR_FOLDER
    if not folder.exists():
        return
    try:
        supervised = await Supervised.connect(folder, spawn_if_absent=False)
    except (SupervisorError, OSError):
        return
    ending = asyncio.create_task(supervised.shutdown(JOBS_GRACE_S))
    at_once = asyncio.create_task(hard.wait())
    await asyncio.wait({ending, at_once}, timeout=JOBS_GRACE_S * 3, return_when=asyncio.FIRST_COMPLETED)
    if not ending.done() or ending.exception() is not None:
        supervised.kill()
        await asyncio.wait({asyncio.create_task(supervised.wait_gone())}, timeout=JOBS_GRACE_S)
    for task in (ending, at_once):
        task.cancel()
    await asyncio.gather(ending, at_once, return_exceptions=True)
    supervised.close()


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _write_private(file: Path, text: str) -> None:
    """Whole or not at all, for this user alone."""
    partial = file.with_name(f"{file.name}.new")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
        opened.write(text)
    partial.replace(file)
