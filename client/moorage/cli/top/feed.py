"""Feeds a `Model` from a running fleet: the public frames as they come, and what the key in use may ask the leader."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from moorage.client.errors import NoScheduler, NotFound, NotPermitted
from moorage.client.view.model import LEFT, Model
from moorage.schemas.codec import Decoder
from moorage.schemas.errors import MoorageError, Refused, problem
from moorage.schemas.frames import FleetFrame, Hello, Load, Standing
from moorage.schemas.job import STATES, TERMINAL

if TYPE_CHECKING:
    from moorage.bus.transport import Delivery, Subscribed
    from moorage.client.client import AsyncClient
    from moorage.client.view.view import View

#: seconds between two rounds of questions; between two of them the public frames go on
ROUND_S: Final = 2.0
#: tenants whose jobs are listed, those with most GPUs first, and jobs of each
TENANTS_MAX: Final = 16
JOBS_MAX: Final = 200
#: waiting jobs that are explained, the oldest of each tenant, and how long an explanation holds (s): it costs the
#: leader a walk over the fleet, and trials of what would help
WHYS_MAX: Final = 6
WHY_S: Final = 10.0
#: how long the first picture waits for loads where nothing else tells of use: a worker tells every 2 s
LOADS_S: Final = 2.5
#: how long the first picture waits for the leader's frame, of which two come a second
FRAME_S: Final = 5.0
LIVE: Final = [state for state in STATES if state not in TERMINAL]

_decode: Final[Decoder[FleetFrame | Hello | Load | Standing]] = Decoder(FleetFrame | Hello | Load | Standing)


class Feed:
    """What keeps a model up to date. `heard` is set when something new is in it."""

    def __init__(self, client: AsyncClient) -> None:
        self.model = Model(_now_ms())
        self.heard = asyncio.Event()
        self._client = client
        self._wire = client._wire
        self._subscribed: list[Subscribed] = []
        self._operates = self._lists = True
        self.is_troubled = False  # whether the last round of questions failed
        self._refused: NotPermitted | None = None
        self._explained: dict[tuple[str, str], float] = {}

    async def open(self) -> None:
        """Subscribe to the public frames that this key may hear: a tenant's may hear none."""
        subjects = self._wire.subjects
        for subject in (subjects.fleet_frame, subjects.standing, subjects.hello_all, subjects.load_all):
            try:
                self._subscribed.append(await self._wire.subscribe(subject, self._on_frame))
            except NotPermitted as error:
                if subject == subjects.fleet_frame:
                    self.model.sees_fleet, self._refused = False, error

    async def close(self) -> None:
        """End what `open` began."""
        for subscription in self._subscribed:
            with contextlib.suppress(MoorageError):
                await subscription.unsubscribe()

    def view(self) -> View:
        """Return this moment."""
        return self.model.view(_now_ms(), time.time_ns() // 1_000_000)

    def _on_frame(self, delivery: Delivery) -> None:
        try:
            frame = _decode(delivery.data)
        except Refused:
            return
        self.model.hear(frame, _now_ms())
        self.heard.set()

    # ---------------------------------------------------------------------------------------------------- asking

    async def ask(self) -> None:
        """Ask the leader once for all that this key may ask.

        Raises `NoScheduler`, `Unreachable`, and `NotPermitted` if that is nothing, and no frame may be heard.
        """
        model = self.model
        tenants: list[str] = [self._client.tenant]
        if self._operates:
            try:
                fleet, told = await asyncio.gather(self._wire.operate("fleet"), self._wire.operate("tenants"))
            except NotPermitted:
                self._operates = False
            else:
                model.told_fleet(fleet.data)
                tenants = [row["tenant"] for row in told.data["tenants"] if row["jobs"]][:TENANTS_MAX]
        if self._lists:
            try:
                await self._list(tenants)
            except NotPermitted:
                self._lists = False
        if self._refused is not None and not self._lists:
            raise self._refused
        model.unseen = self._unseen()
        if self._lists:
            await self._explain()
        self.heard.set()

    def _unseen(self) -> list[str]:
        if self._operates:
            return []
        if not self.model.sees_fleet:
            return [f"the fleet, and jobs of other tenants than {self._client.tenant}: that takes an operator's key"]
        if self._lists:
            return [f"jobs of other tenants than {self._client.tenant}: that takes an operator's key"]
        return ["jobs, and why they wait: that takes an operator's key, or a tenant's"]

    async def _list(self, tenants: list[str]) -> None:
        arguments = {"states": LIVE, "limit": JOBS_MAX}
        answers = await asyncio.gather(*(self._wire.answer("ls", arguments, tenant) for tenant in tenants))
        for tenant, answer in zip(tenants, answers, strict=True):
            self.model.told_jobs(tenant, answer.data)
        self.model.keep_tenants(tenants)

    async def _explain(self) -> None:
        """Ask why the oldest waiting jobs wait, those that were not asked for lately."""
        wanted, now_s = self.model.oldest()[:WHYS_MAX], time.monotonic()
        self._explained = {key: at_s for key, at_s in self._explained.items() if key in wanted}
        due = [key for key in wanted if now_s - self._explained.get(key, -WHY_S) >= WHY_S]

        async def ask(tenant: str, job: str) -> None:
            with contextlib.suppress(NotFound):  # it began or ended meanwhile, and left memory
                self.model.told_why(tenant, (await self._wire.answer("explain", {"job": job}, tenant)).data)
            self._explained[tenant, job] = now_s

        await asyncio.gather(*(ask(*key) for key in due))

    async def first(self) -> None:
        """Ask once, and wait for the leader's frame; also for the loads, where nothing else tells of use.

        Raises `NoScheduler` if no leader sends a frame.
        """
        await self.ask()
        if self.model.sees_fleet and not await self._until(lambda: self.model.frame is not None, FRAME_S):
            why = f"no scheduler leads: no frame of the fleet came within {FRAME_S:g} s"
            raise NoScheduler(problem("no-scheduler", why))
        if not self._lists:
            await self._until(self._has_loads, LOADS_S)

    def _has_loads(self) -> bool:
        frame = self.model.frame
        there = [row["worker"] for row in frame.workers if row["state"] != LEFT] if frame is not None else []
        return self.model.loads.issuperset(there)

    async def _until(self, holds: Callable[[], bool], limit_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not holds():
                    self.heard.clear()
                    await self.heard.wait()
        return holds()

    async def keep_asking(self, on_trouble: Callable[[MoorageError], Any]) -> None:
        """Ask again and again. An answer that fails is told, and the next round tries it again."""
        while True:
            try:
                await self.ask()
                self.is_troubled = False
            except MoorageError as error:
                self.is_troubled = True
                on_trouble(error)
            await asyncio.sleep(ROUND_S)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
