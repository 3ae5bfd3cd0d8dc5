"""The supervisor: the worker's second process, which owns the jobs' processes.

    python -m moorage.worker.supervisor --state DIR [--detach] [--no-cgroup] [--interpreted] [--linger SECONDS]

It starts jobs, is their subreaper, pumps their output, keeps their timeouts and the fence deadline, and lives on when
the agent dies; the agent connects to it again. One supervisor per state folder, by a lock on a file there. Once it has
neither agent nor member it waits a little and ends.

What it cannot promise. A job that runs as the supervisor's own user can signal it, as can root. A set-user-ID program
loses the parent-death signal (prctl(2)), and root can leave its cgroup. A process stuck in the kernel cannot be ended
by anybody: such a member is told as unproven. A virtual machine that was paused has no clock to notice by.
"""

import argparse
import asyncio
import contextlib
import fcntl
import hashlib
import os
import resource
import secrets
import signal
import socket
import string
import sys
from pathlib import Path
from typing import Any, Final

from moorage.worker.cgroup import CgroupBase
from moorage.worker.proctree import become_subreaper, boot_id, boottime_s, read_process
from moorage.worker.supervisor.compiled import compiled_launcher
from moorage.worker.supervisor.fence import BoottimeTimer
from moorage.worker.supervisor.former import FormerMembers
from moorage.worker.supervisor.jobs import CLEAR_DELAY_S_MAX, CLEAR_DELAY_S_MIN, UNPROVEN_AFTER_S, Jobs
from moorage.worker.supervisor.journal import Forgotten, Journal, Over, Record, read_journal, records_of
from moorage.worker.supervisor.log import log
from moorage.worker.supervisor.output import output_path
from moorage.worker.supervisor.protocol import (
    JOURNAL_NAME,
    LOCK_NAME,
    LOG_NAME,
    MARK_NAME,
    OUTPUT_FOLDER,
    PROTOCOL,
    SHUTS_DOWN,
    SOCKET_NAME,
    Done,
    End,
    Ended,
    Event,
    Fence,
    Forget,
    Hello,
    List,
    Listed,
    Message,
    Ping,
    Refused,
    Request,
    Shutdown,
    Start,
)
from moorage.worker.supervisor.server import Connection
from moorage.worker.unix_socket import listen

EXIT_HELD: Final = 73
"""The exit status of a supervisor that finds another on its state folder (EX_CANTCREAT of sysexits.h)."""
TERM_GRACE_S: Final = 10.0
DESCRIPTORS_WANTED: Final = 65536
CONNECTIONS_MAX: Final = 8
LINGER_S: Final = 30.0
"""A supervisor that nobody is connected to and that has no member waits so long for its agent, then ends."""
MARK_BYTES: Final = 16


