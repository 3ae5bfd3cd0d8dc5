"""What the drivers can do that a client has met: those of older releases at once, others once `show` tells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moorage.schemas.capabilities import UNTOLD, UP_TO_0_2, Capabilities, driver_of, told_capabilities


class KnownDrivers:
    """One client's."""

    def __init__(self) -> None:
        self._can = dict(UP_TO_0_2)

    def __contains__(self, driver: str) -> bool:
        return driver in self._can

    def can(self, driver: str) -> Capabilities:
        """Return what a driver can do, as far as it is known."""
        return self._can.get(driver, UNTOLD)

    def meet(self, shown: Mapping[str, Any]) -> None:
        """Keep what an answer to `show` tells of its job's driver."""
        can = told_capabilities(shown)
        if can is not None:
            self._can[driver_of(shown)] = can
