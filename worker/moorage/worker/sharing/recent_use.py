"""Keep what running attempts used of their devices in the last minutes: a ring of readings for each, one a second."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from moorage.schemas.attempt import AttemptName, name_in
from moorage.schemas.errors import refuse
from moorage.schemas.frames import USE_KEPT_S, AttemptUse, Device, DeviceUse, ReadUse, UseLine, UsePage

#: stands for a reading that is not there
_NONE: Final = -1
#: bytes of one ring: three numbers a second
_RING_BYTES: Final = 12 * USE_KEPT_S
#: bytes of all rings of a worker; a device of an attempt beyond that has its newest reading alone
RINGS_BYTES_MAX: Final = 4 * 1024 * 1024


class RecentUse:
    """What the running attempts of one worker use. Seconds are of CLOCK_BOOTTIME."""

    def __init__(self) -> None:
        self._newest: Mapping[AttemptName, Sequence[DeviceUse]] = {}
        self._rings: dict[tuple[AttemptName, int], _Ring] = {}
        self._second = 0

    def record(self, now_s: float, uses: Mapping[AttemptName, Sequence[DeviceUse]]) -> None:
        """Keep a reading of all running attempts that can be measured. Others are forgotten, with their rings."""
        self._newest, self._second = uses, int(now_s)
        there = {(name, use.slot): use for name, each in uses.items() for use in each}
        for key in self._rings.keys() - there.keys():
            del self._rings[key]
        for key, use in there.items():
            ring = self._rings.get(key)
            if ring is None:
                if (len(self._rings) + 1) * _RING_BYTES > RINGS_BYTES_MAX:
                    continue
                ring = self._rings[key] = _Ring()
            ring.put(self._second, use)

    def newest(self, still_s: Mapping[AttemptName, int]) -> list[AttemptUse]:
        """Return the newest reading, with the seconds for which attempts have been still."""
        return [
            AttemptUse(name[-1], list(each), still_s.get(name, 0), *name[:4]) for name, each in self._newest.items()
        ]

    def page(self, ask: ReadUse, devices: Sequence[Device]) -> UsePage:
        """Return what the attempt has used; no device if it cannot be measured or was not read so far."""
        span = math.ceil(ask.last_s / min(ask.points, ask.last_s))
        spans = math.ceil(ask.last_s / span)
        name = name_in(ask)
        lines = []
        for slot, device in enumerate(devices):
            if (ring := self._rings.get((name, slot))) is not None:
                percent, memory_mib, power_w = ring.means(self._second, span, spans)
                about = device.index, device.uuid, device.name, device.memory_mib
                shared_by = next((use.shared_by for use in self._newest.get(name, ()) if use.slot == slot), 0)
                lines.append(UseLine(*about, percent, memory_mib, power_w, shared_by))
        if not lines and len(self._rings) * _RING_BYTES + _RING_BYTES > RINGS_BYTES_MAX:
            raise refuse("not-kept", "this worker has no room for the readings of more jobs", job=ask.job)
        return UsePage(ask.replica, ask.attempt, span, lines)


class _Ring:
    """The readings of one attempt on one device in the last `USE_KEPT_S` seconds: percent, MiB and watts."""

    def __init__(self) -> None:
        self._columns = tuple(array("i", [_NONE]) * USE_KEPT_S for _ in range(3))
        self._second = _NONE  # of the newest reading

    def put(self, second: int, use: DeviceUse) -> None:
        numbers = [_NONE if each is None else each for each in (use.percent, use.memory_mib, use.power_w)]
        since = max(self._second + 1, second - USE_KEPT_S + 1) if self._second >= 0 else second
        for column, number in zip(self._columns, numbers, strict=True):
            for skipped in range(since, second):
                column[skipped % USE_KEPT_S] = _NONE
            column[second % USE_KEPT_S] = number
        self._second = second

    def means(self, until: int, span: int, spans: int) -> list[list[int | None]]:
        """Return for each column the mean of each span, the last one ending with the second `until`."""
        begins = [until + 1 - span * (spans - at) for at in range(spans)]
        return [[_mean(self._read(column, begin, span)) for begin in begins] for column in self._columns]

    def _read(self, column: array[int], begin: int, count: int) -> Iterable[int]:
        first = self._second - USE_KEPT_S + 1
        for second in range(begin, begin + count):
            if first <= second <= self._second and (number := column[second % USE_KEPT_S]) != _NONE:
                yield number


def _mean(numbers: Iterable[int]) -> int | None:
    found = list(numbers)
    return round(sum(found) / len(found)) if found else None
