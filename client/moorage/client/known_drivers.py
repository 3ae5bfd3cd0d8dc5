"""The capabilities of drivers. A client knows the most common ones; `show` reports those of others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moorage.schemas.capabilities import KNOWN, UNKNOWN, Capabilities

if TYPE_CHECKING:
    from moorage.client.answers import JobInfo


class KnownDrivers:
    """The drivers whose capabilities one client knows."""

    def __init__(self) -> None:
        self._can = dict(KNOWN)

    def __contains__(self, driver: str) -> bool:
        return driver in self._can

    def can(self, driver: str) -> Capabilities:
        """Return a driver's capabilities; `UNKNOWN` for an unknown driver."""
        return self._can.get(driver, UNKNOWN)

    def learn(self, shown: JobInfo) -> None:
        """Remember the capabilities of the job's driver, if a worker reports them."""
        if shown.capabilities is not None:
            self._can[shown.driver] = shown.capabilities
