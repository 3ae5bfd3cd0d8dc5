"""The capabilities of drivers. A client knows the most common ones; `show` reports those of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moorage.schemas.capabilities import KNOWN, UNKNOWN, Capabilities, driver_of, reported_capabilities


class KnownDrivers:
    """The drivers whose capabilities one client knows."""

    def __init__(self) -> None:
        self._can = dict(KNOWN)

    def __contains__(self, driver: str) -> bool:
        return driver in self._can

    def can(self, driver: str) -> Capabilities:
        """Return a driver's capabilities; `UNKNOWN` for an unknown driver."""
        return self._can.get(driver, UNKNOWN)

    def learn(self, shown: Mapping[str, Any]) -> None:
        """Remember the capabilities of the job's driver that an answer of `show` reports."""
        can = reported_capabilities(shown)
        if can is not None:
            self._can[driver_of(shown)] = can
