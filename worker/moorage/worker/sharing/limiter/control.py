"""Do the work of the controller's process: give the segments of a worker their tokens and heartbeats.

This process alone writes tokens, and all heartbeats but the first, which the agent writes into a new segment. What NVML
reports of a process is added to the attempt whose segment has a slot of that process; a process without a slot is added
to no attempt. If NVML reports nothing for a device, as for a MIG slice, or none of an attempt's slots has a known pid,
tokens come at a constant rate by the share.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from moorage.worker.sharing.limiter.controller import PASSED_S_MIN, Controller, ControllerSettings
from moorage.worker.sharing.limiter.meter import Unmeasured
from moorage.worker.sharing.limiter.owners import Owners
from moorage.worker.sharing.limiter.segment import Segment, SegmentError, Slot

#: between two refills; a job's process takes the worker for dead if the last heartbeat is two seconds old
STEP_S: Final = 0.1
#: between two searches for processes that have ended
LOOK_S: Final = 1.0
#: tokens a second of a whole device at a constant rate, and for how many seconds of its rate a bucket has room, as in
#: the reference; it has room for the dearest launch in any case
RATE: Final = 50_000
CAPACITY_S: Final = 2.0
CAPACITY_MIN: Final = 10.0
#: a segment that cannot be read this long is not one that is being made
MADE_S: Final = 1.0


class Measures(Protocol):
    """Measures the use of GPUs, as `meter.Meter` does."""

    def used(self, uuid: str, now_s: float) -> dict[int, float]:
        """Return the part of a GPU that each process has used recently, 0..1 by pid. Raises Unmeasured."""
        ...


@dataclass
class _Attempt:
    segment: Segment
    last_s: float
    slots: list[Slot] = field(default_factory=list)
    controllers: dict[int, Controller] = field(default_factory=dict)
    is_told: bool = False


class Control:
    """The segments in a folder. `say` gets a line, once, when something happens that an operator should know."""

    def __init__(
        self, folder: Path, settings: ControllerSettings, meter: Measures, owners: Owners, say: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._meter = meter
        self._owners = owners
        self._say = say
        self._attempts: dict[tuple[str, int], _Attempt] = {}  # by the file's name and number
        self._unread: dict[tuple[str, int], float] = {}
        self._unmeasured: dict[str, str] = {}
        self._looked_s = 0.0
        #: when a process of an attempt was last seen to live
        self.lived_s = 0.0

    def step(self, now_s: float) -> None:
        """Give every segment its heartbeat and its tokens; before that, open new segments and close removed ones.

        A segment that cannot be written is reported to `say` once; the others are not affected. Each `LOOK_S` seconds
        the memory of processes that have ended is released. While the folder cannot be read, no segment is opened or
        closed.
        """
        with contextlib.suppress(OSError):
            self._find(now_s)  # out of descriptors: try again with the next step
        measured: dict[str, dict[int, float] | None] = {}
        for attempt in self._attempts.values():
            try:
                attempt.segment.beat()
                if now_s - attempt.last_s >= PASSED_S_MIN:
                    self._refill(attempt, now_s, measured)
                    attempt.last_s = now_s
            except (OSError, struct.error) as error:  # struct.error: a job has written numbers that are too large
                if not attempt.is_told:
                    self._say(f"{attempt.segment.path} cannot be refilled: {error}")
                attempt.is_told = True
        if now_s >= self._looked_s + LOOK_S:
            self._looked_s = now_s
            with contextlib.suppress(OSError):  # out of descriptors: try again later
                self._look(now_s)

    def close(self) -> None:
        """Close the segments."""
        for attempt in self._attempts.values():
            attempt.segment.close()
        self._attempts.clear()

    def _find(self, now_s: float) -> None:
        """Open the new segments, and close those that were removed. Raises OSError if the folder cannot be read."""
        found: set[tuple[str, int]] = set()
        with contextlib.suppress(FileNotFoundError):
            about = self._folder.lstat()  # every user may make folders in /dev/shm
            if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid():
                found = {(entry.name, entry.inode()) for entry in os.scandir(self._folder)}
        for gone in self._attempts.keys() - found:
            self._attempts.pop(gone).segment.close()
        self._unread = {key: since_s for key, since_s in self._unread.items() if key in found}
        for new in found - self._attempts.keys():
            try:
                self._attempts[new] = _Attempt(Segment.adopt(self._folder / new[0]), now_s)
            except (OSError, SegmentError) as error:
                since_s = self._unread.setdefault(new, now_s)
                if since_s and now_s > since_s + MADE_S:
                    self._unread[new] = 0.0
                    self._say(f"a segment cannot be used, and its job is not throttled: {error}")

    def _refill(self, attempt: _Attempt, now_s: float, measured: dict[str, dict[int, float] | None]) -> None:
        segment, passed_s = attempt.segment, now_s - attempt.last_s
        attempt.slots = segment.slots()
        pids = {pid for slot in attempt.slots if (pid := self._owners.pid_of(slot))}
        is_known = bool(pids) or not attempt.slots
        for device, uuid in enumerate(segment.uuids):
            rate = segment.rate(device)
            if not rate:
                attempt.controllers.pop(device, None)
                continue
            if uuid not in measured:
                measured[uuid] = self._measured(uuid, now_s)
            used = measured[uuid]
            if used is None or not is_known:
                attempt.controllers.pop(device, None)
                refill(segment, device, rate, passed_s)
                continue
            target = min(rate / RATE, 1.0)
            controller = attempt.controllers.get(device)
            if controller is None:
                controller = attempt.controllers[device] = Controller(target, self._settings)
                controller.begin(segment, device)
            controller.target = target
            controller.step(segment, device, sum(used.get(pid, 0.0) for pid in pids), passed_s)

    def _measured(self, uuid: str, now_s: float) -> dict[int, float] | None:
        """Return what processes use of a device; None if it is unknown. `say` gets a line when that begins and ends."""
        bare = uuid.removeprefix("GPU-")  # a segment does not tell a GPU from a MIG slice
        try:
            found = self._meter.used(uuid, now_s)
        except Unmeasured as error:
            if uuid not in self._unmeasured:
                self._say(f"device {bare}: {error}: launches of its jobs come at a constant rate, not by what they use")
            self._unmeasured[uuid] = str(error)
            return None
        if self._unmeasured.pop(uuid, ""):
            self._say(f"device {bare}: what processes use of it is known again")
        return found

    def _look(self, now_s: float) -> None:
        """Release the counted memory of processes that have ended, and set `lived_s` if one lives. Raises OSError."""
        dead = self._owners.look([slot for attempt in self._attempts.values() for slot in attempt.slots])
        for attempt in self._attempts.values():
            for slot in attempt.slots:
                if slot.owner in dead:
                    attempt.segment.bury(slot)
                elif self._owners.pid_of(slot):
                    self.lived_s = now_s


def refill(segment: Segment, device: int, rate: float, seconds: float) -> None:
    """Add the tokens of `seconds`, of `CAPACITY_S` at most, at a constant `rate` per second. Raises OSError."""
    segment.refill(device, rate * min(seconds, CAPACITY_S), max(CAPACITY_MIN, rate * CAPACITY_S))
