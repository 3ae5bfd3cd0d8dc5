"""Waiting for what may come, where one timer serves all that wait on a client."""

from __future__ import annotations

import asyncio

from moorage.bus.errors import RequestTimeout
from moorage.bus.inbox import Answers


class Waiting:
    """What one task at most waits for. Not thread-safe."""

    __slots__ = ("_awaited",)

    def __init__(self) -> None:
        self._awaited: asyncio.Future[bytes] | None = None

    def wake(self) -> None:
        """End the wait, if somebody waits now; what they look at must be changed before."""
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(b"")

    async def wait(self, waits: Answers, at_most_s: float) -> bool:
        """Wait for `wake`; False if it did not come. `waits` are the client's: see `Connected.waits`."""
        token, self._awaited = waits.open_payload("", at_most_s)
        try:
            await self._awaited
        except RequestTimeout:
            return False
        finally:
            waits.abandon(token)
            self._awaited = None
        return True
