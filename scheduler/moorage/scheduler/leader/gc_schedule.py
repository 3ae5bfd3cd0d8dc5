"""Schedules Python's garbage collector in a leader, so that it never blocks the event loop for long.

Reference counts free nearly everything that jobs leave behind, so a collection finds almost nothing. But it walks all
objects allocated since the last one, and with many jobs in memory that takes tens of milliseconds. `gc.freeze` hides
the existing objects from the collector at no cost. Reference cycles among them (there are hardly any) then stay in
memory until the next full collection, which runs at most once an hour, while nothing else happens and few jobs are in
memory.
"""

from __future__ import annotations

import gc
import time
from typing import Final

#: for `gc.set_threshold`: the young generation is collected every 20,000 net new objects, older ones hardly ever
THRESHOLDS: Final = (20_000, 250, 100)
#: job events between two calls of `gc.freeze`; an event stands for some 5 objects
EVENTS_MAX: Final = 4_096
#: a full collection reads each job in memory: it runs at most this often, after this long without an event, and with at
#: most this many jobs
FULL_EVERY_S: Final = 3600.0
CALM_S: Final = 5.0
JOBS_MAX: Final = 15_000


class GcSchedule:
    """The schedule of one term; a process has one term at a time, and one collector.

    In a process that is not the scheduler's `own` it does nothing.
    """

    def __init__(self, own: bool = True) -> None:
        self._own = own
        self._events = 0
        self._full_s = self._event_s = time.monotonic()

    def begin(self) -> None:
        """Collect everything once, including what an earlier term left; from then on only new objects."""
        if not self._own:
            return
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)

    def count_events(self, events: int) -> None:
        """Count the events of a record; freeze if there are enough since the last time."""
        if not events or not self._own:
            return
        self._event_s = time.monotonic()
        self._events += events
        if self._events >= EVENTS_MAX:
            self._events = 0
            gc.freeze()

    def slept(self, seconds: float) -> None:
        """Note that a simulation skipped time, in which nothing was allocated."""
        self._full_s += seconds
        self._event_s += seconds

    def collect_if_calm(self, jobs: int) -> None:
        """Make a full collection if one is due, nothing else happens, and `jobs` in memory are at most `JOBS_MAX`."""
        now_s = time.monotonic()
        if now_s - self._full_s > FULL_EVERY_S and now_s - self._event_s > CALM_S and jobs <= JOBS_MAX:
            self._full_s = now_s
            self.begin()
