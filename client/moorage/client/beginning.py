"""What the tenant's frames say of one job, from before its submit on: for most jobs the whole story of a result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from moorage.bus.inbox import Answers
from moorage.client.waiting import Waiting
from moorage.schemas.frames import Event
from moorage.schemas.job import TERMINAL

#: events that are kept of a job that nobody follows yet, or whose end is awaited here
HELD_MAX: Final = 64

Hear = Callable[[Event], None]


class Beginning(Waiting):
    """What the frames have said of one job since before it was submitted. Its handle holds it until it is followed.

    Somebody may await its end here (`ended`): that is one wait, however much is said meanwhile. `is_whole` says that
    nothing was missed; where something may be missing at the end, `is_stale` says so instead.
    """

    __slots__ = ("__weakref__", "_saw", "events", "is_stale", "is_whole")

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.is_whole = True
        self.is_stale = False
        self._saw: Hear | None = None  # of who awaits its end

    def hear(self, event: Event) -> None:
        events = self.events
        if events and event.rev < events[-1].rev:
            return  # late, and told before
        saw = self._saw
        if saw is not None:
            events.append(event)
            saw(event)
            if event.state in TERMINAL or len(events) > HELD_MAX:
                self.wake()
        elif len(events) >= HELD_MAX:
            self.drop()
        elif self.is_whole:
            events.append(event)

    def refresh(self) -> None:
        """Something of it may be lost: what its end is awaited of asks for the rest, any other job for all of it."""
        self.is_stale = True
        self.wake()
        self.drop()

    def drop(self) -> None:
        """It is heard no more, unless its end is awaited."""
        if self._saw is None:
            self.is_whole = False
            self.events.clear()

    def tell(self, hear: Hear) -> None:
        """Give all of it to `hear`, which hears the rest by itself."""
        events, self.events, self.is_whole = self.events, [], False
        for event in events:
            hear(event)

    @property
    def is_awaited(self) -> bool:
        """Whether `ended` waits: the feed then calls `hear` for it as for each listener (`Feed.attend`)."""
        return self._saw is not None

    async def ended(self, waits: Answers, saw: Hear, silence_s: float, timeout_s: float) -> bool:
        """Wait until the job is over, for `timeout_s`; `saw` is called with each event. Raises TimeoutError.

        False where a `Watch` has to go on: after so long a silence, or a `refresh`, or where too much is said of it.
        """
        ends_s = asyncio.get_running_loop().time() + timeout_s
        self._saw = saw
        for event in self.events:
            saw(event)
        try:
            while not self._is_over:
                if self.is_stale or len(self.events) > HELD_MAX:
                    return False
                heard, left_s = len(self.events), ends_s - asyncio.get_running_loop().time()
                if left_s <= 0:
                    raise TimeoutError
                if not await self.wait(waits, min(silence_s, left_s)) and left_s <= silence_s:
                    raise TimeoutError
                self.is_stale |= len(self.events) == heard
        finally:
            self._saw = None
        return True

    @property
    def _is_over(self) -> bool:
        return bool(self.events) and self.events[-1].state in TERMINAL
