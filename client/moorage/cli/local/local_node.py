"""Runs all of moorage on one machine: an embedded server, a scheduler and a worker, kept alive until a user ends
them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moorage.bus.target import HOME_VARIABLE
from moorage.cli.framework.console import emit, paint
from moorage.cli.framework.console import try_print_err as say
from moorage.cli.framework.disk import watch_disk
from moorage.cli.framework.exit_codes import EXIT_INTERRUPTED
from moorage.cli.framework.interrupts import ENDING
from moorage.cli.framework.options import LocalOptions
from moorage.cli.local.local_tools import end_jobs, until_gone
from moorage.cli.local.processes import LEDGER_URL_FILE
from moorage.schemas.settings_file import FILE_VARIABLE, OWN_FLEET_VARIABLE
from moorage.schemas.units import many
from moorage.system.private_files import replace_private

if TYPE_CHECKING:
    from moorage.bus.embedded import EmbeddedServer
    from moorage.cli.local.children import Child
    from moorage.cli.local.local_door import LocalDoor
    from moorage.client.answers import FleetInfo
    from moorage.client.client import AsyncClient

PORT_DEFAULT: Final = 4222
SERVER_FOLDER: Final = "nats"
#: states of workers that did not come up with this process, or not yet
NOT_HERE: Final = ("lost", "left", "not-heard")
READY_S_MAX: Final = 60.0
READY_LOOK_S: Final = 0.1


class Node:
    """All of moorage on one machine, with one folder: the embedded server and two child processes."""

    def __init__(
        self,
        folder: Path,
        simulate: str,
        port: int | None,
        options: LocalOptions,
        restore: Path | None = None,
        settings: Path | None = None,
        *,
        is_open: bool = False,
        plays_freezing: bool = False,
    ) -> None:
        """`settings` is the file of which the scheduler and the worker read their own sections. With `is_open` the
        server asks nobody on this machine for a password."""
        self._folder = folder
        self._simulate = simulate
        self._port = port
        self._options = options
        self._restore = restore
        self._is_open = is_open
        self._plays_freezing = plays_freezing
        #: by the folder, clients of moorage find the password
        self._env = {HOME_VARIABLE: str(folder), OWN_FLEET_VARIABLE: "1"}
        if settings is not None:
            self._env[FILE_VARIABLE] = str(settings.absolute())
        self._context = ""
        self._server: EmbeddedServer | None = None
        self._scheduler: Child | None = None
        self._worker: Child | None = None
        self._door: LocalDoor | None = None
        self._ready = False
        self._ending = False
        self._server_ended_by_us = False
        self._interrupts = 0
        self._stop = asyncio.Event()
        self._hard = asyncio.Event()

    async def run(self) -> int:
        """Run until a signal comes or a process cannot be kept alive. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in ENDING:
            loop.add_signal_handler(number, self._on_signal)
        keeping: set[asyncio.Task[Any]] = set()
        stop = loop.create_task(self._stop.wait())
        try:
            say(f"starting on {self._folder} …")
            await self._start_server()
            if self._restore is not None:
                await self._make_ledger_of(self._restore)
            self._make_children()
            assert self._scheduler is not None
            assert self._worker is not None
            for child in (self._scheduler, self._worker):
                keeping.add(loop.create_task(child.keep(self._write_up)))
            assert self._door is not None
            assert self._server is not None
            keeping.add(loop.create_task(self._door.keep(self._server.address)))
            keeping |= {loop.create_task(self._keep_server()), loop.create_task(self._print_ready())}
            keeping.add(loop.create_task(watch_disk(self._folder, say, self._start_server_again)))
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
        from moorage.bus.embedded import HOST, EmbeddedServer
        from moorage.bus.errors import ServerFailed
        from moorage.worker.attempt.rendezvous import is_free_port

        async def start(port: int) -> EmbeddedServer:
            return await EmbeddedServer.start(
                self._folder / SERVER_FOLDER, port=port, sync_always=True, anonymous=self._is_open
            )

        if self._port is not None:
            try:
                self._server = await start(self._port)
            except ServerFailed:
                if self._port and not is_free_port(self._port, HOST):
                    raise ServerFailed(
                        self._folder / SERVER_FOLDER,
                        f"another process listens on port {self._port} of {HOST}",
                        "",
                        "leave out --port to use a free port, or name another port; ss -ltnp shows the "
                        "process that listens there",
                    ) from None
                raise
        else:
            try:
                self._server = await start(PORT_DEFAULT if is_free_port(PORT_DEFAULT, HOST) else 0)
            except ServerFailed:
                if is_free_port(PORT_DEFAULT, HOST):
                    raise
                self._server = await start(0)  # another took the port between the look and the start
        self._port = self._server.port
        replace_private(self._folder / LEDGER_URL_FILE, self._server.ledger_url + "\n")

    async def _make_ledger_of(self, backup: Path) -> None:
        """Restore the ledger as `moorage admin restore --replace` does; no scheduler runs here now."""
        from moorage.scheduler.follower.follower import count_the_rest
        from moorage.scheduler.ledger.backup import restore
        from moorage.schemas.subjects import PREFIX_DEFAULT

        assert self._server is not None
        server = self._server
        urls = server.ledger_url, server.url
        state = await restore(*urls, PREFIX_DEFAULT, 1, backup, replace=True, say=say, count_the_rest=count_the_rest)
        say(
            f"restored with {many(len(state.jobs), 'job')} from {backup}; no job is placed for lease_s + grace_s"
            " + margin_s, because jobs that were placed after the backup may still run"
        )

    def _make_children(self) -> None:
        from moorage.cli.local.children import Child
        from moorage.cli.local.local_door import LocalDoor
        from moorage.scheduler.settings import LEDGER_URL_FILE_VARIABLE, LEDGER_URL_VARIABLE

        assert self._server is not None
        url, folder = self._server.address, self._folder
        self._write_up()  # the children find the password by it
        self._scheduler = Child(
            "scheduler",
            [sys.executable, "-m", "moorage.scheduler", "--nats", url],
            folder / "scheduler.log",
            {**self._env, LEDGER_URL_FILE_VARIABLE: str(folder / LEDGER_URL_FILE), LEDGER_URL_VARIABLE: ""},
            say,
        )
        # with everything here, nobody is left to serve in the place of its jobs
        argv = [sys.executable, "-m", "moorage.cli", "worker", "--nats", url, "--leave", "0s"]
        argv += ["--state", str(self._worker_state)]
        if self._simulate:
            argv += ["--simulate", self._simulate]
        if self._plays_freezing:
            argv += ["--play-freezing"]
        self._worker = Child("worker", argv, folder / "worker.log", self._env, say)
        self._door = LocalDoor(folder, self._env, say)

    @property
    def _worker_state(self) -> Path:
        from moorage.bus.target import WORKERS_FOLDER

        return self._folder / WORKERS_FOLDER / ("up-simulated" if self._simulate else "up")

    async def _keep_server(self) -> None:
        """Start the server again when it dies; its data is on disk, and everybody reconnects."""
        from moorage.bus.embedded import EmbeddedServer
        from moorage.cli.local.children import STARTS_MAX, STARTS_WINDOW_S, ChildFailed

        loop = asyncio.get_running_loop()
        deaths: list[float] = []
        while True:
            assert self._server is not None
            await until_gone(self._server.pid)
            if self._ending:
                return
            if self._server_ended_by_us:
                self._server_ended_by_us = False
            else:
                deaths = [*(at for at in deaths if at > loop.time() - STARTS_WINDOW_S), loop.time()]
                say(f"the nats-server (pid {self._server.pid}) ended; starting it again")
            if len(deaths) >= STARTS_MAX:
                raise ChildFailed("nats-server", self._folder / SERVER_FOLDER / "server.log", None)
            await self._server.stop()
            self._server = await EmbeddedServer.start(
                self._folder / SERVER_FOLDER, port=self._port or 0, sync_always=True, anonymous=self._is_open
            )
            self._write_up()

    def _start_server_again(self) -> None:
        """End the server, so that `_keep_server` starts it again: else a stream that could not be written stays
        closed."""
        assert self._server is not None
        self._server_ended_by_us = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._server.pid, signal.SIGTERM)

    def _write_up(self) -> None:
        """Write down for other commands, in this folder and elsewhere, how they reach the server. The password is in
        the nats context alone."""
        from moorage.bus.own_fleets import remember
        from moorage.bus.own_login import offer
        from moorage.bus.target import UP_FILE, Up, started_ticks
        from moorage.schemas.codec import encode

        assert self._server is not None
        pids = {child.name: child.pid for child in (self._scheduler, self._worker) if child is not None}
        pids["nats-server"] = self._server.pid
        self._context = self._context or ("" if self._is_open else offer(self._folder, self._server.address))
        own = os.getpid(), started_ticks(os.getpid())
        door = "" if self._door is None else self._door.url
        found = Up(self._server.address, *own, self._simulate, pids, self._context, door)
        replace_private(self._folder / UP_FILE, encode(found).decode() + "\n")
        remember(self._folder)
        if self._ready and self._options.json:
            emit(found)

    # -- what is said

    async def _print_ready(self) -> None:
        from moorage.client.client import AsyncClient
        from moorage.client.errors import timed_out

        assert self._server is not None
        async with AsyncClient(self._server.url, timeout=READY_S_MAX, name="moorage up") as client:
            try:
                async with asyncio.timeout(READY_S_MAX):
                    fleet = await self._until_joined(client)
                    await self._raise_level(client, fleet)
            except TimeoutError:
                raise timed_out(
                    f"no worker has joined within {READY_S_MAX:g} s",
                    next_step=f"read worker.log and scheduler.log in {self._folder}",
                ) from None
        self._ready = True
        if self._options.json:
            self._write_up()
        else:
            self._print_screen(fleet)

    async def _until_joined(self, client: AsyncClient) -> FleetInfo:
        from moorage.worker.agent.run import simulated_of
        from moorage.worker.settings import WorkerSettings

        hosts = simulated_of(WorkerSettings(Path("unused"), simulate=self._simulate or None))
        expected = len(hosts) if hosts is not None else 1
        while True:
            fleet = await client.fleet.show()
            if sum(worker.state not in NOT_HERE for worker in fleet.workers) >= expected:
                return fleet
            await asyncio.sleep(READY_LOOK_S)

    async def _raise_level(self, client: AsyncClient, fleet: FleetInfo) -> None:
        """Raise a ledger of an older release to what this one knows: no standby could be unable to follow."""
        from moorage.scheduler.core.ledger import records

        if (level := fleet.feature_level) is None or level >= records.FORMAT:
            return
        while not fleet.schedulers:  # the leader counts as one that knows it once it has announced itself
            await asyncio.sleep(READY_LOOK_S)
            fleet = await client.fleet.show()
        await client.admin.feature_level(records.FORMAT, why="moorage up")
        say(f"feature level {records.FORMAT}: a release that knows {level} alone cannot continue from {self._folder}")

    def _print_screen(self, fleet: FleetInfo) -> None:
        assert self._server is not None
        assert self._scheduler is not None
        assert self._worker is not None
        live = [worker for worker in fleet.workers if worker.state not in NOT_HERE]
        gpus = sum(worker.gpus for worker in live)
        tag = f"{paint('sim', 'yellow', sys.stderr)}  " if self._simulate else ""
        kind = f"simulated by {self._simulate}" if self._simulate else ", ".join({m for w in live for m in w.models})
        lines = [
            f"{tag}{paint('moorage is up', 'bold', sys.stderr)}",
            f"  server     {self._server.address}  pid {self._server.pid}",
            f"  scheduler  epoch {fleet.epoch}  pid {self._scheduler.pid}",
            f"  worker     {many(len(live), 'host')}, {', '.join(filter(None, (many(gpus, 'GPU'), kind)))}"
            f"  pid {self._worker.pid}",
            *([f"  door       {self._door.url}"] if self._door is not None and self._door.url else []),
            f"  data       {self._folder}",
            f"  access     {self._access}",
            "",
            "try, in another terminal" + (f" (in {Path.cwd()}):" if self._is_default_folder else ":"),
        ]
        beside = Path(sys.executable).with_name("moorage")
        # as after `make up`; what uv runs has it in its own PATH alone
        if beside.exists() and ("UV" in os.environ or shutil.which("moorage") != str(beside)):
            lines.append(f"  export PATH={shlex.quote(str(beside.parent))}:$PATH")
        if not self._is_default_folder:
            lines.append(f"  export MOORAGE_HOME={shlex.quote(str(self._folder))}")
        largest = max(live, key=lambda worker: worker.gpus)
        has_h100 = len(largest.models) == 1 and "H100" in largest.models[0]
        gpu = f"--gpu {min(2, largest.gpus)}xH100 " if has_h100 else "--gpu " if gpus else ""
        lines += [
            f"  moorage run {gpu}-- " + ("sh -c 'echo on $CUDA_VISIBLE_DEVICES'" if gpus else "echo hello"),
            f"  moorage submit {gpu}-- sleep 60",
            "  moorage ls",
            "  moorage fleet --watch",
            *(
                []
                if gpus
                else [
                    (
                        "this machine has no GPU: submit jobs without --gpu; moorage up --simulate 4x8xH100 simulates "
                        "GPUs"
                    )
                ]
            ),
            "Ctrl-C ends the server, the scheduler, the worker and its jobs",
        ]
        for line in lines:
            say(line)

    @property
    def _access(self) -> str:
        if self._is_open:
            return f"everyone on this machine, without a password: jobs run as {_own_user()}"
        others = f"nats context {self._context}" if self._context else "--open"
        return f"{_own_user()} alone, by a password that moorage's commands find; for other clients: {others}"

    @property
    def _is_default_folder(self) -> bool:
        from moorage.bus.target import home

        return self._folder == home()

    # -- the end

    def _on_signal(self) -> None:
        """End everything in order at the first signal, and at once at the second."""
        self._interrupts += 1
        if self._interrupts == 1:
            self._stop.set()
            return
        say("worker and scheduler are killed: output that was not written yet is lost")
        for child in (self._door, self._worker, self._scheduler):
            if child is not None:
                child.kill()
        self._hard.set()

    async def _end(self, keeping: set[asyncio.Task[Any]]) -> None:
        """End the worker, its jobs, the scheduler and the server, in this order: each after those that need it."""
        self._ending = True
        say("ending the worker, its jobs, the scheduler and the server …")
        if self._door is not None:
            await self._door.stop()
        if self._worker is not None:
            await self._worker.stop()
            await end_jobs(self._worker_state, self._hard)
        if self._scheduler is not None:
            await self._scheduler.stop()
        if self._server is not None:
            await (self._server.kill() if self._hard.is_set() else self._server.stop())
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        say("ended")


def _own_user() -> str:
    """Return the name of this process's user, or the number if the system has no name for it."""
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"user {os.geteuid()}"
