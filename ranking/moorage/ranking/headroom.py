"""The ranker `headroom`: chooses the host with the most room, by a score of idle time and free devices.

    score = 0.7 * (100 - utilisation) + 0.3 * free

Both are in percent; the highest score wins. `free` is the part of the lent devices that is unused. `utilisation` is the
larger of two values: the part of the host's CPU reserved by placed members, and the mean utilisation of its devices in
its last load frame. Reserved devices count only in `free`. A host that reports no CPU count has no CPU reserved.

The score is an integer, in thousandths. Ties go to the devices with the least memory, then to the worker that joined
first: the same input gives the same placement on every machine.
"""

from __future__ import annotations

from typing import ClassVar, Final

from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import Host
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.rank.ranker import Choice, Pack

#: thousandths of a point for one percent idle, and for all devices free
IDLE_WEIGHT: Final = 700
FREE_WEIGHT: Final = 30_000


class Headroom(Pack):
    """Scores every host that could run the shape. `spread` works as in Pack; sharers may join or take a free device.

    As in all rankers, a model name matched as a whole word goes before one matched inside a word.
    """

    name: ClassVar[str] = "headroom"

    def choose(self, fleet: Fleet, shape: Shape, avoid: dict[int, int], excluded: frozenset[int]) -> Choice | None:
        if shape.spread:
            return self._spread(fleet, shape, avoid, excluded)
        return self.least(
            fleet,
            shape,
            excluded,
            lambda host, fit, slots: (-fit.rank, -score(host), host.cls.memory_of(slots), host.worker.num),
        )

    def again(self, choice: Choice, shape: Shape, most: int) -> list[int]:
        return []  # Pack's shortcut does not hold here: each replica is chosen by itself


def score(host: Host) -> int:
    """Return a host's score in thousandths of a point, 0..100,000; a host without devices has free part 0."""
    devices = host.lent.bit_count()
    free = FREE_WEIGHT * host.open.bit_count() // devices if devices else 0
    return IDLE_WEIGHT * (100 - utilisation_percent(host)) + free


def utilisation_percent(host: Host) -> int:
    """Return how busy a host is, 0..100: the larger of CPU reserved and device utilisation reported."""
    reserved = 100 * (host.cpu_milli - host.cpu_free) // host.cpu_milli if host.cpu_milli else 0
    return min(100, max(0, reserved, host.util_percent))
