"""A cluster with everything that goes wrong: `World(seed).run()` raises `Violated` where a promise does not hold."""

from __future__ import annotations

from tests.release.sim.accidents import Accidents
from tests.release.sim.cluster import Cluster, Hazards


class World(Cluster):
    """As `Cluster`."""

    def _hazards(self) -> Hazards:
        return Accidents(self)
