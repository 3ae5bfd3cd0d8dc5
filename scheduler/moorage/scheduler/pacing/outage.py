"""Limits what the log says about trouble that comes and goes: its begin, and its end once it has stayed away.

While a cluster of servers elects, or after a part of it was cut off, one question is answered and the next one not.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Final

from moorage.scheduler.pacing.reminders import Reminders

#: it is over once nothing has failed for so long
CALM_S: Final = 5.0
_NUMBER: Final = re.compile(r"\d+")


class Outage:
    """What fails and works in turns: `failed` and `works` are told each try."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told = Reminders()
        self._began_s: float | None = None
        self._failed_s = 0.0  # the last time

    def failed(self, words: str) -> bool:
        """Return whether to log these words now: they are new but for their numbers, or the last time is long ago."""
        self._failed_s = self._clock()
        if self._began_s is None:
            self._began_s = self._failed_s
        return self._told.due(_NUMBER.sub("", words))

    def works(self) -> float | None:
        """Return for how long it did not, in seconds, once that is over; None else."""
        if self._began_s is None or self._clock() - self._failed_s < CALM_S:
            return None
        lasted_s, self._began_s = self._failed_s - self._began_s, None
        self._told.clear()
        return lasted_s
