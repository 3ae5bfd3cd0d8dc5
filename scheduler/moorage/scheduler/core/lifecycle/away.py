"""The workers that are away: they have no session now, and the ledger has not forgotten them yet.

A host that restarts is one of them for some minutes. What it could run is no request that "no known worker could ever
run", so such a request waits for it.
"""

from __future__ import annotations

from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.state import State


class Away:
    """Keeps what these workers had when they left, as a fleet of its own, on which nothing runs."""

    def __init__(self, state: State, fleet: Fleet) -> None:
        self._state = state
        self._known = fleet
        self._looked = (-1, 0)  # as of which workers `_fleet` is: another one came, left or was forgotten since
        self._fleet = Fleet()
        self._left_ms: dict[int, int] = {}  # by the number of a worker in `_fleet`

    def lack(self, shape: Shape, replicas: int) -> int:
        """Return how many of so many replicas they could not hold, if all came back; 0 or less if they could all."""
        self._look()
        self._fleet.tell_apart(shape)
        return self._fleet.lack(shape, replicas)

    def _look(self) -> None:
        as_of = (self._known.inventory, len(self._state.workers))
        if as_of == self._looked:
            return
        self._looked = as_of
        left_ms = {
            worker.num: worker.left_ms for worker in self._state.workers.values() if worker.hello and not worker.session
        }
        for num in [num for num, left in self._left_ms.items() if left_ms.get(num) != left]:
            self._fleet.leave(num)
        for num in left_ms.keys() - self._fleet.hosts.keys():
            self._fleet.join(self._state.worker_by_num[num], ())
        self._left_ms = left_ms
