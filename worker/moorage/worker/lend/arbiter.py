"""Lend a job the GPUs of a pool that are free at the moment.

A job is one or more works, each a queue of pieces. First every work gets a worker of its own, the smallest work first.
Then, whenever a GPU is free and no claim waits, a helper joins a work that has waiting pieces. Helpers have the lowest
priority: they start only while no claim waits in the pool, they take what `try_claim` gives and never queue, and they
never decide how the job ends.

Render the frames of a film on one GPU, or on all that happen to be free::

    async def render(frame: int, lease: GpuLease) -> None:
        await asyncio.to_thread(make_picture, frame, lease.uuid)

    async def film(pool: GpuPool, frames: int) -> None:
        pieces = Pieces(render, size=frames)
        async with LeaseArbiter(pool, [pieces]):
            for frame in range(frames):
                await pieces.put(frame)
            pieces.close()
        # every frame is rendered and every GPU given back, or the first worker's error is raised

Each piece has everything that its frame needs, so any GPU can render it. If a helper fails, its piece goes back to the
head of the queue, and the work's own worker does not end before every piece is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Generic, Protocol, TypeVar

from moorage.schemas.errors import refuse
from moorage.worker.devices.pool import GpuPool
from moorage.worker.devices.pool_lease import GpuLease

ROUND_S: Final = 0.2  # the longest that a free GPU goes unnoticed
WORKS_MAX: Final = 1024
#: failures of helpers after which a work gets no more helpers; its own worker does the rest
HELPER_FAILURES_MAX: Final = 3
#: most pieces waiting in a queue; a piece that a failed helper handed back may exceed it
PIECES_WAITING_MAX: Final = 2

log = logging.getLogger("moorage.worker.lend.arbiter")

T = TypeVar("T")
Wait = Callable[[asyncio.Event, float], Awaitable[None]]


class Work(Protocol):
    """A part of a job that one worker can do alone and helpers can speed up. `Pieces` is one."""

    @property
    def size(self) -> int:
        """How much there is to do, in any unit that the job's works share: the smallest work gets the first GPU."""
        ...

    def waiting(self) -> int:
        """Return how many pieces wait to be begun: if it is above 0, a helper would find work."""
        ...

    async def run(self, lease: GpuLease) -> None:
        """Do the work as its own worker; return when all of it is done. An exception is the job's error."""
        ...

    async def help(self, lease: GpuLease) -> None:
        """Help until no piece waits. An exception ends only this helper, so it must hand its piece back first."""
        ...

    def on_waiting(self, wake: Callable[[], None]) -> None:
        """Have `wake` called whenever a piece begins to wait; a later call replaces it."""
        ...


@dataclass(slots=True)
class _Entry:
    work: Work
    done: bool = False
    failures: int = 0


