"""What was read of the state leaves once the record then in flight is acknowledged (ledger-rules H4)."""

from __future__ import annotations

import asyncio


class Gate:
    """Shut while a record is in flight. An append that is never acknowledged ends the term, and the gate stays shut."""

    def __init__(self) -> None:
        self._flight: asyncio.Event | None = None  # of the record in flight, set once it is acknowledged

    def shut(self) -> None:
        self._flight = asyncio.Event()

    def open(self) -> None:
        if self._flight is not None:
            self._flight.set()
        self._flight = None

    @property
    def is_open(self) -> bool:
        return self._flight is None

    async def recorded(self) -> None:
        """Wait until what the caller has read of the state is in the ledger; what it reads afterwards may not be.

        The gate may be shut again by then, for the next record.
        """
        if self._flight is not None:
            await self._flight.wait()
