"""What drivers can do, as far as a client knows: those of older releases at once, others once `show` reports it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moorage.schemas.capabilities import UNKNOWN, UP_TO_0_2, Capabilities, driver_of, reported_capabilities


class KnownDrivers:
    """The drivers that one client knows."""

    def __init__(self) -> None:
        self._can = dict(UP_TO_0_2)

    def __contains__(self, driver: str) -> bool:
        return driver in self._can

    def can(self, driver: str) -> Capabilities:
        """Return what a driver can do, as far as it is known."""
        return self._can.get(driver, UNKNOWN)

    def learn(self, shown: Mapping[str, Any]) -> None:
        """Keep what an answer to `show` reports of the job's driver."""
        can = reported_capabilities(shown)
        if can is not None:
            self._can[driver_of(shown)] = can
