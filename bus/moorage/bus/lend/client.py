"""Borrow GPUs for a process that already runs: the client of the agent's socket.

    async with borrow("/run/moorage/lease.sock", "1xL40S", purpose="fine-tune") as lease:
        model.to(torch.device("cuda", lease.devices[0].index))
        ...
        if lease.asked_back:  # the agent stops or is gone, or the devices are idle or wanted: see its `reason`
            save_checkpoint(within_s=lease.asked_back.left_s)
            break

The devices go to the next user once their memory is free, so free it before the block ends. CUDA keeps a context on a
device for as long as its process lives, so do GPU work in a child process that has `lease.environment`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Final

from moorage.bus.lend import protocol
from moorage.bus.lend.protocol import frame, read_answer
from moorage.schemas.errors import MoorageError, Problem, problem
from moorage.schemas.frames import Device
from moorage.schemas.gpu import GpuSpec, as_one_replica, parse_token
from moorage.system.device_environment import device_environment
from moorage.system.framing import FrameRefused
from moorage.system.proctree import boottime_s
from moorage.system.unix_socket import open_folder

RETURN_S_MAX: Final = 5.0
#: the pause before the next try to connect to an agent whose queue of connections is full
CONNECT_AGAIN_S: Final = 0.05
#: why a lease was lost: the connection to the agent ended, because the agent stopped or restarted
AGENT_GONE: Final = "agent-gone"
#: what `wait_asked_back` returns as the reason once the holder itself has given the lease back
GIVEN_BACK: Final = "given-back"

log = logging.getLogger("moorage.worker")


class LeaseRefused(MoorageError):
    """No lease: the agent refused it or is gone. `errno` is 0 unless the socket could not be connected to."""

    def __init__(self, problem: Problem, errno: int = 0) -> None:
        self.errno: Final = errno
        super().__init__(problem)


class AskedBack:
    """A request to give the devices back: its `reason`, and the deadline in seconds of CLOCK_BOOTTIME.

    A lost lease has one, too, with the reason `AGENT_GONE` and the time of the loss as its deadline.
    """

    __slots__ = ("deadline_boottime_s", "reason")

    def __init__(self, reason: str, deadline_boottime_s: float) -> None:
        self.reason: Final = reason
        self.deadline_boottime_s: Final = deadline_boottime_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; 0 once it has passed."""
        return max(0.0, self.deadline_boottime_s - boottime_s())

    def __repr__(self) -> str:
        return f"<AskedBack {self.reason!r} within {self.left_s:.1f} s>"


class BorrowedLease:
    """Devices of this host that this process has until it gives them back, alone or shared in their `mode`.

    `borrow` makes it. `simulated` is set if the worker's devices are not real.
    """

    def __init__(
        self,
        granted: protocol.Granted,
        spec: GpuSpec,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_asked_back: Callable[[AskedBack], None] | None = None,
    ) -> None:
        self.worker: Final = granted.worker
        self.devices: Final[tuple[Device, ...]] = tuple(granted.devices)
        self.mode: Final = granted.mode
        self.simulated: Final = granted.simulated
        #: the variables that show a process exactly these devices (`CUDA_VISIBLE_DEVICES` and the like)
        self.environment: Final[Mapping[str, str]] = device_environment(
            granted.devices, granted.mode, spec, simulated=granted.simulated, by_uuid=granted.by_uuid
        )
        self._on_asked_back = on_asked_back
        #: the latest request to give back; None again if it is withdrawn, as when a drain ends
        self.asked_back: AskedBack | None = None
        self._writer = writer
        self._news = asyncio.Event()
        self._over = False
        self._lost = False
        self._listening = asyncio.get_running_loop().create_task(self._listen(reader))

    @property
    def uuids(self) -> tuple[str, ...]:
        return tuple(device.uuid for device in self.devices)

    @property
    def lost(self) -> bool:
        """Whether the connection to the agent ended, and the lease with it: other processes may get the devices.

        If so, `asked_back` is set. A lease that was given back is not lost.
        """
        return self._lost

    async def wait_asked_back(self) -> AskedBack:
        """Wait until the lease is asked back or lost, and return the latest request; at once if there is one already.

        If the lease is given back first, the reason is `GIVEN_BACK`.
        """
        while self.asked_back is None and not self._over:
            await self._news.wait()
        return self.asked_back or AskedBack(GIVEN_BACK, boottime_s())

    async def give_back(self) -> None:
        """Give the devices back, and wait at most `RETURN_S_MAX` seconds for the agent's answer. Raises no error.

        Does nothing if they are given back or lost already.
        """
        if self._over:
            return
        self._over = True
        self._news.set()
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(RETURN_S_MAX):
                self._writer.write(frame(protocol.GiveBack()))
                await self._writer.drain()
                await asyncio.shield(self._listening)
        self._listening.cancel()
        self._writer.close()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                answer = await read_answer(reader)
            except FrameRefused:
                answer = None
            if isinstance(answer, protocol.AskedBack):
                if answer.deadline_boottime_s == protocol.NEVER_S:
                    self.asked_back = None
                    self._news.clear()
                else:
                    self._note_asked(AskedBack(answer.reason, answer.deadline_boottime_s))
            elif isinstance(answer, protocol.Returned):
                return
            else:
                if not self._over:
                    self._over = self._lost = True
                    self._note_asked(AskedBack(AGENT_GONE, boottime_s()))
                return

    def _note_asked(self, asked: AskedBack) -> None:
        self.asked_back = asked
        self._news.set()
        if self._on_asked_back is None:
            return
        try:
            self._on_asked_back(asked)
        except Exception:  # the listener must go on: without it the process would not learn that the lease is lost
            log.exception("on_asked_back of %r raised", self)

    def __repr__(self) -> str:
        state = "lost" if self._lost else "given back" if self._over else "held"
        return f"<BorrowedLease {' '.join(self.uuids)} of {self.worker} {state}>"


