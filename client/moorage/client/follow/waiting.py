"""Waits for events, with one timer for all waits on a client."""

from __future__ import annotations

import asyncio

from moorage.bus.errors import RequestTimeout
from moorage.bus.inbox import Answers
from moorage.bus.transport import Delivery


class Waiting:
    """A wait that `wake` ends; at most one task waits at a time, or the second gets a RuntimeError. Not thread-safe."""

    __slots__ = ("_awaited", "_silences", "_waits")

    def __init__(self, waits: Answers, silences: Answers) -> None:
        self._waits = waits
        self._silences = silences
        self._awaited: asyncio.Future[list[Delivery]] | None = None

    def wake(self) -> None:
        """End the present wait, if there is one. First change the state that the waiting task checks."""
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result([])

    async def wait(self, at_most_s: float) -> bool:
        """Wait for `wake`, and return whether it came in time. Raises `ConnectionClosed` once the client is closed."""
        return await self._wait(self._waits, at_most_s)

    async def wait_in_silence(self, at_most_s: float) -> bool:
        """Wait like `wait`, for a caller that asks the leader for missed events after the timeout.

        A simulation may lengthen this timeout while no event can have been lost.
        """
        return await self._wait(self._silences, at_most_s)

    async def _wait(self, waits: Answers, at_most_s: float) -> bool:
        if self._awaited is not None:
            raise RuntimeError(
                "another task reads this watch already, and each item goes to one task: open two watches"
            )
        token, self._awaited = waits.open("", at_most_s)
        try:
            await self._awaited
        except RequestTimeout:
            return False
        finally:
            waits.abandon(token)
            self._awaited = None
        return True
