"""Code of a worker's own process that claims devices from its pool, beside placements: the service that embeds it.

What it is given it tells the machine, and each grant is judged: the oldest waiter first, no placement past a waiter,
and no device that somebody else holds or whose memory is not back.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, Final, Protocol

from moorage.schemas.gpu import Sharing
from moorage.worker.devices.pool import GpuLease, GpuPool, PoolLease
from tests.release.sim.devices import LocalHold

#: seconds between two claims of one worker's process, and how long each is held; on average
CLAIM_EVERY_S: Final = 12.0
HELD_S: Final = 3.0


class Judging(Protocol):
    """What the claimers tell: the judge."""

    def held_locally(self, machine: Any, hold: LocalHold) -> None: ...

    def violated(self, what: str, cause: BaseException | None = None) -> None: ...


class Claimers:
    """The local claimers of one worker process. `run` until `until_s` of the loop, then all is given back."""

    def __init__(self, machine: Any, pool: GpuPool, judge: Judging, rng: random.Random) -> None:
        self._machine = machine
        self._pool = pool
        self._judge = judge
        self._rng = rng
        self._asked = 0
        self._granted = 0  # the youngest ticket that waited and was granted
        self._tasks: set[asyncio.Task[None]] = set()
        self._place = pool.try_claim_slots
        setattr(pool, "try_claim_slots", self._placed)  # noqa: B010  # a placement's door, judged

    async def run(self, until_s: float) -> None:
        loop, rng = asyncio.get_running_loop(), self._rng
        while (wait_s := rng.expovariate(1 / CLAIM_EVERY_S)) < until_s - loop.time():
            await asyncio.sleep(wait_s)
            for _ in range(rng.choice((1, 1, 3))):
                task = loop.create_task(self._claim())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        await asyncio.gather(*self._tasks)

    async def _claim(self) -> None:
        rng, pool = self._rng, self._pool
        self._asked += 1
        ticket, waiting = self._asked, pool.pending_claimers()
        if rng.random() < 0.2:
            lease = pool.try_claim()
            if lease is not None and waiting:
                self._judge.violated(f"{self._machine.name}: try_claim overtook {waiting} waiters")
            await self._hold(lease, "exclusive", ticket)
            return
        slots: Sequence[int] | None = None
        if rng.random() < 0.3:
            slots = rng.sample(range(pool.capacity()), rng.randint(1, pool.capacity()))
        mode: Sharing = rng.choice(("exclusive", "exclusive", "time-slice"))
        await self._hold(await self._wait(slots, mode, ticket), mode, ticket)

    async def _wait(self, slots: Sequence[int] | None, mode: Sharing, ticket: int) -> GpuLease | None:
        """The lease; None when it took longer than this claimer is patient. Those that waited are granted in order."""
        waited: list[bool] = []
        mark = asyncio.get_running_loop().call_soon(waited.append, True)
        try:
            async with asyncio.timeout(self._rng.choice((5.0, 60.0, None))):
                lease = await self._pool.claim(slots, mode)
        except TimeoutError:
            return None
        mark.cancel()
        if waited:
            if ticket < self._granted:
                self._judge.violated(f"{self._machine.name}: claim {ticket} was granted after claim {self._granted}")
            self._granted = ticket
        return lease

    async def _hold(self, lease: GpuLease | None, mode: Sharing, ticket: int) -> None:
        if lease is None:
            return
        hold = LocalHold(lease.uuid, mode, ticket)
        with lease:  # also where the judge raises
            self._judge.held_locally(self._machine, hold)
            self._machine.local.append(hold)
            try:
                await asyncio.sleep(self._rng.expovariate(1 / HELD_S))
            finally:
                if hold in self._machine.local:
                    self._machine.local.remove(hold)
        self._pool.validate()

    def _placed(self, slots: Sequence[int], mode: Sharing, holder: str) -> PoolLease:
        lease = self._place(slots, mode, holder)
        if slots and self._pool.pending_claimers():
            self._judge.violated(f"{self._machine.name}: a placement of {holder} went past a waiting claim")
        self._pool.validate()
        return lease
