"""Decide which jobs are frozen for want of use: they have their GPUs alone, and do not use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from moorage.schemas.attempt import AttemptName
from moorage.schemas.job import QOS, Qos
from moorage.worker.devices.readers.base import SlotReading
from moorage.worker.session.attempt_messages import Attempt, FreezeDue
from moorage.worker.sharing.idle_watch import IdleWatch


class UnusedJobs:
    """The attempts of one worker that are to be frozen for want of use; `held` are all of its attempts.

    `after_s` says after how many seconds, by the `qos` of the request, 0 for never; `wakes` whether an attempt's first
    use will have it resumed. An attempt is named once in each time without use: where it could not be frozen, it may
    not be asked again and again.
    """

    def __init__(
        self, held: Mapping[AttemptName, Attempt], after_s: Callable[[Qos], int], wakes: Callable[[Attempt], bool]
    ) -> None:
        self._held = held
        self._wakes = wakes
        # by name and how often it was frozen: it may be frozen and resumed between two readings
        self._watch = IdleWatch[tuple[AttemptName, int]](0, {qos: after_s(qos) for qos in QOS})

    def read(self, readings: Sequence[SlotReading], now_s: float) -> FreezeDue | None:
        """Handle a reading of each slot. Return attempts to freeze, lowest `qos` first, then idlest; None if none."""
        alone = {
            (name, attempt.freezes): (attempt.request.qos, attempt.slots)
            for name, attempt in self._held.items()
            if attempt.place.mode == "exclusive"
            and attempt.phase == "running"
            and not (attempt.frozen or attempt.place.hold)
        }
        found = self._watch.read(alone, readings, now_s)
        due = [
            (QOS.index(self._held[name].request.qos), -idle.seconds, name)
            for (name, _), idle in found.items()
            if self._wakes(self._held[name])
        ]
        return FreezeDue([(name, -seconds) for _, seconds, name in sorted(due)]) if due else None
