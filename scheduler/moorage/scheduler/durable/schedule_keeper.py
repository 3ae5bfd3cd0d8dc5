"""Keeps the stream of schedules like the ledger, and takes the runs that nats-server publishes into the next record.

The ledger says which schedules there are. At a takeover, after each record that changed one, and once a minute, wishes
that the stream lacks are published, and those that no schedule has are deleted. While no tenant has a schedule, nothing
is asked of the server.

After a crash nats-server has forgotten the runs that were due meanwhile, unless its table of them was saved since. So
the leader makes a run that is overdue, once the server has answered for some seconds and has not made it. Runs of
intervals are all the leader's, since the server would begin their grid anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from copy import copy
from typing import Final

from moorage.bus.errors import BusError
from moorage.bus.transport import Delivery
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import ScheduleRun
from moorage.scheduler.core.ledger.schedules import Schedule
from moorage.scheduler.durable.due_times import is_interval, is_too_far, latest_due_ms, next_due_ms
from moorage.scheduler.durable.schedule_stream import Key, Run, ScheduleStream, Wish
from moorage.scheduler.pacing.gate import Gate
from moorage.scheduler.pacing.reminders import Reminders

log = logging.getLogger("moorage.schedules")

#: how often the stream is read again: what a server lost, or what came while the connection was down
LOOK_EVERY_S: Final = 60.0
AGAIN_S: Final = 1.0
#: schedules that are looked at before other tasks run
AT_ONCE: Final = 50
#: a run that is so late is asked for in the stream
LATE_MS: Final = 1_000
#: how long nats-server answers, and a run is overdue, before the leader makes it
SERVER_FIRST_S: Final = 5.0


class ScheduleKeeper:
    """The schedules of one term. `wake` is called when a run was offered."""

    def __init__(self, stream: ScheduleStream, engine: Engine, wake: Callable[[], None], gate: Gate) -> None:
        self.stream = stream
        self.gate = gate
        self._engine = engine
        self._wake = wake
        #: the wishes in the stream; None if it has to be read
        self._kept: dict[Key, Wish] | None = None
        self._kept_at = -1  # the record whose schedules they are
        self._read_at_s = 0.0
        self._seen: dict[Key, tuple[int, int]] = {}  # of each schedule: its wish, and when this term first saw it
        self._seen_at = -1  # the record of the newest of them
        self._offered: dict[Key, int] = {}  # the last run of each schedule that was offered in this term
        self._offered_next: dict[Key, tuple[int, int]] = {}  # of that run: its wish, and when the next one is due
        self._answers_since_s: float | None = None  # while a run is late: since when the server answers
        self._some = asyncio.Event()
        self._reminders = Reminders()
        self._unknown_zones = Reminders()

    def follow(self) -> None:
        """Look whether a record has changed the schedules; to be called after each."""
        if self._engine.state.wishes != self._kept_at:
            self._see()
            self._some.set()

    def _see(self) -> None:
        """Note since when each wish is known: a server that goes away before it has the wish may miss its first run."""
        wishes = self._engine.state.wishes
        if self._seen_at == wishes:
            return
        self._seen_at, now_ms = wishes, _wall_ms()
        for tenant, rows in self._engine.state.schedules.items():
            for name, row in rows.items():
                if self._seen.get((tenant, name), (0, 0))[0] != row.wish:
                    self._seen[tenant, name] = row.wish, now_ms

    def on_run(self, delivery: Delivery) -> None:
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
        next_ms = run.next_ms
        if row is not None and run.made_ms:  # the server's own word may leave out a run that is due within a second
            next_ms = next_due_ms(row, run.made_ms) or next_ms
        self._offered[run.key] = max(run.sequence, offered)
        if next_ms:
            self._offered_next[run.key] = run.wish, next_ms
        latest_ms = latest_due_ms(row, self._engine.state.time_ms) if row is not None else 0
        self._engine.offer(ScheduleRun(tenant, name, run.wish, run.sequence, next_ms, latest_ms, reply, json))
        self._wake()

    async def run(self) -> None:
        """Keep the stream like the ledger, forever."""
        while True:
            self._some.clear()
            wait_s: float | None = AGAIN_S
            try:
                if self._engine.state.schedules or self._kept:
                    await self._keep()
                    wait_s = min(await self._make_due(), LOOK_EVERY_S)
                    self._reminders.clear()
                else:
                    self._kept_at, wait_s = self._engine.state.wishes, None
            except BusError as error:
                if self._reminders.due(words := f"schedules cannot be kept now: {error}"):
                    log.warning("%s", words)
                self._kept = self._answers_since_s = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._some.wait()

    async def _keep(self) -> None:
        """Publish and delete wishes until they are those of the ledger; take the runs in the stream. Raises
        `BusError`."""
        state = self._engine.state
        if time.monotonic() - self._read_at_s >= LOOK_EVERY_S:
            self._kept = None
        while self._kept is None or self._kept_at != state.wishes:
            self._see()
            at, ran_through, wanted = state.wishes, state.ran_through, self._wanted()
            known = {(tenant, name) for tenant, rows in state.schedules.items() for name in rows}
            await self.gate.recorded()
            if is_unread := self._kept is None:
                await self.stream.ensure(ran_through)
                self._kept = await self.stream.wishes()
                self._read_at_s = time.monotonic()
            assert self._kept is not None
            kept = self._kept
            for key in [key for key in kept if key not in wanted]:
                await self.stream.withdraw(key, kept[key])
                if key not in known:
                    await self.stream.forget_run(key, max(ran_through, self._offered.get(key, 0)))
                del kept[key]
            for key, row in wanted.items():
                before = kept.get(key)
                if before is None or before.record != row.wish:
                    _, since_ms = self._seen.get(key) or (0, _wall_ms())  # none if another record removed it meanwhile
                    kept[key] = await self.stream.publish(key, row, since_ms, before)
            for table in (self._seen, self._offered, self._offered_next):
                for key in [key for key in table if state.schedule(*key) is None]:
                    del table[key]
            self._kept_at = at
            if is_unread:
                await self._take_runs()

    async def _take_runs(self) -> None:
        for run in await self.stream.runs():
            self.offer(run)

    async def _make_due(self) -> float:
        """Make the runs that are due and that nats-server does not make. Return for how long there is nothing to do, in
        seconds. Raises `BusError`."""
        late_ms: dict[Key, int] = {}
        now_ms, wait_ms = _wall_ms(), LOOK_EVERY_S * 1000
        for at, (key, row) in enumerate(self._wanted().items()):
            if at % AT_ONCE == 0:
                await asyncio.sleep(0)
            due_ms = self._due_ms(key, row)
            if due_ms and is_interval(row.cron) and (due_ms <= now_ms or is_too_far(row, now_ms)):
                await self._make(key, row, now_ms)
                due_ms = self._due_ms(key, row)
            if 0 < due_ms <= now_ms and not next_due_ms(row, now_ms):
                if self._unknown_zones.due(words := f"no forgotten run is made up in the time zone {row.tz}"):
                    log.warning("%s, which this host lacks: install its package of time zones", words)
                continue
            if due_ms and not is_interval(row.cron):
                due_ms += LATE_MS
                if due_ms <= now_ms:
                    late_ms[key] = due_ms
                    continue
            if due_ms:
                wait_ms = min(wait_ms, max(due_ms - now_ms, 0))
        if late_ms:
            return min(wait_ms / 1000, await self._make_late(late_ms))
        self._answers_since_s = None
        return wait_ms / 1000

    async def _make_late(self, late_ms: dict[Key, int]) -> float:
        """Make what is late, once the server has answered long enough and has not made it. Return when to look again,
        in seconds. Raises `BusError`."""
        await self._take_runs()
        server_ms, now_s = await self.stream.now_ms(), time.monotonic()
        if self._answers_since_s is None:
            self._answers_since_s = now_s
        if (left_s := self._answers_since_s + SERVER_FIRST_S - now_s) > 0:
            return min(left_s, AGAIN_S)
        for key in late_ms:
            row = self._engine.state.schedule(*key)
            if row is not None and not row.paused and 0 < self._due_ms(key, row) <= server_ms - SERVER_FIRST_S * 1000:
                await self._make(key, row, server_ms)
        return AGAIN_S

    async def _make(self, key: Key, row: Schedule, now_ms: int) -> None:
        """Make a run of what is due by `now_ms`: one, however many were missed. Raises `BusError`."""
        wish = row.wish
        if next_ms := next_due_ms(row, now_ms):  # else it would be due again at once
            await self.gate.recorded()
            self.offer(Run(key, wish, await self.stream.make_run(key, wish, next_ms=next_ms), next_ms))

    def _due_ms(self, key: Key, row: Schedule) -> int:
        """Return when the first run is due that was neither decided nor offered; 0 if that is not known."""
        wish, offered_ms = self._offered_next.get(key, (0, 0))
        if wish == row.wish:
            return max(row.next_ms, offered_ms)
        kept = (self._kept or {}).get(key)
        since_ms = kept.since_ms if kept is not None and kept.record == row.wish else 0
        return row.next_ms or (next_due_ms(row, since_ms) if since_ms else 0)

    def _wanted(self) -> dict[Key, Schedule]:
        """Return the schedules that are to run; copies, as the state changes meanwhile."""
        return {
            (tenant, name): copy(row)
            for tenant, rows in self._engine.state.schedules.items()
            for name, row in rows.items()
            if not row.paused
        }


def _wall_ms() -> int:
    return int(time.time() * 1000)