class Supervisor:
    """Everything of one state folder. Made inside the running loop."""

    def __init__(
        self,
        state: Path,
        cgroups: CgroupBase | None,
        descriptors: tuple[int, int],
        linger_s: float = LINGER_S,
        program: str | None = None,
    ) -> None:
        """Raises `OSError`."""
        self.finished = asyncio.Event()
        self._linger_s = linger_s
        self._linger_timer: asyncio.TimerHandle | None = None
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._cgroups = cgroups
        self._connections: list[Connection] = []
        self._records: list[Record] = []
        self._flushing = False
        self._shutdowns: list[tuple[Connection, int]] = []
        self._shutting_down = False
        machine_boot = boot_id()
        left = read_journal(state / JOURNAL_NAME)
        self._former = FormerMembers(machine_boot, {key: entry for key, entry in left.items() if entry.ended is None})
        self._former_since_s = self._loop.time()
        self._former_told = False
        self._journal = Journal(state / JOURNAL_NAME, records_of(left))
        self.jobs = Jobs(
            state=state,
            state_mark=state_mark(state),
            boot_id=machine_boot,
            cgroups=cgroups,
            descriptors=descriptors,
            emit=self._emit,
            record=self._records.append,
            write_ahead=self._write_ahead,
            program=program,
        )
        self.jobs.ended.update((key, entry.ended) for key, entry in left.items() if entry.ended is not None)
        me = read_process(os.getpid())
        assert me is not None
        self._hello = Hello(
            protocol=PROTOCOL,
            pid=me.pid,
            boot_id=machine_boot,
            start_ticks=me.start_ticks,
            cgroup=cgroups.path if cgroups is not None else None,
            controllers=cgroups.controllers if cgroups is not None else (),
        )
        if cgroups is not None:
            cgroups.kill_former()
        self._fence_grace_s = 0.0
        self._fence_timer = BoottimeTimer(self._loop, self._fence_passed)
        self._clear_former(CLEAR_DELAY_S_MIN)
        self._linger()

    # -- what is said, and what is kept of it

    def _emit(self, event: Event) -> None:
        for connection in self._connections:
            connection.say(event)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Once a turn: the journal first, so that nothing told is lost with this process."""
        self._flushing = False
        if self.finished.is_set():
            return
        self._journal_records()
        for connection in list(self._connections):
            connection.flush()
        if not self._connections and self._linger_timer is None:
            self._linger()  # the last member may have ended
        if self._shutting_down and not self.jobs.members:
            self._finish()

    def _journal_records(self) -> None:
        if not self._records:
            return
        records = list(self._records)
        self._records.clear()
        try:
            self._journal.append(records)
            if self._journal.wants_compaction:
                self._journal.compact(records_of(read_journal(self._state / JOURNAL_NAME)))
        except OSError as error:
            # An end that is not kept is told by the next supervisor as `supervisor-died`.
            log(f"journal: {error}")

    def _write_ahead(self, records: list[Record]) -> None:
        self._journal_records()
        self._journal.append(records)

    # -- the former supervisor's members

    def _clear_former(self, delay_s: float) -> None:
        proven: list[Ended] = []
        try:
            proven = self._former.clear(boottime_s())
        except OSError as error:  # no descriptor to look with: look again
            log(f"cannot see what the last supervisor left: {error}")
        for ended in proven:
            self.jobs.ended[ended.key] = ended
            self._records.append(Over(ended=ended))
            self._emit(ended)
        if not self._former.waiting or self.finished.is_set():
            return
        if not self._former_told and self._loop.time() - self._former_since_s >= UNPROVEN_AFTER_S:
            self._former_told = True
            for unproven in self._former.found.values():
                self._emit(unproven)
        later_s = min(2 * delay_s, 10 * CLEAR_DELAY_S_MAX)
        self._loop.call_later(delay_s, self._clear_former, later_s)

    # -- connections

    def opened(self, connection: Connection) -> bool:
        """A new connection; False when there are too many."""
        if len(self._connections) >= CONNECTIONS_MAX:
            return False
        self._connections.append(connection)
        self._linger()
        connection.say(self._hello)
        self._flush_soon()
        return True

    def closed(self, connection: Connection) -> None:
        """The connection has ended; members and deadlines stay as they are."""
        if connection in self._connections:
            self._connections.remove(connection)
        self._linger()

    def asked(self, connection: Connection, request: Request) -> None:
        """Carry out one request. Its answer follows the events it causes at once."""
        answer: Message = Done(n=request.n)
        match request:
            case Start():
                answer = self._start(request)
            case End():
                for member in request.members:
                    grace_s, notice_s = max(0.0, member.grace_s), max(0.0, member.notice_s)
                    self.jobs.end(member.key, "end", grace_s, member.why, notice_s)
            case Fence():
                answer = self._fence(request)
            case List():
                answer = self._listed(request.n)
            case Forget():
                self._forget(request)
            case Ping():
                pass
            case Shutdown() if request.idle_only and not self._idle:
                answer = Refused(n=request.n, code="busy", message="it has members")
            case Shutdown():
                self._shutdowns.append((connection, request.n))
                self.shut_down(max(0.0, request.grace_s))
                return
        connection.say(answer)
        self._flush_soon()

    def _start(self, request: Start) -> Message:
        if self._shutting_down:
            return Refused(n=request.n, code="shutting-down", message="the supervisor is shutting down")
        former = [member.key for member in request.members if member.key in self._former.waiting]
        if former:
            return Refused(n=request.n, code="unproven", message=f"not proven over yet: {former[0]}")
        self.jobs.start(request.members)
        return Done(n=request.n)

    def _fence(self, request: Fence) -> Message:
        deadline_s = request.deadline_boottime_s
        if not (request.grace_s >= 0 and (deadline_s is None or 0 <= deadline_s < 1e9)):
            return Refused(n=request.n, code="invalid-argument", message="deadline or grace out of bounds")
        self._fence_grace_s = request.grace_s
        if deadline_s is None or deadline_s > boottime_s():
            self.jobs.fenced = False
            self._fence_timer.arm(deadline_s)
        else:
            self._fence_timer.arm(None)
            self._fence_passed()
        return Done(n=request.n)

    def _fence_passed(self) -> None:
        log("the fence deadline passed")
        self.jobs.fence(self._fence_grace_s)

    def _listed(self, n: int) -> Listed:
        members = self.jobs.members.values()
        return Listed(
            n=n,
            waiting=tuple(member.key for member in members if not member.confirmed),
            running=tuple(self.jobs.started(member) for member in members if member.confirmed),
            ended=tuple(self.jobs.ended.values()),
            unproven=(*self.jobs.unproven.values(), *self._former.found.values()),
        )

    def _forget(self, request: Forget) -> None:
        keys = [key for key in request.keys if self.jobs.ended.pop(key, None) is not None]
        if request.unproven:
            keys += [key for key in request.keys if self._former.drop(key)]
        if not keys:
            return
        self._records.append(Forgotten(keys=tuple(keys)))
        if not request.keep_output:
            for key in keys:
                for stream in ("stdout", "stderr"):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(output_path(self._state, key, stream))

    # -- the end

    @property
    def _idle(self) -> bool:
        return not self.jobs.members and not self._former.waiting

    def _linger(self) -> None:
        """With no agent and no member there is nothing to keep alive: end, a while after both are so.

        The ends that nobody took stay in the journal, where the next supervisor finds them.
        """
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        if not self._connections and self._idle and not self._shutting_down:
            self._linger_timer = self._loop.call_later(self._linger_s, self._lingered)

    def _lingered(self) -> None:
        self._linger_timer = None
        if not self._connections and self._idle:
            log(f"no agent and no member for {self._linger_s:g} s: ending")
            self._finish()

    def shut_down(self, grace_s: float) -> None:
        """End every member with at most this grace, then finish."""
        if not self._shutting_down:
            self._shutting_down = True
            self._loop.call_later(grace_s + UNPROVEN_AFTER_S, self._finish)
        for member in list(self.jobs.members.values()):
            self.jobs.end(member.key, "end", min(grace_s, member.start.grace_s), SHUTS_DOWN)
        self._flush_soon()

    def _finish(self) -> None:
        if self.finished.is_set():
            return
        self.finished.set()
        self._journal_records()
        for connection, n in self._shutdowns:
            connection.say(Done(n=n))
        for connection in list(self._connections):
            connection.flush()
            connection.close()
        self._fence_timer.close()
        self.jobs.launches.close()
        self._journal.close()
        if self._cgroups is not None:
            with contextlib.suppress(OSError):
                self._cgroups.remove()


class Held(Exception):
    """Another supervisor holds the state folder."""

    def __init__(self, state: Path, holder: str) -> None:
        super().__init__(f"another supervisor (pid {holder or 'unknown'}) holds {state}")


def state_mark(state: Path) -> str:
    """This folder's random mark, made with the folder's first supervisor. Raises `OSError`.

    The caller holds the folder's lock. A file that holds no mark is replaced; members started before keep theirs, which
    the journal has.
    """
    path = state / MARK_NAME
    with contextlib.suppress(FileNotFoundError):
        found = path.read_bytes()[: MARK_BYTES * 2].decode("ascii", "replace")
        if len(found) == MARK_BYTES * 2 and all(char in string.hexdigits for char in found):
            return found
    mark = secrets.token_hex(MARK_BYTES)
    fresh = path.with_name(MARK_NAME + ".new")
    fresh.write_text(mark)
    os.rename(fresh, path)
    return mark


def take_lock(state: Path) -> int:
    """The descriptor of the locked file; the lock lives as long as it. Raises `Held`, `OSError`."""
    descriptor = os.open(state / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip()
        os.close(descriptor)
        raise Held(state, holder) from None
    return descriptor


def raise_descriptor_limit() -> tuple[int, int]:
    """Make room for the pipes; returns the limits as they were, which are the children's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft, hard


