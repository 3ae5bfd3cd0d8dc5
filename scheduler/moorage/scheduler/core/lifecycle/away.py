"""The workers that are away: the ledger knows what they have, and the fleet has no host for them now.

A host that restarts is one of them for some minutes, and each worker until the record with its join is whole. What it
could run is no request that "no known worker could ever run", so such a request waits for it.
"""

from __future__ import annotations

from copy import copy

from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.state import State


class Away:
    """Keeps what these workers have as a fleet of its own, on which nothing runs."""

    def __init__(self, state: State, fleet: Fleet) -> None:
        self._state = state
        self._known = fleet
        self._as_of = (-1, -1, -1)  # the record before, the inventory and the number of workers as of which `_fleet` is
        self._fleet = Fleet()

    def lack(self, shape: Shape, replicas: int) -> int:
        """Return how many of so many replicas they could not hold, if all came back; 0 or less if they could all."""
        self._look()
        self._fleet.distinguish(shape)
        return self._fleet.lack(shape, replicas)

    def places(self, shape: Shape) -> tuple[Shape, ...]:
        """Return the shapes for the places that they would have, as `Fleet.places` does."""
        self._look()
        return self._fleet.places(shape)

    def each_place(self, shape: Shape) -> tuple[Shape, ...]:
        """Return the same as `Fleet.each_place`."""
        self._look()
        return self._fleet.each_place(shape)

    def _look(self) -> None:
        as_of = (self._state.seq, self._known.inventory, len(self._state.workers))
        if as_of == self._as_of:
            return
        self._as_of = as_of
        here, hosts = self._known.hosts, self._fleet.hosts
        known = (each for each in self._state.workers.values() if each.hello and not each.is_unlisted)
        away = {each.num: each for each in known if each.num not in here}
        for num in [num for num in hosts if num not in away or hosts[num].worker.inventory is not away[num].inventory]:
            self._fleet.leave(num)
        for num in away.keys() - hosts.keys():
            self._fleet.join(copy(away[num]), ())  # its next join changes the worker, and not what this fleet has noted
