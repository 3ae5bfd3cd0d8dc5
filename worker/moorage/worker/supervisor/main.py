"""Run the supervisor: the worker's second process, which owns the jobs' processes.

    python -m moorage.worker.supervisor --state DIR [--detach] [--no-cgroup] [--forked] [--linger SECONDS]

It starts jobs, is their subreaper, reads their output, enforces their timeouts and the fence deadline, and lives on
when the agent dies; the next agent connects to it again. A lock on a file in the state folder allows one supervisor per
folder. When it has no agent and no attempt, it waits a little and ends.

It cannot promise everything. A job that runs as the supervisor's own user can signal it, as can root. A set-user-ID
program loses the parent-death signal (prctl(2)), and root can leave its cgroup. A process stuck in the kernel cannot be
ended at all: its attempt is reported as unproven. A paused virtual machine has no clock that shows how long it slept.
"""

import argparse
import asyncio
import hashlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from moorage.system.cgroup import CgroupBase
from moorage.system.collector import leave_what_stays
from moorage.system.descriptors import raise_descriptor_limit
from moorage.system.loops import loop_factory
from moorage.system.proctree import become_subreaper
from moorage.system.record_file import NotThisForm, check_form
from moorage.system.unix_socket import SERVER_OPTIONS, listen
from moorage.worker.supervisor import commands
from moorage.worker.supervisor.commands import Commands
from moorage.worker.supervisor.journal import FORM
from moorage.worker.supervisor.launcher_client import open_compiled
from moorage.worker.supervisor.log import log
from moorage.worker.supervisor.mps_notice import NOTICE_S
from moorage.worker.supervisor.protocol import JOURNAL_NAME, LOG_NAME, OUTPUT_FOLDER, SOCKET_NAME
from moorage.worker.supervisor.server import Connection
from moorage.worker.supervisor.state_folder import EXIT_HELD, Held, take_lock
from moorage.worker.supervisor.supervisor import LINGER_S, Supervisor

TERM_GRACE_S: Final = 10.0
#: such a journal names attempts of which processes may be left: without it, their jobs would begin again beside them
_OF_ANOTHER_RELEASE: Final = (
    "is not a journal that this release can read: use the release that wrote it, or move the file away once no job of"
    " it runs here"
)


def detach(state: Path) -> None:
    """Go on in a child process with a session of its own; the calling process exits with 0.

    The child's standard output and error are the log file. Call it once the socket listens: a parent that waits for
    this process then knows that it can connect.
    """
    if os.fork() != 0:
        os._exit(0)
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    output = os.open(state / LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(null)
    os.close(output)


async def serve(
    state: Path,
    listener: socket.socket,
    for_commands: socket.socket,
    cgroups: CgroupBase | None,
    limits: tuple[int, int],
    linger_s: float = LINGER_S,
    program: int = -1,
    notice_s: float = NOTICE_S,
) -> None:
    """Run until the supervisor is stopped. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    supervisor = Supervisor(state, cgroups, limits, linger_s, program, notice_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.shut_down, TERM_GRACE_S)
    # uvloop hides SIGCHLD from its own handlers; the handlers above make either loop wake up for any signal
    before = signal.signal(signal.SIGCHLD, lambda *_: loop.call_soon_threadsafe(supervisor.jobs.reap))
    if program >= 0:  # start it now, so that the first job need not wait for it
        supervisor.jobs.launcher.running()
    leave_what_stays()
    server = await loop.create_unix_server(lambda: Connection(supervisor), sock=listener, **SERVER_OPTIONS)
    running = Commands(supervisor.jobs, for_commands)
    running.begin()
    try:
        await supervisor.finished.wait()
    finally:
        running.close()
        signal.signal(signal.SIGCHLD, before)
        server.close()


def main(arguments: list[str] | None = None, loops: Callable[[], asyncio.AbstractEventLoop] | None = None) -> int:
    """Run the command and return its exit status.

    `loops` makes the event loop, by default the one of all our processes. Its time is the clock of every timer here but
    the fence's.
    """
    parser = argparse.ArgumentParser(prog="moorage-supervisor", description="Owns the processes of a worker's jobs.")
    parser.add_argument("--state", type=Path, required=True, help="folder of the socket, the journal and the output")
    parser.add_argument("--detach", action="store_true", help="return once the socket listens, and run on")
    parser.add_argument("--no-cgroup", action="store_true", help="prove by walking the tree even where cgroups work")
    parser.add_argument("--forked", action="store_true", help="start by forks even where the launcher is compiled")
    parser.add_argument(
        "--linger", type=float, default=LINGER_S, help="seconds without agent and attempt until it ends"
    )
    parser.add_argument("--notice", type=float, default=NOTICE_S, help="seconds that an end waits for an MPS daemon")
    options = parser.parse_args(arguments)
    os.umask(0o077)
    state: Path = options.state.absolute()
    try:
        state.mkdir(parents=True, exist_ok=True)
        os.chmod(state, 0o700)
        (state / OUTPUT_FOLDER).mkdir(exist_ok=True)
        lock = take_lock(state)
        check_form(state / JOURNAL_NAME, FORM)
        for_commands = listen(state / commands.SOCKET_NAME, kind=socket.SOCK_SEQPACKET)
        listener = listen(state / SOCKET_NAME)
    except Held as held:
        print(f"moorage-supervisor: {held}", file=sys.stderr)
        return EXIT_HELD
    except NotThisForm:
        print(f"moorage-supervisor: {state / JOURNAL_NAME} {_OF_ANOTHER_RELEASE}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"moorage-supervisor: {error}", file=sys.stderr)
        return 1
    os.chdir("/")
    if options.detach:
        detach(state)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    program, why = (-1, "--forked was given") if options.forked else open_compiled()
    log(f"no compiled launcher, each start takes longer: {why}" if why else "jobs start by the compiled launcher")
    become_subreaper()
    limits = raise_descriptor_limit()
    name = "moorage-" + hashlib.blake2b(os.fsencode(state), digest_size=6).hexdigest()
    cgroups = None if options.no_cgroup else CgroupBase.open(name)
    with asyncio.Runner(loop_factory=loops or loop_factory()) as runner:
        runner.run(serve(state, listener, for_commands, cgroups, limits, options.linger, program, options.notice))
    return 0
