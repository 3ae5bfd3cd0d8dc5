"""Find for how long running attempts have shown no sign of work: no output, and devices that do nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import IDLE_POWER, LOW_POWER, DeviceUse
from moorage.worker.devices.readers.base import SlotReading
from moorage.worker.session.attempt_messages import Attempt
from moorage.worker.sharing.idle_watch import PAUSE_S_MAX

#: a device whose kernels only wait is at so many percent
FULL_PERCENT: Final = 100


class Stillness:
    """The stillness of those attempts of one worker whose requests have a `stall_s`; `held` are all of its attempts.

    An attempt moves when it writes output or reports progress (`said`), and when one of its devices works or cannot be
    judged: a board that does not report its use, and at 100 % one that does not report its power. Time that passes
    without readings is no stillness. If the worker does not get the attempts' output (`hears_output`), none is still.
    Seconds are of CLOCK_BOOTTIME.
    """

    def __init__(self, held: Mapping[AttemptName, Attempt], *, hears_output: bool) -> None:
        self._held = held
        self._hears_output = hears_output
        self._since_s: dict[AttemptName, float] = {}
        self._idle_w: dict[int, int] = {}  # by slot: the least power that it was seen to draw at 0 %
        self._read_s = 0.0

    def note_output(self, name: AttemptName, now_s: float) -> None:
        """Note that an attempt has written output or reported progress."""
        if name in self._since_s:
            self._since_s[name] = now_s

    def read(
        self, readings: Sequence[SlotReading], uses: Mapping[AttemptName, Sequence[DeviceUse]], now_s: float
    ) -> None:
        """Handle a reading of each slot, and what the running attempts use by it. Attempts that are not in `uses` begin
        anew."""
        paused, self._read_s = now_s - self._read_s > PAUSE_S_MAX, now_s
        for slot, reading in enumerate(readings):
            if reading.util_percent == 0 and reading.power_w is not None:
                self._idle_w[slot] = min(reading.power_w, self._idle_w.get(slot, reading.power_w))
        since_s: dict[AttemptName, float] = {}
        for name, each in uses.items() if self._hears_output else ():
            attempt = self._held[name]
            if attempt.request.workload.stall_s is not None:
                alone = attempt.place.mode == "exclusive"
                still = not paused and all(self._does_nothing(use, readings[use.slot], alone=alone) for use in each)
                since_s[name] = self._since_s.get(name, now_s) if still else now_s
        self._since_s = since_s

    def seconds(self) -> dict[AttemptName, int]:
        """Return for how many whole seconds each attempt had been still at the last reading."""
        return {name: max(0, int(self._read_s - since_s)) for name, since_s in self._since_s.items()}

    def _does_nothing(self, use: DeviceUse, reading: SlotReading, *, alone: bool) -> bool:
        if use.percent == 0:
            return not (alone and reading.peak_percent)  # it has worked between two readings; else others' work counts
        limit_w = use.power_limit_w
        if use.percent is None or use.percent < FULL_PERCENT or use.power_w is None or not limit_w:
            return False
        idle_w = min(self._idle_w.get(use.slot, int(limit_w * IDLE_POWER)), limit_w)
        return use.power_w < idle_w + (limit_w - idle_w) * LOW_POWER
