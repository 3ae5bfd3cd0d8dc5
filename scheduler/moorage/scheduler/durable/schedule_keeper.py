"""Keeps the stream of schedules like the ledger, and takes the runs that nats-server publishes into the next record.

The ledger says which schedules there are. At a takeover, after each record that changed one, and once a minute, wishes
that the stream lacks are published, and those that no schedule has are deleted. While no tenant has a schedule, nothing
is asked of the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from moorage.bus.errors import BusError
from moorage.bus.transport import Delivery
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import ScheduleRun
from moorage.scheduler.core.ledger.schedules import Schedule
from moorage.scheduler.durable.schedule_stream import Key, Run, ScheduleStream, Wish
from moorage.scheduler.pacing.reminders import Reminders

log = logging.getLogger("moorage.schedules")

#: how often the stream is read again: what a server lost, or what came while the connection was down
LOOK_EVERY_S: Final = 60.0
AGAIN_S: Final = 1.0


class ScheduleKeeper:
    """The schedules of one term. `wake` is called when a run was offered."""

    def __init__(self, stream: ScheduleStream, engine: Engine, wake: Callable[[], None]) -> None:
        self.stream = stream
        self._engine = engine
        self._wake = wake
        #: the wishes in the stream; None if it has to be read
        self._kept: dict[Key, Wish] | None = None
        self._kept_at = -1  # the record whose schedules they are
        self._offered: dict[Key, int] = {}  # the last run of each schedule that was offered in this term
        self._some = asyncio.Event()
        self._reminders = Reminders()

    def follow(self) -> None:
        """Look whether a record has changed the schedules; to be called after each."""
        if self._engine.state.wishes != self._kept_at:
            self._some.set()

    def hear(self, delivery: Delivery) -> None:
        """Take a run that the server passes on."""
        if (run := self.stream.passed_on(delivery)) is not None:
            self.offer(run)

    def offer(self, run: Run, reply: str = "", *, json: bool = True) -> None:
        """Offer a run for the next record, unless it was decided, or is of a wish that the ledger no longer has.

        A run that somebody waits for is offered in any case.
        """
        tenant, name = run.key
        row = self._engine.state.schedule(tenant, name)
        offered = self._offered.get(run.key, 0)
        is_new = row is not None and row.wish == run.wish and run.sequence > max(row.through, offered)
        if not (is_new or reply):
            return
        self._offered[run.key] = max(run.sequence, offered)
        self._engine.offer(ScheduleRun(tenant, name, run.wish, run.sequence, run.next_ms, reply, json))
        self._wake()

    async def run(self) -> None:
        """Keep the stream like the ledger, forever."""
        while True:
            self._some.clear()
            wait_s: float | None = LOOK_EVERY_S
            try:
                if self._engine.state.schedules or self._kept:
                    await self._keep()
                    self._reminders.clear()
                else:
                    self._kept_at, wait_s = self._engine.state.wishes, None
            except BusError as error:
                if self._reminders.due(words := f"schedules cannot be kept now: {error}"):
                    log.warning("%s", words)
                self._kept, wait_s = None, AGAIN_S
            try:
                async with asyncio.timeout(wait_s):
                    await self._some.wait()
            except TimeoutError:
                self._kept = None

    async def _keep(self) -> None:
        """Publish and delete wishes until they are those of the ledger; take the runs in the stream. Raises
        `BusError`."""
        state = self._engine.state
        while self._kept is None or self._kept_at != state.wishes:
            if is_unread := self._kept is None:
                await self.stream.ensure(state.ran_through)
                self._kept = await self.stream.wishes()
            assert self._kept is not None
            at, kept, wanted = state.wishes, self._kept, self._wanted()
            for key in [key for key in kept if key not in wanted]:
                await self.stream.withdraw(key, kept[key])
                if state.schedule(*key) is None:
                    await self.stream.forget_run(key, state.ran_through)
                del kept[key]
            for key, row in wanted.items():
                before = kept.get(key)
                if before is None or before.record != row.wish:
                    kept[key] = Wish(row.wish, await self.stream.publish(key, row.wish, row.cron, row.tz, before))
            self._offered = {key: run for key, run in self._offered.items() if state.schedule(*key) is not None}
            self._kept_at = at
            for run in await self.stream.runs() if is_unread else ():
                self.offer(run)

    def _wanted(self) -> dict[Key, Schedule]:
        """Return the schedules that are to run; a copy, as the state changes meanwhile."""
        return {
            (tenant, name): row
            for tenant, rows in self._engine.state.schedules.items()
            for name, row in rows.items()
            if not row.paused
        }
