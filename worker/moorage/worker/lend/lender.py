"""Serve the agent's socket, over which processes that already run on its host borrow GPUs from its pool.

A lease is a connection. It ends when the holder gives it back, when the connection ends, or when the process that made
the connection is gone (seen by its pidfd, so a child that inherited the socket does not keep the lease). A whole device
is used again once its memory is back at the idle baseline; a share of one, once the driver lists no process of the
holder on it. Until then it stays out of use, and is quarantined after `free_wait_s`, as after any job. So a process
that lives on and keeps a context on the device keeps the device.

Borrowers wait in one queue, and the first of them waits in the pool's own (`GpuPool.claim`). While it waits, this host
accepts no placement with GPUs, so none overtakes it. It gets all of its devices or none. While a process of the host
shares a device, the scheduler places nothing more on that device; other borrowers may share it, within the mode's
limits.

The uid of the peer must be the agent's own, root, or one of `uids` (SO_PEERCRED of unix(7)). The socket has mode 0600,
or 0660 with a group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

from moorage.bus.lend.protocol import (
    FRAME_BYTES_MAX,
    NEVER_S,
    PROTOCOL,
    PURPOSE_CHARS_MAX,
    AskedBack,
    Borrow,
    Granted,
    Request,
    Returned,
    read_request,
)
from moorage.schemas.errors import MoorageError, Problem, problem
from moorage.schemas.gpu import GpuSpec
from moorage.system.framing import FrameRefused
from moorage.system.pidfds import open_peer
from moorage.system.proctree import boottime_s
from moorage.system.unix_socket import SERVER_OPTIONS, peer_of
from moorage.worker.devices.pool import GpuLease, GpuPool
from moorage.worker.devices.readers.base import FREE_WAIT_S, Inventory, SlotReading
from moorage.worker.lend.family import Family
from moorage.worker.lend.given_back import Returning
from moorage.worker.lend.holder import Holder
from moorage.worker.lend.offer import check, matching
from moorage.worker.lend.peer import listen_alone, watch
from moorage.worker.sharing.idle_watch import IdleWatch

CONNECTIONS_MAX: Final = 256
#: a peer that connects and sends no request within this time is disconnected
FIRST_WORD_S_MAX: Final = 5.0
#: how long holders have to give back when an operator drains the worker without a deadline
DRAIN_S: Final = 3600.0
DRAINED: Final = "the worker is drained"
#: how long a holder has to give back devices that it did not use for too long
IDLE_BACK_S: Final = 60.0

log = logging.getLogger("moorage.worker")


class LeaseServer:
    """Lends the devices of `pool`. Use `open`, `ask_back` and `close` in one event loop."""

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
        idle: IdleWatch[Holder] | None = None,
        by_uuid: bool = False,
    ) -> None:
        self._worker = worker
        self._pool = pool
        self._inventory = inventory
        self._devices = pool.devices
        self._modes = modes
        self._uids = frozenset({os.geteuid(), 0, *uids})
        self._gid = gid
        self._queue = asyncio.Lock()  # an asyncio lock is first come, first served
        self._server: asyncio.Server | None = None
        self._holders: set[Holder] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._returning = Returning(worker, pool, inventory, free_wait_s, self._spawn)
        self._empty = asyncio.Event()
        self._empty.set()
        self._closing = ""
        self._closed = False
        self._idle = idle
        self._by_uuid = by_uuid

    @property
    def holders(self) -> list[Holder]:
        """The connections that have a lease now, without those that wait for one."""
        return [holder for holder in self._holders if holder.slots]

    async def open(self, path: Path) -> None:
        """Listen on `path`, and replace the socket that an agent that is gone may have left there.

        Raises OSError: EADDRINUSE if another agent listens there.
        """
        listener = listen_alone(path, self._gid)
        self._server = await asyncio.start_unix_server(self._accept, sock=listener, **SERVER_OPTIONS)

    def ask_back(self, reason: str, within_s: float) -> None:
        """Ask all holders to give back within `within_s` seconds; one with an earlier deadline keeps that.

        A holder that does not give back is not ended, because its process is not the worker's. From the deadline on its
        devices are quarantined; they come back when it gives them back or dies.
        """
        deadline = AskedBack(reason, boottime_s() + within_s)
        for holder in self.holders:
            self._ask_back(holder, deadline)

    def _ask_back(self, holder: Holder, asked: AskedBack) -> None:
        before = holder.asked_back
        if holder.wanted is None or asked.deadline_boottime_s < holder.wanted.deadline_boottime_s:
            holder.wanted = asked
        self._asked_anew(holder, before)

    def _asked_anew(self, holder: Holder, before: AskedBack | None) -> None:
        """Tell a holder its request and watch the deadline, if it is not the one of `before`."""
        asked = holder.asked_back
        if asked == before:
            return
        if holder.overdue is not None:
            holder.overdue.cancel()
        if asked is None:
            holder.send(AskedBack("the worker is no longer drained", NEVER_S))
            return
        holder.send(asked)
        left_s = max(0.0, asked.deadline_boottime_s - boottime_s())
        holder.overdue = asyncio.get_running_loop().call_later(left_s, self._returning.overdue, holder)

    def seen(self, readings: Sequence[SlotReading], now_s: float) -> None:
        """Handle a reading of each slot: log a lease whose devices show no use, then ask it back as the settings say.

        Only exclusive leases are watched. Without `idle` this does nothing.
        """
        if self._idle is None:
            return
        alone = {holder: ("", holder.slots) for holder in self.holders if holder.mode == "exclusive"}
        for holder, idle in self._idle.read(alone, readings, now_s).items():
            log.warning("worker %s: %r has not used its GPUs for %d s", self._worker, holder, idle.seconds)
            if idle.ends:
                reason = f"no use of its GPUs for {idle.seconds} s, {idle.ends_s} are allowed"
                self._ask_back(holder, AskedBack(reason, boottime_s() + IDLE_BACK_S))

    async def leave(self, reason: str, within_s: float) -> None:
        """Lend nothing more, ask for all leases, and wait until holders have given them back, at most `within_s`."""
        self._refuse(reason)
        self.ask_back(reason, within_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._empty.wait()

    def drain(self, draining: bool, within_s: float | None = None) -> None:
        """With True, lend nothing more and ask for all leases within `within_s` seconds; None: within `DRAIN_S`.

        With False, end that: lend again. A deadline of a drain that is over or replaced has no effect any more, and
        holders get a message; what was asked back for another reason stays so. Does nothing if the server lends nothing
        for another reason.
        """
        if self._closing not in ("", DRAINED) or (not draining and not self._closing):
            return
        asked = None
        if draining:
            self._refuse(DRAINED)
            asked = AskedBack(DRAINED, boottime_s() + (DRAIN_S if within_s is None else within_s))
        else:
            self._closing = ""
        for holder in self.holders:
            before, holder.drained = holder.asked_back, asked
            if holder.asked_back != before:
                self._returning.stays(holder)
            self._asked_anew(holder, before)

    def _refuse(self, reason: str) -> None:
        """Lend nothing from now on; refuse the borrowers that wait, and close their connections."""
        self._closing = reason
        for holder in list(self._holders):
            if not holder.slots:
                holder.send(_no_more(reason))
                holder.writer.close()

    async def close(self) -> None:
        """Close every connection, so holders learn that their leases are gone.

        The pool gets all devices back, unchecked.
        """
        self._closing = self._closing or "the agent stops"
        self._closed = True
        if self._server is not None:
            self._server.close()
        # A connection that ends begins to free its devices. A finished task may still be in the set: from Python 3.12
        # on, gathering only finished tasks gives the loop no turn in which it could remove them.
        while running := [task for task in self._tasks if not task.done()]:
            await _give_up(*running)
        self._returning.close()

    # -- one connection

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # accepted just before the listener closed; or too many connections to give each a reason
        if self._closed or len(self._tasks) >= 2 * CONNECTIONS_MAX:
            writer.close()
            return
        task = self._spawn(self._connected(reader, writer))
        task.add_done_callback(lambda _: writer.close())  # also of a task that was cancelled before it began

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("socket")
        pid, uid = peer_of(peer)
        holder = Holder(pid, uid, writer)
        pidfd = -1
        try:
            if uid not in self._uids:
                holder.send(
                    problem(
                        "not-permitted",
                        f"uid {uid} may not borrow from this worker",
                        found=uid,
                        next="add this user to lease_uids in the worker's settings",
                    )
                )
                log.warning(
                    "worker %s: uid %d (pid %d) asked to borrow a GPU and is not allowed to", self._worker, uid, pid
                )
                await _read_out(reader)
            elif len(self._holders) >= CONNECTIONS_MAX:
                holder.send(problem("queue-full", f"{CONNECTIONS_MAX} processes borrow here already"))
                await _read_out(reader)
            elif (pidfd := open_peer(peer, pid)) >= 0:
                self._holders.add(holder)
                await self._serve(holder, reader, watch(pidfd))
            else:
                holder.send(_refusal("the agent does not see this process: it is in another PID namespace, or gone"))
                await _read_out(reader)
        except (FrameRefused, MoorageError) as error:
            holder.send(error.problem if isinstance(error, MoorageError) else _refusal(str(error)))
        except ConnectionError:
            pass
        except OSError as error:
            holder.send(_refusal(f"the agent cannot watch this process: {error.strerror or error}"))
            await _read_out(reader)
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
        if isinstance(request, Borrow):
            await self._lend(holder, request, reader, dead)
        elif request is not None:
            raise FrameRefused("nothing was borrowed on this connection")

    async def _lend(
        self, holder: Holder, request: Borrow, reader: asyncio.StreamReader, dead: asyncio.Future[None]
    ) -> None:
        if request.protocol != PROTOCOL:
            raise MoorageError(
                problem("unknown-version", f"this agent speaks version {PROTOCOL}", found=request.protocol)
            )
        if self._closing:
            raise MoorageError(_no_more(self._closing))
        check(request.gpu, self._devices, self._modes)
        holder.purpose = request.purpose[:PURPOSE_CHARS_MAX]
        loop = asyncio.get_running_loop()
        over: asyncio.Task[Request | None] = loop.create_task(read_request(reader))
        claim = loop.create_task(self._claim(request.gpu))
        leases: list[GpuLease] = []
        following: asyncio.Task[None] | None = None
        try:
            await asyncio.wait((over, dead, claim), return_when=asyncio.FIRST_COMPLETED)
            if not claim.done():
                return  # the borrower gave up or died, or the agent stops
            leases = claim.result()
            # before any return: without a family they would be freed as whole devices, whose memory others share
            holder.mode = request.gpu.effective_sharing
            if holder.mode != "exclusive":
                holder.family = Family(holder.pid)
            if self._closing:
                return  # granted in the turn in which the lending ended: `_refuse` has closed this connection
            holder.slots = tuple(lease.slot for lease in leases)
            if holder.family is not None:
                following = loop.create_task(holder.family.follow())
            self._empty.clear()
            devices = [lease.device for lease in leases]
            holder.send(Granted(self._worker, devices, holder.mode, self._inventory.simulated, self._by_uuid))
            log.info("%s: %r holds a lease", self._worker, holder)
            await asyncio.wait((over, dead), return_when=asyncio.FIRST_COMPLETED)
            if over.done() and not over.cancelled() and over.exception() is None and over.result() is not None:
                holder.send(Returned())
        finally:
            if leases:  # before any await: a second cancellation there would skip it
                self._returning.free(leases, holder)
            else:
                claim.add_done_callback(lambda _: self._free_granted(claim, holder))
            await _give_up(over, claim, *([following] if following is not None else []))

    def _free_granted(self, claim: asyncio.Task[list[GpuLease]], holder: Holder) -> None:
        """Free leases that were granted at the moment of cancellation."""
        if not claim.cancelled() and claim.exception() is None and claim.result():
            self._returning.free(claim.result(), holder)

    async def _claim(self, spec: GpuSpec) -> list[GpuLease]:
        """Wait for all leases that `spec` asks for, and return them; borrowers are served in order of arrival."""
        got: list[GpuLease] = []
        wanted = matching(spec, self._devices)
        try:
            async with self._queue:
                while len(got) < spec.count:
                    lease = await self._pool.claim(wanted, spec.effective_sharing)
                    assert lease is not None  # `check` saw devices, and a pool never loses any
                    got.append(lease)
                    wanted.discard(lease.slot)
        except BaseException:
            for lease in got:
                lease.release()
            raise
        return got


def _refusal(message: str) -> Problem:
    return problem("failed-precondition", message)


def _no_more(reason: str) -> Problem:
    """Return the refusal of a lease while the worker lends nothing, for this reason."""
    step = "borrow again once this worker is back"
    if reason == DRAINED:  # the worker learns of the end with the next renewal of its session
        step = "borrow again a few seconds after an operator has ended the drain: moorage uncordon"
    return problem("failed-precondition", f"no more leases: {reason}", next=step)


async def _read_out(reader: asyncio.StreamReader) -> None:
    """Read what a refused peer writes, for a limited time, so that it can read the reason.

    If the connection closed before the peer has written, the peer would see a broken pipe instead.
    """
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(FIRST_WORD_S_MAX):
            await reader.read(FRAME_BYTES_MAX)
            await reader.read(1)


async def _give_up(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
