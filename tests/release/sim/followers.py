"""Who follows jobs and asks about them: the SDK as services use it, over the simulated network.

A follower is told every transition once and in order, and the job's end; what was answered is never unknown after, and
nobody who asks twice is told the older of two states second.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Final, cast

from moorage.bus.errors import BusError
from moorage.bus.health import State
from moorage.client.client import AsyncClient
from moorage.client.errors import ClientError, NotFound
from moorage.client.transport import Link
from moorage.schemas.job import TERMINAL
from moorage.testing.bus.bus import SimulatedBus
from tests.release.sim.judge import Judge

#: the share of the accepted jobs that somebody follows, and of those that somebody asks about again and again
FOLLOWED: Final = 0.4
ASKED: Final = 0.3
ASK_EVERY_S: Final = 5.0
#: whoever follows hears the end within this, which is longer than any world lasts
HEARS_S_MAX: Final = 1_500.0


class SimulatedTransport:
    """A `ClientTransport` over the world's bus."""

    upkeep = None

    def __init__(self, bus: SimulatedBus, name: str) -> None:
        self._bus = bus
        self._name = name

    @property
    def where(self) -> str:
        return f"simulated:{self._name}"

    async def connect(self, name: str, on_state: Callable[[State], None], on_error: Callable[[BusError], None]) -> Link:
        return cast("Link", self._bus.connect(self._name, on_state=on_state, on_error=on_error))

    async def release(self, link: Link) -> None:
        await link.close()


class Followers:
    """One client a tenant. `follow` a job, or `ask` about it; `tasks` are those that do so."""

    def __init__(self, bus: SimulatedBus, rng: random.Random, judge: Judge) -> None:
        self._rng = rng
        self._judge = judge
        self._transport = SimulatedTransport(bus, "callers")
        self._clients: dict[str, AsyncClient] = {}
        self.tasks: dict[asyncio.Task[None], tuple[str, str]] = {}
        self.restores = 0  # after one a job may be what it was before, or nothing
        self.followed = 0  # to their ends

    async def open(self, tenants: tuple[str, ...]) -> None:
        for tenant in tenants:
            client = AsyncClient(transport=self._transport, tenant=tenant, timeout=HEARS_S_MAX)
            await client.open()
            self._clients[tenant] = client

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for client in self._clients.values():
            await client.close()

    def accepted(self, tenant: str, job: str) -> None:
        """The judge's: a caller was told that this job is accepted."""
        chance = self._rng.random()
        if chance < FOLLOWED:
            self._begin(tenant, job, self._follow(tenant, job, self.restores))
        elif chance < FOLLOWED + ASKED:
            self._begin(tenant, job, self._ask(tenant, job, self.restores))

    async def until_ends(self) -> None:
        """All that is over is told to those who follow it; what no host of this fleet can run never is."""
        for task, unit in list(self.tasks.items()):
            known = self._judge.state.job(*unit)
            if known is not None and not known.over:
                task.cancel()
        told = await asyncio.gather(*self.tasks, return_exceptions=True)
        for error in told:
            if isinstance(error, AssertionError):
                raise error

    def _begin(self, tenant: str, job: str, work: Any) -> None:
        self.tasks[asyncio.create_task(self._judged(work))] = tenant, job

    async def _judged(self, work: Any) -> None:
        """Whatever else is raised is a defect of the SDK."""
        try:
            await work
        except (AssertionError, asyncio.CancelledError):
            raise
        except Exception as error:
            self._judge.violated(f"the SDK broke: {error!r}", error)

    async def _follow(self, tenant: str, job: str, restores: int) -> None:
        await asyncio.sleep(self._rng.choice((0.0, 0.0, 1.0, 30.0)))
        revs, states = list[int](), list[str]()
        try:
            async for event in self._clients[tenant].job(job).events(wait=HEARS_S_MAX):
                revs += [change.rev for change in event.changes]
                states.append(event.state)
                if restores == self.restores and revs != list(range(1, len(revs) + 1)):
                    self._judge.violated(f"{tenant}/{job}: a follower was told {revs}")
        except NotFound:
            if restores == self.restores:
                self._judge.violated(f"{tenant}/{job} was accepted, and a follower is told that it never was")
            return
        if not states or states[-1] not in TERMINAL:
            self._judge.violated(f"{tenant}/{job}: a follower was told of {states[-3:]} and no end")
        self.followed += 1

    async def _ask(self, tenant: str, job: str, restores: int) -> None:
        """Until it is over: its `rev` never goes back."""
        client, seen = self._clients[tenant].job(job), (0, "")
        while seen[1] not in TERMINAL:
            try:
                shown = await client.show()
            except NotFound:
                if restores == self.restores:
                    self._judge.violated(f"{tenant}/{job} was accepted, and is not known to `show`")
                return
            except ClientError:
                continue
            if restores != self.restores:
                return
            told = shown.rev or seen[0] + 1, shown.state  # of some that left memory the state alone is known
            if told[0] < seen[0] or (told[0] == seen[0] and told[1] != seen[1]):
                self._judge.violated(f"{tenant}/{job} was shown as {seen}, and then as {told}")
            seen = told
            await asyncio.sleep(self._rng.expovariate(1 / ASK_EVERY_S))
