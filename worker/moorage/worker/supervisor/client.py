"""Connect the agent to the supervisor (or start it), send requests, and receive events.

A `Supervised` object is one connection. When the socket closes or the supervisor falls silent the object is finished
and gives the reason; make a new one with `connect`, and read with `list` what the supervisor still has.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, cast

import msgspec

import moorage
from moorage.schemas.errors import UPGRADED
from moorage.schemas.job import DURATION_S_MAX
from moorage.schemas.unreadable import UNREADABLE
from moorage.system.framing import FrameReader, FrameRefused
from moorage.system.proctree import boottime_s, kill_trees
from moorage.system.unix_socket import open_folder, peer_of
from moorage.worker.supervisor.protocol import (
    FRAME_BYTES_MAX,
    PROTOCOL,
    SHUTS_DOWN,
    SOCKET_NAME,
    Contain,
    Done,
    End,
    EndAttempt,
    Event,
    Fence,
    Forget,
    Hello,
    List,
    Listed,
    Message,
    Output,
    Ping,
    Ran,
    Refused,
    Relimit,
    Removed,
    Request,
    Shutdown,
    Signal,
    Start,
    StartAttempt,
    decode_messages,
    encode_request,
    first_of,
)
from moorage.worker.supervisor.state_folder import EXIT_HELD

CONNECT_S: Final = 10.0
"""How long a supervisor may take to start and send its hello."""
CONNECT_RETRY_S: Final = 0.02
PING_INTERVAL_S: Final = 1.0
SILENCE_S: Final = 30.0
"""A supervisor may be silent for so long while the lease of its jobs runs. A host that is overloaded, or whose disk
takes no writes for a while, is no reason to end them."""
SILENCE_FENCED_S: Final = 3.0
"""The same once the fence deadline has passed: jobs that a silent supervisor does not end must end with it. The first
warning is logged after as long."""
EVENTS_MAX: Final = 65536
EVENTS_BYTES_MAX: Final = 16 * 1024 * 1024
"""If more events, or bytes of output in them, wait to be taken, the socket is not read further; the supervisor then
drops output first. Answers wait too, so take events while you wait for an answer.
"""

Answer: TypeAlias = Done | Listed

log = logging.getLogger("moorage.worker")


class SupervisorError(Exception):
    """Base class of the supervisor's errors."""


class SupervisorUnavailable(SupervisorError):
    """No supervisor answers on the state folder, and none could be started."""


class SupervisorGone(SupervisorError):
    """The connection is over. `silent` is set if the supervisor stopped answering, not if it closed the connection."""

    def __init__(self, message: str, *, silent: bool = False) -> None:
        super().__init__(message)
        self.silent = silent


class OtherProtocol(SupervisorUnavailable):
    """The supervisor speaks another version of the protocol than this agent."""

    def __init__(self, protocol: int, pid: int) -> None:
        super().__init__(f"the supervisor (pid {pid}) speaks protocol {protocol}, this agent {PROTOCOL}")


class SupervisorRefused(SupervisorError):
    """The supervisor refused a request; `code` is for programs. `errno` is the system's, 0 if it has none."""

    def __init__(self, code: str, message: str, errno: int = 0) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.errno = errno


@dataclass(frozen=True, slots=True)
class SupervisorIdentity:
    """Identifies a supervisor process: equal identities are one process of one boot."""

    boot_id: str
    start_ticks: int
    pid: int

    @property
    def boot(self) -> str:
        """What distinguishes one supervisor from another within one boot of the machine."""
        return f"{self.start_ticks}.{self.pid}"


