"""Notice processes of a limited job that use a GPU without the limiter, and log what keeps them to their share then.

The usual ways are a program that is linked statically, and one that is started with another LD_PRELOAD (`env -i`,
`unset LD_PRELOAD`). A process that loads the library and calls the driver past it is not seen here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from moorage.schemas.attempt import AttemptName
from moorage.worker.devices.readers.base import SlotReading
from moorage.worker.driver import Driver
from moorage.worker.session.attempt_messages import Attempt
from moorage.worker.sharing.limiter.limits import LIBRARY, LIBRARY_AT
from moorage.worker.sharing.limiter.segment import Segment

log = logging.getLogger("moorage.worker")

#: what still keeps a job to its memory share, by the level of its driver's guard
_WORDS = {
    "guarded": "the memory guard alone keeps the job to its memory share, and ends it if it takes more",
    "advisory": "nothing keeps the job to its memory share",
}


class Escapes:
    """Looks at each reading of the devices; `held` are the attempts, and `level` says how a driver's are kept to
    memory.

    Each attempt is logged once.
    """

    def __init__(
        self, held: Mapping[AttemptName, Attempt], drivers: Mapping[str, Driver], level: Callable[[Driver, str], str]
    ) -> None:
        self._held = held
        self._drivers = drivers
        self._level = level
        self._told: set[AttemptName] = set()

    def read(self, readings: Sequence[SlotReading], now_s: float) -> None:
        """Handle a reading of each slot. Log the first process without the limiter of each attempt that has a limit."""
        self._told &= self._held.keys()
        for name, attempt in self._held.items():
            driver = self._drivers[attempt.driver]
            segment = driver.limits.segments.get(name) if driver.limits is not None else None
            if segment is None or name in self._told or not _has_limit(segment):
                continue
            for slot in attempt.slots:
                pids = list(readings[slot].used_by or ())
                ours = [pid for pid, owner in driver.attempts_of(pids).items() if owner == name] if pids else []
                if (pid := next((pid for pid in ours if not _has_loaded_it(pid)), 0)) and name not in self._told:
                    self._told.add(name)
                    words = _WORDS.get(self._level(driver, attempt.place.mode), _WORDS["advisory"])
                    log.warning(
                        "job %s of tenant %s: process %d uses GPU %d without the limiter: %s",
                        name[1], name[0], pid, slot, words,
                    )  # fmt: skip


def _has_limit(segment: Segment) -> bool:
    return not segment.is_closed and any(map(segment.limit, range(segment.devices)))


def _has_loaded_it(pid: int) -> bool:
    """Return whether a process has the library in its memory; True if that cannot be seen, or it has ended."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            maps = file.read()
    except OSError:
        return True
    return not maps or any(str(path).encode() in maps for path in (LIBRARY, LIBRARY_AT))
