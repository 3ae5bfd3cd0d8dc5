"""Through which moment a leader has heard its workers. Silence counts against a lease only while they can be heard.

The server sends its answer to a PING behind all that waits for this connection. So once a round trip ends, the leader
has read all that had reached the server when the round trip began. It counts once the intake has decoded that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from moorage.bus.connection import Connection
from moorage.bus.errors import BusError
from moorage.scheduler.leader.intake import Intake

log = logging.getLogger("moorage.scheduler")

#: the time between two round trips, and the most that one may take before the leader counts as behind, in seconds
ROUND_TRIP_EVERY_S: Final = 0.5
BEHIND_S: Final = 2.5
#: a round trip is given up after this time; the next one says the same of more messages
ROUND_TRIP_S: Final = 30.0


class Hearing:
    """The hearing of one term, on the workers' connection. `now_ms` is the leader's monotonic time."""

    def __init__(self, workers: Connection, intake: Intake, now_ms: Callable[[], int]) -> None:
        self._workers = workers
        self._intake = intake
        self._now_ms = now_ms
        self._through_ms: int | None = None  # None before the first round trip begins
        self._connected = workers.reconnects  # the connection of the last round trip, by its number
        self._counted_ms = 0  # of the time since `_through_ms`: what `take_unheard` has returned
        self._owed_ms = 0  # of times that are over: what it has not returned
        self._is_behind = False

    async def run(self) -> None:
        """Make round trips for ever, and log when the leader falls behind and when it has caught up."""
        while True:
            if self._through_ms is None:
                self._through_ms = self._now_ms()
            with contextlib.suppress(BusError):  # cut off, or no answer: the next round trip says how long that was
                await self._workers.regained()
                began_ms = self._now_ms()
                await self._workers.flush(ROUND_TRIP_S)
                came = self._intake.frames_came
                await asyncio.sleep(ROUND_TRIP_EVERY_S)
                if self._intake.frames_taken >= came:
                    self._heard(self._through_ms, began_ms)
                continue
            await asyncio.sleep(ROUND_TRIP_EVERY_S)

    def _heard(self, before_ms: int, through_ms: int) -> None:
        unheard_ms = max(0, through_ms - before_ms)
        if self._workers.reconnects != self._connected:  # what was sent meanwhile may be lost
            self._connected = self._workers.reconnects
            self._owed_ms += max(0, unheard_ms - self._counted_ms)
        if self._is_behind:
            self._is_behind = False
            late_s = (self._now_ms() - before_ms) / 1000
            log.warning("the workers are heard again: %.1f s do not count for their leases", late_s)
        self._through_ms, self._counted_ms = max(before_ms, through_ms), 0

    def take_unheard(self, now_ms: int) -> int:
        """Return for how many ms no worker could be heard, without those that an earlier call has returned.

        Time in which the connection is behind by `BEHIND_S` at most does not count.
        """
        owed_ms, self._owed_ms = self._owed_ms, 0
        late_ms = now_ms - (now_ms if self._through_ms is None else self._through_ms)
        if late_ms > (ROUND_TRIP_EVERY_S + BEHIND_S) * 1000:
            if not self._is_behind:
                self._is_behind = True
                log.warning(
                    "the leader is cut off from its workers, or behind on what they send: until it has caught up, no"
                    " lease runs out"
                )
            owed_ms += late_ms - self._counted_ms
            self._counted_ms = late_ms
        return owed_ms
