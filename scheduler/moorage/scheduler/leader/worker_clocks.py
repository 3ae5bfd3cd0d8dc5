"""Notice workers whose wall clock is wrong, by the time in their load frames.

Leases need no wall clock, so such a worker goes on. Its log, the files that it stores and the deadlines of its programs
have another time than all others, which nobody finds without being told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

import msgspec

from moorage.schemas.frames import CLOCK, Load

#: a worker's clock that differs this much from the leader's is told; a load frame may come late by less
CLOCK_OFF_S_MAX: Final = 5.0
#: the time told stays as it is while the clock moves by less
_MOVED_S: Final = 2.0

log = logging.getLogger("moorage.scheduler")


class WorkerClocks:
    """Which workers have another time than this host, in the term of one leader; `is_known` tells workers' ids."""

    def __init__(self, is_known: Callable[[str], bool]) -> None:
        self._is_known = is_known
        #: by worker with a wrong clock: seconds ahead by its last frame, and as told (0: not yet)
        self._wrong: dict[str, tuple[float, float]] = {}

    def checked(self, worker: str, frame: Load) -> Load:
        """Return the frame, with a warning if its worker's clock is wrong by this frame and the one before: one of them
        may have come late."""
        off_s = frame.time_ms / 1000 - time.time() if frame.time_ms else 0.0
        if abs(off_s) <= CLOCK_OFF_S_MAX or not self._is_known(worker):
            self._wrong.pop(worker, None)
            return frame
        before_s, told_s = self._wrong.get(worker, (0.0, 0.0))
        if not before_s:
            self._wrong[worker] = (off_s, 0.0)
            return frame
        nearer_s = min(before_s, off_s, key=abs)
        if not told_s:
            log.warning("the clock of worker %s is %s: run chrony or ntpd on both hosts", worker, _words(nearer_s))
        if abs(nearer_s - told_s) >= _MOVED_S:
            told_s = nearer_s
        self._wrong[worker] = (off_s, told_s)
        warning = f"{CLOCK}: {_words(told_s)}"
        return msgspec.structs.replace(frame, warning=f"{frame.warning}; {warning}" if frame.warning else warning)


def _words(off_s: float) -> str:
    return f"{abs(off_s):.0f} s {'ahead of' if off_s > 0 else 'behind'} the leader's"