@contextlib.asynccontextmanager
async def borrow(
    path: Path | str,
    gpu: str | GpuSpec = "1x",
    *,
    purpose: str = "",
    timeout_s: float | None = None,
    on_asked_back: Callable[[AskedBack], None] | None = None,
) -> AsyncIterator[BorrowedLease]:
    """Borrow GPUs from this host's worker, waiting in its queue; they are given back at the end of the block.

    `path` is the agent's socket. `gpu` is a token (`2xH100:80G`, `1xL40S@time-slice`) or a spec for one replica: all of
    it is granted or nothing. Waiting is first come, first served, for at most `timeout_s` (None: without limit). The
    lease belongs to this process and ends with it. `on_asked_back` is called in the event loop, also when the lease is
    lost; an exception that it raises is logged.

    Raises LeaseRefused (no agent there, a user who may not borrow, too few devices that match), SharingUnavailable if
    this host lacks what the shared mode needs, ValueError for a bad token, and TimeoutError after `timeout_s`.
    """
    spec = gpu if isinstance(gpu, GpuSpec) else _spec_of(gpu)
    answer, reader, writer = await _ask(Path(path), protocol.Borrow(spec, purpose), timeout_s)
    try:
        if not isinstance(answer, protocol.Granted):
            raise LeaseRefused(_problem_of(answer))
        lease = BorrowedLease(answer, spec, reader, writer, on_asked_back)
        try:
            yield lease
        finally:
            await lease.give_back()
    finally:
        writer.close()


async def _connect(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.setblocking(False)
    try:
        while True:
            try:
                with open_folder(path.parent) as folder:
                    peer.connect(f"{folder}/{path.name}")
                return await asyncio.open_unix_connection(sock=peer)
            except BlockingIOError:  # the listener's queue is full: the agent is busy or stopped
                await asyncio.sleep(CONNECT_AGAIN_S)
    except asyncio.CancelledError:
        peer.close()
        raise
    except OSError as error:
        peer.close()
        raise LeaseRefused(
            problem(
                "failed-precondition",
                f"no agent lends GPUs to this process at {path}: {error.strerror or error}",
                found=str(path),
                next="start a worker on this host; or add this user to its lease_uids, and to the group lease_gid",
            ),
            error.errno or 0,
        ) from None


async def _ask(
    path: Path, request: protocol.Request, timeout_s: float | None
) -> tuple[protocol.Answer | None, asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect, send a request, and return the answer with the connection. Raises LeaseRefused and TimeoutError."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await _connect(path)
        try:
            return await _answer(reader, writer, request), reader, writer
        except BaseException:
            writer.close()
            raise


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: protocol.Request
) -> protocol.Answer | None:
    try:
        writer.write(frame(request))
        await writer.drain()
    except ConnectionError:
        pass  # the agent's answer says why it closed the connection
    try:
        return await read_answer(reader)
    except FrameRefused as error:
        return problem("unknown-version", str(error))


def _problem_of(answer: protocol.Answer | None) -> Problem:
    if isinstance(answer, Problem):
        return answer
    return problem("failed-precondition", "the agent closed the connection", next="borrow again once the agent is back")


def _spec_of(token: str) -> GpuSpec:
    replicas, spec = parse_token(token)
    if replicas != 1:
        fix = as_one_replica(spec, replicas)
        raise ValueError(f"a lease is on one host and has no replicas: write {fix}, found {token!r}")
    return spec
