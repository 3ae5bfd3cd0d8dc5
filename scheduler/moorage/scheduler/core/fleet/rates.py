"""What a request counts towards its tenant's fair share, by the resource of which it takes the largest part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from moorage.scheduler.core.ledger.fairshare import GPU_MILLI, sharer_milli
from moorage.scheduler.core.ledger.records import MODE_NAMES, Mode
from moorage.schemas.memo import Memo

if TYPE_CHECKING:
    from moorage.scheduler.core.fleet.fleet import Fleet
    from moorage.scheduler.core.fleet.shape import Shape

#: the most shapes whose rate is cached; beyond it the cache is emptied
RATES_MAX: Final = 16_384


class Rates:
    """What a shape counts in thousandths of a GPU, by the resource of which it takes the largest part of the fleet.

    A job that takes a tenth of all CPU counts like a tenth of all GPUs (Ghodsi et al., "Dominant Resource Fairness",
    NSDI 2011). A sharer counts its share of compute, at least 1 / (the most sharers of its mode); its share of the
    GPU's memory does not count. Cached by shape.
    """

    def __init__(self, fleet: Fleet, known_max: int = RATES_MAX) -> None:
        self._fleet = fleet
        self._inventory = -1
        self._total = (0, 0, 0)  # devices, cpu_milli, memory_mib
        self._known: Memo[int, int] = Memo(known_max)

    def of(self, shape: Shape) -> int:
        if self._inventory != self._fleet.inventory:
            hosts = self._fleet.hosts.values()
            self._inventory = self._fleet.inventory
            self._total = (
                sum(host.lent.bit_count() for host in hosts),
                sum(host.cpu_milli for host in hosts),
                sum(host.memory_mib for host in hosts),
            )
            self._known.clear()
        rate = self._known.get(shape.index)
        if rate is None:
            rate = self._known.put(shape.index, self._of(shape))
        return rate

    def _of(self, shape: Shape) -> int:
        devices, cpu_milli, memory_mib = self._total
        whole = GPU_MILLI * max(1, devices)
        each = sharer_milli(MODE_NAMES[shape.mode], shape.compute_percent) if shape.mode > Mode.EXCLUSIVE else GPU_MILLI
        rate = each * shape.count
        if cpu_milli:
            rate = max(rate, shape.cpu_milli * whole // cpu_milli)
        if memory_mib:
            rate = max(rate, shape.memory_mib * whole // memory_mib)
        return min(rate, whole)
