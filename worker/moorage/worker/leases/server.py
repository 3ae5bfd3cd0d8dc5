"""The agent's socket for processes that already run on its host and borrow GPUs from its pool.

A lease is a connection. It ends when the holder says so, when the connection ends, or when the process that made it is
gone (its pidfd; a child that inherited the socket does not keep the lease alive). Its devices go round once their
memory is seen back at the idle baseline, and a share of one once the driver lists no process of the holder on it; until
then they stay out of use, in quarantine after `free_wait_s`, as after any job. A process that lives on and keeps a
context on the device therefore keeps the device.

Borrowers wait in one line, and the first of them in the pool's own line (`GpuPool.claim`): while it waits no placement
is taken on this host, so it is never overtaken. It gets all of its devices or none. While a process of the host shares
a device, the fleet places nothing more on that device; other borrowers may share it, within the mode's caps.

The uid of the peer must be the agent's own, root, or one of `uids` (SO_PEERCRED of unix(7)). The socket has mode 0600,
or 0660 with a group.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from moorage.schemas.errors import MoorageError, Problem, problem
from moorage.schemas.frames import Device
from moorage.schemas.gpu import GpuSpec, Sharing, format_token, model_matches
from moorage.worker.inventory.base import Inventory
from moorage.worker.leases.protocol import (
    FRAME_BYTES_MAX,
    PROTOCOL,
    PURPOSE_CHARS_MAX,
    Answer,
    AskedBack,
    Borrow,
    FrameRefused,
    Granted,
    Recall,
    Recalled,
    Request,
    Returned,
    frame,
    read_request,
)
from moorage.worker.pool import GpuLease, GpuPool
from moorage.worker.proctree import boottime_s, descendants
from moorage.worker.supervisor.server import open_folder

CONNECTIONS_MAX: Final = 256
BACKLOG_MAX: Final = 64
#: a peer that connected and says nothing is sent away
FIRST_WORD_S_MAX: Final = 5.0
FREE_WAIT_S: Final = 10.0
#: how long holders have when an operator drains the worker, which says no time
DRAIN_S: Final = 3600.0
DRAINED: Final = "the worker is drained"
#: who keeps a slot of the pool closed
CLOSED_BY: Final = "asked back"
PROBE_S: Final = 0.25
PROBE_QUARANTINED_S: Final = 5.0
_CREDENTIALS: Final = struct.Struct("3i")
#: socket(7), since Linux 6.5: a pidfd of the peer, which unlike its pid cannot have become another process's
_SO_PEERPIDFD: Final = 77

log = logging.getLogger("moorage.worker")


class Holder:
    """A connection that has, or waits for, a lease."""

    __slots__ = ("asked_back", "mode", "overdue", "pid", "purpose", "slots", "uid", "writer")

    def __init__(self, pid: int, uid: int, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.uid = uid
        self.writer = writer
        self.purpose = ""
        self.slots: tuple[int, ...] = ()
        self.mode: Sharing = "exclusive"
        self.asked_back: AskedBack | None = None
        self.overdue: asyncio.TimerHandle | None = None

    def say(self, answer: Answer) -> None:
        """A holder that does not read loses nothing but words: there are few, and each is small."""
        if not self.writer.is_closing():
            self.writer.write(frame(answer))

    def __repr__(self) -> str:
        return f"<Holder pid {self.pid} uid {self.uid} slots {list(self.slots)} {self.purpose!r}>"


class LeaseServer:
    """Lends the devices of `pool`. `open` it, `ask_back` what is needed, `close` it; one event loop throughout."""

    def __init__(
        self,
        worker: str,
        pool: GpuPool,
        inventory: Inventory,
        *,
        modes: Sequence[str] = ("exclusive",),
        uids: Sequence[int] = (),
        gid: int | None = None,
        free_wait_s: float = FREE_WAIT_S,
    ) -> None:
        self._worker = worker
        self._pool = pool
        self._inventory = inventory
        self._devices = inventory.devices()
        self._modes = modes
        self._uids = frozenset({os.geteuid(), 0, *uids})
        self._gid = gid
        self._free_wait_s = free_wait_s
        self._line = asyncio.Lock()  # asyncio's is first come, first served
        self._server: asyncio.Server | None = None
        self._holders: set[Holder] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._freeing: set[GpuLease] = set()
        self._marked: dict[int, set[object]] = {}  # slots that we put in quarantine, with whom it is for
        self._empty = asyncio.Event()
        self._empty.set()
        self._closing = ""
        self._closed = False

    @property
    def holders(self) -> list[Holder]:
        """Who has a lease now; those that wait for one are not listed."""
        return [holder for holder in self._holders if holder.slots]

    async def open(self, path: Path) -> None:
        """Listen on `path`, in place of the socket of an agent that is gone.

        Raises OSError: EADDRINUSE where another agent listens there.
        """
        self._server = await asyncio.start_unix_server(self._accept, sock=_listen(path, self._gid))

    def ask_back(self, reason: str, within_s: float, pid: int | None = None) -> int:
        """Ask holders (those of `pid`, or all) to give back within so many seconds; how many were asked.

        Who does not is not ended, as it is no process of ours: its devices are marked as quarantined from the
        deadline on, and come back when it gives them back or dies.
        """
        deadline = AskedBack(reason, boottime_s() + within_s)
        asked = 0
        for holder in self.holders:
            if pid is not None and holder.pid != pid:
                continue
            asked += 1
            if holder.asked_back is not None and holder.asked_back.deadline_boottime_s <= deadline.deadline_boottime_s:
                continue
            holder.asked_back = deadline
            holder.say(deadline)
            if holder.overdue is not None:
                holder.overdue.cancel()
            holder.overdue = asyncio.get_running_loop().call_later(within_s, self._overdue, holder)
        return asked

    async def leave(self, reason: str, within_s: float) -> None:
        """Lend nothing more, ask everything back, and wait for it, at most `within_s`."""
        self._refuse(reason)
        self.ask_back(reason, within_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._empty.wait()

    def drain(self, draining: bool) -> None:
        """Lend nothing more and ask everything back within an hour; or lend again, and who was asked may stay."""
        if draining and not self._closing:
            self._refuse(DRAINED)
            self.ask_back(DRAINED, DRAIN_S)
        elif not draining and self._closing == DRAINED:
            self._closing = ""
            for holder in self.holders:
                holder.asked_back = None
                if holder.overdue is not None:
                    holder.overdue.cancel()

    def _refuse(self, reason: str) -> None:
        """Lend nothing from now on, also not to those that wait."""
        self._closing = reason
        for holder in list(self._holders):
            if not holder.slots:
                holder.say(_refusal(f"no more leases: {reason}"))
                holder.writer.close()

    async def close(self) -> None:
        """Close every connection, which tells the holders that their leases are gone."""
        self._closing = self._closing or "the agent stops"
        self._closed = True
        if self._server is not None:
            self._server.close()
        while self._tasks:  # a connection that ends begins the freeing of its devices
            await _give_up(*self._tasks)
        for lease in self._freeing:
            lease.release()
        self._freeing.clear()

    # -- one connection

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # taken off the listener just before it was closed; or more are sent away than can be told why
        if self._closed or len(self._tasks) >= 2 * CONNECTIONS_MAX:
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._connected(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.close())  # also of a task that was cancelled before it began

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("socket")
        pid, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        holder = Holder(pid, uid, writer)
        pidfd = -1
        try:
            if uid not in self._uids:
                holder.say(
                    problem(
                        "not-permitted",
                        f"uid {uid} may not borrow from this worker",
                        found=uid,
                        next="let the worker's lease_uids name this user",
                    )
                )
                log.warning("%s: uid %d (pid %d) asked for a lease and may not have one", self._worker, uid, pid)
                await _heard(reader)
            elif len(self._holders) >= CONNECTIONS_MAX:
                holder.say(problem("queue-full", f"{CONNECTIONS_MAX} processes borrow here already"))
                await _heard(reader)
            elif (pidfd := _open_pidfd(peer, pid)) >= 0:
                self._holders.add(holder)
                await self._serve(holder, reader, _watch(pidfd))
        except (FrameRefused, MoorageError) as error:
            holder.say(error.problem if isinstance(error, MoorageError) else _refusal(str(error)))
        except ConnectionError:
            pass
        finally:
            self._holders.discard(holder)
            if pidfd >= 0:
                asyncio.get_running_loop().remove_reader(pidfd)
                os.close(pidfd)
            if holder.overdue is not None:
                holder.overdue.cancel()
            if not self.holders:
                self._empty.set()

    async def _serve(self, holder: Holder, reader: asyncio.StreamReader, dead: asyncio.Future[None]) -> None:
        try:
            async with asyncio.timeout(FIRST_WORD_S_MAX):
                request = await read_request(reader)
        except TimeoutError:
            return
        if isinstance(request, Recall):
            if holder.uid not in (0, os.geteuid()):
                raise FrameRefused(f"uid {holder.uid} may not ask leases back")
            holder.say(Recalled(self.ask_back(request.reason, request.within_s, request.pid)))
        elif isinstance(request, Borrow):
            await self._lend(holder, request, reader, dead)
        elif request is not None:
            raise FrameRefused("nothing was borrowed on this connection")

    async def _lend(
        self, holder: Holder, request: Borrow, reader: asyncio.StreamReader, dead: asyncio.Future[None]
    ) -> None:
        self._check(request)
        holder.purpose = request.purpose[:PURPOSE_CHARS_MAX]
        loop = asyncio.get_running_loop()
        over: asyncio.Task[Request | None] = loop.create_task(read_request(reader))
        claim = loop.create_task(self._claim(request.gpu))
        leases: list[GpuLease] = []
        try:
            await asyncio.wait((over, dead, claim), return_when=asyncio.FIRST_COMPLETED)
            if not claim.done():
                return  # it gave up, or died, or we leave
            leases = claim.result()
            holder.slots, holder.mode = tuple(lease.slot for lease in leases), request.gpu.effective_sharing
            self._empty.clear()
            devices = [lease.device for lease in leases]
            holder.say(Granted(self._worker, devices, holder.mode, self._inventory.simulated))
            log.info("%s: %r holds a lease", self._worker, holder)
            if self._closing:
                self.ask_back(self._closing, DRAIN_S if self._closing == DRAINED else 0.0)
            await asyncio.wait((over, dead), return_when=asyncio.FIRST_COMPLETED)
            if over.done() and not over.cancelled() and over.exception() is None and over.result() is not None:
                holder.say(Returned())
        finally:
            if leases:  # before anything is awaited: told to stop once more, we would not come back here
                self._free(leases, holder)
            else:
                claim.add_done_callback(lambda _: self._free_granted(claim, holder))
            await _give_up(over, claim)

    def _free_granted(self, claim: asyncio.Task[list[GpuLease]], holder: Holder) -> None:
        """Free what was granted in the moment we were told to stop."""
        if not claim.cancelled() and claim.exception() is None and claim.result():
            self._free(claim.result(), holder)

    def _check(self, request: Borrow) -> None:
        """Raises MoorageError for what this host will never have."""
        spec = request.gpu
        if request.protocol != PROTOCOL:
            raise MoorageError(
                problem("unknown-version", f"this agent speaks version {PROTOCOL}", found=request.protocol)
            )
        if self._closing:
            raise MoorageError(_refusal(f"no more leases: {self._closing}"))
        if spec.effective_sharing not in self._modes:
            raise MoorageError(
                problem(
                    "failed-precondition",
                    f"this worker does not share its devices by {spec.effective_sharing}",
                    field="$.gpu.sharing",
                    found=spec.effective_sharing,
                    allowed=", ".join(self._modes),
                    next="ask for whole devices, or let the worker's modes name it",
                )
            )
        if spec.share is not None:
            raise MoorageError(
                problem(
                    "failed-precondition",
                    "sharers of a lease are counted, not measured",
                    field="$.gpu.share",
                    next=f"ask for @{spec.effective_sharing} alone",
                )
            )
        matching = len(self._matching(spec))
        if matching < spec.count:
            have = ", ".join(sorted({device.name for device in self._devices})) or "no GPU"
            raise MoorageError(
                problem(
                    "no-match",
                    f"this host has {matching} GPUs like {format_token(spec)}, of {len(self._devices)}",
                    field="$.gpu",
                    found=spec.count,
                    allowed=have,
                    next="submit it as a job: moorage fleet shows which hosts have it",
                )
            )

    def _matching(self, spec: GpuSpec) -> set[int]:
        return {slot for slot, device in enumerate(self._devices) if matches(spec, device)}

    async def _claim(self, spec: GpuSpec) -> list[GpuLease]:
        """All that `spec` asks for, in line."""
        got: list[GpuLease] = []
        wanted = self._matching(spec)
        try:
            async with self._line:
                while len(got) < spec.count:
                    lease = await self._pool.claim(wanted, spec.effective_sharing)
                    assert lease is not None  # `_check` saw devices, and a pool never loses any
                    got.append(lease)
                    wanted.discard(lease.slot)
        except BaseException:
            for lease in got:
                lease.release()
            raise
        return got

    # -- after a lease

    def _free(self, leases: list[GpuLease], holder: Holder) -> None:
        self._freeing.update(leases)
        pids = {holder.pid, *descendants([holder.pid])} if holder.mode != "exclusive" else set()
        for lease in leases:
            task = asyncio.get_running_loop().create_task(self._free_when_seen(lease, holder, pids))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _free_when_seen(self, lease: GpuLease, holder: Holder, pids: set[int]) -> None:
        slot = lease.slot
        ends_s = boottime_s() + self._free_wait_s
        waited_out = False
        while not await self._is_free(slot, holder.mode, pids):
            if not waited_out and boottime_s() >= ends_s:
                waited_out = True
                self._mark(slot, holder, f"memory kept after the lease of pid {holder.pid}")
                log.error("%s: slot %d is in quarantine: memory kept after %r", self._worker, slot, holder)
            await asyncio.sleep(PROBE_QUARANTINED_S if waited_out else PROBE_S)
        self._freeing.discard(lease)
        lease.release()
        self._unmark(slot, holder)  # also where it was overdue

    async def _is_free(self, slot: int, mode: Sharing, pids: set[int]) -> bool:
        if mode == "exclusive":
            return await self._inventory.memory_is_free(slot)
        reading = (await self._inventory.sample())[slot]
        return reading.health != "unresponsive" and not any(each.pid in pids for each in reading.processes)

    def _overdue(self, holder: Holder) -> None:
        asked = holder.asked_back
        for slot in holder.slots:
            self._mark(slot, holder, f"asked back from pid {holder.pid}: {asked.reason if asked else ''}")
        log.error("%s: %r was asked to give back and did not", self._worker, holder)

    def _mark(self, slot: int, holder: Holder, reason: str) -> None:
        self._marked.setdefault(slot, set()).add(holder)
        self._pool.quarantine(slot, reason, CLOSED_BY)

    def _unmark(self, slot: int, holder: Holder) -> None:
        """Sharers of a device may each have been marked: the last one lifts the quarantine."""
        marks = self._marked.get(slot, set())
        marks.discard(holder)
        if not marks and self._marked.pop(slot, None) is not None:
            self._pool.unquarantine(slot, CLOSED_BY)


def matches(spec: GpuSpec, device: Device) -> bool:
    """Whether a device is what a spec asks for: vendor, model, memory, and its index where time-slicing names one."""
    if spec.time_slice_index is not None and device.index != spec.time_slice_index:
        return False
    if spec.effective_vendor and device.vendor.lower() != spec.effective_vendor:
        return False
    if spec.models and not any(model_matches(pattern, device.name) for pattern in spec.models):
        return False
    return device.memory_mib >= (spec.min_memory_mib or 0)


def _refusal(message: str, found: object = None) -> Problem:
    return problem("failed-precondition", message, found=found)


async def _heard(reader: asyncio.StreamReader) -> None:
    """Let a peer that is sent away read why: closed under its own first word, it would see a broken pipe instead."""
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(FIRST_WORD_S_MAX):
            await reader.read(FRAME_BYTES_MAX)
            await reader.read(1)


async def _give_up(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _open_pidfd(peer: socket.socket, pid: int) -> int:
    """A pidfd of the peer; -1 where it is gone, or is no process that this namespace shows."""
    try:
        return int(peer.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    except OSError:
        pass
    try:
        return os.pidfd_open(pid)
    except (OSError, ValueError):
        return -1


def _watch(pidfd: int) -> asyncio.Future[None]:
    """Done when the process is gone (pidfd_open(2): it becomes readable)."""
    loop = asyncio.get_running_loop()
    dead: asyncio.Future[None] = loop.create_future()

    def on_readable() -> None:
        loop.remove_reader(pidfd)
        if not dead.done():
            dead.set_result(None)

    loop.add_reader(pidfd, on_readable)
    return dead


def _listen(path: Path, gid: int | None) -> socket.socket:
    """Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with open_folder(path.parent) as folder:
            name = f"{folder}/{path.name}"
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(name) == 0:
                    raise OSError(errno.EADDRINUSE, "another agent lends from this socket", str(path))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            umask = os.umask(0o177)
            try:
                listener.bind(name)
            finally:
                os.umask(umask)
            if gid is not None:
                os.chown(name, -1, gid)
                os.chmod(name, 0o660)
        listener.listen(BACKLOG_MAX)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
