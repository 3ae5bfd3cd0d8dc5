"""What jobs use of the GPUs that they have alone, from the readings that load frames are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moorage.worker.inventory.base import SlotReading
from moorage.worker.member_messages import Member, MemberName, Metered


class UsageMeter:
    """One worker's; `held` are its members.

    Of sharers nothing is measured: what a device does is not told by process on every board. Nor is anything while a
    device does not tell its utilisation, as a MIG slice. What a VM uses of a device that is handed on to it, the host
    cannot read.
    """

    def __init__(self, held: Mapping[MemberName, Member]) -> None:
        self._held = held
        self._before: set[MemberName] = set()  # running at the reading before
        self._read_s = 0.0

    def read(self, readings: Sequence[SlotReading], now_s: float) -> Metered | None:
        """Take a reading of each slot. Returns what was used since the one before, where any job was there for both."""
        passed_ms, self._read_s = int((now_s - self._read_s) * 1000), now_s
        running = {
            name: member
            for name, member in self._held.items()
            if member.slots and member.place.mode == "exclusive" and member.phase in ("running", "ending")
            if not any(readings[slot].handed_on for slot in member.slots)
        }
        items: list[tuple[MemberName, int, int]] = []
        for name, member in running.items():
            percents = [readings[slot].util_percent for slot in member.slots]
            told = [percent for percent in percents if percent is not None]
            if name in self._before and len(told) == len(percents):
                memory_mib = sum(readings[slot].memory_used_mib for slot in member.slots)
                items.append((name, sum(told) * passed_ms // 100, memory_mib * passed_ms))
        self._before = set(running)
        return Metered(items) if items else None