def detach(state: Path) -> None:
    """Go on in a child with a session of its own; the caller's process exits with 0, since the socket listens."""
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
    cgroups: CgroupBase | None,
    limits: tuple[int, int],
    linger_s: float = LINGER_S,
    program: str | None = None,
) -> None:
    """Run until told to stop. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    supervisor = Supervisor(state, cgroups, limits, linger_s, program)
    loop.add_signal_handler(signal.SIGCHLD, supervisor.jobs.reap)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.shut_down, TERM_GRACE_S)
    supervisor.jobs.launches.start_launcher()
    supervisor.jobs.launches.kits.fill()
    # From 3.13 on asyncio would look up the bound name to remove it in the end: that led through a descriptor that is
    # closed by now, and the name is the next supervisor's to take over.
    keep: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
    server = await loop.create_unix_server(lambda: Connection(supervisor), sock=listener, **keep)
    try:
        await supervisor.finished.wait()
    finally:
        server.close()


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns its exit status."""
    parser = argparse.ArgumentParser(prog="moorage-supervisor", description="Owns the processes of a worker's jobs.")
    parser.add_argument("--state", type=Path, required=True, help="folder of the socket, the journal and the output")
    parser.add_argument("--detach", action="store_true", help="return once the socket listens, and run on")
    parser.add_argument("--no-cgroup", action="store_true", help="prove by walking the tree even where cgroups work")
    parser.add_argument("--interpreted", action="store_true", help="launcher.py even where a C compiler is there")
    parser.add_argument("--linger", type=float, default=LINGER_S, help="seconds without agent and member until it ends")
    options = parser.parse_args(arguments)
    os.umask(0o077)
    state: Path = options.state.absolute()
    try:
        state.mkdir(parents=True, exist_ok=True)
        os.chmod(state, 0o700)
        (state / OUTPUT_FOLDER).mkdir(exist_ok=True)
        lock = take_lock(state)
        listener = listen(state / SOCKET_NAME)
    except Held as held:
        print(f"moorage-supervisor: {held}", file=sys.stderr)
        return EXIT_HELD
    except OSError as error:
        print(f"moorage-supervisor: {error}", file=sys.stderr)
        return 1
    os.chdir("/")
    if options.detach:
        detach(state)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    program = None if options.interpreted else compiled_launcher(state, log)
    become_subreaper()
    limits = raise_descriptor_limit()
    name = "moorage-" + hashlib.blake2b(os.fsencode(state), digest_size=6).hexdigest()
    cgroups = None if options.no_cgroup else CgroupBase.open(name)
    asyncio.run(serve(state, listener, cgroups, limits, options.linger, program))
    return 0