class LeaseArbiter:
    """Runs a job: ``async with LeaseArbiter(pool, works): ...``; leaving the block waits for the job.

    `works` are 1..`WORKS_MAX`, in the order in which they get helpers. `helpers_max` bounds the helpers that run at
    once, None for as many as the pool has slots. A round happens every `round_s` seconds, and at once when a piece
    begins to wait, when a worker is done, when a helper is done and no piece waits, and at `wake()`; a round starts at
    most one helper. `wait` waits for the event or that many seconds, whichever is first: for tests, and for clocks
    other than the loop's.

    An error of a work's own worker ends the job: the other works are cancelled, and so is the block itself; the block
    then raises the errors as an ExceptionGroup, as asyncio.TaskGroup does. Cancelling the task that runs the block ends
    the job too. However it ends, every lease is released. A LeaseArbiter runs one job; several may share a pool.

    Raises ValueError for invalid works or numbers, and Refused (failed-precondition) on entering if the pool has no
    slots.
    """

    def __init__(
        self,
        pool: GpuPool,
        works: Sequence[Work],
        *,
        helpers_max: int | None = None,
        round_s: float = ROUND_S,
        wait: Wait | None = None,
    ) -> None:
        if not 1 <= len(works) <= WORKS_MAX:
            raise ValueError(f"a job has 1..{WORKS_MAX} works, found {len(works)}")
        if helpers_max is not None and helpers_max < 0:
            raise ValueError(f"helpers_max must be at least 0, found {helpers_max}")
        if round_s <= 0:
            raise ValueError(f"round_s must be above 0, found {round_s}")
        self._pool = pool
        self._entries = [_Entry(work) for work in works]
        self._helpers_max = pool.capacity() if helpers_max is None else helpers_max
        self._round_s = round_s
        self._wait = wait or _wait
        self._woken = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._helpers = 0
        self.helpers_started = 0
        self.helpers_failed = 0

    @property
    def helpers(self) -> int:
        """How many helpers run now."""
        return self._helpers

    def wake(self) -> None:
        """Begin the next round now. A service may call it from its pool's `on_change`, to use a freed GPU at once."""
        self._woken.set()

    async def __aenter__(self) -> LeaseArbiter:
        if not self._pool.capacity():
            raise refuse("failed-precondition", "the pool has no GPU to do this work on", found="0 slots")
        await self._tasks.__aenter__()
        for entry in self._entries:
            entry.work.on_waiting(self.wake)
        # claims are served in the order in which they are made, and tasks start in the order of their creation
        for entry in sorted(self._entries, key=lambda entry: entry.work.size):
            self._tasks.create_task(self._own_worker(entry))
        self._tasks.create_task(self._dispatch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._tasks.__aexit__(kind, error, at)

    async def _own_worker(self, entry: _Entry) -> None:
        lease = await self._pool.claim()
        assert lease is not None, "a pool keeps its slots"
        try:
            with lease:
                await entry.work.run(lease)
        finally:
            entry.done = True
            self.wake()

    async def _dispatch(self) -> None:
        """Hold rounds until every work is done; the end of the task group cancels it, too."""
        while not all(entry.done for entry in self._entries):
            self._woken.clear()
            self._start_helper()
            await self._wait(self._woken, self._round_s)

    def _start_helper(self) -> None:
        if self._helpers >= self._helpers_max or self._pool.pending_claimers():
            return
        entry = next((entry for entry in self._entries if _wants_help(entry)), None)
        if entry is None:
            return
        lease = self._pool.try_claim()
        if lease is None:
            return
        self._helpers += 1
        self.helpers_started += 1
        task = self._tasks.create_task(self._help(entry, lease))
        # a task that is cancelled before its start runs none of its code, not even `finally`
        task.add_done_callback(lambda _: self._helper_ended(entry, lease))

    async def _help(self, entry: _Entry, lease: GpuLease) -> None:
        try:
            await entry.work.help(lease)
        except Exception as error:
            entry.failures += 1
            self.helpers_failed += 1
            log.warning("a helper of the service failed on %s, and its GPU is given back: %r", lease, error)
        else:
            entry.failures = 0

    def _helper_ended(self, entry: _Entry, lease: GpuLease) -> None:
        self._helpers -= 1
        lease.release()
        # a helper that left pieces waiting has failed or had a reason: without a pause it could repeat that for ever
        if not entry.work.waiting():
            self.wake()


def _wants_help(entry: _Entry) -> bool:
    return not entry.done and entry.failures < HELPER_FAILURES_MAX and entry.work.waiting() > 0


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


class Pieces(Generic[T]):
    """A work of similar pieces: `handle(piece, lease)` does one piece, on any GPU.

    `put` pieces in (it waits while `waiting_max` of them wait), then `close`. The work's own worker ends when every
    piece is done, including pieces that a helper handed back. A piece is done once, but it is begun again if a helper
    failed or was cancelled in it, so `handle` must allow that. Pieces may finish in another order than they came. The
    work with the smallest `size` gets the first GPU.
    """

    def __init__(
        self, handle: Callable[[T, GpuLease], Awaitable[None]], *, size: int = 0, waiting_max: int = PIECES_WAITING_MAX
    ) -> None:
        if waiting_max < 1:
            raise ValueError(f"waiting_max must be at least 1, found {waiting_max}")
        self._handle = handle
        self._size = size
        self._waiting_max = waiting_max
        self._queue: deque[T] = deque()
        self._in_work = 0
        self._closed = False
        self._changed = asyncio.Event()  # set at the next change only: waiters check their condition again
        self._wake: Callable[[], None] | None = None
        self.done = 0

    @property
    def size(self) -> int:
        return self._size

    def waiting(self) -> int:
        return len(self._queue)

    def on_waiting(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    async def put(self, piece: T) -> None:
        """Add a piece, waiting for room. Raises ValueError after `close`.

        If a job has more works than the pool has GPUs, feed each work from a task of its own. A single task that waits
        for room in a work without a GPU would starve the work with a GPU, for ever.
        """
        await self._until(lambda: self._closed or len(self._queue) < self._waiting_max)
        if self._closed:
            raise ValueError("pieces cannot be added after close()")
        self._queue.append(piece)
        self._notify()
        if self._wake is not None:
            self._wake()

    def close(self) -> None:
        """Declare that no more pieces come; the worker ends when the present ones are done.

        A second call does nothing.
        """
        self._closed = True
        self._notify()

    async def run(self, lease: GpuLease) -> None:
        while True:
            await self._until(lambda: bool(self._queue) or (self._closed and not self._in_work))
            if not self._queue:
                return
            await self._do_one(lease)

    async def help(self, lease: GpuLease) -> None:
        while self._queue:
            await self._do_one(lease)

    async def _do_one(self, lease: GpuLease) -> None:
        piece = self._queue.popleft()
        self._in_work += 1
        self._notify()
        try:
            await self._handle(piece, lease)
            self.done += 1
        except BaseException:
            self._queue.appendleft(piece)
            raise
        finally:
            self._in_work -= 1
            self._notify()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
