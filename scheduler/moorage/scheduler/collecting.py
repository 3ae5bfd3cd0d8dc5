"""Python's garbage collector, kept from long pauses while a reign lasts.

What jobs leave behind is freed by reference counts, so a collection finds nothing. But it walks everything that was
allocated since the one before, and if that is all jobs in memory it takes tens of milliseconds. `gc.freeze` hides what
exists from the collector, at no cost. Reference cycles in what is hidden stay until a full collection, but there are
hardly any, and a full one is made in a calm hour.
"""

from __future__ import annotations

import gc
import time
from typing import Final

#: net new objects at which it looks at what is young, some 3 ms of it; what grew old is hardly ever looked at
THRESHOLDS: Final = (20_000, 250, 100)
#: events after which what is there is taken out of sight: each stands for some 5 objects
EVENTS_MAX: Final = 4_096
#: a full collection, some 1 µs a job in memory: so often, after so long without an event, and with so few jobs at most
FULL_EVERY_S: Final = 3600.0
CALM_S: Final = 5.0
JOBS_MAX: Final = 15_000


class Collecting:
    """The collector's schedule for one reign; a process has one reign at a time."""

    def __init__(self) -> None:
        self._events = 0
        self._full_s = self._event_s = time.monotonic()

    def begin(self) -> None:
        """Collect everything once, what an earlier reign left included; from then on only what is new."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)

    def wrote(self, events: int) -> None:
        """Note that a record had so many events."""
        if not events:
            return
        self._event_s = time.monotonic()
        self._events += events
        if self._events >= EVENTS_MAX:
            self._events = 0
            gc.freeze()

    def tidy(self, jobs: int) -> None:
        """Make a full collection if one is due and keeps nobody waiting; `jobs` is how many are in memory."""
        now_s = time.monotonic()
        if now_s - self._full_s > FULL_EVERY_S and now_s - self._event_s > CALM_S and jobs <= JOBS_MAX:
            self._full_s = now_s
            self.begin()