class Supervised(asyncio.Protocol):
    """A live connection to a supervisor. Make it with `connect`."""

    def __init__(self) -> None:
        self.protocol: int | None = None
        """The version of the protocol that it speaks; None before its first message."""
        self.cgroup: str | None = None
        """The path of its cgroup; None if it proves ends by walking the process tree."""
        self.controllers: tuple[str, ...] = ()
        self.device_fence = ""
        """How the kernel can refuse devices to its attempts, as in `Hello`; empty if it cannot."""
        self.no_device_fence = ""
        self.takes: tuple[str, ...] = ()
        """Why it cannot."""
        self._loop = asyncio.get_running_loop()
        self._identity: asyncio.Future[SupervisorIdentity] = self._loop.create_future()
        self._gone: asyncio.Future[SupervisorGone] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(FRAME_BYTES_MAX)
        self._n = 0
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._events: list[Event] = []
        self._events_bytes = 0
        self._some = asyncio.Event()
        self._pidfd = -1
        self._heard_s = self._loop.time()
        self._watch: asyncio.TimerHandle | None = None
        self._ping_interval_s = PING_INTERVAL_S
        self._silence_s = SILENCE_S
        self._silence_fenced_s = SILENCE_FENCED_S
        self._fence_boottime_s: float | None = None
        self._warned = False  # that it is silent, since it was last heard
        self._beat_due_s = self._loop.time()

    @classmethod
    async def connect(
        cls,
        state: Path,
        spawn_if_absent: bool = True,
        *,
        replaces_other: bool = False,
        arguments: Sequence[str] = (),
        ping_interval_s: float = PING_INTERVAL_S,
        silence_s: float = SILENCE_S,
        silence_fenced_s: float = SILENCE_FENCED_S,
    ) -> "Supervised":
        """Connect to the supervisor of this state folder. If there is none, start a detached one with `arguments`.

        Without `spawn_if_absent` none is started, and `SupervisorUnavailable` is raised at once.

        With `replaces_other`, one that speaks another version of the protocol is made to end all its attempts, each
        with its grace, and another one is started behind it; without it, such a supervisor raises `OtherProtocol`.

        The connection ends after `silence_s` without a byte; a ping is sent each `ping_interval_s`. Once the deadline
        given by `fence` has passed, it ends after `silence_fenced_s`. Raises `SupervisorUnavailable`, of which
        `OtherProtocol` is one, and `SupervisorRefused`.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + CONNECT_S
        spawned = False
        while True:
            try:
                found = await cls._try_connect(state, deadline_s - loop.time())
                if found.protocol != PROTOCOL:
                    await found._leave_other(replaces_other)
                    deadline_s, spawned = loop.time() + CONNECT_S, False
                    continue
                found._ping_interval_s = ping_interval_s
                found._silence_s, found._silence_fenced_s = silence_s, silence_fenced_s
                found._beat()
                return found
            except (OSError, SupervisorGone) as error:
                if loop.time() >= deadline_s or (isinstance(error, OSError) and not spawn_if_absent):
                    raise SupervisorUnavailable(f"no supervisor answers on {state}: {error}") from error
            if spawn_if_absent and not spawned:
                # refused by a supervisor that has the folder: either it answers soon, or it is ending and the next one
                # may start
                spawned = await _spawn(state, arguments)
                if spawned:
                    continue
            await asyncio.sleep(CONNECT_RETRY_S)

    @classmethod
    async def _try_connect(cls, state: Path, timeout_s: float) -> "Supervised":
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        supervised = cls()
        try:
            with open_folder(state) as folder:
                raw.connect(f"{folder}/{SOCKET_NAME}")
            raw.setblocking(False)
            await supervised._loop.create_unix_connection(lambda: supervised, sock=raw)
        except OSError:
            raw.close()
            raise
        try:
            await asyncio.wait_for(asyncio.shield(supervised._identity), timeout_s)
        except TimeoutError:
            supervised.close()
            raise SupervisorGone("the supervisor sent no hello", silent=True) from None
        except BaseException:
            supervised.close()
            raise
        return supervised

    # -- requests

    @property
    def identity(self) -> SupervisorIdentity:
        """The identity of this supervisor."""
        return self._identity.result()

    # each writes its frame at once, in the order of the calls; the future is the supervisor's answer, or
    # `SupervisorRefused` or `SupervisorGone`

    def start(self, attempts: Sequence[StartAttempt]) -> "asyncio.Future[Answer]":
        """Start these attempts, whose frame has at most `FRAME_BYTES_MAX`. They are accepted with the answer.

        `Started` or `Ended` follows as an event for each. Starting a key again is harmless: the supervisor reports its
        state again. Raises `SupervisorGone`, `FrameTooLarge`.
        """
        return self._ask(Start(n=self._next(), attempts=tuple(attempts)))

    def contain(self, attempt: StartAttempt, container: str) -> "asyncio.Future[Answer]":
        """Have the supervisor take on a created container that is not started: start the container after the answer.

        Raises as `start`.
        """
        return self._ask(Contain(n=self._next(), attempt=attempt, container=container))

    def removed(self, keys: Iterable[str]) -> "asyncio.Future[Answer]":
        """Inform the supervisor that the engine has removed the containers of these attempts. Raises as `start`."""
        return self._ask(Removed(n=self._next(), keys=tuple(keys)))

    def ran(self, key: str, pid: int) -> "asyncio.Future[Answer]":
        """Inform the supervisor that the engine has started this attempt's container; 0 for the pid of one that is
        over.

        Raises as `start`.
        """
        return self._ask(Ran(n=self._next(), key=key, pid=pid))

    def end(self, attempts: Iterable[EndAttempt]) -> "asyncio.Future[Answer]":
        """Ask these attempts to end; `Ended` follows as an event. Unknown keys are ignored. Raises as `start`."""
        return self._ask(End(n=self._next(), attempts=tuple(attempts)))

    def relimit(self, key: str, timeout_s: float) -> "asyncio.Future[Answer]":
        """Give a running attempt another time limit. Only for a supervisor whose `takes` has it. Raises as `start`."""
        return self._ask(Relimit(n=self._next(), key=key, timeout_s=timeout_s))

    def send_signal(self, key: str, name: str) -> "asyncio.Future[Answer]":
        """Send a signal to processes of an attempt that handle it. Only where `takes` has it. Raises as `start`."""
        return self._ask(Signal(n=self._next(), key=key, signal=name))

    def fence(self, deadline_boottime_s: float | None, grace_s: float) -> "asyncio.Future[Answer]":
        """Replace the deadline (seconds of CLOCK_BOOTTIME) at which the supervisor ends all attempts by itself.

        None removes it. Attempts whose `on_partition` is `keep` are exempt. Once the deadline has passed, nothing is
        started until the deadline is removed or replaced by one in the future. Raises as `start`.
        """
        self._fence_boottime_s = deadline_boottime_s
        return self._ask(Fence(n=self._next(), deadline_boottime_s=deadline_boottime_s, grace_s=grace_s))

    def forget(self, keys: Iterable[str]) -> "asyncio.Future[Answer]":
        """Drop attempts that are dealt with; their output files stay, the agent removes them. Raises as `start`."""
        return self._ask(Forget(n=self._next(), keys=tuple(keys)))

    async def list(self) -> Listed:
        """Return everything that the supervisor has. Raises as `start`."""
        answer = await self._ask(List(n=self._next()))
        assert isinstance(answer, Listed)
        return answer

    async def shutdown_if_idle(self) -> bool:
        """End a supervisor without attempts, and return True once its process is gone.

        Return False if it has attempts. Raises `SupervisorGone`.
        """
        async with self._process_over() as over:
            try:
                await self._ask(Shutdown(n=self._next(), grace_s=0.0, idle_only=True))
            except SupervisorRefused:
                return False
            await over.wait()  # the process ends a little after its connection
        return True

    async def _leave_other(self, replaces: bool) -> None:
        """Leave a supervisor of another protocol. With `replaces`, end it and its attempts, and wait until it is gone.

        Raises `OtherProtocol` without `replaces`, or if it closes the connection and goes on.
        """
        assert self.protocol is not None
        other = OtherProtocol(self.protocol, self.identity.pid)
        try:
            if not replaces:
                raise other
            log.warning("%s: its jobs end, each with its grace, and are tried again under a new supervisor", other)
            async with self._process_over() as over:
                self._ask(Shutdown(n=self._next(), grace_s=DURATION_S_MAX, why=UPGRADED))
                await self.wait_gone()  # its answer may be of its own version, but not the end of its connection
                try:
                    await asyncio.wait_for(over.wait(), CONNECT_S)
                except TimeoutError:
                    raise other from None
        finally:
            self.close()

    @contextlib.asynccontextmanager
    async def _process_over(self) -> AsyncIterator[asyncio.Event]:
        """Give an event that is set once the supervisor's process is gone."""
        over = asyncio.Event()
        try:
            pidfd = os.pidfd_open(self.identity.pid)
        except ProcessLookupError:
            over.set()
            yield over
            return
        self._loop.add_reader(pidfd, over.set)
        try:
            yield over
        finally:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    async def shutdown(self, grace_s: float, why: str = SHUTS_DOWN) -> None:
        """End every attempt with at most this grace, then the supervisor; return once its connection is closed.

        Raises as `start`.
        """
        await self._ask(Shutdown(n=self._next(), grace_s=grace_s, why=why))
        await asyncio.shield(self._gone)

    def _next(self) -> int:
        self._n += 1
        return self._n

    def _ask(self, request: Request) -> "asyncio.Future[Answer]":
        if self._gone.done() or self._transport is None:
            raise self._gone_error()
        frame = encode_request(request)
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[request.n] = future
        future.add_done_callback(lambda _: self._waiting.pop(request.n, None))
        self._transport.write(frame)
        if not self._transport.is_reading():
            self._transport.resume_reading()
        return future

    # -- events

    async def next_events(self) -> Sequence[Event]:
        """Return all events not yet taken, at least one, in order. Raises `SupervisorGone` when no more will come."""
        while not self._events:
            if self._gone.done():
                raise self._gone_error()
            self._some.clear()
            await self._some.wait()
        events, self._events = self._events, []
        self._events_bytes = 0
        if self._transport is not None and not self._transport.is_reading():
            self._transport.resume_reading()
        return events

    async def wait_gone(self) -> SupervisorGone:
        """Wait until the connection ends, and return why."""
        return await asyncio.shield(self._gone)

    def _gone_error(self) -> SupervisorGone:
        # A new exception for each caller, so that callers do not share a traceback.
        reason = self._gone.result() if self._gone.done() else SupervisorGone("not connected")
        return SupervisorGone(str(reason), silent=reason.silent)

    def kill(self) -> None:
        """Send SIGKILL to a silent supervisor; the main processes of its jobs die with it, but containers do not.

        It never hits another process. It does nothing after `close`, or once the connection has ended for another
        reason than silence.
        """
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Close the connection; the supervisor and its attempts live on."""
        self._end(SupervisorGone("closed here"))
        self._close_pidfd()

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    # -- the protocol's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's derives from nothing of asyncio's
        peer: socket.socket = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            self._pidfd = os.pidfd_open(peer_of(peer).pid)

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        try:
            messages = [message for body in self._reader.feed(data) for message in self._messages(body)]
        except (FrameRefused, *UNREADABLE) as error:
            self._end(SupervisorGone(f"the supervisor sent an invalid frame: {error}"))
            return
        for message in messages:
            match message:
                case Hello():
                    self._greeted(message)
                case Done() | Listed():
                    self._answered(message)
                case Refused():
                    self._refused(message)
                case _:
                    self._events.append(message)
                    if isinstance(message, Output):
                        self._events_bytes += len(message.data)
        if self._events:
            self._some.set()
            self._pause_if_full()

    def _messages(self, body: bytes) -> Sequence[Message]:
        """Return the messages of a frame; of a supervisor that speaks another protocol, only its first one."""
        if self.protocol is None:
            first = first_of(body)
            self.protocol = first.protocol if isinstance(first, Hello) else PROTOCOL
            if self.protocol != PROTOCOL:
                return (first,)
        return decode_messages(body) if self.protocol == PROTOCOL else ()

    def _pause_if_full(self) -> None:
        """Stop reading while many events wait for `next_events`, unless an answer is awaited.

        The answer comes behind events, and its caller may be the one that takes the events later, as at an agent's
        start.
        """
        full = len(self._events) > EVENTS_MAX or self._events_bytes > EVENTS_BYTES_MAX
        if full and self._transport is not None and all(answer.done() for answer in self._waiting.values()):
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(SupervisorGone(f"the supervisor closed the connection{f': {exc}' if exc else ''}"))

    def _greeted(self, hello: Hello) -> None:
        if self._identity.done():
            return  # only the first hello counts
        self.cgroup, self.controllers = hello.cgroup, hello.controllers
        self.device_fence, self.no_device_fence = hello.device_fence, hello.no_device_fence
        self.takes = hello.takes
        if self._pidfd < 0:
            # the peer of a socket is the process that made it: that one has forked and ended
            with contextlib.suppress(OSError, OverflowError):
                self._pidfd = os.pidfd_open(hello.pid)
        self._identity.set_result(SupervisorIdentity(hello.boot_id, hello.start_ticks, hello.pid))

    def _answered(self, answer: Answer) -> None:
        future = self._waiting.get(answer.n)
        if future is not None and not future.done():
            future.set_result(answer)

    def _refused(self, refused: Refused) -> None:
        error = SupervisorRefused(refused.code, refused.message)
        future = self._waiting.get(refused.n)
        if refused.n == 0 and not self._identity.done():
            self._identity.set_exception(error)
        elif future is not None and not future.done():
            future.set_exception(error)

    def _beat(self) -> None:
        """Ping, and end a connection that has been silent for too long."""
        if self._transport is None:
            return
        now_s = self._loop.time()
        quiet_s = now_s - self._heard_s
        late_s, self._beat_due_s = now_s - self._beat_due_s, now_s + self._ping_interval_s
        if not self._transport.is_reading() or late_s > self._ping_interval_s:
            # this side did not read, or was stopped: what the supervisor sent meanwhile is still unread
            self._heard_s = now_s
        elif quiet_s > (self._silence_fenced_s if self._is_fenced() else self._silence_s):
            self._end(SupervisorGone(f"silent for {quiet_s:.1f} s", silent=True))
            return
        elif quiet_s <= self._silence_fenced_s:
            self._warned = False
        elif not self._warned:
            self._warned = True
            log.warning(
                "the supervisor has not answered for %.1f s: check the load of this host and of its disk. The "
                "jobs run on;"
                " after %g s without an answer the agent kills the supervisor and all its jobs",
                quiet_s,
                self._silence_s,
            )
        self._transport.write(encode_request(Ping(n=self._next())))
        self._watch = self._loop.call_later(self._ping_interval_s, self._beat)

    def _is_fenced(self) -> bool:
        """Return whether the deadline has passed at which the supervisor ends its jobs."""
        return self._fence_boottime_s is not None and boottime_s() >= self._fence_boottime_s

    def _end(self, reason: SupervisorGone) -> None:
        if self._gone.done():
            return
        self._gone.set_result(reason)
        if self._watch is not None:
            self._watch.cancel()
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        if not self._identity.done():
            self._identity.set_exception(self._gone_error())
            self._identity.exception()  # retrieved, so that asyncio does not warn about it
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(self._gone_error())
                future.exception()  # its caller may be cancelled already; retrieved, so that asyncio does not warn
        self._some.set()
        if not reason.silent:
            self._close_pidfd()


def python_variables() -> dict[str, str]:
    """Return the whole environment for a Python process of moorage: only PATH and where its packages are.

    The process finds the packages of this process, however they are installed: a virtual environment, PYTHONPATH, an
    editable install.
    """
    roots = dict.fromkeys(
        str(Path(path).parent) for path in (*moorage.__path__, os.path.dirname(str(msgspec.__file__)))
    )
    return {"PATH": os.defpath, "PYTHONPATH": os.pathsep.join(roots), "PYTHONDONTWRITEBYTECODE": "1"}


async def _spawn(state: Path, arguments: Sequence[str]) -> bool:
    """Start a supervisor in a session of its own with a clean environment. Raises `SupervisorUnavailable`.

    Return False, without an error, if another supervisor has the folder.
    """
    # A file, because the end of a pipe may never come: under uvloop the detached process keeps a copy of it.
    with tempfile.TemporaryFile() as said:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "moorage.worker.supervisor",
            "--state",
            str(state),
            "--detach",
            *arguments,
            env=python_variables(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
        try:
            await process.wait()
        except BaseException:  # the caller was cancelled: a supervisor that is not up yet would have no agent
            kill_trees([process.pid])  # with the one that it has detached already, and whose start it waits for
            await process.wait()
            raise
        said.seek(0)
        output = said.read()
    if process.returncode not in (0, EXIT_HELD):
        raise SupervisorUnavailable(output.decode(errors="replace").strip()[-2000:])
    return process.returncode == 0
